"""Figures as pictures: one drawing a panel for a page, one picture a figure for files."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.render.model import Cell, Head, Table
from bench.render.palette import COLOURS, GRID, INK
from bench.render.units import count_in, find_units
from bench.report.document import Report
from bench.report.figures.data import MOST_POINTS, describe, thin
from bench.report.figures.drawing import find_height, is_in_rows
from bench.report.figures.sketches import SKETCHES, Sketch, view_report
from bench.text import clean, write_number

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

WIDTH = 5
"""Of a panel, in inches."""

COLUMNS = 3
"""Panels beside each other in a picture of its own."""

_RC = {
    "font.size": 10.5,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "text.parse_math": False,  # a name may hold what mathtext would obey
    "svg.fonttype": "none",  # text stays text: selectable, and in the reader's font
}


@dataclass(frozen=True)
class Panel:
    """One drawing: ``data`` is tidy and in the units its columns name.

    ``title`` tells it from the other panels of its figure, and may be empty; ``alt`` says in words
    what it shows.
    """

    title: str
    data: pd.DataFrame
    svg: str
    alt: str


@dataclass(frozen=True)
class Figure:
    """A figure with its panels.

    ``told`` is what all panels share; ``legend`` is a drawing, empty where the panels need none;
    ``in_rows`` is whether panels have named rows, which need some width.
    """

    name: str
    title: str
    caption: str
    told: str
    panels: tuple[Panel, ...]
    legend: str
    in_rows: bool


@dataclass(frozen=True)
class _Plan:
    """A figure that has data: its panels' titles and frames, and all of these in one frame."""

    sketch: Sketch
    told: str
    titles: list[str]
    frames: list[pd.DataFrame]
    whole: pd.DataFrame


def _plan(report: Report) -> Iterator[_Plan]:
    import pandas as pd

    view = view_report(report)
    grouping, units = view.grouping, find_units(report.cases)
    for plain in SKETCHES:
        parts = [(title, data) for title, data in plain.take(view) if len(data)]
        sketch = replace(
            plain,
            title=count_in(plain.title, units),
            caption=count_in(plain.caption, units),
            value=count_in(plain.value, units),
        )
        if parts:
            titles, frames = (list(column) for column in zip(*parts, strict=True))
            frames = [data.rename(columns=lambda name: count_in(name, units)) for data in frames]
            whole = pd.concat(frames, keys=range(len(frames)), names=["panel"])
            whole = whole.reset_index("panel").reset_index(drop=True)
            told = grouping.place[:1].upper() + grouping.place[1:]
            if sketch.baseline and grouping.baseline:
                told += f"{'. ' if told else ''}Other settings: {grouping.baseline}"
            yield _Plan(sketch, told, titles, frames, whole)


def draw_figures(report: Report) -> list[Figure]:
    """Draw every figure the records have data for, for a page."""
    return [_draw(plan) for plan in _plan(report)]


def undrawn(figures: Sequence[Figure]) -> list[str]:
    """Titles of the figures the records have no data for."""
    drawn = {figure.name for figure in figures}
    return [sketch.title for sketch in SKETCHES if sketch.name not in drawn]


def _draw(plan: _Plan) -> Figure:
    sketch, alone = plan.sketch, len(plan.frames) == 1
    panels: list[Panel] = []
    entries: dict[str, Any] = {}
    height = find_height(plan.whole)
    for number, (title, data) in enumerate(zip(plan.titles, plan.frames, strict=True)):
        with _style(f"{sketch.name}-{number}"):  # ids must not repeat in a page
            canvas, ax = _open_canvas(height)
            sketch.draw(ax, data, plan.whole)
            _tidy(ax, entries)
            if alone and entries:
                _add_legend(canvas, entries, "outside lower left", WIDTH)
            words = ". ".join(filter(None, (sketch.title, title, plan.told)))
            alt = f"{words}. {describe(data, sketch.value)}."
            panels.append(Panel(title, data, _save(canvas), alt))
    legend = ""
    if entries and not alone:
        with _style(f"{sketch.name}-legend"):
            legend = _draw_legend(entries)
    return Figure(
        sketch.name, sketch.title, sketch.describe(plan.whole.columns), plan.told, tuple(panels),
        legend, is_in_rows(plan.whole),
    )  # fmt: skip


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib as mpl
    import seaborn as sns

    style: Any = {**sns.axes_style("whitegrid"), **_RC, "svg.hashsalt": salt}
    with mpl.rc_context(style):
        yield


def _open_canvas(height: float) -> tuple[Canvas, Axes]:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
    return canvas, canvas.add_subplot()


def _save(canvas: Canvas) -> str:
    svg = io.StringIO()
    canvas.savefig(svg, format="svg", metadata={"Date": None}, facecolor="white")
    return svg.getvalue()


