"""Cases as tasks of a Ray cluster, each on whichever node has GPUs for it, or else CPU cores.

A lane is no place here, but one of the cases that the cluster can run at once. Ray's own retries
are off: they would hide attempts. ray is imported only where a cluster is joined or started.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.base.errors import UnsupportedError, UsageError
from bench.base.processes import TemporaryFolder
from bench.base.text import clean
from bench.machine.host import describe_install, find_variables, hash_code
from bench.machine.nvml import find_cards
from bench.networks.data import DatasetInfo
from bench.profile.rates import DeviceRates
from bench.schema.record import Outcome, Place, Status
from bench.workers.examination import Machine
from bench.workers.executors import Executor, ImageRequest, Listener, Settings, Stopping
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.fingerprint import Request
from bench.workers.job import Job, Lane
from bench.workers.rating import choose_seconds, measure_rates

ADDRESS = "RAY_ADDRESS"
"""Ray's own environment variable: the cluster to join if no address is given."""

# Addresses: a cluster on this machine that ends with the sweep, and the last one started here.
LOCAL, _AUTO = "local", "auto"

_SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's own is 15
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of a change in its next version
}
_STORE_BYTES = 100 * 2**20  # little but traces is sent; Ray's default is a third of the memory
_ANSWER_S = 5.0
_POLL_S = 0.1
_KILL_S = 5.0


# ------------------------------------------------------------------------------ on a node


