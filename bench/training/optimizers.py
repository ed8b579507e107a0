"""The optimizers of `OPTIMIZERS`, with their state created before the first step, and the learning
rate of each step.

torch's fused optimizers create a weight's state in its first step, for SGD uninitialised: a first
step that overflows and is skipped would leave it so. With a state of zeros the first step gives the
same result and allocates no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from bench.schema.case import Case, whole_batch
from bench.schema.optimization import OPTIMIZERS, count_warmup_steps, scale_lr


def build_optimizer(
    name: str, parameters: Sequence[Tensor], lr: float, capturable: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer ``name`` of `OPTIMIZERS` for ``parameters``.

    They are fused, but for SGD on half-precision weights on a CPU: one kernel, which also skips
    steps without waiting for the device. If ``capturable``, steps can be captured in a CUDA graph,
    and the learning rate is a tensor on the weights' device, float32, ().
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


_BUILDERS = {"sgd": _build_sgd, "adamw": _build_adamw}


# ----------------------------------------------------------------------------------------- schedule


_Build = Callable[[torch.optim.Optimizer, int, float], LRScheduler]

_SCHEDULES: Mapping[str, _Build] = {
    "constant": lambda sgd, steps, lr: lr_scheduler.ConstantLR(sgd, 1.0, steps),
    "linear": lambda sgd, steps, lr: lr_scheduler.LinearLR(sgd, 1.0, 0.0, steps),
    "cosine": lambda sgd, steps, lr: lr_scheduler.CosineAnnealingLR(sgd, steps),
    "polynomial": lambda sgd, steps, lr: lr_scheduler.PolynomialLR(sgd, steps, power=2),
    "onecycle": lambda sgd, steps, lr: lr_scheduler.OneCycleLR(
        sgd, lr, total_steps=steps, cycle_momentum=False
    ),
}


def learning_rates(case: Case, steps: int) -> list[float]:
    """Return the learning rate of each of the ``steps`` steps of all epochs of ``case``.

    With the base ``b = scale_lr(...)``, W warm-up steps and S = steps - W steps after them:

    - Warm-up step i = 0 ... W - 1 has ``b (i + 1) / (W + 1)``: the first is not 0, and all are
      below b.
    - Step j = 0 ... S - 1 after it has b (constant), ``b (1 - j / S)`` (linear),
      ``b (1 + cos(pi j / S)) / 2`` (cosine) or ``b (1 - j / S)^2`` (polynomial): the first is
      exactly b, and the last is not 0, which would follow at j = S.
    - onecycle has no other warm-up. It rises along half a cosine from ``b / 25`` to b at position
      ``0.3 S - 1``, which is a step only if 0.3 S is whole, and falls along another to
      ``b / 250,000`` at the last step: torch's defaults, from Smith and Topin, arXiv 1708.07120.
      With three steps or fewer none is in the rise, and a single step has the last value.

    Raises UsageError: the warm-up is longer than all steps.
    """
    lr = scale_lr(case.lr, case.lr_scaling, whole_batch(case), case.base_batch)
    rising = count_warmup_steps(case.lr_warmup, steps)
    weight = torch.zeros(1, requires_grad=True)

    def run(build: _Build, count: int) -> list[float]:
        if not count:
            return []
        sgd = torch.optim.SGD([weight], lr)
        scheduler = build(sgd, count, lr)
        rates = []
        for _ in range(count):
            rates.append(float(sgd.param_groups[0]["lr"]))
            sgd.step()  # it changes nothing: the weight has no gradient
            scheduler.step()
        return rates

    return [
        *run(lambda sgd, n, lr: lr_scheduler.LinearLR(sgd, 1 / (n + 1), 1.0, n), rising),
        *run(_SCHEDULES[case.schedule], steps - rising),
    ]
