"""The CPU cores that this process may use, and who uses them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.processes import read_cpu_time


def usable_cpus() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def spell_cpu(name: str, cores: int) -> str:
    """A CPU and how many of its cores may be used, as records have it.

    >>> spell_cpu("AMD EPYC", 2), spell_cpu("AMD EPYC", 1)
    ('AMD EPYC, 2 cores', 'AMD EPYC, 1 core')
    """
    return f"{name}, {cores} core{'s' if cores > 1 else ''}"


def parse_cpu(text: str) -> tuple[str, int | None]:
    """What `spell_cpu` was given; None where the text does not say.

    >>> parse_cpu("AMD EPYC, 1 core"), parse_cpu("AMD EPYC")
    (('AMD EPYC', 1), ('AMD EPYC', None))
    """
    found = re.fullmatch(r"(.*), ([0-9]+) cores?", text)
    return (found[1], int(found[2])) if found else (text, None)


def share_cores(cores: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The cores of each of ``size`` processes: equal shares, or one for several of them.

    >>> share_cores([0, 1, 2, 3, 4], 2), share_cores([0, 1], 3)
    ([(0, 1), (2, 3)], [(0,), (1,), (0,)])
    """
    each = len(cores) // size
    if not each:
        return [(cores[rank % len(cores)],) for rank in range(size)]
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(size)]


def read_governor(folder: Path = Path("/sys/devices/system/cpu")) -> str | None:
    """The frequency governors of the CPUs that this process may use, joined by a comma; None where
    none is told."""
    governors = set()
    for cpu in usable_cpus():
        with suppress(OSError):
            file = folder / f"cpu{cpu}" / "cpufreq" / "scaling_governor"
            governors.add(file.read_text().strip())
    return ", ".join(sorted(governors)) or None


def read_core_times() -> tuple[float, float]:
    """Seconds for which the cores that this process may use were busy so far, and for which other
    guests of its hypervisor had them. What runs on other cores takes nothing from these."""
    import psutil

    cpus, busy, stolen = psutil.cpu_times(percpu=True), 0.0, 0.0
    for times in (cpus[index]._asdict() for index in usable_cpus() if index < len(cpus)):
        stolen += times.pop("steal", 0.0)
        # the kernel counts a guest's time in user and nice too
        unused = ("idle", "iowait", "guest", "guest_nice")
        busy += sum(spent for kind, spent in times.items() if kind not in unused)
    return busy, stolen


class OtherWork:
    """How much of the cores that this process may use others use while it works."""

    def __init__(
        self,
        busy: float = 0.0,
        own: float = 0.0,
        wall: float = 0.0,
        stolen: float = 0.0,
        root: int | None = None,
    ) -> None:
        """Go on from these sums, in s of cores and of the clock; what was ``stolen`` is a part of
        ``busy``. Process ``root`` and its descendants, by default this one, are not others."""
        self.sums = busy, own, wall, stolen
        self.on, self._root = usable_cpus(), root

    @classmethod
    def add(cls, ranks: Sequence[OtherWork]) -> OtherWork:
        """That of processes that work side by side: none of them is another to the first. Cores
        that several of them share count once."""
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
        """Count what happens within; may be entered again."""
        self.start()
        yield
        self.stop()

    def cores(self, guests: bool = True) -> float:
        """Cores that others used on average, other ``guests`` of the hypervisor among them."""
        busy, own, wall, stolen = self.sums
        return max(0.0, busy - own - (0.0 if guests else stolen)) / wall if wall else 0.0

    def stolen(self) -> float:
        """The share of the cores that other guests of the hypervisor had."""
        _, _, wall, stolen = self.sums
        return min(1.0, stolen / (wall * len(self.on))) if wall else 0.0

    def _read(self) -> tuple[float, float, float, float]:
        busy, stolen = read_core_times()
        # the processes that this one starts, such as a DataLoader's workers, are not others
        return busy + stolen, read_cpu_time(self._root), time.monotonic(), stolen
