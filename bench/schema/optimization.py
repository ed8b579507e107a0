"""Optimizers, learning-rate schedules and learning-rate scaling by batch size, as data.

Only names, constants and arithmetic; `bench.training` makes torch's optimizers and schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bench.base.errors import UsageError


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer's default learning rate, its weight decay, and the bytes of ``state`` that it
    keeps on the device for each weight that it steps; ``momentum`` is 0 and ``betas`` are empty if
    it has no parameter of that name.

    ``fused`` ones step in one kernel for all weights, which takes about as long for each of them,
    skips a step without waiting for the device, and can be captured in a CUDA graph. Those of
    ``torchao`` compile their step. ``block`` is the number of elements that share a scale, of an
    optimizer whose state is rounded.
    """

    name: str
    lr: float
    weight_decay: float
    momentum: float = 0.0
    betas: tuple[float, ...] = ()
    state: str = "8"
    fused: bool = False
    torchao: bool = False
    block: int = 0

    @property
    def settings(self) -> str:
        """What it does besides the learning rate: ``weight decay 0.0005, momentum 0.9``."""
        words = [f"weight decay {self.weight_decay:g}"]
        words += [f"momentum {self.momentum:g}"] if self.momentum else []
        words += [f"betas {' and '.join(map(str, self.betas))}"] if self.betas else []
        return ", ".join(words)


# torch's decay and betas, but not its lr of 1e-3, at which DPN-92's loss first rises to 6.9; at
# 3e-4 to 3.3 (CPU, fp32, batch 32, 18 steps), and at batch 128 to 2.9
_ADAMW = OptimizerKind("AdamW, fused", 3e-4, 1e-2, betas=(0.9, 0.999), fused=True)


def _round_state(what: str, bytes: str, block: int) -> OptimizerKind:
    name = f"torchao's AdamW with moments in {what}"
    state = f"{bytes} in weights of at least 4,096 elements, a multiple of {block}; 8 in others"
    return replace(_ADAMW, name=name, state=state, fused=False, torchao=True, block=block)


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    # momentum and decay are pytorch-cifar's, as in 2019. Its lr of 0.1 leaves DPN-92 at 11.5 %
    # after one epoch; 0.01 reaches 29.1 % (H200, batch 128, fp32).
    "sgd": OptimizerKind("SGD, fused", 0.01, 5e-4, 0.9, state="4", fused=True),
    "adam": replace(_ADAMW, name="Adam, fused", weight_decay=0.0),
    "adamw": _ADAMW,
    # its steps are scaled to the size of AdamW's, by 0.2 times the root of a matrix's longer side
    # (arXiv 2502.16982, equation 4), so that AdamW's rate and decay serve both
    "muon": replace(
        _ADAMW,
        name="Muon for matrices of hidden layers, its steps as large as AdamW's; AdamW for others",
        momentum=0.95,
        state="4 in those matrices; 8 in others",
        fused=False,
    ),
    # torch's constants; the paper's largest relative step is 0.01 too (arXiv 1804.04235)
    "adafactor": OptimizerKind(
        "Adafactor, which waits for the device twice a weight",
        1e-2,
        0.0,
        state="4 for each row and column of a weight, or element of a vector",
    ),
    "adamw-8bit": _round_state("8 bits", "2.03", 256),
    "adamw-4bit": _round_state("4 bits", "1.06", 128),
    "adamw-fp8": _round_state("fp8 (e4m3)", "2.03", 256),
    "adamw-offload": replace(
        _ADAMW,
        name="torchao's AdamW, whose state and step are the host's",
        state="none in weights of at least 4,096 elements, but 16 on the host; 8 in others",
        fused=False,
        torchao=True,
    ),
}

UNFUSED = tuple(name for name, kind in OPTIMIZERS.items() if not kind.fused)

COMPILING = tuple(name for name, kind in OPTIMIZERS.items() if kind.block)
"""Optimizers that call torch.compile for their own step."""

OFFLOADED = "adamw-offload"

SPECIAL = ("muon", *(name for name, kind in OPTIMIZERS.items() if kind.torchao))
"""Optimizers that step some weights as AdamW does, and are AdamW if they step all so."""

LEAST_SPECIAL = 4096
"""The fewest elements of a weight that torchao's optimizers round or offload the state of."""


def refuse_offload() -> str:
    """Return why nothing is offloaded where a CPU trains."""
    return f"{OFFLOADED} keeps a GPU's state in the host's memory; this is a CPU; use adamw"


def refuse_plain(optimizer: str, network: str) -> str:
    """Return why one of `SPECIAL` is not measured of a network that it would step as AdamW does."""
    kind, what = OPTIMIZERS[optimizer], f"has at least {LEAST_SPECIAL:,} elements"
    what += f", a multiple of {kind.block}" if kind.block else ""
    if optimizer == "muon":
        what = "is a matrix of a hidden layer (convolutions, embeddings and the head are none)"
    return f"no weight of {network} {what}, so {optimizer} would be AdamW; use --optimizer adamw"


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
