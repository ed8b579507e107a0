"""Several processes train one network: their group, and the gradients that they exchange.

torch's DistributedDataParallel exchanges them while the backward pass goes on, a bucket at a time.
Of BatchNorm's statistics nothing is exchanged unless ``--sync-bn`` is given: each process keeps its
own, and evaluation uses those of the first, as it would after torch's default, which copies the
first's to all others before each step (285 buffers of DPN-92).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, count, islice
from statistics import fmean, median, variance
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map_only

from bench.case import Case, whole_batch
from bench.data.batches import Supply, count_items, count_whole
from bench.errors import UsageError
from bench.interval import find_reach
from bench.precision import autocast
from bench.training.loop import Alone, Training
from bench.training.timing import StepClock, synchronize
from bench.workloads import Loss

T = TypeVar("T")


class Group:
    """The processes that train one network together: this one alone."""

    rank = 0
    size = 1
    backend: str | None = None
    """What exchanges gradients, and its version."""

    def gather(self, value: T) -> list[T]:
        """What each process has here, in the order of their ranks; all wait for it."""
        return [value]

    def wait(self) -> None:
        """Wait until all processes are here."""

    def now(self) -> float:
        """The first process's clock in s, which reads the same in all; all wait for it."""
        return perf_counter()

    def leave(self) -> None:
        """Go on alone; all processes leave."""


