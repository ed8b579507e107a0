"""The data of each figure: a tidy frame, in the units that its columns name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.case import FOLLOWS
from bench.diagnosis.sentences import name_part
from bench.precision import PRECISIONS
from bench.questions.batch_sizes import (
    Shape,
    find_bounds,
    find_cliffs,
    find_families,
    find_knee,
    fit_growth,
    list_speeds,
    write_drop,
)
from bench.questions.effects import Effect
from bench.questions.lines import Line, find_taxes
from bench.record import REFUSED, RELIABLE
from bench.render.cells import TIMED, iterate
from bench.report.document import Report
from bench.report.figures.groups import Group, Steps, name_setting
from bench.study.axes import MACHINE, keep_main, name_axis, name_value, order_values, sort_cases
from bench.study.quantities import QUANTITIES, Quantity
from bench.study.summaries import latest
from bench.text import ESTIMATE, GIB, parse_bytes, write_number

if TYPE_CHECKING:
    import pandas as pd

    from bench.diagnosis.explanation import Explanation

MOST_POINTS = 300
"""Points of one panel."""

MOST_PAIRS = 16
"""Pairs of a switch in one panel; of more, some are shown, evenly spread over the ratios."""

MOST_CHANGES = 40
"""Changes of one panel."""

MOST_CHARACTERS = 54
"""Of a row's name: more would run into the number at its end."""

START = "before the first step (GiB)"
CARD = "card (GiB)"
LIMIT = "memory limit (GiB)"
MARK, KNEE = "mark", "knee"
FITS, FULL, PREDICTED = "fits", "out of memory", "predicted"
LINE = "largest miss of the line (%)"
LR, SERIES = "learning rate", "series"
FLOOR = "at the measured rates (ms)"
SPEED, PRODUCT, COPY = "TFLOP/s", "large product (TFLOP/s)", "large copy (GB/s)"

GPUS, WIDER, OVER_FP32 = "GPUs", "speed-up over one (×)", "speed-up over fp32 (×)"

MOST_PARTS = 9
"""Parts of a step with a row of their own; those that changed least are summed."""

LEAST_SHARE = 0.01
"""Share of a step below which what a kind of work takes, or its change, is not drawn by itself."""

MOST_SERIES = 8
"""Learning rates of one panel."""

MOST_CURVES = 60
"""Learning rates that are looked at for them."""

LEARNING = ("optimizer", "lr", "lr_scaling", "base_batch", "lr_warmup", "schedule", "epochs")
"""Axes that a learning rate follows from; the batch size too, where it is scaled by that."""


TIME = QUANTITIES["epoch_time_s"].title
MEMORY = QUANTITIES["memory_bytes"].title


def frame(columns: dict[str, Any]) -> pd.DataFrame:
    """A frame of columns, numbered from 0."""
    import pandas as pd

    return pd.DataFrame(columns).reset_index(drop=True)


# ------------------------------------------------------------------------------ of one group each


def by_batch(quantity: Quantity) -> Callable[[Group], pd.DataFrame]:
    """Take one quantity by batch size and precision, each at its main loss scale."""

    def take(group: Group) -> pd.DataFrame:
        rows = keep_main(group.cases)
        rows = rows[rows[quantity.name].notna()].sort_values("batch_size")
        return frame(
            {
                "batch size": rows["batch_size"],
                "precision": rows["precision"],
                quantity.title: rows[quantity.name] / quantity.scale,
            }
        )

    return take


def take_speeds(group: Group) -> pd.DataFrame:
    """Images/s by batch size; ``mark`` says where a knee is, and how far a cliff falls."""
    data = by_batch(QUANTITIES["images_per_s"])(group)
    rows = keep_main(group.cases)
    data[MARK] = ""
    for precision, part in rows[rows["status"].isin(RELIABLE)].groupby("precision"):
        speeds = list_speeds(list(iterate(part)))
        knee = find_knee(speeds)
        found = [(cliff.after.batch_size, write_drop(cliff)) for cliff in find_cliffs(speeds)]
        if knee and knee.shape is Shape.KNEE and knee.ends is None:
            found.append((knee.batch_size, f"{KNEE} {knee.batch_size}"))
        for size, mark in found:
            data.loc[(data["precision"] == precision) & (data["batch size"] == size), MARK] = mark
    return data if (data[MARK] != "").any() else data.drop(columns=MARK)


