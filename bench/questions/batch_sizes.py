"""Speed and memory by batch size: knees, cliffs, and memory as a straight line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from bench.limits import MIN_REPEATS, NEAR
from bench.questions.families import Bounds, Family, list_keys, note_first
from bench.questions.report_data import ReportData
from bench.record import RELIABLE
from bench.render.cells import Row, write_tenths
from bench.render.model import NOTHING, Cell
from bench.render.section import Column, Section, Sheet, quantity_cell
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.text import GIB, parse_bytes, write_number
from bench.wall.search import STEP, MemoryLine, fit_line

LEAST_SIZES = 3
"""Fewest batch sizes for a knee or a line: any two points lie on a line."""

DROP = 0.10  # a larger relative drop of images/s from one batch size to the next is a cliff
ROUGH = 0.05  # largest relative deviation from the line at which memory counts as linear
FARTHEST = 2  # memory is predicted up to this many times the largest batch that ran

MIB = 2**20


@dataclass(frozen=True)
class Speed:
    """Images/s at a batch size, and the ends of their spread, which equal them if it is unknown."""

    batch_size: int
    images_per_s: float
    low: float
    high: float


class Shape(StrEnum):
    """How images/s change as the batch size grows."""

    KNEE = "knee"
    RISING = "rising"
    BELOW = "below"


@dataclass(frozen=True)
class Knee:
    """The smallest batch size within `NEAR` of the best images/s; if they still rise, the largest
    that ran."""

    shape: Shape
    batch_size: int
    best: int


def list_speeds(rows: Sequence[Row]) -> list[Speed]:
    """Return the speeds of rows of the frame of cases, by ascending batch size."""
    speeds = []
    for row in (row for row in rows if is_number(row.images_per_s)):
        ends = row.images_per_s_low, row.images_per_s_high
        ends = ends if all(map(is_number, ends)) else 2 * (row.images_per_s,)
        speeds.append(Speed(int(row.batch_size), row.images_per_s, *ends))
    return sorted(speeds, key=lambda speed: speed.batch_size)


def find_knee(speeds: Sequence[Speed]) -> Knee | None:
    """Find the smallest batch within `NEAR` of the best images/s, in ``speeds`` by ascending batch
    size; None if there are fewer than `LEAST_SIZES`.

    The shape is ``RISING`` if the largest batch is the best, by more than `NEAR` over half of it.
    It is ``BELOW`` if the smallest batch that ran is within `NEAR`: the knee may be smaller than
    that.
    """
    if len(speeds) < LEAST_SIZES:
        return None
    best = max(speeds, key=lambda speed: speed.images_per_s)
    enough = best.images_per_s / (1 + NEAR)
    first = next(speed for speed in speeds if speed.images_per_s >= enough)
    half = best.batch_size / 2
    if best is speeds[-1] and first.batch_size > half and _interpolate(speeds, half) < enough:
        return Knee(Shape.RISING, best.batch_size, best.batch_size)
    shape = Shape.BELOW if first is speeds[0] else Shape.KNEE
    return Knee(shape, first.batch_size, best.batch_size)


def _interpolate(speeds: Sequence[Speed], batch_size: float) -> float:
    """Interpolate images/s between batch sizes that ran, linearly in the logarithm of the size."""
    for a, b in pairwise(speeds):
        if a.batch_size <= batch_size <= b.batch_size:
            share = math.log(batch_size / a.batch_size) / math.log(b.batch_size / a.batch_size)
            return a.images_per_s + share * (b.images_per_s - a.images_per_s)
    return speeds[0].images_per_s  # all that ran lie within a factor of two


class Cliff(NamedTuple):
    """Two neighbouring batch sizes; the larger one is slower by more than `DROP`."""

    before: Speed
    after: Speed

    @property
    def lost(self) -> float:
        return 1 - self.after.images_per_s / self.before.images_per_s

    @property
    def misalignment(self) -> str:
        """``257 is no multiple of 8``, if the size before the cliff is one; else empty."""
        before, after = (speed.batch_size for speed in self)
        lost = next((of for of in (8, 64) if after % of and not before % of), 0)
        return f"{after} is no multiple of {lost}" if lost else ""


def write_drop(cliff: Cliff) -> str:
    """Return ``23 % slower``, of images/s."""
    return f"{100 * cliff.lost:.0f} % slower"


def find_cliffs(speeds: Sequence[Speed]) -> list[Cliff]:
    """Return the cliffs that the spread of runs does not explain; ``speeds`` ascend by size."""
    cliffs = [Cliff(a, b) for a, b in pairwise(speeds)]
    return [c for c in cliffs if c.lost > DROP and c.after.high < c.before.low]


_Speeds = tuple[Family, Knee, list[Cliff]]


def _tabulate_speeds(found: ReportData) -> Iterator[Sheet]:
    rows: list[_Speeds] = []
    for family in found.families:
        speeds = list_speeds(family.ended)
        if knee := find_knee(speeds):
            rows.append((family, knee, find_cliffs(speeds)))
    firsts = [family.first for family in found.families]
    near = f"{100 * NEAR:.0f} %"

    def write_speed(family: Family, size: int) -> Cell:
        (row,) = (row for row in family.ended if row.batch_size == size)
        return quantity_cell(QUANTITIES["images_per_s"], row)

    def write_best(row: _Speeds) -> Cell:
        best = write_speed(row[0], row[1].best)
        return Cell(f"{best.text} at {row[1].best}", best.value)

    def write_remarks(row: _Speeds) -> str:
        family, knee, cliffs = row
        sizes = {knee.best, knee.batch_size, *(s.batch_size for cliff in cliffs for s in cliff)}
        rested = [row for row in family.ended if row.batch_size in sizes]
        told = (doubt for doubt in DOUBTS.values() if doubt.name not in found.below)
        return ", ".join(d.remark for d in told if any(getattr(row, d.name) for row in rested))

    columns: list[Column[_Speeds]] = [
        *list_keys(firsts, found.machines, lambda row: row[0].first),
        Column("knee", "knee", f"the smallest batch size that ran within {near} of the best",
               lambda row: Cell(write_knee(row[1], row[0].bounds.fails),
                                row[1].batch_size if row[1].shape is Shape.KNEE else None),
               wrap=True),
        Column("knee_speed", "images/s there", "at the knee",
               lambda row: write_speed(row[0], row[1].batch_size) if row[1].shape is Shape.KNEE
               else None, better="higher", keep=7),
        Column("best", "most images/s", "and the batch size that has them", write_best,
               better="higher"),
        Column("cliffs", "cliffs", f"where images/s drop by more than {100 * DROP:.0f} %",
               lambda row: "; ".join(map(_write_cliff, row[2])) or "none", wrap=True, always=True),
        Column("sizes", "batch sizes", "that were timed, and how many they are",
               lambda row: _write_sizes([s.batch_size for s in list_speeds(row[0].ended)]),
               number=False, keep=5),
        Column("remarks", "remarks", "on the rows that these rest on", write_remarks,
               keep=8, wrap=True),
    ]  # fmt: skip
    notes = [
        f"Knee: the smallest batch size that ran within {near} of the most images/s. Still "
        f"rising: the largest is more than {near} faster than half its size. Cliff: more than "
        f"{100 * DROP:.0f} % fewer images/s than at the batch size before, and more than the "
        "spread of the runs explains."
    ]
    if any(row.repeats < MIN_REPEATS for family, *_ in rows for row in family.ended):
        notes.append(
            f"With fewer than {MIN_REPEATS} repeats, knees and cliffs are as uncertain as the "
            f"runs, and may be chance; use --repeats {MIN_REPEATS}."
        )
    notes += note_first(found.families)
    yield Sheet("Speed by batch size: knees and cliffs", columns, rows, notes)


def write_knee(knee: Knee, fails: int | None) -> str:
    """Return ``128``, ``64 or below`` or ``still rising at 512 (640 does not fit)``; ``fails`` is
    the smallest batch size known not to fit."""
    if knee.shape is Shape.RISING:
        beyond = f" ({fails} does not fit)" if fails else ""
        return f"still rising at {knee.batch_size}{beyond}"
    return f"{knee.batch_size} or below" if knee.shape is Shape.BELOW else str(knee.batch_size)


def _write_cliff(cliff: Cliff) -> str:
    """``256 → 257: 23 % slower, 257 is no multiple of 8``."""
    said = f"{cliff.before.batch_size} → {cliff.after.batch_size}: {write_drop(cliff)}"
    return ", ".join(filter(None, (said, cliff.misalignment)))


def _write_sizes(sizes: Sequence[int]) -> str:
    """Return the range of batch sizes and their number: ``32 to 512 (5)``."""
    return f"{sizes[0]} to {sizes[-1]} ({len(sizes)})"


@dataclass(frozen=True)
class Growth:
    """A linear fit of a family's memory over its batch sizes, and what it predicts."""

    line: MemoryLine
    # largest relative deviation of a batch size from the line, or of the largest batch size from
    # the line through the others if that is more
    miss: float
    sizes: tuple[int, ...]  # that the line was fitted to, ascending
    available: float | None  # bytes that the card or the limit allows; None if unknown
    # the largest multiple of `STEP` predicted to fit, at most `FARTHEST` times the largest that ran
    largest: int | None = None
    more: bool = False  # whether larger ones may fit too, beyond what is predicted
    # bytes by batch size, for the next power of two above those that ran, if it may fit
    predicted: dict[int, float] = field(default_factory=dict)
    holds: bool = True  # whether the measured largest batch agrees with the line, within `ROUGH`


