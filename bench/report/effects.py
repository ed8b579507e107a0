"""What changing one axis does with all else equal: over the pairs of cases that differ in it alone.

Changes of one baseline, such as fp32 to each other precision, are compared with each other, and so
each metric of them is over the same settings of all other axes: those that all of them have. Where
there are none, each is over its own, and `Effect.apart`.

Of each pair the ratio of geometric means over the repeats is taken, and the geometric mean over the
pairs. Its 95 % interval is of that mean over just these pairs: each pair's variance is Welch's, the
degrees of freedom are Satterthwaite's, so that a single pair has the interval that `bench.compare`
gives it. The p-values of all changes of one metric are adjusted by Holm; as in `bench.verdict`,
they rest on the degrees of freedom that follow from the median noise ratio of all pairs. The lowest
and the highest pair tell how far the pairs differ from each other.

Pairs of one seed have seen the same images from the same start, and so are one reading: losses are
averaged over the pairs, seed by seed, and then compared as those of a single pair. Only seeds count
that all of these cases ran, or else, that both cases of a pair did.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from operator import itemgetter
from statistics import fmean, median, stdev, variance
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.case import AXES, BARE, FOLLOWS, RECIPE, SAME_QUESTION, free_axes
from bench.limits import MIN_REPEATS, STEADY
from bench.record import COMPARABLE, RELIABLE, Status
from bench.report import quantities
from bench.report.axes import (
    MACHINE,
    NUMBERS,
    Machines,
    find_varying,
    keep_main,
    name_axis,
    name_value,
    order_values,
    rank,
    take_values,
)
from bench.report.doubts import DOUBTS, SAID_BELOW
from bench.report.metrics import METRICS
from bench.report.summaries import SOURCE
from bench.store.attempts import number_groups
from bench.text import name_first
from bench.verdict import CONFIDENCE, MIN_SEEDS, ROUNDING, Ratio, adjust, compare_seeds
from bench.workloads import IMAGES

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from bench.report.metrics import Metric

TIME, LOSS = METRICS["epoch_time_s"], METRICS["train_loss"]

MEMORY = replace(METRICS[next(iter(quantities.MEMORY))], name="memory_bytes", label="peak memory")
"""Whichever of `quantities.MEMORY` a machine has."""

ENERGY = replace(METRICS["energy_j"], name="energy_per_epoch_j", label="energy of an epoch")
"""Scaled to a whole epoch, so that parts of one can be compared too."""

JUDGED = (TIME, MEMORY, ENERGY, LOSS)

NO_QUESTION = ("seed",)
"""Axes that are varied to see a spread, not for what they do."""

BASELINES = {
    "precision": "fp32",
    "memory_limit": "",
    "freeze": "none",
    "start": "",
    "parallel": "none",
    "grad_compression": "none",
}
"""What the other values of an axis are compared with, where it ran; else the first value.

Of numbers, each is compared with the next below it.
"""


KEPT = ("world_size",)
"""Axes that follow another and are a question of their own: what is compared agrees in them."""


@dataclass(frozen=True)
class Estimate:
    """What a change does to one metric, over the pairs that have it on both sides.

    Attributes:
        ratio: after over before, of geometric means.
        cells: the ``cell`` before and after of each pair: of those with enough repeats, if any has.
        lowest: the ratio of the pair where it is lowest; ``highest`` where it is highest.
        ends: the ``cell`` after the change of these two pairs.
        mixed: whether pairs, each judged by its own interval, differ in their verdicts.
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
        """How many pairs it is over."""
        return len(self.cells)


