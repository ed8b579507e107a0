"""The cases as one CSV table, a row per case, for spreadsheets and programs.

Numbers are in SI units, as the column names say; every row names its hardware and software.
"""

from __future__ import annotations

from typing import Any

from bench.case import AXES
from bench.report.document import Report
from bench.store.cells import write_lines
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.study.summaries import BESIDE

WHERE = ("gpu", "gpu_memory_bytes", "driver", "torch", "cuda", "cudnn", "cpu", "train_images")


def column_names() -> list[str]:
    numbers = [
        n
        for q in QUANTITIES.values()
        for n in ([q.name] if q.paired else [q.name, f"{q.name}_low", f"{q.name}_high"])
    ]
    beside = [f"published_{name}" for name in BESIDE]
    outcome = ["status", "reason", "inferred", "repeats", "runs", "seeds", "kind", "memory_measure"]
    spread = ["spread", "coverage", "start_time_s"]
    return ["sweep", "machine", *AXES, *outcome, *spread, *numbers, *DOUBTS, *beside, *WHERE]


def render(report: Report) -> str:
    names = column_names()
    columns = [map(keep_known, report.beside[name].tolist()) for name in names]
    return write_lines([names, *zip(*columns, strict=True)]).decode()


def keep_known(value: Any) -> Any:
    """Return text, a switch or a finite number; None for anything else, such as NaN."""
    return value if isinstance(value, (str, bool)) or is_number(value) else None
