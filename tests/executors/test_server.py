"""Workers that are forked from a server: what they share with it, and what they must not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import models_for_tests
import psutil
import pytest
from workers_for_tests import find_workers, gone, is_server

from bench.case import Case
from bench.data import DatasetInfo, prepare
from bench.environment import ProcessAnswer
from bench.executors import Event, Job, Lane, Settings
from bench.executors import subprocess as room
from bench.executors.server import Servers, lend_server
from bench.executors.subprocess import SubprocessExecutor
from bench.processes import LENT, find_lender
from bench.record import BESIDE, Measurement, Outcome, Status
from bench.store.reader import read_records
from bench.sweep import __main__ as sweep
from bench.worker.messages import PhaseEntered

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")

TESTS = Path(models_for_tests.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def workers_find_the_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(room, "Servers", Servers)  # of each executor, as they are in a sweep
        yield


@pytest.fixture(scope="module")
def data() -> DatasetInfo:
    return prepare("synthetic", data_dir=None)


@pytest.fixture
def executor() -> Iterator[SubprocessExecutor]:
    executor = SubprocessExecutor(Settings(timeout_s=300))
    yield executor
    executor.close()


class Run:
    """A case, the worker that ran it, and the process that had started that."""

    def __init__(
        self,
        executor: SubprocessExecutor,
        data: DatasetInfo,
        model: str,
        cores: tuple[int, ...] = (),
    ) -> None:
        self.worker, self.parent = 0, 0
        case = Case(
            model=f"models_for_tests:{model}", dataset="synthetic", batch_size=32, device="cpu",
            steps=3,
        )  # fmt: skip
        job = Job(case, data.folder, lane=Lane("", ("GPU-made-up",), cores))
        self.outcome = executor.run(job, self._see, lambda: False)
        assert self.outcome.measurement.notes is None

    def _see(self, event: Event) -> None:
        if isinstance(event, PhaseEntered) and event.phase == "warmup":
            (worker,) = find_workers()
            self.worker, self.parent = worker.pid, worker.ppid()

    @property
    def losses(self) -> list[float | None]:
        assert self.outcome.status is Status.OK, self.outcome.reason
        return [step.loss for step in self.outcome.steps]


# ------------------------------------------------------------------------------- one after another


@pytest.mark.slow
def test_what_a_worker_spoils_the_next_one_has_whole(
    executor: SubprocessExecutor, data: DatasetInfo
) -> None:
    """Settings, functions, limits, threads, the heap; or it dies of a signal: bit for bit."""
    first = Run(executor, data, "good")
    spoilt = Run(executor, data, "vandalizes")
    assert spoilt.outcome.reason == "the worker crashed with SIGABRT"
    killed = Run(executor, data, "kills_itself")
    assert killed.outcome.status is Status.KILLED
    last = Run(executor, data, "good")
    assert {spoilt.parent, killed.parent, last.parent} == {first.parent}, "one server forked all"
    assert is_server(psutil.Process(first.parent))
    cold = SubprocessExecutor(Settings(timeout_s=300, cold=True))
    fresh = Run(cold, data, "good")
    assert fresh.parent == os.getpid()
    assert first.losses == last.losses == fresh.losses
    assert len({first.worker, spoilt.worker, killed.worker, last.worker}) == 4


@pytest.mark.slow
def test_what_is_asked_of_a_machine_is_answered_by_a_fork(
    executor: SubprocessExecutor, data: DatasetInfo
) -> None:
    """As a new Python answers it, which a cold executor asks."""
    parents = []

    def look(answer: ProcessAnswer, pid: int) -> None:
        parents.append(psutil.Process(pid).ppid())

    names = ["dpn-small", *(f"models_for_tests:{n}" for n in ("good", "not_a_model", "missing"))]
    cold = SubprocessExecutor(Settings(timeout_s=300, cold=True))
    warm, fresh = (one.examine(Lane(), ["cpu"], names, 300, look) for one in (executor, cold))
    assert warm == fresh
    assert "returned str" in str(warm.models["models_for_tests:not_a_model"])
    assert parents[1] == os.getpid()
    assert parents[0] == Run(executor, data, "good").parent, "one server forked both"


@pytest.mark.slow
def test_a_warm_worker_has_all_that_a_cold_one_has(
    data: DatasetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process: all but random numbers, which no seed of the case fixes, are the same."""
    monkeypatch.delenv("OMP_NUM_THREADS")  # the threads of as many cores as the lane has
    core = min(os.sched_getaffinity(0))
    facts = []
    for cold, cores in ((False, ()), (True, ()), (False, (core,)), (True, (core,))):
        executor = SubprocessExecutor(Settings(timeout_s=300, cold=cold))
        drawn = []
        for number in range(2):
            file = tmp_path / f"{cold}-{len(cores)}-{number}"
            monkeypatch.setenv(models_for_tests.FACTS, str(file))
            assert Run(executor, data, "tells", cores).losses
            told = json.loads(file.read_text())
            drawn.append(told.pop("drawn"))
            facts.append(told)
        assert drawn[0] == drawn[1], "a case draws by its seed"
        executor.close()
    warm, _, cold_, _, pinned, _, pinned_cold, _ = facts
    assert facts[0] == facts[1]
    assert warm == cold_
    assert pinned == pinned_cold
    assert warm["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-made-up"
    assert pinned["cores"] == [core]
    assert pinned["threads"][0] == 1
    assert warm["leads"]


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_a_cold_sweep_has_the_rows_of_a_warm_one(tmp_path: Path) -> None:
    flags = (
        "--device cpu --dataset synthetic --precision fp32 bf16-amp --steps 3 --batch-size 16 "
        "--model models_for_tests:good --evaluate --repeats 1"
    )
    for name in ("--cold", "--timeout=3600"):
        assert sweep.main([*flags.split(), name, "--out", str(tmp_path / name)]) == 0
    cold, warm = (read_records(tmp_path / name) for name in ("--cold", "--timeout=3600"))
    timed = {
        f.name
        for f in fields(Measurement)
        if f.name.endswith("_s") or f.name.startswith(("step_time", "other_cores"))
    }
    names = {"record_id", "started_at", "finished_at", "session", "warmup_steps", "warmup_steady"}
    names.add("shared")  # by which row, and that has another name
    same = [c for c in cold if c not in timed | names and not c.endswith("process_bytes")]
    assert len(same) > 100
    assert {"train_loss", "test_accuracy", "arithmetic", "flop_per_image", "notes"} <= {*same}
    assert cold[same].equals(warm[same])
    assert (cold["shared"] == "").equals(warm["shared"] == "")
    # cold, each row imports; warm, none does
    assert warm["imports_s"].max() < cold["imports_s"].min()
    assert warm[[*BESIDE]].notna().all(axis=None)
    memory = warm["peak_process_bytes"].median() / cold["peak_process_bytes"].median()
    assert memory == pytest.approx(1, abs=0.02)


# ------------------------------------------------------------------------------------- the server


def test_servers_are_of_one_environment_each(
    executor: SubprocessExecutor, data: DatasetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch reads as it is imported makes another server; what is read late does not."""
    first = Run(executor, data, "good")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Run(executor, data, "good").parent == first.parent
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    other = Run(executor, data, "good")
    assert other.parent != first.parent
    assert is_server(psutil.Process(other.parent))
    # those of other tests of this process may be there yet
    assert not psutil.pid_exists(first.parent), "nobody asks the first any more"
    executor.close()
    assert not psutil.pid_exists(other.parent)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that every Python imports as it starts."""
    file = tmp_path / "sitecustomize.py"
    file.write_text("")
    paths = [str(tmp_path), str(TESTS.parent), str(TESTS)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return file


def test_a_server_is_replaced_when_what_it_imported_changes(
    executor: SubprocessExecutor, data: DatasetInfo, site: Path
) -> None:
    first = Run(executor, data, "good")
    assert Run(executor, data, "good").parent == first.parent
    site.write_text("# another version\n")
    second = Run(executor, data, "good")
    assert second.parent != first.parent
    assert is_server(psutil.Process(second.parent))


@pytest.mark.parametrize(
    ("spoils", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True)"
         ".start()\n", "it has 2 threads"),
        ("import bench.worker.server as s\ns._DEVICES = ('/dev/zero',)\nkept = open('/dev/zero')\n",
         "it has opened /dev/zero"),
        ("import sys\nif 'serve' in sys.argv: raise SystemExit('no luck')\n",
         "it ended: SystemExit: no luck"),
    ],
)  # fmt: skip
def test_what_is_not_fit_to_fork_is_not_forked_and_the_row_says_so(
    executor: SubprocessExecutor, data: DatasetInfo, site: Path, spoils: str, why: str
) -> None:
    """A thread, an open GPU, or no server at all: then each worker is a new Python."""
    site.write_text(spoils)
    case = Case(model="models_for_tests:good", dataset="synthetic", device="cpu", steps=1)
    outcome = executor.run(Job(case, data.folder), lambda event: None, lambda: False)
    assert outcome.status is Status.OK
    said = f"the worker was started cold, because of its server: {why}"
    assert outcome.measurement.notes == said


BUSY = """
import errno, os
fork, calls = os.fork, []
def refuse_once():
    calls.append(None)
    if len(calls) == 2:  # the first ends threads
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = refuse_once
"""


def test_a_host_without_a_process_to_spare_is_asked_again(
    executor: SubprocessExecutor, data: DatasetInfo, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_BACK_OFF_S", 0.01)
    site.write_text(BUSY)
    first = Run(executor, data, "good")
    assert (first.outcome.status, first.outcome.retries) == (Status.OK, 1)
    assert Run(executor, data, "good").parent == first.parent, "the server lives on"


ASKED = """
import torch
asked = []
torch.cuda._is_compiled = lambda: True  # as in a build for CUDA
torch.version.cuda = "13.0"
def tell(name):
    return lambda *_, **__: asked.append(name)
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device",
             "get_device_capability", "get_device_properties", "is_bf16_supported"):
    setattr(torch.cuda, name, tell(name))
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_getCurrentRawStream"):
    setattr(torch._C, name, tell(name))
from bench.worker import server
server.preload()
server._end_threads()
assert server._refuse(server._look_at_files()) == "", server._refuse(server._look_at_files())
print(asked)
"""


def test_nothing_that_the_server_imports_asks_anything_of_cuda() -> None:
    """Nor has it a thread, where libraries may have as many as there are cores."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_parent_imports_no_torch() -> None:
    said = "import sys, bench.executors.subprocess; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ------------------------------------------------------------------------------------------- lent


SLEEPING = """
import sys
from bench.case import Case
from bench.executors import Job, Settings
from bench.executors.subprocess import SubprocessExecutor

case = Case(model="models_for_tests:sleeps", dataset="synthetic", device="cpu", steps=3)
SubprocessExecutor(Settings()).run(Job(case, sys.argv[1]), print, lambda: False)
"""


@pytest.mark.slow
def test_a_lent_server_outlives_who_borrows_it_and_their_workers_do_not(
    tmp_path: Path, data: DatasetInfo
) -> None:
    pids, parents = tmp_path / "pids", set()
    environment = {**os.environ, models_for_tests.PIDS: str(pids)}
    with lend_server(environment, Path.cwd()) as lent:
        for _ in range(2):
            command = [sys.executable, "-c", SLEEPING, data.folder]
            with subprocess.Popen(command, env={**environment, **lent}) as process:
                while not pids.exists():
                    assert process.poll() is None
                    time.sleep(0.05)
                worker, child = map(int, pids.read_text().split())
                parents.add(psutil.Process(worker).ppid())
                process.kill()
            assert gone([worker])
            os.kill(child, signal.SIGKILL)
            pids.unlink()
        (server,) = parents
        assert psutil.Process(server).ppid() == os.getpid()
    assert not psutil.pid_exists(server)


LENDING = """
import os, time
from pathlib import Path
from bench.executors.server import lend_server
with lend_server(os.environ, Path.cwd()) as lent:
    print(*lent.values(), flush=True)
    time.sleep(3600)
"""


def test_a_killed_lender_leaves_nothing() -> None:
    command = [sys.executable, "-c", LENDING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdout is not None
        place = Path(lender.stdout.readline().split()[1])
        assert place.is_socket()
        servers = [child.pid for child in psutil.Process(lender.pid).children()]
        lender.kill()
    assert gone(servers, within_s=60)
    assert not place.parent.exists()


def test_a_lent_server_is_asked_where_it_is_of_the_same_surroundings(
    data: DatasetInfo, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> int:
        executor = SubprocessExecutor(Settings(timeout_s=300))
        found = Run(executor, data, "good").parent
        assert is_server(psutil.Process(found))
        executor.close()
        return found

    assert find_lender() is None
    with lend_server(os.environ, Path.cwd()) as lent:
        monkeypatch.setenv(LENT, lent[LENT])
        assert find_lender() == os.getpid()
        server = run()
        assert psutil.Process(server).ppid() == os.getpid()
        with monkeypatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "2")
            assert run() != server
        assert run() == server
        site.write_text("# another version\n")
        assert run() != server, "what it imported has changed"
    assert run() != server, "it has ended"


# --------------------------------------------------------------------------------------- its end


@pytest.mark.slow
def test_a_killed_server_takes_its_worker_along_and_is_replaced(
    executor: SubprocessExecutor, data: DatasetInfo
) -> None:
    killed: list[int] = []

    def kill(event: Event) -> None:
        if isinstance(event, PhaseEntered) and event.phase == "epoch":
            (worker,) = find_workers()
            killed.extend((worker.ppid(), worker.pid))
            os.kill(worker.ppid(), signal.SIGKILL)

    case = Case(model="models_for_tests:good", dataset="synthetic", device="cpu", steps=3)
    outcome: Outcome = executor.run(Job(case, data.folder), kill, lambda: False)
    assert (outcome.status, outcome.reason) == (Status.KILLED, "SIGKILL from outside the sweep")
    assert gone(killed)
    again = Run(executor, data, "good")
    assert again.losses
    assert again.parent not in killed


@pytest.mark.slow
def test_no_server_outlives_what_started_it(tmp_path: Path, data: DatasetInfo) -> None:
    """Nor one that is still importing, and has forked nothing yet."""
    pids = tmp_path / "pids"
    environment = {**os.environ, models_for_tests.PIDS: str(pids)}
    for early in (True, False):
        with subprocess.Popen(
            [sys.executable, "-c", SLEEPING, data.folder], env=environment
        ) as process:
            servers: list[psutil.Process] = []
            while not servers or not (early or pids.exists()):
                assert process.poll() is None
                children = psutil.Process(process.pid).children(recursive=True)
                servers = [child for child in children if _is_server(child)]
                time.sleep(0.05)
            process.kill()
        _, alive = psutil.wait_procs(servers, timeout=60)
        assert not alive
    _, child = map(int, pids.read_text().split())
    os.kill(child, signal.SIGKILL)  # nobody is left to end a group of its own


def _is_server(process: psutil.Process) -> bool:
    try:
        return is_server(process)
    except psutil.Error:
        return False
