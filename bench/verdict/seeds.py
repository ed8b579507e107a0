"""Losses and errors, judged over seeds.

They differ between seeds by more than most changes move them, and a deterministic network repeats
the loss of one seed to the last digit, which says nothing about the next. If both sides share any
seeds, the others are left out: an interrupted sweep has seeds on one side alone, and their spread
would be mistaken for the change. The two losses of a seed are a pair: they share initial weights,
the order of images and their augmentation. With `MIN_SEEDS` pairs or more, a paired t-test of the
differences of logarithms is used, which is valid whether or not the two are correlated, and far
more powerful if they are. Measured (dpn-small on real images on a CPU, fp32 against bf16-amp, 5
seeds, batch sizes 64 and 128): losses spread by 0.6 % over seeds, their differences within a seed
by 0.15 and 0.08 %; the correlation is 0.96 and 0.999. Without shared seeds, Welch's test is used.
Times are never paired: two repeats with the same seed did not run at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from bench.data.sources import CLASSES, FOLDERS
from bench.limits import MIN_REPEATS
from bench.verdict.difference import (
    ROUNDING,
    SIDES,
    Difference,
    Spread,
    find_lack,
    find_unit,
    scale,
    subtract,
    summarize,
)
from bench.verdict.ratio import Ratio, estimate
from bench.workloads import IMAGES

MIN_SEEDS = MIN_REPEATS
"""Distinct seeds per side that a verdict on a loss or an error needs."""

LEAST_GAIN = 0.02
"""A network that guesses among equally frequent classes has a loss of ln(classes); one that learnt
has a loss lower by at least this share."""

Seeded = tuple[Mapping[int, Sequence[float]], Mapping[int, Sequence[float]]]
"""The repeats of one case by seed: A's and B's."""


def compare_seeds(family: Sequence[Seeded], names: tuple[str, str] = SIDES) -> list[Ratio]:
    """Return the ratio B/A of a loss or an error over seeds, for each case of a family, in order;
    of sides that are not all positive their difference, see `Ratio.difference`.

    The geometric mean of the repeats of one seed is one reading. Seeds that both sides ran are
    compared pair by pair, and other seeds are then left out; if all pairs have the same ratio to
    the last digit, it is exact. Fewer than `MIN_SEEDS` pairs, or seeds per side if there are no
    pairs, give no verdict.
    """
    scaled = [scale_seeds(average_repeats(a), average_repeats(b)) for a, b in family]
    ratios = iter(
        estimate([subtract_seeds(a, b, names) for a, b, _ in scaled if not are_equal(a, b)])
    )
    return [
        Ratio(1.0, 1.0, 1.0, exact=True, pairs=len(a.keys() & b.keys()), unit=unit)
        if are_equal(a, b)
        else _ask_for_seeds(replace(next(ratios), unit=unit), a, b, names)
        for a, b, unit in scaled
    ]


def scale_seeds(
    a: Mapping[int, float], b: Mapping[int, float]
) -> tuple[dict[int, float], dict[int, float], float]:
    """Return both sides, scaled where they have no ratio, and the unit of their difference: a loss
    below zero, as a likelihood's, has no logarithm. Values that are not finite stay as they are."""
    unit = find_unit(*([v for v in side.values() if math.isfinite(v)] for side in (a, b)))
    one, two = ({seed: scale(value, unit) for seed, value in side.items()} for side in (a, b))
    return one, two, unit


def average_repeats(seeds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the geometric mean of the repeats of each seed; of values that are not all positive
    the arithmetic mean."""
    return {seed: _mean(values) for seed, values in seeds.items() if values}


def _mean(values: Sequence[float]) -> float:
    odd = [value for value in values if not math.isfinite(value)]
    if odd or len(values) == 1:
        return (odd or values)[0]
    if min(values) <= 0:
        return fmean(values)
    return math.exp(fmean(math.log(value) for value in values))


def are_equal(a: Mapping[int, float], b: Mapping[int, float]) -> bool:
    """Return whether both sides share at least `MIN_SEEDS` seeds and have equal values in each."""
    shared = a.keys() & b.keys()
    return len(shared) >= MIN_SEEDS and all(
        a[seed] > 0 and abs(a[seed] - b[seed]) <= ROUNDING * a[seed] for seed in shared
    )


def subtract_seeds(
    a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]
) -> Difference | str:
    """Return the difference over shared seeds, if any, else of the sides; or why there is none."""
    readings = (list(a.values()), list(b.values()))
    if lack := find_lack(*readings, names):
        return lack
    shared = sorted(a.keys() & b.keys())
    if not shared or (len(shared) >= MIN_SEEDS and not subtract(*readings).error):
        return subtract(*readings)  # seeds that change nothing make no pairs
    shift, spread = summarize([b[seed] / a[seed] for seed in shared])
    return Difference(shift, spread, Spread(0.0, len(shared)), pairs=len(shared))


def _ask_for_seeds(
    ratio: Ratio, a: Mapping[int, float], b: Mapping[int, float], names: tuple[str, str]
) -> Ratio:
    """Set ``lack`` if a side has too few seeds; for one seed, with the size of the difference."""
    fewest = ratio.pairs or min(len(a), len(b))
    if ratio.value is None or fewest >= MIN_SEEDS:
        return ratio
    short = [name for name, side in zip(names, (a, b), strict=True) if len(side) == fewest]
    where = "" if len(short) == 2 else f" in {' and '.join(short or names)}"
    if fewest > 1:
        return replace(ratio, lack=f"two seeds{where}: needs three")
    apart = abs(ratio.value - 1)
    size = f"{ratio.difference[0]:+.3g}" if ratio.difference else f"{100 * apart:.2g} %"
    differs = f"differs by {size}" if apart > ROUNDING else "equal"
    return replace(ratio, lack=f"one seed{where}: {differs}, no verdict")


def find_classes(
    workload: str, given: int | None, counted: float | None, source: str | None
) -> int | None:
    """Return how many classes the loss of a case distinguishes; None if that is not known, as of a
    workload with a loss of its own. ``given`` is the axis ``classes``; ``counted`` and ``source``
    are the columns ``dataset_classes`` and ``dataset_source``; each may be empty."""
    if counted and counted == counted:  # NaN is empty
        return int(counted)
    return given or (None if workload != IMAGES or source == FOLDERS else CLASSES)


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


def average_seeds(readings: Mapping[int, Sequence[float]]) -> float:
    """Return the geometric mean over seeds, at least one, of the geometric mean of each."""
    return _mean(list(average_repeats(readings).values()))
