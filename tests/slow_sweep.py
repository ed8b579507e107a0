"""`bench.sweep` with a fake that takes its time and files written a few bytes at a time.

So that a signal lands everywhere: within a case, within a line, between a row and its steps.
BENCH_TEST_DELAY_S is how long a case takes at most.
"""

from __future__ import annotations

import io
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.base.origin import EXECUTORS, ExecutorKind
from bench.schema.record import Outcome, Step
from bench.sweep import __main__ as sweep
from bench.workers.executors import CaseEvent
from bench.workers.job import Job, StepTaken
from tests.fake_executor import FakeExecutor, known

DELAY_S = float(os.environ.get("BENCH_TEST_DELAY_S", "0.005"))
STEPS = 5


class SlowFake(FakeExecutor):
    """Answers after a while, with a short curve."""

    def run(
        self, job: Job, on_event: Callable[[CaseEvent], None], stopping: Callable[[], bool]
    ) -> Outcome:
        """Wait, unless stopped, then answer as the fake does."""
        begun, took = time.monotonic(), random.uniform(0, DELAY_S)
        while (passed := time.monotonic() - begun) < took and not stopping():
            on_event(StepTaken("epoch", int(40 * passed / took), 40, 3 << 30))
            time.sleep(min(0.01, DELAY_S))
        outcome = super().run(job, on_event, stopping)
        outcome.steps = [Step(i, 8, 2.5, i, 0.125) for i in range(STEPS)]
        return outcome


class SlowFile(io.FileIO):
    """A file that takes 64 bytes a write."""

    def write(self, data: Any) -> int:
        """Write the first bytes of ``data``."""
        time.sleep(0.0003)
        return super().write(bytes(data[:64]))


if __name__ == "__main__":
    with known():
        EXECUTORS["fake"] = ExecutorKind("__main__:SlowFake")
        io.FileIO = SlowFile  # type: ignore[misc]
        sys.exit(sweep.main())
