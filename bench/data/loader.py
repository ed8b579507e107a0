"""Batches that torch's DataLoader makes on the CPU, item by item, as most training scripts do.

The images, their order and their augmentation are those of `bench.data.batches`: all draws of an
epoch are made as there, on the device, and reach the DataLoader through its batch sampler, as the
keys of its dataset. So the dataset holds no state of an epoch, and it makes no difference to what
is trained how many workers there are, how they are started, and whether they outlive an epoch.

Workers are started as Python starts processes by default (up to 3.13 on Linux, by a fork), because
that is what a user's DataLoader does. A fork copies one thread of the training process: that is
safe because a dataset computes on the CPU, and torch gives each worker one thread to do so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import parent_process
from multiprocessing.connection import wait
from signal import strsignal
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from bench.data.batches import (
    PADDING,
    Divided,
    Making,
    Planned,
    count_items,
    draw,
    mix,
    normalisation,
)
from bench.processes import die_with_parent

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch.utils.data import DataLoader

Key = Any
"""What a dataset is asked for an item with: a number, or whatever else it understands."""


_DIES_S = 10.0
"""How long a worker whose pipe is broken is waited for; it was seen to take milliseconds."""


class Dataset(Protocol):
    """A map-style dataset, as torch has it: an item for each key."""

    def __getitem__(self, key: Key) -> Any:
        """The item of a key: what torch's ``default_collate`` makes a batch of."""

    def __len__(self) -> int:
        """How many items there are."""


@dataclass(frozen=True)
class Loading:
    """How a DataLoader works: its arguments, by the names of the axes."""

    workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch: int = 2


