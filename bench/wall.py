"""The search for the largest batch that fits: the next batch size to try, given all probes so far,
what they come to, and the probes in the rows of a folder.

This module neither trains nor reads files, and keeps no state between calls: the next batch size
and the result follow from the probes alone, so that a search can be resumed from its records.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from operator import itemgetter
from statistics import linear_regression
from typing import Any

from bench.axis import Trait
from bench.case import AXES, Case, default_lr, list_affecting
from bench.errors import UsageError
from bench.record import MEASURED, REFUSED, Status
from bench.rules import check, check_batches
from bench.store.rows import Row, fill_unknown, group
from bench.text import Explained, parse_bytes

STEP = 8
"""Default resolution of the wall, in images: kernels prefer multiples of 8."""

MARGIN = 0.05
"""Share of memory that the recommended batch leaves free."""

ATTEMPTS = 3
"""Attempts at a batch size whose runs end without showing whether it fits."""

_DOUBTED = 0.95
"""An `oom` of a batch predicted to take less than this share of memory is checked by a second run,
as is every `oom_suspected`. Nearer to the wall, a second run costs more than it can gain."""

START = 32
"""Images of a first micro-batch."""

_FAR = 3.0
"""Largest factor by which a line is extrapolated beyond its last probe: from a third of the wall,
an error of 1 % in the readings moves the wall by up to 4 %."""

_REACH = 16
"""Largest factor of a probe over the largest batch that trained: if most of the memory does not
depend on the batch, two small batches hardly show the memory per image."""

_NEAR = 0.8
"""Ratio of batch sizes above which a line through them would follow their noise."""

_STRAIGHT = 0.005
"""Largest relative distance of readings from a line that they count as lying on."""

_FALL = 0.01
"""Share by which memory may be below that of a smaller batch without a doubt: readings of one batch
on a busy CPU differed by 0.3 %."""

_FOLLOWED = 12
"""Probes after which bisection replaces predictions, because memory is not linear, and doubling if
nothing was refused, as with a limit that is not enforced: small steps beyond the predicted wall
took 371 probes to the end of CIFAR-10."""


@dataclass(frozen=True)
class MemoryLine:
    """Memory as a linear function of the batch size: weights, optimizer state and context are
    fixed, activations grow with the batch."""

    fixed_bytes: float
    bytes_per_image: float

    def predict(self, batch_size: int) -> float:
        return self.fixed_bytes + self.bytes_per_image * batch_size

    def find_largest(self, available_bytes: float, step: int = 1) -> int:
        """Return the largest multiple of ``step`` predicted to fit; 0 if none is."""
        images = (available_bytes - self.fixed_bytes) / self.bytes_per_image
        return max(0, math.floor(images / step) * step)


def fit_line(points: Sequence[tuple[int, float]]) -> MemoryLine | None:
    """Fit a least-squares line through (batch size, bytes); None for fewer than two batch sizes, or
    if memory does not grow with them."""
    if len({size for size, _ in points}) < 2:
        return None
    slope, fixed = linear_regression(*zip(*points, strict=True))
    return MemoryLine(fixed, slope) if slope > 0 else None


@dataclass(frozen=True)
class Probe:
    """The result of a run of one batch size; memory in bytes, None if not known.

    ``setup_bytes`` is the memory of the process before its first step, ``room_bytes`` the memory
    that others left on the card, or that a limit allows. ``long`` is whether it was a longer run,
    ``crowded`` whether others used the GPU and may have held the memory that it lacked.
    """

    batch_size: int
    status: Status
    used_bytes: float | None = None
    alloc_retries: int | None = None
    long: bool = False
    setup_bytes: float | None = None
    room_bytes: float | None = None
    crowded: bool = False

    @property
    def trained(self) -> bool:
        """Whether it fitted, even if the loss diverged or a check failed."""
        return self.status in MEASURED

    @property
    def refused(self) -> bool:
        """Whether it ran out of memory that nobody else can have held."""
        return self.status in REFUSED and not self.crowded


@dataclass(frozen=True)
class Goal:
    """The range of a search: ``sizes`` to choose from, ascending, the ``available_bytes`` if known,
    and ``start``, approximately the first batch size to try."""

    sizes: Sequence[int]
    available_bytes: float | None = None
    start: int = START


@dataclass(frozen=True)
class Ask:
    """The batch size to try next, whether in a longer run, and why it is repeated, if it is."""

    batch_size: int
    long: bool = False
    again: str = field(default="", compare=False)


class Ending(Explained):
    FOUND = "found", "the largest batch that trains was confirmed by a longer run"
    NO_WALL = "no_wall", "every batch up to the whole dataset trains"
    NOTHING_FITS = "nothing_fits", "not even the smallest batch trains"
    UNSUPPORTED = "unsupported", "this device or build cannot run the case"
    GAVE_UP = (
        "gave_up",
        f"a run failed {ATTEMPTS} times, perhaps not from lack of memory; see its log, then "
        "go on with --retry error timeout killed oom_suspected",
    )
    CROWDED = (
        "crowded",
        f"a run failed {ATTEMPTS} times while others used the GPU; see python -m bench.doctor, "
        "then go on with --retry error oom oom_suspected, on a GPU without them or with "
        "--allow-shared",
    )


ANSWERED = frozenset({Ending.FOUND, Ending.NO_WALL, Ending.UNSUPPORTED})
"""Endings of a search that need no further runs."""


@cache
def list_sizes(
    case: Case, images: int, step: int = STEP, batchnorm: bool = True
) -> tuple[int, ...]:
    """Return the batch sizes, multiples of ``step``, that a valid ``case`` can train on ``images``
    images, ascending.

    Left out are sizes that cannot be divided into the case's number of micro-batches, and with
    ``batchnorm``, those that give a batch or micro-batch of one image.
    """

    def fits(size: int) -> bool:
        try:
            check(sized := replace(case, batch_size=size))
            check_batches(sized, images, batchnorm)
        except UsageError:
            return False
        return True

    first = -(-case.accumulate // step) * step
    return tuple(size for size in range(first, images + 1, step) if fits(size))


def fit_near(points: dict[int, float]) -> MemoryLine | None:
    """Fit a line to the memory near the largest of the batch sizes. If all points lie on one line,
    return it; else fit the largest size, those within a fifth of it, and the next one below."""
    whole = fit_line(list(points.items()))
    if whole and all(abs(whole.predict(n) / used - 1) <= _STRAIGHT for n, used in points.items()):
        return whole
    top = max(points, default=0)
    below = max((size for size in points if size <= _NEAR * top), default=0)
    near = [(size, used) for size, used in points.items() if size >= below]
    return fit_line(near) or whole


def take_points(probes: Sequence[Probe]) -> tuple[dict[int, float], dict[int, bool]]:
    """Return the memory of each batch size, where the allocator was not short of it; and for each
    size that trained once with less memory than a smaller one, whether that was a longer run.

    The reading of the larger of two sizes is considered wrong until it has trained twice; then that
    of the smaller one is.
    """
    runs: dict[int, list[Probe]] = {}
    for p in probes:
        if p.trained and p.used_bytes and not p.alloc_retries:
            runs.setdefault(p.batch_size, []).append(p)
    points: dict[int, float] = {}
    fallen: dict[int, bool] = {}
    for size, of in sorted(runs.items()):
        used = max(p.used_bytes or 0.0 for p in of)
        above = [n for n, other in points.items() if used < (1 - _FALL) * other]
        if above and len(of) == 1:
            fallen[size] = of[0].long
            continue
        points = {n: other for n, other in points.items() if n not in above} | {size: used}
    return points, fallen


def decide(probes: Sequence[Probe], goal: Goal) -> Ask | Ending:
    """Return the batch size to try next, or how the search ended.

    If memory is linear within a quarter of a step, a search takes at most 8 probes; 9 or 10 in one
    case of 2,000. For any memory, at most ``12 + 4 * ceil(log2(n + 1)) + 2`` probes train or run
    out of memory, where n is the number of `Goal.sizes`; each may take two more runs that do
    neither. If the first run of any batch may read too low, and train although the batch does not
    fit, the limit doubles; for linear memory with one such run it is 24.
    """
    if not goal.sizes:
        return Ending.NOTHING_FITS
    if any(probe.status is Status.UNSUPPORTED for probe in probes):
        return Ending.UNSUPPORTED
    asked = SearchState(probes, goal).ask()
    if isinstance(asked, Ending):
        return asked
    silent = [
        p for p in probes if Ask(p.batch_size, p.long) == asked and not (p.trained or p.refused)
    ]
    if len(silent) < ATTEMPTS:
        return asked
    return Ending.CROWDED if all(p.crowded for p in silent) else Ending.GAVE_UP


class SearchState:
    """The state of a search, derived from the probes so far.

    A batch whose longer run was refused does not train, even if a short run did. From then on only
    longer runs count. A batch that trained once with less memory than a smaller one does not count
    until it has trained again: whatever made it read less may have let it fit.
    """

    def __init__(self, probes: Sequence[Probe], goal: Goal) -> None:
        self._goal, self._sizes = goal, goal.sizes
        told = [p for p in probes if p.trained or p.refused]
        self.points, self._fallen = take_points(told)
        self.line = fit_near(self.points)  # memory near the wall
        self._told = [p for p in told if p.refused or p.batch_size not in self._fallen]
        # the last run of each batch and length counts: it was repeated because of a doubt
        last = {(p.batch_size, p.long): p.trained for p in self._told}
        self._long_trained = {size for (size, long), trained in last.items() if trained and long}
        self._trained = {size for (size, _), trained in last.items() if trained}
        long_refused = self._refusals(self._long_trained, long=True)
        short = max((p.batch_size for p in self._told if p.trained and not p.long), default=0)
        self._long_only = any(
            size <= short and self._believe((size, times)) for size, times in long_refused.items()
        )
        self._fitting = self._long_trained if self._long_only else self._trained
        self._refused = long_refused + self._refusals(self._fitting, long=False)
        self._doubted_long = set(long_refused)
        self.largest = max(self._fitting, default=None)  # that trains, as far as known
        self.confirmed = max(self._long_trained, default=None)  # trained in a longer run

    def _refusals(self, trained: set[int], long: bool) -> Counter[int]:
        """Count how often each batch above those that trained was refused; below, size was not the
        cause. Only runs of one length are considered: a short run that trains does not overrule a
        longer one."""
        top = max(trained, default=0)
        return Counter(
            p.batch_size for p in self._told if p.refused and p.long == long and p.batch_size > top
        )

    def _believe(self, refusals: tuple[int, int]) -> bool:
        size, times = refusals
        # a suspected lack of memory in a library is not certain, even near the wall
        certain = any(p.status is Status.OOM for p in self._told if p.batch_size == size)
        return times > 1 or (certain and self._predict_share(size) >= _DOUBTED)

    def _predict_share(self, size: int) -> float:
        """Return the share of memory that a batch is predicted to take; 0 if not known."""
        available = self._goal.available_bytes
        return self.line.predict(size) / available if self.line and available else 0.0

    @cached_property
    def smallest_refused(self) -> int | None:
        """The smallest batch above `largest` whose refusal is believed."""
        return min((n for n, *_ in filter(self._believe, self._refused.items())), default=None)

    def predict_wall(self) -> float | None:
        """Return the batch size, not rounded, at which the line reaches the available memory."""
        available = self._goal.available_bytes
        if self.line is None or available is None:
            return None
        return (available - self.line.fixed_bytes) / self.line.bytes_per_image

    def ask(self) -> Ask | Ending:
        refused = self.smallest_refused
        low = -1 if self.largest is None else self._at_most(self.largest)
        high = len(self._sizes) if refused is None else self._index(refused)
        # a refusal that is not believed matters only inside the bracket
        doubted = [n for n in self._refused if low < self._index(n) < high]
        if doubted:
            size = min(doubted)
            again = "it ran out of memory where it should have had enough"
            return Ask(size, size in self._doubted_long, again)
        fallen = [n for n in self._fallen if low < self._index(n) < high]
        if fallen:
            size = min(fallen)
            return Ask(size, self._fallen[size], "it took less memory than a smaller batch")
        if self._surprised(low):
            again = "larger ones ran out of memory where it leaves room for them"
            return Ask(self._sizes[low], self._sizes[low] in self._long_trained, again)
        if high - low > 1:
            index = min(max(self._choose(low, high), low + 1), high - 1)
            return Ask(self._sizes[index], self._long_only)
        if low < 0:
            # a case that only ever crashed may be broken
            if any(p.status is Status.OOM for p in self._told):
                return Ending.NOTHING_FITS
            tried = self._refused[self._sizes[0]]
            return Ask(self._sizes[0]) if tried < ATTEMPTS else Ending.GAVE_UP
        largest = self._sizes[low]
        if largest not in self._long_trained or self._count_trained(largest) < 2:
            return Ask(largest, long=True)
        return Ending.NO_WALL if high == len(self._sizes) else Ending.FOUND

    def _surprised(self, low: int) -> bool:
        """Return whether the largest batch that trained probably read too low, in its only run."""
        fitting = [n for n in self._refused if 0 < self._predict_share(n) <= 1]
        return low >= 0 and len(fitting) > 1 and self._count_trained(self._sizes[low]) == 1

    def _count_trained(self, size: int) -> int:
        return sum(p.trained for p in self._told if p.batch_size == size)

    def _index(self, size: int) -> int:
        return bisect_left(self._sizes, size)

    def _at_most(self, size: float) -> int:
        return bisect_right(self._sizes, size) - 1

    def _choose(self, low: int, high: int) -> int:
        """Return the index to try between two; the caller clamps it to lie between them."""
        middle, open_above = (low + high) // 2, high == len(self._sizes)
        if not self._told:
            return min(self._index(self._goal.start), high - 1)
        if len(self._told) >= _FOLLOWED and not open_above:
            return middle
        if self._long_only:
            return max(high - (1 << len(self._refused) - 1), middle)
        if low < 0:
            return middle
        top = self._sizes[low]
        if len(self._told) >= _FOLLOWED:
            return self._at_most(2 * top)
        if len(self._trained) == 1:
            return self._choose_second(top) if open_above else min(self._at_most(2 * top), middle)
        wall = self.predict_wall()
        if wall is None:
            return self._at_most(2 * top) if open_above else middle
        within = min(wall, self._sizes[-1])
        at = self._at_most(wall)
        if open_above and top * _FAR < within:
            return self._at_most(min(within / 2, _REACH * top))
        if not open_above and self._predict_share(self._sizes[high]) < _DOUBTED:
            # memory is not linear: a batch well below the predicted wall was refused
            return self._at_most(math.sqrt(top * self._sizes[high]))
        if at >= high:
            beyond = sum(self._index(size) <= at for size in self._refused)
            return max(high - (1 << beyond - 1), middle)
        # several trained this close together: the prediction is too low, so take larger steps
        beyond = sum(size > _DOUBTED * top for size in self._trained)
        ahead = max(at, low + (1 << max(beyond - 2, 0)))
        return ahead if open_above else min(ahead, max(at, middle))

    def _choose_second(self, first: int) -> int:
        """Return the index half way to a wall extrapolated from set-up and the first batch. The
        first step also allocates gradients and optimizer state, so the true wall is higher."""
        probe = next(p for p in self._told if p.trained)
        available, setup, used = self._goal.available_bytes, probe.setup_bytes, probe.used_bytes
        if not (available and setup and used and used > setup):
            return self._at_most(2 * first)
        wall = (available - setup) / (used - setup) * first
        return self._at_most(min(max((first + wall) / 2, 1.5 * first), _REACH * first))


# ------------------------------------------------------------------------------------------- answer


@dataclass(frozen=True)
class Wall:
    """The result for cases that differ only in the batch size; memory in bytes, margin as a share.

    ``largest`` is the largest batch size that trained, ``smallest_failing`` the smallest above it
    that did not; sizes between the two are not known. From ``thrashes_from``, a batch trains only
    by freeing the allocator's cache, in a probe or in a whole epoch. ``recommended`` is predicted
    to leave ``margin`` of the memory free; it is at most the size that a longer run confirmed, and
    below ``thrashes_from``. ``predicted`` is the first prediction of the wall, ``line`` the memory
    of batches near it. ``probes`` counts runs, including failed ones; ``ending`` is None while the
    search has not ended.
    """

    largest: int | None
    smallest_failing: int | None
    thrashes_from: int | None
    recommended: int | None
    predicted: int | None
    line: MemoryLine | None
    available_bytes: float | None
    margin: float
    probes: int
    ending: Ending | None

    @property
    def confirmed(self) -> bool:
        """Whether the search ended with a longer run that confirmed the largest batch."""
        return self.ending in (Ending.FOUND, Ending.NO_WALL)

    @property
    def off(self) -> int | None:
        """Images by which the first prediction exceeded the largest batch that trains; None if no
        wall was found."""
        if self.predicted is None or self.largest is None or self.smallest_failing is None:
            return None
        return self.predicted - self.largest


def conclude(
    probes: Sequence[Probe], goal: Goal, margin: float = MARGIN, retried: Collection[int] = ()
) -> Wall:
    """Derive the wall from the probes, in the order they were made. ``retried`` are batch sizes at
    which the allocator retried in whole epochs."""
    standing = SearchState(probes, goal)
    asked = decide(probes, goal)
    of_probes = (p.batch_size for p in probes if p.trained and p.alloc_retries)
    thrashes_from = min([*of_probes, *retried], default=None)
    return Wall(
        largest=standing.largest,
        smallest_failing=standing.smallest_refused,
        thrashes_from=thrashes_from,
        recommended=_recommend(standing, goal, margin, thrashes_from),
        predicted=_predict_first(probes, goal),
        line=standing.line,
        available_bytes=goal.available_bytes,
        margin=margin,
        probes=len(probes),
        ending=asked if isinstance(asked, Ending) else None,
    )


def _recommend(
    standing: SearchState, goal: Goal, margin: float, thrashes_from: int | None
) -> int | None:
    confirmed, available = standing.confirmed, goal.available_bytes
    if confirmed is None:
        return None

    def leaves_margin(size: int) -> bool:
        if available is None or not standing.points:
            return size <= (1 - margin) * confirmed
        used = standing.line.predict(size) if standing.line else standing.points.get(size)
        return used is not None and used <= (1 - margin) * available

    sizes = (n for n in goal.sizes if n <= confirmed and n < (thrashes_from or n + 1))
    return max(filter(leaves_margin, sizes), default=None)


def _predict_first(probes: Sequence[Probe], goal: Goal) -> int | None:
    """Return the first prediction of the wall: as soon as two batch sizes had trained."""
    for count in range(2, len(probes) + 1):
        wall = SearchState(probes[:count], goal).predict_wall()
        if wall is not None:
            return max((size for size in goal.sizes if size <= wall), default=0)
    return None


# ------------------------------------------------------------------------------------------ records


SHORT_STEPS, LONG_STEPS = 4, 16
"""Steps of a probe after its warm-up, and of the longer run that confirms the result. An allocator
reaches its peak within the warm-up; only a sweep shows growth after more than 16 steps."""

_LESS = 0.05
"""Share of a card's memory by which the memory left by others may differ between probes."""

