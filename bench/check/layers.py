"""What the layers of a network do in a step, and the tensors that a step leaves behind.

All is read by torch's hooks and by gc, so that the step itself is the same as when measured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

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


def list_tensors() -> list[Tensor]:
    """List the tensors that Python holds."""
    # by type: isinstance reads an object's __class__, which for some of torch's gives a warning
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
