"""Several lanes: what runs where and beside what, GPUs of several kinds, lost cases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.base.errors import UnsupportedError, UsageError
from bench.base.processes import usable_cpus
from bench.machine.nvml import Card
from bench.results.store.reader import read_records
from bench.schema.record import Outcome, Status
from bench.sweep import __main__ as sweep
from bench.sweep import loop, preflight
from bench.workers.executors import ALL, Settings
from bench.workers.executors import subprocess as room
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Job, Lane
from tests import fake_executor as fake
from tests.commands.test_sweep import rows, run
from tests.fake_executor import FakeExecutor
from tests.pytest_for_tests import Capture, Patch
from tests.workers_for_tests import find_workers

Watch = Callable[[Callable[[Job], Outcome | None]], None]

SEEDS = ["--seed", *map(str, range(6))]


pytestmark = pytest.mark.usefixtures("fake")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: Patch) -> Path:
    for name in (fake.ANSWERS, fake.LANES, fake.MEMORY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(loop, "_POLL_S", 0.0)
    return tmp_path / "out"


@pytest.fixture
def watch(monkeypatch: Patch) -> Watch:
    """Have each case of the fake pass through a function, in its lane's thread."""
    answer = FakeExecutor.run

    def install(look: Callable[[Job], Outcome | None]) -> None:
        def run(self: FakeExecutor, job: Job, *rest: Any) -> Outcome:
            return look(job) or answer(self, job, *rest)

        monkeypatch.setattr(FakeExecutor, "run", run)

    return install


# --------------------------------------------------------------------------------- what runs where


def test_lanes_make_the_records_that_one_makes(out: Path) -> None:
    flags = ["8", "16", "32", "--repeats", "2"]
    one = run(out, *flags)
    several = run(out.with_name("several"), *flags, "--lanes", "3")
    same = ["batch_size", "repeat", "run_seed", "sentinel", "attempt", "status", "epoch_time_s"]
    assert sorted(rows(several, *same)) == sorted(rows(one, *same))
    assert set(one["lane"]) == {""}
    assert set(one["lanes_beside"]) == {0}
    assert set(several["lane"]) == {"fake0", "fake1", "fake2"}
    last = several.iloc[-1]
    first = several[(several["batch_size"] == 8) & (several["repeat"] == 1)]["lane"].iloc[0]
    assert (last["sentinel"], last["lane"], last["lanes_beside"]) == (True, first, 0)


def test_no_case_has_the_same_card_in_all_its_repeats(out: Path, watch: Watch) -> None:
    """A slower card would look like the effect of a setting. Both cards take equally long."""
    barrier, left = threading.Barrier(2, timeout=60), iter(range(8))

    def look(job: Job) -> None:
        if next(left, None) is not None:  # all but the drift check
            barrier.wait()

    watch(look)
    frame = run(out, "8", "16", "--repeats", "4", "--lanes", "2", cards="A100:2")
    for size, own in frame[~frame["sentinel"]].groupby("batch_size"):
        assert own["lane"].value_counts().tolist() == [2, 2], size
    assert (frame["gpu_uuid"] == "GPU-" + frame["lane"]).all()
    assert set(frame["gpu"]) == {"A100"}


def test_a_case_of_several_gpus_runs_alone(out: Path, watch: Watch) -> None:
    running = Counter[str]()
    seen: dict[int, list[tuple[tuple[str, ...], int]]] = {1: [], 2: []}

    def look(job: Job) -> None:
        running[job.lane.name] += 1
        time.sleep(0.01)
        seen[job.case.world_size].append((job.lane.gpus, sum(running.values())))
        running[job.lane.name] -= 1

    watch(look)
    # those of two cards come before and after those of one
    flags = ["--parallel", "ddp", "--world-size", "2", "1", "--repeats", "2", "--lanes", "2"]
    frame = run(out, "8", "--seed", "0", "1", "2", *flags, cards="A100:2")
    wide = frame["world_size"] == 2
    assert set(frame[wide]["lane"]) <= {"A100-0+A100-1", "A100-1+A100-0"}
    assert set(frame[wide]["lanes_beside"]) == {0}
    assert (len(seen[1]), len(seen[2])) == (6, 7)
    assert {(len(gpus), beside) for gpus, beside in seen[2]} == {(2, 1)}
    assert {len(gpus) for gpus, _ in seen[1]} == {1}


