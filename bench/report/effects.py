"""What changing one axis does with all else equal: over every pair of cases that differs in it.

Of each pair the ratio of geometric means over the repeats is taken, and the geometric mean over the
pairs. Its 95 % interval is of that mean over just these pairs: each pair's variance is Welch's, the
degrees of freedom are Satterthwaite's, so that a single pair has the interval that `bench.compare`
gives it. The p-values of all changes of one metric are adjusted by Holm, as there. The lowest and
the highest pair tell how far the pairs differ from each other. Losses are compared seed by seed
where cases share seeds.

Everything is vectorised over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bench.case import AXES, FOLLOWS, SAME_QUESTION, free_axes
from bench.limits import MIN_REPEATS, STEADY
from bench.record import COMPARABLE, Status
from bench.report import quantities
from bench.report.axes import (
    MACHINE,
    NUMBERS,
    Machines,
    find_varying,
    keep_main,
    name_value,
    order_values,
    take_values,
)
from bench.report.doubts import DOUBTS, SAID_BELOW
from bench.report.metrics import METRICS
from bench.report.summaries import SOURCE
from bench.store.attempts import number_groups
from bench.verdict import CONFIDENCE, MIN_SEEDS, ROUNDING, Ratio, adjust

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

BASELINES = {"precision": "fp32"}
"""What the other values of an axis are compared with, where it ran; else the first value.

Of numbers, each is compared with the next below it.
"""


@dataclass(frozen=True)
class Estimate:
    """What a change does to one metric, over the pairs that have it on both sides.

    Attributes:
        ratio: after over before, of geometric means.
        pairs: how many there are.
        lowest: the ratio of the pair where it is lowest; ``highest`` where it is highest.
        ends: the ``cell`` after the change of these two pairs.
        mixed: whether pairs, each judged by its own interval, differ in their verdicts.
        difference: after minus before, in the metric's SI unit: the mean over the pairs.
        reach: half the 95 % interval of that difference; None where the ratio has no interval.
    """

    ratio: Ratio
    pairs: int
    lowest: float
    highest: float
    ends: tuple[int, int]
    mixed: bool
    difference: float
    reach: float | None


@dataclass(frozen=True)
class Effect:
    """One change of one axis, with all else equal.

    Attributes:
        axis: an axis of `Case`, or ``machine``.
        before: its value, for people; ``after`` is the one it changes to.
        pairs: the ``cell`` of the case before and of the case after.
        estimates: by the name of one of `JUDGED`.
        estimated: whether any of its times was extrapolated.
        doubts: what speaks against its cases, as remarks.
    """

    axis: str
    before: str
    after: str
    pairs: tuple[tuple[int, int], ...]
    estimates: dict[str, Estimate]
    estimated: bool
    doubts: tuple[str, ...]

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


@dataclass(frozen=True)
class _Change:
    """Pairs of cases: their columns, with ``_a`` before the change and ``_b`` after it."""

    axis: str
    before: str
    after: str
    pairs: pd.DataFrame


def find_effects(rows: pd.DataFrame, cases: pd.DataFrame, machines: Machines) -> list[Effect]:
    """What each change of each axis does, in the order of the overview's columns.

    Args:
        rows: the runs that count, of `summaries.latest`, with the ``cell`` of each.
        cases: the same summarized; ``cell`` names their runs.
    """
    measured = cases[cases["status"].isin([Status.OK.value, Status.DIVERGED.value])]
    changes = [
        change
        for axis in find_varying(measured)
        if axis not in NO_QUESTION
        for change in _find_changes(axis, measured, machines)
    ]
    estimates: list[dict[str, Estimate]] = [{} for _ in changes]
    for metric in JUDGED:
        readings = take_readings(metric, rows)
        found = [_estimate(metric, change, readings) for change in changes]
        for into, estimate in zip(estimates, _adjust(found), strict=True):
            if estimate is not None:
                into[metric.name] = estimate
    return [
        Effect(
            change.axis,
            change.before,
            change.after,
            tuple(zip(change.pairs["cell_a"], change.pairs["cell_b"], strict=True)),
            said,
            bool((change.pairs[["fraction_a", "fraction_b"]] < 1).any(axis=None)),
            tuple(_list_doubts(change.pairs)),
        )
        for change, said in zip(changes, estimates, strict=True)
        if said
    ]


def _find_changes(axis: str, cases: pd.DataFrame, machines: Machines) -> Iterator[_Change]:
    """The changes of one axis for which there are pairs."""
    if axis in FOLLOWS:
        cases = keep_main(cases)
    free = {*free_axes(axis), *SAME_QUESTION}
    equal = ["kind", *(name for name in AXES if name not in free)]
    told_by = "device" if axis == MACHINE else axis
    equal += [column for column, of in COMPARABLE.items() if of != told_by]
    if axis == MACHINE:
        equal.remove("device")
    else:
        equal += SOURCE
    columns = ["cell", "fraction", "dataset", "memory_measure", *DOUBTS]
    values = take_values(cases, axis)
    # of cases that differ only in how they were measured, the one that measured most
    lines = cases[columns].assign(_key=number_groups(cases, equal), _value=values)
    lines = lines.sort_values("fraction", ascending=False, kind="stable")
    lines = lines.drop_duplicates(["_key", "_value"]).sort_index()
    ordered = order_values(axis, values)
    for before, after in _list_steps(axis, ordered):
        sides = [lines[lines["_value"] == value] for value in (before, after)]
        pairs = sides[0].merge(sides[1], on="_key", suffixes=("_a", "_b"))
        if len(pairs):
            first, second = (name_value(axis, value, machines) for value in (before, after))
            yield _Change(axis, first, second, pairs)


def _list_steps(axis: str, values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Which values are compared: neighbours of numbers, others with the baseline."""
    if axis in NUMBERS:
        return list(pairwise(values))
    first = BASELINES.get(axis)
    first = first if first in values else values[0]
    return [(first, value) for value in values if value != first]


