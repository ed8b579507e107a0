"""Real cases on a CPU, and every figure of their rows but times, as one JSON file.

    python tests/oracle/cases.py TREE OUT.json

They are run by the commands of TREE, a checkout of any commit. Losses are equal bit for bit where
the training is.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TWO = "--precision fp32 bf16-amp"
NET = "--model oracle_networks:small --dataset synthetic"
IMAGES = f"{NET} --steps 10 --batch-size 32"
OWN = "--workload oracle_networks:lines --batch-size 64 --epochs 2"

CASES: dict[str, str] = {
    "fp32 and bf16-amp": f"{IMAGES} {TWO}",
    "fp16, static": f"{IMAGES} --precision fp16 --loss-scale 128 4194304",
    "fp16-amp, dynamic": f"{IMAGES} --precision fp16-amp --loss-scale dynamic",
    "accumulate 3": f"{IMAGES} {TWO} --accumulate 3",
    "DDP of 2": f"{IMAGES} {TWO} --parallel ddp --world-size 2",
    "torch loader": f"{IMAGES} {TWO} --loader torch --workers 2",
    "freeze and start": f"{IMAGES} {TWO} --freeze bn --start {{weights}}",
    "memory limit": f"{NET} --steps 10 {TWO} --batch-size 32 40000 --memory-limit 1GiB",
    "own step": f"{OWN} {TWO} --optimizer adamw",
    "schedule": f"{OWN} {TWO} --schedule cosine --lr-warmup 2 --lr 0.05",
    "evaluation": f"{NET} {TWO} --batch-size 1000 --epochs 2 --evaluate on",
    "run again": f"{IMAGES} --precision fp32 --optimizer adamw --repeats 2",
}
"""The flags of each sweep; one run of each case, unless it says otherwise."""

KILLED = f"--workload oracle_networks:slow_lines --batch-size 64 {TWO} --epochs 4 --checkpoint on"
"""A sweep that is killed once its case has written a checkpoint, and continued."""

OF_THE_RUN = re.compile(
    r".*(_s|_per_s|_bytes|_j|_w|_mhz|_c|_cores|_index|_at)$|rate_.*|rates_.*|epoch_time_error|"
    r"record_id|schema|session|log|host|commit|code|bench|neighbours.*|shared|notes|proof_notes|"
    r"variables|missing|retries|alloc_.*|warmup_steps|warmup_steady|slowest_rank|other_cores|"
    r"loader_.*|model_source|start|start_fingerprint|lane|reason"
)
"""Columns that differ between two runs of one commit: times, memory, the machine's state."""

FAILED = 1


def run(tree: Path, out: Path, flags: str, killed: bool = False) -> None:
    """Run a sweep of TREE. If ``killed``, end it with all that it started by SIGKILL once a
    checkpoint is there, and run it again. Raises RuntimeError: it did not end well."""
    command = [sys.executable, "-m", "bench.sweep", *flags.split(), "--device", "cpu"]
    command += ["--out", str(out), *([] if "--repeats" in flags else ["--repeats", "1"])]
    paths = [str(tree), str(HERE), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    own |= {"BENCH_YARDSTICK_S": "0"}
    log = out.with_suffix(".log")
    with log.open("w") as said:
        process = subprocess.Popen(
            command, cwd=tree, env=os.environ | own, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        if killed:
            end = time.monotonic() + 300
            while not [*out.rglob("last.pt")] and process.poll() is None:
                if time.monotonic() > end:
                    raise RuntimeError("no checkpoint within 300 s")
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            run(tree, out, flags)
        elif process.wait() not in (0, FAILED):
            raise RuntimeError(f"{' '.join(command)}: rc {process.returncode}\n{log.read_text()}")


def read(out: Path) -> dict[str, Any]:
    """Return the rows of a sweep: of each run its columns but those `OF_THE_RUN`, and the tables
    beside it, in the order of cases and repeats."""
    found: dict[str, Any] = {}
    runs: dict[str, str] = {}
    with (out / "records.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            axes = "precision loss_scale batch_size repeat attempt sentinel"
            name = " ".join(row[axis] for axis in axes.split())
            runs[row["record_id"]] = name
            found[name] = {key: value for key, value in row.items() if not OF_THE_RUN.match(key)}
    for table in ("steps.csv", "epochs.csv"):
        if (file := out / table).is_file():
            with file.open(newline="") as opened:
                for row in csv.DictReader(opened):
                    if name := runs.get(row["record_id"], ""):
                        kept = {k: v for k, v in row.items() if not OF_THE_RUN.match(k)}
                        found[name].setdefault(table, []).append(kept)
    return found


def main(tree: Path, file: Path) -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch, "weights.pt")
        make = (
            "import sys, torch, oracle_networks; torch.manual_seed(7); "
            "torch.save(oracle_networks.small().state_dict(), sys.argv[1])"
        )
        path = os.pathsep.join([str(tree), str(HERE)])
        subprocess.run(
            [sys.executable, "-c", make, str(weights)], check=True, cwd=tree,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        for name, flags in CASES.items():
            out = Path(scratch, name.replace(" ", "-"))
            run(tree, out, flags.format(weights=weights))
            found[name] = read(out)
            print(f"{name}: {len(found[name])} rows", file=sys.stderr)
        out = Path(scratch, "killed")
        run(tree, out, KILLED, killed=True)
        found["checkpoint and kill"] = read(out)
    file.write_text(json.dumps(found, indent=0), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
