"""The search for advice, as a source of runs for a lane; its folder may hold earlier runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic

from bench.advise.answer import Answer, describe_progress, propose
from bench.advise.findings import Findings, list_levers, strip
from bench.case import Case
from bench.errors import UsageError
from bench.record import REPEATED, Outcome, Record, Status, flatten
from bench.store.rows import Row, keep_latest, read_history
from bench.sweep.display import Display
from bench.sweep.execution import Grid, OomSkips
from bench.sweep.folder import read_past, write_config
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Options, Plan
from bench.text import parse_bytes, read_time
from bench.wall import read_peak
from bench.worker import Job, Lane

UNTIL = 0.01
"""Relative error of the epoch time, within the run, at which a run may end."""

MOST_PART, MOST_S = 0.1, 10.0
"""Largest part of an epoch that a run may take, and most seconds of its steps, as far as they can
be predicted: a tenth of an epoch of ResNet-18 at 224 pixels took two CPU cores 8 minutes."""

LEAST_STEPS = 8
"""Steps that a run measures however long they take: an epoch has no interval below six steps."""

EXPLORE = 0.7
"""Share of the budget for looking for better settings; the rest is for repeats."""


@dataclass(frozen=True)
class Question:
    """A command line, parsed and checked."""

    now: Case  # the setting that is used now
    options: Options
    budget_s: float


def find_advice(asked: Question, until: float) -> Answer:
    """Search until ``until``, by `time.monotonic`, and return what was found."""
    with open_loop(asked.options, Plan([asked.now])) as loop:
        now, given = strip(loop.inputs.plan.cases[0]), asked.options.axes
        levers = list_levers(now, given, loop.inputs.data(now).train_images)
        loop.lock()
        comparable, _ = read_past(loop, [now])
        write_config(loop)
        advisor = Advisor(loop, Findings(now, levers, given), comparable, asked.budget_s, until)
        known = sum(map(len, advisor.findings.runs.values()))
        with Display(loop.out, None, known, [*levers], "the best setting") as display:
            loop.show_on(display)
            loop.work(advisor)
        pending = advisor.choose(math.inf) is not None
    resume = propose(loop.resume, asked.budget_s, loop.stopped) if pending else ""
    return Answer(advisor.findings, advisor.left_out, loop.out, resume, loop.stopped)


class Advisor(Grid):
    """Source of runs, one at a time: what `Findings.explore` asks for, then repeats.

    Args:
        rows: those of the folder that new ones can be compared with.
        until: the time.monotonic() at which the budget ends.
    """

    def __init__(
        self, loop: Loop, findings: Findings, rows: Sequence[Row], budget_s: float, until: float
    ) -> None:
        super().__init__(loop, [], read_history(rows), OomSkips({}), {})
        self.findings, self._budget_s, self._until = findings, budget_s, until
        self.left_out = self._refuse_precisions()
        again = REPEATED | set(loop.options.retry)
        for row in keep_latest(row for row in rows if row.is_repeat):
            if row.status not in again:
                findings.add(row.case, row)

    def _refuse_precisions(self) -> dict[str, str]:
        """Return why precisions are not tried on this machine."""
        now = self.findings.now
        names = [str(name) for name in self.findings.levers["precision"]]
        why = {name: self.loop.refuse(replace(now, precision=name)) for name in names}
        return {name: reason for name, reason in why.items() if reason and name != now.precision}

    @property
    def left(self) -> bool:
        return not self.running and (super().left or self._choose_now() is not None)

    def _choose_now(self) -> Case | None:
        return self.choose(self._until - monotonic())

    def choose(self, left_s: float) -> Case | None:
        """Return the next setting to run, with so much time left; None if no run fits in it, or
        none would help."""
        runs = self.findings.runs
        spare_s = (1 - EXPLORE) * self._budget_s
        for setting in self.findings.explore():
            if setting in runs or not self._may_run(setting):
                continue
            if not runs or self._predict_s(setting) <= left_s - spare_s:
                return setting
            break
        again = self.findings.list_unrepeated()
        return next((s for s in again if self._predict_s(s) <= left_s), None)

    def _may_run(self, setting: Case) -> bool:
        """Return whether a setting can run, and should fit: a CPU's system kills what does not."""
        if setting.precision in self.left_out:
            return False
        try:
            self.loop.inputs.check_batches(setting)
        except UsageError:
            return False
        alike = [row for row in self.findings.rows if row.precision == setting.precision]
        if any(r.status is Status.OOM and r.batch_size <= setting.batch_size for r in alike):
            return False
        each = [used / row.batch_size for row in alike if (used := read_peak(row))]
        room = _find_room(setting) if setting.device == "cpu" and each else math.inf
        return min(each, default=0.0) * setting.batch_size <= room

    def _predict_s(self, setting: Case) -> float:
        """Return the seconds that a run takes, like those so far that were compiled alike."""
        took = [
            read_time(row.finished_at) - read_time(row.started_at)
            for row in self.findings.rows
            if row.compile == setting.compile and row.status is Status.OK
        ]
        return median(took) if took else 0.0

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        self.loop.rate(lane, self.findings.now.device)
        if self.running:
            return None
        if not self._runs and (setting := self._choose_now()):
            case = self.findings.cases.get(setting) or self._size(setting)
            self._runs.append((case, len(self.findings.runs.get(setting, ())) + 1, False))
        return super().take(lane, idle)

    def _size(self, setting: Case) -> Case:
        """Return the case that measures a setting for `MOST_S`, and at least `LEAST_STEPS`."""
        times = [median(of) for of in self.findings.times.values()]
        epoch_s = median(times) if times else 0.0  # not known before the first run
        items = max(1, self.loop.inputs.data(setting).train_images)
        part = LEAST_STEPS * setting.batch_size / items
        if epoch_s:
            part = max(part, min(MOST_PART, MOST_S / epoch_s))
        return replace(setting, until=UNTIL, fraction=float(f"{min(1.0, part):.2g}"))

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        super().settle(job, record, outcome)
        if record.status not in REPEATED:
            self.findings.add(job.case, Row(flatten(record)))
            left_s = self._until - monotonic()
            self.loop.display.say(f"    {describe_progress(self.findings, left_s)}")


def _find_room(setting: Case) -> float:
    """Return the bytes that training may use: a limit, or half of what the CPU has available, as
    other programs need some."""
    import psutil

    if setting.memory_limit:
        return parse_bytes(setting.memory_limit)
    half: float = psutil.virtual_memory().available / 2
    return half
