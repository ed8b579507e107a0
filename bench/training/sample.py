"""The operations of one step of a user's script, counted as the step runs."""

from __future__ import annotations

import sys
from typing import Any

from bench.precision import read_flags
from bench.training.counting import Counter


class _Careful(Counter):
    """A `Counter` that never ends a user's training: it says why it could not count instead."""

    failure = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.failure:
            try:
                self.count(func, args, kwargs or {}, out)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
        return out


class Sample:
    """Counts from `begin` to `end`, which returns what JSON can hold: ``work``, a list of kind,
    operation, format, calls, FLOP and bytes; torch's ``flags`` of arithmetic; and ``failure``, why
    there is no work, if so."""

    def __init__(self) -> None:
        self._counter = _Careful()

    @classmethod
    def begin(cls) -> Sample:
        sample = cls()
        if _is_compiled():
            sample._counter.failure = "compiled code does not show its operations"
        else:
            sample._counter.__enter__()
        return sample

    def end(self) -> dict[str, Any]:
        counter = self._counter
        if not counter.failure.startswith("compiled"):
            counter.__exit__(None, None, None)
        rows = [
            [str(label.kind), label.operation, label.format, one.calls, one.flop, one.bytes]
            for label, one in counter.work.items()
        ]
        return {"work": rows, "flags": read_flags(), "failure": counter.failure}


def _is_compiled() -> bool:
    """Return whether torch.compile has compiled a function in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))
