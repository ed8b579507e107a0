"""What a training holds in memory: weights, gradients, and the state of its optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten

PARTS_BYTES = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
"""The columns of what a training holds."""


def measure_parts(
    optimizers: Iterable[torch.optim.Optimizer], networks: Iterable[nn.Module] | None = None
) -> dict[str, int]:
    """Return the bytes of ``weights_bytes``, parameters and buffers of networks, by default of all
    in this process; of ``gradients_bytes``; and of ``optimizer_bytes``, the state of optimizers and
    copies of weights that they alone have.

    Counted are the storages, each once, on the device of the first weight that is trained; of a
    tensor that is sharded over processes, the part of this one.
    """
    each = list(optimizers)
    trained = [weight for one in each for weight in _list_stepped(one)]
    if networks is None:
        # a compiled step is one, which may hold the state of an optimizer
        made = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        networks = [one for one in made if not isinstance(one, torch.fx.GraphModule)]
    own = [t for net in networks for t in chain(net.parameters(), net.buffers())]
    state = tree_flatten([[*one.state.values()] for one in each])[0]
    device = _find_device(trained)
    weights = _list_storages(own or trained, device)
    beside = _list_storages([*trained, *(one for one in state if isinstance(one, Tensor))], device)
    gradients = _list_storages((t.grad for t in (*own, *trained)), device)
    sizes = {
        "weights_bytes": sum(weights.values()),
        "optimizer_bytes": sum(beside[place] for place in beside.keys() - weights.keys()),
    }
    # they may have been cleared
    return sizes | ({"gradients_bytes": sum(gradients.values())} if gradients else {})


@contextmanager
def watch_gradients(
    optimizer: torch.optim.Optimizer, weights: Iterable[Tensor]
) -> Iterator[list[int]]:
    """Yield a list that gets the bytes of the gradients of ``weights``, and of what an optimizer
    steps, when it takes its first step within."""
    every, found = [*weights, *_list_stepped(optimizer)], list[int]()

    def look(*_: Any) -> None:
        if not found:
            gradients = _list_storages((t.grad for t in every), _find_device(every))
            found.append(sum(gradients.values()))

    handle = optimizer.register_step_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def _list_stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _find_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device that trains: that of weights on a GPU, if any are, as an optimizer may step
    copies of them on the host."""
    devices = [tensor.device for tensor in tensors] or [torch.device("cpu")]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def find_local(tensor: Any) -> Any:
    """Return the part that this process has of a DTensor, which shares its memory; any other tensor
    as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _list_storages(tensors: Iterable[Any], device: torch.device) -> dict[int, int]:
    """Return the bytes of the storages that tensors have on a device, by their addresses."""
    parts = chain.from_iterable(_list_parts(tensor) for tensor in tensors if tensor is not None)
    dense = (t for t in parts if t.device == device and not t.is_sparse)
    storages = (tensor.untyped_storage() for tensor in dense)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _list_parts(tensor: Tensor) -> list[Tensor]:
    """Return what holds a tensor's elements: the part of a DTensor, or codes and scales."""
    tensor = find_local(tensor)  # a DTensor has a mesh of devices too
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [*chain.from_iterable(map(_list_parts, inner))]
