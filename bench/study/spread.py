"""How far the repeats of a case lie apart, and where the median of as many more would fall.

Nothing is assumed of how times are distributed: step times are skewed, and a shared machine has
two speeds. What is said rests on ranks alone. Of N runs and N more under the same conditions, each
order is as likely as any other, so the chance that the median of the second N lies between two of
the first N can be counted (a prediction interval from order statistics: Fligner and Wolfe, The
American Statistician 30, 1976; David and Nagaraja, Order Statistics, 2003, section 7.3).
"""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from functools import cache
from math import comb
from typing import TYPE_CHECKING

from bench.interval import CONFIDENCE

if TYPE_CHECKING:
    from bench.study.columns import Array

ENOUGH = 5
"""From so many repeats on an interval is given, below only their range."""


class Spread(StrEnum):
    """What the two ends beside a median are."""

    NONE = "none"
    WITHIN = "within the run"
    RANGE = "range"
    PREDICTION = "prediction interval"


@cache
def find_coverage(runs: int, depth: int = 1) -> float:
    """How often the median of as many more runs lies between the ``depth``-th from either end.

    Exact for an odd number of runs without ties; else the true share is higher.

    >>> [round(find_coverage(n), 3) for n in (3, 5, 7, 9)]
    [0.6, 0.833, 0.93, 0.971]
    """
    middle = (runs + 1) // 2
    # the median of the second sample is below the depth-th of the first where of the first
    # ``drawn`` in order fewer than ``depth`` are of the first: a hypergeometric tail
    drawn = middle + depth - 1
    term = below = comb(runs, drawn)
    for of_first in range(1, depth):
        term = term * (runs - of_first + 1) * (drawn - of_first + 1)
        term //= of_first * (runs - drawn + of_first)
        below += term
    return max(0.0, 1 - 2 * below / comb(2 * runs, drawn))


@cache
def choose_depth(runs: int) -> int:
    """The narrowest interval of `CONFIDENCE`: its ends' rank from outside; 1, the range, if none.

    >>> [choose_depth(n) for n in (3, 5, 9, 15, 30)]
    [1, 1, 1, 2, 7]
    """
    depths = range(1, (runs + 1) // 2 + 1)
    wide = bisect_left(depths, True, key=lambda d: find_coverage(runs, d) < CONFIDENCE)
    return max(wide, 1)


def find_middle(values: Array, group: Array) -> tuple[Array, Array, Array]:
    """Median, lower end and upper end of the values in each group; of one value it has no ends.

    Args:
        values: NaN for none.
        group: the number of each one's group, from 0 without a gap.
    """
    import numpy as np

    size = np.bincount(group)
    number = np.bincount(group, values == values).astype(int)
    start = np.cumsum(size) - size
    ordered = values[np.lexsort((values, group))]  # NaN is last in its group
    middle = (ordered[start + np.maximum(number - 1, 0) // 2] + ordered[start + number // 2]) / 2
    kinds, kind = np.unique(number, return_inverse=True)
    depth = np.array([choose_depth(n) if n > 1 else 1 for n in kinds.tolist()], int)[kind]
    low, high = ordered[start + depth - 1], ordered[start + np.maximum(number - depth, 0)]
    low[number < 2] = high[number < 2] = np.nan
    return middle, low, high
