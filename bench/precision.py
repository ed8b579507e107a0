"""Which number formats a case trains in: said once, as data.

Reading this module costs nothing; torch is imported by the functions that act on a model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Precision:
    """How weights, activations and arithmetic flags are set.

    ``weights``, ``activations`` and ``arithmetic`` are torch dtype names; ``arithmetic`` is what a
    convolution or matmul rounds its inputs to, and so the error the numeric probe must find.
    """

    name: str
    help: str
    weights: str = "float32"
    autocast: str | None = None
    arithmetic: str = "float32"
    scales_loss: bool = False
    default_loss_scale: float | str | None = None
    min_capability: tuple[int, int] = (0, 0)

    @property
    def masters(self) -> bool:
        """Whether fp32 master weights stand behind the weights the network computes with."""
        return self.weights != "float32"


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("fp32", "fp32 weights and IEEE fp32 arithmetic, TF32 off"),
        Precision(
            "tf32",
            "fp32 weights, TF32 in convolutions and matmuls (Ampere and later)",
            arithmetic="tfloat32",
            min_capability=(8, 0),
        ),
        Precision(
            "fp16",
            "the 2019 recipe: fp16 network, fp32 BatchNorm, loss and master weights, loss scale",
            weights="float16",
            arithmetic="float16",
            scales_loss=True,
            default_loss_scale=128.0,  # what the RTX Titan page used for its batch-size rows
        ),
        Precision(
            "fp16-amp",
            "fp32 weights under torch.autocast(float16), loss scale",
            autocast="float16",
            arithmetic="float16",
            scales_loss=True,
            default_loss_scale="dynamic",
        ),
        Precision(
            "bf16",
            "bf16 network, fp32 BatchNorm, loss and master weights",
            weights="bfloat16",
            arithmetic="bfloat16",
            # Volta and Turing emulate bf16: slow enough to say nothing about the card
            min_capability=(8, 0),
        ),
        Precision(
            "bf16-amp",
            "fp32 weights under torch.autocast(bfloat16)",
            autocast="bfloat16",
            arithmetic="bfloat16",
            min_capability=(8, 0),
        ),
    )
}


def set_flags(precision: Precision) -> None:
    """Set the process's fp32 arithmetic for ``precision``, for convolutions and matmuls alike.

    A default "fp32" run is TF32 in its convolutions. torch raises on reading the older
    ``allow_tf32`` flags once the newer ``fp32_precision`` ones are mixed in; the setter used for
    matmuls keeps both in step, since inductor reads the older ones.
    """
    import torch

    mode = "tf32" if precision.arithmetic == "tfloat32" else "ieee"
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]


def read_flags() -> dict[str, str]:
    """Read back the flags that decide how fp32 arithmetic and cuDNN behave in this process."""
    import torch

    matmul = torch.backends.cuda.matmul
    return {
        "matmul": str(matmul.fp32_precision),
        "fp16_reduction": str(matmul.allow_fp16_reduced_precision_reduction).lower(),
        "bf16_reduction": str(matmul.allow_bf16_reduced_precision_reduction).lower(),
        "conv": str(torch.backends.cudnn.conv.fp32_precision),  # type: ignore[attr-defined]
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark).lower(),
        "deterministic": str(torch.backends.cudnn.deterministic).lower(),
    }


def cast(model: nn.Module, precision: Precision) -> nn.Module:
    """Cast ``model`` in place to the precision's weights; affine BatchNorm stays in fp32.

    The rule is apex ``fp16_utils.network_to_half``'s of 2019: running statistics and affine
    parameters of BatchNorm lose too much in half precision.
    """
    import torch

    if precision.masters:
        model.to(getattr(torch, precision.weights))
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine:
                module.float()
    return model


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the forward pass and the loss run."""
    import torch

    if precision.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision.autocast))


@dataclass(frozen=True)
class Proof:
    """What a convolution and a matmul really did, seen from their error against float64."""

    conv: str
    conv_error: float
    matmul: str
    matmul_error: float

    def contradicts(self, precision: Precision) -> str:
        """Say in one line what ran instead of ``precision``; empty where its label is true.

        The convolution decides: it is all but a thousandth of these networks. An fp32 label needs
        the matmul as well, which torch keeps under a flag of its own.
        """
        wanted = precision.arithmetic
        if self.conv == wanted and (self.matmul == wanted or wanted != "float32"):
            return ""
        return (
            f"labelled {precision.name}, but the convolution ran in {self.conv} (error "
            f"{self.conv_error:.1e}) and the matmul in {self.matmul} ({self.matmul_error:.1e})"
        )


def prove(precision: Precision, device: torch.device) -> Proof:
    """Run one convolution and one matmul as ``precision`` runs them, and look at the error."""
    import torch
    import torch.nn.functional as F

    rng = torch.Generator().manual_seed(0)
    # large enough that cuDNN takes the tensor cores where it may
    image = torch.randn(16, 128, 16, 16, generator=rng)
    kernel = torch.randn(128, 128, 3, 3, generator=rng)
    a, b = torch.randn(256, 512, generator=rng), torch.randn(512, 256, generator=rng)
    weights = getattr(torch, precision.weights)

    def run(operation: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[str, float]:
        with torch.no_grad(), autocast(precision, device):
            out = operation(*(x.to(device, weights) for x in inputs))
        exact = operation(*(x.double() for x in inputs))
        error = float((out.double().cpu() - exact).norm() / exact.norm())
        return _name_arithmetic(out.dtype, error), error

    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=1)

    return Proof(*run(convolve, image, kernel), *run(torch.matmul, a, b))


_ROUNDING = {
    "float32": (0.0, 2e-5, ("float32",)),
    "tfloat32": (2e-5, 1e-3, ("float32",)),
    "float16": (2e-5, 1e-3, ("float16",)),
    "bfloat16": (1e-3, 1e-2, ("bfloat16", "float32")),
}
"""Arithmetic: the relative errors it has, at least and below, and the dtypes it may hand out."""


def _name_arithmetic(dtype: torch.dtype, error: float) -> str:
    """Name the arithmetic from the output's dtype and the relative error.

    Rounding inputs of a long dot product to p significant bits leaves a relative error near
    2^-p: about 1e-7 for fp32 (24 bits), 3e-4 for fp16 and TF32 (11), 2e-3 for bf16 (8). fp16 and
    TF32 differ in the dtype that comes out.
    """
    name = str(dtype).removeprefix("torch.")
    for arithmetic, (low, high, outputs) in _ROUNDING.items():
        if low <= error < high and name in outputs:
            return arithmetic
    return f"{name} with an error of {error:.1e}"
