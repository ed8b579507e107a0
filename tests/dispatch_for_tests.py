"""The operations of a training step on the CPU, watched for a value that is read back to the host.

On a GPU the step would wait for it. CUDA itself, in tests/gpu/test_training.py, raises where a step
waits, for copies too.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_UNLAUNCHED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::_local_scalar_dense",  # copies to the host, which is a breach
}


class Rule(StrEnum):
    READ = "a value read back to the host"


class Watch(TorchDispatchMode):
    """From `judge` on it counts the operations that a GPU would launch, backward and optimizer
    included, in ``launches``, and collects broken rules and their operations in ``breaches``."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.breaches: dict[tuple[Rule, str], None] = {}
        self._judging = False

    def judge(self) -> None:
        self.launches, self.breaches, self._judging = 0, {}, True

    @property
    def rules(self) -> set[Rule]:
        return {rule for rule, _ in self.breaches}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._judging:
            self.launches += _launches(op)
            if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*op.tags}:
                self.breaches[Rule.READ, op.name()] = None
        return op(*args, **(kwargs or {}))


def _launches(op: torch._ops.OpOverload) -> bool:
    """Return whether an op is more than a view, memory that is not filled, or no work of a GPU."""
    aliases = [a.alias_info for a in op._schema.arguments if a.alias_info is not None]
    views = bool(aliases) and not any(alias.is_write for alias in aliases)
    return not (views or op.namespace == "profiler" or op._schema.name in _UNLAUNCHED)
