"""What a script reports as it trains: the sweep's end of `bench.workers.script`."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.schema.case import Case, supposes_items
from bench.schema.record import EpochRow
from bench.workers.epochs import finite


@dataclass
class TakenStep:
    """A step that a script told of, by ``number`` from 0; ``time_s`` is None for its first one."""

    number: int
    moment: float
    time_s: float | None
    items: int
    loss: float | None


class Reports:
    """What the script of a case has reported so far, in the file ``path``.

    Attributes:
        steps: all that it has taken; ``new`` are those of them that nobody has looked at.
        epochs: what was found after as many steps.
        ended_after: epochs, where it was judged and is to end.
        work, profiled, memory: of the lines of these names.
        who: the process that reports.
        cards: the GPUs on which it trained.
        own: whether it calls bench.step; ``began_anew`` once it does, and was seen before.
        counted: whether it is known how many items each of its steps has.
    """

    def __init__(self, case: Case, path: Path) -> None:
        self._case, self._path, self._read = case, path, 0
        self.steps, self.new = list[TakenStep](), deque[TakenStep]()
        self.epochs: dict[int, dict[str, float]] = {}
        self.ended_after: int | None = None
        self.work: dict[str, Any] = {}
        self.profiled: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self.who: dict[str, Any] = {}
        self.cards: dict[str, None] = {}
        self.own, self.counted, self.began_anew = True, True, False
        self._processes = 1  # that reported steps, or would have

    def update(self) -> None:
        """Read what it has reported since the last time."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.splitlines():
                self._take(*json.loads(line))

    def close(self) -> None:
        """Read what is left, and which processes there were, once all have ended."""
        self.update()
        names = [one.read_text() for one in self._path.parent.glob(f"{self._path.name}.*")]
        self._processes = max(1, len(names))
        self.cards |= dict.fromkeys(filter(None, names))

    def _take(self, kind: str, *values: Any) -> None:
        if self.ended_after is not None and kind in ("step", "epoch"):
            return  # it went on until it heard of its end
        if kind == "step":
            moment, time_s, items, loss = values
            items = items or self._case.items or (None if self.own else self._suppose())
            self.counted &= items is not None
            self.steps.append(TakenStep(len(self.steps), moment, time_s, items or 1, loss))
            self.new.append(self.steps[-1])
        elif kind == "own":
            self.own = self.counted = self.began_anew = True
            self.steps.clear()
            self.epochs.clear()
            self.new.clear()
        elif kind == "memory":
            self.memory |= values[0]
        elif kind == "work":
            (self.work,) = values
        elif kind == "profile":
            (self.profiled,) = values
        elif kind == "who":
            self.who |= values[0]
            self.own = bool(self.who.get("own", self.own))
            self.cards |= dict.fromkeys(filter(None, [values[0].get("card")]))
        elif self.steps:
            known = {name: value for name, value in values[0].items() if value is not None}
            self.epochs.setdefault(len(self.steps), {}).update(known)

    def _suppose(self) -> int | None:
        """Return how many items a step that was seen is taken to be of: its batch size."""
        return self._case.batch_size if supposes_items(self._case) else None

    def list_bad(self, steps: int) -> list[int]:
        """Return which of the first so many steps have a loss that is inf or NaN, or end an epoch
        that has one."""
        own = [step.number for step in self.steps[:steps] if not math.isfinite(step.loss or 0.0)]
        found = ((end, one.get("loss", 0.0)) for end, one in self.epochs.items() if end <= steps)
        return sorted(own + [end - 1 for end, loss in found if not math.isfinite(loss)])

    def end_after(self, steps: int) -> None:
        """Leave out what was reported after so many steps, with which an epoch ended."""
        self.epochs = {number: found for number, found in self.epochs.items() if number <= steps}
        self.ended_after = len(self.epochs)
        del self.steps[steps:]
        self.new.clear()

    def count(self, steps: Sequence[TakenStep]) -> int:
        """Return the items of steps, or their number if it does not say."""
        if not self.counted:
            return len(steps)
        return self.processes * sum(step.items for step in steps)

    @property
    def processes(self) -> int:
        """How many processes took items of their own: as many as torch knows of, or of those that a
        variable names the ones that have reported steps."""
        number: int = self.who.get("processes", 1)
        return number if self.who.get("known") else min(number, self._processes)


def find_usual(steps: Sequence[TakenStep], ends: Container[int]) -> int | None:
    """Return the number of items that more than half of some steps have, None if there is none. The
    last step of an epoch, of which ``ends`` has the number of the next, may have what was left."""
    items = [step.items for step in steps if step.number + 1 not in ends]
    items = items or [step.items for step in steps]
    (number, times), *_ = Counter(items).most_common(1)
    return number if 2 * times > len(items) else None


def list_reported(
    steps: Sequence[TakenStep], epochs: Mapping[int, Mapping[str, float]]
) -> list[EpochRow]:
    """Return the epochs that ended after so many steps, with what was found then. Of one of whose
    steps none has a time it is not known either."""
    rows, begin = [], 0
    for number, (end, learnt) in enumerate(epochs.items()):
        own, begin = steps[begin:end], end
        times = [step.time_s for step in own if step.time_s is not None]
        took, loss = sum(times) if times else math.nan, average(own)
        tested = finite(learnt.get("loss", math.nan))
        row = EpochRow(number, took, loss, None, tested, learnt.get("accuracy"))
        rows.append(row)
    return rows


def average(steps: Sequence[TakenStep]) -> float | None:
    """Return the mean loss over the items of steps; None if it is not finite, or not known."""
    images = sum(step.items for step in steps)
    if not images or any(step.loss is None for step in steps):
        return None
    return finite(sum(step.items * (step.loss or 0.0) for step in steps) / images)
