"""Preparing a training to be measured: set-up, warm-up and reset."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bench.base.errors import UsageError
from bench.networks.data.batches import Batches, Counted, MadeBatches, Share, Supply, repeat
from bench.networks.data.loader import LoadedBatches
from bench.networks.workloads import Workload
from bench.schema.case import Case, micro_batch, whole_batch
from bench.training.building import build_training, open_workload, seed_all
from bench.training.loop import Training
from bench.training.parallel import GradientExchange, ProcessGroup, replicate
from bench.training.switches import keep_switches
from bench.training.timing import Warmup, find_accelerator, synchronize, warm_up


def set_up(case: Case, folder: str, group: ProcessGroup | None = None) -> tuple[Supply, Training]:
    """Set the flags, load the data to the device and build the network, ready to train in all
    processes of a ``group``."""
    device, switched = torch.device(case.device), dict[str, Any]()
    share = Share(group.rank, group.size) if group else None
    with keep_switches(switched):
        workload = open_workload(case, folder)
        batches = open_supply(case, workload, device, share)
    training = build_training(case, workload, device)
    training.switched = {**switched, **training.switched}
    if case.parallel == "dp":
        replicate(training, case.world_size)
    elif group is not None and case.parallel == "ddp":
        training.exchange = GradientExchange(training, group)
    elif group is not None and case.parallel == "fsdp":
        from bench.training.sharding import ShardExchange  # only if needed

        training.exchange = ShardExchange(training, group)
    synchronize(device)
    return batches, training


def open_supply(
    case: Case, workload: Workload, device: torch.device, share: Share | None = None
) -> Supply:
    """Return the training batches as ``case`` asks for them, or this process's ``share`` of each.
    Raises UsageError: torch's DataLoader is to make them and the workload has no dataset, or they
    are to be shared and the workload makes its own batches."""
    whole, share = whole_batch(case), share or Share()
    # DataParallel divides it further
    micro = whole if case.parallel == "dp" else micro_batch(case)
    about: dict[str, Any] = {
        "batch_size": whole,
        "micro_batch": micro,
        "device": device,
        "seed": case.seed,
    }
    if case.loader != "device":
        loaded = workload.open_loader(**about, workers=case.workers)
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
    if batches.batch_size != whole:
        raise UsageError(
            f"the workload's open_batches makes batches of {batches.batch_size} where {whole} were "
            "asked for; give them batch_size items"
        )
    return Counted(batches, micro)


def end_workers(batches: Supply) -> None:
    if isinstance(batches, LoadedBatches):
        batches.close()


def count_steps(case: Case, batches: Supply) -> int:
    steps = math.ceil(case.fraction * len(batches))
    return steps if case.steps is None else min(steps, case.steps)


def _measured_shapes(case: Case, batches: Supply) -> list[int]:
    """Return the batch sizes to warm up. The smaller last batch is included for a whole epoch, and
    for ``--steps``, whose few steps are to show whether an epoch would fit."""
    rest = batches.samples % whole_batch(case)
    whole = count_steps(case, batches) == len(batches)  # may be true with --until too
    smaller = [rest] if rest and (whole or case.steps is not None) else []
    return [whole_batch(case), *smaller]


_UNTIL_STEPS = 40  # enough for most cases on an H100 to be known within 1 %
_SMALLER_STEPS = 3  # for the smaller last batch: one to tune, one more, one as in the epoch


def warm_up_shapes(
    training: Training,
    batches: Supply,
    on_step: Callable[[int, Tensor], None],
    clock: Callable[[], float] | None = None,
) -> Warmup:
    """Warm up each measured batch shape, with its micro-batches; return the steps and time taken.

    The smaller last batch is one step of a whole epoch: three warm-up steps tune, compile and
    allocate for it. With ``--fraction`` it is not run at all; `bench.training.timing.extrapolate`
    says what that may cost. With ``--steps`` it runs only here, as often as full batches are
    measured but at most three times. ``clock`` is passed to `bench.training.timing.warm_up`.
    """
    case = training.case
    stream = enumerate(repeat(batches, first=1))  # making batches is warmed up too

    def step() -> None:
        if case.cuda_graphs and training.captured is None:
            training.capture(next(stream)[1])
        index, batch = next(stream)
        on_step(index, training.step(batch)[0])

    measured = count_steps(case, batches)
    if case.until is not None:  # it goes on measuring while step times drift
        measured = min(measured, _UNTIL_STEPS)
    warm = warm_up(step, training.device, measured, clock)
    smaller_steps = min(_SMALLER_STEPS, case.steps or _SMALLER_STEPS)
    for size in _measured_shapes(case, batches)[1:]:
        # a list, since the first of them draws the epoch's order
        smaller = list(islice(repeat(batches, 1, size), smaller_steps))
        moments = [time.perf_counter()]
        for batch in smaller:
            training.step(batch)
            synchronize(training.device)
            moments.append(time.perf_counter())
        warm = Warmup(
            warm.steps + smaller_steps,
            warm.time_s + moments[-1] - moments[0],
            warm.first_s + moments[1] - moments[0],
            warm.steady,
        )
    return warm


def start_over(training: Training, batches: Supply, rank: int = 0) -> None:
    """Undo the effects of warm-up on weights, optimizer, random numbers (seeded by ``rank``) and
    memory statistics, and end the DataLoader's workers."""
    accelerator = find_accelerator(training.device)
    if accelerator:
        # autotuning workspaces would count in the epoch's peak, and an emptied allocator would
        # grow during the epoch: so empty it, then let it grow in a step of each shape
        gc.collect()
        accelerator.empty_cache()
        for size in _measured_shapes(training.case, batches):
            training.step(next(batches.divide(1, steps=1, size=size)))
    end_workers(batches)  # of the warm-up; the epoch starts its own, as a script does
    training.reset()
    seed_all(training.case.seed + rank)
    synchronize(training.device)
    if accelerator:
        accelerator.reset_peak_memory_stats(training.device)
