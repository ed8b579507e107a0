"""Why a case is faster or slower than another, and not faster still: pairs explained, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.diagnosis.explanation import Change, Explanation
from bench.diagnosis.sentences import describe, name_part, write_ms
from bench.questions.recommendation import list_places
from bench.questions.report_data import ReportData
from bench.render.cells import number_cell, write_ratio
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet
from bench.text import capitalize

NAMED = 0.05
"""Share of the step, or of the loss, from which a reason and its evidence are shown."""

SMALL = 0.01  # share of the step below which a part has no row of its own in a short table
LEAST_S = 1e-6  # parts that take less time in both steps are left out


def choose_pair(found: ReportData) -> list[Explanation]:
    """Return the one pair that a report explains, if any was profiled: fp32 beside what is
    recommended, else what has the largest batch. `bench.why` explains all."""
    chosen = {
        row.case
        for place in list_places(found)
        if place.chosen is not None
        for row in place.chosen.cases
    }
    pairs = sorted(found.pairs, key=lambda why: -why.b.case.batch_size)
    return sorted(pairs, key=lambda why: why.b.case not in chosen)[:1]


def name_pair(why: Explanation) -> str:
    """Name a pair for people: ``fp32 → bf16-amp · dpn92 · batch size 512``."""
    return " · ".join(filter(None, (f"{why.a.name} → {why.b.name}", why.about)))


Part = tuple[Cell, Change]
"""A row of a table of reasons or changes: its name, and its time in both steps."""


def tabulate_explained(pairs: Sequence[Explanation]) -> Iterator[Sheet]:
    """Yield two tables for each pair: its reasons, and the changes by kind of work."""
    for number, why in enumerate(pairs, 1):
        yield tabulate_reasons(f"reasons-{number}", why)
        yield tabulate_changes(f"changes-{number}", why)


def _fold(parts: Sequence[Part], least_s: float, most: int) -> list[Part]:
    """Return the first ``most`` parts of ``least_s`` or more; one of them sums the others."""
    large = [part for part in parts if max(abs(part[1].before_s), abs(part[1].after_s)) >= least_s]
    kept = large if len(large) == len(parts) <= most else large[: most - 1]
    rest = [ends for part, ends in parts if not any(part is other for other, _ in kept)]
    if not rest:
        return kept
    together = Change(
        "",
        sum(ends.before_s for ends in rest),
        sum(ends.after_s for ends in rest),
        any(ends.before_estimated for ends in rest),
        any(ends.after_estimated for ends in rest),
    )
    return [*kept, (Cell("other", ""), together)]


def tabulate_reasons(name: str, why: Explanation, most: int = 0) -> Sheet:
    """Tell what the step after goes to, or what it lost by; the evidence below. With ``most`` (0
    for all) the last of at most that many rows sums all that is left or small."""
    lost, whole = why.lost, why.change_s if why.lost else why.b.step.step_s
    rows: list[Part] = [
        (Cell(r.cause.meaning, str(r.cause)),
         Change("", r.before_s, r.after_s, r.before_estimated, r.after_estimated))
        for r in why.reasons
    ]  # fmt: skip
    if any(abs(left) >= LEAST_S for left in why.unexplained_s):
        rows.append((Cell("not explained", ""), Change("", *why.unexplained_s)))
    if most:
        rows = _fold(rows, SMALL * why.b.step.step_s, most)

    def write_share(ends: Change) -> Cell:
        part_s, estimated = (
            (ends.change_s, ends.estimated) if lost else (ends.after_s, ends.after_estimated)
        )
        return number_cell(part_s / whole, lambda share: f"{100 * share:.0f}", estimated)

    before, after, change = _end_columns(why)
    columns: list[Column[Part]] = [
        Column("reason", "what it lost by" if lost else "what the time goes to", "a cause",
               lambda row: row[0], number=False),
        *((before, after, change) if lost else (after,)),
        Column("share", f"of {'the loss' if lost else 'the step'} (%)", "a share of it",
               lambda row: write_share(row[1])),
    ]  # fmt: skip
    shown = {cause.value for cause, _ in rows}
    notes = [
        f"{capitalize(reason.cause.meaning)}: {reason.evidence}"
        for reason in why.reasons
        if reason.evidence and why.share(reason) >= NAMED and str(reason.cause) in shown
    ]
    title = f"Why: {name_pair(why)}"
    return Sheet(title, columns, rows, notes, words=describe(why), name=name, empty=())


def _end_columns(why: Explanation) -> list[Column[Part]]:
    def write_change(change_s: float) -> str:
        text = write_ms(change_s)
        return text if change_s <= 0 or text == "0" else f"+{text}"

    return [
        Column("before", f"{why.a.name} (ms)", "time in a step",
               lambda row: number_cell(row[1].before_s, write_ms, row[1].before_estimated)),
        Column("after", f"{why.b.name} (ms)", "time in a step",
               lambda row: number_cell(row[1].after_s, write_ms, row[1].after_estimated)),
        Column("change", "change (ms)", "what it adds to the step",
               lambda row: number_cell(row[1].change_s, write_change, row[1].estimated)),
    ]  # fmt: skip


def tabulate_changes(name: str, why: Explanation, most: int = 0) -> Sheet:
    """Tell the changes from one step time to the other, by kind of work; they add up. ``most``
    limits the rows as in `tabulate_reasons`, including the one of the whole step."""
    rows: list[Part] = [
        (Cell(name_part(change.name), str(change.name)), change)
        for change in why.changes
        if max(abs(change.before_s), abs(change.after_s)) >= LEAST_S
    ]
    if most:
        rows = _fold(rows, SMALL * why.b.step.step_s, most - 1)
    rows.append((Cell("the whole step"), Change("", why.a.step.step_s, why.b.step.step_s)))

    def write_speedup(ends: Change) -> Cell | None:
        if min(ends.before_s, ends.after_s) <= 0:
            return None
        return number_cell(ends.before_s / ends.after_s, write_ratio, ends.estimated)

    columns: list[Column[Part]] = [
        Column("part", "part of the step", "", lambda row: row[0], wrap=True),
        *_end_columns(why),
        Column("speedup", "speed-up (×)", "of this part alone",
               lambda row: write_speedup(row[1]), keep=8),
    ]  # fmt: skip
    title = f"From one step to the other: {name_pair(why)}"
    return Sheet(title, columns, rows, name=name, empty=())


CAUSES = Section(
    "causes",
    "Why is it not faster, and what changed in a step?",
    lambda found: tabulate_explained(choose_pair(found)),
)