APART = tuple(name for name in AXES if name not in list_affecting(Trait.FIT))
"""Axes that do not change which batches fit: all families have their defaults."""


def name_family(case: Case) -> Case:
    """Return the key of all cases that are searched together: ``case`` without the axes that do not
    matter, with the optimizer's default learning rate. Its batch size is a placeholder."""
    plain = {name: getattr(Case, name) for name in APART}
    plain |= {"lr": default_lr(case.optimizer), "batch_size": Case.batch_size * case.accumulate}
    return replace(case, **plain)


def make_probe(family: Case, batch_size: int, long: bool) -> Case:
    steps = LONG_STEPS if long else SHORT_STEPS
    return replace(family, batch_size=batch_size, steps=steps)


@dataclass
class Trial:
    """The probes of a family so far, in order, and what their rows say about the machine.

    ``train_images`` is None if no row has it. ``retried`` are the batch sizes of cases (not probes)
    that made the allocator retry. ``spilled`` is whether a driver moved to the host what the card
    had no room for, as on Windows and in WSL: such a batch does not fit. ``batchnorm`` is whether
    the network may have BatchNorm; None if it must be inferred from the rows.
    """

    family: Case
    rows: list[Probe] = field(default_factory=list)
    train_images: int | None = None
    retried: set[int] = field(default_factory=set)
    spilled: bool = False
    batchnorm: bool | None = None

    def add(self, row: Row) -> None:
        """Add a row of the records; a row that was cut off is ignored."""
        if images := row.number("train_images"):
            self.train_images = int(images)
        if row.status in (Status.INTERRUPTED, Status.LOST):
            return
        # a peak that was clipped in warm-up would not be on the line either
        counts = [row.number(name) for name in ("warmup_alloc_retries", "alloc_retries")]
        retries = [int(count) for count in counts if count is not None]
        status = row.status
        limit, card = self.family.memory_limit, row.number("gpu_memory_bytes")
        left = card - (row.number("baseline_device_bytes") or 0) if card else None
        # an allocator that is short of memory frees its cache, and the context grows after that, by
        # some 150 MB on an H100: the two peaks are not simultaneous
        held = _peak(row, "reserved") if sum(retries) else _read_reserved(row)
        if status in MEASURED and not limit and held and left and held > left:
            status, self.spilled = Status.OOM, True
        known = [*([parse_bytes(limit)] if limit else []), *([left] if left else [])]
        self.rows.append(
            Probe(
                batch_size=row.batch_size,
                status=status,
                used_bytes=read_peak(row),
                alloc_retries=sum(retries) if retries else None,
                long=(row.number("steps") or math.inf) > SHORT_STEPS,
                setup_bytes=row.number("setup_process_bytes"),
                room_bytes=min(known, default=None),
                # without --allow-shared, such a lack of memory is an error
                crowded=status is Status.ERROR and bool(row.number("neighbours_computing")),
            )
        )

    @property
    def probes(self) -> list[Probe]:
        """The probes; a refused one with clearly less memory left than others had is crowded."""
        most = max((p.room_bytes for p in self.rows if p.room_bytes), default=0.0)
        return [
            replace(p, crowded=True)
            if p.refused and p.room_bytes and p.room_bytes < (1 - _LESS) * most
            else p
            for p in self.rows
        ]

    @property
    def rooms(self) -> list[float]:
        """The memory available to each probe that trained or ran out of memory, if known."""
        return [p.room_bytes for p in self.probes if p.room_bytes and (p.trained or p.refused)]

    @property
    def available_bytes(self) -> float | None:
        """The least memory that was available to any of these probes (`rooms`)."""
        return min(self.rooms, default=None)

    def describe_others(self) -> str:
        """Describe how the memory left by others on the card changed; empty if it did not."""
        low, high = min(self.rooms, default=0.0), max(self.rooms, default=0.0)
        if low >= (1 - _LESS) * high:
            return ""
        return (
            f"others on the GPU left between {low / 2**30:.1f} and {high / 2**30:.1f} GiB during "
            f"the search; what is recommended fits in {low / 2**30:.1f} GiB"
        )

    def aim(self, images: int, step: int) -> Goal:
        batchnorm = self.batchnorm
        if batchnorm is None:
            # only a network without BatchNorm was tried at sizes that BatchNorm cannot train
            every, usual = (list_sizes(self.family, images, step, b) for b in (False, True))
            batchnorm = not {p.batch_size for p in self.rows} & (set(every) - set(usual))
        sizes = list_sizes(self.family, images, step, batchnorm)
        return Goal(sizes, self.available_bytes, START * self.family.accumulate)


