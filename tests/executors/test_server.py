"""Workers that are forked from a server: what they share with it, and what they must not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import models_for_tests
import psutil
import pytest
from workers_for_tests import find_workers, gone, is_server

from bench.case import Case
from bench.data import DatasetInfo
from bench.environment.asking import ProcessAnswer
from bench.executors import Event, Job, Lane, Settings
from bench.executors import subprocess as room
from bench.executors.server import Process, Servers, lend_server
from bench.executors.subprocess import SubprocessExecutor
from bench.processes import LENT, find_lender
from bench.record import BESIDE, Measurement, Status
from bench.worker.messages import PhaseEntered, encode_names

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")

TESTS = Path(models_for_tests.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def servers_of_their_own() -> Iterator[None]:
    """Of each executor, as they are in a sweep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "Servers", Servers)
        yield


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
            steps=3, evaluate=True,
        )  # fmt: skip
        job = Job(case, data.folder, lane=Lane("", ("GPU-made-up",), cores))
        self.outcome = executor.run(job, self._see, lambda: False)
        self.losses = [step.loss for step in self.outcome.steps]
        assert self.outcome.measurement.notes is None

    def _see(self, event: Event) -> None:
        if isinstance(event, PhaseEntered) and event.phase == "warmup":
            (worker,) = find_workers()
            self.worker, self.parent = worker.pid, worker.ppid()


# ------------------------------------------------------------------------------- one after another

TIMED = "_s$|^step_time|^other_cores$|process_bytes$|^warmup_steps$|^warmup_steady$"
"""Columns that differ between two runs of a case."""


@pytest.mark.timeout(600)
def test_a_warm_worker_is_as_a_cold_one_whatever_was_run_before(
    data: DatasetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has as a process, all but random numbers that no seed of the case fixes; and, bit for
    bit, its losses, after one has spoilt settings, functions, limits, threads and the heap, and one
    has died of a signal. What is asked of a machine is answered alike too."""
    core = min(os.sched_getaffinity(0))
    warm, cold = (SubprocessExecutor(Settings(timeout_s=300, cold=c)) for c in (False, True))

    def tell(executor: SubprocessExecutor, *cores: int) -> tuple[Run, dict[str, Any]]:
        file = tmp_path / "facts"
        monkeypatch.setenv(models_for_tests.FACTS, str(file))
        run = Run(executor, data, "tells", cores)
        assert run.outcome.status is Status.OK, run.outcome.reason
        facts = json.loads(file.read_text())
        file.unlink()
        return run, facts

    first, facts = tell(warm)
    spoilt = Run(warm, data, "vandalizes")
    # of a broken heap, free() aborts, unless it was used before by one that trusts it
    crashes = [f"the worker crashed with {signal}" for signal in ("SIGABRT", "SIGSEGV")]
    assert spoilt.outcome.reason in [*crashes, "MemoryError"]
    killed = Run(warm, data, "kills_itself")
    assert killed.outcome.status is Status.KILLED
    last, again = tell(warm)
    assert again == facts, "and a case draws by its seed"
    parents: list[int] = []

    def look(answer: ProcessAnswer, pid: int) -> None:
        parents.append(psutil.Process(pid).ppid())

    names = ["dpn-small", *(f"models_for_tests:{n}" for n in ("good", "not_a_model", "missing"))]
    answers = [one.examine(Lane(), ["cpu"], names, 300, look=look) for one in (warm, cold)]
    assert answers[0] == answers[1]
    assert "returned str" in str(answers[0].models["models_for_tests:not_a_model"])
    assert {spoilt.parent, killed.parent, last.parent, parents[0]} == {first.parent}, "one server"
    assert is_server(psutil.Process(first.parent))
    assert len({first.worker, spoilt.worker, killed.worker, last.worker}) == 4

    fresh, facts_cold = tell(cold)
    assert fresh.parent == parents[1] == os.getpid()
    assert first.losses == last.losses == fresh.losses
    m, n = last.outcome.measurement, fresh.outcome.measurement
    same = [f.name for f in fields(Measurement) if not re.search(TIMED, f.name)]
    assert {"train_loss", "test_accuracy", "arithmetic", "flop_per_image", "notes"} <= {*same}
    assert [getattr(m, name) for name in same] == [getattr(n, name) for name in same]
    assert m.imports_s < n.imports_s, "which imports"
    assert None not in [getattr(m, name) for name in BESIDE]
    assert m.peak_process_bytes / n.peak_process_bytes == pytest.approx(1, abs=0.02)
    monkeypatch.delenv("OMP_NUM_THREADS")  # the threads of as many cores as the lane has
    pinned, pinned_cold = (tell(one, core)[1] for one in (warm, cold))
    for one, other in ((facts, facts_cold), (pinned, pinned_cold)):
        assert one.pop("drawn")
        assert other.pop("drawn")
        assert one == other
    assert facts["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-made-up"
    assert facts["leads"]
    assert pinned["cores"] == [core]
    assert pinned["threads"][0] == 1
    warm.close()


# ------------------------------------------------------------------------------------- the server

LIGHT = """
import sys, types
from bench.worker import server
server.MODULES = ()
cuda = types.SimpleNamespace(is_initialized=lambda: False)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
"""
"""Has a server import nothing of what takes it seconds, and need it not."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that every Python imports as it starts, servers among them."""
    file = tmp_path / "sitecustomize.py"
    file.write_text(LIGHT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(TESTS.parent)]))
    return file


