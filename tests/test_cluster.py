"""A sweep on a Ray cluster whose nodes, tasks and driver are killed ends with its grid, once.

BENCH_THOROUGH is three times the number of kills; `make thorough` takes 100.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_for_tests import MARK, PATIENCE_S, find_marked, wait_for
from ray_sweep import BEGUN, CASE_S
from workers_for_tests import gone

from bench.store.reader import read_records
from bench.store.runs import read_cases

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(3600)

HERE = Path(__file__).parent
KILLS = max(3, int(os.environ.get("BENCH_THOROUGH", "3")) // 3)
CASES = 20 * KILLS + 30  # there is work to do until the last kill, also on a busy machine
FLAGS = "--executor ray --device cpu --dataset synthetic --model dpn-small --precision fp32 "
FLAGS += "--batch-size 8 --steps 1 --repeats 1"
TASK = "ray::run_case"


def start(out: Path, cases: int, *flags: str) -> subprocess.Popen[str]:
    seeds = [str(seed) for seed in range(cases)]
    command = [sys.executable, HERE / "ray_sweep.py", *FLAGS.split(), *flags]
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    command += ["--out", out, "--seed", *seeds]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=unmarked, **quiet, text=True)


def count_rows(out: Path) -> int:
    file = out / "records.csv"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def find_busy(folder: str) -> int | None:
    """The process of a task whose case has only begun."""
    for begun in Path(folder).glob(f"{BEGUN}*"):
        if time.time() - begun.stat().st_mtime < CASE_S / 2:
            return int(begun.name.removeprefix(BEGUN))
    return None


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray notes a cluster's address, made by none

    folder = f"/tmp/bench-chaos-{os.getpid()}"
    before = dict(os.environ)
    os.environ |= {MARK: folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
    try:
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.folder = folder
        yield cluster
        cluster.shutdown()
    finally:
        os.environ.clear()
        os.environ |= before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.thorough
def test_nodes_tasks_and_driver_are_killed(cluster: Any, tmp_path: Path) -> None:
    """Every case ends in one final row, and no task's process remains."""
    rng = random.Random(KILLS)

    def add_node() -> Any:
        return cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)

    nodes = [add_node()]
    sweep = start(tmp_path, CASES, "--address", cluster.address)
    said = ""
    for kind in itertools.islice(itertools.cycle(["node", "task", "driver"]), KILLS):
        rows = count_rows(tmp_path)
        wait_for(lambda sweep=sweep, rows=rows: sweep.poll() or count_rows(tmp_path) > rows + 2)
        assert sweep.poll() is None, "the kills came while there was work to do"
        if kind == "node":
            cluster.remove_node(nodes.pop(rng.randrange(len(nodes))), allow_graceful=False)
            nodes.append(add_node())
        elif kind == "task":
            # of three kills at any moment, it happened that none hit a case
            busy = wait_for(
                lambda sweep=sweep: sweep.poll() is not None or find_busy(cluster.folder)
            )
            assert sweep.poll() is None, "the kills came while there was work to do"
            os.kill(busy, signal.SIGKILL)
        else:
            sweep.kill()
            said += sweep.communicate()[1]
            wait_for(lambda: not find_marked(cluster.folder, TASK))
            sweep = start(tmp_path, CASES, "--address", cluster.address)
    said += sweep.communicate(timeout=1800)[1]
    assert sweep.returncode == 0, said

    frame = read_records(tmp_path)
    final = frame.sort_values("attempt").groupby("seed").tail(1)
    assert sorted(case.seed for case in read_cases(final)) == list(range(CASES))
    assert set(final["status"]) == {"ok"}, said
    assert set(frame["status"]) <= {"ok", "lost"}
    assert (frame[frame["status"] == "ok"].groupby("seed").size() == 1).all()
    for _, rows_of_case in frame.groupby("seed"):
        assert sorted(rows_of_case["attempt"]) == list(range(1, len(rows_of_case) + 1))
    lanes = set(frame["lane"])
    assert lanes <= {os.uname().nodename, "ray0", "ray1"}, "a task that is lost early is nowhere"
    assert "lost" in set(frame["status"]), "no kill hit a case; the test has lost its teeth"
    wait_for(lambda: not find_marked(cluster.folder, TASK))
    print(f"{KILLS} kills, {(frame['status'] == 'lost').sum()} rows lost, {CASES} cases")


@pytest.mark.parametrize(("times", "local"), [(1, False), (2, True)])
@pytest.mark.thorough
def test_ctrl_c(times: int, local: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Once: what is done is kept; twice: at once. Nothing that the sweep started remains."""
    flags = [] if local else ["--address", request.getfixturevalue("cluster").address]
    sweep = start(tmp_path, 200, *flags)
    wait_for(lambda: count_rows(tmp_path) > 2)
    started = psutil.Process(sweep.pid).children(recursive=True) if local else []
    folder = "" if local else request.getfixturevalue("cluster").folder
    assert started if local else wait_for(lambda: find_marked(folder, TASK))
    sweep.send_signal(signal.SIGINT)
    if times > 1:
        assert sweep.stderr is not None
        while "again to stop at once" not in sweep.stderr.readline():
            pass
        sweep.send_signal(signal.SIGINT)
    sweep.communicate(timeout=PATIENCE_S)
    assert sweep.returncode == 130
    assert gone([process.pid for process in started], PATIENCE_S)
    wait_for(lambda: local or not find_marked(folder, TASK))
    statuses = list(read_records(tmp_path)["status"])
    assert set(statuses) <= {"ok", "interrupted"}
    lanes = 1 if local else 2
    assert statuses.count("interrupted") <= lanes
