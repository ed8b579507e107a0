"""Functions that draw the data of a figure into one panel.

Every ``draw_*`` takes the axes, the panel's data, ``whole`` and the main column of the figure.
``whole`` is the data of all its panels, with the number of the ``panel`` as first column; limits,
ticks and series are shared over it.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation, Transform

from bench.precision import PRECISIONS
from bench.render.palette import COLOURS, GRID, INK, MARKERS
from bench.report.figures import frames

APART = 8  # a larger ratio between panels' largest values makes their axis logarithmic
SMALL = 8.5  # points: the font size within the axes
MARKED = 0.03  # of an axis, about the length of a marker

_DASHED: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3))}


def list_series(whole: pd.DataFrame) -> list[str]:
    """Return the precisions of a figure, in their order."""
    held = set(whole["precision"])
    return [name for name in PRECISIONS if name in held]


def plot_lines(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, y: str, **look: Any) -> None:
    """Plot a line per precision over the first column; they differ in more than colour. The legend
    also names those that this panel lacks."""
    x = data.columns[0]
    for name in list_series(whole):
        own = {"color": COLOURS[name][0], "marker": MARKERS[name], "markersize": 7}
        line = data[data["precision"] == name].dropna(subset=[y]).sort_values(x, kind="stable")
        ax.plot(line[x], line[y], label=name, **{"markeredgewidth": 0, **own, **look})
    ax.set(xlabel=x, ylabel=y)


def write_near(ax: Axes, text: str, place: Any, offset: tuple[float, float], **look: Any) -> None:
    """Write a text at an offset, in typographic points, from a place."""
    look = {"textcoords": "offset points", "fontsize": SMALL, **look}
    ax.annotate(text, (place[0], place[1]), xytext=offset, **look).set_in_layout(False)


def add_key(ax: Axes, label: str, **look: Any) -> None:
    """Add to the legend what no series of a panel shows."""
    ax.plot([], [], label=label, **{"color": INK, "linestyle": "", "markeredgewidth": 0, **look})


def share(ax: Axes, way: str, whole: pd.DataFrame, column: str, reach: float = 0) -> None:
    """Make ``x`` or ``y`` cover all panels and ``reach``, from 0, or on a logarithmic scale if the
    panels lie far apart."""
    tops = whole.groupby("panel")[column].max()
    low, high = whole[column].min(), max(tops.max(), reach)
    if low > 0 and tops.max() > APART * tops.min():
        set_logarithmic(ax, way, low / 1.2, high * 1.25)
    else:
        ax.set(**{f"{way}lim": (0, 1.08 * high)})
        getattr(ax, f"{way}axis").set_major_formatter("{x:,.10g}")


def set_logarithmic(ax: Axes, way: str, low: float, high: float) -> None:
    """Give an axis a logarithmic scale, labelled with round numbers, not powers."""
    ax.set(**{f"{way}scale": "log", f"{way}lim": (low, high)})
    if high < 4 * low:
        ticks = [t for t in MaxNLocator(5).tick_values(low, high) if low <= t <= high]
    else:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high < 1e3 * low else (1,)
        ticks = [m * 10.0**n for n in decades for m in steps if low <= m * 10.0**n <= high]
    axis = getattr(ax, f"{way}axis")
    axis.set_ticks(ticks, labels=[f"{tick:,.10g}" for tick in ticks])
    axis.minorticks_off()


def mark_level(ax: Axes, level: float, text: str) -> None:
    """Draw a dashed horizontal line, named at its left end."""
    ax.axhline(level, **_DASHED)
    write_near(ax, text, (0.01, level), (0, 4), xycoords=("axes fraction", "data"))


def is_flat(whole: pd.DataFrame) -> bool:
    """Return whether a figure by batch size has only one; it then has a row per precision."""
    return whole.columns[1] == frames.BATCH and whole[frames.BATCH].nunique() == 1


def draw_batches(
    ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, y: str, reach: float = 0
) -> None:
    """Draw a line per precision over batch sizes or the like, or dots at the only batch size; with
    a bar for each range."""
    if frames.HIGH in whole:
        reach = max(reach, whole[frames.HIGH].max())
    if is_flat(whole):
        _plot_beneath(sns.stripplot, ax, data, whole, y, reach, size=8, jitter=False)
        _draw_ranges(ax, data, whole)
        return
    plot_lines(ax, data, whole, y)
    _draw_ranges(ax, data, whole)
    drawn = whole[data.columns[0]]
    ax.set_xscale("log", base=2)
    ax.set_xlim(drawn.min() / 1.15, drawn.max() * 1.15)
    if "outcome" in whole:
        drawn = drawn[whole["outcome"] != frames.PREDICTED]
    run = sorted(drawn.unique())
    # labels nearer than a third of an octave would overlap
    shown = [t for i, t in enumerate(run) if i == 0 or t / run[i - 1] > 1.25]
    shown = shown[:: math.ceil(len(shown) / 8)]
    ax.set_xticks(shown, [f"{t:g}" for t in shown])
    ax.minorticks_off()
    share(ax, "y", whole, y, reach)


def _draw_ranges(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Draw a bar for each range that is longer than a marker; vertical bars of several series are
    beside each other."""
    if frames.HIGH not in data:
        return
    flat, series = is_flat(whole), list_series(whole)
    long = data[frames.HIGH] - data[frames.LOW] > MARKED * whole[frames.HIGH].max()
    for place, name in enumerate(series):
        part = data[long & (data["precision"] == name)]
        look: dict[str, Any] = {"colors": COLOURS[name][0], "linewidth": 1.8}
        if flat:
            ax.hlines([place] * len(part), part[frames.LOW], part[frames.HIGH], **look)
        else:
            beside = _move(ax, 4, place, len(series))
            ax.vlines(part[data.columns[0]], part[frames.LOW], part[frames.HIGH], **look,
                      transform=beside)  # fmt: skip


