"""Batches made where the images live: on the device, from uint8, without a step's wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import count, cycle, islice
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from bench.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Batch = tuple[torch.Tensor, torch.Tensor]

# Per channel, of pixels in 0..1: the constants pytorch-cifar normalises with.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)
PADDING = 4  # zero pixels on each side before the crop, as there


@dataclass(frozen=True)
class Divided:
    """A batch of ``size`` items in micro-batches, each made when it is asked for. Where several
    processes share a batch, ``size`` is what one of them has, which may be none, and ``whole`` what
    all have together."""

    size: int
    parts: Iterator[Any]
    whole: int | None = None


@dataclass(frozen=True)
class Share:
    """Which items of a batch one of several processes takes: as many as the others, or one more.

    >>> [Share(rank, 3).cut(range(10, 17)) for rank in range(3)]
    [range(10, 13), range(13, 15), range(15, 17)]
    """

    rank: int = 0
    of: int = 1

    def cut(self, items: range) -> range:
        """Its own of ``items``; the shares of all processes make them up, in order."""
        each, more = divmod(len(items), self.of)
        first = items.start + self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))


def count_items(batch: Any) -> int:
    """Items of a batch: of a `Divided` its size, else its first tensor's first dimension. Raises
    ValueError: it holds no tensor, or one without dimensions first."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    if isinstance(batch, Divided):
        return batch.size
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if first is None or not first.dim():
        raise ValueError("a batch holds tensors, the first of them of shape (items, ...)")
    return len(first)


def count_whole(batch: Any) -> int:
    """Items of a batch, those of other processes included."""
    if isinstance(batch, Divided) and batch.whole is not None:
        return batch.whole
    return count_items(batch)


class Making(TypedDict):
    """How batches are made: of how many items, in micro-batches of how many, where, and from which
    seed."""

    batch_size: int
    micro_batch: int
    device: torch.device
    seed: int


class Supply(Protocol):
    """The batches of a workload's data, made on the device."""

    batch_size: int

    @property
    def samples(self) -> int:
        """Items of the data."""

    def __len__(self) -> int:
        """Steps in an epoch; the last batch may be smaller."""

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        """Yield the batches of epoch ``index`` in micro-batches, at most ``steps`` of them, each of
        at most ``size`` items, by default ``batch_size``."""

    def evaluation(self, batch_size: int | None = None) -> Iterator[Any]:
        """Yield every item once, in order, ``batch_size`` at a time."""


def stream(batches: Supply, first: int = 0) -> Iterator[Any]:
    """Whole batches without end, each in one piece, epoch after epoch, from the epoch ``first``;
    ``batches`` makes none in micro-batches."""
    whole = batches.samples // batches.batch_size
    for index in count(first):
        for batch in batches.divide(index, steps=whole):
            yield from batch.parts


class Planned:
    """What the harness's own kinds of `Supply` have in common."""

    share = Share()
    """What of each batch `divide` makes here; of `MadeBatches` others than the first draw their
    own items."""

    batch_size: int
    micro_batch: int
    samples: int

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def plan(self, steps: int | None, size: int | None) -> Iterator[tuple[range, int]]:
        """Which items each of `plan_steps` has here, and how many all processes have of it."""
        for items in plan_steps(self.samples, self.batch_size, steps, size):
            yield self.share.cut(items), len(items)


class Batches(Planned):
    """One split's batches: x float32 (B, C, H, W), normalised and contiguous; y int64 (B,).

    ``images`` uint8 (N, C, H, W) and ``labels`` (N,) go to ``device`` once and stay there.
    With ``augment``, which is for CIFAR's shape, training batches are cropped at random from the
    padded image and flipped with probability 1/2. The order and every draw depend on ``seed`` and
    the epoch alone, not on the batch size; CPU and CUDA generators draw differently from the same
    seed. Where an epoch has more ``samples`` than there are images, each is visited several times.
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
        # torch.tensor copies: from_numpy would warn of, and then write to, a read-only map
        self.images = torch.tensor(images, device=device)
        self.labels = torch.tensor(labels, device=device, dtype=torch.int64)
        self.mean, self.scale = normalisation(device, images.shape[1])

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        """Yield the batches of epoch ``index`` in its random order, the same every time, at most
        ``steps`` of them, in micro-batches, each (x, y), or only the first ``size`` images of each.

        A micro-batch is made when it is asked for, so that only one stands in float32 on the
        device. The last one of a batch may be smaller, and a smaller last batch has fewer of them.
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
        """Yield every image once, in order and as it is, ``batch_size`` at a time."""
        size = batch_size or self.batch_size
        for start in range(0, len(self.images), size):
            batch = slice(start, start + size)
            yield self._normalise(self.images[batch]), self.labels[batch]

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        # (x / 255 - mean) / std in two kernels; uint8 - float32 needs no conversion of its own
        return (x - self.mean).mul_(self.scale)


