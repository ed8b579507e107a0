"""Profiled cases of sweeps, as `bench.diagnosis` takes them, and explanations of their pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

from bench.axis import Value
from bench.case import SAME_QUESTION, Case, format_value, free_axes, spell_value
from bench.diagnosis.breakdown import Breakdown, divide
from bench.diagnosis.explanation import CURES, Alternatives, Explanation, Option, Side, explain
from bench.diagnosis.step import PROFILED, Profile, Step, take_rates
from bench.gpu.peaks import list_peaks
from bench.precision import Arithmetic, find_formats
from bench.record import RELIABLE, WorkRow, read_kernels, write_kernels
from bench.render.table import name_case
from bench.store.rows import group
from bench.study.axes import MACHINE, Machines, find_varying, name_setting, order_values
from bench.study.pairs import find_changes
from bench.study.runs import Result, Run, tell_but
from bench.verdict import compare

if TYPE_CHECKING:
    from bench.study.sweeps import Sweep

STEP = "step_time_median_s"


@dataclass(frozen=True, eq=False)
class Profiled:
    """A case whose work was counted; its step is made when it is first asked for."""

    run: Run  # the repeat that tells: the one of the median profiled step, as a mean would hold the
    # pauses of all; or the first if none was profiled
    work: Sequence[WorkRow]  # of that run
    profiled: bool  # whether its operations have times
    times: tuple[float, ...]  # of the repeats' median steps, in s
    sm_clock_mhz: float | None  # the mean over the repeats; None if unknown
    alloc_retries: int  # the maximum over the repeats

    @property
    def case(self) -> Case:
        return self.run.case

    @cached_property
    def step(self) -> Step:
        """The step, which takes the geometric mean of the repeats' median steps."""
        run, case = self.run, self.case
        peaks = list_peaks(run.gpu) if case.device == "cuda" else {}
        # products of float32 were rounded as the probe found, else as asked
        asked = find_formats(case.precision, case.opt_level).arithmetic
        is_tf32 = Arithmetic.TFLOAT32 in (asked, *run.arithmetic.split("/"))
        spent = (run.number(name) or 0.0 for name in PROFILED)
        return Step(
            geometric_mean(self.times),
            [*self.work],
            take_rates(vars(run), peaks),
            case.device,
            Arithmetic.TFLOAT32 if is_tf32 else Arithmetic.FLOAT32,
            Profile(*spent) if self.profiled else None,
            take_rates(peaks),
        )

    @cached_property
    def breakdown(self) -> Breakdown | None:
        return divide(self.step)


def read_steps(results: Iterable[Result], sweeps: Sequence[Sweep]) -> dict[int, Profiled]:
    """Return, by cell, the step of each case whose work was counted."""
    work = {(sweep.name, record): part for sweep in sweeps for record, part in sweep.work.items()}
    steps = {}
    for result in results if work else ():
        stepped = (run for run in result.every if run.status in RELIABLE)
        repeats = [run for run in stepped if not math.isnan(getattr(run, STEP))]
        step = choose_repeat([(run, work.get((run.sweep, run.record_id), ())) for run in repeats])
        if step:
            steps[result.cell] = step
    return steps