@dataclass(frozen=True)
class Effect:
    """One change of one axis, with all else equal.

    Attributes:
        axis: an axis of `Case`, or ``machine``.
        before: its value, for people; ``after`` is the one it changes to.
        pairs: the ``cell`` of the case before and of the case after, of all that differ in it.
        estimates: by the name of one of `JUDGED`, each over some of these pairs.
        estimated: whether any of the times compared was extrapolated.
        doubts: what speaks against the cases compared, as remarks.
        over: at which settings of other axes times are compared, for people; empty where that is at
            all that any change of this axis has.
        apart: whether changes of the same baseline are compared at other settings, for want of any
            that all have.
    """

    axis: str
    before: str
    after: str
    pairs: tuple[tuple[int, int], ...]
    estimates: dict[str, Estimate]
    estimated: bool
    doubts: tuple[str, ...]
    over: str = ""
    apart: bool = False

    @property
    def time(self) -> Estimate | None:
        """What it does to the epoch time."""
        return self.estimates.get(TIME.name)

    @property
    def memory(self) -> Estimate | None:
        """What it does to the peak of memory."""
        return self.estimates.get(MEMORY.name)

    @property
    def energy(self) -> Estimate | None:
        """What it does to the energy of an epoch."""
        return self.estimates.get(ENERGY.name)

    @property
    def loss(self) -> Estimate | None:
        """What it does to the training loss."""
        return self.estimates.get(LOSS.name)


KINDS = ("measured", "fake", "published")
"""Where there are cases of several kinds, the effects are of the first of these."""


def find_effects(rows: pd.DataFrame, cases: pd.DataFrame, machines: Machines) -> list[Effect]:
    """What each change of each axis does, in the order of the overview's columns.

    Args:
        rows: the runs that count, of `summaries.latest`, with the ``cell`` of each.
        cases: the same summarized; ``cell`` names their runs.
    """
    ended = cases[cases["status"].isin(RELIABLE)]
    kind = next((kind for kind in KINDS if (ended["kind"] == kind).any()), "")
    ended = ended[ended["kind"] == kind]
    changes = [
        change
        for axis in find_varying(ended)
        if axis not in NO_QUESTION
        for change in find_changes(axis, ended, machines)
    ]
    found: list[dict[str, Estimate]] = [{} for _ in changes]
    for metric in JUDGED:
        judge = _judge_seeds if metric.seeded else _judge_repeats
        estimates = judge(metric, changes, take_readings(metric, rows))
        for into, estimate in zip(found, estimates, strict=True):
            if estimate is not None:
                into[metric.name] = estimate
    kept = [pair for pair in zip(changes, found, strict=True) if pair[1]]
    return [
        effect
        for _, axis in groupby(kept, key=lambda pair: pair[0].axis)
        for effect in _describe_axis(list(axis), ended, machines)
    ]


def _describe_axis(
    found: Sequence[tuple[Changed, dict[str, Estimate]]], cases: pd.DataFrame, machines: Machines
) -> Iterator[Effect]:
    """The effects of one axis, each with the settings at which it was compared: in time, if any."""
    used: list[list[Pair]] = []
    rivals: dict[str, set[frozenset[int]]] = {}
    for change, estimates in found:
        cells = {*estimates.get(TIME.name, next(iter(estimates.values()))).cells}
        pairs = [pair for pair in change.pairs if (pair.a, pair.b) in cells]
        used.append(pairs)
        rivals.setdefault(change.before, set()).add(frozenset(pair.key for pair in pairs))
    every = frozenset(pair.key for change, _ in found for pair in change.pairs)
    everywhere = all(held == {every} for held in rivals.values())
    settings: dict[str, dict[int, Any]] = {}
    if not everywhere:
        before = cases[cases["cell"].isin({p.a for change, _ in found for p in change.pairs})]
        free = _list_free(found[0][0].axis)
        settings = {
            name: dict(zip(before["cell"], take_values(before, name), strict=True))
            for name in find_varying(before)
            if name not in free
        }
    for (change, estimates), pairs in zip(found, used, strict=True):
        yield Effect(
            change.axis,
            change.before,
            change.after,
            tuple((pair.a, pair.b) for pair in change.pairs),
            estimates,
            any(pair.estimated for pair in pairs),
            tuple(_list_doubts(pairs)),
            _name_settings(pairs, settings, machines),
            len(rivals[change.before]) > 1,
        )


