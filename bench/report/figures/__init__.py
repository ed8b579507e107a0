"""The report's figures: each a tidy frame first, then drawn from it.

Ink and series have colours of their own here, which the page replaces by CSS variables, so that one
SVG reads on light and on dark.
"""

from bench.render.palette import COLOURS
from bench.report.figures.panels import (
    Figure,
    Panel,
    draw_figures,
    inline,
    tabulate,
    undrawn,
    write_figures,
)
from bench.report.figures.sketches import CHANGES, SKETCHES, view_report

__all__ = [
    "CHANGES",
    "COLOURS",
    "SKETCHES",
    "Figure",
    "Panel",
    "draw_figures",
    "inline",
    "tabulate",
    "undrawn",
    "view_report",
    "write_figures",
]
