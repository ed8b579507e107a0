"""Tables of a sweep's folder: the names of its files, their columns, and their cells, as text and
typed.

An incomplete last line, left by a power cut, is never parsed. Anything that `bench.sweep` would not
write is refused with file, line and column.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.case import AXES, Case, format_value, parse_value
from bench.errors import UsageError
from bench.record import (
    COLUMNS,
    EPOCH_COLUMNS,
    RANK_COLUMNS,
    READER,
    SCHEMA,
    STEP_COLUMNS,
    WORK_COLUMNS,
    Column,
    Status,
)
from bench.text import clean, write_text

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

Cells = dict[str, list[str]]
"""A table as text: the cells of each column."""

_LONGEST_LINE = 1_000_000  # bytes; the longest real row is a few thousand
_LARGEST_INT = 2**53  # whole numbers pass through float64
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_STRANGE = "not written by `bench.sweep`; give a sweep's folder or its records.csv"


# ------------------------------------------------------------------------------------------- write


def write_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(
        ["" if value is None else _write_cell(value) for value in row] for row in rows
    )
    return buffer.getvalue().encode()


def _write_cell(value: Any) -> str:
    return write_text(value) if isinstance(value, str) else format_value(value)


def spell_config(config: Mapping[str, Any]) -> str:
    """Write a configuration as JSON, with a line for each case. Indenting all values would need
    json's encoder in Python: 3 s for 10,000 cases."""
    parts = [f"{json.dumps(key)}: {_spell_entry(value)}" for key, value in config.items()]
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def _spell_entry(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value, indent=2).replace("\n", "\n  ")
    return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]" if value else "[]"


# -------------------------------------------------------------------------------------------- read


def read_text(path: Path, columns: Mapping[str, Column]) -> Cells:
    """Read every cell as text, in the order of ``columns``. A column that a file lacks, since it is
    newer, is empty, or has its axis's default. Raises UsageError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a file that can be read") from error
    whole = data[: data.rfind(b"\n") + 1]  # a torn last line is never parsed
    text = _decode(path, whole or data)
    if not whole:
        if write_lines([columns]).startswith(data):  # torn in its header, or empty
            return {name: [] for name in columns}
        raise UsageError(f"{path}:1: column 1: {_STRANGE}")
    rows = _parse_csv(path, text, next(iter(columns)))
    header = rows.pop(0)
    for name in header:
        if header.count(name) > 1:
            raise UsageError(f"{path}:1: column {clean(name)[:40]!r} appears twice; keep one")
    cells = {name: [row[at] for row in rows] for at, name in enumerate(header)}
    if "schema" in columns:
        _check_schema(path, cells["schema"])
    for number, name in enumerate(header, 1):
        if name not in columns:
            raise UsageError(
                f"{path}:1: column {number}: unknown column {clean(name)[:40]!r}; remove it"
            )
    for name, column in columns.items():
        if name not in header:
            if not (column.optional or is_axis(column)):
                raise UsageError(f"{path}:1: column {name!r} is missing; restore it")
            default = format_value(getattr(Case, name)) if is_axis(column) else ""
            cells[name] = [default] * len(rows)
    return {name: cells[name] for name in columns}


def _decode(path: Path, data: bytes) -> str:
    if data.startswith(b"\xef\xbb\xbf"):
        raise UsageError(f"{path}:1: column 1: a byte-order mark; save it as plain UTF-8")
    for byte, name, mend in (
        (b"\r", "a carriage return", "save it with Unix line ends"),
        (b"\0", "a NUL byte", "records are text"),
    ):
        if (at := data.find(byte)) >= 0:
            raise UsageError(f"{path}:{_place(data, at)}: {name}; {mend}")
    for number, line in enumerate(data.split(b"\n") if len(data) > _LONGEST_LINE else (), 1):
        if len(line) > _LONGEST_LINE:
            raise UsageError(
                f"{path}:{number}: character {_LONGEST_LINE + 1}: a line of {len(line)} bytes; no "
                f"record is longer than {_LONGEST_LINE}"
            )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}:{_place(data, error.start)}: not UTF-8 text; save it as UTF-8"
        ) from error


def _place(data: bytes, at: int) -> str:
    column = at - data.rfind(b"\n", 0, at)
    return f"{data.count(bytes([10]), 0, at) + 1}: character {column}"


def _parse_csv(path: Path, text: str, first: str) -> list[list[str]]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[list[str]] = []
    try:
        rows += lines
    except csv.Error as error:
        raise UsageError(
            f"{path}:{len(rows) + 1}: column 1: not CSV: {clean(str(error))[:200]}"
            f"{'' if rows else f'; {_STRANGE}'}"
        ) from error
    if first not in rows[0]:
        raise UsageError(f"{path}:1: column {first!r} is missing: {_STRANGE}")
    cells, broken = len(rows[0]), lines.line_num != len(rows)
    for number, row in enumerate(rows, 1):
        if broken and any("\n" in cell for cell in row):
            why = "a line break within a cell; give each record one line"
            raise UsageError(f"{path}:{number}: column 1: not CSV: {why}")
        if len(row) != cells:
            raise UsageError(
                f"{path}:{number}: column {min(len(row), cells) + 1}: {len(row)} cells where the "
                f"header has {cells}"
            )
    return rows


def _check_schema(path: Path, cells: list[str]) -> None:
    for text in dict.fromkeys(cells):
        if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
            _refuse_cell(path, cells, "schema", text, "a schema version is a whole number from 1")
        if int(text) > SCHEMA:
            raise UsageError(
                f"{path}: schema {text} is newer than the {SCHEMA} this harness reads; update it"
            )
        if int(text) < SCHEMA:
            raise UsageError(
                f"{path}: schema {text} is older than the {SCHEMA} this harness reads; commit "
                f"{READER} of this project reads it"
            )


def _refuse_cell(path: Path, cells: list[str], name: str, text: str, right: str) -> None:
    line = cells.index(text) + 2  # no cell holds a newline
    raise UsageError(f"{path}:{line}: column {name!r}: {clean(text)[:40]!r}: {right}")


def is_axis(column: Column) -> bool:
    """Return whether a column holds an axis's values; a column of steps named so holds readings."""
    return column.name in AXES and COLUMNS.get(column.name) is column


