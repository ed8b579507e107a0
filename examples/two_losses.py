"""Fine-tuning: a frozen backbone, and two heads with a loss each.

    python -m bench.sweep --workload examples.two_losses:boxes --precision fp32 fp16-amp

One head says what is on an image, the other where: a class and the corners of a box. Nothing
is evaluated, and nothing says what was right: those columns stay empty.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import Network, Workload


class Detector(nn.Module):
    """(N, 3, H, W) to logits (N, classes) and boxes (N, 4)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()
        )
        self.backbone.requires_grad_(False)
        self.neck = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, 2, 1), nn.ReLU())
        self.what, self.where = nn.Linear(2 * width, classes), nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.neck(self.backbone(x)).mean((2, 3))
        return {"logits": self.what(features), "boxes": self.where(features)}


class Boxes(Workload):
    """Random images, classes and boxes."""

    def __init__(self, side: int = 128, width: int = 64, samples: int = 10_000) -> None:
        self.side, self.width, self.samples = side, width, samples

    def build_model(self) -> nn.Module:
        return Detector(self.width, classes=20)

    def make_batch(
        self, size: int, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        shape = (size, 3, self.side, self.side)
        return {
            "images": torch.randn(shape, generator=generator, device=device),
            "classes": torch.randint(20, (size,), generator=generator, device=device),
            "boxes": torch.rand(size, 4, generator=generator, device=device),
        }

    def compute_loss(self, network: Network, batch: dict[str, Tensor]) -> Tensor:
        found = network(batch["images"])
        what = F.cross_entropy(found["logits"], batch["classes"])
        return what + 5 * F.smooth_l1_loss(found["boxes"], batch["boxes"])


def boxes() -> Workload:
    return Boxes()


def tiny() -> Workload:
    """For a quick try on a CPU."""
    return Boxes(side=32, width=8, samples=100)
