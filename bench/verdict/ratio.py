"""The ratio of two sides of repeats, and whether it differs from 1 by more than a margin.

Times, bytes, losses and joules are positive and differ by factors, so everything is done on
logarithms: the ratio B/A is that of geometric means, and a margin of 2 % is a ratio above 1.02 or
below 1/1.02, so that swapping the sides swaps the verdict. The ratio of one case has Welch's 95 %
interval (Welch 1947; Satterthwaite's degrees of freedom), that of
``scipy.stats.ttest_ind(log b, log a, equal_var=False)``. A case is judged by two questions.

1. Do the sides differ at all? Of many cases chance answers yes for some, so p-values are adjusted
   by Holm (1979) over all cases of one metric: where none differs, the probability that any is
   called different is at most 5 %.
2. Do they differ by more than the margin? The case's own interval answers: it lies beyond the
   margin, within it ("same"), or across its end ("ambiguous").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from bench.interval import CONFIDENCE
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
    """What the repeats of one case say of B/A.

    Attributes:
        value: ratio of geometric means; None where there is none, and ``lack`` says why.
        low, high: the 95 % interval; None with too few repeats.
        p: two-sided, of no difference; None where nothing was tested.
        p_adjusted: by Holm over the family.
        exact: both sides repeat without any spread; the interval is a point, and there is no p.
        lack: why there is no ratio, or no verdict on it; empty where there is one.
        pairs: how many seeds of both sides were compared pair by pair; 0 where none were.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    exact: bool = False
    lack: str = ""
    pairs: int = 0

    def invert(self) -> Ratio:
        """The same of A/B: of times, what is a speed."""
        value, low, high = (x and 1 / x for x in (self.value, self.high, self.low))
        return replace(self, value=value, low=low, high=high)

    def judge(self, margin: float) -> Verdict:
        """Conclude against ``margin``, a fraction: 0.02 is 2 %."""
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
        """Whether the interval is so wide that lower, same and higher are all possible."""
        if self.lack or self.low is None or self.high is None:
            return False
        return self.low < 1 / (1 + margin) and self.high > 1 + margin

    def foretell(self, margin: float, repeats: int) -> float:
        """Repeats a side from which on it may be decided what ``repeats`` did not decide. The
        interval narrows with the square root of their number, and these bring its end to that of
        the margin: of sides that differ by more, half are then decided. Infinite without one."""
        if not (self.value and self.low and self.high):
            return math.inf
        reach = math.log(self.high / self.low) / 2
        apart = abs(abs(math.log(self.value)) - math.log1p(margin))
        return repeats * (reach / apart) ** 2 if apart else math.inf

    @property
    def differs(self) -> bool:
        """Whether the sides differ at all, at 5 % family-wise."""
        return self.exact or (self.p_adjusted is not None and self.p_adjusted < 1 - CONFIDENCE)

    def explain(self, margin: float) -> str:
        """Say why there is no verdict or an ambiguous one; empty for the others."""
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
"""The repeats of one case, A's and B's."""


def compare(
    family: Sequence[Samples], deterministic: bool = False, names: tuple[str, str] = SIDES
) -> list[Ratio]:
    """The ratio B/A of each case of a family, in order, with evidence adjusted over all of it.

    Args:
        family: all cases of one metric.
        deterministic: the metric may truly repeat to the last digit, as the bytes an allocator
            takes do: the ratio is then exact, and the margin alone decides. A clock or a power
            meter that shows no spread was not read independently, and there is no verdict.
        names: what A and B are called in a reason.
    """
    return estimate([find_lack(a, b, names) or subtract(a, b) for a, b in family], deterministic)


def estimate(cases: Sequence[Difference | str], deterministic: bool = False) -> list[Ratio]:
    """The ratio of each case; of one that has none, why."""
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