def _name_settings(
    pairs: Sequence[Pair], settings: Mapping[str, Mapping[int, Any]], machines: Machines
) -> str:
    """Name the settings of pairs, by axis and cell: ``fp32, fp16 · batch size 128, 256``."""
    said = []
    for axis, value_of in settings.items():
        values = order_values(axis, [value_of[pair.a] for pair in pairs])
        text = name_first([name_value(axis, value, machines) for value in values], 4)
        said.append(text if axis in (MACHINE, *BARE) else f"{name_axis(axis)} {text}")
    return " · ".join(said)


# ------------------------------------------------------------------------------------------ pairs


class Pair(NamedTuple):
    """Two cases that differ in one axis alone.

    Attributes:
        a: the ``cell`` of the case before the change; ``b`` of the one after it.
        key: a number for the settings of all other axes.
        same_loss: whether their losses can be compared.
        same_memory: whether their memory was measured in the same way.
        estimated: whether either measured a part of an epoch.
        doubts: what speaks against either, of `DOUBTS`.
    """

    a: int
    b: int
    key: int
    same_loss: bool
    same_memory: bool
    estimated: bool
    doubts: frozenset[str]


@dataclass(frozen=True)
class Changed:
    """A change of one axis, and the pairs that it makes."""

    axis: str
    before: str
    after: str
    pairs: Sequence[Pair]


def find_changes(axis: str, cases: pd.DataFrame, machines: Machines) -> Iterator[Changed]:
    """The changes of one axis for which there are pairs.

    Of numbers, each is compared with the next below it that was run with all else equal; other
    values with the baseline. Of cases that differ only in how much of an epoch was measured, those
    that measured equal parts are compared, else the ones that measured most.
    """
    equal = [name for name in AXES if name not in _list_free(axis)]
    told_by = "device" if axis == MACHINE else axis
    equal += [column for column, of in COMPARABLE.items() if told_by not in of]
    if axis == MACHINE:
        equal.remove("device")
    else:
        equal += SOURCE
    if axis in FOLLOWS:
        cases = keep_main(cases, number_groups(cases, equal))
    told = (*SAME_LOSS, "workload", *OWN_DRAWS, "memory_measure")
    columns = ["cell", *SAME_QUESTION, *told, *DOUBTS]
    places = rank(cases, axis)
    lines = cases[columns].assign(_key=number_groups(cases, equal), _rank=places)
    # two environments of one machine: which of them is meant, nobody can say
    lines = lines.drop_duplicates(["_key", "_rank", *SAME_QUESTION], keep=False)
    values = dict(zip(places, take_values(cases, axis), strict=True))
    steps = _list_steps(axis, lines, values)
    pairs = steps.merge(
        lines.add_suffix("_a"), left_on=["_key", "_from"], right_on=["_key_a", "_rank_a"]
    )
    pairs = pairs.merge(
        lines.add_suffix("_b"), left_on=["_key", "_to"], right_on=["_key_b", "_rank_b"]
    )
    pairs = pairs.assign(
        _equal=pairs["part_a"] == pairs["part_b"], same_loss=_have_same_loss(axis, pairs)
    )
    order = ["_equal", "part_a", "part_b"]
    pairs = pairs.sort_values(order, ascending=False, kind="stable")
    pairs = pairs.drop_duplicates(["_key", "_from", "_to"]).sort_values(["_from", "_to", "_key"])
    ends = zip(pairs["_from"].tolist(), pairs["_to"].tolist(), strict=True)
    for (before, after), part in groupby(zip(ends, _list_pairs(pairs), strict=True), itemgetter(0)):
        first, second = (name_value(axis, values[place], machines) for place in (before, after))
        yield Changed(axis, first, second, [pair for _, pair in part])