def test_a_world_size_beyond_the_cards_is_refused_or_a_row(out: Path, capsys: Capture) -> None:
    ddp = ["--parallel", "ddp", "--world-size"]
    lacks = f"world size 3 takes 3 GPUs of one kind; {fake.LANES} has 2 (A100)"
    run(out, "8", *ddp, "3", "--lanes", "all", "--dry-run", rc=2, cards="A100:2")
    assert capsys.readouterr().err == f"error: --world-size 3: {lacks}\n"
    grid = out.with_name("grid.toml")
    grid.write_text('description = "x"\n[[grid]]\nparallel = "ddp"\nworld_size = [2, 3]\n')
    frame = run(out, "8", "--config", str(grid), "--lanes", "all", cards="A100:2")
    ends = sorted(rows(frame, "world_size", "status", "reason"))
    assert ends == [(2, "ok", ""), (3, "unsupported", lacks)]


# ------------------------------------------------------------------------------- lost, stopped


def test_a_lost_case_is_tried_again_as_a_new_attempt(
    out: Path, watch: Watch, monkeypatch: Patch, capsys: Capture
) -> None:
    left = Counter({0: 2, 1: 99})

    def look(job: Job) -> Outcome | None:
        left[job.case.seed] -= 1
        return None if left[job.case.seed] < 0 else Outcome(Status.LOST, "the node went away")

    watch(look)
    frame = run(out, "8", "--seed", "0", "1", "2", "--lanes", "2")
    errors = capsys.readouterr().err
    assert "[2/3] fake" in errors
    assert "[3/3]" not in errors, "one of three had no outcome but lost"
    assert "fp32 · batch size 8 · seed 1: lost: the node went away" in errors
    ends = frame.groupby("seed")[["attempt", "status"]].agg(list)
    assert ends.loc[0].tolist() == [[1, 2, 3], ["lost", "lost", "ok"]]
    assert ends.loc[1].tolist() == [[1, 2, 3], ["lost"] * loop.MOST_LOST], "and not for ever"
    assert ends.loc[2].tolist() == [[1], ["ok"]]

    monkeypatch.undo()
    again = run(out, "8", "--seed", "0", "1", "2")
    assert rows(again[len(frame) :], "seed", "attempt", "status") == [(1, 4, "ok")]


def test_stopped_once_every_lane_ends_its_case_and_any_number_goes_on(
    out: Path, monkeypatch: Patch
) -> None:
    barrier = threading.Barrier(3, timeout=60)

    def answer(
        self: FakeExecutor, job: Job, on_event: Any, stopping: Callable[[], bool]
    ) -> Outcome:
        if job.case.seed < 3:
            return Outcome(Status.OK)
        if barrier.wait() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while not stopping():
            time.sleep(0.01)
        return Outcome(Status.INTERRUPTED, "the sweep was stopped")

    monkeypatch.setattr(FakeExecutor, "run", answer)
    frame = run(out, "8", *SEEDS, "--lanes", "3", rc=130)
    assert Counter(frame["status"]) == {"ok": 3, "interrupted": 3}
    monkeypatch.undo()
    frame = run(out, "8", *SEEDS, "--lanes", "2")
    assert sorted(frame[frame["status"] == "ok"]["seed"]) == list(range(6))
    assert len(frame) == 9


# ---------------------------------------------------------------------------- the command line


CARDS = [
    Card("GPU-a", "NVIDIA A100", 0, 80 * 2**30),
    Card("GPU-b", "NVIDIA A100", 1, 80 * 2**30),
    Card("GPU-t", "Tesla T4", 2, 16 * 2**30),
]


@pytest.fixture
def cards(monkeypatch: Patch) -> None:
    monkeypatch.setattr(room, "find_cards", lambda: (CARDS, ""))
    monkeypatch.setattr(room, "usable_cpus", lambda: [2, 3, 4, 5, 6])


