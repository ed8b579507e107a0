"""The arithmetic that a network's own layers ran in, derived from their error against float64.

A flag only allows an arithmetic, and an output's dtype only shows how the result is stored; the
error shows what was computed. The probe runs the network's most expensive convolution and its most
expensive grouped convolution, forward and both gradients, with the case's shapes (at most
`bench.schema.case.MOST_PROBED` images), memory format and compilation, and a matmul. With frozen
weights, gradients that training does not compute are neither probed nor counted as cost."""

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

from bench.base.text import first_line
from bench.schema.case import Case
from bench.schema.precision import BITS, Arithmetic, Precision
from bench.training.arithmetic import OperationProof, name_arithmetic
from bench.training.float8 import MOST_MULTIPLE, TRIED, Conversion
from bench.training.formats import autocast


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer of a network, as a forward pass called it.

    ``image`` and ``out`` are the shapes of input and output, without the batch dimension; ``batch``
    is the number of such inputs per item of a batch. A linear layer has no ``stride``.
    ``input_grad`` and ``weight_grad`` say whether training computes these gradients.
    ``gradient_bits`` are the significant bits of the output's gradient in a layer converted to fp8.
    """

    image: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    batch: int = 1
    input_grad: bool = True
    weight_grad: bool = True
    gradient_bits: int | None = None

    @property
    def linear(self) -> bool:
        return not self.stride

    @property
    def flop(self) -> int:
        """FLOP of the forward pass and the computed gradients, for one input."""
        passes = 1 + self.input_grad + self.weight_grad
        return passes * 2 * math.prod(self.out) * math.prod(self.weight[1:])

    @property
    def winograd(self) -> bool:
        """Whether Winograd's algorithm can compute it: 3x3, with stride and dilation of 1."""
        return self.weight[2:] == (3, 3) and {*self.stride, *self.dilation} == {1}

    def __str__(self) -> str:
        """Such as ``3×3 convolution, 256 to 256 channels, 32 groups, on 16×16``."""
        if self.linear:
            kind = "linear layer" if self.gradient_bits is None else "fp8 linear layer"
            return f"{kind}, {self.weight[1]} to {self.weight[0]} features"
        size, on = ("×".join(map(str, sides)) for sides in (self.weight[2:], self.image[1:]))
        grouped = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{size} convolution, {self.image[0]} to {self.out[0]} channels{grouped}, on {on}"

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """Run the layer on ``x`` (N, *image) and ``weight``; return (N, *out)."""
        if self.linear:
            return F.linear(x, weight)
        convolve: Callable[..., Tensor] = getattr(F, f"conv{len(self.stride)}d")
        return convolve(x, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def run(
        self, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, grad: Tensor
    ) -> list[Tensor]:
        """Return the output for ``x`` (N, *image), and the gradients that training computes, given
        that of the first images of the output."""
        x.requires_grad_(self.input_grad)
        weight.requires_grad_(self.weight_grad)
        wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
        out = compute(x, weight)
        behind = torch.zeros_like(out)
        behind[: len(grad)] = grad.to(out)
        return [out.detach(), *(torch.autograd.grad(out, wanted, behind) if wanted else ())]


DENSE = Layer((128, 16, 16), (128, 128, 3, 3), (128, 16, 16), (1, 1), (1, 1), (1, 1))
"""A convolution large enough for cuDNN to use allowed tensor cores, from `_DENSE_IMAGES` images on.

With one small image, cuDNN used none on an A100 although its flag was on (TensorFlow issue 58047):
at a case's batch size of 1, a correct label would be rejected.
"""

_DENSE_IMAGES = 16


class _Recorder(TorchDispatchMode):
    """Records each convolution and matmul of a forward pass of ``items`` items. With ``frozen``
    weights, the pass must build an autograd graph, which shows the tensors that get gradients."""

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
            x, w, _, *steps, transposed, _, groups = args
            n = len(steps[0])
            if x.dim() == n + 2 and not transposed:
                about: list[Any] = [tuple(s) for s in (x.shape[1:], w.shape, out.shape[1:])]
                about += [*(tuple(s * n if len(s) == 1 else s) for s in steps), groups]
                layer = Layer(*about)
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            x, w = args[-2:]
            if all(type(t) in (Tensor, nn.Parameter) for t in (x, w)):  # not one in fp8
                into, features = w.shape
                layer = Layer((into,), (features, into), (features,))
        if layer:
            # a layer that trains is probed with both gradients, even if it is the first one
            trained, both = self._has_gradient(w), self._has_gradient(x, w)
            batch = max(1, len(x) // self._items)
            self.layers.add(replace(layer, batch=batch, input_grad=both, weight_grad=trained))
        return out

    def _has_gradient(self, *tensors: Tensor) -> bool:
        return not self._frozen or any(tensor.requires_grad for tensor in tensors)


def find_layers(compute: Callable[[], object], items: int, frozen: bool = False) -> list[Layer]:
    """Return the layers to probe: the most expensive convolution, and the most expensive grouped
    one if it differs; without convolutions, the largest linear layer, if any. ``compute`` runs the
    network forward on ``items`` items; ``frozen`` is whether some weights are frozen."""
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
    """Findings for a network's layers and for a matmul.

    ``dense`` must run as labelled. It is a convolution with a kernel for every arithmetic, probed
    if necessary to tell a layer without such a kernel from a flag that is off, or the converted fp8
    layer. ``notes`` says what could not be probed the way the case runs it.
    """

    layers: tuple[LayerProof, ...]
    matmul: OperationProof
    dense: OperationProof | None = None
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[OperationProof, ...]:
        """All findings, the most expensive layer's forward pass first, the matmul last."""
        return (*(f for proof in self.layers for f in proof.findings), self.matmul)

    @property
    def arithmetic(self) -> str:
        """Each arithmetic found, in that order: ``float16``, or ``tfloat32/float32``."""
        return "/".join(dict.fromkeys(f.arithmetic for f in self.findings))

    def contradicts(self, precision: Precision) -> str:
        """Return the findings that ``precision`` does not allow; empty if its label is correct.

        No arithmetic may be coarser than the label. A layer may run in a finer one, since not every
        shape has a TF32 kernel; then a dense convolution that has one must run as labelled, or the
        flag is off. A layer converted to fp8 must run in fp8. Unclear findings contradict nothing.
        """
        wanted = precision.arithmetic
        against = [f for f in self.findings if f.arithmetic is Arithmetic.WRONG]
        against += [f for f in self.findings if f.bits is not None and f.bits < BITS[wanted]]
        if self.dense and self.dense.arithmetic not in (wanted, Arithmetic.UNCLEAR):
            against.append(self.dense)
        return f"labelled {precision.name}, but {'; '.join(map(str, against))}" if against else ""

    def remarks(self, precision: Precision) -> list[str]:
        """Return findings worth reporting although they contradict nothing, and the notes."""
        found = [*self.findings, *([self.dense] if self.dense else [])]
        fine = [precision.arithmetic, *([Arithmetic.BFLOAT16] if precision.float8 else [])]
        odd = [f for f in found if f.arithmetic not in fine]
        return list(dict.fromkeys([*self.notes, *map(str, odd)]))


_FLOP = {"cuda": 1.5e12, "cpu": 1e9}
"""Maximum of one probe: 0.3 s on a card at 5 TFLOP/s, and less on a CPU at 10 GFLOP/s."""

_EXACT_FLOP = 2e9  # maximum of the float64 reference, on a CPU
_EXACT_IMAGES = 8


_WITHOUT_GRAPHS = {
    "default": "default",
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
"""For each mode of torch.compile, the mode with the same kernels but without CUDA graphs."""


@dataclass(frozen=True)
class LayerSetting:
    """How a case runs its layers, the batch size to probe, and whether weights are ``frozen``."""

    precision: Precision
    device: torch.device
    batch_size: int
    memory_format: torch.memory_format = torch.contiguous_format
    compile: str = Case.compile
    dynamic: bool | None = False
    frozen: bool = False


def prove(
    setting: LayerSetting,
    compute: Callable[[], object],
    items: int,
    conversion: Conversion | None = None,
) -> Proof:
    """Probe a network's layers and a matmul as ``setting`` runs them, and the layer with the most
    FLOP of those that ``conversion`` converted to fp8. ``compute`` runs the trained network
    forward, uncompiled, on a batch of ``items`` items, at least two."""
    notes: list[str] = []
    layers: list[Layer] = []
    try:
        layers = find_layers(compute, items, setting.frozen)
    except Exception as error:  # a network that needs more than two items is probed nevertheless
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


def _probe_converted(conversion: Conversion, setting: LayerSetting, notes: list[str]) -> LayerProof:
    """Run the network's own layer, with a weight and inputs whose exact result is known."""
    product = conversion.largest
    trained = product.layer.weight.requires_grad
    weight = tuple(product.layer.weight.shape)
    layer = Layer(
        (weight[1],),
        weight,
        (weight[0],),
        batch=max(1, product.rows // TRIED),
        # as in `_Recorder`, a layer that trains is probed with both gradients
        input_grad=product.input_grad or trained,
        weight_grad=trained,
        gradient_bits=conversion.gradient_bits,
    )

    def compute(x: Tensor, w: Tensor) -> Tensor:
        bias = {} if product.layer.bias is None else {"bias": x.new_zeros(weight[0])}
        out: Tensor = functional_call(product.layer, {"weight": w, **bias}, (x,))
        return out

    return probe(layer, setting, notes, compute)


def probe(
    layer: Layer,
    setting: LayerSetting,
    notes: list[str],
    compute: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> LayerProof:
    """Run a layer forward and backward on a batch, and measure the errors of its first images and
    of the gradients that training computes.

    The float64 reference computes only those few images, on the CPU: images do not mix in forward
    pass and input gradient, and for the weight gradient all other images get an output gradient of
    zero. If compilation fails, the reason is added to ``notes`` and the layer runs uncompiled.
    ``compute`` runs it on an input (N, *image) and a weight; by default `Layer.compute`.
    """
    exact = int(max(1, min(_EXACT_IMAGES, setting.batch_size, _EXACT_FLOP // layer.flop)))
    rng = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=rng)
        for shape in ((exact, *layer.image), layer.weight, (exact, *layer.out))
    )
    got = _run_as_case(layer, setting, notes, compute or layer.compute, (x, weight, grad))
    right = layer.run(layer.compute, x.double(), weight.double(), grad.double())
    pairs = zip(got, right, strict=True)
    bits = layer.gradient_bits
    factors = (BITS[Arithmetic.FLOAT8], bits) if bits is not None else None

    def judge(
        what: str, products: int, images: int | None, factors: tuple[int, int] | None = factors
    ) -> OperationProof:
        one, exactly = next(pairs)
        error = _error(one[:images], exactly)
        operation = f"{what} of the {layer}" if what else str(layer)
        return name_arithmetic(operation, error, got[0].dtype, products, layer.winograd, factors)

    kernel, places = math.prod(layer.weight[2:]), exact * math.prod(layer.out[1:])
    return LayerProof(
        layer,
        judge("", math.prod(layer.weight[1:]), exact, factors and (factors[0],) * 2),
        judge("input gradient", layer.weight[0] // layer.groups * kernel, exact)
        if layer.input_grad
        else None,
        judge("weight gradient", places, None) if layer.weight_grad else None,
    )


def _run_as_case(
    layer: Layer,
    setting: LayerSetting,
    notes: list[str],
    compute: Callable[[Tensor, Tensor], Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
) -> list[Tensor]:
    """Run a layer as the case does, on a batch of the images, the weight and the gradient of the
    first images' output in ``tensors``; return as `Layer.run`."""
    x, weight, grad = tensors
    device, dtype = setting.device, getattr(torch, setting.precision.weights)
    most = min(layer.batch * setting.batch_size, _FLOP[device.type] // layer.flop)
    batch = int(max(len(x), most))
    if layer.gradient_bits is not None:
        batch = -(-batch // MOST_MULTIPLE) * MOST_MULTIPLE
    many = x.to(device, dtype).repeat(-(-batch // len(x)), *[1] * len(layer.image))[:batch]

    def ready(tensor: Tensor) -> Tensor:
        memory_format = setting.memory_format if tensor.dim() == 4 else torch.contiguous_format
        return tensor.contiguous(memory_format=memory_format)

    def run(compute: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        def cast(a: Tensor, w: Tensor) -> Tensor:
            with autocast(setting.precision, device):
                return compute(a, w)

        return layer.run(cast, ready(many), ready(weight.to(device, dtype)), grad)

    if setting.compile == "off":
        return run(compute)
    try:
        return run(
            torch.compile(compute, dynamic=setting.dynamic, mode=_WITHOUT_GRAPHS[setting.compile])
        )
    except Exception as error:
        notes.append(f"the probe could not be compiled and ran without: {first_line(error)}")
        return run(compute)


def _multiply(setting: LayerSetting) -> OperationProof:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 512, generator=rng), torch.randn(512, 256, generator=rng)
    dtype = getattr(torch, setting.precision.weights)
    with torch.no_grad(), autocast(setting.precision, setting.device):
        out = a.to(setting.device, dtype) @ b.to(setting.device, dtype)
    error = _error(out, a.double() @ b.double())
    return name_arithmetic("matmul, 256×512 by 512×256", error, out.dtype, 512)


def _error(got: Tensor, right: Tensor) -> float:
    return float((got.cpu().double() - right).norm() / right.norm())
