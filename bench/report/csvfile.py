"""The cases as one CSV table, a row per case, for spreadsheets and programs.

Numbers are in SI units, as the column names say; every row names its hardware and software.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.case import AXES
from bench.report.document import Report
from bench.store.cells import write_lines
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number

BESIDE = ("status", "epoch_time_s", "images_per_s", "speedup", "memory_bytes", "memory_saved")
"""What is given of the published case beside another."""

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
    rows = ([keep_known(cells[name]) for name in names] for cells in list_cells(report))
    return write_lines([names, *rows]).decode()


def list_cells(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the cells of each case by column."""
    own = [name for name in column_names() if not name.startswith("published_")]
    for row in report.results:
        published = report.find_published(row)
        beside = {f"published_{name}": getattr(published, name, None) for name in BESIDE}
        if published is None:
            beside["published_status"] = ""
        yield {name: getattr(row, name) for name in own} | beside


def keep_known(value: Any) -> Any:
    """Return text, a switch or a finite number; None for anything else, such as NaN."""
    return value if isinstance(value, (str, bool)) or is_number(value) else None