def _list_pairs(pairs: pd.DataFrame) -> Iterator[Pair]:
    """The rows of cases that were joined, with ``_a`` before the change and ``_b`` after it."""
    names = [name for name in DOUBTS if name not in SAID_BELOW]
    a, b = (pairs[[f"{name}_{side}" for name in names]].to_numpy(dtype=bool) for side in "ab")
    doubts = (frozenset(compress(names, held)) for held in a | b)
    yield from map(
        Pair,
        pairs["cell_a"].tolist(),
        pairs["cell_b"].tolist(),
        pairs["_key"].tolist(),
        pairs["same_loss"].tolist(),
        (pairs["memory_measure_a"] == pairs["memory_measure_b"]).tolist(),
        (pairs[["part_a", "part_b"]] < 1).any(axis=1).tolist(),
        doubts,
    )


def _list_free(axis: str) -> set[str]:
    """The axes in which cases that are compared by ``axis`` may differ."""
    return {axis, *(set(free_axes(axis)) - set(KEPT)), *SAME_QUESTION}


def _list_steps(axis: str, lines: pd.DataFrame, values: Mapping[int, Any]) -> pd.DataFrame:
    """Which values are compared within each group of cases that agree on all else.

    Returns:
        ``_key`` of the group, and the ranks of the value before, ``_from``, and after, ``_to``.
    """
    held = lines[["_key", "_rank"]].drop_duplicates().sort_values(["_key", "_rank"])
    if axis in NUMBERS:
        held = held.assign(_from=held.groupby("_key")["_rank"].shift()).dropna()
        return held.rename(columns={"_rank": "_to"}).astype(int)
    wanted = BASELINES.get(axis)
    first = next((place for place, value in values.items() if value == wanted), 0)
    with_first = held.loc[held["_rank"] == first, "_key"]
    others = held[(held["_rank"] != first) & held["_key"].isin(with_first)]
    return others.rename(columns={"_rank": "_to"}).assign(_from=first)


# --------------------------------------------------------------------------------------- readings


def take_readings(metric: Metric, rows: pd.DataFrame) -> pd.DataFrame:
    """What the runs of each cell measured: ``cell``, ``run_seed``, ``value`` and its ``log``.

    Repeats of one seed are one reading of what depends on the seed: their mean. A cell with a value
    that has no logarithm has no ratio, and is left out.
    """
    import numpy as np

    counted = RELIABLE if metric.diverged else {Status.OK}
    rows = rows[rows["status"].isin(counted) & rows[metric.column].notna()]
    values = rows[metric.column].astype(float)
    values = 1 - values if metric.error_of else values
    lost = ~(values > 0) | np.isinf(values)
    readings = rows[["cell", "run_seed"]].assign(value=values, log=np.log(values.where(~lost)))
    readings = readings[~readings["cell"].isin(readings.loc[lost, "cell"])]
    if metric.seeded:
        readings = readings.groupby(["cell", "run_seed"], as_index=False)[["value", "log"]].mean()
    return readings


def take_seeds(readings: pd.DataFrame) -> dict[int, dict[int, tuple[float, float]]]:
    """By cell and seed, of `take_readings`: the value and its logarithm."""
    seeds: dict[int, dict[int, tuple[float, float]]] = {}
    columns = (readings[name].tolist() for name in ("cell", "run_seed", "value", "log"))
    for cell, seed, value, log in zip(*columns, strict=True):
        seeds.setdefault(cell, {})[seed] = (value, log)
    return seeds


OWN_DRAWS = ("accumulate", "loader")
"""Axes by which the data of a user's workload differ: micro-batches are drawn each by itself, and a
DataLoader has a dataset instead."""

SAME_LOSS = ("part", "dataset", "input", "classes")
"""What cases must agree on for their losses to be compared: as much of an epoch, the images."""


def _have_same_loss(axis: str, pairs: pd.DataFrame) -> Any:
    """Of each pair that differs in an axis, whether its losses can be compared: bool (pairs,).

    Not those of a user's workload that differ in what draws their data, nor before the end of an
    epoch what differs in its `RECIPE`.
    """

    def agree(names: Sequence[str]) -> Any:
        a, b = (pairs[[f"{name}_{side}" for name in names]] for side in "ab")
        return (a.to_numpy() == b.to_numpy()).all(axis=1)

    own = (pairs["workload_a"] != IMAGES).to_numpy()
    early = (pairs["part_a"] < 1).to_numpy() & (axis in RECIPE)
    return agree(SAME_LOSS) & (~own | agree(OWN_DRAWS)) & ~early


