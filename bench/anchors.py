"""Checks of lanes by their anchors, run alone, with all lanes busy, and at the end.

An anchor is a few dozen steps of one case, the same on every lane. Its median step is compared,
with the standard error of the median of normally distributed steps: 1.2533 σ / √n, where σ is
1.4826 times their median absolute deviation.

This estimate of σ is as uncertain as a standard deviation of 0.37 times as many steps (the
efficiency of the median absolute deviation: Rousseeuw and Croux, JASA 88, 1993). That matters if
many lanes are compared: the interval for a pair of them then reaches far into the tail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from bench.limits import INTERFERENCE, is_shared
from bench.record import RELIABLE

if TYPE_CHECKING:
    import pandas as pd

ALONE, BUSY, CLOSE = "alone", "busy", "close"
"""When an anchor ran: while other lanes were idle, on all lanes at once, and at the end."""

_QUANTILE = 1.96
_HALF_INTERVAL = _QUANTILE * 1.2533 * 1.4826  # in median absolute deviations, over √n
_EFFICIENCY = 0.37


class AnchorVerdict(StrEnum):
    DIFFERENT = "different"
    UNKNOWN = "not known"
    ALIKE = "alike"


@dataclass(frozen=True)
class Pace:
    """An anchor's median step in s, and the half-width of its 95 % interval as a share of it, with
    ``freedom`` degrees of freedom."""

    step_s: float
    error: float
    freedom: float = math.inf


@dataclass(frozen=True)
class Change:
    """The ratio of two anchors' median steps, minus 1, and half of its 95 % interval."""

    share: float
    margin: float

    @property
    def verdict(self) -> AnchorVerdict:
        """Return whether the change exceeds `INTERFERENCE`, surely does not, or is unclear."""
        if abs(self.share) > max(self.margin, INTERFERENCE):
            return AnchorVerdict.DIFFERENT
        if abs(self.share) + self.margin <= INTERFERENCE:
            return AnchorVerdict.ALIKE
        return AnchorVerdict.UNKNOWN

    @property
    def slower(self) -> bool:
        return self.share > 0 and self.verdict is AnchorVerdict.DIFFERENT

    def __str__(self) -> str:
        return f"{100 * self.share:+.1f} ± {100 * self.margin:.1f} %"


def read_pace(median_s: float | None, mad_s: float | None, steps: float | None) -> Pace | None:
    """Return the pace of an anchor from its columns; None if too little was measured."""
    known = [value for value in (median_s, mad_s, steps) if value is not None]
    if len(known) < 3 or not all(map(math.isfinite, known)) or known[0] <= 0 or known[2] < 2:
        return None
    error = _HALF_INTERVAL * known[1] / known[0] / math.sqrt(known[2])
    return Pace(known[0], error, _EFFICIENCY * (known[2] - 1))


def compare(now: Pace | None, before: Pace | None) -> Change | None:
    """Return how ``now``, the later or busier pace, differs from ``before``; None if unknown."""
    if now is None or before is None:
        return None
    share = now.step_s / before.step_s - 1
    return Change(share, (1 + share) * math.hypot(now.error, before.error))


@dataclass(frozen=True)
class LaneReading:
    """The anchors of a lane in one session of a sweep, by when they ran.

    ``place`` is the lane's GPU with its UUID, or the CPU with its number of cores; ``disturbed``
    counts the anchors that other programs disturbed.
    """

    lane: str
    place: str
    paces: Mapping[str, Pace] = field(default_factory=dict)
    disturbed: int = 0

    @property
    def drift(self) -> Change | None:
        """Return the closing anchor over the busy one, or the first if lanes took turns."""
        return compare(self.paces.get(CLOSE), self.paces.get(BUSY) or self.paces.get(ALONE))

    @property
    def interference(self) -> Change | None:
        """Return the busy anchor over the one alone.

        All lanes are busy in the closing anchor too, so its difference from the busy one is drift,
        not interference. A lane may have drifted as much between the first two anchors: this is
        added to the margin, which is then that of the change without drift.
        """
        alone, busy, close = (self.paces.get(kind) for kind in (ALONE, BUSY, CLOSE))
        found = compare(busy, alone)
        if found is None or alone is None or busy is None or close is None:
            return found
        drift = abs(found.share - (close.step_s / alone.step_s - 1))
        left = 1 + found.share - drift
        # without drift: 2 busy - close if the closing anchor is slower, else close
        weight = 2 if close.step_s > busy.step_s else 0
        error = math.hypot(weight * busy.step_s * busy.error, close.step_s * close.error)
        margin = drift + math.hypot(error / alone.step_s, left * alone.error)
        return replace(found, margin=max(found.margin, margin))


