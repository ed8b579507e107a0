"""The ends beside a median: what they hold, as often as they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.interval import CONFIDENCE
from bench.study.runs import choose_depth, find_coverage, find_middle

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

# how times are distributed is not known: those of an idle machine, of one with rare slow runs, and
# of one that has two speeds
TIMES: dict[str, Draw] = {
    "normal": lambda random, shape: random.normal(90, 3, shape),
    "skewed": lambda random, shape: 80 + random.exponential(5, shape),
    "two speeds": lambda random, shape: np.where(
        random.random(shape) < 0.3, random.normal(119, 2, shape), random.normal(72, 2, shape)
    ),
}

SWEEPS = 20_000


@pytest.mark.parametrize("runs", [5, 6, 9, 15])
@pytest.mark.parametrize("times", list(TIMES))
def test_the_median_of_a_second_sweep_falls_inside_as_often_as_stated(
    times: str, runs: int
) -> None:
    """20,000 pairs of sweeps; four standard errors are allowed."""
    random = np.random.default_rng(runs)
    first, second = (TIMES[times](random, (SWEEPS, runs)) for _ in range(2))
    _, low, high = np.array([find_middle(sweep) for sweep in first.tolist()]).T
    median = np.median(second, axis=1)
    inside = ((low <= median) & (median <= high)).mean()
    stated = find_coverage(runs, choose_depth(runs))
    error = 4 * (stated * (1 - stated) / SWEEPS) ** 0.5
    assert inside > stated - error
    if runs % 2:  # of an even number the median lies between two runs, and inside more often
        assert inside < stated + error


@given(st.integers(2, 60))
def test_the_interval_is_the_narrowest_that_is_sure_enough(runs: int) -> None:
    depth = choose_depth(runs)
    assert 1 <= depth <= (runs + 1) // 2
    assert find_coverage(runs, depth + 1) < CONFIDENCE
    assert depth == 1 or find_coverage(runs, depth) >= CONFIDENCE


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=8), st.randoms())
def test_median_and_ends_are_those_of_what_is_known(known: list[float], random: Any) -> None:
    values = [*known, math.nan]
    random.shuffle(values)
    middle, low, high = find_middle(values)
    assert middle == np.median(known)
    if len(known) == 1:
        assert np.isnan([low, high]).all()
    else:
        assert (low, high) == (min(known), max(known))
