"""What runs a case: a process of its own by default, a fake for tests of everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

from bench.case import Case
from bench.record import EpochRow, Outcome
from bench.worker.messages import PhaseEntered, StepTaken

EXECUTORS: dict[str, str] = {
    "subprocess": "bench.executors.subprocess:SubprocessExecutor",
    "fake": "bench.executors.fake:FakeExecutor",
}

Event = PhaseEntered | StepTaken
"""A progress report of a running case."""


@dataclass(frozen=True)
class Settings:
    """Settings of an executor, the same for all cases of a sweep."""

    timeout_s: float = 3600.0
    allow_shared: bool = False


@dataclass(frozen=True)
class Lane:
    """A place where one case runs at a time: the only one of a sweep, or one of several.

    ``name`` is empty for the only one. ``gpus`` are UUIDs, ``cores`` the CPUs that its workers are
    held to; empty leaves them what this process has. ``host`` is empty on this machine.
    """

    name: str = ""
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    host: str = ""


@dataclass(frozen=True)
class Job:
    """One case to run: on which images and card, and where its log and checkpoints go.

    ``folder`` is where `bench.data.prepare` left the dataset; ``gpu_uuid`` is None on a CPU. A case
    of several GPUs, or processes, takes those of ``lane``.
    A checkpoint that lies in ``checkpoints`` is resumed if it is of ``identity``. The trace of a
    profiled case is kept in the file ``trace``. ``enough`` is asked after each epoch but the last
    whether the case is to end there; its row then says after which epoch it was truncated.
    """

    case: Case
    folder: str = ""
    gpu_uuid: str | None = None
    log: Path | None = None
    checkpoints: Path | None = None
    identity: dict[str, str] = field(default_factory=dict)
    trace: Path | None = None
    lane: Lane = Lane()
    enough: Callable[[EpochRow], bool] | None = None


class Executor(Protocol):
    """Turns cases into outcomes, one at a time. It never raises: every failure is an outcome."""

    def __init__(self, settings: Settings) -> None: ...

    def run(
        self, job: Job, on_event: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> Outcome:
        """Run one case to its end, or to `interrupted` soon after ``stopping()`` turns true."""

    def kill(self) -> None:
        """End whatever runs, at once."""


def build_executor(name: str, settings: Settings) -> Executor:
    """Make the executor ``name`` of `EXECUTORS`."""
    module, _, kind = EXECUTORS[name].partition(":")
    executor: Executor = getattr(import_module(module), kind)(settings)
    return executor
