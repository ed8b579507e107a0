"""The CPU cores that this process may use, and their use by other processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.processes import read_cpu_time


def usable_cpus() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Quota:
    """The CPU time that control groups allow, in cores, and the file that sets it."""

    cores: float
    file: str


RAISE_QUOTA = "docker run --cpus, limits.cpu of a pod, or CPUQuota of a systemd unit"


def read_quota(
    process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")
) -> Quota | None:
    """Return the smallest quota of this process's control group, of version 2, and of those above
    it; None if there is none."""
    found: list[Quota] = []
    with suppress(OSError):
        group = (process / "cgroup").read_text("utf-8", "replace").rpartition("::/")[2].strip()
        for folder in (top / group, *(top / group).parents):
            with suppress(OSError, ValueError):  # "max 100000" without a quota
                file = folder / "cpu.max"
                quota, period = map(int, file.read_text("ascii").split())
                found.append(Quota(quota / period, str(file)))
    return min(found, key=lambda quota: quota.cores, default=None)


def count_cores() -> float:
    """Return how many cores this process may use: those that it is held to, or fewer by a quota."""
    quota = read_quota()
    cores = len(usable_cpus())
    return cores if quota is None else min(cores, quota.cores)


def spell_cpu(name: str, cores: float) -> str:
    """Format a CPU and how many of its cores may be used, as in records.

    >>> spell_cpu("AMD EPYC", 2), spell_cpu("AMD EPYC", 1), spell_cpu("AMD EPYC", 0.3)
    ('AMD EPYC, 2 cores', 'AMD EPYC, 1 core', 'AMD EPYC, 0.3 cores')
    """
    return f"{name}, {cores:g} core{'s' if cores != 1 else ''}"


def parse_cpu(text: str) -> tuple[str, float | None]:
    """Parse the output of `spell_cpu`; the number is None if it is missing.

    >>> parse_cpu("AMD EPYC, 1 core"), parse_cpu("AMD EPYC, 0.3 cores"), parse_cpu("AMD EPYC")
    (('AMD EPYC', 1), ('AMD EPYC', 0.3), ('AMD EPYC', None))
    """
    found = re.fullmatch(r"(.*), ([0-9]+)(\.[0-9]+)? cores?", text)
    if not found:
        return text, None
    return found[1], float(found[2] + found[3]) if found[3] else int(found[2])


def share_cores(cores: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Return the cores of each of ``size`` processes: equal shares, or one shared by several.

    >>> share_cores([0, 1, 2, 3, 4], 2), share_cores([0, 1], 3)
    ([(0, 1), (2, 3)], [(0,), (1,), (0,)])
    """
    each = len(cores) // size
    if not each:
        return [(cores[rank % len(cores)],) for rank in range(size)]
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(size)]


def read_governor(folder: Path = Path("/sys/devices/system/cpu")) -> str | None:
    """Return the frequency governors of the usable CPUs, joined by a comma; None if unknown."""
    files = (folder / f"cpu{cpu}" / "cpufreq" / "scaling_governor" for cpu in usable_cpus())
    return ", ".join(sorted({file.read_text().strip() for file in files if file.exists()})) or None


def read_core_times() -> tuple[float, float]:
    """Return for how many seconds the usable cores have been busy so far, and for how many other
    guests of the hypervisor had them. Work on other cores is not counted."""
    import psutil

    cpus, busy, stolen = psutil.cpu_times(percpu=True), 0.0, 0.0
    for times in (cpus[index]._asdict() for index in usable_cpus() if index < len(cpus)):
        stolen += times.pop("steal", 0.0)
        # the kernel counts a guest's time in user and nice too
        unused = ("idle", "iowait", "guest", "guest_nice")
        busy += sum(spent for kind, spent in times.items() if kind not in unused)
    return busy, stolen


class OtherWork:
    """The use of this process's cores by others while it works."""

    def __init__(
        self, busy: float = 0.0, own: float = 0.0, wall: float = 0.0, stolen: float = 0.0
    ) -> None:
        """Continue from these sums, in core seconds and wall seconds; ``stolen`` is a part of
        ``busy``. This process and its descendants are not others."""
        self.sums = busy, own, wall, stolen
        self.on, self.quota = usable_cpus(), read_quota()

    @classmethod
    def add(cls, ranks: Sequence[OtherWork]) -> OtherWork:
        """Combine ranks that run side by side and so are not others to each other. Cores that
        several of them share count once; wall time is that of the first."""
        cores = {tuple(one.on): one.sums for one in ranks}
        busy, stolen = (sum(sums[at] for sums in cores.values()) for at in (0, 3))
        added = cls(busy, sum(one.sums[1] for one in ranks), ranks[0].sums[2], stolen)
        added.on = sorted({core for on in cores for core in on})
        return added

    def start(self) -> None:
        self._started = self._read()

    def stop(self) -> None:
        """Count what happened since `start`."""
        busy, own, wall, stolen = (
            so_far + now - before
            for so_far, before, now in zip(self.sums, self._started, self._read(), strict=True)
        )
        self.sums = busy, own, wall, stolen

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what happens in the block; may be entered again."""
        self.start()
        yield
        self.stop()

    def cores(self, guests: bool = True) -> float:
        """Return the mean number of cores used by others, including other ``guests`` by default.
        Cores beyond a quota are theirs: what they compute there takes nothing from this process."""
        busy, own, wall, stolen = self.sums
        used = max(0.0, busy - own - (0.0 if guests else stolen)) / wall if wall else 0.0
        beyond = max(0.0, len(self.on) - self.quota.cores) if self.quota else 0.0
        return max(0.0, used - beyond)

    def stolen(self) -> float:
        """Return the share of the cores that other guests of the hypervisor had."""
        _, _, wall, stolen = self.sums
        return min(1.0, stolen / (wall * len(self.on))) if wall else 0.0

    def _read(self) -> tuple[float, float, float, float]:
        busy, stolen = read_core_times()
        # the processes that this one starts, such as a DataLoader's workers, are not others
        return busy + stolen, read_cpu_time(), time.monotonic(), stolen
