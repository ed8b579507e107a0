"""The products of compiled code, by the graphs that torch.compile gives to its Inductor: compiled
code does not show its operations, and reads what those of its graph read.

A graph is run once more as it is given, on tensors without data, forward and backward: torch then
applies autocast and chooses each operation, and no cache of compiled code hides it. How often each
graph runs in a step is not known. But where all parts of a step agree with a label, any mixture of
them does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten

from bench.base.text import name_first
from bench.training.operations import Sample, read_compiled

_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
"""Options of Inductor by which a script changes the graphs that it was given."""


class GivenGraphs:
    """Counts the graphs that Inductor is given: ``parts``, the rows of each one's forward and
    backward pass as `Sample.end` has them."""

    def __init__(self) -> None:
        self.parts: list[list[Any]] = []
        self._graphs, self._doubts = 0, dict[str, None]()

    def count(self, options: dict[str, Any], graph: Any, inputs: Sequence[Any]) -> None:
        """Count a graph that is about to be compiled with ``options``, and its ``inputs``; what
        cannot be counted is a reason of `explain`."""
        self._graphs += 1
        try:
            config = import_module("torch._inductor.config")
            own = [name for name in _PASSES if options.get(name) or getattr(config, name, None)]
            if own:
                raise TypeError(f"the script changes its graphs by {name_first(own, 3)}")
            self._count(graph, inputs)
        except Exception as error:
            self._doubts[f"{type(error).__name__}: {error}"[:300]] = None

    def _count(self, graph: Any, inputs: Sequence[Any]) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = [*map(_sketch, inputs)]
            with self._counting():
                outputs = tree_flatten(graph(*given))[0]
            ends = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
            trained = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
            if ends and trained:
                gradients = [torch.ones_like(one) for one in ends]
                with self._counting():
                    torch.autograd.grad(ends, trained, gradients, allow_unused=True)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        part = Sample()
        with part:
            yield
        self.parts.append(part.list_rows())
        if part.failure or part.unseen:
            self._doubts[part.failure or f"{name_first([*part.unseen], 3)} are not counted"] = None

    def explain(self, sample: Sample) -> str:
        """Return why ``parts``, with what a sample saw beside them, may not be all of its step;
        empty if they are."""
        if self._doubts:
            return f"in compiled code: {next(iter(self._doubts))}"
        if (
            self._graphs != sample.graphs
            or read_compiled().get("unique_graphs", 0) != sample.graphs
        ):
            return "not all that torch.compile compiled is known, as with another backend"
        return "" if sample.calls else "no compiled code ran in the step that was counted"


def _sketch(given: Any) -> Any:
    """Return a graph's input without its data, and sizes that it may have as those that it has."""
    if not isinstance(given, Tensor):
        return getattr(getattr(given, "node", None), "hint", given)
    if type(given) not in (Tensor, nn.Parameter, FakeTensor):
        raise TypeError(f"a {type(given).__name__} computes in a way of its own")
    sizes, strides = map(_sketch, given.shape), map(_sketch, given.stride())
    sketch = torch.empty_strided([*sizes], [*strides], dtype=given.dtype, device=given.device)
    return sketch.requires_grad_(given.requires_grad)