# -------------------------------------------------------------------------------------------- type


def read_columns(path: Path, columns: Mapping[str, Column]) -> dict[str, list[Any]]:
    """Read a table, a list a column: numbers, NaN where they are not known; text; switches, off
    where they are not known; and a `Status`. An axis that may be empty is text, as it was written.
    Raises UsageError: not as `bench.sweep` writes it; the message names file, line and column.
    """
    typed = {}
    for name, cells in read_text(path, columns).items():
        parse, known = _choose_parser(columns[name]), dict[str, Any]()
        # most columns hold few distinct cells
        for text in dict.fromkeys(cells):
            try:
                known[text] = parse(text)
            except ValueError as error:
                _refuse_cell(path, cells, name, text, str(error))
        typed[name] = [*map(known.__getitem__, cells)]
    return typed


def _choose_parser(column: Column) -> Callable[[str], Any]:
    if is_axis(column):
        return partial(_parse_axis, column)
    if column.name == "status":
        return _parse_status
    if column.type is bool:
        return _parse_switch
    if column.type is str:
        return _parse_text
    return partial(_parse_number, column.type, column.optional)


def _parse_axis(column: Column, text: str) -> Any:
    text = _parse_text(text)
    if text == "" and column.type is str and AXES[column.name].default is None:
        return text  # empty where it does not apply
    try:
        value = parse_value(column.name, text, "")
    except UsageError as error:
        raise ValueError(str(error).partition(": ")[2]) from error
    return text if column.type is str else value


def _parse_text(text: str) -> str:
    return text.removeprefix("'")


def _parse_status(text: str) -> Status:
    if text not in list(Status):
        raise ValueError(f"a status is one of {', '.join(Status)}")
    return Status(text)


def _parse_switch(text: str) -> bool:
    if text not in ("on", "off", ""):
        raise ValueError("a boolean value is 'on' or 'off'")
    return text == "on"


def _parse_number(kind: type, optional: bool, text: str) -> float:
    if text == "" and optional:
        return math.nan
    if not (_NUMBER.fullmatch(text) and math.isfinite(number := float(text))):
        raise ValueError("a finite number" + (", or empty" if optional else ""))
    if kind is not int:
        return number
    if not number.is_integer() or abs(number) > _LARGEST_INT:
        raise ValueError(f"a whole number, at most {_LARGEST_INT}")
    return int(number)
