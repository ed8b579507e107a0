"""Anchors: a short case that every lane runs, so that lanes are compared and not believed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.case import FOLLOWS, Case
from bench.executors import Lane
from bench.record import REFUSED, RELIABLE, Outcome, Record
from bench.report.anchors import ALONE, BUSY, LaneReading, Pace, Session, Verdict, read_pace
from bench.sweep.crew import Crew
from bench.sweep.gate import Gate
from bench.sweep.loop import Loop, Ticket

STEPS = 30
"""Steps of an anchor after its warm-up. The median of so many steps that vary by 1 % is known to
within 0.5 %, and to within 2 % where they vary by 5 %."""


def make_anchor(case: Case) -> Case:
    """The first steps of a case, with nothing measured beside them, on one GPU.

    Its batches come from the plain loader: one that waits for a DataLoader compares CPUs and disks.
    """
    apart = ("epochs", "fraction", "evaluate", "checkpoint", "profile", "compile")
    alone = ("parallel", *FOLLOWS["parallel"], "loader", *FOLLOWS["loader"])
    return replace(case, **{name: getattr(Case, name) for name in (*apart, *alone)}, steps=STEPS)


def choose_anchors(cases: Sequence[Case]) -> list[Case]:
    """The anchors that may be made of ``cases``: of the first, then of ever smaller batches."""
    anchors = [make_anchor(cases[0])] if cases else []
    for case in sorted(cases, key=lambda case: -case.batch_size):
        if case.batch_size < anchors[-1].batch_size:
            anchors.append(make_anchor(case))
    return anchors


class Anchors:
    """Has each idle lane run the anchor once.

    Args:
        loop: whose lanes they are.
        case: of `make_anchor`.
        kind: when it runs: one of those of `bench.report.anchors`.
        lanes: that run it.
        before: how many anchors of this kind each lane has in the records.
        gate: where they are to run at once, and pass it together.
    """

    def __init__(
        self,
        loop: Loop,
        case: Case,
        kind: str,
        lanes: Sequence[Lane],
        before: Mapping[tuple[str, str], int],
        gate: Gate | None,
    ) -> None:
        self.loop = loop
        self.records: dict[str, Record] = {}
        self._case, self._kind, self._before, self._gate = case, kind, before, gate
        self._waiting = {lane.name for lane in lanes}
        self._open = 0  # anchors that run

    @property
    def left(self) -> bool:
        """Whether a lane has not begun its anchor."""
        return bool(self._waiting)

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Ticket | None:
        """The anchor, once for each lane."""
        if not self._open:
            for lost in self._waiting - {free.name for free in idle}:
                self._waiting.discard(lost)
                if self._gate:
                    self._gate.leave(lost)
        if lane.name not in self._waiting:
            return None
        self._waiting.discard(lane.name)
        self._open += 1
        attempt = self._before.get((self._kind, lane.name), 0) + 1
        return Ticket((self._case, 1, False), attempt, anchor=self._kind, gate=self._gate)

    def settle(self, ticket: Ticket, record: Record, outcome: Outcome) -> None:
        """Keep what was measured."""
        self._open -= 1
        self.records[record.lane] = record


def run_anchors(
    crew: Crew,
    cases: Mapping[Loop, Case],
    kind: str,
    before: Mapping[Loop, Mapping[tuple[str, str], int]],
    together: bool,
) -> dict[Loop, dict[str, Record]]:
    """Run an anchor on each idle lane: one after the other, or on all at once.

    Args:
        crew: with the lanes.
        cases: the anchor of each loop that has one.
        kind: when it runs.
        before: as `Anchors` takes it.
        together: whether all run at once.

    Returns:
        The records of each loop, by lane.
    """
    idle = {loop: crew.list_idle(loop) for loop in cases}
    gate = Gate(lane.name for lanes in idle.values() for lane in lanes) if together else None
    sources = [
        Anchors(loop, case, kind, idle[loop], before[loop], gate) for loop, case in cases.items()
    ]
    crew.work(sources, most=0 if together else 1)
    return {source.loop: source.records for source in sources}


def find_anchors(
    crew: Crew,
    choices: Mapping[Loop, Sequence[Case]],
    before: Mapping[Loop, Mapping[tuple[str, str], int]],
) -> tuple[dict[Loop, Case], dict[Loop, dict[str, Record]]]:
    """Run on each lane alone the first anchor for which all lanes of its loop have the memory.

    Args:
        crew: with the lanes.
        choices: of `choose_anchors`, for each loop.
        before: as `Anchors` takes it.

    Returns:
        The anchor of each loop that has one, and the last records of each loop, by lane.
    """
    cases: dict[Loop, Case] = {}
    records: dict[Loop, dict[str, Record]] = {}
    left = {loop: deque(anchors) for loop, anchors in choices.items() if anchors}
    while left:
        now = {loop: anchors.popleft() for loop, anchors in left.items()}
        for loop, found in run_anchors(crew, now, ALONE, before, together=False).items():
            records[loop] = found
            if any(record.status in REFUSED for record in found.values()):
                continue
            cases[loop] = now[loop]
            del left[loop]
        left = {loop: anchors for loop, anchors in left.items() if anchors}
    return cases, records


def describe_anchors(
    alone: Mapping[str, Record], busy: Mapping[str, Record] | None = None
) -> list[str]:
    """Say how lanes of one class compare: by their anchors alone, or with all lanes busy."""
    session = Session("", tuple(_read(name, alone, busy or {}) for name in alone))
    lines = []
    if busy is None:
        if len(session.lanes) < 2:
            return []
        spread = session.spread
        if spread is None:
            return ["lanes: not known whether they are equally fast; too few anchors were timed"]
        line = f"lanes: a step of the slowest against one of the fastest: {spread}"
        if spread.verdict is Verdict.DIFFERENT:
            line = (
                f"warning: {line}; more --repeats, or --lanes 1 with another --out, keep this out "
                "of comparisons"
            )
        return [line]
    for lane in session.lanes:
        change = lane.interference
        if change is None:
            lines.append(f"{lane.lane}: not known what the other lanes change; no anchor was timed")
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


def _read(name: str, alone: Mapping[str, Record], busy: Mapping[str, Record]) -> LaneReading:
    paces: dict[str, Pace] = {}
    for kind, records in ((ALONE, alone), (BUSY, busy)):
        record = records.get(name)
        if record and record.status in RELIABLE:
            m = record.measurement
            pace = read_pace(m.step_time_median_s, m.step_time_mad_s, m.measured_steps)
            paces |= {kind: pace} if pace else {}
    return LaneReading(name, "", paces)
