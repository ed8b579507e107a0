"""Drift of the machine during a sweep: its sentinels against other runs of the same case.

A sentinel is a rerun of the first case of a sweep at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import TYPE_CHECKING

from bench.interval import find_quantile
from bench.limits import STEADY
from bench.record import COMPARABLE, MEASURED
from bench.store.attempts import ASKED, keep_cases, keep_latest, number_groups
from bench.study.columns import Columns, known
from bench.study.summaries import SOURCE, list_equal

if TYPE_CHECKING:
    import pandas as pd


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


def find_drifts(records: pd.DataFrame) -> dict[tuple[str, str], list[Drift]]:
    """Compare each sentinel with all runs of its case and with the previous sentinel.

    ``records`` are those of `read`; the result is by (sweep, machine), in the order of the runs. A
    resumed sweep has a sentinel at the end of each session, and keeps them all.

    Only runs on the same lane and GPU are compared, and only if both or neither ran beside other
    lanes: a slower card, or interference between lanes, is no drift. The spread is pooled over the
    runs of all lanes, each around its own mean; the interval is Student's prediction interval for
    one more reading from the same normal distribution (ISO 16269-8).
    """
    r = Columns(records)
    ended = r.status.find(lambda status: status in MEASURED) & known(r.epoch_time_s)
    if not (r.sentinel & ended).any():
        return {}
    records = records[[*_NEEDED]].assign(beside=r.lanes_beside > 0)
    counting = keep_latest(keep_cases(records)).index  # whether timed or not
    timed = records[ended]
    cells, alike = (number_groups(timed, names).tolist() for names in (list_equal(), _ALIKE))
    runs: dict[int, dict[int, list[float]]] = {}  # by case and by conditions (`_ALIKE`)
    told = zip(timed.index.isin(counting).tolist(), timed["epoch_time_s"].tolist(), strict=True)
    for cell, place, (counts, time) in zip(cells, alike, told, strict=True):
        if counts:
            runs.setdefault(cell, {}).setdefault(place, []).append(time)
    drifts: dict[tuple[str, str], list[Drift]] = {}
    earlier: dict[tuple[int, int], tuple[float, str]] = {}
    columns = (timed[name].tolist() for name in ("sentinel", "epoch_time_s", "started_at", *SOURCE))
    for cell, place, row in zip(cells, alike, zip(*columns, strict=True), strict=True):
        sentinel, time, moment, *source = row
        if not sentinel:
            continue
        found: list[Drift] = []
        every = runs.get(cell, {})
        spread, freedom = _pool([*every.values()])
        if times := every.get(place):
            many = f"the median of its {len(times)} runs" if len(times) > 1 else "its only run"
            middle = median(times)
            margin = _margin(spread, freedom, 1 + 1 / len(times))
            found.append(Drift(moment, many, time / middle - 1, margin / middle))
        if (cell, place) in earlier:
            last, then = earlier[cell, place]
            margin = _margin(spread, freedom, 2) / last
            against = f"the one of {write_moment(then)}"
            found.append(Drift(moment, against, time / last - 1, margin))
        earlier[cell, place] = (time, moment)
        if found:
            drifts.setdefault((source[0], source[1]), []).extend(found)
    return drifts


_ALIKE = ("lane", "gpu_uuid", "beside")

_NEEDED = dict.fromkeys(
    [
        *(ASKED, *SOURCE, "environment", "kind", "lane", "gpu_uuid", "sentinel", "probe"),
        *("repeat", "attempt", "truncated_after", "epoch_time_s", "started_at", *COMPARABLE),
    ]
)


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