@pytest.fixture
def servers(site: Path) -> Iterator[Servers]:
    servers = Servers(cold=False)
    yield servers
    servers.close()


class Fork:
    """A worker that has nothing to do, the process that had started it, and what was noted."""

    def __init__(self, servers: Servers) -> None:
        self.process: Process
        self.process, self.note, reader = servers.launch(dict(os.environ))
        self._answers = os.fdopen(reader)
        self.process.stdin.write(encode_names([]))
        self.process.stdin.flush()
        assert self._answers.readline()
        self.parent = psutil.Process(self.process.pid).ppid()

    def end(self) -> int:
        """Have it end; its return code."""
        self.process.stdin.close()
        self.process.stdout.close()
        self._answers.close()
        return self.process.wait()


def fork(servers: Servers) -> int:
    """The server that a worker is forked from."""
    forked = Fork(servers)
    assert (forked.end(), forked.note) == (0, "")
    assert is_server(psutil.Process(forked.parent))
    return forked.parent


def test_servers_are_of_one_environment_each(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch reads as it is imported makes another server; what is read late does not."""
    first = fork(servers)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert fork(servers) == first
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    other = fork(servers)
    assert other != first
    # those of other tests of this process may be there yet
    assert not psutil.pid_exists(first), "nobody asks the first any more"
    servers.close()
    assert not psutil.pid_exists(other)


def test_a_server_is_replaced_when_what_it_imported_changes(servers: Servers, site: Path) -> None:
    first = fork(servers)
    assert fork(servers) == first
    site.write_text(f"{LIGHT}# another version\n")
    assert fork(servers) != first


@pytest.mark.parametrize(
    ("spoils", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True)"
         ".start()\n", "it has 2 threads"),
        ("server._DEVICES = ('/dev/zero',)\nkept = open('/dev/zero')\n",
         "it has opened /dev/zero"),
        ("cuda.is_initialized = lambda: True\n", "it has initialised CUDA"),
        ("import os\ndef refuse(pid): raise OSError(38, os.strerror(38))\n"
         "os.pidfd_open = refuse\n", "it cannot watch a process: Function not implemented"),
        ("if 'serve' in sys.argv: raise SystemExit('no luck')\n",
         "it ended: SystemExit: no luck"),
    ],
)  # fmt: skip
def test_what_is_not_fit_to_fork_is_not_forked_and_it_says_so(
    servers: Servers, site: Path, spoils: str, why: str
) -> None:
    """A thread, an open GPU, or no server at all: then each worker is a new Python."""
    site.write_text(LIGHT + spoils)
    for _ in range(2):
        forked = Fork(servers)
        assert (forked.end(), forked.parent) == (0, os.getpid())
        assert forked.note == f"the worker was started cold, because of its server: {why}"


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


def test_a_host_without_a_process_to_spare_keeps_its_server(servers: Servers, site: Path) -> None:
    """Whoever asks may try again, as an executor does."""
    site.write_text(LIGHT + BUSY)
    with pytest.raises(BlockingIOError):
        fork(servers)
    (server,) = servers._running.values()
    assert fork(servers) == fork(servers)
    assert [*servers._running.values()] == [server]


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


# ------------------------------------------------------------------------------------------- lent

BORROWING = """
import os, time
from bench.executors.server import Servers
servers = Servers(cold=False)
process, note, _ = servers.launch(dict(os.environ))
assert not note
print(process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.usefixtures("site")
def test_a_lent_server_outlives_who_borrows_it_and_their_workers_do_not() -> None:
    parents = set()
    with lend_server(os.environ, Path.cwd()) as lent:
        for _ in range(2):
            command = [sys.executable, "-c", BORROWING]
            environment = {**os.environ, **lent}
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
                worker = int(process.stdout.readline())
                parents.add(psutil.Process(worker).ppid())
                process.kill()
            assert gone([worker])
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


@pytest.mark.usefixtures("site")
def test_a_killed_lender_leaves_nothing() -> None:
    command = [sys.executable, "-c", LENDING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lender:
        place = Path(lender.stdout.readline().split()[1])
        assert place.is_socket()
        servers = [child.pid for child in psutil.Process(lender.pid).children()]
        lender.kill()
    assert gone(servers, within_s=60)
    assert not place.parent.exists()


def test_a_lent_server_is_asked_where_it_is_of_the_same_surroundings(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> int:
        servers = Servers(cold=False)
        found = fork(servers)
        servers.close()
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
        site.write_text(f"{LIGHT}# another version\n")
        assert run() != server, "what it imported has changed"
    assert run() != server, "it has ended"


# --------------------------------------------------------------------------------------- its end


def test_a_killed_server_takes_its_worker_along_and_is_replaced(servers: Servers) -> None:
    forked = Fork(servers)
    os.kill(forked.parent, signal.SIGKILL)
    assert gone([forked.parent, forked.process.pid])
    assert forked.end() == -signal.SIGKILL
    assert fork(servers) != forked.parent


@pytest.mark.parametrize("early", [True, False])
def test_no_server_outlives_what_started_it(early: bool, site: Path) -> None:
    """Nor one that is still importing, and has forked nothing yet."""
    if early:
        site.write_text(f"{LIGHT}if 'serve' in sys.argv: __import__('time').sleep(1)\n")
    command = [sys.executable, "-c", BORROWING]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        if not early:
            assert process.stdout.readline()
        started: list[int] = []
        while not started:
            started = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
        process.kill()
    assert len(started) == 1 + (not early)
    assert gone(started, within_s=60)