def read_peak(row: Row) -> float | None:
    """Return the peak memory that counts against the available memory. With a memory limit, it is
    what torch's allocator reserves, plus the context. Otherwise it is the process's memory, else
    the device's over its baseline, else the same as with a limit."""
    readings = [_peak(row, "process"), _peak(row, "device")]
    readings.insert(0 if row.memory_limit else 2, _read_reserved(row))
    return next((reading for reading in readings if reading is not None), None)


def _read_reserved(row: Row) -> float | None:
    """Return the peak of torch's allocator plus the context: all of a process's GPU memory."""
    reserved, context = _peak(row, "reserved"), row.number("context_bytes")
    return None if reserved is None or context is None else reserved + context


def _peak(row: Row, owner: str) -> float | None:
    peaks = (row.number(f"{phase}_{owner}_bytes") for phase in ("warmup", "peak"))
    return max((peak for peak in peaks if peak is not None), default=None)


def read_trials(rows: Iterable[Row]) -> list[Trial]:
    """Return the searches in the rows of a folder, in order. Each environment, as with ``--mix``,
    has its own search."""
    rows = [*rows]
    probes = [(name_family(row.case), row) for row in rows if row.probe]
    trials: dict[Any, Trial] = {}
    for alike in group(probes, itemgetter(0)):
        for (family, row), environment in zip(
            alike, fill_unknown([row for _, row in alike]), strict=True
        ):
            trials.setdefault((family, environment), Trial(family)).add(row)
    for row in rows if trials else ():
        if not row.probe and row.status in MEASURED and (row.number("alloc_retries") or 0) > 0:
            for trial in trials.values():
                if trial.family == name_family(row.case):
                    trial.retried.add(row.case.batch_size)
    return [*trials.values()]


