"""What runs a case: a process of its own by default, a fake for tests of everything else.

An executor offers lanes, and each lane runs one case at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO

from bench.case import Case
from bench.data import DatasetInfo, prepare
from bench.data.progress import Progress, progress_bar
from bench.doctor.rates import measure_rates
from bench.environment.asking import Asking, ProcessAnswer, ask, start_asked
from bench.errors import UnsupportedError, UsageError
from bench.origin import EXECUTORS
from bench.processes import hold_to
from bench.record import EpochRow, Known, Outcome
from bench.worker.messages import PhaseEntered, StepTaken
from bench.yardstick import Yardstick


class ShortageError(Exception):
    """What a case takes is not there just now, but it may come, or come back; the message is one
    line that says what is lacking."""


Event = PhaseEntered | StepTaken
"""A progress report of a running case."""

Listener = Callable[[Event], None]
Stopping = Callable[[], bool]
"""Whether a case is to be ended: the sweep was stopped."""


@dataclass(frozen=True)
class Settings:
    """Settings of an executor, the same for all cases of a sweep. ``address`` is that of a cluster
    to join. With ``cold`` each process is started as a new Python, and not forked from one that has
    imported torch."""

    timeout_s: float = 3600.0
    allow_shared: bool = False
    address: str | None = None
    cold: bool = False


@dataclass(frozen=True)
class Lane:
    """A place where one case runs at a time: the only one of a sweep, which has no ``name``, or one
    of several. ``gpus`` are UUIDs, ``cores`` the CPUs that its workers are held to; empty leaves
    them what this process has. ``host`` is empty on this machine."""

    name: str = ""
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    host: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that pin what is started here to its GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


@dataclass(frozen=True)
class Job:
    """One case to run: on which images and card, and where its log and checkpoints go.

    ``folder`` is where `bench.data.prepare` left the dataset; ``gpu_uuid`` is None on a CPU. A case
    of several GPUs, or processes, takes those of ``lane``.
    A checkpoint that lies in ``checkpoints`` is resumed if it is of ``identity``. The trace of a
    profiled case is kept in the file ``trace``. ``enough`` is asked after each epoch but the last
    whether the case is to end there; its row then says after which epoch it was truncated. Where
    ``hold`` is set, each phase waits until ``on_event`` has returned; elsewhere it may be called a
    little late. What is ``known`` is not found anew.
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
    hold: bool = False
    known: Known = field(default_factory=Known)


@dataclass(frozen=True)
class Images:
    """Which images a lane needs, as `bench.data.prepare` takes them."""

    name: str
    data_dir: Path | None = None
    url: str | None = None
    input: str | None = None
    classes: int | None = None

    def prepare(self, progress: Progress | None = None) -> DatasetInfo:
        return prepare(**vars(self), progress=progress)


ALL = 0
"""A number of lanes: one for each GPU; on a CPU, one for each core."""


class Executor:
    """Offers lanes, and turns cases into outcomes, one at a time on each lane.

    It has to `run` a case. All else is here as on this machine with one lane, for what has no
    others. The methods that take a lane may be called by several threads at once, each for another
    lane. A worker dies with the thread that started it, so a lane has one thread as long as it is
    open.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def run(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        """Run one case on ``job.lane`` to its end, or to `interrupted` soon after ``stopping()``.
        It never raises: every failure is an outcome. ``on_event`` is called in the same thread."""
        raise NotImplementedError

    def open_lanes(self, device: str, wanted: int | None = None) -> Sequence[Lane]:
        """Open the lanes that cases on ``device`` ("cuda" or "cpu") may run on; once, first of all.

        So many are ``wanted``; `ALL` for all that there are, None for what is usual, which on one
        machine is a single lane that is pinned to nothing and has no name. Raises UsageError: there
        are not that many; it says how many there are.
        """
        if wanted not in (None, ALL, 1):
            raise UsageError(f"--lanes {wanted}: this executor has one lane; leave it out")
        return (Lane(),)

    def join_lanes(self) -> Sequence[Lane]:
        """Lanes that came since the last call, on nodes that joined late or in place of lost ones.
        A lane whose case was `lost` is gone. It is listed here if it comes back."""
        return ()

    def lose_lanes(self) -> Sequence[Lane]:
        """Lanes that went away since the last call while nothing ran on them; `join_lanes` lists
        them if they come back."""
        return ()

    def gather(self, lane: Lane, device: str, size: int) -> Lane:
        """The lane for a case of ``size`` GPUs (on a CPU, shares of cores) that ``lane`` is to run.

        Its GPUs are of one machine and of the kind of ``lane``. Where that machine has too few, it
        may be another's, and has the name of a lane there. It is only used while nothing else runs.

        Raises UnsupportedError: there never were that many; it says how many there are. Raises
        ShortageError: there are, or were, but some are gone or in use. Raises UsageError: the
        lane's machine failed to say; the case is an `error`.
        """
        if size > 1:
            raise UnsupportedError(f"world size {size}: this executor runs a case on one GPU")
        return lane

    def examine(
        self,
        lane: Lane,
        devices: Sequence[str],
        models: Sequence[str],
        timeout_s: float,
        *,
        look: Callable[[ProcessAnswer, int], None] = lambda answer, pid: None,
    ) -> ProcessAnswer:
        """Ask about devices and models where the lane is, as `bench.environment.asking.ask` does;
        ``look`` is called only where the process that answers runs on this machine."""
        with hold_to(lane.cores):
            return ask(
                devices,
                models,
                timeout_s=timeout_s,
                look=look,
                variables=lane.variables,
                start=self.start_asked,
            )

    def start_asked(
        self, names: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]
    ) -> Asking:
        """Start the process that answers `examine`, as `bench.environment.asking` does."""
        return start_asked(names, environment, errors)

    def prepare(self, lane: Lane, images: Images) -> DatasetInfo:
        """Have images on the lane's machine; its ``folder`` is that of a job on this lane. Raises
        UsageError: they cannot be had or read."""
        with progress_bar() as progress:
            return images.prepare(progress)

    def rate(
        self, lane: Lane, device: str, seconds: float, expected: Mapping[str, float]
    ) -> Yardstick:
        """Measure what the lane can do now, as `bench.doctor.rates.measure_rates` does."""
        with hold_to(lane.cores):
            return measure_rates(device, seconds, lane.variables, expected)

    def kill(self) -> None:
        """End whatever runs on any lane, at once. Called by a signal handler."""

    def close(self) -> None:
        """Let go of the lanes; nothing runs on them any more."""


def build_executor(name: str, settings: Settings) -> Executor:
    return load_executor(EXECUTORS[name].place, settings)


def load_executor(place: str, settings: Settings) -> Executor:
    module, _, kind = place.partition(":")
    executor: Executor = getattr(import_module(module), kind)(settings)
    return executor