def fit_growth(family: Family) -> Growth | None:
    """Fit memory over the batch size; None for fewer than `LEAST_SIZES`, or if memory does not
    grow. A line that misses by more than `ROUGH` predicts nothing, nor does one that the measured
    largest batch contradicts: by more than `ROUGH` of the available memory, a batch trained that
    should take more than that, or one failed that should fit. Runs in which the allocator retried
    are left out: their memory had reached its limit."""
    points = {
        int(row.batch_size): float(row.memory_bytes)
        for row in family.rows
        if row.status in RELIABLE
        and is_number(row.memory_bytes)
        and not (is_number(row.alloc_retries) and row.alloc_retries > 0)
    }
    line = fit_line(list(points.items()))
    if len(points) < LEAST_SIZES or line is None:
        return None
    sizes, available = tuple(sorted(points)), _find_available(family)
    top, (fits, fails) = sizes[-1], family.bounds
    misses = [abs(line.predict(size) / bytes - 1) for size, bytes in points.items()]
    others = fit_line([point for point in points.items() if point[0] != top])
    misses.append(abs(others.predict(top) / points[top] - 1) if others else math.inf)
    growth = Growth(line, max(misses), sizes, available)
    if growth.miss > ROUGH:
        return growth
    if available is not None and (
        (fails is not None and line.predict(fails) < (1 - ROUGH) * available)
        or (fits is not None and line.predict(fits) > (1 + ROUGH) * available)
    ):
        return replace(growth, holds=False)
    ends = math.inf if available is None else line.find_largest(available, STEP)
    power, more = 2 ** top.bit_length(), ends > FARTHEST * top
    largest = None if available is None or (more and fails) else int(min(ends, FARTHEST * top))
    predicted = power <= ends and power < (fails or math.inf)
    ahead = {power: line.predict(power)} if predicted else {}
    return replace(growth, largest=largest, more=more, predicted=ahead)


