"""An executor that answers without training, to drive sweep, store and report in tests.

Its rows carry ``executor=fake``, and every report says that they are not measurements.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from bench.case import AXES, Case, Value, parse_value
from bench.errors import UsageError, nearest
from bench.executors import Event, Job, Settings
from bench.record import MEASURED, Measurement, Outcome, Status

ANSWERS = "BENCH_FAKE_ANSWERS"
"""Environment variable: rules ``axis=value:status`` separated by spaces, the first match counts."""


class FakeExecutor:
    """Answers each case at once: ok, or the status the rules in `ANSWERS` give it.

    Raises:
        UsageError: a rule is none.
    """

    def __init__(self, settings: Settings) -> None:
        self._rules = [_parse_rule(rule) for rule in os.environ.get(ANSWERS, "").split()]

    def run(
        self, job: Job, on_event: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> Outcome:
        """Answer with figures that follow from the batch size alone."""
        if stopping():
            return Outcome(Status.INTERRUPTED, "the sweep was stopped")
        status, m = self._find_answer(job.case), Measurement()
        if status in MEASURED:
            m.epoch_time_s = m.measured_time_s = 10 + 1000 / job.case.batch_size
            m.images_per_s = 50_000 / m.epoch_time_s
            m.peak_device_bytes = job.case.batch_size * 2**20
            m.train_loss = 2.0 if status is not Status.DIVERGED else None
            m.first_bad_step = 0 if status is Status.DIVERGED else None
        return Outcome(status, "" if status is Status.OK else "as the fake was told", m)

    def _find_answer(self, case: Case) -> Status:
        for axis, value, answer in self._rules:
            if getattr(case, axis) == value:
                return answer
        return Status.OK

    def kill(self) -> None:
        """Nothing runs."""


def _parse_rule(rule: str) -> tuple[str, Value, Status]:
    match, _, status = rule.rpartition(":")
    axis, _, value = match.partition("=")
    if axis not in AXES:
        raise UsageError(f"{ANSWERS} {rule!r}: no axis {axis!r}; {nearest(axis, list(AXES))}")
    if status not in list(Status):
        statuses = [str(known) for known in Status]
        raise UsageError(f"{ANSWERS} {rule!r}: no status {status!r}; {nearest(status, statuses)}")
    return axis, parse_value(axis, value, f"{ANSWERS} {axis}"), Status(status)
