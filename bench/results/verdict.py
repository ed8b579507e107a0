"""Whether two sets of repeats differ by more than a margin, or are equivalent: of times, bytes and
joules by their ratio, of losses and errors over seeds.

Repeats cannot show differences between sessions: one sweep is one session, so temperature or other
load that differs between sessions counts as a difference between A and B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean, median
from typing import NamedTuple

from bench.base.limits import CONFIDENCE, LEAST_GAIN, MIN_REPEATS, find_freedom, find_quantile
from bench.networks.data.cifar10 import CLASSES
from bench.networks.workloads import IMAGES

ROUNDING = 1e-12
"""Values within this relative difference are treated as equal."""


# ----------------------------------------------------------------------------------- the difference
#
# The difference of two sides of repeats, its interval and p-value. Of times, bytes and joules it is
# of the logarithms of their medians, which are what is shown; of losses over seeds of their mean
# logarithms. The interval of a median is that of a mean, by Welch, but as much wider as the median
# of a few normal readings varies more than their mean: by simulation it then holds at least as
# often (3 against 3: 97.4 %, the mean's 96.6 %; 3 against 10: 94.8 and 93.6 %; 5 against 5: 96.4
# and 95.5 %), and one run of three that was disturbed moves no number that is shown.
#
# A p-value is of Welch's statistic, with the degrees of freedom that follow from the median noise
# ratio (variance of A over that of B) of all cases. A case's own two variances are a poor estimate
# of it: Holm looks far into the tail, where most cases are because their variance came out small by
# chance, and their degrees of freedom too large. By simulation (24 equal cases, 20 % noise, 3
# against 10 repeats), a case's own degrees of freedom give a false positive in 15 % of comparisons,
# and in 28 % if the side with 3 is also noisier; those of the median in 1 %. A single case has only
# its own: 5 %. With a different noise ratio in each case, the median errs too: at 10 % noise and
# ratios from 1/4 to 4, in 5 to 8 % of comparisons. A paired case has n - 1, which is exact.


class GroupSpread(NamedTuple):
    variance: float
    number: int


@dataclass(frozen=True)
class Difference:
    """Difference B - A of logarithms, of one case or the mean over several, and the spreads of
    both sides of each. For paired readings, A has the spread of the ``pairs`` differences and B has
    none: the degrees of freedom are pairs - 1."""

    shift: float
    sides: tuple[tuple[GroupSpread, GroupSpread], ...]
    pairs: int = 0

    @property
    def counts(self) -> tuple[int, int]:
        a, b = (min(spread.number for spread in side) for side in zip(*self.sides, strict=True))
        return a, b

    @property
    def error(self) -> float:
        return math.sqrt(sum(map(_square_error, self.sides))) / len(self.sides)

    def freedom(self, noise: float | None = None) -> float:
        """Return Satterthwaite's degrees of freedom. ``noise`` is the variance of A over that of B,
        by default, and where a side has none, the case's own."""
        squares = [*map(_square_error, self.sides)]
        parts = 0.0
        for square, (a, b) in zip(squares, self.sides, strict=True):
            known = noise is not None and a.variance > 0 < b.variance
            variances = (noise, 1.0) if noise is not None and known else (a.variance, b.variance)
            if square:
                of = find_freedom([(variances[0], a.number), (variances[1], b.number)])
                parts += (square / sum(squares)) ** 2 / of
        return 1 / parts


def _square_error(sides: tuple[GroupSpread, GroupSpread]) -> float:
    return sum(spread.variance / spread.number for spread in sides)


def pool(cases: Sequence[Difference]) -> Difference:
    """Return the mean of some cases' differences."""
    sides = tuple(both for case in cases for both in case.sides)
    return Difference(fmean(case.shift for case in cases), sides)


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


def subtract(
    a: Sequence[float],
    b: Sequence[float],
    take: Callable[[Sequence[float]], tuple[float, GroupSpread]],
) -> Difference | str:
    """Return the difference of two sides, or why there is none; ``take`` is `summarize` or
    `summarize_middle`."""
    if not a or not b:
        return "a side has no value"
    if not all(value > 0 and math.isfinite(value) for value in (*a, *b)):
        return "a value is not positive: no ratio"
    (level_a, spread_a), (level_b, spread_b) = take(a), take(b)
    return Difference(level_b - level_a, ((spread_a, spread_b),))


