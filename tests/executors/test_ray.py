"""Lanes on a Ray cluster: three nodes of this machine, whose GPUs are pretended.

Workers are real; most are ended while they start, which is when a test has seen enough.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from pytest_for_tests import Patch
from workers_for_tests import gone, is_server, is_worker

from bench.case import Case
from bench.environment.source import hash_code
from bench.errors import UnsupportedError, UsageError
from bench.executors import ALL, Event, Images, Job, Lane, Settings, ShortageError
from bench.executors.ray import executor as executors
from bench.executors.ray.caretaker import MARK, end_marked, find_marked
from bench.executors.ray.cluster import Cluster
from bench.executors.ray.executor import Node, RayExecutor, RemoteStation, refuse
from bench.executors.ray.station import Place, Report, Station
from bench.executors.subprocess import SubprocessExecutor
from bench.gpu.cards import Card
from bench.record import Outcome, Status
from bench.worker.messages import PhaseEntered

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0  # for what is done in a second or two where nothing else runs
TESTS = ROOT / "tests"
TINY = Case(device="cpu", model="models_for_tests:good", dataset="synthetic", batch_size=8, steps=2)
LONG = replace(TINY, steps=None)


def wait_for(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """What ``what`` returns, once that is true."""
    until = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.1)
    return found


class Nodes:
    """A cluster of three nodes of this machine, one with two pretended GPUs; and its lanes."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster as Pretended

        self._folder = folder
        Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray notes a cluster's address, made by none
        head = {"num_gpus": 1, "include_dashboard": False, "temp_dir": folder}
        self.cluster = Pretended(initialize_head=True, head_node_args=head)
        self.others = [self.add(2), self.add(1)]
        self.executor = RayExecutor(
            # of a warm one each test would wait for a server that imports torch
            Settings(timeout_s=120, address=self.cluster.address, cold=True)
        )
        self.first = list(self.executor.open_lanes("cuda"))
        self.images = self.executor.prepare(self.first[0], Images("synthetic"))

    def add(self, gpus: int) -> Any:
        return self.cluster.add_node(num_gpus=gpus, object_store_memory=80 * 2**20)

    def join(self) -> list[Lane]:
        return list(self.executor.join_lanes())

    def lane_on(self, node: Any) -> Lane:
        """A lane of a node; which of them has which name is Ray's choice."""
        stations = self.executor._open.values()
        return next(station.lane for station in stations if station.node.id == node.node_id)

    def job(self, lane: Lane, case: Case = LONG, **values: Any) -> Job:
        return Job(case, folder=self.images.folder, lane=lane, **values)

    def workers(self) -> list[int]:
        """The processes of running cases."""
        found = []
        for pid in find_marked(self._folder):
            try:
                if is_worker(psutil.Process(pid)):
                    found.append(pid)
            except psutil.Error:
                continue
        return found

    def station(self, worker: int) -> int:
        """The process of the actor that started a worker, or the server of it."""
        parent = psutil.Process(worker).parent()
        return parent.ppid() if is_server(parent) else parent.pid


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = f"/tmp/bench-test-{os.getpid()}"  # a socket's path has 107 characters at most
    before = dict(os.environ)
    os.environ |= {MARK: folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    try:
        nodes = Nodes(folder)
        yield nodes
        nodes.executor.close()
        nodes.cluster.shutdown()
        wait_for(lambda: not nodes.workers())
    finally:
        os.environ.clear()
        os.environ |= before
        shutil.rmtree(folder, ignore_errors=True)


class Running:
    """A case that runs in a thread of its own, as one of a sweep does."""

    def __init__(self, nodes: Nodes, lane: Lane) -> None:
        self.stopped = False
        self.outcome: Outcome | None = None
        before = set(nodes.workers())

        def run() -> None:
            self.outcome = nodes.executor.run(
                nodes.job(lane), lambda event: None, lambda: self.stopped
            )

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self.worker = min(wait_for(lambda: set(nodes.workers()) - before))

    def end(self) -> Outcome:
        self._thread.join(PATIENCE_S)
        assert self.outcome is not None, "the run never ended"
        return self.outcome


@pytest.mark.slow
def test_a_lane_for_each_gpu_of_each_node_and_those_of_one_node_together(nodes: Nodes) -> None:
    hosts = [lane.host for lane in nodes.first]
    assert len({lane.name for lane in nodes.first}) == 4, "all names differ"
    assert sorted(hosts.count(host) for host in set(hosts)) == [1, 1, 2]
    assert hosts == sorted(hosts, key=hosts.index), "lanes of a node stand together"
    assert not nodes.join(), "nothing came since"
    pair = next(lane for lane in nodes.first if hosts.count(lane.host) == 2)
    single = next(lane for lane in nodes.first if hosts.count(lane.host) == 1)
    assert nodes.executor.gather(pair, "cuda", 2).name == pair.name
    assert nodes.executor.gather(single, "cuda", 1) == single
    assert nodes.executor.gather(single, "cuda", 2).host == pair.host, "that node has them"
    with pytest.raises(UnsupportedError, match=r"3 GPUs of one kind.* has more than 2$"):
        nodes.executor.gather(pair, "cuda", 3)


def test_a_case_runs_as_it_does_locally(nodes: Nodes, tmp_path: Path) -> None:
    """The same losses to the bit; its events, its log and its trace come from where it ran."""
    case = replace(TINY, profile=True)
    events: list[Event] = []
    job = nodes.job(nodes.first[0], case, log=tmp_path / "log", trace=tmp_path / "trace.json.gz")
    here = replace(job, lane=Lane(), log=None, trace=None)
    outcome = nodes.executor.run(job, events.append, lambda: False)
    alone = SubprocessExecutor(Settings()).run(here, lambda event: None, lambda: False)
    assert (outcome.status, alone.status) == (Status.OK, Status.OK), outcome.reason
    assert [step.loss for step in outcome.steps] == [step.loss for step in alone.steps]
    phases = [event.phase for event in events if isinstance(event, PhaseEntered)]
    assert phases == ["warmup", "epoch", "evaluation"]
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_a_killed_worker_is_killed_not_lost(nodes: Nodes) -> None:
    running = Running(nodes, nodes.first[0])
    os.kill(running.worker, signal.SIGKILL)
    assert running.end().status is Status.KILLED


def test_a_killed_actor_is_lost_and_its_lane_comes_back(nodes: Nodes) -> None:
    lane = nodes.first[0]
    running = Running(nodes, lane)
    os.kill(nodes.station(running.worker), signal.SIGKILL)
    outcome = running.end()
    assert (outcome.status, outcome.preempted) == (Status.LOST, False)
    assert outcome.reason.startswith(f"the lane's process on {lane.host} ended: ")
    assert len(outcome.reason.splitlines()) == 1
    assert gone([running.worker], PATIENCE_S)
    assert nodes.executor.run(nodes.job(lane), print, lambda: False).status is Status.LOST
    assert lane in wait_for(nodes.join)


def test_a_cancelled_case_is_interrupted_and_its_lane_goes_on_until_it_is_gone(
    nodes: Nodes,
) -> None:
    """An idle lane that is gone is not dealt to."""
    lane = nodes.first[0]
    for _ in range(2):
        running = Running(nodes, lane)
        station = nodes.station(running.worker)
        running.stopped = True
        assert running.end().status is Status.INTERRUPTED
        assert gone([running.worker], PATIENCE_S)
        assert not nodes.executor.lose_lanes()
    os.kill(station, signal.SIGKILL)
    assert wait_for(nodes.executor.lose_lanes) == [lane]
    assert wait_for(nodes.join) == [lane]


def test_a_silent_actor_is_lost(nodes: Nodes, monkeypatch: Patch) -> None:
    """Ray does not notice one that is stopped. A sweep waits a minute; here 3 s."""
    lane = nodes.first[0]
    running = Running(nodes, lane)
    station = nodes.station(running.worker)
    monkeypatch.setattr(executors, "_SILENT_S", 3.0)
    os.kill(station, signal.SIGSTOP)
    outcome = running.end()
    assert outcome.status is Status.LOST
    assert "said nothing" in outcome.reason
    monkeypatch.undo()
    assert gone([station, running.worker], PATIENCE_S)
    assert lane in wait_for(nodes.join)


def test_errors_of_a_node_are_one_line(nodes: Nodes, tmp_path: Path) -> None:
    lane = nodes.first[0]
    (tmp_path / "data").touch()
    with pytest.raises(UsageError, match=r"--data-dir .* is a file") as error:
        nodes.executor.prepare(lane, Images("cifar10", tmp_path / "data"))
    assert "\n" not in str(error.value)
    kept = nodes.job(lane, checkpoints=Path("/nowhere/checkpoints/run"))
    outcome = nodes.executor.run(kept, print, lambda: False)
    assert outcome.status is Status.UNSUPPORTED
    assert "file system that all nodes share" in outcome.reason


def test_a_lost_node_and_one_that_joins_late(nodes: Nodes) -> None:
    node = nodes.others.pop()
    lane = nodes.lane_on(node)
    running = Running(nodes, lane)
    nodes.cluster.remove_node(node, allow_graceful=False)
    outcome = running.end()
    assert (outcome.status, outcome.preempted) == (Status.LOST, False)
    assert f"{lane.host} went away" in outcome.reason
    assert gone([running.worker], PATIENCE_S)
    assert not nodes.join()
    nodes.others.append(nodes.add(1))
    assert wait_for(nodes.join) == [lane], "its name is free again"


def test_a_machine_that_was_taken_away_is_preempted(nodes: Nodes) -> None:
    from ray._raylet import GcsClient

    node = nodes.others.pop()
    running = Running(nodes, nodes.lane_on(node))
    preemption, soon_ms = 2, int((time.time() + 1) * 1000)
    gcs = GcsClient(address=nodes.cluster.address)
    assert gcs.drain_node(node.node_id, preemption, "spot", soon_ms)[0]
    time.sleep(1.5)
    nodes.cluster.remove_node(node, allow_graceful=False)
    outcome = running.end()
    assert (outcome.status, outcome.preempted) == (Status.LOST, True)
    assert outcome.reason.endswith("was taken away")
    assert gone([running.worker], PATIENCE_S)


DRIVER = """
import sys, time
from bench.executors import Settings
from bench.executors.ray.executor import RayExecutor
executor = RayExecutor(Settings())
lanes = executor.open_lanes("cpu")
print(executor._cluster.folder, flush=True)
sys.path.insert(0, sys.argv[1])
from test_ray import LONG
from bench.executors import Images, Job
folder = executor.prepare(lanes[0], Images("synthetic")).folder
executor.run(Job(LONG, folder=folder, lane=lanes[0]), print, lambda: False)
"""


def test_nothing_is_left_of_a_local_cluster_whose_driver_is_killed() -> None:
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        folder = driver.stdout.readline().strip()

        def has_worker() -> bool:
            lines = [Path(f"/proc/{pid}/cmdline") for pid in find_marked(folder)]
            return any(b"bench.worker" in line.read_bytes() for line in lines if line.exists())

        wait_for(has_worker)
        driver.kill()
    wait_for(lambda: not list(find_marked(folder)))
    wait_for(lambda: not Path(folder).exists())


@pytest.fixture
def unjoined(monkeypatch: Patch) -> RayExecutor:
    """An executor whose lanes, and the answers of their stations, are made up.

    It joins no cluster either: for an answer of one that has ended `ray.kill` waits for minutes.
    """
    import ray

    monkeypatch.setattr(ray, "kill", lambda actor: None)
    executor = RayExecutor.__new__(RayExecutor)
    executor._open, executor._together, executor._gone, executor._busy = {}, {}, [], set()
    executor._lock, executor._most = threading.Lock(), ALL
    monkeypatch.setattr(
        executor, "_list_nodes", lambda: [station.node for station in executor._open.values()]
    )
    return executor


def open_station(
    executor: RayExecutor, label: str, number: int, gpu: str = "A100", gpus: int = 2
) -> RemoteStation:
    card = Card(f"GPU-{label}-{number}", gpu, number, 80 * 2**30)
    station = RemoteStation(None, Node(label, label, 8.0, gpus), None, None, card)
    station.lane = Lane(f"{label}-gpu{number}", (card.uuid,), host=label)
    executor._enter(station)
    return station


def test_gpus_that_were_there_are_short_and_those_that_never_were_unsupported(
    unjoined: RayExecutor,
) -> None:
    """What is unsupported is not tried again."""
    first, second = (open_station(unjoined, "node", number, gpus=3) for number in range(2))
    other = open_station(unjoined, "node", 2, gpu="T4", gpus=3)
    wide = unjoined.gather(first.lane, "cuda", 2)
    assert wide.gpus == first.lane.gpus + second.lane.gpus
    unjoined._lose(second)
    with pytest.raises(ShortageError, match=r"takes 2 GPUs .*; one node has or had 2, and "):
        unjoined.gather(first.lane, "cuda", 2)
    with pytest.raises(ShortageError, match="lane node-gpu1 is gone"):
        unjoined.gather(second.lane, "cuda", 2)
    with pytest.raises(UnsupportedError, match=r"no node of the cluster has more than 2$"):
        unjoined.gather(first.lane, "cuda", 3)
    open_station(unjoined, "node", 1, gpus=3)
    with pytest.raises(UnsupportedError, match=r"no node of the cluster has more than 1$"):
        unjoined.gather(other.lane, "cuda", 2)


def test_gpus_that_were_not_there_when_the_sweep_started_are_short(unjoined: RayExecutor) -> None:
    """One is down or in use, and a sweep that is started again knows nothing of it but from Ray."""
    first = open_station(unjoined, "node", 0)
    with pytest.raises(ShortageError, match=r"takes 2 GPUs .*; one node has or had 2, and "):
        unjoined.gather(first.lane, "cuda", 2)
    with pytest.raises(UnsupportedError, match=r"no node of the cluster has more than 2$"):
        unjoined.gather(first.lane, "cuda", 3)
    unjoined._most = 1
    with pytest.raises(UnsupportedError, match=r"no node of the cluster has more than 1$"):
        unjoined.gather(first.lane, "cuda", 2)


def ask_one_that_fails(executor: RayExecutor, monkeypatch: Patch, fault: Exception) -> None:
    station = open_station(executor, "node", 0)
    station.actor = MagicMock()
    monkeypatch.setattr("ray.get", MagicMock(side_effect=fault))
    executor.gather(station.lane, "cpu", 2)


def test_a_station_that_is_gone_as_it_is_asked_is_a_lost_lane(
    unjoined: RayExecutor, monkeypatch: Patch
) -> None:
    """On a CPU a station says which cores a wide case takes; the sweep goes on without it."""
    from ray.exceptions import RayActorError

    with pytest.raises(ShortageError, match=r"^lane node-gpu0 was lost: "):
        ask_one_that_fails(unjoined, monkeypatch, RayActorError())
    assert [lane.name for lane in unjoined.lose_lanes()] == ["node-gpu0"], "is dealt nothing more"
    assert not unjoined.lose_lanes()


def test_a_station_that_fails_as_it_is_asked_is_not_gone(
    unjoined: RayExecutor, monkeypatch: Patch
) -> None:
    """A fault of the harness is said, and not waited for."""
    from ray.exceptions import RayTaskError

    fault = RayTaskError("ask", "a traceback", KeyError(0))
    with pytest.raises(UsageError, match=r"^lane node-gpu0: KeyError\(0\)$"):
        ask_one_that_fails(unjoined, monkeypatch, fault)
    assert unjoined._open
    assert not unjoined._gone


def test_the_caretaker_ends_what_is_the_clusters_and_nothing_of_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "log").touch()
    ours = {MARK: str(folder)}
    commands = {
        "marked": ("exec sleep 600", ours),
        "agent": ("exec -a ray::Agent sleep 600 > agent.log", {}),
        "reader": ("exec tail -f log > /dev/null", {}),
        "agent that reads": ("exec -a ray::Agent sleep 600 < log", {}),
        "writer": ("exec sleep 600 > note", {}),
        "agent of another": ("exec -a ray::Agent sleep 600 > /dev/null", {MARK: "/elsewhere"}),
    }
    started = {
        name: subprocess.Popen(["bash", "-c", command], cwd=folder, env={**os.environ, **variables})
        for name, (command, variables) in commands.items()
    }
    try:
        for process in started.values():
            wait_for(lambda pid=process.pid: psutil.Process(pid).name() in ("sleep", "tail"))
        found = {*find_marked(str(folder))}
        assert {n for n, p in started.items() if p.pid in found} == {"marked", "agent"}
        end_marked(str(folder))
        assert [started[name].wait(60) for name in ("marked", "agent")] == [-signal.SIGKILL] * 2
        left = [p.poll() for n, p in started.items() if n not in ("marked", "agent")]
        assert left == [None] * 4
        assert not folder.exists()
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_what_cannot_be_measured_on_is_refused() -> None:
    assert refuse(Place(None, 0, hash_code())) == ""
    assert "RAY_worker_niceness=0" in refuse(Place(None, 15, hash_code()))
    used = Place(None, 0, hash_code(), "python (pid 7)")
    assert "python (pid 7)" in refuse(used)
    assert refuse(used, allow_shared=True) == ""
    other = refuse(Place(None, 0, "0123456789ab"))
    assert "0123456789ab" in other
    assert hash_code() in other