@pytest.mark.usefixtures("cards")
def test_lanes_are_cards_or_equal_shares_of_the_cores() -> None:
    executor = SubprocessExecutor(Settings())
    assert list(executor.open_lanes("cuda")) == list(executor.open_lanes("cuda", 1)) == [Lane()]
    assert Lane().variables == {}
    lanes = executor.open_lanes("cuda", 2)
    assert [lane.name for lane in lanes] == ["gpu0", "gpu1"]
    assert lanes[1].variables == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    assert [lane.cores for lane in executor.open_lanes("cpu", 2)] == [(2, 3), (4, 5)]
    assert [lane.cores for lane in executor.open_lanes("cpu", ALL)] == [(c,) for c in range(2, 7)]
    with pytest.raises(UsageError, match="this process may use 3 GPUs; give at most as many"):
        executor.open_lanes("cuda", 4)
    with pytest.raises(UsageError, match="this process may use 5 CPU cores; give at most as many"):
        executor.open_lanes("cpu", 6)


@pytest.mark.usefixtures("cards")
def test_lanes_on_cards_of_several_kinds_are_refused_at_once(
    monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(preflight, "has_cuda", lambda: True)
    flags = ["--device", "cuda", "--dataset", "synthetic", "--model", "dpn-small"]
    assert sweep.main([*flags, "--lanes", "all", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        "error: --lanes: the GPUs are of several kinds (NVIDIA A100 of 80 GiB and Tesla T4 of "
        "16 GiB), whose rows cannot be compared; choose some of one kind with "
        "CUDA_VISIBLE_DEVICES\n"
    )


@pytest.mark.usefixtures("cards")
def test_a_case_of_several_gpus_takes_some_of_one_kind(monkeypatch: Patch) -> None:
    executor = SubprocessExecutor(Settings())
    first, tesla = Lane("gpu0", ("GPU-a",)), Lane("gpu2", ("GPU-t",))
    assert executor.gather(first, "cuda", 1) is first
    assert executor.gather(first, "cuda", 2) == Lane("gpu0+gpu1", ("GPU-a", "GPU-b"))
    assert executor.gather(Lane(), "cuda", 2) == Lane("", ("GPU-a", "GPU-b"))
    # as long as it is not known which one torch takes, the kind of which there are most
    monkeypatch.setattr(room, "find_cards", lambda: (CARDS[::-1], ""))
    assert {*executor.gather(Lane(), "cuda", 2).gpus} == {"GPU-a", "GPU-b"}
    monkeypatch.setattr(room, "find_cards", lambda: (CARDS, ""))
    with pytest.raises(UnsupportedError, match=r"takes 3 GPUs of one kind; this machine has 2$"):
        executor.gather(first, "cuda", 3)
    with pytest.raises(UnsupportedError, match=r"takes 2 GPUs of one kind; this machine has 1$"):
        executor.gather(tesla, "cuda", 2)
    assert executor.gather(Lane(), "cpu", 2).cores == (2, 3, 4, 5)
    with pytest.raises(UnsupportedError, match="takes 6 CPU cores; this machine has 5"):
        executor.gather(Lane(), "cpu", 6)


# ------------------------------------------------------------------------------- real processes

needs_cores = pytest.mark.skipif(
    len(usable_cpus()) < 2, reason="one CPU core: no two lanes of different cores"
)
REAL = ["--device", "cpu", "--dataset", "synthetic", "--model", "dpn-small", "--precision", "fp32"]


@pytest.mark.slow
@needs_cores
def test_stopped_twice_no_lane_leaves_a_process(tmp_path: Path) -> None:
    """Both train for minutes."""
    command = [sys.executable, "-m", "bench.sweep", *REAL, "--batch-size", "8", "--seed", "0", "1"]
    command += ["--lanes", "2", "--out", str(tmp_path / "out")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **quiet, text=True) as started:
        try:
            while "to run" not in started.stderr.readline():  # until then the machine is asked
                assert started.poll() is None
            while len(workers := find_workers(started.pid)) < 2:
                assert started.poll() is None
                time.sleep(0.1)
            cores = [set(worker.cpu_affinity()) for worker in workers]
            assert not cores[0] & cores[1], "each is held to cores of its own"
            started.send_signal(signal.SIGINT)
            while "stopping" not in started.stderr.readline():
                assert started.poll() is None
            started.send_signal(signal.SIGINT)
            assert started.wait(60) == 130
        finally:
            started.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert set(read_records(tmp_path / "out")["status"]) <= {"interrupted"}
