"""What a monitor watches: a `Device`, and the readings it gives.

`Host` is a CPU and `Unreadable` a card that nothing can be read from; `bench.gpu.nvml` has the
card itself. torch is never imported here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from bench.processes import read_held_memory

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


class Device:
    """What a monitor watches. It never raises: what cannot be read is None, and `why` tells."""

    total_bytes: int | None = None

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of its readings should know."""
        return ()

    def watch(self, pid: int) -> None:
        """Count this process and its descendants as the worker's own from now on."""

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Take one reading; a recording gives, at an edge, all it holds up to that edge."""
        return (Reading(time.monotonic_ns()),)

    def why(self, quantity: str) -> str:
        """Say in one line why ``quantity`` of `READINGS` is None; empty if nothing is known."""
        return ""

    def close(self) -> None:
        """Let go of the device."""


_TOGETHER: Mapping[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("energy_j", "power_w", "power_limit_w"), sum),
    **dict.fromkeys(("sm_clock_mhz", "memory_clock_mhz"), min),
    "temperature_c": max,
    "throttle": lambda seen: tuple(dict.fromkeys(chain.from_iterable(seen))),
    "others": lambda seen: tuple(chain.from_iterable(seen)),
}
"""What several cards are together; in the rest, memory, the first stands for itself."""


class Several(Device):
    """Cards that train one network, read as one: energy and power are of all together, clocks of
    the slowest and temperature of the hottest; memory is that of the first."""

    def __init__(self, cards: Sequence[Device]) -> None:
        self._cards = cards
        self.total_bytes = cards[0].total_bytes
        self.pids: Sequence[int] = ()
        """The worker's process on each card; by default the one that is watched, on all."""

    @property
    def notes(self) -> Sequence[str]:
        return list(dict.fromkeys(note for card in self._cards for note in card.notes))

    def watch(self, pid: int) -> None:
        for card, own in zip(self._cards, self.pids or [pid] * len(self._cards), strict=True):
            card.watch(own)

    def read(self, depth: Depth) -> Sequence[Reading]:
        readings = [card.read(depth)[-1] for card in self._cards]
        together: dict[str, Any] = {}
        for name, combine in _TOGETHER.items():
            seen = [getattr(reading, name) for reading in readings]
            together[name] = None if None in seen else combine(seen)
        return (replace(readings[0], **together),)

    def why(self, quantity: str) -> str:
        return next(filter(None, (card.why(quantity) for card in self._cards)), "")

    def close(self) -> None:
        for card in self._cards:
            card.close()


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

    def held_bytes(self) -> int | None:
        total = 0
        for process in self._alive:
            with suppress(self._error, OSError):
                total += read_held_memory(process.pid)
        return total or None


@dataclass
class Unreadable(Device):
    """A card nobody can look at: every quantity is None, for one reason."""

    reason: str
    total_bytes: int | None = None
    notes: Sequence[str] = ()

    def why(self, quantity: str) -> str:
        return self.reason


@dataclass
class Host(Unreadable):
    """A CPU: the memory that the worker and its descendants hold, and nothing else. Descendants are
    looked for at the edges of phases only: the search would take from the very cores that train."""

    reason: str = "the case ran on a CPU"
    _tree: ProcessTree | None = field(default=None, repr=False)

    def watch(self, pid: int) -> None:
        self._tree = ProcessTree(pid)

    def read(self, depth: Depth) -> Sequence[Reading]:
        if self._tree is None:
            return super().read(depth)
        now = time.monotonic_ns()
        if depth == Depth.EDGE:
            self._tree.refresh()
        return (Reading(now, process_bytes=self._tree.held_bytes()),)

    def why(self, quantity: str) -> str:
        return "the worker had ended" if quantity == "process_bytes" else self.reason
