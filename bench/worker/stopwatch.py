"""Where the time of a worker goes."""

from __future__ import annotations

import time


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