def take_readings(metric: Metric, rows: pd.DataFrame) -> pd.DataFrame:
    """What the runs of each cell measured: ``cell``, ``run_seed``, ``value`` and its ``log``.

    Repeats of one seed are one reading of what depends on the seed: their mean. A cell with a value
    that has no logarithm has no ratio, and is left out.
    """
    import numpy as np

    counted = {Status.OK.value, *([Status.DIVERGED.value] if metric.diverged else [])}
    rows = rows[rows["status"].isin(counted) & rows[metric.column].notna()]
    values = rows[metric.column].astype(float)
    values = 1 - values if metric.error_of else values
    lost = ~(values > 0) | np.isinf(values)
    readings = rows[["cell", "run_seed"]].assign(value=values, log=np.log(values.where(~lost)))
    readings = readings[~readings["cell"].isin(readings.loc[lost, "cell"])]
    if metric.seeded:
        readings = readings.groupby(["cell", "run_seed"], as_index=False)[["value", "log"]].mean()
    return readings


def list_comparable(effect: Effect, cases: pd.DataFrame) -> list[tuple[int, int]]:
    """The pairs of an effect whose losses are of the same images, and of as much of an epoch."""
    known = cases.set_index("cell")[list(_LEARNT_ON)]
    return [(a, b) for a, b in effect.pairs if (known.loc[a] == known.loc[b]).all()]


_LEARNT_ON = ("fraction", "dataset")


def _take_moments(readings: pd.DataFrame, group: str) -> pd.DataFrame:
    """Of each group: how many readings, and mean and variance of them and of their logarithms."""
    moments = readings.groupby(group).agg(
        n=("log", "size"), value=("value", "mean"), value_variance=("value", "var"),
        log=("log", "mean"), log_variance=("log", "var"), low=("log", "min"), high=("log", "max"),
    )  # fmt: skip
    same = moments["high"] - moments["low"] <= ROUNDING
    still = {f"{of}_variance": moments[f"{of}_variance"].mask(same, 0.0) for of in ("value", "log")}
    return moments.assign(**still)


