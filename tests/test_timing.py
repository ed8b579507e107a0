"""Clocks: when warm-up ends, what the spread of steps is, what an epoch extrapolates to."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.limits import STEADY
from bench.training import timing
from bench.training.timing import (
    FEWEST_WINDOWS,
    PATIENCE_S,
    WINDOW_S,
    Extrapolation,
    StepClock,
    Warmup,
    extrapolate,
    measure_slope,
    summarize,
    warm_up,
)

CPU = torch.device("cpu")
READINGS = Path(__file__).parent / "readings"
TIMES = st.lists(st.floats(1e-4, 100), min_size=1, max_size=200)


class Machine:
    """A clock that only steps move; ``duration`` says how long a step takes, from its index.

    ``now`` tells it the time as well, for clocks that sink. As on a card, a step is only queued:
    its time passes where it is waited for.
    """

    def __init__(self, duration: Callable[[int, float], float]) -> None:
        self.now = self._queued_until = 0.0
        self.steps = 0
        self._duration = duration

    def step(self) -> None:
        self._queued_until += self._duration(self.steps, self._queued_until)
        self.steps += 1

    def synchronize(self, device: torch.device) -> None:
        self.now = self._queued_until


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Warmup, Machine]]:
    def warm(duration: Callable[[int, float], float], measured: int) -> tuple[Warmup, Machine]:
        machine = Machine(duration)
        monkeypatch.setattr(timing, "perf_counter", lambda: machine.now)
        monkeypatch.setattr(timing, "synchronize", machine.synchronize)
        warmup = warm_up(machine.step, CPU, measured)
        assert warmup.steps == machine.steps
        assert warmup.time_s == pytest.approx(machine.now)
        return warmup, machine

    return warm


Warm = Callable[..., tuple[Warmup, Machine]]


def noise(seed: int, share: float) -> Callable[[], float]:
    """Factors around 1 that scatter by ``share``."""
    rng = random.Random(seed)
    return lambda: max(0.1, rng.gauss(1, share))


def test_steady_from_the_start_costs_little(warm: Warm) -> None:
    """Five windows: of a step each where a step is long, of half a second where it is short."""
    warmup, _ = warm(lambda step, now: 3.0, 100)
    assert (warmup.steps, warmup.steady) == (1 + FEWEST_WINDOWS, True)
    warmup, _ = warm(lambda step, now: 0.01, 10_000)
    assert warmup.steady
    assert warmup.time_s < (FEWEST_WINDOWS + 1) * WINDOW_S


@pytest.mark.parametrize("measured", [1, 2, 5, 8, 16, 40, 391])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_it_costs_at_most_what_it_warms_for(warm: Warm, measured: int, share: float) -> None:
    """Whatever the noise; but for the first step, which is timed apart, and a floor of five."""
    factor = noise(1, share)
    warmup, machine = warm(lambda step, now: 40.0 if step == 0 else 0.2 * factor(), measured)
    assert machine.steps - 1 <= max(measured, FEWEST_WINDOWS)
    assert warmup.first_s == 40.0


def test_it_outlasts_autotuning(warm: Warm) -> None:
    """A first step of 30 s and a slow dozen after it: what follows is level."""
    slow = [30.0] + [0.2 - 0.01 * i for i in range(12)]
    warmup, machine = warm(lambda step, now: slow[step] if step < 13 else 0.1, 400)
    assert warmup.steady
    assert warmup.first_s == 30.0
    assert machine.steps > 2 * 13


def test_slow_first_steps_are_forgotten_once_the_later_half_is_level(warm: Warm) -> None:
    """Of 16 steps the first seven are slow: their trend is not what is left.

    Nor that of the first ten seconds, which without the later half would take all 200.
    """
    warmup, _ = warm(lambda step, now: 0.4 - 0.04 * step if step < 8 else 0.1, 16)
    assert warmup.steady
    warmup, _ = warm(lambda step, now: 0.01 * (1.5 - min(0.05 * now, 0.5)), 20_000)
    assert warmup.steady
    assert 10 < warmup.time_s < 30


def test_a_slow_second_step_leaves_no_short_window(warm: Warm) -> None:
    """Windows follow the steps before them: 25 steps of 20 ms, not the one that took 2 s."""
    times: list[float] = []

    def duration(step: int, now: float) -> float:
        times.append(now)
        return {0: 30.0, 1: 2.0}.get(step, 0.02)

    warmup, machine = warm(duration, 1000)
    assert warmup.steady
    assert machine.now - 32.0 > (FEWEST_WINDOWS - 1) * WINDOW_S
    assert machine.steps > 100


@pytest.mark.parametrize("percent", [1, 2, 3])
@pytest.mark.parametrize("measured_s", [20, 60, 120, 300])
@pytest.mark.parametrize("share", [0.0, 0.002])
def test_sinking_clocks_are_steady_only_where_it_does_not_matter(
    warm: Warm, percent: int, measured_s: int, share: float
) -> None:
    """1 to 3 % a minute, in steps of 50 ms with the noise of a card's: windows of 2 s see 0.1 %."""
    factor = noise(percent, share)
    warmup, _ = warm(
        lambda step, now: 0.05 * (1 + percent / 100 * now / 60) * factor(), measured_s * 20
    )
    comes_to = percent * measured_s / 60
    if comes_to < 1.9 or comes_to > 2.2:
        assert warmup.steady == (comes_to < STEADY * 100)


