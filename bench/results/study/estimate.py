"""The effect of a change on a metric, over the pairs of cases that differ in it alone.

Each pair has a ratio of medians over its repeats; the effect is the geometric mean of these ratios.
Its 95 % interval is of the mean over just these pairs: each pair's variance is Welch's, the degrees
of freedom are Satterthwaite's, so that a single pair has the interval that `bench.compare` gives
it. The p-values of all changes of one metric are adjusted by Holm; as in `bench.results.verdict`,
they use the degrees of freedom from the median noise ratio of all pairs.

Runs of one seed saw the same images from the same initial weights, and so count as one reading:
losses are averaged over the pairs, seed by seed, and compared like those of a single pair. Only
seeds that all of these cases ran count; if there are none, those that both cases of a pair ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from statistics import fmean

from bench.base.limits import MIN_REPEATS, STEADY
from bench.results.study import quantities
from bench.results.study.comparable import refuse_base
from bench.results.study.pairs import Changed, Pair, select_common
from bench.results.study.quantities import METRICS, Metric, is_number
from bench.results.study.runs import Result, list_readings
from bench.results.verdict import (
    Difference,
    Ratio,
    Verdict,
    compare_seeds,
    find_unit,
    pool,
    summarize_middle,
)
from bench.results.verdict import estimate as judge

TIME, LOSS = METRICS["epoch_time_s"], METRICS["train_loss"]

MEMORY_METRIC = replace(
    METRICS[next(iter(quantities.MEMORY_MEASURES))], name="memory_bytes", label="peak memory"
)
"""The best measure of `quantities.MEMORY` that a machine has."""

ENERGY = replace(METRICS["energy_j"], name="energy_per_epoch_j", label="energy of an epoch")
"""Scaled to a whole epoch, so that runs of a part can be compared too."""

JUDGED = (TIME, MEMORY_METRIC, ENERGY, LOSS)


@dataclass(frozen=True)
class Estimate:
    """The effect of a change on one metric, over the pairs that have it on both sides.

    Attributes:
        ratio: after over before, the geometric mean over the pairs.
        cells: the ``cell`` before and after of each pair; only pairs with enough repeats, if any.
        mixed: whether the pairs, each judged by itself, have different verdicts.
        each: the ratio of each pair; empty for a loss.
    """

    ratio: Ratio
    cells: tuple[tuple[int, int], ...]
    mixed: bool = False
    each: tuple[float, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether the pairs, not of a loss, differ so far that no one ratio tells of them: one lies
        outside the interval of their mean or, without one, they differ by more than `STEADY`
        each."""
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None:
            return max(self.each) / min(self.each) > (1 + STEADY) ** 2
        return min(self.each) < low / (1 + STEADY) or max(self.each) > high * (1 + STEADY)

    @property
    def pairs(self) -> int:
        return len(self.cells)


def estimate(
    metric: Metric, changes: Sequence[Changed], results: Iterable[Result]
) -> list[Estimate | None]:
    """Estimate the effect of each change on a metric; None where no pair has it on both sides."""

    def fits(pair: Pair) -> bool:
        if metric is MEMORY_METRIC:
            return bool(pair.a.memory_measure == pair.b.memory_measure)
        if metric.seeded:  # what a part of an epoch taught one seed is no finding
            known = all(r.learnt_whole or r.seeds >= MIN_REPEATS for r in (pair.a, pair.b))
            return pair.same_loss and known
        return not metric.timed or (not refuse_base(pair.a) and is_number(pair.factor))

    if metric.seeded:
        seeds = take_seeds(metric, results)
        every = select_common(changes, fits, seeds.keys(), seeds.keys())
        means = (list_means(*map(average_seeds, share_seeds(c, seeds))) for c in every if c)
        ratios = iter(compare_seeds([(before, after) for before, after in means]))
        return [Estimate(next(ratios), cells) if cells else None for cells in every]
    taken = {r.cell: [value for _, value in list_readings(metric, r.every)] for r in results}
    # of a cell with a reading that is not above zero none has a ratio
    readings = {c: v for c, v in taken.items() if v and min(v) > 0}
    sides = {cell: summarize_middle(values) for cell, values in readings.items()}
    sure = {cell for cell, values in readings.items() if len(values) >= MIN_REPEATS}
    every = select_common(changes, fits, readings.keys(), sure)
    every_pair = (pair for change in changes for pair in change.pairs)
    shifts = {pair.cells: math.log(pair.factor) if metric.timed else 0.0 for pair in every_pair}
    pooled, mixed, each = [], [], []
    for cells in filter(None, every):
        ends = ((shifts[a, b], *sides[a], *sides[b]) for a, b in cells)
        known = [
            Difference(after + shift - before, ((x, y),)) for shift, before, x, after, y in ends
        ]
        often = [pair for pair, both in zip(known, cells, strict=True) if sure.issuperset(both)]
        verdicts = {ratio.judge(STEADY) for ratio in judge(often)}
        mixed.append(len(verdicts - {Verdict.AMBIGUOUS, Verdict.NONE}) > 1)
        pooled.append(pool(known))
        each.append(tuple(math.exp(one.shift) for one in known))
    ratios = iter(judge(pooled, metric.deterministic))
    unlike, apart = iter(mixed), iter(each)
    return [
        Estimate(next(ratios), cells, next(unlike), next(apart)) if cells else None
        for cells in every
    ]


