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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.data import DatasetInfo
from bench.doctor.rates import choose_seconds, measure_rates
from bench.environment.host import describe_install, find_variables, hash_code
from bench.environment.machine import Machine
from bench.errors import UnsupportedError, UsageError
from bench.executors import Executor, Images, Listener, Settings, Stopping, load_executor
from bench.fingerprint import Request
from bench.gpu.nvml import find_cards, find_neighbours
from bench.origin import EXECUTORS
from bench.record import Outcome, Place, Status
from bench.scratch import Scratch
from bench.text import clean
from bench.worker.messages import Job, Lane
from bench.yardstick import Yardstick

ADDRESS = "RAY_ADDRESS"
"""Ray's own environment variable: the cluster to join if no address is given."""

LOCAL, AUTO = "local", "auto"
"""Addresses: a cluster on this machine that ends with the sweep, and the last one started here."""

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
    """What a node needs to know of the sweep. ``executor`` is the ``package.module:Class`` that
    runs its cases, ``folder`` the one in which it was started, used if it exists there too, and
    ``variables`` are its environment variables that change results."""

    executor: str
    settings: Settings
    folder: str
    variables: Mapping[str, str]
    code: str
    device: str
    seconds: float  # to measure the rates of a device in, 0 for none

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
        return _load(self.executor, self.settings)


_load = cache(load_executor)  # for all cases of a process: the server of its workers is warm


def ask(errand: Errand, question: str, *arguments: Any) -> Any:
    """Call the method ``question`` of the node's executor: examine or prepare."""
    return getattr(errand.enter(), question)(Lane(), *arguments)


@dataclass(frozen=True)
class Answer:
    """What a node answers once a case has ended, with the case's log and its trace."""

    outcome: Outcome
    log: bytes
    trace: bytes


def run_case(
    errand: Errand, job: Job, images: Images | None, fingerprint: str
) -> Iterator[tuple[str, str] | Answer]:
    """Say on which node and GPU the case runs, then run it as on a lane of this machine. ``images``
    must have this ``fingerprint`` here too."""
    import ray

    executor = errand.enter()
    cards = find_cards()[0] if errand.device == "cuda" else []  # of those that Ray lets it see
    name = "-".join([socket.gethostname(), *(f"gpu{card.index}" for card in cards[:1])])
    yield ray.get_runtime_context().get_node_id(), name
    if job.checkpoints and not job.checkpoints.parent.parent.is_dir():
        raise UnsupportedError(
            f"{job.checkpoints.parent.parent} is not there on {socket.gethostname()}; for "
            "--checkpoint, put --out on a file system that all nodes share"
        )
    if images:
        info = executor.prepare(Lane(), images)
        if info.fingerprint != fingerprint:
            raise UsageError("its images are other ones; give all machines the same images")
        job = replace(job, folder=info.folder)
    lane = executor.gather(Lane(), job.case.device, job.case.world_size)
    place = _look(executor, job.case.device, errand.seconds, name)
    uuid = place.environment.gpu_uuid if place.environment else None
    with Scratch("case") as folder:
        log, trace = Path(folder, "log"), job.trace and Path(folder, job.trace.name)
        here = replace(job, lane=lane, gpu_uuid=uuid, log=log, trace=trace)
        outcome = executor.run(here, lambda event: None, lambda: False)
        files = (file.read_bytes() if file and file.exists() else b"" for file in (log, trace))
        yield Answer(replace(outcome, place=place), *files)


@cache
def _look(executor: Executor, device: str, seconds: float, name: str) -> Place:
    """Examine the node, and measure its rates, once in a process of Ray's, which runs many cases.
    Raises UsageError: torch cannot use the device, or others use it."""
    settings = executor.settings
    machine = executor.examine(Lane(), [device], [], settings.timeout_s)
    environment = machine.use([device])[device].environment
    if environment.gpu_uuid and not settings.allow_shared:
        others = find_neighbours(environment.gpu_uuid) or ()
        if used := ", ".join(str(other) for other in others if not other.display):
            raise UsageError(f"the GPU is in use by {used}; end them, or give --allow-shared")
    rates = measure_rates(device, seconds) if seconds else Yardstick()
    return Place(name, replace(environment, **rates.columns), rates.reasons)


