"""Which arithmetic a network's own layers ran in, seen from their error against float64.

A flag says what may happen, an output's dtype what came out; only the error says what was computed.
Probed are the network's most expensive convolution and its most expensive grouped one, forward and
both gradients, in the shapes (of `bench.case.MOST_PROBED` images at most), memory format and
compilation of the case; and a matmul. Of a network with frozen weights, gradients that training
does not compute are not probed, and are no expense.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from bench.case import Case
from bench.gpu.kinds import size_as
from bench.precision import Arithmetic, Precision, autocast
from bench.text import first_line
from bench.training.arithmetic import BITS, OperationProof, name_arithmetic
from bench.training.float8 import MULTIPLE, Conversion


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer of a network, as one of its forward passes called it.

    ``image`` is the input's shape and ``out`` the output's, without the batch; ``batch`` how many
    such inputs one item of a batch makes. A linear layer has no ``stride``. ``input_grad`` and
    ``weight_grad`` say whether training computes these. One that was converted to fp8 has
    ``gradient_bits``, the significant bits of what comes back to its output.
    """

    image: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    batch: int = 1
    input_grad: bool = True
    weight_grad: bool = True
    gradient_bits: int | None = None

    @property
    def linear(self) -> bool:
        return not self.stride

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight[2:]

    @property
    def flop(self) -> int:
        """Of all passes, for one input."""
        elements = self.image if self.transposed else self.out
        passes = 1 + self.input_grad + self.weight_grad
        return passes * 2 * math.prod(elements) * math.prod(self.weight[1:])

    @property
    def products(self) -> tuple[int, int, int]:
        """Products an element sums: forward, input gradient, weight gradient of one input."""
        ahead = math.prod(self.weight[1:])
        back = self.weight[0] // self.groups * math.prod(self.kernel)
        if self.transposed:
            return back, ahead, math.prod(self.image[1:])
        return ahead, back, math.prod(self.out[1:])

    @property
    def fp8_bits(self) -> tuple[tuple[int, int] | None, ...]:
        """Bits of the factors, where it was converted: forward, input and weight gradient."""
        if self.gradient_bits is None:
            return None, None, None
        back = (BITS[Arithmetic.FLOAT8], self.gradient_bits)
        return (BITS[Arithmetic.FLOAT8],) * 2, back, back

    @property
    def winograd(self) -> bool:
        """Whether Winograd's algorithm can compute it: 3x3, one pixel at a time."""
        steps = {*self.stride, *self.dilation}
        return self.kernel == (3, 3) and steps == {1} and not self.transposed

    def __str__(self) -> str:
        """Such as ``3×3 convolution, 256 to 256 channels, 32 groups, on 16×16``."""
        if self.linear:
            kind = "linear layer" if self.gradient_bits is None else "fp8 linear layer"
            return f"{kind}, {self.weight[1]} to {self.weight[0]} features"
        size, on = ("×".join(map(str, sides)) for sides in (self.kernel, self.image[1:]))
        into, out = self.image[0], self.out[0]
        kind = "transposed convolution" if self.transposed else "convolution"
        grouped = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{size} {kind}, {into} to {out} channels{grouped}, on {on}"

    def require(self, x: Tensor, weight: Tensor) -> list[Tensor]:
        x.requires_grad_(self.input_grad)
        weight.requires_grad_(self.weight_grad)
        return [tensor for tensor in (x, weight) if tensor.requires_grad]

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """Run it on ``x`` (N, *image) and ``weight``; (N, *out)."""
        if self.linear:
            return F.linear(x, weight)
        name = f"conv{'_transpose' if self.transposed else ''}{len(self.stride)}d"
        convolve: Callable[..., Tensor] = getattr(F, name)
        if self.transposed:
            extra = (self.output_padding, self.groups, self.dilation)
            return convolve(x, weight, None, self.stride, self.padding, *extra)
        return convolve(x, weight, None, self.stride, self.padding, self.dilation, self.groups)


