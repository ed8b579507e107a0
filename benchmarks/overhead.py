"""What the harness adds: one case by a loop in plain torch and by `bench.sweep`, in turns.

`python -m benchmarks.overhead` prints how long the same steps took either, and the ratio; on a GPU
that of the peaks of their tensors too. asv tracks the ratio as `Overhead`.
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

BARE = str(Path(__file__).with_name("bare.py"))
GRID: dict[str, Any] = json.loads(os.environ.get("BENCH_ASV_GRID", "{}"))
NAMES = ("model", "precision", "batch_size", "fraction", "pairs")
USUAL = {"cuda": ("dpn92", "bf16-amp", 256, 0.2, 3), "cpu": ("dpn-small", "fp32", 64, 0.01, 1)}


def read_case(words: list[str] | None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    add = parser.add_argument
    add("--device", choices=[*USUAL], default="cuda")
    add("--model", help="a network of bench/models/dpn.py")
    # those whose plain torch idiom is two lines
    add("--precision", choices=["fp32", "tf32", "bf16-amp"])
    add("--batch-size", type=int)
    add("--fraction", type=float, help="part of the epoch to measure")
    add("--compile", action="store_true")
    add("--cudnn-benchmark", action="store_true")
    add("--pairs", type=int, help="how often either is measured")
    given = vars(parser.parse_args(words))
    usual = zip(NAMES, USUAL[given["device"]], strict=True)
    return given | {name: value for name, value in usual if given[name] is None}


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"return code {done.returncode}"]
        raise RuntimeError(f"{command[0]} {command[1][:20]} failed: {last[0]}")
    return done.stdout


def measure_bare(case: dict[str, Any]) -> dict[str, Any]:
    steps = math.ceil(case["fraction"] * math.ceil(IMAGES / case["batch_size"]))
    asked = case | {"steps": steps, "models": str(Path(bench.__file__).with_name("models"))}
    told: dict[str, Any] = json.loads(run(BARE, json.dumps(asked)))
    if told["shared"]:
        raise RuntimeError(f"the bare loop shares code with the harness: {told['shared']}")
    return told


def measure_harness(case: dict[str, Any]) -> dict[str, Any]:
    words = [f"--{name.replace('_', '-')}={case[name]}" for name in ("device", *NAMES[:4])]
    words += ["--compile"] * case["compile"] + ["--cudnn-benchmark"] * case["cudnn_benchmark"]
    with tempfile.TemporaryDirectory() as out:
        run("-m", "bench.sweep", *words, "--dataset=synthetic", "--repeats=1", f"--out={out}")
        with (Path(out) / "records.csv").open(encoding="utf-8", newline="") as file:
            *_, row = csv.DictReader(file)
    if row["status"] != "ok":
        raise RuntimeError(f"the case ended as {row['status']}: {row['reason']}")
    told = {"seconds": float(row["measured_time_s"]), "images": int(row["measured_images"])}
    return told | {"tensors": float(row["peak_allocated_bytes"] or "nan")}


def compare(case: dict[str, Any]) -> float:
    """Measure and print the pairs; return the median ratio of the times."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    ratios: list[float] = []
    for number in range(case["pairs"]):
        # whichever goes first may find a cooler machine, so they take turns at it
        bare = None if number % 2 else measure_bare(case)
        harness = measure_harness(case)
        bare = bare or measure_bare(case)
        if bare["images"] != harness["images"]:
            raise RuntimeError(f"{bare['images']} images by the loop, {harness['images']} by us")
        pairs.append((bare, harness))
        print(f"bare {bare['seconds']:.4f} s, harness {harness['seconds']:.4f} s", flush=True)
    for what in ("tensors", "seconds") if case["device"] == "cuda" else ("seconds",):
        ratios = [harness[what] / bare[what] for bare, harness in pairs]
        spread = f"{min(ratios):.4f} to {max(ratios):.4f}, pairs: {len(ratios)}"
        print(f"{what}: harness / bare = {median(ratios):.4f} ({spread})")
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
        return compare(read_case(["--device", GRID.get("device", "cpu")]))


if __name__ == "__main__":
    compare(read_case(None))
