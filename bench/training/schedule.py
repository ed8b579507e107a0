"""The learning rate of each step, from torch's own schedulers run ahead of the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from bench.case import Case, whole_batch
from bench.optimization import count_warmup_steps, scale_lr

_Build = Callable[[torch.optim.Optimizer, int, float], LRScheduler]

_BUILDERS: Mapping[str, _Build] = {
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
        *run(_BUILDERS[case.schedule], steps - rising),
    ]
