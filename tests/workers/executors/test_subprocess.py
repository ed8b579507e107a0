"""Real workers, ended in every way a process can end; and what the parent makes of each."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from bench.machine.monitor import Monitor, Observation
from bench.networks.data import DatasetInfo
from bench.results.store.reader import read_records
from bench.schema.case import Case
from bench.schema.record import EpochRow, Measurement, Outcome, Status, read_missing
from bench.sweep import __main__ as sweep
from bench.workers.executors import CaseEvent, Settings
from bench.workers.executors import subprocess as room
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Job, Message, PhaseEntered, StepTaken, WorkBegun
from tests import models_for_tests
from tests.pytest_for_tests import Patch
from tests.workers_for_tests import find_workers, gone

FLAGS = (
    "--device cpu --dataset synthetic --precision fp32 --fraction 0.001 --batch-size 32 --repeats 1"
)


def model(name: str) -> str:
    assert hasattr(models_for_tests, name)
    return f"models_for_tests:{name}"


# -------------------------------------------------------------- every way to end, in one sweep

ENDS: dict[str, tuple[Status, str, list[str]]] = {
    "raises": (Status.ERROR, "RuntimeError: no such <luck> | =1+1 (models_for_tests.py, line ",
               ["Traceback", "in behave", "nor a second line"]),
    "lacks": (Status.UNSUPPORTED, "there is no such device here", ["Traceback"]),
    "not_a_number": (Status.DIVERGED, "the loss was inf or NaN from step 0 of 2", []),
    "sleeps": (Status.TIMEOUT,
               "warmup took longer than 300 s; raise --timeout; the log has the stacks",
               ["most recent call first", "in behave"]),
    "exits": (Status.ERROR, "the worker exited with code 9 and reported no result", []),
    "kills_itself": (Status.KILLED, "SIGKILL from outside the sweep", []),
    "crashes": (Status.ERROR, "the worker crashed with SIGSEGV",
                ["Segmentation fault", "models_for_tests.py"]),
    "allocates_tensors": (Status.OOM, "RuntimeError: [enforce fail at alloc_cpu.cpp", []),
    "asks": (Status.ERROR, "EOFError: EOF when reading a line", ["go on? "]),
    "babbles": (Status.OK, "", ["so many words, "]),
    "good": (Status.OK, "", []),
}  # fmt: skip
"""How each model ends a case: the outcome, its reason, and what the log says."""


class ClockOfSleepers:
    """The parent's clock, an hour ahead while the sleeper sleeps.

    So the deadline ends it and nobody else, however slow a busy machine makes the others.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self, pids: Path) -> None:
        self._pids = pids

    def monotonic(self) -> float:
        sleeping = self._pids.exists() and psutil.pid_exists(int(self._pids.read_text().split()[0]))
        return time.monotonic() + 3600 * sleeping


