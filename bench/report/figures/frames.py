"""The data of each figure: a tidy frame, in the units that its columns name.

The first column of a figure by batch size, by number of GPUs or through an epoch is its x axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bench.axis import Trait
from bench.case import FOLLOWS, list_affecting
from bench.diagnosis.explanation import Explanation
from bench.diagnosis.sentences import name_part
from bench.precision import PRECISIONS
from bench.questions import batch_sizes
from bench.questions.families import find_families
from bench.questions.scaling_tax import find_taxes
from bench.record import REFUSED, RELIABLE
from bench.render.cells import TIMED, iterate
from bench.report.document import Report
from bench.report.figures.groups import Group, View, name_setting, split_lines
from bench.study.axes import MACHINE, keep_main, name_axis, name_value, order_values, sort_cases
from bench.study.quantities import QUANTITIES
from bench.study.summaries import MATCH, latest
from bench.text import ESTIMATE, GIB, parse_bytes, write_number

MOST_POINTS = 300  # of a panel
CURVE_POINTS = 40  # of an epoch of a curve without a published one beside it
MOST_SERIES = 8  # learning rates of a panel
MOST_CURVES = 60  # learning rates from which they are chosen
MOST_CHANGES = 40  # of a panel
MOST_PAIRS = 16  # of a switch; if there are more, some are shown, evenly spread over the ratios
MOST_CHARACTERS = 54  # of a row's name: more would run into the number at its end
MOST_PARTS = 9  # of a step, with a row each; the rest, which changed least, is summed
LEAST_SHARE = 0.01  # of a step: a smaller kind of work, or change of one, is not drawn by itself

LEARNING = list_affecting(Trait.RATE)
"""Axes that determine a learning rate; the batch size does too if the rate is scaled by it."""

BATCH, EPOCH, GPUS = "batch size", "epoch (%)", "GPUs"
TIME, MEMORY = QUANTITIES["epoch_time_s"].title, QUANTITIES["memory_bytes"].title
LOSS, ACCURACY = "loss", "accuracy (%)"
STEP, LR, SERIES = "step time (ms)", "learning rate", "series"
LOW, HIGH = "from", "to"
MARK, KNEE = "mark", "knee"
FITS, FULL, PREDICTED = "fits", "out of memory", "predicted"
CARD, LIMIT, START = "card (GiB)", "memory limit (GiB)", "before the first step (GiB)"
LINE = "largest miss of the line (%)"
WIDER, OVER_FP32 = "speed-up over one (×)", "speed-up over fp32 (×)"
BEFORE, AFTER, CHANGE = "before (ms)", "after (ms)", "change (ms)"
FLOOR = "at the measured rates (ms)"
SPEED, PRODUCT, COPY = "TFLOP/s", "large product (TFLOP/s)", "large copy (GB/s)"
OFF, ON, FASTER = "off (s)", "on (s)", "speed (×)"


Parts = Iterator[tuple[str, pd.DataFrame]]
"""The title of each panel, and its data; a panel without data is not drawn."""


def _frame(columns: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(columns).reset_index(drop=True)


def _join(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def thin(data: pd.DataFrame, keep: pd.Series | None = None) -> pd.DataFrame:
    """Return about `MOST_POINTS` rows if there are more, evenly spread, and those to ``keep``."""
    if len(data) <= MOST_POINTS:
        return data
    chosen = data.index % math.ceil(len(data) / MOST_POINTS) == 0
    return data[chosen if keep is None else chosen | keep].reset_index(drop=True)


def take_quantity(group: Group, name: str) -> pd.DataFrame:
    """Return one of `QUANTITIES` by batch size and precision, each at its main loss scale; of an
    epoch's time and of images/s also the range, if one is known."""
    quantity, rows = QUANTITIES[name], keep_main(group.cases)
    rows = rows[rows[name].notna()].sort_values("batch_size")
    values = rows[name] / quantity.scale
    numbers = {quantity.title: values}
    times = [rows[f"epoch_time_s{end}"] / rows["epoch_time_s"] for end in ("_low", "_high")]
    if name in ("epoch_time_s", "images_per_s") and times[0].notna().any():
        ends = times if name == "epoch_time_s" else [1 / time for time in reversed(times)]
        numbers |= {LOW: ends[0] * values, HIGH: ends[1] * values}
    return _frame({BATCH: rows["batch_size"], "precision": rows["precision"], **numbers})