def _move(ax: Axes, points: float, place: int, places: int) -> Transform:
    """Return the coordinates of data, moved to one of several ``places``, which are ``points``
    apart and centred on the data."""
    beside = points * (place - (places - 1) / 2)
    return ax.transData + ScaledTranslation(beside / 72, 0, ax.figure.dpi_scale_trans)


def _plot_beneath(
    plot: Any, ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, x: str, reach: float, **look: Any
) -> None:
    order = list_series(whole)
    colours = {name: COLOURS[name][0] for name in order}
    plot(data, x=x, y="precision", hue="precision", order=order, hue_order=order, palette=colours,
         legend=False, ax=ax, **look)  # fmt: skip
    ax.set_ylabel("")
    share(ax, "x", whole, x, reach)


def draw_speeds(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, y: str) -> None:
    """Draw images/s by batch size, with a ring around each knee and a band along each cliff."""
    draw_batches(ax, data, whole, y)
    if frames.MARK not in data or is_flat(whole):
        return
    for precision in list_series(data):
        line = data[data["precision"] == precision].sort_values(frames.BATCH)
        spots, colour = line[[frames.BATCH, y]].to_numpy().tolist(), COLOURS[precision][0]
        for i, mark in enumerate(line[frames.MARK]):
            if mark.startswith(frames.KNEE):
                ax.plot(*spots[i], marker="o", markersize=14, markerfacecolor="none",
                        color=colour, markeredgewidth=1.6)  # fmt: skip
                write_near(ax, mark, spots[i], (0, 10), ha="center")
            elif mark:
                (x0, y0), (x1, y1) = spots[i - 1 : i + 1]
                ax.plot([x0, x1], [y0, y1], color=colour, linewidth=7, alpha=0.3,
                        solid_capstyle="round")  # fmt: skip
                write_near(ax, mark, (math.sqrt(x0 * x1), (y0 + y1) / 2), (6, 5))
    knees = {mark.startswith(frames.KNEE) for mark in whole[frames.MARK].dropna() if mark}
    if True in knees:
        add_key(ax, frames.KNEE, marker="o", markersize=11, markerfacecolor="none",
                markeredgewidth=1.4)  # fmt: skip
    if False in knees:
        add_key(ax, "cliff", linestyle="-", linewidth=6, alpha=0.3)


