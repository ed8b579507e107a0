"""The report's figures: each a tidy frame first, then drawn from it by seaborn.

A figure has one panel a machine and setting. Ink and series have colours of their own here, which
the page replaces by CSS variables, so that one SVG reads on light and on dark.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.precision import PRECISIONS
from bench.record import MEASURED, Status
from bench.report import quantities, summaries
from bench.report.cells import iterate
from bench.report.model import Cell, Head, Report, Table
from bench.report.quantities import GIB, QUANTITIES, Quantity
from bench.report.sweeps import Sweep
from bench.report.tables import loss_scale_batch, main_loss_scale
from bench.text import clean

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_PANELS = 4
"""Panels of one figure: the machines and settings with the most cases."""

MOST_POINTS = 300
"""Points of one panel."""

MOST_STEP_BYTES = 100_000_000
"""Steps files above this are not read for curves: pandas would need ten times as much memory."""

INK, GRID = "#15181c", "#c9ced6"

_PALETTE: tuple[tuple[str, str], ...] = (
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
)
_SHAPES = "osD^vPX*<>hpd"  # matplotlib's markers

COLOURS: dict[str, tuple[str, str]] = dict(zip(PRECISIONS, cycle(_PALETTE), strict=False))
"""Precision -> its colour on light and on dark; each at least 4.5 : 1 against its background."""

_MARKERS: dict[str, str] = dict(zip(PRECISIONS, cycle(_SHAPES), strict=False))


@dataclass(frozen=True)
class Panel:
    """One drawing: ``data`` is tidy and in the units its columns name."""

    title: str
    data: pd.DataFrame
    svg: str
    png: bytes | None
    alt: str


@dataclass(frozen=True)
class Figure:
    """A figure with its panels."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Group:
    """The cases of one panel, and where to look for their steps."""

    title: str
    cases: pd.DataFrame
    report: Report
    steps: Callable[[str], pd.DataFrame]  # of a sweep's name


@dataclass(frozen=True)
class Sketch:
    """How a figure is made: its data from a group's cases, and the drawing of it.

    ``value`` is the column that is the point of it.
    """

    name: str
    title: str
    caption: str
    value: str
    take: Callable[[Group], pd.DataFrame]
    draw: Callable[[Axes, pd.DataFrame], None]


# ------------------------------------------------------------------------------------------- data


def by_batch(quantity: Quantity) -> Callable[[Group], pd.DataFrame]:
    """Take one quantity by batch size and precision, each at its main loss scale."""
    y = name_axis(quantity)

    def take(group: Group) -> pd.DataFrame:
        rows = _main_cases(group.cases)
        believed = rows["status"] != Status.INVALID.value
        rows = rows[rows[quantity.name].notna() & believed].sort_values("batch_size")
        return _frame(
            {
                "batch size": rows["batch_size"],
                "precision": rows["precision"],
                y: rows[quantity.name] / quantity.scale,
            }
        )

    return take


def name_axis(quantity: Quantity) -> str:
    """A quantity's label with its unit: ``memory (GiB)``."""
    return f"{quantity.label} ({quantity.unit})" if quantity.unit else quantity.label


def _main_cases(cases: pd.DataFrame) -> pd.DataFrame:
    keep = cases["precision"].isin([])
    for precision, part in cases.groupby("precision", sort=False):
        scale = main_loss_scale(str(precision), part["loss_scale"])
        keep |= (cases["precision"] == precision) & (cases["loss_scale"] == scale)
    return cases[keep]


