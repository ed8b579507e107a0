"""How long the report takes on 100,000 records, and how much memory.

`python benchmarks/report_scale.py` prints the figures; asv runs the same as `ReportScale`.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.record import COLUMNS, SCHEMA

ROOT = Path(__file__).parents[1]
RECORDS = 100_000


def write_records(folder: Path, records: int = RECORDS) -> Path:
    """Write a sweep of generated records, fake ones and marked so: four cards, five repeats."""
    folder.mkdir(parents=True, exist_ok=True)
    precisions = ("fp32", "tf32", "fp16", "bf16", "bf16-amp")
    empty = dict.fromkeys(COLUMNS, "")
    empty |= {
        "schema": str(SCHEMA),
        "run_seed": "0",
        "model": "dpn92",
        "dataset": "cifar10",
        "fraction": "1",
    }
    empty |= {name: "off" for name, c in COLUMNS.items() if c.type is bool}
    empty |= {"device": "cuda", "sentinel": "off", "attempt": "1", "retries": "0"}
    empty |= {"executor": "fake", "seed": "0", "driver": "580.95.05", "torch": "2.13.0"}
    empty |= {"started_at": "2026-11-20T10:00:00", "finished_at": "2026-11-20T10:01:00"}
    empty |= {"train_images": "50000", "test_images": "10000", "warmup_steady": "on"}
    with (folder / "records.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        for i in range(records):
            case, repeat = divmod(i, 5)
            rest, card = divmod(case, 4)
            rest, p = divmod(rest, len(precisions))
            rate, size = divmod(rest, 40)
            seconds = (40 + card * 10 + 3 * size) / (1 + p) * (1 + repeat / 500)
            batch = 32 * (size + 1)
            row = {
                "record_id": f"r{i}",
                "precision": precisions[p],
                "loss_scale": "128" if precisions[p] == "fp16" else "",
                "batch_size": batch,
                "lr": f"{0.001 * (rate + 1):.3f}",
                "repeat": repeat + 1,
                "gpu": f"Made-up card {card + 1}",
                "gpu_memory_bytes": 24 << 30,
            }
            if batch > 1152:
                row |= {"status": "oom", "reason": "out of memory"}
            else:
                row |= {
                    "status": "ok",
                    "epoch_time_s": f"{seconds:.4f}",
                    "measured_time_s": f"{seconds:.4f}",
                    "measured_images": 50000,
                    "images_per_s": f"{50000 / seconds:.3f}",
                    "peak_device_bytes": (1 << 30) + batch * (20 << 20),
                    "train_loss": f"{2 + size / 100:.4f}",
                    "train_accuracy": f"{0.3 - size / 400:.4f}",
                    "energy_j": f"{seconds * 300:.1f}",
                }
            writer.writerow(empty | row)
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
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    code, seconds, peak = answer.stdout.split()
    if code != "0":
        raise RuntimeError(answer.stderr)
    return float(seconds), int(peak), out.stat().st_size


class ReportScale:
    """The report on 100,000 records, for asv."""

    params = ("text", "html")
    param_names = ("format",)
    timeout = 300.0
    number = 1
    repeat = 1
    version = "1"

    def setup_cache(self) -> str:
        """Write the records once; each parameter reads them."""
        return str(write_records(Path.cwd() / "report-scale"))

    def track_time_s(self, folder: str, format: str) -> float:
        """Seconds from start to the written report."""
        return measure(Path(folder), format)[0]

    def track_peak_bytes(self, folder: str, format: str) -> int:
        """Peak resident set of the reporting process."""
        return measure(Path(folder), format)[1]


ReportScale.track_time_s.unit = "seconds"  # type: ignore[attr-defined]
ReportScale.track_peak_bytes.unit = "bytes"  # type: ignore[attr-defined]


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        folder = write_records(Path(name) / "scale")
        print(f"{RECORDS:,} records written in {time.perf_counter() - start:.1f} s")
        for format in ("text", "html", "csv", "json"):
            seconds, peak, size = measure(folder, format)
            print(
                f"{format:5} {seconds:5.1f} s  {peak / 1e6:6.0f} MB peak  {size / 1e6:6.2f} MB out"
            )


if __name__ == "__main__":
    main()
