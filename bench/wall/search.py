"""The search for the largest batch that fits: which batch size to try next, given what came so far.

Nothing here trains or reads a file, and nothing is remembered between calls: the next question and
the answer follow from the probes alone, so that a search goes on wherever its records end.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import linear_regression

from bench.case import Case
from bench.errors import UsageError
from bench.grid import check_batches, check_division
from bench.record import MEASURED, REFUSED, Status
from bench.text import Explained

STEP = 8
"""Images to which the wall is found. Kernels prefer multiples of 8, so nobody asks for less."""

MARGIN = 0.05
"""Share of memory that the recommended batch leaves free."""

ATTEMPTS = 3
"""How often a batch size is tried whose runs end without saying anything about memory."""

_DOUBTED = 0.95
"""An `oom` at a batch predicted to take less than this share of memory is run once more before it
is believed, and so is every `oom_suspected`. Closer to the wall a second run would cost more than
it could move."""

START = 32
"""Images of a first micro-batch."""

_FAR = 3.0
"""By how many times a line may be continued beyond its last probe: from a third of the wall,
readings that are wrong by 1 % put the wall wrong by up to 4 %."""

_REACH = 16
"""By how many times a probe may exceed the largest batch that trained: where most of the memory
does not depend on the batch, two small batches may say anything of what each image takes."""

_NEAR = 0.8
"""A line through batches closer to each other than this would follow their noise."""

_STRAIGHT = 0.005
"""By how much readings may miss a line that they are said to lie on."""

_FALL = 0.01
"""By how much memory may read lower than that of a smaller batch without being doubted: readings of
one batch on a busy CPU differed by 0.3 %."""

_FOLLOWED = 12
"""Probes after which halving takes over from predictions, where memory is no line at all, and
doubling where nothing was refused, as where a limit is not kept: small steps beyond the predicted
wall took 371 probes to the end of CIFAR-10."""


@dataclass(frozen=True)
class MemoryLine:
    """Memory over the batch size: weights, optimizer state and context do not depend on the batch,
    activations do."""

    fixed_bytes: float
    bytes_per_image: float

    def predict(self, batch_size: int) -> float:
        return self.fixed_bytes + self.bytes_per_image * batch_size

    def find_largest(self, available_bytes: float, step: int = 1) -> int:
        """The largest multiple of ``step`` predicted to fit; 0 where none does."""
        images = (available_bytes - self.fixed_bytes) / self.bytes_per_image
        return max(0, math.floor(images / step) * step)


def fit_line(points: Sequence[tuple[int, float]]) -> MemoryLine | None:
    """Fit the least-squares line through (batch size, bytes); None where there are fewer than two
    batch sizes, or memory does not grow with them."""
    if len({size for size, _ in points}) < 2:
        return None
    slope, fixed = linear_regression(*zip(*points, strict=True))
    return MemoryLine(fixed, slope) if slope > 0 else None


@dataclass(frozen=True)
class Probe:
    """What came of one batch size; memory in bytes, None where it is not known.

    ``setup_bytes`` is what the process held before its first step, ``room_bytes`` what others had
    left on the card or a limit allows; ``long`` says that it was a longer run; ``crowded`` that
    others used the GPU, and may have had the memory that it lacked.
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
        """Whether it fitted. What its loss or its clocks did is another matter."""
        return self.status in MEASURED

    @property
    def refused(self) -> bool:
        """Whether it ran out of memory, and nobody else can have had it."""
        return self.status in REFUSED and not self.crowded


@dataclass(frozen=True)
class Goal:
    """What is searched: ``sizes`` that may be tried, upwards, in ``available_bytes`` if known;
    ``start`` is about the first batch size to try."""

    sizes: Sequence[int]
    available_bytes: float | None = None
    start: int = START


