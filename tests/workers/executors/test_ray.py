"""Cases on a Ray cluster: two nodes of this machine, whose GPUs are pretended.

Workers are real; most are ended while they start, which is when a test has seen enough.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from bench.base.errors import UnsupportedError, UsageError
from bench.machine.host import hash_code
from bench.schema.case import Case
from bench.schema.record import Environment, Outcome, Status
from bench.workers.examination import Platform
from bench.workers.executors import ImageRequest, Settings
from bench.workers.executors import ray as room
from bench.workers.executors.ray import Errand, RayExecutor
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Job, Lane
from tests.planted.records import ROOT
from tests.pytest_for_tests import Patch
from tests.workers_for_tests import gone, is_server, is_worker

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

TINY = Case(device="cpu", model="models_for_tests:good", dataset="synthetic", batch_size=8, steps=2)
LONG = replace(TINY, steps=None)
HOST = os.uname().nodename


MARK = "BENCH_TEST_CLUSTER"
"""Environment variable of all processes of the cluster: its folder."""

PATIENCE_S = 240.0  # for what is done in a second or two where nothing else runs


def wait_for(what: Callable[[], Any]) -> Any:
    """What ``what`` returns, once that is true."""
    until = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.1)
    return found


class Nodes:
    """A cluster of two nodes of this machine, the first with two pretended GPUs."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self._mark = os.fsencode(f"{MARK}={folder}")
        Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray notes a cluster's address, made by none
        head = {"num_gpus": 2, "include_dashboard": False, "temp_dir": folder}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.cluster.add_node(num_gpus=1, object_store_memory=80 * 2**20)
        self.executor = RayExecutor(
            # of a warm one each test would wait for a server that imports torch
            Settings(timeout_s=120, address=self.cluster.address, cold=True)
        )
        self.lanes = self.executor.open_lanes("cuda")
        self.images = self.executor.prepare(self.lanes[0], ImageRequest("synthetic"))

    def job(self, case: Case = LONG, **values: Any) -> Job:
        return Job(case, folder=self.images.folder, lane=self.lanes[0], **values)

    def workers(self) -> list[int]:
        """The processes of running cases."""
        found = []
        for process in filter(is_worker, psutil.process_iter()):
            with suppress(OSError):
                variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                found += [process.pid] if self._mark in variables else []
        return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    folder = f"/tmp/bench-test-{os.getpid()}"  # a socket's path has 107 characters at most
    before = dict(os.environ)
    os.environ |= {MARK: folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    # else a node gives itself up where a busy machine takes more than 30 s to start its agents
    os.environ |= {"RAY_agent_register_timeout_ms": "240000"}
    try:
        nodes = Nodes(folder)
        yield nodes
        nodes.executor.close()
        nodes.cluster.shutdown()
        wait_for(lambda: not nodes.workers())
        # a DataLoader's worker that another file's test forks from this process would collect what
        # Ray leaves in circles, and die of it in gRPC
        gc.collect()
    finally:
        os.environ.clear()
        os.environ |= before
        shutil.rmtree(folder, ignore_errors=True)


class Running:
    """A case that runs in a thread of its own, as one of a sweep does."""

    def __init__(self, nodes: Nodes) -> None:
        self.stopped = False
        self.outcome: Outcome | None = None
        before, job = set(nodes.workers()), nodes.job()

        def run() -> None:
            self.outcome = nodes.executor.run(job, lambda event: None, lambda: self.stopped)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self.worker = min(wait_for(lambda: set(nodes.workers()) - before))
        server, _keeper, task, *_ = psutil.Process(self.worker).parents()
        assert is_server(server)
        self.task = task.pid  # the process of Ray's

    def end(self) -> Outcome:
        self._thread.join(PATIENCE_S)
        assert self.outcome is not None, "the run never ended"
        return self.outcome


def test_a_lane_for_each_gpu_and_those_of_one_node_together(nodes: Nodes) -> None:
    assert [lane.name for lane in nodes.lanes] == ["ray0", "ray1", "ray2"]
    assert nodes.executor.gather(nodes.lanes[0], "cuda", 2) == nodes.lanes[0]
    with pytest.raises(UnsupportedError, match=r"3 GPUs of one machine; .* had more than 2$"):
        nodes.executor.gather(nodes.lanes[0], "cuda", 3)


def test_a_case_runs_as_it_does_locally(nodes: Nodes, tmp_path: Path) -> None:
    """The same losses to the bit; its log and its trace come from where it ran."""
    case = replace(TINY, profile=True)
    job = nodes.job(case, log=tmp_path / "log", trace=tmp_path / "trace.json.gz")
    here = replace(job, lane=Lane(), log=None, trace=None)
    outcome = nodes.executor.run(job, lambda event: None, lambda: False)
    alone = SubprocessExecutor(Settings()).run(here, lambda event: None, lambda: False)
    assert (outcome.status, alone.status) == (Status.OK, Status.OK), outcome.reason
    assert [step.loss for step in outcome.steps] == [step.loss for step in alone.steps]
    assert outcome.place.lane == HOST
    assert outcome.place.environment.host
    assert outcome.place.environment.torch
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize("how", ["worker", "task", "cancelled"])
def test_what_ends_a_running_case_is_its_outcome(nodes: Nodes, how: str) -> None:
    running = Running(nodes)
    running.stopped = how == "cancelled"
    if how != "cancelled":
        os.kill(vars(running)[how], signal.SIGKILL)
    outcome = running.end()
    reason = "on the Ray cluster: The worker died unexpectedly while executing this task"
    ends = {"worker": Status.KILLED, "task": Status.LOST, "cancelled": Status.INTERRUPTED}
    assert outcome.status is ends[how]
    assert (outcome.reason == reason) == (how == "task")
    assert gone([running.worker], PATIENCE_S)


def test_a_process_with_a_gpu_stays_for_the_next_case(nodes: Nodes) -> None:
    """With its server of workers; and it looks again at what it has, if Ray gives it another."""

    def tell() -> tuple[int, str]:
        return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]

    import ray

    task = nodes.executor._submit(tell)
    pids = [ray.get(task.remote())[0] for _ in range(6)]
    assert len({*pids}) <= 2, "as many as nodes"