Seeds = Mapping[int, tuple[float, float]]
"""Of one cell of `take_seeds`: by seed, the value and its logarithm."""


def share_seeds(
    cells: Sequence[tuple[int, int]], seeds: Mapping[int, Seeds]
) -> tuple[list[Seeds], list[Seeds]]:
    """The readings of both sides of pairs, of the seeds that all of these cases ran.

    Where there is no such seed, of those that both cases of a pair ran; all, where that is none.
    """
    every = set.intersection(*(set(seeds[cell]) for pair in cells for cell in pair))
    sides: tuple[list[Seeds], list[Seeds]] = ([], [])
    for pair in cells:
        shared = every or set(seeds[pair[0]]) & set(seeds[pair[1]])
        for side, cell in zip(sides, pair, strict=True):
            side.append({s: r for s, r in seeds[cell].items() if not shared or s in shared})
    return sides


def average_seeds(held: Sequence[Seeds]) -> dict[int, tuple[float, float]]:
    """Over several cells, the mean of each seed that all of them ran: of values, of logarithms."""
    shared = set(held[0]).intersection(*held[1:]) if held else set()
    return {
        seed: (fmean(cell[seed][0] for cell in held), fmean(cell[seed][1] for cell in held))
        for seed in sorted(shared)
    }


def list_means(seeds: Seeds) -> dict[int, list[float]]:
    """Of `average_seeds`, as verdicts take them: by seed one reading, the geometric mean."""
    return {seed: [math.exp(log)] for seed, (_, log) in seeds.items()}


def list_shifts(a: Sequence[Seeds], b: Sequence[Seeds]) -> list[float]:
    """By how much each pair of `share_seeds` differs: the mean logarithm after less that before."""
    return [
        fmean(log for _, log in y.values()) - fmean(log for _, log in x.values())
        for x, y in zip(a, b, strict=True)
    ]


# ---------------------------------------------------------------------------------------- judging


def _keep_alike(
    changes: Sequence[Changed], known: Sequence[Sequence[Pair]], sure: Collection[int]
) -> list[list[Pair]]:
    """Of each change the pairs at settings that all changes of its baseline have, if there are any.

    Of these, or else of its own, those with enough repeats, where the changes that have any such
    pairs have them in common; a change that has none does not stand in their way.

    Args:
        changes: of `find_changes`.
        known: the pairs of each whose metric is known.
        sure: the cells that have enough repeats.
    """
    families: dict[tuple[str, str], list[int]] = {}
    for place, change in enumerate(changes):
        if len(known[place]):
            families.setdefault((change.axis, change.before), []).append(place)
    kept = [list(pairs) for pairs in known]
    for places in families.values():
        keys = [{pair.key for pair in known[place]} for place in places]
        good = [
            {pair.key for pair in known[place] if pair.a in sure and pair.b in sure}
            for place in places
        ]
        shared = set.intersection(*keys)
        best = set.intersection(shared, *filter(None, good)) if any(good) else set()
        for place, mine, enough in zip(places, keys, good, strict=True):
            wanted = (best or shared) if shared else (enough or mine)
            kept[place] = [pair for pair in known[place] if pair.key in wanted]
    return kept


