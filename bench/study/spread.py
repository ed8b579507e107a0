"""The spread of a case's repeats, and a prediction of the median of as many more.

No distribution of times is assumed: step times are skewed, and a shared machine has two speeds.
Everything rests on ranks alone. Of N runs and N more under the same conditions, each order is
equally likely, so the probability that the median of the second N lies between two of the first N
can be counted (a prediction interval from order statistics: Fligner and Wolfe, The
American Statistician 30, 1976; David and Nagaraja, Order Statistics, 2003, section 7.3).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from math import comb

from bench.interval import CONFIDENCE

ENOUGH = 5
"""Fewest repeats for a prediction interval; with fewer, only their range is given."""


class Spread(StrEnum):
    """The meaning of the two ends beside a median."""

    NONE = "none"
    WITHIN = "within the run"
    RANGE = "range"
    PREDICTION = "prediction interval"


@cache
def find_coverage(runs: int, depth: int = 1) -> float:
    """Return how often the median of as many more runs lies between the ``depth``-th from each end.

    Exact for an odd number of runs without ties; otherwise the true share is higher.

    >>> [round(find_coverage(n), 3) for n in (3, 5, 7, 9)]
    [0.6, 0.833, 0.93, 0.971]
    """
    middle = (runs + 1) // 2
    # the median of the second sample is below the depth-th of the first if fewer than ``depth`` of
    # the ``drawn`` smallest pooled values are of the first: a hypergeometric tail
    drawn = middle + depth - 1
    term = below = comb(runs, drawn)
    for of_first in range(1, depth):
        term = term * (runs - of_first + 1) * (drawn - of_first + 1)
        term //= of_first * (runs - drawn + of_first)
        below += term
    return max(0.0, 1 - 2 * below / comb(2 * runs, drawn))


@cache
def choose_depth(runs: int) -> int:
    """Return the depth of the narrowest interval with `CONFIDENCE`; 1, the range, if none has it.

    >>> [choose_depth(n) for n in (3, 5, 9, 15, 30)]
    [1, 1, 1, 2, 7]
    """
    depths = range(1, (runs + 1) // 2 + 1)
    wide = bisect_left(depths, True, key=lambda d: find_coverage(runs, d) < CONFIDENCE)
    return max(wide, 1)


def find_middle(values: Iterable[float]) -> tuple[float, float, float]:
    """Return median, lower end and upper end of the known values; the ends of a single one are
    NaN."""
    known = sorted(value for value in values if value == value)
    number = len(known)
    if not number:
        return math.nan, math.nan, math.nan
    middle = (known[(number - 1) // 2] + known[number // 2]) / 2
    if number < 2:
        return middle, math.nan, math.nan
    depth = choose_depth(number)
    return middle, known[depth - 1], known[-depth]
