"""`python -m bench.overhead`: measure the time that the harness itself adds to an epoch.

The same case is trained by a bare loop (same network, images, warm-up and steps; no sampler, no
events, no step clock, no records) and by the harness, in turn, each in a fresh process. The last
line printed is the ratio of their epoch times and its spread; the line before it is the time of the
harness's process that is neither warm-up nor training, and its parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bench.axis import Value
from bench.case import Case
from bench.environment import ask, has_cuda
from bench.errors import UsageError
from bench.executors import Executor, Job, Settings, build_executor
from bench.flags import Parser, add_axes, command, describe, read_axes
from bench.grid import grid
from bench.record import BESIDE, Measurement, Status
from bench.sweep.preflight import gather_inputs, list_examined


@command
def main(argv: Sequence[str]) -> int:
    """Time harness and bare loop in turn. Raises UsageError: the case is not one,
    or cannot be measured here."""
    parser = Parser(
        prog="python -m bench.overhead",
        usage="%(prog)s [--AXIS VALUE] [--pairs N] [--data-dir DIR] [--json]",
        description=describe(__doc__),
    )
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="pairs to measure (5)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10 is")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    add_axes(parser, "of the case; default on a GPU: dpn92, fp16, batch 512")
    given = parser.parse(argv)
    if given.pairs < 1:
        raise UsageError(f"--pairs {given.pairs}: give a whole number of at least 1")
    cuda = has_cuda()
    defaults: dict[str, list[Value]] = (
        {"device": ["cuda"], "precision": ["fp16"], "batch_size": [512], "fraction": [0.5]}
        if cuda
        else {"device": ["cpu"], "model": ["dpn-small"], "fraction": [0.1]}
    )
    axes = read_axes(given)
    cases = grid({**defaults, "dataset": ["synthetic"], **axes})
    if len(cases) > 1:
        raise UsageError(f"{len(cases)} cases are given; give one value for each axis")
    (case,) = cases
    asked = ask([case.device], list_examined([case]))
    inputs = gather_inputs([case], asked, axes, given.data_dir)
    case = inputs.settle(case)
    platform, folder = inputs.platforms[case.device], inputs.data(case).folder
    where = platform.environment.gpu or platform.environment.cpu
    out = sys.stderr if given.json else sys.stdout
    print(
        f"{case.model}, {case.label()}, {case.dataset}, fraction {case.fraction:g}, on {where}",
        file=out,
    )
    job = Job(case, folder, platform.environment.gpu_uuid)
    settings = Settings(allow_shared=True)
    ratios, measured = [], []
    with closing(build_executor("subprocess", settings)) as executor:
        for pair in range(given.pairs):
            # whichever goes first may find a cooler machine, so they take turns at it
            if pair % 2 == 0:
                bare_s = time_bare(job)
            measured.append(measure_case(executor, job))
            if pair % 2:
                bare_s = time_bare(job)
            harness_s = measured[-1].measured_time_s or 0.0
            ratios.append(harness_s / bare_s)
            print(
                f"pair {pair + 1}: bare {bare_s:.4f} s, harness {harness_s:.4f} s, "
                f"ratio {ratios[-1]:.4f}",
                file=out,
            )
    parts = {name: median(getattr(m, name) or 0.0 for m in measured) for name in BESIDE}
    said = ", ".join(f"{label} {parts[name]:.2f}" for name, label in BESIDE.items())
    print(f"seconds beside training: {sum(parts.values()):.2f} ({said})", file=out)
    print(f"overhead: harness / bare = {median(ratios):.4f} ({describe_spread(ratios)})", file=out)
    if given.json:
        answer = {
            "case": asdict(case),
            "on": where,
            "ratio": median(ratios),
            "ratios": ratios,
            "beside_s": sum(parts.values()),
            "beside": parts,
        }
        print(json.dumps(answer, indent=2))
    return 0


def describe_spread(ratios: Sequence[float]) -> str:
    """Say what the ratio printed last is, and how far the pairs lie apart.

    >>> describe_spread([1.01]), describe_spread([1.01, 0.99, 1.0])
    ('one pair: its spread is unknown; use --pairs 5', 'median of 3; 0.9900 to 1.0100')
    """
    if len(ratios) == 1:
        return "one pair: its spread is unknown; use --pairs 5"
    return f"median of {len(ratios)}; {min(ratios):.4f} to {max(ratios):.4f}"


def measure_case(executor: Executor, job: Job) -> Measurement:
    """Measure a case as a sweep does. Raises UsageError: it cannot be measured here."""
    outcome = executor.run(job, lambda event: None, lambda: False)
    if outcome.status is not Status.OK or outcome.measurement.measured_time_s is None:
        raise UsageError(f"the case ended as {outcome.status}: {outcome.reason}; choose another")
    return outcome.measurement


def time_bare(job: Job) -> float:
    """Train a case by the bare loop in a fresh process; the same steps' seconds. Raises UsageError:
    it failed."""
    asked = json.dumps({"case": asdict(job.case), "folder": job.folder})
    command = [sys.executable, "-c", "from bench.overhead import _train; _train()"]
    answer = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise UsageError(f"the bare loop failed: {answer.stderr.strip().splitlines()[-1]}")
    return float(answer.stdout)


def _train() -> None:
    """The bare loop: read a job from standard input, print seconds."""
    from bench.training.timing import synchronize
    from bench.worker.preparation import count_steps, set_up, start_over, warm_up_shapes

    job = json.loads(sys.stdin.read())
    case = Case(**job["case"])
    _, batches, training = set_up(case, job["folder"])
    device = training.device
    steps = count_steps(case, batches)
    warm_up_shapes(training, batches, case, lambda step, loss: None)
    start_over(training, batches, case)
    start = time.perf_counter()
    for index in range(case.epochs):
        for batch in batches.divide(index, steps):
            training.step(batch)
    synchronize(device)
    print(time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
