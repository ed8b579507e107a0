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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from bench.attempts import keep_latest
from bench.case import AXES, Case, format_value, parse_value
from bench.errors import UsageError
from bench.migration import MIGRATIONS
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
_BLOCK = 1 << 16
_STRANGE = "not written by `bench.sweep`; give a sweep's folder or its records.csv"
# also what a terminal obeys beyond ASCII (U+009B starts a sequence) and what turns text around
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_FORMULA = tuple("=+-@＝＋－＠")  # the wide ones too: some spreadsheets read them alike
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_LARGEST_INT = 2**53  # whole numbers pass through float64


class StoreError(Exception):
    """A row could not be written. The rows before it are intact."""


def clean(text: str) -> str:
    """Make ``text`` one line of printable UTF-8, as every text cell is stored."""
    return _CONTROL.sub(" ", text).strip()


def write_text(text: str) -> str:
    """Make ``text`` a cell that no spreadsheet takes for a formula; for every CSV written."""
    text = clean(text)
    # a spreadsheet runs a cell that starts like this; the apostrophe makes it text there
    return f"'{text}" if text.startswith((*_FORMULA, "'")) else text


def _write_cell(value: Any) -> str:
    return write_text(value) if isinstance(value, str) else format_value(value)


def _leave_out_impossible(values: dict[str, Any]) -> dict[str, Any]:
    """Empty what no reader would take, such as a NaN, and say so under ``missing``.

    One such cell would make the whole file one that is refused.
    """
    odd = {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and COLUMNS[name].optional and not 0 <= value < math.inf
    }
    why = (f"{name}: read as {value}" for name, value in odd.items())
    missing = "; ".join(filter(None, (values["missing"], *why)))
    return {**values, **dict.fromkeys(odd), "missing": missing}


def _at_least_zero(value: float | None) -> float | None:
    return value if value is not None and 0 <= value < math.inf else None


def _write_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(_write_cell, row) for row in rows)
    return buffer.getvalue().encode()


class Past(NamedTuple):
    """What the store already holds of one run of a case."""

    status: Status
    attempt: int
    inferred: bool = False
    seed: int = 0


Run = tuple[Case, int, bool]
"""A case, its repeat, and whether it is the sentinel."""


