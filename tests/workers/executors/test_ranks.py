"""The workers of a case that trains in several processes: scripted ones, and real ones of gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from bench.networks.data import DatasetInfo
from bench.schema.case import Case
from bench.schema.record import Measurement, Outcome, RankRow, Status
from bench.workers.executors import Settings
from bench.workers.executors import subprocess as room
from bench.workers.executors.subprocess import SubprocessExecutor, Workers
from bench.workers.job import GO_ON, Job, Lane, Message, PhaseEntered, StepTaken
from bench.workers.server import EndedError
from tests.pytest_for_tests import Patch
from tests.workers_for_tests import find_workers

DDP = Case(device="cpu", parallel="ddp", world_size=2, dataset="synthetic")

# ------------------------------------------------------------------ several workers look like one


class Script:
    """A worker that says what it was given, and at each phase waits as one does; then it ends."""

    note = ""

    def __init__(self, says: list[Message], code: int = 0) -> None:
        self.says, self.code, self.pid, self.answers = [*says], code, 4242, 0
        self.connection, self._end = Pipe()
        self._end.send("something to hear, always")
        self._asked = False

    def receive(self, timeout_s: float) -> Message:
        if self._asked:
            raise TimeoutError
        if not self.says:
            raise EndedError
        self._asked = isinstance(self.says[0], PhaseEntered)
        return self.says.pop(0)

    def send(self, content: str = GO_ON) -> None:
        self.answers += 1
        self._asked = False

    def dump_stacks(self) -> None: ...
    def wait(self, seconds: float) -> None: ...

    def kill(self) -> None: ...

    def end(self, patiently: bool) -> int:
        return self.code


def play(
    monkeypatch: Patch, *scripts: Script, log: Path | None = None
) -> tuple[Workers, list[Message]]:
    """What the parent hears of workers that say their lines."""
    left = iter(scripts)
    monkeypatch.setattr(room, "start_worker", lambda job, variables, rendezvous, cold: next(left))
    monkeypatch.setattr(room, "_GRACE_S", 0.5)
    ranks = Workers(Job(replace(DDP, world_size=len(scripts)), log=log), {}, Settings())
    heard = []
    for message in ranks.messages():
        if isinstance(message, PhaseEntered):
            ranks.send()
        if message is not None:
            heard.append(message)
    return ranks, heard


GONE = Outcome(Status.ERROR, "RuntimeError: Connection closed by peer", peer=True)
FAILED = Outcome(Status.ERROR, "RuntimeError: CUDA error")
OOM = Outcome(Status.OOM, "OutOfMemoryError: CUDA out of memory")
OK = Outcome(Status.OK, measurement=Measurement(epoch_time_s=1.0))


def test_a_phase_begins_once_all_are_there(monkeypatch: Patch) -> None:
    step = StepTaken("warmup", 0, 0, 1)
    one = Script([PhaseEntered("warmup"), step, PhaseEntered("epoch"), OK])
    other = Script([PhaseEntered("warmup"), step, PhaseEntered("epoch"), Outcome(Status.OK)])
    ranks, heard = play(monkeypatch, one, other)
    assert heard[-1] == OK
    assert [m for m in heard if isinstance(m, StepTaken)] == [step], "the first one's alone"
    phases = [m.phase for m in heard if isinstance(m, PhaseEntered)]
    assert phases == ["warmup", "epoch"]
    assert (one.answers, other.answers) == (2, 2)
    assert ranks.end(patiently=True) == 0


MEASURED = replace(OK, follows=["sync_step_s"])


@pytest.mark.parametrize(
    ("scripts", "expected", "code"),
    [
        # a phase that one does not reach does not begin
        ([([PhaseEntered("warmup"), OK], 0), ([], -9)], [], -9),
        # what was measured comes through before a later death; the parent keeps it, as of one
        ([([MEASURED], 1), ([MEASURED], -9)], [MEASURED], 1),
        # memory that ran out comes before what failed otherwise, and that before peers that were
        # gone, as does a killed process
        ([([OOM], 1), ([GONE], 1)], [replace(OOM, reason=f"rank 0: {OOM.reason}")], 1),
        (
            [([GONE], 1), ([FAILED], 1), ([OOM], 1)],
            [replace(OOM, reason=f"rank 2: {OOM.reason}")],
            1,
        ),
        ([([GONE], 1), ([], -9), ([GONE], 1)], [], -9),
    ],
)
def test_what_is_heard_of_processes_that_end(
    scripts: list[tuple[list[Message], int]], expected: list[Message], code: int, monkeypatch: Patch
) -> None:
    ranks, heard = play(monkeypatch, *(Script(*one) for one in scripts))
    assert heard == expected
    assert ranks.end(patiently=True) == code
    if code < 0:
        assert ranks.failed_rank == "rank 1: ", "which the parent reads from the return code"


def test_each_process_sees_its_own_gpu(monkeypatch: Patch) -> None:
    seen: list[tuple[Job, Any, Any]] = []

    def start(job: Job, variables: Any, rendezvous: Any, cold: bool) -> Script:
        seen.append((job, variables, rendezvous))
        return Script([OK])

    monkeypatch.setattr(room, "start_worker", start)
    job = Job(replace(DDP, device="cuda"), gpu_uuid="GPU-1", lane=Lane("", ("GPU-1", "GPU-2")))
    Workers(job, {}, Settings()).end(patiently=True)
    own = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("GPU-1", "GPU-2")]
    assert [job.lane.variables for job, _, _ in seen] == own
    assert [job.gpu_uuid for job, _, _ in seen] == ["GPU-1", "GPU-2"]
    assert [rendezvous.rank for _, _, rendezvous in seen] == [0, 1]
    assert seen[0][2].gpus == ["GPU-1", "GPU-2"]


def test_the_one_process_of_data_parallel_sees_all_gpus(monkeypatch: Patch) -> None:
    seen: list[Job] = []

    def start(job: Job, variables: Any, rendezvous: Any, cold: bool) -> Script:
        seen.append(job)
        raise OSError("it is not started")

    monkeypatch.setattr(room, "start_worker", start)
    case = replace(DDP, device="cuda", parallel="dp")
    job = Job(case, gpu_uuid="GPU-1", lane=Lane("", ("GPU-1", "GPU-2")))
    executor = SubprocessExecutor(Settings(timeout_s=60.0))
    with pytest.raises(OSError, match="it is not started"):
        executor._attempt(job, lambda event: None, lambda: False)
    assert [job.lane.variables for job in seen] == [{"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}]


# --------------------------------------------------------------------------------- real workers


def run(case: Case, data: DatasetInfo, log: Path | None = None, timeout_s: float = 600) -> Outcome:
    executor = SubprocessExecutor(Settings(timeout_s=timeout_s))
    return executor.run(Job(case, data.folder, log=log), lambda event: None, lambda: False)


SHORT = replace(DDP, model="models_for_tests:exchanges_briefly", batch_size=256, world_size=2)


@pytest.mark.slow
def test_a_whole_epoch_of_two_is_measured(data: DatasetInfo, tmp_path: Path) -> None:
    found = run(replace(SHORT, evaluate=True), data, tmp_path / "log")
    m = found.measurement
    assert found.status is Status.OK, found.reason
    assert m.measured_images == data.train_images == sum(s.images for s in found.steps)
    assert [s.images for s in found.steps] == [512] * 97 + [336]
    assert [r.images for r in found.ranks] == [25_000, 25_000]
    slowest = max(r.epoch_time_s or 0 for r in found.ranks)
    assert m.epoch_time_s == m.measured_time_s == pytest.approx(slowest)
    assert m.test_accuracy is not None
    assert str(m.comm_backend).startswith("gloo")
    assert m.wire_bytes == 4 * (3 * 4 * 9 + 4 + 256 * 10 + 10)
    assert m.buckets == 1
    assert m.sync_step_s
    assert m.no_sync_step_s
    assert m.exposed_error_s
    assert all(isinstance(r, RankRow) and r.peak_process_bytes for r in found.ranks)
    assert m.arithmetic == "float32", "the first process goes on alone"
    assert m.step_bytes
    assert not find_workers()


class Hour:
    """The parent's clock, an hour ahead from ``come`` on: no test waits for a deadline."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.come = False

    def monotonic(self) -> float:
        return time.monotonic() + 3600 * self.come


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_ends_the_case(
    number: signal.Signals, data: DatasetInfo, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The second one, within its epoch: at once, or at the deadline, with the stacks of both."""
    clock, log = Hour(), tmp_path / "log"
    monkeypatch.setattr(room, "time", clock)

    def look(event: object) -> None:
        if isinstance(event, PhaseEntered) and event.phase == "epoch":
            os.kill(find_workers()[1].pid, number)
            # the first one waits for it by then; what an event is held for does not count
            threading.Timer(1, setattr, (clock, "come", number == signal.SIGSTOP)).start()

    job = Job(replace(SHORT, batch_size=32), data.folder, log=log)
    found = SubprocessExecutor(Settings(timeout_s=1800)).run(job, look, lambda: False)
    assert not find_workers()
    if number == signal.SIGKILL:
        assert found.status is Status.KILLED
        assert found.reason == "rank 1: SIGKILL from outside the sweep"
        return
    assert found.status is Status.TIMEOUT
    assert "epoch took longer than 1800 s" in found.reason
    assert "measurement.py" in log.read_text(), "where the first waits for the other"
