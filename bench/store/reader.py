"""Read a sweep's folder: records, steps and epochs, checked and typed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError
from bench.record import COLUMNS, WorkRow
from bench.store.cells import CONFIG, EPOCHS, RANKS, RECORDS, STEPS, TABLES, WORK
from bench.store.plans import SHARD, Shard, parse_shard
from bench.store.table import make_empty, read_text
from bench.store.values import type_table

if TYPE_CHECKING:
    import pandas as pd


def find_records(path: Path) -> list[Path]:
    """Return the records file of a sweep's folder, those of the shards in a folder that holds them,
    or ``path`` itself if it is a file. Raises UsageError: there is none, or the shards are not
    those of one sweep."""
    file = path / RECORDS if path.is_dir() else path
    if file.is_file():
        return [file]
    if shards := find_shards(path):
        return [folder / RECORDS for folder in shards]
    wrote = "give a folder that `bench.sweep --out` wrote"
    there = {f.name for f in path.glob("*.csv") if not f.stem.endswith("-curve")}
    others = sorted(there - TABLES.keys())
    such = f", or a file there, as {others[0]}" if others else ""
    raise UsageError(f"{path}: no records there; {wrote}{such}")


def find_shards(path: Path) -> list[Path]:
    """Return the folders in ``path`` that hold a shard, by its number. They are of one sweep if
    they are of as many shards and a command ran in all of them, but for the flags that say which
    shard and where its files are. Raises UsageError: they are not, or two are the same shard."""
    shards: dict[Shard, Path] = {}
    commands: list[set[tuple[str, ...]]] = []
    for folder in sorted(file.parent for file in path.glob(f"*/{RECORDS}")):
        config = read_config(folder)
        try:
            shard = parse_shard(config[SHARD])
            commands.append({*map(_leave_out_own, config["command"].splitlines())})
        except (KeyError, TypeError, ValueError, AttributeError, UsageError):  # none, or edited
            continue
        if shard in shards:
            raise UsageError(f"{path}: {shards[shard].name} and {folder.name} are shard {shard}")
        shards[shard] = folder
    if len({shard.of for shard in shards}) > 1 or (commands and not set.intersection(*commands)):
        names = ", ".join(folder.name for folder in shards.values())
        raise UsageError(f"{path}: {names} are of several sweeps; give the folders of one")
    return [folder for _, folder in sorted(shards.items(), key=lambda found: found[0].number)]


def _leave_out_own(command: str) -> tuple[str, ...]:
    """Return the words of a command without what may differ between the shards of a sweep. Raises
    ValueError: they were edited."""
    words, kept = iter(shlex.split(command)), []
    for word in words:
        flag, value, _ = word.partition("=")
        if flag not in ("--shard", "--out", "--data-dir"):
            kept.append(word)
        elif not value:
            next(words, "")
    return tuple(kept)


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
    columns are those of `COLUMNS`, whether the file has all or not. ``path`` is a sweep's folder, a
    folder of shards, or a records file.

    Raises UsageError: it is not a records file of this harness, is of another schema, or holds an
    invalid value; the message names file, line and column.
    """
    return _concatenate(_read_records(f, *_stamp(f)).copy(deep=False) for f in find_records(path))


@lru_cache(maxsize=1)
def _read_records(file: Path, *_: int) -> pd.DataFrame:
    """Read a records file once: a sweep's report reads what the sweep resumed from."""
    return type_table(file, read_text(file, COLUMNS), COLUMNS)


def _concatenate(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    first, *others = parts
    if not others:
        return first
    import pandas as pd

    filled = [part for part in (first, *others) if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else first


def _read_beside(name: str, path: Path) -> pd.DataFrame:
    """Read a table beside a sweep's records, maybe empty. Raises UsageError: as `read_records`."""
    columns = TABLES[name]

    def read(records: Path) -> pd.DataFrame:
        # results/reference/NAME.csv has its steps in NAME-curve.csv
        apart = name == STEPS and records.name != RECORDS
        file = records.with_name(f"{records.stem}-curve.csv" if apart else name)
        table = read_text(file, columns) if file.is_file() else make_empty(columns)
        return type_table(file, table, columns)

    return _concatenate(map(read, find_records(path)))


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
