"""The report as one self-contained page, for a screen of any width and for print, and its figures:
the data of each panel as a tidy frame, and their pictures.

A panel has the settings of one machine, network and data. A line in it is settings of one
precision that differ in nothing but the batch size: all other axes are at the values that most of
its settings have. The first column of a frame is its x axis. Text and series have fixed colours
here, which the page replaces by CSS variables, so that one SVG is readable on light and on dark.
"""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from bench.case import AXES, FOLLOWS, SAME_QUESTION
from bench.origin import LABELS
from bench.precision import PRECISIONS
from bench.questions.settings import list_settings
from bench.record import MEASURED, Status, Step
from bench.render.table import COLOURS, GRID, INK, MARKERS, STYLE, count_in, find_units
from bench.render.text import list_doubts
from bench.report.document import Report
from bench.store.reader import find_records, read_beside
from bench.store.rows import group
from bench.study.axes import find_varying, list_main, name_axis, name_value
from bench.study.quantities import is_number
from bench.study.runs import SOURCE, Result
from bench.study.sweeps import MOST_STEP_BYTES
from bench.text import capitalize, clean

MOST_PANELS = 6  # of one figure
CURVE_POINTS = 40  # of an epoch of a curve
APART = 8  # a larger ratio between panels' largest values gives each a scale of its own

BATCH, EPOCH = "batch size", "epoch (%)"
SPEED, LOSS = "images/s", "loss"

PANEL = (*SOURCE, "model", "dataset", "kind", "environment")  # what those of one panel agree on
_FREE = (*PANEL, "device", "precision", *FOLLOWS["precision"], "batch_size", *SAME_QUESTION)
HELD = tuple(name for name in AXES if name not in _FREE)
"""The axes that are held at a panel's baseline."""

Parts = Iterator[tuple[str, pd.DataFrame]]
"""The title of each panel, and its data; a panel without data is not drawn."""


# ----------------------------------------------------------------------------------- their data


def list_groups(report: Report) -> list[tuple[str, list[Result]]]:
    """Return the title and the cases of each panel, each precision at its main loss scale: of the
    machines, networks and data with the most settings."""
    valid = [
        one for one in report.results if one.status in MEASURED and is_number(one.images_per_s)
    ]
    valid = [one for one in valid if one.status != Status.INVALID]
    parts = group((one.best for one in list_settings(valid)), attrgetter(*PANEL))
    several = [n for n in ("model", "dataset") if len({getattr(one, n) for one in valid}) > 1]
    varying = [name for name in find_varying(valid) if name in HELD]
    found = []
    for part in sorted(parts, key=len, reverse=True)[:MOST_PANELS]:
        base = max(group(part, attrgetter(*HELD)), key=_judge_baseline)
        first = base[0]
        words = [report.machines[first.sweep, first.machine], *(getattr(first, n) for n in several)]
        words += [f"{name_axis(n)} {name_value(n, getattr(first, n), {})}" for n in varying]
        words += [LABELS.get(first.kind, ""), "synthetic images" * (first.dataset == "synthetic")]
        words += ["extrapolated from part of an epoch" * any(one.extrapolated for one in base)]
        cases = [base[at] for at in list_main(base, [0] * len(base))]
        found.append((" · ".join(filter(None, words)), cases))
    return found


def _judge_baseline(part: Sequence[Result]) -> tuple[int, bool, bool, int]:
    """Rank values of `HELD`: those timed at several batch sizes, then those without accumulation
    and memory limit, then the most common."""
    sizes, first = {one.batch_size for one in part}, part[0]
    return min(len(sizes), 2), first.accumulate == 1, first.memory_limit == "", len(part)


def take_speeds(report: Report) -> Parts:
    """Yield images/s by batch size."""
    for title, cases in list_groups(report):
        rows = [(row.batch_size, row.precision, row.images_per_s) for row in cases]
        data = pd.DataFrame(rows, columns=[BATCH, "precision", SPEED])
        yield title, data if len(data) > 1 else data.head(0)


def take_curves(report: Report) -> Parts:
    """Yield the loss through the epoch per precision, of one run each at the batch size that most
    precisions have."""
    sweeps = {sweep.name: sweep for sweep in report.sweeps}
    read = cache(lambda name: read_beside(sweeps[name].path, Step, MOST_STEP_BYTES))
    for title, rows in list_groups(report):
        held = Counter(size for _, size in {(row.precision, row.batch_size) for row in rows})
        size = max(sorted(held), key=held.__getitem__)
        curves = [pd.DataFrame()]
        for row in (row for row in rows if row.batch_size == size):
            stored = read(row.sweep)
            steps = next(
                (stored[run.record_id] for run in row.every if run.record_id in stored), ()
            )
            mine = pd.DataFrame(map(asdict, steps))
            if len(mine):
                seen = float(mine["images"].sum())
                images = row.train_images if row.train_images > 0 else seen
                points = CURVE_POINTS * int(row.epochs)
                curves.append(thin_steps(mine, images, points).assign(precision=row.precision))
        yield f"{title} · batch size {size}", pd.concat(curves, ignore_index=True)


