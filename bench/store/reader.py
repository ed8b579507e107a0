"""Read a sweep's folder: records, steps and epochs, checked and typed.

Every cell is checked. An impossible value is refused with file, line and column. An incomplete
last line, left by a power cut, is never parsed.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from bench.axis import Value
from bench.case import AXES, Case, format_value, make_case, parse_value
from bench.errors import UsageError
from bench.record import COLUMNS, SCHEMA, Column, Status, WorkRow
from bench.store.attempts import FEW, find_truncated, keep_latest, number_groups
from bench.store.cells import CONFIG, EPOCHS, RANKS, RECORDS, STEPS, TABLES, WORK, write_lines
from bench.store.migration import CORRECTED, MIGRATIONS, RESPELLED
from bench.text import clean

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    Places = np.ndarray[Any, Any]  # of cells among the distinct ones

_LONGEST_LINE = 1_000_000  # bytes; the longest honest row is a few thousand
_STRANGE = "not written by `bench.sweep`; give a sweep's folder or its records.csv"
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_LARGEST_INT = 2**53  # whole numbers pass through float64


class Past(NamedTuple):
    """What the store already holds of one run of a case."""

    status: Status
    attempt: int
    inferred: bool = False
    seed: int = 0
    lane: str = ""
    time_s: float | None = None  # of the epoch


Run = tuple[Case, int, bool]
"""A case, its repeat, and whether it is the sentinel."""


def records_file(path: Path) -> Path:
    """The records file of a sweep's folder, or the file itself where one is given. Raises
    UsageError: there is none."""
    file = path / RECORDS if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path}: no records there; give a folder that `bench.sweep --out` wrote")
    return file


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in a sweep's folder; empty where none can be read."""
    file = folder / CONFIG
    with suppress(OSError, ValueError):
        config = _parse_config(file.absolute(), *_stamp(file))
        if isinstance(config, dict):
            return {**config}
    return {}


def _stamp(file: Path) -> tuple[int, int, int]:
    """What tells the contents of a file from those that it had before. Raises OSError: it is not
    there."""
    found = file.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4)
def _parse_config(file: Path, *_: int) -> Any:
    """What a file holds, as it stands: of 10,000 cases a sweep would take 0.1 s four times."""
    return json.loads(file.read_text(encoding="utf-8"))


def read_records(path: Path) -> pd.DataFrame:
    """Read a sweep's records, checked and typed, one row a record.

    Numbers are float64 with NaN for empty (int64 where none is empty and all are whole), text is
    str (object in fewer rows than `FEW`) with "" for empty, switches are bool with False for empty.
    The columns are those of `COLUMNS`, whatever schema the file has. ``path`` is a sweep's folder,
    or a records file.

    Raises UsageError: it is no records file of this harness, is of a newer schema, or holds a value
    that cannot be; the message names file, line and column.
    """
    file = records_file(path)
    return _read_records(file, *_stamp(file)).copy(deep=False)


@lru_cache(maxsize=1)
def _read_records(file: Path, *_: int) -> pd.DataFrame:
    """The records of a file as it stands: a sweep's report reads what the sweep went on from."""
    return type_table(file, read_text(file, COLUMNS), COLUMNS)


def _read_beside(name: str, path: Path) -> pd.DataFrame:
    """Read a table beside a sweep's records, maybe none. Raises UsageError: as `read_records`."""
    records, columns = records_file(path), TABLES[name]
    # results/reference/NAME.csv has its steps in NAME-curve.csv
    apart = name == STEPS and records.name != RECORDS
    file = records.with_name(f"{records.stem}-curve.csv" if apart else name)
    table = read_text(file, columns) if file.is_file() else _empty(columns)
    return type_table(file, table, columns)


read_steps = partial(_read_beside, STEPS)
read_epochs = partial(_read_beside, EPOCHS)  # which only cases of several have
read_work = partial(_read_beside, WORK)
read_ranks = partial(_read_beside, RANKS)  # which only cases on several GPUs have


def list_work(frame: pd.DataFrame) -> list[WorkRow]:
    """The rows of a table of `read_work`, as they were written."""
    columns = (frame[field.name].tolist() for field in fields(WorkRow))
    rows = zip(*columns, strict=True)
    make: Callable[..., WorkRow] = WorkRow
    return [make(*(None if cell != cell else cell for cell in row)) for row in rows]


def _empty(columns: Iterable[str]) -> pa.Table:
    import pyarrow as pa

    return pa.table({name: pa.array([], pa.string()) for name in columns})