class Store:
    """The one writer of a sweep's folder; a context manager that holds its lock.

    Args:
        folder: created if absent.
        wait_s: how long to wait for another writer to finish.
        on_wait: told who that writer is when waiting begins.

    Raises:
        UsageError: another sweep holds the folder, it cannot be written, or its records are
            not of this harness.
    """

    def __init__(
        self, folder: Path, wait_s: float = 0, on_wait: Callable[[str], None] = lambda who: None
    ) -> None:
        self.folder = folder
        self.set_aside: list[str] = []
        self._holder = folder / ".holder"
        # a store may be closed by another thread than opened it
        from filelock import FileLock

        self._lock = FileLock(folder / ".lock", thread_local=False)
        self._files: dict[str, io.FileIO] = {}
        try:
            (folder / LOGS).mkdir(parents=True, exist_ok=True)
            self._acquire(wait_s, on_wait)
            self._holder.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
            for name, columns in ((RECORDS, COLUMNS), (STEPS, STEP_COLUMNS)):
                self._files[name] = self._open(name, columns)
        except (OSError, NotImplementedError) as error:  # filelock's word for no locks there
            self._close()
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"--out {folder}: cannot be written ({why}); choose a folder that can"
            ) from error
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Store:
        """Return the store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None
    ) -> None:
        """Release the folder to other writers."""
        self._close()

    def append(self, record: Record, steps: Sequence[Step] = ()) -> None:
        """Write a record and its steps, durably: once this returns, a power cut leaves them.

        The steps go first, so that a row never stands without its curve.

        Raises:
            StoreError: the disk is full or the file cannot be written; earlier rows are intact.
        """
        rows = [
            (
                record.record_id,
                s.step,
                s.images,
                _at_least_zero(s.loss),
                s.correct,
                _at_least_zero(s.time_s),
            )
            for s in steps
        ]
        if rows:
            _append(self._files[STEPS], _write_lines(rows))
        row = _leave_out_impossible(flatten(record))
        _append(self._files[RECORDS], _write_lines([row.values()]))

    def read_config(self) -> dict[str, Any]:
        """The configuration already there; empty if none can be read."""
        try:
            config = json.loads((self.folder / CONFIG).read_text())
        except (OSError, ValueError):
            return {}
        return config if isinstance(config, dict) else {}

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

    def _acquire(self, wait_s: float, on_wait: Callable[[str], None]) -> None:
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            if wait_s:
                on_wait(self._read_holder())
                with suppress(Timeout):
                    self._lock.acquire(timeout=wait_s)
                    return
            raise UsageError(
                f"--out {self.folder}: in use by {self._read_holder()}; "
                "wait for it with --wait, or choose another --out"
            ) from None

    def _read_holder(self) -> str:
        try:
            return clean(self._holder.read_text(errors="replace"))[:200]
        except OSError:
            return "another sweep"

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._lock.is_locked:
            self._holder.unlink(missing_ok=True)
            self._lock.release()

    def _open(self, name: str, columns: dict[str, Column]) -> io.FileIO:
        """Open a file for appending: with a whole last line, and today's columns."""
        path = self.folder / name
        if torn := _torn_tail(path):
            aside = path.with_name(f"{name}.torn-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
            aside.write_bytes(torn)
            os.truncate(path, path.stat().st_size - len(torn))
            self.set_aside.append(f"{name}: an unfinished last line was set aside as {aside.name}")
        if path.exists() and path.stat().st_size and not _has_header(path, columns):
            _rewrite(path, _read_text(path, columns))
        file = io.FileIO(path, "a")
        if not file.seek(0, os.SEEK_END):
            _append(file, _write_lines([columns]))
            _sync_folder(self.folder)
        return file


def _append(file: io.FileIO, data: bytes) -> None:
    """Write ``data`` at the end of ``file`` and wait until the disk has it, or leave no trace."""
    end = file.seek(0, os.SEEK_END)
    try:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):  # what then stays of the line is torn, and set aside next time
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
        columns = [
            [str(SCHEMA)] * len(table) if name == "schema" else table[name].to_pylist()
            for name in table.column_names
        ]
        writer.writerows(zip(*columns, strict=True))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make names just created in ``folder`` survive a power cut too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _torn_tail(path: Path) -> bytes:
    """What an unfinished write left at the end of a file; empty where it ends as it should.

    That is a line without its end, or one with NUL bytes: the file had grown, its pages not come.
    """
    if not path.exists():
        return b""
    with path.open("rb") as file:
        start = end = file.seek(0, os.SEEK_END)
        tail = b""
        while start and tail.find(b"\n", 0, -1) < 0:
            start = max(0, start - _BLOCK)
            file.seek(start)
            tail = file.read(min(_BLOCK, end - start)) + tail
            end = start
    last = tail[tail.rfind(b"\n", 0, -1) + 1 :]
    return b"" if last.endswith(b"\n") and b"\0" not in last else last


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


def _has_header(path: Path, columns: Iterable[str]) -> bool:
    header = _write_lines([columns])
    with path.open("rb") as file:
        return file.read(len(header)) == header


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
    whole = data[: data.rfind(b"\n") + 1]  # a torn last line is never parsed
    _check_bytes(path, whole or data)
    if not whole:
        if _write_lines([columns]).startswith(data):  # torn in its header, or empty
            return _empty(columns)
        raise UsageError(f"{path}:1: column 1: {_STRANGE}")
    data = whole
    header = _split(path, data[: data.index(b"\n")])
    _check_header(path, header, columns)
    table = _parse_csv(path, data, header)
    oldest = _check_schema(path, table) if "schema" in columns else SCHEMA
    for number, name in enumerate(header, 1):
        if name not in columns:
            raise UsageError(
                f"{path}:1: column {number}: unknown column {clean(name)[:40]!r}; remove it"
            )
    for name, column in columns.items():
        if name not in header:
            if column.since <= oldest:
                raise UsageError(f"{path}:1: column {name!r} is missing; restore it")
            table = table.append_column(name, pa.array(_fill_in(name, table), pa.string()))
    return table.select(list(columns))


