"""Batches made by torch's DataLoader on the CPU, item by item, as in most training scripts.

The images, their order and their augmentation are the same as in `bench.networks.data.batches`: all
random numbers of an epoch are drawn in the same way, on the device, and reach the DataLoader
through its batch sampler, as the keys of its dataset. So the dataset holds no state of an epoch,
and the number of workers, their start method and their lifetime do not affect what is trained.

Workers are started by Python's default method (up to 3.13 on Linux, by a fork), as in a user's
DataLoader. A fork copies one thread of the training process: this is safe because a dataset
computes on the CPU, and torch gives each worker one thread for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from signal import strsignal
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from bench.base.processes import die_with_parent
from bench.networks.data.batches import (
    PADDING,
    BatchArguments,
    Divided,
    Planned,
    count_items,
    draw,
    mix,
    normalisation,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch.utils.data import DataLoader

Key = Any
"""Key of an item in a dataset: a number, or any other key that the dataset supports."""


_DIES_S = 10.0
"""Time to wait for the end of a worker whose pipe is broken; it was seen to take milliseconds."""


class Dataset(Protocol):
    """A map-style dataset, as in torch: an item for each key."""

    def __getitem__(self, key: Key) -> Any:
        """Return the item of a key, which torch's ``default_collate`` must support."""

    def __len__(self) -> int:
        """Return the number of items."""


PREFETCH = 2
"""Batches that each worker prepares ahead: torch's default, which most training scripts keep. More
of them only even out a loader whose batches take unequal times; one that is too slow stays so."""


class LoadedBatches(Planned):
    """A `bench.networks.data.batches.Supply` of batches made by a DataLoader and copied to the
    device.

    Each batch of the DataLoader is a micro-batch. Its workers end with the epoch, as those of
    torch's default: kept ones would hide their start from the time of an epoch, and a dataset's own
    random numbers would depend on earlier epochs, so that no checkpoint could resume them. An epoch
    that is not read to its end is ended by `close` or by the next epoch.
    ``draw`` returns the keys of the items of an epoch, in order; there are ``samples`` of them, by
    default the number of items. For `evaluation` the keys are the items' numbers.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        draw: Callable[[int], list[Key]],
        workers: int = 0,
        samples: int | None = None,
        **making: Unpack[BatchArguments],
    ) -> None:
        self.batch_size, self.samples = making["batch_size"], samples or len(dataset)
        # seconds from the start of the latest epoch to its first batch; None until then
        self.first_batch_s: float | None = None
        self._dataset, self._draw = dataset, draw
        self.micro_batch, self._seed = making["micro_batch"], making["seed"]
        self._device, self._workers = making["device"], workers
        self._batches: Iterator[Any] = iter(())

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        """Yield the batches of epoch ``index`` in micro-batches, at most ``steps`` batches, and at
        most the first ``size`` items of each.

        The workers make the whole epoch even if only some steps are taken, so that they are as busy
        as in a whole epoch. Each batch must be taken before the next epoch begins.
        """
        begun, self.first_batch_s = perf_counter(), None
        self.close()
        batches = self._batches = iter(self._build(index, size))

        def take(parts: int) -> Iterator[Any]:
            for _ in range(parts):
                if batches is not self._batches:
                    raise RuntimeError("a batch is taken after its epoch")
                batch = self._move(self._load(batches))
                if self.first_batch_s is None:
                    self.first_batch_s = perf_counter() - begun
                yield batch

        for own, whole in self.plan(steps, size):
            yield Divided(len(own), take(-(-len(own) // self.micro_batch)), whole)
        if (steps is None or steps >= len(self)) and batches is self._batches:
            next(batches, None)  # its workers end, as at the end of a script's epoch

    def evaluation(self, batch_size: int | None = None) -> Iterator[Any]:
        from torch.utils.data import default_collate

        size = batch_size or self.batch_size
        every = range(len(self._dataset))
        for start in every[::size]:
            items = [self._dataset[number] for number in every[start : start + size]]
            yield self._move(default_collate(items))

    def close(self) -> None:
        # torch ends the workers with the last reference, but an exception raised by one keeps one
        getattr(self._batches, "_shutdown_workers", lambda: None)()
        self._batches = iter(())

    def _build(self, index: int, size: int | None) -> DataLoader[Any]:
        from torch import Generator
        from torch.utils.data import DataLoader

        keys, batches = self._draw(index), list[list[Key]]()
        for own, _ in self.plan(None, size):
            for start in own[:: self.micro_batch]:
                batches.append(keys[start : min(start + self.micro_batch, own.stop)])
        return DataLoader(
            self._dataset,  # type: ignore[arg-type]  # any object with these two methods
            batch_sampler=batches,
            num_workers=self._workers,
            prefetch_factor=PREFETCH if self._workers else None,
            # a worker that hangs when the process is killed would never end
            worker_init_fn=partial(_start_worker, os.getpid()),
            # of its own: torch's global one, which the network uses, does not change
            generator=Generator().manual_seed(mix(self._seed, index)),
        )

    @staticmethod
    def _load(batches: Iterator[Any]) -> Any:
        """Return the next batch. Raises RuntimeError: a worker was killed by a signal. Its pipe
        breaks before it can be waited for, so torch raises the pipe's error, or names no signal."""
        try:
            return next(batches)
        except (EOFError, OSError, RuntimeError) as error:
            silent = not isinstance(error, RuntimeError) or "exited unexpectedly" in str(error)
            if not silent or "in DataLoader worker process" in str(error):
                raise  # by the dataset, or with the signal
            workers = {each.sentinel: each for each in getattr(batches, "_workers", ())}
            for sentinel in wait(workers, _DIES_S):
                worker = workers[sentinel]  # type: ignore[index]
                worker.join(_DIES_S)  # its pipe closes before its exit code is available
                if (worker.exitcode or 0) < 0:
                    raise RuntimeError(
                        f"DataLoader worker (pid {worker.pid}) is killed by signal: "
                        f"{strsignal(-worker.exitcode)}"
                    ) from error
            raise

    def _move(self, batch: Any) -> Any:
        """Copy a batch to the device. Its memory is not page-locked, as by torch's default: 128
        images of CIFAR-10 are 1.5 MB, copied in less than a millisecond beside steps of tens."""
        from torch import Tensor
        from torch.utils._pytree import tree_map_only

        # default_collate turns tuples into a list; `Batches` yields tuples
        batch = tuple(batch) if type(batch) is list else batch
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device), batch)


