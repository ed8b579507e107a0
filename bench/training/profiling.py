"""A few steps under torch's profiler, outside all measured time.

The profiler's first start takes seconds and memory, so nothing is measured after it.
"""

from __future__ import annotations

import gzip
import math
from itertools import islice
from pathlib import Path

from torch.profiler import record_function

from bench.base.processes import TemporaryFolder, pause_collection
from bench.networks.data.batches import Supply, repeat
from bench.profile.timeline import Timeline, name_region, read_trace, summarize
from bench.schema.work import WorkKind
from bench.training.counting import mark_input, mark_parts, read_vocabulary
from bench.training.loop import Training
from bench.training.recording import Recording

_SECONDS = 1.0
"""Total time of the steps under the profiler, within the limits of `FEWEST` and `MOST` steps.

One of them is not profiled: it includes the profiler's start."""

FEWEST, MOST = 2, 5
"""Limits of the number of profiled steps; a GPU always has the fewest. In ten steps of dpn-small on
an H100, any two agreed within 0.1 % in total kernel time and within 2.5 % in each kernel of more
than 1 % of it, any five within 0.05 and 0.8 %. In fp16 at batch size 512 on an H200, five took 2.0
to 2.5 s of a case whose steps take 0.7 s; two take 1.0 to 1.2 s."""


def profile_step(
    training: Training, batches: Supply, step_s: float, trace: Path | None
) -> Timeline:
    """Train a few steps of full batches under the profiler, and return where a step's time goes.
    A step takes ``step_s`` without the profiler. The steps change the training. The trace is kept,
    gzipped, in the file ``trace`` if one is given.

    Raises ValueError: the trace cannot be read, or a GPU's has no kernels. Whatever a step raises
    is raised.
    """
    case, device = training.case, training.device
    steps = choose_steps(step_s, device.type, case.workers)
    # steps of the epoch after the unprofiled ones
    left = batches.samples // case.batch_size - case.workers - 2
    # these steps start a DataLoader's workers, whose first batches are not typical
    first = 1 + case.workers if case.workers else 0
    if case.workers and 0 < left < steps:
        steps = left  # the next epoch starts other workers, for which a median step does not wait

    def mark(part: WorkKind | None) -> record_function:
        return record_function(name_region(part))

    with TemporaryFolder("profile") as folder:
        file = Path(folder) / "trace.json"
        with mark_parts(training, mark):
            supply = mark_input(repeat(batches, case.epochs, case.batch_size), mark)
            for batch in islice(supply, first):
                training.step(batch)
            recording = Recording(device, file)
            try:
                recording.start()
                training.step(next(supply))
                recording.begin()
                for batch in islice(supply, steps):
                    training.step(batch)
            finally:
                recording.end()
        return read_profile(file, steps, device.type, trace)


def read_profile(file: Path, steps: int, device: str, trace: Path | None = None) -> Timeline:
    """Return the mean of the ``steps`` of a `Recording` on ``device``, cuda or cpu; it is kept,
    gzipped, in the file ``trace`` if one is given. Raises ValueError: the trace cannot be read, or
    a GPU's has no kernels."""
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        # torch's own export uses level 9: 0.38 CPU s instead of 0.11 s for a tenth less space
        trace.write_bytes(gzip.compress(file.read_bytes(), 6))
    # reading and dividing 126,000 events took 2.1 CPU s with collection and 1.0 s without
    with pause_collection():
        return summarize(read_trace(file), steps, read_vocabulary(), device)


def choose_steps(step_s: float, device: str, workers: int = 0) -> int:
    """Return the number of steps to profile; with DataLoader workers, a multiple of their number.

    >>> choose_steps(0.25, "cpu"), choose_steps(60, "cpu"), choose_steps(0.001, "cpu")
    (3, 2, 5)
    >>> choose_steps(0.001, "cuda"), choose_steps(0.25, "cpu", 2)
    (2, 4)
    """
    most = FEWEST if device == "cuda" else MOST
    steps = min(max(math.floor(_SECONDS / step_s) - 1, FEWEST), most)
    return steps if not workers else workers * math.ceil(steps / workers)
