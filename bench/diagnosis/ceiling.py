"""The most that one step can gain on another, and whether the machine's measured rates bear it out.

No ratio of two least times is a bound: the step before takes longer than its least time. So what
B can gain at most on A is A's time as it was measured over the least time of B's work.

That least time is none where an operation was faster than it. A few things do that honestly: what
an operation reads may still be in a cache from the one before, though no more than a cache holds,
and some algorithms do less than is counted (`SAVED`, `SURE`). Whatever is faster than these allow
shows that the rates were measured too low, as beside another program: then nothing that rests on
them is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.diagnosis.breakdown import Breakdown
from bench.diagnosis.rates import COPY, RATE_COLUMNS, find_rates, find_times, floor_step
from bench.diagnosis.step import Bound, Step
from bench.gpu.kinds import size_as
from bench.limits import SLOWED, STEADY
from bench.record import WorkRow
from bench.work import Kind

CACHE_BYTES = {"cuda": 128e6, "cpu": 512e6}
"""More than the largest caches hold: 126 MB of a B200, 50 of an H100; 400 of a CPU."""

CACHE_SPEED = 50
"""No cache is more than so many times as fast as the memory behind it: all first-level caches of a
server's CPU reach some 20 TB/s, its memory 0.4."""

SAVED = {Kind.CONVOLUTION: 8.0, Kind.GROUPED: 8.0, Kind.ATTENTION: 2.0}
"""By how many times the FLOP that are counted may be more than those that are done. Winograd's
F(4×4, 3×3) needs a quarter of a convolution's multiplications (Lavin and Gray 2015), Fourier's
algorithm fewer with larger windows; causal attention is half of what is counted."""

SURE = (Kind.ELEMENTWISE, Kind.CAST, Kind.OPTIMIZER)
"""Kinds that move no less than is counted, but for caches. Others may: batch norm reads its input
twice, and a channel's second time from a cache; a loss reads only what its targets name."""


@dataclass(frozen=True)
class Ceiling:
    """The most that B can gain on A: what is meant wherever "at most" is said of a pair.
    ``least_s`` is what B's counted work takes at the machine's measured rates. An operation that a
    cache made faster than that has its own time in it."""

    speedup: float  # A's measured time over the least of B's
    least_s: float
    memory: float  # the share of that time that is memory traffic


def find_ceiling(
    before: Step, after: Step, compiled: bool, breakdown: Breakdown | None
) -> Ceiling | None:
    """The most that the second step can gain on the first, of which only the time is looked at.
    None where the work of the second was not counted, moves less than was as it is compiled, needs
    a rate that was not measured, or took less time than that. Where `find_beaten` finds anything it
    means nothing. ``breakdown`` is of the second; None without a profile."""
    if compiled:
        return None
    times = {id(timed.row): timed.time_s for timed in breakdown.rows} if breakdown else {}
    shares = floor_step(after, times)
    if shares is None or (least := sum(shares.values())) > after.step_s * (1 + STEADY):
        return None
    return Ceiling(before.step_s / min(least, after.step_s), least, shares[Bound.MEMORY] / least)


@dataclass(frozen=True)
class Beaten:
    """What was faster than the machine's measured rates allow."""

    rate: str  # the column of the one that was measured too low
    measured: float  # FLOP/s or bytes/s
    reached: float  # at least
    row: WorkRow | None  # the operation that did; None for a whole step


def find_beaten(step: Step, compiled: bool) -> Beaten | None:
    """What was most above the rates, by more than two measurements of one rate differ. What would
    be above the card's data sheet, too, has a wrong time, and says nothing of the rates. A compiled
    step is not looked at: what was counted of an operation may run in another's kernel."""
    if compiled:
        return None
    held = [_hold([row], row.time_s, step, row) for row in step.work if row.time_s]
    held.append(_hold(step.work, step.step_s, step))
    beaten = [one for one in held if one and one.reached > one.measured * (1 + SLOWED)]
    return max(beaten, key=lambda one: one.reached / one.measured, default=None)


def _hold(
    rows: Sequence[WorkRow], time_s: float, step: Step, row: WorkRow | None = None
) -> Beaten | None:
    """Hold the time of operations against what they take without fail, by the rate most at work."""
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
        # a call more: those of a step that is scaled to fewer items are rounded
        cached = (one.calls + 1) * CACHE_BYTES[size_as(step.device)] / copy
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
    return Beaten(name, measured, measured * faster, row)
