"""The figures of a report: images/s by batch size, and epoch time against peak memory.

A panel has the settings of one machine, network and data. A line of the first figure is settings of
one precision that differ in nothing but the batch size: all other axes are at the values that most
of the panel's settings have. The second has them all, and marks those that none beats in both. Text
and series have fixed colours here, which a page replaces by CSS variables, so that one SVG is
readable on light and on dark.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.answers.render.table import name_case
from bench.answers.settings import list_settings
from bench.base.limits import STEADY
from bench.base.origin import LABELS
from bench.base.text import GIB, capitalize, clean
from bench.report.document import Report
from bench.results.store.rows import group
from bench.results.study.axes import ORDER, find_varying, list_main
from bench.results.study.comparable import refuse_alone
from bench.results.study.quantities import is_number
from bench.results.study.runs import Result, Spread
from bench.schema.axis import name_axis
from bench.schema.case import AXES, FOLLOWS, SAME_QUESTION, find_axis, spell_value
from bench.schema.precision import PRECISIONS
from bench.schema.record import MEASURED, Status

MOST_PANELS = 6
_APART = 8  # a larger ratio between panels' largest values gives each a scale of its own

PANEL = ("ran_on", "model", "dataset", "kind", "environment")  # what those of one panel agree on
_FREE = (*PANEL, "device", "precision", *FOLLOWS["precision"], "batch_size", *SAME_QUESTION)
FIXED_AXES = tuple(name for name in AXES if name not in _FREE)
"""The axes that are held at a panel's baseline."""


class Panel(NamedTuple):
    """The settings of one machine, network and data, each precision at its main loss scale."""

    about: str  # the machine, and what else tells it from other panels
    fixed: str  # the values of `FIXED_AXES` of ``cases``; empty if all panels have the same
    cases: list[Result]  # those that differ in precision and batch size alone
    every: list[Result]  # all whose memory is known
    chosen: set[int]  # the cells of what is recommended

    @property
    def title(self) -> str:
        return " · ".join(filter(None, (self.about, self.fixed)))


def list_panels(report: Report) -> list[Panel]:
    """Return the panels of the machines, networks and data with the most settings; none of a single
    case, and none where no time is compared with another."""
    valid = [one for one in report.results if one.status in MEASURED]
    valid = [one for one in valid if one.status != Status.INVALID and is_number(one.images_per_s)]
    # what counts no items has no rate of them
    valid = [one for one in valid if not (one.period.amount or refuse_alone(one))]
    apart = [setting for place in report.places if place.apart for setting in place.settings]
    unlike = {case.cell for setting in apart for case in setting.cases}
    valid = [one for one in valid if one.cell not in unlike]
    chosen = {setting.best.cell for setting in report.recommended}
    parts = group((one.best for one in list_settings(valid)), attrgetter(*PANEL))
    several = [n for n in ("model", "dataset") if len({getattr(one, n) for one in valid}) > 1]
    varying = find_varying(valid, [name for name in ORDER if name in FIXED_AXES])
    found = []
    for part in sorted(parts, key=len, reverse=True)[:MOST_PANELS]:
        base = max(group(part, attrgetter(*FIXED_AXES)), key=_judge_baseline)
        first = base[0]
        words = [first.ran_on, *(getattr(first, n) for n in several)]
        words += [LABELS.get(first.kind, ""), "synthetic images" * (first.dataset == "synthetic")]
        if extrapolated := [one for one in part if one.extrapolated]:
            some = "some " * (len(extrapolated) < len(part))
            words += [f"{some}extrapolated from part of an epoch"]
        fixed = [f"{name_axis(n)} {spell_value(getattr(first, n))}" for n in varying]
        cases = [base[at] for at in list_main(base, [0] * len(base))]
        main = list_main(part, [*map(attrgetter(*FIXED_AXES, "batch_size"), part)])
        every = [part[at] for at in main if is_number(part[at].memory_bytes)]
        if len(cases) > 1:
            about = capitalize(" · ".join(filter(None, words)))
            found.append(Panel(about, " · ".join(fixed), cases, every, chosen))
    return found


def _judge_baseline(part: Sequence[Result]) -> tuple[int, bool, bool, int]:
    """Rank values of `FIXED_AXES`: those timed at several batch sizes, then those without
    accumulation and memory limit, then the most common."""
    sizes, first = {one.batch_size for one in part}, part[0]
    return min(len(sizes), 2), first.accumulate == 1, first.memory_limit is None, len(part)


def find_frontier(cases: Sequence[Result]) -> list[Result]:
    """Return the cases that ended well and that none beats, by memory. One beats another with at
    most as much time and memory, and less of one of them; `STEADY` makes no difference."""
    sound = [case for case in cases if case.trust]

    def beats(one: Result, other: Result) -> bool:
        time = one.epoch_time_s / other.epoch_time_s
        memory = one.memory_bytes / other.memory_bytes
        return bool(max(time, memory) <= 1 + STEADY and min(time, memory) < 1 - STEADY)

    left = [case for case in sound if not any(beats(one, case) for one in sound)]
    return sorted(left, key=attrgetter("memory_bytes", "epoch_time_s"))


