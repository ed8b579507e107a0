"""How speed and memory go with the batch size: knees, cliffs, memory as a line, the largest batch.

All of it is of a family: cases that differ in nothing but their batch size. Probes of the largest
batch are no measurements of speed, but tell of memory as much as cases do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

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


class Bounds(NamedTuple):
    """Between which batch sizes memory ends: the largest that was trained, None for none, and the
    smallest above it that ran out of memory, None for none."""

    fits: int | None
    fails: int | None


def find_bounds(rows: Sequence[Row]) -> Bounds:
    """What cases and probes show of where memory ends."""
    fits = max((int(row.batch_size) for row in rows if row.status in TIMED), default=None)
    failed = (int(row.batch_size) for row in rows if row.status in REFUSED)
    return Bounds(fits, min((size for size in failed if size > (fits or 0)), default=None))


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

    @cached_property
    def ended(self) -> list[Row]:
        """The cases with a time that can be compared, by batch size."""
        return [row for row in self.cases if row.status in RELIABLE]

    @cached_property
    def bounds(self) -> Bounds:
        """Where its memory ends, by cases and probes alike."""
        return find_bounds((*self.probes, *self.cases))

    @property
    def largest(self) -> Row | None:
        """The case at the largest batch size that was measured and ended well."""
        return next((row for row in self.ended[::-1] if row.status == Status.OK.value), None)

    @property
    def end(self) -> Row | None:
        """`largest`, where that is about the largest batch that fits.

        It is if memory is known to end there: by a search that ended, or by a batch of at most
        twice its size that ran out of memory. And if nothing much larger trained: it has `CLOSE` of
        the largest batch that did, or is the one that the search recommends.
        """
        row, (fits, fails) = self.largest, self.bounds
        if row is None or fits is None:
            return None
        searched = self.wall if self.wall is not None and self.wall.confirmed else None
        ends = searched or (fails is not None and fails <= 2 * row.batch_size)
        recommended = searched.recommended if searched else None
        least = CLOSE * fits if recommended is None else min(CLOSE * fits, recommended)
        return row if ends and row.batch_size >= least else None


class Search(NamedTuple):
    """A search for the largest batch: where it ran, for which cases, and what it found."""

    sweep: str
    machine: str
    family: Case
    wall: Wall


def find_searches(records: pd.DataFrame, sweeps: Sequence[Sweep]) -> list[Search]:
    """The searches in records of `summaries.read`, probes and the cases that may have retried, each
    to the step and with the margin of its sweep."""
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
            tuple(probed.get(rows[places[number][0]]._memory, ())),
            int(rows[places[number][0]]._group),
            _find_wall(cases.iloc[places[number][:1]], searches) if searches else None,
        )
        for number in first
    ]


def _find_wall(case: pd.DataFrame, searches: Sequence[Search]) -> Wall | None:
    """The wall that was found for the family of the only row of ``case``."""
    source = tuple(case[name].iloc[0] for name in SOURCE)
    mine = [search for search in searches if (search.sweep, search.machine) == source]
    family = name_family(read_cases(case)[0]) if mine else None
    return next((search.wall for search in mine if search.family == family), None)


def _keep_one(cases: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Of cases that differ only in how they were measured, the one that measured most; sorted by
    ``axis``, in which the cases of a ``_family`` differ."""
    order = cases[["_family", axis, "part"]].assign(
        _lost=~cases["status"].isin(TIMED), _cut=cases["steps"] != ""
    )
    by = [axis, "_lost", "_cut", "part"]
    order = order.sort_values(by, ascending=[True, True, True, False], kind="stable")
    return cases.loc[order.drop_duplicates(["_family", axis]).index]


# ------------------------------------------------------------------------------------------ speed


@dataclass(frozen=True)
class Speed:
    """Images/s at a batch size, and the ends of their spread; where there is none, themselves."""

    batch_size: int
    images_per_s: float
    low: float
    high: float


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

    @property
    def certain(self) -> bool:
        return self.shape is Shape.KNEE and self.ends is None


def list_speeds(rows: Sequence[Row]) -> list[Speed]:
    """The speeds of rows of the frame of cases, upwards by batch size."""
    speeds = []
    for row in rows:
        if is_number(row.images_per_s):
            low, high = row.images_per_s_low, row.images_per_s_high
            ends = (low, high) if is_number(low) and is_number(high) else 2 * (row.images_per_s,)
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
    earliest = next(speed for speed in speeds if speed.high >= (1 - NEAR) * best.low)
    sure = (speed for speed in speeds if speed.low >= (1 - NEAR) * best.high)
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
    def sizes(self) -> tuple[int, int]:
        return self.before.batch_size, self.after.batch_size

    @property
    def misalignment(self) -> str:
        """What the batch size is a multiple of before it, and not after it; empty for neither."""
        before, after = self.sizes
        lost = next((of for of in (8, 64) if after % of and not before % of), 0)
        return f"{after} is no multiple of {lost}" if lost else ""


