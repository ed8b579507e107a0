"""Workloads: a network, its batches, its loss, and the units of its samples.

DPN on CIFAR-10 is a `Workload` (`Images`). Users extend the class in a module of
their own, and give a function that returns an instance. Everything but `Workload.build_model` has a
default. torch is imported only where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from bench.base.errors import UsageError
from bench.networks.data import ImageArrays as Prepared
from bench.networks.data.batches import BatchArguments, Batches, MadeBatches, Supply
from bench.networks.data.batches import count_items as count_items
from bench.networks.data.cifar10 import CIFAR10_SHAPE, CLASSES, Shape
from bench.networks.data.loader import Dataset, LoadedBatches, load_images, load_items
from bench.networks.models import LENGTHS, build_model, load_factory, parse_factory
from bench.networks.modules import is_affine_batchnorm

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

OWN = "own"
"""The value of the axes ``precision``, ``dataset`` and ``optimizer`` where a user's workload or
command decides itself."""

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
    Raises ValueError: it is neither `IMAGES`, a model that is one, nor of the form
    ``package.module:factory``."""
    if text in (IMAGES, COMMAND, *LENGTHS):
        return text
    return parse_factory(text)


def load_workload(name: str, length: int | None = None) -> Workload:
    """Make the workload ``name``, of sequences of a ``length`` if one is given. Raises UsageError:
    it cannot be imported, is not a workload, or has no length."""
    return check_workload(name, make_workload(name), length)


def make_workload(name: str) -> object:
    """Return what the factory ``name`` makes, or the workload of a model of `LENGTHS`. Raises
    UsageError: it cannot be imported."""
    return NextToken(name) if name in LENGTHS else load_factory(name, "--workload")()


def check_workload(name: str, made: object, length: int | None) -> Workload:
    """Check the result of the factory ``name``, and set its ``length`` if one is given. Raises
    UsageError: it is not a workload, or has no length."""
    if not isinstance(made, Workload):
        raise UsageError(
            f"workload {name!r} returned {type(made).__name__}; its factory returns a "
            f"bench.Workload; a network for images is given as --model {name}"
        )
    if length is not None:
        if not made.length:
            raise UsageError(
                f"--length {length}: workload {name!r} does not say how long its sequences are; "
                "give it an attribute length, by which it makes its network and batches, or leave "
                "out --length"
            )
        made.length = length
    return made


def find_logits(outputs: Any) -> Any:
    """Return the logits in what a network returned: those of this name, as in the outputs of
    Hugging Face's networks, else the first of a tuple or list.

    >>> find_logits(("logits", "features")), find_logits({"logits": 1, "aux_logits": 2})
    ('logits', 1)
    """
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    if hasattr(outputs, "logits"):
        return outputs.logits
    return outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs


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

    length = 0
    """Units of an item that is a sequence, such as a text of tokens, which ``--length`` sets before
    anything else is asked for; 0 for items that are none."""

    shape: Shape = CIFAR10_SHAPE
    """Shape of an image from the default `make_batch`."""

    classes = CLASSES
    """Number of classes of the default `make_batch` and `compute_loss`."""

    blocks = ""
    """Names of what ``--recompute blocks`` computes again, and ``--parallel fsdp`` shards, such as
    ``layers.*``, comma-separated; by default the blocks that the network repeats in a list."""

    def build_model(self) -> nn.Module:
        """Build the network, on the CPU in float32."""
        raise NotImplementedError("give it a method build_model that returns the network")

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
        raise NotImplementedError("give it a method make_test_batch, or leave out test_samples")

    def compute_loss(self, network: Network, batch: Any) -> Tensor | Loss:
        """Return the loss of a batch, float32 of shape (): the mean over its items.

        It is called for training and for evaluation; everything outside ``network`` is computed in
        float32. By default it is the cross-entropy of images (N, ...) and labels (N,). Raises
        UsageError: the network returns another shape than (N, classes).
        """
        import torch.nn.functional as F

        x, y = batch
        logits = find_logits(network(x))
        # half ones, also in a class unknown here; float64 stays
        logits = logits if logits.element_size() > 4 else logits.float()
        if logits.shape != (len(x), self.classes):
            raise UsageError(
                f"the model returned {tuple(logits.shape)} for {len(x)} images; "
                f"it must return ({len(x)}, {self.classes})"
            )
        return Loss(F.cross_entropy(logits, y), (logits.detach().argmax(dim=1) == y).sum())

    def count_units(self, size: int) -> int:
        """Return the number of units in ``size`` items: by default ``length`` in a sequence, and
        else one each."""
        return size * (self.length or 1)

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


