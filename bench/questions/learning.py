"""Whether each precision learns as well as its baseline: a test of equivalence.

Finding no difference proves nothing; `bench.verdict.equivalence` tests whether a difference beyond
a margin can be ruled out, over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from bench.limits import STEADY
from bench.questions.effects import Effect
from bench.questions.report_data import ReportData
from bench.render.cells import Row, write_ends
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet
from bench.study.estimate import (
    LOSS,
    Seeds,
    average_seeds,
    list_means,
    list_shifts,
    share_seeds,
    take_seeds,
)
from bench.study.metrics import METRICS, Metric
from bench.study.pairs import SAME_LOSS
from bench.text import write_range, write_share
from bench.verdict.equivalence import Claim, Equivalence, judge_equivalences, withdraw
from bench.verdict.seeds import GUESSING, UNCHECKED, find_classes, is_guessing

MARGIN = STEADY  # a loss or an error within this share of the other counts as equal

LEARNT: tuple[Metric, ...] = (LOSS, METRICS["test_top1_error"])


class LearningEffect(NamedTuple):
    """The effect of a change of precision on a loss or an error, over its pairs, seed by seed."""

    effect: Effect
    metric: Metric
    found: Equivalence
    pairs: int  # pairs of cases with readings on both sides
    of: int  # all pairs of cases whose losses are comparable
    remarks: Sequence[str]


def judge_learning(found: ReportData) -> Iterator[LearningEffect]:
    losses, cells = found.losses, found.by_cell
    told = {c: tuple(getattr(row, name) for name in SAME_LOSS) for c, row in cells.items()}
    for metric in LEARNT:
        seeds = losses if metric is LOSS else take_seeds(metric, found.results)
        concerned = []
        for effect in found.effects:
            pairs = effect.loss.cells if effect.axis == "precision" and effect.loss else ()
            known = [(a, b) for a, b in pairs if a in seeds and b in seeds]
            if known:
                concerned.append((effect, known, share_seeds(known, seeds)))
        means = [list_means(*map(average_seeds, sides)) for _, _, sides in concerned]
        family = [(before, after) for before, after in means]
        judged = judge_equivalences(family, MARGIN)
        for (effect, known, sides), equivalence in zip(concerned, judged, strict=True):
            ratios = [math.exp(shift) for shift in list_shifts(*sides)]
            low, high = min(ratios), max(ratios)
            if equivalence.verdict is Claim.EQUIVALENT and max(high, 1 / low) > 1 + MARGIN:
                equivalence = withdraw(equivalence, "not in every case")
            if all(_guesses(losses.get(c), cells[c]) for pair in known for c in pair):
                equivalence = withdraw(equivalence, GUESSING)
            remarks = [equivalence.lack, *_list_remarks([cells[a] for a, _ in known], low, high)]
            of = sum(told[a] == told[b] for a, b in effect.pairs)
            yield LearningEffect(
                effect, metric, equivalence, len(known), of, [*filter(None, remarks)]
            )


def _guesses(losses: Seeds | None, case: Row) -> bool:
    if losses is None:
        return False
    return is_guessing(
        fmean(one for side in list_means(losses) for (one,) in side.values()), _find_classes(case)
    )


def _find_classes(case: Row) -> int | None:
    return find_classes(case.workload, case.classes, case.dataset_classes, case.dataset_source)


def _list_remarks(before: Sequence[Row], low: float, high: float) -> Iterator[str]:
    if high / low > 1 + MARGIN:
        yield f"from {low:.3f} to {high:.3f} over the cases"
    if any(case.dataset == "synthetic" for case in before):
        yield "synthetic"
    if any(_find_classes(case) is None for case in before):
        yield UNCHECKED
    parts = [case.part for case in before]
    if min(parts) < 1:
        yield f"after {write_range(parts, write_share)} % of an epoch"


def _tabulate_learning(found: ReportData) -> Iterator[Sheet]:
    columns: list[Column[LearningEffect]] = [
        Column("change", "change", "which precision is compared with which",
               lambda one: f"{one.effect.before} → {one.effect.after}", wrap=True),
        Column("metric", "metric", "what is compared", lambda one: one.metric.label,
               number=False),
        Column("verdict", "verdict", f"at a margin of {100 * MARGIN:.0f} %",
               lambda one: one.found.verdict.value, number=False),
        Column("ratio", "ratio", "after over before, over seeds; of losses not above zero the "
               "difference, with its sign",
               lambda one: Cell(one.found.write(one.found.ratio or 1.0), one.found.ratio), keep=8),
        Column("interval", "90 % interval", "of the ratio",
               lambda one: write_ends((one.found.low, one.found.high), one.found.write), keep=8),
        Column("seeds", "seeds", "that were compared", lambda one: one.found.seeds, keep=8),
        Column("pairs", "pairs", "pairs of cases with this reading, of all",
               lambda one: f"{one.pairs} of {one.of}" * (one.pairs < one.of),
               keep=6),
        Column("remarks", "remarks", "what to know before believing it",
               lambda one: ", ".join(one.remarks), wrap=True),
    ]  # fmt: skip
    note = (
        "Equivalent: two one-sided tests at 5 % rule out a difference beyond the margin; worse or "
        "better: the difference is beyond it. Holm over all rows of a metric. Losses are compared "
        "seed by seed, each the mean over all pairs of the change."
    )
    rows = [one for one in judge_learning(found) if one.found.seeds > 1]
    title = f"Does it learn as well? Equivalence within {100 * MARGIN:.0f} %"
    yield Sheet(title, columns, rows, [note])


LEARNING = Section("learning", "Does each precision learn as well?", _tabulate_learning)
