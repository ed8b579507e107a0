"""The data of each figure: a tidy frame, in the units that its columns name.

The first column of a figure by batch size, by number of GPUs or through an epoch is its x axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bench.diagnosis.explanation import Explanation
from bench.diagnosis.sentences import name_part
from bench.precision import PRECISIONS
from bench.questions import batch_sizes
from bench.questions.families import find_families
from bench.questions.scaling_tax import find_taxes
from bench.record import REFUSED, RELIABLE
from bench.render.cells import TIMED, iterate
from bench.report.figures.groups import Group, View, name_setting, split_lines
from bench.study.axes import keep_main, name_axis
from bench.study.quantities import QUANTITIES
from bench.study.results import Result
from bench.study.summaries import MATCH
from bench.text import ESTIMATE, GIB, parse_bytes, write_number

MOST_POINTS = 300  # of a panel
CURVE_POINTS = 40  # of an epoch of a curve without a published one beside it
MOST_CHANGES = 40  # of a panel
MOST_CHARACTERS = 54  # of a row's name: more would run into the number at its end
MOST_PARTS = 9  # of a step, with a row each; the rest, which changed least, is summed
LEAST_SHARE = 0.01  # of a step: a smaller kind of work, or change of one, is not drawn by itself

BATCH, EPOCH, GPUS = "batch size", "epoch (%)", "GPUs"
TIME, MEMORY = QUANTITIES["epoch_time_s"].title, QUANTITIES["memory_bytes"].title
LOSS, ACCURACY = "loss", "accuracy (%)"
LOW, HIGH = "from", "to"
MARK, KNEE = "mark", "knee"
FITS, FULL, PREDICTED = "fits", "out of memory", "predicted"
CARD, LIMIT, START = "card (GiB)", "memory limit (GiB)", "before the first step (GiB)"
LINE = "largest miss of the line (%)"
WIDER, OVER_FP32 = "speed-up over one (×)", "speed-up over fp32 (×)"
BEFORE, AFTER, CHANGE = "before (ms)", "after (ms)", "change (ms)"
FLOOR = "at the measured rates (ms)"


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
    for family in find_families(rows["result"].tolist(), ()):
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
    return rows.assign(record_id=[_find_median_run(result, view) for result in rows["result"]])


def _find_median_run(result: Result, view: View) -> str:
    """Return the record of a case's repeat whose epoch time is the median of those with steps."""
    stored = {*view.steps(result.sweep)["record_id"]}
    same = (run for run in result.every if run.timed and run.status == result.status)
    timed = sorted(
        (run for run in same if run.record_id in stored), key=lambda run: run.epoch_time_s
    )
    return str(timed[(len(timed) - 1) // 2].record_id if timed else result.record_id)


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


def describe(data: pd.DataFrame, value: str) -> str:
    """Say in words what a panel shows: its extremes per precision, or each change."""
    if "change" in data:
        return "; ".join(f"{row.change} {write_number(row.ratio)}×" for row in iterate(data))
    if "part" in data:
        parts = data.dropna(subset=value).sort_values(value, key=abs, ascending=False).head(4)
        return "; ".join(f"{row.part} {row[value]:+.4g} ms" for _, row in parts.iterrows())
    if "outcome" in data:
        data = data[data["outcome"] != PREDICTED]
    order = [name for name in PRECISIONS if (data["precision"] == name).any()]
    ends = data.groupby("precision")[value].agg(["min", "max"]).loc[order].map(write_number)
    said = [f"{name} from {low} to {high}" for name, low, high in ends.itertuples()]
    return f"{value}: {'; '.join(said)}"