def _judge_seeds(
    metric: Metric, changes: Sequence[Changed], readings: pd.DataFrame
) -> list[Estimate | None]:
    """Estimate what each change does to a loss or an error."""
    seeds = take_seeds(readings)
    known = [
        [pair for pair in change.pairs if pair.same_loss and pair.a in seeds and pair.b in seeds]
        for change in changes
    ]
    found: list[Estimate | None] = []
    family: list[tuple[dict[int, list[float]], dict[int, list[float]]]] = []
    for pairs in _keep_alike(changes, known, seeds):
        cells = tuple((pair.a, pair.b) for pair in pairs)
        if not cells:
            found.append(None)
            continue
        sides = share_seeds(cells, seeds)
        shifts, (a, b) = list_shifts(*sides), map(average_seeds, sides)
        family.append((list_means(a), list_means(b)))
        low, high = (shifts.index(end(shifts)) for end in (min, max))
        before, after = (fmean(fmean(v for v, _ in x.values()) for x in side) for side in sides)
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
    """Half the 95 % interval of a difference of means over seeds: paired where they are shared."""
    from scipy.special import stdtrit

    shared = sorted(a.keys() & b.keys())
    if len(shared) >= MIN_SEEDS:
        apart = [b[seed] - a[seed] for seed in shared]
        error, freedom = stdev(apart) / math.sqrt(len(apart)), len(apart) - 1.0
        error = 0.0 if error <= ROUNDING * abs(fmean(a.values())) else error
    elif min(len(a), len(b)) >= MIN_SEEDS:
        parts = [variance(side.values()) / len(side) for side in (a, b)]
        error = math.sqrt(sum(parts))
        if not error:
            return None
        shares = [part / sum(parts) for part in parts]
        freedom = 1 / sum(s**2 / (len(side) - 1) for s, side in zip(shares, (a, b), strict=True))
    else:
        return None
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error


def _judge_repeats(
    metric: Metric, changes: Sequence[Changed], readings: pd.DataFrame
) -> list[Estimate | None]:
    """Estimate what each change does to a time, a memory or an energy."""
    grouped = readings.groupby("cell")["log"]
    moments = grouped.agg(["size", "mean", "var", "min", "max"])
    moments["value"] = readings.groupby("cell")["value"].mean()
    still = moments["max"] - moments["min"] <= ROUNDING
    moments["var"] = moments["var"].mask(still, 0.0)
    place_of = {cell: place for place, cell in enumerate(moments.index.tolist())}
    known = [
        [
            pair
            for pair in change.pairs
            if pair.a in place_of
            and pair.b in place_of
            and (metric is not MEMORY or pair.same_memory)
        ]
        for change in changes
    ]
    sure = {*moments.index[moments["size"] >= MIN_REPEATS].tolist()}
    columns = [moments[name].to_numpy() for name in ("size", "mean", "var", "value")]
    samples: list[_Sample | None] = []
    for pairs in _keep_alike(changes, known, sure):
        if not pairs:
            samples.append(None)
            continue
        cells = tuple((pair.a, pair.b) for pair in pairs)
        sides = [[place_of[cell] for cell in side] for side in zip(*cells, strict=True)]
        samples.append(_Sample(cells, *(column[side] for column in columns for side in sides)))
    noises = [noise for sample in samples if sample for noise in sample.noises]
    typical = math.exp(median(noises)) if noises else None
    estimates = [sample.estimate(metric, typical) if sample else None for sample in samples]
    p_values = [e.ratio.p for e in estimates if e and e.ratio.p is not None]
    adjusted = iter(adjust(p_values))
    return [
        replace(e, ratio=replace(e.ratio, p_adjusted=next(adjusted)))
        if e and e.ratio.p is not None
        else e
        for e in estimates
    ]