def take_seeds(metric: Metric, results: Iterable[Result]) -> Mapping[int, Seeds]:
    """Return by cell and seed the mean over the repeats of a value and of its logarithm, which is
    NaN for one that is not above zero."""
    seeds: dict[int, dict[int, tuple[float, float]]] = {}
    for result in results:
        for seed, same in groupby(sorted(list_readings(metric, result.every)), itemgetter(0)):
            values = [value for _, value in same]
            logs = [math.log(value) for value in values if value > 0]
            average = fmean(values), fmean(logs) if logs else math.nan
            seeds.setdefault(result.cell, {})[seed] = average
    return seeds


Seeds = Mapping[int, tuple[float, float]]
"""One cell of `take_seeds`: the value and its logarithm by seed."""


def share_seeds(
    cells: Sequence[tuple[int, int]], seeds: Mapping[int, Seeds]
) -> tuple[list[Seeds], list[Seeds]]:
    """Return the readings of both sides of pairs, for the seeds that all of these cases ran. If
    there are none, for the seeds that both cases of a pair ran; if none again, for all seeds."""
    every = set.intersection(*(set(seeds[cell]) for pair in cells for cell in pair))
    sides: tuple[list[Seeds], list[Seeds]] = ([], [])
    for pair in cells:
        shared = every or set(seeds[pair[0]]) & set(seeds[pair[1]])
        for side, cell in zip(sides, pair, strict=True):
            side.append({s: r for s, r in seeds[cell].items() if s in shared or not shared})
    return sides


def average_seeds(cells: Sequence[Seeds]) -> dict[int, tuple[float, float]]:
    """Average values and logarithms over cells, for each seed that all of them ran."""
    shared = set(cells[0]).intersection(*cells[1:]) if cells else set()
    return {
        seed: (fmean([cell[seed][0] for cell in cells]), fmean([cell[seed][1] for cell in cells]))
        for seed in sorted(shared)
    }


def list_means(*sides: Seeds) -> list[dict[int, list[float]]]:
    """Return the mean of each seed of `average_seeds` as its one reading, for each side: the
    geometric one, or the arithmetic one if any side has a value that is not above zero."""
    signed = any(math.isnan(log) for side in sides for _, log in side.values())
    return [
        {seed: [value if signed else math.exp(log)] for seed, (value, log) in side.items()}
        for side in sides
    ]


def list_shifts(a: Sequence[Seeds], b: Sequence[Seeds]) -> list[float]:
    """Return for each pair of `share_seeds` the mean logarithm after minus the one before; of
    losses that are not all above zero the difference, in the unit of `find_unit`."""
    logs, values = (
        [[fmean([reading[at] for reading in seeds.values()]) for seeds in side] for side in (a, b)]
        for at in (1, 0)
    )
    shifts = [after - before for before, after in zip(*logs, strict=True)]
    if any(map(math.isnan, shifts)):
        unit = find_unit(*values) or 1.0
        shifts = [(after - before) / unit for before, after in zip(*values, strict=True)]
    return shifts