def test_clocks_that_settle_are_waited_for(warm: Warm) -> None:
    """A card that slows by 10 % over half a minute, as it warms, then stays."""
    factor = noise(2, 0.002)
    warmup, machine = warm(
        lambda step, now: 0.01 * (1.1 - 0.1 * math.exp(-now / 8)) * factor(), 12_000
    )
    assert warmup.steady
    last = 0.1 * math.exp(-machine.now / 8)
    assert last / 1.1 < STEADY


def test_noise_is_waited_out_only_so_long(warm: Warm) -> None:
    """A tenth of noise hides any trend: patience ends, an hour of epoch is no hour of warm-up."""
    factor = noise(3, 0.1)
    warmup, _ = warm(lambda step, now: 0.2 * factor(), 18_000)
    assert warmup.steady
    assert warmup.time_s < 2 * PATIENCE_S["cpu"]


def test_steps_that_grow_for_ever_are_said_to(warm: Warm) -> None:
    warmup, _ = warm(lambda step, now: 0.1 * 1.02**step, 60)
    assert not warmup.steady
    assert warmup.steps == 1 + 60


@pytest.mark.parametrize("at", [0.0, 1.0, 3.0, 6.0])
def test_a_machine_that_changes_state_is_steady_in_the_later_block(warm: Warm, at: float) -> None:
    """72 ms a step, then 119: warm-up never ends across the change."""
    warmup, machine = warm(lambda step, now: 0.072 if now < at else 0.119, 600)
    assert warmup.steady
    changed = at < machine.now
    assert not changed or machine.now - at >= (FEWEST_WINDOWS - 1) * WINDOW_S


@settings(deadline=None)  # scipy is imported in it
@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=30), st.floats(0.1, 10))
def test_the_slope_is_scipys(values: list[float], every: float) -> None:
    from scipy.stats import theilslopes

    moments = [every * i for i in range(len(values))]
    slope, expected = measure_slope(moments, values), theilslopes(values, moments, 0.95)
    level = float(np.median(values))
    assert slope.middle == pytest.approx(expected.slope / level, abs=1e-9)
    # scipy corrects for ties and so may take a neighbouring rank
    if len(set(values)) == len(values):
        assert slope.low == pytest.approx(expected.low_slope / level, abs=1e-9)
        assert slope.high == pytest.approx(expected.high_slope / level, abs=1e-9)


@given(TIMES)
def test_summary_agrees_with_numpy(times: list[float]) -> None:
    spread = summarize(times)
    assert spread.median == pytest.approx(np.median(times))
    assert spread.p95 == np.percentile(times, 95, method="inverted_cdf")
    assert spread.mad == pytest.approx(np.median(np.abs(np.array(times) - np.median(times))))
    assert spread.slowest == max(times) == times[spread.slowest_index]


def test_extrapolation_by_hand() -> None:
    """10 of 100.5 full steps measured in 1.9 s, the first slow."""
    times = [1.0] + [0.1] * 9
    whole = extrapolate(1.9, times, 100.5)
    assert whole.epoch_s == pytest.approx(1.9 + 90.5 * 0.1)
    assert whole.low_s == pytest.approx(whole.epoch_s)  # even steps leave no doubt,
    assert whole.high_s == pytest.approx(whole.epoch_s + 0.05)  # but the smaller one may be whole


def test_steps_whose_batches_lay_ready_are_left_out() -> None:
    """After the start of a loader four steps find their batches ready, and the others wait."""
    times = [1.0] + [0.1] * 4 + [0.3] * 7
    assert extrapolate(3.5, times, 112, ahead=5).epoch_s == pytest.approx(3.5 + 100 * 0.3)
    few = extrapolate(1.4, times[:5], 105, ahead=5)
    assert few.epoch_s == pytest.approx(1.4 + 100 * 0.1), "there is nothing else to go by"


