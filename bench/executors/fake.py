"""An executor that answers without training, to drive sweep, store and report in tests.

Its rows carry ``executor=fake``, and every report says that they are not measurements.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from bench.executors import Event, Job, Settings
from bench.record import MEASURED, Measurement, Outcome, Status

ANSWERS = "BENCH_FAKE_ANSWERS"
"""Environment variable: rules ``axis=value:status`` separated by spaces, the first match counts."""


class FakeExecutor:
    """Answers each case at once: ok, or the status the rules in `ANSWERS` give it."""

    def __init__(self, settings: Settings) -> None:
        self._rules: list[tuple[str, str, Status]] = []
        for rule in os.environ.get(ANSWERS, "").split():
            match, _, status = rule.rpartition(":")
            axis, _, value = match.partition("=")
            self._rules.append((axis, value, Status(status)))

    def run(
        self, job: Job, on_event: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> Outcome:
        """Answer with figures that follow from the batch size alone."""
        case = job.case
        status = Status.INTERRUPTED if stopping() else Status.OK
        for axis, value, answer in self._rules:
            if str(getattr(case, axis)) == value:
                status = answer
                break
        m = Measurement()
        if status in MEASURED:
            m.epoch_time_s = m.measured_time_s = 10 + 1000 / case.batch_size
            m.images_per_s = 50_000 / m.epoch_time_s
            m.peak_device_bytes = case.batch_size * 2**20
            m.train_loss = 2.0 if status is not Status.DIVERGED else None
        return Outcome(status, "" if status is Status.OK else "as the fake was told", m)

    def kill(self) -> None:
        """Nothing runs."""
