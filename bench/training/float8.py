"""Linear layers converted to fp8 by torchao, and their share of the network's FLOP.

``convert_to_float8_training`` replaces each `torch.nn.Linear` by a layer that rounds both factors
of its three products (output, gradient of the input, gradient of the weight) to 8 bits before
multiplying them. Weights stay in fp32, under the same names. torchao is imported only here, and
only when a layer is converted.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bench.base.errors import UnsupportedError, UsageError
from bench.base.installation import find_version
from bench.base.text import first_line, name_first
from bench.networks.workloads import Workload, sketch_batch
from bench.schema.case import Case, list_micro_batches
from bench.schema.precision import (
    EMULATE_FP8,
    FP8_RECIPES,
    ask_for_torchao,
    refuse_fp8,
)

MULTIPLE = 16
"""Each dimension of an fp8 product must be a multiple of this for ``torch._scaled_mm``."""

MOST_MULTIPLE = max(recipe.multiple for recipe in FP8_RECIPES.values())

_NAMED = 8
"""Maximum number of name patterns in a description."""


def find_products(model: nn.Module, workload: Workload) -> dict[str, nn.Linear]:
    """Return the linear layers that can be converted, by name, in the network's order.

    Both dimensions must be multiples of `MULTIPLE`. Excluded are the head, whose rounding costs the
    most accuracy, layers that the workload keeps in fp32, and layers whose behaviour torchao would
    change: subclasses of `torch.nn.Linear`, and layers with hooks, as of spectral normalisation.
    """
    try:
        head = workload.find_head(model)
    except UsageError:  # no layer has weights
        return {}
    kept = {
        id(m) for whole in filter(workload.keeps_fp32, model.modules()) for m in whole.modules()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and id(module) not in kept
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    }


@dataclass
class Product:
    """A converted layer, and its work for a batch of two items.

    ``rows`` counts the rows of its input, and ``flop`` forward and backward, as torch's counter
    counts products. ``input_grad`` is whether training needs the gradient of its input.
    """

    name: str
    layer: nn.Linear
    rows: int = 0
    flop: int = 0
    input_grad: bool = False

    def count_flop(self, weight_grad: bool) -> int:
        """Return its FLOP, with or without the product for the gradient of its weight."""
        left = 0 if weight_grad else self.layer.weight.requires_grad
        return self.flop - left * 2 * self.rows * self.layer.weight.numel()


TRIED = 2
"""Items of the batch that is run through the network: BatchNorm needs two."""


@dataclass(frozen=True)
class Conversion:
    """The part of a network that runs in fp8.

    ``linear`` is the number of linear layers before the conversion. ``gradient_bits`` are the
    significant bits of output gradients. ``flop_per_unit`` is the FLOP of the converted layers in
    fp8, forward and backward, per unit of the workload. ``notes`` are remarks for the reader.
    """

    products: tuple[Product, ...]
    linear: int
    flop_per_unit: float
    gradient_bits: int
    notes: tuple[str, ...]

    @property
    def largest(self) -> Product:
        return max(self.products, key=lambda p: (p.flop, p.layer.weight.numel()))

    def __str__(self) -> str:
        """Such as ``8 of 9 linear layers: blocks.*.qkv, blocks.*.out``."""
        patterns = [re.sub(r"(?<![^.])\d+(?![^.])", "*", one.name) for one in self.products]
        named = name_first(list(dict.fromkeys(patterns)), _NAMED)
        return f"{len(self.products)} of {self.linear} linear layers: {named}"


def convert(case: Case, model: nn.Module, device: torch.device, workload: Workload) -> Conversion:
    """Convert the layers of `find_products` that the network calls by torchao, in place, for the
    batches of ``case``.

    The network, on the CPU in float32, will train on ``device``. On a CPU, fp8 is emulated. Raises
    UnsupportedError: there is nothing to convert, or it cannot be found from shapes alone, or
    torchao does not support it.
    """
    kind, is_mx = FP8_RECIPES[case.fp8_recipe], case.fp8_recipe == "mxfp8"
    emulated, notes = device.type == "cpu", []
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    try:
        products = _follow(model, workload, find_products(model, workload))
    except Exception as error:
        raise UnsupportedError(
            f"fp8 needs a network that can be followed on shapes alone: {first_line(error)}"
        ) from error
    if not products:
        raise UnsupportedError(refuse_fp8("the network"))
    multiple = kind.multiple
    # the rows are the inner dimension of the product for the weight's gradient
    items = math.gcd(*list_micro_batches(case, workload.samples))
    uneven = any(product.rows * items % (TRIED * multiple) for product in products)
    padded = uneven and kind.rounds_weight_gradient
    if is_mx:
        products = [p for p in products if not any(n % multiple for n in p.layer.weight.shape)]
        if uneven or not products:
            raise UnsupportedError(
                f"{case.fp8_recipe} scales blocks of {multiple}, and the rows of a batch or the "
                "dimensions of all layers are no multiple of that; give another batch size"
            )
    if emulated:
        notes.append(f"fp8 is emulated in float32 ({EMULATE_FP8}): its times mean nothing")
    if padded:
        notes.append(
            f"the products of fp8 are padded, since the rows of some are no multiple of {MULTIPLE} "
            "at this batch size"
        )
    if is_mx:
        _scale_blocks(products, emulated)
    else:
        float8 = import_torchao("float8", "fp8")
        recipe = float8.Float8LinearConfig.from_recipe_name(case.fp8_recipe)
        config = replace(recipe, emulate=emulated, pad_inner_dim=padded)
        chosen = {product.layer for product in products}
        float8.convert_to_float8_training(
            model, module_filter_fn=lambda module, _: module in chosen, config=config
        )
    for product in products:
        now: Any = model.get_submodule(product.name)
        product.layer = now
        if emulated and not kind.rounds_weight_gradient:
            # as torchao does under a GPU's autocast: it does not look for a CPU's
            now.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    return Conversion(
        tuple(products),
        linear,
        sum(p.count_flop(kind.rounds_weight_gradient) for p in products)
        / workload.count_units(TRIED),
        kind.gradient_bits,
        tuple(notes),
    )


def _scale_blocks(products: Sequence[Product], emulated: bool) -> None:
    """Let layers multiply by torchao's mxfp8, whose kernels take bf16, as autocast gives it."""
    mx = import_torchao("prototype.moe_training.mxfp8_linear", "mxfp8")
    kernels = mx.KernelPreference.EMULATED if emulated else mx.KernelPreference.AUTO

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        factors = x.bfloat16().contiguous(), layer.weight.bfloat16()
        out: Tensor = mx._to_mxfp8_then_scaled_mm(*factors, kernels, mx.ScaleCalculationMode.RCEIL)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    for product in products:
        product.layer.forward = partial(forward, product.layer)  # type: ignore[method-assign]


