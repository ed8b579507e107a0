"""What the real cases of the oracle train: small, and quick where a CPU emulates float16."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.networks.workloads import Network, Workload


def small() -> nn.Module:
    """A network of images with what precisions treat differently: convolution, norm, product."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )


class Lines(Workload):
    """A straight line with noise, fitted by a step of one's own: a loss of two parts.

    ``pause_s`` are the seconds that each step waits, so that a kill falls within an epoch.
    """

    samples = 256

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))

    def make_batch(
        self, size: int, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        x = torch.randn(size, 16, generator=generator, device=device)
        return {"x": x, "y": x.sum(1, keepdim=True)}

    def compute_loss(self, network: Network, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(self.pause_s)
        found = network(batch["x"])
        return F.mse_loss(found, batch["y"]) + 0.1 * found.abs().mean()


def lines() -> Workload:
    return Lines()


def slow_lines() -> Workload:
    return Lines(pause_s=0.1)
