"""How long the report takes on few records, many cases and many records, and how much memory.

`python -m benchmarks.report_scale` prints the figures; asv runs the same as `ReportScale`.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from itertools import islice, product
from pathlib import Path

SWEEPS = {
    "50 records": (50, 1),
    "10,000 cases": (10_000, 1),
    "100,000 records of 200 cases": (100_000, 500),
}
"""Records and repeats of a case, by name."""
PRECISIONS = ("fp32", "fp16", "fp16-amp", "bf16", "bf16-amp")
PATHS = [str(Path(__file__).parents[1] / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
WITH_FAKE = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "BENCH_YARDSTICK_S": "0"}
"""The environment in which the tests' executor, which trains nothing, is found."""
FITS, FULL = "32", "64"
"""Batch sizes of the rows that the others are made of: one measured, one out of memory."""


def sweep(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of a sweep of the commit's own harness, by precision and batch size.

    The tests' fake executor trains nothing, and each row names it.
    """
    command = [sys.executable, "-m", "with_fake", "bench.sweep", "--executor", "fake"]
    command += ["--preset", "quick"]
    command += ["--precision", *PRECISIONS, "--batch-size", FITS, FULL, "--model", "dpn92"]
    command += ["--fraction", "1", "--device", "cuda", "--out", str(folder)]
    answers = {"BENCH_FAKE_ANSWERS": f"batch_size={FULL}:oom"}
    done = subprocess.run(command, env=WITH_FAKE | answers, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    with (folder / "records.csv").open(encoding="utf-8", newline="") as file:
        return {(row["precision"], row["batch_size"]): row for row in csv.DictReader(file)}


def write_records(folder: Path, records: int, repeats: int) -> Path:
    """Write a sweep of made-up records: four cards, forty batch sizes, five precisions.

    They are rows that the harness itself wrote, with other values in some columns, so that a column
    that comes later has what a sweep puts into it.
    """
    rows = sweep(folder)
    rates = range(-(-records // (800 * repeats)))
    places = product(rates, range(40), range(5), range(4), range(1, repeats + 1))
    with (folder / "records.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[PRECISIONS[0], FITS]), lineterminator="\n")
        writer.writeheader()
        for i, (rate, size, p, card, repeat) in islice(enumerate(places), records):
            seconds = (40 + card * 10 + 3 * size) / (1 + p) * (1 + repeat / 500)
            batch = 32 * (size + 1)
            row = {
                "record_id": f"r{i}",
                "batch_size": batch,
                "lr": f"{0.001 * (rate + 1):.3f}",
                "repeat": repeat,
                "gpu": f"Made-up card {card + 1}",
                "gpu_memory_bytes": 24 << 30,
                "driver": "580.95.05",
                "torch": "2.13.0",
            }
            fits = batch <= 1152
            if fits:
                row |= {
                    "epoch_time_s": f"{seconds:.4f}",
                    "measured_time_s": f"{seconds:.4f}",
                    "measured_images": 50000,
                    "images_per_s": f"{50000 / seconds:.3f}",
                    "peak_device_bytes": (1 << 30) + batch * (20 << 20),
                    "train_loss": f"{2 + size / 100:.4f}",
                    "train_accuracy": f"{0.3 - size / 400:.4f}",
                    "energy_j": f"{seconds * 300:.1f}",
                    "warmup_steady": "on",
                }
            writer.writerow(rows[PRECISIONS[p], FITS if fits else FULL] | row)
    return folder


_MEASURE = """
import resource, sys, time
start = time.perf_counter()
from bench.report.__main__ import main
code = main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(code, time.perf_counter() - start, peak * (1 if sys.platform == "darwin" else 1024))
"""


def measure(folder: Path, format: str) -> tuple[float, int, int]:
    """Seconds, peak resident bytes and bytes written of one report, in a process of its own."""
    out = folder / f"report.{format}"
    command = [sys.executable, "-c", _MEASURE, str(folder), "--format", format, "-o", str(out)]
    # in the current folder, where asv has no bench: the commit's is on the path
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    code, seconds, peak = answer.stdout.split()
    if code != "0":
        raise RuntimeError(answer.stderr)
    return float(seconds), int(peak), out.stat().st_size


class ReportScale:
    """The report of each sweep, for asv."""

    params = (tuple(SWEEPS), ("text", "html"))
    param_names = ("sweep", "format")
    timeout = 300.0
    version = "3"

    def setup_cache(self) -> dict[tuple[str, str], tuple[float, int, int]]:
        """Write the records and measure the report in each format, once for all figures."""
        measured: dict[tuple[str, str], tuple[float, int, int]] = {}
        for name, of in SWEEPS.items():
            folder = write_records(Path.cwd() / "report-scale" / name.replace(" ", "-"), *of)
            measured |= {(name, format): measure(folder, format) for format in self.params[1]}
        return measured

    def track_time_s(
        self, measured: dict[tuple[str, str], tuple[float, int, int]], sweep: str, format: str
    ) -> float:
        """Seconds from start to the written report."""
        return measured[sweep, format][0]

    def track_peak_bytes(
        self, measured: dict[tuple[str, str], tuple[float, int, int]], sweep: str, format: str
    ) -> int:
        """Peak resident set of the reporting process."""
        return measured[sweep, format][1]


vars(ReportScale.setup_cache).update(timeout=600)
ReportScale.track_time_s.unit = "seconds"  # type: ignore[attr-defined]
ReportScale.track_peak_bytes.unit = "bytes"  # type: ignore[attr-defined]


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as place:
        for name, (records, repeats) in SWEEPS.items():
            folder = write_records(Path(place) / str(records), records, repeats)
            print(name)
            for format in ("text", "html", "csv", "json"):
                seconds, peak, size = measure(folder, format)
                print(
                    f"  {format:5} {seconds:5.1f} s  {peak / 1e6:6.0f} MB peak  "
                    f"{size / 1e6:6.2f} MB out"
                )


if __name__ == "__main__":
    main()