def _follow(model: nn.Module, workload: Workload, layers: dict[str, nn.Linear]) -> list[Product]:
    """Return those of ``layers`` that a training step calls, and their work, from shapes alone. It
    would be useless to convert a layer that is not called although its weight is used, as in
    `torch.nn.MultiheadAttention`."""
    products = [Product(name, layer) for name, layer in layers.items()]

    def note(one: Product, layer: nn.Linear, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        x = inputs[0]
        rows = x.numel() // layer.in_features
        passes = 1 + x.requires_grad + layer.weight.requires_grad
        one.rows += rows
        one.flop += passes * 2 * rows * layer.weight.numel()
        one.input_grad |= x.requires_grad

    batch = sketch_batch(workload, TRIED)
    state: dict[str, Tensor] = {name: b.to("meta") for name, b in model.named_buffers()}
    for name, p in model.named_parameters():
        state[name] = p.detach().to("meta").requires_grad_(p.requires_grad)

    def network(*inputs: Any, **named: Any) -> Any:
        return functional_call(model, state, inputs, named)

    handles = [one.layer.register_forward_hook(partial(note, one)) for one in products]
    try:
        with torch.device("meta"):
            workload.compute_loss(network, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [product for product in products if product.rows]


def import_torchao(part: str, what: str) -> Any:
    """Import a part of torchao, which ``what`` needs, without warnings about libraries that only
    others need. Raises UnsupportedError: torchao is not installed, or not compatible with this
    torch."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return import_module(f"torchao.{part}")
    except Exception as error:
        here = f"torchao {find_version('torchao') or 'none'} and torch {torch.__version__}"
        raise UnsupportedError(
            f"{ask_for_torchao(what)} (here are {here}: {first_line(error)})"
        ) from error