def choose_repeat(repeats: Sequence[tuple[Run, Sequence[WorkRow]]]) -> Profiled | None:
    """Return a case by its runs with a time, each with its work; None if no work was counted."""
    known = [(run, work) for run, work in repeats if work]
    if not known:
        return None
    profiled = [
        (run, work)
        for run, work in known
        if run.profiled_step_s > 0 and any(row.time_s is not None for row in work)
    ]
    ranked = sorted(profiled, key=lambda repeat: repeat[0].profiled_step_s) or known[:1]
    run, work = ranked[(len(ranked) - 1) // 2]
    times = tuple(float(getattr(run, STEP)) for run, _ in repeats)
    clocks, retries = (
        [value for run, _ in repeats if (value := run.number(name)) is not None]
        for name in ("sm_clock_mhz", "alloc_retries")
    )
    clock = fmean(clocks) if clocks else None
    return Profiled(run, work, bool(profiled), times, clock, int(max(retries, default=0)))


def explain_pairs(
    steps: Mapping[int, Profiled],
    results: Sequence[Result],
    machines: Machines,
    axis: str = "precision",
    before: str | None = None,
    after: str | None = None,
    tried: Sequence[Result] | None = None,
) -> list[Explanation]:
    """Explain each pair of profiled cases of `bench.study.pairs.find_changes` on one machine.
    ``before`` and ``after`` are the values of the change as CSV spells them; None is any. Options
    may have been ``tried`` in other cases too."""
    known = {cell for cell, one in steps.items() if one.profiled}
    if not (profiled := [result for result in results if result.cell in known]):
        return []
    find_others = _group_others(steps, results if tried is None else tried)
    common = _name_common(profiled, axis, machines)
    pairs = list(_find_pairs(profiled, axis, before, after, machines))
    sides = []
    for a, b in ((steps[one], steps[two]) for one, two in pairs):
        factor = b.case.batch_size / a.case.batch_size
        sides.append((make_side(axis, a, factor), make_side(axis, b)))
    ratios = compare([(b.times, a.times) for a, b in sides])
    return [
        explain(axis, a, b, b.case.batch_size, ratio, find_others(two), common[two])
        for (_, two), (a, b), ratio in zip(pairs, sides, ratios, strict=True)
    ]


def _find_pairs(
    results: Sequence[Result], axis: str, before: str | None, after: str | None, machines: Machines
) -> Iterator[tuple[int, int]]:
    """Yield the cells before and after the change; one given value is paired with all others."""
    if before is None and after is None:
        for change in find_changes(axis, results, machines):
            yield from (pair.cells for pair in change.pairs)
        return

    def spell(result: Result) -> str:
        return format_value(getattr(result, axis))

    order = map(format_value, order_values(axis, (getattr(r, axis) for r in results)))
    firsts, lasts = ([*order] if end is None else [end] for end in (before, after))
    for first, last in product(firsts, lasts):
        both = [result for result in results if spell(result) in (first, last)]
        for change in find_changes(axis, both, machines) if first != last else ():
            for pair in change.pairs:
                yield pair.cells if spell(pair.a) == first else pair.cells[::-1]


def make_side(axis: str, one: Profiled, factor: float = 1.0) -> Side:
    """Return a profiled case as a side of a pair, scaled to ``factor`` times its items. Raises
    ValueError: it has no profile."""
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
    """Return a step with ``factor`` times the work, as several steps have."""
    if factor == 1:
        return step

    def scale(row: WorkRow) -> WorkRow:
        amounts = {name: getattr(row, name) for name in ("flop", "bytes", "time_s", "exclusive_s")}
        scaled = {name: value and value * factor for name, value in amounts.items()}
        kernels = [replace(k, time_s=k.time_s * factor) for k in read_kernels(row.kernels)]
        calls = round(row.calls * factor)
        return replace(row, calls=calls, kernels=write_kernels(kernels), **scaled)

    profile = step.profile and Profile(
        *(getattr(step.profile, field.name) * factor for field in fields(Profile))
    )
    work = [scale(row) for row in step.work]
    return replace(step, step_s=step.step_s * factor, work=work, profile=profile)


def _name_common(results: Sequence[Result], axis: str, machines: Machines) -> dict[int, str]:
    free, varying = free_axes(axis), find_varying(results)
    names = [n for n in ("model", *varying, "batch_size") if n not in free]
    if axis != "precision":
        names.insert(1, "precision")

    def name(result: Result) -> str:
        where = [machines[result.sweep, result.machine]] if MACHINE in varying else []
        return " · ".join([name_case(result, dict.fromkeys(names)), *where])

    return {result.cell: name(result) for result in results}


_OPTION_AXES = sorted({o.axis for cures in CURES.values() for o in cures if isinstance(o, Option)})


def _group_others(
    steps: Mapping[int, Profiled], results: Sequence[Result]
) -> Callable[[int], Alternatives]:
    times: dict[int, tuple[Case, float]] = {}
    for result in results:
        # of one without counted work only the time of a step is known
        one = steps.get(result.cell)
        step_s = one.step.step_s if one else getattr(result, STEP)
        if step_s == step_s:
            times[result.cell] = result.case, step_s / result.batch_size
    groups: dict[str, dict[int, list[int]]] = {}
    for axis in _OPTION_AXES:
        equal = tell_but({*free_axes(axis), *SAME_QUESTION})
        alike = [[result.cell for result in part] for part in group(results, equal)]
        groups[axis] = {cell: cells for cells in alike for cell in cells}

    def find(cell: int) -> Alternatives:
        found: dict[str, dict[Value, float]] = {}
        for axis, alike in groups.items():
            for case, time in (times[one] for one in alike[cell] if one != cell and one in times):
                speedups = found.setdefault(axis, {})
                speedups.setdefault(getattr(case, axis), times[cell][1] / time)
        return found

    return find
