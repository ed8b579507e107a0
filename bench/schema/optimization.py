"""Optimizers, learning-rate schedules and learning-rate scaling by batch size, as data.

Only names, constants and arithmetic; `bench.training` makes torch's optimizers and schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.base.errors import UsageError


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer's default learning rate, and its weight decay; ``momentum`` is 0 and ``betas``
    are empty if it has no parameter of that name."""

    name: str
    lr: float
    weight_decay: float
    momentum: float = 0.0
    betas: tuple[float, ...] = ()

    @property
    def settings(self) -> str:
        """What it does besides the learning rate: ``weight decay 0.0005, momentum 0.9``."""
        words = [f"weight decay {self.weight_decay:g}"]
        words += [f"momentum {self.momentum:g}"] if self.momentum else []
        words += [f"betas {' and '.join(map(str, self.betas))}"] if self.betas else []
        return ", ".join(words)


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    # momentum and decay are pytorch-cifar's, as in 2019. Its lr of 0.1 leaves DPN-92 at 11.5 %
    # after one epoch; 0.01 reaches 29.1 % (H200, batch 128, fp32).
    "sgd": OptimizerKind("SGD, fused", 0.01, 5e-4, 0.9),
    # torch's decay and betas, but not its lr of 1e-3, at which DPN-92's loss first rises to 6.9; at
    # 3e-4 to 3.3 (CPU, fp32, batch 32, 18 steps), and at batch 128 to 2.9
    "adamw": OptimizerKind("AdamW, fused", 3e-4, 1e-2, betas=(0.9, 0.999)),
}

SCHEDULES: Mapping[str, str] = {
    "constant": "the learning rate stays as it is",
    "linear": "falls to 0 in a straight line (LinearLR)",
    "cosine": "falls to 0 as half a cosine (CosineAnnealingLR)",
    "polynomial": "falls to 0 as a square (PolynomialLR, power 2)",
    "onecycle": "rises for 30 % of the steps from a 25th, then falls as a cosine (OneCycleLR)",
}

LR_SCALINGS: Mapping[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    # Goyal et al., arXiv 1706.02677
    "linear": lambda ratio: ratio,
    # Krizhevsky, arXiv 1404.5997; for adaptive optimizers Malladi et al., arXiv 2205.10287
    "sqrt": math.sqrt,
}
"""Factor of the learning rate, by the ratio of the batch size to the base batch size."""


def scale_lr(lr: float, rule: str, batch_size: int, base_batch: int) -> float:
    """Return the learning rate at ``batch_size``, given ``lr`` at ``base_batch``.

    >>> scale_lr(0.1, "linear", 512, 128), scale_lr(0.1, "sqrt", 512, 128)
    (0.4, 0.2)
    """
    return lr * LR_SCALINGS[rule](batch_size / base_batch)


def count_warmup_steps(warmup: str, steps: int) -> int:
    """Return how many of ``steps`` training steps an ``lr_warmup`` value means. Raises UsageError:
    there are fewer steps than that.

    >>> count_warmup_steps("20", 391), count_warmup_steps("5%", 391)
    (20, 20)
    """
    if warmup.endswith("%"):
        return round(float(warmup[:-1]) / 100 * steps)
    if int(warmup) > steps:
        raise UsageError(
            f"--lr-warmup {warmup} is longer than the training's {steps} steps; use at most {steps}"
        )
    return int(warmup)
