"""How far the logarithms of two sides of repeats lie apart, and what chance makes of it.

A p-value refers Welch's statistic to the degrees of freedom that follow from the median noise ratio
of all cases. A case's own two variances are a poor estimate of it: Holm looks far into the tail,
where a case mostly is because its variance came out small by chance, and its degrees of freedom too
large. By simulation (24 equal cases, 20 % noise, 3 against 10 repeats), own degrees of freedom call
a difference in 15 % of comparisons, and in 28 % where the three are also the noisier; the median's
in 1 %. A single case has only its own: 5 %. The median errs where each case has a noise ratio of
its own: at 10 % noise and ratios spread from 1/4 to 4, in 5 to 8 % of comparisons. A paired case
has n - 1, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from bench.interval import find_freedom, find_reach

SIDES = ("A", "B")
"""What the two sides are called in a reason, unless the caller has better names."""

ROUNDING = 1e-12
"""Values this close, relatively, are one value written twice."""


class Spread(NamedTuple):
    variance: float
    number: int


@dataclass(frozen=True)
class Difference:
    """Mean difference B - A of one case's logarithms, and each side's spread. ``pairs`` differences
    of paired readings are a side A with their spread and a side B without any: its degrees of
    freedom are pairs - 1."""

    shift: float
    a: Spread
    b: Spread
    pairs: int = 0

    @property
    def error(self) -> float:
        return math.sqrt(self.a.variance / self.a.number + self.b.variance / self.b.number)

    def freedom(self, noise: float | None = None) -> float:
        """Satterthwaite's degrees of freedom; ``noise`` is the variance of A's side over that of
        B's, by default the case's own."""
        a, b = (self.a.variance, self.b.variance) if noise is None else (noise, 1.0)
        return find_freedom([(a, self.a.number), (b, self.b.number)])


def adjust(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for being the smallest of many (Holm 1979, step-down).

    >>> adjust([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


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
    """Mean of the logarithms, and their unbiased variance: 0 where the values are one."""
    logs = [math.log(value) for value in values]
    mean = fmean(logs)
    if max(values) - min(values) <= ROUNDING * max(values):
        return mean, Spread(0.0, len(logs))
    squares = math.fsum((log - mean) ** 2 for log in logs)
    return mean, Spread(squares / (len(logs) - 1), len(logs))


def find_interval(difference: Difference, confidence: float) -> tuple[float, float]:
    reach = find_reach([difference.a, difference.b], confidence)
    return exp(difference.shift - reach), exp(difference.shift + reach)


def find_p_values(cases: Sequence[Difference]) -> list[float]:
    if not cases:  # as of single runs, for which scipy need not be imported
        return []
    from scipy.special import stdtr

    return [
        min(1.0, 2 * float(stdtr(freedom, -abs(case.shift) / case.error)))
        for case, freedom in zip(cases, find_freedoms(cases), strict=True)
    ]


def find_freedoms(cases: Sequence[Difference]) -> list[float]:
    """Degrees of freedom of each case's test; see the module."""
    noises = {
        index: math.log(case.a.variance / case.b.variance)
        for index, case in enumerate(cases)
        if case.a.variance and case.b.variance
    }
    typical = math.exp(median(noises.values())) if noises else None
    # a side that never varies leaves the noise to the other, and says nothing about the typical
    return [case.freedom(typical if i in noises else None) for i, case in enumerate(cases)]


def exp(log: float) -> float:
    return math.exp(min(log, 700.0))  # e^710 overflows
