"""Colours and markers, the same in every figure and on the page around them."""

from __future__ import annotations

from itertools import cycle

from bench.precision import PRECISIONS

INK, GRID = "#15181c", "#c9ced6"

STYLE = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "grid.color": GRID,
    "text.parse_math": False,  # a name may hold mathtext markup
}
"""The settings of matplotlib for all figures."""

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
