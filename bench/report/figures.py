"""The figures of a report: the data of each panel as a tidy frame, and their pictures.

A panel has the settings of one machine, network and data. A line in it is settings of one precision
that differ in nothing but the batch size: all other axes are at the panel's baseline, the values
that most of its settings have, or the defaults if several are equally common. The first column of a
frame is its x axis. Text and series have fixed colours here, which the page replaces by CSS
variables, so that one SVG is readable on light and on dark.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from bench.case import AXES, FOLLOWS, SAME_QUESTION, Case
from bench.origin import LABELS
from bench.precision import PRECISIONS
from bench.questions.gpus import Line, name_line
from bench.questions.settings import list_settings
from bench.record import MEASURED, REFUSED, Status, Step
from bench.render.table import (
    COLOURS,
    GRID,
    INK,
    MARKERS,
    STYLE,
    Cell,
    Head,
    Table,
    count_in,
    find_units,
    number_cell,
)
from bench.report.document import Report
from bench.store.reader import read_beside
from bench.store.rows import group
from bench.study.axes import find_varying, list_main, name_axis, name_value
from bench.study.quantities import QUANTITIES, is_number
from bench.study.runs import SOURCE, Result
from bench.study.sweeps import MOST_STEP_BYTES
from bench.text import GIB, capitalize, clean, parse_bytes, write_number

MOST_PANELS = 6  # of one figure
MOST_POINTS = 300  # of a panel's table
CURVE_POINTS = 40  # of an epoch of a curve
APART = 8  # a larger ratio between panels' largest values gives each a scale of its own

BATCH, EPOCH, GPUS = "batch size", "epoch (%)", "GPUs"
SPEED, LOSS, WIDER = "images/s", "loss", "speed-up over one (×)"
MEMORY = QUANTITIES["memory_bytes"].title
LOW, HIGH = "from", "to"
FITS, FULL = "fits", "out of memory"
CARD, LIMIT = "card (GiB)", "memory limit (GiB)"

PANEL = (*SOURCE, "model", "dataset", "kind", "environment")  # what those of one panel agree on
_FREE = (*PANEL, "device", "precision", *FOLLOWS["precision"], "batch_size", *SAME_QUESTION)
HELD = tuple(name for name in AXES if name not in _FREE)
"""The axes that are held at a panel's baseline."""

Parts = Iterator[tuple[str, pd.DataFrame]]
"""The title of each panel, and its data; a panel without data is not drawn."""


# ----------------------------------------------------------------------------------- their data


def list_groups(report: Report) -> list[tuple[str, list[Result]]]:
    """Return the title and the cases of each panel, each precision at its main loss scale: of the
    machines, networks and data with the most settings, in the order of the overview."""
    valid = [one for one in report.results if one.status != Status.INVALID]
    parts = group((one.best for one in list_settings(valid)), attrgetter(*PANEL))
    kept = sorted(parts, key=len, reverse=True)[:MOST_PANELS]
    varying = [name for name in find_varying(valid) if name in HELD]
    found = []
    for part in (part for part in parts if any(part is one for one in kept)):
        base = max(group(part, attrgetter(*HELD)), key=_judge_baseline)
        held = (f"{name_axis(n)} {name_value(n, getattr(base[0], n), {})}" for n in varying)
        title = " · ".join([*_describe(base, report), *held])
        found.append((title, [base[at] for at in list_main(base, [0] * len(base))]))
    return found


def _judge_baseline(part: Sequence[Result]) -> tuple[int, int, int, int]:
    """Rank values of `HELD`: those timed at several batch sizes, then those without accumulation
    and memory limit, then the most common, then the defaults."""
    first, timed = part[0], [one for one in part if one.status in MEASURED]
    plain = 2 * (first.accumulate == 1) + (first.memory_limit == "")
    defaults = sum(getattr(first, name) == getattr(Case, name) for name in HELD)
    return min(len({one.batch_size for one in timed}), 2), plain, len(timed), defaults


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


def _frame(rows: Sequence[Result], **columns: Sequence[Any]) -> pd.DataFrame:
    named = {BATCH: [r.batch_size for r in rows], "precision": [r.precision for r in rows]}
    return pd.DataFrame({**named, **columns})


def take_speeds(report: Report) -> Parts:
    """Yield images/s by batch size, with their range if one is known."""
    for title, cases in list_groups(report):
        rows = [row for row in cases if is_number(row.images_per_s)]
        rows.sort(key=lambda row: row.batch_size)
        data = _frame(rows, **{SPEED: [row.images_per_s for row in rows]})
        if any(is_number(row.images_per_s_low) for row in rows):
            data[LOW], data[HIGH] = ([getattr(row, f"images_per_s_{end}") for row in rows]
                                     for end in ("low", "high"))  # fmt: skip
        yield title, data if len(data) > 1 else data.head(0)


