"""A memory limit: where it stands on a CPU, what the context is on a GPU, what is refused before.

Real processes run into real limits; a GPU's memory is told by readings.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.machine.gpus import Depth, Device, Reading, Unreadable
from bench.networks.data import DatasetInfo
from bench.schema.case import Case
from bench.schema.record import Status
from bench.sweep import __main__ as sweep
from bench.workers.executors import Settings
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Job
from bench.workers.limit import (
    GpuLimit,
    MemoryLimitError,
    share_of_device,
)

MIB, GIB = 2**20, 2**30
linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits mappings on Linux")


# ------------------------------------------------------------------------------------ on a CPU

TO_THE_WALL = """
import os
import sys
import torch
from bench.base.processes import read_held_memory
from bench.workers.limit import HostLimit

limit = HostLimit(int(sys.argv[1]))
limit.impose()
limit.adjust()
held, peak = [], 0
try:
    while True:
        held.append(torch.ones(2**18 * int(sys.argv[2])))
        peak = max(peak, read_held_memory(os.getpid()))
except RuntimeError as error:
    limit.lift()
    held.append(torch.ones(2**25))
    print(peak, str(error).splitlines()[0])
"""


@linux
@pytest.mark.slow
def test_what_a_process_holds_ends_at_the_limit() -> None:
    """Within a block of 1 MiB, and 8 MiB that mappings hold and do not touch."""
    limit, block_mib = 600 * MIB, 1
    command = [sys.executable, "-c", TO_THE_WALL, str(limit), str(block_mib)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, _, reason = done.stdout.partition(" ")
    assert limit - (block_mib + 8) * MIB < int(peak) <= limit + MIB
    assert "DefaultCPUAllocator: can't allocate memory" in reason


HOLDS = """
import mmap, os, sys
from bench.base.processes import read_held_memory, read_peak_memory
size = int(sys.argv[2])
print(read_held_memory(os.getpid()))
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), size, access=mmap.ACCESS_READ)
mapped.find(b"x")
print(read_held_memory(os.getpid()))
own = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
own[::mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
print(read_held_memory(os.getpid()))
own.close()
print(read_peak_memory())
"""


@linux
def test_memory_and_its_peak_are_without_pages_of_files(tmp_path: Path) -> None:
    """The kernel maps and takes them back as it likes; memory without a file stays."""
    size = 64 * MIB
    (tmp_path / "file").write_bytes(bytes(size))
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "file"), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, mapped, own, peak = map(int, done.stdout.split())
    assert abs(mapped - before) < 0.1 * size
    assert 0.9 * size < own - mapped < 1.1 * size
    assert abs(peak - own) < 0.1 * size


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "limit", "status", "reason"),
    [
        ("good", "1300MiB", Status.OK, ""),
        ("fills", "1300MiB", Status.OOM, "needs more than 1300MiB of host memory"),
        (
            *("good", "64MiB", Status.OOM),
            "needs more than 64MiB of host memory: the process alone takes",
        ),
        (
            *("crashes", "1300MiB", Status.OOM_SUSPECTED),
            "crashed with SIGSEGV, under a memory limit of 1300MiB",
        ),
    ],
)
def test_every_way_to_run_into_a_limit_is_a_row(
    model: str, limit: str, status: Status, reason: str, data: DatasetInfo
) -> None:
    case = Case(f"models_for_tests:{model}", "synthetic", device="cpu", batch_size=32, steps=1)
    job = Job(replace(case, memory_limit=limit), data.folder)
    found = SubprocessExecutor(Settings(300)).run(job, lambda event: None, lambda: False)
    assert found.status is status, found.reason
    assert reason in found.reason
    if status is Status.OK:
        assert found.measurement.peak_process_bytes < 1300 * MIB


# ------------------------------------------------------------------------------------ on a GPU


class Card(Device):
    """A GPU of 80 GiB whose readings are given, one after the other; the last one stays."""

    def __init__(self, *readings: Reading) -> None:
        self.readings = [*readings]
        self.pids: list[int] = []
        self.closed = False

    def watch(self, pid: int) -> None:
        self.pids.append(pid)

    def read(self, depth: Depth) -> tuple[Reading, ...]:
        return (self.readings.pop(0) if len(self.readings) > 1 else self.readings[0],)

    def close(self) -> None:
        self.closed = True


@given(
    total=st.integers(GIB, 200 * GIB), limit=st.floats(0.01, 1), context=st.integers(0, 200 * GIB)
)
def test_the_cap_is_the_limit_less_the_context(total: int, limit: float, context: int) -> None:
    limit_bytes = int(total * limit)
    if context >= limit_bytes:
        with pytest.raises(MemoryLimitError, match="the context alone takes"):
            share_of_device(limit_bytes, context, total)
        return
    share = share_of_device(limit_bytes, context, total)
    assert 0 < share <= 1
    assert abs(int(share * total) - (limit_bytes - context)) <= 1, "torch cuts off the fraction"


@pytest.fixture
def caps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    caps: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1 * GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", caps.append)
    return caps


def test_where_a_driver_lists_no_process_the_context_is_what_the_device_holds_more(
    caps: list[float],
) -> None:
    """As under WSL 2: the memory of others is in the baseline already."""
    limit = GpuLimit(21 * GIB, Card(Reading(0, device_bytes=7 * GIB), Reading(1, 10 * GIB)))
    limit.adjust()
    assert limit.context_bytes == 2 * GIB, "of 3 GiB, the allocator has one"
    assert "more than before CUDA was used" in limit.note
    assert [share * 80 for share in caps] == pytest.approx([19])


def test_where_a_driver_tells_nothing_the_whole_device_is_the_context(
    caps: list[float],
) -> None:
    limit = GpuLimit(None, Unreadable("no NVIDIA driver"))
    limit.adjust()
    limit.lift()
    assert (limit.context_bytes, caps) == (9 * GIB, [])
    assert "other processes too" in limit.note


def test_the_cap_is_set_anew_when_the_kernels_are_loaded(caps: list[float]) -> None:
    card = Card(Reading(0), Reading(1, process_bytes=2 * GIB), Reading(2, process_bytes=5 * GIB))
    limit = GpuLimit(21 * GIB, card)
    assert card.pids == [os.getpid()]
    limit.impose()
    assert limit.context_bytes == 1 * GIB
    limit.adjust()
    assert limit.context_bytes == 4 * GIB
    limit.lift()
    assert [share * 80 for share in caps] == pytest.approx([20, 17, 80])
    assert card.closed


# ----------------------------------------------------------------------- before and after a case


def test_a_sweep_refuses_it_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--device cpu --dataset synthetic --model dpn-small --memory-limit 64MiB 900000GiB"
    assert sweep.main([*flags.split(), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "--memory-limit 900000GiB is above the" in error
    assert not (tmp_path / "out").exists()
