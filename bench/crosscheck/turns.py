"""Measurements of a job by the harness and by a bare loop, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from bench.errors import UsageError
from bench.executors import Executor, Job
from bench.record import Measurement, Status

Bare = TypeVar("Bare")


def take_turns(
    executor: Executor, job: Job, time_bare: Callable[[Job], Bare], pairs: int
) -> Iterator[tuple[Measurement, Bare]]:
    """Measure a job by the harness and by a bare loop, ``pairs`` times. Raises UsageError: it
    cannot be measured here."""
    for number in range(pairs):
        # whichever goes first may find a cooler machine, so they take turns at it
        bare = time_bare(job) if number % 2 == 0 else None
        yield measure(executor, job), time_bare(job) if bare is None else bare


def measure(executor: Executor, job: Job) -> Measurement:
    """Measure a case as a sweep does. Raises UsageError: it cannot be measured here."""
    outcome = executor.run(job, lambda event: None, lambda: False)
    if outcome.status is not Status.OK or outcome.measurement.measured_time_s is None:
        raise UsageError(f"the case ended as {outcome.status}: {outcome.reason}; choose another")
    return outcome.measurement
