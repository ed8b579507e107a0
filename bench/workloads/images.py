"""The harness's own workload: the network of ``--model`` on the images of ``--dataset``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.data.batches import Batches, Supply
from bench.errors import UsageError
from bench.models import MODELS, build_model
from bench.workloads import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bench.data import Dataset


class Images(Workload):
    """A network on images with labels, by cross-entropy.

    Args:
        model: a network's name, or the user's own ``package.module:factory``.
        data: the images; without them, what needs none, such as counting FLOP.
    """

    def __init__(self, model: str, data: Dataset | None = None) -> None:
        self.model = model
        if data is not None:
            self.data = data
            self.samples, self.test_samples = len(data.train_images), len(data.test_images)
            # a user's own model gives a logit for each class; a built-in network has ten
            if model not in MODELS:
                self.classes = data.info.classes

    def build_model(self) -> nn.Module:
        """Build the network.

        Raises:
            UsageError: it cannot be built.
        """
        return build_model(self.model, self.classes)

    def open_batches(
        self, *, batch_size: int, micro_batch: int, device: torch.device, seed: int
    ) -> Batches:
        """The training images in random order, cropped and flipped at random."""
        return Batches(
            self.data.train_images,
            self.data.train_labels,
            batch_size=batch_size,
            micro_batch=micro_batch,
            device=device,
            seed=seed,
        )

    def open_tests(self, *, batch_size: int, device: torch.device) -> Supply:
        """The test images as they are.

        Raises:
            UsageError: the dataset has none.
        """
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
