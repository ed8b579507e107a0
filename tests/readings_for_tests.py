"""Recordings of a device, for tests and for cards that are not at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any

from bench.gpu.device import READINGS, Depth, Device, Process, Reading


class Replay:
    """A recording played back: at each edge, the readings made up to that edge.

    A recording is JSON lines. First ``{"total_bytes": …, "why": {quantity: reason}, "notes": []}``,
    then one `Reading` a line, None left out, with ``"edge": true`` at the edges of phases.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        head, *rows = map(json.loads, lines)
        self.total_bytes: int | None = head.get("total_bytes")
        self.notes: Sequence[str] = head.get("notes", ())
        self._why: Mapping[str, str] = head.get("why", {})
        self._rows = iter(rows)

    def watch(self, pid: int) -> None: ...

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Nothing between edges; at an edge everything up to it; at the end nothing."""
        readings = []
        for row in self._rows if depth == Depth.EDGE else ():
            edge = row.pop("edge", False)
            if row.get("others") is not None:
                row["others"] = tuple(Process(**process) for process in row["others"])
            if row.get("throttle") is not None:
                row["throttle"] = tuple(row["throttle"])
            readings.append(Reading(**row))
            if edge:
                break
        return readings

    def why(self, quantity: str) -> str:
        return self._why.get(quantity, "")

    def close(self) -> None: ...


class Recorder:
    def __init__(self, device: Device, file: IO[str]) -> None:
        self._device = device
        self._file = file
        self._rows: list[dict[str, Any]] = []
        self.total_bytes = device.total_bytes
        self.watch = device.watch
        self.why = device.why

    @property
    def notes(self) -> Sequence[str]:
        return self._device.notes

    def read(self, depth: Depth) -> Sequence[Reading]:
        readings = self._device.read(depth)
        for reading in readings:
            row = {name: value for name, value in asdict(reading).items() if value is not None}
            self._rows.append(row)
        if readings and depth == Depth.EDGE:
            self._rows[-1]["edge"] = True
        return readings

    def close(self) -> None:
        why = {quantity: self.why(quantity) for quantity in READINGS if self.why(quantity)}
        head = {"total_bytes": self.total_bytes, "why": why, "notes": list(self.notes)}
        self._device.close()
        self._file.writelines(json.dumps(row) + "\n" for row in (head, *self._rows))
