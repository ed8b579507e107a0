"""Why a case is not faster than another by as much as was hoped: pairs explained, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from bench.diagnosis.expectation import expect
from bench.diagnosis.explanation import Explanation, Reason
from bench.diagnosis.sentences import describe, has_gap, name_part, write_tried
from bench.diagnosis.step import Bound
from bench.report.axes import Machines, find_varying, list_naming_axes
from bench.report.breakdowns import ms_cell
from bench.report.cells import iterate, name_place, quantity_cell, quantity_head, write_ratio
from bench.report.effects import Effect
from bench.report.model import NOTHING, Cell, Head, Table
from bench.report.profiles import Profiled
from bench.report.quantities import QUANTITIES
from bench.text import say_left_out

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 40
"""Pairs of the table; more would not be read."""

MOST_PAIRS = 4
"""Pairs that are explained in full; of each value of the axis the one at the largest batch size
comes first."""

MOST_REASONS = 3
"""Reasons that are named in the row of a pair."""

NAMED = 0.05
"""Share of the gap from which a reason is named there."""


LEAST_S = 1e-6
"""What takes less of both steps is left out of the way between them."""


def choose_pairs(explanations: Sequence[Explanation], most: int = MOST_PAIRS) -> list[Explanation]:
    """The pairs to explain in full, in their order.

    Of each value of the axis one before a second of any, those at the largest batch sizes first.
    """
    left = sorted(explanations, key=lambda why: -why.b.case.batch_size)
    turns: dict[str, Iterator[int]] = {}
    chosen = sorted(left, key=lambda why: next(turns.setdefault(why.b.name, count())))[:most]
    return [why for why in explanations if any(why is other for other in chosen)]


def name_pair(why: Explanation) -> str:
    """Name a pair for people: ``fp32 → bf16-amp · dpn92 · batch size 512``."""
    return " · ".join(filter(None, (f"{why.a.name} → {why.b.name}", why.about)))


def tabulate_expected(
    steps: Mapping[int, Profiled],
    cases: pd.DataFrame,
    effects: Sequence[Effect],
    machines: Machines,
) -> Iterator[Table]:
    """What counts and the machine's rates let one expect of each precision, beside what it brought.

    Args:
        steps: of `bench.report.profiles.read_steps`.
        cases: of `bench.report.summaries.summarize`.
        effects: whose pairs of precisions are shown.
    """
    axes = list_naming_axes(find_varying(cases))
    quantity, lines = QUANTITIES["speedup"], []
    cells = [pair for effect in effects if effect.axis == "precision" for pair in effect.pairs]
    counted = [(a, b) for a, b in cells if a in steps and b in steps]
    known = cases["cell"].isin([cell for pair in counted for cell in pair])
    rows = {row.cell: row for row in iterate(cases[known])}
    for a, b in counted:
        found = expect(steps[a].step, steps[b].step)
        # compiled, both move less than was counted
        if found is None or rows[a].precision != "fp32" or rows[b].compile:
            continue
        share = found.a.bounds.get(Bound.MEMORY, 0.0)
        lines.append(
            (
                Cell(name_place(rows[b], axes, machines)),
                quantity_cell(quantity, rows[b]),
                _ratio_cell(found.speedup),
                Cell(f"{100 * share:.0f}", share),
            )
        )
    if not lines:
        return
    heads = (
        Head("case", "case", "the settings that tell it apart", False, wrap=True),
        quantity_head(quantity),
        Head(
            "expected", "expected at most (×)", "both at all that this machine was measured to do"
        ),
        Head("memory", "memory traffic of fp32 (%)", "share of the least time of fp32's step"),
    )
    notes = [
        "Expected: the least time of fp32's operations over that of this precision's, from their "
        "FLOP and bytes and from the rates that this machine reached: at most, if both reach these "
        "rates. Where fp32 falls further short of them, more is measured. python -m bench.doctor "
        "--model NAME says it before a sweep."
    ]
    if len(lines) > MOST_ROWS:
        notes.append(f"{say_left_out(len(lines) - MOST_ROWS, 'row')}; --where chooses.")
    yield Table("expected", "Expected and measured", heads, tuple(lines[:MOST_ROWS]), tuple(notes))


def tabulate_pairs(pairs: Sequence[Explanation]) -> Iterator[Table]:
    """A row a pair: the speed-up measured, hoped for and possible, and the largest reasons."""
    if not pairs:
        return
    heads = (
        Head("pair", "pair", "the two cases", False, wrap=True),
        Head("speedup", "speed-up (×)", "time of a step before over that after", better="higher"),
        Head("interval", "95 % interval", "of the speed-up", keep=6),
        Head("hoped", "hoped (×)", "the measured rates of products in the two formats, one over "
             "the other", keep=7),
        Head("ceiling", "at most (×)", "were all work done at the measured rates of this machine",
             keep=8),
        Head("reasons", "reasons", "shares of what is missing to the hoped speed-up", False,
             wrap=True),
    )  # fmt: skip
    lines = [
        (
            Cell(name_pair(pair)),
            _ratio_cell(pair.speedup.value),
            Cell(_write_ends(pair.speedup.low, pair.speedup.high)),
            _ratio_cell(pair.hoped),
            _ratio_cell(pair.ceiling),
            Cell(_name_reasons(pair)),
        )
        for pair in pairs[:MOST_ROWS]
    ]
    notes = [
        "Hoped: what the number format promises, by the rates of large matrix products and at "
        "least by its bits. At most: the step before as it was measured, and all work after the "
        "change at the rates that large products and large copies reach. The reasons are shares of "
        "the time that is missing to the hoped speed-up. Speed-up: of median steps, the geometric "
        "mean of the repeats; that of median epochs differs where the repeats do."
    ]
    if len(pairs) > MOST_ROWS:
        notes.append(f"{len(pairs) - MOST_ROWS:,} more pairs are left out; --where chooses.")
    yield Table("why", "Why is it not faster?", heads, tuple(lines), tuple(notes)).drop_empty()


def _name_reasons(why: Explanation) -> str:
    if not has_gap(why):
        return NOTHING
    named = [reason for reason in why.reasons if reason.share >= NAMED][:MOST_REASONS]
    listed = "; ".join(f"{100 * reason.share:.0f} % {reason.cause.meaning}" for reason in named)
    return f"of the gain: {listed}" if why.gap_s < 0 and listed else listed


def _ratio_cell(value: float | None) -> Cell:
    return Cell(NOTHING) if value is None else Cell(write_ratio(value), value)


def _write_ends(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return NOTHING
    return f"{write_ratio(low)}–{write_ratio(high)}"


def tabulate_explained(pairs: Sequence[Explanation]) -> Iterator[Table]:
    """Two tables for each pair: the reasons, under words, and the way between the two."""
    for number, why in enumerate(pairs, 1):
        yield tabulate_reasons(f"reasons-{number}", why)
        yield tabulate_changes(f"changes-{number}", why)


def tabulate_reasons(name: str, why: Explanation) -> Table:
    """What each reason takes of the gap; the evidence below, which is sentences."""
    heads = (
        Head("reason", "reason", "what makes it slower than was hoped", False),
        Head(
            "share",
            "of the gain (%)" if why.gap_s < 0 and has_gap(why) else "of the gap (%)",
            "share of the difference to what was hoped; none where that is within noise",
        ),
        Head("time", "ms a step", "the same as time"),
    )
    found = [(r.cause.meaning, r.cause, r.time_s, r.share) for r in why.reasons]
    rest = why.unexplained_s / why.gap_s if why.gap_s else 0.0
    lines = [
        (
            Cell(meaning, value),
            Cell(f"{100 * share:.0f}", share) if has_gap(why) else Cell(NOTHING),
            ms_cell(time_s),
        )
        for meaning, value, time_s, share in [
            *found,
            ("not explained", None, why.unexplained_s, rest),
        ]
    ]
    words = tuple(describe(why))
    notes = tuple(_write_evidence(reason) for reason in why.reasons)
    return Table(name, f"Why: {name_pair(why)}", heads, tuple(lines), notes, words=words)


def _write_evidence(reason: Reason) -> str:
    about = reason.cause.meaning
    cure = reason.option + write_tried(reason) if reason.time_s > 0 else ""  # a gain needs none
    said = (f"{about[:1].upper()}{about[1:]}:", reason.evidence, cure)
    return " ".join(filter(None, (part.strip() for part in said)))


def tabulate_changes(name: str, why: Explanation) -> Table:
    """The way from one step time to the other, by kind of work; it adds up."""
    a, b = why.a, why.b
    heads = (
        Head("part", "part of the step", "", False, wrap=True),
        Head("before", f"{a.name} (ms)", "time in a step"),
        Head("after", f"{b.name} (ms)", "time in a step"),
        Head("change", "change (ms)", "what it adds to the step"),
        Head("speedup", "speed-up (×)", "of this part alone", keep=8),
    )
    lines = [
        (
            Cell(name_part(change.name), str(change.name)),
            ms_cell(change.before_s),
            ms_cell(change.after_s),
            change_cell(change.change_s),
            _ratio_cell(_divide(change.before_s, change.after_s)),
        )
        for change in why.changes
        if max(abs(change.before_s), abs(change.after_s)) >= LEAST_S
    ]
    lines.append(
        (
            Cell("the whole step"),
            ms_cell(a.step.step_s),
            ms_cell(b.step.step_s),
            change_cell(b.step.step_s - a.step.step_s),
            _ratio_cell(_divide(a.step.step_s, b.step.step_s)),
        )
    )
    return Table(name, f"From one step to the other: {name_pair(why)}", heads, tuple(lines), ())


def _divide(before: float, after: float) -> float | None:
    return before / after if before > 0 and after > 0 else None


def change_cell(seconds: float) -> Cell:
    """Write what is added to a time, in milliseconds with its sign."""
    text = ms_cell(seconds).text
    return Cell(text if seconds <= 0 or text == "0" else f"+{text}", seconds)
