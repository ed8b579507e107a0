"""Functions that draw the data of a figure into one panel.

Every ``draw_*`` takes the axes, the panel's data, ``whole`` and the main column of the figure.
``whole`` is the data of all its panels, with the number of the ``panel`` as first column; limits,
ticks and series are shared over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation, Transform

from bench.diagnosis.sentences import write_ms
from bench.limits import STEADY
from bench.precision import PRECISIONS
from bench.render.cells import iterate, write_ratio
from bench.render.palette import ACCENT, COLOURS, GRID, INK, MARKERS, PALETTE
from bench.report.figures import frames
from bench.text import count

APART = 8  # a larger ratio between panels' largest values makes their axis logarithmic
SMALL = 8.5  # points: the font size within the axes
MARKED = 0.03  # of an axis, about the length of a marker
FAR = 6  # larger changes are marked at the edge; showing them would hide the others

LESS, MORE = ACCENT, PALETTE[1][0]
"""Colours of time that a part of a step loses or gains; its side and its sign show that too."""

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


def set_logarithmic(ax: Axes, way: str, low: float, high: float, unit: str = "") -> None:
    """Give an axis a logarithmic scale, labelled with round numbers, not powers."""
    ax.set(**{f"{way}scale": "log", f"{way}lim": (low, high)})
    if high < 4 * low:
        ticks = [t for t in MaxNLocator(5).tick_values(low, high) if low <= t <= high]
    else:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high < 1e3 * low else (1,)
        ticks = [m * 10.0**n for n in decades for m in steps if low <= m * 10.0**n <= high]
    if unit == "×":  # a ratio is compared with 1
        near = 0.1 * math.log(high / low)  # labels nearer than this would touch
        ticks = sorted([1.0, *(t for t in ticks if abs(math.log(t)) > near)])
    axis = getattr(ax, f"{way}axis")
    axis.set_ticks(ticks, labels=[f"{tick:,.10g}{unit}" for tick in ticks])
    axis.minorticks_off()


def surround(ax: Axes, values: pd.Series, margin: float) -> None:
    """Limit the y axis to some values, with ``margin`` times their range around them."""
    low, high = values.min(), values.max()
    room = margin * (high - low) or 0.01
    ax.set_ylim(low - room, high + room)


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
    if y == frames.LOSS:
        surround(ax, whole[y], 0.1)
    else:
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


def draw_speedup(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, y: str) -> None:
    """Draw the speed-up over fp32, by batch size or number of GPUs, with a line at 1."""
    draw_batches(ax, data, whole, y, reach=1.1)
    if is_flat(whole):
        ax.axvline(1, **_DASHED)
    else:
        mark_level(ax, 1, "fp32")


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
    surround(ax, whole[y], 0.05)


def draw_trade(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, x: str) -> None:
    """Draw time against memory, with the batch sizes of the Pareto front."""
    y, front = frames.MEMORY, data[data["front"] == "yes"]
    ax.plot(front[x], front[y], drawstyle="steps-post", label="Pareto front", **_DASHED)
    plot_lines(ax, data, whole, y, linestyle="", markersize=7.4 if len(data) < 100 else 5.5)
    share(ax, "x", whole, x)
    share(ax, "y", whole, y)
    for place, size in zip(front[[x, y]].to_numpy(), front[frames.BATCH], strict=True):
        write_near(ax, str(size), place, (6, 5))


def draw_waterfall(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, x: str) -> None:
    """Draw how one step's time becomes another's: a row per part, each starting where the row above
    ends. A tick shows where a part would end at the machine's measured rates."""
    at, numbers = 0.0, []
    for place, (_, before, after, change, floor) in enumerate(data.itertuples(index=False)):
        if total := math.isnan(change):
            at = after if place else before
            start, width, colour, said = 0.0, at, INK, write_ms(at / 1e3)
        else:
            start, width, colour = min(at, at + change), abs(change), MORE if change > 0 else LESS
            said = f"{'+' if change > 0 else ''}{write_ms(change / 1e3)}"
            at += change
        ax.barh(place, width, left=start, height=0.42, color=colour, linewidth=0,
                alpha=0.6 if total else 1)  # fmt: skip
        if not math.isnan(floor):
            ax.plot(at - change + floor - before, place, linestyle="", marker="|", markersize=13,
                    markeredgewidth=1.4, color=INK, label="at the measured rates")  # fmt: skip
        if place < len(data) - 1:
            ax.plot([at, at], [place + 0.21, place + 0.79], color=INK, linewidth=0.7, alpha=0.4)
        numbers.append(f"{said} ms")
    for colour, label in ((LESS, "less time"), (MORE, "more time")):
        add_key(ax, label, marker="s", markersize=8, color=colour)
    ax.set_xlim(min(0, ax.get_xlim()[0]), 1.1 * ax.get_xlim()[1])  # room for the numbers
    ax.xaxis.set_major_formatter("{x:,.10g}")
    ax.set_xlabel("time of a step (ms)")
    write_rows(ax, data["part"], numbers)


