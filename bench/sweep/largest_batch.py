"""The search for the largest batch that fits: the next batch size to try, given all probes so far,
what they come to, and the probes in the rows of a folder.

This module neither trains nor reads files, and keeps no state between calls: the next batch size
and the result follow from the probes alone, so that a search can be resumed from its records.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import itemgetter
from statistics import linear_regression
from typing import Any, NamedTuple

from bench.base.errors import UsageError
from bench.base.text import Explained, parse_bytes
from bench.results.store.rows import Row, fill_unknown, group
from bench.schema.case import UNFITTED, Case, default_lr
from bench.schema.command import list_places
from bench.schema.goals import FREE_MARGIN
from bench.schema.record import MEASURED, REFUSED, Status, read_missing
from bench.schema.rules import check, check_batches
from bench.workers.limit import ALLOWANCE_BYTES

STEP = 8
"""Default resolution of the largest batch, in images: kernels prefer multiples of 8."""

ATTEMPTS = 3
"""Attempts at a batch size whose runs end without showing whether it fits."""

START = 32
"""Images of a first micro-batch."""

# The largest factor by which a line is extrapolated beyond its last probe: from a third of the
# largest batch, an error of 1 % in the readings moves the largest batch by up to 4 %.
_FAR = 3.0

_STRIDE = 8  # of a command, whose batches no dataset ends

_NEAR = 0.8  # ratio of batch sizes above which a line through them would follow their noise

MOST_ITEMS = 1 << 20
"""The largest batch size that a command is tried at: how many items it has is not known."""

_FLAT = 0.01  # growth of memory up to which it is the same, as readings of a CPU scatter

_FAR_SIZES = 64  # ratio of batch sizes at which the same memory says that no batch is made of them

_LESS = 0.05  # share of memory by which what others leave may differ between probes

LIMITED_AFTER = 3
"""Steps of a script before its limit is the one that was asked for, see `bench.workers.limit`: one
that takes no more has not shown that it trains within it."""

SHORT_STEPS, LONG_STEPS = 4, 16
"""Steps of a probe after its warm-up, and of the longer run that confirms the result. An allocator
reaches its peak within the warm-up; only a sweep shows growth after more than 16 steps."""


@dataclass(frozen=True)
class MemoryLine:
    """Memory as a linear function of the batch size: weights, optimizer state and context are
    fixed, activations grow with the batch."""

    fixed_bytes: float
    bytes_per_image: float

    def find_largest(self, available_bytes: float) -> int:
        """Return the largest batch size predicted to fit; 0 if none is."""
        return max(0, math.floor((available_bytes - self.fixed_bytes) / self.bytes_per_image))


def fit_line(points: Sequence[tuple[int, float]]) -> MemoryLine | None:
    """Fit a least-squares line through (batch size, bytes); None for fewer than two batch sizes, or
    if memory does not grow with them."""
    if len({size for size, _ in points}) < 2:
        return None
    slope, fixed = linear_regression(*zip(*points, strict=True))
    return MemoryLine(fixed, slope) if slope > 0 else None


@dataclass(frozen=True)
class Probe:
    """The result of a run of one batch size, a ``long`` one or a short one; memory in bytes, None
    if not known. ``room_bytes`` is what others left on the card, or what a limit allows. Of a
    command it may not be ``seen`` that it took steps; ``reason`` says why, or why it failed."""

    batch_size: int
    status: Status
    used_bytes: float | None = None
    alloc_retries: int = 0
    long: bool = False
    room_bytes: float | None = None
    seen: bool = True
    reason: str = ""

    @property
    def trained(self) -> bool:
        """Whether it fitted, even if the loss diverged or a check failed."""
        return self.status in MEASURED and self.seen

    @property
    def fault(self) -> str:
        """Why it ended with an error, without what differs between sizes; empty if it did not."""
        reason, _, _ = self.reason.partition("; after ")
        return reason.replace(str(self.batch_size), "") if self.status is Status.ERROR else ""


@dataclass(frozen=True)
class Goal:
    """The range of a search: ``sizes`` to choose from, ascending, the ``available_bytes`` if known,
    and ``start``, approximately the first batch size to try."""

    sizes: Sequence[int]
    available_bytes: float | None = None
    start: int = START
    of_command: bool = False  # whose batches are known by their memory alone
    capped: bool = False  # by a size at which it took no step, as where its data are fewer


class Ask(NamedTuple):
    """The batch size to try next, and whether in a longer run."""

    batch_size: int
    long: bool = False


class Ending(Explained):
    FOUND = "found", "the largest batch that trains was confirmed by a longer run"
    EVERY_SIZE = "every_size", "the data allow no larger one, or too few steps with it"
    NO_STEPS = "no_steps", "the command shows no steps, by which a search ends its runs early"
    SAME = "same", "its memory is the same at each of them, as if it ignored {batch_size}"
    FAILS = "fails", "the command fails alike at each; mend that, then go on with --retry error"
    NO_MORE = "no_more", "larger ones take no more memory, as where all data fit in one batch"
    NOTHING_FITS = "nothing_fits", "not even the smallest batch trains"
    UNSUPPORTED = "unsupported", "this device or build cannot run the case"
    GAVE_UP = (
        "gave_up",
        f"a run failed {ATTEMPTS} times, perhaps not from lack of memory, or while others used the "
        "GPU; see its log, then go on with --retry error timeout killed oom oom_suspected",
    )


ANSWERED = frozenset({Ending.FOUND, Ending.EVERY_SIZE, Ending.UNSUPPORTED})
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

    sizes = []
    first = -(-case.accumulate // step) * step
    for size in range(first, images + 1, step):
        with suppress(UsageError):
            check(sized := replace(case, batch_size=size))
            check_batches(sized, images, batchnorm)
            sizes.append(size)
    return tuple(sizes)


USUAL = 7
"""The probes that a search takes where memory is linear."""


class LargestBatch:
    """What probes of cases that differ only in the batch size show: the largest one, and what to
    try next.

    A batch whose longer run was refused does not train, even if a short run did; from then on only
    longer runs count as trained. A suspected lack of memory counts once it was seen twice. If
    memory is linear, a search takes about `USUAL` probes. For any memory, their number grows with
    the logarithm of that of `Goal.sizes`; each may take two more runs that neither train nor run
    out of memory.

    Attributes:
        largest: the largest batch size that trained.
        smallest_failing: the smallest above it that did not; sizes between the two are not known.
        thrashes_from: from this size on a batch trains only by freeing the allocator's cache.
        recommended: predicted to leave ``margin`` of the memory free; at most the size that a
            longer run confirmed, and below ``thrashes_from``.
        line: the memory of batches near the largest_batch.
        failed: why the last probe failed that did, or took no step.
        available_bytes: as in `Goal`.
        margin: as a share.
        probes: the number of runs, including failed ones.
        ending: how the search ended; None while it has not.
        asked: what to try next; None once it has ended.
    """

    def __init__(self, probes: Sequence[Probe], goal: Goal, margin: float = FREE_MARGIN) -> None:
        self._goal, self._sizes, self.available_bytes = goal, goal.sizes, goal.available_bytes
        self.probes, self.margin = len(probes), margin
        self.failed = next((p.reason for p in reversed(probes) if not p.trained), "")
        self._faulty = {p.batch_size for p in probes if p.fault}
        suspected = Counter(p.batch_size for p in probes if p.status is Status.OOM_SUSPECTED)
        refused = {p.batch_size for p in probes if p.status is Status.OOM}
        refused |= {size for size, times in suspected.items() if times > 1}
        trained = [p for p in probes if p.trained]
        longer = {p.batch_size for p in trained if p.long}
        self._proven = max(longer, default=0)  # trained in a longer run
        above = refused & {p.batch_size for p in probes if p.long and not p.trained}
        self._long_only = max(above, default=0) > self._proven
        self._trained = longer if self._long_only else {p.batch_size for p in trained}
        self.largest = max(self._trained, default=None)
        self._refused = {size for size in refused if size > (self.largest or 0)}
        self.smallest_failing = min(self._refused, default=None)
        # memory near the largest: of it, sizes within a fifth of it, and the next one below; what
        # an allocator that retries holds is on no line
        points = {
            p.batch_size: p.used_bytes for p in trained if p.used_bytes and not p.alloc_retries
        }
        top = max(points, default=0)
        below = max((size for size in points if size <= _NEAR * top), default=0)
        self.line = fit_line([(n, used) for n, used in points.items() if n >= below])
        thrashing = [p.batch_size for p in trained if p.alloc_retries]
        self.thrashes_from = min(thrashing, default=None)
        most = (1 - margin) * self._proven
        if self.line and self.available_bytes:
            predicted = self.line.find_largest((1 - margin) * self.available_bytes)
            most = min(self._proven, predicted)
        fitting = [n for n in self._sizes if n <= most and n < min(thrashing, default=n + 1)]
        self.recommended = max(fitting, default=None)
        asked = self._decide(probes)
        self.asked = asked if isinstance(asked, Ask) else None
        self.ending = asked if isinstance(asked, Ending) else None

    @property
    def confirmed(self) -> bool:
        """Whether the search ended with a longer run that confirmed the largest batch."""
        return self.ending in (Ending.FOUND, Ending.EVERY_SIZE)

    def _decide(self, probes: Sequence[Probe]) -> Ask | Ending:
        if not self._sizes:
            return Ending.NOTHING_FITS
        if any(probe.status is Status.UNSUPPORTED for probe in probes):
            return Ending.UNSUPPORTED
        if self._goal.of_command and (ending := self._look_at_command(probes)):
            return ending
        refused = self.smallest_failing
        low = -1 if self.largest is None else bisect_left(self._sizes, self.largest)
        high = len(self._sizes) if refused is None else bisect_left(self._sizes, refused)
        if high - low > 1:
            index = min(max(self._choose(low, high), low + 1), high - 1)
            asked = Ask(self._sizes[index], self._long_only)
        elif self.largest is None:
            return Ending.NOTHING_FITS
        elif self.largest != self._proven:
            asked = Ask(self.largest, long=True)
        else:
            return Ending.EVERY_SIZE if refused is None else Ending.FOUND
        silent = [p for p in probes if (p.batch_size, p.long) == asked and not p.trained]
        return asked if len(silent) < ATTEMPTS else Ending.GAVE_UP

    def _look_at_command(self, probes: Sequence[Probe]) -> Ending | None:
        """Return how the search of a command ends that makes no larger batches: it fails alike at
        two sizes, its steps are not seen, or its memory stays the same. Of a line, the last is not
        true: what grew by 2 % in all grows by more than 1 % in four times the batch."""
        if len(self._faulty) > 1 and len({probe.fault for probe in probes}) == 1:
            return Ending.FAILS
        known = sorted((p.batch_size, p.used_bytes) for p in probes if p.trained and p.used_bytes)
        if not all(probe.seen for probe in probes) and not self._trained:
            return Ending.NO_STEPS
        if not known or self.smallest_failing is not None:
            return None
        (least, fewest), (most, used) = known[0], known[-1]
        if used <= (1 + _FLAT) * fewest:
            return Ending.SAME if most >= _FAR_SIZES * least else None
        grown = [(size, other) for size, other in known if other > (1 + 2 * _FLAT) * fewest]
        flat = (most >= 4 * size and used <= (1 + _FLAT) * other for size, other in grown)
        return Ending.NO_MORE if any(flat) else None

    def _choose(self, low: int, high: int) -> int:
        """Return the index to try between two; the caller clamps it to lie between them.

        The line says where the largest batch is. From where it is refuted by a batch that trains,
        steps double up to the middle, or if nothing was refused, without an end. Where a second
        size is refused that it had allowed, it is no line, and the geometric mean comes next: of
        memory that the compiler or another plateau hides up to a third of the largest batch, that
        takes 10 probes in place of 20."""
        middle, open_above = (low + high) // 2, self.smallest_failing is None
        if self._goal.capped:
            return middle
        if self.largest is None and open_above:
            start = bisect_left(self._sizes, self._goal.start)
            # whether a command has a fault of its own shows at another size
            return int(start == 0) if self._goal.of_command and len(self._faulty) == 1 else start
        if self.largest is None:
            back = high - (1 << max(0, len(self._refused) - 1))
            return max(back, middle) if self._long_only else middle
        ahead = self._at_most(2 * self.largest)
        if self.line and self.available_bytes is not None:
            largest_batch = self.line.find_largest(self.available_bytes)
            at = self._at_most(largest_batch)
            if at >= high and self.smallest_failing is not None:
                mean = math.sqrt(self.largest * self.smallest_failing)
                return self._at_most(mean) if len(self._refused) > 1 else high - 1
            if at > low:
                far = open_above and self.largest * _FAR < largest_batch
                # a line through what only scatters leads anywhere
                most = _STRIDE * self.largest if self._goal.of_command else math.inf
                return self._at_most(min(largest_batch / 2, most)) if far else at
            ahead = low + (1 << sum(size > largest_batch for size in self._trained))
        return ahead if open_above else min(ahead, middle)

    def _at_most(self, size: float) -> int:
        return bisect_right(self._sizes, size) - 1


# ------------------------------------------------------------------------------------------ records


def name_family(case: Case) -> Case:
    """Return the key of all cases that are searched together: ``case`` without the axes that do not
    matter, with the optimizer's default learning rate. Its batch size is a placeholder."""
    plain = {name: getattr(Case, name) for name in UNFITTED}
    plain |= {"lr": default_lr(case.optimizer), "batch_size": Case.batch_size * case.accumulate}
    if case.command is not None:  # its script takes them as they are given
        kept = {*list_places(case.command), "items"} - {"batch_size", "seed"}
        plain = {name: value for name, value in plain.items() if name not in kept}
    return replace(case, **plain)


