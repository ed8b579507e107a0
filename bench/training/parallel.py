"""Training of one network by several processes: their group, and the exchange of gradients.

torch's DistributedDataParallel exchanges gradients during the backward pass, one bucket at a time.
BatchNorm statistics are not exchanged unless ``--sync-bn`` is given: each process keeps its own,
and evaluation uses those of the first, as with torch's default, which copies them from the first to
all others before each step (285 buffers of DPN-92).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from statistics import fmean, median, variance
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.base.errors import UsageError
from bench.base.limits import find_half_width
from bench.networks.data.batches import Supply, count_items, repeat
from bench.networks.workloads import Loss
from bench.training.formats import autocast
from bench.training.loop import Exchange, Training
from bench.training.timing import StepClock, synchronize

_T = TypeVar("_T")


class ProcessGroup:
    """The group of processes that train one network; in this class, a single process."""

    rank = 0
    size = 1
    backend: str | None = None
    """Name and version of the library that exchanges gradients."""

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all processes, in the order of their ranks; all wait for it."""
        return [value]

    def wait(self) -> None:
        """Wait until all processes have called this."""

    def now(self) -> float:
        """Return the first process's clock, in s, the same in all processes; all wait for it."""
        return perf_counter()

    def leave(self) -> None:
        """Leave the group; all processes must call this."""


class Processes(ProcessGroup):
    """Processes of one machine, joined by torch.distributed: NCCL between GPUs, gloo on CPUs.
    Other values than gradients (clocks, times, losses) go through gloo, so that no GPU waits for
    them. All processes name the same new file ``store``; each trains on the first GPU it sees."""

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

    def gather(self, value: _T) -> list[_T]:
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


class GroupExchange(Exchange):
    """What the processes of a group exchange in the steps of a training.

    A process with n of the N items of a batch weights its mean loss by ``n * size / N``: the mean
    of the gradients over all processes is then the gradient of the mean loss over the batch, also
    if the parts are uneven.
    """

    buckets = 0
    """In how many buckets gradients were exchanged in the last step."""

    wire_bytes = 0
    """Bytes of gradients that this process handed over in the last step."""

    gathered_bytes: int | None = None
    """Bytes of weights that were gathered in the last step; None if weights are not sharded."""

    exchanging = True
    """If not, each process trains on its own."""

    def __init__(self, group: ProcessGroup) -> None:
        self._size = group.size

    def begin(self, batch: Any) -> float:
        size = count_items(batch)
        return size * self._size / (getattr(batch, "whole", None) or size)

    def watch(self) -> None:
        """Start to time how long this process works in each step before it sends gradients."""

    def read_work(self) -> list[float]:
        """Return the time from start to first gradients sent of each step since `watch`, in s.
        Synchronise first. Step times do not show which process is slow: all wait for it. Empty
        where processes wait for each other before that too."""
        return []

    def end(self) -> None:
        """Let go of what exchanges; all processes call this."""


class GradientExchange(GroupExchange):
    """Exchanges the gradients of a training's steps with the other processes, by torch's
    DistributedDataParallel.

    Gradients are divided by the number of processes in their own format, then rounded to that of
    ``--grad-compression``, then summed. Dividing after the sum would overflow in float16; dividing
    before may lose values below the format's smallest number, which for float16 is 6e-8. A loss
    scale keeps the gradients above it.

    With a loss scale, the scaled gradients are exchanged. So all processes see the same sum, and
    overflow and skip a step together.
    """

    def __init__(self, training: Training, group: ProcessGroup) -> None:
        super().__init__(group)
        self._format = EXCHANGED[training.case.grad_compression]
        self._device = training.device
        self._parts: DistributedDataParallel | None = DistributedDataParallel(
            _Whole(training.parameters),
            device_ids=[0] if training.device.type == "cuda" else None,
            # buckets of torch's default: 25 MiB, but 1 MiB for the first, so that the exchange
            # begins early. Any other size is that of the first one too
            bucket_cap_mb=None,
        )
        # a lambda without annotations: torch would require evaluated ones
        self._parts.register_comm_hook(None, lambda state, bucket: self._average(bucket))
        self.watch()

    def begin(self, batch: Any) -> float:
        if self.exchanging:
            self._clock.tick()
        return super().begin(batch)

    def run(self, compute: Callable[[], Loss], last: bool) -> Loss:
        assert self._parts is not None
        with nullcontext() if last and self.exchanging else self._parts.no_sync():
            found: Loss = self._parts(compute)
        return found

    def watch(self) -> None:
        self._clock = StepClock(self._device)

    def read_work(self) -> list[float]:
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


