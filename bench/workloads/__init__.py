"""Workloads: a network, its batches, its loss, and the units of its samples.

DPN on CIFAR-10 is a `Workload` (`bench.workloads.images`). Users extend the class in a module of
their own, and give a function that returns an instance. Everything but `Workload.build_model` has a
default. torch is imported only where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Unpack

from bench.data.batches import BatchArguments, MadeBatches, Supply
from bench.data.batches import count_items as count_items
from bench.data.loader import Dataset, LoadedBatches, load_items
from bench.data.sources import CLASSES, SHAPE, Shape
from bench.errors import UsageError
from bench.models import load_factory, parse_factory
from bench.precision import OWN as OWN
from bench.precision import is_affine_batchnorm

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

IMAGES = "images"
"""The axis value of the harness's own workload, whose network and dataset are axes."""

COMMAND = "command"
"""The axis value of a user's own command, which trains as it likes."""

NO_DATASET = (
    "it has no dataset for --loader torch; give it a method build_dataset() that returns a "
    "map-style torch dataset of its samples, or leave out --loader"
)


def parse_workload(text: str) -> str:
    """Check a workload's name without importing it, and return it as it is spelled in records.
    Raises ValueError: it is neither `IMAGES` nor of the form ``package.module:factory``."""
    if text in (IMAGES, COMMAND):
        return text
    return parse_factory(text)


def load_workload(name: str) -> Workload:
    """Make the user's workload ``name``. Raises UsageError: it cannot be imported, or is not a
    workload."""
    return check_workload(name, load_factory(name, "--workload")())


def check_workload(name: str, made: object) -> Workload:
    """Check the result of the factory ``name``. Raises UsageError: it is not a workload."""
    if not isinstance(made, Workload):
        raise UsageError(
            f"workload {name!r} returned {type(made).__name__}; its factory returns a "
            f"bench.workloads.Workload; a network for images is given as --model {name}"
        )
    return made


AUXILIARY = {1: 0.4, 2: 0.3}
"""Weight of the loss of each auxiliary head, by how many a network has: Inception v3's one (Szegedy
et al., arXiv 1512.00567; 0.4 is that of PyTorch's tutorial on fine-tuning), and GoogLeNet's two
(Szegedy et al., arXiv 1409.4842)."""


def split_heads(outputs: Any) -> tuple[Any, list[Any]]:
    """Return the logits in what a network returned, and those of its auxiliary heads.

    Both have names where they are told apart: ``logits`` and ``aux_logits…``, as in torchvision's
    named tuples, in the outputs of Hugging Face's networks, in dataclasses and dicts. Of a tuple or
    list without them it is the first that counts, and the others are not trained.

    >>> split_heads(("logits", "features")), split_heads({"logits": 1, "aux_logits": 2})
    (('logits', []), (1, [2]))
    """
    if isinstance(outputs, Mapping):
        named = dict(outputs)
    elif isinstance(outputs, tuple) and hasattr(outputs, "_asdict"):
        named = outputs._asdict()
    else:
        named = vars(outputs) if is_dataclass(outputs) else {}
    if "logits" in named:
        beside = [x for name, x in named.items() if name.startswith("aux_logits") and x is not None]
        return named["logits"], beside
    if isinstance(outputs, tuple | list) and outputs:
        return outputs[0], []
    return outputs, []