def make_probe(family: Case, batch_size: int, long: bool) -> Case:
    steps = LONG_STEPS if long else SHORT_STEPS
    return replace(family, batch_size=batch_size, steps=steps)


@dataclass
class ProbedFamily:
    """The probes of a family so far, in order; ``train_images`` is None if no row has it."""

    family: Case
    rows: list[Probe] = field(default_factory=list)
    train_images: int | None = None

    def add(self, row: Row) -> None:
        """Add a row of the records; a row that was cut off is ignored."""
        if images := row.number("train_images"):
            self.train_images = int(images)
        if row.status in (Status.INTERRUPTED, Status.LOST):
            return
        # a peak that was clipped in warm-up would not be on the line either; but where warm-up
        # times the ways to compute something, one whose workspace does not fit is left out
        names = ["alloc_retries", *["warmup_alloc_retries"] * (not self.family.autotuned)]
        retries = sum(row.number(name) or 0 for name in names)
        limit, card = row.memory_limit, row.number("gpu_memory_bytes")
        left = card - (row.number("baseline_device_bytes") or 0) if card else None
        # an allocator that is short of memory frees its cache, and the context grows after that, by
        # some 150 MB on an H100: the two peaks are not simultaneous
        reserved = _peak(row, "reserved") if retries else _read_reserved(row)
        # on Windows and in WSL a driver moves to the host what the card has no room for
        spilled = row.status in MEASURED and not limit and left and reserved and reserved > left
        known = [*([parse_bytes(limit)] if limit else []), *([left] if left else [])]
        self.rows.append(
            Probe(
                batch_size=row.batch_size,
                status=Status.OOM if spilled else row.status,
                used_bytes=read_peak(row),
                alloc_retries=int(retries),
                long=(row.number("steps") or math.inf) > SHORT_STEPS,
                room_bytes=min(known, default=None),
                seen=not took_too_few(row),
                reason=row.reason or read_missing(row.missing or "").get("measured_steps", ""),
            )
        )

    @property
    def probes(self) -> list[Probe]:
        """The probes; one that was refused with clearly less memory left than others had says
        nothing."""
        most = max((p.room_bytes for p in self.rows if p.room_bytes), default=0.0)
        return [
            replace(p, status=Status.ERROR)
            if p.status in REFUSED and p.room_bytes and p.room_bytes < (1 - _LESS) * most
            else p
            for p in self.rows
        ]

    def aim(self, images: int, step: int, batchnorm: bool = True) -> Goal:
        """Return the range of the search; what was tried is in it, as only a network without
        BatchNorm may be tried at some sizes. The memory is the least that was available to a probe
        that trained or ran out of it; it is not known where several processes have it each."""
        of_command = self.family.command is not None
        blind = [probe.batch_size for probe in self.rows if not probe.seen]
        if of_command:
            sizes = {*range(step, min([*blind, MOST_ITEMS + 1]), step)}
        else:
            sizes = {*list_sizes(self.family, images, step, batchnorm)}
        sizes |= {probe.batch_size for probe in self.rows if probe.seen}
        decided = [p for p in self.probes if p.trained or p.status in REFUSED]
        available = min((p.room_bytes for p in decided if p.room_bytes), default=None)
        most = max((p.used_bytes for p in decided if p.trained and p.used_bytes), default=0.0)
        if of_command and available and most > available + ALLOWANCE_BYTES:
            available = None  # they hold more together than one can
        start = START * self.family.accumulate
        return Goal(sorted(sizes), available, start, of_command, bool(blind))


