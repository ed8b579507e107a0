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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from threading import Lock
from time import monotonic
from types import SimpleNamespace

from bench.case import Case, list_varying
from bench.errors import UsageError
from bench.halving import Halving, read_halving
from bench.record import MEASURED, REPEATED, EpochRow, Outcome, Record, Status
from bench.search.options import Search
from bench.store.reader import read_beside, read_config
from bench.store.rows import Row, keep_latest
from bench.sweep.display import Display
from bench.sweep.folder import read_past, write_config
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Plan
from bench.sweep.schedule import Losses, OomSkips
from bench.wall import name_family
from bench.worker.messages import Job, Lane

INSTALL = "bench.search needs Ray Tune: pip install -e '.[search]'"

Curve = Sequence[float | None]
"""The metric of each epoch of a trial so far; None if it is unknown, inf or NaN."""


_EPOCH = "epoch"


class Ladder:
    """The scheduler of one search; lanes may judge trials in several threads. It is built anew from
    the curves of the trials that have ended, in the order in which they did, so that a search can
    resume from its records. Raises UsageError: Ray Tune is not installed."""

    def __init__(self, halving: Halving, curves: Iterable[Curve] = ()) -> None:
        try:
            from ray.tune.schedulers import AsyncHyperBandScheduler
        except ImportError as error:
            raise UsageError(f"{INSTALL} ({str(error).splitlines()[0]})") from None
        self._halving = halving
        self._scheduler = AsyncHyperBandScheduler(
            time_attr=_EPOCH,
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
        result = {_EPOCH: epoch, self._halving.metric: value}
        with self._lock:
            answer: str = self._scheduler.on_trial_result(None, trial, result)
        return answer == self._scheduler.STOP  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- trials


def run_search(asked: Search) -> tuple[Trials, Loop]:
    """Run the trials into --out until the time limit. Return them, and the loop."""
    Ladder(asked.halving)  # raises UsageError if Ray Tune is not installed
    with open_loop(asked.options, Plan(asked.plan().trials)) as loop:
        drawn = asked.plan(loop.inputs.settle)
        halving = drawn.halving
        loop.lock()
        comparable, _ = read_past(loop, drawn.trials)
        earlier = read_halving(read_config(loop.store.folder).get("halving"))
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
