"""Whether each precision learns as well as the one it is compared with: equivalent, or not.

That no difference was found shows nothing; `bench.verdict.judge_equivalences` asks whether one
beyond a margin can be ruled out, over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.limits import STEADY
from bench.questions.effects import Effect
from bench.questions.material import Material
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet
from bench.study.estimate import (
    LOSS,
    Seeds,
    average_seeds,
    list_means,
    list_shifts,
    share_seeds,
    take_readings,
    take_seeds,
)
from bench.study.metrics import METRICS, Metric
from bench.study.pairs import SAME_LOSS
from bench.text import write_range, write_share
from bench.verdict import (
    GUESSING,
    Claim,
    Equivalence,
    Seeded,
    judge_equivalences,
    learnt_nothing,
    take_back,
)

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


def judge_learning(found: Material) -> Iterator[Lesson]:
    """Judge every change of precision by each of `LEARNT` that was measured."""
    cases, losses = found.cases, found.losses
    told = {row[0]: row[1:] for row in cases[["cell", *SAME_LOSS]].itertuples(index=False)}
    for metric in LEARNT:
        seeds = losses if metric is LOSS else take_seeds(take_readings(metric, found.rows))
        concerned = []
        for effect in found.effects:
            cells = effect.loss.cells if effect.axis == "precision" and effect.loss else ()
            known = [(a, b) for a, b in cells if a in seeds and b in seeds]
            if known:
                concerned.append((effect, known, share_seeds(known, seeds)))
        family: list[Seeded] = []
        for _, _, (before, after) in concerned:
            family.append((list_means(average_seeds(before)), list_means(average_seeds(after))))
        judged = judge_equivalences(family, MARGIN)
        for (effect, known, sides), equivalence in zip(concerned, judged, strict=True):
            ratios = [math.exp(shift) for shift in list_shifts(*sides)]
            ends = (min(ratios), max(ratios))
            if equivalence.verdict is Claim.EQUIVALENT and max(ends[1], 1 / ends[0]) > 1 + MARGIN:
                equivalence = take_back(equivalence, "not in every case")
            if all(_guesses(cell, losses, told) for pair in known for cell in pair):
                equivalence = take_back(equivalence, GUESSING)
            remarks = tuple(_list_remarks(equivalence, known, told, ends))
            of = sum(told[a] == told[b] for a, b in effect.pairs)
            yield Lesson(effect, metric, equivalence, len(known), of, remarks)


_Told = dict[int, tuple[float, str, str, str]]
"""Of `SAME_LOSS`, by cell."""


def _guesses(cell: int, losses: Mapping[int, Seeds], told: _Told) -> bool:
    """Whether the loss of a case is still that of guessing; not, where it is unknown."""
    if cell not in losses:
        return False
    _, _, _, classes = told[cell]
    loss = math.exp(fmean(log for _, log in losses[cell].values()))
    return learnt_nothing(loss, int(classes) if classes else None)


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
    parts = [part for part, *_ in of]
    if min(parts) < 1:
        yield f"after {write_range(parts, write_share)} % of an epoch"


def _tell_lessons(found: Material) -> Iterator[Sheet]:
    columns: list[Column[Lesson]] = [
        Column("change", "change", "which precision is compared with which",
               lambda lesson: f"{lesson.effect.before} → {lesson.effect.after}",
               wrap=True),
        Column("metric", "metric", "what is compared", lambda lesson: lesson.metric.label,
               number=False),
        Column("verdict", "verdict", f"at a margin of {100 * MARGIN:.0f} %",
               lambda lesson: lesson.equivalence.verdict.value, number=False),
        Column("ratio", "ratio", "after over before, over seeds", lambda lesson:
               Cell(f"{lesson.equivalence.ratio:.4f}", lesson.equivalence.ratio)
               if lesson.equivalence.ratio is not None else None, keep=8),
        Column("interval", "90 % interval", "of the ratio", lambda lesson:
               f"{lesson.equivalence.low:.4f}–{lesson.equivalence.high:.4f}"
               if None not in (lesson.equivalence.low, lesson.equivalence.high) else None, keep=8),
        Column("seeds", "seeds", "that were compared", lambda lesson: lesson.equivalence.seeds,
               keep=8),
        Column("needed", "seeds needed", "for a verdict, probably",
               lambda lesson: lesson.equivalence.seeds_needed, keep=7),
        Column("pairs", "pairs", "pairs of cases with this reading, of all",
               lambda lesson: f"{lesson.pairs} of {lesson.of}" * (lesson.pairs < lesson.of),
               keep=6),
        Column("remarks", "remarks", "what to know before believing it",
               lambda lesson: ", ".join(lesson.remarks), wrap=True),
    ]  # fmt: skip
    note = (
        "Equivalent: two one-sided tests at 5 % rule out a difference beyond the margin; worse or "
        "better: the difference is beyond it. Holm over all rows of a metric. Losses are compared "
        "seed by seed, each the mean over all pairs of the change."
    )
    rows = [lesson for lesson in judge_learning(found) if lesson.equivalence.seeds > 1]
    title = f"Does it learn as well? Equivalence within {100 * MARGIN:.0f} %"
    yield Sheet(title, columns, rows, [note])


LEARNING = Section("learning", "Does each precision learn as well?", _tell_lessons)
