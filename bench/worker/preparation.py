"""A training made ready to be measured: set up, warmed up, and put back to its start."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor

from bench.case import FOLLOWS, Case, micro_batch, whole_batch
from bench.data.batches import Batches, Counted, Divided, MadeBatches, Share, Supply
from bench.data.loader import LoadedBatches, Loading
from bench.errors import UsageError
from bench.training.accelerator import find_accelerator
from bench.training.building import build_training, open_workload, seed_all
from bench.training.loop import Training
from bench.training.parallel import Exchange, Group, replicate
from bench.training.timing import Warmup, synchronize, warm_up
from bench.workloads import Workload


class Stopwatch:
    """Divides the life of a process into parts, which add up to the whole, from the
    time.monotonic() when it was asked for, in s. The processes of a machine share that clock, so
    another one may have read it."""

    def __init__(self, started: float) -> None:
        self._started = self.until = started
        self.parts: dict[str, float] = {}

    def lap(self, part: str, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self.parts[part] = self.parts.get(part, 0.0) + now - self.until
        self.until = now

    @property
    def total(self) -> float:
        return self.until - self._started


def set_up(
    case: Case, folder: str, group: Group | None = None, watch: Stopwatch | None = None
) -> tuple[Workload, Supply, Training]:
    """Set the flags, bring the data to the device and build the network: ready to train, for all of
    a ``group`` together; ``watch`` is told how long the data take, and the network."""
    device, workload = torch.device(case.device), open_workload(case, folder)
    share = Share(group.rank, group.size) if group else None
    batches = open_supply(case, workload, device, share)
    watch = watch or Stopwatch(0.0)
    watch.lap("data_s")
    training = build_training(case, workload, device)
    if case.parallel == "dp":
        replicate(training, case.world_size)
    elif group is not None and case.parallel == "ddp":
        training.exchange = Exchange(training, case, group)
    synchronize(device)
    watch.lap("building_s")
    return workload, batches, training


def open_supply(
    case: Case, workload: Workload, device: torch.device, share: Share | None = None
) -> Supply:
    """The batches of training, made as ``case`` asks for, or this process's ``share`` of each.
    Raises UsageError: torch's DataLoader is to make them, and the workload has no dataset; or they
    are to be shared, and the workload makes batches of its own."""
    whole, share = whole_batch(case), share or Share()
    # torch's DataParallel divides a micro-batch further
    micro = whole if case.parallel == "dp" else micro_batch(case)
    about: dict[str, Any] = {
        "batch_size": whole,
        "micro_batch": micro,
        "device": device,
        "seed": case.seed,
    }
    if case.loader != "device":
        loading = Loading(**{name: getattr(case, name) for name in FOLLOWS["loader"]})
        loaded = workload.open_loader(**about, loading=loading)
        loaded.share = share
        return loaded
    batches = workload.open_batches(**about)
    if isinstance(batches, Batches | MadeBatches):
        batches.share = share
        return batches
    if share.of > 1:
        raise UsageError(
            "the workload's open_batches makes batches of its own, which cannot be shared by "
            "processes; leave out --parallel, or give it make_batch or --loader torch"
        )
    return Counted(batches, micro)


def end_workers(batches: Supply) -> None:
    if isinstance(batches, LoadedBatches):
        batches.close()


def count_steps(case: Case, batches: Supply) -> int:
    steps = math.ceil(case.fraction * len(batches))
    return steps if case.steps is None else min(steps, case.steps)


def _measured_shapes(case: Case, batches: Supply) -> list[int]:
    """The batch sizes that ``case`` trains on: the last, smaller one in a whole epoch. And with
    ``--steps``, whose few steps are to tell whether an epoch would fit."""
    rest = batches.samples % whole_batch(case)
    whole = count_steps(case, batches) == len(batches)  # with --until too, as far as is known
    smaller = [rest] if rest and (whole or case.steps is not None) else []
    return [whole_batch(case), *smaller]


_UNTIL_STEPS = 40  # as many as most cases of an H100 need to be known within 1 %
_SMALLER_STEPS = 3  # of a shape that one step in an epoch has: one to tune, one more, one as it is


def warm_up_shapes(
    training: Training,
    batches: Supply,
    case: Case,
    on_step: Callable[[int, Tensor], None],
    clock: Callable[[], float] | None = None,
) -> Warmup:
    """Warm each batch shape that is measured, with its micro-batches; say what it took.

    The smaller last batch stands in a whole epoch alone, for one step: three steps tune, compile
    and allocate for it. Where a ``--fraction`` is measured it is not run at all;
    `bench.training.timing.extrapolate` says what that may cost. With ``--steps`` it runs here, as
    often as full batches are measured, and is not measured. ``clock`` is as
    `bench.training.timing.warm_up` takes it.
    """
    full = batches.samples // whole_batch(case)

    def supply(size: int) -> Iterator[Divided]:
        return chain.from_iterable(batches.divide(i, steps=full, size=size) for i in count(1))

    stream = enumerate(supply(whole_batch(case)))  # making batches is warmed up too

    def step() -> None:
        if case.cuda_graphs and training.captured is None:
            training.capture(next(stream)[1])
        index, batch = next(stream)
        on_step(index, training.step(batch)[0])

    measured = count_steps(case, batches)
    if case.until is not None:  # which measures on while steps drift
        measured = min(measured, _UNTIL_STEPS)
    warm = warm_up(step, training.device, measured, clock)
    smaller_steps = min(_SMALLER_STEPS, case.steps or _SMALLER_STEPS)
    for size in _measured_shapes(case, batches)[1:]:
        smaller = islice(supply(size), smaller_steps)
        batch = next(smaller, None)  # the epoch's order is drawn here
        moments = [time.perf_counter()]
        while batch is not None:
            training.step(batch)
            synchronize(training.device)
            moments.append(time.perf_counter())
            batch = next(smaller, None)
        warm = Warmup(
            warm.steps + smaller_steps,
            warm.time_s + moments[-1] - moments[0],
            warm.first_s + moments[1] - moments[0],
            warm.steady,
        )
    return warm


def start_over(training: Training, batches: Supply, case: Case, rank: int = 0) -> None:
    """Undo what warm-up did to weights, optimizer, random numbers, which differ by ``rank``, and
    memory statistics. Workers of a DataLoader end."""
    accelerator = find_accelerator(training.device)
    if accelerator.empty_cache:
        # autotuning's workspaces would stand in the epoch's peak, and an allocator just emptied
        # would grow anew inside the epoch: so empty it, then grow it by a step of each shape
        gc.collect()
        accelerator.empty_cache()
        for size in _measured_shapes(case, batches):
            training.step(next(batches.divide(1, steps=1, size=size)))
    end_workers(batches)  # those of the warm-up; the epoch starts its own, as a script does
    training.reset()
    seed_all(case.seed + rank)
    synchronize(training.device)
    accelerator.reset_peaks(training.device)