def _estimate(metric: Metric, change: _Change, readings: pd.DataFrame) -> Estimate | None:
    """What a change does to one metric; None where no pair has it on both sides."""
    import numpy as np

    pairs = change.pairs
    if metric is MEMORY:
        pairs = pairs[pairs["memory_measure_a"] == pairs["memory_measure_b"]]
    if metric is LOSS:  # over other images, or over another part of them, it is another quantity
        for name in _LEARNT_ON:
            pairs = pairs[pairs[f"{name}_a"] == pairs[f"{name}_b"]]
    known = set(readings["cell"])
    pairs = pairs[pairs["cell_a"].isin(known) & pairs["cell_b"].isin(known)]
    if not len(pairs):
        return None
    concerned = readings[readings["cell"].isin({*pairs["cell_a"], *pairs["cell_b"]})]
    moments = _take_moments(concerned, "cell")
    a, b = (moments.loc[pairs[f"cell_{side}"]].reset_index(drop=True) for side in "ab")
    shifts = (b["log"] - a["log"]).to_numpy()
    ratio, reach = _judge_seeds(pairs, readings) if metric.seeded else (None, None)
    if ratio is None:
        ratio, reach = _judge(metric, a, b, shifts)
    after = pairs["cell_b"].tolist()
    return Estimate(
        ratio,
        len(pairs),
        float(np.exp(shifts.min())),
        float(np.exp(shifts.max())),
        (after[int(shifts.argmin())], after[int(shifts.argmax())]),
        ratio.p is not None and not metric.seeded and _is_mixed(a, b, shifts),
        float((b["value"] - a["value"]).mean()),
        reach,
    )


def _judge(
    metric: Metric, a: pd.DataFrame, b: pd.DataFrame, shifts: np.ndarray
) -> tuple[Ratio, float | None]:
    """The ratio over pairs whose readings are independent, and half the difference's interval."""
    value = math.exp(float(shifts.mean()))
    need, what = (MIN_SEEDS, "seeds") if metric.seeded else (MIN_REPEATS, "repeats")
    fewest = int(min(a["n"].min(), b["n"].min()))
    if fewest < need:
        return Ratio(value, lack=f"needs {need} {what} a side, has {fewest}"), None
    if not (a["log_variance"].any() or b["log_variance"].any()):
        if metric.deterministic:
            return Ratio(value, value, value, exact=True), 0.0
        lack = "repeats equal to the last digit are not independent readings"
        return Ratio(value, lack=lack), None
    errors, freedom = _welch(a, b, "value_variance")
    reach = _quantile(errors, freedom) * _error(errors)
    return _pool(shifts, *_welch(a, b, "log_variance")), reach


def _judge_seeds(pairs: pd.DataFrame, readings: pd.DataFrame) -> tuple[Ratio | None, float | None]:
    """The ratio over seeds that every case of every pair ran: the mean over pairs is one reading.

    One seed starts all cases from the same weights on the same images, so that their losses rise
    and fall together: differences seed by seed are far less noisy, as `verdict.compare_seeds` says.

    Returns:
        Nothing where fewer than `MIN_SEEDS` are shared.
    """
    sides = [
        readings.rename(columns={name: f"{name}_{side}" for name in ("cell", "value", "log")})
        for side in "ab"
    ]
    both = pairs[["cell_a", "cell_b"]].merge(sides[0], on="cell_a")
    both = both.merge(sides[1], on=["cell_b", "run_seed"])
    shared = both.groupby("run_seed")["cell_a"].transform("size") == len(pairs)
    apart = both[shared].assign(
        value=both["value_b"] - both["value_a"], log=both["log_b"] - both["log_a"]
    )
    by_seed = apart.groupby("run_seed", as_index=False)[["value", "log"]].mean()
    if len(by_seed) < MIN_SEEDS:
        return None, None
    found = _take_moments(by_seed.assign(all=0), "all")
    shift, freedom = found["log"].to_numpy(), (found["n"] - 1).to_numpy()
    errors, squares = ((found[f"{of}_variance"] / found["n"]).to_numpy() for of in ("log", "value"))
    if not errors.any():
        value = math.exp(float(shift[0]))
        return Ratio(value, value, value, exact=True), 0.0
    return _pool(shift, errors, freedom), _quantile(squares, freedom) * _error(squares)


