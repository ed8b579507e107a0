"""`--executor fake`, which answers without training, to drive sweep, store and report in tests.

The fixture `fake` makes it known to the commands of a file of tests, and `with_fake` to one in a
process of its own. It has no machine: none is looked at, and none is warned of.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from bench.base.errors import UnsupportedError, UsageError
from bench.base.origin import EXECUTORS, ExecutorKind
from bench.base.text import parse_bytes
from bench.machine.host import describe_host, find_torch
from bench.networks.data import SYNTHETIC, DatasetInfo, find_layout
from bench.networks.data.cifar10 import CIFAR10_IMAGES, CLASSES
from bench.networks.weights import hash_weights
from bench.schema.axis import Value
from bench.schema.case import Case, parse_value
from bench.schema.record import MEASURED, EpochRow, Measurement, Outcome, Status
from bench.sweep import preflight
from bench.workers.examination import Machine, Platform, examine
from bench.workers.executors import Executor, ImageRequest, Listener, Settings, Stopping
from bench.workers.fingerprint import Fingerprint, Request
from bench.workers.job import Job, Lane
from bench.workers.judgement import write_warnings

if TYPE_CHECKING:
    import pytest

ANSWERS = "BENCH_FAKE_ANSWERS"
"""Environment variable: rules ``axis=value:status`` separated by spaces; the first match wins."""

MEMORY = "BENCH_FAKE_MEMORY"
"""Environment variable: a model of memory, ``name=value`` separated by spaces, see `Memory`."""

LANES = "BENCH_FAKE_LANES"
"""Environment variable: the cards of the lanes, ``kind:number`` separated by spaces."""


@dataclass
class Memory:
    """A model of the memory that a batch takes, in bytes: fixed + image * batch.

    ``image`` is multiplied by ``low`` for precisions other than fp32 and tf32. Above the smaller of
    the case's memory limit and ``capacity``, a case is out of memory.
    """

    fixed: float = 0.0
    image: float = 0.0
    low: float = 1.0
    capacity: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Memory:
        """Read ``name=value`` separated by spaces, of numbers and sizes such as 1GiB."""
        parts = (part.split("=") for part in text.split())
        sizes = {
            k: float(v) if v.replace(".", "", 1).isdigit() else parse_bytes(v) for k, v in parts
        }
        return cls(**sizes)

    def take(self, case: Case) -> int:
        scale = 1.0 if case.precision in ("fp32", "tf32") else self.low
        return round(self.fixed + scale * self.image * case.batch_size)

    def limit(self, case: Case) -> float:
        limit = parse_bytes(case.memory_limit) if case.memory_limit else math.inf
        return min(limit, self.capacity)


PLAIN = Memory(image=2**20)
"""The model if `MEMORY` is not set."""


class FakeExecutor(Executor):
    """An executor that answers each case at once: ok, or the status by the rules in `ANSWERS`, or
    out of memory by the model in `MEMORY`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._rules = [_parse_rule(rule) for rule in os.environ.get(ANSWERS, "").split()]
        memory = os.environ.get(MEMORY)
        self._memory = PLAIN if memory is None else Memory.parse(memory)
        self._cards = _parse_lanes(os.environ.get(LANES, ""))

    def open_lanes(self, device: str, wanted: int | None = None) -> Sequence[Lane]:
        if wanted in (None, 1):
            return (Lane(),)
        lanes = [Lane(name, (uuid,)) for name, uuid in self._cards] or [
            Lane(f"fake{i}") for i in range(wanted or 1)
        ]
        if wanted > len(lanes):
            raise UsageError(f"--lanes {wanted}: {LANES} has {len(lanes)}; give at most that many")
        return lanes[: wanted or len(lanes)]

    def gather(self, lane: Lane, device: str, size: int) -> Lane:
        if size == 1 or not self._cards:
            return lane
        own = (lane.name or self._cards[0][0]).rpartition("-")[0]
        alike = [(name, uuid) for name, uuid in self._cards if name.rpartition("-")[0] == own]
        if size > len(alike):
            raise UnsupportedError(
                f"world size {size} takes {size} GPUs of one kind; {LANES} has {len(alike)} ({own})"
            )
        names, uuids = zip(*alike[:size], strict=True)
        return replace(lane, name="+".join(names), gpus=uuids)

    def examine(
        self, lane: Lane, devices: Sequence[str], models: Sequence[Request], timeout_s: float
    ) -> Machine:
        card = {"gpu": lane.name.rpartition("-")[0], "gpu_uuid": lane.gpus[0]} if lane.gpus else {}
        host = describe_host()
        platform = Platform(replace(host, torch=host.torch or find_torch(), **card))
        return Machine(
            devices=dict.fromkeys(devices, platform),
            # of layers that fp8 can convert, which no network here lacks
            models={asked.subject: Fingerprint("", "", "", products=1) for asked in models},
        )

    def prepare(self, lane: Lane, images: ImageRequest) -> DatasetInfo:
        if images.name == SYNTHETIC or find_layout(images.data_dir):
            return super().prepare(lane, images)
        # nothing is downloaded for invented results
        return DatasetInfo(
            images.name, "", CIFAR10_IMAGES["train"], CIFAR10_IMAGES["test"], CLASSES, "", ""
        )

    def kill(self) -> None:
        """Do nothing: no case takes time."""

    def close(self) -> None:
        """Do nothing: no lane holds anything."""

    def run(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        if stopping():
            return Outcome(Status.INTERRUPTED, "the sweep was stopped")
        rules = (answer for axis, value, answer in self._rules if getattr(job.case, axis) == value)
        status, m = next(rules, Status.OK), Measurement()
        if status in MEASURED:
            used, limit = self._memory.take(job.case), self._memory.limit(job.case)
            if used > limit:
                return Outcome(Status.OOM, f"{used} bytes are above {limit:.0f}")
            if self._memory is PLAIN:
                m.peak_device_bytes = used
            else:  # the columns that a worker on a CPU fills
                m.peak_process_bytes = used
            m.epoch_time_s = m.measured_time_s = 10 + 1000 / (job.case.batch_size or 1)
            m.images_per_s = 50_000 / m.epoch_time_s
            m.train_loss = 2.0 if status is not Status.DIVERGED else None
            m.first_bad_step = 0 if status is Status.DIVERGED else None
        reason = "" if status is Status.OK else "as the fake was told"
        epochs = list(_learn(job)) if job.enough and status in MEASURED else []
        if epochs:
            last = epochs[-1]
            m.truncated_after = len(epochs) if len(epochs) < job.case.epochs else None
            for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
                setattr(m, name, getattr(last, name))
            m.first_bad_step = None
            if last.train_loss is None:
                m.first_bad_step = 0
                status, reason = Status.DIVERGED, "the loss was inf or NaN"
        return Outcome(status, reason, m, epochs=epochs)


def _parse_lanes(text: str) -> list[tuple[str, str]]:
    """Return the name and UUID of each card of a text such as ``A100:2 H100:1``."""
    kinds = (part.split(":") for part in text.split())
    names = [f"{kind}-{i}" for kind, number in kinds for i in range(int(number))]
    return [(name, f"GPU-{name}") for name in names]


BEST_LR, LARGEST_LR = 0.1, 5.0
"""The fake learns best at the first learning rate, and diverges above the second."""


def learn(case: Case, epoch: int) -> EpochRow:
    """Return an epoch, counted from 0, of the fake's training. A learning rate nearer to `BEST_LR`
    learns faster, a larger batch slightly slower. The loss falls from ln 10 towards 0."""
    pace = math.exp(-abs(math.log10(case.lr / BEST_LR)) - case.batch_size / 10_000)
    diverged = case.lr > LARGEST_LR
    loss = None if diverged else math.log(10) / (1 + pace * (epoch + 1))
    accuracy = 1.0 if loss is None else math.exp(-loss)  # as of NaN where all are of one class
    row = EpochRow(epoch, 1.0, loss, accuracy)
    if case.evaluate or case.command is not None:
        row.test_loss, row.test_accuracy = loss, accuracy
    return row


def _learn(job: Job) -> Iterator[EpochRow]:
    """Yield the epochs of a job until ``job.enough`` ends it."""
    assert job.enough
    for epoch in range(job.case.epochs):
        yield (row := learn(job.case, epoch))
        if epoch + 1 < job.case.epochs and job.enough(row):
            return


def stop_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C while a run is made, the first being number 1."""
    real, begun = FakeExecutor.run, count(1)

    def run(self: FakeExecutor, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        if next(begun) == number:
            os.kill(os.getpid(), signal.SIGINT)
            while not stopping():  # the main thread takes it
                time.sleep(0.01)
        return real(self, job, on_event, stopping)

    patch.setattr(FakeExecutor, "run", run)


def _parse_rule(rule: str) -> tuple[str, Value, Status]:
    match, _, status = rule.rpartition(":")
    axis, _, value = match.partition("=")
    return axis, parse_value(axis, value, f"{ANSWERS} {axis}"), Status(status)


def _pass_by(
    devices: Sequence[str], models: Sequence[Request], *, ask: Any = None, **known: Any
) -> Any:
    """Ask the executor alone, if it is this one, and leave out of the answer the machine that a
    sweep looks at meanwhile."""
    if ask and isinstance(ask.func.__self__, FakeExecutor):
        starts = {name: hash_weights(name) for asked in models for name in asked.starts}
        return replace(ask(devices, models, known["timeout_s"]), starts=starts)
    return examine(devices, models, ask=ask, **known)


def _warn(machine: Machine) -> Sequence[str]:
    return write_warnings(machine) if machine.results else []


@contextmanager
def known() -> Iterator[None]:
    """The commands of this process know the fake, and look at no machine for it."""
    real = {name: vars(preflight)[name] for name in ("examine", "write_warnings")}
    EXECUTORS["fake"] = ExecutorKind(f"{__name__}:FakeExecutor", "answers without training")
    vars(preflight).update(examine=_pass_by, write_warnings=_warn)
    try:
        yield
    finally:
        vars(preflight).update(real)
        del EXECUTORS["fake"]
