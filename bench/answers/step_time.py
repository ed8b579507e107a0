"""Where the time of a step goes: profiled cases of sweeps, as `bench.profile` takes them, and
pairs of them explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

from bench.answers.explanation import Explanation, StepSide, describe, explain
from bench.answers.render.table import (
    NOTHING,
    Cell,
    Column,
    Section,
    Sheet,
    name_case,
    name_place,
    write_ratio,
    write_tenths,
)
from bench.answers.report_data import ReportData
from bench.base.text import ESTIMATE, capitalize
from bench.profile.breakdown import LEFT_OVER, Breakdown, Change, divide, name_part
from bench.profile.step import Profile, StepWork, write_ms
from bench.results.study.axes import MACHINE, find_varying, list_naming_axes, name_setting
from bench.results.study.pairs import find_changes
from bench.results.study.profiled import Profiled
from bench.results.study.runs import Result
from bench.results.verdict import compare
from bench.schema.axis import Value
from bench.schema.case import free_axes, spell_value
from bench.schema.precision import find_formats
from bench.schema.record import WorkRow, read_kernels, write_kernels

MOST_PARTS = 7  # parts of a step with a column of their own; the others are summed

_Divided = tuple[Result, Breakdown]


def _tabulate_breakdowns(found: ReportData) -> Iterator[Sheet]:
    known = ((row, found.steps.get(row.cell)) for row in found.results)
    steps = [(row, one.breakdown) for row, one in known if one and one.breakdown is not None]
    largest: dict[str, float] = {}
    for _, breakdown in steps:
        for name, share in _share(breakdown).items():
            largest[name] = max(largest.get(name, 0.0), abs(share))
    parts = sorted(largest, key=lambda name: -largest[name])

    def add_shares(names: Sequence[str], step: _Divided) -> float:
        shares = _share(step[1])
        return sum(shares.get(name, 0.0) for name in names)

    named = list_naming_axes(found.varying)
    columns: list[Column[_Divided]] = [
        Column("case", "case", "the settings that tell it apart",
               lambda step: name_place(step[0], named), wrap=True),
        Column("step", "step (ms)", "a median step, not profiled",
               lambda step: step[1].step.step_s, write=write_ms, better="lower"),
        Column("verdict", "limited by", "what limits most of the step",
               lambda step: Cell(step[1].verdict or NOTHING, step[1].bound), wrap=True,
               always=True),
        *(
            Column(name, f"{name_part(name)} (%)", "share of the step",
                   partial(add_shares, [name]), keep=8 - place, write=write_tenths)
            for place, name in enumerate(parts[:MOST_PARTS])
        ),
        Column("others", "others (%)", "all other parts together",
               partial(add_shares, parts[MOST_PARTS:]), keep=1, write=write_tenths),
    ]  # fmt: skip
    note = (
        "A step is the median step without the profiler; a profile of a few steps after the epoch "
        "says how it is divided. python -m bench.why explains pairs."
    )
    estimated = [ESTIMATED] if any(breakdown.estimated for _, breakdown in steps) else []
    title, empty = "Where the time of a step goes", ("", NOTHING, "0.0")
    yield Sheet(title, columns, steps, [note, *estimated], empty=empty)


ESTIMATED = (
    f"{ESTIMATE} Estimated: kernels overlapped, and how they shared the time was not measured."
)


def _share(breakdown: Breakdown) -> dict[str, float]:
    parts = {**breakdown.parts, LEFT_OVER: breakdown.left_over_s}
    return {str(name): time_s / breakdown.step.step_s for name, time_s in parts.items()}


BREAKDOWNS = Section("time", "Where does the time of a step go?", _tabulate_breakdowns)


# ------------------------------------------------------------------------------- pairs, explained

_NAMED = 0.05
"""Share of the step, or of the loss, from which the evidence of a reason is shown."""

_LEAST_S = 1e-6  # parts that take less time in both steps are left out

_Part = tuple[Cell, Change]
"""A row of a table of reasons or changes: its name, and its time in both steps."""


def tabulate_explained(pairs: Sequence[Explanation]) -> Iterator[Sheet]:
    """Yield two tables for each pair: its reasons, and the changes by kind of work."""
    for why in pairs:
        yield tabulate_reasons(why)
        yield tabulate_changes(why)


def tabulate_reasons(why: Explanation) -> Sheet:
    """Tell what the step after goes to, or what it lost by; the evidence below."""
    rows: list[_Part] = [
        (Cell(r.cause.meaning, str(r.cause)), Change("", r.before_s, r.after_s))
        for r in why.reasons
    ]
    if any(abs(left) >= _LEAST_S for left in why.unexplained_s):
        rows.append((Cell("not explained", ""), Change("", *why.unexplained_s)))
    before, after, change = _end_columns(why)
    columns: list[Column[_Part]] = [
        Column("reason", "what it lost by" if why.lost else "what the time goes to", "a cause",
               lambda row: row[0], number=False),
        *((before, after, change) if why.lost else (after,)),
        Column("share", f"of {'the loss' if why.lost else 'the step'} (%)", "a share of it",
               lambda row: why.share(row[1]),
               write=lambda share: f"{100 * share:.0f}"),
    ]  # fmt: skip
    notes = [
        f"{capitalize(reason.cause.meaning)}: {reason.evidence}"
        for reason in why.reasons
        if reason.evidence and why.share(reason) >= _NAMED
    ]
    title = " · ".join(filter(None, (f"Why: {why.a.name} → {why.b.name}", why.about)))
    return Sheet(title, columns, rows, notes, words=describe(why), name="reasons", empty=())


def _end_columns(why: Explanation) -> list[Column[_Part]]:
    def write_change(change_s: float) -> str:
        text = write_ms(change_s)
        return text if change_s <= 0 or text == "0" else f"+{text}"

    return [
        Column("before", f"{why.a.name} (ms)", "time in a step",
               lambda row: row[1].before_s, write=write_ms),
        Column("after", f"{why.b.name} (ms)", "time in a step",
               lambda row: row[1].after_s, write=write_ms),
        Column("change", "change (ms)", "what it adds to the step",
               lambda row: row[1].change_s, write=write_change),
    ]  # fmt: skip


def tabulate_changes(why: Explanation) -> Sheet:
    """Tell the changes from one step time to the other, by kind of work; they add up."""
    rows: list[_Part] = [
        (Cell(name_part(change.name), str(change.name)), change)
        for change in why.changes
        if max(abs(change.before_s), abs(change.after_s)) >= _LEAST_S
    ]
    rows.append((Cell("the whole step"), Change("", why.a.step.step_s, why.b.step.step_s)))

    def find_speedup(row: _Part) -> float | None:
        before_s, after_s = row[1].before_s, row[1].after_s
        return before_s / after_s if min(before_s, after_s) > 0 else None

    columns: list[Column[_Part]] = [
        Column("part", "part of the step", "", lambda row: row[0], wrap=True),
        *_end_columns(why),
        Column("speedup", "speed-up (×)", "of this part alone", find_speedup, keep=8,
               write=write_ratio),
    ]  # fmt: skip
    return Sheet("By part of the step", columns, rows, name="changes", empty=())


CAUSES = Section("causes", "Why is it not faster, and what changed in a step?", tabulate_explained)


# ------------------------------------------------------------------------------- profiled pairs


def explain_pairs(
    steps: Mapping[int, Profiled],
    results: Sequence[Result],
    axis: str,
    ends: Sequence[Value],
) -> list[Explanation]:
    """Explain each pair of profiled cases of `bench.results.study.pairs.find_changes` on one
    machine. ``ends`` are the values before and after the change; without them, any."""
    known = {cell for cell, one in steps.items() if one.profiled}
    if not (profiled := [result for result in results if result.cell in known]):
        return []
    common = _name_common(profiled, axis)
    pairs = list(_find_pairs(profiled, axis, ends))
    sides = []
    for a, b in ((steps[one], steps[two]) for one, two in pairs):
        factor = b.items / a.items if a.items and b.items else 1.0
        sides.append((make_side(axis, a, factor), make_side(axis, b)))
    ratios = compare([(b.times, a.times) for a, b in sides])
    return [
        explain(a, b, steps[two].items, ratio, common[two])
        for (_, two), (a, b), ratio in zip(pairs, sides, ratios, strict=True)
    ]


def _find_pairs(
    results: Sequence[Result], axis: str, ends: Sequence[Value]
) -> Iterator[tuple[int, int]]:
    """Yield the cells before and after the change."""
    asked = [result for result in results if not ends or getattr(result, axis) in ends]
    for change in find_changes(axis, asked):
        for pair in change.pairs:
            forward = not ends or getattr(pair.a, axis) == ends[0]
            yield pair.cells if forward else pair.cells[::-1]


def make_side(axis: str, one: Profiled, factor: float = 1.0) -> StepSide:
    """Return a profiled case as a side of a pair, scaled to ``factor`` times its items."""
    case, step, breakdown = one.run.case, one.step, one.breakdown
    if factor != 1:
        step = scale_step(step, factor)
        breakdown = divide(step)
    assert breakdown is not None
    return StepSide(
        name_setting(axis, spell_value(getattr(case, axis))),
        case,
        step,
        breakdown,
        find_formats(case.precision, case.opt_level).arithmetic,
        tuple(time * factor for time in one.times),
        one.sm_clock_mhz,
        one.alloc_retries,
        one.straggler and replace(one.straggler, longer_s=one.straggler.longer_s * factor),
    )


def scale_step(step: StepWork, factor: float) -> StepWork:
    """Return a step with ``factor`` times the work, as several steps have."""

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


def _name_common(results: Sequence[Result], axis: str) -> dict[int, str]:
    free, varying = free_axes(axis), find_varying(results)
    names = [n for n in ("model", *varying, "batch_size") if n not in free]
    if axis != "precision":
        names.insert(1, "precision")

    def name(result: Result) -> str:
        where = [result.ran_on] if MACHINE in varying else []
        return " · ".join([name_case(result, dict.fromkeys(names)), *where])

    return {result.cell: name(result) for result in results}
