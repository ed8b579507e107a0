"""Batches made on the device that holds the uint8 images, without waiting for it in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain, count, cycle, islice
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from bench.base.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Batch = tuple[torch.Tensor, torch.Tensor]

# Per channel, for pixels in 0..1: the normalisation constants of pytorch-cifar.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)
PADDING = 4  # zero pixels on each side before the crop, as in pytorch-cifar


@dataclass(frozen=True)
class Divided:
    """A batch of ``size`` items in micro-batches, each made on demand. If several processes share a
    batch, ``size`` is the number of items of one process, which may be 0, and ``whole`` that of
    all."""

    size: int
    parts: Iterator[Any]
    whole: int | None = None


@dataclass(frozen=True)
class Share:
    """The part of a batch for one of several processes; sizes differ by at most one item.

    >>> [Share(rank, 3).cut(range(10, 17)) for rank in range(3)]
    [range(10, 13), range(13, 15), range(15, 17)]
    """

    rank: int = 0
    of: int = 1

    def cut(self, items: range) -> range:
        """Return this process's part of ``items``; the parts of all processes are consecutive."""
        each, more = divmod(len(items), self.of)
        first = items.start + self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))


def count_items(batch: Any) -> int:
    """Return the number of items: the size of a `Divided` batch, else the first tensor's first
    dimension. Raises ValueError: there is no tensor, or the first one has no dimensions."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    if isinstance(batch, Divided):
        return batch.size
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if first is None or not first.dim():
        raise ValueError("a batch holds tensors, the first of them of shape (items, ...)")
    return len(first)


class BatchArguments(TypedDict):
    """Arguments for making batches: sizes of batch and micro-batch, device and seed."""

    batch_size: int
    micro_batch: int
    device: torch.device
    seed: int


class Supply(Protocol):
    """The batches of a workload's data, made on the device."""

    batch_size: int

    @property
    def samples(self) -> int:
        """Number of items in an epoch."""

    def __len__(self) -> int:
        """Return the steps per epoch; the last batch may be smaller."""

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        """Yield the batches of epoch ``index`` in micro-batches, at most ``steps`` batches, each of
        at most ``size`` items, by default ``batch_size``."""

    def evaluation(self, batch_size: int | None = None) -> Iterator[Any]:
        """Yield every item once, in order, ``batch_size`` at a time."""


