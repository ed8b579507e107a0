"""Where the time of a step goes, its costliest operations, and one pair explained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from bench.diagnosis.breakdown import LISTED, Breakdown, Timed
from bench.diagnosis.explanation import (
    LEFT_OVER,
    Change,
    Explanation,
    describe,
    name_part,
    write_ms,
)
from bench.diagnosis.step import Bound, Step, choose_prefix, find_floor
from bench.questions.profiles import Profiled
from bench.questions.recommendation import list_places
from bench.questions.report_data import ReportData
from bench.render.section import Column, Section, Sheet, case_column, join
from bench.render.table import (
    NOTHING,
    Cell,
    Row,
    name_place,
    number_cell,
    write_ratio,
    write_tenths,
)
from bench.text import ESTIMATE, capitalize, count, say_left_out, write_number

MOST_PARTS = 7  # parts of a step with a column of their own; the others are summed
SMALL = 0.03  # share of a step below which a part has no column of its own in any case

MOST_STEPS, MOST_OPERATIONS = 2, 6
"""Most cases whose operations are listed, and most operations of each."""

ESTIMATED = (
    f"{ESTIMATE} Estimated: kernels overlapped, and how they shared the time was not measured."
)

_Broken = tuple[Row, Profiled, Breakdown]


def _list_profiled(found: ReportData) -> list[_Broken]:
    return [(row, one, one.breakdown) for row, one in found.counted if one.breakdown is not None]


def _tabulate_breakdowns(found: ReportData) -> Iterator[Sheet]:
    profiled = _list_profiled(found)
    shares = {id(breakdown): _share(breakdown) for *_, breakdown in profiled}
    parts = _choose_parts(shares.values())
    others = sorted({name for share in shares.values() for name in share} - set(parts))

    def write_share(names: Sequence[str], one: _Broken) -> Cell:
        share = sum(shares[id(one[2])].get(name, 0.0) for name in names)
        return number_cell(share, write_tenths)

    columns: list[Column[_Broken]] = [
        case_column(found.named, found.machines, lambda one: one[0]),
        Column("step", "step (ms)", "a median step, not profiled",
               lambda one: one[2].step_s, write=write_ms, better="lower"),
        Column("verdict", "limited by", "what limits most of the step",
               lambda one: Cell(one[2].verdict or NOTHING, one[2].bound), wrap=True, always=True),
        *(
            Column(name, f"{name_part(name)} (%)", "share of the step",
                   partial(write_share, [name]), keep=8 - place)
            for place, name in enumerate(parts)
        ),
        Column("others", "others (%)", "all other parts together",
               partial(write_share, others), keep=1),
    ]  # fmt: skip

    def note() -> Iterator[str]:
        yield (
            "A step is the median step without the profiler; a profile of a few steps after the "
            "epoch says how it is divided. Limited by: what limits at least two thirds of a step; "
            f"of a mixed one, all that limit {100 * LISTED:.0f} % or more."
        )
        if any(breakdown.estimated for *_, breakdown in profiled):
            yield ESTIMATED
        if left := len(found.counted) - len(profiled):
            yield (
                f"{count(left, 'other case')} {'has' if left == 1 else 'have'} no profile: add "
                "--profile on to the command of the sweep and run it again."
            )

    title, empty = "Where the time of a step goes", ("", NOTHING, "0.0")
    yield Sheet(title, columns, profiled, note(), empty=empty)


def _share(breakdown: Breakdown) -> dict[str, float]:
    shares = {str(part.name): part.time_s / breakdown.step_s for part in breakdown.parts}
    return shares | {LEFT_OVER: breakdown.left_over_s / breakdown.step_s}


def _choose_parts(shares: Iterable[dict[str, float]]) -> list[str]:
    largest: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            largest[name] = max(largest.get(name, 0.0), abs(value))
    named = [name for name, value in largest.items() if value >= SMALL]
    return sorted(named, key=lambda name: -largest[name])[:MOST_PARTS]


_Operation = tuple[Timed, Step, Breakdown]


def _tabulate_operations(found: ReportData) -> Iterator[Sheet]:
    """List the operations of the pair that is explained, or of the first cases."""
    wanted = {side.case for pair in choose_pair(found) for side in (pair.a, pair.b)}
    profiled = _list_profiled(found)
    profiled.sort(key=lambda one: one[1].case not in wanted)
    rows, groups = join(
        (
            name_place(row, found.named, found.machines),
            [(timed, one.step, breakdown) for timed in breakdown.rows[:MOST_OPERATIONS]],
        )
        for row, one, breakdown in profiled[:MOST_STEPS]
    )
    scale, prefix = choose_prefix(max((timed.flops or 0.0 for timed, *_ in rows), default=0.0))

    def write_rate(rate: float | None, scale: float) -> Cell:
        return number_cell(rate, lambda rate: write_number(rate / scale))

    columns: list[Column[_Operation]] = [
        Column("operation", "operation", "its name, or a convolution's window and channels",
               lambda one: Cell(one[0].row.operation, one[0].row.operation), number=False),
        Column("kind", "kind", "of work",
               lambda one: Cell(name_part(one[0].row.kind), one[0].row.kind), number=False, keep=3),
        Column("format", "format", "of what it reads first",
               lambda one: Cell(one[0].row.format or NOTHING, one[0].row.format),
               number=False, keep=6),
        Column("calls", "calls", "of a step",
               lambda one: Cell(f"{one[0].row.calls:,}", one[0].row.calls), keep=4),
        Column("time", "ms a step", "time of a step",
               lambda one: number_cell(one[0].time_s, write_ms), better="lower"),
        Column("share", "of the step (%)", "share of the step", lambda one:
               number_cell(one[0].time_s / one[2].step_s, write_tenths), keep=8),
        Column("flops", f"{prefix}FLOP/s", "reached", lambda one:
               write_rate(one[0].flops, scale), better="higher", keep=7),
        Column("traffic", "GB/s", "reached, were nothing kept in a cache", lambda one:
               write_rate(one[0].traffic, 1e9), better="higher", keep=7),
        Column("floor", "at least (ms)", "at the measured rates of this machine", lambda one:
               find_floor(one[0].row, one[1].rates, one[1].arithmetic), write=write_ms, keep=7),
        Column("bound", "limited by", "what limits it: see the notes", lambda one:
               Cell(one[0].bound, one[0].bound) if one[0].bound else None, number=False, keep=8),
    ]  # fmt: skip
    bounds = {timed.bound for timed, *_ in rows}
    named = "; ".join(f"{bound}: {bound.meaning}" for bound in Bound if bound in bounds)
    notes = [
        "At least: what the operation would take if its arithmetic, or its memory traffic, ran at "
        "the rate that a large matrix product, or a large copy, reaches on this machine.",
        f"Limited by: {named}.",
    ]
    if any(breakdown.estimated for *_, breakdown in rows):
        notes.append(ESTIMATED)
    if (more := len(profiled) - MOST_STEPS) > 0:
        notes.append(f"{say_left_out(more, 'case')}; --where chooses.")
    yield Sheet("The operations that take longest", columns, rows, notes, groups)


BREAKDOWNS = Section("time", "Where does the time of a step go?", _tabulate_breakdowns)
OPERATIONS = Section("operations", "Which operations take longest?", _tabulate_operations)


NAMED = 0.05
"""Share of the step, or of the loss, from which a reason and its evidence are shown."""

SMALLEST = 0.01  # share of the step below which a part has no row of its own in a short table
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


def tabulate_explained(pairs: Sequence[Explanation], most: int = 0) -> Iterator[Sheet]:
    """Yield two tables for each pair: its reasons, and the changes by kind of work. With ``most``
    (0 for all) the last of at most that many rows sums all that is left or small."""
    for number, why in enumerate(pairs, 1):
        yield tabulate_reasons(f"reasons-{number}", why, most)
        yield tabulate_changes(f"changes-{number}", why, most)


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
    )
    return [*kept, (Cell("other", ""), together)]


def tabulate_reasons(name: str, why: Explanation, most: int = 0) -> Sheet:
    """Tell what the step after goes to, or what it lost by; the evidence below. With ``most`` (0
    for all) the last of at most that many rows sums all that is left or small."""
    lost, whole = why.lost, why.change_s if why.lost else why.b.step.step_s
    rows: list[Part] = [
        (Cell(r.cause.meaning, str(r.cause)), Change("", r.before_s, r.after_s))
        for r in why.reasons
    ]
    if any(abs(left) >= LEAST_S for left in why.unexplained_s):
        rows.append((Cell("not explained", ""), Change("", *why.unexplained_s)))
    if most:
        rows = _fold(rows, SMALLEST * why.b.step.step_s, most)

    def write_share(ends: Change) -> Cell:
        part_s = ends.change_s if lost else ends.after_s
        return number_cell(part_s / whole, lambda share: f"{100 * share:.0f}")

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
               lambda row: number_cell(row[1].before_s, write_ms)),
        Column("after", f"{why.b.name} (ms)", "time in a step",
               lambda row: number_cell(row[1].after_s, write_ms)),
        Column("change", "change (ms)", "what it adds to the step",
               lambda row: number_cell(row[1].change_s, write_change)),
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
        rows = _fold(rows, SMALLEST * why.b.step.step_s, most - 1)
    rows.append((Cell("the whole step"), Change("", why.a.step.step_s, why.b.step.step_s)))

    def write_speedup(ends: Change) -> Cell | None:
        if min(ends.before_s, ends.after_s) <= 0:
            return None
        return number_cell(ends.before_s / ends.after_s, write_ratio)

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
