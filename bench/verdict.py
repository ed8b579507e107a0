"""Whether two sets of repeats differ, and by more than a margin; whether they are equivalent.

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

The p-value of the first refers Welch's statistic to the degrees of freedom that follow from the
median noise ratio of all cases. A case's own two variances are a poor estimate of it: Holm looks
far into the tail, where a case mostly is because its variance came out small by chance, and its
degrees of freedom too large. By simulation (24 equal cases, 20 % noise, 3 against 10 repeats), own
degrees of freedom call a difference in 15 % of comparisons, and in 28 % where the three are also
the noisier; the median's in 1 %. A single case has only its own: 5 %. The median errs where each
case has a noise ratio of its own: at 10 % noise and ratios spread from 1/4 to 4, in 5 to 8 % of
comparisons. A paired case has n - 1, which is exact.

**Losses and errors** are judged over seeds (`compare_seeds`). They differ from seed to seed by more
than most changes move them, and a deterministic network repeats the loss of one seed to the last
digit, which says nothing about the next. Where both sides ran some seed, the others are left out: a
sweep that was interrupted has seeds on one side alone, and their spread would be taken for the
change. The two losses of a seed are a pair: they share initial weights, the order of images and
their augmentation. From `MIN_SEEDS` pairs on, the paired t-test of the differences of logarithms is
taken, which is valid whether or not the two are correlated, and far more powerful where they are.
Measured (dpn-small on real images on a CPU, fp32 against bf16-amp, 5 seeds, batch sizes 64 and
128): losses spread by 0.6 % over seeds, their differences within a seed by 0.15 and 0.08 %; the
correlation is 0.96 and 0.999. Without shared seeds it is Welch's test. Times are never paired: two
repeats with the same seed did not run at the same moment.

**Equivalence** (`judge_equivalences`) asks the opposite: can a difference beyond the margin be
ruled out? "Not significantly different" does not show this, as too few seeds never show a
difference. The answer is one of four:

- equivalent: two one-sided tests at 5 % reject both a ratio above the margin and one below it
  (TOST, Schuirmann 1987), so that the 90 % interval lies within the margin;
- worse, better: the 95 % interval lies beyond the margin;
- cannot tell: neither, with the number of seeds that would probably tell.

Exactly one of three regions (below the margin, within it, above) holds the true ratio, so the
three tests together err in at most 5 % of cases (Goeman, Solari & Stijnen 2010, Statistics in
Medicine 29). Several cases, such as several precisions, are one family: Holm's adjustment is
applied to the claims "equivalent" and, separately, to "worse" and "better", so that any false claim
of either kind has a probability of at most 5 %. The intervals are not adjusted.

The number of seeds is the smallest with a power of 80 %. The power of two one-sided tests at a
given spread is an integral over the chi-squared distribution of the sample variance (Owen 1965;
Phillips 1990, J. Pharmacokinet. Biopharm. 18; see Chow & Liu, Design and Analysis of
Bioavailability and Bioequivalence Studies). The true ratio is taken as 1, or as the observed one
where that differs from 1 significantly. A few seeds estimate the spread poorly (the 90 % interval
from 5 reaches from 0.65 to 2.4 times), so the power is averaged over the spreads that fit the
observed one (Julious & Owen 2006, Pharmaceutical Statistics 5). By simulation, plans from 5 seeds
then tell in 86 to 88 % of cases; had they taken the observed spread as the true one, in 67 %.

Nothing here sees what repeats cannot show: one sweep is one session, and what differs between
sessions (temperature, other load) counts as a difference between A and B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from bench.data.sources import CLASSES
from bench.interval import CONFIDENCE, find_freedom, find_reach
from bench.limits import MIN_REPEATS
from bench.text import write_percent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_SEEDS = MIN_REPEATS
"""Distinct seeds a side for a verdict on a loss or an error."""

MOST_SEEDS = 1000
"""Above this, the number of seeds that would tell is not searched for."""

POWER = 0.8
"""Probability with which the advised number of seeds tells."""

ERROR = 0.05
"""Of one claim of equivalence, and of all claims of a family."""

LEAST_GAIN = 0.02
"""A network that guesses among equally frequent classes has a loss of ln(classes). One that learnt
is below that by at least this share. Records say how many classes there were where --classes was
given; else the datasets of the harness have 10, and for a user's folders with more the rule is
merely weaker."""

SIDES = ("A", "B")
"""What the two sides are called in a reason, unless the caller has better names."""

ROUNDING = 1e-12
"""Values this close, relatively, are one value written twice."""


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


class _Spread(NamedTuple):
    variance: float
    number: int


@dataclass(frozen=True)
class _Difference:
    """Mean difference B - A of one case's logarithms, and each side's spread. ``pairs`` differences
    of paired readings are a side A with their spread and a side B without any: its degrees of
    freedom are pairs - 1."""

    shift: float
    a: _Spread
    b: _Spread
    pairs: int = 0

    @property
    def error(self) -> float:
        return math.sqrt(self.a.variance / self.a.number + self.b.variance / self.b.number)

    def freedom(self, noise: float | None = None) -> float:
        """Satterthwaite's degrees of freedom; ``noise`` is the variance of A's side over that of
        B's, by default the case's own."""
        a, b = (self.a.variance, self.b.variance) if noise is None else (noise, 1.0)
        return find_freedom([(a, self.a.number), (b, self.b.number)])


Samples = tuple[Sequence[float], Sequence[float]]
"""The repeats of one case, A's and B's."""

Seeded = tuple[Mapping[int, Sequence[float]], Mapping[int, Sequence[float]]]
"""The repeats of one case by their seed, A's and B's."""


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
    return _estimate([_lack(a, b, names) or _subtract(a, b) for a, b in family], deterministic)


def compare_seeds(family: Sequence[Seeded], names: tuple[str, str] = SIDES) -> list[Ratio]:
    """The ratio B/A of a loss or an error of each case of a family, in order, over seeds.

    Repeats of one seed are no further evidence: their geometric mean is one reading. Seeds that
    both sides ran are compared pair by pair, and other seeds are then left out; where the ratio of
    all of these agrees to the last digit, it is exact. With fewer than `MIN_SEEDS` of them, or a
    side where there are none, there is no verdict.
    """
    means = [(_average(a), _average(b)) for a, b in family]
    ratios = iter(_estimate([_subtract_seeds(a, b, names) for a, b in means if not _equal(a, b)]))
    return [
        Ratio(1.0, 1.0, 1.0, exact=True, pairs=len(a.keys() & b.keys()))
        if _equal(a, b)
        else _ask_for_seeds(next(ratios), a, b, names)
        for a, b in means
    ]


def _estimate(cases: Sequence[_Difference | str], deterministic: bool = False) -> list[Ratio]:
    """The ratio of each case; of one that has none, why."""
    ratios: list[Ratio] = []
    tested: dict[int, _Difference] = {}
    for index, difference in enumerate(cases):
        if isinstance(difference, str):
            ratios.append(Ratio(lack=difference))
            continue
        value, pairs = _exp(difference.shift), difference.pairs
        counts = (difference.a.number, difference.b.number)
        if min(counts) < MIN_REPEATS:
            has = " and ".join(dict.fromkeys(map(str, counts)))
            lack = f"needs {MIN_REPEATS} repeats a side, has {has}"
            ratios.append(Ratio(value, lack=lack, pairs=pairs))
        elif difference.a.variance or difference.b.variance:
            tested[index] = difference
            ratios.append(Ratio(value, *_interval(difference, CONFIDENCE), pairs=pairs))
        elif deterministic or pairs:
            ratios.append(Ratio(value, value, value, exact=True, pairs=pairs))
        else:
            lack = "repeats equal to the last digit are not independent readings"
            ratios.append(Ratio(value, lack=lack))
    p_values = _test(list(tested.values()))
    for index, p, p_adjusted in zip(tested, p_values, adjust(p_values), strict=True):
        ratios[index] = replace(ratios[index], p=p, p_adjusted=p_adjusted)
    return ratios


def _average(seeds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """One reading a seed: the geometric mean of its repeats."""
    return {seed: _mean(values) for seed, values in seeds.items() if values}


def _mean(values: Sequence[float]) -> float:
    odd = [value for value in values if not _has_log(value)]
    if odd or len(values) == 1:
        return (odd or values)[0]
    return math.exp(fmean(math.log(value) for value in values))


def _equal(a: Mapping[int, float], b: Mapping[int, float]) -> bool:
    """Whether both sides ran the same seeds, enough of them, and agree in each of these."""
    shared = a.keys() & b.keys()
    return len(shared) >= MIN_SEEDS and all(
        a[seed] > 0 and abs(a[seed] - b[seed]) <= ROUNDING * a[seed] for seed in shared
    )


def _subtract_seeds(
    a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]
) -> _Difference | str:
    """Subtract seed by seed where both sides ran any, else side from side."""
    readings = (list(a.values()), list(b.values()))
    if lack := _lack(*readings, names):
        return lack
    shared = sorted(a.keys() & b.keys())
    if not shared or (len(shared) >= MIN_SEEDS and not _subtract(*readings).error):
        return _subtract(*readings)  # seeds without effect make no pairs
    shift, spread = _summarize([b[seed] / a[seed] for seed in shared])
    return _Difference(shift, spread, _Spread(0.0, len(shared)), pairs=len(shared))


def _ask_for_seeds(
    ratio: Ratio, a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]
) -> Ratio:
    """Say which side lacks seeds, where one does, and by how much the readings differ."""
    fewest = ratio.pairs or min(len(a), len(b))
    if ratio.value is None or fewest >= MIN_SEEDS:
        return ratio
    short = [name for name, side in zip(names, (a, b), strict=True) if len(side) == fewest]
    where = "" if len(short) == 2 else f" in {' and '.join(short or names)}"
    if fewest > 1:
        return replace(ratio, lack=f"two seeds{where}: needs three")
    apart = abs(ratio.value - 1)
    differs = f"differs by {100 * apart:.2g} %" if apart > ROUNDING else "equal"
    return replace(ratio, lack=f"one seed{where}: {differs}, no verdict")


def learnt_nothing(loss: float, classes: int | None = None) -> bool:
    """Whether a training loss, a geometric mean over seeds, is still that of guessing among
    ``classes``, so that equal losses show nothing; one that is not finite is not of a network that
    learnt.

    >>> learnt_nothing(2.309), learnt_nothing(2.0), learnt_nothing(math.nan)
    (True, False, True)
    """
    return not loss < (1 - LEAST_GAIN) * math.log(classes or CLASSES)


GUESSING = "the loss is still that of guessing; train longer (--fraction, --steps or --epochs)"
"""Why there is no verdict where nothing was learnt."""


def average_seeds(readings: Mapping[int, Sequence[float]]) -> float:
    """The geometric mean over seeds, each the geometric mean of its repeats; at least one seed."""
    return _mean(list(_average(readings).values()))


class Claim(Enum):
    """What is concluded of B against A when equivalence is asked for; lower is better."""

    EQUIVALENT = "equivalent"
    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "cannot tell"


@dataclass(frozen=True)
class Equivalence:
    """Whether B may replace A without a loss or an error that differs by more than the margin.

    Attributes:
        margin: a fraction: 0.02 is a ratio from 1/1.02 to 1.02.
        ratio: of geometric means over seeds, B/A; None where there is none.
        low, high: its 90 % interval, not adjusted; None with too few seeds.
        p: of the two one-sided tests: that the ratio is beyond the margin; adjusted by Holm.
        seeds: that were compared, of the side that has fewer.
        paired: compared seed by seed.
        seeds_needed: with which a verdict has a power of `POWER`; None where there is a verdict,
            where fewer than `MIN_SEEDS` say too little about the spread, and above `MOST_SEEDS`.
        lack: why there can be no verdict; empty where there could.
    """

    verdict: Claim
    margin: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    seeds: int = 0
    paired: bool = False
    seeds_needed: int | None = None
    lack: str = ""

    def sentence(self) -> str:
        return f"{self.verdict.value}: {self.explain()}"

    def explain(self) -> str:
        margin = f"the margin of {write_percent(self.margin)}"
        if self.ratio is None:
            return self.lack
        if self.low is None or self.high is None:
            return f"ratio {self.ratio:.4f}; {self.lack}{self._advise()}"
        count = f"{self.seeds} {'paired ' * self.paired}seeds"
        found = f"ratio {self.ratio:.4f}, {self.low:.4f} to {self.high:.4f} over {count}"
        if self.verdict is Claim.EQUIVALENT:
            return f"{found}, within {margin}"
        if self.verdict is not Claim.UNCLEAR:
            return f"{found}, beyond {margin}"
        limit, where = 1 + self.margin, "reaches beyond {}"
        if 1 / limit <= self.low and self.high <= limit:
            where = "within {}, but may be chance among all the cases"
        elif self.low > limit or self.high < 1 / limit:
            where = "beyond {}, but may be chance"
        return f"{found}, {where.format(margin)}{self._advise()}"

    def _advise(self) -> str:
        if self.seeds_needed is not None:
            fewer = "" if self.paired else ", fewer if both sides run the same seeds"
            return f"; about {self.seeds_needed} seeds would tell{fewer}"
        if self.seeds < MIN_SEEDS:
            return f"; sweep with --repeats {MIN_SEEDS} or more, each repeat has its own seed"
        return f"; more than {MOST_SEEDS} seeds would be needed" * (not self.lack)


def take_back(found: Equivalence, lack: str) -> Equivalence:
    """Leave the ratio, and give no verdict for the reason ``lack``."""
    return Equivalence(
        Claim.UNCLEAR, found.margin, found.ratio, seeds=found.seeds, paired=found.paired, lack=lack
    )


def doubt_guessing(found: Equivalence, guessing: Sequence[bool]) -> Equivalence:
    """Take back a verdict on networks that guess; that only one of them learnt is one. ``guessing``
    says of the sides whose loss is known whether it is still that of guessing."""
    differs = found.verdict in (Claim.BETTER, Claim.WORSE)
    if not any(guessing) or (differs and not all(guessing)):
        return found
    return take_back(found, GUESSING)


def judge_equivalence(a: Mapping[int, float], b: Mapping[int, float], margin: float) -> Equivalence:
    """Test whether B's loss or error is equivalent to A's: a positive reading of each seed, such as
    a loss or 1 - accuracy. ``margin`` is a fraction: 0.02 is a ratio from 1/1.02 to 1.02."""
    pair = ({s: [v] for s, v in a.items()}, {s: [v] for s, v in b.items()})
    return judge_equivalences([pair], margin)[0]


def judge_equivalences(
    family: Sequence[Seeded], margin: float, names: tuple[str, str] = SIDES
) -> list[Equivalence]:
    """Test each case of a family, in order, for equivalence, adjusted over all of it; see the
    module. Seeds are averaged, paired and counted as by `compare_seeds`."""
    limit = math.log1p(margin)
    unclear = Equivalence(Claim.UNCLEAR, margin)
    results: list[Equivalence] = []
    tested: dict[int, _Difference] = {}
    for index, pair in enumerate(family):
        a, b = map(_average, pair)
        case = _subtract_seeds(a, b, names)
        if isinstance(case, str):
            results.append(replace(unclear, lack=case))
            continue
        seeds, value = min(case.a.number, case.b.number), _exp(case.shift)
        result = replace(unclear, ratio=value, seeds=seeds, paired=bool(case.pairs))
        if (equal := _equal(a, b)) or (case.pairs >= MIN_SEEDS and not case.error):
            value, seeds = 1.0 if equal else value, len(a.keys() & b.keys())
            claim = _place(case.shift, limit)
            result = Equivalence(claim, margin, value, value, value, seeds=seeds, paired=True)
        elif result.seeds < MIN_SEEDS:
            few = f"{result.seeds} seed{'s' * (result.seeds > 1)}, needs {MIN_SEEDS}"
            result = replace(result, lack=few)
        elif case.error:
            tested[index] = case
            low, high = _interval(case, 1 - 2 * ERROR)
            result = replace(result, low=low, high=high)
        else:
            result = replace(result, lack="seeds without any spread are not independent readings")
        results.append(result)
    within, beyond = _test_equivalence(list(tested.values()), limit)
    claims = [
        _place(case.shift, limit) if min(p_within, p_beyond) < ERROR else Claim.UNCLEAR
        for case, p_within, p_beyond in zip(tested.values(), within, beyond, strict=True)
    ]
    # Holm tests the next case at this level, with those that are shown to be equivalent set aside
    level = ERROR / max(1, len(claims) - claims.count(Claim.EQUIVALENT))
    for (index, case), claim, p in zip(tested.items(), claims, within, strict=True):
        needed = None
        if claim is Claim.UNCLEAR:
            needed = find_seeds(case, limit, level)
            needed = needed and max(needed, results[index].seeds + 1)
        results[index] = replace(results[index], verdict=claim, p=p, seeds_needed=needed)
    return results


def _place(shift: float, limit: float) -> Claim:
    """The region that holds a difference of logarithms."""
    if abs(shift) <= limit:
        return Claim.EQUIVALENT
    return Claim.WORSE if shift > 0 else Claim.BETTER


def _test_equivalence(
    cases: Sequence[_Difference], limit: float
) -> tuple[list[float], list[float]]:
    """Holm's p-values that a case is not within the limit, and that it is not beyond it."""
    from scipy.special import stdtr

    within, beyond = [], []
    for case, freedom in zip(cases, _find_freedoms(cases), strict=True):
        inside = (limit - abs(case.shift)) / case.error
        within.append(float(stdtr(freedom, -inside)))  # the larger one of the two tests
        beyond.append(min(1.0, 2 * float(stdtr(freedom, inside))))
    return adjust(within), adjust(beyond)


