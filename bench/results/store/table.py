"""Tables of a sweep's folder: the names of its files, their columns, and their cells, as text and
typed.

An incomplete last line, left by a power cut, is never parsed. Anything that `bench.sweep` would not
write is refused with file, line and column.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.base.errors import UsageError
from bench.base.text import clean, write_text
from bench.schema.case import AXES, Case, format_value, parse_value
from bench.schema.record import (
    COLUMNS,
    EPOCH_COLUMNS,
    GONE,
    RANK_COLUMNS,
    READER,
    SCHEMA,
    STEP_COLUMNS,
    WORK_COLUMNS,
    ColumnInfo,
    Status,
)

RECORDS, STEPS, EPOCHS, WORK_FILE = "records.csv", "steps.csv", "epochs.csv", "work.csv"
RANKS = "ranks.csv"
CONFIG, LOGS, CHECKPOINTS, TRACES = "config.json", "logs", "checkpoints", "traces"
OUTPUTS = "outputs"
"""The folder of those that stand for ``{out}`` in a command, one for each run."""

LAST, BEST = "last.pt", "best.pt"
"""The checkpoints of a run."""

TABLES: dict[str, dict[str, ColumnInfo]] = {
    RECORDS: COLUMNS,
    STEPS: STEP_COLUMNS,
    EPOCHS: EPOCH_COLUMNS,
    WORK_FILE: WORK_COLUMNS,
    RANKS: RANK_COLUMNS,
}
"""The columns of each table."""

LARGEST_READ = 1e100
"""A larger quantity is read as not known, so that none overflows that is computed from two: none of
a run is near it, and a loss of 32 bits is at most 3.4e38."""

_STATUS: dict[str, Any] = {status.value: status for status in Status}
_SWITCH: dict[str, Any] = {"on": True, "off": False, "": False}


def write_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    """Write rows as lines of CSV; what is no number, as NaN, is empty: a reader would refuse it."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(_write_cell, row) for row in rows)
    return buffer.getvalue().encode()


def _write_cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return write_text(value) if isinstance(value, str) else format_value(value)


def read_columns(path: Path, columns: Mapping[str, ColumnInfo]) -> dict[str, list[Any]]:
    """Read a table, a list a column: numbers, NaN where they are not known; text; switches, off
    where they are not known; a `Status`; and the values of axes as a `Case` has them. A column that
    a file lacks, since it is newer, is empty, or has its axis's default.

    Raises UsageError: it cannot be read, or is not as `bench.sweep` writes it; the message names
    file, line and column.
    """
    typed = {}
    axes = AXES if "schema" in columns else {}  # a column of steps named so holds readings
    for name, cells in _read_cells(path, columns, axes).items():
        known = dict[str, Any]()
        # most columns hold few distinct cells
        for text in dict.fromkeys(cells):
            try:
                known[text] = _parse(columns[name], name in axes, text)
            except ValueError as error:
                where = f"{path}:{cells.index(text) + 2}: column {name!r}"
                raise UsageError(f"{where}: {clean(text)[:40]!r}: {error}") from error
        typed[name] = [*map(known.__getitem__, cells)]
    commands = typed["command"] if axes else []
    for number, command in enumerate(commands, 2):
        if command is None and not typed["batch_size"][number - 2]:
            raise UsageError(f"{path}:{number}: column 'batch_size': '0': that of a command alone")
    return typed


def _read_cells(
    path: Path, columns: Mapping[str, ColumnInfo], axes: Collection[str]
) -> dict[str, list[str]]:
    """Read every cell as text, in the order of ``columns``, of which some are ``axes``."""
    strange = "not written by `bench.sweep`; give a sweep's folder or its records.csv"
    rows: list[list[str]] = []
    try:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a torn last line is never parsed
        lines = csv.reader(io.StringIO((whole or data).decode(), newline=""), strict=True)
        rows += lines
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a file that can be read") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"{path}:{len(rows) + 1}: not CSV in UTF-8 ({clean(str(error))[:80]}): {strange}"
        ) from error
    if not whole and write_lines([columns]).startswith(data):
        return {name: [] for name in columns}  # torn in its header, or empty
    header = rows.pop(0)
    if next(iter(columns)) not in header or not whole:
        raise UsageError(f"{path}:1: column {next(iter(columns))!r} is missing: {strange}")
    if lines.line_num != len(rows) + 1:
        raise UsageError(f"{path}: a line break within a cell; give each record one line")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise UsageError(f"{path}:{number}: {len(row)} cells, and {len(header)} in the header")
    cells = dict(zip(header, map(list, zip(*rows, strict=True)), strict=False))
    for text in {*cells.get("schema", [])} - {str(SCHEMA)} if "schema" in columns else ():
        older = text.isdecimal() and int(text[:6]) < SCHEMA
        says = f"schema {clean(text)[:40]} is {'older' if older else 'newer'} than the {SCHEMA}"
        fix = f"commit {READER} of this project reads it" if older else "update it"
        raise UsageError(f"{path}: {says} this harness reads; {fix}")
    known = columns.keys() | GONE
    if odd := [name for name in header if name not in known or header.count(name) > 1]:
        raise UsageError(f"{path}:1: column {clean(odd[0])[:40]!r} is unknown or twice; remove it")
    for name in columns.keys() - {*header}:
        if not (columns[name].optional or name in axes):
            raise UsageError(f"{path}:1: column {name!r} is missing; restore it")
        default = format_value(getattr(Case, name)) if name in axes else ""
        cells[name] = [default] * len(rows)
    return {name: cells.get(name, []) for name in columns}


def _parse(column: ColumnInfo, is_axis: bool, text: str) -> Any:
    """Return the value of a cell. Raises ValueError: it is none of the column; says what is."""
    if column.type is str:
        text = text.removeprefix("'")
    if is_axis:
        if text == "" and AXES[column.name].default is None:
            return None  # empty where it does not apply
        try:
            return parse_value(column.name, text, "")
        except UsageError as error:
            raise ValueError(str(error).partition(": ")[2]) from error
    words = _STATUS if column.name == "status" else _SWITCH if column.type is bool else {}
    if words:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return words[text]
    if column.type is str:
        return text
    if text == "" and column.optional:
        return math.nan
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (column.type is int and not number.is_integer()):
        kind = "whole number" if column.type is int else "finite number"
        raise ValueError(f"a {kind}" + ", or empty" * column.optional)
    return math.nan if column.optional and abs(number) > LARGEST_READ else column.type(number)