def summarize(values: Sequence[float]) -> tuple[float, GroupSpread]:
    """Return the mean of the logarithms and their unbiased variance: 0 if all values are equal."""
    logs = [math.log(value) for value in values]
    mean = fmean(logs)
    if max(values) - min(values) <= ROUNDING * max(values):
        return mean, GroupSpread(0.0, len(logs))
    squares = math.fsum((log - mean) ** 2 for log in logs)
    return mean, GroupSpread(squares / (len(logs) - 1), len(logs))


def summarize_middle(values: Sequence[float]) -> tuple[float, GroupSpread]:
    """Return the logarithm of the median, and the variance of logarithms by which a mean of as many
    would be as uncertain as that median is."""
    _, spread = summarize(values)
    more = _OF_MEDIANS[len(values)] if len(values) < len(_OF_MEDIANS) else math.pi / 2
    return math.log(median(values)), GroupSpread(spread.variance * more, spread.number)


_OF_MEDIANS = (1, 1, 1, 1.346, 1.193, 1.434, 1.288, 1.473, 1.346, 1.495, 1.383)
"""The variance of the median of so many normal readings over that of their mean; of more it is at
most pi / 2."""


def pool_noise(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation of the logarithms of one reading, by groups of readings of one
    thing each, and its degrees of freedom; NaN and 0 where no group has two."""
    spreads = [summarize(group)[1] for group in groups if len(group) > 1]
    freedom = sum(spread.number - 1 for spread in spreads)
    squares = math.fsum(spread.variance * (spread.number - 1) for spread in spreads)
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def find_p_values(cases: Sequence[Difference]) -> list[float]:
    from scipy.special import stdtr

    return [
        min(1.0, 2 * float(stdtr(freedom, -abs(case.shift) / case.error)))
        for case, freedom in zip(cases, find_freedoms(cases), strict=True)
    ]


def find_freedoms(cases: Sequence[Difference]) -> list[float]:
    """Return the degrees of freedom of each case's test; see above."""
    noises = [
        math.log(a.variance / b.variance)
        for case in cases
        for a, b in case.sides
        if a.variance > 0 < b.variance
    ]
    typical = math.exp(median(noises)) if noises else None
    return [case.freedom(typical) for case in cases]


def exp(log: float) -> float:
    return math.exp(min(log, 700.0))  # e^710 overflows


# -------------------------------------------------------------------------------------------- ratio
#
# The ratio of two sides of repeats, and whether it differs from 1 by more than a margin.
#
# Times, bytes, losses and joules are positive and differ by factors, so everything is done on
# logarithms: the ratio B/A is of medians, and a margin of 2 % is exceeded by a ratio above
# 1.02 or below 1/1.02, so that swapping the sides swaps the verdict. The ratio of one case has
# Welch's 95 % interval (Welch 1947; Satterthwaite's degrees of freedom), for medians as above, else
# as in ``scipy.stats.ttest_ind(log b, log a, equal_var=False)``. A case is judged by two questions.
#
# 1. Do the sides differ at all? Among many cases some differ by chance, so p-values are adjusted by
#    Holm (1979) over all cases of one metric: if none differs, the probability that any is called
#    different is at most 5 %.
# 2. Do they differ by more than the margin? The case's own interval decides: it lies beyond the
#    margin, within it ("same"), or across its end ("ambiguous").


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
        value: ratio of medians, of losses and errors of geometric means; None if there is none, and
            ``lack`` says why.
        low, high: the 95 % interval; None with too few repeats.
        p: two-sided p-value of no difference; None if nothing was tested.
        p_adjusted: ``p``, adjusted by Holm over the family.
        exact: both sides repeat without any spread; the interval is a point, and there is no p.
        lack: why there is no ratio or no verdict on it; empty if there is one.
        pairs: number of seeds compared pair by pair; 0 if the sides were not paired.
        unit: 0, or of sides without a ratio the unit of their difference, see `find_unit`: the
            value and its ends are e to the power of the difference over it.
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
        low, high = (end and self.unit * math.log(end) for end in (self.low, self.high))
        return self.unit * math.log(self.value), low, high

    def invert(self) -> Ratio:
        """Return the ratio A/B: for times, the speed-up."""
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

    def allows(self, verdict: Verdict, margin: float) -> bool:
        """Return whether the interval leaves ``verdict``, which is LOWER or HIGHER, possible."""
        if self.lack or self.low is None or self.high is None:
            return False
        return self.low < 1 / (1 + margin) if verdict is Verdict.LOWER else self.high > 1 + margin

    @property
    def differs(self) -> bool:
        """Whether the sides differ at all, at a family-wise error of 5 %."""
        return self.exact or (self.p_adjusted is not None and self.p_adjusted < 1 - CONFIDENCE)

    def explain(self, margin: float) -> str:
        """Explain a missing or ambiguous verdict; empty for the others."""
        unsure = self.judge(margin) is Verdict.AMBIGUOUS
        return "neither surely beyond the margin nor within it" if unsure else self.lack


Samples = tuple[Sequence[float], Sequence[float]]
"""The repeats of one case: A's and B's."""


def compare(family: Sequence[Samples], deterministic: bool = False) -> list[Ratio]:
    """Return the ratio B/A of each case of a family, in order, with p-values adjusted over it.

    Args:
        family: all cases of one metric.
        deterministic: the metric may repeat to the last digit, like an allocator's bytes: the
            ratio is then exact, and the margin alone decides. Otherwise readings without spread
            (of a clock or a power meter) are not independent, and there is no verdict.
    """
    return estimate([subtract(a, b, summarize_middle) for a, b in family], deterministic)


def estimate(
    cases: Sequence[Difference | str],
    deterministic: bool = False,
    confidence: float = CONFIDENCE,
    what: str = "repeats",
) -> list[Ratio]:
    """Return the ratio of each difference; a string is the reason why a case has none."""
    ratios: list[Ratio] = []
    tested: dict[int, Difference] = {}
    for index, case in enumerate(cases):
        if isinstance(case, str):
            ratios.append(Ratio(lack=case))
            continue
        ratio = Ratio(exp(case.shift), pairs=case.pairs)
        if deterministic and not case.error:  # one reading says as much as several
            ratio = replace(ratio, low=ratio.value, high=ratio.value, exact=True)
        elif min(case.counts) < MIN_REPEATS:
            has = " and ".join(dict.fromkeys(map(str, case.counts)))
            ratio = replace(ratio, lack=f"needs {MIN_REPEATS} {what} a side, has {has}")
        elif case.error:
            tested[index] = case
            reach = find_quantile(case.freedom(), confidence) * case.error
            ratio = replace(ratio, low=exp(case.shift - reach), high=exp(case.shift + reach))
        elif case.pairs:
            ratio = replace(ratio, low=ratio.value, high=ratio.value, exact=True)
        else:
            lack = f"{what} that are equal to the last digit do not show how far others differ"
            ratio = replace(ratio, lack=lack)
        ratios.append(ratio)
    p_values = find_p_values([*tested.values()]) if tested else []
    for index, p, p_adjusted in zip(tested, p_values, adjust(p_values), strict=True):
        ratios[index] = replace(ratios[index], p=p, p_adjusted=p_adjusted)
    return ratios


# -------------------------------------------------------------------------------- losses over seeds
#
# Losses and errors, judged over seeds.
#
# They differ between seeds by more than most changes move them, and a deterministic network repeats
# the loss of one seed to the last digit, which says nothing about the next. If both sides share any
# seeds, the others are left out: an interrupted sweep has seeds on one side alone, and their spread
# would be mistaken for the change. The two losses of a seed are a pair: they share initial weights,
# the order of images and their augmentation. With `MIN_SEEDS` pairs or more, a paired t-test of the
# differences of logarithms is used, which is valid whether or not the two are correlated, and far
# more powerful if they are. Measured (dpn-small on real images on a CPU, fp32 against bf16-amp, 5
# seeds, batch sizes 64 and 128): losses spread by 0.6 % over seeds, their differences within a seed
# by 0.15 and 0.08 %; the correlation is 0.96 and 0.999. Without shared seeds, Welch's test is used.
# Times are never paired: two repeats with the same seed did not run at the same moment.


MIN_SEEDS = MIN_REPEATS
"""Distinct seeds per side that a verdict on a loss or an error needs."""

Seeded = tuple[Mapping[int, Sequence[float]], Mapping[int, Sequence[float]]]
"""The repeats of one case by seed: A's and B's."""


def compare_seeds(family: Sequence[Seeded], confidence: float = CONFIDENCE) -> list[Ratio]:
    """Return the ratio B/A of a loss or an error over seeds, for each case of a family, in order;
    of sides that are not all positive their difference, see `Ratio.difference`.

    The geometric mean of the repeats of one seed is one reading. Seeds that both sides ran are
    compared pair by pair, and other seeds are then left out; if all pairs have the same ratio to
    the last digit, it is exact. Fewer than `MIN_SEEDS` pairs, or seeds per side if there are no
    pairs, give no verdict.
    """
    cases = [*map(subtract_seeds, family)]
    ratios = estimate([case for case, _ in cases], confidence=confidence, what="seeds")
    return [replace(ratio, unit=unit) for ratio, (_, unit) in zip(ratios, cases, strict=True)]


def subtract_seeds(pair: Seeded) -> tuple[Difference | str, float]:
    """Return the difference over shared seeds, if any, else of the sides, or why there is none; and
    the unit of `find_unit`: a loss below zero, as a likelihood's, has no logarithm."""
    means = [{seed: _mean(values) for seed, values in side.items() if values} for side in pair]
    unit = find_unit(*([v for v in side.values() if math.isfinite(v)] for side in means))
    if unit:
        means = [
            {seed: exp(v / unit) if math.isfinite(v) else v for seed, v in side.items()}
            for side in means
        ]
    a, b = means
    whole = subtract([*a.values()], [*b.values()], summarize)
    shared = sorted(a.keys() & b.keys())
    # seeds that change nothing make no pairs
    if isinstance(whole, str) or not shared or (len(shared) >= MIN_SEEDS and not whole.error):
        return whole, unit
    shift, spread = summarize([b[seed] / a[seed] for seed in shared])
    return Difference(shift, ((spread, GroupSpread(0.0, len(shared))),), len(shared)), unit


def average_seeds(readings: Mapping[int, Sequence[float]]) -> float:
    """Return the geometric mean over seeds, at least one, of the geometric mean of each; of values
    that are not all positive the arithmetic mean."""
    return _mean([_mean(values) for values in readings.values() if values])


def _mean(values: Sequence[float]) -> float:
    odd = [value for value in values if not math.isfinite(value)]
    if odd or len(values) == 1:
        return (odd or values)[0]
    return fmean(values) if min(values) <= 0 else math.exp(fmean(map(math.log, values)))


def find_classes(workload: str, given: int | None, counted: float | None) -> int | None:
    """Return how many classes the loss of a case distinguishes; None if that is not known, as of a
    workload with a loss of its own. ``given`` is the axis ``classes``, and ``counted`` the
    column ``dataset_classes``; each may be empty."""
    if counted and counted == counted:  # NaN is empty
        return int(counted)
    return given or (None if workload != IMAGES else CLASSES)


def is_guessing(loss: float, classes: int | None) -> bool:
    """Return whether a training loss, a mean over seeds, is still that of guessing among
    ``classes``, so that equal losses show nothing. With None, for an unknown number of classes,
    only NaN and inf count as guessing.

    >>> is_guessing(2.309, 10), is_guessing(2.0, 10), is_guessing(math.nan, 10)
    (True, False, True)
    >>> is_guessing(6.0, None), is_guessing(math.inf, None)
    (False, True)
    """
    return not loss < ((1 - LEAST_GAIN) * math.log(classes) if classes else math.inf)


GUESSING = "the loss is still that of guessing; train longer (--fraction, --steps or --epochs)"
"""The reason for no verdict if nothing was learnt."""

UNCHECKED = "whether it is better than guessing is not known"
"""What to know about a verdict where the number of classes is not known."""


# -------------------------------------------------------------------------------------- equivalence
#
# Tests of whether a difference beyond a margin can be ruled out.
#
# "Not significantly different" does not show this: too few seeds never show a difference. There are
# four verdicts:
#
# - equivalent: two one-sided tests at 5 % reject both a ratio above the margin and one below it
#   (TOST, Schuirmann 1987), so that the 90 % interval lies within the margin;
# - worse, better: the 95 % interval lies beyond the margin;
# - cannot tell: neither.
#
# The true ratio lies in exactly one of three regions (below the margin, within it, above it), so
# the three tests together err in at most 5 % of cases (Goeman, Solari & Stijnen 2010, Statistics in
# Medicine 29). Several cases, such as several precisions, are one family: Holm's adjustment is
# applied to the claims "equivalent" and, separately, to "worse" and "better", so that any false
# claim of either kind has a probability of at most 5 %. The intervals are not adjusted.


ERROR = 0.05
"""Error probability of a single claim of equivalence, and of all claims of a family."""


class EquivalenceVerdict(Enum):
    """Verdicts of a test of equivalence of B against A; lower is better."""

    EQUIVALENT = "equivalent"
    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "cannot tell"


@dataclass(frozen=True)
class Equivalence:
    """Result of testing whether a loss or an error of B differs from A's by more than the margin.

    Attributes:
        ratio: ratio B/A of geometric means over seeds; None if there is none.
        low, high: its 90 % interval, not adjusted; None with too few seeds.
        p: p-value of the two one-sided tests for a ratio within the margin, adjusted by Holm.
        seeds: number of seeds compared, of the side with fewer.
        lack: why no verdict is possible; empty if one is.
        unit: as of `Ratio`.
    """

    verdict: EquivalenceVerdict
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    seeds: int = 0
    lack: str = ""
    unit: float = 0.0

    def write(self, ratio: float) -> str:
        """Write a ratio, or the difference that it stands for, with its sign."""
        return f"{self.unit * math.log(ratio):+.4g}" if self.unit else f"{ratio:.4f}"


def withdraw(found: Equivalence, lack: str) -> Equivalence:
    """Keep the ratio, but replace the verdict by the reason ``lack``."""
    return replace(
        found, verdict=EquivalenceVerdict.UNCLEAR, lack=lack, low=None, high=None, p=None
    )


def withdraw_if_guessing(found: Equivalence, guessing: Sequence[bool]) -> Equivalence:
    """Withdraw a verdict on networks that guess, unless it is that only one of them learnt.
    ``guessing`` is whether the loss of each side, if known, is still that of guessing."""
    differs = found.verdict in (EquivalenceVerdict.BETTER, EquivalenceVerdict.WORSE)
    believed = not any(guessing) or (differs and not all(guessing))
    return found if believed else withdraw(found, GUESSING)


def judge_equivalences(family: Sequence[Seeded], margin: float) -> list[Equivalence]:
    """Test each case of a family for equivalence, in order, adjusted over the family; see above.
    ``margin`` is a fraction: 0.02 is a ratio from 1/1.02 to 1.02. Seeds are averaged, paired and
    counted as in `compare_seeds`."""
    cases = [*map(subtract_seeds, family)]
    ratios = compare_seeds(family, 1 - 2 * ERROR)
    limit, both = math.log1p(margin), [*zip(cases, ratios, strict=True)]
    tested = [
        case for (case, _), ratio in both if isinstance(case, Difference) and ratio.p is not None
    ]
    tests = iter(_test_equivalence(tested, limit) if tested else ())
    results = []
    for (case, unit), ratio in both:
        if isinstance(case, str):
            results.append(Equivalence(EquivalenceVerdict.UNCLEAR, lack=case, unit=unit))
            continue
        within, beyond = next(tests) if ratio.p is not None else (None, 1.0)
        sure = ratio.exact or (within is not None and min(within, beyond) < ERROR)
        claim = EquivalenceVerdict.WORSE if case.shift > 0 else EquivalenceVerdict.BETTER
        if not sure or abs(case.shift) <= limit:
            claim = EquivalenceVerdict.EQUIVALENT if sure else EquivalenceVerdict.UNCLEAR
        ends, seeds = (ratio.low, ratio.high), min(case.counts)
        results.append(Equivalence(claim, ratio.value, *ends, within, seeds, ratio.lack, unit))
    return results


def _test_equivalence(cases: Sequence[Difference], limit: float) -> list[tuple[float, float]]:
    """Return Holm's p-values for the claims that a case is within the limit, and beyond it."""
    from scipy.special import stdtr

    within, beyond = [], []
    for case, freedom in zip(cases, find_freedoms(cases), strict=True):
        inside = (limit - abs(case.shift)) / case.error
        within.append(float(stdtr(freedom, -inside)))  # the larger p of the two tests
        beyond.append(min(1.0, 2 * float(stdtr(freedom, inside))))
    return [*zip(adjust(within), adjust(beyond), strict=True)]
