"""The most that one step can gain on another, and whether the machine's measured rates support it.

The ratio of two least times is not a bound, as step A takes longer than its least time. So the most
that B can gain on A is A's measured time over the least time of B's work.

The least time is not valid if an operation was faster than it. A few things make that possible:
inputs may still be in a cache, up to its size, and some algorithms do less work than is counted
(`SAVED`, `SURE`). Anything faster than these allow shows that the rates were measured too low, for
example beside another program: then nothing that depends on them is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.diagnosis.breakdown import Breakdown
from bench.diagnosis.rates import COPY, RATE_COLUMNS, find_rates, find_times, floor_step
from bench.diagnosis.step import Bound, Step
from bench.limits import SLOWED, STEADY
from bench.record import WorkRow
from bench.work import Kind

CACHE_BYTES = {"cuda": 128e6, "cpu": 512e6}
"""More than the largest caches hold: 126 MB on a B200, 50 on an H100, 400 on a CPU."""

CACHE_SPEED = 50
"""No cache is faster than the memory behind it by more than this factor: all first-level caches of
a server's CPU reach some 20 TB/s, its memory 0.4."""

SAVED = {Kind.CONVOLUTION: 8.0, Kind.GROUPED: 8.0, Kind.ATTENTION: 2.0}
"""Factors by which the counted FLOP may exceed those that are done. Winograd's F(4×4, 3×3) needs a
quarter of a convolution's multiplications (Lavin and Gray 2015), FFT algorithms fewer with larger
windows; causal attention does half of what is counted."""

SURE = (Kind.ELEMENTWISE, Kind.CAST, Kind.OPTIMIZER)
"""Kinds that move at least the counted bytes, apart from caches. Others may move fewer: batch norm
reads a channel twice, the second time from a cache; a loss reads only what its targets name."""


@dataclass(frozen=True)
class Ceiling:
    """The most that B can gain on A, which "at most" always means for a pair. ``least_s`` is the
    time of B's counted work at the machine's measured rates; an operation that a cache made faster
    has its measured time in it."""

    speedup: float  # A's measured time over B's least time
    least_s: float
    memory: float  # the share of memory traffic in that time


def find_ceiling(
    before: Step, after: Step, compiled: bool, breakdown: Breakdown | None
) -> Ceiling | None:
    """Return the most that the second step can gain on the first, of which only the time is used.
    None if the second is compiled (it moves less than was counted), or if its work was not counted,
    needs a rate that was not measured, or took less than its least time. Not valid if
    `find_violation` finds anything. ``breakdown`` is of the second; None without a profile."""
    if compiled:
        return None
    times = {id(timed.row): timed.time_s for timed in breakdown.rows} if breakdown else {}
    shares = floor_step(after, times)
    if shares is None or (least := sum(shares.values())) > after.step_s * (1 + STEADY):
        return None
    return Ceiling(before.step_s / min(least, after.step_s), least, shares[Bound.MEMORY] / least)


@dataclass(frozen=True)
class RateViolation:
    """Work that was faster than the machine's measured rates allow."""

    rate: str  # the column of the rate that was measured too low
    measured: float  # FLOP/s or bytes/s
    reached: float  # at least
    row: WorkRow | None  # the operation; None for a whole step


def find_violation(step: Step, compiled: bool) -> RateViolation | None:
    """Return the work that exceeds the rates most, by more than two measurements of one rate
    differ. A time above the card's data sheet, too, is wrong and says nothing about the rates.
    Compiled steps are skipped: counted work may run in another operation's kernel."""
    if compiled:
        return None
    held = [_hold([row], row.time_s, step, row) for row in step.work if row.time_s]
    held.append(_hold(step.work, step.step_s, step))
    beaten = [one for one in held if one and one.reached > one.measured * (1 + SLOWED)]
    return max(beaten, key=lambda one: one.reached / one.measured, default=None)


def _hold(
    rows: Sequence[WorkRow], time_s: float, step: Step, row: WorkRow | None = None
) -> RateViolation | None:
    """Compare the time of operations with their least time, by the rate that dominates."""
    copy, least = step.rates.copy, dict[tuple[str, float], float]()
    peaks = {RATE_COLUMNS[format]: rate for format, rate in step.peaks.products.items()}
    if step.peaks.copy:
        peaks[COPY] = step.peaks.copy
    for one in rows:
        times = find_times(one, step.rates, step.arithmetic)
        if times is None or copy is None:
            continue
        computing, moving = times
        computing /= SAVED.get(Kind(one.kind), 1.0)
        # one call more, as calls are rounded in a step that is scaled to fewer items
        cached = (one.calls + 1) * CACHE_BYTES[step.device] / copy
        moving = max(moving - cached, moving / CACHE_SPEED) if one.kind in SURE else 0.0
        rate = (COPY, copy)
        if computing > moving:
            rates = find_rates(one.format, step.rates, step.arithmetic, one.kind)
            rate = max(rates.items(), key=lambda item: item[1])
        least[rate] = least.get(rate, 0.0) + max(computing, moving)
    faster = sum(least.values()) / time_s
    possible = {
        rate: time
        for rate, time in least.items()
        if time and rate[1] * faster <= peaks.get(rate[0], math.inf)
    }
    if not possible:
        return None
    name, measured = max(possible, key=lambda rate: possible[rate])
    return RateViolation(name, measured, measured * faster, row)
