"""The effect of a change on a metric, over the pairs of cases that differ in it alone.

Each pair has a ratio of geometric means over its repeats; the effect is the geometric mean of these
ratios. Its 95 % interval is of the mean over just these pairs: each pair's variance is Welch's, the
degrees of freedom are Satterthwaite's, so that a single pair has the interval that `bench.compare`
gives it. The p-values of all changes of one metric are adjusted by Holm; as in `bench.verdict`,
they use the degrees of freedom from the median noise ratio of all pairs. The lowest and the highest
pair show how far the pairs differ from each other.

Runs of one seed saw the same images from the same initial weights, and so count as one reading:
losses are averaged over the pairs, seed by seed, and compared like those of a single pair. Only
seeds that all of these cases ran count; if there are none, those that both cases of a pair ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev, variance
from typing import TYPE_CHECKING

from bench.interval import find_half_width, find_quantile
from bench.limits import MIN_REPEATS, STEADY
from bench.record import RELIABLE, Status
from bench.store.rows import group
from bench.study import quantities
from bench.study.pairs import Changed, Pair, select_common
from bench.study.quantities import METRICS
from bench.study.runs import Result
from bench.verdict import (
    MIN_SEEDS,
    ROUNDING,
    Difference,
    Ratio,
    adjust,
    compare_seeds,
    find_unit,
    summarize,
)

if TYPE_CHECKING:
    from bench.study.quantities import Metric

TIME, LOSS = METRICS["epoch_time_s"], METRICS["train_loss"]

MEMORY = replace(METRICS[next(iter(quantities.MEMORY))], name="memory_bytes", label="peak memory")
"""The best measure of `quantities.MEMORY` that a machine has."""

ENERGY = replace(METRICS["energy_j"], name="energy_per_epoch_j", label="energy of an epoch")
"""Scaled to a whole epoch, so that runs of a part can be compared too."""

JUDGED = (TIME, MEMORY, ENERGY, LOSS)


@dataclass(frozen=True)
class Estimate:
    """The effect of a change on one metric, over the pairs that have it on both sides.

    Attributes:
        ratio: after over before, of geometric means.
        cells: the ``cell`` before and after of each pair; only pairs with enough repeats, if any.
        lowest: the lowest ratio of a pair; ``highest`` the highest.
        ends: the ``cell`` after the change in each of these two pairs.
        mixed: whether the pairs, each judged by its own interval, have different verdicts.
        difference: after minus before, in the metric's SI unit: the mean over the pairs.
        reach: half the 95 % interval of that difference; None where the ratio has no interval.
    """

    ratio: Ratio
    cells: tuple[tuple[int, int], ...]
    lowest: float
    highest: float
    ends: tuple[int, int]
    mixed: bool
    difference: float
    reach: float | None

    @property
    def pairs(self) -> int:
        return len(self.cells)


def estimate(
    metric: Metric, changes: Sequence[Changed], results: Iterable[Result]
) -> list[Estimate | None]:
    """Estimate the effect of each change on a metric; None where no pair has it on both sides."""
    if metric.seeded:
        return _judge_seeds(changes, take_seeds(metric, results))
    return _judge_repeats(metric, changes, take_readings(metric, results))


def take_times(results: Iterable[Result]) -> dict[int, list[float]]:
    """Return by cell the epoch times of its usable repeats, in s."""
    times = {result.cell: list_readings(TIME, result) for result in results}
    return {cell: [time for _, time in held] for cell, held in times.items() if held}


def list_readings(metric: Metric, result: Result) -> list[tuple[int, float]]:
    """Return the seed of each usable run that has a value, and that value."""
    counted = RELIABLE if metric.diverged else {Status.OK}
    usable = (run for run in result.every if run.status in counted)
    told = ((run.run_seed, getattr(run, metric.column)) for run in usable)
    return [(seed, metric.read(value)) for seed, value in told if value == value]


def take_readings(metric: Metric, results: Iterable[Result]) -> dict[int, list[float]]:
    """Return the readings of each cell's runs; none of a cell with one that is not above zero."""
    held = {r.cell: [value for _, value in list_readings(metric, r)] for r in results}
    return {
        c: values
        for c, values in held.items()
        if values and 0 < min(values) <= max(values) < math.inf
    }


