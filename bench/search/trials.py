"""The trials of a search, and which of them may go on, at which rungs: Ray Tune's ASHA scheduler,
called in this process.

Only Tune's scheduler is used, not its processes. They would run each trial in an actor on a cluster
of their own (4 s and 312 MB to start), which then starts the worker that measures, and they keep
trials in a store of their own, retry them, and change what a process inherits. A scheduler needs
none of that: its public methods ``on_trial_add`` and ``on_trial_result`` take a trial, of which
they read only ``trial_id``, and the result of an epoch, and return CONTINUE or STOP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from threading import Lock
from types import SimpleNamespace

from bench.base.errors import UsageError
from bench.base.installation import describe_extra
from bench.results.store.reader import read_beside
from bench.results.store.rows import LatestAttempt, PlannedRun, Row, keep_latest, plan_runs
from bench.results.study.comparable import take_last
from bench.schema.case import Case, list_varying
from bench.schema.goals import Halving
from bench.schema.record import MEASURED, EpochRow, Outcome, Record, flatten, read_missing
from bench.search.options import Search, go_on
from bench.sweep.display import Display
from bench.sweep.execution import Grid, OomSkips, remaining_runs
from bench.sweep.folder import refuse_mixing
from bench.sweep.largest_batch import name_family
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Plan
from bench.workers.job import Job, Lane

INSTALL = f"bench.search needs Ray Tune: {describe_extra('search')}"


class Ladder:
    """The scheduler of one search; lanes may judge trials in several threads. It is built anew from
    the curves of the trials that have ended, in the order in which they did, so that a search can
    resume from its records: the metric of each epoch, None if it is unknown, inf or NaN. Raises
    UsageError: Ray Tune is not installed."""

    def __init__(self, halving: Halving, curves: Iterable[Sequence[float | None]] = ()) -> None:
        try:
            from ray.tune.schedulers import AsyncHyperBandScheduler
        except ImportError as error:
            raise UsageError(f"{INSTALL} ({str(error).splitlines()[0]})") from None
        self._halving = halving
        self._scheduler = AsyncHyperBandScheduler(
            time_attr="epoch",
            metric=halving.metric,
            mode="max" if halving.higher else "min",
            max_t=halving.epochs,
            grace_period=halving.grace,
            reduction_factor=halving.reduction,
        )
        self._added = 0
        self._lock = Lock()
        for curve in curves:
            judge = self.add()
            for epoch, value in enumerate(curve, 1):
                judge(epoch, value)

    def add(self) -> Callable[[int, float | None], bool]:
        """Add a trial. Return a function of an epoch, from 1, and its metric that tells whether the
        trial is to end, as it does after the last epoch. A trial without a metric ends at once and
        counts at no rung: it can only get worse, and has no place in a percentile of the others."""
        with self._lock:
            self._added += 1
            trial = SimpleNamespace(trial_id=str(self._added))
            self._scheduler.on_trial_add(None, trial)
        return partial(self._judge, trial)

    def _judge(self, trial: SimpleNamespace, epoch: int, value: float | None) -> bool:
        if value is None or epoch >= self._halving.epochs:
            return True
        result = {"epoch": epoch, self._halving.metric: value}
        with self._lock:
            answer: str = self._scheduler.on_trial_result(None, trial, result)
        return answer == self._scheduler.STOP  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- trials


def run_search(asked: Search) -> tuple[Trials, Loop]:
    """Run the trials into --out. Return them, and the loop. Raises UsageError: Ray Tune is not
    installed, or --out has a search by other rules or of other trials."""
    Ladder(asked.halving)
    with open_loop(asked.options, Plan([*asked.cases])) as loop:
        cases = loop.inputs.plan.cases
        comparable = loop.find_comparable(cases)
        halving = go_on(loop.out, asked.halving)
        loop.write_config(cases, halving=asdict(halving))
        trials = Trials(loop, halving, cases, comparable)
        known = len(cases) - trials.waiting
        with Display(loop.out, trials.waiting, known, list_varying(cases)) as display:
            loop.show_on(display)
            loop.work(trials)
    return trials, loop


class Trials(Grid):
    """A source of the trials that have not ended, in the order in which they were drawn.

    A trial is judged by a `Ladder` of all that ended before it; ``rows`` are the earlier ones that
    new ones can be compared with, as far as that is known: which torch a command has shows when it
    runs. Trials that run at the same time share a ladder. There is no other state, so a search can
    resume from its records. Raises UsageError: trials of a command are of two versions, and --mix
    is not given.
    """

    def __init__(
        self, loop: Loop, halving: Halving, cases: Sequence[Case], rows: Sequence[Row]
    ) -> None:
        self.halving = halving
        # with the metric by epoch, in the order in which trials ended
        self._learnt: list[tuple[Row, list[float | None]]] = []
        self._ladder: Ladder | None = None
        epochs = read_beside(loop.store.folder, EpochRow)
        before: dict[PlannedRun, LatestAttempt] = {}
        rows, differing = take_last(rows, ["torch"])
        if not loop.options.mix:
            refuse_mixing(loop.out, differing)
        for row in keep_latest(row for row in rows if row.is_repeat):
            before[row.case, row.repeat, False] = LatestAttempt(
                row.status, row.attempt, row.inferred, lane=row.lane
            )
        left = remaining_runs(plan_runs(cases, 1), before, loop.options.retry)
        done = {run: past for run, past in before.items() if run[0] in cases and run not in left}
        super().__init__(loop, left, before, OomSkips(done, name_family), {})
        untold = None
        for row in rows:
            if (row.case, row.repeat, False) in done and row.status in MEASURED:
                mine = sorted(epochs.get(row.record_id, ()), key=attrgetter("epoch"))
                diverged = row.number("first_bad_step") is not None
                self._learn(row, mine, diverged)
                untold = untold if diverged else (row.case, mine, row.missing)
        if untold:
            self._refuse_untold(*untold)

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        alone = not self.running
        job = super().take(lane, idle)
        if job is None:
            return None
        if alone or self._ladder is None:
            self._ladder = Ladder(self.halving, (curve for _, curve in self._learnt))
        judge = self._ladder.add()
        return replace(job, enough=lambda row: judge(row.epoch + 1, self._read(job.case, row)))

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn from an outcome. Raises UsageError: no trial has told the metric yet, although the
        loss of this one was never inf or NaN; or it is of another version than the others."""
        super().settle(job, record, outcome)
        m, epochs = record.measurement, outcome.epochs
        if record.status not in MEASURED:
            return
        diverged = m.first_bad_step is not None
        self._learn(Row(flatten(record)), epochs, diverged)
        rows, differing = take_last([row for row, _ in self._learnt], ["torch"])
        if not self.loop.options.mix:
            refuse_mixing(self.loop.out, differing)
        alike = {*map(id, rows)}
        self._learnt = [one for one in self._learnt if id(one[0]) in alike]
        if not diverged:
            self._refuse_untold(record.case, epochs, m.missing or "")

    def _refuse_untold(self, case: Case, epochs: Sequence[EpochRow], missing: str) -> None:
        """Raise UsageError if no trial has told the metric, nor this one, which did not diverge."""
        metric = self.halving.metric
        known = any(getattr(row, metric) is not None for row in epochs)
        if known or any(value is not None for _, one in self._learnt for value in one):
            return
        why, fix = missing or "no reason is given", "give another --metric"
        if case.command is not None:
            fix = f"tell it by {_TOLD_BY[metric]}"
            others = [n for n in _TOLD_BY if any(getattr(row, n) is not None for row in epochs)]
            fix += f", or give --metric {others[0]}" if others else ""
            unseen = read_missing(missing).get("measured_steps")
            why = unseen or "the command does not tell it"
        raise UsageError(
            f"--metric {metric} is not known of these trials: {why}; {fix}, and another --out"
        )

    def _learn(self, row: Row, epochs: Sequence[EpochRow], diverged: bool) -> None:
        """Learn from the epochs of a trial, of which the last is no number if it diverged."""
        curve = [self._read(row.case, epoch) for epoch in epochs]
        self._learnt.append((row, [*curve[:-1], None] if diverged else curve))

    def _read(self, case: Case, row: EpochRow) -> float | None:
        """Return the metric of an epoch; None if its loss is inf or NaN. A command need not tell
        a loss."""
        value: float | None = getattr(row, self.halving.metric)
        known = row.train_loss is not None or case.command is not None
        return value if known and value is not None and math.isfinite(value) else None


_TOLD_BY = {
    "test_accuracy": "bench.epoch(accuracy=…) after each epoch",
    "test_loss": "bench.epoch(loss=…) after each epoch",
    "train_loss": "bench.step(loss=…), and bench.epoch() after each epoch",
}
"""The lines by which a script tells each metric that it can."""
