"""What a monitor watches: a `Device`, and the readings it gives.

`Host` is a CPU and `Unreadable` a card that nothing can be read from; `bench.gpu.nvml` has the
card itself and `bench.gpu.recording` a recording of one. torch is never imported here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import psutil


class Depth(IntEnum):
    """How much to read. On an H200 memory takes 8 µs and the energy counter 3.5 ms."""

    FAST = 0  # memory
    SLOW = 1  # and power, clocks, temperature, throttling, processes
    EDGE = 2  # and energy: the boundary of a phase


@dataclass(frozen=True, slots=True)
class Process:
    """A process on the card that is not the worker's; ``display``: it draws, as a desktop does."""

    pid: int
    bytes: int | None = None
    name: str | None = None
    display: bool = False

    def __str__(self) -> str:
        """As in the column `neighbours`: ``pid 123 (python): 2100000000 B``."""
        name = f" ({self.name})" if self.name else ""
        return f"pid {self.pid}{name}: " + (f"{self.bytes} B" if self.bytes else "memory unknown")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device said at one moment, in SI units; None where it said nothing.

    ``time_ns`` is monotonic. ``device_bytes`` is raw: all memory in use on the card, by anyone.
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
    others: tuple[Process, ...] | None = None


READINGS = tuple(f.name for f in fields(Reading) if f.name != "time_ns")


class Device(Protocol):
    """What a monitor watches. It never raises: what cannot be read is None, and `why` tells."""

    total_bytes: int | None

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of its readings should know."""

    def watch(self, pid: int) -> None:
        """Count this process and its descendants as the worker's own from now on."""

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Take one reading; a recording gives, at an edge, all it holds up to that edge."""

    def why(self, quantity: str) -> str:
        """Say in one line why ``quantity`` of `READINGS` is None; empty if nothing is known."""

    def close(self) -> None:
        """Let go of the device."""


class ProcessTree:
    """The worker's process and its descendants; those that have ended remain its own."""

    def __init__(self, pid: int) -> None:
        import psutil

        self.pids = {pid}
        self._alive: list[psutil.Process] = []
        self._error = psutil.Error
        with suppress(psutil.Error):
            self._alive = [psutil.Process(pid)]
        self.refresh()

    def refresh(self) -> None:
        """Look for new descendants: about 13 µs for every process of the machine."""
        with suppress(self._error, IndexError):
            root = self._alive[0]
            self._alive = [root, *root.children(recursive=True)]
        self.pids.update(process.pid for process in self._alive)

    def resident_bytes(self) -> int | None:
        """Resident set of all of them together; None once they have ended."""
        total = 0
        for process in self._alive:
            with suppress(self._error):
                total += process.memory_info().rss
        return total or None


@dataclass
class Unreadable:
    """A card nobody can look at: every quantity is None, for one reason."""

    reason: str
    total_bytes: int | None = None
    notes: Sequence[str] = ()

    def watch(self, pid: int) -> None:
        """Nothing to watch."""

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Only the time."""
        return (Reading(time.monotonic_ns()),)

    def why(self, quantity: str) -> str:
        """The reason."""
        return self.reason

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class Host(Unreadable):
    """A CPU: the resident set of the worker and its descendants, and nothing else.

    Descendants are looked for at the edges of phases only: the search would take from the very
    cores that train.
    """

    reason: str = "the case ran on a CPU"
    _tree: ProcessTree | None = field(default=None, repr=False)

    def watch(self, pid: int) -> None:
        """Count this process and its descendants as the worker's own from now on."""
        self._tree = ProcessTree(pid)

    def read(self, depth: Depth) -> Sequence[Reading]:
        """The resident set."""
        now = time.monotonic_ns()
        if self._tree is None:
            return (Reading(now),)
        if depth == Depth.EDGE:
            self._tree.refresh()
        return (Reading(now, process_bytes=self._tree.resident_bytes()),)

    def why(self, quantity: str) -> str:
        """The worker had ended, or the reason."""
        return "the worker had ended" if quantity == "process_bytes" else self.reason
