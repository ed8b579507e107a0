"""The cores that a process has: by affinity, by a quota, and by what others use of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.base import processes as cores
from bench.base.processes import (
    OtherWork,
    Quota,
    TemporaryFolder,
    read_core_times,
    read_cpu_time,
    read_quota,
    remove_left,
)
from bench.machine.host import describe_host
from tests.pytest_for_tests import Patch


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "30000 100000\n"}, 0.3),
        ("0::/a/b", {"a/b/cpu.max": "max 1000", "a/cpu.max": "150 1000"}, 0.15),
        ("4:cpu:/x\n0::/a", {"a/cpu.max": "500 1000", "cpu.max": "2000 1000"}, 0.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        (
            "3:cpu,cpuacct:/docker/x\n1:cpuset:/\n0::/",
            {
                "cpu/cpu.cfs_quota_us": "150000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            "4:memory:/\n1:cpu:/a",
            {
                "cpu/a/cpu.cfs_quota_us": "-1\n",
                "cpu/a/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "50000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        ("4:memory:/a", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "2"}, None),
    ],
)
def test_a_quota_of_control_groups_is_found(
    groups: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    """Of a process in these groups, of which the tree holds these files."""
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_quota(tmp_path, tmp_path)
    assert (found and found.cores) == quota


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: Patch) -> None:
    """And only these: not one that is in use, was just made, or is another program's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used, left, new, other = (TemporaryFolder(kind) for kind in ("a", "b", "c", "d"))
    Path(other.name).rename(tmp_path / "bench-other-1")
    for folder in (left, new, other):
        os.close(folder._locked)
    for path in [used.name, left.name, tmp_path / "bench-other-1"]:
        os.utime(path, (0, 0))
    remove_left()
    names = {Path(used.name).name, Path(new.name).name, "bench-other-1"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_quota_is_the_number_of_cores(monkeypatch: Patch) -> None:
    monkeypatch.setattr(cores, "usable_cpus", lambda: [0, 1])
    for quota, number in ((None, "2 cores"), (0.3, "0.3 cores"), (1.0, "1 core"), (8.0, "2 cores")):
        allowed = quota and Quota(quota, "cpu.max")
        monkeypatch.setattr(cores, "read_quota", lambda allowed=allowed: allowed)
        assert (describe_host().cpu or "").endswith(f", {number}")
    # others compute on one core of two, and take nothing from a third of one
    busy = OtherWork(busy=13.0, own=3.0, wall=10.0)
    busy.on, busy.quota = [0, 1], Quota(0.3, "cpu.max")
    assert busy.cores() == 0
    busy.sums = 20.0, 1.0, 10.0, 0.0
    assert busy.cores() == pytest.approx(0.2), "of 1.9 cores, 1.7 are beyond the quota"


def test_the_cores_were_busy_for_what_is_neither_idle_nor_a_guest_s(monkeypatch: Patch) -> None:
    """Linux counts a guest's time in user and nice too; other systems tell of less."""
    times = {"user": 5.0, "nice": 1.0, "system": 2.0, "idle": 90.0, "iowait": 7.0, "irq": 0.5}
    times |= {"softirq": 0.25, "steal": 3.0, "guest": 2.0, "guest_nice": 0.5}
    core: Any = namedtuple("core", times)  # type: ignore[misc]
    other: Any = namedtuple("other", ["user", "idle"])
    counters = [other(1000.0, 0.0), core(**times), other(4.0, 9.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: counters)
    monkeypatch.setattr(cores, "usable_cpus", lambda: [1, 2, 7])
    assert read_core_times() == (8.75 + 4.0, 3.0)


BURN = """
import sys, time
while time.process_time() < {seconds}: pass
print(time.process_time(), flush=True)
sys.stdin.readline()
"""


def test_what_processes_of_its_own_compute_is_no_work_of_others(monkeypatch: Patch) -> None:
    """While they run, and once they ended."""
    machine = [0.0]

    def tell(percpu: bool) -> list[Any]:
        """Two cores, the first of which is another lane's, and busier."""
        assert percpu
        return [psutil._pslinux.scputimes(k * machine[0], *[0.0] * 9) for k in (1000, 1)]

    monkeypatch.setattr(psutil, "cpu_times", tell)
    monkeypatch.setattr(cores, "usable_cpus", lambda: [1])
    for ends in (False, True):
        others, before = OtherWork(), read_cpu_time()
        pipe = subprocess.PIPE
        with others.watch():
            own = time.process_time()
            child = subprocess.Popen(
                [sys.executable, "-c", BURN.format(seconds=0.5)], stdin=pipe, stdout=pipe, text=True
            )
            burnt = float(child.stdout.readline())
            if ends:
                child.communicate("\n")
            # the machine computed what we and the child did, and nothing else
            machine[0] += time.process_time() - own + burnt
        child.communicate("\n" if not ends else None)
        # the kernel counts a process's time in hundredths of a second
        assert read_cpu_time() - before >= 0.48
        assert others.cores() * others.sums[2] < 0.1