@dataclass(frozen=True)
class _Sample:
    """Readings of the pairs of one change, as arrays: of logarithms, and the mean of values."""

    cells: tuple[tuple[int, int], ...]
    n_a: np.ndarray
    n_b: np.ndarray
    mean_a: np.ndarray
    mean_b: np.ndarray
    variance_a: np.ndarray
    variance_b: np.ndarray
    value_a: np.ndarray
    value_b: np.ndarray

    @property
    def noises(self) -> list[float]:
        """The logarithm of each pair's ratio of variances, where both sides vary."""
        import numpy as np

        both = (self.variance_a > 0) & (self.variance_b > 0)
        ratios: list[float] = np.log(self.variance_a[both] / self.variance_b[both]).tolist()
        return ratios

    @property
    def errors(self) -> np.ndarray:
        """Variance of each pair's difference."""
        errors: np.ndarray = self.variance_a / self.n_a + self.variance_b / self.n_b
        return errors

    def freedom(self, noise: float | None = None) -> np.ndarray:
        """Each pair's degrees of freedom (Welch 1947, Satterthwaite); infinite without spread.

        Args:
            noise: variance before over variance after; by default each pair's own.
        """
        import numpy as np

        a, b = self.variance_a / self.n_a, self.variance_b / self.n_b
        if noise is not None:
            both = (self.variance_a > 0) & (self.variance_b > 0)
            a, b = np.where(both, noise / self.n_a, a), np.where(both, 1 / self.n_b, b)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = (a / (a + b), b / (a + b))  # squares of tiny variances would vanish
            freedom = 1 / (shares[0] ** 2 / (self.n_a - 1) + shares[1] ** 2 / (self.n_b - 1))
        return np.where(a + b > 0, freedom, np.inf)

    def estimate(self, metric: Metric, typical: float | None) -> Estimate:
        """Judge the mean over the pairs."""
        import numpy as np

        shifts = self.mean_b - self.mean_a
        low, high = int(shifts.argmin()), int(shifts.argmax())
        ratio, reach = self._judge(metric, shifts, typical)
        return Estimate(
            ratio,
            self.cells,
            float(np.exp(shifts[low])),
            float(np.exp(shifts[high])),
            (self.cells[low][1], self.cells[high][1]),
            ratio.p is not None and self._is_mixed(shifts),
            float((self.value_b - self.value_a).mean()),
            reach,
        )

    def _judge(
        self, metric: Metric, shifts: np.ndarray, typical: float | None
    ) -> tuple[Ratio, float | None]:
        from scipy.special import stdtr, stdtrit

        shift = float(shifts.mean())
        value = math.exp(shift)
        fewest = int(min(self.n_a.min(), self.n_b.min()))
        if fewest < MIN_REPEATS:
            return Ratio(value, lack=f"needs {MIN_REPEATS} repeats, has {fewest}"), None
        errors = self.errors
        if not errors.any():
            if metric.deterministic:
                return Ratio(value, value, value, exact=True), 0.0
            lack = "repeats equal to the last digit are not independent readings"
            return Ratio(value, lack=lack), None
        error = math.sqrt(float(errors.sum())) / len(errors)
        own, tested = (_pool(errors, self.freedom(noise)) for noise in (None, typical))
        reach = float(stdtrit(own, (1 + CONFIDENCE) / 2)) * error
        p = min(1.0, 2 * float(stdtr(tested, -abs(shift) / error)))
        ratio = Ratio(value, math.exp(shift - reach), math.exp(shift + reach), p, p)
        return ratio, reach * float(self.value_a.mean()) * value

    def _is_mixed(self, shifts: np.ndarray) -> bool:
        """Whether some pairs are below the margin, within it or above it, and others are not."""
        import numpy as np
        from scipy.special import stdtrit

        freedom = np.minimum(self.freedom(), 1e9)
        reach = stdtrit(freedom, (1 + CONFIDENCE) / 2) * np.sqrt(self.errors)
        low, high, limit = shifts - reach, shifts + reach, math.log1p(STEADY)
        kinds = [high < -limit, (low >= -limit) & (high <= limit), low > limit]
        return sum(bool(kind.any()) for kind in kinds) > 1


def _pool(errors: np.ndarray, freedom: np.ndarray) -> float:
    """Satterthwaite's degrees of freedom of a mean over pairs, from the variance of each."""
    shares = errors / errors.sum()
    return float(1 / (shares**2 / freedom).sum())


def _list_doubts(pairs: Sequence[Pair]) -> Iterator[str]:
    held = frozenset[str]().union(*(pair.doubts for pair in pairs))
    yield from (DOUBTS[name].remark for name in DOUBTS if name in held)
