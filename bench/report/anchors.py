"""Whether lanes can be believed: their anchors, run alone, with all lanes busy, and at the end.

An anchor is a few dozen steps of one case, the same on every lane. What is compared is its median
step, with the standard error of a median of normally distributed steps: 1.2533 σ / √n, and σ is
1.4826 times their median absolute deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from bench.limits import BUSY_CORES, INTERFERENCE
from bench.record import RELIABLE

if TYPE_CHECKING:
    import pandas as pd

ALONE, BUSY, CLOSE = "alone", "busy", "close"
"""When an anchor ran: while other lanes were idle, on all lanes at once, and when all was done."""

_HALF_INTERVAL = 1.96 * 1.2533 * 1.4826  # in median absolute deviations, over √n


class Verdict(StrEnum):
    """What can be said of a difference between two anchors."""

    DIFFERENT = "different"
    UNKNOWN = "not known"
    ALIKE = "alike"


_MEASURED = ("step_time_median_s", "step_time_mad_s", "measured_steps")


@dataclass(frozen=True)
class Pace:
    """The median step of an anchor, in s, and half of its 95 % interval, as a share of it."""

    step_s: float
    error: float


@dataclass(frozen=True)
class Change:
    """One anchor's median step over another's, minus 1, and half of its 95 % interval."""

    share: float
    margin: float

    @property
    def verdict(self) -> Verdict:
        """Whether it is more than `INTERFERENCE`, or surely not, or noise hides it."""
        if abs(self.share) > max(self.margin, INTERFERENCE):
            return Verdict.DIFFERENT
        if abs(self.share) + self.margin <= INTERFERENCE:
            return Verdict.ALIKE
        return Verdict.UNKNOWN

    @property
    def slower(self) -> bool:
        """Whether it is surely slower by more than `INTERFERENCE`."""
        return self.share > 0 and self.verdict is Verdict.DIFFERENT

    def __str__(self) -> str:
        """As in a table: ``+3.1 ± 0.4 %``."""
        return f"{100 * self.share:+.1f} ± {100 * self.margin:.1f} %"


def read_pace(median_s: float | None, mad_s: float | None, steps: float | None) -> Pace | None:
    """The pace of an anchor by its columns; None where too little was measured to tell."""
    known = [value for value in (median_s, mad_s, steps) if value is not None]
    if len(known) < 3 or not all(map(math.isfinite, known)) or known[0] <= 0 or known[2] < 2:
        return None
    return Pace(known[0], _HALF_INTERVAL * known[1] / known[0] / math.sqrt(known[2]))


def compare(now: Pace | None, before: Pace | None, also: float = 0.0) -> Change | None:
    """How ``now`` differs from ``before``; None where either is not known.

    Args:
        now: the later or busier one.
        before: what it is compared with.
        also: a share by which they may differ for another reason, which widens the margin.
    """
    if now is None or before is None:
        return None
    share = now.step_s / before.step_s - 1
    return Change(share, math.hypot((1 + share) * math.hypot(now.error, before.error), also))


@dataclass(frozen=True)
class LaneReading:
    """The anchors of a lane in one session of a sweep, by when they ran.

    ``place`` is its GPU with the UUID, or the CPU with as many cores as it has.
    """

    lane: str
    place: str
    paces: Mapping[str, Pace] = field(default_factory=dict)

    @property
    def drift(self) -> Change | None:
        """The closing anchor over the busy one; where lanes took turns, over the first."""
        return compare(self.paces.get(CLOSE), self.paces.get(BUSY) or self.paces.get(ALONE))

    @property
    def interference(self) -> Change | None:
        """The busy anchor over the one alone. What the lane drifted may be in it by chance."""
        drift = self.drift
        also = abs(drift.share) if drift else 0.0
        return compare(self.paces.get(BUSY), self.paces.get(ALONE), also)


@dataclass(frozen=True)
class Session:
    """The lanes of a sweep between two starts of it."""

    started_at: str
    lanes: tuple[LaneReading, ...]

    @property
    def spread(self) -> Change | None:
        """The slowest lane over the fastest, each alone; None where fewer than two are known.

        They ran one after the other, so what any of them drifted may be in it.
        """
        paces = sorted(
            (lane.paces[ALONE] for lane in self.lanes if ALONE in lane.paces),
            key=lambda pace: pace.step_s,
        )
        drifts = [abs(lane.drift.share) for lane in self.lanes if lane.drift]
        return compare(paces[-1], paces[0], max(drifts, default=0.0)) if len(paces) > 1 else None


def number_sessions(records: pd.DataFrame) -> pd.Series:
    """The session of each row: 0 before any anchor, and one more where lanes are opened again.

    Args:
        records: of one folder, in the order in which they were written.
    """
    alone = records["anchor"] == ALONE
    # in a merged folder the lanes of several machines may have the same names; those of a cluster
    # are named by their machines, and compared
    hosts = records.loc[records["lane"] != ""].groupby("lane")["host"].nunique()
    several = bool((hosts > 1).any())
    machine = records["host"] if several else records["host"].map(lambda host: "")
    before = alone.groupby(machine).shift(fill_value=False).astype(bool)
    first = (len(records) + 1) * machine.factorize()[0]
    number: pd.Series = (alone & ~before).groupby(machine).cumsum() + first
    return number


def find_sessions(records: pd.DataFrame, numbers: pd.Series | None = None) -> dict[int, Session]:
    """The lanes of each session by its number.

    Args:
        records: of one folder, in the order in which they were written.
        numbers: of `number_sessions`, where they are known.
    """
    anchors = records[records["anchor"] != ""]
    if anchors.empty:
        return {}
    sessions = {}
    numbers = number_sessions(records) if numbers is None else numbers
    for number, rows in anchors.groupby(numbers[anchors.index], sort=True):
        lanes = []
        for lane, own in rows.groupby("lane", sort=False):
            # one that other programs disturbed says nothing of lanes
            shared = (own["neighbours_computing"] > 0) | (own["other_cores"] > BUSY_CORES)
            timed = own[own["status"].isin(list(RELIABLE)) & ~shared]
            columns = (timed[name] for name in _MEASURED)
            paces = {
                kind: pace
                for kind, *cells in zip(timed["anchor"], *columns, strict=True)
                if (pace := read_pace(*map(float, cells)))
            }
            place = " ".join(filter(None, own.iloc[0][["gpu", "gpu_uuid"]])) or own["cpu"].iloc[0]
            lanes.append(LaneReading(str(lane), str(place), paces))
        sessions[int(number)] = Session(str(rows["started_at"].iloc[0]), tuple(lanes))
    return sessions


def judge_lanes(records: pd.DataFrame) -> dict[str, pd.Series]:
    """What the anchors say against each row, as shares; NaN where they say nothing against it.

    ``interference`` is how much longer its lane's steps took with all lanes busy, of a row that was
    measured beside others; ``lane_spread`` how much longer the slowest lane's took than the
    fastest's.

    Args:
        records: of one folder, in the order in which they were written.
    """
    import pandas as pd

    found = {
        name: pd.Series(math.nan, index=records.index) for name in ("interference", "lane_spread")
    }
    if (records["anchor"] == "").all():
        return found
    number = number_sessions(records)
    sessions = find_sessions(records, number)
    beside = records["lanes_beside"].astype(float) > 0
    for key, session in sessions.items():
        here = (number == key) & (records["lane"] != "") & (records["anchor"] == "")
        if session.spread is not None and session.spread.verdict is Verdict.DIFFERENT:
            found["lane_spread"][here] = session.spread.share
        for lane in session.lanes:
            if lane.interference is not None and lane.interference.slower:
                own = here & beside & (records["lane"] == lane.lane)
                found["interference"][own] = lane.interference.share
    return found