def draw_memory(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, y: str) -> None:
    """Draw memory by batch size, with its limit and what the process took at its start."""
    outcomes = (frames.FITS, frames.FULL, frames.PREDICTED)
    fits, full, ahead = (data[data["outcome"] == outcome] for outcome in outcomes)
    if is_flat(whole):
        draw_batches(ax, fits, whole[whole["outcome"] == frames.FITS], y)
        return
    level = frames.LIMIT if frames.LIMIT in data else frames.CARD
    card: float = data[level].dropna().iloc[0] if level in data else math.nan
    # a card far above all that was used would flatten the lines
    near = len(full) or data[y].max() > card / 3
    draw_batches(ax, fits, whole, y, 1.06 * card if near else 0)
    if near:
        mark_level(ax, card, f"{level.removesuffix(' (GiB)')}: {card:.4g} GiB")
    for precision, part in ahead.groupby("precision"):
        largest = fits[fits["precision"] == precision].nlargest(1, frames.BATCH)
        line = pd.concat([largest, part.sort_values(frames.BATCH)])
        ax.plot(line[frames.BATCH], line[y], **{**_DASHED, "color": COLOURS[str(precision)][0]})
    if len(ahead):
        add_key(ax, frames.PREDICTED, **_DASHED)
    if frames.START in data and math.isfinite(start := data[frames.START].iloc[0]):
        ax.axhspan(0, start, facecolor=GRID, edgecolor="none", alpha=0.6, zorder=0,
                   label="before the first step")  # fmt: skip
    order = list_series(full)
    for precision, part in full.groupby("precision"):
        # crosses of several precisions are 9 points apart on the same line
        place = _move(ax, 9, order.index(str(precision)), len(order))
        ax.plot(part[frames.BATCH], [card] * len(part), linestyle="", marker="x", markersize=6,
                markeredgewidth=2, color=COLOURS[str(precision)][0], transform=place,
                clip_on=False)  # fmt: skip
    if len(full):
        add_key(ax, frames.FULL, marker="x", markeredgewidth=2)


def draw_scaling(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, y: str) -> None:
    """Draw the speed-up over one GPU by number of GPUs, with a line for linear scaling."""
    draw_batches(ax, data, whole, y)
    sizes = sorted(whole[frames.GPUS].unique())
    ax.plot(sizes, sizes, zorder=1, **_DASHED)
    low, high = min(1.0, whole[y].min()), max(sizes[-1], whole[y].max())
    ax.set_yscale("log", base=2)  # on which that line is straight
    ax.set_ylim(low / 1.15, high * 1.3)
    ticks = [2.0**n for n in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    write_near(ax, "as many times as GPUs", (sizes[-1], sizes[-1]), (0, 8), ha="right")


def draw_curves(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, y: str) -> None:
    """Draw a line per precision through the epoch; published ones are dashed."""
    for run, dashes in (("this sweep", "-"), ("2019", _DASHED["linestyle"])):
        plot_lines(ax, data[data["run"] == run], whole, y, marker="", linestyle=dashes)
        if whole["run"].nunique() > 1:
            add_key(ax, run, linestyle=dashes)
    ax.set_xlim(0, 1.02 * whole[frames.EPOCH].max())
    low, high = whole[y].min(), whole[y].max()
    room = 0.05 * (high - low) or 0.01
    ax.set_ylim(low - room, high + room)


def draw_trade(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, x: str) -> None:
    """Draw time against memory, with the batch sizes of the Pareto front."""
    y, front = frames.MEMORY, data[data["front"] == "yes"]
    ax.plot(front[x], front[y], drawstyle="steps-post", label="Pareto front", **_DASHED)
    plot_lines(ax, data, whole, y, linestyle="", markersize=7.4 if len(data) < 100 else 5.5)
    share(ax, "x", whole, x)
    share(ax, "y", whole, y)
    for place, size in zip(front[[x, y]].to_numpy(), front[frames.BATCH], strict=True):
        write_near(ax, str(size), place, (6, 5))


def find_height(whole: pd.DataFrame) -> float:
    """Return the height of a panel in inches."""
    if is_flat(whole):
        return 0.9 + 0.36 * len(list_series(whole))
    return 3.3