DENSE = Layer((128, 16, 16), (128, 128, 3, 3), (128, 16, 16), (1, 1), (1, 1), (1, 1))
"""Large enough that cuDNN takes the tensor cores where it may, at `_DENSE_IMAGES` at least.

Of one small image it took none on an A100, its flag on (TensorFlow issue 58047): at a case's own
batch of one, a true label would be called false.
"""

_DENSE_IMAGES = 16


class _Recorder(TorchDispatchMode):
    """Notes each convolution and matmul of a forward pass of so many ``items``; with some weights
    ``frozen`` it is to see a graph, which says who has gradients."""

    def __init__(self, items: int, frozen: bool) -> None:
        super().__init__()
        self._items, self._frozen = items, frozen
        self.layers: set[Layer] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        layer = None
        if func is torch.ops.aten.convolution.default:
            x, w, _, *steps, transposed, padded, groups = args
            n = len(steps[0])
            if x.dim() == n + 2:
                about: list[Any] = [tuple(s) for s in (x.shape[1:], w.shape, out.shape[1:])]
                about += [tuple(s * n if len(s) == 1 else s) for s in steps]
                about += [groups, transposed, tuple(padded)]
                layer = Layer(*about)
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            x, w = args[-2:]
            if all(type(t) in (Tensor, nn.Parameter) for t in (x, w)):  # not one in fp8
                into, features = w.shape
                layer = Layer((into,), (features, into), (features,))
        if layer:
            # the first layer that trains is probed as the first of a network: with both gradients
            trained, both = self._has_gradient(w), self._has_gradient(x, w)
            batch = max(1, len(x) // self._items)
            self.layers.add(replace(layer, batch=batch, input_grad=both, weight_grad=trained))
        return out

    def _has_gradient(self, *tensors: Tensor) -> bool:
        return not self._frozen or any(tensor.requires_grad for tensor in tensors)


def find_layers(compute: Callable[[], object], items: int, frozen: bool = False) -> list[Layer]:
    """The layers to probe: the most expensive convolution, and grouped one if that is another;
    where there is no convolution, the largest linear layer; or nothing. ``compute`` runs the
    network forward on a batch of so many ``items``, with some weights ``frozen`` or none."""
    with torch.set_grad_enabled(frozen), _Recorder(items, frozen) as seen:
        compute()
    convolutions = [layer for layer in seen.layers if not layer.linear]
    grouped = [layer for layer in convolutions if layer.groups > 1]
    chosen = [
        max(layers, key=lambda layer: (layer.flop * layer.batch, str(layer)))
        for layers in (convolutions or seen.layers, grouped)
        if layers
    ]
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class LayerProof:
    layer: Layer
    forward: OperationProof
    input_grad: OperationProof | None
    weight_grad: OperationProof | None

    @property
    def findings(self) -> tuple[OperationProof, ...]:
        return tuple(f for f in (self.forward, self.input_grad, self.weight_grad) if f)


@dataclass(frozen=True)
class Proof:
    """What was found of a network's layers and of a matmul.

    ``dense`` is what must run as labelled: a convolution that has a kernel for every arithmetic,
    where it was needed to tell a layer that has none from a flag that is off. ``notes`` says what
    could not be probed as the case runs.
    """

    layers: tuple[LayerProof, ...]
    matmul: OperationProof
    dense: OperationProof | None = None
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[OperationProof, ...]:
        """All of them, the most expensive layer's forward pass first, the matmul last."""
        return (*(f for proof in self.layers for f in proof.findings), self.matmul)

    @property
    def arithmetic(self) -> str:
        """Each arithmetic that was found, in that order: ``float16``, or ``tfloat32/float32``."""
        return "/".join(dict.fromkeys(f.arithmetic for f in self.findings))

    def contradicts(self, precision: Precision) -> str:
        """What ran that ``precision`` does not allow; empty where its label is true.

        Nothing may be coarser than the label. A layer may be finer: not every shape has a kernel in
        TF32. But then a dense convolution that has one must run as labelled; else the flag is off.
        A layer that was converted to fp8 must. What is unclear contradicts nothing.
        """
        wanted = precision.arithmetic
        against = [f for f in self.findings if f.arithmetic is Arithmetic.WRONG]
        against += [f for f in self.findings if f.bits is not None and f.bits < BITS[wanted]]
        if self.dense and self.dense.arithmetic not in (wanted, Arithmetic.UNCLEAR):
            against.append(self.dense)
        return f"labelled {precision.name}, but {'; '.join(map(str, against))}" if against else ""

    def remarks(self, precision: Precision) -> list[str]:
        """What a reader should know although it contradicts nothing."""
        found = [*self.findings, *([self.dense] if self.dense else [])]
        fine = [precision.arithmetic, *([Arithmetic.BFLOAT16] if precision.float8 else [])]
        odd = [f for f in found if f.arithmetic not in fine or f.ways]
        return list(dict.fromkeys([*self.notes, *map(str, odd)]))


_FLOP = {"cuda": 1.5e12, "cpu": 1e9}
"""Of one probe at most: 0.3 s on a card at 5 TFLOP/s, and less on a CPU at 10 GFLOP/s."""

_EXACT_FLOP = 2e9  # of the float64 reference, on a CPU
_EXACT_IMAGES = 8


_WITHOUT_GRAPHS = {
    "default": "default",
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
"""The mode of torch.compile that has the kernels of another, each started by itself."""


@dataclass(frozen=True)
class Setting:
    """How a case runs its layers, on how many images they are probed, and whether some weights are
    ``frozen``."""

    precision: Precision
    device: torch.device
    batch_size: int
    memory_format: torch.memory_format = torch.contiguous_format
    compile: str = Case.compile
    frozen: bool = False


def prove(
    setting: Setting,
    compute: Callable[[], object],
    items: int,
    conversion: Conversion | None = None,
) -> Proof:
    """Probe a network's layers and a matmul as ``setting`` runs them; of what of it runs in fp8, by
    ``conversion``, the layer that does the most. ``compute`` runs the network as it was trained,
    forward and not compiled, on a batch of so many ``items``, at least two."""
    notes: list[str] = []
    layers: list[Layer] = []
    try:
        layers = find_layers(compute, items, setting.frozen)
    except Exception as error:  # a network for which two items are too few is probed all the same
        notes.append(f"the network's layers could not be listed: {first_line(error)}")
    right = (setting.precision.arithmetic, Arithmetic.UNCLEAR)
    converted = [_probe_converted(conversion, setting, notes)] if conversion else []
    if not (converted or layers):
        layers = [DENSE]
    proofs = (*converted, *(probe(layer, setting, notes) for layer in layers))
    dense = None
    if converted:
        if converted[0].forward.arithmetic not in right:
            dense = converted[0].forward
    elif any(p.forward.arithmetic not in right for p in proofs):
        enough = replace(setting, batch_size=max(setting.batch_size, _DENSE_IMAGES))
        dense = probe(DENSE, enough, notes).forward
    return Proof(proofs, _multiply(setting), dense, tuple(dict.fromkeys(notes)))


def _probe_converted(conversion: Conversion, setting: Setting, notes: list[str]) -> LayerProof:
    """Run the network's own layer, with a weight and inputs whose exact result is known."""
    product = conversion.largest
    weight = tuple(product.layer.weight.shape)
    layer = Layer(
        (weight[1],),
        weight,
        (weight[0],),
        batch=max(1, product.rows_per_item),
        # as of the other layers, the first that trains is probed with both
        input_grad=product.input_grad or product.weight_grad,
        weight_grad=product.weight_grad,
        gradient_bits=conversion.gradient_bits,
    )

    def compute(x: Tensor, w: Tensor) -> Tensor:
        bias = {} if product.layer.bias is None else {"bias": x.new_zeros(weight[0])}
        out: Tensor = functional_call(product.layer, {"weight": w, **bias}, (x,))
        return out

    return probe(layer, setting, notes, compute)


def probe(
    layer: Layer,
    setting: Setting,
    notes: list[str],
    compute: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> LayerProof:
    """Run a layer forward and backward on a batch, and look at its first images' errors, and those
    of the gradients that training computes.

    Images do not mix in a forward pass and an input gradient; for the weight gradient, the gradient
    behind all other images is zero. So float64 computes those few alone, on the CPU. Why a
    compilation failed is added to ``notes``, and the layer is run without. ``compute`` runs it on
    an input (N, *image) and a weight; by default `Layer.compute`.
    """
    compute = compute or layer.compute
    device, dtype = setting.device, getattr(torch, setting.precision.weights)
    exact = int(max(1, min(_EXACT_IMAGES, setting.batch_size, _EXACT_FLOP // layer.flop)))
    batch = layer.batch * setting.batch_size
    batch = int(max(exact, min(batch, _FLOP[size_as(device.type)] // layer.flop)))
    if layer.gradient_bits is not None:
        batch = -(-batch // MULTIPLE) * MULTIPLE

    rng = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=rng)
        for shape in ((exact, *layer.image), layer.weight, (exact, *layer.out))
    )

    def ready(tensor: Tensor) -> Tensor:
        memory_format = setting.memory_format if tensor.dim() == 4 else torch.contiguous_format
        return tensor.contiguous(memory_format=memory_format)

    def run(compute: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        few = x.to(device, dtype)
        many = few.repeat(-(-batch // exact), *[1] * len(layer.image))[:batch]
        a, w = ready(many), ready(weight.to(device, dtype))
        wanted = layer.require(a, w)
        with autocast(setting.precision, device):
            out = compute(a, w)
        behind = torch.zeros_like(out)
        behind[:exact] = grad.to(out)
        return [out.detach(), *(torch.autograd.grad(out, wanted, behind) if wanted else ())]

    try:
        got = run(
            compute
            if setting.compile == "off"
            else torch.compile(compute, dynamic=False, mode=_WITHOUT_GRAPHS[setting.compile])
        )
    except Exception as error:
        if setting.compile == "off":
            raise
        notes.append(f"the probe could not be compiled and ran without: {first_line(error)}")
        got = run(compute)
    a, w = x.double(), weight.double()
    wanted = layer.require(a, w)
    out = layer.compute(a, w)
    right = [out.detach(), *(torch.autograd.grad(out, wanted, grad.double()) if wanted else ())]
    ahead, back, places = layer.products
    pairs = zip(got, right, strict=True)

    def judge(
        operation: str, products: int, bits: tuple[int, int] | None, images: int | None
    ) -> OperationProof:
        one, exactly = next(pairs)
        error = _error(one[:images], exactly)
        return name_arithmetic(operation, error, got[0].dtype, products, layer.winograd, bits)

    bits = layer.fp8_bits
    return LayerProof(
        layer,
        judge(str(layer), ahead, bits[0], exact),
        judge(f"input gradient of the {layer}", back, bits[1], exact) if layer.input_grad else None,
        judge(f"weight gradient of the {layer}", exact * places, bits[2], None)
        if layer.weight_grad
        else None,
    )


def _multiply(setting: Setting) -> OperationProof:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 512, generator=rng), torch.randn(512, 256, generator=rng)
    dtype = getattr(torch, setting.precision.weights)
    with torch.no_grad(), autocast(setting.precision, setting.device):
        out = a.to(setting.device, dtype) @ b.to(setting.device, dtype)
    error = _error(out, a.double() @ b.double())
    return name_arithmetic("matmul, 256×512 by 512×256", error, out.dtype, 512)


def _error(got: Tensor, right: Tensor) -> float:
    return float((got.cpu().double() - right).norm() / right.norm())
