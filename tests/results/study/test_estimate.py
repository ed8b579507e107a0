"""What the seeds of two cases come to."""

from __future__ import annotations

import math

import pytest

from bench.results.study.estimate import list_shifts

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
