"""How each figure's data is drawn into one panel.

Every function takes the axes, the panel's data and ``whole``: the data of all panels of the figure,
each row with the number of its ``panel``, which is what limits, ticks and series are shared over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bench.diagnosis.evidence import write_ms
from bench.limits import STEADY
from bench.precision import PRECISIONS
from bench.render.cells import iterate
from bench.render.palette import ACCENT, COLOURS, GRID, INK, MARKERS, PALETTE
from bench.report.figures.data import (
    CARD,
    COPY,
    FITS,
    FULL,
    GPUS,
    KNEE,
    LIMIT,
    LR,
    MARK,
    MEMORY,
    OVER_FP32,
    PREDICTED,
    PRODUCT,
    SERIES,
    SPEED,
    START,
    TIME,
    WIDER,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

APART = 8
"""Panels whose largest values differ by more than this factor share a logarithmic axis."""

FAR = 6
"""Changes by more than this factor are marked at the edge; to show them would hide the others."""

FASTER, SLOWER = ACCENT, PALETTE[1][0]
"""Time that a part of a step loses or gains; its side and its sign tell it too."""

SMALL = 8.5
"""Font size of what is written within the axes, in points."""

_CROSS = 9
"""Points from one cross to the next of another precision, beside each other on one line."""

_DASHED: tuple[int, tuple[int, int]] = (0, (4, 3))

# seaborn edges markers in white, which stands out on a dark page
_LINE: dict[str, Any] = {"errorbar": None, "dashes": False, "markersize": 7, "markeredgewidth": 0}


def list_series(whole: pd.DataFrame) -> list[str]:
    """The precisions of a figure, in their order."""
    held = set(whole["precision"])
    return [name for name in PRECISIONS if name in held]


def tell_apart(whole: pd.DataFrame) -> dict[str, Any]:
    """How seaborn tells precisions apart: by colour, and by marker for who sees no colour."""
    order = list_series(whole)
    return {
        "hue": "precision",
        "hue_order": order,
        "palette": {name: COLOURS[name][0] for name in order},
        "style": "precision",
        "style_order": order,
        "markers": {name: MARKERS[name] for name in order},
    }


# ------------------------------------------------------------------------------------ shared axes


def share(ax: Axes, way: str, whole: pd.DataFrame, column: str, reach: float = 0) -> None:
    """Give an axis the extent of all panels: from 0, or logarithmic where they lie far apart.

    Args:
        way: ``x`` or ``y``.
        reach: a value to be shown too.
    """
    tops = whole.groupby("panel")[column].max()
    low, high = whole[column].min(), max(tops.max(), reach)
    set_limits = ax.set_xlim if way == "x" else ax.set_ylim
    if low > 0 and tops.max() > APART * tops.min():
        low, high = low / 1.2, high * 1.25
        set_scale = ax.set_xscale if way == "x" else ax.set_yscale
        set_scale("log")
        set_limits(low, high)
        set_log_ticks(ax, way, low, high)
    else:
        set_limits(0, 1.08 * high)
        (ax.xaxis if way == "x" else ax.yaxis).set_major_formatter("{x:,.10g}")


def set_log_ticks(ax: Axes, way: str, low: float, high: float, unit: str = "") -> None:
    """Label a logarithmic axis with round numbers, not powers."""
    from matplotlib.ticker import MaxNLocator

    if high < 4 * low:
        ticks = [t for t in MaxNLocator(5).tick_values(low, high) if low <= t <= high]
    else:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high < 1e3 * low else (1,)
        ticks = [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]
    if unit == "×":  # what a ratio is read against
        near = 0.1 * math.log(high / low)  # labels nearer than this would touch
        ticks = sorted([1.0, *(t for t in ticks if abs(math.log(t)) > near)])
    set_ticks = ax.set_xticks if way == "x" else ax.set_yticks
    set_ticks(ticks, [f"{tick:,.10g}{unit}" for tick in ticks])
    (ax.xaxis if way == "x" else ax.yaxis).minorticks_off()


def set_doublings(ax: Axes, values: pd.Series, extent: pd.Series | None = None) -> None:
    """Give the x axis the scale of batch sizes, ticked at those that were run.

    Args:
        extent: all that is drawn, where that is more than ``values``.
    """
    ax.set_xscale("log", base=2)
    ticks = sorted(values.unique())
    reach = sorted(values.unique() if extent is None else extent.unique())
    ax.set_xlim(reach[0] / 1.15, reach[-1] * 1.15)
    # labels nearer than a third of an octave would overlap
    shown = [t for i, t in enumerate(ticks) if i == 0 or t / ticks[i - 1] > 1.25]
    shown = shown[:: math.ceil(len(shown) / 8)]
    ax.set_xticks(shown, [f"{t:g}" for t in shown])
    ax.minorticks_off()


def mark_level(ax: Axes, level: float, text: str) -> None:
    """Draw a dashed line across, named at its left end."""
    ax.axhline(level, color=INK, linewidth=1, linestyle=_DASHED)
    ax.annotate(text, (0.01, level), xycoords=("axes fraction", "data"), xytext=(0, 4),
                textcoords="offset points", fontsize=SMALL)  # fmt: skip


# ----------------------------------------------------------------------------------- by batch size


def is_flat(whole: pd.DataFrame) -> bool:
    """Whether a figure by batch size has only one: its precisions then stand below each other."""
    return whole.columns[1] == "batch size" and whole["batch size"].nunique() == 1


def draw_batches(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """A line a precision, over batch sizes."""
    import seaborn as sns

    y = data.columns[2]
    if is_flat(whole):
        draw_dots(ax, data, whole)
        return
    sns.lineplot(data, x="batch size", y=y, ax=ax, **_LINE, **tell_apart(whole))
    set_doublings(ax, whole["batch size"])
    share(ax, "y", whole, y)


def draw_speeds(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Images/s by batch size, with a ring around each knee and a band along each cliff."""
    draw_batches(ax, data, whole)
    if MARK not in data or is_flat(whole):
        return
    x, y, order = "batch size", data.columns[2], list_series(data)
    lines = {name: data[data["precision"] == name].sort_values(x) for name in order}
    places, names = [], []
    for precision, line in lines.items():
        colour = COLOURS[precision][0]
        spots = line[[x, y]].to_numpy().tolist()
        for i, mark in enumerate(line[MARK]):
            if not isinstance(mark, str) or not mark:
                continue
            if mark.startswith(KNEE):
                ax.plot(*spots[i], marker="o", markersize=14, markerfacecolor="none",
                        markeredgecolor=colour, markeredgewidth=1.6)  # fmt: skip
                places.append(spots[i])
            else:
                ax.plot(*zip(*spots[i - 1 : i + 1], strict=True), color=colour, linewidth=7,
                        alpha=0.3, solid_capstyle="round")  # fmt: skip
                places.append([math.sqrt(spots[i - 1][0] * spots[i][0]),
                               (spots[i - 1][1] + spots[i][1]) / 2])  # fmt: skip
            names.append(mark)
    marks = whole[MARK].dropna().astype(str)
    if marks.str.startswith(KNEE).any():
        ax.plot([], [], linestyle="", marker="o", markersize=11, markerfacecolor="none",
                markeredgecolor=INK, markeredgewidth=1.4, label=KNEE)  # fmt: skip
    if ((marks != "") & ~marks.str.startswith(KNEE)).any():
        ax.plot([], [], color=INK, linewidth=6, alpha=0.3, label="cliff")
    drawn = [line[[x, y]].to_numpy().tolist() for line in lines.values()]
    name_points(ax, data[[x, y]].to_numpy().tolist(), places, names, drawn)


