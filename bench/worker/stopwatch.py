"""Where the time of a worker goes, and that of the cores that it works on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.environment import read_core_times, usable_cpus
from bench.processes import read_cpu_time


class Stopwatch:
    """Divides the life of a process into parts, which add up to the whole, from the
    time.monotonic() when it was asked for, in s. The processes of a machine share that clock, so
    another one may have read it."""

    def __init__(self, started: float) -> None:
        self._started = self.until = started
        self.parts: dict[str, float] = {}

    def lap(self, part: str, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self.parts[part] = self.parts.get(part, 0.0) + now - self.until
        self.until = now

    @property
    def total(self) -> float:
        return self.until - self._started


class OtherWork:
    """How much of the cores that this process may use others use while it works."""

    def __init__(self, busy: float = 0.0, own: float = 0.0, wall: float = 0.0) -> None:
        """Go on from these sums, in s of cores and of the clock."""
        self.sums = busy, own, wall
        self.on = usable_cpus()

    @classmethod
    def add(cls, ranks: Sequence[OtherWork]) -> OtherWork:
        """That of processes that work side by side: none of them is another to the first. Cores
        that several of them share count once."""
        busy = {tuple(one.on): one.sums[0] for one in ranks}
        return cls(sum(busy.values()), sum(one.sums[1] for one in ranks), ranks[0].sums[2])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what happens within; may be entered again."""
        start = self._read()
        yield
        busy, own, wall = (
            so_far + after - before
            for so_far, before, after in zip(self.sums, start, self._read(), strict=True)
        )
        self.sums = busy, own, wall

    def cores(self) -> float:
        """Cores that others, the hypervisor's other guests among them, have used on average."""
        busy, own, wall = self.sums
        return max(0.0, busy - own) / wall if wall else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        # the processes that this one starts, such as a DataLoader's workers, are not others
        return sum(read_core_times()), read_cpu_time(), time.monotonic()
