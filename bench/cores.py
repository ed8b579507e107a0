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
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


@dataclass(frozen=True)
class Quota:
    """The CPU time that control groups allow, in cores, and the file that sets it."""

    cores: float
    file: str


RAISE_QUOTA = "docker run --cpus, limits.cpu of a pod, or CPUQuota of a systemd unit"


def read_quota(process: Path = Path("/proc/self")) -> Quota | None:
    """Return the smallest quota of this process's control groups, of version 1 or 2, and of those
    above them; None if there is none."""
    found: list[Quota] = []
    for folder, top in _list_groups(process):
        for group in (folder, *folder.parents):
            for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
                with suppress(OSError, ValueError, ZeroDivisionError):
                    # "max 100000" without a quota in version 2, and -1 in version 1
                    text = " ".join((group / name).read_text("ascii") for name in names)
                    quota, period = map(int, text.split())
                    if quota > 0:
                        found.append(Quota(quota / period, str(group / names[0])))
            if group == top:
                break
    return min(found, key=lambda quota: quota.cores, default=None)


def _list_groups(process: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of each control group that may hold a quota, and where its tree is
    mounted."""
    try:
        groups, mounts = (
            os.fsdecode((process / name).read_bytes()).splitlines()
            for name in ("cgroup", "mountinfo")
        )
    except OSError:
        return  # not Linux
    for line in mounts:
        (_, _, _, root, place, *_), (kind, _, options) = map(str.split, line.split(" - ", 1))
        controllers = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        if controllers is None or (controllers and controllers not in options.split(",")):
            continue
        for _, names, path in (line.split(":", 2) for line in groups):
            if controllers in names.split(","):
                # a container may see its own group alone, mounted as the root
                below = path.removeprefix(root) if path.startswith(root) else ""
                yield Path(place, below.strip("/")), Path(place)


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
    governors = set()
    for cpu in usable_cpus():
        with suppress(OSError):
            file = folder / f"cpu{cpu}" / "cpufreq" / "scaling_governor"
            governors.add(file.read_text().strip())
    return ", ".join(sorted(governors)) or None


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
        self,
        busy: float = 0.0,
        own: float = 0.0,
        wall: float = 0.0,
        stolen: float = 0.0,
        root: int | None = None,
    ) -> None:
        """Continue from these sums, in core seconds and wall seconds; ``stolen`` is a part of
        ``busy``. Process ``root``, by default this one, and its descendants are not others."""
        self.sums = busy, own, wall, stolen
        self.on, self._root, self.quota = usable_cpus(), root, read_quota()

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
        return busy + stolen, read_cpu_time(self._root), time.monotonic(), stolen
