"""The statistics behind `bench.compare`: against hand-worked numbers, scipy, and simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from bench.verdict import (
    MIN_REPEATS,
    MIN_SEEDS,
    Ratio,
    Verdict,
    adjust,
    compare,
    compare_seeds,
)

MARGIN = 0.02
WRONG = {Verdict.LOWER, Verdict.HIGHER}


def judge(ratios: Sequence[Ratio], margin: float = MARGIN) -> list[Verdict]:
    return [ratio.judge(margin) for ratio in ratios]


# -------------------------------------------------------------------------------- worked examples


def test_welch_by_hand() -> None:
    """Logarithms 0 1 2 against 1 2 3 6.

    Means 1 and 3; variances 1 and (4 + 1 + 0 + 9)/3 = 14/3; squared error 1/3 + 14/12 = 3/2;
    t = 2/sqrt(3/2) = 1.632993; df = (9/4) / ((1/9)/2 + (49/36)/3) = 4.418182.
    """
    a, b = [math.exp(x) for x in (0, 1, 2)], [math.exp(x) for x in (1, 2, 3, 6)]
    (ratio,) = compare([(a, b)])
    t, df, error = 1.6329931618554518, 4.418181818181818, 1.224744871391589
    assert ratio.value == pytest.approx(math.e**2, rel=1e-14)
    assert ratio.p == pytest.approx(2 * stats.t.sf(t, df), rel=1e-12)
    assert ratio.p_adjusted == ratio.p
    reach = stats.t.ppf(0.975, df) * error
    assert ratio.low == pytest.approx(math.exp(2 - reach), rel=1e-12)
    assert ratio.high == pytest.approx(math.exp(2 + reach), rel=1e-12)


@given(
    st.lists(st.integers(900, 1100), min_size=3, max_size=8),
    st.lists(st.integers(900, 1100), min_size=3, max_size=8),
)
def test_one_case_is_welchs_test_of_the_logarithms(a: list[int], b: list[int]) -> None:
    assume(len(set(a)) > 1 and len(set(b)) > 1)
    (ratio,) = compare([(a, b)])
    welch = stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert ratio.p == pytest.approx(welch.pvalue, rel=1e-9)
    assert ratio.low == pytest.approx(math.exp(interval.low), rel=1e-9)
    assert ratio.high == pytest.approx(math.exp(interval.high), rel=1e-9)


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
        t = 0.05 / (0.01 * math.sqrt((scale**2 + 1) / 3))
        assert ratio.p == pytest.approx(2 * stats.t.sf(t, 50 / 17), rel=1e-9)
    # the interval is the case's own
    reach = stats.t.ppf(0.975, 4) * 0.01 * math.sqrt(2 / 3)
    assert ratios[0].high == pytest.approx(math.exp(0.05 + reach), rel=1e-9)


def test_a_side_without_spread_leaves_the_noise_to_the_other() -> None:
    noisy = [100.0, 102.0, 98.0, 101.0]
    (ratio,) = compare([([90.0, 90.0, 90.0], noisy)], deterministic=True)
    t = (np.mean(np.log(noisy)) - math.log(90)) / (np.std(np.log(noisy), ddof=1) / 2)
    assert ratio.p == pytest.approx(2 * stats.t.sf(t, 3), rel=1e-9)
    assert not ratio.exact


def test_holm_worked_example() -> None:
    """Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1, then never below the one before."""
    assert adjust([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust([0.9, 0.8]) == [1.0, 1.0]
    assert adjust([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
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


# -------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("low", "high", "p", "verdict"),
    [
        (1.03, 1.06, 0.01, Verdict.HIGHER),
        (0.94, 0.97, 0.01, Verdict.LOWER),
        (0.94, 0.9803, 0.01, Verdict.LOWER),  # below 1/1.02, not below 0.98
        (1.03, 1.06, 0.06, Verdict.AMBIGUOUS),
        (1.01, 1.06, 0.01, Verdict.AMBIGUOUS),
        (0.99, 1.03, 0.70, Verdict.AMBIGUOUS),
        (0.985, 1.015, 0.70, Verdict.SAME),
        (1.005, 1.015, 0.001, Verdict.SAME),  # differs, by less than matters
    ],
)
def test_verdict_of_interval_and_evidence(
    low: float, high: float, p: float, verdict: Verdict
) -> None:
    ratio = Ratio(math.sqrt(low * high), low, high, p, p)
    assert ratio.judge(MARGIN) is verdict
    assert bool(ratio.explain(MARGIN)) == (verdict is Verdict.AMBIGUOUS)


def test_each_ambiguity_says_its_own_reason() -> None:
    crossing = Ratio(1.035, 1.01, 1.06, 0.01, 0.01).explain(MARGIN)
    chance = Ratio(1.045, 1.03, 1.06, 0.01, 0.24).explain(MARGIN)
    wide = Ratio(1.01, 0.99, 1.03, 0.7, 0.7).explain(MARGIN)
    assert "perhaps by less than the margin" in crossing
    assert "chance among all the cases" in chance
    assert "more repeats" in wide


@pytest.mark.parametrize(
    ("a", "b", "has"), [([1.0], [1.1], "1"), ([1.0, 1.1, 1.2], [1.0, 1.1], "3 and 2")]
)
def test_too_few_repeats_give_a_ratio_and_no_verdict(
    a: list[float], b: list[float], has: str
) -> None:
    (ratio,) = compare([(a, b)], deterministic=True)
    assert ratio.value is not None
    assert ratio.low is ratio.p is None
    assert ratio.judge(MARGIN) is Verdict.NONE
    assert ratio.explain(MARGIN) == f"needs {MIN_REPEATS} repeats a side, has {has}"


def test_too_few_repeats_are_not_of_the_family() -> None:
    full = ([1.00, 1.01, 0.99], [1.05, 1.06, 1.04])
    alone, beside = compare([full])[0], compare([full, ([1.0], [2.0])])[0]
    assert alone == beside


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ([], [1.0], "no value in A"),
        ([], [], "no value in A or B"),
        ([1.0], [0.0, 1.0], "a value in B is not positive"),
        ([-1.0], [math.nan], "a value in A and B is not positive"),
        ([math.inf], [1.0], "a value in A is not positive"),
    ],
)
def test_no_ratio_says_why(a: list[float], b: list[float], why: str) -> None:
    (ratio,) = compare([(a, b)])
    assert ratio.value is None
    assert ratio.judge(MARGIN) is Verdict.NONE
    assert ratio.explain(MARGIN).startswith(why)


@pytest.mark.parametrize(
    ("b", "verdict"), [(1000, Verdict.SAME), (1015, Verdict.SAME), (1021, Verdict.HIGHER)]
)
def test_deterministic_repeats_without_spread_are_exact(b: int, verdict: Verdict) -> None:
    (ratio,) = compare([([1000] * 3, [b] * 3)], deterministic=True)
    assert ratio.exact
    assert ratio.p is None
    assert ratio.low == ratio.value == ratio.high == pytest.approx(b / 1000)
    assert ratio.judge(MARGIN) is verdict
    assert compare([([b] * 3, [1000] * 3)], deterministic=True)[0].judge(MARGIN) is {
        Verdict.SAME: Verdict.SAME,
        Verdict.HIGHER: Verdict.LOWER,
    }.get(verdict)


def test_a_clock_without_spread_is_not_believed() -> None:
    (ratio,) = compare([([10.0] * 5, [11.0] * 5)])
    assert ratio.value == pytest.approx(1.1)
    assert ratio.judge(MARGIN) is Verdict.NONE
    assert "not independent" in ratio.explain(MARGIN)


def test_values_far_apart_do_not_overflow() -> None:
    (ratio,) = compare([([1e-300, 2e-300, 1e-290], [1e300, 2e300, 1e299])])
    assert ratio.high is not None
    assert math.isfinite(ratio.high)


# ------------------------------------------------------------------------------------------ seeds


def test_repeats_of_one_seed_are_one_reading() -> None:
    """Two repeats of a seed whose losses are 2 and 8 read as 4, their geometric mean."""
    a = {0: [2.0, 8.0], 1: [5.0], 2: [3.0, 3.0]}
    b = {7: [4.5], 8: [5.5, 5.5], 9: [3.5]}
    assert compare_seeds([(a, b)])[0] == compare([([4.0, 5.0, 3.0], [4.5, 5.5, 3.5])])[0]


@pytest.mark.parametrize(
    ("a", "b", "lack"),
    [
        ({0: [2.05] * 3}, {0: [2.10] * 3}, "one seed: differs by 2.4 %, no verdict"),
        ({0: [2.05] * 3}, {0: [2.05] * 3}, "one seed: equal, no verdict"),
        ({0: [2.0]}, {s: [2.0 + s] for s in range(3)}, "one seed in A: differs by 44 %, no"),
        ({0: [2.0], 1: [2.1]}, {0: [2.0], 1: [2.1]}, "two seeds: needs three"),
        ({s: [2.0 + s] for s in range(3)}, {0: [2.0], 1: [2.1]}, "two seeds in B: needs three"),
        ({}, {0: [2.0]}, "no value in A"),
        ({0: [2.0]}, {0: [-1.0]}, "a value in B is not positive"),
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


# ----------------------------------------------------------------------------------- invariances

REPEATS = st.lists(st.integers(9_000, 11_000).map(float), min_size=3, max_size=6)
FAMILY = st.lists(st.tuples(REPEATS, REPEATS), min_size=1, max_size=4)
FLIPPED = {Verdict.LOWER: Verdict.HIGHER, Verdict.HIGHER: Verdict.LOWER}


@given(FAMILY, st.booleans())
def test_swapping_sides_inverts_ratio_and_verdict(
    family: list[tuple[list[float], list[float]]], deterministic: bool
) -> None:
    there = compare(family, deterministic)
    back = compare([(b, a) for a, b in family], deterministic)
    for x, y in zip(there, back, strict=True):
        assert x.value is not None
        assert y.value == pytest.approx(1 / x.value, rel=1e-12)
        assert near(y.p, x.p)
        assert near(y.low, None if x.high is None else 1 / x.high)
        if not on_the_edge(x):
            assert y.judge(MARGIN) is FLIPPED.get(x.judge(MARGIN), x.judge(MARGIN))


@given(FAMILY, st.booleans(), st.floats(1e-9, 1e9))
def test_units_change_nothing(
    family: list[tuple[list[float], list[float]]], deterministic: bool, unit: float
) -> None:
    scaled = [([unit * x for x in a], [unit * x for x in b]) for a, b in family]
    for x, y in zip(compare(family, deterministic), compare(scaled, deterministic), strict=True):
        assert near(y.value, x.value)
        assert near(y.low, x.low)
        assert near(y.p_adjusted, x.p_adjusted)
        assert y.exact == x.exact
        if not on_the_edge(x):
            assert y.judge(MARGIN) is x.judge(MARGIN)


def near(x: float | None, y: float | None) -> bool:
    """Whether two are equal but for rounding, or both absent."""
    return x is y if x is None or y is None else math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-12)


def on_the_edge(ratio: Ratio) -> bool:
    """Whether rounding could decide the verdict."""
    edges = (1 + MARGIN, 1 / (1 + MARGIN))
    ends = [end for end in (ratio.low, ratio.high) if end is not None]
    close = any(math.isclose(end, edge, rel_tol=1e-6) for end in ends for edge in edges)
    return close or math.isclose(ratio.p_adjusted or 0, 0.05, rel_tol=1e-4)


# ------------------------------------------------------------------------------------ simulation

TRIALS = 1500


def simulate(
    noise: tuple[float | NDArray[np.float64], float | NDArray[np.float64]],
    repeats: tuple[int, int],
    ratios: Sequence[float],
    trials: int = TRIALS,
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


# so noisy that the margin of 2 % protects from nothing
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "noise", "repeats"),
    [
        pytest.param(1, (0.2, 0.2), (5, 5), id="one case"),
        pytest.param(24, (0.2, 0.2), (5, 5), id="equal"),
        pytest.param(24, (0.05, 0.2), (5, 5), id="B four times as noisy"),
        pytest.param(24, (0.2, 0.2), (3, 10), id="unequal repeats"),
        pytest.param(24, (0.2, 0.05), (3, 10), id="unequal repeats, the few the noisier"),
        pytest.param(24, (0.02, 0.2), (3, 3), id="B ten times as noisy, three repeats"),
    ],
)
def test_no_difference_is_seldom_called_one(
    cases: int, noise: tuple[float, float], repeats: tuple[int, int]
) -> None:
    assert wrong_rate(simulate(noise, repeats, [1.0] * cases)) <= 0.05


@pytest.mark.slow
def test_repeats_of_a_seed_make_no_difference_of_seeds() -> None:
    """Deterministic repeats: three seeds a side, each twice. Six readings would be too many."""
    rng = np.random.default_rng(11)
    draws = np.exp(0.2 * rng.standard_normal((TRIALS, 12, 2, MIN_SEEDS)))
    sweeps, naive = [], []
    for trial in draws:
        family = [
            tuple({seed: [float(v)] * 2 for seed, v in enumerate(side)} for side in case)
            for case in trial
        ]
        sweeps.append(compare_seeds([(a, b) for a, b in family]))
        naive.append(compare([(list(a) * 2, list(b) * 2) for a, b in trial.tolist()]))
    assert wrong_rate(sweeps) <= 0.05 < wrong_rate(naive)


@pytest.mark.slow
def test_no_difference_among_cases_of_unlike_noise() -> None:
    noise = 0.05 * np.exp(np.random.default_rng(1).normal(0, 1, 24))
    assert wrong_rate(simulate((noise, noise), (5, 5), [1.0] * 24)) <= 0.05


def test_at_ordinary_noise_a_wrong_verdict_is_rarer_still() -> None:
    assert wrong_rate(simulate((0.01, 0.01), (5, 5), [1.0] * 24)) <= 0.001


@pytest.mark.parametrize("changed", [1.05, 1 / 1.05, 0.95])
@pytest.mark.parametrize(
    ("cases", "affected"),
    [
        pytest.param(1, 1, id="one case"),
        pytest.param(24, 24, id="all of 24"),
        pytest.param(24, 1, id="one of 24"),
    ],
)
def test_five_percent_is_found(changed: float, cases: int, affected: int) -> None:
    ratios = [changed] * affected + [1.0] * (cases - affected)
    right = Verdict.HIGHER if changed > 1 else Verdict.LOWER
    trials = 400 if cases > 1 else TRIALS
    sweeps = simulate((0.01, 0.01), (5, 5), ratios, trials)
    found = [verdict is right for sweep in sweeps for verdict in judge(sweep)[:affected]]
    assert np.mean(found) >= 0.9


def test_a_difference_of_the_margin_is_seldom_called_same() -> None:
    sweeps = simulate((0.01, 0.01), (10, 10), [1 + MARGIN])
    assert np.mean([judge(sweep) == [Verdict.SAME] for sweep in sweeps]) <= 0.05


def test_same_is_found() -> None:
    sweeps = simulate((0.01, 0.01), (10, 10), [1.0])
    assert np.mean([judge(sweep) == [Verdict.SAME] for sweep in sweeps]) >= 0.9


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    sweeps = simulate((0.01, 0.02), (5, 5), [1.05], 4000)
    covered = [r.low <= 1.05 <= r.high for (r,) in sweeps if r.low and r.high]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)
