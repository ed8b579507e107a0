"""Whether two sets of repeats differ, and by more than a margin.

Times, bytes, losses and joules are positive and differ by factors, so all is done on logarithms:
the ratio B/A is that of geometric means. One case's ratio has Welch's 95 % interval (Welch 1947;
Satterthwaite's degrees of freedom), as ``scipy.stats.ttest_ind(log b, log a, equal_var=False)``.

A case is judged by two questions.

1. Do the sides differ at all? Asked of many cases, chance answers yes for some, so each p-value is
   adjusted by Holm (1979) over all cases of one metric: where no case differs, the probability
   that any is called different is at most 5 %.
2. By more than the margin? The case's own interval answers: it lies beyond the margin, within it
   ("same", which is equivalence shown by two one-sided tests, at 2.5 % each), or across it.

A loss is judged over seeds (`compare_seeds`): one epoch's loss differs from seed to seed by more
than most changes move it, and a deterministic network repeats one seed's to the last digit, which
says nothing about the next seed.

A margin of 2 % is a ratio above 1.02 or below 1/1.02, so that swapping the sides swaps the verdict.

The p-value of the first question refers Welch's statistic to the degrees of freedom that follow
from the median noise ratio of all cases. A case's own two variances are poor at saying it: Holm
looks far into the tail, where a case mostly stands because its variance came out small by chance,
and then its own degrees of freedom came out too large. By simulation (24 equal cases, 20 % noise, 3
against 10 repeats), own degrees of freedom call a difference in 15 % of comparisons, and in 28 %
where the three are also the noisier; the median's in 1 %. A single case has only its own: 5 %. The
median errs where each case has a noise ratio of its own: at 10 % noise and ratios spread from 1/4
to 4, in 5 to 8 % of comparisons.

Nothing here sees what repeats cannot show: one sweep is one session, and what differs between
sessions (temperature, other load) counts as a difference between A and B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean, median

from bench.limits import MIN_REPEATS

CONFIDENCE = 0.95
"""Of a case's interval; the rest is the family-wise error of the first question."""

MIN_SEEDS = MIN_REPEATS
"""Distinct seeds a side for a verdict on what was learnt."""

ROUNDING = 1e-12
"""Values this close, relatively, are one value written twice."""


class Verdict(Enum):
    """What is concluded of B against A."""

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
        low: lower end of the 95 % interval; None with too few repeats.
        high: its upper end.
        p: two-sided, of no difference; None where nothing was tested.
        p_adjusted: by Holm over the family.
        exact: both sides repeat without any spread; the interval is a point, and there is no p.
        lack: why there is no ratio, or no verdict on it; empty where there is one.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    exact: bool = False
    lack: str = ""

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
        return "may differ or not; more repeats would tell"


@dataclass(frozen=True)
class _Spread:
    """Variance of one side's logarithms, and how many there are."""

    variance: float
    count: int


@dataclass(frozen=True)
class _Difference:
    """Mean difference B - A of one case's logarithms, and each side's spread."""

    shift: float
    a: _Spread
    b: _Spread

    @property
    def error(self) -> float:
        """Standard error of the difference."""
        return math.sqrt(self.a.variance / self.a.count + self.b.variance / self.b.count)

    def freedom(self, noise: float | None = None) -> float:
        """Satterthwaite's degrees of freedom.

        Args:
            noise: variance of A's side over that of B's; by default, the case's own.
        """
        variances = (self.a.variance, self.b.variance) if noise is None else (noise, 1.0)
        a, b = variances[0] / self.a.count, variances[1] / self.b.count
        a, b = a / max(a, b), b / max(a, b)  # squares of tiny variances would vanish
        return (a + b) ** 2 / (a**2 / (self.a.count - 1) + b**2 / (self.b.count - 1))


Samples = tuple[Sequence[float], Sequence[float]]
"""The repeats of one case, A's and B's."""


Seeded = tuple[Mapping[int, Sequence[float]], Mapping[int, Sequence[float]]]
"""The repeats of one case by their seed, A's and B's."""


def compare(family: Sequence[Samples], deterministic: bool = False) -> list[Ratio]:
    """Estimate the ratio B/A of each case of a family, with evidence adjusted over all of it.

    Args:
        family: all cases of one metric.
        deterministic: the metric may truly repeat to the last digit, as the bytes an allocator
            takes do. Then repeats without spread on both sides are taken at their word: the ratio
            is exact, and the margin alone decides. A clock or a power meter that shows no spread
            was not read independently, and there is no verdict.

    Returns:
        A ratio for each case, in order.
    """
    ratios: list[Ratio] = []
    tested: dict[int, _Difference] = {}
    for index, (a, b) in enumerate(family):
        lack = _lack(a, b)
        if lack:
            ratios.append(Ratio(lack=lack))
            continue
        difference = _subtract(a, b)
        value = _exp(difference.shift)
        if min(len(a), len(b)) < MIN_REPEATS:
            has = " and ".join(dict.fromkeys((str(len(a)), str(len(b)))))
            lack = f"needs {MIN_REPEATS} repeats a side, has {has}"
            ratios.append(Ratio(value, lack=lack))
        elif difference.a.variance or difference.b.variance:
            tested[index] = difference
            ratios.append(Ratio(value, *_interval(difference)))
        elif deterministic:
            ratios.append(Ratio(value, value, value, exact=True))
        else:
            lack = "repeats equal to the last digit are not independent readings"
            ratios.append(Ratio(value, lack=lack))
    p_values = _test(list(tested.values()))
    for index, p, p_adjusted in zip(tested, p_values, adjust(p_values), strict=True):
        was = ratios[index]
        ratios[index] = Ratio(was.value, was.low, was.high, p, p_adjusted)
    return ratios


