"""The report as one self-contained page, for a screen of any width and for print, and its figure:
images/s by batch size.

A panel of it has the settings of one machine, network and data. A line is settings of one precision
that differ in nothing but the batch size: all other axes are at the values that most of its
settings have. Text and series have fixed colours here, which the page replaces by CSS variables, so
that one SVG is readable on light and on dark.
"""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
from collections.abc import Sequence
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib as mpl
import seaborn as sns
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.case import AXES, FOLLOWS, SAME_QUESTION, spell_value
from bench.origin import LABELS
from bench.precision import PRECISIONS
from bench.questions.settings import list_settings
from bench.record import MEASURED, Status
from bench.render.table import Head
from bench.render.text import list_doubts
from bench.report.document import Report
from bench.store.reader import find_records
from bench.store.rows import group
from bench.study.axes import ORDER, find_varying, list_main, name_axis
from bench.study.comparable import refuse_alone
from bench.study.quantities import is_number
from bench.study.runs import Result
from bench.text import capitalize, clean

MOST_PANELS = 6
APART = 8  # a larger ratio between panels' largest values gives each a scale of its own

NAME = "images-per-s"
"""The name of the figure's files, and of its place on a page."""

PANEL = ("ran_on", "model", "dataset", "kind", "environment")  # what those of one panel agree on
_FREE = (*PANEL, "device", "precision", *FOLLOWS["precision"], "batch_size", *SAME_QUESTION)
HELD = tuple(name for name in AXES if name not in _FREE)
"""The axes that are held at a panel's baseline."""

Panels = list[tuple[str, list[Result]]]
"""The title of each panel, and its cases."""


def list_panels(report: Report) -> Panels:
    """Return the panels of the machines, networks and data with the most settings, each precision
    at its main loss scale; none of a single case."""
    valid = [one for one in report.results if one.status in MEASURED]
    valid = [one for one in valid if one.status != Status.INVALID and is_number(one.images_per_s)]
    # what counts no items has no rate of them
    valid = [one for one in valid if not (one.period.amount or refuse_alone(one))]
    parts = group((one.best for one in list_settings(valid)), attrgetter(*PANEL))
    several = [n for n in ("model", "dataset") if len({getattr(one, n) for one in valid}) > 1]
    varying = find_varying(valid, [name for name in ORDER if name in HELD])
    found = []
    for part in sorted(parts, key=len, reverse=True)[:MOST_PANELS]:
        base = max(group(part, attrgetter(*HELD)), key=_judge_baseline)
        first = base[0]
        words = [first.ran_on, *(getattr(first, n) for n in several)]
        words += [f"{name_axis(n)} {spell_value(getattr(first, n))}" for n in varying]
        words += [LABELS.get(first.kind, ""), "synthetic images" * (first.dataset == "synthetic")]
        if extrapolated := [one for one in base if one.extrapolated]:
            some = "some " * (len(extrapolated) < len(base))
            words += [f"{some}extrapolated from part of an epoch"]
        cases = [base[at] for at in list_main(base, [0] * len(base))]
        if len(cases) > 1:
            found.append((capitalize(" · ".join(filter(None, words))), cases))
    return found


def _judge_baseline(part: Sequence[Result]) -> tuple[int, bool, bool, int]:
    """Rank values of `HELD`: those timed at several batch sizes, then those without accumulation
    and memory limit, then the most common."""
    sizes, first = {one.batch_size for one in part}, part[0]
    return min(len(sizes), 2), first.accumulate == 1, first.memory_limit is None, len(part)


INK, GRID = "#15181c", "#c9ced6"


PALETTE: tuple[tuple[str, str], ...] = (
    ("#4f5b69", "#aeb9c7"),
    ("#a85507", "#f0a848"),
    ("#1a5fc0", "#70abff"),
    ("#0b7480", "#3ec6d2"),
    ("#a8195c", "#f47cb0"),
    ("#6a3cc2", "#b498ff"),
    ("#2f7a1f", "#7fce6a"),
    ("#7a5c00", "#d9bf4a"),
    ("#b3261e", "#ff8a80"),
    ("#3f51b5", "#9fa8ff"),
    ("#8c4a2f", "#d9a48c"),
)
"""Colours on light and on dark; each at least 4.5 : 1 against its background."""

_SHAPES = "osD^vPX*<>hpd"  # matplotlib's markers

COLOURS: dict[str, tuple[str, str]] = dict(zip(PRECISIONS, cycle(PALETTE), strict=False))
"""Precision -> its colour on light and on dark."""

MARKERS: dict[str, str] = dict(zip(PRECISIONS, cycle(_SHAPES), strict=False))
"""Precision -> its marker, for readers who do not see the colours."""