def find_seeds(case: _Difference, limit: float, level: float) -> int | None:
    """The least number of seeds a side, from `MIN_SEEDS`, with which a case gets a verdict with
    `POWER`; None above `MOST_SEEDS`.

    The true difference is taken as none, or as the observed one where that is significant. The true
    spread is taken as uncertain as the number of observed seeds makes it. ``limit`` is the
    logarithm of the margin's end, ``level`` that of the test for equivalence.
    """
    shift = abs(case.shift) if case.error and min(_test([case])) < ERROR else 0.0
    known = case.freedom() if case.error else math.inf

    def is_enough(seeds: int) -> bool:
        return find_power(case, shift, limit, seeds, level, known) >= POWER

    if not is_enough(MOST_SEEDS):
        return None
    low, high = MIN_SEEDS - 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


_POINTS = 50  # of a distribution of variances; with 2,000, a power near 80 % differs by < 0.001


def find_power(
    case: _Difference,
    shift: float,
    limit: float,
    seeds: int,
    level: float = ERROR,
    known: float = math.inf,
) -> float:
    """Probability that so many seeds a side show on which side of the limit, the logarithm of the
    margin's end, ``shift`` is: the true difference of logarithms, not negative. The variances of
    ``case`` are known from ``known`` degrees of freedom; by default they are true. ``level`` is of
    the test for equivalence, and of the two-sided one for a difference."""
    import numpy as np
    from scipy.special import gammaincinv, ndtr, stdtrit

    variance = case.a.variance + case.b.variance
    if not variance:
        return 1.0

    def spread(freedom: float) -> NDArray[np.float64]:
        """Equally likely ratios of a variance's estimate to the true variance."""
        shares = (np.arange(_POINTS) + 0.5) / _POINTS
        return np.asarray(gammaincinv(freedom / 2, shares) * 2 / freedom)

    true = variance / (np.ones(1) if math.isinf(known) else spread(known))
    freedom = (seeds - 1) * variance**2 / (case.a.variance**2 + case.b.variance**2)
    error = np.sqrt(true / seeds)[:, None]
    estimates = error * np.sqrt(spread(freedom))
    # the mean of normal readings, and the estimate of its error, are independent
    if shift > limit:
        shown = ndtr((shift - limit - stdtrit(freedom, 1 - level / 2) * estimates) / error)
    else:
        inside = limit - stdtrit(freedom, 1 - level) * estimates
        shown = ndtr((inside - shift) / error) - ndtr((-inside - shift) / error)
    return float(np.mean(np.maximum(shown, 0.0)))


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