def draw_changes(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, x: str) -> None:
    """Draw a row per change: its ratio, the interval of that, and the range of single pairs."""
    columns = whole[[x, "low", "high", "lowest", "highest"]]
    low, high = float(columns.min().min()), float(columns.max().max())
    low, high = min(max(low, 1 / FAR), 0.95) / 1.06, max(min(high, FAR), 1.05) * 1.06
    set_logarithmic(ax, "x", low, high, "×")
    ax.axvspan(1 / (1 + STEADY), 1 + STEADY, facecolor=GRID, edgecolor="none", alpha=0.7, zorder=0,
               label=f"±{100 * STEADY:.0f} %")  # fmt: skip
    ax.axvline(1, color=INK, linewidth=0.8, alpha=0.5, zorder=1)
    for place, row in enumerate(iterate(data)):
        if not math.isnan(row.low):
            ax.plot([row.low, row.high], [place, place], color=ACCENT, linewidth=4,
                    solid_capstyle="butt", label="95 % interval")  # fmt: skip
        if row.pairs > 1:
            # over the interval's bar, and ticks that are longer than its width and the mean's dot
            ax.plot([row.lowest, row.highest], [place, place], color=INK, linewidth=1, marker="|",
                    markersize=10, markeredgewidth=1.2, label="range of the pairs")  # fmt: skip
    sure, within = data["low"].notna(), data[x].between(low, high)
    points = data[x].clip(low * 1.02, high / 1.02)
    for chosen, label, marker, face in (
        (sure & within, "mean", "o", ACCENT),
        (~sure & within, "mean, too few repeats for an interval", "o", "none"),
        (data[x] > high, "beyond the scale", ">", ACCENT),
        (data[x] < low, "beyond the scale", "<", ACCENT),
    ):
        if chosen.any():
            ax.plot(points[chosen], points[chosen].index, linestyle="", marker=marker,
                    markersize=6.5, markerfacecolor=face, markeredgecolor=ACCENT,
                    markeredgewidth=1.3, label=label)  # fmt: skip
    names = [f"{row.change} ({count(row.pairs, 'pair')})" for row in iterate(data)]
    write_rows(ax, names, [f"{write_ratio(ratio)}×" for ratio in data[x]])


def write_rows(ax: Axes, names: Sequence[str] | pd.Series, numbers: Sequence[str]) -> None:
    """Write the name of each row above it, from the top, and its number at the right end."""
    for place, texts in enumerate(zip(names, numbers, strict=True)):
        for x, text, align in zip((0.0, 1.0), texts, ("left", "right"), strict=True):
            written = ax.text(x, place - 0.45, text, ha=align, va="center", fontsize=SMALL + 0.5,
                              transform=ax.get_yaxis_transform())  # fmt: skip
            written.set_in_layout(False)
    ax.set(ylim=(len(numbers) - 0.5, -0.8), yticks=[])
    ax.spines["left"].set_visible(False)
    ax.grid(axis="y", visible=False)


def is_in_rows(whole: pd.DataFrame) -> bool:
    """Return whether a figure has a named row for each row of its data."""
    return bool({"change", "part"} & set(whole))


def find_height(whole: pd.DataFrame) -> float:
    """Return the height of a panel in inches."""
    if is_in_rows(whole):
        return float(0.75 + 0.46 * whole["panel"].value_counts().max())
    if is_flat(whole):
        return 0.9 + 0.36 * len(list_series(whole))
    return 3.3
