"""What the harness itself adds to an epoch, by `bench.overhead`, as every commit has it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from typing import Any

GRID: dict[str, Any] = json.loads(os.environ.get("BENCH_ASV_GRID", "{}"))

SMALL = ["--device=cpu", "--model=dpn-small", "--batch-size=64", "--fraction=0.01", "--pairs=1"]
LARGE = ["--device=cuda", "--pairs=3"]


def track_overhead() -> float:
    """Epoch time of one case under the harness, over that of a bare loop, trained in turn."""
    flags = LARGE if GRID.get("device") == "cuda" else SMALL
    if "--executor" in GRID.get("flags", []):
        return math.nan  # nothing is trained, so there is nothing to compare
    answer = subprocess.run(
        [sys.executable, "-m", "bench.overhead", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    print(answer.stdout, answer.stderr)
    if "No module named bench.overhead" in answer.stderr:
        return math.nan  # a commit from before it
    found = re.search(r"harness / bare = ([0-9.]+)", answer.stdout)
    if not found:
        raise RuntimeError((answer.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return float(found[1])


vars(track_overhead).update(
    pretty_name="Overhead of the harness",
    unit="of a bare loop",
    version="1",
    timeout=1800,
    pretty_source=track_overhead.__doc__,
)
