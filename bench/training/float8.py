"""Linear layers in fp8, converted by torchao: which they are, and how much of the network's FLOP.

``convert_to_float8_training`` puts a layer in place of each `torch.nn.Linear` that rounds the two
factors of its three products (output, gradient of the input, gradient of the weight) to 8 bits
before each step multiplies them. Weights stay in fp32, under the names that they had. torchao is
imported here, where a layer is to be converted, and nowhere else.
"""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bench.errors import UnsupportedError, UsageError
from bench.precision import (
    EMULATE_FP8,
    FP8_INSTALL,
    FP8_RECIPES,
    emulates_fp8,
    find_torchao,
    refuse_fp8,
)
from bench.text import first_line, name_first
from bench.training.counting import sketch_batch
from bench.workloads import Workload

MULTIPLE = 16
"""Of which each dimension of a product in fp8 is a multiple: what ``torch._scaled_mm`` takes."""

_NAMED = 8
"""Patterns of names that a description lists at most."""


def find_products(model: nn.Module, workload: Workload) -> dict[str, nn.Linear]:
    """The linear layers that can be converted, by name, in the network's order.

    Both dimensions are multiples of `MULTIPLE`, and it is not the head, whose rounding costs the
    most accuracy, nor in what the workload keeps in fp32. Left alone is also what torchao's layer
    would change: a class that extends `torch.nn.Linear`, and a layer with hooks, such as those of
    spectral normalisation.
    """
    try:
        head = workload.find_head(model)
    except UsageError:  # nothing has weights
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


@dataclass(frozen=True)
class Product:
    """A layer that was converted, and what two items of a batch make of it.

    ``rows`` are those of its input, and ``flop`` is forward and backward, as torch's counter counts
    a product; both are zero where no batch could be followed through the network. ``input_grad`` is
    whether training needs the gradient of its input.
    """

    name: str
    layer: nn.Linear
    rows: int = 0
    flop: int = 0
    input_grad: bool = True

    @property
    def weight_grad(self) -> bool:
        return self.layer.weight.requires_grad

    @property
    def rows_per_item(self) -> int:
        return self.rows // _TRIED


_TRIED = 2
"""Items of the batch that is followed through the network: BatchNorm needs as many."""


@dataclass(frozen=True)
class Conversion:
    """What of a network runs in fp8.

    ``linear`` is the number of linear layers that there were. ``gradient_bits`` are the significant
    bits of the gradients that come back to a layer. ``flop_per_unit`` are those of the converted
    layers, forward and backward, of one of the workload's units; None where ``unknown`` says why.
    """

    products: tuple[Product, ...]
    linear: int
    flop_per_unit: float | None
    gradient_bits: int
    emulated: bool
    padded: bool
    unknown: str = ""

    @property
    def largest(self) -> Product:
        return max(self.products, key=lambda p: (p.flop, p.layer.weight.numel()))

    @property
    def unneeded(self) -> int:
        """Layers of which torchao computes a gradient that training does not need.

        Its backward pass computes both, that of a frozen weight too. Compiled, what nothing uses is
        left out: of a transformer whose blocks are frozen, 19 products in place of 27.
        """
        return sum(product.input_grad != product.weight_grad for product in self.products)

    @property
    def notes(self) -> list[str]:
        said = []
        if self.emulated:
            said.append(f"fp8 is emulated in float32 ({EMULATE_FP8}): its times mean nothing")
        if self.padded:
            why = "may be" if self.unknown else "are"
            said.append(
                f"the products of fp8 are padded, since the rows of some {why} no multiple of "
                f"{MULTIPLE} at this batch size"
            )
        return said

    def __str__(self) -> str:
        """Such as ``8 of 9 linear layers: blocks.*.qkv, blocks.*.out``."""
        patterns = [re.sub(r"(?<![^.])\d+(?![^.])", "*", one.name) for one in self.products]
        named = name_first(list(dict.fromkeys(patterns)), _NAMED)
        return f"{len(self.products)} of {self.linear} linear layers: {named}"


