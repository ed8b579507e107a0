"""Where the time of a step goes, and a pair of steps explained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench.diagnosis.breakdown import Breakdown
from bench.diagnosis.explanation import (
    LEFT_OVER,
    Change,
    Explanation,
    describe,
    name_part,
    write_ms,
)
from bench.render.section import Column, Section, Sheet, case_column
from bench.render.table import NOTHING, Cell, number_cell, write_ratio, write_tenths
from bench.study.runs import Result
from bench.text import ESTIMATE, capitalize

if TYPE_CHECKING:
    from bench.questions.report_data import ReportData

MOST_PARTS = 7  # parts of a step with a column of their own; the others are summed

Step = tuple[Result, Breakdown]


def _tabulate_breakdowns(found: ReportData) -> Iterator[Sheet]:
    known = ((row, found.steps.get(row.cell)) for row in found.results)
    steps = [(row, one.breakdown) for row, one in known if one and one.breakdown is not None]
    largest: dict[str, float] = {}
    for _, breakdown in steps:
        for name, share in _share(breakdown).items():
            largest[name] = max(largest.get(name, 0.0), abs(share))
    parts = sorted(largest, key=lambda name: -largest[name])

    def write_share(names: Sequence[str], step: Step) -> Cell:
        shares = _share(step[1])
        return number_cell(sum(shares.get(name, 0.0) for name in names), write_tenths)

    columns: list[Column[Step]] = [
        case_column(found.named, found.machines, lambda step: step[0]),
        Column("step", "step (ms)", "a median step, not profiled",
               lambda step: step[1].step_s, write=write_ms, better="lower"),
        Column("verdict", "limited by", "what limits most of the step",
               lambda step: Cell(step[1].verdict or NOTHING, step[1].bound), wrap=True,
               always=True),
        *(
            Column(name, f"{name_part(name)} (%)", "share of the step",
                   partial(write_share, [name]), keep=8 - place)
            for place, name in enumerate(parts[:MOST_PARTS])
        ),
        Column("others", "others (%)", "all other parts together",
               partial(write_share, parts[MOST_PARTS:]), keep=1),
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
    shares = {str(part.name): part.time_s / breakdown.step_s for part in breakdown.parts}
    return shares | {LEFT_OVER: breakdown.left_over_s / breakdown.step_s}


BREAKDOWNS = Section("time", "Where does the time of a step go?", _tabulate_breakdowns)


# ------------------------------------------------------------------------------- pairs, explained

NAMED = 0.05
"""Share of the step, or of the loss, from which the evidence of a reason is shown."""

LEAST_S = 1e-6  # parts that take less time in both steps are left out

Part = tuple[Cell, Change]
"""A row of a table of reasons or changes: its name, and its time in both steps."""


def tabulate_explained(pairs: Sequence[Explanation]) -> Iterator[Sheet]:
    """Yield two tables for each pair: its reasons, and the changes by kind of work."""
    for why in pairs:
        yield tabulate_reasons(why)
        yield tabulate_changes(why)


def tabulate_reasons(why: Explanation) -> Sheet:
    """Tell what the step after goes to, or what it lost by; the evidence below."""
    lost, whole = why.lost, why.change_s if why.lost else why.b.step.step_s
    rows: list[Part] = [
        (Cell(r.cause.meaning, str(r.cause)), Change("", r.before_s, r.after_s))
        for r in why.reasons
    ]
    if any(abs(left) >= LEAST_S for left in why.unexplained_s):
        rows.append((Cell("not explained", ""), Change("", *why.unexplained_s)))

    def write_share(row: Part) -> Cell:
        part_s = row[1].change_s if lost else row[1].after_s
        return number_cell(part_s / whole, lambda share: f"{100 * share:.0f}")

    before, after, change = _end_columns(why)
    columns: list[Column[Part]] = [
        Column("reason", "what it lost by" if lost else "what the time goes to", "a cause",
               lambda row: row[0], number=False),
        *((before, after, change) if lost else (after,)),
        Column("share", f"of {'the loss' if lost else 'the step'} (%)", "a share of it",
               write_share),
    ]  # fmt: skip
    notes = [
        f"{capitalize(reason.cause.meaning)}: {reason.evidence}"
        for reason in why.reasons
        if reason.evidence and why.share(reason) >= NAMED
    ]
    title = " · ".join(filter(None, (f"Why: {why.a.name} → {why.b.name}", why.about)))
    return Sheet(title, columns, rows, notes, words=describe(why), name="reasons", empty=())


def _end_columns(why: Explanation) -> list[Column[Part]]:
    def write_change(change_s: float) -> str:
        text = write_ms(change_s)
        return text if change_s <= 0 or text == "0" else f"+{text}"

    return [
        Column("before", f"{why.a.name} (ms)", "time in a step",
               lambda row: number_cell(row[1].before_s, write_ms)),
        Column("after", f"{why.b.name} (ms)", "time in a step",
               lambda row: number_cell(row[1].after_s, write_ms)),
        Column("change", "change (ms)", "what it adds to the step",
               lambda row: number_cell(row[1].change_s, write_change)),
    ]  # fmt: skip


def tabulate_changes(why: Explanation) -> Sheet:
    """Tell the changes from one step time to the other, by kind of work; they add up."""
    rows: list[Part] = [
        (Cell(name_part(change.name), str(change.name)), change)
        for change in why.changes
        if max(abs(change.before_s), abs(change.after_s)) >= LEAST_S
    ]
    rows.append((Cell("the whole step"), Change("", why.a.step.step_s, why.b.step.step_s)))

    def write_speedup(row: Part) -> Cell | None:
        before_s, after_s = row[1].before_s, row[1].after_s
        known = min(before_s, after_s) > 0
        return number_cell(before_s / after_s, write_ratio) if known else None

    columns: list[Column[Part]] = [
        Column("part", "part of the step", "", lambda row: row[0], wrap=True),
        *_end_columns(why),
        Column("speedup", "speed-up (×)", "of this part alone", write_speedup, keep=8),
    ]  # fmt: skip
    return Sheet("By part of the step", columns, rows, name="changes", empty=())


CAUSES = Section("causes", "Why is it not faster, and what changed in a step?", tabulate_explained)