def read_text(path: Path, columns: dict[str, Column]) -> pa.Table:
    """Read every cell as text, in the order of ``columns``; what an older schema lacks is added."""
    import pyarrow as pa

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a file that can be read") from error
    whole = data[: data.rfind(b"\n") + 1]  # a torn last line is never parsed
    _check_bytes(path, whole or data)
    if not whole:
        if write_lines([columns]).startswith(data):  # torn in its header, or empty
            return _empty(columns)
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
    # steps do not name their schema: one that lacks a later column is of before it
    oldest = _check_schema(path, table) if "schema" in columns else 1
    for number, name in enumerate(header, 1):
        if name not in columns:
            raise UsageError(
                f"{path}:1: column {number}: unknown column {clean(name)[:40]!r}; remove it"
            )
    for name, column in columns.items():
        if name not in header:
            if column.since <= oldest:
                raise UsageError(f"{path}:1: column {name!r} is missing; restore it")
            table = table.append_column(name, pa.array(_fill_in(column, table), pa.string()))
        elif name in (*RESPELLED, *CORRECTED):
            cells, correct = table[name].to_pylist(), CORRECTED.get(name, str)
            now = {text: correct(text) for text in {*cells}} | RESPELLED.get(name, {})
            cells = [now[text] for text in cells]
            table = table.set_column(header.index(name), name, pa.array(cells, pa.string()))
    return table.select(list(columns))


def _fill_in(column: Column, table: pa.Table) -> list[str]:
    """The cells of a column that an older file lacks: migrated, the axis's default, or empty."""
    if column.name in MIGRATIONS:
        needs, fill = MIGRATIONS[column.name]
        return list(map(fill, *(table[needed].to_pylist() for needed in needs)))
    default = format_value(getattr(Case, column.name)) if _is_axis(column) else ""
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
        return _empty(header)
    try:
        table = pacsv.read_csv(
            io.BytesIO(data),
            # threads take more processor time than one, and are started for each file
            read_options=pacsv.ReadOptions(column_names=header, skip_rows=1, use_threads=False),
            parse_options=pacsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()),
                strings_can_be_null=False,
                check_utf8=False,  # which took half the time, and was seen already
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


def type_table(path: Path, table: pa.Table, columns: dict[str, Column]) -> pd.DataFrame:
    """Give the cells of a `read_text` of ``path`` their types, as `read_records` has them. Raises
    UsageError: a cell holds a value that cannot be."""
    import numpy as np
    import pandas as pd

    typed = {}
    few = len(table) < FEW
    no_text = np.full(len(table), "", object) if few else pd.array([""] * len(table), "str")
    nothing = {str: no_text, bool: np.zeros(len(table), bool)}
    no_number = np.full(len(table), math.nan)
    for name, column in columns.items():
        # most columns hold few distinct cells; 100,000 records took 3.0 s cell by cell
        distinct, places = _encode(table[name])
        if (
            len(distinct) == 1  # as most are in most sweeps
            and column.optional
            and not _is_axis(column)
            and distinct[0].as_py() == ""
        ):
            typed[name] = nothing.get(column.type, no_number)
            continue
        for text in _suspects(column, distinct):
            if wrong := _wrong(column, text):
                _refuse(path, table, name, text, wrong)
        typed[name] = _read_cells(column.type, distinct, places)
    if not few:
        return pd.DataFrame(typed)
    # text as objects in one block: of few rows a look at a column takes a tenth of the time
    texts = [name for name, column in columns.items() if column.type is str]
    block = np.array([typed.pop(name) for name in texts], object).T
    text = pd.DataFrame(block.reshape(len(table), len(texts)), columns=texts, dtype=object)
    return pd.concat([text, pd.DataFrame(typed)], axis=1)[list(columns)]