def read_goal(told: Any) -> tuple[int | None, float]:
    """Read the step and the margin of a folder's last search from ``search`` in its configuration;
    None and `MARGIN` by default."""
    told = told if isinstance(told, dict) else {}
    step, margin = told.get("step"), told.get("margin")
    return (
        step if isinstance(step, int) and step > 0 else None,
        margin if isinstance(margin, float) and 0 <= margin < 1 else MARGIN,
    )


def read_walls(
    rows: Iterable[Row], step: int | None = None, margin: float = MARGIN
) -> list[tuple[Case, Wall]]:
    """Return the family (`name_family`) and the wall of each search in the rows of a
    folder. ``step`` is the resolution in images, by default the greatest
    common divisor of the tried batch sizes; the recommended batch leaves ``margin`` free."""
    found = []
    for trial in read_trials(rows):
        common = reduce(math.gcd, (probe.batch_size for probe in trial.probes), 0) or STEP
        found.append((trial.family, conclude_trial(trial, step or common, margin)))
    return found


def conclude_trial(trial: Trial, step: int, margin: float = MARGIN) -> Wall:
    largest = max((probe.batch_size for probe in trial.probes), default=step)
    goal = trial.aim(trial.train_images or largest, step)
    return conclude(trial.probes, goal, margin, trial.retried)
