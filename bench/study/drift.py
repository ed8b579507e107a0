"""Whether the machine changed while a sweep ran: its sentinels against other runs of their case.

A sentinel is the first case of a sweep, run once more at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bench.interval import find_quantile
from bench.limits import STEADY
from bench.record import MEASURED
from bench.store.attempts import ASKED, keep_cases, keep_latest, number_groups
from bench.study.summaries import list_equal

if TYPE_CHECKING:
    import pandas as pd


class Steadiness(StrEnum):
    """What can be said of a machine from a sentinel, most serious first."""

    DRIFTED = "Drift"
    UNKNOWN = "Drift not known"
    STEADY = f"Steady within {100 * STEADY:.0f} %"


@dataclass(frozen=True)
class Drift:
    """One sentinel against other runs of its case.

    ``change`` is its time over theirs, minus 1; the truth lies within ``margin`` of it in 95 of 100
    cases, and nowhere known (infinite) where too few runs tell how far they spread. Both are
    shares.
    """

    started_at: str
    against: str  # what it is compared with, for people
    change: float
    margin: float

    @property
    def steadiness(self) -> Steadiness:
        """Whether the machine drifted, held, or one cannot tell."""
        if abs(self.change) > max(self.margin, STEADY):
            return Steadiness.DRIFTED
        if abs(self.change) + self.margin <= STEADY:
            return Steadiness.STEADY
        return Steadiness.UNKNOWN


def find_drifts(records: pd.DataFrame) -> dict[tuple[str, str], list[Drift]]:
    """Per sweep and machine: each sentinel against all runs of its case and the sentinel before.

    A sweep that was gone on with has a sentinel at the end of each session, and keeps them all.
    Of several lanes, only what ran on the same one is compared, and not beside others where the
    sentinel was not: a slower card, or what lanes change in each other, is no drift.

    The spread that a change must exceed is that of the runs, of all lanes, each around its own
    mean: the interval is Student's, for one more reading from the same normal distribution
    (ISO 16269-8).

    Args:
        records: of `read`, in the order in which they ran.
    """
    ended = records["status"].isin([s.value for s in MEASURED]) & records["epoch_time_s"].notna()
    drifts: dict[tuple[str, str], list[Drift]] = {}
    if not (records["sentinel"] & ended).any():
        return drifts
    timed = records.loc[ended, [*_NEEDED]]
    sentinel = timed["sentinel"]
    cell = number_groups(timed, list_equal())
    alike = number_groups(timed.assign(beside=timed["lanes_beside"] > 0), _ALIKE)
    counting = keep_latest(keep_cases(records))  # whether timed or not
    runs = timed[timed.index.isin(counting.index)]
    for (number, place), closing in timed[sentinel].groupby([cell, alike], sort=False):
        every = runs.loc[cell[runs.index] == number, "epoch_time_s"].astype(float)
        spread, freedom = _pool(every, alike[every.index])
        times = every[alike[every.index] == place]
        source = (str(closing["sweep"].iloc[0]), str(closing["machine"].iloc[0]))
        before: tuple[float, str] | None = None
        for time, moment in zip(closing["epoch_time_s"], closing["started_at"], strict=True):
            found = drifts.setdefault(source, [])
            if len(times):
                many = f"the median of its {len(times)} runs" if len(times) > 1 else "its only run"
                middle = float(times.median())
                margin = _margin(spread, freedom, 1 + 1 / len(times))
                found.append(Drift(str(moment), many, time / middle - 1, margin / middle))
            if before:
                earlier, then = before
                against = f"the one of {write_moment(then)}"
                margin = _margin(spread, freedom, 2) / earlier
                found.append(Drift(str(moment), against, time / earlier - 1, margin))
            before = (float(time), str(moment))
    return {source: found for source, found in drifts.items() if found}


_ALIKE = ("lane", "gpu_uuid", "beside")
_NEEDED = (
    *(ASKED, "sweep", "machine", "environment", "kind", "sentinel", "epoch_time_s", "started_at"),
    *("lane", "gpu_uuid", "lanes_beside"),
)


def _pool(times: pd.Series, alike: pd.Series) -> tuple[float, int]:
    """The spread of runs under like conditions, in s, and the degrees of freedom that it has."""
    own = times.groupby(alike)
    freedom = len(times) - own.ngroups
    squares = float(((times - own.transform("mean")) ** 2).sum())
    return (math.sqrt(squares / freedom) if freedom else math.inf), freedom


def _margin(spread: float, freedom: int, variances: float) -> float:
    """Half the 95 % interval, in s, of a difference of so many variances of one run."""
    if not freedom:
        return math.inf
    return find_quantile(freedom) * spread * math.sqrt(variances)


def write_moment(moment: str) -> str:
    """A UTC time to the minute: ``2026-11-20 17:52 UTC``."""
    return f"{moment[:16].replace('T', ' ')} UTC" if len(moment) > 10 else moment