def compare_seeds(family: Sequence[Seeded]) -> list[Ratio]:
    """Estimate the ratio B/A of what each case of a family learnt, over seeds.

    Repeats of one seed are no further evidence: their geometric mean is one reading. Where both
    sides ran the same seeds, enough of them, and agree in each to the last digit, the ratio is
    exactly 1. With fewer than `MIN_SEEDS` a side there is no verdict.

    Returns:
        A ratio for each case, in order.
    """
    means = [tuple({s: _mean(v) for s, v in side.items() if v} for side in pair) for pair in family]
    ratios = iter(
        compare([(list(a.values()), list(b.values())) for a, b in means if not _equal(a, b)])
    )
    return [
        Ratio(1.0, 1.0, 1.0, exact=True) if _equal(a, b) else _ask_for_seeds(next(ratios), a, b)
        for a, b in means
    ]


def _mean(values: Sequence[float]) -> float:
    """The geometric mean; of values that have none, the first that is not positive."""
    odd = [value for value in values if not (value > 0 and math.isfinite(value))]
    if odd or len(values) == 1:
        return (odd or values)[0]
    return math.exp(fmean(math.log(value) for value in values))


def _equal(a: Mapping[int, float], b: Mapping[int, float]) -> bool:
    """Whether both sides ran the same seeds, enough of them, and agree in each."""
    return (
        len(a) >= MIN_SEEDS
        and a.keys() == b.keys()
        and all(value > 0 and abs(value - b[seed]) <= ROUNDING * value for seed, value in a.items())
    )


def _ask_for_seeds(ratio: Ratio, a: Mapping[int, float], b: Mapping[int, float]) -> Ratio:
    """Say which side lacks seeds, where one does, and how far the readings are apart."""
    fewest = min(len(a), len(b))
    if ratio.value is None or fewest >= MIN_SEEDS:
        return ratio
    short = [name for name, side in (("A", a), ("B", b)) if len(side) == fewest]
    where = "" if len(short) == 2 else f" in {short[0]}"
    if fewest > 1:
        return replace(ratio, lack=f"two seeds{where}: needs three")
    apart = abs(ratio.value - 1)
    differs = f"differs by {100 * apart:.2g} %" if apart > ROUNDING else "equal"
    return replace(ratio, lack=f"one seed{where}: {differs}, no verdict")


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


def _lack(a: Sequence[float], b: Sequence[float]) -> str:
    """Why two sets of values have no ratio; empty where they have."""
    empty = [name for name, values in (("A", a), ("B", b)) if not values]
    if empty:
        return f"no value in {' or '.join(empty)}"
    wrong = [
        name
        for name, values in (("A", a), ("B", b))
        if not all(value > 0 and math.isfinite(value) for value in values)
    ]
    return f"a value in {' and '.join(wrong)} is not positive: no ratio" if wrong else ""


def _subtract(a: Sequence[float], b: Sequence[float]) -> _Difference:
    (mean_a, spread_a), (mean_b, spread_b) = _summarize(a), _summarize(b)
    return _Difference(mean_b - mean_a, spread_a, spread_b)


def _summarize(values: Sequence[float]) -> tuple[float, _Spread]:
    """Mean of the logarithms, and their unbiased variance: 0 where the values are one."""
    logs = [math.log(value) for value in values]
    mean = fmean(logs)
    if max(values) - min(values) <= ROUNDING * max(values):
        return mean, _Spread(0.0, len(logs))
    squares = math.fsum((log - mean) ** 2 for log in logs)
    return mean, _Spread(squares / (len(logs) - 1), len(logs))


def _interval(difference: _Difference) -> tuple[float, float]:
    from scipy.special import stdtrit

    reach = float(stdtrit(difference.freedom(), (1 + CONFIDENCE) / 2)) * difference.error
    return _exp(difference.shift - reach), _exp(difference.shift + reach)


def _test(cases: Sequence[_Difference]) -> list[float]:
    """Two-sided p-values of no difference; see the module for the degrees of freedom."""
    from scipy.special import stdtr

    noises = {
        index: math.log(case.a.variance / case.b.variance)
        for index, case in enumerate(cases)
        if case.a.variance and case.b.variance
    }
    typical = math.exp(median(noises.values())) if noises else None
    p_values = []
    for index, case in enumerate(cases):
        # a side that never varies leaves the noise to the other, and is no case of the typical
        freedom = case.freedom(typical if index in noises else None)
        p_values.append(min(1.0, 2 * float(stdtr(freedom, -abs(case.shift) / case.error))))
    return p_values


def _exp(log: float) -> float:
    return math.exp(min(log, 700.0))  # e^710 overflows