def _start_worker(parent: int, number: int) -> None:
    if os.getppid() == parent:  # not where a fork server started it, as from Python 3.14 on
        die_with_parent(parent)


# ----------------------------------------------------------------------------------- what is loaded


class Crops:
    """Training images, cropped and flipped as the key says, and normalised.

    Items are made one by one, as by the transforms of a user's dataset, and batches by torch's
    ``default_collate``, which in a worker writes directly into shared memory. The key of an item is
    its number or, if augmented, that with the row and column of its crop in the padded image, and
    whether it is flipped.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.integer]) -> None:
        import torch

        # torch.tensor copies: from_numpy warns about read-only maps. Forked workers share the copy.
        self.images = torch.tensor(images)
        self.labels: list[int] = labels.tolist()
        self.mean, self.scale = normalisation("cpu", self.images.shape[1])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: int | tuple[int, int, int, bool]) -> tuple[torch.Tensor, int]:
        from torch.nn.functional import pad

        number, top, left, flip = (key, PADDING, PADDING, False) if isinstance(key, int) else key
        image = self.images[number]
        if (top, left) != (PADDING, PADDING):
            height, width = image.shape[1:]
            image = pad(image, (PADDING,) * 4)[:, top : top + height, left : left + width]
        image = image.flip(-1) if flip else image
        return (image - self.mean).mul_(self.scale), self.labels[number]


def load_images(
    images: NDArray[np.uint8],
    labels: NDArray[np.integer],
    *,
    workers: int = 0,
    samples: int | None = None,
    augment: bool = True,
    **making: Unpack[BatchArguments],
) -> LoadedBatches:
    """Return the batches of `bench.networks.data.batches.Batches`, made by a DataLoader."""
    n = len(images)

    def list_keys(index: int) -> list[Key]:
        drawn = draw(samples or n, n, making["seed"], index, making["device"])
        order, corners, flips = (part.tolist() for part in drawn)
        return list(zip(order, *corners, flips, strict=True)) if augment else order

    crops = Crops(images, labels)
    return LoadedBatches(crops, draw=list_keys, workers=workers, samples=samples, **making)


def load_items(
    dataset: Dataset, *, workers: int = 0, **making: Unpack[BatchArguments]
) -> LoadedBatches:
    """Return the batches of a user's dataset, each item once per epoch, in random order."""

    def list_keys(index: int) -> list[Key]:
        import torch

        generator = torch.Generator().manual_seed(mix(making["seed"], index))
        order: list[int] = torch.randperm(len(dataset), generator=generator).tolist()
        return order

    return LoadedBatches(dataset, draw=list_keys, workers=workers, **making)


# --------------------------------------------------------------------------------- the loader alone

ALONE_S = 2.0
"""Time for which the loader is measured without training, in s."""


def measure_rate(batches: LoadedBatches, workers: int, wait: Callable[[], None]) -> float | None:
    """Return the items per second that the loader supplies to the device without training; None if
    no batch is left after the first of each worker.

    The clock starts when every worker has supplied a batch, so that neither their start nor the
    batches prepared meanwhile count; it stops after `ALONE_S`, or with the epoch. ``wait`` waits
    until all copies to the device are done.
    """
    supplied = (count_items(part) for divided in batches.divide() for part in divided.parts)
    try:
        for _ in islice(supplied, max(1, workers)):
            pass
        wait()
        start, items = perf_counter(), 0
        for number in supplied:
            items += number
            if perf_counter() - start >= ALONE_S:
                break
        wait()
        return items / (perf_counter() - start) if items else None
    finally:
        batches.close()