def test_what_a_process_found_is_of_the_gpus_that_it_had(monkeypatch: Patch) -> None:
    executor = Mock(settings=Settings())
    looked = executor.examine
    looked.return_value.use.side_effect = lambda devices: {
        name: Platform(Environment(gpu_uuid=os.environ["CUDA_VISIBLE_DEVICES"])) for name in devices
    }
    for visible in ("0", "1", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        place = room._look(executor, "cuda", 0.0, visible)
        assert place.environment.gpu_uuid == visible
    assert looked.call_count == 2


def test_errors_of_a_node_are_one_line(nodes: Nodes, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(
        UsageError, match=r"^on the Ray cluster: .*--data-dir .* is a file"
    ) as error:
        nodes.executor.prepare(nodes.lanes[0], ImageRequest("cifar10", tmp_path / "data"))
    assert "\n" not in str(error.value)
    kept = nodes.job(checkpoints=Path("/nowhere/checkpoints/run"))
    outcome = nodes.executor.run(kept, print, lambda: False)
    assert outcome.status is Status.UNSUPPORTED
    assert "file system that all nodes share" in outcome.reason
    images, _ = nodes.executor._images[nodes.images.folder]
    monkeypatch.setitem(nodes.executor._images, nodes.images.folder, (images, "f00d"))
    outcome = nodes.executor.run(nodes.job(), print, lambda: False)
    assert outcome.status is Status.ERROR
    assert "give all machines the same images" in outcome.reason
    monkeypatch.setattr(nodes.executor, "_errand", replace(nodes.executor._errand, code="f00d"))
    with pytest.raises(UsageError, match=r"^on the Ray cluster: its code of this harness is "):
        nodes.executor.examine(nodes.lanes[0], ["cpu"], [], 60)


@pytest.mark.parametrize("address", ["ray://localhost:10001", "nowhere", "localhost:1"])
def test_addresses_that_cannot_be_joined(address: str) -> None:
    with pytest.raises(UsageError, match=f"^--executor ray: {address} ") as error:
        RayExecutor(Settings(address=address))
    assert re.fullmatch(
        f"--executor ray: {address} is no Ray cluster to be joined or started from here "
        r"\([^\n]+\); run `ray start --head` on one of its machines and `ray start --address "
        "HOST:PORT` on this one, and set RAY_AUTH_MODE=token if it demands a token",
        str(error.value),
    )


ERRAND = Errand(Settings(), str(ROOT), {}, hash_code(), "cpu", 0.0)


def test_a_node_has_the_sweep_s_variables_or_is_refused(monkeypatch: Patch, tmp_path: Path) -> None:
    """Ray sets OMP_NUM_THREADS=1, which workers would inherit, and lowers their priority."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.chdir(ROOT)
    replace(ERRAND, folder=str(tmp_path), variables={"NVIDIA_TF32_OVERRIDE": "1"}).enter()
    assert Path.cwd() == tmp_path
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setattr(os, "setpriority", Mock(side_effect=PermissionError))
    monkeypatch.setattr(os, "getpriority", lambda *_: 15)
    with pytest.raises(UsageError, match="RAY_worker_niceness=0"):
        ERRAND.enter()


def test_lack_of_host_memory_is_no_lack_of_the_gpu_s() -> None:
    """Ray calls both by the name that torch has for the second."""
    from ray.exceptions import OutOfMemoryError

    outcome = room._explain(OutOfMemoryError("low on memory. See more"))
    assert outcome.status is Status.KILLED
    assert outcome.reason == "on the Ray cluster, by Ray, from lack of host memory: low on memory"
