"""Figures: the list of them, and their pictures: one a panel for a page, one a figure for files.

Text and series have fixed colours here, which the page replaces by CSS variables, so that one SVG
is readable on light and on dark.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from bench.limits import NEAR
from bench.questions.batch_sizes import DROP
from bench.render.cells import number_cell
from bench.render.model import Cell, Head, Table
from bench.render.palette import COLOURS, GRID, INK, STYLE
from bench.render.units import count_in, find_units
from bench.report.document import Report
from bench.report.figures import drawing, frames
from bench.report.figures.frames import Group, Parts, View, describe, thin, view_report
from bench.text import capitalize, clean

WIDTH = 5  # of a panel, in inches
COLUMNS = 3  # panels beside each other in a picture of its own

_RC = {
    **STYLE,
    "font.size": 10.5,
    "axes.facecolor": "none",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: selectable, and in the reader's font
}


@dataclass(frozen=True)
class Sketch:
    """The definition of a figure: the data of its panels, and how one is drawn."""

    name: str
    question: str
    title: str
    caption: str
    value: str  # its main column
    take: Callable[[View], Parts]
    draw: Callable[[Axes, pd.DataFrame, pd.DataFrame, str], None]
    baseline: bool = True  # whether its settings are at the baseline of their panel
    explain: Mapping[str, str] = field(default_factory=dict)  # by column, what the caption adds


def each_group(
    take: Callable[[Group, View], pd.DataFrame], least: int = 1
) -> Callable[[View], Parts]:
    """Make a panel per group, at its baseline; none at all if no panel has ``least`` rows. If each
    line has one batch size, the title gives it."""

    def take_all(view: View) -> Parts:
        parts = [(group, take(group, view)) for group in view.groups]
        for group, data in parts if max((len(d) for _, d in parts), default=0) >= least else ():
            title = " · ".join(filter(None, (group.place, group.baseline)))
            if frames.BATCH in data.columns[1:]:
                sizes = " and ".join(map(str, data[frames.BATCH].unique()))
                title = f"{title}, batch size {sizes}" if title else f"Batch size {sizes}"
            yield title, data

    return take_all


_MAIN = "Each precision at its main loss scale"

SKETCHES: tuple[Sketch, ...] = (
    Sketch(
        "images-per-s", "How many images a second are trained at each batch size?",
        "Images per second", f"Higher is better. {_MAIN}.",
        frames.SPEED, each_group(frames.take_speeds, least=2), drawing.draw_speeds,
        explain={
            frames.HIGH: "A bar is the range in the overview, of the runs or within the only one; "
            "shorter ones are not drawn.",
            frames.MARK: "A ring marks the knee, the smallest batch size within "
            f"{100 * NEAR:.0f} % of the best; a wide band marks a cliff, a drop of more than "
            f"{100 * DROP:.0f} %.",
        },
    ),
    Sketch(
        "memory", "How much memory does each batch size take?", "Memory",
        f"Lower is better. {_MAIN}.",
        frames.MEMORY, each_group(frames.take_memory, least=2), drawing.draw_memory,
        explain={
            frames.START: "The grey band is what the process needs before the first step: Python, "
            "torch and its libraries, the network and the dataset.",
            frames.CARD: "A cross on the line of the card marks a batch that ran out of memory.",
            frames.LIMIT: "A cross on the line of the memory limit marks a batch that ran out of "
            "memory.",
            frames.LINE: "Where memory grows linearly, a dashed line continues to batch "
            "sizes that did not run, up to the predicted limit.",
        },
    ),
    Sketch(
        "gpu-scaling", "How much faster are several GPUs than one?", "Speed-up over one GPU",
        "Higher is better. Weak scaling keeps the batch per GPU, strong scaling the total batch; "
        "on a CPU, processes take the place of GPUs.",
        frames.WIDER, frames.take_scaling, drawing.draw_scaling, baseline=False,
    ),
    Sketch(
        "loss-curve", "How does the loss fall during training?", "Loss during training",
        "Mean cross-entropy of the images since the previous point. One run of each case: of its "
        "repeats, the one whose epoch time is the median. Published curves are dashed; beside one, "
        "each point is the mean of as many images as its own, which are those of 50 steps.",
        frames.LOSS, each_group(frames.take_curves), drawing.draw_curves,
    ),
    Sketch(
        "time-memory", "Which settings are best in time and memory together?",
        "Time against memory",
        "Lower left is better. All settings are shown. On the dashed line, the Pareto front, are "
        "those that no other beats in both, labelled with their batch size.",
        frames.TIME, frames.take_trade, drawing.draw_trade, baseline=False,
    ),
)  # fmt: skip


def list_sketches(report: Report) -> list[Sketch]:
    """Return the figures that a document shows."""
    return [s for s in SKETCHES if s.name in report.figures or not report.figures]


@dataclass(frozen=True)
class Panel:
    """One drawing."""

    title: str  # tells it from the other panels of its figure; may be empty
    data: pd.DataFrame  # tidy, in the units that its columns name
    svg: str = ""
    alt: str = ""  # what it shows, in words


@dataclass(frozen=True, kw_only=True)
class Figure(Sketch):
    """A sketch with the panels that a report has data for, drawn or not yet drawn."""

    told: str  # what all panels share
    panels: tuple[Panel, ...]
    whole: pd.DataFrame  # the data of all, with the number of the ``panel`` as first column
    legend: str = ""  # a drawing, where the panels need one


def plan_figures(report: Report) -> Iterator[Figure]:
    """Yield every figure that the records have data for, in their units, not yet drawn."""
    view, units = view_report(report), find_units(report.results)
    for sketch in list_sketches(report):
        panels = tuple(
            Panel(title, data.rename(columns=lambda name: count_in(name, units)))
            for title, data in sketch.take(view)
            if len(data)
        )
        if not panels:
            continue
        whole = pd.concat(
            {number: panel.data for number, panel in enumerate(panels)}, names=["panel"]
        )
        whole = whole.reset_index("panel").reset_index(drop=True)
        told = capitalize(view.place)
        if sketch.baseline and view.baseline:
            told += f"{'. ' if told else ''}Other settings: {view.baseline}"
        explained = [sketch.explain[name] for name in map(str, whole) if name in sketch.explain]
        words = {name: count_in(getattr(sketch, name), units)
                 for name in ("question", "title", "value")}  # fmt: skip
        words["caption"] = count_in(" ".join([sketch.caption, *explained]), units)
        yield Figure(**vars(sketch) | words, told=told, panels=panels, whole=whole)


def _plot(figure: Figure, data: pd.DataFrame, ax: Axes, entries: dict[str, Any]) -> None:
    figure.draw(ax, data, figure.whole, figure.value)
    sns.despine(ax=ax, left=not ax.spines["left"].get_visible())
    for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
        entries.setdefault(label, handle)


def draw_figures(report: Report) -> list[Figure]:
    """Draw the figures for a page: each panel apart, and the legend if there are several."""
    return [_draw_apart(figure) for figure in plan_figures(report)]


def _draw_apart(figure: Figure) -> Figure:
    entries: dict[str, Any] = {}
    panels, legend = [], ""
    for number, panel in enumerate(figure.panels):
        with _style(f"{figure.name}-{number}"):  # ids must not repeat in a page
            canvas = Canvas(
                figsize=(WIDTH, drawing.find_height(figure.whole)), layout="constrained"
            )
            _plot(figure, panel.data, canvas.add_subplot(), entries)
            if len(figure.panels) == 1:
                _add_legend(canvas, entries, "outside lower left")
            words = ". ".join(filter(None, (figure.title, panel.title, figure.told)))
            alt = f"{words}. {describe(panel.data, figure.value)}."
            panels.append(replace(panel, svg=_save(canvas), alt=alt))
    if entries and len(panels) > 1:
        with _style(f"{figure.name}-legend"):
            rows = math.ceil(len(entries) / _count_columns(entries, WIDTH))
            canvas = Canvas(figsize=(WIDTH, 0.12 + 0.2 * rows))
            _add_legend(canvas, entries, "center left")
            legend = _save(canvas)
    return replace(figure, panels=tuple(panels), legend=legend)


def _style(salt: str) -> AbstractContextManager[None]:
    style: Any = {**sns.axes_style("whitegrid"), **_RC, "svg.hashsalt": salt}
    return mpl.rc_context(style)


def _save(canvas: Canvas) -> str:
    svg = io.StringIO()
    canvas.savefig(svg, format="svg", metadata={"Date": None}, facecolor="white")
    return svg.getvalue()


def _add_legend(canvas: Canvas, entries: dict[str, Any], place: Any) -> None:
    if entries:
        canvas.legend(
            list(entries.values()), list(entries), loc=place, fontsize=9, handlelength=1.6,
            columnspacing=1.2, ncols=_count_columns(entries, canvas.get_figwidth()),
        )  # fmt: skip


def _count_columns(labels: Iterable[str], width: float) -> int:
    """Return how many fit: a character of 9 points is about 0.08 inches wide."""
    return max(1, int(width / (0.45 + 0.08 * max(map(len, labels)))))


def write_figures(report: Report, folder: Path) -> None:
    """Write each figure as one picture with all its panels, as SVG and PNG. Raises OSError: the
    folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in plan_figures(report):
        with _style(figure.name):
            canvas = _draw_together(figure)
            path = folder / f"{figure.name}.svg"
            path.write_text(_save(canvas), encoding="utf-8")
            canvas.savefig(path.with_suffix(".png"), dpi=160, facecolor="white")