def take_memory(report: Report) -> Parts:
    """Yield memory by batch size; cases that ran out of memory are at the card's size, or at the
    limit."""
    for title, rows in list_groups(report):
        fits = [row for row in rows if is_number(row.memory_bytes)]
        data = _frame(fits, **{MEMORY: [row.memory_bytes / GIB for row in fits]})
        data = data.assign(outcome=FITS)
        limit = rows[0].memory_limit
        card = next((r.gpu_memory_bytes for r in rows if is_number(r.gpu_memory_bytes)), None)
        if limit or (card and all(row.device != "cpu" for row in rows)):
            level = LIMIT if limit else CARD
            data[level] = most = (parse_bytes(limit) if limit else float(card or 0)) / GIB
            lost = _frame([row for row in rows if row.status in REFUSED]).assign(outcome=FULL)
            lost[MEMORY] = lost[level] = most
            data = pd.concat([data, lost], ignore_index=True) if len(lost) else data
        yield title, data if len(fits) > 1 else data.head(0)


def take_curves(report: Report) -> Parts:
    """Yield the loss through the epoch per precision, of one run each at the batch size that most
    precisions have."""
    sweeps = {sweep.name: sweep for sweep in report.sweeps}
    read = cache(lambda name: read_beside(sweeps[name].path, Step, MOST_STEP_BYTES))

    def take(record: str, sweep: str) -> pd.DataFrame:
        return pd.DataFrame(map(asdict, read(sweep).get(record, ())))

    for title, cases in list_groups(report):
        rows = [row for row in cases if row.status in MEASURED]
        held = Counter(size for _, size in {(row.precision, row.batch_size) for row in rows})
        size = max(sorted(held), key=held.__getitem__, default=None)
        shown = {row.precision: row for row in reversed(rows) if row.batch_size == size}
        curves = [pd.DataFrame()]
        for row in (row for row in rows if shown.get(row.precision) is row):
            mine = take(_find_median_run(row, read(row.sweep)), row.sweep)
            if len(mine):
                seen = mine["images"].sum()
                ends = np.linspace(0, seen, CURVE_POINTS * int(row.epochs) + 1)[1:].tolist()
                images = row.train_images if row.train_images > 0 else seen
                curves.append(thin_steps(mine, images, ends).assign(precision=row.precision))
        yield f"{title} · batch size {size}", pd.concat(curves, ignore_index=True)


def _find_median_run(result: Result, stored: Container[str]) -> str:
    """Return the record of a case's repeat whose epoch time is the median of those with steps, or
    the faster of the middle two, as in the tables."""
    same = (run for run in result.every if run.timed and run.status == result.status)
    timed = sorted(
        (run for run in same if run.record_id in stored), key=lambda run: run.epoch_time_s
    )
    return str(timed[(len(timed) - 1) // 2].record_id if timed else result.record_id)


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


def take_scaling(report: Report) -> Parts:
    """Yield the speed-up over one GPU by number of GPUs and precision, for lines that have one. Of
    a precision with several loss scales, the first is drawn."""
    axes = [name for name in report.named if name not in FOLLOWS["precision"]]
    parts = group(
        (line for line in report.lines if line.points[0].gpus == 1),
        lambda line: name_line(line, axes, report.machines, but="precision"),
    )
    for lines in parts[:MOST_PANELS]:
        held: dict[str, Line] = {}
        for line in lines:
            held.setdefault(line.points[0].row.precision, line)
        rows = [
            (point.gpus, name, 1.0 if point.base is None else point.speedup)
            for name, line in held.items()
            for point in line.points
        ]
        title = name_line(lines[0], axes, report.machines, but="precision")
        yield title, pd.DataFrame(rows, columns=[GPUS, "precision", WIDER])


# ------------------------------------------------------------------------------ how one is drawn

_DASHED: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3))}


def _plot_lines(ax: Axes, data: pd.DataFrame, y: str, **look: Any) -> None:
    """Plot a line per precision over the first column; they differ in more than colour."""
    x = data.columns[0]
    for name in (name for name in PRECISIONS if (data["precision"] == name).any()):
        own = {"color": COLOURS[name][0], "marker": MARKERS[name], "markersize": 7}
        line = data[data["precision"] == name].dropna(subset=[y]).sort_values(x, kind="stable")
        ax.plot(line[x], line[y], label=name, **{"markeredgewidth": 0, **own, **look})
        if HIGH in line:
            ax.vlines(line[x], line[LOW], line[HIGH], colors=COLOURS[name][0], linewidth=1.8)
    ax.set(xlabel=x, ylabel=y)