def take_seeds(metric: Metric, results: Iterable[Result]) -> dict[int, Seeds]:
    """Return by cell and seed the mean over the repeats of a value and of its logarithm, which is
    NaN for one that is not above zero."""
    seeds: dict[int, Seeds] = {}
    for result in results:
        readings = list_readings(metric, result)
        if readings and not any(math.isinf(value) for _, value in readings):
            by_seed = sorted(group(readings, lambda reading: reading[0]))
            seeds[result.cell] = {
                same[0][0]: _average_repeats([value for _, value in same]) for same in by_seed
            }
    return seeds


def _average_repeats(values: Sequence[float]) -> tuple[float, float]:
    logs = [math.log(value) for value in values if value > 0]
    return fmean(values), fmean(logs) if logs else math.nan


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
            held = seeds[cell]
            whole = not shared or held.keys() <= shared
            side.append(held if whole else {s: r for s, r in held.items() if s in shared})
    return sides


def average_seeds(held: Sequence[Seeds]) -> dict[int, tuple[float, float]]:
    """Average values and logarithms over cells, for each seed that all of them ran."""
    shared = set(held[0]).intersection(*held[1:]) if held else set()
    return {
        seed: (fmean([cell[seed][0] for cell in held]), fmean([cell[seed][1] for cell in held]))
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
    shifts = [_average(y, 1) - _average(x, 1) for x, y in zip(a, b, strict=True)]
    if not any(map(math.isnan, shifts)):
        return shifts
    before, after = ([_average(seeds, 0) for seeds in side] for side in (a, b))
    unit = find_unit(before, after) or 1.0
    return [(y - x) / unit for x, y in zip(before, after, strict=True)]


def _average(seeds: Seeds, what: int) -> float:
    return fmean([reading[what] for reading in seeds.values()])


def _judge_seeds(changes: Sequence[Changed], seeds: Mapping[int, Seeds]) -> list[Estimate | None]:
    found: list[Estimate | None] = []
    family: list[tuple[dict[int, list[float]], dict[int, list[float]]]] = []
    for cells in select_common(changes, lambda pair: pair.same_loss, seeds.keys(), seeds.keys()):
        if not cells:
            found.append(None)
            continue
        sides = share_seeds(cells, seeds)
        shifts, (a, b) = list_shifts(*sides), map(average_seeds, sides)
        one, other = list_means(a, b)
        family.append((one, other))
        low, high = (shifts.index(end(shifts)) for end in (min, max))
        before, after = (fmean([_average(x, 0) for x in side]) for side in sides)
        found.append(
            Estimate(
                Ratio(),
                cells,
                math.exp(shifts[low]),
                math.exp(shifts[high]),
                (cells[low][1], cells[high][1]),
                False,
                after - before,
                _reach({s: x[0] for s, x in a.items()}, {s: x[0] for s, x in b.items()}),
            )
        )
    ratios = iter(compare_seeds(family))
    return [e and replace(e, ratio=next(ratios)) for e in found]


def _reach(a: Mapping[int, float], b: Mapping[int, float]) -> float | None:
    """Return half the 95 % interval of a difference of means over seeds, paired where shared."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) >= MIN_SEEDS:
        apart = [b[seed] - a[seed] for seed in shared]
        spread = 0.0 if stdev(apart) <= ROUNDING * abs(fmean(a.values())) else variance(apart)
        return find_half_width([(spread, len(apart))])
    if min(len(a), len(b)) < MIN_SEEDS:
        return None
    return find_half_width([(variance(side.values()), len(side)) for side in (a, b)]) or None


def _judge_repeats(
    metric: Metric, changes: Sequence[Changed], readings: Mapping[int, Sequence[float]]
) -> list[Estimate | None]:
    told = {cell: summarize(values) for cell, values in readings.items()}
    sure = {cell for cell, values in readings.items() if len(values) >= MIN_REPEATS}

    def fits(pair: Pair) -> bool:
        if metric is MEMORY:
            return pair.same_memory
        return pair.a.settled or not metric.timed

    def subtract(pair: tuple[int, int]) -> Difference:
        (one, before), (other, after) = (told[cell] for cell in pair)
        return Difference(other - one, before, after)

    every = select_common(changes, fits, told.keys(), sure)
    samples = [[subtract(pair) for pair in cells] for cells in every]
    noises = [
        math.log(pair.a.variance / pair.b.variance)
        for pairs in samples
        for pair in pairs
        if pair.a.variance > 0 < pair.b.variance
    ]
    typical = math.exp(median(noises)) if noises else None
    estimates: list[Estimate | None] = []
    for cells, pairs in zip(every, samples, strict=True):
        if not cells:
            estimates.append(None)
            continue
        shifts = [pair.shift for pair in pairs]
        low, high = (shifts.index(end(shifts)) for end in (min, max))
        before, after = (
            [fmean(readings[cell]) for cell in side] for side in zip(*cells, strict=True)
        )
        ratio, reach = _judge(metric, pairs, typical)
        estimates.append(
            Estimate(
                ratio,
                cells,
                math.exp(shifts[low]),
                math.exp(shifts[high]),
                (cells[low][1], cells[high][1]),
                ratio.p is not None and _is_mixed(pairs),
                fmean(after) - fmean(before),
                None if reach is None else reach * fmean(before) * (ratio.value or 1.0),
            )
        )
    adjusted = iter(adjust([e.ratio.p for e in estimates if e and e.ratio.p is not None]))
    for place, e in enumerate(estimates):
        if e and e.ratio.p is not None:
            estimates[place] = replace(e, ratio=replace(e.ratio, p_adjusted=next(adjusted)))
    return estimates


def _judge(
    metric: Metric, pairs: Sequence[Difference], typical: float | None
) -> tuple[Ratio, float | None]:
    """Return the geometric mean of the pairs' ratios, and half its interval on a scale of
    logarithms; None without an interval."""
    shift = fmean(pair.shift for pair in pairs)
    value = math.exp(shift)
    fewest = min(side.number for pair in pairs for side in (pair.a, pair.b))
    if fewest < MIN_REPEATS:
        return Ratio(value, lack=f"needs {MIN_REPEATS} repeats, has {fewest}"), None
    varying = [pair for pair in pairs if pair.error]
    if not varying:
        if metric.deterministic:
            return Ratio(value, value, value, exact=True), 0.0
        lack = "repeats equal to the last digit are not independent readings"
        return Ratio(value, lack=lack), None
    whole = sum(pair.error**2 for pair in varying)
    error = math.sqrt(whole) / len(pairs)

    def pool(noise: float | None) -> float:
        """Return Satterthwaite's degrees of freedom of the mean, from each pair's error."""
        freedoms = (
            pair.freedom(noise if pair.a.variance > 0 < pair.b.variance else None)
            for pair in varying
        )
        shares = (pair.error**2 / whole for pair in varying)
        return 1 / sum(share**2 / of for share, of in zip(shares, freedoms, strict=True))

    reach = find_quantile(pool(None)) * error
    from scipy.special import stdtr

    p = min(1.0, 2 * float(stdtr(pool(typical), -abs(shift) / error)))
    return Ratio(value, math.exp(shift - reach), math.exp(shift + reach), p, p), reach


def _is_mixed(pairs: Sequence[Difference]) -> bool:
    """Return whether pairs, each by its own interval, differ in their verdicts."""
    limit, kinds = math.log1p(STEADY), set[str]()
    for pair in pairs:
        reach = find_half_width([pair.a, pair.b])
        low, high = pair.shift - reach, pair.shift + reach
        if high < -limit:
            kinds.add("lower")
        elif low >= -limit and high <= limit:
            kinds.add("same")
        elif low > limit:
            kinds.add("higher")
    return len(kinds) > 1