def take_speeds(group: Group, view: View) -> pd.DataFrame:
    """Return images/s by batch size; `MARK` says where a knee is, and how far a cliff falls."""
    data = take_quantity(group, "images_per_s").assign(**{MARK: ""})
    rows = keep_main(group.cases)
    for precision, part in rows[rows["status"].isin(RELIABLE)].groupby("precision"):
        speeds = batch_sizes.list_speeds(list(iterate(part)))
        knee = batch_sizes.find_knee(speeds)
        cliffs = batch_sizes.find_cliffs(speeds)
        found = [(cliff.after.batch_size, batch_sizes.write_drop(cliff)) for cliff in cliffs]
        if knee and knee.shape is batch_sizes.Shape.KNEE:
            found.append((knee.batch_size, f"{KNEE} {knee.batch_size}"))
        for size, mark in found:
            data.loc[(data["precision"] == precision) & (data[BATCH] == size), MARK] = mark
    return data if (data[MARK] != "").any() else data.drop(columns=MARK)


def take_memory(group: Group, view: View) -> pd.DataFrame:
    """Return memory by batch size; cases that ran out of memory are at the card's size, or at the
    limit. `START` is the process's memory before the first step, the median of the cases: no batch
    size changes it. If memory is linear, it continues to `PREDICTED` batch sizes."""
    rows = keep_main(group.cases)
    data = take_quantity(group, "memory_bytes").assign(outcome=FITS)
    if not len(data):
        return data
    parts = [data, *_predict_memory(rows)]
    limit, card = rows["memory_limit"].iloc[0], rows["gpu_memory_bytes"].dropna()
    if limit or (len(card) and (rows["device"] != "cpu").all()):
        level = LIMIT if limit else CARD
        data[level] = (parse_bytes(limit) if limit else float(card.iloc[0])) / GIB
        full = rows[rows["status"].isin(REFUSED)]
        lost = _frame({BATCH: full["batch_size"], "precision": full["precision"]})
        lost[MEMORY] = lost[level] = data[level].iloc[0]
        parts.insert(1, lost.assign(outcome=FULL))
    data = _join(parts)
    start = rows["setup_process_bytes"].astype(float).median()
    of_process = rows["memory_measure"].isin(["peak_device_bytes", "peak_process_bytes"])
    if start > 0 and of_process.all():  # a peak of tensors alone leaves out the process
        data[START] = start / GIB
    return data


