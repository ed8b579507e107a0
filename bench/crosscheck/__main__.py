"""`python -m bench.crosscheck`: check time and memory against independent code.

One case is measured by the harness and by a bare training loop with a separate memory poller, in
turn, each in fresh processes. The bare loop and the poller share no code with the harness, except
the network's definition. The ratios of seconds and of peak memory must be within 1 % of 1. Of
memory, what torch's allocator holds without using it is left out: it depends on the order in which
tensors came and went, not on the work.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from bench.case import Case, Value, check_batches, free_axes, grid
from bench.data import prepare
from bench.environment import Platform, has_cuda, probe
from bench.errors import UsageError
from bench.executors import Job, Settings
from bench.flags import (
    CIFAR_ONLY,
    Parser,
    add_axes,
    describe,
    read_axes,
    refuse_other_data,
    run_command,
)
from bench.precision import PRECISIONS
from bench.record import Status

HERE = Path(__file__).parent
_WITHOUT = (*CIFAR_ONLY, *free_axes("loader"))
"""Axes without a flag here: the bare loop makes its batches on the device."""

BOUND = 0.01
"""Harness and bare loop are to agree within this."""

MODELS = {"dpn92": "dpn92", "dpn26": "dpn26", "dpn-small": "dpn_small"}
PRECISIONS_HERE = ("fp32", "bf16-amp")  # those whose plain torch idiom is two lines
WARMUP_S = {"cuda": 5.0, "cpu": 1.0}


@dataclass(frozen=True)
class Side:
    """What one side measured of the same steps; memory in bytes, None where it cannot be read.

    ``unused_bytes`` of the memory is what torch's allocator held but did not use: its peak of
    reserved less that of allocated bytes; None on a CPU. ``batches_s`` is what making the steps'
    batches takes by itself, which the bare loop measures: the one part of the work that the two
    sides write differently.
    """

    seconds: float
    steps: int
    images: int
    memory_bytes: int | None
    unused_bytes: int | None = None
    batches_s: float | None = None

    @property
    def used_bytes(self) -> int | None:
        """The memory less what the allocator did not use.

        On an H100, bf16-amp at batch 256 took 8,635 MiB, of which 1,660 were unused: 1.8 % between
        two loops of the same work can be that alone.
        """
        return self.memory_bytes and self.memory_bytes - (self.unused_bytes or 0)


@dataclass(frozen=True)
class Pair:
    """Both sides of one turn."""

    harness: Side
    bare: Side


class Verdict(StrEnum):
    """What the ratios of all pairs come to."""

    AGREE = "agree"
    DISAGREE = "disagree"
    UNCLEAR = "unclear"
    NOT_READ = "not read"


@dataclass(frozen=True)
class Judgement:
    """Harness over bare: the median ratio, its range over the pairs, and the verdict."""

    verdict: Verdict
    ratio: float | None = None
    lowest: float | None = None
    highest: float | None = None

    def describe(self, what: str) -> str:
        """One line for people."""
        if self.ratio is None:
            return f"{what}: {self.verdict}"
        return (
            f"{what}: harness / bare = {self.ratio:.4f} ({self.lowest:.4f} to {self.highest:.4f}): "
            f"{self.verdict} ({100 * BOUND:g} %)"
        )


def judge(pairs: Sequence[tuple[float, float] | None]) -> Judgement:
    """Compare readings, (harness, bare) a pair; None where one of them could not be read.

    They agree where every ratio is within `BOUND` of 1, and disagree where all are outside on the
    same side. Anything else is unclear: the machine is too restless to tell.

    >>> judge([(1.2, 1.0), (1.21, 1.0)]).verdict
    <Verdict.DISAGREE: 'disagree'>
    """
    ratios = [harness / bare for harness, bare in filter(None, pairs)]
    if not ratios or len(ratios) < len(pairs):
        return Judgement(Verdict.NOT_READ)
    verdict = Verdict.UNCLEAR
    if all(abs(ratio - 1) <= BOUND for ratio in ratios):
        verdict = Verdict.AGREE
    elif min(ratios) > 1 + BOUND or max(ratios) < 1 - BOUND:
        verdict = Verdict.DISAGREE
    return Judgement(verdict, median(ratios), min(ratios), max(ratios))


def judge_work(pairs: Sequence[Pair]) -> Verdict:
    """Whether both sides trained the same number of steps and images in every pair."""
    same = all((p.harness.steps, p.harness.images) == (p.bare.steps, p.bare.images) for p in pairs)
    return Verdict.AGREE if same else Verdict.DISAGREE


def judge_all(pairs: Sequence[Pair]) -> dict[str, Judgement]:
    """The judgements of work, time and memory, by name."""
    memory = [
        (p.harness.used_bytes, p.bare.used_bytes)
        if p.harness.used_bytes and p.bare.used_bytes
        else None
        for p in pairs
    ]
    return {
        "work": Judgement(judge_work(pairs)),
        "time": judge([(p.harness.seconds, p.bare.seconds) for p in pairs]),
        "memory": judge(memory),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Cross-check.

    Returns:
        0 where both agree, and on a CPU, which can only rehearse; 1 where they do not; 2 for a
        usage error.
    """
    return run_command(crosscheck, argv)