class Images(Workload):
    """Training of a network on labelled images with cross-entropy. ``model`` is a name or the
    user's ``package.module:factory``. Uses without images, such as counting FLOP, need no ``data``.
    """

    def __init__(self, model: str, data: Prepared | None = None) -> None:
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
            "augment": self.shape == CIFAR10_SHAPE,
        }

    def open_tests(self, *, batch_size: int, device: torch.device) -> Supply:
        """Return the test images without augmentation. Raises UsageError: the dataset has none."""
        if not self.test_samples:
            raise UsageError(
                "the dataset has no test images; download them too, or leave out --evaluate"
            )
        return Batches(
            self.data.test_images,
            self.data.test_labels,
            batch_size=batch_size,
            device=device,
            seed=0,
            augment=False,
        )


_TEXTS = {"gpt-small": (32_000, 2**22, 2**18), "gpt-tiny": (64, 2**18, 2**14)}
"""Of the models of `LENGTHS` their vocabulary, and the tokens of an epoch and of the test."""

_DRAWN, _SHIFT = 0.25, 7
"""The share of tokens that are drawn, and what each other adds to the one before it."""


class NextToken(Workload):
    """Prediction of each next token of synthetic texts, by a ``model`` of `LENGTHS`, or any network
    that a subclass builds. An item is a text of ``length`` tokens; an epoch has as many tokens at
    any length.

    Of the tokens of a text one in four is drawn, the k-th of the vocabulary about as often as 1 / k
    (Zipf's law); each other is the one before it plus 7. So a network can learn first which are
    common, and then which follows which.
    """

    unit = "tokens"

    def __init__(self, model: str) -> None:
        self.model, self.length = model, LENGTHS[model]
        self.vocabulary, self.tokens, self.test_tokens = _TEXTS[model]

    @property
    def samples(self) -> int:  # type: ignore[override]
        return self.tokens // self.length

    @property
    def test_samples(self) -> int:  # type: ignore[override]
        return self.test_tokens // self.length

    def build_model(self) -> nn.Module:
        model: nn.Module = load_factory(self.model)(self.vocabulary, self.length)
        return model

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """Make texts, int64 (size, length + 1)."""
        import torch

        shape, most = (size, self.length + 1), self.vocabulary

        def draw() -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        fresh, drawn = draw() < _DRAWN, ((most + 1) ** draw()).long().sub_(1).clamp_(max=most - 1)
        places = torch.arange(shape[1], device=device)
        last = torch.where(fresh, places, 0).cummax(dim=1).values
        return (drawn.gather(1, last) + _SHIFT * (places - last)) % most

    def make_test_batch(self, first: int, size: int, device: torch.device) -> Tensor:
        import torch

        # a generator for each text: what a batch holds must not depend on its size
        generators = (
            torch.Generator(device).manual_seed(2**31 + item) for item in range(first, first + size)
        )
        return torch.cat([self.make_batch(1, device, generator) for generator in generators])

    def compute_loss(self, network: Network, batch: Tensor) -> Loss:
        """Return the mean cross-entropy in nats a token."""
        import torch.nn.functional as F

        logits, right = network(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), right.flatten())
        return Loss(loss, (logits.detach().argmax(dim=2) == right).sum())

    def keeps_fp32(self, module: nn.Module) -> bool:
        from torch import nn

        return isinstance(module, nn.LayerNorm)


def count_classes(workload: Workload) -> int | None:
    """Return the number of classes that the workload's loss distinguishes; None if it computes a
    loss of its own."""
    usual = type(workload).compute_loss is Workload.compute_loss
    return workload.classes if usual else None


def sketch_batch(workload: Workload, items: int) -> Any:
    """Return a batch of the workload, moved to torch's meta device: shapes without data."""
    import torch
    from torch.utils._pytree import tree_map_only

    made = workload.make_batch(items, torch.device("cpu"), torch.Generator().manual_seed(0))
    return tree_map_only(torch.Tensor, lambda t: t.to("meta"), made)