# ------------------------------------------------------------------------------ in the sweep


class RayExecutor(Executor):
    """An executor whose cases are tasks of a cluster. Raises UsageError: ray is not installed,
    there is no cluster at the address, or none can be started."""

    executor = EXECUTORS["subprocess"].place
    """What runs the cases on a node; tests use another."""

    _errand: Errand

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.address = settings.address or os.environ.get(ADDRESS) or LOCAL
        _connect(self.address)
        self._images: dict[str, tuple[Images, str]] = {}  # by folder, with their fingerprint
        self._homes: dict[object, str] = {}  # by case: the node that ran it

    def open_lanes(self, device: str, wanted: int | None = None) -> Sequence[Lane]:
        """Open a lane for each GPU of the cluster, on a CPU for each node (as many as the smallest
        one's cores go into all), at most as many as wanted. Raises UsageError: there is none."""
        import ray

        self._errand = Errand(
            self.executor,
            replace(self.settings, address=None),
            str(Path.cwd()),
            find_variables(os.environ),
            hash_code(),
            device,
            choose_seconds(device),
        )
        what = "GPU" if device == "cuda" else "CPU"
        sizes = {
            node["NodeID"]: int(node["Resources"].get(what, 0))
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get(what, 0) >= 1
        }
        if not sizes:
            flag = "--num-gpus, or use --device cpu" if device == "cuda" else "--num-cpus"
            raise UsageError(
                f"the Ray cluster {self.address} offers no {device}; start its nodes with {flag}"
            )
        self._nodes, self._most, self._cores = [*sizes], max(sizes.values()), min(sizes.values())
        there = sum(n if device == "cuda" else n // self._cores for n in sizes.values())
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
        """Examine all nodes; a model that is broken on one, or another one there, is broken. Raises
        UsageError: a node cannot be measured on."""
        first: Machine
        first, *others = self._ask(self._nodes, "examine", devices, models, timeout_s)
        for other in others:
            first = replace(first, torch_error=first.torch_error or other.torch_error)
            for subject, there in other.models.items():
                mine = first.models.get(subject, there)
                if isinstance(mine, str) or isinstance(there, str):
                    first.models[subject] = mine if isinstance(mine, str) else there
                elif (mine.structure, mine.source) != (there.structure, there.source):
                    first.models[subject] = (
                        f"{subject} is not the same on all nodes of the Ray cluster; give all "
                        "machines the same code and packages"
                    )
        return first

    def prepare(self, lane: Lane, images: Images) -> DatasetInfo:
        images = replace(images, data_dir=(images.data_dir or Path("data")).absolute())
        info: DatasetInfo
        (info,) = self._ask(self._nodes[:1], "prepare", images)
        self._images[info.folder] = images, info.fingerprint
        return info

    def run(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        """Run one case as a task; `lost` if its process or its node went away."""
        import ray

        options = self._request(job.case.world_size)
        if home := self._homes.get(job.case):  # of its sentinel, or of another attempt
            options["scheduling_strategy"] = _tie(home)
        task = ray.remote(max_retries=0, num_returns="streaming")(run_case).options(**options)
        answers = task.remote(self._errand, job, *self._images.get(job.folder, (None, "")))
        said: list[Any] = []
        told = False
        try:
            while len(said) < 2:
                # an untimed wait would not notice that the sweep is stopped
                ready, _ = ray.wait([answers], timeout=_POLL_S)
                if stopping() and not told:
                    ray.cancel(answers)
                    told = True
                if ready:
                    said.append(ray.get(next(answers)))
                    self._homes[job.case] = said[0][0]
        except ray.exceptions.RayError as error:
            node, name = said[0] if said else ("", "")
            outcome = _explain(error, node, name)
            if stopping():
                outcome = Outcome(Status.INTERRUPTED, "the sweep was stopped")
            return replace(outcome, place=Place(name) if name else None)
        answer: Answer = said[1]
        for file, data in ((job.log, answer.log), (job.trace, answer.trace)):
            if file is not None and data:
                with suppress(OSError):
                    file.write_bytes(data)
        return answer.outcome

    def kill(self) -> None:
        """Leave the cluster, which ends all tasks. A signal handler calls this, perhaps during a
        call to Ray, so another thread does the work."""
        ending = threading.Thread(target=self.close, daemon=True)
        ending.start()
        ending.join(_KILL_S)

    def close(self) -> None:
        import ray

        ray.shutdown()

    def _request(self, gpus: int = 1) -> dict[str, Any]:
        """Return what a task asks Ray for."""
        if self._errand.device == "cuda":
            return {"num_gpus": gpus, "num_cpus": 0}
        return {"num_cpus": self._cores}

    def _ask(self, nodes: Sequence[str], question: str, *arguments: Any) -> list[Any]:
        """Have nodes answer. Raises UsageError: as their executors, or because one is gone."""
        import ray

        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        asked = [
            ray.remote(ask)
            .options(**self._request(), scheduling_strategy=_tie(node))
            .remote(self._errand, question, *arguments)
            for node in nodes
        ]
        answers = []
        for node, answer in zip(nodes, asked, strict=True):
            try:
                answers.append(ray.get(answer))
            except ray.exceptions.RayError as error:
                raise UsageError(_explain(error, node, hosts[node]).reason) from error
        return answers


def _tie(node: str) -> Any:
    """Return the strategy that has a task run on a node, or on another once that one is gone."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=True)


def _explain(error: Exception, node: str, name: str) -> Outcome:
    """Return the outcome of a task that ended with an error of Ray's, on a node if it had begun."""
    import ray

    errors, on = ray.exceptions, f"on {name or 'the Ray cluster'}"
    why = clean(str(error).partition(". ")[0].partition("\n")[0])
    if isinstance(error, errors.TaskCancelledError):
        return Outcome(Status.LOST, f"the task {on} was cancelled")
    if isinstance(error, errors.RayTaskError):
        status = Status.UNSUPPORTED if isinstance(error.cause, UnsupportedError) else Status.ERROR
        told = isinstance(error.cause, (UsageError, UnsupportedError))
        return Outcome(status, f"{on}: {error.cause if told else clean(repr(error.cause))}")
    if isinstance(error, errors.OutOfMemoryError):
        return Outcome(Status.KILLED, f"{on}, by Ray, from lack of host memory: {why}")
    # a node that was to be taken away is said to be so until Ray has noticed that it is gone
    preempted = node in ray._private.state.state.get_draining_nodes()
    return Outcome(Status.LOST, f"{on}: {why}", preempted=preempted)


def _connect(address: str) -> None:
    """Join the cluster at ``HOST:PORT``, of which this machine must be a node, or start one."""
    if find_spec("ray") is None:
        mend = describe_install(["ray"])
        raise UsageError(f"--executor ray: ray is not installed for {sys.executable}; {mend}")
    if address.startswith("ray://"):
        raise UsageError(
            f"--address {address}: the sweep must run on a node of the cluster; start it there, "
            "with --address HOST:6379"
        )
    import ray

    own = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    # Ray prints the last lines of a lost node's log into the tables on standard output
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address == LOCAL:
            os.environ.update(_SETTINGS)
        elif address != AUTO:  # where nothing listens Ray tries for minutes, verbosely
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
        ray.init(address, namespace="bench", **quiet, **(own if address == LOCAL else {}))
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        why = clean(next(iter(str(error).splitlines()), type(error).__name__))
        raise UsageError(
            f"--executor ray: no local cluster can be started ({why}); see `ray start --help`"
            if address == LOCAL
            else f"--address {address}: no Ray cluster can be joined there ({why}); start one with "
            "`ray start --head` there and `ray start --address` here, and set RAY_AUTH_MODE=token "
            "if it demands a token"
        ) from error