@dataclass(frozen=True)
class Errand:
    """What a node needs to know of the sweep: its settings, the folder in which it was started,
    used if it exists there too, its environment variables that change results, the hash of its
    code, and how long to measure the rates of a device, in s, 0 for not at all."""

    settings: Settings
    folder: str
    variables: Mapping[str, str]
    code: str
    device: str
    seconds: float

    def enter(self) -> Executor:
        """Return the executor of this process of Ray's. Raises UsageError: nothing can be measured
        here; it says what to do."""
        if (here := hash_code()) != self.code:
            raise UsageError(
                f"its code of this harness is {here}, and the sweep's is {self.code}; install the "
                "same on all nodes"
            )
        with suppress(PermissionError):  # only some users may raise what Ray lowered
            os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
        if (niceness := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
            raise UsageError(
                f"Ray runs its processes there at a niceness of {niceness}; set "
                "RAY_worker_niceness=0 where `ray start` is called"
            )
        with suppress(OSError):
            os.chdir(self.folder)
        for name in find_variables():  # Ray sets OMP_NUM_THREADS, which a worker would inherit
            del os.environ[name]
        os.environ.update(self.variables)
        return _build(self.settings)


_build = cache(SubprocessExecutor)  # for all cases of a process: the server of its workers is warm


def ask(errand: Errand, question: str, *arguments: Any) -> Any:
    """Call the method ``question`` of the node's executor: examine or prepare."""
    return getattr(errand.enter(), question)(Lane(), *arguments)


def run_case(
    errand: Errand, job: Job, images: ImageRequest | None, fingerprint: str
) -> tuple[Outcome, bytes, bytes]:
    """Run a case as on a lane of this machine; return its outcome, log and trace. ``images`` must
    have this ``fingerprint`` here too."""
    executor, here = errand.enter(), socket.gethostname()
    if job.checkpoints and not job.checkpoints.parent.parent.is_dir():
        raise UnsupportedError(
            f"{job.checkpoints.parent.parent} is not there on {here}; for --checkpoint, put --out "
            "on a file system that all nodes share"
        )
    if images:
        info = executor.prepare(Lane(), images)
        if info.fingerprint != fingerprint:
            raise UsageError(f"{here} has other images; give all machines the same images")
        job = replace(job, folder=info.folder)
    lane = executor.gather(Lane(), job.case.device, job.case.world_size)
    # the GPUs that Ray gives to this task, which may be others than the last one had
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    place = _look(executor, job.case.device, errand.seconds, visible)
    uuid = place.environment.gpu_uuid if place.environment else None
    with TemporaryFolder("case") as folder:
        log, trace = Path(folder, "log"), job.trace and Path(folder, job.trace.name)
        placed = replace(job, lane=lane, gpu_uuid=uuid, log=log, trace=trace)
        outcome = executor.run(placed, lambda event: None, lambda: False)
        logged, traced = (f.read_bytes() if f and f.exists() else b"" for f in (log, trace))
    return replace(outcome, place=place), logged, traced


@cache
def _look(executor: Executor, device: str, seconds: float, visible: str | None) -> Place:
    """Examine the node, and measure its rates, once for each set of ``visible`` GPUs in a process
    of Ray's, which runs many cases. Raises UsageError: torch cannot use the device."""
    cards = find_cards()[0] if device == "cuda" else []  # of those that Ray lets it see
    name = "-".join([socket.gethostname(), *(f"gpu{card.index}" for card in cards[:1])])
    machine = executor.examine(Lane(), [device], [], executor.settings.timeout_s)
    environment = machine.use([device])[device].environment
    rates = measure_rates(device, seconds) if seconds else DeviceRates()
    return Place(name, replace(environment, **rates.columns), rates.reasons)


# ------------------------------------------------------------------------------ in the sweep


class RayExecutor(Executor):
    """An executor whose cases are tasks of a cluster. Raises UsageError: ray is not installed,
    there is no cluster at the address, or none can be started."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.address = settings.address or os.environ.get(ADDRESS) or LOCAL
        _connect(self.address)
        self._images: dict[str, tuple[ImageRequest, str]] = {}  # by folder, with their fingerprint

    def open_lanes(self, device: str, wanted: int | None = None) -> Sequence[Lane]:
        """Open a lane for each GPU of the cluster, on a CPU for each node (as many as the smallest
        one's cores go into all), at most as many as wanted. Raises UsageError: there is none."""
        import ray

        self._errand = Errand(
            replace(self.settings, address=None),
            str(Path.cwd()),
            find_variables(os.environ),
            hash_code(),
            device,
            choose_seconds(device),
        )
        what = "GPU" if device == "cuda" else "CPU"
        sizes = [int(n["Resources"].get(what, 0)) for n in ray.nodes() if n["Alive"]]
        if not any(sizes):
            flag = "--num-gpus, or use --device cpu" if device == "cuda" else "--num-cpus"
            raise UsageError(
                f"the Ray cluster {self.address} offers no {device}; start its nodes with {flag}"
            )
        self._most, self._cores = max(sizes), min(filter(None, sizes))
        there = sum(n if device == "cuda" else n // self._cores for n in sizes)
        return [Lane(f"ray{number}") for number in range(min(wanted or there, there))]

    def gather(self, lane: Lane, device: str, size: int) -> Lane:
        if size > self._most:
            what = "GPUs" if device == "cuda" else "CPU cores"
            raise UnsupportedError(
                f"world size {size} takes {size} {what} of one machine; no node of the cluster had "
                f"more than {self._most}"
            )
        return lane

    def examine(
        self, lane: Lane, devices: Sequence[str], models: Sequence[Request], timeout_s: float
    ) -> Machine:
        """Examine a node: all are to have the same code and packages. Raises UsageError."""
        machine: Machine = self._ask("examine", devices, models, timeout_s)
        return machine

    def prepare(self, lane: Lane, images: ImageRequest) -> DatasetInfo:
        images = replace(images, data_dir=(images.data_dir or Path("data")).absolute())
        info: DatasetInfo = self._ask("prepare", images)
        self._images[info.folder] = images, info.fingerprint
        return info

    def run(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        """Run one case as a task; `lost` if its process or its node went away."""
        import ray

        task = self._submit(run_case, job.case.world_size)
        answer = task.remote(self._errand, job, *self._images.get(job.folder, (None, "")))
        cancelled = False
        # an untimed wait would not notice that the sweep is stopped
        while not ray.wait([answer], timeout=_POLL_S)[0]:
            if stopping() and not cancelled:
                ray.cancel(answer)
                cancelled = True
        try:
            outcome: Outcome
            outcome, *files = ray.get(answer)
        except ray.exceptions.RayError as error:
            if stopping():
                return Outcome(Status.INTERRUPTED, "the sweep was stopped")
            return _explain(error)
        for file, data in zip((job.log, job.trace), files, strict=True):
            if file is not None and data:
                with suppress(OSError):
                    file.write_bytes(data)
        return outcome

    def kill(self) -> None:
        """Leave the cluster, which ends all tasks. A signal handler calls this, perhaps during a
        call to Ray, so another thread does the work."""
        ending = threading.Thread(target=self.close, daemon=True)
        ending.start()
        ending.join(_KILL_S)

    def close(self) -> None:
        import ray

        ray.shutdown()

    def _submit(self, function: Any, gpus: int = 1) -> Any:
        """Return a task that asks Ray for GPUs, or for the cores of a node."""
        import ray

        size: dict[str, Any] = {"num_cpus": self._cores}
        if self._errand.device == "cuda":
            size = {"num_gpus": gpus, "num_cpus": 0}
        # with GPUs Ray ends a process after one task, lest it keep their memory: here only a worker
        # holds some, and a process that stays has its server of workers, and the rates, at once
        return ray.remote(max_retries=0, max_calls=0, **size)(function)

    def _ask(self, question: str, *arguments: Any) -> Any:
        """Have a node answer. Raises UsageError: as its executor, or because it is gone."""
        import ray

        try:
            return ray.get(self._submit(ask).remote(self._errand, question, *arguments))
        except ray.exceptions.RayError as error:
            raise UsageError(_explain(error).reason) from error


def _explain(error: Exception) -> Outcome:
    """Return the outcome of a task that ended with an error of Ray's."""
    import ray

    errors, on = ray.exceptions, "on the Ray cluster"
    why = clean(str(error).partition(". ")[0].partition("\n")[0])
    if isinstance(error, errors.RayTaskError):
        status = Status.UNSUPPORTED if isinstance(error.cause, UnsupportedError) else Status.ERROR
        ours = isinstance(error.cause, (UsageError, UnsupportedError))
        return Outcome(status, f"{on}: {error.cause if ours else clean(repr(error.cause))}")
    if isinstance(error, errors.OutOfMemoryError):
        return Outcome(Status.KILLED, f"{on}, by Ray, from lack of host memory: {why}")
    return Outcome(Status.LOST, f"{on}: {why}")


def _connect(address: str) -> None:
    """Join the cluster at ``HOST:PORT``, of which this machine must be a node, or start one."""
    if find_spec("ray") is None:
        fix = describe_install(["ray"])
        raise UsageError(f"--executor ray: ray is not installed for {sys.executable}; {fix}")
    import ray

    about: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Ray prints the last lines of a lost node's log into the tables on standard output
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    try:
        if address == LOCAL:
            os.environ.update(_SETTINGS)
            about |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        elif address != _AUTO:  # where nothing listens Ray tries for minutes, verbosely
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
        ray.init(address, namespace="bench", **about)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        why = clean(next(iter(str(error).splitlines()), type(error).__name__))
        raise UsageError(
            f"--executor ray: {address} is no Ray cluster to be joined or started from here "
            f"({why}); run `ray start --head` on one of its machines and `ray start --address "
            "HOST:PORT` on this one, and set RAY_AUTH_MODE=token if it demands a token"
        ) from error