class LoadedBatches(Planned):
    """A `bench.data.batches.Supply` of batches made by a DataLoader and copied to the device.

    Each batch of the DataLoader is a micro-batch. Its workers end with the epoch, unless they are
    persistent; an epoch of which only a part is taken is ended by `close`, or by the next one.
    ``draw`` gives the keys of an epoch's items, in order, as many as ``samples``, by default as
    there are items; ``in_order`` are those of all items, for `evaluation`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        draw: Callable[[int], Sequence[Key]],
        in_order: Sequence[Key],
        loading: Loading,
        samples: int | None = None,
        **making: Unpack[Making],
    ) -> None:
        self.batch_size, self.samples = making["batch_size"], samples or len(dataset)
        self.first_batch_s: float | None = None
        """Seconds from the start of the last epoch begun to its first batch; None before it."""
        self._dataset, self._draw, self._in_order = dataset, draw, in_order
        self.micro_batch, self._seed = making["micro_batch"], making["seed"]
        self._device, self._loading = making["device"], loading
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._epoch = 0
        self._begun = 0.0

    def divide(
        self, index: int = 0, steps: int | None = None, size: int | None = None
    ) -> Iterator[Divided]:
        """Yield the batches of epoch ``index`` in micro-batches, at most ``steps`` of them, or only
        the first ``size`` items of each.

        The workers go on to make the whole epoch, also where only some steps of it are taken: they
        shall be as busy in these as in an epoch. Each batch is to be taken before the next epoch
        begins.
        """
        self._begun, self.first_batch_s = perf_counter(), None
        if self._loading.persistent_workers:
            self._epoch += 1
        else:
            self.close()
        self._plan.batches = self._list_batches(self._draw(index), size)
        if self._loader is None:
            self._loader = self._build()
        # from its own generator: torch's, which the network draws from, stays as it is
        self._loader.generator.manual_seed(mix(self._seed, index))  # type: ignore[union-attr]
        self._batches = iter(self._loader)
        epoch = self._epoch
        for own, whole in self.plan(steps, size):
            yield Divided(len(own), self._take(-(-len(own) // self.micro_batch), epoch), whole)
        ended = steps is None or steps >= len(self)
        if ended and epoch == self._epoch and self._batches is not None:
            next(self._batches, None)  # its workers end, as where a script's epoch ends

    def evaluation(self, batch_size: int | None = None) -> Iterator[Any]:
        from torch.utils.data import default_collate

        size = batch_size or self.batch_size
        for start in range(0, len(self._in_order), size):
            keys = self._in_order[start : start + size]
            yield self._move(default_collate([self._dataset[key] for key in keys]))

    def close(self) -> None:
        # torch ends them with the last reference, but an exception that a worker raised keeps one
        if end := getattr(self._batches, "_shutdown_workers", None):
            end()
        self._batches = self._loader = None
        self._epoch += 1

    def _list_batches(self, keys: Sequence[Key], size: int | None) -> Iterator[list[Key]]:
        for own, _ in self.plan(None, size):
            for start in range(own.start, own.stop, self.micro_batch):
                yield list(keys[start : min(start + self.micro_batch, own.stop)])

    def _build(self) -> DataLoader[Any]:
        from torch import Generator
        from torch.utils.data import DataLoader

        how = self._loading
        given: dict[str, Any] = {}
        if how.workers:
            given = {
                "prefetch_factor": how.prefetch,
                "persistent_workers": how.persistent_workers,
                # a worker that hangs when the process is killed would stay for ever
                "worker_init_fn": partial(_start_worker, os.getpid()),
            }
        return DataLoader(
            self._dataset,  # type: ignore[arg-type]  # any object with these two methods
            batch_sampler=self._plan,
            num_workers=how.workers,
            pin_memory=how.pin_memory,
            generator=Generator(),
            **given,
        )

    def _take(self, parts: int, epoch: int) -> Iterator[Any]:
        for _ in range(parts):
            if epoch != self._epoch or self._batches is None:
                raise RuntimeError("a batch is taken after its epoch")
            batch = self._move(self._load(self._batches))
            if self.first_batch_s is None:
                self.first_batch_s = perf_counter() - self._begun
            yield batch

    @staticmethod
    def _load(batches: Iterator[Any]) -> Any:
        """The next batch. Raises RuntimeError: a worker died by a signal, worded as torch's handler
        of SIGCHLD words it. The pipe of a batch breaks before the worker can be waited for; torch
        then raises what it met there (EOFError, ConnectionResetError), or names no signal."""
        try:
            return next(batches)
        except (EOFError, OSError, RuntimeError) as error:
            said = str(error)
            if isinstance(error, RuntimeError) and "exited unexpectedly" not in said:
                raise
            if "in DataLoader worker process" in said:  # an error of the dataset's own
                raise
            workers = {each.sentinel: each for each in getattr(batches, "_workers", ())}
            for sentinel in wait(workers, _DIES_S):
                worker = workers[sentinel]  # type: ignore[index]
                worker.join(_DIES_S)  # its end of a pipe closes before it can be waited for
                if (code := worker.exitcode) is not None and code < 0:
                    raise RuntimeError(
                        f"DataLoader worker (pid {worker.pid}) is killed by signal: "
                        f"{strsignal(-code)}"
                    ) from error
            raise

    def _move(self, batch: Any) -> Any:
        """Copy a batch to the device; from page-locked memory without waiting for it."""
        from torch import Tensor
        from torch.utils._pytree import tree_map_only

        # a batch of several parts is a tuple, as `Batches` has it, where items are tuples
        batch = tuple(batch) if type(batch) is list else batch
        pinned = self._loading.pin_memory
        return tree_map_only(
            Tensor, lambda tensor: tensor.to(self._device, non_blocking=pinned), batch
        )


class _Plan:
    """The keys of each batch of the epoch that is loaded next."""

    batches: Iterator[list[Key]]

    def __iter__(self) -> Iterator[list[Key]]:
        return self.batches


def _start_worker(parent: int, number: int) -> None:
    starter = parent_process()
    if os.getppid() == parent or starter is None:
        die_with_parent(parent)
        return

    # a fork server started it, the default from Python 3.14 on, and outlives the parent
    def end() -> None:
        wait([starter.sentinel])
        os._exit(1)

    Thread(target=end, daemon=True).start()


# ----------------------------------------------------------------------------------- what is loaded


class Crops:
    """Training images, each cropped where its key says, flipped or not, and normalised.

    An item is made by itself, as the transforms of a user's dataset do, and a batch by torch's
    ``default_collate``, which in a worker writes it into shared memory at once. The key of an item
    is its number, the row and column of its crop in the padded image, and whether it is flipped.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.integer]) -> None:
        import torch

        # torch.tensor copies: from_numpy would warn of a read-only map. Forked workers share it.
        self.images = torch.tensor(images)
        self.labels: list[int] = labels.tolist()
        self.mean, self.scale = normalisation("cpu", self.images.shape[1])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int, int, bool]) -> tuple[torch.Tensor, int]:
        from torch.nn.functional import pad

        number, top, left, flip = key
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
    loading: Loading,
    samples: int | None = None,
    augment: bool = True,
    **making: Unpack[Making],
) -> LoadedBatches:
    """The batches of `bench.data.batches.Batches` from the same arguments, by a DataLoader."""
    n = len(images)

    def list_keys(index: int) -> Sequence[Key]:
        drawn = draw(samples or n, n, making["seed"], index, making["device"])
        order, corners, flips = (part.tolist() for part in drawn)
        if not augment:
            return [_as_it_is(number) for number in order]
        return list(zip(order, *corners, flips, strict=True))

    return LoadedBatches(
        Crops(images, labels),
        draw=list_keys,
        in_order=[_as_it_is(number) for number in range(n)],
        loading=loading,
        samples=samples,
        **making,
    )


def _as_it_is(number: int) -> Key:
    return number, PADDING, PADDING, False


def load_items(dataset: Dataset, *, loading: Loading, **making: Unpack[Making]) -> LoadedBatches:
    """The batches of a user's dataset, each item once an epoch, in an order of its own."""

    def list_keys(index: int) -> Sequence[Key]:
        import torch

        generator = torch.Generator().manual_seed(mix(making["seed"], index))
        order: list[int] = torch.randperm(len(dataset), generator=generator).tolist()
        return order

    every = range(len(dataset))
    return LoadedBatches(dataset, draw=list_keys, in_order=every, loading=loading, **making)


# --------------------------------------------------------------------------------- the loader alone

ALONE_S = 2.0
"""For how long the loader is measured without training, in s."""


def measure_rate(batches: LoadedBatches, workers: int, wait: Callable[[], None]) -> float | None:
    """Items per second that the loader supplies to the device while nothing is trained; None where
    no batch is left after the first of each worker.

    The clock starts once every worker has supplied a batch, so that neither their start nor what
    they prepared meanwhile counts; it stops after `ALONE_S`, or with the epoch. ``wait`` waits
    until the device has all that was copied to it.
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