def _predict_memory(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield each precision's line beyond the batch sizes that ran, up to its end."""
    for family in find_families(rows, rows.head(0)):
        growth = batch_sizes.fit_growth(family)
        if growth is None:
            continue
        fails = family.bounds.fails or math.inf
        ends = growth.largest if growth.largest and not growth.more else 0
        near = [ends] if growth.sizes[-1] < ends < fails else []
        if sizes := sorted({*near, *growth.predicted}):
            ahead = _frame({BATCH: sizes, "precision": family.first.precision})
            ahead[MEMORY] = [growth.line.predict(size) / GIB for size in sizes]
            ahead[LINE], ahead["outcome"] = 100 * growth.miss, PREDICTED
            yield ahead


def take_scales(group: Group, view: View) -> pd.DataFrame:
    """Return the loss of whole epochs by static scale, at the largest batch size with several."""
    rows = group.cases[group.cases["train_loss"].notna() & (group.cases["part"] == 1)]
    rows = rows.assign(scale=pd.to_numeric(rows["loss_scale"], errors="coerce"))
    rows = rows[rows["scale"].notna()]  # neither dynamic nor none
    kept = [rows.head(0)]
    for _, part in rows.groupby("precision", sort=False):
        for name in FOLLOWS["precision"]:
            if name != "loss_scale":
                part = part[part[name] == order_values(name, part[name])[0]]
        scales = part.groupby("batch_size")["scale"].nunique()
        kept.append(part[part["batch_size"] == scales[scales > 1].index.max()])
    rows = pd.concat(kept).sort_values(["precision", "scale"])
    names = {"loss scale": "scale", "precision": "precision", BATCH: "batch_size"}
    return _frame({title: rows[name] for title, name in {**names, LOSS: "train_loss"}.items()})


def take_trade(view: View) -> Parts:
    """Yield time against memory of all settings; ``front``: cases that no other beats in both."""
    for group in view.groups:
        names = ["epoch_time_s", "memory_bytes"]
        rows = group.all[group.all[names].notna().all(axis=1)].sort_values(names)
        time, memory = (rows[name] for name in names)
        least = memory.cummin()  # of all that are as fast
        front = (memory == least) & (time == time.groupby(least).transform("min"))
        usual = group.settings.items()
        settings = [
            ", ".join(_name_switch(axis, getattr(row, axis)) for axis, common in usual
                      if getattr(row, axis) != common)
            for row in iterate(rows)
        ]  # fmt: skip
        data = _frame({
            TIME: time, MEMORY: memory / GIB, "precision": rows["precision"],
            BATCH: rows["batch_size"], "loss scale": rows["loss_scale"], "setting": settings,
            "front": front.map({True: "yes", False: "no"}),
        })  # fmt: skip
        yield group.place, thin(data, data["front"] == "yes") if len(data) > 1 else data.head(0)


def _name_switch(axis: str, value: Any) -> str:
    """Name a setting that is not the usual one: ``lr 0.1``, ``channels last``."""
    if isinstance(value, bool):
        return name_axis(axis) if value else f"no {name_axis(axis)}"
    return name_setting(axis, value)


def _find_runs(group: Group, view: View, whole: bool = False) -> pd.DataFrame:
    """Return one measured run per precision, all at the batch size that most precisions have. It is
    the repeat whose epoch time is the median, or the faster of the middle two, as in the tables.
    ``whole`` keeps only runs of whole epochs."""
    cases = group.cases[group.cases["part"] == 1] if whole else group.cases
    rows = keep_main(cases) if len(cases) else cases
    rows = rows[rows["status"].isin(TIMED)]
    if not len(rows):
        return rows
    held = rows.groupby("batch_size")["precision"].nunique()
    rows = rows[rows["batch_size"] == held.idxmax()].drop_duplicates("precision")
    runs = latest(view.report.records)
    return rows.assign(record_id=[_find_median_run(row, runs, view) for row in iterate(rows)])


def _find_median_run(case: Any, runs: pd.DataFrame, view: View) -> str:
    """Return the record of a case's repeat whose epoch time is the median of those with steps."""
    cell = runs.loc[(runs["sweep"] == case.sweep) & (runs["record_id"] == case.record_id), "cell"]
    same = runs[runs["cell"].isin(cell) & (runs["status"] == case.status)]
    stored = same["record_id"].isin(view.steps(str(case.sweep))["record_id"].unique())
    timed = same[same["epoch_time_s"].notna() & stored].sort_values("epoch_time_s", kind="stable")
    return str(timed["record_id"].iloc[(len(timed) - 1) // 2] if len(timed) else case.record_id)


def _read_steps(rows: pd.DataFrame, view: View) -> Iterator[tuple[Any, pd.DataFrame]]:
    for row in iterate(rows):
        every = view.steps(str(row.sweep))
        if len(mine := every[every["record_id"] == row.record_id]):
            yield row, mine


def thin_steps(steps: pd.DataFrame, images: float, ends: Sequence[float]) -> pd.DataFrame:
    """Average steps over images, by share of an epoch of ``images``; several epochs pass 100 %. A
    mean ends where as many images were seen as one of the rising ``ends`` says, and at the end."""
    steps = steps[steps["images"] > 0]
    seen = steps["images"].cumsum()
    bin = np.searchsorted(ends, seen)
    weighted = (steps["loss"] * steps["images"]).groupby(bin).sum(min_count=1)
    total = steps["images"].where(steps["loss"].notna()).groupby(bin).sum()
    accuracy = 100 * steps["correct"].groupby(bin).sum() / steps["images"].groupby(bin).sum()
    loss = weighted / total.where(total > 0)
    return _frame({EPOCH: 100 * seen.groupby(bin).max() / images, LOSS: loss, ACCURACY: accuracy})


def take_curves(group: Group, view: View, whole: bool = False) -> pd.DataFrame:
    """Return loss and accuracy through the epoch per precision, and the published curves that
    match. These have a mean per fifty steps; beside them, all curves are means over the same
    images."""
    rows, reference = _find_runs(group, view, whole), view.report.reference
    ours, theirs = [*_read_steps(rows, view)], []
    if ours and reference is not None and (rows["kind"] != "published").any():
        published = reference.records.merge(rows[[*MATCH]], on=[*MATCH])
        theirs = [*_read_steps(published.assign(sweep=""), view)]
    ends = theirs[0][1]["images"].cumsum().tolist() if theirs else None
    curves = []
    for run, found in (("this sweep", ours), ("2019", theirs)):
        for row, mine in found:
            every = mine["images"].sum()
            evenly = np.linspace(0, every, CURVE_POINTS * int(row.epochs) + 1)[1:].tolist()
            images = row.train_images if row.train_images > 0 else every
            curve = thin_steps(mine, images, evenly if ends is None else ends)
            named = {"precision": row.precision, "run": run, BATCH: row.batch_size}
            curves.append(curve.assign(**named))
    return _join(curves)


def take_steps(group: Group, view: View) -> pd.DataFrame:
    """Return step times per precision, at the batch size of the curves."""
    parts = []
    for row, mine in _read_steps(_find_runs(group, view), view):
        part = thin(_frame({STEP: 1e3 * mine["time_s"].dropna()}))
        if len(part) >= 5:
            parts.append(part.assign(**{"precision": row.precision, BATCH: row.batch_size}))
    return _join(parts)


def take_rates(view: View) -> Parts:
    """Yield the learning rate of each step, a series for each distinct course; empty if it is the
    same in every step of every case. The title names the axes whose values name the series, and how
    many of all are shown. Of series that look alike, the first is shown."""
    for group in view.groups:
        rows = group.all[group.all["status"].isin(TIMED)]
        axes = [axis for axis in LEARNING if rows[axis].nunique() > 1]
        if (rows["lr_scaling"] != "none").any() and rows["batch_size"].nunique() > 1:
            axes.append("batch_size")
        ordered = sort_cases(rows, [*axes, "precision"])
        rows = ordered.drop_duplicates(axes) if axes else rows.head(1)
        curves: list[tuple[Any, pd.DataFrame]] = []
        for row, mine in _read_steps(rows.head(MOST_CURVES), view):
            mine = mine[mine["lr"].notna()]
            images = row.train_images if row.train_images > 0 else mine["images"].sum()
            part = _frame({EPOCH: 100 * mine["images"].cumsum() / images, LR: mine["lr"]})
            if len(part) and not any(_look_alike(part, other) for _, other in curves):
                curves.append((row, part))
        title = " · ".join(filter(None, (group.place, *map(name_axis, axes))))
        if len(curves) > MOST_SERIES:
            title += f", {MOST_SERIES} of {len(curves)} curves"
        parts = []
        for row, part in _spread_out(curves, axes):
            told = part.index.isin([part.index[-1], part[LR].idxmax(), part[LR].idxmin()])
            names = [name_value(axis, getattr(row, axis), {}) for axis in axes]
            part = thin(part, keep=pd.Series(told, part.index))
            parts.append(part.assign(**{SERIES: " · ".join(names) or "every case"}))
        data = _join(parts)
        yield title, data if len(data) and data[LR].nunique() > 1 else data.head(0)


def _look_alike(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Return whether two learning rates are alike: nowhere more than 1 % of the highest apart."""
    ends = [float(part[EPOCH].iloc[-1]) for part in (a, b)]
    places = np.linspace(0, min(ends), 200)
    of_a, of_b = (np.interp(places, part[EPOCH], part[LR]) for part in (a, b))
    near = abs(of_a - of_b) <= 0.01 * max(of_a.max(), of_b.max())
    return math.isclose(*ends, rel_tol=0.01) and bool(near.all())


def _spread_out(
    curves: Sequence[tuple[Any, pd.DataFrame]], axes: Sequence[str]
) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Yield at most `MOST_SERIES` curves: all values of other axes before a second batch size."""
    seen: set[tuple[str, Any]] = set()
    others = [axis for axis in axes if axis != "batch_size"]
    left = [({(axis, getattr(row, axis)) for axis in others}, (row, part)) for row, part in curves]
    for _ in range(min(MOST_SERIES, len(curves))):
        best = max(left, key=lambda one: len(one[0] - seen))
        left = [one for one in left if one is not best]
        seen |= best[0]
        yield best[1]


def take_waterfall(why: Explanation) -> pd.DataFrame:
    """Return how one step time becomes another: a row per part, between the two steps. `FLOOR` is
    the time of the part in the second step at the machine's measured rates."""
    parts = why.b.breakdown.parts if why.ceiling else ()
    floors = {part.name: part.floor_s for part in parts if part.floor_s is not None}
    before, after = why.a.step.step_s, why.b.step.step_s
    large = [c for c in why.changes if abs(c.change_s) >= LEAST_SHARE * max(before, after)]
    shown = sorted(large, key=lambda change: -abs(change.change_s))[:MOST_PARTS]
    lines = [(why.a.name, before, math.nan, math.nan)]
    for c in shown:
        name = f"{ESTIMATE * c.estimated}{name_part(c.name)}"
        lines.append((name, c.before_s, c.after_s, floors.get(c.name, math.nan)))
    if rest := [change for change in why.changes if change not in shown]:
        name = f"{ESTIMATE * any(c.estimated for c in rest)}all others"
        sums = sum(c.before_s for c in rest), sum(c.after_s for c in rest)
        lines.append((name, *sums, math.nan))
    lines.append((why.b.name, math.nan, after, math.nan))
    data = pd.DataFrame(lines, columns=["part", BEFORE, AFTER, FLOOR])
    data[[BEFORE, AFTER, FLOOR]] *= 1e3
    data.insert(3, CHANGE, data[AFTER] - data[BEFORE])
    return data


def take_roofline(why: Explanation) -> pd.DataFrame:
    """Return the kinds of work of two steps: what each computes and moves per second, and the
    limits. Empty if the machine's rates are not known. Kinds that take less than `LEAST_SHARE` of
    both steps are left out."""
    lines: list[dict[str, Any]] = []
    large = {part.name for side in (why.a, why.b) for part in side.breakdown.parts
             if part.time_s >= LEAST_SHARE * side.step.step_s}  # fmt: skip
    estimates = why.a.breakdown.estimates | why.b.breakdown.estimates
    for side in (why.a, why.b):
        rates, peaks = side.step.rates, side.step.peaks
        product, copy = rates.products.get(side.format), rates.copy
        if product is None or copy is None:
            return pd.DataFrame()
        for part in side.breakdown.parts:
            if part.name not in large or part.bytes <= 0 or part.counted_s <= 0:
                continue
            speed, traffic = part.flop / part.counted_s, part.bytes / part.counted_s
            most = peaks.products.get(side.format, math.inf), peaks.copy or math.inf
            if speed > most[0] or traffic > most[1]:
                continue  # above the data sheet: wrong, or from a cache
            lines.append({
                "work": f"{ESTIMATE * (part.name in estimates)}{name_part(part.name)}",
                "precision": side.case.precision, "FLOP/byte": part.flop / part.bytes or math.nan,
                SPEED: speed / 1e12 or math.nan, "GB/s": traffic / 1e9,
                "of the step (%)": 100 * part.time_s / side.step.step_s,
                PRODUCT: product / 1e12, COPY: copy / 1e9,
            })  # fmt: skip
    return pd.DataFrame(lines)


def take_scaling(view: View) -> Parts:
    """Yield the speed-up over one GPU by number of GPUs and precision, for lines that have one."""
    for title, lines in split_lines(view.report):
        rows = []
        for base, point in ((line.base, point) for line in lines for point in line.all):
            speedup = 1.0 if point is base else point.speedup
            if base and math.isfinite(speedup) and (point is base or point.gpus > 1):
                rows.append((point.gpus, point.row.precision, speedup))
        yield title, pd.DataFrame(rows, columns=[GPUS, "precision", WIDER])


def take_tax(view: View) -> Parts:
    """Yield the speed-up over fp32 by number of GPUs and precision."""
    for title, lines in split_lines(view.report):
        rows = [
            (gpus, tax.line.points[0].row.precision, speedup)
            for tax in find_taxes(lines)
            for gpus, speedup in tax.speedups.items()
        ]
        yield title, pd.DataFrame(rows, columns=[GPUS, "precision", OVER_FP32])


def take_changes(view: View) -> Parts:
    """Yield the effect of each change on some metrics, as a ratio; for times inverted, as a speed.
    ``lowest`` and ``highest`` are over the pairs; ``low`` and ``high`` the 95 % interval of their
    mean, empty if there are too few repeats."""
    for title, metric, power in (
        ("Speed: right is faster", "epoch_time_s", -1),
        ("Memory: left is less", "memory_bytes", 1),
        ("Energy of an epoch: left is less", "energy_per_epoch_j", 1),
    ):
        lines = []
        for effect in view.report.effects:
            estimate = effect.estimates.get(metric)
            if estimate is None or not (ratio := estimate.ratio).value:
                continue
            ends = [math.nan if end is None else end for end in (ratio.low, ratio.high)]
            low, high = sorted(end**power for end in ends)
            lowest, highest = sorted(end**power for end in (estimate.lowest, estimate.highest))
            before, after = (_shorten(value, 20) for value in (effect.before, effect.after))
            where = f" ({effect.over})" if effect.apart else ""
            change = _shorten(f"{name_axis(effect.axis)}: {before} → {after}{where}")
            lines.append({
                "change": change, "ratio": ratio.value**power, "low": low, "high": high,
                "lowest": lowest, "highest": highest, "pairs": estimate.pairs,
            })  # fmt: skip
        yield title, pd.DataFrame(lines[:MOST_CHANGES])


def _shorten(name: str, most: int = MOST_CHARACTERS) -> str:
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def take_switches(view: View) -> Parts:
    """Yield the epoch times of pairs of cases with a switch off and on, a panel per switch. A row
    is a pair, the largest speed-up first; at most `MOST_PAIRS` are kept."""
    cases = view.report.cases.set_index("cell", drop=False)
    for effect in view.report.effects:
        if effect.before != "off":
            continue
        off, on = (cases.loc[[pair[side] for pair in effect.pairs]] for side in (0, 1))
        told = [name for name in view.report.varying if name != effect.axis]
        data = _frame({
            "case": [_name_case(row, told, view.report) for row in iterate(off)],
            "precision": off["precision"].to_numpy(), OFF: off["epoch_time_s"].to_numpy(),
            ON: on["epoch_time_s"].to_numpy(),
        })  # fmt: skip
        data = data.assign(**{FASTER: data[OFF] / data[ON]}).dropna()
        data = data.sort_values(FASTER, ascending=False, kind="stable").reset_index(drop=True)
        title, pairs = f"{name_axis(effect.axis)}: off → {effect.after}", len(data)
        if pairs > MOST_PAIRS:
            step = (pairs - 1) / (MOST_PAIRS - 1)
            data = data.loc[[round(i * step) for i in range(MOST_PAIRS)]].reset_index(drop=True)
            title += f", {MOST_PAIRS} of {pairs} pairs"
        yield title, data


def _name_case(row: Any, told: Sequence[str], report: Report) -> str:
    """Name a case by some axes, the machine last: ``dpn26 · bf16 · batch 128 · H200``."""
    names = []
    for axis in told:
        value = "" if axis == MACHINE else getattr(row, axis)
        if axis in ("model", "dataset", "precision"):
            names.append(value)
        elif axis == "batch_size":
            names.append(f"batch {value}")
        elif value != "" and value is not False:
            names.append(_name_switch(axis, value))
    if MACHINE in told:
        names.append(_shorten(report.machines[row.sweep, row.machine], 16))
    return _shorten(" · ".join(names) or str(row.precision))


def describe(data: pd.DataFrame, value: str) -> str:
    """Say in words what a panel shows: its extremes per precision, or each change."""
    if "change" in data:
        return "; ".join(f"{row.change} {write_number(row.ratio)}×" for row in iterate(data))
    if "part" in data:
        parts = data.dropna(subset=value).sort_values(value, key=abs, ascending=False).head(4)
        return "; ".join(f"{row.part} {row[value]:+.4g} ms" for _, row in parts.iterrows())
    if "work" in data:
        return f"{value} of {', '.join(dict.fromkeys(data['work']))}"
    if "outcome" in data:
        data = data[data["outcome"] != PREDICTED]
    by = SERIES if SERIES in data else "precision"
    order = [name for name in PRECISIONS if (data[by] == name).any()] or list(data[by].unique())
    ends = data.groupby(by)[value].agg(["min", "max"]).loc[order].map(write_number)
    said = [f"{name} from {low} to {high}" for name, low, high in ends.itertuples()]
    return f"{value}: {'; '.join(said)}"
