"""Recordings of a device, for tests and for cards that are not at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from bench.machine.gpus import Depth, Device, GpuProcess, Reading


class Replay(Device):
    """A recording played back: at each edge, the readings made up to that edge.

    A recording is JSON lines. First ``{"why": {quantity: reason}}``,
    then one `Reading` a line, None left out, with ``"edge": true`` at the edges of phases.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        head, *rows = map(json.loads, lines)
        self._why, self._rows = head.get("why", {}), iter(rows)

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Nothing between edges; at an edge everything up to it; at the end nothing."""
        readings = []
        for row in self._rows if depth == Depth.EDGE else ():
            edge = row.pop("edge", False)
            if row.get("others") is not None:
                row["others"] = tuple(GpuProcess(**process) for process in row["others"])
            if row.get("throttle") is not None:
                row["throttle"] = tuple(row["throttle"])
            readings.append(Reading(**row))
            if edge:
                break
        return readings

    def why(self, quantity: str) -> str:
        return self._why.get(quantity, "")