Network = Callable[..., Any]
"""The network as a step calls it: in the case's precision and memory format, perhaps compiled.

Floating-point arguments are cast to the dtype of its weights, and its outputs to float32.
"""


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, and the number of units predicted correctly, if it is known.

    ``loss`` is float32 of shape (), the mean over the batch; ``correct`` is an integer of shape (),
    from 0 to ``count_units`` of the batch. Both stay on the device.
    """

    loss: Tensor
    correct: Tensor | None = None


@dataclass(frozen=True)
class WorkloadFacts:
    """Facts found by a trial of a user's workload.

    ``samples`` is the number of training items; ``units`` and ``test_units`` count the training and
    test data in the workload's ``unit``. ``optimizer`` is the class of its own optimizer, empty if
    it uses the case's; ``dataset`` is whether it has a dataset for ``--loader torch``, and
    ``classes`` as of `count_classes`.
    """

    samples: int
    units: int
    test_units: int
    unit: str
    optimizer: str = ""
    dataset: bool = False
    classes: int | None = None


class Workload:
    """The network, data and loss that a case trains. The defaults are for classifying images."""

    unit = "images"
    """The unit that is counted: tables show ``images/s``."""

    samples = 50_000
    """Number of training items, and so of an epoch."""

    test_samples = 0
    """Number of test items; 0 for none."""

    shape: Shape = SHAPE
    """Shape of an image from the default `make_batch`."""

    classes = CLASSES
    """Number of classes of the default `make_batch` and `compute_loss`."""

    def build_model(self) -> nn.Module:
        """Build the network, on the CPU in float32."""
        raise NotImplementedError("a workload has a method build_model, which returns the network")

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        """Make a batch of ``size`` items on ``device``: a tensor, or tuples, lists, dicts of them.

        The first tensor's first dimension is ``size``. By default, these are random images, float32
        (size, *shape), and labels, int64 (size,). The generator is on ``device``, seeded by seed,
        epoch, step and micro-batch.
        """
        import torch

        x = torch.randn(size, *self.shape, device=device, generator=generator)
        return x, torch.randint(self.classes, (size,), device=device, generator=generator)

    def make_test_batch(self, first: int, size: int, device: torch.device) -> Any:
        """Make a batch of ``size`` test items from item ``first`` on, always the same ones."""
        raise NotImplementedError("a workload with test_samples has a method make_test_batch")

    def compute_loss(self, network: Network, batch: Any) -> Tensor | Loss:
        """Return the loss of a batch, float32 of shape (): the mean over its items.

        It is called for training and for evaluation; everything outside ``network`` is computed in
        float32. By default it is the cross-entropy of images (N, ...) and labels (N,), with those
        of auxiliary heads, times `AUXILIARY`. Raises UsageError: the network returns another shape
        than (N, classes).
        """
        import torch.nn.functional as F

        x, y = batch
        main, beside = split_heads(network(x))
        # half ones, also in a class unknown here; float64 stays
        heads = [head if head.element_size() > 4 else head.float() for head in (main, *beside)]
        for logits in heads:
            if logits.shape != (len(x), self.classes):
                raise UsageError(
                    f"the model returned {tuple(logits.shape)} for {len(x)} images; "
                    f"it must return ({len(x)}, {self.classes})"
                )
        loss = F.cross_entropy(heads[0], y)
        for logits in heads[1:]:
            loss = loss + AUXILIARY.get(len(beside), 0.3) * F.cross_entropy(logits, y)
        return Loss(loss, (heads[0].detach().argmax(dim=1) == y).sum())

    def count_units(self, size: int) -> int:
        """Return the number of units in ``size`` items: by default one each."""
        return size

    def keeps_fp32(self, module: nn.Module) -> bool:
        """Return whether ``module`` stays in fp32 when weights are cast to half precision; by
        default affine BatchNorm does, as in 2019."""
        return is_affine_batchnorm(module)

    def find_head(self, model: nn.Module) -> nn.Module:
        """Return the output layer of ``model``: by default the last layer with weights. Raises
        UsageError: no layer has weights."""
        for module in reversed(list(model.modules())):
            if any(True for _ in module.parameters(recurse=False)):
                return module
        raise UsageError("no layer of the network has weights")

    def build_optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer | None:
        """Make the optimizer of the float32 ``parameters``; None to use ``--optimizer``."""
        return None

    def open_batches(self, **making: Unpack[BatchArguments]) -> Supply:
        """Return the training batches: by default those of `make_batch`."""
        return MadeBatches(self.make_batch, self.samples, **making)

    def build_dataset(self) -> Dataset | None:
        """Make the training data for ``--loader torch``: a map-style dataset of `samples` items.

        torch's ``default_collate`` must turn its items into tensors of the same shapes and dtypes
        as `make_batch`. Return None if there is no such dataset.
        """
        return None

    def open_loader(self, *, workers: int, **making: Unpack[BatchArguments]) -> LoadedBatches:
        """Return the training batches from torch's DataLoader: by default of `build_dataset`.
        Raises UsageError: there is no dataset."""
        dataset = self.build_dataset()
        if dataset is None:
            raise UsageError(f"the workload: {NO_DATASET}")
        return load_items(dataset, workers=workers, **making)

    def open_tests(self, *, batch_size: int, device: torch.device) -> Supply:
        """Return the batches of the test data: by default those of `make_test_batch`. Raises
        UsageError: there is no test data."""
        if not self.test_samples:
            raise UsageError("the workload has no test data; leave out --evaluate")
        return MadeBatches(
            self.make_batch,
            self.test_samples,
            batch_size=batch_size,
            micro_batch=batch_size,
            device=device,
            seed=0,
            make_in_order=lambda size, device, first: self.make_test_batch(first, size, device),
        )


def count_classes(workload: Workload) -> int | None:
    """Return the number of classes that the workload's loss distinguishes; None if it computes a
    loss of its own."""
    usual = type(workload).compute_loss is Workload.compute_loss
    return workload.classes if usual else None
