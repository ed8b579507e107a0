"""The lanes of a sweep: whether they are equally fast, and how much they slow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench.anchors import ALONE, BUSY, CLOSE, AnchorVerdict, Change, LaneReading, find_sessions
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet, join
from bench.study.drift import write_moment
from bench.text import say_left_out, write_number

if TYPE_CHECKING:
    import pandas as pd


def tabulate_lanes(records: pd.DataFrame) -> Iterator[Sheet]:
    """Yield a table of one row for each lane whose anchors ran, grouped by session of a sweep;
    ``records`` are all records of `bench.study.summaries.read`."""
    parts: list[tuple[str, Sequence[LaneReading]]] = []
    notes = []
    for sweep, own in records.groupby("sweep", sort=False):
        for session in find_sessions(own).values():
            where = f"{sweep} ({write_moment(session.started_at)})"
            parts.append((where, session.lanes))
            notes.append(f"{where}: {_describe_spread(session.spread)}")
            if disturbed := sum(lane.disturbed for lane in session.lanes):
                left = say_left_out(disturbed, "anchor")
                notes.append(f"{where}: {left}, because other programs computed meanwhile.")

    def take_step(kind: str, lane: LaneReading) -> float | None:
        return lane.paces[kind].step_s if kind in lane.paces else None

    pace = partial(Column, write=lambda step_s: write_number(1e3 * step_s))
    columns: list[Column[LaneReading]] = [
        Column("lane", "lane", "the name of the lane", lambda lane: lane.lane, number=False),
        Column("place", "where", "its GPU, or the cores that it was held to",
               lambda lane: lane.place, keep=4, wrap=True),
        pace("alone_s", "alone (ms)", "median step of the anchor while other lanes were idle",
             partial(take_step, ALONE)),
        pace("busy_s", "all busy (ms)", "the same while all lanes ran it",
             partial(take_step, BUSY)),
        pace("close_s", "closing (ms)", "the same when all cases had ended",
             partial(take_step, CLOSE), keep=6),
        Column("interference", "busy over alone", "how much longer a step takes beside others",
               lambda lane: _write_change(lane.interference if BUSY in lane.paces else None)),
        Column("drift", "closing over before", "how much longer it takes at the end",
               lambda lane: _write_change(lane.drift), keep=5),
    ]  # fmt: skip
    rows, groups = join(parts)
    notes.append("± is half of the 95 % interval, from the spread of the steps.")
    title = "Lanes: the same short case on each"
    yield Sheet(title, columns, rows, notes, groups if len(groups) > 1 else {})


def _write_change(change: Change | None) -> Cell | None:
    if change is None:
        return None
    doubt = " (not known)" if change.verdict is AnchorVerdict.UNKNOWN else ""
    return Cell(f"{change}{doubt}", change.share)


def _describe_spread(spread: Change | None) -> str:
    if spread is None:
        return "whether the lanes are equally fast is not known."
    unsure = spread.verdict is AnchorVerdict.UNKNOWN
    doubt = "; whether they are equally fast is not known" if unsure else ""
    return f"a step of the slowest lane against one of the fastest, each alone: {spread}{doubt}."


LANES = Section(
    "lanes", "Do the lanes slow each other?", lambda found: tabulate_lanes(found.everything)
)
