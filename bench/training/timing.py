"""Timing of a case's phases and of its steps.

The boundaries of the phases::

    set-up       process start to the first step: imports, pixels to the device, network
    warm-up      discarded steps of each measured batch shape, until step times are steady or
                 the limit is reached; then weights, optimizer, BatchNorm statistics and random
                 numbers are reset
    warm epoch   between two device synchronisations, around the training steps alone
    evaluation   the test images, outside the epoch

Only the warm epoch counts as epoch time. For the same case an H200 took 33.8 s or 11.0 s, depending
on whether cuDNN's autotuning in the first steps was included.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean, linear_regression, median
from time import perf_counter
from typing import Any

import torch

from bench.base.limits import STEADY, find_quantile, leave_out_first

LEAST_S = 0.5
"""Minimum time of warm-up after the first step, in s, unless its limit of steps is reached."""

FEWEST_WINDOWS, MOST_WINDOWS = 3, 16
"""Limits of the number of windows. Of three, the first may allocate or capture again. A window is
at least a sixteenth of the elapsed time, so that judging them all stays cheap."""

LEAST_STEPS = 5
"""Warm-up steps after the first that are always allowed; the limit is half the measured steps if
that is more."""


ACCELERATORS: dict[str, Any] = {"cuda": torch.cuda}
"""By type of device, the functions of a device whose work goes on after a call returns. A CPU has
none: neither its own clock, nor an allocator with statistics."""


def find_accelerator(device: torch.device) -> Any:
    """Return `torch.cuda` for a GPU, and None for a CPU."""
    return ACCELERATORS.get(device.type)


def synchronize(device: torch.device) -> None:
    if accelerator := find_accelerator(device):
        accelerator.synchronize(device)


class StepClock:
    """Times each step without stopping the device: by device events, read once after the epoch; on
    a CPU by perf_counter."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = find_accelerator(device)
        self._events: list[Any] = []
        self._ended: list[float] = []  # durations that `read_ended` has read
        self._moments: list[float] = []

    def tick(self) -> None:
        """Mark a boundary: once before the first step, then after each."""
        if self._accelerator:
            self._events.append(self._accelerator.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._moments.append(perf_counter())

    def read(self) -> list[float]:
        if self._accelerator:
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)]
        return [b - a for a, b in pairwise(self._moments)]

    def read_ended(self) -> list[float]:
        """Return the durations of the steps that the device has finished, in s, without waiting.
        Each event is read only once, however often this is called within an epoch."""
        if not self._accelerator:
            return self.read()
        events, ended = self._events, self._ended
        while len(ended) + 1 < len(events) and events[len(ended) + 1].query():
            ended.append(events[len(ended)].elapsed_time(events[len(ended) + 1]) / 1e3)
        return ended


@dataclass(frozen=True)
class Warmup:
    """Total steps and seconds of a warm-up, and the seconds of first steps among them."""

    steps: int
    time_s: float
    first_s: float
    steady: bool


