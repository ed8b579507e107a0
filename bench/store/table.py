"""Tables of a folder as text, with the columns of today.

An incomplete last line, left by a power cut, is never parsed. Anything that `bench.sweep` would not
write is refused with file, line and column.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bench.case import AXES, Case, format_value
from bench.errors import UsageError
from bench.record import COLUMNS, OLDEST, READER, SCHEMA, Column
from bench.store.cells import write_lines
from bench.text import clean

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST_LINE = 1_000_000  # bytes; the longest real row is a few thousand
_CONSTANT = {
    "skip_overflow": "off",
    "pin_memory": "off",
    "persistent_workers": "off",
    "prefetch": "2",
    "bucket_mb": "25",
}
"""Axes that schema 10 had, and the value that every case has now."""
_STRANGE = "not written by `bench.sweep`; give a sweep's folder or its records.csv"


def make_empty(columns: Iterable[str]) -> pa.Table:
    import pyarrow as pa

    return pa.table({name: pa.array([], pa.string()) for name in columns})


def read_text(path: Path, columns: dict[str, Column]) -> pa.Table:
    """Read every cell as text, in the order of ``columns``. A column that a file lacks is empty, or
    has its axis's default; others that a file of an older schema has are left out."""
    import pyarrow as pa

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a file that can be read") from error
    whole = data[: data.rfind(b"\n") + 1]  # a torn last line is never parsed
    _check_bytes(path, whole or data)
    if not whole:
        if write_lines([columns]).startswith(data):  # torn in its header, or empty
            return make_empty(columns)
        raise UsageError(f"{path}:1: column 1: {_STRANGE}")
    data = whole
    try:
        header = next(csv.reader([data[: data.index(b"\n")].decode()]), [])
    except csv.Error as error:
        raise UsageError(f"{path}:1: column 1: not CSV: {error}; {_STRANGE}") from error
    if (first := next(iter(columns))) not in header:
        raise UsageError(f"{path}:1: column {first!r} is missing: {_STRANGE}")
    for name in header:
        if header.count(name) > 1:
            raise UsageError(f"{path}:1: column {clean(name)[:40]!r} appears twice; keep one")
    table = _parse_csv(path, data, header)
    older = "schema" in columns and _check_schema(path, table) < SCHEMA
    for number, name in enumerate(header, 1):
        if name in columns:
            continue
        if not older:
            raise UsageError(
                f"{path}:1: column {number}: unknown column {clean(name)[:40]!r}; remove it"
            )
        if name in _CONSTANT and (other := {*table[name].to_pylist()} - {_CONSTANT[name], ""}):
            raise UsageError(
                f"{path}: {name} {clean(min(other))[:40]!r} is not measured any more; commit "
                f"{READER} of this project reads it"
            )
    for name, column in columns.items():
        if name not in header:
            if not (column.optional or is_axis(column)):
                raise UsageError(f"{path}:1: column {name!r} is missing; restore it")
            default = format_value(getattr(Case, name)) if is_axis(column) else ""
            table = table.append_column(name, pa.array([default] * len(table), pa.string()))
    return table.select(list(columns))


def _check_bytes(path: Path, data: bytes) -> None:
    if data.startswith(b"\xef\xbb\xbf"):
        raise UsageError(f"{path}:1: column 1: a byte-order mark; save it as plain UTF-8")
    for byte, name, mend in (
        (b"\r", "a carriage return", "save it with Unix line ends"),
        (b"\0", "a NUL byte", "records are text"),
    ):
        if (at := data.find(byte)) >= 0:
            raise UsageError(f"{path}:{_place(data, at)}: {name}; {mend}")
    if len(data) > _LONGEST_LINE:
        _check_line_lengths(path, data)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}:{_place(data, error.start)}: not UTF-8 text; save it as UTF-8"
        ) from error


def _check_line_lengths(path: Path, data: bytes) -> None:
    start = 0
    while len(data) - start > _LONGEST_LINE:
        end = data.rfind(b"\n", start, start + _LONGEST_LINE + 1)
        if end < 0:
            length = (data.find(b"\n", start) + 1 or len(data) + 1) - 1 - start
            raise UsageError(
                f"{path}:{data.count(bytes([10]), 0, start) + 1}: character {_LONGEST_LINE + 1}: "
                f"a line of {length} bytes; no record is longer than {_LONGEST_LINE}"
            )
        start = end + 1


def _place(data: bytes, at: int) -> str:
    column = at - data.rfind(b"\n", 0, at)
    return f"{data.count(bytes([10]), 0, at) + 1}: character {column}"


def _parse_csv(path: Path, data: bytes, header: list[str]) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv as pacsv

    if data.count(b"\n") == 1:
        return make_empty(header)
    try:
        table = pacsv.read_csv(
            io.BytesIO(data),
            # several threads take more CPU time than one, and are started for each file
            read_options=pacsv.ReadOptions(column_names=header, skip_rows=1, use_threads=False),
            parse_options=pacsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()),
                strings_can_be_null=False,
                check_utf8=False,  # it took half the time, and _check_bytes does it
            ),
        )
    except pa.ArrowInvalid as error:
        _refuse_csv(path, data, len(header), str(error))
    if len(table) != data.count(b"\n") - 1:
        _refuse_csv(path, data, len(header), "a line break within a cell")
    return table


def _refuse_csv(path: Path, data: bytes, cells: int, why: str) -> NoReturn:
    lines = csv.reader(io.StringIO(data.decode(), newline=""))
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            if lines.line_num != number:
                why = "a line break within a cell; give each record one line"
                break
            if len(line) != cells:
                column = min(len(line), cells) + 1
                raise UsageError(
                    f"{path}:{number}: column {column}: {len(line)} cells where the header has "
                    f"{cells}"
                )
    except csv.Error as error:
        number, why = number + 1, str(error)
    raise UsageError(f"{path}:{number}: column 1: not CSV: {clean(why)[:200]}")


def _check_schema(path: Path, table: pa.Table) -> int:
    oldest = SCHEMA
    for text in table["schema"].unique().to_pylist():
        if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
            refuse_cell(path, table, "schema", text, "a schema version is a whole number from 1")
        if int(text) > SCHEMA:
            raise UsageError(
                f"{path}: schema {text} is newer than the {SCHEMA} this harness reads; update it"
            )
        if int(text) < OLDEST:
            raise UsageError(
                f"{path}: schema {text} is older than the {OLDEST} this harness reads; commit "
                f"{READER} of this project reads it"
            )
        oldest = min(oldest, int(text))
    return oldest


def refuse_cell(path: Path, table: pa.Table, name: str, text: str, right: str) -> NoReturn:
    line = table[name].to_pylist().index(text) + 2  # no cell holds a newline
    raise UsageError(f"{path}:{line}: column {name!r}: {clean(text)[:40]!r}: {right}")


def is_axis(column: Column) -> bool:
    """Return whether a column holds an axis's values; a column of steps named so holds readings."""
    return column.name in AXES and COLUMNS.get(column.name) is column
