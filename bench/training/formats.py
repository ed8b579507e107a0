"""The number formats of a precision, applied: torch's flags, the weights of a network, autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bench.networks.modules import calls_batchnorm, is_affine_batchnorm
from bench.schema.precision import Arithmetic, Precision


def set_flags(precision: Precision) -> None:
    """Set the process's fp32 arithmetic for ``precision``, for all of cuDNN and for matmuls.

    A default "fp32" run uses TF32 in its convolutions. torch raises when an older ``allow_tf32``
    flag is read that disagrees with the newer ``fp32_precision`` ones, including those of cuDNN's
    recurrent layers, so all are set. The setter for matmuls sets both of its flags; inductor reads
    the older, and for the convolutions that it writes itself (max-autotune) the one of all cuDNN.
    """
    mode = "tf32" if precision.arithmetic is Arithmetic.TFLOAT32 else "ieee"
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = mode == "tf32"  # first: it sets the two below to "none"
    torch.backends.cudnn.fp32_precision = mode  # type: ignore[attr-defined]
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = mode  # type: ignore[attr-defined]


def cast(
    model: nn.Module,
    precision: Precision,
    keeps_fp32: Callable[[nn.Module], bool] = is_affine_batchnorm,
) -> nn.Module:
    """Cast ``model`` in place to the precision's weights, except modules selected by
    ``keeps_fp32``, with their children.

    torch's BatchNorm takes half-precision inputs with fp32 weights; any other such module gets its
    inputs in fp32, and its outputs are cast back.
    """
    if precision.casts:
        dtype = getattr(torch, precision.weights)
        model.to(dtype)
        for module in filter(keeps_fp32, model.modules()):
            module.float()
            if not calls_batchnorm(module):
                _surround(module, dtype)
    return model


def _surround(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point inputs of ``module`` to fp32, and its outputs to ``dtype``."""

    def to(wanted: torch.dtype, values: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda t: t.to(wanted) if t.is_floating_point() else t, values
        )

    module.register_forward_pre_hook(
        lambda _, args, named: to(torch.float32, (args, named)), with_kwargs=True
    )
    module.register_forward_hook(lambda _, args, out: to(dtype, out))


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which the forward pass and the loss run."""
    if precision.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision.autocast))
