"""A card that is read through its vendor's library: its calls, and its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from bench.gpu.device import Depth, Device, Process, ProcessTree, Reading

Listed = Iterable[tuple[int, int | None]]
"""Processes on a card: pid, and memory in bytes if known."""


class Call:
    """A call to a library for one quantity. ``ways`` are alternatives, the preferred one first, as
    drivers and versions of a library differ in the calls they support. An ``instance`` call may be
    made for a MIG instance, others only for the whole card."""

    def __init__(
        self, depth: Depth, *ways: Callable[[Any, Any], Any], instance: bool = False
    ) -> None:
        self.depth, self.ways, self.instance = depth, ways, instance


class LibraryCard(Device):
    """A card, or an ``instance`` of one, read by ``calls``. A call that the driver or the library
    lacks is made once and its quantity stays None; one that fails temporarily is made again next
    time. The calls ``others`` and ``display`` return `Listed`: processes that compute or draw.

    A subclass gives the ``name`` of the library, and says which of its ``errors`` is a lack.
    """

    name = ""

    def __init__(
        self,
        library: Any,
        calls: Mapping[str, Call],
        errors: tuple[type[Exception], ...],
        card: Any,
        instance: Any = None,
    ) -> None:
        self._library, self._calls, self._errors = library, calls, errors
        self._card, self._instance = card, instance or card
        self._lacks: dict[str, str] = {}
        self._fails: dict[str, str] = {}
        self._ways = {name: list(call.ways) for name, call in calls.items()}
        self._tree: ProcessTree | None = None
        self._before: set[int] = set()
        self._listed = False  # the worker has been seen under its own pid
        self._alias: int | None = None
        self._names: dict[int, str | None] = {}

    def is_lack(self, error: Exception) -> bool:
        """Return whether an error is permanent, so that asking again does not help."""
        raise NotImplementedError

    def word(self, error: Exception) -> str:
        return str(error)

    @property
    def notes(self) -> Sequence[str]:
        """A remark on the pid under which the library lists the worker, if it is not its own."""
        if self._alias is None or self._listed:
            return ()
        return (f"{self.name} lists the worker as pid {self._alias}, of another pid namespace",)

    def watch(self, pid: int) -> None:
        self._tree = ProcessTree(pid)

    def read(self, depth: Depth) -> Sequence[Reading]:
        now = time.monotonic_ns()
        values = {
            name: self._ask(name) for name, call in self._calls.items() if call.depth <= depth
        }
        display = values.pop("display", None) or ()
        if (compute := values.get("others")) is not None:
            values["process_bytes"], values["others"] = self._attribute(compute, display)
        elif depth >= Depth.SLOW:
            self._fails["process_bytes"] = self.why("others")
        return (Reading(now, **values),)

    def why(self, quantity: str) -> str:
        return self._lacks.get(quantity) or self._fails.get(quantity, "")

    def _ask(self, name: str) -> Any:
        ways = self._ways[name]
        handle = self._instance if self._calls[name].instance else self._card
        while ways and name not in self._lacks:
            try:
                value = ways[0](self._library, handle)
            except self._errors as error:
                said = f"{self.name}: {self.word(error)}"
                if not self.is_lack(error):
                    self._fails[name] = said
                    return None
                if not ways[1:]:
                    self._lacks[name] = said
                ways.pop(0)
            else:
                del ways[1:]  # v1 and v2 of a call count differently: never change half way
                return value
        return None

    def _attribute(
        self, compute: Listed, drawing: Listed
    ) -> tuple[int | None, tuple[Process, ...]]:
        """Return the memory of the worker's processes, and the other processes on the card."""
        # a process on the card holds some memory: 0 means that the driver does not know how much
        computing = {pid: size or None for pid, size in compute}
        listed = {pid: size or None for pid, size in drawing}
        # Under WDDM every window is listed as computing too, with its memory unknown.
        display = {pid for pid in listed if computing.get(pid) is None}
        listed |= computing
        mine = self._own(listed)
        others = tuple(
            Process(pid, size, self._name(pid), pid in display)
            for pid, size in listed.items()
            if pid not in mine
        )
        sizes = [size for pid in mine if (size := listed[pid]) is not None]
        if mine and len(sizes) == len(mine):
            return sum(sizes), others
        self._fails["process_bytes"] = (
            "the driver does not report a process's memory" if mine else "the card did not list it"
        )
        return None, others

    def _own(self, listed: Mapping[int, int | None]) -> set[int]:
        """Return the worker's pids among those listed. In a container the library may list host
        pids. If the worker is not listed, the first new process whose pid does not exist here is
        taken to be it, unless several appear at once."""
        if self._tree is None:
            self._before |= listed.keys()
            return set()
        if listed.keys() - self._tree.pids - self._names.keys():
            self._tree.refresh()
        mine = listed.keys() & self._tree.pids
        self._listed |= bool(mine)
        if self._listed:
            return mine
        if self._alias is None:
            from psutil import pid_exists

            hidden = [pid for pid in listed.keys() - self._before if not pid_exists(pid)]
            self._alias = hidden[0] if len(hidden) == 1 else None
        return {pid for pid in listed if pid == self._alias}

    def _name(self, pid: int) -> str | None:
        if pid not in self._names:
            import psutil

            self._names[pid] = None
            with suppress(psutil.Error):
                self._names[pid] = psutil.Process(pid).name()
        return self._names[pid]