# ---------------------------------------------------------------------------------------- drawing


INK, _GRID, PAPER = "#15181c", "#c9ced6", "#ffffff"


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
    "grid.color": _GRID,
    "text.parse_math": False,  # a name may hold mathtext markup
    "font.size": 10.5,
    "axes.facecolor": "none",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: selectable, and in the reader's font
    "svg.hashsalt": "figure",
}

_HOLLOW: Any = {"markerfacecolor": PAPER, "markeredgewidth": 1.6}
_RING: Any = {"marker": "o", "markersize": 15, "fillstyle": "none", "color": INK}
_FRONTIER: Any = {"color": INK, "linewidth": 1, "linestyle": ":"}


def _draw_rates(ax: Axes, panel: Panel) -> None:
    """Plot a line per precision over the batch size; they differ in more than colour."""
    ax.set_xscale("log", base=2)
    _mark(ax, panel, panel.cases, "batch_size", "images_per_s", 1)
    ticks = sorted({case.batch_size for case in panel.cases})
    if len(ticks) == 1:  # of which a logarithmic axis would show nothing
        ax.set_xlim(ticks[0] / 2, 2 * ticks[0])
    width = math.log(ticks[-1] / ticks[0])
    near = any(math.log(b / a) < width / 10 for a, b in pairwise(ticks))
    shown = ticks[:1]  # of labels nearer than a line is high, the first
    for tick in ticks[1:]:
        shown += [tick] * (math.log(tick / shown[-1]) >= width / 28)
    ax.set_xticks(ticks, [f"{tick:g}" * (tick in shown) for tick in ticks], rotation=90 * near)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,.10g}")


def _draw_costs(ax: Axes, panel: Panel) -> None:
    """Plot the time of each setting against its memory, and name those that none beats in both."""
    best = find_frontier(panel.every)
    places = [(case.memory_bytes / GIB, case.epoch_time_s) for case in best]
    ax.plot([x for x, _ in places], [y for _, y in places], drawstyle="steps-post", **_FRONTIER)
    _mark(ax, panel, panel.every, "memory_bytes", "epoch_time_s", GIB)
    also = find_varying(panel.every, [name for name in ORDER if name in FIXED_AXES])
    named: list[tuple[tuple[float, float], list[str]]] = []
    for case, place in zip(best, places, strict=True):
        more = [name_case(case, [n]) for n in also if getattr(case, n) != find_axis(n).default]
        text = " · ".join([f"{case.batch_size:g}", *more])
        if named and np.allclose(place, named[-1][0], rtol=STEADY, atol=0):
            named[-1][1].append(text)  # one name over another could not be read
        elif not named or text != named[-1][1][-1]:  # of two precisions, once
            named.append((place, [text]))
    for place, texts in named:
        # where no other setting is
        ax.annotate("\n".join(dict.fromkeys(texts)), place, (-6, -6), textcoords="offset points",
                    ha="right", va="top", fontsize=9)  # fmt: skip
    ax.set_xlim(left=0, right=1.08 * max(case.memory_bytes / GIB for case in panel.every))


def _mark(ax: Axes, panel: Panel, cases: Sequence[Result], x: str, y: str, unit: float) -> None:
    """Draw a mark for each case, with the range of its repeats: filled if its time can be trusted,
    ringed if it is recommended. Those of a precision are joined if ``x`` is their batch size."""
    for name in (name for name in PRECISIONS if any(case.precision == name for case in cases)):
        mine = [case for case in cases if case.precision == name]
        mine.sort(key=attrgetter(x))
        look: Any = {"color": COLOURS[name][0], "zorder": 3 + 1 / (1 + len(mine))}
        if x == "batch_size":
            ax.plot([case.batch_size for case in mine], [getattr(case, y) for case in mine], **look)
        for case in mine:
            at, value = getattr(case, x) / unit, getattr(case, y)
            hollow = {"markeredgewidth": 0} if case.trusted else _HOLLOW
            if case.spread == Spread.RANGE.value:
                ends = [value - getattr(case, f"{y}_low"), getattr(case, f"{y}_high") - value]
                ends = [[max(0.0, end)] for end in ends]  # a median of reciprocals is rounded
                ax.errorbar(at, value, ends, fmt="none", capsize=3, elinewidth=1.2, **look)
            ax.plot(at, value, MARKERS[name], markersize=7, **hollow, **look)
            if case.cell in panel.chosen:
                ax.plot(at, value, zorder=5, **_RING)


