"""Processes that are forked from a server: what they share with it, and what they must not."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.networks.data import DatasetInfo
from bench.schema.case import Case
from bench.schema.record import Measurement, Status
from bench.workers.executors import CaseEvent, Settings
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.fingerprint import Request
from bench.workers.job import Job, Lane, PhaseEntered
from bench.workers.server import EndedError, MessageError, Process, call
from tests import models_for_tests
from tests.workers_for_tests import find_workers, gone, is_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")

TESTS = Path(models_for_tests.__file__).parent
CORE = min(os.sched_getaffinity(0))


class Run:
    """A case, the worker that ran it, held to a core, and the process that had started that."""

    def __init__(self, executor: SubprocessExecutor, data: DatasetInfo, model: str) -> None:
        self.worker, self.parent = 0, 0
        case = Case(
            model=f"models_for_tests:{model}", dataset="synthetic", batch_size=32, device="cpu",
            steps=3, evaluate=True,
        )  # fmt: skip
        job = Job(case, data.folder, lane=Lane("", ("GPU-made-up",), (CORE,)))
        self.outcome = executor.run(job, self._see, lambda: False)
        self.losses = [step.loss for step in self.outcome.steps]
        assert self.outcome.measurement.notes is None

    def _see(self, event: CaseEvent) -> None:
        if isinstance(event, PhaseEntered) and event.phase == "warmup":
            (worker,) = find_workers()
            self.worker, self.parent = worker.pid, worker.ppid()


# ------------------------------------------------------------------------------- one after another

TIMED = "_s$|^step_time|^other_cores$|process_bytes$|^warmup_steps$|^warmup_steady$"
"""Columns that differ between two runs of a case."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_warm_worker_is_as_a_cold_one_whatever_was_run_before(
    data: DatasetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has as a process, all but random numbers that no seed of the case fixes; and, bit for
    bit, its losses, after one has spoilt settings, functions, limits, threads and the heap, and one
    has died of a signal. What is asked of a machine is answered too."""
    monkeypatch.delenv("OMP_NUM_THREADS")  # as many as the lane has cores
    warm, cold = (SubprocessExecutor(Settings(timeout_s=300, cold=c)) for c in (False, True))

    def tell(executor: SubprocessExecutor) -> tuple[Run, dict[str, Any]]:
        file = tmp_path / "facts"
        monkeypatch.setenv(models_for_tests.FACTS, str(file))
        run = Run(executor, data, "tells")
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
    name = "models_for_tests:not_a_model"
    answer = warm.examine(Lane("", (), (CORE,)), ["cpu"], [Request(Case(name))], 300)
    assert "returned str" in str(answer.models[name])
    assert {spoilt.parent, killed.parent, last.parent} == {first.parent}, "one server"
    assert is_server(psutil.Process(first.parent))
    assert len({first.worker, spoilt.worker, killed.worker, last.worker}) == 4

    fresh, facts_cold = tell(cold)
    assert fresh.parent != first.parent
    assert not psutil.pid_exists(fresh.parent), "it was of this worker alone"
    assert first.losses == last.losses == fresh.losses
    m, n = last.outcome.measurement, fresh.outcome.measurement
    same = [f.name for f in fields(Measurement) if not re.search(TIMED, f.name)]
    assert {"train_loss", "test_accuracy", "arithmetic", "flop_per_image", "notes"} <= {*same}
    assert [getattr(m, name) for name in same] == [getattr(n, name) for name in same]
    assert m.setup_time_s < n.setup_time_s, "which imports"
    assert m.peak_process_bytes / n.peak_process_bytes == pytest.approx(1, abs=0.02)
    assert facts.pop("drawn")
    assert facts_cold.pop("drawn")
    assert facts == facts_cold
    assert facts["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-made-up"
    assert facts["leads"]
    assert facts["cores"] == [CORE]
    assert facts["threads"][0] == 1


# ------------------------------------------------------------------------------------- its server

LIGHT = """
import sys
from bench.workers import server as process
process.MODULES = ("math",)
"""
"""Has a server import nothing of what takes it seconds."""


@pytest.fixture
def site(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A module that every Python imports as it starts, servers among them: in a folder that no
    other test had, since a server is found again by its environment."""
    file = tmp_path_factory.mktemp("site") / "sitecustomize.py"
    file.write_text(LIGHT)
    paths = [str(file.parent), str(tmp_path), str(TESTS), str(TESTS.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return file


def fork() -> int:
    """The server that a process is forked from."""
    with Process("processes_for_tests:wait") as forked:
        assert forked.note == ""
        server = forked.receive(60)
        assert is_server(psutil.Process(server))
        forked.send(None)
        assert forked.wait() == 0
    return int(server)


@pytest.mark.usefixtures("site")
def test_servers_are_of_one_environment_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch reads as it is imported makes another server; what is read late does not."""
    first = fork()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert fork() == first
    with Process("processes_for_tests:wait") as waiting:
        assert waiting.receive(60) == first
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert fork() != first
        assert waiting.wait(0) is None, "nor is one ended that has a process yet"
    del waiting
    assert not psutil.pid_exists(first), "nobody asks the first any more"


def test_a_server_is_replaced_when_what_it_imported_changes(site: Path) -> None:
    first = fork()
    assert fork() == first
    site.write_text(f"{LIGHT}# another version\n")
    assert fork() != first


@pytest.mark.parametrize(
    ("spoils", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True)"
         ".start()\n", "it has 2 threads"),
        ("driver = open(__file__)\nprocess.DRIVERS = (__file__,)\n",
         "it has a GPU's driver open (sitecustomize.py)"),
        ("serve = process.serve\ndef refuse(*given):\n"
         "    if given[1]: raise SystemExit\n    serve(*given)\n"
         "process.serve = refuse\n", "it ended"),
    ],
)  # fmt: skip
def test_what_is_not_fit_to_fork_is_not_forked_and_it_says_so(
    site: Path, spoils: str, why: str
) -> None:
    """A thread, a GPU in use, or no server at all: then each process imports all by itself."""
    why = why.replace("sitecustomize.py", str(site))
    site.write_text(LIGHT + spoils)
    servers = []
    for _ in range(2):
        with Process("processes_for_tests:wait") as forked:
            servers.append(forked.receive(60))
        assert forked.note == f"the worker was started cold, because of its server: {why}"
    assert servers[0] != servers[1]


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
import os
from bench.workers import server as process
process.preload()
process._imported = process._look_at([process.__file__])
process._server = process._keeper = os.getpid()
if not os.fork():  # as a server does
    os._exit(0)
os.wait()
if not os.fork():
    print(process._refuse(), asked, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
def test_nothing_that_the_server_imports_asks_anything_of_cuda() -> None:
    """Nor has it a thread, where libraries may have as many as there are cores."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, " []\n"), done.stderr


LOOKS = """
import multiprocessing, os, signal, sys, threading
from pathlib import Path
main = sys.modules["__main__"]
FOUND = {
    "argv": sys.argv, "source": Path(sys.argv[0]).read_text(), "file": main.__file__,
    "own": __file__, "input": sys.stdin.read(), "fd": sys.stdin.fileno(),
    "is": sys.stdin is sys.__stdin__, "kept": hasattr(main, "serve"),
    "errors": [s.errors for s in (sys.stdin, sys.stdout, sys.stderr)],
    "optimize": sys.flags.optimize, "utf8": sys.flags.utf8_mode, "options": sys._xoptions,
    "process": multiprocessing.current_process().name, "threads": len(threading.enumerate()),
    "method": multiprocessing.get_start_method(allow_none=True), "folder": os.getcwd(),
    "signals": {n: str(signal.getsignal(n)) for n in range(1, 32)}, "umask": os.umask(0o22),
}
def tell(): return FOUND
if __name__ == "__main__": print(repr(FOUND))
"""


@pytest.mark.usefixtures("site")
def test_a_module_finds_what_its_script_would(tmp_path: Path) -> None:
    """Its source, by `sys.argv` and `__main__`; the streams, the interpreter's flags, signals."""
    file = tmp_path / "looks.py"
    file.write_text(LOOKS)
    flags = [sys.executable, "-O", "-X", "utf8"]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{os.environ['PYTHONPATH']}"}
    starts = "from bench.workers.server import call; "
    starts += "asked = 'processes_for_tests:tell_script', 'looks:tell'; "
    starts += "print(repr(call(*asked, timeout_s=60)))"
    process, script = (
        subprocess.run([*flags, *what], capture_output=True, check=True, text=True,
                       env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        for what in (["-c", starts], [str(file)])
    )  # fmt: skip
    seen = ast.literal_eval(process.stdout)
    assert seen == ast.literal_eval(script.stdout)
    assert seen["own"] == str(file)


# --------------------------------------------------------------------------------- what is said


@pytest.mark.usefixtures("site")
def test_what_a_process_sends_is_told_from_what_it_prints(tmp_path: Path) -> None:
    with Process("processes_for_tests:say", 1, "two", log=tmp_path / "log") as process:
        assert [process.receive(60), process.receive(60)] == [1, "two"]
        assert process.wait() == 2
    assert (tmp_path / "log").read_text() == "1 two\n"
    with pytest.raises(EndedError, match="No module named 'nowhere'"):
        call("nowhere:say", timeout_s=60)
    with pytest.raises(MessageError, match="the worker sent what is no message"):
        call("processes_for_tests:send_what_only_it_has", timeout_s=60)


@pytest.mark.usefixtures("site")
def test_a_log_that_cannot_be_written_does_not_stop_the_process(tmp_path: Path) -> None:
    for log in (tmp_path / "no" / "folder", Path("/dev/full")):
        with Process("processes_for_tests:say", "x" * 2_000_000, log=log) as process:
            assert process.receive(60)
            assert process.wait(60) == 1


@pytest.mark.usefixtures("site")
def test_the_stacks_of_a_process_are_waited_for(tmp_path: Path) -> None:
    with Process("processes_for_tests:be_late", log=tmp_path / "log") as process:
        process.receive(60)
        process.dump_stacks()
    assert "most recent call first" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("site")
def test_a_process_has_one_socket_which_is_its_own() -> None:
    """None of its server's, nor of another process, whose end would not be seen then."""
    with Process("processes_for_tests:wait") as other:
        other.receive(60)
        assert call("processes_for_tests:tell_sockets", timeout_s=60) == (1, 0)


@pytest.mark.usefixtures("site")
def test_a_temporary_folder_may_have_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the address of a socket, by which the processes of a case talk."""
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    assert call("processes_for_tests:pass_on", timeout_s=60) == "pipe"


# --------------------------------------------------------------------------------------- its end


@pytest.mark.usefixtures("site")
def test_a_killed_server_takes_its_process_along_and_is_replaced() -> None:
    with Process("processes_for_tests:wait") as forked:
        server = forked.receive(60)
        os.kill(server, signal.SIGKILL)
        assert gone([forked.pid])
        assert forked.wait() == -signal.SIGKILL
    assert fork() != server


STARTING = """
import time
from bench.workers.server import Process
process = Process("processes_for_tests:leave_behind")
print(*process.receive(60), flush=True)
time.sleep(3600)
"""


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("ended", ["sweep", "server", "worker"])
def test_nothing_outlives_what_started_it(ended: str, tmp_path: Path) -> None:
    """Whatever is killed, and whatever has left its parent and its session; nor a folder."""
    command = [sys.executable, "-c", STARTING]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        server, worker, *left = map(int, process.stdout.readline().split())
        try:
            keeper = psutil.Process(server).ppid()
            assert psutil.Process(keeper).ppid() == process.pid
            os.kill({"sweep": process.pid, "server": server}.get(ended, worker), signal.SIGKILL)
            assert gone([worker, *left])
            if ended != "worker":
                assert gone([keeper, server])
                assert not list(tmp_path.glob("bench_*"))
        finally:
            process.kill()
