"""Drift of the machine during a sweep: its sentinels against other runs of the same case.

A sentinel is a rerun of the first case of a sweep at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import Any

from bench.interval import find_quantile
from bench.limits import STEADY
from bench.record import MEASURED
from bench.study.runs import Run, latest


class Steadiness(StrEnum):
    """Verdicts on a machine from a sentinel, most serious first."""

    DRIFTED = "Drift"
    UNKNOWN = "Drift not known"
    STEADY = f"Steady within {100 * STEADY:.0f} %"


@dataclass(frozen=True)
class Drift:
    """One sentinel ``against`` other runs of its case. ``change`` is its time over theirs, minus 1.
    ``margin`` is half its 95 % interval, infinite if too few runs show the spread. Both are
    shares."""

    started_at: str
    against: str
    change: float
    margin: float

    @property
    def steadiness(self) -> Steadiness:
        if abs(self.change) > max(self.margin, STEADY):
            return Steadiness.DRIFTED
        if abs(self.change) + self.margin <= STEADY:
            return Steadiness.STEADY
        return Steadiness.UNKNOWN


def find_drifts(every: Sequence[Run]) -> dict[tuple[str, str], list[Drift]]:
    """Compare each sentinel with all runs of its case and with the previous sentinel.

    The result is by (sweep, machine), in the order of the runs. A resumed sweep has a sentinel at
    the end of each session, and keeps them all.

    Only runs on the same lane and GPU are compared, and only if both or neither ran beside other
    lanes: a slower card, or interference between lanes, is no drift. The spread is pooled over the
    runs of all lanes, each around its own mean; the interval is Student's prediction interval for
    one more reading from the same normal distribution (ISO 16269-8).
    """
    if not any(run.sentinel for run in every):
        return {}
    counting = {*map(id, latest(every))}  # whether timed or not
    timed = [run for run in every if run.status in MEASURED and run.timed]
    runs: dict[Any, dict[Any, list[float]]] = {}  # by case and by conditions
    for run in timed:
        if id(run) in counting:
            runs.setdefault(run.cell, {}).setdefault(_tell_conditions(run), []).append(
                run.epoch_time_s
            )
    drifts: dict[tuple[str, str], list[Drift]] = {}
    earlier: dict[Any, Run] = {}
    for run in (run for run in timed if run.sentinel):
        found: list[Drift] = []
        known, place, time = runs.get(run.cell, {}), _tell_conditions(run), run.epoch_time_s
        spread, freedom = _pool([*known.values()])
        if times := known.get(place):
            many = f"the median of its {len(times)} runs" if len(times) > 1 else "its only run"
            middle = median(times)
            margin = _margin(spread, freedom, 1 + 1 / len(times))
            found.append(Drift(run.started_at, many, time / middle - 1, margin / middle))
        if last := earlier.get((run.cell, place)):
            margin = _margin(spread, freedom, 2) / last.epoch_time_s
            against = f"the one of {write_moment(last.started_at)}"
            found.append(Drift(run.started_at, against, time / last.epoch_time_s - 1, margin))
        earlier[run.cell, place] = run
        if found:
            drifts.setdefault((run.sweep, run.machine), []).extend(found)
    return drifts


def _tell_conditions(run: Run) -> tuple[str, str, bool]:
    return run.lane, run.gpu_uuid, run.lanes_beside > 0


def _pool(runs: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the pooled standard deviation of runs, in s, and its degrees of freedom."""
    freedom = sum(len(times) - 1 for times in runs)
    means = [fmean(times) for times in runs]
    both = zip(runs, means, strict=True)
    squares = sum((time - mean) ** 2 for times, mean in both for time in times)
    return (math.sqrt(squares / freedom) if freedom else math.inf), freedom


def _margin(spread: float, freedom: int, variances: float) -> float:
    """Return half the 95 % interval, in s, of a change with ``variances`` times the variance."""
    return find_quantile(freedom) * spread * math.sqrt(variances) if freedom else math.inf


def write_moment(moment: str) -> str:
    """Write a UTC time to the minute: ``2026-11-20 17:52 UTC``."""
    return f"{moment[:16].replace('T', ' ')} UTC" if len(moment) > 10 else moment