def took_too_few(row: Row) -> bool:
    """Return whether a command ended after too few steps to show that its batch fits."""
    steps = sum(row.number(name) or 0 for name in ("warmup_steps", "measured_steps"))
    few = row.unit == "runs" or (row.memory_limit and 0 < steps <= LIMITED_AFTER)
    return row.command is not None and row.status in MEASURED and bool(few)


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


def read_trials(rows: Iterable[Row]) -> list[ProbedFamily]:
    """Return the searches in the rows of a folder, in order. Each environment, as with ``--mix``,
    has its own search."""
    probes = [(name_family(row.case), row) for row in rows if row.probe]
    trials: dict[Any, ProbedFamily] = {}
    for alike in group(probes, itemgetter(0)):
        for (family, row), environment in zip(
            alike, fill_unknown([row for _, row in alike]), strict=True
        ):
            trials.setdefault((family, environment), ProbedFamily(family)).add(row)
    return [*trials.values()]


def read_largest_batches(
    rows: Iterable[Row], step: int | None = None, margin: float = FREE_MARGIN
) -> list[tuple[Case, LargestBatch]]:
    """Return the family (`name_family`) and the largest batch of each search in the rows of a
    folder. ``step`` is the resolution in images, by default the greatest common divisor of the
    tried batch sizes; the recommended batch leaves ``margin`` free."""
    found = []
    for trial in read_trials(rows):
        tried = [probe.batch_size for probe in trial.rows]
        common = step or reduce(math.gcd, tried, 0) or STEP
        goal = trial.aim(trial.train_images or max(tried, default=common), common)
        found.append((trial.family, LargestBatch(trial.probes, goal, margin)))
    return found