def test_an_interval_by_hand() -> None:
    """Seven steady steps without correlation: the prediction interval of a textbook."""
    times = [1.0, 1.0, 1.2, 0.9, 1.3, 0.8, 1.1, 0.7]
    steady = np.array(times[1:])
    whole = extrapolate(8.0, times, 48.0)
    half = 40 * 2.4469 * steady.std(ddof=1) * math.sqrt(1 / 7 + 1 / 40)  # t(0.975, 6)
    assert whole.high_s == pytest.approx(whole.epoch_s + half, rel=1e-3)
    assert whole.low_s == pytest.approx(max(8.0, whole.epoch_s - half), rel=1e-3)


def test_extrapolation_of_nothing_left_out() -> None:
    assert extrapolate(7.0, [1.0] * 7, 7) == Extrapolation(7.0, None, None)


def test_too_few_steps_have_no_interval() -> None:
    assert extrapolate(4.0, [1.0] * 4, 100) == Extrapolation(100.0, None, None)
    assert extrapolate(6.0, [1.0] * 6, 100).low_s is not None


@given(st.floats(0.01, 10), st.integers(1, 50), st.integers(50, 400))
def test_extrapolation_of_even_steps_is_exact(step: float, measured: int, full: int) -> None:
    whole = extrapolate(step * measured, [step] * measured, full + 0.5)
    assert whole.epoch_s == pytest.approx(step * (full + 0.5))


@settings(deadline=None)
@given(TIMES, st.floats(0.5, 300))
def test_an_interval_holds_its_estimate(times: list[float], left: float) -> None:
    whole = extrapolate(sum(times), times, len(times) + left)
    if whole.low_s is None or whole.high_s is None:
        assert len(times) < 7
    else:
        # what was measured is behind us
        assert sum(times) <= whole.low_s <= whole.epoch_s <= whole.high_s
        assert math.isfinite(whole.high_s)


@pytest.mark.parametrize(
    ("correlation", "measured", "least"),
    [
        (0, 8, 0.93),
        (0, 39, 0.93),
        (0.3, 39, 0.93),
        (0.6, 39, 0.91),
        (0.6, 117, 0.92),
        (0.9, 117, 0.9),
    ],
)
def test_intervals_cover_what_they_say(correlation: float, measured: int, least: float) -> None:
    """Simulated epochs of 390 steps whose neighbours correlate: 95 % within, or close to it.

    Few steps that correlate strongly look calm; short of them the interval is too narrow.
    """
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(1000):
        series = [rng.standard_normal()]
        for shock in rng.standard_normal(389) * math.sqrt(1 - correlation**2):
            series.append(correlation * series[-1] + shock)
        times = [1 + 0.03 * x for x in series]
        whole = extrapolate(sum(times[:measured]), times[:measured], 390)
        assert whole.low_s is not None
        assert whole.high_s is not None
        hits += whole.low_s <= sum(times) <= whole.high_s
    assert least <= hits / 1000 <= 0.985


def test_clock_times_each_step() -> None:
    clock = StepClock(CPU)
    for _ in range(4):
        clock.tick()
    times = clock.read()
    assert len(times) == 3
    assert all(t >= 0 for t in times)


def recorded() -> list[float]:
    """A real epoch of 391 steps on a noisy virtual CPU, where a step varies by a tenth."""
    lines = (READINGS / "steps-epyc-2-cores.csv").read_text().splitlines()[2:]
    return [float(line.split(",")[1]) for line in lines]


@pytest.mark.parametrize(("fraction", "within"), [(0.1, 0.03), (0.2, 0.015), (0.5, 0.01)])
def test_extrapolation_of_a_recorded_epoch(fraction: float, within: float) -> None:
    """From its first tenth the whole is told within 2.1 %; a mean of 39 such steps is no better.

    The last step of 80 images is taken by its share of 128.
    """
    times = recorded()
    measured = times[: round(fraction * len(times))]
    whole = extrapolate(sum(measured), measured, 50_000 / 128)
    assert whole.epoch_s == pytest.approx(sum(times), rel=within)
    assert whole.low_s is not None
    assert whole.high_s is not None
    assert whole.low_s <= sum(times) <= whole.high_s


@pytest.mark.parametrize(("fraction", "share"), [(0.1, 0.85), (0.2, 0.8), (0.3, 0.95)])
def test_intervals_hold_a_recorded_epoch(fraction: float, share: float) -> None:
    """Begin anywhere in the recorded epoch, measure a part, go round to the whole.

    Its interval holds the whole in at least this share of the 390 beginnings. Less than 95 %: the
    machine was slower for a while, which steps of another while do not know.
    """
    times = recorded()[:-1]
    n, hits = round(fraction * len(times)), 0
    for begin in range(len(times)):
        measured = (times[begin:] + times[:begin])[:n]
        whole = extrapolate(sum(measured), measured, len(times))
        assert whole.low_s is not None
        assert whole.high_s is not None
        hits += whole.low_s <= sum(times) <= whole.high_s
    assert hits / len(times) >= share
