"""A few steps under torch's profiler, outside of all measured time.

The profiler's first start takes seconds and memory, so nothing is measured after it. Compiled code
runs on a CPU without a name for its kernels: there it is compiled a second time, with names, for
the profile alone.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from bench.case import Case
from bench.data.batches import Supply
from bench.timeline import STEPS, Timeline, name_region, read_trace, summarize
from bench.training.counting import mark_input, mark_parts, read_vocabulary
from bench.training.timing import synchronize
from bench.work import Kind

if TYPE_CHECKING:
    from bench.training.loop import Training

SECONDS = 1.0
"""As long as the profiled steps take together, unless that were fewer or more than these."""

FEWEST, MOST = 3, 10


def profile_step(
    training: Training,
    batches: Supply,
    case: Case,
    step_s: float,
    trace: Path | None = None,
) -> Timeline:
    """Train a few steps of full batches under the profiler: where the time of one goes.

    They change the training.

    Args:
        training: as the epoch left it, or as any other steps did.
        batches: of its data.
        case: what is trained.
        step_s: what a step takes without the profiler, in s.
        trace: where the trace is to be kept, gzipped; by default it is not.

    Raises:
        ValueError: the trace cannot be read, or a GPU's holds no kernel.
        Exception: whatever a step raises.
    """
    steps = choose_steps(step_s, case.workers)
    device = training.device
    full = max(1, batches.samples // case.batch_size)  # a batch may be larger than the data
    left = full - case.workers - 2  # of the epoch, once those that are not profiled have run
    if case.workers and 0 < left < steps:
        steps = left  # at the next one other workers start, which no median step waits for

    def mark(part: Kind | None) -> AbstractContextManager[Any]:
        return record_function(name_region(part))

    stream = chain.from_iterable(
        batches.divide(i, steps=full, size=case.batch_size) for i in count(case.epochs)
    )
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with (
        tempfile.TemporaryDirectory(prefix="bench-profile-") as folder,
        _naming_kernels(training, case),
        mark_parts(training, mark),
    ):
        supply = mark_input(stream, mark)
        # workers of a DataLoader start now: the first batch of each says nothing of the others
        for batch in islice(supply, 1 + case.workers):
            training.step(batch)
        file = trace or Path(folder) / "trace.json.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        with profile(
            activities=activities,
            # the first step under the profiler pays for its start
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda found: found.export_chrome_trace(str(file)),
            record_shapes=True,
        ) as profiler:
            training.step(next(supply))
            synchronize(device)
            profiler.step()
            with record_function(STEPS):
                for batch in islice(supply, steps):
                    training.step(batch)
            synchronize(device)
        timeline = read_trace(file)
    return summarize(timeline, steps, read_vocabulary(), device.type)


def choose_steps(step_s: float, workers: int = 0) -> int:
    """How many steps are profiled; with workers of a DataLoader, as many from each.

    >>> choose_steps(0.25), choose_steps(60), choose_steps(0.001), choose_steps(0.25, 3)
    (4, 3, 10, 6)
    """
    steps = min(max(math.ceil(SECONDS / step_s), FEWEST), MOST)
    return steps if not workers else workers * math.ceil(steps / workers)


@contextmanager
def _naming_kernels(training: Training, case: Case) -> Iterator[None]:
    """Have what is compiled for a CPU record its kernels by their names."""
    if not case.compile or training.device.type != "cpu":
        yield
        return
    from torch._inductor import config

    compiled = training.forward
    torch._dynamo.reset()
    with config.patch({"cpp.enable_kernel_profile": True}):
        # compiled at the first step, which is within
        training.forward = torch.compile(training.model, dynamic=False)
        try:
            yield
        finally:
            training.forward = compiled
