"""When a case's clock runs, and how its steps are timed.

The boundaries, written down once::

    set-up       process start to the first step: imports, pixels to the device, network
    warm-up      steps thrown away, until step times are steady, of each batch shape that is
                 measured, and no more of them than that; then weights, optimizer, BatchNorm
                 statistics and random numbers are as at the start
    warm epoch   between two device synchronisations, around the training steps alone
    evaluation   the test images, outside the epoch

Only the warm epoch is an epoch time. One H200 read 33.8 s or 11.0 s for the same case, depending on
whether cuDNN's autotuning of the first steps was counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist, fmean, median
from time import perf_counter
from typing import Any

import torch

from bench.interval import find_quantile
from bench.limits import STEADY, leave_out_first
from bench.training.accelerator import find_accelerator

LEAST_S = 0.5
"""As long warm-up takes after the first step, unless fewer steps are measured."""

FEWEST_WINDOWS, MOST_WINDOWS = 3, 16
"""One to allocate or capture anew, one more, one as it is. A window is at least a sixteenth of what
has passed, so that judging hundreds of them costs nothing."""

LEAST_STEPS = 5
"""Warm-up may take as many after the first, however few are measured; else half as many as are."""


def synchronize(device: torch.device) -> None:
    find_accelerator(device).synchronize(device)


class StepClock:
    """Times each step without stopping the device: by its events, read once after the epoch; on a
    CPU, perf_counter."""

    def __init__(self, device: torch.device) -> None:
        self._make_event = find_accelerator(device).make_event
        self._events: list[Any] = []
        self._ended: list[float] = []  # durations that `read_ended` has read
        self._moments: list[float] = []

    def tick(self) -> None:
        """Mark a boundary: once before the first step, then after each."""
        if self._make_event:
            self._events.append(self._make_event())
            self._events[-1].record()
        else:
            self._moments.append(perf_counter())

    def read(self) -> list[float]:
        if self._make_event:
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)]
        return [b - a for a, b in pairwise(self._moments)]

    def read_ended(self) -> list[float]:
        """The duration of each step that the device has ended; nothing is waited for, and each
        event is read once, however often this is asked within an epoch."""
        if not self._make_event:
            return self.read()
        events, ended = self._events, self._ended
        while len(ended) + 1 < len(events) and events[len(ended) + 1].query():
            ended.append(events[len(ended)].elapsed_time(events[len(ended) + 1]) / 1e3)
        return ended


@dataclass(frozen=True)
class Warmup:
    """What warming up took: steps and seconds in all, and of those the seconds of first steps."""

    steps: int
    time_s: float
    first_s: float
    steady: bool


@dataclass(frozen=True)
class Slope:
    low: float
    middle: float
    high: float

    @property
    def told(self) -> bool:
        return self.low > 0 or self.high < 0


def measure_slope(moments: Sequence[float], values: Sequence[float]) -> Slope:
    """Theil-Sen slope of ``values`` over ``moments`` in s, relative to their median, per second.

    The median of the slopes of all pairs; up to 29 % of the values may be outliers. Its interval
    is made of ranks of those slopes, from the normal approximation of Kendall's statistic:
    P. K. Sen, J. Am. Stat. Assoc. 63 (1968) 1379. At least two values.
    """
    n, level = len(values), median(values)
    slopes = sorted(
        (values[j] - values[i]) / (moments[j] - moments[i]) / level
        for i in range(n)
        for j in range(i + 1, n)
    )
    spread = NormalDist().inv_cdf(0.975) * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(round((len(slopes) - spread) / 2) - 1, 0)
    high = min(round((len(slopes) + spread) / 2), len(slopes) - 1)
    return Slope(slopes[low], median(slopes), slopes[high])


def is_level(moments: Sequence[float], durations: Sequence[float], steps: int) -> bool:
    """Whether windows of steps, two or more by their middles and the durations of a step in them,
    in s, show no trend that would matter over ``steps`` more of them.

    Their later half takes as long as the earlier one within `STEADY`, by the medians; and a trend
    that can be told from noise comes to no more than that. One that noise hides, or that is slower
    than a second shows, is left to the epoch, which sees more of it.
    """
    level, half = median(durations), len(durations) // 2
    apart = abs(median(durations[-half:]) - median(durations[:half]))
    slope = measure_slope(moments, durations)
    matters = slope.told and abs(slope.middle) * steps * level > STEADY
    return apart <= STEADY * level and not matters


def warm_up(
    step: Callable[[], object],
    device: torch.device,
    measured_steps: int,
    clock: Callable[[], float] | None = None,
) -> Warmup:
    """Run ``step`` until its duration has no trend that would matter in what is measured.

    The first step (autotuning, compilation, allocation) is timed apart. From there on windows are
    timed, of one step or, where steps are short, of several. Warm-up takes `LEAST_S` and
    `FEWEST_WINDOWS` of them, and is over when

    - those of the later half of that time are level (`is_level`): steady; or
    - half as many steps were run as will be measured, or `LEAST_STEPS`: not steady.

    ``step`` runs one training step of one shape. All that is decided hangs on ``clock``, by default
    perf_counter, so that processes that share it run as many steps.
    """
    now = clock or perf_counter

    def run(steps: int) -> float:
        start = now()
        for _ in range(steps):
            step()
        synchronize(device)
        return (now() - start) / steps

    start = now()
    first_s = run(1)
    budget = max(measured_steps // 2, LEAST_STEPS)
    begun, steps, size = now(), 0, 1
    moments: list[float] = []
    durations: list[float] = []
    while True:
        duration = run(size)
        steps += size
        durations.append(duration)
        passed = now() - begun
        moments.append(passed - size * duration / 2)
        # the step before may still have been a slow one, so each window sets the next one's length
        length_s = max(LEAST_S / FEWEST_WINDOWS, passed / MOST_WINDOWS)
        size = max(1, min(math.ceil(length_s / duration), budget // MOST_WINDOWS, budget - steps))
        if steps < budget and (len(durations) < FEWEST_WINDOWS or passed < LEAST_S):
            continue
        later = min(bisect_left(moments, passed / 2), len(durations) - FEWEST_WINDOWS)
        steady = is_level(moments[later:], durations[later:], measured_steps)
        if steady or steps >= budget:
            return Warmup(1 + steps, now() - start, first_s, steady)


@dataclass(frozen=True)
class Extrapolation:
    """A whole epoch in s, told from a part of it, with a 95 % interval where there can be one."""

    epoch_s: float
    low_s: float | None
    high_s: float | None

    @property
    def error(self) -> float:
        """How far the interval reaches from the epoch, as a share of it; infinite without one."""
        if self.low_s is None or self.high_s is None:
            return math.inf
        return max(self.high_s - self.epoch_s, self.epoch_s - self.low_s) / self.epoch_s

    def widen(self, share: float) -> Extrapolation:
        """The same with an interval of at least this share of the epoch to both sides.

        A case that ends once it is known that well ends the sooner the fewer slow steps it met.
        Where 2 of 100 steps take a fifth longer, its own interval held in 86 % of simulated epochs,
        and one of ±1 % in all; where 3 take half as long again, in 61 and 74 %.
        """
        if self.low_s is None or self.high_s is None:
            return self
        low, high = self.epoch_s * (1 - share), self.epoch_s * (1 + share)
        return replace(self, low_s=min(self.low_s, low), high_s=max(self.high_s, high))


def extrapolate(
    measured_s: float,
    times: Sequence[float],
    full_steps: float,
    ahead: int = 0,
    drift: bool = False,
) -> Extrapolation:
    """Estimate a whole epoch from its first steps.

    What was measured stands as measured; each step left out takes the mean of the steady ones. A
    mean, not a median: what slows one step in twenty slows the epoch too. The first tenth is left
    out of it (`leave_out_first`).

    The last, smaller batch counts by its images. It takes at least its share of a full step, but
    for fixed costs, and at most a full one, so the estimate is short by less than
    ``ceil(full_steps) - full_steps`` steps; the interval's upper end adds that much.

    The interval is one for the mean of the R steps left out, told from n steady ones of mean m and
    standard deviation s::

        m ± t(0.975, n / tau - 1) * s * sqrt(tau * (1 / n + 1 / R)),  tau = (1 + r) / (1 - r)

    n / tau is the effective sample size of a series whose neighbours correlate by r (AR(1): Zwiers
    and von Storch, J. Climate 8 (1995) 336); s carries tau's correction for it. r is the series'
    own, its bias removed as Kendall (Biometrika 41 (1954) 403) has it, between 0 and 0.95. Below
    `FEWEST_STEPS` steady steps there is no interval.

    With ``drift`` it also holds the interval for steps that drift by b a step, as least squares
    have it (Draper and Smith, Applied Regression Analysis, 3rd ed., 1.4), up to the middle of the
    steps left out, d = (n + R) / 2 steps on from that of the steady ones::

        m + b d ± t(0.975, n / tau - 2) * s * sqrt(tau * (1 / n + 1 / R + 12 d² / (n³ - n)))

    It speaks for this run alone. A machine that changes state in blocks (a virtual machine took 72
    ms a step for a minute and a half, then 119) is steady within each block, and no interval of
    steps from one block knows of the next: only repeats at other times do.

    ``measured_s`` is the wall time of the measured steps, all of full batches, and ``times`` their
    durations in s; ``full_steps`` the epoch's images over the batch size, so 390.625 for 50,000 and
    128. Of steps ``ahead``, whose batches may lie ready once the first does, a loader knows no more
    than a start: they are left out too, if as many more were measured.
    """
    steady = leave_out_first(times)
    if len(times) >= 2 * ahead:
        steady = times[max(len(times) - len(steady), ahead) :]
    left, mean = full_steps - len(times), fmean(steady)
    epoch_s = measured_s + left * mean
    if len(steady) < FEWEST_STEPS or left <= 0:
        return Extrapolation(epoch_s, None, None)
    n = len(steady)
    smaller = (math.ceil(full_steps) - full_steps) * mean
    half = left * _reach([t - mean for t in steady], 1, left)
    low, high = -half, half
    if drift:
        places, far = [i - (n - 1) / 2 for i in range(n)], (n + left) / 2
        spread = (n**3 - n) / 12  # the sum of the squares of the places
        slope = sum(place * t for place, t in zip(places, steady, strict=True)) / spread
        away = [t - mean - slope * place for place, t in zip(places, steady, strict=True)]
        shift, reach = left * slope * far, left * _reach(away, 2, left, far * far / spread)
        low, high = min(low, shift - reach), max(high, shift + reach)
    return Extrapolation(epoch_s, max(epoch_s + low, measured_s), epoch_s + high + smaller)


def _reach(away: Sequence[float], fitted: int, left: float, lever: float = 0.0) -> float:
    """Half of a 95 % interval of `extrapolate`, for one of so many steps ``left`` out: by how far
    ``away`` each steady step is from what was fitted to them, so many parameters, and the square of
    how far away these are, over the sum of the squares of the places."""
    n, squares = len(away), sum(d * d for d in away)
    r = sum(a * b for a, b in pairwise(away)) / squares if squares else 0.0
    r = min(max((n * r + fitted) / (n - 2 - fitted), 0.0), 0.95)
    effective = max(n * (1 - r) / (1 + r), fitted + FEWEST_FREE[fitted])
    variance = squares / n * effective / (effective - fitted)
    return find_quantile(effective - fitted) * math.sqrt(
        variance * (1 / effective + n / effective * (1 / left + lever))
    )


class Certainty:
    """Says after each step of an epoch whether the steps so far tell all of it, within ``share`` of
    its time by the 95 % interval of `extrapolate`.

    It looks after `FIRST_LOOK` steps and then each time that a quarter more have ended. Each look
    is one more chance to be lucky, so that the interval of a case that was ended holds less often
    than one of a fixed number of steps would; tests/test_timing.py simulates how often.
    """

    def __init__(self, share: float, clock: StepClock, full_steps: float, ahead: int = 0) -> None:
        # it imports scipy: within an epoch that kept an H200 waiting for 0.13 to 0.3 s
        find_quantile(1.0)
        self._share, self._clock = share, clock
        self._full_steps, self._ahead = full_steps, ahead
        self._next = float(max(FIRST_LOOK, 2 * ahead))

    def __call__(self) -> bool:
        """Whether the time of the epoch is known well enough."""
        times = self._clock.read_ended()
        if len(times) < self._next:
            return False
        self._next = len(times) * LOOKS
        whole = extrapolate(sum(times), times, self._full_steps, self._ahead, drift=True)
        return whole.error <= self._share


FIRST_LOOK, LOOKS = 10, 1.25
"""Steps before the first look, and by how many times more of them the next one comes. On an H100
10 to 12 steps were enough for each batch of 512, and 15 to 47 for most of 128 and 256."""


FEWEST_FREE = {1: 1.0, 2: 3.0}
"""Degrees of freedom that remain at least, by how many parameters were fitted. With 1 beside a
drift, an H200's steps that were all within 0.3 % told their epoch within 7 %; with 3 the interval
still held in 96 to 100 % of simulated parts of 11 to 79 steps without spikes. Beside a mean alone,
3 would have let it hold in 74 instead of 87 % of 11 steps that correlate by 0.8."""


FEWEST_STEPS = 5
"""Steady steps below which an extrapolated epoch has no interval."""
