"""The statistics behind `bench.compare`: against hand-worked numbers, scipy, and simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from bench.base.limits import MIN_REPEATS
from bench.networks.data.cifar10 import CLASSES
from bench.networks.workloads import IMAGES
from bench.results.verdict import (
    GUESSING,
    Difference,
    Equivalence,
    EquivalenceVerdict,
    GroupSpread,
    Ratio,
    Seeded,
    Verdict,
    adjust,
    average_seeds,
    compare,
    compare_seeds,
    estimate,
    exp,
    find_classes,
    find_unit,
    is_guessing,
    judge_equivalences,
    pool,
    pool_noise,
    subtract,
    summarize,
    summarize_middle,
    withdraw,
    withdraw_if_guessing,
)

MARGIN = 0.02
WRONG = {Verdict.LOWER, Verdict.HIGHER}


def judge(ratios: Sequence[Ratio], margin: float = MARGIN) -> list[Verdict]:
    return [ratio.judge(margin) for ratio in ratios]


# -------------------------------------------------------------------------------- worked examples


@given(
    st.lists(st.integers(900, 1100), min_size=3, max_size=8),
    st.lists(st.integers(900, 1100), min_size=3, max_size=8),
)
def test_seeds_that_are_not_shared_are_compared_by_welchs_test(a: list[int], b: list[int]) -> None:
    assume(len(set(a)) > 1 and len(set(b)) > 1)
    sides = {n: [value] for n, value in enumerate(a)}, {-n - 1: [v] for n, v in enumerate(b)}
    (ratio,) = compare_seeds([sides])
    welch = stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert ratio.p == pytest.approx(welch.pvalue, rel=1e-9)
    assert ratio.low == pytest.approx(math.exp(interval.low), rel=1e-9)
    assert ratio.high == pytest.approx(math.exp(interval.high), rel=1e-9)


@given(
    st.lists(st.integers(900, 1100), min_size=5, max_size=5),
    st.lists(st.integers(900, 1100), min_size=5, max_size=5),
)
def test_repeats_are_compared_by_the_medians_that_are_shown(a: list[int], b: list[int]) -> None:
    """With an interval around their ratio, wider than a mean's by the root of 1.434 (of five)."""
    assume(len(set(a)) > 1 and len(set(b)) > 1)
    (ratio,) = compare([(a, b)])
    assert ratio.value == pytest.approx(np.median(b) / np.median(a), rel=1e-12)
    interval = stats.ttest_ind(np.log(b), np.log(a), equal_var=False).confidence_interval(0.95)
    reach = math.sqrt(1.434) * (interval.high - interval.low) / 2
    assert ratio.low == pytest.approx(ratio.value * math.exp(-reach), rel=1e-9)
    assert ratio.high == pytest.approx(ratio.value * math.exp(reach), rel=1e-9)


def test_one_disturbed_run_of_three_moves_no_ratio() -> None:
    (ratio,) = compare([([100.0, 101.0, 1000.0], [50.0, 50.5, 50.4])])
    assert ratio.value == pytest.approx(50.4 / 101)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 0.5 < ratio.high


def test_freedom_of_a_family_is_of_its_median_noise() -> None:
    """Three cases of three repeats; the noise ratios of their variances are 1, 4 and 100.

    With the middle one, shares 4/3 and 1/3: df = (5/3)^2 / (((4/3)^2 + (1/3)^2)/2) = 50/17.
    """
    base = np.array([-1.0, 0.0, 1.0])
    family = [
        (np.exp(0.01 * scale * base).tolist(), np.exp(0.01 * base + 0.05).tolist())
        for scale in (1, 2, 10)
    ]
    ratios = compare(family)
    for scale, ratio in zip((1, 2, 10), ratios, strict=True):
        t = 0.05 / (0.01 * math.sqrt(1.346 * (scale**2 + 1) / 3))  # of medians of three
        assert ratio.p == pytest.approx(2 * stats.t.sf(t, 50 / 17), rel=1e-9)
    # the interval is the case's own
    reach = stats.t.ppf(0.975, 4) * 0.01 * math.sqrt(1.346 * 2 / 3)
    assert ratios[0].high == pytest.approx(math.exp(0.05 + reach), rel=1e-9)


