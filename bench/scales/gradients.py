"""Hooks on the gradients of each layer in a backward pass, to count or round them on the device.

They see the gradient of each layer's output, with which the layer's backward pass begins, and of
each of its parameters. Nothing is read back here: counts stay on the device until asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.networks.modules import find_class, is_affine_batchnorm
from bench.results.scale_map import GradientKind
from bench.schema.precision import PRECISIONS

Look = Callable[[int, GradientKind, Tensor], Tensor | None]
"""Called with the index of a layer, whether a gradient is of its output or of a weight, and the
gradient; returns what replaces it, or None to leave it."""

GRADIENT_KINDS = tuple(GradientKind)

LIMITS = {torch.float16: 65520.0, torch.bfloat16: (2 - 2**-8) * 2.0**127}
"""The smallest value that a format rounds to infinity: half way from its largest to the next."""

_CAST = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.PReLU,
)
"""The modules whose own parameters autocast casts: the operations of AT_FORALL_LOWER_PRECISION_FP
in torch's ATen/autocast_mode.h that have a module."""

_CHUNK = 1 << 24
"""Values counted at a time: a cell's index takes 8 bytes, and some gradients have 10^8 values."""


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have trainable parameters of their own, by name."""
    return {
        name or type(model).__name__: module
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    }


def list_kept(
    model: nn.Module, precision: str, keeps_fp32: Callable[[nn.Module], bool] = is_affine_batchnorm
) -> list[bool]:
    """Return, for each of `find_layers`, whether the gradients of its own parameters stay in fp32.

    Under autocast all do but those of layers that it runs in the narrow format, `_CAST`. So a norm,
    and a parameter that is added, such as a position embedding, receive fp32 gradients. An output's
    gradient does not stay in fp32: a norm's output is fp32 there, but the layer after it returns a
    rounded gradient. In other precisions, the modules that `bench.schema.precision.cast` leaves in
    fp32 keep fp32 gradients."""
    layers = find_layers(model).values()
    if PRECISIONS[precision].autocast is not None:
        return [not issubclass(find_class(layer), _CAST) for layer in layers]
    kept = {part for module in filter(keeps_fp32, model.modules()) for part in module.modules()}
    return [layer in kept for layer in layers]


def attach(model: nn.Module, look: Look) -> None:
    """Call ``look`` with every gradient of each layer from now on. The hook of a tensor sees the
    gradient before an in-place operation, such as an in-place ReLU after the layer, for which a
    module's backward hook raises."""

    def watch(module: nn.Module, inputs: Any, output: Any, index: int) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(look, index, GradientKind.OUTPUT))

    for index, module in enumerate(find_layers(model).values()):
        module.register_forward_hook(partial(watch, index=index))
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_hook(partial(look, index, GradientKind.WEIGHT))  # type: ignore[no-untyped-call]


def find_bounds(format: torch.dtype, scales: Sequence[float]) -> Tensor:
    """Return, for each scale, the smallest float32 numbers that are kept, that are normal and that
    overflow when they are multiplied by it and rounded to the nearest, ties to even: float32
    (scales, 3). No product is rounded on the way."""
    about = torch.finfo(format)
    half = about.tiny * about.eps / 2
    edges = torch.tensor([half, about.tiny - half, LIMITS[format]], dtype=torch.float64)
    exact = edges / torch.tensor(scales, dtype=torch.float64)[:, None]
    near = exact.float()
    below = near.double() < exact
    below[:, 0] |= near[:, 0].double() == exact[:, 0]  # a tie with zero, which is even
    return torch.where(below, near.nextafter(torch.tensor(torch.inf)), near)


class GradientCounter:
    """Counts of fp32 gradients between the `find_bounds` of all scales, and the largest gradient of
    every step: ``peaks`` float32 (steps, layers, kinds), NaN if a gradient was NaN."""

    def __init__(
        self,
        layers: int,
        format: torch.dtype,
        scales: Sequence[float],
        steps: int,
        at: Sequence[int],
        device: torch.device,
    ) -> None:
        self._at = {step: slot for slot, step in enumerate(at)}
        self._bounds = find_bounds(format, scales).to(device)
        least = torch.tensor([2.0**-149], device=device)
        self._cuts = torch.cat([least, self._bounds.flatten()]).unique()
        self._one = torch.ones((), dtype=torch.int64, device=device)
        shape = layers, len(GRADIENT_KINDS)
        cells = len(at), *shape, len(self._cuts) + 1
        self._counts = torch.zeros(cells, dtype=torch.int64, device=device)
        self.peaks = torch.zeros(steps, *shape, device=device)
        self.step = 0
        """The step that gradients belong to, from 1; to be set before each step."""

    def __call__(self, layer: int, kind: GradientKind, gradient: Tensor) -> None:
        if not gradient.numel():
            return
        place = layer, GRADIENT_KINDS.index(kind)
        values = gradient.detach().float().abs().flatten()
        peak = self.peaks[self.step - 1][place]
        torch.maximum(peak, values.amax(), out=peak)
        if self.step in self._at:
            counts = self._counts[self._at[self.step]][place]
            for part in values.split(_CHUNK):
                # not bincount, which makes the host wait for the largest value
                cells = torch.bucketize(part, self._cuts, right=True)
                counts.scatter_add_(0, cells, self._one.expand(len(cells)))

    @property
    def fates(self) -> Tensor:
        """Counts at each scale: int64 (steps counted, layers, kinds, scales, fates)."""
        under = self._counts.cumsum(-1)
        inner = under[..., torch.searchsorted(self._cuts, self._bounds)]
        one = (*inner.shape[:-1], 1)
        zero, whole = (under[..., end, None, None].expand(one) for end in (0, -1))
        return torch.cat([inner.new_zeros(one), zero, inner, whole], dim=-1).diff(dim=-1)


def round_gradients(kept: Sequence[bool], format: torch.dtype) -> Look:
    """Return a `Look` that rounds gradients to a format, and keeps their dtype. Those of weights of
    the layers ``kept`` stay as they are."""

    def look(layer: int, kind: GradientKind, gradient: Tensor) -> Tensor | None:
        if kind is GradientKind.WEIGHT and kept[layer]:
            return None
        return gradient.to(format).to(gradient.dtype)

    return look
