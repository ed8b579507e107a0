"""Whether each precision learns as well as the one it is compared with: equivalent, or not.

That no difference was found shows nothing; `bench.verdict.judge_equivalences` asks whether one
beyond a margin can be ruled out, over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.limits import STEADY
from bench.report.effects import LOSS, Effect, list_comparable, take_readings
from bench.report.metrics import METRICS, Metric
from bench.verdict import Equivalence, Seeded, judge_equivalences

if TYPE_CHECKING:
    import pandas as pd

MARGIN = STEADY
"""A loss or an error within this share of the other counts as equal."""

LEARNT: tuple[Metric, ...] = (LOSS, METRICS["test_top1_error"])


@dataclass(frozen=True)
class Lesson:
    """What a change of precision does to a loss or an error: over all its pairs, seed by seed."""

    effect: Effect
    metric: Metric
    equivalence: Equivalence


def judge_learning(
    rows: pd.DataFrame, cases: pd.DataFrame, effects: Sequence[Effect]
) -> Iterator[Lesson]:
    """Judge every change of precision by each of `LEARNT` that was measured.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: the same summarized.
    """
    concerned = [effect for effect in effects if effect.axis == "precision"]
    for metric in LEARNT:
        readings = take_readings(metric, rows)
        family = [(effect, _average(effect, readings, cases)) for effect in concerned]
        family = [(effect, pair) for effect, pair in family if pair[0] and pair[1]]
        found = judge_equivalences([pair for _, pair in family], MARGIN)
        for (effect, _), equivalence in zip(family, found, strict=True):
            yield Lesson(effect, metric, equivalence)


def _average(effect: Effect, readings: pd.DataFrame, cases: pd.DataFrame) -> Seeded:
    """Before and after, by seed: the geometric mean over the pairs, of seeds that all of these ran.

    Pairs of one seed see the same images, and so are one reading.
    """
    pairs = list_comparable(effect, cases)
    sides = []
    for cells in zip(*pairs, strict=True):
        theirs = readings[readings["cell"].isin(cells)]
        by_seed = theirs.groupby("run_seed")["log"].agg(["size", "mean"])
        whole = by_seed.loc[by_seed["size"] == len(pairs), "mean"]
        means = zip(whole.index.tolist(), whole.tolist(), strict=True)
        sides.append({seed: [math.exp(log)] for seed, log in means})
    return (sides[0], sides[1]) if sides else ({}, {})
