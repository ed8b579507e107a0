"""The ratio of two sides of repeats, and whether it differs from 1 by more than a margin.

Times, bytes, losses and joules are positive and differ by factors, so everything is done on
logarithms: the ratio B/A is of geometric means, and a margin of 2 % is exceeded by a ratio above
1.02 or below 1/1.02, so that swapping the sides swaps the verdict. The ratio of one case has
Welch's 95 % interval (Welch 1947; Satterthwaite's degrees of freedom), as in
``scipy.stats.ttest_ind(log b, log a, equal_var=False)``. A case is judged by two questions.

1. Do the sides differ at all? Among many cases some differ by chance, so p-values are adjusted by
   Holm (1979) over all cases of one metric: if none differs, the probability that any is called
   different is at most 5 %.
2. Do they differ by more than the margin? The case's own interval decides: it lies beyond the
   margin, within it ("same"), or across its end ("ambiguous").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from bench.interval import CONFIDENCE, estimate_repeats
from bench.limits import MIN_REPEATS
from bench.verdict.difference import (
    SIDES,
    Difference,
    adjust,
    exp,
    find_interval,
    find_lack,
    find_p_values,
    subtract,
)


class Verdict(Enum):
    LOWER = "lower"
    HIGHER = "higher"
    SAME = "same"
    AMBIGUOUS = "ambiguous"
    NONE = "no verdict"


@dataclass(frozen=True)
class Ratio:
    """The ratio B/A of one case, estimated from its repeats.

    Attributes:
        value: ratio of geometric means; None if there is none, and ``lack`` says why.
        low, high: the 95 % interval; None with too few repeats.
        p: two-sided p-value of no difference; None if nothing was tested.
        p_adjusted: ``p``, adjusted by Holm over the family.
        exact: both sides repeat without any spread; the interval is a point, and there is no p.
        lack: why there is no ratio or no verdict on it; empty if there is one.
        pairs: number of seeds compared pair by pair; 0 if the sides were not paired.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    exact: bool = False
    lack: str = ""
    pairs: int = 0
    unit: float = 0.0

    @property
    def difference(self) -> tuple[float, float | None, float | None] | None:
        """B - A with the ends of its interval, where the sides were compared by that; else None."""
        if not self.unit or self.value is None:
            return None
        value, low, high = (
            None if end is None else self.unit * math.log(end)
            for end in (self.value, self.low, self.high)
        )
        assert value is not None
        return value, low, high

    def invert(self) -> Ratio:
        """Return the ratio A/B: for times, the speed."""
        value, low, high = (x and 1 / x for x in (self.value, self.high, self.low))
        return replace(self, value=value, low=low, high=high)

    def judge(self, margin: float) -> Verdict:
        """Return the verdict for ``margin``, a fraction: 0.02 is 2 %."""
        if self.lack or self.low is None or self.high is None:
            return Verdict.NONE
        limit = 1 + margin
        if self.differs and self.low > limit:
            return Verdict.HIGHER
        if self.differs and self.high < 1 / limit:
            return Verdict.LOWER
        inside = 1 / limit <= self.low and self.high <= limit
        return Verdict.SAME if inside else Verdict.AMBIGUOUS

    def rules_out_nothing(self, margin: float) -> bool:
        """Return whether the interval is so wide that lower, same and higher are all possible."""
        if self.lack or self.low is None or self.high is None:
            return False
        return self.low < 1 / (1 + margin) and self.high > 1 + margin

    def estimate_repeats(self, margin: float, repeats: int) -> float:
        """Return the repeats per side that may decide what ``repeats`` did not: with so many the
        interval ends at the margin, and half of the sides that differ by more are decided.
        Infinite without an interval, and if it would take too many."""
        if not (self.value and self.low and self.high):
            return math.inf
        reach = math.log(self.high / self.low) / 2
        apart = abs(abs(math.log(self.value)) - math.log1p(margin))
        return estimate_repeats(reach, apart, repeats, sides=1 if self.pairs else 2)

    @property
    def differs(self) -> bool:
        """Whether the sides differ at all, at a family-wise error of 5 %."""
        return self.exact or (self.p_adjusted is not None and self.p_adjusted < 1 - CONFIDENCE)

    def explain(self, margin: float) -> str:
        """Explain a missing or ambiguous verdict; empty for the others."""
        verdict = self.judge(margin)
        if verdict is Verdict.NONE:
            return self.lack
        if verdict is not Verdict.AMBIGUOUS or self.low is None or self.high is None:
            return ""
        if self.differs:
            return "differs, perhaps by less than the margin"
        if self.low > 1 + margin or self.high < 1 / (1 + margin):
            return "beyond the margin by itself, but may be chance among all the cases"
        return "may differ or not"


Samples = tuple[Sequence[float], Sequence[float]]
"""The repeats of one case: A's and B's."""


def compare(
    family: Sequence[Samples], deterministic: bool = False, names: tuple[str, str] = SIDES
) -> list[Ratio]:
    """Return the ratio B/A of each case of a family, in order, with p-values adjusted over it.

    Args:
        family: all cases of one metric.
        deterministic: the metric may repeat to the last digit, like an allocator's bytes: the
            ratio is then exact, and the margin alone decides. Otherwise readings without spread
            (of a clock or a power meter) are not independent, and there is no verdict.
        names: the names of A and B in a reason.
    """
    return estimate([find_lack(a, b, names) or subtract(a, b) for a, b in family], deterministic)


def estimate(cases: Sequence[Difference | str], deterministic: bool = False) -> list[Ratio]:
    """Return the ratio of each difference; a string is the reason why a case has none."""
    ratios: list[Ratio] = []
    tested: dict[int, Difference] = {}
    for index, difference in enumerate(cases):
        if isinstance(difference, str):
            ratios.append(Ratio(lack=difference))
            continue
        value, pairs = exp(difference.shift), difference.pairs
        counts = (difference.a.number, difference.b.number)
        if min(counts) < MIN_REPEATS:
            has = " and ".join(dict.fromkeys(map(str, counts)))
            lack = f"needs {MIN_REPEATS} repeats a side, has {has}"
            ratios.append(Ratio(value, lack=lack, pairs=pairs))
        elif difference.a.variance or difference.b.variance:
            tested[index] = difference
            ratios.append(Ratio(value, *find_interval(difference, CONFIDENCE), pairs=pairs))
        elif deterministic or pairs:
            ratios.append(Ratio(value, value, value, exact=True, pairs=pairs))
        else:
            lack = "repeats equal to the last digit are not independent readings"
            ratios.append(Ratio(value, lack=lack))
    p_values = find_p_values(list(tested.values()))
    for index, p, p_adjusted in zip(tested, p_values, adjust(p_values), strict=True):
        ratios[index] = replace(ratios[index], p=p, p_adjusted=p_adjusted)
    return ratios
