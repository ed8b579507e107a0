"""The messages between a worker and its parent, one JSON line each, and the worker's channel.

Only this module writes and reads such lines. A model that prints into the worker's pipe can send
anything, so reading checks everything.
"""

from __future__ import annotations

import io
import json
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TextIO

from bench.case import Case
from bench.errors import UsageError
from bench.plain import read_value
from bench.processes import read_peak_memory
from bench.record import EpochRow, KnownResults, Measurement, RankRow, Status, Step, WorkRow

if TYPE_CHECKING:
    import torch

Phase = Literal["warmup", "epoch", "evaluation"]
"""The phases that a worker announces, in this order; the last two once for each epoch."""

_SHOWN = 200  # characters of an unreadable line that an error repeats
_REPORT_EVERY_S = 0.2


class MessageError(ValueError):
    """A line is not a message."""


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
    """A worker's task, the first line that it reads.

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
    """The worker is about to enter ``phase`` and waits for a line. ``epoch`` counts from 0: it is
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
    """The result of one of several epochs. The worker then waits for a line: `GO_ON`, or `END` to
    end the case here, measured so far and marked as truncated."""

    row: EpochRow


GO_ON, END = b"\n", b"end\n"


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

_KINDS = {kind.__name__: kind for kind in (PhaseEntered, StepTaken, EpochEnded, Finished)}


def encode(content: Message | Assignment) -> bytes:
    values = {f.name: getattr(content, f.name) for f in fields(content)}
    if not isinstance(content, Assignment):
        values["kind"] = type(content).__name__
    return json.dumps(values, default=_list_cells).encode() + b"\n"


def _list_cells(part: Any) -> list[Any]:
    """Write a row without field names: a whole epoch has thousands of steps."""
    return [getattr(part, f.name) for f in fields(part)]


def decode(line: bytes) -> Message:
    """Read a message. Raises MessageError: the line is not one; says why."""
    try:
        values = read_value(dict[str, Any], json.loads(line))
        kind = values.pop("kind", None)
        if kind not in [*_KINDS]:
            raise MessageError(f"no kind {kind!r}; right values: {', '.join(_KINDS)}")
        message: Message = read_value(_KINDS[kind], values)
    except (ValueError, TypeError) as error:
        shown = line[:_SHOWN].decode(errors="replace")
        raise MessageError(f"the worker sent {shown!r}, which is no message: {error}") from error
    return message


def encode_names(names: Sequence[str]) -> bytes:
    """Write a worker's order to answer as `bench.environment` does, instead of an assignment."""
    return json.dumps(list(names)).encode() + b"\n"


def decode_order(line: str) -> Assignment | list[str]:
    """Read a worker's first line: its assignment, or the names of devices and models to examine."""
    values = json.loads(line)
    kind = list[str] if isinstance(values, list) else Assignment
    order: Assignment | list[str] = read_value(kind, values)
    return order


class Channel:
    """The worker's end of the channel to its parent, whose lines are ``orders``. Without a parent
    nothing is sent. If ``judged``, the parent is asked after each epoch whether to train another.
    """

    def __init__(
        self, descriptor: int | None = None, judged: bool = False, orders: TextIO | None = None
    ) -> None:
        self._out = None if descriptor is None else os.fdopen(descriptor, "wb", buffering=0)
        self._judged, self._orders = judged, orders or io.StringIO()

    def send(self, message: Message) -> None:
        if self._out:
            line = encode(message)
            while line:  # a pipe may take only part of a long line
                line = line[self._out.write(line) :]

    def enter(self, phase: Phase, epoch: int = 0) -> None:
        if self._out:
            self.send(PhaseEntered(phase, epoch))
            self._orders.readline()

    def ask(self, row: EpochRow) -> bool:
        """Send an epoch's result; return whether to train another."""
        if not (self._out and self._judged):
            return True
        self.send(EpochEnded(row))
        return self._orders.readline() != END.decode()


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