Ended = tuple[Path, pd.DataFrame, list[int]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The folder, the records by model, and the processes of the one that slept."""
    folder = tmp_path_factory.mktemp("sweep")
    pids = folder / "pids"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(models_for_tests.PIDS, str(pids))
        patch.setattr(room, "time", ClockOfSleepers(pids))
        patch.setattr(sweep, "print_report", lambda *folders: None)
        flags = [*FLAGS.split(), "--timeout", "300", "--out", str(folder / "out")]
        assert sweep.main([*flags, "--model", *map(model, ENDS)]) == 0
    frame = read_records(folder / "out").set_index("model")
    return folder / "out", frame, [int(pid) for pid in pids.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_each_ends_in_its_outcome(ended: Ended, name: str) -> None:
    folder, frame, _ = ended
    row = frame.loc[model(name)]
    status, reason, parts = ENDS[name]
    log = (folder / row["log"]).read_text() if row["log"] else ""
    assert row["status"] == status, log[-2000:] or row["reason"]
    assert reason in row["reason"]
    assert row["reason"].isprintable()
    assert row["retries"] == 0
    measured = status in (Status.OK, Status.DIVERGED)
    assert (row["epoch_time_s"] > 0) == measured
    assert (row["peak_process_bytes"] > 2**20) == measured, "memory is recorded too"
    assert [part for part in parts if part not in log] == []


@pytest.mark.slow
def test_the_sweep_goes_on_to_its_end_and_leaves_no_process(ended: Ended) -> None:
    """Neither the one that would not hear SIGTERM nor its child; and a hundred megabytes of output
    are kept in two."""
    folder, frame, slept = ended
    assert list(frame.index) == list(map(model, ENDS))
    assert len(slept) == 2
    assert gone(slept, within_s=0)
    assert not find_workers()
    assert frame.loc[model("exits"), "log"] == "", "who said nothing has no log"
    log = (folder / frame.loc[model("babbles"), "log"]).read_bytes()
    assert len(log) < 2_200_000
    assert log.startswith(b"so many words, ")
    assert b"bytes left out]\n" in log
    assert b"the last word\n" in log[-1_000_000:]


# ------------------------------------------------------------------ stopped, killed, tried again


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_takes_its_worker_along(
    number: signal.Signals, tmp_path: Path
) -> None:
    """And what the worker has started; by Ctrl-C its case is a record."""
    pids, out = tmp_path / "pids", tmp_path / "out"
    flags = [*FLAGS.split(), "--model", model("sleeps"), "--out", str(out)]
    command, pipe = [sys.executable, "-m", "bench.sweep", *flags], subprocess.PIPE
    environment = {**os.environ, models_for_tests.PIDS: str(pids)}
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    while not pids.exists():  # until it trains
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    worker, child = map(int, pids.read_text().split())
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    killed = number is signal.SIGKILL
    assert process.returncode == (-number if killed else 130), errors
    assert gone([worker])
    assert gone([child])
    rows = read_records(out)
    interrupted = [] if killed else [("interrupted", "the sweep was stopped")]
    assert [*zip(rows["status"], rows["reason"], strict=True)] == interrupted


@pytest.mark.slow
def test_what_a_worker_tells_comes_back(data: DatasetInfo) -> None:
    """Through a real process: phases, steps and epochs, as the monitor sees them too."""
    events: list[CaseEvent] = []
    case = Case(
        model=model("good"), dataset="synthetic", device="cpu", batch_size=500, epochs=2,
        fraction=0.1,
    )  # fmt: skip
    executor = SubprocessExecutor(Settings())
    outcome = executor.run(Job(case, data.folder), events.append, lambda: False)
    m = outcome.measurement
    assert (outcome.status, outcome.reason) == (Status.OK, "")
    entered = [(e.phase, e.epoch) for e in events if isinstance(e, PhaseEntered)]
    epochs = [(phase, epoch) for epoch in (0, 1) for phase in ("epoch", "evaluation")]
    assert entered == [("warmup", 0), *epochs]
    begun = [event.what for event in events if isinstance(event, WorkBegun)]
    assert begun == ["checking the arithmetic", "counting a step's work"]
    step = next(event for event in reversed(events) if isinstance(event, StepTaken))
    assert (step.phase, step.total) == ("epoch", 10)
    assert step.memory_bytes > 2**20
    assert [(s.step, s.images) for s in outcome.steps] == [(i, 500) for i in range(20)]
    assert [row.epoch for row in outcome.epochs] == [0, 1]
    assert m.measured_time_s == sum(row.time_s for row in outcome.epochs)
    assert m.peak_process_bytes
    assert m.setup_time_s


# -------------------------------------------------- what the parent does, with a scripted worker


class Script:
    """A worker that says what it is told to, one script a try."""

    scripts: list[list[Message] | Exception]
    started = 0
    pids: Sequence[int] = (os.getpid(),)
    failed_rank = note = ""

    def __init__(self, job: Job, variables: Mapping[str, str], settings: Settings) -> None:
        script = self.scripts[Script.started]
        Script.started += 1
        if isinstance(script, Exception):
            raise script
        self._messages = script

    def messages(self) -> Iterator[Message | None]:
        yield from self._messages

    def send(self, content: object) -> None: ...
    def dump_stacks(self) -> None: ...
    def kill(self) -> None: ...

    def end(self, patiently: bool) -> int:
        return 1


def says(status: Status, transient: bool = False, **values: Any) -> list[Message]:
    return [Outcome(status, "so it is", Measurement(**values), transient=transient)]


Scripted = Callable[..., Outcome]


@pytest.fixture
def scripted(monkeypatch: Patch) -> Scripted:
    def run(
        *scripts: list[Message] | Exception,
        stopping: bool = False,
        epochs: int = 1,
        case: Case = Case(device="cpu"),  # noqa: B008
        settings: Settings = Settings(),  # noqa: B008
    ) -> Outcome:
        monkeypatch.setattr(room, "Workers", Script)
        monkeypatch.setattr(room, "_BACK_OFF_S", 0.001)
        Script.scripts, Script.started = list(scripts), 0
        job = Job(replace(case, epochs=epochs), "nowhere")
        return SubprocessExecutor(settings).run(job, print, lambda: stopping)

    return run


BUSY = says(Status.ERROR, transient=True)
NO_PROCESS, NO_MEMORY = (OSError(n, os.strerror(n)) for n in (errno.EAGAIN, errno.ENOMEM))


@pytest.mark.parametrize(
    ("scripts", "status", "retries", "reason"),
    [
        ([says(Status.OK), says(Status.OK)], Status.OK, 0, "so it is"),
        ([says(Status.OOM), says(Status.OK)], Status.OOM, 0, "so it is"),
        ([BUSY, BUSY, BUSY, says(Status.OK)], Status.ERROR, 2, "so it is"),
        ([BUSY, BUSY, says(Status.OK)], Status.OK, 2, ""),
        ([NO_PROCESS, says(Status.OK)], Status.OK, 1, ""),
        ([NO_MEMORY, says(Status.OK)], Status.OOM, 0, "Cannot allocate memory"),
    ],
)
def test_what_passes_is_tried_three_times_at_most_and_nothing_else(
    scripted: Scripted,
    monkeypatch: Patch,
    scripts: list[Any],
    status: Status,
    retries: int,
    reason: str,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    outcome = scripted(*scripts)
    assert (outcome.status, outcome.retries, Script.started) == (status, retries, retries + 1)
    assert reason in outcome.reason
    assert slept == [0.001, 0.002][:retries], "it waits longer each time"


def test_stopped_between_tries(scripted: Scripted) -> None:
    assert scripted(BUSY, BUSY, stopping=True).status is Status.INTERRUPTED
    assert Script.started == 1


PHASES: list[Any] = [("warmup", 0), ("epoch", 0), ("evaluation", 0), ("epoch", 1)]
EPOCHS: list[Message] = [PhaseEntered(*phase) for phase in PHASES]


def test_what_stops_between_epochs_says_after_how_many(scripted: Scripted) -> None:
    reasons = [scripted([*EPOCHS[:n], *says(Status.OOM)], epochs=3).reason for n in (1, 2, 3, 4)]
    after = ["", *(f"; after {done} of 3 epochs" for done in (0, 1, 1))]
    assert reasons == [f"so it is{suffix}" for suffix in after]


@pytest.mark.parametrize("ending", [[], says(Status.TIMEOUT), says(Status.INTERRUPTED)])
def test_what_was_measured_is_not_lost_with_what_follows(
    scripted: Scripted, ending: list[Message]
) -> None:
    """The profiler crashes, hangs or is stopped: the case was measured before."""
    lacks, timed = {"energy_j": "no sensor"}, Measurement(epoch_time_s=2.0)
    measured = Outcome(Status.OK, measurement=timed, missing=lacks, follows=["busy_s"])
    outcome = scripted([*EPOCHS[:3], measured, *ending])
    assert (outcome.status, outcome.measurement.epoch_time_s) == (Status.OK, 2.0)
    missing = read_missing(outcome.measurement.missing or "")
    assert missing["energy_j"] == "no sensor"
    assert missing["busy_s"].startswith("so it is" if ending else "the worker ")
    rows = [EpochRow(i, 2.0, 2.25, 0.25) for i in range(2)]
    last = Outcome(Status.OK, measurement=Measurement(busy_s=1.0), epochs=rows)
    whole = scripted([measured, last])
    assert (whole.measurement.busy_s, whole.epochs, whole.reason) == (1.0, rows, "")
    assert "busy_s" not in read_missing(whole.measurement.missing or "")


def test_each_epoch_has_the_time_limit_for_itself(scripted: Scripted, monkeypatch: Patch) -> None:
    """Of 3600 s: phases of 2000 s each go on; 4000 s within the second epoch do not."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def pass_time(message: Message, seconds: float) -> Iterator[Message]:
        nonlocal now
        now += seconds
        yield message

    def script(last_s: float) -> Any:
        for message in EPOCHS:
            yield from pass_time(message, 2000)
        yield from pass_time(says(Status.OK)[0], last_s)

    assert scripted(script(2000), epochs=2).status is Status.OK
    now = 0.0
    outcome = scripted(script(4000), epochs=2)
    assert outcome.status is Status.TIMEOUT
    assert outcome.reason.startswith("epoch took longer than 3600 s")
    assert outcome.reason.endswith("; after 1 of 2 epochs")


@pytest.mark.parametrize("root", [False, True])
def test_a_process_that_was_stopped_is_named_rather_than_the_limit(
    scripted: Scripted, monkeypatch: Patch, root: bool
) -> None:
    """The worker, or one that it started, as a loader's."""
    code = (
        "import subprocess as s; p = s.Popen(['sleep', '300']); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        stopped = psutil.Process(parent.pid) if root else child
        try:
            monkeypatch.setattr(Script, "pids", [parent.pid])
            late = Settings(timeout_s=0)
            assert scripted([*EPOCHS], settings=late).reason.startswith(
                "set-up took longer than 0 s; raise --timeout"
            )
            stopped.suspend()
            while stopped.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            outcome = scripted([*EPOCHS], settings=late)
        finally:
            child.kill()
            parent.kill()
    assert outcome.status is Status.TIMEOUT
    assert outcome.reason == (
        f"set-up took longer than 0 s, since process {stopped.pid} was stopped, as by kill -STOP "
        "or a debugger: --retry timeout runs the case again"
        + "; the log has the stacks"
        * (not root)
    )


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (Status.OK, Status.INVALID),
        (Status.DIVERGED, Status.INVALID),  # not to be believed comes first
        (Status.OOM, Status.OOM),
    ],
)
def test_what_speaks_against_the_card_is_kept(
    scripted: Scripted, monkeypatch: Patch, status: Status, wanted: Status
) -> None:
    seen = Observation(verdict="throttled: too hot", notes=["and shared"])
    monkeypatch.setattr(Monitor, "close", lambda self, *arguments: seen)
    outcome = scripted(says(status, epoch_time_s=1.0, notes="mine"))
    assert outcome.status is wanted
    assert "throttled: too hot" in f"{outcome.reason} {outcome.measurement.notes}"
    assert outcome.measurement.notes.startswith("mine; and shared")


