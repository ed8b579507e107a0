"""The data of each figure: a tidy frame a panel, in the units that its columns name.

A panel has the settings of one machine, network and data. A line in it is settings of one precision
that differ in nothing but the batch size: all other axes are at the panel's baseline, the values
that most of its settings have, or the defaults if several are equally common. The first column of a
figure by batch size, by number of GPUs or through an epoch is its x axis.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from bench.case import AXES, FOLLOWS, SAME_QUESTION, Case
from bench.origin import LABELS
from bench.precision import PRECISIONS
from bench.questions import batch_sizes
from bench.questions.gpus import Line, name_line
from bench.questions.settings import list_settings
from bench.record import MEASURED, REFUSED, RELIABLE, Status
from bench.report.document import Report
from bench.study.axes import find_varying, list_main, name_axis, name_value
from bench.study.quantities import QUANTITIES, is_number
from bench.study.results import Result
from bench.study.runs import SOURCE, group
from bench.study.sweeps import MOST_STEP_BYTES
from bench.text import GIB, parse_bytes, write_number

MOST_PANELS = 6  # of one figure: the machines, networks and data with the most settings
MOST_LINES = 6  # panels of a figure: the first lines that differ in more than their precision
MOST_POINTS = 300  # of a panel
CURVE_POINTS = 40  # of an epoch of a curve without a published one beside it

BATCH, EPOCH, GPUS = "batch size", "epoch (%)", "GPUs"
TIME, MEMORY = QUANTITIES["epoch_time_s"].title, QUANTITIES["memory_bytes"].title
SPEED, LOSS, WIDER = "images/s", "loss", "speed-up over one (×)"
LOW, HIGH = "from", "to"
MARK, KNEE = "mark", "knee"
FITS, FULL, PREDICTED = "fits", "out of memory", "predicted"
CARD, LIMIT, START = "card (GiB)", "memory limit (GiB)", "before the first step (GiB)"
LINE = "largest miss of the line (%)"

PANEL = (*SOURCE, "model", "dataset", "kind", "environment")  # what those of one panel agree on
_FREE = (*PANEL, "device", "precision", *FOLLOWS["precision"], "batch_size", *SAME_QUESTION)
HELD = tuple(name for name in AXES if name not in _FREE)
"""The axes that are held at a panel's baseline."""

Parts = Iterator[tuple[str, pd.DataFrame]]
"""The title of each panel, and its data; a panel without data is not drawn."""


@dataclass(frozen=True)
class Group:
    """The settings of one panel, each as the case of best evidence."""

    place: str  # machine, network and data, as far as the panels differ in them
    baseline: str  # its values of the axes that vary, as far as panels differ in them
    cases: list[Result]  # at the baseline
    all: list[Result]  # at any value of `HELD`
    settings: dict[str, Any]  # the value at the baseline of each axis of `HELD` that varies

    @cached_property
    def main(self) -> list[Result]:
        """The cases at the baseline, each precision at its main loss scale."""
        return [self.cases[at] for at in list_main(self.cases, [0] * len(self.cases))]


@dataclass(frozen=True)
class View:
    """A report, cut into panels once for all figures."""

    report: Report
    steps: Callable[[str], pd.DataFrame]  # of a sweep, by its name; empty for the published one
    groups: tuple[Group, ...] = ()  # those with the most settings, in the order of the overview
    place: str = ""  # the machine, network and data that all share
    baseline: str = ""  # the values that all share of the axes that vary