def _is_mixed(a: pd.DataFrame, b: pd.DataFrame, shifts: np.ndarray) -> bool:
    """Whether some pairs are below the margin, within it or above it, and others are not."""
    import numpy as np
    from scipy.special import stdtrit

    variances, freedom = _welch(a, b, "log_variance")
    freedom = np.where(np.isfinite(freedom), freedom, 1e9)
    reach = stdtrit(freedom, (1 + CONFIDENCE) / 2) * np.sqrt(variances)
    low, high, limit = shifts - reach, shifts + reach, math.log1p(STEADY)
    kinds = [high < -limit, (low >= -limit) & (high <= limit), low > limit]
    return sum(bool(kind.any()) for kind in kinds) > 1


def _welch(a: pd.DataFrame, b: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Variance of each pair's difference, and its degrees of freedom (Welch 1947)."""
    import numpy as np

    parts = [(side[name] / side["n"]).to_numpy() for side in (a, b)]
    counts = [side["n"].to_numpy() for side in (a, b)]
    variances = parts[0] + parts[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [part / variances for part in parts]  # squares of tiny variances would vanish
        freedom = 1 / sum(s**2 / (n - 1) for s, n in zip(shares, counts, strict=True))
    return variances, np.where(variances > 0, freedom, np.inf)


def _error(variances: np.ndarray) -> float:
    """Standard error of the mean over pairs."""
    return math.sqrt(float(variances.sum())) / len(variances)


def _freedom(variances: np.ndarray, freedom: np.ndarray) -> float:
    """Satterthwaite's degrees of freedom of the mean over pairs."""
    shares = variances / variances.sum()
    return float(1 / (shares**2 / freedom).sum())


def _quantile(variances: np.ndarray, freedom: np.ndarray) -> float:
    from scipy.special import stdtrit

    if not variances.any():
        return 0.0
    return float(stdtrit(_freedom(variances, freedom), (1 + CONFIDENCE) / 2))


def _pool(shifts: np.ndarray, variances: np.ndarray, freedom: np.ndarray) -> Ratio:
    """The geometric mean over pairs, with its interval and the p-value of no difference."""
    from scipy.special import stdtr

    shift, error = float(shifts.mean()), _error(variances)
    reach = _quantile(variances, freedom) * error
    p = min(1.0, 2 * float(stdtr(_freedom(variances, freedom), -abs(shift) / error)))
    return Ratio(math.exp(shift), math.exp(shift - reach), math.exp(shift + reach), p, p)


def _adjust(found: Sequence[Estimate | None]) -> Iterator[Estimate | None]:
    """Adjust the p-values of one metric for being the smallest of many."""
    p_values = [e.ratio.p for e in found if e is not None and e.ratio.p is not None]
    adjusted = iter(adjust(p_values))
    for estimate in found:
        if estimate is None or estimate.ratio.p is None:
            yield estimate
        else:
            yield replace(estimate, ratio=replace(estimate.ratio, p_adjusted=next(adjusted)))


def _list_doubts(pairs: pd.DataFrame) -> Iterator[str]:
    for doubt in DOUBTS.values():
        sides = [f"{doubt.name}_{side}" for side in "ab"]
        if doubt.name not in SAID_BELOW and pairs[sides].any(axis=None):
            yield doubt.remark
