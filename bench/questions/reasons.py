"""Why a case is faster or slower than another, and not faster still: pairs explained, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from bench.case import Case
from bench.diagnosis.breakdown import divide
from bench.diagnosis.ceiling import find_beaten, find_ceiling
from bench.diagnosis.explanation import Change, Explanation
from bench.diagnosis.sentences import (
    describe,
    name_part,
    write_beaten,
    write_host,
    write_percent,
)
from bench.questions.breakdowns import ms_cell
from bench.questions.effects import Effect
from bench.questions.profiles import Profiled
from bench.render.cells import iterate, name_place, write_ratio
from bench.render.model import NOTHING, Cell, Head, Table
from bench.study.axes import Machines, find_varying, list_naming_axes
from bench.text import ESTIMATE, say_left_out

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
"""Share of the step, or of the loss, from which a reason is named there, or its evidence told."""

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


def tabulate_possible(
    steps: Mapping[int, Profiled],
    cases: pd.DataFrame,
    effects: Sequence[Effect],
    machines: Machines,
) -> Iterator[Table]:
    """What each precision can gain at most, of pairs that are not explained for want of a profile.

    Args:
        steps: of `bench.questions.profiles.read_steps`.
        cases: of `bench.study.summaries.summarize`.
        effects: whose pairs of precisions are shown.
    """
    axes = list_naming_axes(find_varying(cases))
    cells = [pair for effect in effects if effect.axis == "precision" for pair in effect.pairs]
    rows = {row.cell: row for row in iterate(cases) if row.cell in steps}
    lines, wrong = [], None
    for a, b in (pair for pair in cells if pair[0] in rows and pair[1] in rows):
        before, after = steps[a].step, steps[b].step
        if (before.profile and after.profile) or rows[a].precision != "fp32":
            continue
        compiled = rows[b].compile != Case.compile
        beaten = find_beaten(before, compiled) or find_beaten(after, compiled)
        most = None if beaten else find_ceiling(before, after, compiled, divide(after))
        if beaten or most:
            wrong = beaten or wrong
            lines.append(
                (
                    Cell(name_place(rows[b], axes, machines)),
                    _ratio_cell(before.step_s / after.step_s),
                    _ratio_cell(most.speedup if most else None),
                    Cell(f"{100 * most.memory:.0f}", most.memory) if most else Cell(NOTHING),
                )
            )
    if not lines:
        return
    heads = (
        Head("case", "case", "the settings that tell it apart", False, wrap=True),
        Head("speedup", "speed-up (×)", "of a median step, over fp32", better="higher"),
        Head("ceiling", "at most (×)", CEILING),
        Head("memory", "memory traffic (%)", "share of the least time of this precision's step"),
    )
    notes = [
        f"{AT_MOST} {OF_STEPS} With --profile on, python -m bench.why says where the rest goes."
    ]
    notes += [write_beaten(wrong)] if wrong else []
    if len(lines) > MOST_ROWS:
        notes.append(f"{say_left_out(len(lines) - MOST_ROWS, 'row')}; --where chooses.")
    title = "What each precision can gain at most"
    yield Table("possible", title, heads, tuple(lines[:MOST_ROWS]), tuple(notes))


CEILING = "fp32's step as measured, over the work after at this machine's measured rates"

AT_MOST = (
    "At most: the step before as it was measured, over the time that the operations after take at "
    "the rates that large products and large copies reach on this machine."
)


OF_STEPS = (
    "Speed-up: of median steps, the geometric mean of the repeats. That of epochs, as elsewhere, "
    "has their slow steps in it too."
)


def tabulate_pairs(pairs: Sequence[Explanation]) -> Iterator[Table]:
    """A row a pair: the speed-up measured and possible, and the largest reasons."""
    if not pairs:
        return
    heads = (
        Head("pair", "pair", "the two cases", False, wrap=True),
        Head("speedup", "speed-up (×)", "time of a step before over that after", better="higher"),
        Head("interval", "95 % interval", "of the speed-up", keep=6),
        Head("ceiling", "at most (×)", "were all work done at the measured rates of this machine",
             keep=8),
        Head("reasons", "reasons", "shares of the step after, or of what was lost", False,
             wrap=True),
        Head("remarks", "remarks", "whether a step waits for its program", False, wrap=True),
    )  # fmt: skip
    lines = [
        (
            Cell(name_pair(pair)),
            _ratio_cell(pair.speedup.value),
            Cell(_write_ends(pair.speedup.low, pair.speedup.high)),
            _ratio_cell(pair.ceiling.speedup if pair.ceiling else None),
            Cell(_name_reasons(pair)),
            Cell("; ".join(filter(None, map(write_host, (pair.a, pair.b))))),
        )
        for pair in pairs[:MOST_ROWS]
    ]
    notes = [f"{AT_MOST} {OF_STEPS} The reasons are shares of the step after, or of what it lost."]
    if len(pairs) > MOST_ROWS:
        notes.append(f"{len(pairs) - MOST_ROWS:,} more pairs are left out; --where chooses.")
    yield Table("why", "Why is it not faster?", heads, tuple(lines), tuple(notes)).drop_empty()


def _name_reasons(why: Explanation) -> str:
    if why.beaten:
        return "none: the machine's rates were measured too low"
    listed = "; ".join(
        f"{write_percent(why.share(reason), why.estimates(reason))} {reason.cause.meaning}"
        for reason in why.reasons[:MOST_REASONS]
        if why.share(reason) >= NAMED
    )
    return f"of the loss: {listed}" if why.lost and listed else listed


def _ratio_cell(value: float | None, estimated: bool = False) -> Cell:
    if value is None:
        return Cell(NOTHING)
    return Cell(f"{ESTIMATE * estimated}{write_ratio(value)}", value, estimated)


def _write_ends(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return NOTHING
    return f"{write_ratio(low)}–{write_ratio(high)}"


def tabulate_explained(pairs: Sequence[Explanation]) -> Iterator[Table]:
    """Two tables for each pair: the reasons, under words, and the way between the two."""
    for number, why in enumerate(pairs, 1):
        yield tabulate_reasons(f"reasons-{number}", why)
        yield tabulate_changes(f"changes-{number}", why)


def _fold(parts: Sequence[Part], least_s: float, most: int) -> list[Part]:
    """The first ``most`` parts that take so long before or after; the others are one of these."""
    large = [part for part in parts if max(abs(part[1].before_s), abs(part[1].after_s)) >= least_s]
    kept = large if len(large) == len(parts) <= most else large[: most - 1]
    rest = [ends for part, ends in parts if not any(part is other for other, _ in kept)]
    if not rest:
        return list(kept)
    together = Change(
        "",
        sum(ends.before_s for ends in rest),
        sum(ends.after_s for ends in rest),
        any(ends.before_estimated for ends in rest),
        any(ends.after_estimated for ends in rest),
    )
    return [*kept, (Cell("other", ""), together)]


SMALL = 0.01
"""Share of the step below which a part is no line of its own of a short table."""


def tabulate_reasons(name: str, why: Explanation, most: int = 0) -> Table:
    """What the step after goes to, or what it lost by; the evidence below.

    Args:
        most: rows, of which the last is all that is left or small; 0 for all.
    """
    lost, whole = why.lost, why.change_s if why.lost else why.b.step.step_s
    heads = (
        Head("reason", "what it lost by" if lost else "what the time goes to", "a cause", False),
        *(_head_ends(why) if lost else [Head("after", f"{why.b.name} (ms)", "time in a step")]),
        Head("share", f"of {'the loss' if lost else 'the step'} (%)", "a share of it"),
    )
    found = [
        (Cell(r.cause.meaning, str(r.cause)), Change("", r.before_s, r.after_s, r.before_estimated,
                                                     r.after_estimated))
        for r in why.reasons
    ]  # fmt: skip
    if any(abs(left) >= LEAST_S for left in why.unexplained_s):
        found.append((Cell("not explained", ""), Change("", *why.unexplained_s)))
    if most:
        found = _fold(found, SMALL * why.b.step.step_s, most)
    lines = []
    for cause, ends in found:
        share = (ends.change_s if lost else ends.after_s) / whole
        estimated = ends.estimated if lost else ends.after_estimated
        cells = _list_ends(ends) if lost else [ms_cell(ends.after_s, estimated)]
        mark = ESTIMATE * estimated
        lines.append((cause, *cells, Cell(f"{mark}{100 * share:.0f}", share, estimated)))
    shown = {cause.value for cause, _ in found}
    notes = tuple(
        f"{reason.cause.meaning[:1].upper()}{reason.cause.meaning[1:]}: {reason.evidence}"
        for reason in why.reasons
        if reason.evidence and why.share(reason) >= NAMED and str(reason.cause) in shown
    )
    title = f"Why: {name_pair(why)}"
    return Table(name, title, heads, tuple(lines), notes, words=tuple(describe(why)))


Part = tuple[Cell, Change]
"""A row of a table of reasons or changes: its name, and what it takes of both steps."""


def _head_ends(why: Explanation) -> Iterator[Head]:
    yield Head("before", f"{why.a.name} (ms)", "time in a step")
    yield Head("after", f"{why.b.name} (ms)", "time in a step")
    yield Head("change", "change (ms)", "what it adds to the step")


def _list_ends(ends: Change) -> Iterator[Cell]:
    yield ms_cell(ends.before_s, ends.before_estimated)
    yield ms_cell(ends.after_s, ends.after_estimated)
    yield change_cell(ends.change_s, ends.estimated)


def tabulate_changes(name: str, why: Explanation, most: int = 0) -> Table:
    """The way from one step time to the other, by kind of work; it adds up.

    Args:
        most: rows, as for `tabulate_reasons`; the whole step is one of them.
    """
    a, b = why.a, why.b
    heads = (
        Head("part", "part of the step", "", False, wrap=True),
        *_head_ends(why),
        Head("speedup", "speed-up (×)", "of this part alone", keep=8),
    )
    parts = [
        (Cell(name_part(change.name), str(change.name)), change)
        for change in why.changes
        if max(abs(change.before_s), abs(change.after_s)) >= LEAST_S
    ]
    if most:
        parts = _fold(parts, SMALL * b.step.step_s, most - 1)
    parts.append((Cell("the whole step"), Change("", a.step.step_s, b.step.step_s)))
    lines = [
        (
            part,
            *_list_ends(ends),
            _ratio_cell(_divide(ends.before_s, ends.after_s), ends.estimated),
        )
        for part, ends in parts
    ]
    return Table(name, f"From one step to the other: {name_pair(why)}", heads, tuple(lines), ())


def _divide(before: float, after: float) -> float | None:
    return before / after if before > 0 and after > 0 else None


def change_cell(seconds: float, estimated: bool = False) -> Cell:
    """Write what is added to a time, in milliseconds with its sign."""
    text = ms_cell(seconds).text
    sign = "" if seconds <= 0 or text == "0" else "+"
    return Cell(f"{ESTIMATE * estimated}{sign}{text}", seconds, estimated)
