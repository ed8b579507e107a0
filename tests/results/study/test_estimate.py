"""What the seeds of two cases come to."""

from __future__ import annotations

import math

import pytest

from bench.base.limits import STEADY
from bench.results.study.estimate import (
    Estimate,
    average_seeds,
    list_means,
    list_shifts,
    share_seeds,
)
from bench.results.verdict import Ratio

NAN = math.nan


def test_a_shift_is_of_logarithms_or_of_signed_losses_in_their_unit() -> None:
    """The unit is the larger of the two means without signs."""
    one, other = (
        {0: (1.0, 0.0), 1: (3.0, math.log(3))},
        {0: (2.0, math.log(2)), 1: (6.0, math.log(6))},
    )
    assert list_shifts([one], [other]) == pytest.approx([math.log(2)])
    before = [{0: (-1.0, NAN)}, {0: (2.0, math.log(2))}]
    after = [{0: (1.0, 0.0)}, {0: (5.0, math.log(5))}]
    assert list_shifts(before, after) == pytest.approx([2 / 3, 3 / 3])
    # their means are above zero, and some of their repeats are not
    assert list_shifts([{0: (1.0, NAN)}], [{0: (3.0, math.log(3))}]) == [2.0]


def seeds(*names: int) -> dict[int, tuple[float, float]]:
    return {seed: (float(seed + 1), math.log(seed + 1)) for seed in names}


def test_readings_are_of_the_seeds_that_all_ran_else_both_of_a_pair_else_any() -> None:
    cells = {1: seeds(0, 1, 2), 2: seeds(1, 2), 3: seeds(2, 3), 4: seeds(2), 5: seeds(9)}
    every = share_seeds([(1, 2), (3, 4)], cells)
    assert every == ([seeds(2), seeds(2)], [seeds(2), seeds(2)])
    both = share_seeds([(1, 2), (5, 5)], cells)
    assert both == ([seeds(1, 2), seeds(9)], [seeds(1, 2), seeds(9)])
    assert share_seeds([(1, 5)], cells) == ([seeds(0, 1, 2)], [seeds(9)])


def test_a_mean_over_cells_is_geometric_unless_a_value_is_not_above_zero() -> None:
    held = average_seeds([seeds(0, 1), {1: (8.0, math.log(8)), 2: (1.0, 0.0)}])
    assert held == {1: (5.0, pytest.approx(math.log(4)))}
    assert average_seeds([]) == {}
    assert list_means(held) == [{1: [pytest.approx(4)]}]
    assert list_means(held, {1: (-1.0, NAN)}) == [{1: [5.0]}, {1: [-1.0]}]


@pytest.mark.parametrize(
    ("ends", "each", "apart"),
    [
        # outside of the interval of their mean, by more than what is steady
        ((0.9, 1.1), (0.91, 1.0, 1.09), False),
        ((0.9, 1.1), (0.9 / (1 + 1.01 * STEADY), 1.0), True),
        ((0.9, 1.1), (0.9 / (1 + 0.99 * STEADY), 1.0), False),
        ((0.9, 1.1), (1.0, 1.1 * (1 + 1.01 * STEADY)), True),
        ((0.9, 1.1), (1.0, 1.1 * (1 + 0.99 * STEADY)), False),
        ((0.9, 1.1), (), False),
        # without an interval, from each other
        ((None, None), (1.0, (1 + 1.01 * STEADY) ** 2), True),
        ((None, None), (1.0, (1 + 0.99 * STEADY) ** 2), False),
    ],
)
def test_pairs_are_apart_outside_of_the_interval_of_their_mean(
    ends: tuple[float | None, float | None], each: tuple[float, ...], apart: bool
) -> None:
    found = Estimate(Ratio(1.0, *ends), ((1, 2),) * len(each), each=each)
    assert (found.apart, found.pairs) == (apart, len(each))