def crosscheck(argv: Sequence[str]) -> int:
    """Measure in pairs and judge; the return code.

    Raises:
        UsageError: the case is not one that the bare loop can train, or it failed.
    """
    refuse_other_data(argv, "bench.crosscheck")
    parser = Parser(
        prog="python -m bench.crosscheck", description=describe(__doc__), allow_abbrev=False
    )
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="pairs to measure (3)")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    add_axes(
        parser,
        "of the case; default on a GPU: dpn92, bf16-amp, batch 256, fraction 0.2",
        without=_WITHOUT,
    )
    given = parser.parse(argv)
    if given.pairs < 1:
        raise UsageError(f"--pairs {given.pairs}: give a whole number of at least 1")
    axes = read_axes(given, without=_WITHOUT)
    platform = probe(
        "cuda" if axes.get("device", ["cuda" if has_cuda() else "cpu"])[0] == "cuda" else "cpu"
    )
    case = choose_case(axes, platform)
    data = prepare(case.dataset, data_dir=None)
    check_batches(case, data.train_images)
    rehearsal, where = platform.environment.gpu is None, platform.environment.gpu or "a CPU"
    out = sys.stderr if given.json else sys.stdout
    print(f"{case.model}, {case.label()}, fraction {case.fraction:g}, on {where}", file=out)
    pairs: list[Pair] = []
    for number in range(given.pairs):
        # whichever goes first may find a cooler machine, so they take turns at it
        if number % 2 == 0:
            bare = time_bare(case, platform.environment.gpu_uuid)
            harness = time_harness(case, data.folder, platform.environment.gpu_uuid)
        else:
            harness = time_harness(case, data.folder, platform.environment.gpu_uuid)
            bare = time_bare(case, platform.environment.gpu_uuid)
        pairs.append(Pair(harness, bare))
        print(
            f"pair {number + 1}: bare {_describe(bare)}; harness {_describe(harness)}",
            file=out,
            flush=True,
        )
    judged = judge_all(pairs)
    for what, judgement in judged.items():
        print(judgement.describe(what), file=out)
    if rehearsal:
        print("rehearsal: time and resident memory of a CPU decide nothing", file=out)
    agree = all(judgement.verdict is Verdict.AGREE for judgement in judged.values())
    if given.json:
        answer = {
            "case": asdict(case),
            "on": where,
            "rehearsal": rehearsal,
            "agree": agree,
            "bound": BOUND,
            "judgements": {what: asdict(judgement) for what, judgement in judged.items()},
            "pairs": [asdict(pair) for pair in pairs],
        }
        print(json.dumps(answer, indent=2))
    return 0 if agree or rehearsal else 1


def choose_case(axes: dict[str, list[Value]], platform: Platform) -> Case:
    """The one case to measure.

    Raises:
        UsageError: several are given, or one that the bare loop cannot train.
    """
    if platform.environment.gpu is None:
        defaults: dict[str, list[Value]] = {
            "device": ["cpu"],
            "model": ["dpn-small"],
            "fraction": [0.05],
            "precision": ["fp32"],
        }
    else:
        native = not platform.discourage(PRECISIONS["bf16-amp"])
        defaults = {
            "device": ["cuda"],
            "precision": ["bf16-amp" if native else "fp32"],
            "batch_size": [256],
            "fraction": [0.2],
        }
    cases = grid({**defaults, "dataset": ["synthetic"], **axes})
    if len(cases) > 1:
        raise UsageError(f"{len(cases)} cases are given; give one value for each axis")
    (case,) = cases
    if case.model not in MODELS:
        raise UsageError(
            f"--model {case.model!r}: the bare loop can only train {', '.join(MODELS)}"
        )
    if case.precision not in PRECISIONS_HERE:
        right = " or ".join(PRECISIONS_HERE)
        raise UsageError(f"--precision {case.precision}: the bare loop can only train {right}")
    plain = Case(
        model=case.model,
        dataset="synthetic",
        precision=case.precision,
        batch_size=case.batch_size,
        fraction=case.fraction,
        device=case.device,
    )
    if case != plain:
        raise UsageError(
            "the bare loop supports --model, --precision, --batch-size, --fraction and --device; "
            "leave out the other axes"
        )
    return case


