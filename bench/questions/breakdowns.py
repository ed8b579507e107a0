"""Where the time of a step goes: the cases with a profile, and their costliest operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from bench.diagnosis.breakdown import LISTED, Breakdown, Timed
from bench.diagnosis.explanation import LEFT_OVER
from bench.diagnosis.rates import choose_prefix, find_floor
from bench.diagnosis.sentences import name_part, write_ms
from bench.diagnosis.step import Bound, Step
from bench.questions.profiles import Profiled
from bench.questions.reasons import choose_pair
from bench.questions.report_data import ReportData
from bench.render.cells import Row, name_place, number_cell, write_tenths
from bench.render.model import NOTHING, Cell
from bench.render.section import Column, Section, Sheet, case_column, join
from bench.text import ESTIMATE, count, say_left_out, write_number

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
        return number_cell(share, write_tenths, not one[2].estimates.isdisjoint(names))

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
        if any(breakdown.estimates for *_, breakdown in profiled):
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

    def write_rate(rate: float | None, scale: float, estimated: bool) -> Cell:
        return number_cell(rate, lambda rate: write_number(rate / scale), estimated)

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
               lambda one: number_cell(one[0].time_s, write_ms, one[0].estimated), better="lower"),
        Column("share", "of the step (%)", "share of the step", lambda one:
               number_cell(one[0].time_s / one[2].step_s, write_tenths, one[0].estimated), keep=8),
        Column("flops", f"{prefix}FLOP/s", "reached", lambda one:
               write_rate(one[0].flops, scale, one[0].estimated), better="higher", keep=7),
        Column("traffic", "GB/s", "reached, were nothing kept in a cache", lambda one:
               write_rate(one[0].traffic, 1e9, one[0].estimated), better="higher", keep=7),
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
    if any(timed.estimated for timed, *_ in rows):
        notes.append(ESTIMATED)
    if any(timed.beyond for timed, *_ in rows):
        notes.append("A rate above the data sheet of the card is left out, and warned of.")
    if (more := len(profiled) - MOST_STEPS) > 0:
        notes.append(f"{say_left_out(more, 'case')}; --where chooses.")
    yield Sheet("The operations that take longest", columns, rows, notes, groups)


BREAKDOWNS = Section("time", "Where does the time of a step go?", _tabulate_breakdowns)
OPERATIONS = Section("operations", "Which operations take longest?", _tabulate_operations)
