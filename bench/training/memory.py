"""What a training holds in memory: weights, gradients, and the state of its optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

PARTS_BYTES = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
"""The columns of what a training holds."""


def measure_held(
    optimizers: Iterable[torch.optim.Optimizer], networks: Iterable[nn.Module] | None = None
) -> dict[str, int]:
    """Return the bytes of ``weights_bytes``, parameters and buffers of networks, by default of all
    in this process; of ``gradients_bytes``; and of ``optimizer_bytes``, the state of optimizers and
    copies of weights that they alone have.

    Counted are the storages, each once, on the device of the first weight that is trained; of a
    tensor that is sharded over processes, the part of this one.
    """
    each = list(optimizers)
    trained = [weight for one in each for group in one.param_groups for weight in group["params"]]
    if networks is None:
        # a compiled step is one, which may hold the state of an optimizer
        made = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        networks = [one for one in made if not isinstance(one, torch.fx.GraphModule)]
    own = [t for net in networks for t in chain(net.parameters(), net.buffers())]
    state = tree_leaves([one.state for one in each])  # by weight, which are its keys
    weights, gradients = _Storages(trained[:1]), _Storages(trained[:1])
    optimizer = _Storages(trained[:1])
    weights.add(own or trained)
    optimizer.found = {**weights.found}
    optimizer.add([*trained, *(leaf for leaf in state if isinstance(leaf, Tensor))])
    gradients.add(t.grad for t in {id(t): t for t in (*own, *trained)}.values())
    held = sum(weights.found.values())
    told = {"weights_bytes": held, "optimizer_bytes": sum(optimizer.found.values()) - held}
    if gradients.found:  # they may have been cleared
        told["gradients_bytes"] = sum(gradients.found.values())
    return told


@contextmanager
def watch_gradients(
    optimizer: torch.optim.Optimizer, weights: Iterable[Tensor]
) -> Iterator[list[int]]:
    """Yield a list that gets the bytes of the gradients of ``weights``, and of what an optimizer
    steps, when it takes its first step within."""
    stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
    every, found = [*{id(t): t for t in (*weights, *stepped)}.values()], list[int]()

    def look(*_: Any) -> None:
        if not found:
            held = _Storages(every[:1])
            held.add(t.grad for t in every)
            found.append(sum(held.found.values()))

    handle = optimizer.register_step_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


class _Storages:
    """The bytes of storages on the device of the first of some tensors, by their addresses."""

    def __init__(self, first: Iterable[Tensor]) -> None:
        self._device = next((t.device for t in first), torch.device("cpu"))
        self.found: dict[int, int] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if local is not None and local.device == self._device and not local.is_sparse:
                storage = local.untyped_storage()
                self.found[storage.data_ptr()] = storage.nbytes()
