"""The comparison of the harness with independent code, the bare loop, and the runs of that loop."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.errors import UsageError
from bench.executors import Job
from bench.processes import name_signal
from bench.record import Measurement
from bench.workloads import IMAGES

HERE = Path(__file__).parent

BOUND = 0.01
"""Harness and bare loop must agree within this relative difference.

The 22 measured rows of the H100 (results/nvidia-h100-80gb-hbm3-20261122-*: DPN-92, batch sizes 128
to 640, six precisions, and DDP in one process) show what memory consists of. In each of them NVML's
peak of the process is exactly ``peak_reserved_bytes`` + ``context_bytes``, and NVML's peak of the
device is 9,240,576 B more. So the memory of the device above its baseline is

    tensors  +  unused memory held by torch's allocator  +  memory outside the allocator

The tensors are the work. Their peak is the same in every repeat, and differs between the warm-up
and the epoch of a row by at most 0.10 %: the bound is ten times that. Unused memory is 13 to 21 %
of what is reserved. In the first cross-check (bf16-amp, batch size 256) two loops that did the same
work differed by 154 MiB of 8,635, or 1.8 %, which is 77 pages of the driver. As that part alone can
exceed the bound, it is printed and not judged. The memory outside was 768.8 MiB at every batch size
in five precisions, and 770.8 with tf32: a page, 2 MiB, is 0.26 %. With NCCL it was 1,332.8.
"""

WARMUP_S = {"cuda": 5.0, "cpu": 1.0}


@dataclass(frozen=True)
class Side:
    """The measurements of one side. Memory is in bytes, None if it cannot be read.

    ``memory_bytes`` is the peak of the device above its baseline, on a CPU that of the resident
    set; ``allocated_bytes`` and ``reserved_bytes`` are the peaks of tensors and of torch's
    allocator on a GPU. ``batches_s`` is the time to make the steps' batches alone, measured by the
    bare loop: the one part of the work that the two sides implement differently.
    """

    seconds: float
    steps: int
    images: int
    memory_bytes: int | None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    batches_s: float | None = None

    @property
    def outside_bytes(self) -> int | None:
        """The memory outside torch's allocator: the context, the kernels and the libraries."""
        if self.memory_bytes is None or self.reserved_bytes is None:
            return None
        return self.memory_bytes - self.reserved_bytes


class Pair(NamedTuple):
    harness: Side
    bare: Side


class Agreement(StrEnum):
    AGREE = "agree"
    DISAGREE = "disagree"
    UNCLEAR = "unclear"
    NOT_READ = "not read"


@dataclass(frozen=True)
class Judgement:
    """Harness over bare: the median ratio, its range over the pairs, and the verdict."""

    verdict: Agreement
    ratio: float | None = None
    lowest: float | None = None
    highest: float | None = None

    def describe(self, what: str) -> str:
        if self.ratio is None:
            return f"{what}: {self.verdict}"
        return (
            f"{what}: harness / bare = {self.ratio:.4f} ({self.lowest:.4f} to {self.highest:.4f}): "
            f"{self.verdict} ({100 * BOUND:g} %)"
        )


def judge(pairs: Sequence[tuple[float, float] | None]) -> Judgement:
    """Compare readings: a pair (harness, bare), or None if one of them could not be read.

    They agree if every ratio is within `BOUND` of 1, and disagree if all are outside on the same
    side. Anything else is unclear: the machine is too noisy to tell.

    >>> judge([(1.2, 1.0), (1.21, 1.0)]).verdict
    <Agreement.DISAGREE: 'disagree'>
    """
    ratios = [harness / bare for harness, bare in filter(None, pairs)]
    if not ratios or len(ratios) < len(pairs):
        return Judgement(Agreement.NOT_READ)
    verdict = Agreement.UNCLEAR
    if all(abs(ratio - 1) <= BOUND for ratio in ratios):
        verdict = Agreement.AGREE
    elif min(ratios) > 1 + BOUND or max(ratios) < 1 - BOUND:
        verdict = Agreement.DISAGREE
    return Judgement(verdict, median(ratios), min(ratios), max(ratios))


JUDGED = {"tensors": "allocated_bytes", "outside the allocator": "outside_bytes"}
"""The parts of a GPU's memory in which both sides must agree."""

RESIDENT = {"memory": "memory_bytes"}
"""Their replacement on a CPU, for which torch reports no memory."""


def judge_all(pairs: Sequence[Pair], rehearsal: bool = False) -> dict[str, Judgement]:
    same = all((p.harness.steps, p.harness.images) == (p.bare.steps, p.bare.images) for p in pairs)
    judged = {
        "work": Judgement(Agreement.AGREE if same else Agreement.DISAGREE),
        "time": judge([(p.harness.seconds, p.bare.seconds) for p in pairs]),
    }
    for what, field in (RESIDENT if rehearsal else JUDGED).items():
        both = [tuple(getattr(side, field) for side in p) for p in pairs]
        judged[what] = judge([(h, b) if h and b else None for h, b in both])
    return judged


