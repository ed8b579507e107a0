"""The names of a sweep's files, their columns, and the spelling of their cells."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

from bench.case import format_value
from bench.record import COLUMNS, EPOCH_COLUMNS, RANK_COLUMNS, STEP_COLUMNS, WORK_COLUMNS, Column
from bench.text import write_text

RECORDS, STEPS, EPOCHS, WORK = "records.csv", "steps.csv", "epochs.csv", "work.csv"
RANKS = "ranks.csv"
CONFIG, LOGS, CHECKPOINTS, TRACES = "config.json", "logs", "checkpoints", "traces"

LAST, BEST = "last.pt", "best.pt"
"""The checkpoints of a run."""

TABLES: dict[str, dict[str, Column]] = {
    RECORDS: COLUMNS,
    STEPS: STEP_COLUMNS,
    EPOCHS: EPOCH_COLUMNS,
    WORK: WORK_COLUMNS,
    RANKS: RANK_COLUMNS,
}
"""The columns of each table."""


def _write_cell(value: Any) -> str:
    return write_text(value) if isinstance(value, str) else format_value(value)


def write_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(
        ["" if value is None else _write_cell(value) for value in row] for row in rows
    )
    return buffer.getvalue().encode()


def spell_config(config: Mapping[str, Any]) -> str:
    """Write a configuration as JSON, with a line for each case. Indenting all values would need
    json's encoder in Python: 3 s for 10,000 cases."""
    parts = [f"{json.dumps(key)}: {_spell_entry(value)}" for key, value in config.items()]
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def _spell_entry(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value, indent=2).replace("\n", "\n  ")
    return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]" if value else "[]"