@pytest.mark.parametrize("swap", [False, True])
def test_a_side_without_spread_has_no_noise_ratio(swap: bool) -> None:
    """Its p-value is by the freedom of the other side."""
    still, noisy = [2.0, 2.0, 2.0], [2.1, 2.2, 2.4]
    (ratio,) = compare([(noisy, still) if swap else (still, noisy)])
    t = math.log(1.1) / math.sqrt(1.346 * np.var(np.log(noisy), ddof=1) / 3)
    assert ratio.p == pytest.approx(2 * stats.t.sf(t, 2), rel=1e-9)


def test_bytes_that_repeat_are_exact_by_one_reading() -> None:
    (ratio,) = compare([([4.0], [2.0])], deterministic=True)
    assert (ratio.low, ratio.high, ratio.lack) == (0.5, 0.5, "")
    assert ratio.judge(MARGIN) is Verdict.LOWER
    (ratio,) = compare([([4.0], [2.0])])
    assert ratio.judge(MARGIN) is Verdict.NONE


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_orders_and_bounds(p_values: list[float]) -> None:
    adjusted = adjust(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1, len(p_values) * p)
    ranks = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert [adjusted[i] for i in ranks] == sorted(adjusted)
    # Holm rejects exactly what its step-down does
    rejected = set()
    for rank, index in enumerate(ranks):
        if (len(ranks) - rank) * p_values[index] >= 0.05:
            break
        rejected.add(index)
    assert {i for i, q in enumerate(adjusted) if q < 0.05} == rejected


# ------------------------------------------------------------------------------------- the parts


