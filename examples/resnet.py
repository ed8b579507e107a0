"""A ResNet on images of 224 by 224 pixels, in plain torch, as a workload.

    python -m bench.sweep --workload examples.resnet:resnet50 --precision fp32 bf16-amp

The images are random: what is measured is the network. ResNet-18 and -50 are those of He et al.,
arXiv 1512.03385, the stride of a bottleneck in its 3x3 convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench import Workload


def convolve(into: int, out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution and BatchNorm."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(into, out, kernel, stride, padding, bias=False), nn.BatchNorm2d(out)
    )


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1."""

    def __init__(self, into: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        if bottleneck:
            layers = [
                convolve(into, width, 1),
                nn.ReLU(),
                convolve(width, width, 3, stride),
                nn.ReLU(),
                convolve(width, out, 1),
            ]
        else:
            layers = [convolve(into, width, 3, stride), nn.ReLU(), convolve(width, out, 3)]
        self.residual = nn.Sequential(*layers)
        same = into == out and stride == 1
        self.shortcut = nn.Identity() if same else convolve(into, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Module):
    """(N, 3, H, W) to logits (N, classes); ``blocks`` of each of four stages."""

    def __init__(self, blocks: tuple[int, ...], width: int, bottleneck: bool, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolve(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        into = width
        for stage, count in enumerate(blocks):
            wide = width * 2**stage
            for index in range(count):
                stride = 2 if stage and not index else 1
                stages.append(Block(into, wide, stride, bottleneck))
                into = 4 * wide if bottleneck else wide
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(into, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return logits


class Images224(Workload):
    """Random images as large as ImageNet's; batches, loss and accuracy are the defaults."""

    def __init__(
        self,
        blocks: tuple[int, ...],
        bottleneck: bool,
        *,
        side: int = 224,
        width: int = 64,
        classes: int = 1000,
        samples: int = 50_000,
    ) -> None:
        self.shape, self.classes, self.samples = (3, side, side), classes, samples
        self.settings = (blocks, width, bottleneck, classes)

    def build_model(self) -> nn.Module:
        return ResNet(*self.settings)


def resnet18() -> Workload:
    return Images224((2, 2, 2, 2), bottleneck=False)


def resnet50() -> Workload:
    return Images224((3, 4, 6, 3), bottleneck=True)


def tiny() -> Workload:
    """For a quick try on a CPU."""
    return Images224((1, 1), bottleneck=True, side=64, width=8, classes=10, samples=64)