def measure_slope(moments: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the Theil-Sen slope of ``values`` over ``moments`` (s), relative to the median value,
    per second, between the ends of its 95 % interval.

    It is the median slope of all pairs; up to 29 % of the values may be outliers. Its 95 % interval
    uses ranks of those slopes, by the normal approximation of Kendall's statistic: P. K. Sen, J.
    Am. Stat. Assoc. 63 (1968) 1379. There must be at least two values.
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
    return slopes[low], median(slopes), slopes[high]


def is_level(moments: Sequence[float], durations: Sequence[float], steps: int) -> bool:
    """Return whether step times show no trend that would matter over ``steps`` more steps. There
    are two or more windows, given by their midpoints and their durations per step, in s.

    The medians of the later and the earlier half must agree within `STEADY`, and a significant
    trend must amount to no more than that. A trend hidden by noise, or too slow to see within a
    second, is left to the epoch, which shows more of it.
    """
    level, half = median(durations), len(durations) // 2
    apart = abs(median(durations[-half:]) - median(durations[:half]))
    low, slope, high = measure_slope(moments, durations)
    matters = (low > 0 or high < 0) and abs(slope) * steps * level > STEADY
    return apart <= STEADY * level and not matters


def warm_up(
    step: Callable[[], object],
    device: torch.device,
    measured_steps: int,
    clock: Callable[[], float] | None = None,
) -> Warmup:
    """Run ``step`` until its duration has no trend that would matter in the measurement.

    The first step (autotuning, compilation, allocation) is timed separately. After it, windows of
    one step, or of several short steps, are timed, for at least `LEAST_S` and `FEWEST_WINDOWS`
    windows. Warm-up is over when

    - the windows of the later half of that time are level (`is_level`): steady; or
    - half as many steps as will be measured, or `LEAST_STEPS` if more, were run: not steady.

    ``step`` runs one training step of one shape. All decisions depend on ``clock``, by default
    perf_counter, so that processes with the same clock run the same number of steps.
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
        # the last window may still have been slow, so each one sets the length of the next
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
    """Time of a whole epoch in s, estimated from a part, with a 95 % interval if there is one.
    ``last_s`` of its upper end are for a smaller last batch, which may take as long as a full one.
    """

    epoch_s: float
    low_s: float | None
    high_s: float | None
    last_s: float = 0.0

    @property
    def error(self) -> float:
        """The larger distance to an interval end from the epoch in which the last batch takes the
        middle of what it may take, relative; infinite without one. With nothing for it, an epoch of
        78.1 steps would never be known within 1 %, of which 0.9 steps are 1.1 %."""
        if self.low_s is None or self.high_s is None:
            return math.inf
        middle = self.epoch_s + self.last_s / 2
        return max(self.high_s - middle, middle - self.low_s) / self.epoch_s

    def widen(self, share: float) -> Extrapolation:
        """Return it with an interval of at least ±``share`` of the epoch.

        A case that ends once it is known this well ends sooner the fewer slow steps it met. If 2 of
        100 steps take 20 % longer, its own interval held in 86 % of simulated epochs, and one of
        ±1 % in all; if 3 take 50 % longer, in 61 and 74 %.
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

    Measured steps count as measured; each step left out takes the mean of the steady ones. This is
    a mean, not a median, because slow steps slow the epoch too. The first tenth of the steps is
    excluded from it (`leave_out_first`).

    The last, smaller batch counts by its images. It takes at least its share of a full step, and
    with fixed costs at most a full step, so the estimate is too low by less than
    ``ceil(full_steps) - full_steps`` steps; the interval's upper end adds that much.

    The interval is for the mean of the R steps left out, estimated from n steady ones of mean m and
    standard deviation s::

        m ± t(0.975, n / tau - 1) * s * sqrt(tau * (1 / n + 1 / R)),  tau = (1 + r) / (1 - r)

    n / tau is the effective sample size of a series with autocorrelation r between neighbours
    (AR(1): Zwiers and von Storch, J. Climate 8 (1995) 336); s is corrected by tau for it. r is that
    of the series, its bias removed after Kendall (Biometrika 41 (1954) 403), between 0 and 0.95.
    With fewer than `_FEWEST_STEPS` steady steps there is no interval.

    With ``drift``, or if the steps have one whose own interval excludes 0, it also includes the
    interval for a linear drift of b per step, fitted by least squares (Draper and Smith, Applied
    Regression Analysis, 3rd ed., 1.4), at the middle of the steps left out, d = (n + R) / 2 steps
    after the middle of the steady ones::

        m + b d ± t(0.975, n / tau - 2) * s * sqrt(tau * (1 / n + 1 / R + 12 d² / (n³ - n)))

    If the steps went from one level to another (`find_shift`), the interval is from the lower to
    the higher of the two instead: the steps left out may stay at the second, or come back.

    It holds for this run alone, and if what is left out goes on as what was measured. A shift
    after the measured steps, or slow steps of which none is among them, it cannot know: of
    simulated epochs whose clock sank by 8 % anywhere, it held in a fifth. A machine that changes
    state in blocks (a virtual machine took 72 ms per step for a minute and a half, then 119) is
    steady within each block: only repeats at other times tell.

    ``measured_s`` is the wall time of the measured steps, all of full batches, and ``times`` their
    durations in s; ``full_steps`` is the epoch's images divided by the batch size, 390.625 for
    50,000 and 128. A loader may have prepared the batches of the first ``ahead`` steps, which are
    not typical: they are left out too, if as many more were measured.
    """
    steady = leave_out_first(times)
    if len(times) >= 2 * ahead:
        steady = times[max(len(times) - len(steady), ahead) :]
    left, mean = full_steps - len(times), fmean(steady)
    epoch_s = measured_s + left * mean
    if len(steady) < _FEWEST_STEPS or left <= 0:
        return Extrapolation(epoch_s, None, None)
    smaller = (math.ceil(full_steps) - full_steps) * mean
    low, high = _span(steady, mean, left, drift)
    return Extrapolation(epoch_s, max(epoch_s + low, measured_s), epoch_s + high + smaller, smaller)


def _span(steady: Sequence[float], mean: float, left: float, drift: bool) -> tuple[float, float]:
    """Return the ends of the 95 % interval of `extrapolate`, in s from ``left`` steps of ``mean``
    length."""
    n, many = len(steady), len(steady) >= MANY_STEPS
    half = left * _reach([t - mean for t in steady], 1, left)
    ends = [-half, half]
    line, slope = fit_line(steady)
    away = [t - at for t, at in zip(steady, line, strict=True)]
    spread, far = (n**3 - n) / 12, (n + left) / 2  # the sum of the squares of the places
    clear = many and abs(slope) > 2 * _reach(away, 2, math.inf, 1 / spread - 1 / n)
    if at := find_shift(steady):
        sides = [(steady[:at], fmean(steady[:at])), (steady[at:], fmean(steady[at:]))]
        around = [t - level for side, level in sides for t in side]
        # a dozen steps that wander may look like two levels
        ends = [] if many else ends
        for side, level in sides:
            reach = _reach(around, 2, left, 1 / len(side) - 1 / n)
            ends += [left * (level - mean - reach), left * (level - mean + reach)]
    if drift or (clear and not at):
        reach = _reach(away, 2, left, far * far / spread)
        ends += [left * (slope * far - reach), left * (slope * far + reach)]
    return min(ends), max(ends)


def fit_line(steady: Sequence[float]) -> tuple[list[float], float]:
    """Return the line through times by least squares, at each of them, and its slope per step."""
    places = range(len(steady))
    slope, start = linear_regression(places, steady)
    return [start + slope * place for place in places], slope


def find_shift(steady: Sequence[float]) -> int | None:
    """Return after how many steps their times went from one level to another; None if they did
    not.

    It is where two means leave the least squares, with at least `LEAST_SIDE` steps on each side.
    They must leave less than a line does, explain more than `SHIFT` times the variance within the
    sides (for one that may be anywhere, chance exceeds 12.4 in 1 % of series: D. Andrews,
    Econometrica 61 (1993) 821), and leave neighbours without correlation: times that wander have
    no two levels.
    """
    n, mean = len(steady), fmean(steady)
    if n < 2 * LEAST_SIDE:
        return None
    sums = [*accumulate(t - mean for t in steady)]
    gains = {k: sums[k - 1] ** 2 * n / (k * (n - k)) for k in range(LEAST_SIDE, n - LEAST_SIDE + 1)}
    at = max(gains, key=gains.__getitem__)
    levels = fmean(steady[:at]), fmean(steady[at:])
    away = [t - levels[i >= at] for i, t in enumerate(steady)]
    squares = sum(d * d for d in away)
    line, _ = fit_line(steady)
    others = sum((t - one) ** 2 for t, one in zip(steady, line, strict=True))
    neighbours = sum(a * b for a, b in pairwise(away))
    weak = gains[at] * (n - 2) <= SHIFT * squares
    return None if weak or squares >= others or neighbours > ALIKE * squares else at


LEAST_SIDE, SHIFT, ALIKE = 3, 15.0, 0.3
"""See `find_shift`."""


def _reach(away: Sequence[float], fitted: int, left: float, lever: float = 0.0) -> float:
    """Return half of a 95 % interval of `extrapolate`, per step of the ``left`` steps left out.
    ``away`` are the steady steps' residuals of a fit with ``fitted`` parameters; ``lever`` is the
    squared distance of the steps left out over the sum of the squared places."""
    n, squares = len(away), sum(d * d for d in away)
    if not squares:
        return 0.0
    r = sum(a * b for a, b in pairwise(away)) / squares
    r = min(max((n * r + fitted) / (n - 2 - fitted), 0.0), 0.95)
    free = FEWEST_FREE[fitted] if n < MANY_STEPS else max(FEWEST_FREE[fitted], 2.0)
    effective = max(n * (1 - r) / (1 + r), fitted + free)
    variance = squares / n * effective / (effective - fitted)
    return find_quantile(effective - fitted) * math.sqrt(
        variance * (1 / effective + n / effective * (1 / left + lever))
    )


class Certainty:
    """Decides after each step of an epoch whether its total time is known within ``share``, by the
    95 % interval of `extrapolate`.

    It checks after `FIRST_LOOK` steps and then each time that a quarter more have ended. Each check
    is one more chance to be lucky, so the interval of a case ended this way holds less often than
    with a fixed number of steps; tests/training/test_timing.py simulates how often.

    Several processes that train together end together: each checks after the same steps, by those
    of them that have ended in it, and ``gather`` returns what all of them found.
    """

    def __init__(
        self,
        share: float,
        clock: StepClock,
        full_steps: float,
        ahead: int,
        gather: Callable[[bool], Sequence[bool]] | None = None,
    ) -> None:
        # this imports scipy, which within an epoch kept an H200 waiting for 0.13 to 0.3 s
        find_quantile(1.0)
        self._share, self._clock = share, clock
        self._full_steps, self._ahead, self._gather = full_steps, ahead, gather
        self._fewest, self._begun = max(FIRST_LOOK, 2 * ahead), 0
        self._next = float(self._fewest)

    def __call__(self) -> bool:
        """Return whether the time of the epoch is known well enough."""
        times = self._clock.read_ended()
        self._begun += 1
        seen = self._begun if self._gather else len(times)
        if seen < self._next:
            return False
        self._next = seen * LOOKS
        sure = len(times) >= self._fewest
        if sure:
            whole = extrapolate(sum(times), times, self._full_steps, self._ahead, drift=True)
            sure = whole.error <= self._share
        return all(self._gather(sure)) if self._gather else sure


FIRST_LOOK, LOOKS = 10, 1.25
"""Steps before the first check, and the growth factor of that number until the next one. On an H100
10 to 12 steps were enough for each case of batch size 512, and 15 to 47 for most of 128 and 256.

Six steps told eight whole epochs of an H200 within 0.13 %, but nothing in six steps tells that they
will: where steps scatter by 0.1 %, a drift of 4 % over 391 steps changes them by 0.04 %."""


FEWEST_FREE = {1: 1.0, 2: 3.0}
"""Minimum degrees of freedom, by the number of fitted parameters. With a drift and 1, the interval
was ±7 % of the epoch for an H200's steps all within 0.3 %; with 3 it still held in 96 to 100 % of
simulated parts of 11 to 79 steps without spikes. For a mean alone, 3 would make it hold in 74
instead of 87 % of cases of 11 steps with a correlation of 0.8."""

MANY_STEPS = 30
"""Steady steps from which a mean has at least 2 degrees of freedom. With 1, steps that scatter by
10 % and correlate by 0.95 gave ±83 % after 57 of them, and up to ±155 %; with 2 they give ±22 %,
which held in as many of 600 simulated series, 90 %, and in 87 instead of 88 % after 36."""


_FEWEST_STEPS = 5
"""Minimum number of steady steps for an interval of an extrapolated epoch."""
