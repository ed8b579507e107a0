"""What is checked: one case's training, from its start as often as the checks need it.

Everything is set up as a worker sets it up to measure the case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import Case
from bench.check.layers import Reading, read_layers, watch_gradients
from bench.data import Dataset
from bench.data.batches import Batches
from bench.training.loop import Training
from bench.worker.measurement import set_up

if TYPE_CHECKING:
    from bench.data.batches import Batch

GRADIENT_STEPS = 10
"""Steps in which a weight must receive a gradient once. Where a head or the last BatchNorm of a
block starts at zero, what lies behind it receives none in the first step."""

_WATCHED = 8  # images whose predictions are drawn
_MOMENTS = 13  # times at which they are looked at


@dataclass(frozen=True)
class Predictions:
    """Of a few images, in evaluation mode, before and during the first steps.

    Args:
        steps: how many steps had been taken.
        images: float32 (images, 3, 32, 32), normalised.
        labels: int64 (images,).
        probabilities: float32 (moments, images, classes).
    """

    steps: list[int]
    images: Tensor
    labels: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of training, each on a batch of its own.

    Attributes:
        losses: of every step.
        readings: of the layers, in the first and in the last step.
        received: whether each weight to be trained received a gradient in `GRADIENT_STEPS`.
    """

    losses: list[float]
    readings: list[Reading] = field(default_factory=list)
    received: dict[str, bool] = field(default_factory=dict)
    predictions: Predictions | None = None


class Subject:
    """A case, its images, and its training from the start.

    Args:
        folder: where `bench.data.prepare` left the dataset.
        steps: how many the first steps are.
    """

    def __init__(self, case: Case, folder: str, steps: int) -> None:
        self.case, self.folder, self.steps = case, folder, steps
        self.device = torch.device(case.device)

    def start(self, *, compiled: bool = True) -> tuple[Batches, Training]:
        """The training as a worker sets it up, with its batches.

        Args:
            compiled: False leaves the network as written, where hooks are to see its layers.
        """
        case = self.case if compiled else replace(self.case, compile=False)
        self.data: Dataset
        self.data, batches, training = set_up(case, self.folder)
        return batches, training

    @cached_property
    def batch(self) -> Batch:
        """The first batch of the epoch, as it enters the network."""
        return next(self.start()[0].epoch(0))

    @cached_property
    def classes(self) -> int:
        """Classes that the network tells apart."""
        _, training = self.start()
        with torch.no_grad():
            return training.classify(self.batch[0]).shape[1]

    @cached_property
    def first_steps(self) -> FirstSteps:
        """The first steps, watched."""
        batches, training = self.start(compiled=False)
        watched = self._choose_watched(batches)
        moments = sorted({round(i * self.steps / (_MOMENTS - 1)) for i in range(_MOMENTS)})
        losses, readings, seen = [], [], []
        with watch_gradients(training) as received:
            for index, (x, y) in enumerate(islice(stream(batches), self.steps)):
                if index in moments:
                    seen.append(predict(training, watched[0]))
                if index == GRADIENT_STEPS:
                    by_then = dict(received)
                if index in (0, self.steps - 1):
                    with read_layers(training, index, lr=self.case.lr) as reading:
                        losses.append(training.step(x, y)[0])
                    readings.append(reading)
                else:
                    losses.append(training.step(x, y)[0])
            seen.append(predict(training, watched[0]))
        return FirstSteps(
            torch.stack(losses).tolist(),
            readings,
            {name: bool(usable) for name, usable in by_then.items()},
            Predictions(moments, *watched, torch.stack(seen).cpu()),
        )

    @cached_property
    def blind_steps(self) -> FirstSteps:
        """The same steps with the same labels, every image blank."""
        batches, training = self.start()
        steps = islice(stream(batches), self.steps)
        losses = [training.step(torch.zeros_like(x), y)[0] for x, y in steps]
        return FirstSteps(torch.stack(losses).tolist())

    def _choose_watched(self, batches: Batches) -> Batch:
        """A few images to predict: of the test images where there are any."""
        data = self.data
        held_out = len(data.test_images) > 0
        images = data.test_images if held_out else data.train_images
        labels = data.test_labels if held_out else data.train_labels
        few = copy(batches)
        few.images = torch.tensor(images[:_WATCHED], device=self.device)
        few.labels = torch.tensor(labels[:_WATCHED], device=self.device, dtype=torch.int64)
        return next(few.evaluation())


def stream(batches: Batches) -> Iterator[Batch]:
    """Whole batches without end, epoch after epoch."""
    whole = len(batches.labels) // batches.batch_size
    return chain.from_iterable(batches.epoch(index, steps=whole) for index in count())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode, and every module back as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def predict(training: Training, images: Tensor) -> Tensor:
    """Probabilities in evaluation mode, float32 (N, classes); training is left as it was."""
    with evaluating(training.model):
        return F.softmax(training.classify(images), dim=1)