def compare(
    turns: Iterable[tuple[Measurement, Side]], job: Job, unit: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Print what both sides measured in each turn, and whether they agree; return it for JSON."""
    pairs: list[Pair] = []
    for m, bare in turns:
        memory = m.peak_process_bytes if job.gpu_uuid is None else m.peak_device_bytes
        harness = Side(
            m.measured_time_s or 0.0,
            m.measured_steps or 0,
            m.measured_images or 0,
            memory,
            m.peak_allocated_bytes,
            m.peak_reserved_bytes,
        )
        pairs.append(Pair(harness, bare))
        say(f"pair {len(pairs)}: bare {_describe(bare, unit)}; harness {_describe(harness, unit)}")
    rehearsal = job.case.device == "cpu"
    judged = judge_all(pairs, rehearsal)
    for what, judgement in judged.items():
        say(judgement.describe(what))
    if rehearsal:
        say("rehearsal: time and resident memory of a CPU decide nothing")
    return {
        "rehearsal": rehearsal,
        "agree": all(judgement.verdict is Agreement.AGREE for judgement in judged.values()),
        "bound": BOUND,
        "judgements": {what: asdict(judgement) for what, judgement in judged.items()},
        "pairs": [{"harness": asdict(pair.harness), "bare": asdict(pair.bare)} for pair in pairs],
    }


def time_bare(job: Job, samples: int) -> Side:
    """Train a case by the bare loop, on an epoch of ``samples``, while the poller reads the memory.
    Raises UsageError: the loop failed, or on a CPU the poller."""
    case, gpu_uuid = job.case, job.gpu_uuid
    steps = math.ceil(case.fraction * math.ceil(samples / case.batch_size))
    images = case.workload == IMAGES
    # networks are named after their functions in models/dpn.py
    subject = f"model={case.model.replace('-', '_')}" if images else f"workload={case.workload}"
    words = [
        f"--{subject}",
        f"--precision={case.precision}",
        f"--batch-size={case.batch_size}",
        f"--steps={steps}",
        f"--warmup-s={WARMUP_S[case.device]}",
        f"--device={case.device}",
    ]
    with tempfile.TemporaryFile("w+") as readings, tempfile.TemporaryFile("w+") as errors:
        start = partial(subprocess.Popen, stdin=subprocess.PIPE, stderr=errors, text=True)
        bare = start([sys.executable, str(HERE / "bare.py"), *words], stdout=subprocess.PIPE)
        watched = [str(bare.pid), *filter(None, [gpu_uuid])]
        poller = start([sys.executable, str(HERE / "poller.py"), *watched], stdout=readings)
        try:
            while poller.poll() is None and not os.fstat(readings.fileno()).st_size:
                time.sleep(0.01)  # its first reading is the baseline
            answer, _ = bare.communicate("go\n")
            poller.communicate()
        finally:
            for process in (bare, poller):
                process.kill()
                process.wait()
        errors.seek(0)
        if bare.returncode or (poller.returncode and gpu_uuid is None):
            raise refuse_failed(bare.returncode, errors.read())
        readings.seek(0)
        polled = [(float(t), int(b)) for t, b in (line.split() for line in readings)]
    measured: dict[str, Any] = json.loads(answer)
    shared, began, ended = (measured.pop(name) for name in ("shared", "began", "ended"))
    if shared:
        raise UsageError(f"the bare loop shares code with the harness: {shared}")
    memory = find_peak(polled, began, ended, over_baseline=gpu_uuid is not None)
    return Side(memory_bytes=memory, **measured)


def refuse_failed(returncode: int, errors: str) -> UsageError:
    """Return the refusal of a bare loop that failed; the return code of a signal is negative."""
    ends = [f"killed by {name_signal(-returncode)}"] if returncode < 0 else []
    ends += errors.strip().splitlines()[-1:] or ([] if ends else [f"return code {returncode}"])
    return UsageError(f"the bare loop failed: {'; '.join(ends)}")


def find_peak(
    polled: Sequence[tuple[float, int]], began: float, ended: float, *, over_baseline: bool
) -> int | None:
    """Return the largest reading from ``began`` to ``ended``, less the very first if
    ``over_baseline``; None without one. ``polled`` holds times in s and bytes."""
    inside = [size for moment, size in polled if began <= moment <= ended]
    if not inside:
        return None
    return max(inside) - (polled[0][1] if over_baseline else 0)


def _describe(side: Side, unit: str) -> str:
    memory = "memory not read" if side.memory_bytes is None else f"{side.memory_bytes / 1e9:.3f} GB"
    if side.allocated_bytes is not None and side.reserved_bytes is not None:
        unused = (side.reserved_bytes - side.allocated_bytes) / 1e9
        memory += f" ({side.allocated_bytes / 1e9:.3f} in tensors, {unused:.3f} held without use)"
    text = f"{side.seconds:.4f} s, {memory}, {side.images} {unit} in {side.steps} steps"
    if side.batches_s is not None:
        text += f" ({100 * side.batches_s / side.seconds:.1f} % of it making batches)"
    return text
