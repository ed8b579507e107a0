"""Anchors: a short case that every lane runs, to compare the lanes by measurement."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.anchors import ALONE, BUSY, AnchorVerdict, LaneReading, Pace, Session, read_pace
from bench.case import AXES, Case
from bench.executors import Lane
from bench.limits import is_shared
from bench.record import REFUSED, RELIABLE, Outcome, Record
from bench.sweep.crew import Crew
from bench.sweep.gate import Gate
from bench.sweep.loop import Loop, Ticket

STEPS = 30
"""Steps of an anchor after its warm-up. Their median is known to within 0.5 % if the steps vary by
1 %, and to within 2 % if they vary by 5 %."""


def make_anchor(case: Case) -> Case:
    """Return the first steps of a case, with no other measurements, on one GPU, and with the plain
    loader: an anchor that waits for a DataLoader compares CPUs and disks."""
    apart = {name: axis.default for name, axis in AXES.items() if not axis.anchored}
    return replace(case, **apart | {"steps": STEPS})


def choose_anchors(cases: Sequence[Case]) -> list[Case]:
    """Return candidate anchors: of the first case, then of cases with ever smaller batches."""
    anchors = [make_anchor(cases[0])] if cases else []
    for case in sorted(cases, key=lambda case: -case.batch_size):
        if case.batch_size < anchors[-1].batch_size:
            anchors.append(make_anchor(case))
    return anchors


class Anchors:
    """A source that has each idle lane of ``loop`` run the anchor ``case`` once.

    Args:
        kind: when it runs: a kind of `bench.anchors`.
        lanes: the lanes to run it, in this order if there is no gate.
        before: the number of recorded anchors, by kind and lane.
        gate: the gate to pass together, if they are to run at once.
        search: whether to stop at the first lane that lacks the memory.
    """

    def __init__(
        self,
        loop: Loop,
        case: Case,
        kind: str,
        lanes: Sequence[Lane],
        before: Mapping[tuple[str, str], int],
        gate: Gate | None,
        search: bool = False,
    ) -> None:
        self.loop = loop
        self.records: dict[str, Record] = {}
        self._case, self._kind, self._before, self._gate = case, kind, before, gate
        self._search = search
        self._waiting = [lane.name for lane in lanes]
        self._open = 0  # anchors that run

    @property
    def left(self) -> bool:
        return bool(self._waiting)

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Ticket | None:
        if not self._open:
            for lost in {*self._waiting} - {free.name for free in idle}:
                self._waiting.remove(lost)
                if self._gate:
                    self._gate.leave(lost)
        if lane.name not in (self._waiting if self._gate else self._waiting[:1]):
            return None
        self._waiting.remove(lane.name)
        self._open += 1
        attempt = self._before.get((self._kind, lane.name), 0) + 1
        return Ticket((self._case, 1, False), attempt, anchor=self._kind, gate=self._gate)

    def settle(self, ticket: Ticket, record: Record, outcome: Outcome) -> None:
        self._open -= 1
        self.records[record.lane] = record
        if self._search and record.status in REFUSED:
            self._waiting.clear()


def run_anchors(
    crew: Crew,
    cases: Mapping[Loop, Case],
    kind: str,
    before: Mapping[Loop, Mapping[tuple[str, str], int]],
    alone: Mapping[Loop, Mapping[str, Record]],
    together: bool,
) -> dict[Loop, dict[str, Record]]:
    """Run an anchor on each idle lane, in turn or all ``together``. Return the records of each
    loop, by lane. Lanes that lacked the memory in ``alone``, of `find_anchors`, are left out."""
    lanes = {
        loop: [lane for lane in crew.list_idle(loop) if not _is_refused(alone[loop].get(lane.name))]
        for loop in cases
    }
    gate = Gate(lane.name for own in lanes.values() for lane in own) if together else None
    sources = [
        Anchors(loop, case, kind, lanes[loop], before[loop], gate) for loop, case in cases.items()
    ]
    crew.work(sources, most=0 if together else 1)
    return {source.loop: source.records for source in sources}


def find_anchors(
    crew: Crew,
    choices: Mapping[Loop, Sequence[Case]],
    before: Mapping[Loop, Mapping[tuple[str, str], int]],
) -> tuple[dict[Loop, Case], dict[Loop, dict[str, Record]]]:
    """Run on each lane alone the first anchor that fits in the memory of all lanes of its loop.
    Return the anchor of each loop that has one, and the last records of each loop, by lane.

    A lane that lacks the memory even for the last anchor is left out, and limits no other lane.
    """
    cases: dict[Loop, Case] = {}
    records: dict[Loop, dict[str, Record]] = {}
    for loop, anchors in choices.items():
        if anchors:
            case, records[loop] = _find_anchor(crew, loop, anchors, before[loop])
            cases |= {loop: case} if case else {}
    return cases, records


def _find_anchor(
    crew: Crew, loop: Loop, anchors: Sequence[Case], before: Mapping[tuple[str, str], int]
) -> tuple[Case | None, dict[str, Record]]:
    """Return the anchor of a loop, and records by lane, with the refusals of lanes that have none.

    A lane that lacks the memory for an anchor runs the smallest next, and then each other one
    before the other lanes do. So a lane without an anchor costs two runs, and an anchor that is too
    large is refused only once.
    """
    lanes, left = crew.list_idle(loop), deque(anchors)
    records: dict[str, Record] = {}  # of the first anchor left
    smallest: dict[str, Record] = {}  # of the last anchor

    def run(case: Case, lanes: Sequence[Lane]) -> dict[str, Record]:
        source = Anchors(loop, case, ALONE, lanes, before, None, search=True)
        crew.work([source], most=1)
        return source.records

    while True:
        records |= run(left[0], [lane for lane in lanes if lane.name not in records])
        tight = next((lane for lane in lanes if _is_refused(records.get(lane.name))), None)
        if tight is None:
            without = {name: record for name, record in smallest.items() if _is_refused(record)}
            return (left[0] if records else None), records | without
        refused = records.pop(tight.name)
        lanes.remove(tight)
        if len(left) == 1:
            smallest[tight.name] = refused
        elif tight.name not in smallest:
            smallest |= run(anchors[-1], [tight])
        if tight.name in smallest and not _is_refused(smallest[tight.name]):
            lanes.insert(0, tight)
            left.popleft()
            known = smallest if len(left) == 1 else {}
            records = {lane.name: known[lane.name] for lane in lanes if lane.name in known}


def _is_refused(record: Record | None) -> bool:
    return record is not None and record.status in REFUSED


def compare_alone(alone: Mapping[str, Record]) -> list[str]:
    """Return lines that compare the lanes of one class by their anchors alone."""
    lanes = tuple(_read(name, alone, {}) for name in alone)
    lines = [
        f"warning: {name} has no anchor, and is compared with no other lane: batch size "
        f"{record.case.batch_size} is too large for it; add a smaller --batch-size"
        for name, record in alone.items()
        if _is_refused(record)
    ]
    if len(lanes) < 2:
        return lines
    spread = Session("", lanes).spread
    if spread is None:
        why = _say_why_unknown(lanes)
        return [*lines, f"lanes: not known whether they are equally fast; {why}"]
    line = f"lanes: a step of the slowest against one of the fastest: {spread}"
    if spread.verdict is AnchorVerdict.DIFFERENT:
        line = (
            f"warning: {line}; more --repeats, or --lanes 1 with another --out, keep this out "
            "of comparisons"
        )
    return [*lines, line]


def compare_busy(alone: Mapping[str, Record], busy: Mapping[str, Record]) -> list[str]:
    """Return lines on how much slower each lane's anchor is when all lanes are busy."""
    lines = []
    for lane in (_read(name, alone, busy) for name, one in alone.items() if not _is_refused(one)):
        change = lane.interference
        if change is None:
            why = _say_why_unknown([lane])
            lines.append(f"{lane.lane}: not known what the other lanes change; {why}")
            continue
        now, then = (1e3 * lane.paces[kind].step_s for kind in (BUSY, ALONE))
        line = (
            f"{lane.lane}: a step takes {now / then:.3f} × as long with all lanes busy "
            f"({then:.4g} → {now:.4g} ms, {change})"
        )
        if change.slower:
            line = f"warning: {line}; --lanes quiet with another --out runs one case at a time"
        lines.append(line)
    return lines


def _say_why_unknown(lanes: Sequence[LaneReading]) -> str:
    if any(lane.disturbed for lane in lanes):
        return "other programs computed beside the anchors; end them"
    return "too few anchors were timed; use more --repeats"


def _read(name: str, alone: Mapping[str, Record], busy: Mapping[str, Record]) -> LaneReading:
    paces: dict[str, Pace] = {}
    disturbed = 0
    for kind, records in ((ALONE, alone), (BUSY, busy)):
        record = records.get(name)
        if record is None or record.status not in RELIABLE:
            continue
        m = record.measurement
        if is_shared(m.neighbours_computing or 0, m.other_cores or 0.0):
            disturbed += 1
        elif pace := read_pace(m.step_time_median_s, m.step_time_mad_s, m.measured_steps):
            paces[kind] = pace
    return LaneReading(name, "", paces, disturbed)
