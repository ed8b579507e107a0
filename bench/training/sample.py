"""The operations of one step of a user's script, counted as the step runs."""

from __future__ import annotations

import sys
from typing import Any

from bench.precision import read_flags
from bench.training.counting import Counter


class Sample(Counter):
    """Counts the operations of a user's training from `begin` to `end`, and never ends it: what
    cannot be counted has a reason, ``failure``."""

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

    def begin(self) -> None:
        self._entered = not _is_compiled()
        if self._entered:
            self.__enter__()
        else:
            self.failure = "compiled code does not show its operations"

    def end(self) -> dict[str, Any]:
        """Return what JSON can hold: ``work``, a list of kind, operation, format, calls, FLOP and
        bytes; torch's ``flags`` of arithmetic; and ``failure``."""
        if self._entered:
            self.__exit__(None, None, None)
        rows = [
            [str(label.kind), label.operation, label.format, one.calls, one.flop, one.bytes]
            for label, one in self.work.items()
        ]
        return {"work": rows, "flags": read_flags(), "failure": self.failure}


def _is_compiled() -> bool:
    """Return whether torch.compile has compiled a function in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))