def _encode(cells: pa.ChunkedArray) -> tuple[pa.Array, Places]:
    """The distinct cells, and the place of each among them."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(cells) < FEW:
        texts = cells.to_pylist()
        found = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        return pa.array(list(found), pa.string()), np.array([found[text] for text in texts], int)
    if pc.all(pc.equal(cells, cells[0])).as_py():  # a tenth of the time
        return cells.slice(0, 1).combine_chunks(), np.zeros(len(cells), int)
    encoded = cells.combine_chunks().dictionary_encode()
    return encoded.dictionary, encoded.indices.to_numpy()


def _suspects(column: Column, distinct: pa.Array) -> Any:
    """The cells worth a look one by one: of numbers, those numpy finds odd."""
    import numpy as np
    import pyarrow as pa

    if _is_axis(column) or column.name == "status" or column.type is bool:
        return distinct.to_pylist()
    if column.type is str:
        return []
    try:
        numbers = _parse_numbers(distinct)
    except pa.ArrowInvalid:
        return distinct.to_pylist()
    odd = ~(np.isfinite(numbers) & (numbers >= 0) & (numbers <= _LARGEST_INT))
    if column.type is int:
        odd |= numbers != np.floor(numbers)
    return distinct.filter(pa.array(odd)).to_pylist()


def _is_axis(column: Column) -> bool:
    """Whether a column holds values of an axis; that of steps named after one holds readings."""
    return column.name in AXES and COLUMNS.get(column.name) is column


def _wrong(column: Column, text: str) -> str:
    """Say what would be right for a cell that cannot be; empty where it can."""
    # an axis whose default is None is empty where it does not apply
    if _is_axis(column) and (text or AXES[column.name].default is not None):
        try:
            parse_value(column.name, text.removeprefix("'"), "")
        except UsageError as error:
            return str(error).partition(": ")[2]
    if column.name == "status":
        return "" if text in list(Status) else f"a status is one of {', '.join(Status)}"
    if column.type is bool:
        return "" if text in ("on", "off", "") else "a boolean value is 'on' or 'off'"
    if column.type is str or (text == "" and column.optional):
        return ""
    if not (_NUMBER.fullmatch(text) and math.isfinite(float(text))):
        return "a finite number, at least 0" + (", or empty" if column.optional else "")
    if column.type is int and not (text.isdigit() and float(text) <= _LARGEST_INT):
        return f"a whole number, at most {_LARGEST_INT}"
    return ""


def _read_cells(kind: type, distinct: pa.Array, places: Places) -> Any:
    import numpy as np
    import pyarrow.compute as pc

    if kind is str:
        # pandas' methods for text took two thirds of the time of reading a short file
        bare = pc.replace_substring_regex(distinct, "^'", "", max_replacements=1)
        if len(places) < FEW:
            return np.array(bare.to_pylist(), object)[places]
        return bare.take(places).to_pandas()
    if kind is bool:
        return pc.equal(distinct, "on").to_numpy(zero_copy_only=False)[places]
    numbers = _parse_numbers(distinct)
    if kind is int and not np.isnan(numbers).any():
        numbers = numbers.astype("int64")
    return numbers[places]


def _parse_numbers(distinct: pa.Array) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    filled = pc.if_else(pc.equal(distinct, ""), None, distinct)
    return filled.cast(pa.float64()).to_numpy(zero_copy_only=False)


def read_cases(frame: pd.DataFrame) -> list[Case]:
    """The case of each row of a records table."""
    number = number_groups(frame, AXES)
    first = frame[~number.duplicated()]
    cases = parse_cases({name: first[name].tolist() for name in AXES})
    return [cases[at] for at in number.tolist()]


def parse_cases(cells: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases from the cells of each axis, as records and configurations hold them. Raises
    UsageError: a cell is no value of its axis."""
    values = []
    for name in AXES:
        parsed = {cell: parse_axis(name, cell) for cell in dict.fromkeys(cells[name])}
        values.append(map(parsed.__getitem__, cells[name]))
    return [make_case(*axes) for axes in zip(*values, strict=True)]


def read_history(frame: pd.DataFrame) -> dict[Run, Past]:
    """The latest attempt at every run in a records table: no probe, anchor or truncated trial.

    A profiled run is the latest at what it serves too, see `list_served`, where that has no other.
    """
    of_run, of_past = ("repeat", "sentinel"), ("attempt", "inferred", "run_seed", "lane")
    history: dict[Run, Past] = {}
    aside = frame["probe"] | (frame["anchor"] != "") | find_truncated(frame)
    rows = keep_latest(frame[~aside])
    cells = (rows[name].tolist() for name in (*of_run, "status", *of_past, "epoch_time_s"))
    for case, repeat, sentinel, status, *past, time in zip(read_cases(rows), *cells, strict=True):
        run = (case, repeat, sentinel)
        # rows of several environments are attempts of their own; the number goes on from the last
        if run not in history or history[run].attempt <= past[0]:
            time_s = None if math.isnan(time) else time
            history[run] = Past._make([Status(status), *past, time_s])
    for run, latest in [*history.items()]:
        for served in list_served(run):
            history.setdefault(served, latest)
    return history


def list_served(run: Run) -> Iterator[Run]:
    """The runs that one is the measurement of: itself, and where it was profiled, itself without.

    The profiler starts once all else is measured.
    """
    yield run
    case, repeat, sentinel = run
    if case.profile:
        yield replace(case, profile=False), repeat, sentinel


@cache
def parse_axis(name: str, cell: Any) -> Value:
    """The value of an axis as records and configurations hold it: empty is None. Raises
    UsageError: it is none."""
    return None if cell == "" else parse_value(name, cell, name)