def draw_dots(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """A dot a precision, at the one batch size there is."""
    import seaborn as sns

    x, order = str(data.columns[2]), list_series(whole)
    sns.stripplot(
        data, x=x, y="precision", hue="precision", order=order, hue_order=order, size=8,
        palette={name: COLOURS[name][0] for name in order}, legend=False, jitter=False, ax=ax,
    )  # fmt: skip
    ax.set_ylabel("")
    share(ax, "x", whole, x)


def draw_memory(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Memory by batch size, with where it ends and what the process took at its start."""
    from matplotlib.transforms import ScaledTranslation

    if is_flat(whole):
        fits = data[data["outcome"] == FITS]
        draw_dots(ax, fits, whole[whole["outcome"] == FITS])
        return
    fits, full, ahead = (data[data["outcome"] == name] for name in (FITS, FULL, PREDICTED))
    draw_batches(ax, fits, whole)
    measured = whole.loc[whole["outcome"] != PREDICTED, "batch size"]
    set_doublings(ax, measured, whole["batch size"])
    level = LIMIT if LIMIT in data and data[LIMIT].notna().any() else CARD
    card: float = data[level].dropna().iloc[0] if level in data else math.nan
    # a card far above all that was used would press the lines to the floor
    if len(full) or data[MEMORY].max() > card / 3:
        mark_level(ax, card, f"{level.removesuffix(' (GiB)')}: {card:.4g} GiB")
        share(ax, "y", whole, MEMORY, reach=1.06 * float(card))
    for precision, part in ahead.groupby("precision"):
        own = fits[fits["precision"] == precision].nlargest(1, "batch size")
        sizes, bytes = (
            [*own[column], *part.sort_values("batch size")[column]]
            for column in ("batch size", MEMORY)
        )
        colour = COLOURS[str(precision)][0]
        ax.plot(sizes, bytes, color=colour, linewidth=1, linestyle=_DASHED)
    if len(ahead):
        ax.plot([], [], color=INK, linewidth=1, linestyle=_DASHED, label=PREDICTED)
    if START in data and math.isfinite(start := data[START].iloc[0]):
        ax.axhspan(0, start, facecolor=GRID, edgecolor="none", alpha=0.6, zorder=0,
                   label="before the first step")  # fmt: skip
    order = list_series(full)
    for precision, part in full.groupby("precision"):
        colour = COLOURS[str(precision)][0]
        beside = _CROSS * (order.index(str(precision)) - (len(order) - 1) / 2)
        place = ax.transData + ScaledTranslation(beside / 72, 0, ax.figure.dpi_scale_trans)
        ax.plot(part["batch size"], [card] * len(part), linestyle="", marker="x", markersize=6,
                markeredgewidth=2, color=colour, transform=place, clip_on=False)  # fmt: skip
        if not (fits["precision"] == precision).any():
            ax.plot([], [], marker=MARKERS[str(precision)], markeredgewidth=0, color=colour,
                    label=precision)  # fmt: skip
    if len(full):
        ax.plot(
            [], [], linestyle="", marker="x", markeredgewidth=2, color=INK, label="out of memory"
        )


def draw_speedup(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Speed-up over fp32, with a line where there is none."""
    draw_batches(ax, data, whole)
    column = data.columns[2]
    if is_flat(whole):
        share(ax, "x", whole, column, reach=1.1)
        ax.axvline(1, color=INK, linewidth=1, linestyle=_DASHED)
    else:
        share(ax, "y", whole, column, reach=1.1)
        mark_level(ax, 1, "fp32")


def draw_scaling(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Speed-up over one GPU by their number, with the line of as many times as GPUs."""
    _draw_gpus(ax, data, whole, WIDER)
    sizes = sorted(whole[GPUS].unique())
    ax.plot(sizes, sizes, color=INK, linewidth=1, linestyle=_DASHED, zorder=1)
    low, high = min(1.0, whole[WIDER].min()), max(sizes[-1], whole[WIDER].max())
    ax.set_yscale("log", base=2)  # on which that line is straight
    ax.set_ylim(low / 1.15, high * 1.3)
    ticks = [2.0**n for n in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.annotate("as many times as GPUs", (sizes[-1], sizes[-1]), xytext=(0, 8), ha="right",
                textcoords="offset points", fontsize=SMALL)  # fmt: skip


def draw_tax(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Speed-up over fp32 by the number of GPUs, with a line where there is none."""
    _draw_gpus(ax, data, whole, OVER_FP32)
    share(ax, "y", whole, OVER_FP32, reach=1.1)
    mark_level(ax, 1, "fp32")


def _draw_gpus(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame, y: str) -> None:
    import seaborn as sns

    sns.lineplot(data, x=GPUS, y=y, ax=ax, **_LINE, **tell_apart(whole))
    set_doublings(ax, whole[GPUS])


def draw_scales(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Loss over static loss scales."""
    import seaborn as sns

    sns.lineplot(data, x="loss scale", y="loss", ax=ax, **_LINE, **tell_apart(whole))
    set_doublings(ax, whole["loss scale"])
    low, high = whole["loss"].min(), whole["loss"].max()
    margin = 0.1 * (high - low) or 0.01
    ax.set_ylim(low - margin, high + margin)


# --------------------------------------------------------------------------------- through a run


def draw_curve(y: str) -> Callable[[Axes, pd.DataFrame, pd.DataFrame], None]:
    """A line a precision through the epoch; published ones are dashed."""

    def draw(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
        import seaborn as sns

        options = {name: value for name, value in tell_apart(whole).items() if name[0] in "hp"}
        if whole["run"].nunique() > 1:
            options["style"] = "run"
            options["dashes"] = {"this sweep": "", "2019": (2, 1.5)}
        sns.lineplot(data, x="epoch (%)", y=y, ax=ax, errorbar=None, **options)
        ax.set_xlim(0, 1.02 * whole["epoch (%)"].max())
        margin = 0.05 * (whole[y].max() - whole[y].min()) or 0.01
        ax.set_ylim(whole[y].min() - margin, whole[y].max() + margin)

    return draw


def draw_rates(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """A line a way in which the learning rate goes, by colour and by dashes."""
    order = list(dict.fromkeys(whole[SERIES]))
    for name, line in data.groupby(SERIES, sort=False):
        place = order.index(str(name))
        ax.plot(line["epoch (%)"], line[LR], label=name, linewidth=1.8,
                color=PALETTE[place % len(PALETTE)][0],
                linestyle=("-", "--", "-.", ":")[place % 4])  # fmt: skip
    ax.set_xlabel("epoch (%)")
    ax.set_ylabel(LR)
    ax.set_xlim(0, 1.02 * whole["epoch (%)"].max())
    share(ax, "y", whole, LR)


def draw_steps(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """A box of step times a precision."""
    import seaborn as sns

    series = tell_apart(whole)
    sns.boxplot(
        data, y="precision", x="step time (ms)", ax=ax, hue="precision", legend=False,
        order=series["hue_order"], hue_order=series["hue_order"], palette=series["palette"],
        saturation=1, width=0.55, linecolor=INK, linewidth=1, fliersize=2.5,
    )  # fmt: skip
    ax.set_ylabel("")
    share(ax, "x", whole, "step time (ms)")


# ----------------------------------------------------------------------------------------- trade


def draw_trade(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Time against memory, with the Pareto front named where there is room."""
    import seaborn as sns

    front = data[data["front"] == "yes"]
    ax.plot(front[TIME], front[MEMORY], drawstyle="steps-post", color=INK, linewidth=1,
            linestyle=_DASHED, label="Pareto front")  # fmt: skip
    options = {"s": 55 if len(data) < 100 else 30, "edgecolor": "none"}
    sns.scatterplot(data, x=TIME, y=MEMORY, ax=ax, **options, **tell_apart(whole))
    share(ax, "x", whole, TIME)
    share(ax, "y", whole, MEMORY)
    spots = front[[TIME, MEMORY]].to_numpy().tolist()
    corners = [[b[0], a[1]] for a, b in pairwise(spots)]
    stairs = [spot for pair in zip(spots, [*corners, spots[-1]], strict=True) for spot in pair]
    name_points(ax, data[[TIME, MEMORY]].to_numpy().tolist(), spots, name_front(front), [stairs])


def name_front(front: pd.DataFrame) -> list[str]:
    """Name cases by batch size and setting, and what these leave alike by more, until they differ.

    >>> import pandas as pd
    >>> columns = ["batch size", "setting", "precision", "loss scale"]
    >>> rows = [(64, "", "fp16", "128"), (64, "", "bf16", ""), (8, "compile", "fp16", "128")]
    >>> name_front(pd.DataFrame(rows, columns=columns))
    ['64, fp16', '64, bf16', '8, compile']
    """
    rows = [
        (f"{size}", setting, precision, f"loss scale {scale}" if scale else "")
        for size, setting, precision, scale in front[
            ["batch size", "setting", "precision", "loss scale"]
        ].itertuples(index=False)
    ]
    names = [", ".join(filter(None, row[:2])) for row in rows]
    for more in (3, 4):
        names = [
            ", ".join(filter(None, row[:more])) if names.count(name) > 1 else name
            for name, row in zip(names, rows, strict=True)
        ]
    return names


Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in points on paper."""

_BESIDE = (("left", 6, 5), ("right", -6, -5 - SMALL), ("left", 6, -5 - SMALL),
           ("center", 0, 6), ("center", 0, -6 - SMALL), ("right", -6, 5))  # fmt: skip
_APART = tuple(
    (side, x, y)
    for reach in (22, 36, 52, 70)
    for side, x, y in (
        ("left", 0.6 * reach, reach), ("center", 0, reach), ("right", -0.6 * reach, reach),
        ("left", 0.6 * reach, -reach), ("center", 0, -reach), ("right", -0.6 * reach, -reach),
        ("left", reach, 0.3 * reach), ("left", reach, -0.3 * reach),
    )
)  # fmt: skip
"""Where a name may stand: which part of it is held, and how far that is from the point."""


def name_points(
    ax: Axes,
    points: Sequence[Sequence[float]],
    named: Sequence[Sequence[float]],
    names: Sequence[str],
    lines: Sequence[Sequence[Sequence[float]]],
) -> None:
    """Write names beside points, where they cover nothing drawn, no other name, and fit.

    A name that would stand near another point too is written further off, with a line to its own.

    Args:
        points: all that are drawn.
        named: where the names belong, in their order.
        lines: what else is drawn, each as the points that it joins.
    """
    scale = 72 / ax.figure.dpi

    def place_on_paper(point: Sequence[float]) -> tuple[float, float]:
        x, y = ax.transData.transform(point)
        return scale * x, scale * y

    dots = [place_on_paper(point) for point in points]
    drawn = [spot for line in lines for spot in _follow([place_on_paper(p) for p in line])]
    box = ax.get_window_extent()
    paper = (scale * box.x0, scale * box.y0 + 3, scale * box.x1, scale * box.y1)
    taken: list[Box] = []
    for point, name in zip(named, names, strict=True):
        x, y = place_on_paper(point)
        others = [dot for dot in dots if math.dist(dot, (x, y)) > 1]
        width = 0.58 * SMALL * len(name)
        for apart, (side, dx, dy) in [(p in _APART, p) for p in (*_BESIDE, *_APART)]:
            x0 = x + dx - width * {"left": 0, "center": 0.5, "right": 1}[side]
            text = (x0, y + dy, x0 + width, y + dy + SMALL)
            if not (paper[0] <= text[0] and text[2] <= paper[2]):
                continue
            if not (paper[1] <= text[1] and text[3] <= paper[3]):
                continue
            if _holds(text, dots, 4) or (not apart and _holds(text, others, 9)):
                continue
            if _holds(text, drawn) or any(_overlap(text, other) for other in taken):
                continue
            end = (x + dx, y + dy + (0 if dy > 0 else SMALL))
            leader = [_between((x, y), end, i / 12) for i in range(13)] if apart else []
            if any(math.dist(step, dot) < 4 for step in leader[3:] for dot in others):
                continue
            if any(_holds(other, leader) for other in taken):
                continue
            taken.append(text)
            drawn += leader
            line = {"arrowstyle": "-", "color": INK, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
            written = ax.annotate(
                name, (point[0], point[1]), xytext=(dx, dy), fontsize=SMALL, ha=side, va="bottom",
                textcoords="offset points",
            )  # fmt: skip
            written.set_in_layout(False)
            if apart:
                tie = ax.annotate(
                    "", (point[0], point[1]), xytext=(dx, end[1] - y), textcoords="offset points",
                    arrowprops=line,
                )  # fmt: skip
                tie.set_in_layout(False)
            break


def _holds(box: Box, points: Sequence[tuple[float, float]], margin: float = 0) -> bool:
    """Whether any of some points lies within a box, or less than a margin outside."""
    left, bottom, right, top = box
    return any(
        left - margin < x < right + margin and bottom - margin < y < top + margin for x, y in points
    )


def _overlap(one: Box, other: Box) -> bool:
    return (
        one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
    )  # fmt: skip


def _between(
    start: tuple[float, float], end: tuple[float, float], share: float
) -> tuple[float, float]:
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def _follow(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Points at most 4 apart along a line."""
    for start, end in pairwise(points):
        parts = math.ceil(math.dist(start, end) / 4)
        yield from (_between(start, end, i / parts) for i in range(parts))


# ------------------------------------------------------------------------------------ of one step


def draw_waterfall(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """From one step's time to another's, a row a part, each from where the row above has ended.

    A tick is where a part would have ended at the machine's measured rates.
    """
    totals, at = data["change (ms)"].isna(), 0.0
    for place, row in enumerate(data.itertuples(index=False)):
        part, before, after, change, floor = row[:5]
        if totals[place]:
            at = after if place else before
            start, width, colour, said = 0.0, at, INK, f"{write_ms(at / 1e3)} ms"
        else:
            start, width = (at, change) if change > 0 else (at + change, -change)
            colour = SLOWER if change > 0 else FASTER
            said = f"{'+' if change > 0 else ''}{write_ms(change / 1e3)} ms"
            at += change
        ax.barh(place, width, left=start, height=0.42, color=colour, linewidth=0,
                alpha=0.6 if totals[place] else 1)  # fmt: skip
        if floor == floor and not totals[place]:
            ax.plot(at - change + floor - before, place, linestyle="", marker="|", markersize=13,
                    markeredgewidth=1.4, color=INK, label="at the measured rates")  # fmt: skip
        if place < len(data) - 1:
            ax.plot([at, at], [place + 0.21, place + 0.79], color=INK, linewidth=0.7, alpha=0.4)
        write_row(ax, place, part, said)
    for colour, label in ((FASTER, "less time"), (SLOWER, "more time")):
        ax.plot([], [], linestyle="", marker="s", markersize=8, markeredgewidth=0, color=colour,
                label=label)  # fmt: skip
    ax.set_xlim(min(0, ax.get_xlim()[0]), 1.1 * ax.get_xlim()[1])  # room for the numbers
    ax.xaxis.set_major_formatter("{x:,.10g}")
    ax.set_xlabel("time of a step (ms)")
    finish_rows(ax, len(data))


def draw_roofline(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """The kinds of work of a step under what the machine was measured to do.

    A kind that has no FLOP stands in a strip at the left edge, as far below the roof as it moves
    fewer bytes a second than a copy; the area of a point is its share of the step.
    """
    copy = float(data[COPY].max()) / 1e3  # TB/s: times FLOP/byte, that is TFLOP/s
    roofs = data.groupby("precision")[PRODUCT].max()
    intensities = data["FLOP/byte"][data["FLOP/byte"] > 0]
    edge = min([1.0, *intensities]) / 2
    end = 3 * max([*intensities, *(roofs / copy)])
    strip = edge / (end / edge) ** 0.3
    free = list(dict.fromkeys(data.loc[~(data["FLOP/byte"] > 0), "work"]))
    spots: dict[str, list[tuple[float, tuple[float, float]]]] = {}
    for precision in list_series(data):
        colour, roof = COLOURS[precision][0], float(roofs[precision])
        ax.plot([strip, roof / copy, end], [copy * strip, roof, roof], color=colour, linewidth=1.4)
        said = f"{roof:.3g} {SPEED}"  # the unit of the axis
        ax.annotate(said, (end, roof), xytext=(0, 3), fontsize=SMALL,
                    textcoords="offset points", ha="right")  # fmt: skip
        ax.plot([], [], linestyle="", marker=MARKERS[precision], color=colour, markersize=7,
                markeredgewidth=0, label=precision)  # fmt: skip
        for row in data[data["precision"] == precision].itertuples(index=False):
            kind, _, intensity, speed, traffic, share = row[:6]
            if kind in free:  # along its line it may stand anywhere
                intensity = strip * (edge / strip) ** ((free.index(kind) + 0.5) / len(free))
                speed = traffic / 1e3 * intensity
            size = max(4.0, 2.4 * share**0.5)
            ax.plot(intensity, speed, linestyle="", marker=MARKERS[precision], color=colour,
                    markersize=size, alpha=0.85, markeredgewidth=0)  # fmt: skip
            spots.setdefault(kind, []).append((share, (intensity, speed)))
    for places in spots.values():
        ax.plot(*zip(*(place for _, place in places), strict=True), color=INK, linewidth=0.7,
                alpha=0.6, zorder=1)  # fmt: skip
    ax.axvspan(strip, edge, facecolor=GRID, edgecolor="none", alpha=0.5, zorder=0, label="no FLOP")
    points = [place for places in spots.values() for _, place in places]
    low, high = min(speed for _, speed in points) / 5, max(roofs) * 2.5
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(strip, end)
    ax.set_ylim(low, high)
    set_log_ticks(ax, "x", edge, end)
    set_log_ticks(ax, "y", low, high)
    ax.set_xlabel("FLOP/byte")
    ax.set_ylabel(SPEED)
    order = sorted(spots, key=lambda kind: -max(share for share, _ in spots[kind]))
    lines = [[[strip, copy * strip], [r / copy, r], [end, r]] for r in roofs]
    above = (high / low) ** 0.035  # where the rates are written
    lines += [[[end * (strip / end) ** 0.25, above * r], [end, above * r]] for r in roofs]
    name_points(ax, points, [max(spots[kind])[1] for kind in order], order, lines)


# ---------------------------------------------------------------------------------------- changes


def draw_changes(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """A row a change: its ratio, the interval of it and how far single pairs lie."""
    columns = ["ratio", "low", "high", "lowest", "highest"]
    low, high = (float(end) for end in (whole[columns].min().min(), whole[columns].max().max()))
    low, high = min(max(low, 1 / FAR), 0.95) / 1.06, max(min(high, FAR), 1.05) * 1.06
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    set_log_ticks(ax, "x", low, high, "×")
    ax.axvspan(1 / (1 + STEADY), 1 + STEADY, facecolor=GRID, edgecolor="none", alpha=0.7, zorder=0,
               label=f"±{100 * STEADY:.0f} %")  # fmt: skip
    ax.axvline(1, color=INK, linewidth=0.8, alpha=0.5, zorder=1)
    for place, row in enumerate(iterate(data)):
        if row.low == row.low:
            ax.plot([row.low, row.high], [place, place], color=ACCENT, linewidth=4,
                    solid_capstyle="butt", label="95 % interval")  # fmt: skip
        if row.pairs > 1:
            # over the interval's bar, and ticks that are longer than its width and the mean's dot
            ax.plot([row.lowest, row.highest], [place, place], color=INK, linewidth=1, marker="|",
                    markersize=10, markeredgewidth=1.2, label="range of the pairs")  # fmt: skip
        name = f"{row.change} ({row.pairs} pair{'s' if row.pairs > 1 else ''})"
        write_row(ax, place, name, write_ratio(row.ratio))
    sure = data["low"].notna()
    beyond = (data["ratio"] < low) | (data["ratio"] > high)
    points = data["ratio"].clip(low * 1.02, high / 1.02)
    for chosen, label, marker, face in (
        (sure & ~beyond, "mean", "o", ACCENT),
        (~sure & ~beyond, "mean, too few repeats for an interval", "o", "none"),
        (beyond & (data["ratio"] > 1), "beyond the scale", ">", ACCENT),
        (beyond & (data["ratio"] < 1), "beyond the scale", "<", ACCENT),
    ):
        if chosen.any():
            ax.plot(points[chosen], points[chosen].index, linestyle="", marker=marker,
                    markersize=6.5, markerfacecolor=face, markeredgecolor=ACCENT,
                    markeredgewidth=1.3, label=label)  # fmt: skip
    finish_rows(ax, len(data))


def write_ratio(ratio: float) -> str:
    """A ratio for people: two decimals, more below 0.1."""
    return f"{ratio:.2f}×" if ratio >= 0.1 else f"{ratio:.2g}×"


def draw_pairs(ax: Axes, data: pd.DataFrame, whole: pd.DataFrame) -> None:
    """A row a pair: the time with a switch off, and on."""
    times = ["off (s)", "on (s)"]
    low, high = whole[times].min().min(), whole[times].max().max()
    if high > APART * low:
        ax.set_xscale("log")
        ax.set_xlim(low / 1.2, high * 1.2)
        set_log_ticks(ax, "x", low / 1.2, high * 1.2)
    else:
        ax.set_xlim(0, 1.06 * high)
        ax.xaxis.set_major_formatter("{x:,.10g}")
    colours = [COLOURS[name][0] for name in data["precision"]]
    for place, (case, _, off, on, speed) in enumerate(data.itertuples(index=False)):
        ax.plot([off, on], [place, place], color=colours[place], linewidth=2)
        write_row(ax, place, case, write_ratio(speed))
    for column, label, marker in (("off (s)", "off", "|"), ("on (s)", "on", "o")):
        ax.scatter(data[column], range(len(data)), marker=marker, s=70 if marker == "|" else 42,
                   c=colours, linewidths=2, zorder=3)  # fmt: skip
        ax.plot([], [], linestyle="", marker=marker, color=INK, markeredgewidth=2, label=label)
    ax.set_xlabel(TIME)
    finish_rows(ax, len(data))


def write_row(ax: Axes, place: int, left: str, right: str) -> None:
    """Write above a row: what it is, and its number at the right end."""
    for x, text, align in ((0.0, left, "left"), (1.0, right, "right")):
        written = ax.text(x, place - 0.45, text, ha=align, va="center", fontsize=SMALL + 0.5,
                          transform=ax.get_yaxis_transform())  # fmt: skip
        written.set_in_layout(False)


def finish_rows(ax: Axes, rows: int) -> None:
    """Rows from the top, with their names above them instead of beside the axis."""
    ax.set_ylim(rows - 0.5, -0.8)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.grid(axis="y", visible=False)


def is_in_rows(whole: pd.DataFrame) -> bool:
    """Whether a figure has a named row for each of its data's."""
    return bool({"change", "case", "part"} & set(whole))


def find_height(whole: pd.DataFrame) -> float:
    """How high a panel must be, in inches."""
    rows = whole.groupby("panel").size().max()
    if is_in_rows(whole):
        return float(0.75 + 0.46 * rows)
    if "step time (ms)" in whole or is_flat(whole):
        return 0.9 + 0.36 * len(list_series(whole))
    if SERIES in whole:
        return 2.6 + 0.2 * whole[SERIES].nunique()  # a line of the legend each
    return 3.3
