"""Profiled cases of sweeps as `bench.diagnosis` takes them, and the pairs of them explained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Any

from bench.axis import Value
from bench.case import AXES, SAME_QUESTION, Case, format_value, free_axes, spell_value
from bench.diagnosis.advice import CURES, Option
from bench.diagnosis.breakdown import Breakdown, divide
from bench.diagnosis.explanation import Alternatives, Explanation, Side
from bench.diagnosis.floors import take_rates
from bench.diagnosis.rates import CALL, RATES
from bench.diagnosis.reasons import explain
from bench.diagnosis.sentences import name_part
from bench.diagnosis.step import PROFILED, Profile, Step
from bench.gpu.peaks import list_peaks
from bench.precision import Arithmetic, find_formats
from bench.record import RELIABLE, read_kernels, write_kernels
from bench.render.model import Notice
from bench.store.attempts import number_groups
from bench.store.reader import list_work, read_cases
from bench.study.axes import Machines, find_varying, name_setting, rank
from bench.study.pairs import find_changes
from bench.study.summaries import SOURCE, list_equal
from bench.text import ESTIMATE, count, name_first
from bench.verdict import compare

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.sweeps import Sweep

STEP = "step_time_median_s"


@dataclass(frozen=True)
class Profiled:
    """A case with its step, and what tells of it beside that.

    Attributes:
        case: its settings.
        step: the geometric mean of its repeats' median steps, with the work of one of these.
        times: the median step of each repeat, in s.
        sm_clock_mhz: mean of the repeats'; None where it is not known.
        alloc_retries: the most of any repeat.
    """

    case: Case
    step: Step
    times: tuple[float, ...]
    sm_clock_mhz: float | None
    alloc_retries: int

    @cached_property
    def breakdown(self) -> Breakdown | None:
        """Where the time of its step went; None without a profile."""
        return divide(self.step)


def read_steps(rows: pd.DataFrame, sweeps: Sequence[Sweep]) -> dict[int, Profiled]:
    """The step of each case whose work was counted, by the case's cell.

    Args:
        rows: the runs that count, of `bench.study.summaries.latest`.
        sweeps: that they are of.
    """
    rows = rows[rows["status"].isin(RELIABLE) & rows[STEP].notna()]
    work = {
        (sweep.name, record): part
        for sweep in sweeps
        for record, part in sweep.work.groupby("record_id", sort=False)
    }
    frames = [work.get(key) for key in zip(rows["sweep"], rows["record_id"], strict=True)]
    cases, runs = read_cases(rows), take_runs(rows)
    places: dict[int, list[int]] = {}
    for place, cell in enumerate(rows["cell"].tolist()):
        places.setdefault(int(cell), []).append(place)
    found = {}
    for cell, held in places.items():
        if step := make_step(cases[held[0]], [(runs[at], frames[at]) for at in held]):
            found[cell] = step
    return found


Run = Mapping[Any, Any]
"""What is looked at of a record, by column."""


def take_runs(records: pd.DataFrame) -> list[Run]:
    """What `make_step` looks at of each record, taken once: a cell of a frame costs 20 µs."""
    columns = [STEP, *PROFILED, *RATES, CALL, "gpu", "arithmetic", "sm_clock_mhz", "alloc_retries"]
    return list(records[columns].to_dict("records"))


def make_step(case: Case, repeats: Sequence[tuple[Run, pd.DataFrame | None]]) -> Profiled | None:
    """The step of a case, with the work of one repeat: a mean would hold the pauses of all.

    That is the repeat whose profiled step is the median, or where none was profiled the first.

    Args:
        repeats: of `take_runs`, all with a time, and the work of each, as
            `bench.store.reader.read_work` has it.

    Returns:
        None where no work was counted.
    """
    known = [(run, frame) for run, frame in repeats if frame is not None and len(frame)]
    profiled = [
        (run, frame)
        for run, frame in known
        if run["profiled_step_s"] > 0 and frame["time_s"].notna().any()
    ]
    if not known:
        return None
    ranked = sorted(profiled, key=lambda repeat: repeat[0]["profiled_step_s"]) or known[:1]
    run, frame = ranked[(len(ranked) - 1) // 2]
    times = tuple(float(run[STEP]) for run, _ in repeats)
    peaks = list_peaks(run["gpu"]) if case.device == "cuda" else {}
    # products of float32 were rounded as the probe found, else as asked
    asked = find_formats(case.precision, case.opt_level).arithmetic
    is_tf32 = Arithmetic.TFLOAT32 in (asked, *run["arithmetic"].split("/"))
    step = Step(
        geometric_mean(times),
        list_work(frame),
        take_rates(run, peaks),
        case.device,
        Arithmetic.TFLOAT32 if is_tf32 else Arithmetic.FLOAT32,
        Profile(*(_none(run[name]) or 0.0 for name in PROFILED)) if profiled else None,
        take_rates(peaks),
    )
    clocks, retries = (
        [value for run, _ in repeats if (value := _none(run[name])) is not None]
        for name in ("sm_clock_mhz", "alloc_retries")
    )
    return Profiled(
        case,
        step,
        times,
        fmean(clocks) if clocks else None,
        int(max(retries, default=0)),
    )


def _none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def doubt_profiles(steps: Iterable[Profiled]) -> Iterator[Notice]:
    """What to know before believing the times and rates of operations.

    Args:
        steps: those that are shown.
    """
    divided = [(one, one.breakdown) for one in steps if one.breakdown]
    guessed = [(one, breakdown) for one, breakdown in divided if breakdown.estimates]
    if guessed:
        names = dict.fromkeys(name for _, breakdown in guessed for name in breakdown.estimates)
        kinds = " and ".join(name_part(name) for name in sorted(names))
        text = (
            "Kernels ran side by side, and these profiles do not say how they shared the time: "
            f"parts of a step that are marked {ESTIMATE} take all that overlapped from {kinds}."
        )
        mend = "Run the same command with --profile on and a new --out: profiles now measure it."
        where = _count_cases([one for one, _ in guessed], len(divided))
        yield Notice("Estimated division", text, mend, where)
    beyond = [
        (one, timed) for one, breakdown in divided for timed in breakdown.rows if timed.beyond
    ]
    if beyond:
        operations = list(dict.fromkeys(timed.row.operation for _, timed in beyond))
        text = (
            f"The rates of {name_first(operations, 3)} would be above the data sheet of the card "
            "and are left out: a cache holds what is moved, or the time is wrong."
        )
        where = _count_cases([one for one, _ in beyond], len(divided))
        yield Notice("Beyond the data sheet", text, "Use a larger --batch-size.", where)


def _count_cases(held: Sequence[Profiled], whole: int) -> str:
    """How many cases, and which: ``1 of 8 profiled cases (fp32 · batch size 128)``."""
    names = list(dict.fromkeys(one.case.label(("precision", "batch_size")) for one in held))
    cases = len({id(one) for one in held})
    return f"{cases:,} of {count(whole, 'profiled case')} ({name_first(names, 4)})"


# ------------------------------------------------------------------------------------------ pairs


def explain_pairs(
    steps: Mapping[int, Profiled],
    cases: pd.DataFrame,
    machines: Machines,
    axis: str = "precision",
    before: str | None = None,
    after: str | None = None,
    tried: pd.DataFrame | None = None,
) -> list[Explanation]:
    """Explain each pair of profiled cases that differ in one axis.

    Pairs are those of the effects of `bench.questions.effects`: of precisions each against fp32, of
    numbers each against the next below, of other values each against the first; at equal values of
    all other axes, on one machine.

    Args:
        steps: of `read_steps`.
        cases: of `bench.study.summaries.summarize`.
        machines: what each is called.
        axis: in which the cases of a pair differ.
        before: the value to begin with, as CSV spells it; None for any.
        after: the value to explain; None for any.
        tried: cases that an option may have been tried in; by default ``cases``.
    """
    known = {cell for cell, one in steps.items() if one.step.profile is not None}
    profiled = cases[cases["cell"].isin(known)]
    if not len(profiled):
        return []
    find_others = _group_others(steps, cases if tried is None else tried)
    common = _name_common(profiled, axis, machines)
    pairs = list(_find_pairs(profiled, axis, before, after, machines))
    sides = []
    for one, two in pairs:
        a, b = steps[one], steps[two]
        factor = b.case.batch_size / a.case.batch_size
        sides.append((make_side(axis, a, factor), make_side(axis, b)))
    ratios = compare([(b.times, a.times) for a, b in sides])
    return [
        explain(axis, a, b, b.case.batch_size, ratio, find_others(two), common[two])
        for (_, two), (a, b), ratio in zip(pairs, sides, ratios, strict=True)
    ]


def _find_pairs(
    cases: pd.DataFrame, axis: str, before: str | None, after: str | None, machines: Machines
) -> Iterator[tuple[int, int]]:
    """Cells before and after the change."""
    spelled = cases[axis].map(format_value)
    if before is not None and after is not None:
        for first, one, two in _list_pairs(axis, cases[spelled.isin([before, after])], machines):
            yield (one, two) if first == (before or "none") else (two, one)
        return
    asked = before if before is not None else after
    if asked is None:
        yield from ((one, two) for _, one, two in _list_pairs(axis, cases, machines))
        return
    # one end is given: each other value is the other
    order = cases.assign(_rank=rank(cases, axis), _text=spelled).sort_values("_rank")
    for value in dict.fromkeys(order["_text"]):
        if value != asked:
            first, last = (asked, value) if before is not None else (value, asked)
            yield from _find_pairs(cases, axis, first, last, machines)


def _list_pairs(
    axis: str, cases: pd.DataFrame, machines: Machines
) -> Iterator[tuple[str, int, int]]:
    """The value that each change begins with, and the cells of its pairs."""
    for change in find_changes(axis, cases, machines):
        cells = ((pair.a, pair.b) for pair in change.pairs)
        yield from ((change.before, int(one), int(two)) for one, two in cells)


def make_side(axis: str, one: Profiled, factor: float = 1.0) -> Side:
    """A profiled case as a side of a pair, scaled to so many times its items.

    Raises:
        ValueError: it has no profile.
    """
    step = scale_step(one.step, factor)
    breakdown = one.breakdown if step is one.step else divide(step)
    if breakdown is None:
        raise ValueError(f"{one.case.label()} has no profile")
    return Side(
        name_setting(axis, spell_value(getattr(one.case, axis))),
        one.case,
        step,
        breakdown,
        find_formats(one.case.precision, one.case.opt_level).arithmetic,
        tuple(time * factor for time in one.times),
        one.sm_clock_mhz,
        one.alloc_retries,
    )


def scale_step(step: Step, factor: float) -> Step:
    """A step that does so many times as much, as several steps do."""
    if factor == 1:
        return step

    def scale(value: float | None) -> float | None:
        return None if value is None else value * factor

    work = [
        replace(
            row,
            calls=round(row.calls * factor),
            flop=scale(row.flop),
            bytes=scale(row.bytes),
            time_s=scale(row.time_s),
            exclusive_s=scale(row.exclusive_s),
            kernels=write_kernels(
                [replace(k, time_s=k.time_s * factor) for k in read_kernels(row.kernels)]
            ),
        )
        for row in step.work
    ]
    profile = step.profile and Profile(
        *(getattr(step.profile, field.name) * factor for field in fields(Profile))
    )
    return replace(step, step_s=step.step_s * factor, work=work, profile=profile)


def _name_common(cases: pd.DataFrame, axis: str, machines: Machines) -> dict[int, str]:
    """What tells each case from the others, but for one axis and what follows from it."""
    free = free_axes(axis)
    names = [n for n in ("model", *find_varying(cases), "batch_size") if n not in free]
    if axis != "precision":
        names.insert(1, "precision")
    several = len(cases[list(SOURCE)].drop_duplicates()) > 1
    named = list(dict.fromkeys(name for name in names if name in AXES))
    common = {}
    for cell, case, sweep, machine in zip(
        cases["cell"], read_cases(cases), cases["sweep"], cases["machine"], strict=True
    ):
        where = [machines[sweep, machine]] if several else []
        common[int(cell)] = " · ".join([case.label(named), *where])
    return common


_OPTION_AXES = sorted(
    {option.axis for cures in CURES.values() for option in cures if isinstance(option, Option)}
)


def _group_others(
    steps: Mapping[int, Profiled], cases: pd.DataFrame
) -> Callable[[int], Alternatives]:
    """What else the sweeps measured, for the options of the case of a cell."""
    cells = [int(cell) for cell in cases["cell"]]
    times: dict[int, tuple[Case, float]] = {}
    for cell, case, time in zip(cells, read_cases(cases), cases[STEP].tolist(), strict=True):
        # of those without work, what the frame says
        step_s = steps[cell].step.step_s if cell in steps else time
        if step_s == step_s:
            times[cell] = case, step_s / case.batch_size
    groups: dict[str, dict[int, list[int]]] = {}
    for axis in _OPTION_AXES:
        alike: dict[int, list[int]] = {}
        keys = number_groups(cases, list_equal({*free_axes(axis), *SAME_QUESTION}))
        for key, cell in zip(keys.tolist(), cells, strict=True):
            alike.setdefault(key, []).append(cell)
        groups[axis] = {cell: group for group in alike.values() for cell in group}

    def find(cell: int) -> Alternatives:
        found: dict[str, dict[Value, float]] = {}
        for axis, alike in groups.items():
            for case, time in (times[one] for one in alike[cell] if one != cell and one in times):
                speedup = times[cell][1] / time
                found.setdefault(axis, {}).setdefault(getattr(case, axis), speedup)
        return found

    return find
