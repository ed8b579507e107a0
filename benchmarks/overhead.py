"""What the harness adds: one case by a loop in plain torch and by `bench.sweep`, in turns.

`python -m benchmarks.overhead` prints how long the same steps took either, and the ratio, which asv
tracks as `Overhead`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import bench
from benchmarks.bare import IMAGES

BARE = Path(__file__).with_name("bare.py")
GRID: dict[str, Any] = json.loads(os.environ.get("BENCH_ASV_GRID", "{}"))
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {"model": "dpn92", "precision": "bf16-amp", "batch_size": 256, "fraction": 0.2},
    "cpu": {"model": "dpn-small", "precision": "fp32", "batch_size": 64, "fraction": 0.01},
}
"""What is measured on a device; of the precisions those whose plain torch idiom is two lines."""


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[:2]} failed: {done.stderr.strip()[-300:]}")
    return done.stdout


def measure_bare(case: dict[str, Any]) -> tuple[float, int]:
    """Seconds of the steps, and their images, by the loop."""
    steps = math.ceil(case["fraction"] * math.ceil(IMAGES / case["batch_size"]))
    asked = case | {"steps": steps, "models": str(Path(bench.__file__).with_name("networks"))}
    answer: dict[str, Any] = json.loads(run(str(BARE), json.dumps(asked)))
    if answer["shared"]:
        raise RuntimeError(f"the bare loop shares code with the harness: {answer['shared']}")
    return answer["seconds"], answer["images"]


def measure_harness(case: dict[str, Any]) -> tuple[float, int]:
    """Seconds of the steps, and their images, by bench.sweep."""
    names = ("device", "model", "precision", "batch_size", "fraction")
    words = [f"--{name.replace('_', '-')}={case[name]}" for name in names]
    with tempfile.TemporaryDirectory() as out:
        run("-m", "bench.sweep", *words, "--dataset=synthetic", "--repeats=1", f"--out={out}")
        with (Path(out) / "records.csv").open(encoding="utf-8", newline="") as file:
            *_, row = csv.DictReader(file)
    if row["status"] != "ok":
        raise RuntimeError(f"the case ended as {row['status']}: {row['reason']}")
    return float(row["measured_time_s"]), int(row["measured_images"])


def compare(device: str, pairs: int) -> float:
    """Measure and print the pairs; return the median ratio of the times."""
    ratios: list[float] = []
    case = {"device": device, **USUAL[device]}
    for number in range(pairs):
        # whichever goes first may find a cooler machine, so they take turns at it
        order = (measure_bare, measure_harness)[:: -1 if number % 2 else 1]
        found = {measure: measure(case) for measure in order}
        (bare, images), (harness, same) = found[measure_bare], found[measure_harness]
        if images != same:
            raise RuntimeError(f"{images} images by the loop, {same} by the harness")
        ratios.append(harness / bare)
        print(f"bare {bare:.4f} s, harness {harness:.4f} s", flush=True)
    spread = f"{min(ratios):.4f} to {max(ratios):.4f}, pairs: {len(ratios)}"
    print(f"seconds: harness / bare = {median(ratios):.4f} ({spread})")
    return median(ratios)


class Overhead:
    """The harness beside a loop in plain torch, for asv."""

    timeout = 1800.0
    version = "1"
    unit = "of the bare loop"

    def track_time_ratio(self) -> float:
        """Time of the same steps by the harness, over that of a loop in plain torch."""
        if "--executor" in GRID.get("flags", []):
            return math.nan  # nothing is trained, so there is nothing to compare
        return compare(GRID.get("device", "cpu"), 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--device", choices=[*USUAL], default="cuda")
    parser.add_argument("--pairs", type=int, default=3, help="how often either is measured")
    given = parser.parse_args()
    compare(given.device, given.pairs)
