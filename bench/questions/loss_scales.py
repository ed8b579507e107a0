"""What loss scales do to gradients: a loss-scale map in sentences, tables and as a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from bench.precision import is_dynamic
from bench.render.section import Column, Section, Sheet
from bench.render.table import INK, STYLE, Cell
from bench.scale_map import (
    HEADROOM,
    LAYER_TOLERANCE,
    Fate,
    Kind,
    ScaleCase,
    ScaledTraining,
    ScaleMap,
    Way,
    Window,
    find_window,
)


def write_scale(scale: float) -> str:
    """Return a scale as text: ``128``, ``2^16``.

    >>> write_scale(128.0), write_scale(65536.0), write_scale(0.5), write_scale(3e4)
    ('128', '2^16', '0.5', '30000')
    """
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and exponent > 10:
        return f"2^{exponent - 1}"
    return repr(scale).removesuffix(".0")


def write_share(share: float, limit: float = 0.0) -> str:
    """Return a share in per cent; what is not quite 0 or 100 is never rounded to that.

    Args:
        limit: shares above this get as many digits as it takes to show that.

    >>> write_share(0.0), write_share(1e-7), write_share(0.0312), write_share(0.99999)
    ('0 %', '< 0.01 %', '3.1 %', '> 99.9 %')
    >>> write_share(0.0104), write_share(0.0104, 0.01)
    ('1 %', '1.04 %')
    """
    if 0 < share < 1e-4:
        return "< 0.01 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    digits = 2 if share < 0.01 else 1
    while share > limit and float(f"{100 * share:.{digits}f}") <= 100 * limit and digits < 6:
        digits += 1
    return f"{100 * share:.{digits}f}".rstrip("0").rstrip(".") + " %"


def summarize_scale_map(scales: ScaleMap) -> str:
    """Return a line of one or more sentences for each case."""
    return "\n".join(
        f"{case.label}: {'. '.join(_summarize(case, find_window(case, scales.tolerance)))}."
        for case in scales.cases
    )


def _summarize(case: ScaleCase, window: Window) -> Iterator[str]:
    if case.diverged:
        yield (
            f"training in fp32 itself diverged at step {case.diverged}, so nothing can be said of "
            "loss scales: use a smaller --lr"
        )
        return
    if window.low is None or window.high is None or window.use is None:
        first = case.scales[0]
        yield (
            f"no scale is safe: {write_scale(first)}, the smallest one tried, overflows at "
            f"{_overflow(case, first)}; try smaller scales with --scales, or use bf16-amp"
            if first in case.overflows
            else f"no scale is safe: {_describe_lost(case, window, first)}; try others with "
            "--scales, or use bf16-amp"
        )
        return
    span = (
        f"scales from {write_scale(window.low)} to {write_scale(window.high)} are"
        if window.low < window.high
        else f"of those tried only the scale {write_scale(window.low)} is"
    )
    narrow = ", or rather a dynamic scale, as the window is narrow" if window.narrow else ""
    use = f"use {write_scale(window.use)}{narrow}" if window.needed else "no loss scale is needed"
    yield f"{use}: {span} safe, with no overflow {describe_seen(case)}"


def _describe_lost(case: ScaleCase, window: Window, scale: float) -> str:
    """Return what a scale loses; if only one layer loses too much, what that one loses."""
    lost = case.lost(scale)
    if lost <= window.enough and scale in window.starved:
        layer, share = window.starved[scale]
        return f"at scale {write_scale(scale)}, layer {layer} loses {write_share(share)}"
    return f"scale {write_scale(scale)} flushes {write_share(lost, window.enough)}"


def describe_seen(case: ScaleCase) -> str:
    """Return the steps at which every scale was checked for an overflow."""
    trained = {t.scales[0] for t in case.trainings if t.setting and not is_dynamic(t.setting)}
    if case.way is Way.ROUNDED or trained.issuperset(case.scales):
        return f"in {case.steps} steps"
    return f"at {name_steps(case.at)}"


def name_steps(steps: Sequence[int]) -> str:
    """Return the steps as text: ``step 1``, ``steps 1, 5 and 20``."""
    *most, last = map(str, steps)
    return f"steps {', '.join(most)} and {last}" if most else f"step {last}"


def _overflow(case: ScaleCase, scale: float) -> str:
    first = case.overflows[scale]
    return f"step {first.step}" + (f" ({first.where})" if first.where else "")


def tabulate_scale_map(scales: ScaleMap, said: Sequence[str] = ()) -> Iterator[Sheet]:
    """Yield the windows, with the sentences ``said`` above their notes; then for each case its
    scales and its trainings."""
    windows = [(case, find_window(case, scales.tolerance)) for case in scales.cases]
    yield _tabulate_windows(windows, scales.tolerance, said)
    for number, (case, window) in enumerate(windows, 1):
        name = f"-{number}" if len(windows) > 1 else ""
        yield _tabulate_scales(case, window, f"scales-gradients{name}")
        yield _tabulate_trainings(case, f"scales-trainings{name}")


_scale_column = partial(Column, write=write_scale)
_share_column = partial(Column, write=write_share)

_Judged = tuple[ScaleCase, Window]


def _tabulate_windows(rows: Sequence[_Judged], tolerance: float, said: Sequence[str]) -> Sheet:
    columns: list[Column[_Judged]] = [
        Column("precision", "precision", "number format", lambda row: row[0].precision,
               number=False),
        Column("model", "model", "network", lambda row: row[0].model, wrap=True),
        Column("batch_size", "batch size", "images per step", lambda row: row[0].batch_size),
        _scale_column("low", "safe from", "smallest safe scale", lambda row: row[1].low),
        _scale_column("high", "safe to", "largest safe scale", lambda row: row[1].high),
        _scale_column("use", "use", "recommended scale",
                     lambda row: row[1].use if row[1].needed else "none needed"),
        _share_column("lost", "flushed at that scale", "share of gradient values rounded to zero",
                     lambda row: None if row[1].use is None else row[0].lost(row[1].use), keep=4),
        _share_column("lost_at_1", "flushed at scale 1", "the same without a loss scale",
                     lambda row: row[0].lost(1.0) if 1.0 in row[0].scales else None, keep=3),
        _scale_column("ceiling", "overflows from", "smallest scale tried that overflowed",
                     lambda row: row[1].ceiling, keep=5),
    ]  # fmt: skip
    notes = [
        *said,
        "Flushed: rounded to zero. Safe: this scale and all smaller ones never overflow, and it "
        f"flushes at most {write_share(tolerance)} more of the values than the best scale, and of "
        f"no single layer more than {write_share(LAYER_TOLERANCE)} beyond its best scale. Use: the "
        f"largest safe scale at which gradients {HEADROOM} times as large would still not "
        "overflow.",
        *dict.fromkeys(case.way.meaning for case, _ in rows),
    ]
    return Sheet("Safe loss scales", columns, rows, notes, empty=())


def _judge(case: ScaleCase, window: Window, scale: float) -> str:
    if case.diverged:
        return "fp32 itself diverged"
    if window.ceiling is not None and scale >= window.ceiling:
        return "overflows" if scale in case.overflows else "above an overflow"
    if window.low is None or window.high is None or not window.low <= scale <= window.high:
        lost = case.lost(scale)
        if lost <= window.enough and scale in window.starved:
            return f"layer {window.starved[scale][0]} loses too much"
        # the column beside it may round to the tolerance
        exact = write_share(lost, window.enough)
        return "flushes too much" + (f": {exact}" if exact != write_share(lost) else "")
    return "safe, use this" if scale == window.use and window.needed else "safe"


def _tabulate_scales(case: ScaleCase, window: Window, name: str) -> Sheet:
    def share(
        kind: Kind, fate: Fate, name: str, label: str, help: str, **head: Any
    ) -> Column[float]:
        return _share_column(
            f"{kind.value}_{name}", f"{kind.value}s {label}", f"share {help}",
            lambda scale: case.share(fate, scale, kind), **head,
        )  # fmt: skip

    columns: list[Column[float]] = [
        _scale_column("scale", "scale", "loss scale", lambda scale: scale),
        *(
            column
            for kind, keep in ((Kind.OUTPUT, 5), (Kind.WEIGHT, 3))
            for column in (
                share(kind, Fate.FLUSHED, "lost", "flushed", "rounded to zero", better="lower"),
                share(kind, Fate.SUBNORMAL, "subnormal", "subnormal", "kept with fewer digits",
                      keep=keep),
                share(kind, Fate.OVERFLOWED, "overflowed", "overflow", "beyond the largest value",
                      keep=7),
            )
        ),
        Column("first_overflow", "first overflow", "step, from 1",
               lambda scale: case.overflows[scale].step if scale in case.overflows else None,
               write="step {}".format, keep=4),
        Column("judgement", "verdict", "what the rule makes of it",
               lambda scale: _judge(case, window, scale), wrap=True),
    ]  # fmt: skip
    most = " Each share is that of the step where it is largest." if len(case.at) > 1 else ""
    notes = [
        "Share of the gradient values of all layers' outputs and of all layers' weights, at "
        f"{name_steps(case.at)}. Values that are zero before scaling are left out.{most}",
        "Flushed: rounded to zero. Subnormal: kept with fewer digits. Overflow: beyond the largest "
        f"finite value; checked {describe_seen(case)}. What a network keeps in fp32, such as "
        "BatchNorm's parameters, is not rounded.",
    ]
    title, rows = f"Gradients by loss scale: {case.label}", case.scales
    return Sheet(title, columns, rows, notes, name=name, empty=())


def _describe_trace(training: ScaledTraining) -> str:
    """Return where the scale changed: ``2^16, 2^15 from step 2``."""
    told, before = [], None
    for step, scale in enumerate(training.scales, 1):
        if scale != before:
            told.append(write_scale(scale) + (f" from step {step}" if step > 1 else ""))
        before = scale
    shown = told if len(told) <= 5 else [*told[:3], "…", told[-1]]
    return ", ".join(shown)


def _name_setting(setting: str) -> str:
    try:
        return write_scale(float(setting))
    except ValueError:
        return setting or "none, in fp32"


def _tabulate_trainings(case: ScaleCase, name: str) -> Sheet:
    fp32, rows = case.training(""), case.trainings

    def write_loss(training: ScaledTraining) -> Cell:
        loss = training.losses[-1]
        return Cell(f"{loss:.4f}", loss) if math.isfinite(loss) else Cell("not finite")

    def subtract(training: ScaledTraining) -> float | None:
        difference = training.losses[-1] - fp32.losses[-1] if fp32 else math.nan
        return difference if training.setting and math.isfinite(difference) else None

    columns: list[Column[ScaledTraining]] = [
        Column("setting", "loss scale", "static, or the rule of a dynamic one",
               lambda training: _name_setting(training.setting), number=False),
        Column("loss", f"loss at step {case.steps}", "of that step's batch", write_loss,
               better="lower"),
        Column("difference", "minus fp32", "difference of that loss from the one in fp32",
               subtract, write="{:+.4f}".format, keep=6),
        Column("overflows", "steps with overflow", "skipped under a dynamic scale",
               lambda training: training.overflows, keep=5),
        Column("first", "first overflow", "step, from 1",
               lambda training: training.first_overflow, write="step {}".format, keep=4),
        Column("trace", "scale during training", "where it changed",
               lambda training: _describe_trace(training) if training.setting else None, wrap=True),
    ]  # fmt: skip
    note = (
        "All trainings start from the same weights and use the same batches. A static scale skips "
        "no step: after an overflow the weights are inf or NaN."
    )
    title = f"Training by loss scale: {case.label}"
    return Sheet(title, columns, rows, [note], name=name, empty=())


SCALES = Section(
    "scales",
    "Which loss scales are safe?",
    lambda found: chain(
        *(
            tabulate_scale_map(told, summarize_scale_map(told).split("\n"))
            for told in found.scale_maps
        )
    ),
)


OVERFLOW, ABSENT = "#a8195c", "#d9dce1"
LEAST = 0.01
"""Lower end of the colour scale, in per cent."""
MOST_PANELS = 4
"""Most cases in one figure."""


def draw_scale_map(scales: ScaleMap) -> str:
    """Draw the map as SVG: a row of panels for each case, layers by scales."""
    return _draw(scales, "svg").decode()


def rasterize_scale_map(scales: ScaleMap) -> bytes:
    """Draw the same as PNG."""
    return _draw(scales, "png")


def _draw(scales: ScaleMap, format: str) -> bytes:
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "scales"}
    cases = scales.cases[:MOST_PANELS]
    heights = [min(max(2.6, 0.17 * len(case.layers) + 1.3), 9.0) for case in cases]
    file = io.BytesIO()
    with mpl.rc_context(style):
        canvas = Figure(figsize=(10, sum(heights)), layout="constrained")
        parts = canvas.subfigures(len(cases), 1, height_ratios=heights, squeeze=False)
        for part, case in zip(parts[:, 0], cases, strict=True):
            _draw_case(part, case, find_window(case, scales.tolerance))
        metadata = {"Date": None} if format == "svg" else None
        canvas.savefig(file, format=format, dpi=130, metadata=metadata, facecolor="white")
    return file.getvalue()


def _draw_case(part: Any, case: ScaleCase, window: Window) -> None:
    import numpy as np
    import seaborn as sns
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.patches import Patch

    said = "no scale is safe"
    if window.low is not None and window.high is not None and window.use is not None:
        use = f"use {write_scale(window.use)} (▼)" if window.needed else "none needed"
        said = f"safe scales {write_scale(window.low)} to {write_scale(window.high)}, {use}"
    part.suptitle(
        f"{case.label}: {said}\nColours: {name_steps(case.at)}. "
        f"Between the dashed lines: the safe scales (overflows checked {describe_seen(case)}).",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    axes = part.subplots(1, len(Kind), sharey=True)
    for ax, kind in zip(axes, Kind, strict=True):
        lost = case.by_layer(Fate.FLUSHED, kind)
        over = case.by_layer(Fate.OVERFLOWED, kind)
        # on a logarithmic scale, whose lowest colour includes zero
        grid = [
            [max(100 * lost.get((n, s), math.nan), LEAST) for s in case.scales] for n in case.layers
        ]
        fits = [[not over.get((n, s), 0.0) for s in case.scales] for n in case.layers]
        sns.heatmap(
            grid, ax=ax, norm=LogNorm(LEAST, 100), cmap="Blues", cbar=kind is Kind.WEIGHT,
            cbar_kws={"label": "values flushed to zero (%)", "format": "%g"}, rasterized=True,
        )  # fmt: skip
        if not all(map(all, fits)):
            sns.heatmap(
                [[1.0] * len(row) for row in fits], ax=ax, mask=np.array(fits, dtype=bool),
                cmap=ListedColormap([OVERFLOW]), cbar=False, rasterized=True,
            )  # fmt: skip
        _mark_window(ax, case.scales, window)
        ax.set_facecolor(ABSENT)
        every = math.ceil(len(case.layers) / 45)
        shown = range(0, len(case.layers), every)
        ax.set_yticks([i + 0.5 for i in shown], [case.layers[i] for i in shown], fontsize=8)
        apart = math.ceil(len(case.scales) / 13)
        columns = range(0, len(case.scales), apart)
        ax.set_xticks(
            [i + 0.5 for i in columns], [write_scale(case.scales[i]) for i in columns],
            rotation=60, fontsize=8,
        )  # fmt: skip
        ax.set_xlabel("loss scale")
        ax.set_title(f"gradients of {kind.value}s", fontsize=9, pad=14)
    axes[0].set_ylabel("layer, from input to output")
    patches = (
        Patch(color=OVERFLOW, label="some values overflow"),
        Patch(color=ABSENT, label="stays in fp32"),
    )
    part.legend(handles=patches, fontsize=8.5, loc="outside lower left", ncols=2, frameon=False)


def _mark_window(ax: Any, scales: Sequence[float], window: Window) -> None:
    if window.low is None or window.high is None or window.use is None:
        return
    for edge in (scales.index(window.low), scales.index(window.high) + 1):
        ax.axvline(edge, color=INK, linewidth=1.4, linestyle=(0, (4, 2)), clip_on=False)
    if window.needed:
        ax.annotate("▼", (scales.index(window.use) + 0.5, 1.0), xycoords=("data", "axes fraction"),
                    ha="center", va="bottom", fontsize=9)  # fmt: skip
