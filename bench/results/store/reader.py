"""Read a sweep's folder: records, steps and epochs, checked and typed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.base.errors import UsageError
from bench.base.text import name_first
from bench.results.store.rows import SHARD, SOURCES, Row, Shard, parse_shard
from bench.results.store.table import (
    CONFIG,
    EPOCHS,
    RANKS,
    RECORDS,
    STEPS,
    TABLES,
    WORK_FILE,
    read_columns,
)
from bench.schema.case import AXES, format_value
from bench.schema.record import COLUMNS, EpochRow, RankRow, Step, WorkRow

if TYPE_CHECKING:
    import pandas as pd

Sources = dict[str, dict[str, dict[str, str]]]
"""By script or network and the hash that rows have, the hashes of the files of that version."""

_Part = TypeVar("_Part", Step, EpochRow, WorkRow, RankRow)

_FILES: dict[type, str] = {Step: STEPS, EpochRow: EPOCHS, WorkRow: WORK_FILE, RankRow: RANKS}


def find_records(path: Path) -> list[Path]:
    """Return the records file of a sweep's folder, those of the shards in a folder that holds them,
    or ``path`` itself if it is a file. Raises UsageError: there is none, or the shards are not
    those of one sweep."""
    file = path / RECORDS if path.is_dir() else path
    if file.is_file():
        return [file]
    if shards := find_shards(path):
        return [folder / RECORDS for folder in shards]
    inside = [*map(str, list_results(path))]
    each = f"give one in it: {name_first(inside, 3)}" if len(inside) > 1 else name_newest(path)
    raise UsageError(f"{path}: no records there; {each}")


def find_shards(path: Path) -> list[Path]:
    """Return the folders in ``path`` that hold a shard, by its number. Raises UsageError: they are
    of several sweeps: two are the same shard, or they are of another number of shards."""
    shards: dict[Shard, Path] = {}
    for folder in sorted(file.parent for file in path.glob(f"*/{RECORDS}")):
        try:
            shard = parse_shard(str(read_config(folder).get(SHARD)))
        except UsageError:  # none, or edited
            continue
        if shard in shards or any(shard.of != one.of for one in shards):
            raise UsageError(
                f"{path}: {folder.name} is of another sweep than {shards.popitem()[1].name}; give "
                "the folders of one"
            )
        shards[shard] = folder
    return [folder for _, folder in sorted(shards.items())]


def list_results(folder: Path) -> list[Path]:
    """Return the folders of the sweeps in a folder, newest first, then the records files of its
    ``reference``. A rehearsal of `bench.card` has no figures."""
    found: dict[Path, float] = {}
    for path in folder.glob("*/"):
        if path.name.startswith("rehearsal-"):
            continue
        shards = (file for file in path.glob(f"*/{RECORDS}") if SHARD in read_config(file.parent))
        if files := [*path.glob(RECORDS)] or [*shards]:
            found[path] = max(file.stat().st_mtime for file in files)
    sweeps = sorted(found, key=lambda path: -found[path])
    reference = sorted((folder / "reference").glob("*.csv"))
    # a curve belongs to the file that it is named after, and is no sweep
    return [*sweeps, *(file for file in reference if not file.stem.endswith("-curve"))]


def expand_folders(paths: Iterable[Path]) -> list[Path]:
    """Return paths of records, those of `list_results` in place of a folder that only holds
    folders of sweeps. Raises UsageError: there are no records in one."""
    found = list[Path]()
    for path in paths:
        try:
            find_records(path)
            found.append(path)
        except UsageError:
            if not (inside := list_results(path)):
                raise
            found += inside
    return found


def name_newest(folder: Path = Path("results")) -> str:
    """Return a hint of which results to give: the newest in a folder, or else in ``results``."""
    for path in chain(list_results(folder), list_results(Path("results"))):
        return f"the newest results here are in {path}"
    return "give a folder that `bench.sweep --out` wrote"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a sweep's folder; empty if none can be read."""
    with suppress(OSError, ValueError):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
    return {}


def read_rows(path: Path) -> list[Row]:
    """Read a sweep's records. ``path`` is a sweep's folder, a folder of shards, or a records file.

    Raises UsageError: it is not a records file of this harness, is of another schema, or holds an
    invalid value; the message names file, line and column.
    """
    tables = [read_columns(file, COLUMNS) for file in find_records(path)]
    return [
        Row(dict(zip(columns, row, strict=True)))
        for columns in tables
        for row in zip(*columns.values(), strict=True)
    ]


def read_sources(folder: Path) -> Sources:
    """Return which of the user's files each version of what was trained in a folder is made of."""
    sources = read_config(folder).get(SOURCES)
    return (
        {str(what): dict(of) for what, of in sources.items()} if isinstance(sources, dict) else {}
    )


def read_there(folder: Path | None) -> list[Row]:
    """Return the rows of a folder, none if it has no records yet. Raises UsageError: as
    `read_rows`."""
    return read_rows(folder) if folder is not None and (folder / RECORDS).is_file() else []


def read_beside(path: Path, kind: type[_Part]) -> dict[str, list[_Part]]:
    """Read the rows of one ``kind`` that belong to a sweep's records, by record. Empty if there are
    none. Raises UsageError: as `read_rows`."""
    found: dict[str, list[_Part]] = defaultdict(list)
    make: Callable[..., _Part] = kind
    names = [field.name for field in fields(kind)]
    for records in find_records(path):
        # results/reference/NAME.csv has its steps in NAME-curve.csv
        curve = kind is Step and records.name != RECORDS
        file = records.with_name(f"{records.stem}-curve.csv" if curve else _FILES[kind])
        if not file.is_file():
            continue
        columns = read_columns(file, TABLES[_FILES[kind]])
        values = ([None if cell != cell else cell for cell in columns[name]] for name in names)
        for record, *part in zip(columns["record_id"], *values, strict=True):
            found[record].append(make(*part))
    return dict(found)


def read_records(path: Path) -> pd.DataFrame:
    """Read a sweep's records as a frame, one row per record, with the columns of `COLUMNS`: numbers
    are NaN and text is "" where they are empty. An axis that may be empty is text, as in the file.
    Raises UsageError: as `read_rows`."""
    import pandas as pd

    tables = [read_columns(file, COLUMNS) for file in find_records(path)]
    for table in tables:  # before pandas takes None beside a number for NaN
        texts = (name for name in AXES if COLUMNS[name].type is str)
        table.update({name: [*map(format_value, table[name])] for name in texts})
    return pd.concat(map(pd.DataFrame, tables), ignore_index=True)