def repeat(batches: Supply, first: int = 0, size: int | None = None) -> Iterator[Divided]:
    """Yield full batches endlessly, epoch by epoch from epoch ``first``, or at most the first
    ``size`` items of each."""
    full = max(1, batches.samples // batches.batch_size)  # a batch may be larger than the data
    epochs = (batches.divide(index, steps=full, size=size) for index in count(first))
    return chain.from_iterable(epochs)


def stream(batches: Supply, first: int = 0) -> Iterator[Any]:
    """Yield the micro-batches of `repeat`."""
    return chain.from_iterable(batch.parts for batch in repeat(batches, first))


class Planned:
    """Base class of the harness's own kinds of `Supply`."""

    share = Share()
    """The part of each batch that `divide` makes in this process. With `MadeBatches`, processes
    other than the first draw their own items."""

    batch_size: int
    micro_batch: int
    samples: int

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def plan(self, steps: int | None, size: int | None) -> Iterator[tuple[range, int]]:
        """Yield the items of this process, and the number of all, for each step of `plan_steps`."""
        for items in plan_steps(self.samples, self.batch_size, steps, size):
            yield self.share.cut(items), len(items)


class Batches(Planned):
    """One split's batches: x float32 (B, C, H, W), normalised and contiguous; y int64 (B,).

    ``images`` uint8 (N, C, H, W) and ``labels`` (N,) are copied to ``device`` once and stay there.
    With ``augment``, which is for CIFAR's shape, training images are cropped at random from the
    padded image and flipped with probability 1/2. Order and augmentation depend only on ``seed``
    and epoch, not on the batch size; CPU and CUDA generators draw differently from the same seed.
    If an epoch has more ``samples`` than there are images, each image is used several times.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.integer],
        *,
        batch_size: int,
        micro_batch: int | None = None,
        device: torch.device | str,
        seed: int,
        augment: bool = True,
        samples: int | None = None,
    ) -> None:
        import torch

        self.batch_size = batch_size
        self.micro_batch = micro_batch or batch_size
        self.seed = seed
        self.augment = augment
        self.samples = samples or len(images)
        # torch.tensor copies: from_numpy would warn about a read-only map, and write to it
        self.images = torch.tensor(images, device=device)
        self.labels = torch.tensor(labels, device=device, dtype=torch.int64)
        self.mean, self.scale = normalisation(device, images.shape[1])

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        """Yield the batches of epoch ``index``, in a random order that is the same every time, at
        most ``steps`` of them, in micro-batches (x, y), or only the first ``size`` images of each.

        Micro-batches are made on demand, so that only one is in float32 on the device. The last one
        of a batch may be smaller, and a smaller last batch has fewer of them.
        """
        n, micro, device = self.samples, self.micro_batch, self.images.device
        order, corners, flips = draw(n, len(self.images), self.seed, index, device)
        augment = _Augmentation(micro, device) if self.augment else None

        def make(first: int, end: int) -> Iterator[Batch]:
            labels = self.labels.index_select(0, order[first:end])
            for start in range(first, end, micro):
                part = slice(start, min(start + micro, end))
                x = self.images.index_select(0, order[part])
                if augment is not None:
                    x = augment(x, corners[:, part], flips[part])
                yield self._normalise(x), labels[part.start - first : part.stop - first]

        for own, whole in self.plan(steps, size):
            yield Divided(len(own), make(own.start, own.stop), whole)

    def evaluation(self, batch_size: int | None = None) -> Iterator[Batch]:
        """Yield every image once, in order and not augmented, ``batch_size`` at a time."""
        size = batch_size or self.batch_size
        for start in range(0, len(self.images), size):
            batch = slice(start, start + size)
            yield self._normalise(self.images[batch]), self.labels[batch]

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        # (x / 255 - mean) / std in two kernels; uint8 - float32 needs no conversion of its own
        return (x - self.mean).mul_(self.scale)


def plan_steps(
    samples: int, batch_size: int, steps: int | None, size: int | None
) -> Iterator[range]:
    """Yield the items of each step of an epoch, of at most ``steps`` steps, and at most the first
    ``size`` items of each batch.

    >>> list(plan_steps(10, 4, None, None)), list(plan_steps(10, 4, 2, 3))
    ([range(0, 4), range(4, 8), range(8, 10)], [range(0, 3), range(4, 7)])
    """
    for first in range(0, samples, batch_size)[:steps]:
        yield range(first, min(first + min(size or batch_size, batch_size), samples))


def normalisation(device: torch.device | str, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what to subtract from a pixel of 0 to 255, and the factor to multiply it by then, both
    float32 (channels, 1, 1). If there are not three channels, CIFAR-10's values are cycled."""
    import torch

    mean, std = (list(islice(cycle(x), channels)) for x in (MEAN, STD))
    lowered = torch.tensor(mean, device=device).mul_(255).view(-1, 1, 1)
    return lowered, torch.tensor(std, device=device).mul_(255).reciprocal_().view(-1, 1, 1)


def draw(
    n: int, images: int, seed: int, index: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the random numbers of epoch ``index`` with ``n`` items out of ``images`` images, on
    ``device``, from a generator of its own. Return the order, int64 (n,), and for each item in it
    the corner of its crop, int64 (2, n) from 0 to 2 `PADDING`, and whether to flip it, bool (n,).
    """
    import torch

    generator = torch.Generator(device).manual_seed(mix(seed, index))
    # Drawing for a whole epoch at once takes a few kernels, whatever the batch size
    order = torch.randperm(n, generator=generator, device=device)
    if n > images:
        order.remainder_(images)
    corners = torch.randint(2 * PADDING + 1, (2, n), generator=generator, device=device)
    return order, corners, torch.rand(n, generator=generator, device=device) < 0.5


class _Augmentation:
    """Crops each image of a batch at its corner, and flips those to be flipped.

    Times of alternatives, on 2 CPU threads, batch size 128, with normalisation: this 0.76 ms;
    images kept padded on the device 0.95 ms (and 56 % more memory); one gather by computed
    addresses 1.3 ms; padding each batch anew 1.2 ms. Without augmentation: 0.18 ms.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        import torch

        side = 32 + 2 * PADDING
        # The border is zeroed once and never written again
        padded = torch.zeros(batch_size, 3, side, side, dtype=torch.uint8, device=device)
        self.inside = padded[:, :, PADDING:-PADDING, PADDING:-PADDING]
        self.windows = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # a view: (B, 3, 9, 9, 32, 32)
        self.rows = torch.arange(batch_size, device=device)

    def __call__(self, x: torch.Tensor, corners: torch.Tensor, flips: torch.Tensor) -> torch.Tensor:
        import torch

        self.inside[: len(x)] = x
        x = self.windows[self.rows[: len(x)], :, corners[0], corners[1]]
        return torch.where(flips.view(-1, 1, 1, 1), x.flip(-1), x)


@dataclass
class MadeBatches(Planned):
    """Batches made by a function, from a generator or from a position in the data.

    ``make(size, device, generator)`` makes a batch; the generator is seeded by ``seed``, epoch,
    step and micro-batch. ``make_in_order(size, device, first)`` makes the batch from item ``first``
    on for `evaluation`, which without it draws its batches too. Raises UsageError: a batch has
    another number of items than requested.
    """

    make: Callable[[int, torch.device, torch.Generator], Any]
    samples: int
    _: KW_ONLY
    batch_size: int
    micro_batch: int
    device: torch.device
    seed: int
    make_in_order: Callable[[int, torch.device, int], Any] | None = None

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        for step, (own, whole) in enumerate(self.plan(steps, size)):
            yield Divided(len(own), self._parts(index, step, len(own)), whole)

    def _parts(self, index: int, step: int, items: int) -> Iterator[Any]:
        for part in range(-(-items // self.micro_batch)):
            size = min(self.micro_batch, items - part * self.micro_batch)
            rank = [self.share.rank] if self.share.rank else []
            seeded = self._seeded(index, step, part, *rank)
            batch = self.make(size, self.device, seeded)
            _count_exactly(batch, size)
            yield batch

    def evaluation(self, batch_size: int | None = None) -> Iterator[Any]:
        size = batch_size or self.batch_size
        for step, first in enumerate(range(0, self.samples, size)):
            items = min(size, self.samples - first)
            if self.make_in_order is not None:
                batch = self.make_in_order(items, self.device, first)
            else:
                batch = self.make(items, self.device, self._seeded(0, step, 0))
            _count_exactly(batch, items)
            yield batch

    def _seeded(self, *place: int) -> torch.Generator:
        import torch

        return torch.Generator(self.device).manual_seed(mix(self.seed, *place))


class Counted:
    """Wraps a user's own `Supply`, and counts the items of its micro-batches. Raises UsageError: a
    batch does not have those that are asked for, in micro-batches of their size."""

    def __init__(self, supply: Supply, micro_batch: int) -> None:
        self._supply, self._micro_batch = supply, micro_batch
        self.batch_size, self.samples = supply.batch_size, supply.samples
        self.evaluation = supply.evaluation

    def __len__(self) -> int:
        return len(self._supply)

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        given = self._supply.divide(index, steps=steps, size=size)
        plan = plan_steps(self.samples, self.batch_size, steps, size)
        for items, batch in zip(plan, given, strict=False):
            yield Divided(len(items), self._count(batch.parts, len(items)))

    def _count(self, parts: Iterator[Any], left: int) -> Iterator[Any]:
        for part in parts:
            left -= _count_exactly(part, min(self._micro_batch, left))
            yield part
            if not left:
                return
        raise UsageError(f"the workload's divide left out {left} items of a batch")


def _count_exactly(batch: Any, size: int) -> int:
    # shapes are known on the host, so this does not wait for the device
    if (made := count_items(batch)) != size:
        raise UsageError(
            f"the workload made a batch of {made} items where {size} were asked for; make_batch, "
            "make_test_batch and divide make as many as they are asked for"
        )
    return made


def mix(*numbers: int) -> int:
    """Hash numbers to one seed of 32 bits: torch's CPU generator reads only its low 32 bits."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
