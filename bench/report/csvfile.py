"""The cases as one CSV table, a row a case, for spreadsheets and programs.

Numbers are in SI units, as the names of their columns say; what ran them stands in every row.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from bench.case import AXES, format_value
from bench.report.document import Report
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.study.summaries import BESIDE
from bench.text import write_text

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
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = column_names()
    writer.writerow(names)
    columns = [report.beside[name].tolist() for name in names]
    writer.writerows(map(write_cell, row) for row in zip(*columns, strict=True))
    return buffer.getvalue()


def write_cell(value: Any) -> str:
    """One cell: NaN is empty, switches are on or off, no text is a formula to a spreadsheet."""
    if isinstance(value, str):
        return write_text(value)
    if isinstance(value, bool):
        return format_value(value)
    if not is_number(value):
        return ""
    return repr(value).removesuffix(".0")