def _fill_in(name: str, table: pa.Table) -> list[str]:
    """The cells of a column that an older file lacks: migrated, the axis's default, or empty."""
    if migrate := MIGRATIONS.get(name):
        columns = (table[needed].to_pylist() for needed in migrate.needs)
        return [migrate.fill(*cells) for cells in zip(*columns, strict=True)]
    default = format_value(getattr(Case, name)) if name in AXES else ""
    return [default] * len(table)


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
    import numpy as np

    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    lengths = np.diff(np.concatenate(([-1], ends, [len(data)]))) - 1
    if (line := int(lengths.argmax())) < len(lengths) and lengths[line] > _LONGEST_LINE:
        raise UsageError(
            f"{path}:{line + 1}: character {_LONGEST_LINE + 1}: a line of {lengths[line]} bytes; "
            f"no record is longer than {_LONGEST_LINE}"
        )


def _place(data: bytes, at: int) -> str:
    column = at - data.rfind(b"\n", 0, at)
    return f"{data.count(bytes([10]), 0, at) + 1}: character {column}"


def _split(path: Path, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()]), [])
    except csv.Error as error:
        raise UsageError(f"{path}:1: column 1: not CSV: {error}; {_STRANGE}") from error


def _check_header(path: Path, header: list[str], columns: dict[str, Column]) -> None:
    first = next(iter(columns))
    if first not in header:
        raise UsageError(f"{path}:1: column {first!r} is missing: {_STRANGE}")
    for name in header:
        if header.count(name) > 1:
            raise UsageError(f"{path}:1: column {clean(name)[:40]!r} stands twice; keep one")


def _parse_csv(path: Path, data: bytes, header: list[str]) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv as pacsv

    if data.count(b"\n") == 1:
        return _empty(header)
    try:
        table = pacsv.read_csv(
            io.BytesIO(data),
            read_options=pacsv.ReadOptions(column_names=header, skip_rows=1),
            parse_options=pacsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid as error:
        _refuse_csv(path, data, len(header), str(error))
    if len(table) != data.count(b"\n") - 1:
        _refuse_csv(path, data, len(header), "a line break within a cell")
    return table


def _refuse_csv(path: Path, data: bytes, cells: int, why: str) -> NoReturn:
    """Say on which line the CSV goes wrong."""
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
    """The oldest schema among the rows."""
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
    odd = ~(np.isfinite(numbers) & (numbers >= 0) & (numbers <= _LARGEST_INT))
    if column.type is int:
        odd |= numbers != np.floor(numbers)
    return cells.filter(pa.array(odd)).unique().to_pylist()  # type: ignore[no-any-return]


def _wrong(column: Column, text: str) -> str:
    """Say what would be right for a cell that cannot be; empty where it can."""
    # loss_scale is empty where the precision scales no loss
    if column.name in AXES and (text or column.name != "loss_scale"):
        try:
            parse_value(column.name, text.removeprefix("'"), "")
        except UsageError as error:
            return str(error).partition(": ")[2]
    if column.name == "status":
        return "" if text in list(Status) else f"a status is one of {', '.join(Status)}"
    if column.type is bool:
        return "" if text in ("on", "off", "") else "a switch is 'on' or 'off'"
    if column.type is str or (text == "" and column.optional):
        return ""
    if not (_NUMBER.fullmatch(text) and math.isfinite(float(text))):
        return "a finite number, at least 0" + (", or empty" if column.optional else "")
    if column.type is int and not (text.isdigit() and float(text) <= _LARGEST_INT):
        return f"a whole number, at most {_LARGEST_INT}"
    return ""


def _read_strings(cells: pa.Array) -> Any:
    import pyarrow.compute as pc

    # pandas' methods for text took two thirds of the time of reading a short file
    return pc.replace_substring_regex(cells, "^'", "", max_replacements=1).to_pandas()


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


def read_history(frame: pd.DataFrame) -> dict[Run, Past]:
    """The latest attempt at every run in a records table."""
    names = ("repeat", "sentinel", "status", "attempt", "inferred", "run_seed")
    history: dict[Run, Past] = {}
    rows = keep_latest(frame)
    for case, repeat, sentinel, *past in zip(
        read_cases(rows), *(rows[name] for name in names), strict=True
    ):
        status, attempt, inferred, seed = past
        run = (case, int(repeat), bool(sentinel))
        # rows of several environments are attempts of their own; the number goes on from the last
        if run not in history or history[run].attempt <= attempt:
            history[run] = Past(Status(status), int(attempt), bool(inferred), int(seed))
    return history


@cache
def _parse_case(axes: tuple[Any, ...]) -> Case:
    values = {
        name: None if value == "" else parse_value(name, value, name)
        for name, value in zip(AXES, axes, strict=True)
    }
    return Case(**values)  # type: ignore[arg-type]