@dataclass(frozen=True)
class Session:
    started_at: str
    lanes: tuple[LaneReading, ...]

    @property
    def spread(self) -> Change | None:
        """Return the slowest lane over the fastest, each alone; None if fewer than two are known.

        They ran one after the other, so the result may include drift.
        """
        paces = sorted(
            (lane.paces[ALONE] for lane in self.lanes if ALONE in lane.paces),
            key=lambda pace: pace.step_s,
        )
        if len(paces) < 2:
            return None
        found = compare(slow := paces[-1], fast := paces[0])
        assert found
        drift = max((abs(lane.drift.share) for lane in self.lanes if lane.drift), default=0.0)
        wide = _choose_quantile(len(paces), slow.freedom + fast.freedom) / _QUANTILE
        return replace(found, margin=math.hypot(wide * found.margin, drift))


def _choose_quantile(lanes: int, freedom: float) -> float:
    from scipy.special import ndtri, stdtrit

    share = 1 - 0.95 ** (1 / math.comb(lanes, 2))
    tail = 1 - share / 2
    return float(stdtrit(freedom, tail) if math.isfinite(freedom) else ndtri(tail))


def find_sessions(records: pd.DataFrame) -> dict[str, Session]:
    """Return the lanes of each start of a sweep whose anchors ran, by the column ``session``.
    ``records`` are the rows of one folder, in the order in which they were written."""
    anchors = records[records["anchor"] != ""]
    sessions = {}
    for key, rows in anchors.groupby("session", sort=False):
        # a larger anchor came before if a lane lacked the memory for it; a smaller one is repeated
        # on that lane alone
        ended = rows["batch_size"][rows["status"].isin(list(RELIABLE))]
        rows = rows[rows["batch_size"] == [*rows["batch_size"], *ended][-1]]
        lanes = []
        for lane, own in rows.groupby("lane", sort=False):
            timed = own[own["status"].isin(list(RELIABLE))]
            # an anchor that other programs disturbed says nothing about lanes
            shared = is_shared(timed["neighbours_computing"], timed["other_cores"])
            timed = timed[~shared]
            measured = timed[["step_time_median_s", "step_time_mad_s", "measured_steps"]]
            readings = measured.astype(float).itertuples(index=False)
            paces = {
                kind: pace
                for kind, cells in zip(timed["anchor"], readings, strict=True)
                if (pace := read_pace(*cells))
            }
            place = " ".join(filter(None, own.iloc[0][["gpu", "gpu_uuid"]])) or own["cpu"].iloc[0]
            lanes.append(LaneReading(str(lane), str(place), paces, int(shared.sum())))
        sessions[str(key)] = Session(str(rows["started_at"].iloc[0]), tuple(lanes))
    return sessions


def judge_lanes(records: pd.DataFrame) -> dict[str, pd.Series]:
    """Return what the anchors say against each row, as shares; NaN if nothing.

    ``interference``, for rows measured beside others, is how much longer the lane's steps took with
    all lanes busy; ``lane_spread`` is how much longer the slowest lane's steps took than the
    fastest's. ``records`` are the rows of one folder, in the order in which they were written.
    """
    import pandas as pd

    found = {
        name: pd.Series(math.nan, index=records.index) for name in ("interference", "lane_spread")
    }
    if not (records["anchor"] != "").any():
        return found
    beside = records["lanes_beside"].astype(float) > 0
    for key, session in find_sessions(records).items():
        here = (records["session"] == key) & (records["lane"] != "") & (records["anchor"] == "")
        if session.spread is not None and session.spread.verdict is AnchorVerdict.DIFFERENT:
            found["lane_spread"][here] = session.spread.share
        for lane in session.lanes:
            if lane.interference is not None and lane.interference.slower:
                own = here & beside & (records["lane"] == lane.lane)
                found["interference"][own] = lane.interference.share
    return found
