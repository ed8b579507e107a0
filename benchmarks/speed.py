"""How long the harness itself takes over many cases: `python -m benchmarks.speed`.

Nothing is trained. A sweep of 10,000 cases by the tests' fake executor, the same command once all
is there, and the report of it. asv tracks the same.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SIDE = 100
"""Batch sizes, and as many learning rates of each."""

PATHS = [str(Path(__file__).parents[1] / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
WITH_FAKE = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "BENCH_RATES_S": "0"}
"""The environment in which the tests' executor, which trains nothing, is found."""


def measure(*command: str) -> float:
    """CPU seconds of a command of the commit's own harness."""
    words = [sys.executable, "-m", *command]
    # in the current folder, where asv has no bench: the commit's is on the path
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, env=WITH_FAKE, capture_output=True, text=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime


def setup_cache() -> dict[str, float]:
    """All parts, in turn: the second finds every row of the first there."""
    sizes = [str(2 + size) for size in range(SIDE)]
    rates = [f"{(1 + rate) / 1000:g}" for rate in range(SIDE)]
    sweep = ["with_fake", "bench.sweep", "--executor", "fake", "--preset", "quick"]
    sweep += ["--precision", "fp32", "--batch-size", *sizes, "--lr", *rates, "--model", "dpn92"]
    sweep += ["--fraction", "1", "--repeats", "1", "--no-report"]
    with tempfile.TemporaryDirectory() as out:
        page = f"{out}/report.html"
        commands = (
            [*sweep, "--out", out],
            [*sweep, "--out", out],
            ["bench.report", out],
            ["bench.report", out, "--format", "html", "-o", page],
        )
        return dict(zip(PARTS, (measure(*command) for command in commands), strict=True))


PARTS = ("a sweep, all to run", "a sweep, nothing to run", "a report as text", "a report as HTML")

vars(setup_cache).update(timeout=600, pretty_source="")


def track_cpu_s(measured: dict[str, float], part: str) -> float:
    """CPU seconds of the harness over 10,000 cases that are not trained."""
    return measured[part]


vars(track_cpu_s).update(
    pretty_name="CPU time of the harness over 10,000 cases",
    unit="seconds",
    version="1",
    timeout=60,
    param_names=["part"],
    params=[list(PARTS)],
    pretty_source=track_cpu_s.__doc__,
)

if __name__ == "__main__":
    for part, seconds in setup_cache().items():
        print(f"{part:24} {seconds:5.1f} s of CPU")