def write_drop(cliff: Cliff) -> str:
    """``23 % slower``, of images/s."""
    return f"{100 * cliff.lost:.0f} % slower"


def find_cliffs(speeds: Sequence[Speed]) -> list[Cliff]:
    """The cliffs that the spread of the runs does not explain, of speeds upwards by batch size."""
    cliffs = [Cliff(a, b) for a, b in pairwise(speeds)]
    return [c for c in cliffs if c.lost > DROP and c.after.high < c.before.low]


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
    largest: int | None = None
    more: bool = False
    predicted: dict[int, float] = field(default_factory=dict)
    holds: bool = True


def fit_growth(family: Family) -> Growth | None:
    """Fit memory over the batch size; None for fewer than `LEAST_SIZES`, or where it does not grow.

    A line that misses by more than `ROUGH` predicts nothing, nor does one that what was found of
    the largest batch contradicts: a batch trained that should take more than there is, or one
    failed that should fit, by more than `ROUGH` of the memory that it should take.

    What made the allocator retry is left out: there memory is as large as it could be.
    """
    points = {
        int(row.batch_size): float(row.memory_bytes)
        for row in (*family.probes, *family.cases)
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
    power = 2 ** top.bit_length()
    more = ends > FARTHEST * top
    known = available is not None and not (more and fails)
    return replace(
        growth,
        largest=int(min(ends, FARTHEST * top)) if known else None,
        more=more,
        predicted={power: line.predict(power)}
        if power <= ends and power < (fails or math.inf)
        else {},
    )


def _find_available(family: Family) -> float | None:
    """Bytes that a family's memory may come to, by the measure it is read in; None if unknown.

    That is its memory limit, or the card less what others had of it if that is less. Torch's
    allocator does not hold the CUDA context, which then is subtracted too, as far as it is known.
    """
    rows = (*family.probes, *family.cases)

    def middle(name: str) -> float:
        known = [float(v) for row in rows if is_number(v := getattr(row, name))]
        return median(known) if known else 0.0

    card, ends = middle("gpu_memory_bytes"), []
    if family.first.memory_limit:
        ends.append(float(parse_bytes(family.first.memory_limit)))
    if family.first.device == "cuda" and card > 0:
        ends.append(card - max(middle("baseline_device_bytes"), 0))
    if not ends:
        return None
    of_allocator = {"peak_reserved_bytes", "peak_allocated_bytes"}
    context = any(row.memory_measure in of_allocator for row in rows)
    return min(ends) - (max(middle("context_bytes"), 0) if context else 0)


# ------------------------------------------------------------------------------ between precisions


class Match(NamedTuple):
    """A case beside another of another precision; at one batch size, or each at its largest."""

    before: Row
    after: Row

    @property
    def speed(self) -> float:
        """How many times as fast the second is; NaN where a time is unknown."""
        return divide(self.before.epoch_time_s, self.after.epoch_time_s)

    @property
    def memory(self) -> float:
        """By how much its memory is more, as a share of the first's; NaN where one is unknown."""
        return divide(self.after.memory_bytes, self.before.memory_bytes) - 1

    @property
    def loss(self) -> float:
        """Its training loss less that of the first, over the seeds that both ran; NaN for none.

        And where they are not of equal parts of an epoch, or of batches of two sizes and no whole
        one.
        """
        before, after = self
        early = before.part < 1 and before.batch_size != after.batch_size
        if before.part != after.part or early or not (before.losses and after.losses):
            return math.nan
        sides = share_seeds([(0, 1)], {0: before.losses, 1: after.losses})
        ours, theirs = (fmean(value for value, _ in side.values()) for (side,) in sides)
        return theirs - ours


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
        base, *others = sorted(group, key=lambda one: list(PRECISIONS).index(one.first.precision))
        if others and len({row.batch_size for family in group for row in family.ended}) > 1:
            yield base, others


class Contest(NamedTuple):
    """Families that differ in precision only, each at its own largest batch.

    Attributes:
        ends: those that have a `Family.end`, with it, the baseline first; none where all are at one
            batch size, or only one has one.
        left: the others.
    """

    ends: list[tuple[Family, Row]]
    left: list[Family]


def list_contests(families: Sequence[Family]) -> Iterator[Contest]:
    """The precisions that can be compared each at its own largest batch."""
    for base, others in list_rivals(families):
        ends = [(family, row) for family in (base, *others) if (row := family.end) is not None]
        left = [family for family in (base, *others) if family.end is None]
        yield Contest(ends if len({row.batch_size for _, row in ends}) > 1 else [], left)


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