class Processes(Group):
    """Processes of one machine, which torch.distributed joins: NCCL between GPUs, gloo on CPUs.
    What is no gradient (clocks, times, losses) goes through gloo, so that no GPU waits for it. All
    of them name a file ``store`` that none has written to; of GPUs, each trains on the first that
    it sees."""

    def __init__(
        self, rank: int, size: int, store: str, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.size = rank, size
        if device.type == "cuda":
            torch.cuda.set_device(0)
            version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            self.backend, backends = f"nccl {version}", "cpu:gloo,cuda:nccl"
        else:
            self.backend, backends = f"gloo of torch {torch.__version__}", "gloo"
        dist.init_process_group(
            backends,
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        dist.all_reduce(torch.zeros(1))

    def now(self) -> float:
        moment = torch.tensor(perf_counter(), dtype=torch.float64)
        dist.broadcast(moment, 0)
        return float(moment)

    def leave(self) -> None:
        dist.destroy_process_group()


class Exchange(Alone):
    """What the steps of a training share with those of the other processes: gradients.

    Each process has a part of a batch of n items of N, and its mean loss counts ``n * size / N``:
    the mean of the gradients over all processes is then that of the mean loss over the batch, also
    where the parts are uneven.

    Gradients are divided by the number of processes before they are summed, in their own format,
    and rounded to that of ``--grad-compression`` after that. A sum that is divided afterwards would
    overflow in float16; what is divided before may lose what is below its smallest number, which
    for float16 is 6e-8, and a loss scale keeps the gradients above that.

    With a loss scale they are exchanged as they are, scaled. So all processes see the same sum, and
    overflow and skip a step together.
    """

    def __init__(self, training: Training, case: Case, group: Group) -> None:
        self.buckets: int | None = None
        """Parts that the gradients of the last step were exchanged in."""
        self.wire_bytes: int | None = None
        """Bytes of gradients that this process handed over in the last step."""
        self.exchanging = True
        """Whether steps exchange gradients; where not, each process trains on its own."""
        self._size = group.size
        self._format = _FORMATS[case.grad_compression]
        self._device = training.device
        self._parts: DistributedDataParallel | None = DistributedDataParallel(
            _Whole(training.parameters),
            device_ids=[0] if training.device.type == "cuda" else None,
            # without a size it is 25, and the first bucket has 1 MiB, so that exchange begins
            # early: what users of torch have who choose none
            bucket_cap_mb=None if case.bucket_mb == Case.bucket_mb else case.bucket_mb,
        )
        # without annotations, which would have to be evaluated ones
        self._parts.register_comm_hook(None, lambda state, bucket: self._average(bucket))
        self.watch()

    def begin(self, batch: Any) -> float:
        if self.exchanging:
            self._clock.tick()
        return count_items(batch) * self._size / count_whole(batch)

    def run(self, compute: Callable[[], Loss], last: bool) -> Loss:
        assert self._parts is not None
        with nullcontext() if last and self.exchanging else self._parts.no_sync():
            found: Loss = self._parts(compute)
        return found

    def watch(self) -> None:
        """Time from here on how long this process works before it hands over gradients."""
        self._clock = StepClock(self._device)

    def read_work(self) -> list[float]:
        """Of each step since `watch`, its start to its first gradients handed over, in s.
        Synchronise first. Step times do not tell which process is slow: all wait for it."""
        return self._clock.read()[::2]

    def end(self) -> None:
        self._parts = None

    def _average(self, bucket: Any) -> Future[Tensor]:
        if not bucket.index():
            self._clock.tick()
            self._handed = 0
        gradients = bucket.buffer()
        sent = gradients.div_(self._size)
        if self._format is not None:
            sent = sent.to(self._format)
        self._handed += sent.numel() * sent.element_size()
        if bucket.is_last():
            self.buckets, self.wire_bytes = bucket.index() + 1, self._handed
        summed: Future[list[Tensor]] = dist.all_reduce(sent, async_op=True).get_future()
        own = sent is gradients
        return summed.then(
            lambda done: done.value()[0] if own else gradients.copy_(done.value()[0])
        )


_FORMATS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class _Whole(nn.Module):
    """The weights whose gradients are exchanged; what it computes is whatever it is given.

    A workload may run the network several times for a loss, or not on all of a batch:
    DistributedDataParallel is to see one forward pass a loss. It finds no buffers here, and copies
    none.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)

    def forward(self, compute: Callable[[], Loss]) -> Loss:
        return compute()


@dataclass(frozen=True)
class Exposed:
    """A step with gradients exchanged, and without, in s; the difference is exposed. ``error_s`` is
    half of the 95 % interval of the difference, within this run."""

    sync_step_s: float
    no_sync_step_s: float
    error_s: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Exposed:
        """That of the steps of pairs of blocks, with exchange and without, in s."""
        sync, alone = (fmean(steps) for steps in zip(*pairs, strict=True))
        return cls(sync, alone, find_reach([(variance(a - b for a, b in pairs), len(pairs))]))


_PAIRS, _FEWEST, _MOST, _SECONDS = 6, 2, 30, 6.0
"""Pairs of blocks, and how many steps each has for about so many seconds in all. Student's t of six
pairs is 2.6, of three 4.3: six shorter blocks tell more than three longer ones."""


def measure_exchange(
    training: Training, batches: Supply, case: Case, group: Group, step_s: float
) -> Exposed:
    """How long a step takes with gradients exchanged, and without, each the mean over blocks as
    `find_slowest` takes it.

    Exchange that the backward pass hides takes no time of a step. Blocks of the two kinds come in
    pairs, and every other pair the other way round, so that a machine that slows down meanwhile
    slows both. All processes, which all call this, begin a block together, and its first step is
    left out: it would wait for those that were slower in the block before. What a step takes,
    ``step_s``, counts as the first process has it.

    The training is as before when this ends; what it was is kept in host memory meanwhile.
    """
    exchange = training.exchange
    assert isinstance(exchange, Exchange)
    steps = math.ceil(_SECONDS / (2 * _PAIRS * group.gather(step_s)[0]))
    steps = min(max(steps, _FEWEST), _MOST)
    whole = whole_batch(case)
    full = max(1, batches.samples // whole)
    stream = chain.from_iterable(
        batches.divide(i, steps=full, size=whole) for i in count(case.epochs)
    )
    # on the CPU, where it is not in the way of a step's memory
    before = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), training.state())
    blocks: dict[bool, list[list[float]]] = {True: [], False: []}
    try:
        for exchanging in [True, False, False, True] * (_PAIRS // 2):
            exchange.exchanging = exchanging
            synchronize(training.device)
            group.wait()
            clock = StepClock(training.device)
            clock.tick()
            for batch in islice(stream, 1 + steps):
                training.step(batch)
                clock.tick()
            synchronize(training.device)
            blocks[exchanging].append(clock.read()[1:])
    finally:
        exchange.exchanging = True
        training.restore(before)
    sync, alone = (find_slowest(group.gather(blocks[kind])) for kind in (True, False))
    return Exposed.of(list(zip(sync, alone, strict=True)))


def find_slowest(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """The median step of each block, of whichever process was slowest in a step, in s, by the times
    of each process, of each block, of each step.

    Processes that exchange wait for the slowest of each step, so that those which do not are taken
    alike. By the slowest process's median instead, jitter of 2 % would be exposed communication of
    2 % of a step between eight processes that exchange nothing.
    """
    return [median(map(max, zip(*block, strict=True))) for block in zip(*times, strict=True)]


def replicate(training: Training, number: int) -> None:
    """Run the network on the first ``number`` GPUs by torch's DataParallel, in this one process.
    Raises UsageError: this process sees fewer."""
    if (there := torch.cuda.device_count()) < number:
        raise UsageError(f"--world-size {number}: this process sees {there} GPUs")
    training.forward = DataParallel(_Cast(training), list(range(number)))


class _Cast(nn.Module):
    """The network in its own autocast: each of DataParallel's threads begins with the default."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.network = training.model
        self._precision, self._device = training.precision, training.device

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with autocast(self._precision, self._device):
            return self.network(*inputs, **named)
