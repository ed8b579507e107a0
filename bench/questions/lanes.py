"""The lanes of a sweep: whether they are equally fast, and what they change in each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.anchors import (
    ALONE,
    BUSY,
    CLOSE,
    AnchorVerdict,
    Change,
    LaneReading,
    Pace,
    Session,
    find_sessions,
)
from bench.render.model import NOTHING, Cell, Head, Table
from bench.study.drift import write_moment
from bench.text import say_left_out, write_number

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN = "not known"

_HEADS = (
    Head("lane", "lane", "the name of the lane", False),
    Head("place", "where", "its GPU, or the cores that it was held to", False, keep=4, wrap=True),
    Head("alone_s", "alone (ms)", "median step of the anchor while other lanes were idle"),
    Head("busy_s", "all busy (ms)", "the same while all lanes ran it"),
    Head("close_s", "closing (ms)", "the same when all cases had ended", keep=6),
    Head("interference", "busy over alone", "how much longer a step takes beside others"),
    Head("drift", "closing over before", "how much longer it takes at the end", keep=5),
)


def tabulate_lanes(records: pd.DataFrame) -> Iterator[Table]:
    """One row for each lane whose anchors ran, each session of a sweep set off.

    Args:
        records: of `bench.study.summaries.read`.
    """
    rows: list[tuple[Cell, ...]] = []
    groups, notes = {}, []
    for sweep, own in records.groupby("sweep", sort=False):
        for session in find_sessions(own).values():
            where = f"{sweep} ({write_moment(session.started_at)})"
            groups[len(rows)] = where
            rows += [_write_lane(lane) for lane in session.lanes]
            notes.append(f"{where}: {_describe_spread(session)}")
            if disturbed := sum(lane.disturbed for lane in session.lanes):
                left = say_left_out(disturbed, "anchor")
                notes.append(f"{where}: {left}, because other programs computed meanwhile.")
    if rows:
        yield Table(
            "lanes",
            "Lanes: the same short case on each",
            _HEADS,
            tuple(rows),
            (*notes, "± is half of the 95 % interval, from the spread of the steps."),
            groups if len(groups) > 1 else {},
        ).drop_empty()


def _write_lane(lane: LaneReading) -> tuple[Cell, ...]:
    return (
        Cell(lane.lane),
        Cell(lane.place),
        *(_write_pace(lane.paces.get(kind)) for kind in (ALONE, BUSY, CLOSE)),
        _write_change(lane.interference if BUSY in lane.paces else None),
        _write_change(lane.drift),
    )


def _write_pace(pace: Pace | None) -> Cell:
    return Cell(NOTHING) if pace is None else Cell(write_number(1e3 * pace.step_s), pace.step_s)


def _write_change(change: Change | None) -> Cell:
    if change is None:
        return Cell(NOTHING)
    doubt = f" ({UNKNOWN})" if change.verdict is AnchorVerdict.UNKNOWN else ""
    return Cell(f"{change}{doubt}", change.share)


def _describe_spread(session: Session) -> str:
    """Say whether lanes are equally fast, each alone."""
    spread = session.spread
    if spread is None:
        return "whether the lanes are equally fast is not known."
    said = f"a step of the slowest lane against one of the fastest, each alone: {spread}"
    if spread.verdict is AnchorVerdict.UNKNOWN:
        return f"{said}; whether they are equally fast is not known."
    return f"{said}."
