"""Executors, which run cases, each in a process of its own.

An executor offers lanes, and each lane runs one case at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.base.origin import EXECUTORS
from bench.base.processes import hold_to
from bench.networks.data import SYNTHETIC, DatasetInfo, find_layout, prepare
from bench.networks.data.cifar10 import CIFAR10_IMAGES
from bench.profile.rates import DeviceRates
from bench.schema.record import Outcome
from bench.workers.examination import Machine, ask_processes
from bench.workers.fingerprint import Request
from bench.workers.job import Job, Lane, PhaseEntered, StepTaken, WorkBegun
from bench.workers.rating import measure_rates

CaseEvent = PhaseEntered | StepTaken | WorkBegun
"""A progress report of a running case."""

Listener = Callable[[CaseEvent], None]
Stopping = Callable[[], bool]
"""Returns whether the sweep was stopped, so that the case is to be ended."""


@dataclass(frozen=True)
class Settings:
    """Settings of an executor, the same for all cases of a sweep. ``address`` is the address of a
    cluster to join. With ``cold`` each process is started as a new Python process, not forked from
    one that has imported torch."""

    timeout_s: float = 3600.0
    allow_shared: bool = False
    address: str | None = None
    cold: bool = False


@dataclass(frozen=True)
class ImageRequest:
    """The images that a lane needs, as arguments of `bench.networks.data.prepare`."""

    name: str
    data_dir: Path | None = None
    input: str | None = None
    classes: int | None = None

    def prepare(self) -> DatasetInfo:
        """Decode them, once on a machine. Raises UsageError: they cannot be obtained or read."""
        return prepare(**vars(self))

    def count(self) -> DatasetInfo:
        """Return how many there are in an epoch, without decoding them. Raises UsageError: their
        folder is a file, or lacks some of them."""
        if self.name != SYNTHETIC:
            find_layout(self.data_dir)
        return DatasetInfo(self.name, "", CIFAR10_IMAGES["train"], 0, 0, "", "")


ALL = 0
"""The number of lanes that stands for one per GPU or, on a CPU, one per core."""


class Executor(ABC):
    """A provider of lanes that turns cases into outcomes, one at a time on each lane.

    Those methods that take a lane may be called by several threads at once, each for another lane.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def run(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        """Run one case on ``job.lane``; soon after ``stopping()`` is true, end it as `interrupted`.
        Never raises: every failure is an outcome. ``on_event`` is called in the same thread."""

    @abstractmethod
    def open_lanes(self, device: str, wanted: int | None = None) -> Sequence[Lane]:
        """Open the lanes for cases on ``device`` ("cuda" or "cpu"). Called once, before all else.

        ``wanted`` is their number: `ALL` for all there are, None for the default, which on one
        machine is a single lane without pinning or a name. Raises UsageError: there are fewer; it
        says how many.
        """

    @abstractmethod
    def gather(self, lane: Lane, device: str, size: int) -> Lane:
        """Return a lane with ``size`` GPUs (on a CPU, shares of cores) for a case of ``lane``.

        Its GPUs are in one machine and of the same kind as those of ``lane``. It is used only while
        nothing else runs. Raises UnsupportedError: there are not that many; it says how many.
        """

    def examine(
        self, lane: Lane, devices: Sequence[str], models: Sequence[Request], timeout_s: float
    ) -> Machine:
        """Ask about devices and models on the lane's machine, by
        `bench.workers.examination.ask_processes`."""
        cold = self.settings.cold
        with hold_to(lane.cores):
            return ask_processes(devices, models, timeout_s, variables=lane.variables, cold=cold)

    def prepare(self, lane: Lane, images: ImageRequest) -> DatasetInfo:
        """Prepare images on the lane's machine; the result's ``folder`` is for jobs on this lane.
        Raises UsageError: they cannot be obtained or read."""
        return images.prepare()

    def rate(self, lane: Lane, device: str, seconds: float) -> DeviceRates:
        """Measure the lane's current rates, as `bench.workers.rating.measure_rates` does."""
        with hold_to(lane.cores):
            return measure_rates(device, seconds, lane.variables)

    @abstractmethod
    def kill(self) -> None:
        """End everything that runs on any lane, at once. Called by a signal handler."""

    @abstractmethod
    def close(self) -> None:
        """Release the lanes; nothing runs on them any more."""


def build_executor(name: str, settings: Settings) -> Executor:
    module, _, kind = EXECUTORS[name].place.partition(":")
    executor: Executor = getattr(import_module(module), kind)(settings)
    return executor
