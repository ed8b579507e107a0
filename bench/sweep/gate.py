"""A barrier for lanes, so that all of them measure at the same time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from bench.executors import Event
from bench.worker.messages import PhaseEntered

PATIENCE_S = 120.0
"""Seconds that a lane waits for the others: importing torch from a slow disk, and cuDNN's choice of
algorithms, take less."""


class Gate:
    """A barrier before the warm-up and before the epoch: each of ``lanes`` waits there until the
    others have come or ended, at most ``patience_s``.

    It needs an executor that reports a phase before the worker enters it. Lanes of different
    classes share a gate, although their anchors are different cases: a lane is disturbed when other
    lanes of its machine are busy, whatever they run. Lanes without an anchor pass no gate.
    """

    def __init__(self, lanes: Iterable[str], patience_s: float = PATIENCE_S) -> None:
        self._awaited = set(lanes)
        self._patience_s = patience_s
        self._came: Counter[str] = Counter()
        self._changed = threading.Condition()

    def enter(self, lane: str, event: Event, stopping: Callable[[], bool]) -> None:
        """Wait for the others before a phase that is measured together. Runs in a lane's thread."""
        if not isinstance(event, PhaseEntered) or event.phase == "evaluation":
            return
        until = time.monotonic() + self._patience_s
        with self._changed:
            self._came[lane] += 1
            self._changed.notify_all()
            place = self._came[lane]
            while any(self._came[other] < place for other in self._awaited):
                if stopping() or time.monotonic() > until:
                    break
                self._changed.wait(0.1)

    def leave(self, lane: str) -> None:
        """Stop waiting for a lane, which has ended."""
        with self._changed:
            self._awaited.discard(lane)
            self._changed.notify_all()