def _find_available(family: Family) -> float | None:
    """Return the bytes that a family's memory may reach, by its measure; None if unknown: its
    limit, or the card's memory less what other programs held if that is less. The CUDA context, as
    far as known, is subtracted from measures of torch's allocator, which does not hold it."""
    rows = family.rows

    def middle(name: str) -> float:
        return median([float(v) for row in rows if is_number(v := getattr(row, name))] or [0.0])

    card, ends = middle("gpu_memory_bytes"), []
    if family.first.memory_limit:
        ends.append(float(parse_bytes(family.first.memory_limit)))
    if family.first.device != "cpu" and card > 0:
        ends.append(card - max(middle("baseline_device_bytes"), 0))
    if not ends:
        return None
    of_allocator = {"peak_reserved_bytes", "peak_allocated_bytes"}
    context = any(row.memory_measure in of_allocator for row in rows)
    return min(ends) - context * max(middle("context_bytes"), 0)


def _tabulate_growth(found: ReportData) -> Iterator[Sheet]:
    rows = [(family, growth) for family in found.families if (growth := fit_growth(family))]
    firsts = [family.first for family in found.families]
    gib = partial(Column, write=lambda bytes: f"{bytes / GIB:.2f}")
    columns: list[Column[tuple[Family, Growth]]] = [
        *list_keys(firsts, found.machines, lambda row: row[0].first),
        gib("fixed", "fixed (GiB)", "what no batch size changes: weights, context, libraries",
            lambda row: row[1].line.fixed_bytes),
        Column("image", "an item (MiB)", "memory that each item of a batch adds",
               lambda row: row[1].line.bytes_per_image,
               write=lambda bytes: write_number(bytes / MIB)),
        Column("miss", "largest miss (%)", "of a batch size that ran, from the line; of the "
               "largest, also from the line through the others",
               lambda row: row[1].miss, write=write_tenths, keep=7),
        Column("predicted", "predicted (GiB)", "for the next power of two", lambda row: "; ".join(
               f"{size}: {bytes / GIB:.2f}" for size, bytes in row[1].predicted.items()) or None,
               number=False, keep=8),
        gib("available", "available (GiB)", "up to the end of the card or the limit",
            lambda row: row[1].available, keep=6),
        Column("largest", "predicted to fit", f"the largest multiple of {STEP}, at most "
               f"{FARTHEST} times the largest that ran", lambda row: None
               if row[1].available is None else Cell(_write_fitting(row[1]), row[1].largest),
               number=True, wrap=True),
        Column("wall", "measured", "the largest batch that fits, where it was found",
               lambda row: _write_bounds(row[0].bounds), number=False),
        Column("sizes", "fitted to", "batch sizes, and how many they are",
               lambda row: _write_sizes(row[1].sizes), number=False, keep=5),
    ]  # fmt: skip
    notes = [
        "Memory as a line over the batch size: least squares through the batch sizes that ran. "
        "Predictions are not measurements."
    ]
    if any(growth.miss > ROUGH or not growth.holds for _, growth in rows):
        notes.append(
            f"Where the line misses by more than {100 * ROUGH:.0f} %, or where what was measured "
            "of the largest batch contradicts it, memory is not a line (algorithms and allocators "
            "change with the batch size), and nothing is predicted; python -m bench.fit measures "
            "the largest batch."
        )
    notes += note_first(found.families)
    yield Sheet("Memory by batch size, as a line", columns, rows, notes)


def _write_fitting(growth: Growth) -> str:
    if not growth.holds:
        return "does not hold"
    if growth.largest is None:
        return NOTHING
    return f"{growth.largest} or more" if growth.more else str(growth.largest or "none")


def _write_bounds(bounds: Bounds) -> str:
    """Return ``512 fits, 640 does not``; empty if nothing ran out of memory."""
    fits, fails = bounds
    if fails is None:
        return ""
    return f"not even {fails} fits" if fits is None else f"{fits} fits, {fails} does not"


SPEEDS = Section("batch-speed", "From which batch size on is training no faster?", _tabulate_speeds)
GROWTH = Section("batch-memory", "How does memory grow with the batch size?", _tabulate_growth)
