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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, median
from time import perf_counter

import torch

from bench.limits import STEADY

WINDOW_S = 0.5
"""Length of a window of steps in warm-up at first, where the budget has room for such."""

FEWEST_WINDOWS, MOST_WINDOWS = 5, 16
"""Below five, no order of values is rarer than one in twenty. A window is at most a sixteenth of
the budget; and at least of what has passed, so that judging hundreds of them costs nothing."""

PATIENCE_S = {"cuda": 20.0, "cpu": 10.0}
"""How long noise may keep warm-up from its answer; a trend that shows is waited for longer."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Times each step without stopping the device: CUDA events, read once after the epoch.

    On a CPU, perf_counter.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._moments: list[float] = []

    def tick(self) -> None:
        """Mark a boundary: once before the first step, then after each."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._moments.append(perf_counter())

    def read(self) -> list[float]:
        """The duration of each step in seconds. Synchronise first."""
        if self._cuda:
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)]
        return [b - a for a, b in pairwise(self._moments)]


@dataclass(frozen=True)
class Warmup:
    """What warming up took: steps and seconds in all, and of those the seconds of first steps."""

    steps: int
    time_s: float
    first_s: float
    steady: bool


@dataclass(frozen=True)
class Slope:
    """A relative change per second with its 95 % interval."""

    low: float
    middle: float
    high: float

    @property
    def told(self) -> bool:
        """Whether it can be told from noise."""
        return self.low > 0 or self.high < 0

    def within(self, share: float, seconds: float) -> bool:
        """Whether the change over ``seconds`` is surely no more than ``share``."""
        return max(-self.low, self.high) * seconds <= share


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


def warm_up(
    step: Callable[[], object],
    device: torch.device,
    measured_steps: int,
    clock: Callable[[], float] | None = None,
) -> Warmup:
    """Run ``step`` until its duration has no trend that would matter in what is measured.

    The first step (autotuning, compilation, allocation) is timed apart. From there on windows of
    about `WINDOW_S` are timed, and after each the trend of all of them, and of the later half, is
    judged by `measure_slope`. Warm-up is over when

    - the trend, extrapolated over the measured steps, is surely below `STEADY`: steady; or
    - noise hides any trend in both and `PATIENCE_S` have passed: as steady as can be told; or
    - as many steps were run as will be measured (at least `FEWEST_WINDOWS`): steady unless a trend
      shows in the later half that would come to more than `STEADY`.

    Args:
        step: runs one training step of one shape.
        measured_steps: how many steps this warms up for.
        clock: seconds, by default of perf_counter; all that is decided hangs on it alone, so that
            processes that share it run as many steps.
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
    budget = max(measured_steps, FEWEST_WINDOWS)
    begun, steps, size = now(), 0, 1
    moments: list[float] = []
    durations: list[float] = []
    steady: bool | None = None
    while steady is None:
        duration = run(size)
        steps += size
        durations.append(duration)
        passed = now() - begun
        moments.append(passed - size * duration / 2)
        # the step before may still have been a slow one, so each window sets the next one's length
        length_s = max(WINDOW_S, passed / MOST_WINDOWS)
        size = max(1, min(math.ceil(length_s / duration), budget // MOST_WINDOWS, budget - steps))
        if len(durations) < FEWEST_WINDOWS:
            continue
        half = min(len(durations) // 2, len(durations) - FEWEST_WINDOWS)
        whole, later = (measure_slope(moments[i:], durations[i:]) for i in (0, half))
        ahead_s = measured_steps * median(durations[half:])
        if whole.within(STEADY, ahead_s) or later.within(STEADY, ahead_s):
            steady = True
        elif steps >= budget:
            steady = not later.told or abs(later.middle) * ahead_s <= STEADY
        elif moments[-1] >= PATIENCE_S[device.type] and not (whole.told or later.told):
            steady = True
    return Warmup(1 + steps, now() - start, first_s, steady)


@dataclass(frozen=True)
class StepTimes:
    """The spread of a sequence of step times, in seconds."""

    median: float
    p95: float
    mad: float
    slowest: float
    slowest_index: int


def summarize(times: Sequence[float]) -> StepTimes:
    """Median, 95th percentile (nearest rank), median absolute deviation and slowest step."""
    middle = median(times)
    slowest = max(range(len(times)), key=times.__getitem__)
    return StepTimes(
        middle,
        sorted(times)[math.ceil(0.95 * len(times)) - 1],
        median(abs(t - middle) for t in times),
        times[slowest],
        slowest,
    )


def leave_out_first(times: Sequence[float]) -> Sequence[float]:
    """All but the first tenth: the first steps after a reset allocate anew, on an idle device."""
    return times[math.ceil(len(times) / 10) :] or times


@dataclass(frozen=True)
class Extrapolation:
    """A whole epoch in s, told from a part of it, with a 95 % interval where there can be one."""

    epoch_s: float
    low_s: float | None
    high_s: float | None


def extrapolate(
    measured_s: float, times: Sequence[float], full_steps: float, ahead: int = 0
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

    It speaks for this run alone. A machine that changes state in blocks (a virtual machine took 72
    ms a step for a minute and a half, then 119) is steady within each block, and no interval of
    steps from one block knows of the next: only repeats at other times do.

    Args:
        measured_s: wall time of the measured steps.
        times: their durations in s, all of full batches.
        full_steps: the epoch's images over the batch size, so 390.625 for 50,000 and 128.
        ahead: steps whose batches may lie ready once the first does, of which a loader knows no
            more than a start. They are left out too, if as many more were measured.
    """
    steady = leave_out_first(times)
    if len(times) >= 2 * ahead:
        steady = times[max(len(times) - len(steady), ahead) :]
    left, mean = full_steps - len(times), fmean(steady)
    epoch_s = measured_s + left * mean
    if len(steady) < FEWEST_STEPS or left <= 0:
        return Extrapolation(epoch_s, None, None)
    from scipy.special import stdtrit

    n, away = len(steady), [t - mean for t in steady]
    squares = sum(d * d for d in away)
    r = sum(a * b for a, b in pairwise(away)) / squares if squares else 0.0
    r = min(max((n * r + 1) / (n - 3), 0.0), 0.95)
    effective = max(n * (1 - r) / (1 + r), 2.0)
    variance = squares / n * effective / (effective - 1)
    t = float(stdtrit(effective - 1, 0.975))
    half = left * t * math.sqrt(variance * (1 / effective + n / effective / left))
    smaller = (math.ceil(full_steps) - full_steps) * mean
    low_s = max(epoch_s - half, measured_s)
    return Extrapolation(epoch_s, low_s, epoch_s + half + smaller)


FEWEST_STEPS = 5
"""Steady steps below which an extrapolated epoch has no interval."""
