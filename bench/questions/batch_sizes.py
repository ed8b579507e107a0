"""Cases that differ only in their batch size: knees and cliffs of their speed, memory as a straight
line, and the largest batch that fits.

Probes of the largest batch do not measure speed, but show memory as well as cases do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.case import SAME_QUESTION, Case, free_axes
from bench.limits import MIN_REPEATS, NEAR
from bench.record import MEASURED, REFUSED, RELIABLE
from bench.render.section import Column, Section, Sheet, axis_column, quantity_cell
from bench.render.table import NOTHING, Cell, Row, whole_cell, write_tenths
from bench.store.rows import group
from bench.study.axes import Machines, find_varying, list_main
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.study.runs import SOURCE, Result, Run, tell_but
from bench.study.sweeps import Sweep
from bench.text import GIB, parse_bytes, write_number
from bench.wall import APART, STEP, Ending, MemoryLine, Wall, fit_line, read_walls

if TYPE_CHECKING:
    from bench.questions.report_data import ReportData

MOST_FAMILIES = 60  # families that a report looks at; more would not be read

LEAST_SIZES = 3
"""Fewest batch sizes for a knee or a line: any two points lie on a line."""

DROP = 0.10  # a larger relative drop of images/s from one batch size to the next is a cliff
ROUGH = 0.05  # largest relative deviation from the line at which memory counts as linear
FARTHEST = 2  # memory is predicted up to this many times the largest batch that ran

MIB = 2**20

_OTHERS = ("batch_size", *SAME_QUESTION)


class Bounds(NamedTuple):
    """The largest batch size that was trained, and the smallest above it that ran out of memory."""

    fits: int | None
    fails: int | None


def find_bounds(rows: Sequence[Row]) -> Bounds:
    """Return the largest batch that fits and the smallest that does not, by cases and probes."""
    fits = max((int(row.batch_size) for row in rows if row.status in MEASURED), default=None)
    failed = (int(row.batch_size) for row in rows if row.status in REFUSED)
    return Bounds(fits, min((size for size in failed if size > (fits or 0)), default=None))


@dataclass(frozen=True)
class Family:
    """Cases of one precision that differ in nothing but their batch size."""

    cases: tuple[Result, ...]  # one a batch size, ascending; at least one
    probes: tuple[Run, ...]  # that take as much memory, in the order in which they ran

    @property
    def first(self) -> Result:
        """Any of its cases, for the settings that all of them share."""
        return self.cases[0]

    @cached_property
    def ended(self) -> list[Result]:
        """The cases with a comparable time, by batch size."""
        return [row for row in self.cases if row.status in RELIABLE]

    @property
    def rows(self) -> Sequence[Row]:
        """Its probes and its cases."""
        return (*self.probes, *self.cases)

    @cached_property
    def bounds(self) -> Bounds:
        """The limits of its memory, by cases and probes alike."""
        return find_bounds(self.rows)


class Search(NamedTuple):
    """A search for the largest batch: where it ran, for which cases, and what it found."""

    sweep: str
    machine: str
    family: Case
    wall: Wall


def find_searches(runs: Sequence[Run], sweeps: Sequence[Sweep]) -> list[Search]:
    """Return the searches in runs, by probes and by cases that may have retried, each with the step
    and margin of its sweep."""
    if not any(run.probe for run in runs):
        return []
    asked = {sweep.name: sweep for sweep in sweeps}
    found = []
    for part in group(runs, attrgetter(*SOURCE)):
        sweep = asked[part[0].sweep]
        mine = {run.record_id for run in part}
        rows = [row for row in sweep.rows if row.record_id in mine]
        walls = read_walls(rows, sweep.step, sweep.margin)
        found += [Search(*attrgetter(*SOURCE)(part[0]), *wall) for wall in walls]
    return found


def find_families(results: Sequence[Result], probes: Iterable[Run]) -> list[Family]:
    """Return families of results, in the order of the overview, and of probes, each precision at
    its main loss scale. Left out are groups with only one batch size and all families after the
    first `MOST_FAMILIES`."""
    tell, tell_alike, tell_memory = (
        tell_but((*_OTHERS, *free)) for free in ((), free_axes("precision"), APART)
    )
    results = [results[at] for at in list_main(results, [*map(tell_alike, results)])]
    several = {
        tell_alike(part[0])
        for part in group(results, tell_alike)
        if len({one.batch_size for one in part}) > 1
    }
    probed = {tell_memory(part[0]): part for part in group(probes, tell_memory)}
    families = group((r for r in results if tell_alike(r) in several), tell)[:MOST_FAMILIES]
    return [
        Family(_keep_one(family), tuple(probed.get(tell_memory(family[0]), ())))
        for family in families
    ]


def _keep_one(results: Sequence[Result]) -> tuple[Result, ...]:
    """Keep of each batch size, in order, the case that measured most."""
    tell = attrgetter("batch_size")
    return tuple(
        min(alike, key=lambda one: (one.status not in MEASURED, one.steps != "", -one.part))
        for alike in group(sorted(results, key=tell), tell)
    )


def list_keys(
    cases: Sequence[Row], machines: Machines, take: Callable[[Any], Row]
) -> list[Column[Any]]:
    """Return columns for the precision and the other axes in which families differ. ``take`` maps a
    row of the table to its case."""
    varying = find_varying(cases)
    shown = [axis for axis in varying if axis not in _OTHERS]
    shown = shown if "precision" in varying else ["precision", *shown]
    return [axis_column(axis, machines, take, number=False) for axis in shown]


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
    """Return the speeds of cases, by ascending batch size."""
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
    more = ends > FARTHEST * top
    largest = None if available is None or (more and fails) else int(min(ends, FARTHEST * top))
    return replace(growth, largest=largest, more=more)


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


class _Row(NamedTuple):
    """A family in the table: what is known of its speed and of its memory."""

    family: Family
    knee: Knee | None
    cliffs: list[Cliff]
    growth: Growth | None


def _tabulate_batches(found: ReportData) -> Iterator[Sheet]:
    rows: list[_Row] = []
    for family in found.families:
        speeds = list_speeds(family.ended)
        knee, growth = find_knee(speeds), fit_growth(family)
        if knee or growth:
            rows.append(_Row(family, knee, find_cliffs(speeds) if knee else [], growth))
    near = f"{100 * NEAR:.0f} %"

    def write_best(row: _Row) -> Cell | None:
        if row.knee is None:
            return None
        (best,) = (one for one in row.family.ended if one.batch_size == row.knee.best)
        cell = quantity_cell(QUANTITIES["images_per_s"], best)
        return Cell(f"{cell.text} at {row.knee.best}", cell.value)

    def write_remarks(row: _Row) -> str:
        knee, sizes = row.knee, {s.batch_size for cliff in row.cliffs for s in cliff}
        sizes |= {knee.best, knee.batch_size} if knee else set()
        rested = [one for one in row.family.ended if one.batch_size in sizes]
        told = (doubt for doubt in DOUBTS.values() if doubt.name not in found.below)
        return ", ".join(d.remark for d in told if any(getattr(one, d.name) for one in rested))

    def of_growth(say: Callable[[Growth], Any]) -> Callable[[_Row], Any]:
        return lambda row: say(row.growth) if row.growth else None

    columns: list[Column[_Row]] = [
        *list_keys([family.first for family in found.families], found.machines,
                   lambda row: row.family.first),
        Column("knee", "knee", f"the smallest batch size that ran within {near} of the best",
               lambda row: Cell(write_knee(row.knee, row.family.bounds.fails),
                                row.knee.batch_size if row.knee.shape is Shape.KNEE else None)
               if row.knee else None, wrap=True),
        Column("best", "most images/s", "and the batch size that has them", write_best,
               better="higher"),
        Column("cliffs", "cliffs", f"where images/s drop by more than {100 * DROP:.0f} %",
               lambda row: "; ".join(map(_write_cliff, row.cliffs)), wrap=True),
        Column("fixed", "fixed (GiB)", "memory that no batch size changes: weights, context, "
               "libraries", of_growth(lambda growth: growth.line.fixed_bytes),
               write=lambda bytes: f"{bytes / GIB:.2f}", keep=7),
        Column("image", "an item (MiB)", "memory that each item of a batch adds",
               of_growth(lambda growth: growth.line.bytes_per_image),
               write=lambda bytes: write_number(bytes / MIB), keep=7),
        Column("miss", "miss (%)", "the largest of a batch size that ran, from the line; of the "
               "largest, also from the line through the others",
               of_growth(lambda growth: growth.miss), write=write_tenths, keep=6),
        Column("largest", "predicted to fit", f"the largest multiple of {STEP}, at most "
               f"{FARTHEST} times the largest that ran", of_growth(lambda growth: None
               if growth.available is None else Cell(_write_fitting(growth), growth.largest)),
               number=True, wrap=True, keep=8),
        Column("wall", "measured", "the largest batch that fits, where it was found",
               lambda row: _write_bounds(row.family.bounds), number=False),
        Column("remarks", "remarks", "on the rows that knees and cliffs rest on", write_remarks,
               keep=8, wrap=True),
    ]  # fmt: skip
    notes = [
        f"Knee: the smallest batch size that ran within {near} of the most images/s. Still "
        f"rising: the largest is more than {near} faster than half its size. Cliff: more than "
        f"{100 * DROP:.0f} % fewer images/s than at the batch size before, and more than the "
        "spread of the runs explains.",
        "Memory as a line over the batch size: least squares through the batch sizes that ran. "
        f"Where it misses by more than {100 * ROUGH:.0f} %, or what was measured of the largest "
        "batch contradicts it, nothing is predicted; python -m bench.fit measures it.",
    ]
    if any(row.repeats < MIN_REPEATS for one in rows for row in one.family.ended):
        notes.append(
            f"With fewer than {MIN_REPEATS} repeats, knees and cliffs are as uncertain as the "
            f"runs, and may be chance; use --repeats {MIN_REPEATS}."
        )
    if len(found.families) == MOST_FAMILIES:
        notes.append(
            f"Only the first {MOST_FAMILIES} settings are looked at; --where chooses others."
        )
    yield Sheet("By batch size: speed, and memory as a line", columns, rows, notes)


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


def _tabulate_walls(found: ReportData) -> Iterator[Sheet]:
    rows = [(_describe_search(search), search.wall) for search in found.searches]
    fine = all(wall.ending is Ending.FOUND for _, wall in rows)
    margins = " or ".join(sorted({f"{100 * wall.margin:g} %" for _, wall in rows}))
    columns: list[Column[tuple[Row, Wall]]] = [
        *list_keys([row for row, _ in rows], found.machines, lambda row: row[0]),
        Column("largest", "largest batch", "that was trained", lambda row: row[1].largest,
               better="higher"),
        Column("refused", "does not fit", "the smallest batch above it that ran out of memory",
               lambda row: row[1].smallest_failing),
        Column("thrashes", "retries from", "the allocator frees its cache and tries again",
               lambda row: row[1].thrashes_from, keep=8),
        Column("recommended", "recommended", "its memory leaves a margin free",
               lambda row: row[1].recommended),
        Column("probes", "probes", "short runs that the search took", lambda row: row[1].probes,
               better="lower", keep=6),
        Column("predicted", "first prediction", "of the largest, from two small batches",
               lambda row: row[1].predicted, keep=7),
        Column("off", "off by", "items that the prediction was too high",
               lambda row: whole_cell(row[1].off, sign=True), keep=7),
        Column("ending", "ended", "how the search ended", lambda row: "" if fine else
               row[1].ending.meaning if row[1].ending else "not yet; run the same command again",
               keep=8, wrap=True),
    ]  # fmt: skip
    note = (
        f"Recommended: by the line of memory, {margins} of it stays free. The next run, another "
        "driver or a neighbour may take that much."
    )
    yield Sheet("Largest batch that fits, by probes of a few steps", columns, rows, [note])


def _describe_search(search: Search) -> Row:
    spelled = {name: "" if value is None else value for name, value in vars(search.family).items()}
    return SimpleNamespace(sweep=search.sweep, machine=search.machine, **spelled)


WALLS = Section("walls", "How large a batch fits in memory?", _tabulate_walls)
BATCHES = Section(
    "batches", "From which batch size on is training no faster, and what fits?", _tabulate_batches
)
