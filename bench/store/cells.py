"""The names of a sweep's files and the spelling of their cells, for reader and writer."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from bench.case import format_value
from bench.text import write_text

RECORDS, STEPS, EPOCHS, WORK = "records.csv", "steps.csv", "epochs.csv", "work.csv"
RANKS = "ranks.csv"
CONFIG, LOGS, CHECKPOINTS, TRACES = "config.json", "logs", "checkpoints", "traces"


def _write_cell(value: Any) -> str:
    return write_text(value) if isinstance(value, str) else format_value(value)


def write_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    """Spell rows as lines of CSV, in UTF-8."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(_write_cell, row) for row in rows)
    return buffer.getvalue().encode()
