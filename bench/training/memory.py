"""What a training holds in memory: weights, gradients, and the state of its optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


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
    return {
        "weights_bytes": held,
        "gradients_bytes": sum(gradients.found.values()),
        "optimizer_bytes": sum(optimizer.found.values()) - held,
    }


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
