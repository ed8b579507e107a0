"""The trials of a search as a source of runs for lanes, and what a folder holds of them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from bench.case import Case, telling_axes
from bench.errors import UsageError
from bench.executors import Lane
from bench.halving import Halving
from bench.record import MEASURED, REPEATED, EpochRow, Outcome, Record, Status
from bench.search.ladder import Curve, Ladder
from bench.store.attempts import keep_latest
from bench.store.reader import read_epochs
from bench.store.runs import read_cases
from bench.sweep.loop import Loop, Ticket
from bench.sweep.schedule import Losses, OomSkips
from bench.wall.records import name_family

if TYPE_CHECKING:
    import pandas as pd


class Trials:
    """Deals out the trials that have not ended, in the order in which they were drawn.

    A trial climbs a ladder that is made of all that ended before it, by ``frame``, the rows of the
    folder that new ones can be compared with. Trials that run beside each other share one. Nothing
    else is remembered, so that a search goes on wherever its records end. No trial begins from the
    time.monotonic() ``until`` on.
    """

    def __init__(
        self,
        loop: Loop,
        halving: Halving,
        cases: Sequence[Case],
        frame: pd.DataFrame,
        until: float = math.inf,
    ) -> None:
        self.loop = loop
        self.axes = telling_axes(cases)
        self._halving, self._until = halving, until
        self._attempts = Counter[Case]()
        self._walls = OomSkips({}, name_family)
        self._curves: list[Curve] = []  # in the order in which trials ended
        done = self._read(frame, set(cases))
        self._queue = deque(case for case in cases if case not in done)
        self._losses = Losses()
        self._open = 0  # trials that are dealt out and have not ended
        self._ladder: Ladder | None = None

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def left(self) -> bool:
        return bool(self._queue) and monotonic() < self._until

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Ticket | None:
        if not self.left:
            return None
        case = self._queue.popleft()
        if not self._open or self._ladder is None:
            self._ladder = Ladder(self._halving, self._curves)
        self._open += 1
        self._attempts[case] += 1
        judge, metric = self._ladder.add(), self._halving.metric
        return Ticket(
            (case, 1, False),
            self._attempts[case],
            self._walls.blocks(case),
            enough=lambda row: judge(row.epoch + 1, read_metric(row, metric)),
        )

    def settle(self, ticket: Ticket, record: Record, outcome: Outcome) -> None:
        """Learn how a trial ended; one that was lost is the next again, but not for ever. Raises
        UsageError: the metric is empty although the loss is a number."""
        self._open -= 1
        case, m = record.case, record.measurement
        if record.status is Status.LOST and self._losses.allow(case, outcome):
            self._queue.appendleft(case)
        self._walls.note(case, record.status)
        if record.status not in MEASURED:
            return
        if getattr(m, self._halving.metric) is None and m.first_bad_step is None:
            raise UsageError(
                f"--metric {self._halving.metric} is not known of these trials: "
                f"{m.missing or 'no reason is given'}; give another --metric, and another --out"
            )
        self._curves.append([read_metric(row, self._halving.metric) for row in outcome.epochs])

    def _read(self, frame: pd.DataFrame, wanted: set[Case]) -> set[Case]:
        """Take in the trials that ended before, but for those that are to be tried again."""
        done = set()
        plain = ~frame["probe"] & ~frame["sentinel"] & (frame["anchor"] == "")
        rows = keep_latest(frame[plain & (frame["repeat"] == 1)])
        epochs = read_epochs(self.loop.store.folder)
        again = REPEATED | set(self.loop.options.retry)
        for case, row in zip(read_cases(rows), rows.to_dict("records"), strict=True):
            if case not in wanted:
                continue
            status = Status(row["status"])
            self._attempts[case] = max(self._attempts[case], int(row["attempt"]))
            if status in again:
                continue
            done.add(case)
            self._walls.note(case, status)
            if status in MEASURED:
                mine = epochs[epochs["record_id"] == row["record_id"]].sort_values("epoch")
                # a loss that is no number any more is empty there, and leaves nothing to compare
                values = mine[self._halving.metric].where(mine["train_loss"].notna())
                self._curves.append([None if math.isnan(v) else v for v in values.tolist()])
        return done


def read_metric(row: EpochRow, metric: str) -> float | None:
    """What a trial is judged by: nothing, where its loss is no number any more."""
    return None if row.train_loss is None else getattr(row, metric)
