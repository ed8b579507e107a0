"""What a worker is given, its job, and what it sends to its parent.

At each phase it waits for its parent, so that it can take readings of the card at the boundary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from bench.base.inject import Files
from bench.schema.case import Case
from bench.schema.record import EpochRow, KnownResults, Outcome

WorkerPhase = Literal["warmup", "epoch", "evaluation"]
"""The phases that a worker announces, in this order; the last two once for each epoch."""

_REPORT_EVERY_S = 0.2


@dataclass(frozen=True)
class Lane:
    """A place where one case runs at a time: the only one of a sweep, which has no ``name``, or one
    of several. ``gpus`` are UUIDs, ``cores`` the CPU cores that its workers are pinned to; if
    empty, they may use those of this process."""

    name: str = ""
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that pin processes of this lane to its GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


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
class Job:
    """A run of a case: which it is, and where and with what it is made. The worker gets it whole.

    A source decides on ``case`` and what follows from it: which ``repeat`` it is, whether it is the
    ``sentinel`` or a ``probe`` of a search, the ``attempt``, and a ``smaller`` batch size that ran
    out of memory, so that this one is not run. ``enough`` is called after each epoch but the last,
    and returns whether to end the case there, truncated; a worker is ``judged`` by its parent's.

    ``folder`` is where `bench.networks.data.prepare` left the dataset, ``gpu_uuid`` the GPU as NVML
    knows it, None on a CPU. A case of several GPUs or processes uses the GPUs or cores of ``lane``,
    and a worker that does not train alone has a ``rendezvous``. A checkpoint in ``checkpoints`` is
    resumed if it has this ``identity``. It is expected to be made of these ``files``. Of a command,
    ``outputs`` is a folder of its own, ``since_ns`` when the results were begun, and ``sees_steps``
    whether its steps are looked for. The ``trace``
    of a profiled case is kept in a file, as the ``log`` is. ``known`` values are not determined
    again. ``asked_at`` is the time.monotonic() at which the worker was requested, in s, and
    ``until`` that at which it is stopped."""

    case: Case
    folder: str = ""
    gpu_uuid: str | None = None
    log: Path | None = None
    checkpoints: Path | None = None
    identity: dict[str, str] = field(default_factory=dict)
    trace: Path | None = None
    lane: Lane = Lane()
    enough: Callable[[EpochRow], bool] | None = None
    known: KnownResults = field(default_factory=KnownResults)
    files: Files = field(default_factory=dict)
    since_ns: int = 0
    outputs: Path | None = None
    rendezvous: Rendezvous | None = None
    asked_at: float = 0.0
    until: float = math.inf
    judged: bool = False
    repeat: int = 1
    sentinel: bool = False
    probe: bool = False
    attempt: int = 1
    smaller: int | None = None
    sees_steps: bool = True

    @property
    def run(self) -> tuple[Case, int, bool]:
        return self.case, self.repeat, self.sentinel

    @cached_property
    def name(self) -> str:
        """What its files are named after, whichever attempt it is; hashing a case takes 80 µs."""
        return f"{self.case.slug()}-{self.run_name}"

    @property
    def run_name(self) -> str:
        """What distinguishes it from other runs of its case."""
        return "s" if self.sentinel else "p" if self.probe else str(self.repeat)


@dataclass(frozen=True)
class PhaseEntered:
    """The worker is about to enter ``phase`` and waits for `GO_ON`. ``epoch`` counts from 0: it is
    the epoch that begins or, for an evaluation, the one that has just ended."""

    phase: WorkerPhase
    epoch: int = 0


@dataclass(frozen=True)
class StepTaken:
    """Step ``step`` (from 0) of ``total`` was taken; ``total`` is 0 if unknown."""

    phase: WorkerPhase
    step: int
    total: int
    memory_bytes: int


@dataclass(frozen=True)
class WorkBegun:
    """The worker begins something that no measured time has in it; ``what`` names it."""

    what: str


@dataclass(frozen=True)
class EpochEnded:
    """The result of one of several epochs. The worker then waits for `GO_ON`, or `END` to
    end the case here, measured so far and marked as truncated."""

    row: EpochRow


GO_ON, END = "go on", "end"


Message = PhaseEntered | StepTaken | WorkBegun | EpochEnded | Outcome


class Channel:
    """The worker's end of the connection to its parent. Without a parent nothing is sent."""

    def __init__(self, parent: Connection | None = None) -> None:
        self._parent = parent

    def send(self, message: Message) -> None:
        if self._parent:
            self._parent.send(message)

    def enter(self, phase: WorkerPhase, epoch: int = 0) -> None:
        self.ask(PhaseEntered(phase, epoch))

    def ask(self, message: Message) -> object:
        """Send a message, and wait for what the parent says to it."""
        self.send(message)
        return self._parent.recv() if self._parent else GO_ON

    def reporter(
        self, phase: WorkerPhase, total: int, read_memory: Callable[[], int], first: int = 0
    ) -> Callable[[int, object], None]:
        """Return what tells of a step now and then, with the memory that ``read_memory``
        reads in bytes; ``first`` is the number of the phase's first step."""
        due = 0.0

        def report(step: int, _: object) -> None:
            nonlocal due
            if (now := time.perf_counter()) >= due:
                self.send(StepTaken(phase, step - first, total, read_memory()))
                due = now + _REPORT_EVERY_S

        return report
