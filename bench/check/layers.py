"""Statistics of layer outputs and gradients, and of the memory that a step leaves behind.

All are read by torch's hooks and modes, so that the step itself is the same as when measured.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.training.loop import Training

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
_SAMPLE = 2**16
"""Values of a tensor sampled for its quantiles: the 1 % quantile is then one of 0.9 to 1.1 %."""


@dataclass(frozen=True)
class Spread:
    """The distribution of values: quantiles as in `QUANTILES`, NaN where one is not finite.
    ``zeros`` and ``not_finite`` are shares of all values."""

    quantiles: tuple[float, ...]
    rms: float
    zeros: float
    not_finite: float


@dataclass(frozen=True)
class Activations:
    """The output of a layer in one step. ``dead`` is the share of channels that hold the same value
    at every position of every image, in the layer's input or output, whichever is larger."""

    layer: str
    kind: str
    spread: Spread
    dead: float


@dataclass(frozen=True)
class Gradients:
    """The magnitudes of a weight's gradient in one step, unscaled. ``update`` is lr times the
    gradient's rms over the weight's: near 1e-3 in healthy training (Stanford CS231n, Neural
    Networks Part 3)."""

    weight: str
    spread: Spread
    update: float


@dataclass
class Reading:
    """All layers and weights in one step, in the order in which they were reached."""

    step: int
    activations: list[Activations] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)


def spread(values: Tensor) -> Spread:
    """Describe ``values``, of any shape and floating dtype, at least one."""
    flat = values.detach().float().flatten()
    sample = flat
    if len(flat) > _SAMPLE:
        # drawn by a generator of its own: the training's random numbers stay as they are
        rng = torch.Generator().manual_seed(0)
        sample = flat[torch.randint(len(flat), (_SAMPLE,), generator=rng).to(flat.device)]
    places = torch.tensor(QUANTILES, device=flat.device)
    return Spread(
        tuple(sample.quantile(places).tolist()),
        float(flat.square().mean().sqrt()),
        float((flat == 0).float().mean()),
        float((~flat.isfinite()).float().mean()),
    )


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
def read_layers(training: Training, step: int) -> Iterator[Reading]:
    """Read every layer and weight in the step that is taken inside the ``with`` block."""
    reading = Reading(step)
    scale = float(training.current_scale())

    def see(module: nn.Module, given: tuple[Any, ...], out: object, name: str) -> None:
        if _has_channels(out):
            dead = max(dead_share(t) for t in (*given[:1], out) if _has_channels(t))
            found = Activations(name, type(module).__name__, spread(out), dead)
            reading.activations.append(found)

    def receive(weight: Tensor, name: str) -> None:
        assert weight.grad is not None
        found = spread(weight.grad.float().abs() / scale)
        size = float(weight.detach().float().square().mean().sqrt())
        update = training.lr * found.rms / size if size else math.inf
        reading.gradients.append(Gradients(name, found, update))

    with ExitStack() as hooks:
        for name, module in training.model.named_modules():
            if not list(module.children()):
                hook = partial(see, name=name or "model")
                hooks.enter_context(module.register_forward_hook(hook))
        for name, weight in training.model.named_parameters():
            if weight.requires_grad:
                hook = partial(receive, name=name)
                hooks.enter_context(weight.register_post_accumulate_grad_hook(hook))
        yield reading
    order = {name: at for at, (name, _) in enumerate(training.model.named_parameters())}
    reading.gradients.sort(key=lambda g: order[g.weight])


def _has_channels(value: object) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor):
        return False
    return value.is_floating_point() and value.dim() >= 2 and value.numel() > 0


@contextmanager
def watch_gradients(training: Training) -> Iterator[dict[str, Tensor]]:
    """Yield for each trainable weight whether any step inside the ``with`` block gave it a usable
    gradient, finite and not all zeros: bool, (), on the device."""
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