def take_memory(group: Group) -> pd.DataFrame:
    """Memory by batch size; what ran out of memory stands at the card's size, or at the limit.

    `START` is what the process took before the first step, the median of the cases: no batch size
    changes it. Where memory is a line, it goes on to batch sizes that are `PREDICTED`.
    """
    import pandas as pd

    rows = keep_main(group.cases)
    data = by_batch(QUANTITIES["memory_bytes"])(group).assign(outcome=FITS)
    if not len(data):
        return data
    limit, card = rows["memory_limit"].iloc[0], rows["gpu_memory_bytes"].dropna()
    level = LIMIT if limit else CARD
    ahead = _predict_memory(rows)
    if limit or (len(card) and (rows["device"] == "cuda").all()):
        data[level] = (parse_bytes(limit) if limit else float(card.iloc[0])) / GIB
        full = rows[rows["status"].isin(REFUSED)]
        lost = frame({"batch size": full["batch_size"], "precision": full["precision"]})
        lost[MEMORY] = lost[level] = data[level].iloc[0]
        lost["outcome"] = FULL
        data = pd.concat([data, lost], ignore_index=True)
    data = pd.concat([data, *ahead], ignore_index=True)
    start = rows["setup_process_bytes"].astype(float).median()
    of_process = rows["memory_measure"].isin(["peak_device_bytes", "peak_process_bytes"])
    if start > 0 and of_process.all():  # tensors alone do not hold the process
        data[START] = start / GIB
    return data