def _list_signs(panels: Sequence[Panel], costs: bool) -> list[Line2D]:
    """Return what a legend explains: precisions, and the signs that are drawn."""
    cases = [case for panel in panels for case in (panel.every if costs else panel.cases)]
    link: Any = {"linestyle": "none"} if costs else {}
    signs = [
        Line2D([], [], color=COLOURS[name][0], marker=MARKERS[name], markersize=7,
               markeredgewidth=0, label=name, **link)
        for name in PRECISIONS if any(case.precision == name for case in cases)
    ]  # fmt: skip
    chosen = {cell for panel in panels for cell in panel.chosen}
    if any(case.cell in chosen for case in cases):
        ring = {**_RING, "markersize": 10}
        signs.append(Line2D([], [], linestyle="none", label="recommended", **ring))
    if any(not case.trusted for case in cases):
        hollow: Any = {"marker": "o", "markersize": 7, "color": INK, **_HOLLOW}
        signs.append(Line2D([], [], linestyle="none", label="has a warning", **hollow))
    if any(case.spread == Spread.RANGE.value for case in cases):
        bar: Any = {"marker": "|", "markersize": 11, "color": INK}
        signs.append(Line2D([], [], linestyle="none", label="range of repeats", **bar))
    return signs


class Drawing(NamedTuple):
    """A figure: the name of its files and of its place on a page, its heading, what to see in it,
    and how a panel is drawn."""

    name: str
    title: str
    caption: str
    x: str
    y: str
    draw: Callable[[Axes, Panel], None]

    @property
    def costs(self) -> bool:
        """Whether it has all settings of a panel, not those of its lines alone."""
        return self.draw is _draw_costs


DRAWINGS = (
    Drawing(
        "images-per-s", "images/s by batch size",
        "Higher is better.",
        "batch size", "images/s", _draw_rates,
    ),
    Drawing(
        "time-memory", "Epoch time against memory",
        "Lower left is better. The dotted line joins the settings that no other beats in both "
        "time and memory; the numbers are their batch sizes.",
        "peak memory (GiB)", "epoch time (s)", _draw_costs,
    ),
)  # fmt: skip


def list_figures(panels: Sequence[Panel]) -> list[tuple[Drawing, list[Panel]]]:
    """Return the figures that there is data for, with the panels of each: costs of several
    settings, and rates of several batch sizes."""
    found = []
    for kind in DRAWINGS:
        varied = [p.every if kind.costs else {case.batch_size for case in p.cases} for p in panels]
        shown = [panel for panel, several in zip(panels, varied, strict=True) if len(several) > 1]
        if not kind.costs and any(case.loss_scale for panel in shown for case in panel.cases):
            kind = kind._replace(caption=f"{kind.caption} Each precision at its main loss scale.")
        found += [(kind, shown)] * bool(shown)
    return found


def draw(kind: Drawing, panels: Sequence[Panel], columns: int, say: Callable[[str], str]) -> Figure:
    """Draw the panels, in so many columns, with the legend of all below them. ``say`` words what is
    counted."""
    wide = min(columns, len(panels))
    high = math.ceil(len(panels) / wide)
    tops: list[tuple[Any, float]] = []
    with mpl.rc_context(_LOOK):
        canvas = Figure((5 * wide, 3.7 * high + 0.5), layout="constrained")
        axes = []
        for place, panel in enumerate(panels, 1):
            ax = canvas.add_subplot(high, wide, place)
            kind.draw(ax, panel)
            ax.set(xlabel=kind.x, ylabel=say(kind.y))
            title = panel.about if kind.costs else panel.title
            ax.set_title(textwrap.fill(clean(title), 60), fontsize=9.5, loc="left")
            sns.despine(ax=ax)
            first = panel.cases[0]
            tops.append(((first.model, first.dataset), ax.get_ylim()[1]))
            axes.append(ax)
        for ax, (what, top) in zip(axes, tops, strict=True):  # of one network, one scale
            ax.set_ylim(0, max(t for of, t in tops if of == what and t <= _APART * top))
        signs = _list_signs(panels, kind.costs)
        canvas.legend(handles=signs, loc="outside lower left", fontsize=9,
                      ncols=3 * wide, handlelength=1.6, columnspacing=1.2)  # fmt: skip
    return canvas


def write_figures(report: Report, folder: Path) -> None:
    """Write each figure as one picture with all its panels, as SVG and PNG, if there is data for
    it. Raises OSError: the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, panels in list_figures(list_panels(report)):
        canvas = draw(kind, panels, 3, report.wording.say)
        path = folder / f"{kind.name}.svg"
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
    _GRID: "var(--grid)",
    PAPER: "var(--paper)",
    **{light: f"var(--{name})" for name, (light, _) in COLOURS.items()},
}
_COLOUR = re.compile("|".join(_VARIABLES))


def inline(canvas: Figure, name: str) -> str:
    """Make a drawing part of a page, with the page's colours, without a background. ``name`` tells
    its ids from those of another."""
    svg = _save(canvas)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, count=1, flags=re.DOTALL)  # the background
    svg = re.sub(r'\b(width|height)="[\d.]+pt" ?', "", svg, count=2)
    svg = svg.replace("'DejaVu Sans'", "inherit")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = _COLOUR.sub(lambda match: _VARIABLES[match[0]], svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