def thin_steps(steps: pd.DataFrame, images: float, points: int) -> pd.DataFrame:
    """Average losses over images in ``points`` equal parts, by share of an epoch of ``images``;
    several epochs pass 100 %."""
    seen = steps["images"].cumsum()
    known = steps.assign(seen=seen, sum=steps["loss"] * steps["images"]).dropna(subset=["loss"])
    parts = known.groupby(np.ceil(known["seen"] * points / max(seen.iloc[-1], 1)))
    loss = parts["sum"].sum() / parts["images"].sum()
    data = pd.DataFrame({EPOCH: 100 * parts["seen"].max() / images, LOSS: loss})
    return data.reset_index(drop=True)


@dataclass(frozen=True)
class Sketch:
    """The definition of a figure."""

    name: str
    question: str
    title: str
    caption: str
    value: str  # its main column
    take: Callable[[Report], Parts]


SKETCHES = (
    Sketch(
        "images-per-s", "How many images a second are trained at each batch size?",
        "Images per second", "Higher is better. Each precision at its main loss scale.",
        SPEED, take_speeds,
    ),
    Sketch(
        "loss-curve", "How does the loss fall during training?", "Loss during training",
        "Mean cross-entropy of the images since the previous point, of one run of each case.",
        LOSS, take_curves,
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
        """What it shows, in words; the tables of a report have the numbers."""
        shown = {name for _, data in self.panels for name in data["precision"]}
        titles = [title for title, _ in self.panels]
        return ". ".join([self.sketch.title, *titles, ", ".join(sorted(shown))]) + "."


def plan_figures(report: Report) -> Iterator[Figure]:
    """Yield every figure that the records have data for, in their units, not yet drawn."""
    units = find_units(report.results)
    for sketch in SKETCHES:
        panels = tuple(
            (capitalize(title), data.rename(columns=lambda name: count_in(name, units)))
            for title, data in sketch.take(report)
            if len(data)
        )
        names = ("question", "title", "caption", "value")
        words = {name: count_in(getattr(sketch, name), units) for name in names}
        if panels and (sketch.name in report.figures or not report.figures):
            yield Figure(replace(sketch, **words), panels)  # type: ignore[arg-type]


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
            _draw_panel(ax, data, sketch, max(t for t in tops if t <= APART * top))
            ax.set_title(textwrap.fill(clean(title), 60), fontsize=9.5, loc="left")
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        canvas.legend(entries.values(), entries, loc="outside lower left", fontsize=9,
                      ncols=3 * wide, handlelength=1.6, columnspacing=1.2)  # fmt: skip
        if heading:
            canvas.suptitle(heading, fontsize=10.5, x=0.01, ha="left")
    return canvas


def _draw_panel(ax: Axes, data: pd.DataFrame, sketch: Sketch, most: float) -> None:
    """Plot a line per precision over the first column; they differ in more than colour."""
    x, y, curve = data.columns[0], sketch.value, sketch.take is take_curves
    for name in (name for name in PRECISIONS if (data["precision"] == name).any()):
        line = data[data["precision"] == name].dropna(subset=[y]).sort_values(x, kind="stable")
        ax.plot(line[x], line[y], label=name, color=COLOURS[name][0], markersize=7,
                marker="" if curve else MARKERS[name], markeredgewidth=0)  # fmt: skip
    ax.set(xlabel=x, ylabel=y)
    if curve:
        ax.set_xlim(0)
    else:
        ticks = sorted(data[x].unique())
        ax.set_xscale("log", base=2)
        # labels nearer than a third of an octave would overlap
        shown = [t for i, t in enumerate(ticks) if i == 0 or t / ticks[i - 1] > 1.25]
        shown = shown[:: math.ceil(len(shown) / 8)]
        ax.set_xticks(shown, [f"{t:g}" for t in shown])
        ax.minorticks_off()
        ax.set_ylim(0, 1.08 * most)
        ax.yaxis.set_major_formatter("{x:,.10g}")
    sns.despine(ax=ax)


def _save(canvas: Canvas) -> str:
    svg = io.StringIO()
    with mpl.rc_context(_LOOK):
        canvas.savefig(svg, format="svg", metadata={"Date": None}, facecolor="white")
    return svg.getvalue()


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


# ----------------------------------------------------------------------------------------- the page


TEMPLATES = Path(__file__).with_name("templates")


def render(report: Report) -> str:
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"clean": clean, "inline": inline}
    figures = draw_figures(report)
    lead = figures[0] if figures and report.pictured else None
    names = [table.name for table in report.tables]
    anchors = (f"table-{name}" + f"-{i}" * (name in names[:i]) for i, name in enumerate(names))
    return templates.get_template("page.html").render(
        report=report,
        lead=lead,
        doubts=list_doubts(report.warnings),
        tables=list(zip(anchors, report.tables, strict=True)),
        figures=[figure for figure in figures if figure is not lead],
        links=[
            (sweep.name, _link(file, report.home))
            for sweep in report.sweeps
            for file in find_records(sweep.path)
        ],
        colours=COLOURS,
    )


def _link(file: Path, home: Path) -> str:
    try:
        return quote(Path(os.path.relpath(file.resolve(), home)).as_posix())
    except ValueError:  # on another drive
        return file.resolve().as_uri()
