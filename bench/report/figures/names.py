"""Names beside the points of a drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from bench.render.palette import INK

SMALL = 8.5  # points: the font size within the axes

_BESIDE = (("left", 6, 5), ("right", -6, -5 - SMALL), ("left", 6, -5 - SMALL),
           ("center", 0, 6), ("center", 0, -6 - SMALL), ("right", -6, 5))  # fmt: skip
_APART = tuple(
    (side, x * reach, y * reach)
    for reach in (22, 36, 52, 70)
    for side, x, y in (
        ("left", 0.6, 1), ("center", 0, 1), ("right", -0.6, 1),
        ("left", 0.6, -1), ("center", 0, -1), ("right", -0.6, -1),
        ("left", 1, 0.3), ("left", 1, -0.3),
    )
)  # fmt: skip
"""Where a name may be: its alignment, and its offset from the point in typographic points. At the
places further off, a line leads from the name to its point."""


def write_near(
    ax: Axes, text: str, place: Sequence[float], offset: tuple[float, float], **look: Any
) -> Any:
    """Write a text at an offset, in typographic points, from a place."""
    look = {"textcoords": "offset points", "fontsize": SMALL, **look}
    return ax.annotate(text, (place[0], place[1]), xytext=offset, **look)


def name_points(
    ax: Axes,
    points: Sequence[Sequence[float]],
    named: Iterable[tuple[Sequence[float], str]],
    lines: Sequence[Sequence[Sequence[float]]],
) -> None:
    """Write names beside points, where they fit and cover nothing drawn and no other name. One that
    would be near another point too is written further off, with a line to its own. ``points`` are
    all those drawn, and ``lines`` all lines, each as the points that it joins."""
    scale = 72 / ax.figure.dpi  # pixels to points

    def find_on_paper(spots: Any) -> Any:
        return (scale * ax.transData.transform(spots)).tolist()

    left, bottom, right, top = (scale * end for end in ax.get_window_extent().extents)
    dots = find_on_paper(points)
    drawn = []
    for line in lines:
        for start, end in pairwise(find_on_paper(line)):  # a spot every 4 points
            drawn += np.linspace(start, end, math.ceil(math.dist(start, end) / 4), False).tolist()
    taken: list[Sequence[float]] = []
    for point, name in named:
        x, y = find_on_paper(point)
        others = [dot for dot in dots if math.dist(dot, (x, y)) > 1]
        width = 0.58 * SMALL * len(name)
        for side, dx, dy in (*_BESIDE, *_APART):
            beside = (side, dx, dy) in _BESIDE
            x0 = x + dx - width * {"left": 0, "center": 0.5, "right": 1}[side]
            box = (x0, y + dy, x0 + width, y + dy + SMALL)
            end = (x + dx, y + dy + (0 if dy > 0 else SMALL))
            leader = [] if beside else np.linspace((x, y), end, 13).tolist()
            if (
                not (left <= box[0] and box[2] <= right)
                or not (bottom + 3 <= box[1] and box[3] <= top)
                or _holds(box, dots, 4)
                or (beside and _holds(box, others, 9))
                or _holds(box, drawn)
                or any(_overlap(box, other) or _holds(other, leader) for other in taken)
                or any(math.dist(step, dot) < 4 for step in leader[3:] for dot in others)
            ):
                continue
            taken.append(box)
            drawn += leader
            write_near(ax, name, point, (dx, dy), ha=side, va="bottom").set_in_layout(False)
            if leader:
                look = {"arrowstyle": "-", "color": INK, "linewidth": 0.6, "shrinkA": 0,
                        "shrinkB": 4}  # fmt: skip
                tie = write_near(ax, "", point, (dx, end[1] - y), arrowprops=look)
                tie.set_in_layout(False)
            break


def _holds(box: Sequence[float], points: Sequence[Sequence[float]], margin: float = 0) -> bool:
    """Return whether any point lies within a box, or less than ``margin`` outside of it."""
    left, bottom, right, top = box
    return any(
        left - margin < x < right + margin and bottom - margin < y < top + margin for x, y in points
    )


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