def _space(ax: Axes, data: pd.DataFrame) -> None:
    """Give the x axis a step for each doubling, and a tick at each value there is room for."""
    run = sorted(data[data.columns[0]].unique())
    ax.set_xscale("log", base=2)
    ax.set_xlim(run[0] / 1.15, run[-1] * 1.15)
    # labels nearer than a third of an octave would overlap
    shown = [t for i, t in enumerate(run) if i == 0 or t / run[i - 1] > 1.25]
    shown = shown[:: math.ceil(len(shown) / 8)]
    ax.set_xticks(shown, [f"{t:g}" for t in shown])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,.10g}")


def _draw_speeds(ax: Axes, data: pd.DataFrame, y: str, most: float) -> None:
    _plot_lines(ax, data, y)
    _space(ax, data)
    ax.set_ylim(0, 1.08 * most)


def _draw_memory(ax: Axes, data: pd.DataFrame, y: str, most: float) -> None:
    _plot_lines(ax, data[data["outcome"] == FITS], y)
    _space(ax, data)
    full = data[data["outcome"] == FULL]
    ax.set_ylim(0, 1.08 * most)
    level = LIMIT if LIMIT in data else CARD
    # a card far above all that was used would flatten the lines
    if level in data and (len(full) or data[y].max() > data[level].max() / 3):
        end = float(data[level].max())
        ax.set_ylim(0, 1.14 * max(most, end))
        ax.axhline(end, **_DASHED)
        ax.text(0.01, end, f"{level.removesuffix(' (GiB)')}: {end:.4g} GiB", va="bottom",
                fontsize=8.5, transform=ax.get_yaxis_transform())  # fmt: skip
    if len(full):
        ax.plot(full[BATCH], full[y], linestyle="", marker="x", markeredgewidth=2, color=INK,
                label=FULL)  # fmt: skip


def _draw_scaling(ax: Axes, data: pd.DataFrame, y: str, most: float) -> None:
    _plot_lines(ax, data, y)
    _space(ax, data)
    sizes = sorted(data[GPUS].unique())
    ax.plot(sizes, sizes, zorder=1, label="as many times as GPUs", **_DASHED)
    ax.set_yscale("log", base=2)  # on which that line is straight
    ax.yaxis.set_major_formatter("{x:g}")


def _draw_curves(ax: Axes, data: pd.DataFrame, y: str, most: float) -> None:
    _plot_lines(ax, data, y, marker="")
    ax.set_xlim(0)


@dataclass(frozen=True)
class Sketch:
    """The definition of a figure: the data of its panels, and how one is drawn."""

    name: str
    question: str
    title: str
    caption: str
    value: str  # its main column
    take: Callable[[Report], Parts]
    draw: Callable[[Axes, pd.DataFrame, str, float], None]