EXCHANGED = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class _Whole(nn.Module):
    """The weights whose gradients are exchanged; ``forward`` runs the function it is given.

    A workload may run the network several times per loss, or on part of a batch, but
    DistributedDataParallel must see one forward pass per loss. There are no buffers to copy.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)

    def forward(self, compute: Callable[[], Loss]) -> Loss:
        return compute()


@dataclass(frozen=True)
class Exposed:
    """Time of a step with and without gradient exchange, in s; the difference is exposed.
    ``error_s`` is half of the 95 % confidence interval of the difference, within this run."""

    sync_step_s: float
    no_sync_step_s: float
    error_s: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Exposed:
        """Make it from pairs of step times with and without exchange, in s, one per block pair."""
        sync, alone = (fmean(steps) for steps in zip(*pairs, strict=True))
        return cls(sync, alone, find_half_width([(variance(a - b for a, b in pairs), len(pairs))]))


_PAIRS, _FEWEST, _MOST, _SECONDS = 6, 2, 30, 6.0
"""Pairs of blocks, limits of the steps per block, and total seconds. Student's t is 2.6 for six
pairs and 4.3 for three: six pairs of shorter blocks are more precise than three of longer ones."""


def measure_exchange(
    training: Training, batches: Supply, group: ProcessGroup, step_s: float
) -> Exposed:
    """Measure the time of a step with and without gradient exchange, each the mean over blocks of
    the results of `find_slowest`.

    Exchange hidden behind the backward pass adds no time. Blocks of the two kinds come in pairs of
    alternating order, so that a slowing machine affects both. All processes must call this; they
    begin each block together, and its first step is left out, since it would wait for processes
    that were slower in the block before. The first process's ``step_s`` sets the number of steps.

    The training is restored at the end; its state is kept in host memory meanwhile.
    """
    exchange = training.exchange
    assert isinstance(exchange, GroupExchange)
    steps = math.ceil(_SECONDS / (2 * _PAIRS * group.gather(step_s)[0]))
    steps = min(max(steps, _FEWEST), _MOST)
    supply = repeat(batches, training.case.epochs)
    # on the CPU, so that it takes no memory from the steps
    before = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), training.state())
    blocks: dict[bool, list[list[float]]] = {True: [], False: []}
    try:
        for exchanging in [True, False, False, True] * (_PAIRS // 2):
            exchange.exchanging = exchanging
            training.set_lr(0.0)  # the weights of a network that is not whole lead nowhere
            synchronize(training.device)
            group.wait()
            clock = StepClock(training.device)
            clock.tick()
            for batch in islice(supply, 1 + steps):
                training.step(batch)
                clock.tick()
            synchronize(training.device)
            blocks[exchanging].append(clock.read()[1:])
    finally:
        exchange.exchanging = True
        training.restore(before)
    sync, alone = (find_slowest(group.gather(blocks[kind])) for kind in (True, False))
    return Exposed.of(list(zip(sync, alone, strict=True)))


def replicate(training: Training, number: int) -> None:
    """Run the network on the first ``number`` GPUs by torch's DataParallel, in this one process:
    each step copies the weights to all, and gathers outputs and gradients on the first. Raises
    UsageError: this process sees fewer."""
    if (there := torch.cuda.device_count()) < number:
        raise UsageError(f"--world-size {number}: this process sees {there} GPUs")
    training.forward = _Replicas(_Cast(training), list(range(number)))


class _Replicas(DataParallel[nn.Module]):
    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        refuse_inputs((inputs, kwargs))
        return super().scatter(inputs, kwargs, device_ids)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        refuse_outputs(outputs)
        return super().gather(outputs, output_device)


def refuse_inputs(inputs: object) -> None:
    """Refuse inputs of a network that torch's DataParallel would divide wrongly. Of a tensor with
    one item, such as a mask for all, it makes one part: it then runs one GPU on its part of the
    batch, and leaves out the rest. Raises UsageError: they are not all as long."""
    sizes = {one.shape[:1] for one in tree_leaves(inputs) if isinstance(one, Tensor)}
    if len(sizes) > 1:
        lengths = " and ".join(str(*size) or "no" for size in sorted(sizes, reverse=True))
        raise UsageError(
            "--parallel dp divides all inputs of the network among the GPUs by their first "
            f"dimension, and those of a batch have {lengths} items; give --parallel ddp"
        )


def refuse_outputs(outputs: object) -> None:
    """Refuse outputs of a network that torch's DataParallel would not join to those of a whole
    batch. Raises UsageError: one is a single number."""
    if any(isinstance(one, Tensor) and not one.dim() for one in tree_leaves(outputs)):
        raise UsageError(
            "--parallel dp: the network returns a single number, such as a loss of its own, "
            "and torch's DataParallel joins items only; give --parallel ddp"
        )


class _Cast(nn.Module):
    """The network with its own autocast: each of DataParallel's threads starts with the default."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.network = training.model
        self._precision, self._device = training.precision, training.device

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with autocast(self._precision, self._device):
            return self.network(*inputs, **named)


def find_slowest(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the median of each block's step times, in s, with the slowest process counting in each
    step. ``times`` is indexed by process, block and step.

    Processes that exchange wait for the slowest in each step, so those that do not are treated
    alike. With the median of the slowest process instead, jitter of 2 % between eight processes
    that exchange nothing would appear as exposed communication of 2 % of a step.
    """
    return [median(map(max, zip(*block, strict=True))) for block in zip(*times, strict=True)]
