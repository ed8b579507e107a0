"""The harness's own workload: the network of ``--model`` on the images of ``--dataset``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from bench.data import Dataset
from bench.data.batches import BatchArguments, Batches, Supply
from bench.data.loader import LoadedBatches, load_images
from bench.data.sources import SHAPE
from bench.errors import UsageError
from bench.models import build_model
from bench.workloads import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn


class Images(Workload):
    """Training of a network on labelled images with cross-entropy. ``model`` is a name or the
    user's ``package.module:factory``. Uses without images, such as counting FLOP, need no ``data``.
    """

    def __init__(self, model: str, data: Dataset | None = None) -> None:
        self.model = model
        if data is not None:
            self.data = data
            self._epoch = data.info.train_images if data.info.distinct else None
            self.samples = self._epoch or len(data.train_images)
            self.test_samples = len(data.test_images)
            _, *shape = data.train_images.shape
            self.shape = (shape[0], shape[1], shape[2])
            self.classes = data.info.classes

    def build_model(self) -> nn.Module:
        return build_model(self.model, self.classes, self.shape)

    def open_batches(self, **making: Unpack[BatchArguments]) -> Batches:
        """Return the training images in random order; images of CIFAR's shape are augmented.

        On a 2-core CPU, at 224 pixels and batch size 16, augmentation would take 8 % of a step of
        timm's vit_tiny and 5 % of mobilenetv3_small; without it a batch takes less than 1 %.
        """
        return Batches(**self._training, **making)

    def open_loader(self, *, workers: int, **making: Unpack[BatchArguments]) -> LoadedBatches:
        """Return the batches of `open_batches`, made by torch's DataLoader."""
        return load_images(**self._training, **making, workers=workers)

    @property
    def _training(self) -> dict[str, Any]:
        return {
            "images": self.data.train_images,
            "labels": self.data.train_labels,
            "samples": self._epoch,
            "augment": self.shape == SHAPE,
        }

    def open_tests(self, *, batch_size: int, device: torch.device) -> Supply:
        """Return the test images without augmentation. Raises UsageError: the dataset has none."""
        if not self.test_samples:
            raise UsageError("the dataset has no test images")
        return Batches(
            self.data.test_images,
            self.data.test_labels,
            batch_size=batch_size,
            device=device,
            seed=0,
            augment=False,
        )
