"""Hooks on the gradients of each layer in a backward pass, to count or round them on the device.

They see the gradient of each layer's output, with which the layer's backward pass begins, and of
each of its parameters. Nothing is read back here: counts stay on the device until asked for.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.precision import PRECISIONS, is_affine_batchnorm
from bench.scale_map import Fate, Kind
from bench.scales.formats import FORMATS, Cells, Format, find_bounds


@dataclass(frozen=True)
class Site:
    """The place of a gradient: the layer's index, and the parameter's name if it is of a weight."""

    layer: int
    kind: Kind
    parameter: str = ""


Look = Callable[[Site, Tensor], Tensor | None]
"""Called with each gradient; returns what replaces it, or None to leave it."""

KINDS = tuple(Kind)

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
    rounded gradient. In other precisions, the modules that `bench.precision.cast` leaves in fp32
    keep fp32 gradients. The name of a format stands for a network in that format.
    """
    layers, known = find_layers(model).values(), PRECISIONS.get(precision)
    if known is not None and known.autocast is not None:
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
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                hook = partial(look, Site(index, Kind.WEIGHT, name))
                hooks.enter_context(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
    return hooks.close


class Counter:
    """Counts of fp32 gradients in the cells of `Cells`, and the largest gradient of every step:
    ``counts`` int64 (steps counted, layers, kinds, cells), ``peaks`` float32 (steps, layers,
    kinds), NaN if a gradient was NaN."""

    def __init__(
        self, layers: int, cells: Cells, steps: int, at: Sequence[int], device: torch.device
    ) -> None:
        self._at = {step: slot for slot, step in enumerate(at)}
        self._cuts = torch.tensor(cells.cuts, dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.int64, device=device)
        shape = layers, len(KINDS)
        self.counts = torch.zeros(len(at), *shape, len(cells), dtype=torch.int64, device=device)
        self.peaks = torch.zeros(steps, *shape, device=device)
        self.step = 0
        """The step that gradients belong to, from 1; to be set before each step."""

    def __call__(self, site: Site, gradient: Tensor) -> None:
        if not gradient.numel():
            return
        place = site.layer, KINDS.index(site.kind)
        values = gradient.detach().float().abs().flatten()
        peak = self.peaks[self.step - 1][place]
        torch.maximum(peak, values.amax(), out=peak)
        if self.step in self._at:
            counts = self.counts[self._at[self.step]][place]
            for part in values.split(_CHUNK):
                # not bincount, which makes the host wait for the largest value
                cells = torch.bucketize(part, self._cuts, right=True)
                counts.scatter_add_(0, cells, self._one.expand(len(cells)))


class Comparison:
    """Fates of gradients in a narrow format, by comparison with the same gradients in fp32: int64
    (passes, layers, kinds, fates).

    A value that is zero here and was not in fp32 was flushed. `remember` sees the fp32 pass; then
    `look` sees one or several passes over the same batch, each after `begin`.
    """

    def __init__(self, layers: int, passes: int, format: Format, device: torch.device) -> None:
        shape = passes, layers, len(KINDS), len(Fate)
        self.fates = torch.zeros(shape, dtype=torch.int64, device=device)
        self._normal = float(2.0**format.least_exponent)
        # a layer that is called more than once has several, in the order of the backward pass;
        # parameters are told apart by name, because autocast changes their order
        self._known: dict[Site, list[Tensor]] = {}
        self._calls = collections.Counter[Site]()
        self._pass = -1

    def forget(self) -> None:
        """Forget the fp32 pass, before that of another batch."""
        self._known.clear()

    def remember(self, site: Site, gradient: Tensor) -> None:
        """Keep where a gradient of the fp32 pass is not zero; a `Look`."""
        self._known.setdefault(site, []).append(gradient.detach() != 0)

    def begin(self) -> None:
        """Start the next pass in the narrow format."""
        self._pass += 1
        self._calls.clear()

    def look(self, site: Site, gradient: Tensor) -> None:
        was = self._known[site][self._calls[site]]
        self._calls[site] += 1
        assert was.shape == gradient.shape
        size = gradient.detach().abs()
        zero, finite = size == 0, size.isfinite()
        # an output gradient in fp32 loses no digits
        narrow = site.kind is Kind.WEIGHT or gradient.dtype is not torch.float32
        small = ~zero & (size < (self._normal if narrow else 0.0))
        fates = {
            Fate.ZERO: zero & ~was,
            Fate.FLUSHED: zero & was,
            Fate.SUBNORMAL: small,
            Fate.NORMAL: finite & ~zero & ~small,
            Fate.OVERFLOWED: ~finite,
        }
        counted = torch.stack([fates[fate].sum() for fate in Fate])
        self.fates[self._pass][site.layer, KINDS.index(site.kind)] += counted


class Rounding:
    """A `Look` that rounds gradients to a format, and keeps their dtype. What overflows becomes inf
    in every format, also in e4m3, which has no inf."""

    def __init__(
        self,
        model: nn.Module,
        precision: str,
        format: Format,
        keeps_fp32: Callable[[nn.Module], bool] = is_affine_batchnorm,
    ) -> None:
        self._dtype = getattr(torch, format.dtype)
        self._limit = find_bounds(format, 1.0).overflowing
        self._exempt = list_kept(model, precision, keeps_fp32)

    def __call__(self, site: Site, gradient: Tensor) -> Tensor | None:
        kept = site.kind is Kind.WEIGHT and self._exempt[site.layer]
        return None if kept else self.round(gradient)

    def round(self, values: Tensor) -> Tensor:
        rounded = values.to(self._dtype).to(values.dtype)
        beyond = values.abs() >= self._limit
        return torch.where(beyond, values.sign() * torch.inf, rounded)


def choose_format(precision: str) -> Format:
    """Return the format of the gradients of a precision, or the format of that name. Raises
    KeyError: the precision's gradients are fp32, or the name is unknown."""
    known = PRECISIONS.get(precision)
    dtype = (known.autocast or known.weights) if known else FORMATS[precision].dtype
    return {f.dtype: f for f in FORMATS.values()}[dtype]
