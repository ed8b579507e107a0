"""Dual Path Networks (Chen et al. 2017, arXiv:1707.01629) in their CIFAR form.

This is the form trained for the 2019 page: a 3×3 stem without pooling, four stages, 32 groups. Each
block adds its first ``residual`` channels to the trunk (the residual path) and appends ``growth``
new ones to it (the dense path).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """One resolution of the network: ``blocks`` blocks with the channel counts of each path."""

    blocks: int
    bottleneck: int
    residual: int
    growth: int


class DualPathBlock(nn.Module):
    """1×1, grouped 3×3 and 1×1 convolutions; the output has ``growth`` more channels than the
    input. The first block of a stage projects its input, so that both paths start anew there."""

    def __init__(
        self, channels: int, stage: Stage, *, stride: int, project: bool, groups: int
    ) -> None:
        super().__init__()
        out = stage.residual + stage.growth
        self.residual = stage.residual
        self.conv1 = nn.Conv2d(channels, stage.bottleneck, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(stage.bottleneck)
        self.conv2 = nn.Conv2d(
            stage.bottleneck, stage.bottleneck, 3, stride, 1, groups=groups, bias=False
        )
        self.bn2 = nn.BatchNorm2d(stage.bottleneck)
        self.conv3 = nn.Conv2d(stage.bottleneck, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, residual + dense, H/stride, W/stride)."""
        new = F.relu(self.bn1(self.conv1(x)))
        new = F.relu(self.bn2(self.conv2(new)))
        new = self.bn3(self.conv3(new))
        trunk = self.shortcut(x)
        r = self.residual
        return F.relu(torch.cat([trunk[:, :r] + new[:, :r], trunk[:, r:], new[:, r:]], dim=1))


class DPN(nn.Module):
    """A dual path network for images of CIFAR's size, (N, channels, 32, 32), or larger ones."""

    def __init__(
        self,
        stages: tuple[Stage, ...],
        *,
        stem: int = 64,
        groups: int = 32,
        classes: int = 10,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, stem, 3, 1, 1, bias=False), nn.BatchNorm2d(stem), nn.ReLU()
        )
        blocks = list[nn.Module]()
        channels = stem
        for depth, stage in enumerate(stages):
            for index in range(stage.blocks):
                first = index == 0
                blocks.append(
                    DualPathBlock(
                        channels,
                        stage,
                        stride=2 if first and depth > 0 else 1,
                        project=first,
                        groups=groups,
                    )
                )
                channels = stage.residual + (index + 2) * stage.growth
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels, H, W) to (N, classes) logits."""
        logits: Tensor = self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))
        return logits


def _stages(blocks: tuple[int, int, int, int]) -> tuple[Stage, ...]:
    paths = ((96, 256, 16), (192, 512, 32), (384, 1024, 24), (768, 2048, 128))
    return tuple(Stage(n, *path) for n, path in zip(blocks, paths, strict=True))


def dpn26(classes: int = 10, channels: int = 3) -> DPN:
    """DPN-26: 11,574,842 parameters, 3.99 GFLOP per image forward and backward."""
    return DPN(_stages((2, 2, 2, 2)), classes=classes, channels=channels)


def dpn92(classes: int = 10, channels: int = 3) -> DPN:
    """DPN-92: 34,236,634 parameters, 12.25 GFLOP per image forward and backward."""
    return DPN(_stages((3, 4, 20, 3)), classes=classes, channels=channels)


def dpn_small(classes: int = 10, channels: int = 3) -> DPN:
    """A small DPN for CPUs: 155,850 parameters, 0.06 GFLOP per image forward and backward."""
    paths = ((16, 32, 4), (32, 64, 8), (64, 128, 8), (128, 256, 16))
    stages = tuple(Stage(1, *path) for path in paths)
    return DPN(stages, stem=16, groups=8, classes=classes, channels=channels)
