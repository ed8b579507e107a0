"""A loss-scale map as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bench.questions.loss_scales import describe_seen, name_steps, write_scale
from bench.render.palette import INK, STYLE
from bench.scale_map import Fate, Kind, ScaleCase, ScaleMap, Window, find_window

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
