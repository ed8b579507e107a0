"""How speed and memory go with the batch size: knees, cliffs, memory as a line, the largest batch.

All of it is of a family: cases that differ in nothing but their batch size. Probes of the largest
batch are no measurements of speed, but tell of memory as much as cases do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from bench.case import SAME_QUESTION, Case, free_axes
from bench.precision import PRECISIONS
from bench.record import REFUSED, RELIABLE, Status
from bench.render.cells import TIMED, Row, iterate
from bench.store.attempts import number_groups
from bench.store.reader import read_cases
from bench.study.axes import keep_main
from bench.study.estimate import share_seeds
from bench.study.quantities import is_number
from bench.study.summaries import SOURCE, list_equal
from bench.text import parse_bytes
from bench.wall.answer import Wall
from bench.wall.line import MemoryLine, fit_line
from bench.wall.records import APART, name_family, read_walls
from bench.wall.search import STEP

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.sweeps import Sweep

LEAST_SIZES = 3
"""Batch sizes that a knee or a line needs: two points lie on a line whatever they are."""

NEAR = 0.05
"""Images/s within this share of the best are as good as it."""

DROP = 0.10
"""A larger share of images/s lost from one batch size to the next is a cliff."""

ROUGH = 0.05
"""Where a batch size misses the line by more, memory is no line."""

CLOSE = 0.9
"""A batch of this share of the largest that trained stands for it."""

FARTHEST = 2
"""Times the largest batch that ran up to which memory is predicted."""

MOST_FAMILIES = 60
"""Families that a report looks at; more would not be read."""

_EQUAL = list_equal(("batch_size", *SAME_QUESTION))


@dataclass(frozen=True)
class Family:
    """Cases of one precision that differ in nothing but their batch size.

    Rows, not frames: each is looked at many times, and a frame takes a millisecond to give one.

    Attributes:
        cases: one row a batch size, upwards; at least one.
        probes: the records of probes that take as much memory, in the order in which they ran.
        group: a number that it shares with families that differ from it in precision only.
        wall: what a search for its largest batch found; None where there was none.
    """

    cases: tuple[Row, ...]
    probes: tuple[Row, ...]
    group: int
    wall: Wall | None = None

    @property
    def first(self) -> Row:
        """Any of its cases, for the settings that all share."""
        return self.cases[0]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Probes and cases alike."""
        return (*self.probes, *self.cases)

    @cached_property
    def ended(self) -> list[Row]:
        """The cases with a time that can be compared, by batch size."""
        return [row for row in self.cases if row.status in RELIABLE]


@dataclass(frozen=True)
class Search:
    """A search for the largest batch: where it ran, for which cases, and what it found."""

    sweep: str
    machine: str
    family: Case
    wall: Wall


def find_searches(records: pd.DataFrame, sweeps: Sequence[Sweep]) -> list[Search]:
    """The searches in records, each to the step and with the margin of its sweep.

    Args:
        records: of `summaries.read`: the probes, and the cases that may have retried.
    """
    if not records["probe"].any():
        return []
    asked = {sweep.name: sweep for sweep in sweeps}
    return [
        Search(str(sweep), str(machine), *found)
        for (sweep, machine), part in records.groupby(list(SOURCE), sort=False)
        for found in read_walls(part, asked[str(sweep)].step, asked[str(sweep)].margin)
    ]