def convert(
    model: nn.Module, workload: Workload, recipe: str, device: torch.device, items: int = 1
) -> Conversion:
    """Have torchao convert the layers of `find_products` that the network calls, in place.

    The network, on the CPU in float32, will train on ``device``, on batches that all hold a
    multiple of so many ``items``. On a CPU, fp8 is emulated if `emulates_fp8` says that it may.
    Raises UnsupportedError: there is nothing to convert, or torchao or the device cannot.
    """
    emulated = device.type == "cpu"
    if emulated and not emulates_fp8():
        raise UnsupportedError("fp8 needs an NVIDIA GPU; this is a CPU")
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    found, unknown = find_products(model, workload), ""
    try:
        products = _follow(model, workload, found)
    except Exception as error:  # a network that cannot be run on shapes alone
        unknown = f"the network cannot be followed on shapes alone: {first_line(error)}"
        products = [Product(name, layer) for name, layer in found.items()]
    if not products:
        raise UnsupportedError(refuse_fp8("the network"))
    # the rows are the inner dimension of the product that is the weight's gradient
    padded = any(product.rows * items % (_TRIED * MULTIPLE) for product in products)
    float8 = _import_torchao()
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(recipe),
        emulate=emulated,
        pad_inner_dim=padded or bool(unknown),
    )
    chosen = {product.layer for product in products}
    float8.convert_to_float8_training(
        model, module_filter_fn=lambda module, _: module in chosen, config=config
    )
    now: list[Any] = [model.get_submodule(product.name) for product in products]
    return Conversion(
        tuple(replace(p, layer=layer) for p, layer in zip(products, now, strict=True)),
        linear,
        None if unknown else sum(p.flop for p in products) / workload.count_units(_TRIED),
        FP8_RECIPES[recipe].gradient_bits,
        emulated,
        config.pad_inner_dim,
        unknown,
    )


def _follow(model: nn.Module, workload: Workload, layers: dict[str, nn.Linear]) -> list[Product]:
    """Those of ``layers`` that a training step calls, with what it makes of them, on shapes alone.
    A layer whose weight is used without calling it, as in `torch.nn.MultiheadAttention`, would be
    converted in vain."""
    found = {name: Product(name, layer, input_grad=False) for name, layer in layers.items()}

    def watch(name: str, layer: nn.Linear) -> Any:
        def after(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            x, one = inputs[0], found[name]
            n = x.numel() // layer.in_features
            passes = 1 + x.requires_grad + layer.weight.requires_grad
            flop = one.flop + passes * 2 * n * layer.weight.numel()
            needed = one.input_grad or x.requires_grad
            found[name] = replace(one, rows=one.rows + n, flop=flop, input_grad=needed)

        return layer.register_forward_hook(after)

    batch = sketch_batch(workload, _TRIED)
    state: dict[str, Tensor] = {name: b.to("meta") for name, b in model.named_buffers()}
    for name, p in model.named_parameters():
        state[name] = p.detach().to("meta").requires_grad_(p.requires_grad)

    def network(*inputs: Any, **named: Any) -> Any:
        return functional_call(model, state, inputs, named)

    handles = [watch(name, layer) for name, layer in layers.items()]
    try:
        with torch.device("meta"):
            workload.compute_loss(network, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [product for product in found.values() if product.rows]


def _import_torchao() -> Any:
    """torchao's float8, without the warnings of its other parts, whose libraries it does not need.
    Raises UnsupportedError: it is not installed, or does not go with this torch."""
    if find_torchao() is None:
        raise UnsupportedError(FP8_INSTALL)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            from torchao import float8
    except Exception as error:
        raise UnsupportedError(
            f"torchao {find_torchao()} cannot be imported beside torch {torch.__version__} "
            f"({first_line(error)}): {FP8_INSTALL.partition(': ')[2]}"
        ) from error
    finally:
        logging.disable(before)
    return float8