@dataclass(frozen=True)
class Ask:
    """The batch size to try next, whether in a longer run, and why again, if it is."""

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
        f"a run failed {ATTEMPTS} times, and not for certain for want of memory; see its log, then "
        "go on with --retry error timeout killed oom_suspected",
    )
    CROWDED = (
        "crowded",
        f"a run failed {ATTEMPTS} times while others used the GPU; see python -m bench.doctor, "
        "then go on with --retry error oom oom_suspected, on a GPU without them or with "
        "--allow-shared",
    )


ANSWERED = frozenset({Ending.FOUND, Ending.NO_WALL, Ending.UNSUPPORTED})
"""Endings of a search after which nothing is left to find out."""


@cache
def list_sizes(
    case: Case, images: int, step: int = STEP, batchnorm: bool = True
) -> tuple[int, ...]:
    """The multiples of ``step`` that ``case``, of settings that go together, can train on so many
    images, upwards.

    Left out are those that so many micro-batches of one size do not make, and where there may be
    ``batchnorm``, those with a batch or micro-batch of one image.
    """

    def fits(size: int) -> bool:
        try:
            check_division(sized := replace(case, batch_size=size))
            check_batches(sized, images, batchnorm)
        except UsageError:
            return False
        return True

    first = -(-case.accumulate // step) * step
    return tuple(size for size in range(first, images + 1, step) if fits(size))


def fit_near(points: dict[int, float]) -> MemoryLine | None:
    """Fit the line that memory follows near the largest of the batch sizes: that of all of them
    where they lie on one. Else it goes through the largest, those within a fifth of it, and the
    nearest below these."""
    whole = fit_line(list(points.items()))
    if whole and all(abs(whole.predict(n) / used - 1) <= _STRAIGHT for n, used in points.items()):
        return whole
    top = max(points, default=0)
    below = max((size for size in points if size <= _NEAR * top), default=0)
    near = [(size, used) for size, used in points.items() if size >= below]
    return fit_line(near) or whole


def take_points(probes: Sequence[Probe]) -> tuple[dict[int, float], dict[int, bool]]:
    """The memory that batch sizes took, where the allocator was not short of them; and by each
    batch size that trained once and fell below a smaller one, whether that was a longer run.

    The larger of two has taken less by mistake, until it has trained twice; then the smaller has
    taken more by mistake.
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
    """Say which batch size to try next, or how the search ended.

    Memory that is a line within a quarter of a step takes at most 8 probes, 9 or 10 in one case of
    2,000. Whatever it does, no more than ``12 + 4 * ceil(log2(n + 1)) + 2`` probes are made that
    say something of memory, n being the number of `Goal.sizes`, and each at most twice more for
    runs that say nothing. Where the first run of any batch may read too little, and train by that
    where it does not fit, it is twice as many; of a line of which one run does, 24.
    """
    if not goal.sizes:
        return Ending.NOTHING_FITS
    if any(probe.status is Status.UNSUPPORTED for probe in probes):
        return Ending.UNSUPPORTED
    asked = Standing(probes, goal).ask()
    if isinstance(asked, Ending):
        return asked
    silent = [
        p for p in probes if Ask(p.batch_size, p.long) == asked and not (p.trained or p.refused)
    ]
    if len(silent) < ATTEMPTS:
        return asked
    return Ending.CROWDED if all(p.crowded for p in silent) else Ending.GAVE_UP


class Standing:
    """What the probes so far have shown.

    A batch of which a longer run was refused does not train, even if a short one did. From then on
    only longer runs count. A batch that trained once, with less memory than a smaller one, does not
    count until it has trained again: what made it read less may have let it fit.
    """

    def __init__(self, probes: Sequence[Probe], goal: Goal) -> None:
        self._goal, self._sizes = goal, goal.sizes
        told = [p for p in probes if p.trained or p.refused]
        self.points, self._fallen = take_points(told)
        self.line = fit_near(self.points)  # that memory follows near the wall
        self._told = [p for p in told if p.refused or p.batch_size not in self._fallen]
        # the last run of a batch and a length counts: where it was run again, it had been doubted
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
        self.largest = max(self._fitting, default=None)  # that trains, as far as is known
        self.confirmed = max(self._long_trained, default=None)  # that a longer run trained

    def _refusals(self, trained: set[int], long: bool) -> Counter[int]:
        """How often each batch was refused; one below a batch that trained was no matter of size.
        Only runs of one length speak of each other: a short run that trains does not overrule a
        longer one."""
        top = max(trained, default=0)
        return Counter(
            p.batch_size for p in self._told if p.refused and p.long == long and p.batch_size > top
        )

    def _believe(self, refusals: tuple[int, int]) -> bool:
        size, times = refusals
        # where a library failed for want of memory, as it seemed, nothing near the wall is certain
        certain = any(p.status is Status.OOM for p in self._told if p.batch_size == size)
        return times > 1 or (certain and self._predict_share(size) >= _DOUBTED)

    def _predict_share(self, size: int) -> float:
        """The part of memory that a batch should take; 0 where nothing is known of it."""
        available = self._goal.available_bytes
        return self.line.predict(size) / available if self.line and available else 0.0

    @cached_property
    def smallest_refused(self) -> int | None:
        """The smallest batch above `largest` that does not train, and is believed."""
        return min((n for n, *_ in filter(self._believe, self._refused.items())), default=None)

    def predict_wall(self) -> float | None:
        """The batch size at which the line meets the memory there is, as a fraction of images."""
        available = self._goal.available_bytes
        if self.line is None or available is None:
            return None
        return (available - self.line.fixed_bytes) / self.line.bytes_per_image

    def ask(self) -> Ask | Ending:
        refused = self.smallest_refused
        low = -1 if self.largest is None else self._at_most(self.largest)
        high = len(self._sizes) if refused is None else self._index(refused)
        # a refusal that is not believed matters while it lies in the bracket
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
            # what only ever crashed may be broken
            if any(p.status is Status.OOM for p in self._told):
                return Ending.NOTHING_FITS
            tried = self._refused[self._sizes[0]]
            return Ask(self._sizes[0]) if tried < ATTEMPTS else Ending.GAVE_UP
        largest = self._sizes[low]
        if largest not in self._long_trained or self._count_trained(largest) < 2:
            return Ask(largest, long=True)
        return Ending.NO_WALL if high == len(self._sizes) else Ending.FOUND

    def _surprised(self, low: int) -> bool:
        """Whether the largest batch that trained seems to have read too little, in its only run."""
        fitting = [n for n in self._refused if 0 < self._predict_share(n) <= 1]
        return low >= 0 and len(fitting) > 1 and self._count_trained(self._sizes[low]) == 1

    def _count_trained(self, size: int) -> int:
        return sum(p.trained for p in self._told if p.batch_size == size)

    def _index(self, size: int) -> int:
        return bisect_left(self._sizes, size)

    def _at_most(self, size: float) -> int:
        return bisect_right(self._sizes, size) - 1

    def _choose(self, low: int, high: int) -> int:
        """The index to try between two; the caller keeps it between them."""
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
            # the line is none: a batch well below its end was refused
            return self._at_most(math.sqrt(top * self._sizes[high]))
        if at >= high:
            beyond = sum(self._index(size) <= at for size in self._refused)
            return max(high - (1 << beyond - 1), middle)
        # several trained this near to each other: the line ends too low, so go on in larger steps
        beyond = sum(size > _DOUBTED * top for size in self._trained)
        ahead = max(at, low + (1 << max(beyond - 2, 0)))
        return ahead if open_above else min(ahead, max(at, middle))

    def _choose_second(self, first: int) -> int:
        """Half way to where memory would end if it grew from the start as over the first batch; the
        first step also brings gradients and the optimizer's state, so that it would end later."""
        probe = next(p for p in self._told if p.trained)
        available, setup, used = self._goal.available_bytes, probe.setup_bytes, probe.used_bytes
        if not (available and setup and used and used > setup):
            return self._at_most(2 * first)
        wall = (available - setup) / (used - setup) * first
        return self._at_most(min(max((first + wall) / 2, 1.5 * first), _REACH * first))
