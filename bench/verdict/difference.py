"""The difference of the mean logarithms of two sides of repeats, its interval and p-value.

A p-value is of Welch's statistic, with the degrees of freedom that follow from the median noise
ratio (variance of A over that of B) of all cases. A case's own two variances are a poor estimate of
it: Holm looks far into the tail, where most cases are because their variance came out small by
chance, and their degrees of freedom too large. By simulation (24 equal cases, 20 % noise, 3 against
10 repeats), a case's own degrees of freedom give a false positive in 15 % of comparisons, and in
28 % if the side with 3 is also noisier; those of the median in 1 %. A single case has only its own:
5 %. With a different noise ratio in each case, the median errs too: at 10 % noise and ratios from
1/4 to 4, in 5 to 8 % of comparisons. A paired case has n - 1, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from bench.interval import find_freedom, find_half_width

SIDES = ("A", "B")
"""Default names of the two sides in a reason."""

ROUNDING = 1e-12
"""Values within this relative difference are treated as equal."""


class Spread(NamedTuple):
    variance: float
    number: int


@dataclass(frozen=True)
class Difference:
    """Difference B - A of one case's mean logarithms, and the spread of each side. For paired
    readings, A has the spread of the ``pairs`` differences and B has none: the degrees of freedom
    are pairs - 1."""

    shift: float
    a: Spread
    b: Spread
    pairs: int = 0

    @property
    def error(self) -> float:
        return math.sqrt(self.a.variance / self.a.number + self.b.variance / self.b.number)

    def freedom(self, noise: float | None = None) -> float:
        """Return Satterthwaite's degrees of freedom. ``noise`` is the variance of A over that of B,
        by default the case's own."""
        a, b = (self.a.variance, self.b.variance) if noise is None else (noise, 1.0)
        return find_freedom([(a, self.a.number), (b, self.b.number)])


def adjust(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons (Holm 1979, step-down).

    >>> adjust([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def find_unit(a: Sequence[float], b: Sequence[float]) -> float:
    """Return 0 where two sides have a ratio, as all values are positive. Else they are compared by
    their difference, in this unit: the larger of the two means of the values without their signs,
    which do not cancel where a loss is above zero with some seeds and below it with others. A
    margin of 2 % is then 2 % of that; of a loss that is 0 on both sides every difference is large.
    """
    known = [side for side in (a, b) if side]
    if all(value > 0 for side in known for value in side):
        return 0.0
    return max(fmean(map(abs, side)) for side in known) or 1.0


def scale(value: float, unit: float) -> float:
    """Return the positive number whose logarithm is ``value`` in `find_unit`'s unit; the value
    itself without one."""
    return exp(value / unit) if unit and math.isfinite(value) else value


def find_lack(a: Sequence[float], b: Sequence[float], names: tuple[str, str]) -> str:
    sides = list(zip(names, (a, b), strict=True))
    if empty := [name for name, values in sides if not values]:
        return f"no value in {' or '.join(empty)}"
    wrong = [name for name, values in sides if not all(map(has_log, values))]
    return f"a value in {' and '.join(wrong)} is not positive: no ratio" if wrong else ""


def has_log(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def subtract(a: Sequence[float], b: Sequence[float]) -> Difference:
    (mean_a, spread_a), (mean_b, spread_b) = summarize(a), summarize(b)
    return Difference(mean_b - mean_a, spread_a, spread_b)


def summarize(values: Sequence[float]) -> tuple[float, Spread]:
    """Return the mean of the logarithms and their unbiased variance: 0 if all values are equal."""
    logs = [math.log(value) for value in values]
    mean = fmean(logs)
    if max(values) - min(values) <= ROUNDING * max(values):
        return mean, Spread(0.0, len(logs))
    squares = math.fsum((log - mean) ** 2 for log in logs)
    return mean, Spread(squares / (len(logs) - 1), len(logs))


def find_interval(difference: Difference, confidence: float) -> tuple[float, float]:
    reach = find_half_width([difference.a, difference.b], confidence)
    return exp(difference.shift - reach), exp(difference.shift + reach)


def find_p_values(cases: Sequence[Difference]) -> list[float]:
    if not cases:  # as for single runs, which need no import of scipy
        return []
    from scipy.special import stdtr

    return [
        min(1.0, 2 * float(stdtr(freedom, -abs(case.shift) / case.error)))
        for case, freedom in zip(cases, find_freedoms(cases), strict=True)
    ]


def find_freedoms(cases: Sequence[Difference]) -> list[float]:
    """Return the degrees of freedom of each case's test; see the module."""
    noises = {
        index: math.log(case.a.variance / case.b.variance)
        for index, case in enumerate(cases)
        if case.a.variance and case.b.variance
    }
    typical = math.exp(median(noises.values())) if noises else None
    # if one side never varies, the case uses its own variances
    return [case.freedom(typical if i in noises else None) for i, case in enumerate(cases)]


def exp(log: float) -> float:
    return math.exp(min(log, 700.0))  # e^710 overflows