SKETCHES = (
    Sketch(
        "images-per-s", "How many images a second are trained at each batch size?",
        "Images per second",
        "Higher is better. Each precision at its main loss scale; a bar is the range of the "
        "overview.",
        SPEED, take_speeds, _draw_speeds,
    ),
    Sketch(
        "memory", "How much memory does each batch size take?", "Memory",
        "Lower is better. Each precision at its main loss scale; a cross is a batch that ran out "
        "of memory.",
        MEMORY, take_memory, _draw_memory,
    ),
    Sketch(
        "gpu-scaling", "How much faster are several GPUs than one?", "Speed-up over one GPU",
        "Higher is better. Weak scaling keeps the batch per GPU, strong scaling the total batch; "
        "on a CPU, processes take the place of GPUs.",
        WIDER, take_scaling, _draw_scaling,
    ),
    Sketch(
        "loss-curve", "How does the loss fall during training?", "Loss during training",
        "Mean cross-entropy of the images since the previous point. One run of each case: of its "
        "repeats, the one whose epoch time is the median.",
        LOSS, take_curves, _draw_curves,
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------ as pictures


@dataclass(frozen=True)
class Figure:
    """A sketch with the panels that a report has data for, and its picture for a page."""

    sketch: Sketch  # in the units that the cases count
    panels: tuple[tuple[str, pd.DataFrame], ...]  # title and data
    svg: str = ""

    @property
    def alt(self) -> str:
        """What it shows, in words."""
        return ". ".join([self.sketch.title, *(self._say(*panel) for panel in self.panels)]) + "."

    def _say(self, title: str, data: pd.DataFrame) -> str:
        value = self.sketch.value
        order = [name for name in PRECISIONS if (data["precision"] == name).any()]
        ends = data.groupby("precision")[value].agg(["min", "max"]).loc[order].map(write_number)
        said = [f"{name} from {low} to {high}" for name, low, high in ends.itertuples()]
        return f"{title}: {value}: {'; '.join(said)}"


def plan_figures(report: Report) -> Iterator[Figure]:
    """Yield every figure that the records have data for, in their units, not yet drawn."""
    units = find_units(report.results)
    for sketch in list_sketches(report):
        panels = tuple(
            (capitalize(title), data.rename(columns=lambda name: count_in(name, units)))
            for title, data in sketch.take(report)
            if len(data)
        )
        names = ("question", "title", "caption", "value")
        words = {name: count_in(getattr(sketch, name), units) for name in names}
        if panels:
            yield Figure(replace(sketch, **words), panels)  # type: ignore[arg-type]


def list_sketches(report: Report) -> list[Sketch]:
    """Return the figures that a document shows."""
    return [s for s in SKETCHES if s.name in report.figures or not report.figures]


def draw_figures(report: Report) -> list[Figure]:
    """Draw the figures for a page: the panels below each other, so that a phone has room."""
    return [replace(one, svg=_save(_draw(one, 1))) for one in plan_figures(report)]


def write_figures(report: Report, folder: Path) -> None:
    """Write each figure as one picture with all its panels, as SVG and PNG. Raises OSError: the
    folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in plan_figures(report):
        canvas = _draw(figure, 3, figure.sketch.title)
        path = folder / f"{figure.sketch.name}.svg"
        path.write_text(_save(canvas), encoding="utf-8")
        canvas.savefig(path.with_suffix(".png"), dpi=160, facecolor="white")


_LOOK: Any = {
    **sns.axes_style("whitegrid"),
    **STYLE,
    "font.size": 10.5,
    "axes.facecolor": "none",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: selectable, and in the reader's font
    "svg.hashsalt": "figure",
}


def _draw(figure: Figure, columns: int, heading: str = "") -> Canvas:
    """Draw the panels, in so many columns, with the legend of all below them."""
    wide = min(columns, len(figure.panels))
    high = math.ceil(len(figure.panels) / wide)
    sketch, entries = figure.sketch, dict[str, Any]()
    tops = [float(data[sketch.value].max()) for _, data in figure.panels]
    with mpl.rc_context(_LOOK):
        canvas = Canvas(figsize=(5 * wide, 3.5 * high + 0.5), layout="constrained")
        for place, ((title, data), top) in enumerate(zip(figure.panels, tops, strict=True), 1):
            ax = canvas.add_subplot(high, wide, place)
            sketch.draw(ax, data, sketch.value, max(t for t in tops if t <= APART * top))
            sns.despine(ax=ax)
            ax.set_title(textwrap.fill(clean(title), 60), fontsize=9.5, loc="left")
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        canvas.legend(entries.values(), entries, loc="outside lower left", fontsize=9,
                      ncols=3 * wide, handlelength=1.6, columnspacing=1.2)  # fmt: skip
        if heading:
            canvas.suptitle(heading, fontsize=10.5, x=0.01, ha="left")
    return canvas


def _save(canvas: Canvas) -> str:
    svg = io.StringIO()
    with mpl.rc_context(_LOOK):
        canvas.savefig(svg, format="svg", metadata={"Date": None}, facecolor="white")
    return svg.getvalue()


def tabulate(panel: tuple[str, pd.DataFrame]) -> Table:
    title, whole = panel
    data = whole[whole.index % math.ceil(len(whole) / MOST_POINTS) == 0]
    heads = tuple(Head(c, c, "", data[c].dtype.kind != "O") for c in map(str, data.columns))
    rows = tuple(
        tuple(number_cell(v) if isinstance(v, float) else Cell(str(v)) for v in row)
        for row in data.itertuples(index=False)
    )
    left = len(data) < len(whole)
    notes = (f"{len(data)} of {len(whole)} points.",) if left else ()
    return Table("data", title, heads, rows, notes)


_VARIABLES = {
    "#000000": "currentColor",
    INK: "currentColor",
    GRID: "var(--grid)",
    **{light: f"var(--{name})" for name, (light, _) in COLOURS.items()},
}
_COLOUR = re.compile("|".join(_VARIABLES))
_ID = re.compile(r'(?<= id=")[^"]*(?=")|(?<=href="#)[^"]*(?=")|(?<=url\(#)[^)]*(?=\))')


def inline(svg: str, name: str) -> str:
    """Make a drawing part of a page, with the page's colours, without a background, and with ids
    that begin with its name, as those of two drawings are equal."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, count=1, flags=re.DOTALL)  # the background
    svg = re.sub(r'\b(width|height)="[\d.]+pt" ?', "", svg, count=2)
    svg = svg.replace("'DejaVu Sans'", "inherit")
    svg = _ID.sub(lambda match: f"{name}-{match[0]}", svg)
    svg = _COLOUR.sub(lambda match: _VARIABLES[match[0]], svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
