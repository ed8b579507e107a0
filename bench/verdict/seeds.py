"""Losses and errors, judged over seeds.

They differ from seed to seed by more than most changes move them, and a deterministic network
repeats the loss of one seed to the last digit, which says nothing about the next. Where both sides
ran some seed, the others are left out: a sweep that was interrupted has seeds on one side alone,
and their spread would be taken for the change. The two losses of a seed are a pair: they share
initial weights, the order of images and their augmentation. From `MIN_SEEDS` pairs on, the paired
t-test of the differences of logarithms is taken, which is valid whether or not the two are
correlated, and far more powerful where they are. Measured (dpn-small on real images on a CPU, fp32
against bf16-amp, 5 seeds, batch sizes 64 and 128): losses spread by 0.6 % over seeds, their
differences within a seed by 0.15 and 0.08 %; the correlation is 0.96 and 0.999. Without shared
seeds it is Welch's test. Times are never paired: two repeats with the same seed did not run at the
same moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from bench.data.sources import CLASSES
from bench.limits import MIN_REPEATS
from bench.verdict.difference import (
    ROUNDING,
    SIDES,
    Difference,
    Spread,
    find_lack,
    has_log,
    subtract,
    summarize,
)
from bench.verdict.ratio import Ratio, estimate

MIN_SEEDS = MIN_REPEATS
"""Distinct seeds a side for a verdict on a loss or an error."""

LEAST_GAIN = 0.02
"""A network that guesses among equally frequent classes has a loss of ln(classes). One that learnt
is below that by at least this share. Records say how many classes there were where --classes was
given; else the datasets of the harness have 10, and for a user's folders with more the rule is
merely weaker."""

Seeded = tuple[Mapping[int, Sequence[float]], Mapping[int, Sequence[float]]]
"""The repeats of one case by their seed, A's and B's."""


def compare_seeds(family: Sequence[Seeded], names: tuple[str, str] = SIDES) -> list[Ratio]:
    """The ratio B/A of a loss or an error of each case of a family, in order, over seeds.

    Repeats of one seed are no further evidence: their geometric mean is one reading. Seeds that
    both sides ran are compared pair by pair, and other seeds are then left out; where the ratio of
    all of these agrees to the last digit, it is exact. With fewer than `MIN_SEEDS` of them, or a
    side where there are none, there is no verdict.
    """
    means = [(average_repeats(a), average_repeats(b)) for a, b in family]
    ratios = iter(estimate([subtract_seeds(a, b, names) for a, b in means if not are_equal(a, b)]))
    return [
        Ratio(1.0, 1.0, 1.0, exact=True, pairs=len(a.keys() & b.keys()))
        if are_equal(a, b)
        else _ask_for_seeds(next(ratios), a, b, names)
        for a, b in means
    ]


def average_repeats(seeds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """One reading a seed: the geometric mean of its repeats."""
    return {seed: _mean(values) for seed, values in seeds.items() if values}


def _mean(values: Sequence[float]) -> float:
    odd = [value for value in values if not has_log(value)]
    if odd or len(values) == 1:
        return (odd or values)[0]
    return math.exp(fmean(math.log(value) for value in values))


def are_equal(a: Mapping[int, float], b: Mapping[int, float]) -> bool:
    """Whether both sides ran the same seeds, enough of them, and agree in each of these."""
    shared = a.keys() & b.keys()
    return len(shared) >= MIN_SEEDS and all(
        a[seed] > 0 and abs(a[seed] - b[seed]) <= ROUNDING * a[seed] for seed in shared
    )


def subtract_seeds(
    a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]
) -> Difference | str:
    """Subtract seed by seed where both sides ran any, else side from side."""
    readings = (list(a.values()), list(b.values()))
    if lack := find_lack(*readings, names):
        return lack
    shared = sorted(a.keys() & b.keys())
    if not shared or (len(shared) >= MIN_SEEDS and not subtract(*readings).error):
        return subtract(*readings)  # seeds without effect make no pairs
    shift, spread = summarize([b[seed] / a[seed] for seed in shared])
    return Difference(shift, spread, Spread(0.0, len(shared)), pairs=len(shared))


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
    return _mean(list(average_repeats(readings).values()))