@given(
    st.lists(st.lists(st.floats(0.5, 2), max_size=5), max_size=4),
)
def test_noise_is_pooled_over_groups(groups: list[list[float]]) -> None:
    """Groups of one reading say nothing of it."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum(float(np.var(np.log(group))) * len(group) for group in several)
    noise, found = pool_noise(groups)
    assert found == freedom
    expected = math.sqrt(squares / freedom) if freedom else math.nan
    assert noise == pytest.approx(expected, rel=1e-9, abs=1e-11, nan_ok=True)


@pytest.mark.parametrize(
    ("number", "more"),
    [(2, 1.0), (3, 1.346), (4, 1.193), (10, 1.383), (11, math.pi / 2), (25, math.pi / 2)],
)
def test_a_median_is_as_much_less_sure_than_a_mean_as_its_number_says(
    number: int, more: float
) -> None:
    values = [100.0 + x for x in range(number)]
    middle, spread = summarize_middle(values)
    assert middle == pytest.approx(math.log(np.median(values)), rel=1e-12)
    variance = float(np.var(np.log(values), ddof=1))
    assert spread == (pytest.approx(more * variance, rel=1e-9), number)
    assert summarize(values) == (
        pytest.approx(np.log(values).mean(), rel=1e-12),
        (pytest.approx(variance, rel=1e-9), number),
    )


def test_values_that_differ_by_rounding_have_no_spread() -> None:
    assert summarize([1000.0, 1000.0 + 5e-10])[1] == (0.0, 2)
    assert summarize([1000.0, 1000.0 + 5e-9])[1].variance > 0
    assert summarize([0.001, 0.001 + 5e-15])[1].variance > 0


NOISY, CALM, STILL = GroupSpread(4.0, 4), GroupSpread(1.0, 2), GroupSpread(0.0, 3)


def test_the_error_of_several_cases_is_of_their_mean() -> None:
    """Squares 4/4 + 1/2 and 1/2 + 0: the mean of two has the root of their sum, halved."""
    one, other = Difference(0.5, ((NOISY, CALM),)), Difference(0.1, ((CALM, STILL),))
    both = pool([one, other])
    assert both.shift == pytest.approx(0.3)
    assert both.error == pytest.approx(math.sqrt(1.5 + 0.5) / 2)
    assert (one.counts, other.counts, both.counts) == ((4, 2), (2, 3), (2, 2))


@pytest.mark.parametrize(
    ("sides", "noise", "freedom"),
    [
        # Satterthwaite: the square of the sum over the sum of squares over their freedoms
        ([(NOISY, CALM)], None, 1.5**2 / (1 / 3 + 0.25 / 1)),
        ([(NOISY, CALM)], 1.0, 0.75**2 / (0.25**2 / 3 + 0.5**2 / 1)),
        ([(NOISY, CALM)], 8.0, 2.5**2 / (4 / 3 + 0.25 / 1)),
        # a side without spread has no noise ratio: its own
        ([(CALM, STILL)], 8.0, 1.0),
        ([(STILL, CALM)], 8.0, 1.0),
        # shares 3/4 and 1/4 of the variance of the mean; and a case without any has none
        (
            [(NOISY, CALM), (CALM, STILL)],
            None,
            1 / ((3 / 4) ** 2 * (1 / 3 + 0.25) / 1.5**2 + (1 / 4) ** 2),
        ),
        ([(CALM, STILL), (STILL, STILL)], None, 1.0),
    ],
)
def test_freedom_by_hand(
    sides: list[tuple[GroupSpread, GroupSpread]], noise: float | None, freedom: float
) -> None:
    assert Difference(0.0, tuple(sides)).freedom(noise) == pytest.approx(freedom, rel=1e-9)


@pytest.mark.parametrize(
    ("a", "b", "unit"),
    [
        ([1.0, 2.0], [3.0], 0.0),
        ([], [3.0], 0.0),
        ([1.0, -3.0], [1.5], 2.0),
        ([1.0, -1.0], [4.0, -2.0], 3.0),
        ([], [-4.0], 4.0),
        ([0.0], [0.0], 1.0),
        ([0.0], [0.5], 0.5),
    ],
)
def test_the_unit_of_a_difference_is_the_larger_mean_without_signs(
    a: list[float], b: list[float], unit: float
) -> None:
    assert find_unit(a, b) == unit


@pytest.mark.parametrize(
    ("readings", "mean"),
    [
        ({0: [2.0, 8.0], 1: [9.0], 2: []}, 6.0),
        ({0: [-1.0, 3.0], 1: [-5.0]}, -2.0),
        ({0: [0.0, 4.0]}, 2.0),
        ({0: [2.0, math.inf], 1: [3.0]}, math.inf),
        ({0: [2.0, math.nan]}, math.nan),
        ({0: [math.inf, -math.inf]}, math.inf),
        ({0: [0.2, 0.8]}, 0.4),
    ],
)
def test_seeds_are_averaged_by_factors_unless_a_value_is_not_above_zero(
    readings: dict[int, list[float]], mean: float
) -> None:
    assert average_seeds(readings) == pytest.approx(mean, rel=1e-12, nan_ok=True)


def test_the_one_reading_of_a_seed_is_kept_to_the_last_digit() -> None:
    values = [n / 10 for n in range(1, 100)]
    assert [average_seeds({0: [value]}) for value in values] == values


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_no_ratio_is_of_what_has_no_logarithm(bad: float) -> None:
    for sides in (([bad, 1.0], [1.0]), ([1.0], [1.0, bad])):
        assert subtract(*sides, summarize) == "a value is not positive: no ratio"


def test_a_ratio_that_overflows_is_large() -> None:
    assert (exp(1.0), exp(701.0)) == (math.e, math.exp(700.0))


# -------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("low", "high", "lack", "nothing"),
    [
        (0.980, 1.021, "", True),
        (0.981, 1.021, "", False),  # 1/1.02 is 0.9804
        (0.980, 1.019, "", False),
        (0.980, 1.021, "why", False),
        (None, 1.021, "", False),
        (0.980, None, "", False),
    ],
)
def test_an_interval_past_the_margin_on_both_sides_rules_out_nothing(
    low: float | None, high: float | None, lack: str, nothing: bool
) -> None:
    ratio = Ratio(1.0, low, high, lack=lack)
    allowed = [ratio.allows(v, MARGIN) for v in (Verdict.LOWER, Verdict.HIGHER)]
    assert all(allowed) is nothing
    if lack or not low or not high:
        assert ratio.judge(MARGIN) is Verdict.NONE


def test_a_ratio_inverted_has_its_ends_swapped() -> None:
    ratio = Ratio(2.0, 1.6, 2.5, 0.01, 0.02, pairs=3)
    assert ratio.invert() == Ratio(0.5, 0.4, 0.625, 0.01, 0.02, pairs=3)
    assert Ratio(lack="why").invert() == Ratio(lack="why")


def test_a_difference_is_in_its_unit() -> None:
    ratio = Ratio(math.exp(0.5), math.exp(0.25), math.exp(1.0), unit=2.0)
    assert ratio.difference == pytest.approx((1.0, 0.5, 2.0))
    assert Ratio(math.exp(0.5), unit=2.0).difference == (pytest.approx(1.0), None, None)
    assert Ratio(2.0, 1.6, 2.5).difference is None
    assert Ratio(unit=2.0).difference is None
    (found,) = compare_seeds([pair_up([-1.0, -2.0, -3.0], [-0.9, -1.9, -2.9])])
    assert found.unit == 2.0
    assert found.difference == pytest.approx((0.1, 0.1, 0.1))


def test_an_interval_is_as_sure_as_asked() -> None:
    case = Difference(0.1, ((GroupSpread(0.01, 4), GroupSpread(0.01, 4)),))
    reach = stats.t.ppf(0.95, 6) * math.sqrt(0.005)
    (ratio,) = estimate([case], confidence=0.9)
    ends = math.exp(0.1 - reach), math.exp(0.1 + reach)
    assert (ratio.low, ratio.high) == pytest.approx(ends, rel=1e-9)
    assert ratio.p == ratio.p_adjusted == pytest.approx(2 * stats.t.sf(0.1 / math.sqrt(0.005), 6))
    # a reason keeps its place, and is of no family
    lack, again, same = estimate(["why", case, Difference(0.0, ((STILL, STILL),), 3)])
    assert (lack, again.p_adjusted, again.pairs) == (Ratio(lack="why"), ratio.p, 0)
    assert same == Ratio(1.0, 1.0, 1.0, exact=True, pairs=3)
    # exactly as many repeats as are needed are enough, and one fewer of either side is not
    few = Difference(0.1, ((GroupSpread(0.01, 2), GroupSpread(0.01, 3)),))
    (ratio,) = estimate([few], deterministic=True)
    assert (ratio.lack, ratio.low) == ("needs 3 repeats a side, has 2 and 3", None)


@pytest.mark.parametrize(
    ("low", "high", "p", "verdict", "why"),
    [
        (1.03, 1.06, 0.01, Verdict.HIGHER, ""),
        (0.94, 0.9803, 0.01, Verdict.LOWER, ""),  # below 1/1.02, not below 0.98
        (1.03, 1.06, 0.06, Verdict.AMBIGUOUS, "neither surely"),
        (1.01, 1.06, 0.01, Verdict.AMBIGUOUS, "neither surely"),
        (0.985, 1.015, 0.70, Verdict.SAME, ""),
        (1.005, 1.015, 0.001, Verdict.SAME, ""),  # differs, by less than matters
    ],
)
def test_verdict_of_interval_and_evidence(
    low: float, high: float, p: float, verdict: Verdict, why: str
) -> None:
    ratio = Ratio(math.sqrt(low * high), low, high, p, p)
    assert ratio.judge(MARGIN) is verdict
    assert why in ratio.explain(MARGIN)
    assert bool(ratio.explain(MARGIN)) == bool(why)


@pytest.mark.parametrize(
    ("a", "b", "value", "why"),
    [
        ([2.0, 2.0, 2.0], [1.0], 0.5, f"needs {MIN_REPEATS} repeats a side, has 3 and 1"),
        ([10.0] * 5, [11.0] * 5, 1.1, "repeats that are equal to the last digit do not"),
        ([], [1.0], None, "a side has no value"),
        ([1.0], [0.0, 1.0], None, "a value is not positive"),
    ],
)
def test_no_verdict_says_why(a: list[float], b: list[float], value: float, why: str) -> None:
    (ratio,) = compare([(a, b)])
    assert ratio.value == pytest.approx(value)
    assert ratio.low is ratio.p is None
    assert ratio.judge(MARGIN) is Verdict.NONE
    assert ratio.explain(MARGIN).startswith(why)


@given(st.integers(900, 1100))
def test_deterministic_repeats_without_spread_are_exact(b: int) -> None:
    (ratio,) = compare([([1000] * 3, [b] * 3)], deterministic=True)
    assert ratio.exact
    assert ratio.p is None
    assert ratio.low == ratio.value == ratio.high == pytest.approx(b / 1000)
    beyond = Verdict.HIGHER if b > 1020 else Verdict.LOWER
    assert ratio.judge(MARGIN) is (Verdict.SAME if 981 <= b <= 1020 else beyond)


# ------------------------------------------------------------------------------------------ seeds


def test_repeats_of_one_seed_are_one_reading() -> None:
    """Two repeats of a seed whose losses are 2 and 8 read as 4, their geometric mean."""
    a = {0: [2.0, 8.0], 1: [5.0], 2: [3.0, 3.0]}
    b = {7: [4.5], 8: [5.5, 5.5], 9: [3.5]}
    assert compare_seeds([(a, b)]) == compare_seeds([pair_up([4.0, 5.0, 3.0], [4.5, 5.5, 3.5], 7)])


@pytest.mark.parametrize(
    ("a", "b", "lack"),
    [
        # without a seed of both all count
        ({9: [2.0]}, {s: [2.0 + s] for s in range(3)}, "needs 3 seeds a side, has 1 and 3"),
        # a seed without any effect on either side is no pair
        ({s: [2.0] for s in range(3)}, {s: [2.2] for s in range(3)}, "seeds that are equal to"),
    ],
)
def test_too_few_seeds_give_no_verdict(
    a: dict[int, list[float]], b: dict[int, list[float]], lack: str
) -> None:
    (ratio,) = compare_seeds([(a, b)])
    assert ratio.judge(MARGIN) is Verdict.NONE
    assert ratio.explain(MARGIN).startswith(lack)


def test_sides_equal_in_every_seed_are_the_same_and_of_no_family() -> None:
    equal = {0: [2.0], 1: [2.5], 2: [1.5]}
    other = {0: [2.2, 2.2], 1: [2.7], 2: [1.7]}
    (alone,) = compare_seeds([(equal, other)])
    same, beside = compare_seeds([(equal, dict(equal)), (equal, other)])
    assert (same.value, same.exact, same.judge(MARGIN)) == (1.0, True, Verdict.SAME)
    assert beside == alone
    # the same losses of other seeds say only that the seeds' spread is alike
    (shuffled,) = compare_seeds([(equal, {3: [2.0], 4: [2.5], 5: [1.5]})])
    assert shuffled.judge(MARGIN) is Verdict.AMBIGUOUS


def test_shared_seeds_are_compared_as_pairs() -> None:
    """The paired t-test of the logarithms; seeds of one side alone are left out."""
    a = {0: 2.00, 1: 2.30, 2: 1.90, 3: 2.10, 9: 7.0}
    b = {3: 2.13, 2: 1.91, 1: 2.33, 0: 2.01, 8: 0.1}
    (ratio,) = compare_seeds([({s: [v] for s, v in a.items()}, {s: [v] for s, v in b.items()})])
    paired = stats.ttest_rel(*(np.log([side[s] for s in range(4)]) for side in (b, a)))
    interval = paired.confidence_interval(0.95)
    assert ratio.pairs == 4
    assert ratio.p == pytest.approx(paired.pvalue, rel=1e-9)
    assert (ratio.low, ratio.high) == pytest.approx(tuple(map(math.exp, interval)), rel=1e-9)
    # where none is shared, all seeds count, and none is paired
    few = {s + 20: [v] for s, v in b.items()}
    (ratio,) = compare_seeds([({s: [v] for s, v in a.items()}, few)])
    assert ratio.pairs == 0
    assert ratio.value == pytest.approx(stats.gmean([*b.values()]) / stats.gmean([*a.values()]))


def test_a_seed_that_one_side_lacks_is_in_no_ratio() -> None:
    """An interrupted side has two of five seeds: the others, far off, are no part of the change."""
    a = {0: [2.0], 1: [2.2], 2: [1.0], 3: [9.0], 4: [0.1]}
    b = {0: [2.02], 1: [2.222]}
    (ratio,) = compare_seeds([(a, b)])
    assert (ratio.value, ratio.pairs) == (pytest.approx(1.01), 2)
    assert ratio.lack == "needs 3 seeds a side, has 2"
    (found,) = judge_equivalences([(a, b)], MARGIN)
    assert (found.ratio, found.seeds, found.verdict) == (
        pytest.approx(1.01),
        2,
        EquivalenceVerdict.UNCLEAR,
    )


# ------------------------------------------------------------------------------------ equivalence


def pair_up(a: Sequence[float], b: Sequence[float], shift: int = 0) -> Seeded:
    """Readings of seeds 0, 1, … of A and, ``shift`` later, of B."""
    return {s: [v] for s, v in enumerate(a)}, {s + shift: [v] for s, v in enumerate(b)}


def judge_equivalence(a: dict[int, float], b: dict[int, float], margin: float) -> Equivalence:
    (found,) = judge_equivalences(
        [({s: [v] for s, v in a.items()}, {s: [v] for s, v in b.items()})], margin
    )
    return found


NEAR = [1.001, 1.004, 0.998, 1.0, 1.003]
LOSSES = [2.0, 2.2, 1.9, 2.1, 2.05]


def scaled(factor: float) -> list[float]:
    return [factor * x * y for x, y in zip(LOSSES, NEAR, strict=True)]


def test_equivalence_by_hand() -> None:
    """Two one-sided paired t-tests against +-log 1.02, and the 90 % interval."""
    found = judge_equivalence(dict(enumerate(LOSSES)), dict(enumerate(scaled(1.0))), MARGIN)
    differences, limit = np.log(NEAR), math.log(1.02)
    above = stats.ttest_1samp(differences, -limit, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, limit, alternative="less").pvalue
    assert found.p == pytest.approx(max(above, below), rel=1e-9)
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.90)
    assert (found.low, found.high) == pytest.approx(tuple(map(math.exp, interval)), rel=1e-9)
    assert (found.verdict, found.seeds) == (EquivalenceVerdict.EQUIVALENT, 5)


@pytest.mark.parametrize(
    ("factor", "claim"),
    [
        (1.0, EquivalenceVerdict.EQUIVALENT),
        (1.018, EquivalenceVerdict.UNCLEAR),
        (1.04, EquivalenceVerdict.WORSE),
        (1 / 1.04, EquivalenceVerdict.BETTER),
    ],
)
def test_claims(factor: float, claim: EquivalenceVerdict) -> None:
    found = judge_equivalence(dict(enumerate(LOSSES)), dict(enumerate(scaled(factor))), MARGIN)
    assert found.verdict is claim


@given(st.floats(-0.04, 0.04))
@example(0.0217)  # with p of 0.044, as the other
@example(-0.0241)
def test_claims_are_those_of_tests_against_the_margin(shift: float) -> None:
    """Two-sided beyond it, and both one-sided within it, as scipy has them."""
    (found,) = judge_equivalences([pair_up(LOSSES, scaled(math.exp(shift)))], MARGIN)
    differences, limit = np.log(NEAR) + shift, math.log(1.02)

    def test(at: float, side: str) -> float:
        return float(stats.ttest_1samp(differences, at, alternative=side).pvalue)

    claims = {
        EquivalenceVerdict.EQUIVALENT: max(test(-limit, "greater"), test(limit, "less")),
        EquivalenceVerdict.WORSE: 2 * test(limit, "greater"),
        EquivalenceVerdict.BETTER: 2 * test(-limit, "less"),
    }
    assume(all(abs(p - 0.05) > 1e-9 for p in claims.values()))
    expected = [claim for claim, p in claims.items() if p < 0.05]
    assert [found.verdict] == (expected or [EquivalenceVerdict.UNCLEAR])


def test_losses_equal_in_every_seed_are_equivalent_at_any_margin() -> None:
    """But not those of too few seeds."""
    same = dict(enumerate(LOSSES))
    found = judge_equivalence(same, dict(same), 0.0)
    assert (found.verdict, found.low, found.high) == (EquivalenceVerdict.EQUIVALENT, 1.0, 1.0)
    two = judge_equivalence({0: 2.0, 1: 2.5}, {0: 2.0, 1: 2.5}, MARGIN)
    assert (two.verdict, two.lack) == (EquivalenceVerdict.UNCLEAR, "needs 3 seeds a side, has 2")


@pytest.mark.parametrize(
    ("verdict", "guessing", "kept"),
    [
        (EquivalenceVerdict.EQUIVALENT, [False, False], True),
        (EquivalenceVerdict.EQUIVALENT, [], True),
        (EquivalenceVerdict.EQUIVALENT, [True, False], False),
        (EquivalenceVerdict.WORSE, [False, True], True),
        (EquivalenceVerdict.BETTER, [True, False], True),
        (EquivalenceVerdict.WORSE, [True, True], False),
        (EquivalenceVerdict.UNCLEAR, [False, True], False),
    ],
)
def test_networks_that_guess_are_worse_or_better_but_never_equivalent(
    verdict: EquivalenceVerdict, guessing: list[bool], kept: bool
) -> None:
    found = Equivalence(verdict, 1.1, 1.05, 1.2, 0.01, 5, "", 0.5)
    without = Equivalence(EquivalenceVerdict.UNCLEAR, 1.1, seeds=5, lack=GUESSING, unit=0.5)
    assert withdraw(found, GUESSING) == without
    assert withdraw_if_guessing(found, guessing) == (found if kept else without)


def test_a_family_of_equivalences_is_adjusted_and_keeps_its_order() -> None:
    """Claims of both kinds by Holm, each among its own; what has no ratio says why."""
    shifted = [1.04 * x for x in NEAR]
    family = [
        pair_up(LOSSES, scaled(1.0)),
        pair_up([math.nan] * 3, LOSSES[:3]),
        pair_up(LOSSES, [x * y for x, y in zip(LOSSES, shifted, strict=True)]),
        pair_up([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]),
        pair_up([math.inf, -1.0, -2.0], [-1.0, -2.0, -3.0]),
    ]
    within, lack, beyond, same, lost = judge_equivalences(family, MARGIN)
    alone = [judge_equivalences([family[at]], MARGIN)[0] for at in (0, 2)]
    assert within.p == pytest.approx(2 * alone[0].p)  # type: ignore[operator]
    assert beyond.p == alone[1].p == pytest.approx(1, abs=0.01)
    assert [one.verdict for one in (within, beyond, same)] == [
        EquivalenceVerdict.EQUIVALENT,
        EquivalenceVerdict.WORSE,
        EquivalenceVerdict.EQUIVALENT,
    ]
    reason = "a value is not positive: no ratio"
    assert lack == Equivalence(EquivalenceVerdict.UNCLEAR, lack=reason)
    assert lost == Equivalence(EquivalenceVerdict.UNCLEAR, lack=reason, unit=2.0)
    assert (same.ratio, same.low, same.high, same.p, same.seeds) == (1.0, 1.0, 1.0, None, 3)
    assert same.unit == 2.0
    assert (within.write(1.01234), same.write(math.exp(0.25))) == ("1.0123", "+0.5")


# ------------------------------------------------------------------------------------ simulation

TRIALS = 1500

Noise = tuple[float | NDArray[np.float64], float | NDArray[np.float64]]


def simulate(
    noise: Noise, repeats: tuple[int, int], ratios: Sequence[float], trials: int = TRIALS
) -> list[list[Ratio]]:
    """Compare sweeps that differ by ``ratios``, case by case, under log-normal noise."""
    rng = np.random.default_rng(20190121)
    cases = len(ratios)
    a, b = (
        np.asarray(s)[..., None] * rng.standard_normal((trials, cases, n))
        for s, n in zip(noise, repeats, strict=True)
    )
    b = b + np.log(ratios)[:, None]
    a, b = np.exp(a), np.exp(b)
    return [
        compare([(a[t, c].tolist(), b[t, c].tolist()) for c in range(cases)]) for t in range(trials)
    ]


def wrong_rate(sweeps: list[list[Ratio]]) -> float:
    """How often two equal sweeps get a verdict that they differ, in any case."""
    return float(np.mean([bool(WRONG & set(judge(ratios))) for ratios in sweeps]))


UNLIKE = 0.05 * np.exp(np.random.default_rng(1).normal(0, 1, 24))


# so noisy that the margin of 2 % protects from nothing
@pytest.mark.parametrize(
    ("cases", "noise", "repeats"),
    [
        pytest.param(1, (0.2, 0.2), (5, 5), id="one case"),
        pytest.param(24, (0.2, 0.05), (3, 10), id="unequal repeats, the few the noisier"),
        pytest.param(24, (UNLIKE, UNLIKE), (5, 5), id="each case has its own"),
    ],
)
def test_no_difference_is_seldom_called_one(
    cases: int, noise: Noise, repeats: tuple[int, int]
) -> None:
    trials = TRIALS if cases == 1 else 400
    assert wrong_rate(simulate(noise, repeats, [1.0] * cases, trials)) <= 0.05


@pytest.mark.parametrize(("changed", "affected"), [(1 / 1.05, 24), (1.05, 1)])
def test_five_percent_is_found_among_24_cases(changed: float, affected: int) -> None:
    ratios = [changed] * affected + [1.0] * (24 - affected)
    right = Verdict.HIGHER if changed > 1 else Verdict.LOWER
    sweeps = simulate((0.01, 0.01), (5, 5), ratios, 200)
    found = [verdict is right for sweep in sweeps for verdict in judge(sweep)[:affected]]
    assert np.mean(found) >= 0.9


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    sweeps = simulate((0.01, 0.02), (5, 5), [1.05], 3000)
    covered = [r.low <= 1.05 <= r.high for (r,) in sweeps if r.low and r.high]
    assert 0.95 <= np.mean(covered) <= 0.975


@pytest.mark.parametrize(("drift", "pairs_hold"), [(0.0, 0.93), (0.1, 0.0)])
def test_runs_in_turns_are_not_pairs(drift: float, pairs_hold: float) -> None:
    """Of two cases in turns the second always runs later: where the machine slows by a tenth in the
    sweep, the interval of their pairs seldom holds."""
    rng = np.random.default_rng(20261129)
    logs = np.linspace(0, drift, 6) + 0.01 * rng.standard_normal((400, 6))
    a, b = logs[:, ::2], logs[:, 1::2]
    sides = zip(np.exp(a).tolist(), np.exp(b).tolist(), strict=True)
    found = [compare([both])[0] for both in sides]
    assert np.mean([(r.low or 9) <= 1 <= (r.high or 0) for r in found]) >= 0.95
    apart = b - a
    reach = stats.t.ppf(0.975, 2) * apart.std(axis=1, ddof=1) / math.sqrt(3)
    assert pairs_hold <= np.mean(abs(apart.mean(axis=1)) <= reach) <= (0.8 if drift else 0.97)


# ---------------------------------------------------------------------- simulation of equivalence


def simulate_equivalence(
    ratio: float, noise: float, seeds: int, paired: bool, cases: int = 1, trials: int = TRIALS
) -> list[list[Equivalence]]:
    """Losses that share 2 % of noise within a seed, or nothing where seeds are not shared."""
    rng = np.random.default_rng(20261121)
    shared = 0.02 * rng.standard_normal((trials, cases, 1, seeds)) * paired
    values = shared + noise * rng.standard_normal((trials, cases, 2, seeds))
    values[:, :, 1] += math.log(ratio)
    other = 0 if paired else seeds
    return [
        judge_equivalences([pair_up(a, b, other) for a, b in family], MARGIN)
        for family in np.exp(values).tolist()
    ]


def claim_rate(found: list[list[Equivalence]], *claims: EquivalenceVerdict) -> float:
    """How often any case of a family gets such a claim."""
    return float(np.mean([any(each.verdict in claims for each in family) for family in found]))


def chance(rate: float, trials: int) -> float:
    """What a true rate is seldom seen above in so many trials: three standard errors."""
    return rate + 3 * math.sqrt(rate * (1 - rate) / trials)


WORST, BEST = 1 + MARGIN, 1 / (1 + MARGIN)


@pytest.mark.parametrize(
    ("ratio", "noise", "seeds", "paired", "cases"),
    [
        pytest.param(BEST, 0.002, 3, True, 1, id="three pairs"),
        pytest.param(WORST, 0.002, 5, True, 6, id="six cases"),
        pytest.param(BEST, 0.03, 5, True, 1, id="very noisy"),
    ],
)
def test_a_difference_of_the_margin_is_seldom_called_equivalent(
    ratio: float, noise: float, seeds: int, paired: bool, cases: int
) -> None:
    trials = 3000 if cases == 1 else 800
    found = simulate_equivalence(ratio, noise, seeds, paired, cases, trials)
    assert claim_rate(found, EquivalenceVerdict.EQUIVALENT) <= chance(0.05, trials)
    wrong = EquivalenceVerdict.WORSE if ratio > 1 else EquivalenceVerdict.BETTER
    assert claim_rate(found, wrong) <= chance(0.025 if cases == 1 else 0.05, trials)


def test_paired_losses_without_difference_are_seldom_called_different() -> None:
    """24 cases, three pairs each; the seeds' losses are correlated."""
    rng = np.random.default_rng(12)
    values = 0.2 * rng.standard_normal((250, 24, 1, 3))
    values = values + 0.2 * rng.standard_normal((250, 24, 2, 3))
    sweeps = [
        compare_seeds([pair_up(a, b) for a, b in family]) for family in np.exp(values).tolist()
    ]
    assert all(ratio.pairs == 3 for ratio in sweeps[0])
    assert wrong_rate(sweeps) <= chance(0.05, 250)


def test_a_loss_2_percent_below_that_of_guessing_is_learnt() -> None:
    """0.98 ln 10 is 2.25653."""
    assert is_guessing(2.2566, 10)
    assert not is_guessing(2.2564, 10)
    assert [is_guessing(x, None) for x in (6.0, math.inf, math.nan)] == [False, True, True]


@pytest.mark.parametrize(
    ("workload", "given_classes", "counted", "classes"),
    [
        (IMAGES, None, None, CLASSES),
        (IMAGES, 100, math.nan, 100),
        (IMAGES, 100, 5.0, 5),
        ("own", None, math.nan, None),
        ("own", 7, None, 7),
        ("own", None, 3.0, 3),
    ],
)
def test_the_classes_of_a_loss_are_counted_else_given_else_known_of_images_alone(
    workload: str, given_classes: int | None, counted: float | None, classes: int | None
) -> None:
    assert find_classes(workload, given_classes, counted) == classes