def _draw_together(figure: Figure) -> Canvas:
    wide = min(COLUMNS, len(figure.panels))
    high = math.ceil(len(figure.panels) / wide)
    width = wide * (WIDTH if wide == 1 else 0.85 * WIDTH)
    height = high * (drawing.find_height(figure.whole) + 0.3) + 0.6  # titles, and the legend
    canvas = Canvas(figsize=(width, height), layout="constrained")
    entries: dict[str, Any] = {}
    for place, panel in enumerate(figure.panels, 1):
        ax = canvas.add_subplot(high, wide, place)
        _plot(figure, panel.data, ax, entries)
        if panel.title:
            ax.set_title(_wrap(panel.title, 48), fontsize=10, loc="left")
    _add_legend(canvas, entries, "outside lower left")
    heading = ". ".join(filter(None, (figure.title, figure.told)))
    canvas.suptitle(_wrap(heading, int(12.5 * width)), fontsize=10, x=0.01, ha="left")
    return canvas


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(clean(text), width, max_lines=3, placeholder=" …")


def tabulate(figure: Figure, panel: Panel) -> Table:
    data = thin(panel.data)
    heads = tuple(Head(c, c, "", data[c].dtype.kind != "O") for c in map(str, data.columns))
    rows = tuple(
        tuple(number_cell(v) if isinstance(v, float) else Cell(str(v)) for v in row)
        for row in data.itertuples(index=False)
    )
    left = len(data) < len(panel.data)
    notes = (f"{len(data)} of {len(panel.data)} points.",) if left else ()
    return Table(figure.name, panel.title or figure.title, heads, rows, notes)


_VARIABLES = {
    "#000000": "currentColor",
    INK: "currentColor",
    GRID: "var(--grid)",
    **{light: f"var(--{name})" for name, (light, _) in COLOURS.items()},
}
_COLOUR = re.compile("|".join(_VARIABLES))
_ID, _REFERRED = re.compile(r' id="([^"]*)"'), re.compile(r'(?:href="|url\()#([^")]*)')


def inline(svg: str) -> str:
    """Make a drawing part of a page, with the page's colours and without a background."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, count=1, flags=re.DOTALL)  # the background
    svg = re.sub(r'\b(width|height)="[\d.]+pt" ?', "", svg, count=2)
    svg = svg.replace("'DejaVu Sans'", "inherit")
    used = set(_REFERRED.findall(svg))
    svg = _ID.sub(lambda match: match[0] if match[1] in used else "", svg)  # ids repeat in a page
    svg = _COLOUR.sub(lambda match: _VARIABLES[match[0]], svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
