"""Hooks on the gradients of each layer in a backward pass, to count or round them on the device.

They see the gradient of each layer's output, with which the layer's backward pass begins, and of
each of its parameters. Nothing is read back here: counts stay on the device until asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.precision import PRECISIONS, is_affine_batchnorm
from bench.scale_map import Fate, Kind


@dataclass(frozen=True)
class Site:
    """The place of a gradient: the layer's index, and whether it is of its output or a weight."""

    layer: int
    kind: Kind


Look = Callable[[Site, Tensor], Tensor | None]
"""Called with each gradient; returns what replaces it, or None to leave it."""

KINDS = tuple(Kind)

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


def choose_format(precision: str) -> torch.dtype:
    """Return the format of the gradients of a precision in 16 bits."""
    known = PRECISIONS[precision]
    format: torch.dtype = getattr(torch, known.autocast or known.weights)
    return format


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
    rounded gradient. In other precisions, the modules that `bench.precision.cast` leaves in fp32
    keep fp32 gradients.
    """
    layers = find_layers(model).values()
    if PRECISIONS[precision].autocast is not None:
        return [not isinstance(layer, _CAST) for layer in layers]
    kept = {part for module in filter(keeps_fp32, model.modules()) for part in module.modules()}
    return [layer in kept for layer in layers]


def attach(model: nn.Module, look: Look) -> Callable[[], None]:
    """Call ``look`` with every gradient of each layer. Return a function that ends this. The hook
    of a tensor sees the gradient before an in-place operation, such as an in-place ReLU after the
    layer, for which a module's backward hook raises."""
    hooks = ExitStack()

    def watch(module: nn.Module, inputs: Any, output: Any, index: int) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(look, Site(index, Kind.OUTPUT)))

    for index, module in enumerate(find_layers(model).values()):
        hooks.enter_context(module.register_forward_hook(partial(watch, index=index)))
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                hook = partial(look, Site(index, Kind.WEIGHT))
                hooks.enter_context(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
    return hooks.close


def tally(values: Tensor, scale: float, format: torch.dtype) -> Tensor:
    """Count the `Fate` of values, float32 and at least 0, that are multiplied by a scale and then
    rounded: int64 (fates,), on their device."""
    rounded = (values * scale).to(format)
    normal = rounded >= torch.finfo(format).tiny
    overflowed = (~rounded.isfinite()).sum()
    zero, kept = (values == 0).sum(), rounded.count_nonzero()
    held = (normal & rounded.isfinite()).sum()
    counts = (zero, values.numel() - zero - kept, kept - held - overflowed, held, overflowed)
    return torch.stack(counts)


class Counter:
    """Counts of fp32 gradients at each scale, and the largest gradient of every step: ``fates``
    int64 (steps counted, layers, kinds, scales, fates), ``peaks`` float32 (steps, layers, kinds),
    NaN if a gradient was NaN."""

    def __init__(
        self,
        layers: int,
        format: torch.dtype,
        scales: Sequence[float],
        steps: int,
        at: Sequence[int],
        device: torch.device,
    ) -> None:
        self._format, self._scales = format, scales
        self._at = {step: slot for slot, step in enumerate(at)}
        shape = layers, len(KINDS)
        counted = len(at), *shape, len(scales), len(Fate)
        self.fates = torch.zeros(counted, dtype=torch.int64, device=device)
        self.peaks = torch.zeros(steps, *shape, device=device)
        self.step = 0
        """The step that gradients belong to, from 1; to be set before each step."""

    def __call__(self, site: Site, gradient: Tensor) -> None:
        if not gradient.numel():
            return
        place = site.layer, KINDS.index(site.kind)
        values = gradient.detach().float().abs()
        peak = self.peaks[self.step - 1][place]
        torch.maximum(peak, values.amax(), out=peak)
        if self.step in self._at:
            fates = self.fates[self._at[self.step]][place]
            for index, scale in enumerate(self._scales):
                fates[index] += tally(values, scale, self._format)


def round_gradients(kept: Sequence[bool], format: torch.dtype) -> Look:
    """Return a `Look` that rounds gradients to a format, and keeps their dtype. Those of weights of
    the layers ``kept`` stay as they are."""

    def look(site: Site, gradient: Tensor) -> Tensor | None:
        if site.kind is Kind.WEIGHT and kept[site.layer]:
            return None
        return gradient.to(format).to(gradient.dtype)

    return look