def _predict_memory(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Where each precision's line goes beyond the batch sizes that ran, up to its end."""
    for family in find_families(rows, rows.head(0)):
        growth = fit_growth(family)
        if growth is None:
            continue
        fails = find_bounds(family).fails or math.inf
        ends = growth.largest if growth.largest and not growth.more else 0
        near = [ends] if growth.sizes[-1] < ends < fails else []
        sizes = sorted({*near, *growth.predicted})
        if sizes:
            bytes = [growth.line.predict(size) for size in sizes]
            ahead = frame({"batch size": sizes, "precision": family.first.precision})
            ahead[MEMORY], ahead[LINE] = [b / GIB for b in bytes], 100 * growth.miss
            yield ahead.assign(outcome=PREDICTED)


def take_scales(group: Group) -> pd.DataFrame:
    """Loss of whole epochs by static scale, at the largest batch size with several."""
    import pandas as pd

    rows = group.cases[group.cases["train_loss"].notna() & (group.cases["part"] == 1)]
    rows = rows.assign(scale=pd.to_numeric(rows["loss_scale"], errors="coerce"))
    rows = rows[rows["scale"].notna()]  # neither dynamic nor none
    if not len(rows):
        return rows.head(0)
    kept = []
    for _, part in rows.groupby("precision", sort=False):
        for name in FOLLOWS["precision"]:
            if name != "loss_scale":
                part = part[part[name] == order_values(name, part[name])[0]]
        scales = part.groupby("batch_size")["scale"].nunique()
        several = scales[scales > 1]
        if len(several):
            kept.append(part[part["batch_size"] == several.index.max()])
    rows = pd.concat(kept) if kept else rows.head(0)
    data = frame(
        {
            "loss scale": rows["scale"],
            "precision": rows["precision"],
            "batch size": rows["batch_size"],
            "loss": rows["train_loss"],
        }
    )
    return data.sort_values(["precision", "loss scale"]).reset_index(drop=True)


def take_trade(group: Group) -> pd.DataFrame:
    """Time against memory of all settings; ``front``: the cases that no other beats in both."""
    rows = group.all[group.all[["epoch_time_s", "memory_bytes"]].notna().all(axis=1)]
    rows = rows.sort_values(["epoch_time_s", "memory_bytes"])
    spots = rows[["epoch_time_s", "memory_bytes"]].drop_duplicates()
    spots = spots[spots["memory_bytes"] < spots["memory_bytes"].cummin().shift(fill_value=math.inf)]
    pairs = set(zip(spots["epoch_time_s"], spots["memory_bytes"], strict=True))
    front = [pair in pairs for pair in zip(rows["epoch_time_s"], rows["memory_bytes"], strict=True)]
    data = frame(
        {
            TIME: rows["epoch_time_s"],
            MEMORY: rows["memory_bytes"] / GIB,
            "precision": rows["precision"],
            "batch size": rows["batch_size"],
            "loss scale": rows["loss_scale"],
            "setting": [_name_difference(row, group.settings) for row in iterate(rows)],
        }
    )
    data["front"] = ["yes" if best else "no" for best in front]
    if len(data) < 2:
        return data.head(0)
    return data if len(data) <= MOST_POINTS else thin(data, keep=data["front"] == "yes")


def _name_difference(row: Any, baseline: dict[str, Any]) -> str:
    """What a case has other than its panel's baseline: ``lr 0.1, channels last``."""
    differing = {
        axis: value for axis, usual in baseline.items() if (value := getattr(row, axis)) != usual
    }
    return ", ".join(_name_switch(axis, value) for axis, value in differing.items())


def _name_switch(axis: str, value: Any) -> str:
    if isinstance(value, bool):
        return name_axis(axis) if value else f"no {name_axis(axis)}"
    return name_setting(axis, value)


def thin(data: pd.DataFrame, keep: pd.Series | None = None) -> pd.DataFrame:
    """About `MOST_POINTS` of the rows, evenly spread, and those to ``keep``."""
    chosen = data.index % math.ceil(len(data) / MOST_POINTS) == 0
    return data[chosen if keep is None else chosen | keep].reset_index(drop=True)


# ------------------------------------------------------------------------------ the steps of runs


def _curve_cases(group: Group, report: Report, steps: Steps) -> pd.DataFrame:
    """One measured run of each precision, all at the batch size that most precisions have.

    Of a case's repeats, it is the one whose epoch time is the median, or the faster of the middle
    two: it is the run that the tables tell of.
    """
    rows = keep_main(group.cases)
    rows = rows[rows["status"].isin(TIMED)]
    if not len(rows):
        return rows
    held = rows.groupby("batch_size")["precision"].nunique()
    rows = rows[rows["batch_size"] == held.idxmax()].drop_duplicates("precision")
    runs = latest(report.records)
    return rows.assign(record_id=[_find_median_run(row, runs, steps) for row in iterate(rows)])


def _find_median_run(case: Any, runs: pd.DataFrame, steps: Steps) -> str:
    """The record of the repeat of a case whose epoch time is the median of those with steps."""
    first = (runs["sweep"] == case.sweep) & (runs["record_id"] == case.record_id)
    if not first.any():
        return str(case.record_id)
    cell = runs.loc[first, "cell"].iloc[0]
    same = runs[(runs["cell"] == cell) & (runs["status"] == case.status)]
    stored = same["record_id"].isin(steps(str(case.sweep))["record_id"].unique())
    timed = same[same["epoch_time_s"].notna() & stored].sort_values("epoch_time_s", kind="stable")
    return str(timed["record_id"].iloc[(len(timed) - 1) // 2] if len(timed) else case.record_id)


def _steps_of(rows: pd.DataFrame, steps: Steps) -> Iterator[tuple[Any, pd.DataFrame]]:
    for row in iterate(rows):
        every = steps(str(row.sweep))
        mine = every[every["record_id"] == row.record_id]
        if len(mine):
            yield row, mine


def thin_steps(steps: pd.DataFrame, images: float, ends: Sequence[float]) -> pd.DataFrame:
    """Steps as means over images, by share of an epoch of ``images``; several epochs pass 100 %.

    Args:
        ends: how many images were seen where a mean ends, rising; what follows the last is one
            more.
    """
    import numpy as np

    steps = steps[steps["images"] > 0]
    seen = steps["images"].cumsum()
    bin = np.searchsorted(ends, seen)
    weighted = (steps["loss"] * steps["images"]).groupby(bin).sum(min_count=1)
    total = steps["images"].where(steps["loss"].notna()).groupby(bin).sum()
    hits, all = steps["correct"].groupby(bin).sum(), steps["images"].groupby(bin).sum()
    return frame(
        {
            "epoch (%)": 100 * seen.groupby(bin).max() / images,
            "loss": weighted / total.where(total > 0),
            "accuracy (%)": 100 * hits / all,
        }
    )


CURVE_POINTS = 40
"""Of an epoch of a curve that has no published one beside it."""


def take_curves(group: Group, report: Report, steps: Steps) -> pd.DataFrame:
    """Loss and accuracy through the epoch per precision, and the published curves that match.

    Beside a published curve, which has a mean for each fifty steps, all are means over its images.
    """
    import numpy as np
    import pandas as pd

    rows = _curve_cases(group, report, steps)
    ours, theirs = [*_steps_of(rows, steps)], []
    if ours and report.reference is not None and (rows["kind"] != "published").any():
        match = ["model", "dataset", "precision", "batch_size", "loss_scale"]
        there = report.reference.records.merge(rows[match], on=match)
        theirs = [*_steps_of(there.assign(sweep=""), steps)]
    ends = theirs[0][1]["images"].cumsum().tolist() if theirs else None
    curves = []
    for run, found in (("this sweep", ours), ("2019", theirs)):
        for row, mine in found:
            every = mine["images"].sum()
            evenly = np.linspace(0, every, CURVE_POINTS * int(row.epochs) + 1)[1:].tolist()
            images = row.train_images if row.train_images > 0 else every
            curve = thin_steps(mine, images, evenly if ends is None else ends)
            named = {"precision": row.precision, "run": run, "batch size": row.batch_size}
            curves.append(curve.assign(**named))
    return pd.concat(curves, ignore_index=True) if curves else pd.DataFrame()


def take_whole_curves(group: Group, report: Report, steps: Steps) -> pd.DataFrame:
    """The curves of `take_curves` that go through whole epochs."""
    whole = group.cases[group.cases["part"] == 1]
    return take_curves(replace(group, cases=whole), report, steps) if len(whole) else whole


def take_steps(group: Group, report: Report, steps: Steps) -> pd.DataFrame:
    """Step times per precision, at the batch size of the curves."""
    import pandas as pd

    parts = []
    for row, mine in _steps_of(_curve_cases(group, report, steps), steps):
        times = 1e3 * mine["time_s"].dropna()
        if len(times) >= 5:
            part = frame({"step time (ms)": times})
            part = part if len(part) <= MOST_POINTS else thin(part)
            parts.append(part.assign(precision=row.precision, **{"batch size": row.batch_size}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def take_rates(group: Group, report: Report, steps: Steps) -> tuple[pd.DataFrame, str]:
    """The learning rate of each step, a series for each way in which it goes, and its heading.

    Empty where it is the same in every step of every case. The heading names the axes whose values
    name the series, and how many of all are shown. Of series that look alike, the first is shown.
    """
    import pandas as pd

    rows = group.all[group.all["status"].isin(TIMED)]
    axes = [axis for axis in LEARNING if rows[axis].nunique() > 1]
    if (rows["lr_scaling"] != "none").any() and rows["batch_size"].nunique() > 1:
        axes.append("batch_size")
    order = [*axes, "precision"]
    rows = sort_cases(rows, order).drop_duplicates(axes) if axes else rows.head(1)
    curves: list[tuple[Any, pd.DataFrame]] = []
    for row, mine in _steps_of(rows.head(MOST_CURVES), steps):
        mine = mine[mine["lr"].notna()]
        images = row.train_images if row.train_images > 0 else mine["images"].sum()
        part = frame({"epoch (%)": 100 * mine["images"].cumsum() / images, LR: mine["lr"]})
        if len(part) and not any(_look_alike(part, other) for _, other in curves):
            curves.append((row, part))
    parts = []
    for row, part in _spread_out(curves, axes):
        if len(part) > MOST_POINTS:
            told = part.index.isin([part.index[-1], part[LR].idxmax(), part[LR].idxmin()])
            part = thin(part, keep=pd.Series(told, part.index))
        parts.append(part.assign(**{SERIES: _name_series(row, axes)}))
    data = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    heading = " · ".join(name_axis(axis) for axis in axes)
    left = f", {MOST_SERIES} of {len(curves)} curves" if len(curves) > MOST_SERIES else ""
    return (data if len(data) and data[LR].nunique() > 1 else data.head(0)), heading + left


def _look_alike(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Whether two learning rates go alike: nowhere more than 1 % of the highest apart."""
    import numpy as np

    ends = [float(part["epoch (%)"].iloc[-1]) for part in (a, b)]
    if not math.isclose(*ends, rel_tol=0.01):
        return False
    places = np.linspace(0, min(ends), 200)
    of_a, of_b = (np.interp(places, part["epoch (%)"], part[LR]) for part in (a, b))
    return bool((abs(of_a - of_b) <= 0.01 * max(of_a.max(), of_b.max())).all())


def _spread_out(
    curves: Sequence[tuple[Any, pd.DataFrame]], axes: Sequence[str]
) -> list[tuple[Any, pd.DataFrame]]:
    """At most `MOST_SERIES`: every value of the other axes before a second batch size."""
    left, chosen = list(curves), list(curves[:0])
    seen: set[tuple[str, Any]] = set()
    others = [axis for axis in axes if axis != "batch_size"]
    while left and len(chosen) < MOST_SERIES:
        best = max(left, key=lambda c: sum((axis, getattr(c[0], axis)) not in seen
                                           for axis in others))  # fmt: skip
        seen |= {(axis, getattr(best[0], axis)) for axis in others}
        chosen.append(best)
        left = [curve for curve in left if curve is not best]
    return chosen


def _name_series(row: Any, axes: Sequence[str]) -> str:
    return " · ".join(name_value(axis, getattr(row, axis), {}) for axis in axes) or "every case"


# ------------------------------------------------------------------------------------ of one step


def take_waterfall(why: Explanation) -> pd.DataFrame:
    """The way from one step time to another: a row a part, between the two steps.

    `FLOOR` is what the part after would take at the machine's measured rates.
    """
    import pandas as pd

    parts = why.b.breakdown.parts if why.ceiling else ()
    floors = {part.name: 1e3 * part.floor_s for part in parts if part.floor_s is not None}
    lines: list[tuple[str, float, float, float, float]] = [
        (why.a.name, 1e3 * why.a.step.step_s, math.nan, math.nan, math.nan)
    ]
    least = LEAST_SHARE * max(why.a.step.step_s, why.b.step.step_s)
    large = [change for change in why.changes if abs(change.change_s) >= least]
    shown = sorted(large, key=lambda change: -abs(change.change_s))[:MOST_PARTS]
    for change in shown:
        before, after = 1e3 * change.before_s, 1e3 * change.after_s
        floor = floors.get(change.name, math.nan)
        part = f"{ESTIMATE * change.estimated}{name_part(change.name)}"
        lines.append((part, before, after, after - before, floor))
    rest = [change for change in why.changes if change not in shown]
    if rest:
        before, after = (1e3 * sum(getattr(change, name) for change in rest)
                         for name in ("before_s", "after_s"))  # fmt: skip
        mark = ESTIMATE * any(change.estimated for change in rest)
        lines.append((f"{mark}all others", before, after, after - before, math.nan))
    lines.append((why.b.name, math.nan, 1e3 * why.b.step.step_s, math.nan, math.nan))
    names = ["part", "before (ms)", "after (ms)", "change (ms)", FLOOR]
    return pd.DataFrame(lines, columns=names)


def take_roofline(why: Explanation) -> pd.DataFrame:
    """The kinds of work of two steps: what each computes and moves a second, and the two limits.

    Empty where the machine's rates are not known. Kinds that take less than `LEAST_SHARE` of both
    steps are left out.
    """
    import pandas as pd

    lines = []
    large = {
        part.name
        for side in (why.a, why.b)
        for part in side.breakdown.parts
        if part.time_s >= LEAST_SHARE * side.step.step_s
    }
    estimates = why.a.breakdown.estimates | why.b.breakdown.estimates
    for side in (why.a, why.b):
        rates, product = side.step.rates, side.step.rates.products.get(side.format)
        if product is None or rates.copy is None:
            return pd.DataFrame()
        for part in side.breakdown.parts:
            if part.name in large and part.bytes > 0 and part.counted_s > 0:
                speed, traffic = part.flop / part.counted_s, part.bytes / part.counted_s
                peak = side.step.peaks.products.get(side.format, math.inf)
                if speed > peak or traffic > (side.step.peaks.copy or math.inf):
                    continue  # above the data sheet: wrong, or of a cache
                lines.append(
                    {
                        "work": f"{ESTIMATE * (part.name in estimates)}{name_part(part.name)}",
                        "precision": side.case.precision,
                        "FLOP/byte": part.flop / part.bytes or math.nan,
                        SPEED: speed / 1e12 or math.nan,
                        "GB/s": traffic / 1e9,
                        "of the step (%)": 100 * part.time_s / side.step.step_s,
                        PRODUCT: product / 1e12,
                        COPY: rates.copy / 1e9,
                    }
                )
    return pd.DataFrame(lines)


# --------------------------------------------------------------------------------- of several GPUs


def take_scaling(lines: Sequence[Line]) -> pd.DataFrame:
    """The speed-up over one GPU by their number and precision; lines without one are left out."""
    import pandas as pd

    return pd.DataFrame(
        {GPUS: point.gpus, "precision": point.row.precision, WIDER: speedup}
        for line in lines
        if line.base
        for point, speedup in ((p, 1.0 if p is line.base else p.speedup) for p in line.all)
        if math.isfinite(speedup) and (point is line.base or point.gpus > 1)
    )


def take_tax(lines: Sequence[Line]) -> pd.DataFrame:
    """The speed-up over fp32 by the number of GPUs and precision."""
    import pandas as pd

    return pd.DataFrame(
        {GPUS: gpus, "precision": tax.line.points[0].row.precision, OVER_FP32: speedup}
        for tax in find_taxes(lines)
        for gpus, speedup in tax.speedups.items()
    )


# -------------------------------------------------------------------------------------- of changes


def take_changes(report: Report, metric: str, inverse: bool = False) -> pd.DataFrame:
    """What each change does to one metric, as a ratio; ``inverse`` of times, to be a speed.

    ``lowest`` and ``highest`` are over the pairs; ``low`` and ``high`` the 95 % interval of their
    mean, empty where there are too few repeats.
    """
    import pandas as pd

    power = -1 if inverse else 1
    lines: list[dict[str, Any]] = []
    for effect in report.effects:
        estimate = effect.estimates.get(metric)
        if estimate is None or not estimate.ratio.value or len(lines) == MOST_CHANGES:
            continue
        ratio = estimate.ratio
        ends = [math.nan if end is None else end for end in (ratio.low, ratio.high)]
        low, high = sorted(end**power for end in ends)
        lowest, highest = sorted(end**power for end in (estimate.lowest, estimate.highest))
        lines.append(
            {
                "change": name_change(effect), "ratio": estimate.ratio.value**power, "low": low,
                "high": high, "lowest": lowest, "highest": highest, "pairs": estimate.pairs,
            }
        )  # fmt: skip
    return pd.DataFrame(lines)


def name_change(effect: Effect) -> str:
    """A change for people: ``precision: fp32 → bf16``; with its settings, if they are its own."""
    before, after = (_shorten(value) for value in (effect.before, effect.after))
    where = f" ({effect.over})" if effect.apart else ""
    return _shorten(f"{name_axis(effect.axis)}: {before} → {after}{where}", MOST_CHARACTERS)


def _shorten(name: str, most: int = 20) -> str:
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def take_switch(report: Report, effect: Effect) -> tuple[pd.DataFrame, int]:
    """The epoch times of pairs of cases with a switch off and on, and how many pairs there are.

    The frame has a row a pair, the largest speed-up first; of more than `MOST_PAIRS`, it has some.
    """
    cases = report.cases.set_index("cell", drop=False)
    off, on = (cases.loc[[pair[side] for pair in effect.pairs]] for side in (0, 1))
    told = [name for name in report.axes if name != effect.axis]
    data = frame(
        {
            "case": [_name_case(row, told, report) for row in iterate(off)],
            "precision": off["precision"].to_numpy(),
            "off (s)": off["epoch_time_s"].to_numpy(),
            "on (s)": on["epoch_time_s"].to_numpy(),
        }
    )
    data = data.assign(**{"speed (×)": data["off (s)"] / data["on (s)"]}).dropna()
    data = data.sort_values("speed (×)", ascending=False, kind="stable").reset_index(drop=True)
    if len(data) <= MOST_PAIRS:
        return data, len(data)
    step = (len(data) - 1) / (MOST_PAIRS - 1)
    some = data.loc[[round(i * step) for i in range(MOST_PAIRS)]]
    return some.reset_index(drop=True), len(data)


def _name_case(row: Any, told: Sequence[str], report: Report) -> str:
    """A case by some axes, the machine last: ``dpn26 · bf16 · batch 128 · H200``."""
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
    return _shorten(" · ".join(names) or str(row.precision), MOST_CHARACTERS)


def describe(data: pd.DataFrame, value: str) -> str:
    """Say in words what a panel shows: its extremes per precision, or each change."""
    write = write_number
    if "change" in data:
        return "; ".join(f"{row.change} {write(row.ratio)}×" for row in iterate(data))
    if "part" in data:
        parts = data.dropna(subset=value).sort_values(value, key=abs, ascending=False).head(4)
        return "; ".join(f"{row.part} {row[value]:+.4g} ms" for _, row in parts.iterrows())
    if "work" in data:
        return f"{value} of {', '.join(dict.fromkeys(data['work']))}"
    said = []
    if "outcome" in data:
        data = data[data["outcome"] != PREDICTED]
    by = SERIES if SERIES in data else "precision"
    order = [name for name in PRECISIONS if (data[by] == name).any()] or list(data[by].unique())
    for name in order:
        part = data.loc[data[by] == name, value]
        said.append(f"{name} from {write(part.min())} to {write(part.max())}")
    return f"{value}: {'; '.join(said)}"
