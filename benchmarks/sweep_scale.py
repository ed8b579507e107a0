"""How long a sweep of many cases takes that trains nothing, and the same command once all is there.

`python -m benchmarks.sweep_scale` prints the figures; asv tracks the same.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report_scale import WITH_FAKE

CASES = 10_000
SIDE = 100
"""Batch sizes, and as many cases of each as learning rates."""


def measure(folder: Path, cases: int) -> float:
    """CPU seconds of a sweep by the tests' fake executor into a folder, with its report."""
    sizes = [str(2 + size) for size in range(min(SIDE, cases))]
    rates = [f"{(1 + rate) / 1000:g}" for rate in range(-(-cases // SIDE))]
    command = [sys.executable, "-m", "with_fake", "bench.sweep", "--executor", "fake"]
    command += ["--preset", "quick"]
    command += ["--precision", "fp32", "--batch-size", *sizes, "--lr", *rates, "--model", "dpn92"]
    command += ["--fraction", "1", "--repeats", "1", "--out", str(folder)]
    before = _read_clock()
    done = subprocess.run(command, env=WITH_FAKE, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return _read_clock() - before


def _read_clock() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def setup_cache() -> dict[str, float]:
    """Both, in turn: the second finds every row there."""
    with tempfile.TemporaryDirectory() as place:
        return {which: measure(Path(place, "sweep"), CASES) for which in PARTS}


PARTS = ("all to run", "nothing to run")

vars(setup_cache).update(timeout=600, pretty_source="")


def track_cpu_s(measured: dict[str, float], part: str) -> float:
    """CPU seconds of a sweep of 10,000 cases that trains nothing, from start to its report."""
    return measured[part]


vars(track_cpu_s).update(
    pretty_name="CPU time of a sweep of 10,000 cases that trains nothing",
    unit="seconds",
    version="2",
    timeout=60,
    param_names=["sweep"],
    params=[list(PARTS)],
    pretty_source=track_cpu_s.__doc__,
)

if __name__ == "__main__":
    for part, seconds in setup_cache().items():
        print(f"{part:15} {seconds:5.1f} s of CPU")