@pytest.mark.parametrize("address", ["ray://localhost:10001", "nowhere", "localhost:1"])
def test_addresses_that_cannot_be_joined(address: str) -> None:
    with pytest.raises(UsageError, match=f"^--address {address}: ") as error:
        Cluster(address)
    assert "\n" not in str(error.value)


def test_the_variables_of_the_sweep_hold_on_every_node(monkeypatch: Patch, tmp_path: Path) -> None:
    """Ray sets OMP_NUM_THREADS=1, which workers would inherit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.chdir(ROOT)
    variables = {"NVIDIA_TF32_OVERRIDE": "1"}
    station = Station(RayExecutor.stations, Settings(), str(tmp_path), variables)
    assert Path.cwd() == tmp_path
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ
    assert station.describe().niceness <= os.getpriority(os.PRIO_PROCESS, 0)


class Talker:
    """An executor that says something, waits to be stopped, and says why it ended."""

    def __init__(self, settings: Settings) -> None: ...

    def run(
        self, job: Job, on_event: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> Outcome:
        job.log.write_text("said\n")
        on_event(PhaseEntered("warmup"))
        while not stopping():
            time.sleep(0.01)
        return Outcome(Status.INTERRUPTED, threading.current_thread().name)


def test_a_station_reports_as_the_case_goes_on(monkeypatch: Patch) -> None:
    monkeypatch.setattr("bench.executors.ray.station.HEARTBEAT_S", 0.4)
    for name in ("OMP_NUM_THREADS", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(name, "1")  # put back after the test
    station = Station(f"{__name__}:Talker", Settings(), ".", {})
    threads = set()
    for number in range(2):
        reports = station.run(number, Job(TINY))
        seen = [next(reports)]
        while not seen[-1].log:
            seen.append(next(reports))
        assert [e for report in seen for e in report.events] == [PhaseEntered("warmup")]
        assert b"".join(report.log for report in seen) == b"said\n"
        assert next(reports) == Report(), "a sign of life"
        station.stop(number)
        *_, last = reports
        assert last.outcome.status is Status.INTERRUPTED
        threads.add(last.outcome.reason)
    assert len(threads) == 1, "a worker would die with the thread that started it"
