"""Figures as pictures: one drawing per panel for a page, one picture per figure for files."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from bench.render.cells import number_cell
from bench.render.model import Cell, Head, Table
from bench.render.palette import COLOURS, GRID, INK, STYLE
from bench.render.units import count_in, find_units
from bench.report.document import Report
from bench.report.figures.drawing import find_height, is_in_rows
from bench.report.figures.frames import describe, thin
from bench.report.figures.groups import view_report
from bench.report.figures.sketches import Sketch, list_sketches
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

    @property
    def in_rows(self) -> bool:
        """Whether panels have named rows, which need some width."""
        return is_in_rows(self.whole)


def plan_figures(report: Report) -> Iterator[Figure]:
    """Yield every figure that the records have data for, in their units, not yet drawn."""
    view, units = view_report(report), find_units(report.cases)
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
            canvas = Canvas(figsize=(WIDTH, find_height(figure.whole)), layout="constrained")
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
    width = wide * (WIDTH if wide == 1 or figure.in_rows else 0.85 * WIDTH)
    height = high * (find_height(figure.whole) + 0.3) + 0.6  # titles, and the legend
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