def find_families(
    cases: pd.DataFrame, probes: pd.DataFrame, searches: Sequence[Search] = ()
) -> list[Family]:
    """Gather families, in the order of the overview; each precision at its main loss scale.

    Left out are families whose group has only one batch size, and those after the first
    `MOST_FAMILIES`.

    Args:
        cases: of `summaries.summarize`.
        probes: records of `summaries.read`.
        searches: of `find_searches`.
    """
    import pandas as pd

    if not len(cases):
        return []
    alike = [name for name in _EQUAL if name not in free_axes("precision")]
    cases = keep_main(cases, number_groups(cases, alike))
    memory = [name for name in _EQUAL if name not in APART]
    both = pd.concat([part[memory] for part in (cases, probes)], ignore_index=True)
    numbers = number_groups(both, memory).to_numpy()
    probed: dict[int, list[Row]] = {}
    for number, row in zip(numbers[len(cases) :], iterate(probes), strict=True):
        probed.setdefault(number, []).append(row)
    cases = cases.assign(
        _family=number_groups(cases, _EQUAL),
        _group=number_groups(cases, alike),
        _memory=numbers[: len(cases)],
    )
    cases = cases[cases.groupby("_group")["batch_size"].transform("nunique") > 1]
    first = cases["_family"].drop_duplicates()[:MOST_FAMILIES]
    cases = _keep_one(cases[cases["_family"].isin(first)], "batch_size")
    rows = list(iterate(cases))
    # of each family its places in the frame, upwards by batch size
    places = {number: list(part) for number, part in cases.groupby("_family").indices.items()}
    return [
        Family(
            tuple(rows[at] for at in places[number]),
            tuple(probed.get(cases["_memory"].iloc[places[number][0]], ())),
            int(cases["_group"].iloc[places[number][0]]),
            _find_wall(cases.iloc[places[number][:1]], searches) if searches else None,
        )
        for number in first
    ]


def _find_wall(case: pd.DataFrame, searches: Sequence[Search]) -> Wall | None:
    """The wall that was found for the family of the only row of ``case``."""
    (sweep,), (machine,) = (case[name] for name in SOURCE)
    mine = [search for search in searches if (search.sweep, search.machine) == (sweep, machine)]
    family = name_family(read_cases(case)[0]) if mine else None
    return next((search.wall for search in mine if search.family == family), None)


