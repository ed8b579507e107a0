"""What is trained: a network, the batches it is given, its loss, and what its samples are.

A `Workload` stands for all of that; DPN on CIFAR-10 is one (`bench.workloads.images`). Whoever
brings their own extends the class, in a module of theirs, and gives a function that returns one.
Everything but `Workload.build_model` has a default. torch is imported only where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from bench.data.batches import MadeBatches, Making, Supply
from bench.data.batches import count_items as count_items
from bench.data.loader import Dataset, LoadedBatches, Loading, load_items
from bench.data.sources import CLASSES, SHAPE, Shape
from bench.errors import UsageError
from bench.models import is_factory, load_factory
from bench.precision import is_affine_batchnorm

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

IMAGES = "images"
"""The axis value of the harness's own workload: the network and the dataset are axes."""

OWN = "own"
"""The axis value of ``dataset`` for a user's workload, which brings its data."""


NO_DATASET = (
    "it has no dataset for --loader torch; give it a method build_dataset() that returns a "
    "map-style torch dataset of its samples, or leave out --loader"
)


def parse_workload(text: str) -> str:
    """Check a workload's name without importing it. Raises ValueError: neither `IMAGES` nor of the
    form ``package.module:factory``."""
    if text == IMAGES or is_factory(text):
        return text
    raise ValueError(f"give package.module:factory of your own, or {IMAGES!r}")


def load_workload(name: str) -> Workload:
    """Make the user's workload ``name``. Raises UsageError: it cannot be imported, or is none."""
    return check_workload(name, load_factory(name, "--workload")())


def check_workload(name: str, made: object) -> Workload:
    """Check what the factory ``name`` made. Raises UsageError: it is no workload."""
    if not isinstance(made, Workload):
        raise UsageError(
            f"workload {name!r} returned {type(made).__name__}; its factory returns a "
            "bench.workloads.Workload"
        )
    return made


Network = Callable[..., Any]
"""The network as a step calls it: in the case's precision and memory format, perhaps compiled.

Floating-point arguments are cast to the dtype of its weights, and what it returns to float32.
"""


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, and how many of its units were predicted right, if that can be said.

    ``loss`` is float32 of shape (), the mean over the batch; ``correct`` a whole number of shape
    (), from 0 to ``count_units`` of the batch. Both stay on the device.
    """

    loss: Tensor
    correct: Tensor | None = None


@dataclass(frozen=True)
class WorkloadFacts:
    """What is known of a user's workload once it was examined.

    ``samples`` are the items of its training data; ``units`` how many units these are, of its
    ``unit``, and ``test_units`` those of its test data. ``optimizer`` is the class of its own,
    empty where it takes that of the case; ``dataset`` is whether it has one for ``--loader torch``.
    """

    samples: int
    units: int
    test_units: int
    unit: str
    optimizer: str = ""
    dataset: bool = False


class Workload:
    """What a case trains. The defaults are those of a network that tells images apart."""

    unit = "images"
    """What is counted: tables say ``images/s``."""

    samples = 50_000
    """Items of the training data: an epoch is as many."""

    test_samples = 0
    """Items of the test data; 0 for none."""

    shape: Shape = SHAPE
    """Of an image that the default `make_batch` makes."""

    classes = CLASSES
    """Of the default `compute_loss`."""

    def build_model(self) -> nn.Module:
        """Build the network, on the CPU in float32."""
        raise NotImplementedError("a workload has a method build_model, which returns the network")

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        """Make a batch of ``size`` items on ``device``: a tensor, or tuples, lists, dicts of them.

        The first tensor's first dimension is ``size``. By default random images, float32 (size,
        *shape), and labels, int64 (size,). The generator is of ``device``, seeded by seed, epoch,
        step and micro-batch.
        """
        import torch

        x = torch.randn(size, *self.shape, device=device, generator=generator)
        return x, torch.randint(self.classes, (size,), device=device, generator=generator)

    def make_test_batch(self, first: int, size: int, device: torch.device) -> Any:
        """Make a batch of the test items from ``first`` on, the same ones every time."""
        raise NotImplementedError("a workload with test_samples has a method make_test_batch")

    def compute_loss(self, network: Network, batch: Any) -> Tensor | Loss:
        """The loss of a batch, float32 of shape (): the mean over its items.

        It is called for training and for evaluation, and is computed in float32 but for what
        ``network`` does. By default the cross-entropy of images (N, ...) and labels (N,); raises
        UsageError: the network returns another shape than (N, classes).
        """
        import torch.nn.functional as F

        x, y = batch
        logits = network(x)
        if logits.shape != (len(x), self.classes):
            raise UsageError(
                f"the model returned {tuple(logits.shape)} for {len(x)} images; "
                f"it must return ({len(x)}, {self.classes})"
            )
        return Loss(F.cross_entropy(logits, y), (logits.detach().argmax(dim=1) == y).sum())

    def count_units(self, size: int) -> int:
        """How many units ``size`` items are: by default one each."""
        return size

    def keeps_fp32(self, module: nn.Module) -> bool:
        """Whether ``module`` stays in fp32 where weights are cast to half; by default affine
        BatchNorm does, as in 2019, and the rest is cast."""
        return is_affine_batchnorm(module)

    def find_head(self, model: nn.Module) -> nn.Module:
        """The layer of ``model`` that gives its outputs: by default the last with weights. Raises
        UsageError: no layer has weights."""
        for module in reversed(list(model.modules())):
            if any(True for _ in module.parameters(recurse=False)):
                return module
        raise UsageError("no layer of the network has weights")

    def build_optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer | None:
        """Make the optimizer of the float32 ``parameters``; None for that of ``--optimizer``."""
        return None

    def open_batches(self, **making: Unpack[Making]) -> Supply:
        """The batches of training: by default those of `make_batch`."""
        return MadeBatches(self.make_batch, self.samples, **making)

    def build_dataset(self) -> Dataset | None:
        """Make the training data for ``--loader torch``: a map-style dataset of `samples` items.

        torch's ``default_collate`` makes of its items what `make_batch` makes: tensors of the same
        shapes and dtypes. None where there is no such dataset.
        """
        return None

    def open_loader(self, *, loading: Loading, **making: Unpack[Making]) -> LoadedBatches:
        """The batches of training, by torch's DataLoader: by default of `build_dataset`. Raises
        UsageError: there is no dataset."""
        dataset = self.build_dataset()
        if dataset is None:
            raise UsageError(f"the workload: {NO_DATASET}")
        return load_items(dataset, loading=loading, **making)

    def open_tests(self, *, batch_size: int, device: torch.device) -> Supply:
        """The batches of the test data: by default those of `make_test_batch`. Raises UsageError:
        there are none."""
        if not self.test_samples:
            raise UsageError("the workload has no test data")
        return MadeBatches(
            self.make_batch,
            self.test_samples,
            batch_size=batch_size,
            micro_batch=batch_size,
            device=device,
            seed=0,
            make_in_order=lambda size, device, first: self.make_test_batch(first, size, device),
        )
