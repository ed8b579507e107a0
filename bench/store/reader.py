"""Read a sweep's folder: records, steps and epochs, checked and typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError
from bench.record import COLUMNS, WorkRow
from bench.store.cells import CONFIG, EPOCHS, RANKS, RECORDS, STEPS, TABLES, WORK
from bench.store.table import make_empty, read_text
from bench.store.values import type_table

if TYPE_CHECKING:
    import pandas as pd


def records_file(path: Path) -> Path:
    """Return the records file of a sweep's folder, or ``path`` itself if it is a file. Raises
    UsageError: there is none."""
    file = path / RECORDS if path.is_dir() else path
    if not file.is_file():
        wrote = "give a folder that `bench.sweep --out` wrote"
        there = {f.name for f in path.glob("*.csv") if not f.stem.endswith("-curve")}
        others = sorted(there - TABLES.keys())
        such = f", or a file there, as {others[0]}" if others else ""
        raise UsageError(f"{path}: no records there; {wrote}{such}")
    return file


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a sweep's folder; empty if none can be read."""
    file = folder / CONFIG
    with suppress(OSError, ValueError):
        config = _parse_config(file.absolute(), *_stamp(file))
        if isinstance(config, dict):
            return {**config}
    return {}


def _stamp(file: Path) -> tuple[int, int, int]:
    """Return a key that changes with the contents of a file. Raises OSError: it does not exist."""
    found = file.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4)
def _parse_config(file: Path, *_: int) -> Any:
    """Parse a configuration file once: a sweep of 10,000 cases would take 0.1 s four times."""
    return json.loads(file.read_text(encoding="utf-8"))


def read_records(path: Path) -> pd.DataFrame:
    """Read a sweep's records, checked and typed, one row per record.

    Numbers are float64 with NaN for empty (int64 for whole numbers if none is empty), text is str
    (object in fewer rows than `FEW`) with "" for empty, switches are bool with False for empty. The
    columns are those of `COLUMNS`, whatever schema the file has. ``path`` is a sweep's folder, or a
    records file.

    Raises UsageError: it is not a records file of this harness, is of a newer schema, or holds an
    invalid value; the message names file, line and column.
    """
    file = records_file(path)
    return _read_records(file, *_stamp(file)).copy(deep=False)


@lru_cache(maxsize=1)
def _read_records(file: Path, *_: int) -> pd.DataFrame:
    """Read a records file once: a sweep's report reads what the sweep resumed from."""
    return type_table(file, read_text(file, COLUMNS), COLUMNS)


def _read_beside(name: str, path: Path) -> pd.DataFrame:
    """Read a table beside a sweep's records, maybe empty. Raises UsageError: as `read_records`."""
    records, columns = records_file(path), TABLES[name]
    # results/reference/NAME.csv has its steps in NAME-curve.csv
    apart = name == STEPS and records.name != RECORDS
    file = records.with_name(f"{records.stem}-curve.csv" if apart else name)
    table = read_text(file, columns) if file.is_file() else make_empty(columns)
    return type_table(file, table, columns)


read_steps = partial(_read_beside, STEPS)
read_epochs = partial(_read_beside, EPOCHS)  # only of cases with several epochs
read_work = partial(_read_beside, WORK)
read_ranks = partial(_read_beside, RANKS)  # only of cases on several GPUs


def list_work(frame: pd.DataFrame) -> list[WorkRow]:
    """Return the rows of a table of `read_work`, as they were written."""
    columns = (frame[field.name].tolist() for field in fields(WorkRow))
    rows = zip(*columns, strict=True)
    make: Callable[..., WorkRow] = WorkRow
    return [make(*(None if cell != cell else cell for cell in row)) for row in rows]
