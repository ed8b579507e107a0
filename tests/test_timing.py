"""Clocks: when warm-up ends, what the spread of steps is, what an epoch extrapolates to."""

from __future__ import annotations

import math
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import timing
from bench.timing import MAX_WINDOWS, StepClock, extrapolate, summarize, warm_up

CPU = torch.device("cpu")
READINGS = Path(__file__).parent / "readings"
TIMES = st.lists(st.floats(1e-4, 100), min_size=1, max_size=200)


class Machine:
    """A clock that only steps move, each by the next of ``durations``."""

    def __init__(self, durations: list[float], then: float) -> None:
        self.now = 0.0
        self.steps = 0
        self._durations = chain(durations, repeat(then))

    def step(self) -> None:
        self.now += next(self._durations)
        self.steps += 1


def warm(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> timing.Warmup:
    monkeypatch.setattr(timing, "perf_counter", lambda: machine.now)
    return warm_up(machine.step, CPU, 0.5)


def test_warm_up_outlasts_autotuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step of 30 s and a slow dozen after it are in no window that counts as steady."""
    machine = Machine([30.0] + [0.2 - 0.01 * i for i in range(12)], then=0.1)
    warmup = warm(machine, monkeypatch)
    assert warmup.steady
    assert warmup.step_s == pytest.approx(0.1, rel=0.03)
    assert warmup.steps == machine.steps > 13
    assert warmup.time_s == pytest.approx(machine.now)


def test_warm_up_gives_up_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([1.1**i for i in range(400)], then=1.0)
    warmup = warm(machine, monkeypatch)
    assert not warmup.steady
    assert warmup.steps == 2 + MAX_WINDOWS


def test_steady_from_the_start_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm(Machine([], then=3.0), monkeypatch).steps == 4
    assert warm(Machine([], then=0.01), monkeypatch).steps == 2 + 2 * 50


def test_a_slow_sinking_shows_in_a_long_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that slows by 10 % over half a minute is steady to 20 ms windows, not to 2 s ones."""
    sinking = [0.01 * (1.3 - 0.3 * math.exp(-0.01 * i / 5)) for i in range(4000)]
    machine = Machine(sinking, then=0.013)
    monkeypatch.setattr(timing, "perf_counter", lambda: machine.now)
    assert warm_up(machine.step, CPU, 2.0).time_s > 6


@given(TIMES)
def test_summary_agrees_with_numpy(times: list[float]) -> None:
    spread = summarize(times)
    assert spread.median == pytest.approx(np.median(times))
    assert spread.p95 == np.percentile(times, 95, method="inverted_cdf")
    assert spread.mad == pytest.approx(np.median(np.abs(np.array(times) - np.median(times))))
    assert spread.slowest == max(times) == times[spread.slowest_index]


def test_extrapolation_by_hand() -> None:
    """10 of 100 full steps measured in 1.9 s, the first slow; a last, smaller one takes 0.05 s."""
    times = [1.0] + [0.1] * 9
    assert extrapolate(1.9, times, 100, 0.05) == pytest.approx(1.9 + 90 * 0.1 + 0.05)


def test_extrapolation_of_nothing_left_out() -> None:
    assert extrapolate(7.0, [1.0] * 7, 7, 0.0) == 7.0


@given(st.floats(0.01, 10), st.integers(1, 50), st.integers(50, 400))
def test_extrapolation_of_even_steps_is_exact(step: float, measured: int, full: int) -> None:
    estimate = extrapolate(step * measured, [step] * measured, full, step / 2)
    assert estimate == pytest.approx(step * full + step / 2)


def test_clock_times_each_step() -> None:
    clock = StepClock(CPU)
    for _ in range(4):
        clock.tick()
    times = clock.read()
    assert len(times) == 3
    assert all(t >= 0 for t in times)


@pytest.mark.parametrize(("fraction", "within"), [(0.1, 0.03), (0.2, 0.015), (0.5, 0.01)])
def test_extrapolation_of_a_recorded_epoch(fraction: float, within: float) -> None:
    """A real epoch of 391 steps on a noisy virtual CPU, where a step varies by a tenth.

    From its first tenth the whole is told within 2.1 %; a mean of 39 such steps is no better.
    """
    lines = (READINGS / "steps-epyc-2-cores.csv").read_text().splitlines()[2:]
    times = [float(line.split(",")[1]) for line in lines]
    measured = times[: round(fraction * len(times))]
    estimate = extrapolate(sum(measured), measured, 390, times[-1])
    assert estimate == pytest.approx(sum(times), rel=within)
