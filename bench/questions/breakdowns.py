"""Where the time of a step goes: the cases with a profile, and their costliest operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.diagnosis.breakdown import LISTED, Breakdown, Timed, divide
from bench.diagnosis.evidence import write_ms
from bench.diagnosis.explanation import LEFT_OVER
from bench.diagnosis.floors import find_floor
from bench.diagnosis.rates import choose_prefix
from bench.diagnosis.sentences import name_part
from bench.diagnosis.step import Bound, Step
from bench.questions.profiles import Profiled
from bench.render.cells import Row, iterate, name_place
from bench.render.model import NOTHING, Cell, Head, Table
from bench.study.axes import Machines
from bench.text import ESTIMATE, count, say_left_out, write_number

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 40
"""Cases of the table; more would not be read."""

MOST_PARTS = 7
"""Parts of a step with a column of their own; the others are summed."""

SMALL = 0.03
"""Share of a step below which a part has no column of its own in any case."""

MOST_STEPS, MOST_OPERATIONS = 4, 6
"""Cases whose operations are listed, and how many of each."""

ESTIMATED = (
    f"{ESTIMATE} Estimated: kernels overlapped, and how they shared the time was not measured."
)

UNPROFILED = "add --profile on to the command of the sweep and run it again."


@dataclass(frozen=True)
class Divided:
    """A case with its step.

    Attributes:
        row: of the frame of cases.
        step: what it did.
        breakdown: where its time went; None without a profile.
    """

    row: Row
    step: Step
    breakdown: Breakdown | None


def divide_cases(steps: Mapping[int, Profiled], cases: pd.DataFrame) -> list[Divided]:
    """The cases whose work was counted, in the order of ``cases``.

    Args:
        steps: of `bench.questions.profiles.read_steps`.
        cases: of `bench.study.summaries.summarize`.
    """
    rows = iterate(cases[cases["cell"].isin(list(steps))])
    return [Divided(row, step, divide(step)) for row in rows for step in [steps[row.cell].step]]


def tabulate_breakdowns(
    divided: Sequence[Divided], axes: Sequence[str], machines: Machines
) -> Iterator[Table]:
    """A row a case with a profile: its verdict, and the shares of its step.

    Args:
        divided: the cases whose work was counted, in the order of the overview.
        axes: those that tell the cases apart.
    """
    profiled = [(one, one.breakdown) for one in divided if one.breakdown is not None]
    if not profiled:
        return
    shown, shares = profiled[:MOST_ROWS], [_share(breakdown) for _, breakdown in profiled]
    parts = choose_parts(shares)
    others = {name for share in shares for name in share} - set(parts)
    heads = (
        Head("case", "case", "the settings that tell it apart", False, wrap=True),
        Head("step", "step (ms)", "a median step, not profiled", better="lower"),
        Head("verdict", "limited by", "what limits most of the step", False, wrap=True),
        *(
            Head(name, f"{name_part(name)} (%)", "share of the step", keep=8 - place)
            for place, name in enumerate(parts)
        ),
        Head("others", "others (%)", "all other parts together", keep=1),
    )
    lines = [
        (
            Cell(name_place(one.row, axes, machines)),
            ms_cell(breakdown.step_s),
            Cell(breakdown.verdict or NOTHING, breakdown.bound),
            *(_percent_cell(share.get(name, 0.0), name in breakdown.estimates) for name in parts),
            _percent_cell(
                sum(share.get(name, 0.0) for name in others), bool(others & breakdown.estimates)
            ),
        )
        for (one, breakdown), share in zip(shown, shares, strict=False)
    ]
    left = len(divided) - len(profiled)
    more, have = len(profiled) - len(shown), "has" if left == 1 else "have"
    notes = [
        "A step is the median step without the profiler; a profile of a few steps after the epoch "
        "says how it is divided. "
        "Limited by: what limits at least two thirds of a step; of a mixed one, all that limit "
        f"{100 * LISTED:.0f} % or more.",
        *([ESTIMATED] if any(breakdown.estimates for _, breakdown in profiled[:MOST_ROWS]) else []),
        *([f"{say_left_out(more, 'case')}; --where chooses."] if more else []),
        *([f"{count(left, 'other case')} {have} no profile: {UNPROFILED}"] if left else []),
    ]
    yield Table(
        "time", "Where the time of a step goes", heads, tuple(lines), tuple(notes)
    ).drop_empty(("", NOTHING, "0.0"), but=("verdict",))


def _share(breakdown: Breakdown) -> dict[str, float]:
    """The parts of a step as shares of it, with what is left over."""
    shares = {str(part.name): part.time_s / breakdown.step_s for part in breakdown.parts}
    return shares | {LEFT_OVER: breakdown.left_over_s / breakdown.step_s}


def choose_parts(shares: Sequence[dict[str, float]], most: int = MOST_PARTS) -> list[str]:
    """The parts that are largest anywhere, the largest first."""
    largest: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            largest[name] = max(largest.get(name, 0.0), abs(value))
    named = [name for name, value in largest.items() if value >= SMALL]
    return sorted(named, key=lambda name: -largest[name])[:most]


def ms_cell(seconds: float | None, estimated: bool = False) -> Cell:
    """Write a time in milliseconds, an estimate with its mark; nothing for none."""
    if seconds is None:
        return Cell(NOTHING)
    return Cell(write_ms(seconds, estimated), seconds, estimated)


def _percent_cell(share: float, estimated: bool = False) -> Cell:
    return Cell(f"{ESTIMATE * estimated}{100 * share:.1f}", share, estimated)


# ------------------------------------------------------------------------------------- operations


def tabulate_operations(
    divided: Sequence[Divided], axes: Sequence[str], machines: Machines
) -> Iterator[Table]:
    """The operations that take longest, of a few cases.

    Args:
        divided: the cases to choose from, those wanted most first.
        axes: those that tell the cases apart.
    """
    profiled = [(one, one.breakdown) for one in divided if one.breakdown is not None]
    if not profiled:
        return
    lines: list[tuple[Cell, ...]] = []
    groups: dict[int, str] = {}
    shown = profiled[:MOST_STEPS]
    listed = [timed for _, breakdown in shown for timed in breakdown.rows[:MOST_OPERATIONS]]
    speeds = (timed.flops or 0.0 for timed in listed)
    scale, prefix = choose_prefix(max(speeds, default=0.0))
    heads = (
        Head("operation", "operation", "its name, or a convolution's window and channels", False),
        Head("kind", "kind", "of work", False, keep=3),
        Head("format", "format", "of what it reads first", False, keep=6),
        Head("calls", "calls", "of a step", keep=4),
        Head("time", "ms a step", "time of a step", better="lower"),
        Head("share", "of the step (%)", "share of the step", keep=8),
        Head("flops", f"{prefix}FLOP/s", "reached", better="higher", keep=7),
        Head("traffic", "GB/s", "reached, were nothing kept in a cache", better="higher", keep=7),
        Head("floor", "at least (ms)", "at the measured rates of this machine", keep=7),
        Head("bound", "limited by", "what limits it: see the notes", False, keep=8),
    )  # fmt: skip
    for one, breakdown in shown:
        groups[len(lines)] = name_place(one.row, axes, machines)
        lines += [
            tuple(_write(timed, one.step, breakdown, scale))
            for timed in breakdown.rows[:MOST_OPERATIONS]
        ]
    bounds = {row[-1].value for row in lines}
    notes = [
        "At least: what the operation would take if its arithmetic, or its memory traffic, ran at "
        "the rate that a large matrix product, or a large copy, reaches on this machine.",
        "Limited by: "
        + "; ".join(f"{bound}: {bound.meaning}" for bound in Bound if bound in bounds)
        + ".",
    ]
    if any(timed.estimated for timed in listed):
        notes.append(ESTIMATED)
    if any(timed.beyond for timed in listed):
        notes.append("A rate above the data sheet of the card is left out, and warned of.")
    if len(profiled) > MOST_STEPS:
        more = len(profiled) - MOST_STEPS
        notes.append(f"{say_left_out(more, 'case')}; --where chooses.")
    yield Table(
        "operations",
        "The operations that take longest",
        heads,
        tuple(lines),
        tuple(notes),
        groups,
    ).drop_empty()


def _write(timed: Timed, step: Step, breakdown: Breakdown, scale: float) -> Iterator[Cell]:
    row = timed.row
    yield Cell(row.operation, row.operation)
    yield Cell(name_part(row.kind), row.kind)
    yield Cell(row.format or NOTHING, row.format)
    yield Cell(f"{row.calls:,}", row.calls)
    yield ms_cell(timed.time_s, timed.estimated)
    yield _percent_cell(timed.time_s / breakdown.step_s, timed.estimated)
    yield _rate_cell(timed.flops, scale, timed.estimated)
    yield _rate_cell(timed.traffic, 1e9, timed.estimated)
    yield ms_cell(find_floor(row, step.rates, step.arithmetic))
    yield Cell(timed.bound, timed.bound) if timed.bound else Cell(NOTHING)


def _rate_cell(rate: float | None, scale: float, estimated: bool) -> Cell:
    """Write a rate, over a scale; nothing where there is none."""
    if rate is None:
        return Cell(NOTHING)
    return Cell(f"{ESTIMATE * estimated}{write_number(rate / scale)}", rate, estimated)
