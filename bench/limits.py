"""Thresholds from which a difference is reported, shared by measuring, reporting and comparing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

STEADY = 0.02
"""Within this share of each other, times are called the same: what a trend of steps may come to
when warm-up ends, and how far repeats and the sentinel may lie from the median of their case."""

LEAST_END = 5
"""Steps at each end of an epoch that a trend is told by, unless a quarter of them is more."""


def leave_out_first(times: Sequence[float]) -> Sequence[float]:
    """All but the first tenth: the first steps after a reset allocate anew, on an idle device."""
    return times[math.ceil(len(times) / 10) :] or times


def find_ends(times: Sequence[float]) -> tuple[float, float] | None:
    """The level of full steps at both ends of an epoch: the medians of two quarters of its times,
    in s.

    A mean would take isolated spikes for a trend: on an H100 four of forty steps took 1.3 to 1.5
    times as long as the others, which were alike within 0.1 %. The first tenth is left out; None
    where one slow step of so few would show as a trend.
    """
    level = leave_out_first(times)
    size = max(math.ceil(len(level) / 4), min(LEAST_END, len(level) // 2))
    return (median(level[:size]), median(level[-size:])) if size > 2 else None


BUSY_CORES = 0.15
"""CPU cores that others may use during an epoch on a CPU; an idle machine's daemons stay below."""


def is_shared(computing: Any, cores: Any) -> Any:
    """Whether others computed beside what was measured: how many processes on its card, and on how
    many CPU cores; two numbers, or two columns of them."""
    return (computing > 0) | (cores > BUSY_CORES)


MIN_REPEATS = 3
"""Repeats a side for a verdict. Two give a spread with one degree of freedom: an interval reaches
12.7 standard errors, and no difference a reader cares for is shown."""

SLOWED = 0.1
"""A device whose product or copy is slower than at another time by more than this share is named.
A card steps its clocks by 1 %; two CPU cores that others use too gave 30 % less a minute later."""

FAR = 0.5
"""A rate of products or copies below this share of the data sheet's is measured again, and named.
An H100 reaches 0.64 to 0.76 of its FLOP/s, by number format, and 0.9 of its bytes a second."""

INTERFERENCE = 0.02
"""A lane's steps that take longer by more than this share while all lanes are busy make its rows
doubtful, and so do lanes whose steps differ by more than it when each runs alone."""

STRAGGLES = 0.05
"""A process that works longer than the others' median by more than this share makes them wait."""