_LOOK: Any = {
    **sns.axes_style("whitegrid"),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "grid.color": GRID,
    "text.parse_math": False,  # a name may hold mathtext markup
    "font.size": 10.5,
    "axes.facecolor": "none",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: selectable, and in the reader's font
    "svg.hashsalt": "figure",
}


def _draw(panels: Panels, columns: int, label: str) -> Figure:
    """Draw the panels, in so many columns, with the legend of all below them."""
    wide = min(columns, len(panels))
    high = math.ceil(len(panels) / wide)
    tops = [max(case.images_per_s for case in cases) for _, cases in panels]
    with mpl.rc_context(_LOOK):
        canvas = Figure((5 * wide, 3.5 * high + 0.5), layout="constrained")
        entries: dict[str, Any] = {}
        for place, ((title, cases), top) in enumerate(zip(panels, tops, strict=True), 1):
            ax = canvas.add_subplot(high, wide, place)
            _draw_panel(ax, cases)
            ax.set(xlabel="batch size", ylabel=label)
            ax.set_ylim(0, 1.08 * max(t for t in tops if t <= APART * top))
            ax.set_title(textwrap.fill(clean(title), 60), fontsize=9.5, loc="left")
            entries |= {str(line.get_label()): line for line in ax.get_lines()}
        canvas.legend(entries.values(), entries, loc="outside lower left", fontsize=9,
                      ncols=3 * wide, handlelength=1.6, columnspacing=1.2)  # fmt: skip
    return canvas


def _draw_panel(ax: Axes, cases: Sequence[Result]) -> None:
    """Plot a line per precision over the batch size; they differ in more than colour."""
    for name in (name for name in PRECISIONS if any(case.precision == name for case in cases)):
        mine = [case for case in cases if case.precision == name]
        mine.sort(key=attrgetter("batch_size"))
        ax.plot([case.batch_size for case in mine], [case.images_per_s for case in mine],
                label=name, color=COLOURS[name][0], marker=MARKERS[name], markersize=7,
                markeredgewidth=0)  # fmt: skip
    ticks = sorted({case.batch_size for case in cases})
    ax.set_xscale("log", base=2)
    # labels nearer than a third of an octave would overlap
    shown = [t for i, t in enumerate(ticks) if i == 0 or t / ticks[i - 1] > 1.25]
    shown = shown[:: math.ceil(len(shown) / 8)]
    ax.set_xticks(shown, [f"{t:g}" for t in shown])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,.10g}")
    sns.despine(ax=ax)


def write_figures(report: Report, folder: Path) -> None:
    """Write the figure as one picture with all its panels, as SVG and PNG, if there is data for it.
    Raises OSError: the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    if panels := list_panels(report):
        canvas = _draw(panels, 3, report.wording.say("images/s"))
        path = folder / f"{NAME}.svg"
        path.write_text(_save(canvas), encoding="utf-8")
        canvas.savefig(path.with_suffix(".png"), dpi=160, facecolor="white")


def _save(canvas: Figure) -> str:
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


def inline(svg: str) -> str:
    """Make a drawing part of a page, with the page's colours, without a background."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, count=1, flags=re.DOTALL)  # the background
    svg = re.sub(r'\b(width|height)="[\d.]+pt" ?', "", svg, count=2)
    svg = svg.replace("'DejaVu Sans'", "inherit")
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
    templates.filters |= {"clean": clean, "keep_whole": keep_whole, "align": align}
    templates.globals["zip"] = zip
    panels, label = list_panels(report), report.wording.say("images/s")
    names = [table.name for table in report.tables]
    anchors = (f"table-{name}" + f"-{i}" * (name in names[:i]) for i, name in enumerate(names))
    return templates.get_template("page.html").render(
        report=report,
        figure=inline(_save(_draw(panels, 1, label))) if panels else "",
        label=label,
        name=NAME,
        panels=[title for title, _ in panels],
        doubts=list_doubts(report.warnings),
        tables=list(zip(anchors, report.tables, strict=True)),
        links=[
            (sweep.name, quote(Path(os.path.relpath(file.resolve(), report.home)).as_posix()))
            for sweep in report.sweeps
            for file in find_records(sweep.path)
        ],
        colours=COLOURS,
    )


def align(head: Head) -> str:
    """Return the class of the cells below a head, as an attribute."""
    kind = "n" if head.number else "long" if head.wrap else ""
    return Markup(f' class="{kind}"' if kind else "")


def keep_whole(text: str) -> Markup:
    """Escape a text whose flags and shares are not broken over lines: ``--`` at the end of a line
    reads as a dash, and ``%`` at the start of one as nothing."""
    marked = re.sub(r"(?<!\S)--[a-z][a-z-]*|[\d.]+ %", r"<span>\g<0></span>", str(escape(text)))
    return Markup(marked)
