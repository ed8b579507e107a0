"""The trials of a search: a source of runs for lanes, in a folder that may hold earlier trials."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from time import monotonic

from bench.case import Case, list_varying
from bench.errors import UsageError
from bench.halving import Halving, read_halving
from bench.record import MEASURED, REPEATED, EpochRow, Outcome, Record, Status
from bench.search.ladder import Curve, Ladder
from bench.search.options import Search
from bench.store.reader import read_beside
from bench.store.rows import Row, keep_latest
from bench.sweep.display import Display
from bench.sweep.folder import read_past, write_config
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Plan
from bench.sweep.schedule import Losses, OomSkips
from bench.wall.records import name_family
from bench.worker.messages import Job, Lane


def run_search(asked: Search) -> tuple[Trials, Loop]:
    """Run the trials into --out until the time limit. Return them, and the loop."""
    Ladder(asked.halving)  # raises UsageError if Ray Tune is not installed
    with open_loop(asked.options, Plan(asked.plan().trials)) as loop:
        drawn = asked.plan(loop.inputs.settle)
        halving = drawn.halving
        loop.lock()
        comparable, _ = read_past(loop, drawn.trials)
        earlier = read_halving(loop.store.read_config().get("halving"))
        refuse_other_search(loop.out, earlier, halving)
        if earlier and len(earlier.trials) > len(halving.trials):
            halving = earlier
        write_config(loop, drawn.trials, halving=asdict(halving))
        trials = Trials(loop, halving, drawn.trials, comparable, monotonic() + asked.time_s)
        known = len(drawn.trials) - trials.waiting
        with Display(loop.out, trials.waiting, known, trials.axes) as display:
            loop.show_on(display)
            loop.work(trials)
    return trials, loop


def refuse_other_search(out: Path, before: Halving | None, now: Halving) -> None:
    """Refuse other rules or trials than those of the search that ``out`` holds."""
    if before is None:
        return
    changed = [
        f"--{name.replace('_', '-')} was {value}"
        for name, value in before.rules.items()
        if now.rules[name] != value
    ]
    both = min(len(before.trials), len(now.trials))
    if not changed and list(before.trials[:both]) != list(now.trials[:both]):
        changed = ["its trials were drawn of other settings, or by another --seed"]
    if changed:
        raise UsageError(
            f"--out {out}: has another search: {', '.join(changed)}; give the same, or choose "
            "another --out"
        )


class Trials:
    """A source of the trials that have not ended, in the order in which they were drawn.

    A trial is judged by a `Ladder` of all that ended before it; ``rows`` are the earlier ones that
    new ones can be compared with. Trials that run at the same time share a ladder. There is no
    other state, so a search can resume from its records. No trial begins once time.monotonic() is
    ``until`` or later.
    """

    def __init__(
        self,
        loop: Loop,
        halving: Halving,
        cases: Sequence[Case],
        rows: Sequence[Row],
        until: float = math.inf,
    ) -> None:
        self.loop = loop
        self.axes = list_varying(cases)
        self.halving, self._until = halving, until
        self._attempts = Counter[Case]()
        self._walls = OomSkips({}, name_family)
        self._curves: list[Curve] = []  # in the order in which trials ended
        done = self._read(rows, set(cases))
        self._queue = deque(case for case in cases if case not in done)
        self._losses = Losses()
        self._open = 0  # trials that were taken and have not ended
        self._ladder: Ladder | None = None

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def left(self) -> bool:
        return bool(self._queue) and monotonic() < self._until

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        if not self.left:
            return None
        case = self._queue.popleft()
        if not self._open or self._ladder is None:
            self._ladder = Ladder(self.halving, self._curves)
        self._open += 1
        self._attempts[case] += 1
        judge, metric = self._ladder.add(), self.halving.metric
        return Job(
            case,
            attempt=self._attempts[case],
            smaller=self._walls.blocks(case),
            enough=lambda row: judge(row.epoch + 1, read_metric(row, metric)),
        )

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn from an outcome. A lost trial comes next again, as often as `Losses` allows. Raises
        UsageError: the metric is empty although the loss was never inf or NaN."""
        self._open -= 1
        case, m = record.case, record.measurement
        if record.status is Status.LOST and self._losses.allow(case, outcome):
            self._queue.appendleft(case)
        self._walls.note(case, record.status)
        if record.status not in MEASURED:
            return
        if getattr(m, self.halving.metric) is None and m.first_bad_step is None:
            raise UsageError(
                f"--metric {self.halving.metric} is not known of these trials: "
                f"{m.missing or 'no reason is given'}; give another --metric, and another --out"
            )
        self._curves.append([read_metric(row, self.halving.metric) for row in outcome.epochs])

    def _read(self, rows: Sequence[Row], wanted: set[Case]) -> set[Case]:
        """Read the trials that ended before, less those to be retried. Return their cases."""
        done = set()
        epochs = read_beside(self.loop.store.folder, EpochRow)
        again = REPEATED | set(self.loop.options.retry)
        for row in keep_latest(row for row in rows if row.is_repeat and row.repeat == 1):
            case = row.case
            if case not in wanted:
                continue
            self._attempts[case] = max(self._attempts[case], row.attempt)
            if row.status in again:
                continue
            done.add(case)
            self._walls.note(case, row.status)
            if row.status in MEASURED:
                mine = sorted(epochs.get(row.record_id, ()), key=attrgetter("epoch"))
                self._curves.append([read_metric(epoch, self.halving.metric) for epoch in mine])
        return done


def read_metric(row: EpochRow, metric: str) -> float | None:
    """Return the metric of an epoch; None if its loss is inf or NaN."""
    return None if row.train_loss is None else getattr(row, metric)
