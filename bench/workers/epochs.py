"""A measured epoch: its timing, its evaluation, and the columns and rows that they fill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

import psutil  # noqa: F401  (the progress needs it, and would import it within an epoch)
import torch

from bench.base.limits import find_ends, summarize_steps
from bench.base.processes import read_peak_memory
from bench.networks.data.batches import Supply
from bench.networks.data.loader import PREFETCH
from bench.schema.case import Case, micro_batch, whole_batch
from bench.schema.record import EpochRow, Measurement, Outcome, Step
from bench.training.loop import Epoch, Training, merge, train_epoch
from bench.training.parallel import ProcessGroup
from bench.training.timing import (
    Certainty,
    Extrapolation,
    StepClock,
    extrapolate,
    find_accelerator,
    synchronize,
)
from bench.workers.job import Channel
from bench.workers.preparation import count_steps


def read_reserved(device: torch.device) -> Callable[[], int]:
    """Return what tells the memory that training holds, as a report of its progress."""
    accelerator = find_accelerator(device)
    return accelerator.memory_reserved if accelerator else read_peak_memory


@dataclass(frozen=True)
class Tested:
    loss: float
    accuracy: float | None
    time_s: float


@dataclass
class TimedEpoch:
    """A measured epoch, with the time in s and the learning rate of each step."""

    epoch: Epoch
    times: list[float]
    rates: list[float]
    time_s: float
    tested: Tested | None = None

    def average(self) -> tuple[float | None, float | None]:
        """Return the mean loss, None if not finite, and the accuracy, None if unknown."""
        epoch, images = self.epoch, sum(self.epoch.images)
        total = sum(n * loss for n, loss in zip(epoch.images, epoch.losses, strict=True))
        return finite(total / images), sum(epoch.correct) / images if epoch.correct else None


def train(
    training: Training,
    batches: Supply,
    index: int,
    rates: list[float],
    channel: Channel,
    group: ProcessGroup,
) -> Callable[[], TimedEpoch]:
    """Train epoch ``index``, with all processes of a ``group``, between two device
    synchronisations. ``rates`` has the learning rate of each step of all epochs. Return a function
    that fetches the results later."""
    case, device = training.case, training.device
    steps = count_steps(case, batches)
    clock, report = StepClock(device), channel.reporter("epoch", steps, read_reserved(device))
    first = index * len(batches)
    own = rates[first : first + steps]
    parts = batches.divide(index, steps=steps)
    arguments: tuple[Any, ...] = (training, parts, clock, report, own)
    if case.until is not None:
        full = batches.samples / whole_batch(case)
        gather = group.gather if group.size > 1 else None
        arguments += (Certainty(case.until, clock, full, _count_ahead(case), gather),)
    synchronize(device)
    start = time.perf_counter()
    fetch = train_epoch(*arguments)
    synchronize(device)
    time_s = time.perf_counter() - start

    def read() -> TimedEpoch:
        times = clock.read()
        return TimedEpoch(fetch(), times, own[: len(times)], time_s)

    return read


def _count_ahead(case: Case) -> int:
    return math.ceil(case.workers * PREFETCH / case.accumulate)


def join_epochs(ranks: Sequence[Sequence[TimedEpoch]]) -> list[TimedEpoch]:
    """Merge the epochs of all processes, given by rank. An epoch takes as long as in the slowest
    process. Step times and test results are those of the first process."""
    return [
        replace(ones[0], epoch=merge([o.epoch for o in ones]), time_s=max(o.time_s for o in ones))
        for ones in zip(*ranks, strict=True)
    ]


def evaluate(training: Training) -> Tested:
    """Measure loss, accuracy and time on the test data. Raises UsageError: there is none.

    Training is not affected: weights and BatchNorm's statistics stay as they are, and the state of
    the random number generators is restored.
    """
    # opened each time: if kept, they would count in the next epoch's memory
    case, device = training.case, training.device
    batches = training.workload.open_tests(batch_size=micro_batch(case), device=device)
    random = [device] if find_accelerator(device) else []
    try:
        with torch.random.fork_rng(random, device_type=device.type):
            # warm up cuDNN and the compiler for evaluation mode: one untimed batch of each shape,
            # and another one where only the second call is captured as a graph
            size = min(batches.batch_size, batches.samples)
            rest = batches.samples % size or size
            sizes = (size, rest) * (2 if case.own_graphs else 1)
            training.evaluate(next(batches.evaluation(n)) for n in sizes)
            synchronize(training.device)
            start = time.perf_counter()
            loss, accuracy = training.evaluate(batches.evaluation())
            return Tested(loss, accuracy, time.perf_counter() - start)
    finally:
        training.resume()  # even after a failure: the next epoch trains


def describe_time(
    found: Outcome, training: Training, done: Sequence[TimedEpoch], batches: Supply
) -> None:
    case, workload = training.case, training.workload
    m, times = found.measurement, [t for one in done for t in one.times]
    images = [n for one in done for n in one.epoch.images]
    m.measured_time_s = sum(one.time_s for one in done)
    m.measured_steps, m.steps_per_epoch = len(times), len(batches)
    m.measured_images = sum(images)
    m.epoch_time_s = m.measured_time_s / len(done)
    if len(times) < len(batches):
        full_steps = batches.samples / whole_batch(case)
        ahead, drift = _count_ahead(case), case.until is not None
        whole = extrapolate(m.measured_time_s, times, full_steps, ahead, drift)
        flag = "--fraction" if case.steps is None or len(times) < case.steps else "--steps"
        describe_interval(found, times, whole, case.until or 0.0, f"; raise {flag}")
    m.images_per_s = workload.count_units(batches.samples) / m.epoch_time_s
    units = workload.count_units(whole_batch(case))
    full = [t for t, n in zip(times, images, strict=True) if n == units]
    if not describe_steps(m, times, full):
        reason = f"{len(full)} steps are too few to tell a trend"
        found.leave_out(reason, "step_time_first_s", "step_time_last_s")


def describe_interval(
    found: Outcome,
    times: Sequence[float],
    whole: Extrapolation,
    asked: float = 0.0,
    fix: str = "",
) -> None:
    """Fill in an epoch estimated from steps of ``times``, with an interval as wide as ``asked``, or
    the reason why there is none and its ``fix``."""
    m, wide = found.measurement, whole.widen(asked)
    m.epoch_time_s, m.epoch_time_low_s, m.epoch_time_high_s = wide.epoch_s, wide.low_s, wide.high_s
    if whole.low_s is None:
        few = f"{len(times)} steps are too few for an interval{fix}"
        found.leave_out(few, "epoch_time_low_s", "epoch_time_high_s")
    else:
        m.epoch_time_error = max(whole.error, asked)


def describe_steps(m: Measurement, times: Sequence[float], full: Sequence[float]) -> bool:
    """Fill in what the ``times`` of steps come to, in s. Return whether those of ``full`` batches
    are enough to tell a trend."""
    vars(m).update(summarize_steps(times))
    if ends := find_ends(full):
        m.step_time_first_s, m.step_time_last_s = ends
    return ends is not None


TESTED = ("test_loss", "test_accuracy", "eval_time_s")
"""Columns that an evaluation fills."""

_UNCOUNTED = "the workload does not say what is predicted right"


def describe_learning(found: Outcome, training: Training, done: Sequence[TimedEpoch]) -> None:
    case, m, last = training.case, found.measurement, done[-1]
    if case.loss_scale is not None:
        m.overflow_steps = sum(sum(one.epoch.overflowed) for one in done)
        m.final_loss_scale = float(training.current_scale())
    if case.clip_grad is not None:
        steps = [s for one in done for s in zip(one.epoch.norms, one.epoch.overflowed, strict=True)]
        norms = [norm for norm, overflowed in steps if math.isfinite(norm) and not overflowed]
        m.clipped_steps = sum(norm > case.clip_grad for norm in norms)
        if norms:
            m.grad_norm_median = median(norms)
        else:
            found.leave_out("the gradients of all steps overflowed", "grad_norm_median")
    losses = chain.from_iterable(one.epoch.losses for one in done)
    m.first_bad_step = next((i for i, x in enumerate(losses) if not math.isfinite(x)), None)
    row = list_epochs(case, done)[-1]
    for name in ("train_loss", "train_accuracy", *TESTED):
        setattr(m, name, getattr(row, name))
    if m.train_accuracy is None:
        found.leave_out(_UNCOUNTED, "train_accuracy")
    if last.tested is None:
        return
    for name in TESTED:  # an evaluation before the last one may have failed
        found.missing.pop(name, None)
    if m.test_loss is None:
        found.leave_out("it is inf or NaN", "test_loss")
    if m.test_accuracy is None:
        found.leave_out(_UNCOUNTED, "test_accuracy")


def list_steps(case: Case, done: Sequence[TimedEpoch]) -> Iterator[Step]:
    """Yield one row per step, numbered across epochs."""
    first = 0
    for one in done:
        epoch, number = one.epoch, len(one.times)
        scales = epoch.loss_scales if case.loss_scale is not None else [None] * number
        correct: Sequence[int | None] = epoch.correct or [None] * number
        losses = map(finite, epoch.losses)
        steps = range(first, first := first + number)
        rows = zip(steps, epoch.images, losses, correct, one.times, scales, one.rates, strict=True)
        yield from (Step(*row) for row in rows)


def list_epochs(case: Case, done: Sequence[TimedEpoch]) -> list[EpochRow]:
    rows = []
    for index, one in enumerate(done):
        row = EpochRow(index, one.time_s, *one.average())
        if one.tested is not None:
            row.test_loss, row.test_accuracy = finite(one.tested.loss), one.tested.accuracy
            row.eval_time_s = one.tested.time_s
        if case.loss_scale is not None:
            row.overflow_steps = sum(one.epoch.overflowed)
        rows.append(row)
    return rows


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
