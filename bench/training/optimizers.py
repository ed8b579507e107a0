"""The optimizers of `OPTIMIZERS`, with their state created before the first step.

torch's fused optimizers create a weight's state in its first step, for SGD uninitialised: a first
step that overflows and is skipped would leave it so. With a state of zeros the first step gives the
same result and allocates no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from bench.errors import UnsupportedError
from bench.optimization import OPTIMIZERS


def build_optimizer(
    name: str, parameters: Sequence[Tensor], lr: float, capturable: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer ``name`` of `OPTIMIZERS` for ``parameters``.

    SGD and AdamW are fused, but for SGD on half-precision weights on a CPU: one kernel, which
    also skips steps without waiting for the device. LARS has no such kernel: if steps may be
    skipped, each waits for the device. If ``capturable``, steps can be captured in a CUDA
    graph, and the learning rate is a tensor on the weights' device, float32, (). Raises
    UnsupportedError: it needs a package that is not installed.
    """
    optimizer = _BUILDERS[name](parameters, lr)
    if capturable:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(lr, device=group["params"][0].device)
            if "capturable" in group:  # AdamW's; torch refuses to capture it otherwise
                group["capturable"] = True
        # torch warns of steps that are not captured, such as those of a smaller last batch
        optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return optimizer


def clear_state(optimizer: torch.optim.Optimizer) -> None:
    """Set the state of every weight to zero, as it was before the first step."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.zero_() if isinstance(value, Tensor) else type(value)()


def _build_sgd(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    kind = OPTIMIZERS["sgd"]
    # the kernel for a CPU leaves most half-precision weights as they are (pytorch issue 191763)
    loops = any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in parameters)
    optimizer = torch.optim.SGD(
        parameters, lr, kind.momentum, weight_decay=kind.weight_decay, fused=not loops
    )
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _build_adamw(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    kind = OPTIMIZERS["adamw"]
    first, second = kind.betas
    optimizer = torch.optim.AdamW(
        parameters, lr, (first, second), weight_decay=kind.weight_decay, fused=True
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            # on the device, so that a fused step does not count if it is skipped
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


TRUST = 0.001
"""The trust coefficient of LARS, as in the paper: a layer's step relative to its norm at lr 1."""

_TESTED = 4, 1
"""The first version of pytorch-optimizer whose LARS was compared with the paper's."""


def _build_lars(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """Make LARS (You et al., arXiv 1708.03888, algorithm 1) for weights of two or more dimensions.

    ``v = m v + TRUST |w| / (|g| + b |w|) (g + b w); w = w - lr v``. The paper has the learning rate
    inside v, which is the same if it is constant. Biases and BatchNorm's weights use SGD with
    momentum, without this scaling and without weight decay.
    """
    try:
        from pytorch_optimizer import LARS
    except ImportError as error:
        raise UnsupportedError(
            f"--optimizer lars needs another package ({error}): "
            "pip install 'pytorch-optimizer>=4.1'"
        ) from error
    found = version("pytorch_optimizer")
    if tuple(int(part) for part in found.split(".")[:2]) < _TESTED:
        raise UnsupportedError(
            f"--optimizer lars of pytorch-optimizer {found} is not known to have the paper's rule: "
            "pip install 'pytorch-optimizer>=4.1'"
        )
    kind = OPTIMIZERS["lars"]
    made: Any = LARS(
        parameters,
        lr,
        weight_decay=kind.weight_decay,
        momentum=kind.momentum,
        trust_coefficient=TRUST,
    )
    for parameter in parameters:
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer: torch.optim.Optimizer = made
    return optimizer


_BUILDERS = {"sgd": _build_sgd, "adamw": _build_adamw, "lars": _build_lars}