def plan_steps(
    samples: int, batch_size: int, steps: int | None = None, size: int | None = None
) -> Iterator[range]:
    """Which items of an epoch each step takes, of the first ``steps`` of it, or only the first
    ``size`` items of each batch.

    >>> list(plan_steps(10, 4)), list(plan_steps(10, 4, steps=2, size=3))
    ([range(0, 4), range(4, 8), range(8, 10)], [range(0, 3), range(4, 7)])
    """
    for first in range(0, samples, batch_size)[:steps]:
        yield range(first, min(first + min(size or batch_size, batch_size), samples))


def normalisation(device: torch.device | str, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a pixel from 0 to 255 is lowered by, then multiplied with: float32 (channels, 1, 1). Of
    other than three channels, those of CIFAR-10 take turns."""
    import torch

    mean, std = (list(islice(cycle(x), channels)) for x in (MEAN, STD))
    lowered = torch.tensor(mean, device=device).mul_(255).view(-1, 1, 1)
    return lowered, torch.tensor(std, device=device).mul_(255).reciprocal_().view(-1, 1, 1)


def draw(
    n: int, images: int, seed: int, index: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is random in epoch ``index``, ``n`` of so many images, on ``device``, by a generator of
    its own: the order, int64 (n,), and of each image in it the corner of its crop, int64 (2, n)
    from 0 to twice `PADDING`, and whether it is flipped, bool (n,)."""
    import torch

    generator = torch.Generator(device).manual_seed(mix(seed, index))
    # A whole epoch's draws at once cost a few kernels, whatever the batch size
    order = torch.randperm(n, generator=generator, device=device)
    if n > images:
        order.remainder_(images)
    corners = torch.randint(2 * PADDING + 1, (2, n), generator=generator, device=device)
    return order, corners, torch.rand(n, generator=generator, device=device) < 0.5


class _Augmentation:
    """Crop each image of a batch where its corner is, then mirror those to be flipped.

    Of the formulations tried, on 2 CPU threads, batch 128, normalised: this 0.76 ms; images kept
    padded on the device 0.95 (and 56 % more memory); one gather by computed addresses 1.3; padding
    each batch anew 1.2. Without augmentation a batch takes 0.18 ms.
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
    """Batches that a function makes anew, from a generator or from a place in the data.

    ``make`` gives the batch of so many items on a device from a generator, which is seeded by
    ``seed``, epoch, step and micro-batch: each of these changes what is drawn. ``make_in_order``
    gives that from an item on; without it `evaluation` draws its batches as well. Raises
    UsageError: a batch has another number of items than was asked for.
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
            yield _check(self.make(size, self.device, seeded), size)

    def evaluation(self, batch_size: int | None = None) -> Iterator[Any]:
        size = batch_size or self.batch_size
        for step, first in enumerate(range(0, self.samples, size)):
            items = min(size, self.samples - first)
            if self.make_in_order is not None:
                batch = self.make_in_order(items, self.device, first)
            else:
                batch = self.make(items, self.device, self._seeded(0, step, 0))
            yield _check(batch, items)

    def _seeded(self, *place: int) -> torch.Generator:
        import torch

        return torch.Generator(self.device).manual_seed(mix(self.seed, *place))


class Counted:
    """A user's own `Supply`, the items of its batches and micro-batches counted as they come.
    Raises UsageError: what it yields is not divided as it should be."""

    def __init__(self, supply: Supply, micro_batch: int) -> None:
        self._supply, self._micro_batch = supply, micro_batch
        self.batch_size = supply.batch_size

    def __len__(self) -> int:
        return len(self._supply)

    @property
    def samples(self) -> int:
        return self._supply.samples

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        for step, batch in enumerate(self._supply.divide(index, steps=steps, size=size)):
            if not isinstance(batch, Divided):
                raise UsageError(
                    f"the workload's divide yielded {type(batch).__name__}; it yields a Divided "
                    "for each batch"
                )
            whole = min(self.batch_size, self.samples - step * self.batch_size)
            items = min(size or whole, whole)
            if batch.size != items:
                raise UsageError(
                    f"the workload's divide made a batch of {batch.size} items as step {step} of "
                    f"an epoch, where {items} were asked for"
                )
            yield Divided(items, self._count(batch))

    def _count(self, batch: Divided) -> Iterator[Any]:
        left = batch.size
        for part in batch.parts:
            wanted, made = min(self._micro_batch, left), count_items(part)
            if made != wanted:
                raise UsageError(
                    f"the workload's divide made a micro-batch of {made} items where {wanted} were "
                    f"asked for: micro-batches of {self._micro_batch} of a batch of {batch.size}"
                )
            left -= made
            yield part
        if left:
            raise UsageError(
                f"the workload's divide left out {left} items of a batch of {batch.size}: its "
                "micro-batches are too few"
            )

    def evaluation(self, batch_size: int | None = None) -> Iterator[Any]:
        return self._supply.evaluation(batch_size)


def _check(batch: Any, size: int) -> Any:
    # shapes are known on the host: this does not wait for the device
    if (made := count_items(batch)) != size:
        raise UsageError(
            f"the workload made a batch of {made} items where {size} were asked for; make_batch "
            "and make_test_batch return as many as they are asked for"
        )
    return batch


def mix(*numbers: int) -> int:
    """One generator seed per seed and epoch: torch's CPU generator reads only its low 32 bits."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