def time_harness(case: Case, folder: str, gpu_uuid: str | None) -> Side:
    """Measure ``case`` as a sweep does.

    Raises:
        UsageError: it cannot be measured here.
    """
    from bench.executors.subprocess import SubprocessExecutor

    outcome = SubprocessExecutor(Settings(allow_shared=True)).run(
        Job(case, folder, gpu_uuid), lambda event: None, lambda: False
    )
    m = outcome.measurement
    if outcome.status is not Status.OK:
        raise UsageError(f"the case ended as {outcome.status}: {outcome.reason}; choose another")
    assert m.measured_time_s is not None
    assert m.measured_steps is not None
    assert m.measured_images is not None
    memory = m.peak_process_bytes if gpu_uuid is None else m.peak_device_bytes
    unused = None
    if m.peak_reserved_bytes is not None and m.peak_allocated_bytes is not None:
        unused = m.peak_reserved_bytes - m.peak_allocated_bytes
    return Side(m.measured_time_s, m.measured_steps, m.measured_images, memory, unused)


def time_bare(case: Case, gpu_uuid: str | None) -> Side:
    """Train ``case`` by the bare loop while the poller reads the memory.

    Raises:
        UsageError: one of them failed.
    """
    steps = math.ceil(case.fraction * math.ceil(50_000 / case.batch_size))
    flags = {
        "model": MODELS[case.model],
        "precision": case.precision,
        "batch-size": case.batch_size,
        "steps": steps,
        "warmup-s": WARMUP_S[case.device],
        "device": case.device,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryFile("w+") as readings, tempfile.TemporaryFile("w+") as errors:
        bare = subprocess.Popen(
            [sys.executable, str(HERE / "bare.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        poller = subprocess.Popen(
            [sys.executable, str(HERE / "poller.py"), str(bare.pid), *filter(None, [gpu_uuid])],
            stdin=subprocess.PIPE,
            stdout=readings,
            stderr=errors,
            text=True,
        )
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
        said = errors.read().strip().splitlines()
        if bare.returncode or (poller.returncode and gpu_uuid is None):
            raise UsageError(f"the bare loop failed: {said[-1] if said else bare.returncode}")
        readings.seek(0)
        polled = [(float(t), int(b)) for t, b in (line.split() for line in readings)]
    measured: dict[str, Any] = json.loads(answer)
    if measured["shared"]:
        raise UsageError(f"the bare loop shares code with the harness: {measured['shared']}")
    return Side(
        measured["seconds"],
        measured["steps"],
        measured["images"],
        find_peak(polled, measured["began"], measured["ended"], over_baseline=gpu_uuid is not None),
        measured["unused_bytes"],
        measured["batches_s"],
    )


def find_peak(
    polled: Sequence[tuple[float, int]], began: float, ended: float, *, over_baseline: bool
) -> int | None:
    """The largest reading from ``began`` to ``ended``; on a card, less the first of all.

    Args:
        polled: readings in order: time in s, bytes.
    """
    inside = [size for moment, size in polled if began <= moment <= ended]
    if not inside:
        return None
    return max(inside) - (polled[0][1] if over_baseline else 0)


def _describe(side: Side) -> str:
    memory = "memory not read" if side.memory_bytes is None else f"{side.memory_bytes / 1e9:.3f} GB"
    if side.unused_bytes is not None:
        memory += f" ({side.unused_bytes / 1e9:.3f} GB of it held by the allocator without use)"
    text = f"{side.seconds:.4f} s, {memory}, {side.images} images in {side.steps} steps"
    if side.batches_s is not None:
        text += f" ({100 * side.batches_s / side.seconds:.1f} % of it making batches)"
    return text


if __name__ == "__main__":
    sys.exit(main())
