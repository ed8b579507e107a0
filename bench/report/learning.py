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
from bench.report.effects import (
    LOSS,
    SAME_LOSS,
    Effect,
    average_log,
    average_seeds,
    list_means,
    take_readings,
    take_seeds,
)
from bench.report.metrics import METRICS, Metric
from bench.verdict import (
    GUESSING,
    Claim,
    Equivalence,
    Seeded,
    judge_equivalences,
    learnt_nothing,
    take_back,
)

if TYPE_CHECKING:
    import pandas as pd

MARGIN = STEADY
"""A loss or an error within this share of the other counts as equal."""

LEARNT: tuple[Metric, ...] = (LOSS, METRICS["test_top1_error"])


@dataclass(frozen=True)
class Lesson:
    """What a change of precision does to a loss or an error: over its pairs, seed by seed.

    Attributes:
        pairs: how many pairs have readings on both sides, of ``of``.
        remarks: what to know before believing it.
    """

    effect: Effect
    metric: Metric
    equivalence: Equivalence
    pairs: int
    of: int
    remarks: tuple[str, ...]


def judge_learning(
    rows: pd.DataFrame, cases: pd.DataFrame, effects: Sequence[Effect]
) -> Iterator[Lesson]:
    """Judge every change of precision by each of `LEARNT` that was measured.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: the same summarized.
    """
    told = {row[0]: row[1:] for row in cases[["cell", *SAME_LOSS]].itertuples(index=False)}
    losses = take_seeds(take_readings(LOSS, rows))
    for metric in LEARNT:
        seeds = losses if metric is LOSS else take_seeds(take_readings(metric, rows))
        concerned = []
        for effect in effects:
            pairs = [pair for pair in effect.pairs if told[pair[0]] == told[pair[1]]]
            known = [(a, b) for a, b in pairs if a in seeds and b in seeds]
            if effect.axis == "precision" and known:
                concerned.append((effect, pairs, known))
        family: list[Seeded] = []
        for _, _, known in concerned:
            a, b = (average_seeds(side, seeds) for side in zip(*known, strict=True))
            family.append((list_means(a), list_means(b)))
        found = judge_equivalences(family, MARGIN)
        for (effect, pairs, known), equivalence in zip(concerned, found, strict=True):
            ends = _find_ends(known, seeds)
            if equivalence.verdict is Claim.EQUIVALENT and max(ends[1], 1 / ends[0]) > 1 + MARGIN:
                equivalence = take_back(equivalence, "not in every case")
            if all(_guesses(cell, losses, told) for pair in known for cell in pair):
                equivalence = take_back(equivalence, GUESSING)
            remarks = tuple(_list_remarks(equivalence, known, told, ends))
            yield Lesson(effect, metric, equivalence, len(known), len(pairs), remarks)


_Seeds = dict[int, dict[int, tuple[float, float]]]
_Told = dict[int, tuple[float, str, str, str]]
"""Of `SAME_LOSS`, by cell."""


def _find_ends(pairs: Sequence[tuple[int, int]], seeds: _Seeds) -> tuple[float, float]:
    """The ratio of the pair where it is lowest, and where it is highest."""
    ratios = [math.exp(average_log(seeds[b]) - average_log(seeds[a])) for a, b in pairs]
    return min(ratios), max(ratios)


def _guesses(cell: int, losses: _Seeds, told: _Told) -> bool:
    """Whether the loss of a case is still that of guessing; not, where it is unknown."""
    if cell not in losses:
        return False
    _, _, _, classes = told[cell]
    return learnt_nothing(math.exp(average_log(losses[cell])), int(classes) if classes else None)


def _list_remarks(
    equivalence: Equivalence,
    pairs: Sequence[tuple[int, int]],
    told: _Told,
    ends: tuple[float, float],
) -> Iterator[str]:
    if equivalence.lack:
        yield equivalence.lack
    if ends[1] / ends[0] > 1 + MARGIN:
        yield f"from {ends[0]:.3f} to {ends[1]:.3f} over the cases"
    of = [told[before] for before, _ in pairs]
    if any(dataset == "synthetic" for _, dataset, *_ in of):
        yield "synthetic"
    if any(part < 1 for part, *_ in of):
        yield "part of an epoch"
