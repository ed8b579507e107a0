"""A few steps under torch's profiler, outside of all measured time.

The profiler's first start takes seconds and memory, so nothing is measured after it. Compiled code
runs on a CPU without a name for its kernels: there it is compiled a second time, with names, for
the profile alone.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from bench.case import Case
from bench.data.batches import Supply
from bench.processes import pause_collection
from bench.scratch import Scratch
from bench.timeline import STEPS, Timeline, name_region, read_trace, summarize
from bench.training.counting import mark_input, mark_parts, read_vocabulary
from bench.training.timing import synchronize
from bench.work import Kind

if TYPE_CHECKING:
    from bench.training.loop import Training

SECONDS = 1.0
"""As long as the steps under the profiler take together, unless that were fewer or more than these.

One of them is not profiled: it pays for the profiler's start."""

FEWEST, MOST = 2, 5
"""A GPU's are the fewest: of ten steps of dpn-small that an H100 recorded, any two had the time of
all kernels within 0.1 % and each kernel's that is more than 1 % of it within 2.5 %, any five within
0.05 and 0.8 %. In fp16 at batch size 512 five took an H200 2.0 to 2.5 s of a case, of which steps
are 0.7 s; two take 1.0 to 1.2 s."""


def profile_step(
    training: Training, batches: Supply, case: Case, step_s: float, trace: Path | None = None
) -> Timeline:
    """Train a few steps of full batches under the profiler: where the time of one goes, which takes
    ``step_s`` without it. They change the training. The trace is kept in the file ``trace``,
    gzipped, if one is given.

    Raises ValueError, where the trace cannot be read or a GPU's holds no kernel, and whatever a
    step raises.
    """
    device = training.device
    steps = choose_steps(step_s, device.type, case.workers)
    full = max(1, batches.samples // case.batch_size)  # a batch may be larger than the data
    left = full - case.workers - 2  # of the epoch, once those that are not profiled have run
    # these start the workers of a DataLoader, of which the first batch of each says nothing of the
    # others, or compile
    first = 1 + case.workers if case.workers or _names_kernels(case, device) else 0
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
    with Scratch("profile") as folder, ExitStack() as reading:
        file = Path(folder) / "trace.json"
        with _naming_kernels(training, case), mark_parts(training, mark):
            supply = mark_input(stream, mark)
            for batch in islice(supply, first):
                training.step(batch)
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
                # it would go through all events time and again: 126,000 of them were read and
                # divided in 2.1 CPU s with it and in 1.0 s without
                reading.enter_context(pause_collection())
        if trace:
            trace.parent.mkdir(parents=True, exist_ok=True)
            # torch's own export zips at level 9: 0.38 CPU s for a tenth less than 0.11 s give
            trace.write_bytes(gzip.compress(file.read_bytes(), 6))
        return summarize(read_trace(file), steps, read_vocabulary(), device.type)


def choose_steps(step_s: float, device: str, workers: int = 0) -> int:
    """How many steps are profiled; with workers of a DataLoader, as many from each.

    >>> choose_steps(0.25, "cpu"), choose_steps(60, "cpu"), choose_steps(0.001, "cpu")
    (3, 2, 5)
    >>> choose_steps(0.001, "cuda"), choose_steps(0.25, "cpu", 2)
    (2, 4)
    """
    most = FEWEST if device == "cuda" else MOST
    steps = min(max(math.floor(SECONDS / step_s) - 1, FEWEST), most)
    return steps if not workers else workers * math.ceil(steps / workers)


def _names_kernels(case: Case, device: torch.device) -> bool:
    return case.compiled and device.type == "cpu"


@contextmanager
def _naming_kernels(training: Training, case: Case) -> Iterator[None]:
    if not _names_kernels(case, training.device):
        yield
        return
    from torch._inductor import config

    compiled = training.forward
    torch._dynamo.reset()
    with config.patch({"cpp.enable_kernel_profile": True}):
        # compiled at the first step, which is within
        training.forward = torch.compile(training.model, dynamic=False, mode=case.compile)
        try:
            yield
        finally:
            training.forward = compiled
