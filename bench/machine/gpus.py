"""The `Device` that a monitor watches, and its readings.

`HostReadings` is a CPU and `Unreadable` a card that nothing can be read from; `bench.machine.nvml`
has the card itself. torch is never imported here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import IntEnum

from bench.base.processes import list_children, read_held_memory, read_memory_share


class Depth(IntEnum):
    """How much to read. On an H200 memory takes 8 µs and the energy counter 3.5 ms."""

    FAST = 0  # memory
    SLOW = 1  # and power, clocks, temperature, throttling, processes
    EDGE = 2  # and energy: the boundary of a phase


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on the card and is not the worker's."""

    pid: int
    bytes: int | None = None
    name: str | None = None

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"pid {self.pid}{name}: " + (f"{self.bytes} B" if self.bytes else "memory unknown")


@dataclass(frozen=True)
class Reading:
    """The values read from a device at one moment, in SI units; None if not available.

    ``time_ns`` is monotonic. ``device_bytes`` is all memory in use on the card, by any process.
    ``energy_j`` is a counter with an arbitrary start. ``throttle`` names reasons of `THROTTLES`.
    """

    time_ns: int
    device_bytes: int | None = None
    process_bytes: int | None = None
    energy_j: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] | None = None
    others: tuple[GpuProcess, ...] | None = None


READINGS = tuple(f.name for f in fields(Reading) if f.name != "time_ns")


class Device:
    """A watched device. It never raises: values that cannot be read are None; `why` says why."""

    whole = False
    """Whether a command is watched: what counts is all that the worker starts, and not itself."""

    @property
    def note(self) -> str:
        """What is to be known of its readings; empty if nothing is."""
        return ""

    def watch(self, pid: int) -> None:
        """Count this process and its descendants as the worker's own from now on."""

    def is_used(self) -> bool:
        """Return whether the worker was seen on it; True also where that cannot be seen."""
        return True

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Take one reading; a recording returns, at an edge, all its readings up to that edge."""
        return (Reading(time.monotonic_ns()),)

    def why(self, quantity: str) -> str:
        """Say in one line why ``quantity`` of `READINGS` is None; empty if nothing is known."""
        return ""

    def close(self) -> None:
        """Release the device."""


class ProcessTree:
    """The worker's process and its descendants, including those that have ended."""

    def __init__(self, pid: int) -> None:
        self._root, self.pids = pid, {pid}
        self.refresh()

    def refresh(self) -> None:
        """Look for new descendants, which takes about 13 µs per process of the machine."""
        self.alive = [self._root, *list_children(self._root)]
        self.pids.update(self.alive)


class HeldMemory:
    """The memory that some processes hold, a page that several of them share counted once. ``note``
    is what is to be known of it."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Of ``pids``, those so far, all pages are theirs, though they share some with the server
        that they were forked from."""
        self.note, self._repeated, self._due_s = "", 0, 0.0
        self._pids = pids
        self._outside = self._read_repeated() or 0

    def update(self, pids: Sequence[int]) -> None:
        """Count these processes from now on, and look for what they share, if it is time."""
        changed, began_s = pids != self._pids, time.monotonic()
        self._pids = pids
        if len(pids) < 2:
            self._repeated = 0
        elif changed or began_s >= self._due_s:
            repeated = self._read_repeated()
            if repeated is None:
                self.note = "what processes share is counted in the memory of each of them"
            self._repeated = max(0, (repeated or 0) - self._outside)
            # it takes 10 ms for each GiB of a process: a fiftieth of the time while they stay
            self._due_s = time.monotonic() + 50 * (time.monotonic() - began_s)

    def _read_repeated(self) -> int | None:
        """Return by how many bytes the sum of what they hold is above that of their shares; None
        if the system does not tell."""
        repeated = 0
        for pid in self._pids:
            with suppress(Exception):  # it has ended
                if (share := read_memory_share(pid)) is None:
                    return None
                repeated += read_held_memory(pid) - share
        return repeated

    def read(self) -> int | None:
        sizes = []
        for pid in self._pids:
            with suppress(Exception):  # it has ended
                sizes.append(read_held_memory(pid))
        # of those that share pages some may have ended since they were looked at
        return max(sum(sizes) - self._repeated, *sizes, 0) if sizes else None


@dataclass
class Unreadable(Device):
    """A card that cannot be read: every quantity is None, for one reason."""

    reason: str

    def why(self, quantity: str) -> str:
        return self.reason


@dataclass
class HostReadings(Unreadable):
    """A CPU: only the memory that the worker and its descendants hold is read. New descendants are
    looked for only at phase boundaries, as the search takes time from the cores that train, or if
    it is `whole` five times a second, as a command starts what it likes."""

    reason: str = "the case ran on a CPU"
    _tree: ProcessTree | None = field(default=None, repr=False)
    _memory: HeldMemory | None = field(default=None, repr=False)

    def watch(self, pid: int) -> None:
        self._tree = ProcessTree(pid)
        self._memory = HeldMemory([pid][self.whole :])

    def read(self, depth: Depth) -> Sequence[Reading]:
        if self._tree is None or self._memory is None:
            return super().read(depth)
        now = time.monotonic_ns()
        if depth == Depth.EDGE or (self.whole and depth == Depth.SLOW):
            self._tree.refresh()
            self._memory.update(self._tree.alive[self.whole :])
        return (Reading(now, process_bytes=self._memory.read() or None),)

    @property
    def note(self) -> str:
        return self._memory.note if self._memory else ""

    def why(self, quantity: str) -> str:
        return "the worker had ended" if quantity == "process_bytes" else self.reason
