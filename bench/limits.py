"""Thresholds from which a difference is reported, shared by measuring, reporting and comparing."""

from __future__ import annotations

from typing import Any

STEADY = 0.02
"""Within this share of each other, times are called the same: what a trend of steps may come to
when warm-up ends, and how far repeats and the sentinel may lie from the median of their case."""

BUSY_CORES = 0.15
"""CPU cores that others may use during an epoch on a CPU; an idle machine's daemons stay below."""


def is_shared(computing: Any, cores: Any) -> Any:
    """Whether others computed beside what was measured, on its card or its cores.

    Args:
        computing: other processes that used the card, and
        cores: CPU cores that others used: two numbers, or two columns of them.
    """
    return (computing > 0) | (cores > BUSY_CORES)


MIN_REPEATS = 3
"""Repeats a side for a verdict. Two give a spread with one degree of freedom: an interval reaches
12.7 standard errors, and no difference a reader cares for is shown."""

SLOWED = 0.1
"""A device whose product or copy is slower than at another time by more than this share is named.
A card steps its clocks by 1 %; two CPU cores that others use too gave 30 % less a minute later."""

INTERFERENCE = 0.02
"""A lane's steps that take longer by more than this share while all lanes are busy make its rows
doubtful, and so do lanes whose steps differ by more than it when each runs alone."""

STRAGGLES = 0.05
"""A process that works longer than the others' median by more than this share makes them wait."""
