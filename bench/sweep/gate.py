"""A gate that lanes pass together, so that what each measures then is measured at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from bench.executors import Event
from bench.worker.messages import PhaseEntered

PATIENCE_S = 120.0
"""How long a lane waits for the others: a process that imports torch from a slow disk, and cuDNN's
choice of algorithms, take less."""


class Gate:
    """Holds each lane of these names before its warm-up and its epoch until all have come there, or
    ended, or it has waited ``patience_s``.

    An executor that reports a phase before the worker enters it holds the worker so. Lanes of
    unlike classes pass one gate, although their anchors are different cases: what disturbs a lane
    is that the others of its machine are busy, whatever they run. Lanes without an anchor pass
    none.
    """

    def __init__(self, lanes: Iterable[str], patience_s: float = PATIENCE_S) -> None:
        self._awaited = set(lanes)
        self._patience_s = patience_s
        self._came: Counter[str] = Counter()
        self._changed = threading.Condition()

    def enter(self, lane: str, event: Event, stopping: Callable[[], bool]) -> None:
        """Wait at the beginning of a phase that is measured together. Called in a lane's thread."""
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
        """Say that a lane has ended, and is waited for no more."""
        with self._changed:
            self._awaited.discard(lane)
            self._changed.notify_all()
