"""When a case's clock runs, and how its steps are timed.

The boundaries, written down once::

    set-up       process start to the first step: imports, pixels to the device, network
    warm-up      steps thrown away, until step times are steady, for both batch shapes; then
                 weights, optimizer, BatchNorm statistics and random numbers are as at the start
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
from statistics import fmean, median
from time import perf_counter

import torch

STEADY = 0.05
"""Two halves of the warm-up window may differ by this much."""

MAX_WINDOWS = 20
"""Windows after which warm-up gives up on steadiness and says so."""

WINDOW_S = {"cuda": 2.0, "cpu": 0.5}
"""Length of a window: long enough, on a card, for clocks that sink as it warms to show."""


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
    """What warming one batch shape took."""

    steps: int
    time_s: float
    step_s: float
    steady: bool


def warm_up(step: Callable[[], object], device: torch.device, window_s: float) -> Warmup:
    """Run ``step`` until two neighbouring windows of it take the same time.

    As pyperf does, two halves are compared rather than a fixed count run: autotuning, compilation,
    allocator growth and clocks settle after different numbers of steps.

    Args:
        step: runs one training step of one shape.
        window_s: how long a window is at least, in s.
    """

    def run(steps: int) -> float:
        start = perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return (perf_counter() - start) / steps

    start = perf_counter()
    run(1)  # autotuning, compilation, allocation
    window = max(1, math.ceil(window_s / run(1)))
    steps, halves, steady = 2, [run(window)], False
    while not steady and len(halves) < MAX_WINDOWS:
        halves.append(run(window))
        steady = abs(halves[-1] - halves[-2]) <= STEADY * min(halves[-2:])
    return Warmup(steps + window * len(halves), perf_counter() - start, fmean(halves[-2:]), steady)


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


def extrapolate(
    measured_s: float, times: Sequence[float], full_steps: int, partial_s: float
) -> float:
    """Estimate a whole epoch from its first steps.

    What was measured stands as measured; each full step left out takes the mean of the steady
    ones. A mean, not a median: what slows one step in twenty slows the epoch too. The first tenth
    is left out of it, since the first steps after a reset allocate anew.

    Args:
        measured_s: wall time of the measured steps.
        times: their durations, all of full batches.
        full_steps: full batches in an epoch.
        partial_s: duration of the epoch's last, smaller step; 0 where there is none.
    """
    steady = times[math.ceil(len(times) / 10) :] or times
    return measured_s + (full_steps - len(times)) * fmean(steady) + partial_s
