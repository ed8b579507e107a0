"""Capture and replay of a whole training step as a CUDA graph.

A step of many small kernels is limited by the host, which launches them one by one. A graph always
uses the memory of its capture: each batch is copied to the memory of the first one, the learning
rate is a tensor, and a step's results are copied out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

StepResults = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""The return type of `bench.training.loop.Training.step`."""

WARMUP_STEPS = 3
"""Steps before a capture, as in torch's notes on CUDA graphs: the tuning and compilation of first
steps cannot be captured."""


class CudaGraph:
    """Captures and replays work of the device; the only part here that needs a GPU."""

    def capture(self, run: Callable[[], object]) -> None:
        """Call ``run`` `WARMUP_STEPS` times in a stream of its own, then once more to capture."""
        self._graph = torch.cuda.CUDAGraph()
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                run()
        current.wait_stream(side)
        try:
            # a DataLoader's thread that pins memory may call CUDA meanwhile, which is harmless
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            # ending a failed capture raises too, and would hide the cause
            raise error.__context__ or error from None

    def replay(self) -> None:
        """Replay the captured work in the current stream."""
        self._graph.replay()


class Captured:
    """A step captured for batches like ``batch``: with the same shapes, dtypes, devices and other
    contents, in one piece."""

    def __init__(
        self, step: Callable[[Any], StepResults], batch: Any, recorder: CudaGraph | None
    ) -> None:
        self._recorder = recorder or CudaGraph()
        self._batch = tree_map_only(Tensor, torch.clone, batch)
        self._results: list[Tensor | None] = []

        def run() -> None:
            found = step(self._batch)
            if not self._results:
                self._results = [None if one is None else torch.empty_like(one) for one in found]
            for kept, one in zip(self._results, found, strict=True):
                if kept is not None and one is not None:
                    kept.copy_(one)

        self._recorder.capture(run)

    def fits(self, batch: Any) -> bool:
        ours, theirs = tree_leaves(self._batch), tree_leaves(batch)
        return len(ours) == len(theirs) and all(map(_is_alike, ours, theirs))

    def step(self, batch: Any) -> StepResults:
        """Train on a batch that `fits`."""
        for kept, one in zip(tree_leaves(self._batch), tree_leaves(batch), strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(one, non_blocking=True)
        self._recorder.replay()
        # the next step overwrites them
        loss, correct, overflowed, norm = (
            None if one is None else one.clone() for one in self._results
        )
        assert loss is not None
        assert overflowed is not None
        return loss, correct, overflowed, norm


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return type(one) is type(other) and bool(one == other)