def _frame(columns: dict[str, pd.Series]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(columns).reset_index(drop=True)


_MEMORY = name_axis(QUANTITIES["memory_bytes"])
_TIME = name_axis(QUANTITIES["epoch_time_s"])


def take_memory(group: Group) -> pd.DataFrame:
    """Memory by batch size; what ran out of memory stands at the card's size."""
    import pandas as pd

    data = by_batch(QUANTITIES["memory_bytes"])(group).assign(outcome="fits")
    full = _main_cases(group.cases)
    full = full[full["status"].isin([Status.OOM.value, Status.OOM_SUSPECTED.value])]
    card = group.cases["gpu_memory_bytes"].dropna()
    if len(data) and len(card) and (group.cases["device"] == "cuda").all():
        size = float(card.iloc[0]) / GIB
        lost = _frame({"batch size": full["batch_size"], "precision": full["precision"]})
        lost[_MEMORY], lost["outcome"] = size, "out of memory"
        data = pd.concat([data, lost], ignore_index=True)
        data["card (GiB)"] = size
    return data


def take_scales(group: Group) -> pd.DataFrame:
    """Loss by static scale, at the largest batch size with several."""
    rows = group.cases[~group.cases["loss_scale"].isin(["", "dynamic"])]
    rows = rows[rows["train_loss"].notna()]
    kept = [
        part[part["batch_size"] == loss_scale_batch(part)].index
        for _, part in rows.groupby("precision")
    ]
    rows = rows.loc[[i for index in kept for i in index]]
    rows = rows[rows.groupby("precision")["loss_scale"].transform("nunique") > 1]
    data = _frame(
        {
            "loss scale": rows["loss_scale"].astype(float),
            "precision": rows["precision"],
            "batch size": rows["batch_size"],
            "loss": rows["train_loss"],
        }
    )
    return data.sort_values(["precision", "loss scale"]).reset_index(drop=True)


def take_trade(group: Group) -> pd.DataFrame:
    """Time against memory; ``front`` says which cases no other beats in both."""
    rows = group.cases[group.cases[["epoch_time_s", "memory_bytes"]].notna().all(axis=1)]
    rows = rows.sort_values(["epoch_time_s", "memory_bytes"])
    spots = rows[["epoch_time_s", "memory_bytes"]].drop_duplicates()
    spots = spots[spots["memory_bytes"] < spots["memory_bytes"].cummin().shift(fill_value=math.inf)]
    pairs = set(zip(spots["epoch_time_s"], spots["memory_bytes"], strict=True))
    front = [pair in pairs for pair in zip(rows["epoch_time_s"], rows["memory_bytes"], strict=True)]
    data = _frame(
        {
            _TIME: rows["epoch_time_s"],
            _MEMORY: rows["memory_bytes"] / GIB,
            "precision": rows["precision"],
            "batch size": rows["batch_size"],
            "loss scale": rows["loss_scale"],
        }
    )
    data["front"] = ["yes" if best else "no" for best in front]
    if len(data) < 2:
        return data.head(0)
    return data if len(data) <= MOST_POINTS else _thin(data, keep=data["front"] == "yes")


def _thin(data: pd.DataFrame, keep: pd.Series | None = None) -> pd.DataFrame:
    chosen = data.index % math.ceil(len(data) / MOST_POINTS) == 0
    return data[chosen if keep is None else chosen | keep].reset_index(drop=True)


def _curve_cases(group: Group) -> pd.DataFrame:
    """One measured run a precision, all at one batch size: the one most precisions have."""
    rows = _main_cases(group.cases)
    rows = rows[rows["status"].isin([s.value for s in MEASURED])]
    if not len(rows):
        return rows
    held = rows.groupby("batch_size")["precision"].nunique()
    return rows[rows["batch_size"] == held.idxmax()].drop_duplicates("precision")


def _steps_of(rows: pd.DataFrame, group: Group) -> Iterator[tuple[Any, pd.DataFrame]]:
    for row in iterate(rows):
        steps = group.steps(str(row.sweep))
        mine = steps[steps["record_id"] == row.record_id]
        if len(mine):
            yield row, mine


def thin_steps(steps: pd.DataFrame, images: float, points: int = 40) -> pd.DataFrame:
    """Steps as at most ``points`` means over images, by share of an epoch."""
    steps = steps[steps["images"] > 0]
    seen = steps["images"].cumsum()
    bin = ((seen - 1) * points // max(float(seen.max()), 1)).astype(int)
    weighted = (steps["loss"] * steps["images"]).groupby(bin).sum(min_count=1)
    total = steps["images"].where(steps["loss"].notna()).groupby(bin).sum()
    hits, all = steps["correct"].groupby(bin).sum(), steps["images"].groupby(bin).sum()
    return _frame(
        {
            "epoch (%)": 100 * seen.groupby(bin).max() / images,
            "loss": weighted / total.where(total > 0),
            "accuracy (%)": 100 * hits / all,
        }
    )


def take_curves(group: Group) -> pd.DataFrame:
    """Loss and accuracy through the epoch per precision, and the published curves that match."""
    import pandas as pd

    rows = _curve_cases(group)
    curves = []
    for row, steps in _steps_of(rows, group):
        images = row.train_images if row.train_images > 0 else steps["images"].sum()
        curve = thin_steps(steps, images)
        curves.append(curve.assign(precision=row.precision, run="this sweep", batch=row.batch_size))
    reference = group.report.reference
    if curves and reference is not None and (group.cases["kind"] != "published").any():
        theirs = reference.records
        for name in ("model", "dataset"):
            theirs = theirs[theirs[name] == group.cases[name].iloc[0]]
        keys = rows[["precision", "batch_size", "loss_scale"]]
        steps = group.steps("")
        for row in iterate(theirs.merge(keys)):
            mine = steps[steps["record_id"] == row.record_id]
            if len(mine):
                curve = thin_steps(mine, row.train_images)
                curves.append(
                    curve.assign(precision=row.precision, run="2019", batch=row.batch_size)
                )
    if not curves:
        return pd.DataFrame()
    return pd.concat(curves, ignore_index=True).rename(columns={"batch": "batch size"})


def take_steps(group: Group) -> pd.DataFrame:
    """Step times per precision, at the batch size of the curves."""
    import pandas as pd

    parts = []
    for row, steps in _steps_of(_curve_cases(group), group):
        times = 1e3 * steps["time_s"].dropna()
        if len(times) >= 5:
            part = _frame({"step time (ms)": times})
            part = part if len(part) <= MOST_POINTS else _thin(part)
            parts.append(part.assign(precision=row.precision, **{"batch size": row.batch_size}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


# ---------------------------------------------------------------------------------------- drawing


def _series(data: pd.DataFrame) -> dict[str, Any]:
    """How seaborn tells precisions apart: by colour, and by marker for who sees no colour."""
    order = [name for name in PRECISIONS if (data["precision"] == name).any()]
    return {
        "hue": "precision",
        "hue_order": order,
        "palette": {name: COLOURS[name][0] for name in order},
        "style": "precision",
        "style_order": order,
        "markers": {name: _MARKERS[name] for name in order},
    }


# seaborn edges markers in white, which stands out on a dark page
_LINE: dict[str, Any] = {"errorbar": None, "dashes": False, "markersize": 7, "markeredgewidth": 0}


def _draw_batches(ax: Axes, data: pd.DataFrame) -> None:
    import seaborn as sns

    y = data.columns[2]
    sns.lineplot(data, x="batch size", y=y, ax=ax, **_LINE, **_series(data))
    _set_batches(ax, data["batch size"])
    ax.set_ylim(0, 1.08 * data[y].max())


def _set_batches(ax: Axes, sizes: pd.Series) -> None:
    ax.set_xscale("log", base=2)
    ticks = sorted(sizes.unique())
    # labels nearer than a third of an octave would overlap
    shown = [t for i, t in enumerate(ticks) if i == 0 or t / ticks[i - 1] > 1.25]
    shown = shown[:: math.ceil(len(shown) / 8)]
    ax.set_xticks(shown, [f"{t:g}" for t in shown])
    ax.minorticks_off()


def _draw_memory(ax: Axes, data: pd.DataFrame) -> None:
    _draw_batches(ax, data[data["outcome"] == "fits"])
    full = data[data["outcome"] != "fits"]
    if "card (GiB)" not in data:
        return
    size = data["card (GiB)"].iloc[0]
    ax.axhline(size, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.annotate(f"card: {size:.1f} GiB", (0.01, size), xycoords=("axes fraction", "data"),
                xytext=(0, 4), textcoords="offset points", fontsize=8.5)  # fmt: skip
    order = [name for name in PRECISIONS if (data["precision"] == name).any()]
    for precision, part in full.groupby("precision"):
        y = size * (0.97 - 0.03 * order.index(str(precision)))  # below each other, not over
        ax.plot(part["batch size"], [y] * len(part), linestyle="", marker="x", markersize=7,
                markeredgewidth=2, color=COLOURS[str(precision)][0])  # fmt: skip
        if not ((data["precision"] == precision) & (data["outcome"] == "fits")).any():
            ax.plot([], [], marker=_MARKERS[str(precision)], markeredgewidth=0,
                    color=COLOURS[str(precision)][0], label=precision)  # fmt: skip
    if len(full):
        _set_batches(ax, data["batch size"])
        ax.plot(
            [], [], linestyle="", marker="x", markeredgewidth=2, color=INK, label="out of memory"
        )
    ax.set_ylim(0, 1.12 * max(size, data[_MEMORY].max()))


def _draw_speedup(ax: Axes, data: pd.DataFrame) -> None:
    _draw_batches(ax, data)
    ax.set_ylim(0, 1.08 * max(1, data["speed-up (×)"].max()))
    ax.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.annotate("fp32", (0.01, 1), xycoords=("axes fraction", "data"), xytext=(0, 4),
                textcoords="offset points", fontsize=8.5)  # fmt: skip


def _draw_curve(y: str) -> Callable[[Axes, pd.DataFrame], None]:
    def draw(ax: Axes, data: pd.DataFrame) -> None:
        import seaborn as sns

        options = {name: value for name, value in _series(data).items() if name[0] in "hp"}
        if data["run"].nunique() > 1:
            options["style"] = "run"
            options["dashes"] = {"this sweep": "", "2019": (2, 1.5)}
        sns.lineplot(data, x="epoch (%)", y=y, ax=ax, errorbar=None, **options)

    return draw


def _draw_scales(ax: Axes, data: pd.DataFrame) -> None:
    import seaborn as sns

    sns.lineplot(data, x="loss scale", y="loss", ax=ax, **_LINE, **_series(data))
    _set_batches(ax, data["loss scale"])


def _draw_trade(ax: Axes, data: pd.DataFrame) -> None:
    import seaborn as sns

    front = data[data["front"] == "yes"]
    ax.plot(front[_TIME], front[_MEMORY], drawstyle="steps-post", color=INK, linewidth=1,
            linestyle=(0, (4, 3)), label="Pareto front")  # fmt: skip
    sns.scatterplot(data, x=_TIME, y=_MEMORY, ax=ax, s=55, edgecolor="none", **_series(data))
    written = -math.inf
    for _, row in front.sort_values(_MEMORY).iterrows():
        if row[_MEMORY] - written < 0.07 * data[_MEMORY].max():
            continue  # it would overlap the one below
        written = row[_MEMORY]
        ax.annotate(str(row["batch size"]), (row[_TIME], row[_MEMORY]), xytext=(5, 5),
                    textcoords="offset points", fontsize=8.5)  # fmt: skip
    ax.set_xlim(0, 1.08 * data[_TIME].max())
    ax.set_ylim(0, 1.08 * data[_MEMORY].max())


def _draw_steps(ax: Axes, data: pd.DataFrame) -> None:
    import seaborn as sns

    series = _series(data)
    sns.boxplot(
        data, y="precision", x="step time (ms)", ax=ax, hue="precision", legend=False,
        order=series["hue_order"], hue_order=series["hue_order"], palette=series["palette"],
        saturation=1, width=0.55, linecolor=INK, linewidth=1, fliersize=2.5,
    )  # fmt: skip
    ax.set_ylabel("")
    ax.set_xlim(left=0)


_OTHERS = "Each precision at its main loss scale"

SKETCHES: tuple[Sketch, ...] = (
    Sketch(
        "epoch-time",
        "Epoch time by batch size",
        f"Lower is better. {_OTHERS}.",
        _TIME,
        by_batch(QUANTITIES["epoch_time_s"]),
        _draw_batches,
    ),
    Sketch(
        "images-per-s",
        "Images per second by batch size",
        f"Higher is better. {_OTHERS}.",
        "images/s",
        by_batch(QUANTITIES["images_per_s"]),
        _draw_batches,
    ),
    Sketch(
        "memory",
        "Memory by batch size",
        f"Lower is better. {_OTHERS}. A cross below the card's size: that batch ran out of memory.",
        _MEMORY,
        take_memory,
        _draw_memory,
    ),
    Sketch(
        "speed-up",
        "Speed-up over fp32 at the same batch size",
        f"Higher is better; at 1 a precision is as fast as fp32. {_OTHERS}.",
        "speed-up (×)",
        by_batch(QUANTITIES["speedup"]),
        _draw_speedup,
    ),
    Sketch(
        "loss-curve",
        "Loss through the epoch",
        "Mean cross-entropy of the images since the point before.",
        "loss",
        take_curves,
        _draw_curve("loss"),
    ),
    Sketch(
        "accuracy-curve",
        "Accuracy through the epoch",
        "Images predicted right among those since the point before.",
        "accuracy (%)",
        take_curves,
        _draw_curve("accuracy (%)"),
    ),
    Sketch(
        "loss-by-scale",
        "Loss by static loss scale",
        "Mean cross-entropy over the epoch, at the largest batch size with several scales.",
        "loss",
        take_scales,
        _draw_scales,
    ),
    Sketch(
        "time-memory",
        "Time against memory",
        "Towards the lower left is better. On the dashed front, with their batch sizes: the cases "
        "that no other beats in both.",
        _TIME,
        take_trade,
        _draw_trade,
    ),
    Sketch(
        "step-time",
        "Distribution of step times",
        "Box: quartiles and median; whiskers: 1.5 times the quartiles' distance; dots: beyond.",
        "step time (ms)",
        take_steps,
        _draw_steps,
    ),
    Sketch(
        "energy",
        "Energy of an epoch by batch size",
        f"Lower is better. {_OTHERS}.",
        "energy (J)",
        by_batch(QUANTITIES["energy_per_epoch_j"]),
        _draw_batches,
    ),
)

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


def draw_figures(report: Report, png: bool = False) -> list[Figure]:
    """Draw every figure the records have data for.

    Args:
        png: also rasterise each panel.
    """
    groups = list(group_cases(report))
    figures = []
    for sketch in SKETCHES:
        panels = []
        for group in groups:
            data = sketch.take(group)
            if not len(data):
                continue
            title = group.title
            if "batch size" in data and sketch.take in (take_curves, take_steps, take_scales):
                sizes = data["batch size"].unique()
                title += f", batch size {' and '.join(map(str, sizes))}"
            panels.append(_draw_panel(sketch, title, data, png))
        if panels:
            figures.append(Figure(sketch.name, sketch.title, sketch.caption, tuple(panels)))
    return figures


def undrawn(figures: Sequence[Figure]) -> list[str]:
    """Titles of the figures the records have no data for."""
    drawn = {figure.name for figure in figures}
    return [sketch.title for sketch in SKETCHES if sketch.name not in drawn]


def group_cases(report: Report) -> Iterator[Group]:
    """The largest groups of cases of one machine and setting, in the order of the tables."""
    read: dict[str, pd.DataFrame] = {}
    sweeps: dict[str, Sweep] = {sweep.name: sweep for sweep in report.sweeps}
    if report.reference:
        sweeps[""] = report.reference

    def steps(name: str) -> pd.DataFrame:
        if name not in read:
            read[name] = sweeps[name].read_steps(MOST_STEP_BYTES)
        return read[name]

    groups = []
    for section in report.sections:
        for pair, part in section.cases.groupby(list(summaries.SOURCE), sort=False):
            machine = report.machines[str(pair[0]), str(pair[1])]
            parts = [machine]
            if len(report.sections) > 1:
                parts.append(section.title)
            elif part["fake"].all():
                parts.append("not measured")
            if part["synthetic"].any():
                parts.append("synthetic images")
            if part["extrapolated"].any():
                parts.append("extrapolated from part of an epoch")
            groups.append(Group(" · ".join(parts), part, report, steps))
    largest = sorted(groups, key=lambda group: -len(group.cases))[:MOST_PANELS]
    yield from (group for group in groups if any(group is kept for kept in largest))


def _draw_panel(sketch: Sketch, title: str, data: pd.DataFrame, png: bool) -> Panel:
    import matplotlib as mpl
    import seaborn as sns
    from matplotlib.figure import Figure as Canvas

    style: Any = {**sns.axes_style("whitegrid"), **_RC, "svg.hashsalt": sketch.name + title}
    with mpl.rc_context(style):
        canvas = Canvas(figsize=(5, 3.6), layout="constrained")
        ax = canvas.add_subplot()
        sketch.draw(ax, data)
        sns.despine(ax=ax)
        _set_legend(ax)
        lines = textwrap.fill(clean(title), 60, max_lines=3, placeholder=" …")
        canvas.suptitle(lines, fontsize=10, x=0.01, ha="left")
        svg, raster = io.StringIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", metadata={"Date": None}, facecolor="white")
        if png:
            canvas.savefig(raster, format="png", dpi=160, facecolor="white")
    return Panel(
        title, data, svg.getvalue(), raster.getvalue() or None, _describe(sketch, title, data)
    )


def _set_legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    pairs = [(h, label) for h, label in zip(handles, labels, strict=True) if label not in _TITLES]
    if ax.get_legend():
        ax.get_legend().remove()  # type: ignore[union-attr]
    if pairs:
        kept, names = zip(*pairs, strict=True)
        ax.figure.legend(  # type: ignore[union-attr]
            kept, names, loc="outside lower left", ncols=4, fontsize=9, handlelength=1.6,
            columnspacing=1.2,
        )  # fmt: skip


_TITLES = ("precision", "run")


def _describe(sketch: Sketch, title: str, data: pd.DataFrame) -> str:
    """Say in words what a panel shows: its extremes per precision."""
    y = sketch.value
    said = []
    for precision, part in data.groupby("precision", sort=False):
        low, high = part[y].min(), part[y].max()
        said.append(
            f"{precision} from {quantities.write_number(low)} to {quantities.write_number(high)}"
        )
    return f"{sketch.title}, {title}. {y}: {'; '.join(said)}."


def tabulate(figure: Figure, panel: Panel) -> Table:
    """A panel's data as a table."""
    heads = tuple(
        Head(c, c, "", panel.data[c].dtype != object) for c in map(str, panel.data.columns)
    )
    cut = panel.data if len(panel.data) <= MOST_POINTS else _thin(panel.data)
    rows = tuple(tuple(_cell(value) for value in row) for row in cut.itertuples(index=False))
    notes = () if len(cut) == len(panel.data) else (f"{len(cut)} of {len(panel.data)} points.",)
    return Table(figure.name, panel.title, heads, rows, notes)


def _cell(value: Any) -> Cell:
    if isinstance(value, float):
        return Cell(quantities.write_number(value) if math.isfinite(value) else "–", value)
    return Cell(str(value))


def write_figures(report: Report, folder: Path) -> None:
    """Write each panel as SVG and PNG; with several, they are numbered.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for figure in draw_figures(report, png=True):
        for number, panel in enumerate(figure.panels, 1):
            name = figure.name + (f"-{number}" if len(figure.panels) > 1 else "")
            (folder / f"{name}.svg").write_text(panel.svg, encoding="utf-8")
            (folder / f"{name}.png").write_bytes(panel.png or b"")


_COLOUR = re.compile("|".join(["#000000", INK, GRID, *(light for light, _ in COLOURS.values())]))
_ID, _REFERRED = re.compile(r' id="([^"]*)"'), re.compile(r'(?:href="|url\()#([^")]*)')
_VARIABLES = {
    "#000000": "currentColor",
    INK: "currentColor",
    GRID: "var(--grid)",
    **{light: f"var(--{name})" for name, (light, _) in COLOURS.items()},
}


def inline(panel: Panel) -> str:
    """A panel's SVG to stand in a page: its colours are the page's, its background none."""
    svg = panel.svg[panel.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, count=1, flags=re.DOTALL)  # the paper
    svg = re.sub(r'\b(width|height)="[\d.]+pt" ?', "", svg, count=2)
    svg = svg.replace("'DejaVu Sans'", "inherit")
    used = set(_REFERRED.findall(svg))
    svg = _ID.sub(lambda match: match[0] if match[1] in used else "", svg)  # ids repeat in a page
    svg = _COLOUR.sub(lambda match: _VARIABLES[match[0]], svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
