"""What a module of a network is, also one that was scripted or traced."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def find_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of torch's that a module was written as, which a scripted or traced one
    names; that of the module if it is no such class."""
    from torch import nn

    named = getattr(nn, getattr(module, "original_name", ""), None)
    return named if isinstance(named, type) else type(module)


def calls_batchnorm(module: nn.Module) -> bool:
    """Return whether ``module`` is torch's own BatchNorm, perhaps scripted or traced."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return isinstance(module, _BatchNorm) or bool(find_batchnorm(module))


def find_batchnorm(module: nn.Module) -> list[bool | None]:
    """Return for each call of batch normalisation in the code of a scripted or traced layer whether
    it normalises by the batch; None if that is as the layer's mode is, which no trace looks at."""
    import torch

    if not isinstance(module, torch.jit.ScriptModule) or any(True for _ in module.children()):
        return []
    with suppress(RuntimeError, AttributeError):  # it has no forward
        code: Any = module.inlined_graph  # type: ignore[no-untyped-call]
        return [call.inputsAt(5).toIValue() for call in code.findAllNodes("aten::batch_norm")]
    return []


def is_batchnorm(module: nn.Module) -> bool:
    """Return whether ``module`` is BatchNorm: torch's own, or another that holds the statistics of
    batches, as a frozen one of timm or torchvision."""
    import torch
    from torch.nn.modules.batchnorm import _NormBase

    buffers = dict(module.named_buffers(recurse=False))
    others = (_NormBase, torch.jit.ScriptModule)  # such as InstanceNorm
    return calls_batchnorm(module) or (
        {"running_mean", "running_var"} <= {*buffers} and not isinstance(module, others)
    )


def is_affine_batchnorm(module: nn.Module) -> bool:
    """Return whether ``module`` is one that apex ``fp16_utils.network_to_half`` of 2019 left in
    fp32: BatchNorm's running statistics and affine parameters lose too much in half precision."""
    return is_batchnorm(module) and getattr(module, "weight", None) is not None
