"""The overhead of the harness in an epoch, compared with a bare loop of its own parts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from bench.case import Case
from bench.crosscheck.agreement import refuse_failed
from bench.executors import Job
from bench.record import BESIDE, Measurement


def measure_overhead(
    turns: Iterable[tuple[Measurement, float]], say: Callable[[str], None]
) -> dict[str, Any]:
    """Print how much longer an epoch takes under the harness, and where the rest of its time goes.
    Return all of it for JSON."""
    ratios, measured = [], []
    for m, bare_s in turns:
        harness_s = m.measured_time_s or 0.0
        measured.append(m)
        ratios.append(harness_s / bare_s)
        times = f"bare {bare_s:.4f} s, harness {harness_s:.4f} s"
        say(f"pair {len(ratios)}: {times}, ratio {ratios[-1]:.4f}")
    parts = {name: median(getattr(m, name) or 0.0 for m in measured) for name in BESIDE}
    beside_s = sum(parts.values())
    said = ", ".join(f"{label} {parts[name]:.2f}" for name, label in BESIDE.items())
    say(f"seconds beside training: {beside_s:.2f} ({said})")
    say(f"overhead: harness / bare = {median(ratios):.4f} ({describe_spread(ratios)})")
    return {"ratio": median(ratios), "ratios": ratios, "beside_s": beside_s, "beside": parts}


def describe_spread(ratios: Sequence[float]) -> str:
    """Describe the ratio that is printed last, and the spread of the pairs.

    >>> describe_spread([1.01]), describe_spread([1.01, 0.99, 1.0])
    ('one pair: its spread is unknown; use --pairs 5', 'median of 3; 0.9900 to 1.0100')
    """
    if len(ratios) == 1:
        return "one pair: its spread is unknown; use --pairs 5"
    return f"median of {len(ratios)}; {min(ratios):.4f} to {max(ratios):.4f}"


def time_bare(job: Job) -> float:
    """Train a case by the bare loop in a fresh process. Return the seconds of the same steps.
    Raises UsageError: it failed."""
    asked = json.dumps({"case": asdict(job.case), "folder": job.folder})
    command = [sys.executable, "-c", "from bench.crosscheck.overhead import _train; _train()"]
    answer = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise refuse_failed(answer.returncode, answer.stderr)
    return float(answer.stdout)


def _train() -> None:
    """Run the bare loop: read a job from standard input, print the seconds."""
    from bench.training.timing import synchronize
    from bench.worker.preparation import count_steps, set_up, start_over, warm_up_shapes

    job = json.loads(sys.stdin.read())
    case = Case(**job["case"])
    _, batches, training = set_up(case, job["folder"])
    steps = count_steps(case, batches)
    warm_up_shapes(training, batches, case, lambda step, loss: None)
    start_over(training, batches, case)
    start = time.perf_counter()
    for index in range(case.epochs):
        for batch in batches.divide(index, steps):
            training.step(batch)
    synchronize(training.device)
    print(time.perf_counter() - start)
