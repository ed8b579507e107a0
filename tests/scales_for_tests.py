"""Networks whose gradients are known, and questions about the loss scales that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.networks.data import DatasetInfo, ImageArrays
from bench.networks.workloads import IMAGES, Workload
from bench.networks.workloads import Network as Run
from bench.results.scale_map import ScaleCase
from bench.scales.session import measure
from bench.schema.case import Case


class _Multiply(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(context: Any, x: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * context.factor, None


class Planted(nn.Module):
    """Ten logits of zero, whatever the image, and gradients that are known.

    Of n images, all of class 0, the gradient of the logits holds -0.9 / n once and 0.1 / n nine
    times an image, times the factor; that of the bias, and of the weight, as its input is 1, holds
    -0.9 and nine times 0.1, times the factor.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.head = nn.Linear(1, 10)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        ones = x.flatten(1)[:, :1] * 0 + 1
        return _Multiply.apply(self.head(ones), self.factor)  # type: ignore[no-any-return]


small_gradients = partial(Planted, 2.0**-20)
large_gradients = partial(Planted, 8.0)


class Network(nn.Module):
    """A convolution, BatchNorm, an in-place ReLU and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=4)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.norm(self.conv(x))).flatten(1))  # type: ignore[no-any-return]


network = Network


class Rows(Workload):
    """Numbers of which the network makes the planted gradients; its loss tells nothing else."""

    unit = "rows"
    samples = 16

    def build_model(self) -> nn.Module:
        return Planted(2.0**-20)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        return {"x": torch.randn(size, 3, device=device, generator=generator)}

    def compute_loss(self, network: Run, batch: dict[str, Tensor]) -> Tensor:
        logits = network(batch["x"])
        zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return nn.functional.cross_entropy(logits, zeros)


BATCH = 4


def dataset(seed: int | None = None, images: int = 16) -> ImageArrays:
    """Grey images of class 0, or random images of random classes."""
    rng = np.random.default_rng(seed)
    x = np.full((images, 3, 32, 32), 128, np.uint8)
    y = np.zeros(images, np.uint8)
    if seed is not None:
        x = rng.integers(0, 256, x.shape, np.uint8)
        y = rng.integers(0, 10, images).astype(np.uint8)
    info = DatasetInfo("synthetic", "", images, 0, 10, "", "")
    return ImageArrays(info, x, y, x[:0], y[:0])


SMALL = Case(
    "scales_for_tests:small_gradients",
    "synthetic",
    precision="fp16",
    batch_size=BATCH,
    lr=0.01,
    device="cpu",
)
POWERS = tuple(2.0**k for k in range(41))


def answer(
    model: str = "small_gradients",
    data: ImageArrays | None = None,
    steps: int = 3,
    scales: Sequence[float] = POWERS,
    **settings: Any,
) -> ScaleCase:
    """The map of a network of this file, or of a workload if settings of its case name one."""
    case = replace(SMALL, model=f"scales_for_tests:{model}", **settings)
    images = None if case.workload != IMAGES else data or dataset()
    return measure(case, images, scales, steps)
