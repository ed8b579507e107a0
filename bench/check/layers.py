"""What the layers of a network do in a step, and the memory that a step leaves behind.

All is read by torch's hooks and modes, so that the step itself is the same as when measured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.training.loop import Training


class Activations(NamedTuple):
    """The output of a layer in one step. ``dead`` is the share of channels that hold the same value
    at every position of every image, in the layer's input or output, whichever is larger."""

    layer: str
    dead: float
    finite: bool


_JUDGED = 16
"""Values that a channel must have to be called dead: if a ReLU passes half of the images, 16 values
are all zero by chance once in 65,536."""


def dead_share(values: Tensor) -> float:
    """Return the share of channels, (N, channels, …), with one value in all positions and images.

    It is 0 if there are too few values to tell.

    >>> dead_share(torch.stack([torch.zeros(16), torch.arange(16.0)], dim=1))
    0.5
    """
    channels = values.detach().transpose(0, 1).flatten(1)
    if channels.shape[1] < _JUDGED:
        return 0.0
    return float((channels.amin(dim=1) == channels.amax(dim=1)).float().mean())


@contextmanager
def read_layers(training: Training) -> Iterator[list[Activations]]:
    """Read every layer, in the order reached, in the step that is taken inside the block."""
    layers: list[Activations] = []

    def see(module: nn.Module, given: tuple[Any, ...], out: object, name: str) -> None:
        if _has_channels(out):
            dead = max(dead_share(t) for t in (*given[:1], out) if _has_channels(t))
            layers.append(Activations(name, dead, bool(out.isfinite().all())))

    with ExitStack() as hooks:
        for name, module in training.model.named_modules():
            if not list(module.children()):
                hook = partial(see, name=name or "model")
                hooks.enter_context(module.register_forward_hook(hook))
        yield layers


def _has_channels(value: object) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor):
        return False
    return value.is_floating_point() and value.dim() >= 2 and value.numel() > 0


@contextmanager
def watch_gradients(training: Training) -> Iterator[dict[str, Tensor]]:
    """Yield for each trainable weight whether any step inside the block gave it a usable gradient,
    finite and not all zeros: bool, (), on the device."""
    never = torch.zeros((), dtype=torch.bool, device=training.device)
    received = {n: never for n, p in training.model.named_parameters() if p.requires_grad}

    def receive(weight: Tensor, name: str) -> None:
        assert weight.grad is not None
        received[name] = received[name] | (weight.grad.isfinite().all() & weight.grad.any())

    with ExitStack() as hooks:
        for name, weight in training.model.named_parameters():
            if name in received:
                hook = partial(receive, name=name)
                hooks.enter_context(weight.register_post_accumulate_grad_hook(hook))
        yield received


def count_graphs() -> int:
    """Count the tensors that Python holds and that have an autograd graph behind them."""
    # by type: isinstance reads an object's __class__, which for some of torch's gives a warning
    tensors = (o for o in gc.get_objects() if issubclass(type(o), Tensor))
    return sum(tensor.grad_fn is not None for tensor in tensors)


class Ledger(TorchDispatchMode):
    """A record of every storage that is made inside it, and of how much of that is still held.

    Tensors that a graph saves for its backward pass are held by C++ alone: neither `gc` nor a
    Python weak reference to the tensor sees them, but a weak reference to the storage does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._made:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def held(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())