def view_report(report: Report) -> View:
    sweeps = {sweep.name: sweep for sweep in report.sweeps}
    if report.reference:
        sweeps[""] = report.reference
    steps = cache(lambda name: sweeps[name].read_steps(MOST_STEP_BYTES))
    valid = [one for one in report.results if one.status != Status.INVALID]
    parts = group((one.best for one in list_settings(valid)), attrgetter(*PANEL))
    if not parts:
        return View(report, steps)
    kept = sorted(parts, key=len, reverse=True)[:MOST_PANELS]
    parts = [part for part in parts if any(part is other for other in kept)]
    varying = [name for name in find_varying(valid) if name in HELD]
    bases = [_keep_baseline(part) for part in parts]
    settings = [{name: getattr(base[0], name) for name in varying} for base in bases]
    places, place = _share([_describe(base, report) for base in bases])
    told = [[_name_setting(*item) for item in held.items()] for held in settings]
    titles, baseline = _share(told)
    groups = map(Group, places, titles, bases, parts, settings)
    return View(report, steps, tuple(groups), place, baseline)


def _share(phrases: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    """Return for each list of phrases what not all lists have, and then what all have."""
    shared = [text for text in phrases[0] if all(text in other for other in phrases)]
    own = [" · ".join(text for text in phrase if text not in shared) for phrase in phrases]
    return own, ", ".join(shared)


def _keep_baseline(cases: Sequence[Result]) -> list[Result]:
    """Return the cases at the most common values of `HELD`, or at the defaults if several are as
    common. Values timed at several batch sizes come first, then those without accumulation and
    memory limit."""

    def judge(part: Sequence[Result]) -> tuple[int, int, int, int]:
        first, timed = part[0], [one for one in part if one.status in MEASURED]
        plain = 2 * (first.accumulate == 1) + (first.memory_limit == "")
        defaults = sum(getattr(first, name) == getattr(Case, name) for name in HELD)
        return min(len({one.batch_size for one in timed}), 2), plain, len(timed), defaults

    return max(group(cases, attrgetter(*HELD)), key=judge)


def _name_setting(axis: str, value: Any) -> str:
    return f"{name_axis(axis)} {name_value(axis, value, {})}"


def _describe(cases: Sequence[Result], report: Report) -> list[str]:
    """Describe where a panel's cases ran and what they are, as phrases."""
    first, results = cases[0], report.results
    several = [n for n in ("model", "dataset") if len({getattr(r, n) for r in results}) > 1]
    parts = {one.extrapolated for one in cases}
    facts = {
        first.apart: bool(first.apart),
        LABELS["unknown"]: all(one.kind == "unknown" for one in cases),
        "synthetic images": any(one.synthetic for one in cases),
        "extrapolated from part of an epoch": parts == {True},
        "some extrapolated from part of an epoch": len(parts) > 1,
    }
    named = [report.machines[first.sweep, first.machine], *(getattr(first, n) for n in several)]
    return named + [fact for fact, holds in facts.items() if holds]


def thin(data: pd.DataFrame, keep: pd.Series | None = None) -> pd.DataFrame:
    """Return about `MOST_POINTS` rows if there are more, evenly spread, and those to ``keep``."""
    if len(data) <= MOST_POINTS:
        return data
    chosen = data.index % math.ceil(len(data) / MOST_POINTS) == 0
    return data[chosen if keep is None else chosen | keep].reset_index(drop=True)


def _frame(rows: Sequence[Result], **columns: Sequence[Any]) -> pd.DataFrame:
    named = {BATCH: [r.batch_size for r in rows], "precision": [r.precision for r in rows]}
    return pd.DataFrame({**named, **columns})


def _join(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def take_speeds(group: Group, view: View) -> pd.DataFrame:
    """Return images/s by batch size, with their range if one is known; `MARK` says where a knee is,
    and how far a cliff falls."""
    rows = [row for row in group.main if is_number(row.images_per_s)]
    rows.sort(key=lambda row: row.batch_size)
    data = _frame(rows, **{SPEED: [row.images_per_s for row in rows], MARK: ""})
    if any(is_number(row.images_per_s_low) for row in rows):
        data[LOW], data[HIGH] = ([getattr(row, f"images_per_s_{end}") for row in rows]
                                 for end in ("low", "high"))  # fmt: skip
    for precision in {row.precision for row in rows}:
        ended = [r for r in rows if r.precision == precision and r.status in RELIABLE]
        speeds = batch_sizes.list_speeds(ended)
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
    rows = group.main
    fits = [row for row in rows if is_number(row.memory_bytes)]
    data = _frame(fits, **{MEMORY: [row.memory_bytes / GIB for row in fits]}).assign(outcome=FITS)
    if not len(data):
        return data
    parts = [data, *_predict_memory(rows)]
    limit = rows[0].memory_limit
    card = next((r.gpu_memory_bytes for r in rows if is_number(r.gpu_memory_bytes)), None)
    if limit or (card and all(row.device != "cpu" for row in rows)):
        level = LIMIT if limit else CARD
        data[level] = (parse_bytes(limit) if limit else float(card or 0)) / GIB
        lost = _frame([row for row in rows if row.status in REFUSED])
        lost[MEMORY] = lost[level] = data[level].iloc[0]
        parts.insert(1, lost.assign(outcome=FULL))
    data = _join(parts)
    starts = [row.setup_process_bytes for row in rows if is_number(row.setup_process_bytes)]
    of_process = ("peak_device_bytes", "peak_process_bytes")
    if starts and all(row.memory_measure in of_process for row in rows):
        data[START] = median(starts) / GIB
    return data


def _predict_memory(rows: Sequence[Result]) -> Iterator[pd.DataFrame]:
    """Yield each precision's line beyond the batch sizes that ran, up to its end."""
    for family in batch_sizes.find_families(rows, ()):
        growth = batch_sizes.fit_growth(family)
        if growth is None:
            continue
        fails = family.bounds.fails or math.inf
        ends = growth.largest if growth.largest and not growth.more else 0
        near = [ends] if growth.sizes[-1] < ends < fails else []
        if sizes := sorted({*near, *growth.predicted}):
            ahead = pd.DataFrame({BATCH: sizes, "precision": family.first.precision})
            ahead[MEMORY] = [growth.line.predict(size) / GIB for size in sizes]
            yield ahead.assign(outcome=PREDICTED, **{LINE: [100 * growth.miss] * len(sizes)})


def take_trade(view: View) -> Parts:
    """Yield time against memory of all settings; ``front``: cases that no other beats in both."""
    for one in view.groups:
        both = ("epoch_time_s", "memory_bytes")
        rows = [row for row in one.all if all(is_number(getattr(row, name)) for name in both)]
        rows.sort(key=attrgetter(*both))
        least = [*accumulate((row.memory_bytes for row in rows), min)]
        first: dict[float, float] = {}  # the lowest time with that little memory
        for row, memory in zip(rows, least, strict=True):
            first.setdefault(memory, row.epoch_time_s)
        front = [
            "yes" if row.memory_bytes == memory and first[memory] == row.epoch_time_s else "no"
            for row, memory in zip(rows, least, strict=True)
        ]
        usual = one.settings.items()
        settings = [
            ", ".join(_name_switch(axis, getattr(row, axis)) for axis, common in usual
                      if getattr(row, axis) != common)
            for row in rows
        ]  # fmt: skip
        data = pd.DataFrame({
            TIME: [row.epoch_time_s for row in rows],
            MEMORY: [row.memory_bytes / GIB for row in rows],
            "precision": [row.precision for row in rows], BATCH: [row.batch_size for row in rows],
            "loss scale": [row.loss_scale for row in rows], "setting": settings, "front": front,
        })  # fmt: skip
        yield one.place, thin(data, data["front"] == "yes") if len(data) > 1 else data.head(0)


def _name_switch(axis: str, value: Any) -> str:
    """Name a setting that is not the usual one: ``lr 0.1``, ``channels last``."""
    if isinstance(value, bool):
        return name_axis(axis) if value else f"no {name_axis(axis)}"
    return _name_setting(axis, value)


def take_curves(group: Group, view: View) -> pd.DataFrame:
    """Return the loss through the epoch per precision, of one run each at the batch size that most
    precisions have, and the published curves that match. These have a mean per fifty steps; beside
    them, all curves are means over the same images."""
    rows = [row for row in group.main if row.status in MEASURED]
    held = Counter(size for _, size in {(row.precision, row.batch_size) for row in rows})
    size = max(sorted(held), key=held.__getitem__, default=None)
    shown = {row.precision: row for row in reversed(rows) if row.batch_size == size}
    ours, theirs = [], []
    for row in (row for row in rows if shown.get(row.precision) is row):
        if len(mine := _read_steps(_find_median_run(row, view), row.sweep, view)):
            ours.append((row, mine))
        published = view.report.find_published(row)
        if published and len(mine := _read_steps(published.record_id, "", view)):
            theirs.append((published, mine))
    theirs = theirs if ours else []
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


def _find_median_run(result: Result, view: View) -> str:
    """Return the record of a case's repeat whose epoch time is the median of those with steps, or
    the faster of the middle two, as in the tables."""
    stored = {*view.steps(result.sweep)["record_id"]}
    same = (run for run in result.every if run.timed and run.status == result.status)
    timed = sorted(
        (run for run in same if run.record_id in stored), key=lambda run: run.epoch_time_s
    )
    return str(timed[(len(timed) - 1) // 2].record_id if timed else result.record_id)


def _read_steps(record: str, sweep: str, view: View) -> pd.DataFrame:
    every = view.steps(sweep)
    return every[every["record_id"] == record]


def thin_steps(steps: pd.DataFrame, images: float, ends: Sequence[float]) -> pd.DataFrame:
    """Average losses over images, by share of an epoch of ``images``; several epochs pass 100 %. A
    mean ends where as many images were seen as one of the rising ``ends`` says, and at the end."""
    steps = steps[steps["images"] > 0]
    seen = steps["images"].cumsum()
    bin = np.searchsorted(ends, seen)
    weighted = (steps["loss"] * steps["images"]).groupby(bin).sum(min_count=1)
    total = steps["images"].where(steps["loss"].notna()).groupby(bin).sum()
    loss = weighted / total.where(total > 0)
    data = pd.DataFrame({EPOCH: 100 * seen.groupby(bin).max() / images, LOSS: loss})
    return data.reset_index(drop=True)


def take_scaling(view: View) -> Parts:
    """Yield the speed-up over one GPU by number of GPUs and precision, for lines that have one. Of
    a precision with several loss scales, the first is drawn."""
    report = view.report
    axes = [name for name in report.named if name not in FOLLOWS["precision"]]
    parts: dict[tuple[bool, int], dict[str, Line]] = {}
    for line in report.lines:
        part = parts.setdefault((line.strong, line.group), {})
        part.setdefault(line.points[0].row.precision, line)
    for (strong, _), part in [*parts.items()][:MOST_LINES]:
        lines = [*part.values()]
        name = name_line(lines[0], axes, report.machines, but="precision")
        rows = []
        for base, point in ((line.base, point) for line in lines for point in line.all):
            speedup = 1.0 if point is base else point.speedup
            if base and math.isfinite(speedup) and (point is base or point.gpus > 1):
                rows.append((point.gpus, point.row.precision, speedup))
        yield (
            f"{'strong' if strong else 'weak'}: {name}",
            pd.DataFrame(rows, columns=[GPUS, "precision", WIDER]),
        )


def describe(data: pd.DataFrame, value: str) -> str:
    """Say in words what a panel shows: its extremes per precision."""
    if "outcome" in data:
        data = data[data["outcome"] != PREDICTED]
    order = [name for name in PRECISIONS if (data["precision"] == name).any()]
    ends = data.groupby("precision")[value].agg(["min", "max"]).loc[order].map(write_number)
    said = [f"{name} from {low} to {high}" for name, low, high in ends.itertuples()]
    return f"{value}: {'; '.join(said)}"