def _lack(a: Sequence[float], b: Sequence[float], names: tuple[str, str]) -> str:
    sides = list(zip(names, (a, b), strict=True))
    if empty := [name for name, values in sides if not values]:
        return f"no value in {' or '.join(empty)}"
    wrong = [name for name, values in sides if not all(map(_has_log, values))]
    return f"a value in {' and '.join(wrong)} is not positive: no ratio" if wrong else ""


def _has_log(value: float) -> bool:
    return value > 0 and math.isfinite(value)


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


def _interval(difference: _Difference, confidence: float) -> tuple[float, float]:
    reach = find_reach([difference.a, difference.b], confidence)
    return _exp(difference.shift - reach), _exp(difference.shift + reach)


def _test(cases: Sequence[_Difference]) -> list[float]:
    if not cases:  # as of single runs, for which scipy need not be imported
        return []
    from scipy.special import stdtr

    return [
        min(1.0, 2 * float(stdtr(freedom, -abs(case.shift) / case.error)))
        for case, freedom in zip(cases, _find_freedoms(cases), strict=True)
    ]


def _find_freedoms(cases: Sequence[_Difference]) -> list[float]:
    """Degrees of freedom of each case's test; see the module."""
    noises = {
        index: math.log(case.a.variance / case.b.variance)
        for index, case in enumerate(cases)
        if case.a.variance and case.b.variance
    }
    typical = math.exp(median(noises.values())) if noises else None
    # a side that never varies leaves the noise to the other, and says nothing about the typical
    return [case.freedom(typical if i in noises else None) for i, case in enumerate(cases)]


def _exp(log: float) -> float:
    return math.exp(min(log, 700.0))  # e^710 overflows
