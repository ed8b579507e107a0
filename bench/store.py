"""Where records live: the only file that knows CSV.

A sweep is a folder::

    records.csv    one row per case and repeat, appended and fsynced as each ends
    steps.csv      one row per training step, joined by record_id
    config.json    the resolved configuration
    logs/          what each worker printed

One writer at a time holds a lock on the folder. Whatever a power cut leaves of a last line is set
aside, never parsed.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import socket
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from filelock import FileLock, Timeout

from bench.case import AXES, Case, format_value, parse_value
from bench.errors import UsageError
from bench.record import (
    COLUMNS,
    SCHEMA,
    STEP_COLUMNS,
    Column,
    Record,
    Status,
    Step,
    flatten,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

RECORDS, STEPS, CONFIG, LOGS = "records.csv", "steps.csv", "config.json", "logs"

_LONGEST_LINE = 1_000_000  # bytes; the longest honest row is a few thousand
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]+")
_FORMULA = ("=", "+", "-", "@")


class StoreError(Exception):
    """A row could not be written. The rows before it are intact."""


def clean(text: str) -> str:
    """Make ``text`` one line of printable UTF-8, as every text cell is stored."""
    return _CONTROL.sub(" ", text).strip()


def _write_cell(value: Any) -> str:
    if isinstance(value, str):
        text = clean(value)
        # a spreadsheet runs a cell that starts like this; the apostrophe makes it text there
        return f"'{text}" if text.startswith((*_FORMULA, "'")) else text
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return format_value(value)


def _write_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(_write_cell, row) for row in rows)
    return buffer.getvalue().encode()


class Past(NamedTuple):
    """What the store already holds of one run of a case."""

    status: Status
    attempt: int


Run = tuple[Case, int, bool]
"""A case, its repeat, and whether it is the sentinel."""


class Store:
    """The one writer of a sweep's folder; a context manager that holds its lock.

    Args:
        folder: created if absent.
        wait_s: how long to wait for another writer to finish.

    Raises:
        UsageError: another sweep holds the folder, it cannot be written, or its records are
            not of this harness.
    """

    def __init__(self, folder: Path, wait_s: float = 0) -> None:
        self.folder = folder
        self._holder = folder / ".holder"
        try:
            (folder / LOGS).mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / ".lock", timeout=wait_s)
            self._lock.acquire()
            self._holder.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
        except Timeout:
            raise UsageError(
                f"--out {folder}: in use by {self._read_holder()}; "
                "wait for it with --wait, or choose another --out"
            ) from None
        except OSError as error:
            raise UsageError(
                f"--out {folder}: cannot be written ({error.strerror}); choose a folder that can"
            ) from error
        self.set_aside: list[str] = []
        try:
            self._records = self._open(RECORDS, COLUMNS)
            self._steps = self._open(STEPS, STEP_COLUMNS)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Store:
        """Return the store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None
    ) -> None:
        """Release the folder to other writers."""
        self._records.close()
        self._steps.close()
        self._holder.unlink(missing_ok=True)
        self._lock.release()

    def append(self, record: Record, steps: Sequence[Step] = ()) -> None:
        """Write a record and its steps, durably: once this returns, a power cut leaves them.

        The steps go first, so that a row never stands without its curve.

        Raises:
            StoreError: the disk is full or the file cannot be written; earlier rows are intact.
        """
        rows = [(record.record_id, s.step, s.images, s.loss, s.correct, s.time_s) for s in steps]
        if rows:
            self._append(self._steps, _write_lines(rows))
        self._append(self._records, _write_lines([flatten(record).values()]))

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the resolved configuration beside the records.

        Raises:
            StoreError: it cannot be written.
        """
        temporary = self.folder / f".{CONFIG}"
        try:
            temporary.write_text(json.dumps(config, indent=2) + "\n")
            temporary.replace(self.folder / CONFIG)
        except OSError as error:
            raise StoreError(f"{self.folder / CONFIG}: {error.strerror}") from error

    def history(self) -> dict[Run, Past]:
        """The latest attempt at every run in the store."""
        frame = read_records(self.folder)
        columns = [frame[name] for name in ("repeat", "sentinel", "status", "attempt")]
        past: dict[Run, Past] = {}
        for case, repeat, sentinel, status, attempt in zip(
            read_cases(frame), *columns, strict=True
        ):
            run = (case, repeat, sentinel)
            if run not in past or past[run].attempt <= attempt:
                past[run] = Past(Status(status), attempt)
        return past

    def _read_holder(self) -> str:
        try:
            return self._holder.read_text()[:200]
        except OSError:
            return "another sweep"

    def _open(self, name: str, columns: dict[str, Column]) -> io.FileIO:
        path = self.folder / name
        file = io.FileIO(path, "a+")
        torn = _torn_tail(path)
        if torn:
            aside = path.with_name(f"{name}.torn-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
            aside.write_bytes(torn)
            file.truncate(file.seek(0, os.SEEK_END) - len(torn))
            self.set_aside.append(f"{name}: an unfinished last line was set aside as {aside.name}")
        if file.seek(0, os.SEEK_END) == 0:
            self._append(file, _write_lines([list(columns)]))
        elif name == RECORDS:
            table = _read_text(path, columns)
            if table.column_names != _read_header(path):
                file.close()
                _rewrite(path, table)
                return io.FileIO(path, "a+")
        return file

    def _append(self, file: io.FileIO, data: bytes) -> None:
        end = file.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(end)
            raise StoreError(
                f"{file.name}: {error.strerror}; the rows before are intact, "
                "and the same command goes on from them once there is room"
            ) from error


def _rewrite(path: Path, table: pa.Table) -> None:
    """Write an older file anew in today's schema, so that rows appended to it line up."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.column_names)
        columns = [table[name].to_pylist() for name in table.column_names]
        columns[table.column_names.index("schema")] = [str(SCHEMA)] * len(table)
        writer.writerows(zip(*columns, strict=True))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _torn_tail(path: Path) -> bytes:
    """What follows the last newline of a file; empty where it ends as it should."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        size = min(end, _LONGEST_LINE)
        file.seek(end - size)
        return file.read(size).rpartition(b"\n")[2]


def records_file(path: Path) -> Path:
    """The records file of a sweep's folder, or the file itself where one is given.

    Raises:
        UsageError: there is none.
    """
    file = path / RECORDS if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path}: no records there; give a folder that `bench.sweep --out` wrote")
    return file


def read_records(path: Path) -> pd.DataFrame:
    """Read a sweep's records, checked and typed, one row a record.

    Numbers are float64 with NaN for empty (int64 where none is empty and all are whole), text is
    str with "" for empty, switches are bool with False for empty. The columns are those of
    `COLUMNS`, whatever schema the file has.

    Args:
        path: a sweep's folder, or a records file.

    Raises:
        UsageError: the file is not a records file of this harness, is of a newer schema, or holds a
            value that cannot be; the message names file, line and column.
    """
    file = records_file(path)
    return _type(file, _read_text(file, COLUMNS), COLUMNS)


def read_steps(path: Path) -> pd.DataFrame:
    """Read the steps beside a sweep's records: the columns of `STEP_COLUMNS`, maybe no row.

    Raises:
        UsageError: as `read_records`.
    """
    records = records_file(path)
    # results/reference/NAME.csv has its steps in NAME-curve.csv
    name = STEPS if records.name == RECORDS else f"{records.stem}-curve.csv"
    file = records.with_name(name)
    table = _read_text(file, STEP_COLUMNS) if file.is_file() else _empty(STEP_COLUMNS)
    return _type(file, table, STEP_COLUMNS)


def _read_header(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _empty(columns: Iterable[str]) -> pa.Table:
    import pyarrow as pa

    return pa.table({name: pa.array([], pa.string()) for name in columns})


def _read_text(path: Path, columns: dict[str, Column]) -> pa.Table:
    """Read every cell as text, in the order of ``columns``; what an older schema lacks is added."""
    import pyarrow as pa

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a file that can be read") from error
    _check_bytes(path, data)
    data = data[: data.rfind(b"\n") + 1]  # a torn last line is never parsed
    if not data:
        return _empty(columns)
    header = next(csv.reader(io.StringIO(data[: data.index(b"\n")].decode())), [])
    _check_header(path, header, columns)
    table = _parse_csv(path, data, header)
    oldest = _check_schema(path, table) if "schema" in header else SCHEMA
    for name, column in columns.items():
        if name not in header:
            if column.since <= oldest:
                raise UsageError(f"{path}:1: column {name!r} is missing")
            default = format_value(getattr(Case, name)) if name in AXES else ""
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
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        if end - start > _LONGEST_LINE:
            raise UsageError(
                f"{path}:{_place(data, start)}: a line of {end - start} bytes; "
                f"no record is longer than {_LONGEST_LINE}"
            )
        start = end + 1
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}:{_place(data, error.start)}: not UTF-8 text; save it as UTF-8"
        ) from error


def _place(data: bytes, at: int) -> str:
    column = at - data.rfind(b"\n", 0, at)
    return f"{data.count(bytes([10]), 0, at) + 1}: character {column}"


def _check_header(path: Path, header: list[str], columns: dict[str, Column]) -> None:
    first = next(iter(columns))
    if first not in header:
        raise UsageError(
            f"{path}:1: column {first!r} is missing, so `bench.sweep` did not write this file; "
            "give a sweep's folder or its records.csv"
        )
    for name in header:
        if header.count(name) > 1:
            raise UsageError(f"{path}:1: column {clean(name)[:40]!r} stands twice; keep one")


def _parse_csv(path: Path, data: bytes, header: list[str]) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv as pacsv

    if data.count(b"\n") == 1:
        return _empty(header)
    try:
        return pacsv.read_csv(
            io.BytesIO(data),
            read_options=pacsv.ReadOptions(column_names=header, skip_rows=1),
            parse_options=pacsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid as error:
        lines = csv.reader(io.StringIO(data.decode(), newline=""))
        for cells in lines:
            if len(cells) != len(header):
                raise UsageError(
                    f"{path}:{lines.line_num}: column {min(len(cells), len(header)) + 1}: "
                    f"{len(cells)} cells where the header has {len(header)}"
                ) from error
        raise UsageError(f"{path}: not CSV: {clean(str(error))[:200]}") from error


def _check_schema(path: Path, table: pa.Table) -> int:
    """The oldest schema among the rows."""
    for name in table.column_names:
        if name not in COLUMNS and not _newer(table):
            raise UsageError(f"{path}:1: unknown column {clean(name)[:40]!r}; remove it")
    oldest = SCHEMA
    for text in table["schema"].unique().to_pylist():
        if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
            _refuse(path, table, "schema", text, "a schema version is a whole number from 1")
        if int(text) > SCHEMA:
            raise UsageError(
                f"{path}: schema {text} is newer than the {SCHEMA} this harness reads; update it"
            )
        oldest = min(oldest, int(text))
    return oldest


def _newer(table: pa.Table) -> bool:
    versions = table["schema"].unique().to_pylist()
    return any(v.isascii() and v.isdigit() and int(v[:6]) > SCHEMA for v in versions)


def _refuse(path: Path, table: pa.Table, name: str, text: str, right: str) -> NoReturn:
    line = table[name].to_pylist().index(text) + 2  # no cell holds a newline
    raise UsageError(f"{path}:{line}: column {name!r}: {clean(text)[:40]!r}: {right}")


def _type(path: Path, table: pa.Table, columns: dict[str, Column]) -> pd.DataFrame:
    import pandas as pd

    typed = {}
    for name, column in columns.items():
        cells = table[name].combine_chunks()
        for text in _suspects(column, cells):
            if wrong := _wrong(column, text):
                _refuse(path, table, name, text, wrong)
        typed[name] = _READERS[column.type](cells)
    return pd.DataFrame(typed)


def _suspects(column: Column, cells: pa.Array) -> list[str]:
    """The distinct cells worth a look one by one: of numbers, those numpy finds odd."""
    import numpy as np
    import pyarrow as pa

    if column.name in AXES or column.name == "status" or column.type is bool:
        return cells.unique().to_pylist()  # type: ignore[no-any-return]
    if column.type is str:
        return []
    try:
        numbers = _read_numbers(cells)
    except pa.ArrowInvalid:
        return cells.unique().to_pylist()  # type: ignore[no-any-return]
    odd = ~(np.isfinite(numbers) & (numbers >= 0))
    if column.type is int:
        odd |= numbers != np.floor(numbers)
    return cells.filter(pa.array(odd)).unique().to_pylist()  # type: ignore[no-any-return]


def _wrong(column: Column, text: str) -> str:
    """Say what would be right for a cell that cannot be; empty where it can."""
    if column.name in AXES:
        # loss_scale is empty where the precision scales no loss
        if text or column.name != "loss_scale":
            try:
                parse_value(column.name, text.removeprefix("'"), "")
            except UsageError as error:
                return str(error).partition(": ")[2]
    elif column.name == "status":
        return "" if text in list(Status) else f"a status is one of {', '.join(Status)}"
    elif column.type is bool:
        return "" if text in ("on", "off", "") else "a switch is 'on' or 'off'"
    elif column.type is not str and not (text == "" and column.optional):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= 0 and text.isascii()):
            return "a finite number, at least 0" + (", or empty" if column.optional else "")
        if column.type is int and not text.isdigit():
            return "a whole number"
    return ""


def _read_strings(cells: pa.Array) -> Any:
    text = cells.to_pandas()
    return text.where(~text.str.startswith("'"), text.str.slice(1))


def _read_switches(cells: pa.Array) -> Any:
    import pyarrow.compute as pc

    return pc.equal(cells, "on").to_numpy(zero_copy_only=False)


def _read_numbers(cells: pa.Array) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    filled = pc.if_else(pc.equal(cells, ""), None, cells)
    return filled.cast(pa.float64()).to_numpy(zero_copy_only=False)


def _read_whole_numbers(cells: pa.Array) -> Any:
    import numpy as np

    numbers = _read_numbers(cells)
    return numbers if np.isnan(numbers).any() else numbers.astype("int64")


_READERS = {
    str: _read_strings,
    bool: _read_switches,
    float: _read_numbers,
    int: _read_whole_numbers,
}


def read_cases(frame: pd.DataFrame) -> list[Case]:
    """The case of each row of a records table."""
    return [_parse_case(axes) for axes in zip(*(frame[name] for name in AXES), strict=True)]


@cache
def _parse_case(axes: tuple[Any, ...]) -> Case:
    values = {
        name: None if value == "" else parse_value(name, value, name)
        for name, value in zip(AXES, axes, strict=True)
    }
    return Case(**values)  # type: ignore[arg-type]
