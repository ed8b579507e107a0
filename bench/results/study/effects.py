"""What changing one axis does, all else equal.

Whether a precision learns as well as its baseline is a test of equivalence, over seeds. Finding no
difference proves nothing; `bench.results.verdict` tests whether a difference beyond a margin can be
ruled out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from bench.base.limits import STEADY
from bench.results.study.axes import find_varying
from bench.results.study.estimate import (
    JUDGED,
    LOSS,
    TIME,
    Estimate,
    Seeds,
    average_seeds,
    estimate,
    list_means,
    list_shifts,
    share_seeds,
    take_seeds,
)
from bench.results.study.pairs import find_changes
from bench.results.study.quantities import METRICS, Metric
from bench.results.study.runs import Result
from bench.results.study.warnings import WARNINGS
from bench.results.verdict import (
    Equivalence,
    EquivalenceVerdict,
    find_classes,
    is_guessing,
    judge_equivalences,
    withdraw,
    withdraw_if_guessing,
)
from bench.schema.record import RELIABLE

_KINDS = ("measured", "unknown", "published")
"""Kinds of cases by priority: effects are estimated for the first one that there is."""


@dataclass(frozen=True)
class Effect:
    """One change of one axis, with all else equal."""

    axis: str  # an axis of `Case`, or ``machine``
    before: str  # its value, as displayed
    after: str
    pairs: tuple[tuple[int, int], ...]  # the ``cell`` before and after, of all pairs
    estimates: dict[str, Estimate]  # by the name of a metric of `JUDGED`, each over some pairs
    estimated: bool  # whether any of the times compared was extrapolated
    warnings: tuple[str, ...]  # what speaks against the cases compared, as remarks

    @property
    def time(self) -> Estimate | None:
        return self.estimates.get(TIME.name)

    @property
    def loss(self) -> Estimate | None:
        return self.estimates.get(LOSS.name)


def find_effects(results: Sequence[Result], varying: Sequence[str]) -> Iterator[Effect]:
    """Yield what each change of each axis does, in the order of the overview's columns."""
    ended = [result for result in results if result.status in RELIABLE]
    kind = min((result.kind for result in ended), key=_KINDS.index, default="")
    ended = [result for result in ended if result.kind == kind]
    changes = [
        change
        for axis in find_varying(ended, varying)
        if axis != "seed"  # varied to see a spread, not for its effect
        for change in find_changes(axis, ended)
    ]
    judged = {metric.name: estimate(metric, changes, results) for metric in JUDGED}
    for at, change in enumerate(changes):
        estimates = {name: one for name, every in judged.items() if (one := every[at]) is not None}
        if estimates:
            compared = {*next(iter(estimates.values())).cells}
            pairs = [pair for pair in change.pairs if pair.cells in compared]
            warnings = set[str]().union(*(pair.warnings for pair in pairs))
            yield Effect(
                change.axis,
                change.before,
                change.after,
                tuple(pair.cells for pair in change.pairs),
                estimates,
                any(pair.estimated for pair in pairs),
                tuple(warning.remark for name, warning in WARNINGS.items() if name in warnings),
            )


EQUAL_MARGIN = STEADY  # a loss or an error within this share of the other counts as equal

LEARNT: tuple[Metric, ...] = (LOSS, METRICS["test_top1_error"])


class LearningEffect(NamedTuple):
    """The effect of a change of precision on a loss or an error, over its pairs, seed by seed."""

    effect: Effect
    metric: Metric
    found: Equivalence


def judge_learning(
    effects: Iterable[Effect], results: Iterable[Result]
) -> Iterator[LearningEffect]:
    """Yield whether each change of precision learns as well, as `bench.compare` judges a pair."""
    changes = [effect for effect in effects if effect.axis == "precision"]
    judged = [(effect, effect.loss.cells) for effect in changes if effect.loss]
    paired = {cell for _, pairs in judged for pair in pairs for cell in pair}
    cells = {result.cell: result for result in results if result.cell in paired}
    losses = take_seeds(LOSS, cells.values())
    for metric in LEARNT:
        seeds = losses if metric is LOSS else take_seeds(metric, cells.values())
        concerned = []
        for effect, pairs in judged:
            known = [(a, b) for a, b in pairs if a in seeds and b in seeds]
            if known:
                concerned.append((effect, known, share_seeds(known, seeds)))
        means = [list_means(*map(average_seeds, sides)) for _, _, sides in concerned]
        verdicts = judge_equivalences([(before, after) for before, after in means], EQUAL_MARGIN)
        for (effect, known, sides), equivalence in zip(concerned, verdicts, strict=True):
            most = max(abs(shift) for shift in list_shifts(*sides))
            if equivalence.verdict is EquivalenceVerdict.EQUIVALENT and most > math.log1p(
                EQUAL_MARGIN
            ):
                equivalence = withdraw(equivalence, "not in every case")
            guessing = [
                all(_guesses(losses.get(cell), cells[cell]) for cell in side)
                for side in zip(*known, strict=True)
            ]
            yield LearningEffect(effect, metric, withdraw_if_guessing(equivalence, guessing))


def _guesses(losses: Seeds | None, case: Result) -> bool:
    if losses is None:
        return False
    known = find_classes(case.workload, case.classes, case.dataset_classes)
    (side,) = list_means(losses)
    return is_guessing(fmean(loss for (loss,) in side.values()), known)