def _tidy(ax: Axes, entries: dict[str, Any]) -> None:
    """Take away what seaborn adds to each panel; gather what the legend is to name."""
    import seaborn as sns

    sns.despine(ax=ax, left=not ax.spines["left"].get_visible())
    handles, labels = ax.get_legend_handles_labels()
    for handle, label in zip(handles, labels, strict=True):
        if label not in ("precision", "run"):  # seaborn's headings
            entries.setdefault(label, handle)
    if ax.get_legend():
        ax.get_legend().remove()  # type: ignore[union-attr]


def _add_legend(canvas: Canvas, entries: dict[str, Any], place: Any, width: float) -> None:
    canvas.legend(
        list(entries.values()), list(entries), loc=place, ncols=_count_columns(entries, width),
        fontsize=9, handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip


def _count_columns(labels: Iterable[str], width: float) -> int:
    """As many as fit: a character of 9 points is about 0.08 inches wide."""
    longest = max(len(label) for label in labels)
    return max(1, int(width / (0.45 + 0.08 * longest)))


def _draw_legend(entries: dict[str, Any]) -> str:
    from matplotlib.figure import Figure as Canvas

    rows = math.ceil(len(entries) / _count_columns(entries, WIDTH))
    canvas = Canvas(figsize=(WIDTH, 0.12 + 0.2 * rows))
    _add_legend(canvas, entries, "center left", WIDTH)
    return _save(canvas)


# ------------------------------------------------------------------------------------------ files


def write_figures(report: Report, folder: Path) -> None:
    """Write each figure as one picture with all its panels, as SVG and PNG.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for plan in _plan(report):
        with _style(plan.sketch.name):
            canvas = _draw_together(plan)
            path = folder / f"{plan.sketch.name}.svg"
            path.write_text(_save(canvas), encoding="utf-8")
            canvas.savefig(path.with_suffix(".png"), dpi=160, facecolor="white")


def _draw_together(plan: _Plan) -> Canvas:
    """All panels of a figure, with one legend."""
    from matplotlib.figure import Figure as Canvas

    wide = min(COLUMNS, len(plan.frames))
    high = math.ceil(len(plan.frames) / wide)
    each = WIDTH if wide == 1 or is_in_rows(plan.whole) else 0.85 * WIDTH
    size = (each * wide, high * (find_height(plan.whole) + 0.3) + 0.6)  # titles, and the legend
    canvas = Canvas(figsize=size, layout="constrained")
    entries: dict[str, Any] = {}
    for place, (title, data) in enumerate(zip(plan.titles, plan.frames, strict=True), 1):
        ax = canvas.add_subplot(high, wide, place)
        plan.sketch.draw(ax, data, plan.whole)
        _tidy(ax, entries)
        if title:
            ax.set_title(_wrap(title, 48), fontsize=10, loc="left")
    if entries:
        _add_legend(canvas, entries, "outside lower left", size[0])
    heading = ". ".join(filter(None, (plan.sketch.title, plan.told)))
    canvas.suptitle(_wrap(heading, int(12.5 * size[0])), fontsize=10, x=0.01, ha="left")
    return canvas


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(clean(text), width, max_lines=3, placeholder=" …")


# ------------------------------------------------------------------------------------------- page


def tabulate(figure: Figure, panel: Panel) -> Table:
    """A panel's data as a table."""
    heads = tuple(
        Head(c, c, "", panel.data[c].dtype != object) for c in map(str, panel.data.columns)
    )
    cut = panel.data if len(panel.data) <= MOST_POINTS else thin(panel.data)
    rows = tuple(tuple(_cell(value) for value in row) for row in cut.itertuples(index=False))
    notes = () if len(cut) == len(panel.data) else (f"{len(cut)} of {len(panel.data)} points.",)
    return Table(figure.name, panel.title or figure.title, heads, rows, notes)


def _cell(value: Any) -> Cell:
    if isinstance(value, float):
        return Cell(write_number(value) if math.isfinite(value) else "–", value)
    return Cell(str(value))


_COLOUR = re.compile("|".join(["#000000", INK, GRID, *(light for light, _ in COLOURS.values())]))
_ID, _REFERRED = re.compile(r' id="([^"]*)"'), re.compile(r'(?:href="|url\()#([^")]*)')
_VARIABLES = {
    "#000000": "currentColor",
    INK: "currentColor",
    GRID: "var(--grid)",
    **{light: f"var(--{name})" for name, (light, _) in COLOURS.items()},
}


def inline(svg: str) -> str:
    """A drawing to stand in a page: its colours are the page's, its background none."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, count=1, flags=re.DOTALL)  # the paper
    svg = re.sub(r'\b(width|height)="[\d.]+pt" ?', "", svg, count=2)
    svg = svg.replace("'DejaVu Sans'", "inherit")
    used = set(_REFERRED.findall(svg))
    svg = _ID.sub(lambda match: match[0] if match[1] in used else "", svg)  # ids repeat in a page
    svg = _COLOUR.sub(lambda match: _VARIABLES[match[0]], svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