def _keep_one(cases: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Of cases that differ only in how they were measured, the one that measured most.

    Args:
        axis: what the cases of a ``_family`` differ in, by which they are sorted.
    """
    order = cases[["_family", axis, "part"]].assign(
        _lost=~cases["status"].isin(TIMED), _cut=cases["steps"] != ""
    )
    by = [axis, "_lost", "_cut", "part"]
    order = order.sort_values(by, ascending=[True, True, True, False], kind="stable")
    return cases.loc[order.drop_duplicates(["_family", axis]).index]


# ------------------------------------------------------------------------------------------ speed


@dataclass(frozen=True)
class Speed:
    """Images/s at a batch size, with the ends of their spread where it is known."""

    batch_size: int
    images_per_s: float
    low: float | None = None
    high: float | None = None

    @property
    def lowest(self) -> float:
        """The lower end of its spread, or itself."""
        return self.images_per_s if self.low is None else self.low

    @property
    def highest(self) -> float:
        """The upper end of its spread, or itself."""
        return self.images_per_s if self.high is None else self.high


class Shape(StrEnum):
    """How images/s go on with the batch size."""

    KNEE = "knee"
    RISING = "rising"
    BELOW = "below"


@dataclass(frozen=True)
class Knee:
    """Where larger batches stop being faster.

    Attributes:
        shape: whether there is a knee.
        batch_size: the smallest within `NEAR` of the best; if rising, the largest that ran.
        best: the batch size with the most images/s.
        ends: between which batch sizes it lies, as far as the spread of the runs tells; None where
            it is certain.
    """

    shape: Shape
    batch_size: int
    best: int
    ends: tuple[int, int] | None = None


def list_speeds(rows: Sequence[Row]) -> list[Speed]:
    """The speeds of rows of the frame of cases, upwards by batch size."""
    speeds = []
    for row in rows:
        if is_number(row.images_per_s):
            low, high = row.images_per_s_low, row.images_per_s_high
            ends = (low, high) if is_number(low) and is_number(high) else (None, None)
            speeds.append(Speed(int(row.batch_size), row.images_per_s, *ends))
    return sorted(speeds, key=lambda speed: speed.batch_size)


def find_knee(speeds: Sequence[Speed]) -> Knee | None:
    """Find the smallest batch within `NEAR` of the best images/s.

    There is none where images/s still rise: where the largest batch is the best, and better by
    more than `NEAR` than half of it. There is none either where the smallest batch that ran is
    within `NEAR`, by its median or by the spread of its repeats: then it may lie below.

    It is certain where no smaller batch's highest reaches within `NEAR` of the best's lowest, and
    its own lowest is within `NEAR` of the best's highest.

    Args:
        speeds: upwards by batch size.

    Returns:
        None where there are fewer than `LEAST_SIZES` batch sizes.
    """
    if len(speeds) < LEAST_SIZES:
        return None
    best = max(speeds, key=lambda speed: speed.images_per_s)
    enough = (1 - NEAR) * best.images_per_s
    first = next(speed for speed in speeds if speed.images_per_s >= enough)
    earliest = next(s for s in speeds if s.highest >= (1 - NEAR) * best.lowest)
    sure = (s for s in speeds if s.lowest >= (1 - NEAR) * best.highest)
    latest = max(first, next(sure, best), key=lambda speed: speed.batch_size)
    ends = None if earliest is latest else (earliest.batch_size, latest.batch_size)
    half = best.batch_size / 2
    if best is speeds[-1] and first.batch_size > half and _interpolate(speeds, half) < enough:
        return Knee(Shape.RISING, best.batch_size, best.batch_size, ends)
    shape = Shape.BELOW if earliest is speeds[0] else Shape.KNEE
    return Knee(shape, first.batch_size, best.batch_size, ends)


def _interpolate(speeds: Sequence[Speed], batch_size: float) -> float:
    """Images/s between the batch sizes that ran, linear in the logarithm of the batch size."""
    for a, b in pairwise(speeds):
        if a.batch_size <= batch_size <= b.batch_size:
            share = math.log(batch_size / a.batch_size) / math.log(b.batch_size / a.batch_size)
            return a.images_per_s + share * (b.images_per_s - a.images_per_s)
    return speeds[0].images_per_s  # all that ran lie within a factor of two


@dataclass(frozen=True)
class Cliff:
    """Two neighbouring batch sizes, of which the larger is slower by more than `DROP`."""

    before: Speed
    after: Speed

    @property
    def lost(self) -> float:
        """The share of images/s that is lost."""
        return 1 - self.after.images_per_s / self.before.images_per_s

    @property
    def misalignment(self) -> str:
        """What the batch size is a multiple of before it, and not after it; empty for neither."""
        before, after = self.before.batch_size, self.after.batch_size
        lost = next((of for of in (8, 64) if after % of and not before % of), 0)
        return f"{after} is no multiple of {lost}" if lost else ""


def write_drop(cliff: Cliff) -> str:
    """``23 % slower``, of images/s."""
    return f"{100 * cliff.lost:.0f} % slower"


def find_cliffs(speeds: Sequence[Speed]) -> list[Cliff]:
    """Find the cliffs that the spread of the runs does not explain.

    Args:
        speeds: upwards by batch size.
    """
    cliffs = [Cliff(a, b) for a, b in pairwise(speeds)]
    return [c for c in cliffs if c.lost > DROP and c.after.highest < c.before.lowest]


# ----------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Growth:
    """Memory of a family as a line over its batch sizes, and what it predicts.

    Attributes:
        miss: the largest deviation of a batch size from the line, or of the largest from the line
            through the others if that is more, as a share of its memory.
        sizes: the batch sizes that the line was fitted to, upwards.
        available: bytes up to the end of the card or the memory limit; None if unknown.
        largest: the largest multiple of `STEP` predicted to fit, at most `FARTHEST` times the
            largest that ran; None where `available` is, or nothing is predicted.
        more: whether larger ones may fit too, beyond what is predicted.
        predicted: batch sizes that did not run -> bytes: the next power of two, unless it is
            predicted not to fit, or was found not to.
        holds: whether what was found of the largest batch is within `ROUGH` of the prediction.
    """

    line: MemoryLine
    miss: float
    sizes: tuple[int, ...]
    available: float | None
    largest: int | None
    more: bool
    predicted: dict[int, float]
    holds: bool = True


def fit_growth(family: Family) -> Growth | None:
    """Fit memory over the batch size; None for fewer than `LEAST_SIZES`, or where it does not grow.

    A line that misses by more than `ROUGH` predicts nothing, nor does one that what was found of
    the largest batch contradicts.

    What made the allocator retry is left out: there memory is as large as it could be.
    """
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
    sizes, available, bounds = tuple(sorted(points)), find_available(family), find_bounds(family)
    top = sizes[-1]
    misses = [abs(line.predict(size) / bytes - 1) for size, bytes in points.items()]
    others = fit_line([point for point in points.items() if point[0] != top])
    misses.append(abs(others.predict(top) / points[top] - 1) if others else math.inf)
    growth = Growth(line, max(misses), sizes, available, None, False, {})
    if growth.miss > ROUGH:
        return growth
    if available is not None and _contradict(bounds, line, available):
        return replace(growth, holds=False)
    ends = math.inf if available is None else line.find_largest(available, STEP)
    power = 2 ** top.bit_length()
    fits = power <= ends and power < (bounds.fails or math.inf)
    more = ends > FARTHEST * top
    known = available is not None and not (more and bounds.fails)
    return replace(
        growth,
        largest=int(min(ends, FARTHEST * top)) if known else None,
        more=more,
        predicted={power: line.predict(power)} if fits else {},
    )


def _contradict(bounds: Bounds, line: MemoryLine, available: float) -> bool:
    """Whether a batch trained that should take more than there is, or one failed that should fit.

    Of the memory that they should take, `ROUGH` is allowed either way.
    """
    too_low = bounds.fails is not None and line.predict(bounds.fails) < (1 - ROUGH) * available
    too_high = bounds.fits is not None and line.predict(bounds.fits) > (1 + ROUGH) * available
    return too_low or too_high


def find_available(family: Family) -> float | None:
    """Bytes that a family's memory may come to, by the measure it is read in; None if unknown.

    That is its memory limit, or the card less what others had of it if that is less. Torch's
    allocator does not hold the CUDA context, which then is subtracted too, as far as it is known.
    """

    def middle(name: str) -> float:
        known = [float(v) for row in family.rows if is_number(v := getattr(row, name))]
        return median(known) if known else math.nan

    card, others = middle("gpu_memory_bytes"), middle("baseline_device_bytes")
    context = middle("context_bytes")
    ends = []
    if family.first.memory_limit:
        ends.append(float(parse_bytes(family.first.memory_limit)))
    if family.first.device == "cuda" and card > 0:
        ends.append(card - (others if others > 0 else 0))
    if not ends:
        return None
    measures = {row.memory_measure for row in family.rows}
    of_allocator = measures & {"peak_reserved_bytes", "peak_allocated_bytes"}
    return min(ends) - (context if of_allocator and context > 0 else 0)


@dataclass(frozen=True)
class Bounds:
    """Between which batch sizes memory ends, as far as a family shows.

    Attributes:
        fits: the largest batch that was trained; None for none.
        fails: the smallest above it that ran out of memory; None for none.
    """

    fits: int | None
    fails: int | None


def find_bounds(family: Family) -> Bounds:
    """The largest batch that was trained, and the smallest that was not; cases and probes alike."""
    fits = max((int(row.batch_size) for row in family.rows if row.status in TIMED), default=None)
    failed = (int(row.batch_size) for row in family.rows if row.status in REFUSED)
    return Bounds(fits, min((size for size in failed if size > (fits or 0)), default=None))


# ------------------------------------------------------------------------------ between precisions


@dataclass(frozen=True)
class Match:
    """A case beside another of another precision; at one batch size, or each at its largest."""

    before: Row
    after: Row

    @property
    def speed(self) -> float:
        """How many times as fast the second is; NaN where a time is unknown."""
        return divide(self.before.epoch_time_s, self.after.epoch_time_s)

    @property
    def memory(self) -> float:
        """Its memory over that of the first; NaN where one is unknown."""
        return divide(self.after.memory_bytes, self.before.memory_bytes)

    @property
    def loss(self) -> float:
        """Its training loss less that of the first, over the seeds that both ran; NaN for none.

        And where they are not of equal parts of an epoch, or of batches of two sizes and no whole
        one.
        """
        same = self.before.part == self.after.part
        early = self.before.part < 1 and self.before.batch_size != self.after.batch_size
        if not same or early or not (self.before.losses and self.after.losses):
            return math.nan
        sides = share_seeds([(0, 1)], {0: self.before.losses, 1: self.after.losses})
        before, after = (fmean(value for value, _ in side.values()) for (side,) in sides)
        return after - before


def divide(a: float, b: float) -> float:
    """A ratio of two numbers of cases; NaN where one is missing, or nothing can be divided by."""
    return a / b if is_number(a) and is_number(b) and b > 0 else math.nan


def list_rivals(families: Sequence[Family]) -> Iterator[tuple[Family, list[Family]]]:
    """Each group of families that differ in precision only: the baseline, and the others.

    The baseline is the first of `PRECISIONS` that ended anywhere: fp32, where it did.
    """
    groups: dict[int, list[Family]] = {}
    for family in families:
        if family.ended:
            groups.setdefault(family.group, []).append(family)
    for group in groups.values():
        # where the overview is ordered by batch size first, families come as they first ran
        ordered = sorted(group, key=lambda family: list(PRECISIONS).index(family.first.precision))
        sizes = {row.batch_size for family in group for row in family.ended}
        if len(ordered) > 1 and len(sizes) > 1:
            yield ordered[0], ordered[1:]


def match_sizes(base: Family, other: Family) -> list[Match]:
    """The pairs of two families at each batch size that both ran, upwards."""
    by_size = {row.batch_size: row for row in base.ended}
    return [Match(by_size[r.batch_size], r) for r in other.ended if r.batch_size in by_size]


def find_largest(family: Family) -> Row | None:
    """The case at the largest batch size that was measured and ended well."""
    fine = [row for row in family.ended if row.status == Status.OK.value]
    return fine[-1] if fine else None


def find_end(family: Family) -> Row | None:
    """The case of `find_largest`, where that is about the largest batch that fits.

    It is if memory is known to end there: by a search that ended, or by a batch of at most twice
    its size that ran out of memory. And if nothing much larger trained: it has `CLOSE` of the
    largest batch that did, or is the one that the search recommends.
    """
    row, bounds, wall = find_largest(family), find_bounds(family), family.wall
    if row is None or bounds.fits is None:
        return None
    size, searched = int(row.batch_size), wall is not None and wall.confirmed
    ends = searched or (bounds.fails is not None and bounds.fails <= 2 * size)
    recommended = wall.recommended if wall is not None and searched else None
    close = size >= CLOSE * bounds.fits or (recommended is not None and size >= recommended)
    return row if ends and close else None


@dataclass(frozen=True)
class Contest:
    """Families that differ in precision only, each with its case of `find_end`.

    Attributes:
        ends: those that have one, the baseline first; none where all are at one batch size, or
            only one has one.
        left: the others.
    """

    ends: tuple[tuple[Family, Row], ...]
    left: tuple[Family, ...]


def list_contests(families: Sequence[Family]) -> Iterator[Contest]:
    """The precisions that can be compared each at its own largest batch."""
    for base, others in list_rivals(families):
        found = [(family, find_end(family)) for family in (base, *others)]
        ends = tuple((family, row) for family, row in found if row is not None)
        left = tuple(family for family, row in found if row is None)
        several = len({row.batch_size for _, row in ends}) > 1
        yield Contest(ends if several else (), left)


# ----------------------------------------------------------------------------------- accumulation


def list_accumulated(cases: pd.DataFrame) -> Iterator[list[Row]]:
    """Cases that differ only in how many micro-batches make their batch, the fewest first.

    Where the plain batch did not fit, its row says so.
    """
    equal = [name for name in (*_EQUAL, "batch_size") if name != "accumulate"]
    numbers = number_groups(cases, equal)
    several = cases.groupby(numbers)["accumulate"].transform("nunique") > 1
    order = cases.assign(_family=numbers)[several]
    order = order.sort_values(["_family", "accumulate"], kind="stable")
    for _, part in order.groupby("_family", sort=False):
        yield list(iterate(_keep_one(part, "accumulate")))
