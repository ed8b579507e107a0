"""The messages between a worker and its parent, and the worker's channel."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from bench.case import Case
from bench.errors import UsageError
from bench.processes import read_peak_memory
from bench.record import EpochRow, KnownResults, Measurement, RankRow, Status, Step, WorkRow

if TYPE_CHECKING:
    import torch

Phase = Literal["warmup", "epoch", "evaluation"]
"""The phases that a worker announces, in this order; the last two once for each epoch."""

_REPORT_EVERY_S = 0.2


@dataclass(frozen=True)
class Rendezvous:
    """The place of a worker among those that train one network together.

    ``rank`` counts from 0 to ``size`` - 1; ``store`` is a file in a folder of their own by which
    they find each other, ``gpus`` the UUIDs of all their GPUs by rank (none on a CPU), and
    ``timeout_s`` how long one waits for another.
    """

    rank: int
    size: int
    store: str
    gpus: list[str]
    timeout_s: float


@dataclass(frozen=True)
class Assignment:
    """A worker's task.

    ``folder`` is where `bench.data.prepare` left the dataset, ``started`` the time.monotonic() at
    which the worker was requested, in s, ``gpu_uuid`` the GPU as NVML knows it, ``checkpoints`` the
    folder of the run's checkpoints, ``identity`` the identity that a checkpoint needs to be resumed
    and ``trace`` the file for a profile's trace. ``rendezvous`` is None for a worker that trains
    alone. With ``judged`` the worker asks after each epoch but the last whether to go on, see
    `EpochEnded`. ``known`` values are not determined again.
    """

    case: Case
    folder: str
    started: float
    gpu_uuid: str | None = None
    checkpoints: str = ""
    identity: dict[str, str] = field(default_factory=dict)
    trace: str = ""
    rendezvous: Rendezvous | None = None
    judged: bool = False
    known: KnownResults = field(default_factory=KnownResults)


@dataclass(frozen=True)
class PhaseEntered:
    """The worker is about to enter ``phase`` and waits for `GO_ON`. ``epoch`` counts from 0: it is
    the epoch that begins or, for an evaluation, the one that has just ended."""

    phase: Phase
    epoch: int = 0


@dataclass(frozen=True)
class StepTaken:
    """Step ``step`` (from 0) of ``total`` was taken; ``total`` is 0 if unknown."""

    phase: Phase
    step: int
    total: int
    loss: float
    memory_bytes: int


@dataclass(frozen=True)
class EpochEnded:
    """The result of one of several epochs. The worker then waits for `GO_ON`, or `END` to
    end the case here, measured so far and marked as truncated."""

    row: EpochRow


GO_ON, END = "go on", "end"


@dataclass
class Finished:
    """The outcome of a case and its measurement. ``missing`` says why columns are empty.

    ``epochs`` is empty for a case of one epoch, which its measurement describes. ``follows`` lists
    the columns that the worker will fill in another such message; if none comes, this one is final
    without them. ``peer`` says that the case failed because a process that it trains with was gone.
    ``unit`` is what a command counts, and ``epoch_items`` how many of them its epoch time is of.
    ``until`` is the time.monotonic(), in s, up to which the columns of `bench.record.BESIDE` are
    filled; 0 if they are not.
    """

    status: Status = Status.OK
    reason: str = ""
    transient: bool = False
    measurement: Measurement = field(default_factory=Measurement)
    missing: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    epochs: list[EpochRow] = field(default_factory=list)
    work: list[WorkRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)
    peer: bool = False
    until: float = 0.0
    unit: str = ""
    epoch_items: int = 0

    def note(self, text: str) -> None:
        m = self.measurement
        m.notes = f"{m.notes}; {text}" if m.notes else text

    def leave_out(self, reason: str, *columns: str) -> None:
        self.missing |= dict.fromkeys(columns, reason)

    def fail_checkpoint(self, reason: str) -> None:
        self.note(reason)
        self.leave_out(reason, "checkpoint")

    @contextmanager
    def leave_out_on_error(self, *columns: str) -> Iterator[None]:
        """Catch any error and leave ``columns`` empty, with the error as the reason."""
        try:
            yield
        except UsageError as error:
            self.leave_out(str(error), *columns)
        except Exception as error:
            traceback.print_exception(error)  # to the log
            self.leave_out(f"{type(error).__name__}: {error}", *columns)


Message = PhaseEntered | StepTaken | EpochEnded | Finished


class Channel:
    """The worker's end of the connection to its parent. Without a parent nothing is sent. If
    ``judged``, the parent is asked after each epoch whether to train another."""

    def __init__(self, parent: Connection | None = None, judged: bool = False) -> None:
        self._parent, self._judged = parent, judged

    def send(self, message: Message) -> None:
        if self._parent:
            self._parent.send(message)

    def enter(self, phase: Phase, epoch: int = 0) -> None:
        self._ask(PhaseEntered(phase, epoch))

    def ask(self, row: EpochRow) -> bool:
        """Send an epoch's result; return whether to train another."""
        return not self._judged or self._ask(EpochEnded(row)) != END

    def _ask(self, message: Message) -> object:
        self.send(message)
        return self._parent.recv() if self._parent else GO_ON


class Reporter:
    """A progress reporter that does not stop the device: the loss is copied to pinned memory after
    its step, and read once it has arrived."""

    def __init__(self, channel: Channel, device: torch.device, phase: Phase, steps: int) -> None:
        self._channel, self._phase, self._steps = channel, phase, steps
        from bench.training.timing import find_accelerator

        self._accelerator = find_accelerator(device)
        self._due = time.perf_counter()
        self._pending: tuple[int, torch.Tensor, Any] | None = None

    def __call__(self, index: int, loss: torch.Tensor) -> None:
        if self._pending is not None:
            step, copy, event = self._pending
            if event.query():
                self._send(step, float(copy))
                self._pending = None
        elif time.perf_counter() >= self._due:
            if self._accelerator is None:
                self._send(index, float(loss))
            else:
                import torch

                copy = torch.empty((), pin_memory=True)
                copy.copy_(loss, non_blocking=True)
                event = self._accelerator.Event(enable_timing=True)
                event.record()
                self._pending = index, copy, event

    def _send(self, step: int, loss: float) -> None:
        held = self._accelerator.memory_reserved if self._accelerator else read_peak_memory
        self._channel.send(StepTaken(self._phase, step, self._steps, loss, held()))
        self._due = time.perf_counter() + _REPORT_EVERY_S