def test_energy_of_some_epochs_is_not_that_of_all(scripted: Scripted, monkeypatch: Patch) -> None:
    """The counter was read by the process that resumed; the row's steps are of both."""
    read = {"energy_j": 900.0, "mean_power_w": 300.0}
    seen = Observation(values={**read, "temperature_c": 50.0})
    monkeypatch.setattr(Monitor, "close", lambda self, *arguments: seen)
    whole, m = (scripted(says(Status.OK, resumed_epochs=n)).measurement for n in (0, 2))
    assert (whole.energy_j, whole.mean_power_w, whole.missing) == (900.0, 300.0, None)
    assert (m.energy_j, m.mean_power_w, m.temperature_c) == (None, None, 50.0)
    assert "energy_j: another process trained the first epochs" in m.missing


def test_a_crash_under_a_limit_is_suspected_once_batches_take_memory(scripted: Scripted) -> None:
    limited, free = Case(device="cpu", memory_limit="900MiB"), Case(device="cpu")
    assert scripted([], case=limited).status is Status.ERROR, "while it was set up"
    assert scripted(EPOCHS[:1], case=limited).status is Status.OOM_SUSPECTED
    assert scripted(EPOCHS[:1], case=free).status is Status.ERROR


@pytest.mark.parametrize(("computing", "allowed"), [(0, False), (1, False), (1, True)])
def test_a_lack_of_memory_beside_others_is_an_error_unless_they_are_allowed(
    scripted: Scripted, monkeypatch: Patch, computing: int, allowed: bool
) -> None:
    seen = Observation(values={"neighbours_computing": computing})
    monkeypatch.setattr(Monitor, "close", lambda self, *arguments: seen)
    outcome = scripted(says(Status.OOM), settings=Settings(allow_shared=allowed))
    believed = allowed or not computing
    assert outcome.status is (Status.OOM if believed else Status.ERROR)
    assert ("bench.doctor; so it is" in outcome.reason) != believed


def test_a_compiled_case_has_a_cache_of_its_own(monkeypatch: Patch, tmp_path: Path) -> None:
    """Its first repeat compiles; torch's own cache would hold what an earlier sweep made."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    executor, compiled = SubprocessExecutor(Settings()), Case(compile="default")
    cases = (Case(), compiled, compiled, replace(compiled, batch_size=64))
    plain, one, again, other = (executor.choose_cache(Job(case)) for case in cases)
    assert plain == {}
    assert one.keys() == {"TORCHINDUCTOR_CACHE_DIR"}
    assert one == again != other
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert executor.choose_cache(Job(compiled)) == {}
