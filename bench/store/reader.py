"""Read a sweep's folder: records, steps and epochs, checked and typed."""

from __future__ import annotations

import json
import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.errors import UsageError
from bench.record import COLUMNS, EpochRow, RankRow, Step, WorkRow
from bench.store.plans import SHARD, Shard, parse_shard
from bench.store.rows import Row
from bench.store.table import CONFIG, EPOCHS, RANKS, RECORDS, STEPS, TABLES, WORK, read_columns

if TYPE_CHECKING:
    import pandas as pd

Part = TypeVar("Part", Step, EpochRow, WorkRow, RankRow)

_FILES: dict[type, str] = {Step: STEPS, EpochRow: EPOCHS, WorkRow: WORK, RankRow: RANKS}


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


def read_rows(path: Path) -> list[Row]:
    """Read a sweep's records. ``path`` is a sweep's folder, a folder of shards, or a records file.

    Raises UsageError: it is not a records file of this harness, is of another schema, or holds an
    invalid value; the message names file, line and column.
    """
    return [row for file in find_records(path) for row in _read_rows(file, *_stamp(file))]


@lru_cache(maxsize=1)
def _read_rows(file: Path, *_: int) -> list[Row]:
    """Read a records file once: a sweep's report reads what the sweep resumed from."""
    columns = read_columns(file, COLUMNS)
    rows = zip(*columns.values(), strict=True)
    return [Row(dict(zip(columns, row, strict=True))) for row in rows]


def read_beside(
    path: Path, kind: type[Part], most_bytes: float = math.inf
) -> dict[str, list[Part]]:
    """Read the rows of one ``kind`` that belong to a sweep's records, by record. Empty if there are
    none, or if their files are larger than ``most_bytes``. Raises UsageError: as `read_rows`."""
    found: dict[str, list[Part]] = defaultdict(list)
    make: Callable[..., Part] = kind
    names = [field.name for field in fields(kind)]
    for columns in _read_beside(path, _FILES[kind], most_bytes):
        told = ([None if cell != cell else cell for cell in columns[name]] for name in names)
        for record, *part in zip(columns["record_id"], *told, strict=True):
            found[record].append(make(*part))
    return dict(found)


def _read_beside(path: Path, name: str, most_bytes: float = math.inf) -> Iterator[dict[str, Any]]:
    # results/reference/NAME.csv has its steps in NAME-curve.csv
    files = [
        file.with_name(name if file.name == RECORDS or name != STEPS else f"{file.stem}-curve.csv")
        for file in find_records(path)
    ]
    files = [file for file in files if file.is_file()]
    if sum(file.stat().st_size for file in files) <= most_bytes:
        yield from (read_columns(file, TABLES[name]) for file in files)


# ------------------------------------------------------------------------------ as frames of pandas


def read_records(path: Path) -> pd.DataFrame:
    """Read a sweep's records as a frame, one row per record, with the columns of `COLUMNS`.

    Numbers are float64 with NaN for empty (int64 for whole numbers if none is empty), text is
    "" where it is empty, switches are False. Raises UsageError: as `read_rows`.
    """
    return _make_frame(RECORDS, (read_columns(file, COLUMNS) for file in find_records(path)))


def _make_frame(name: str, parts: Iterable[Mapping[str, Sequence[Any]]]) -> pd.DataFrame:
    import pandas as pd

    kinds = {int: "float64", float: "float64", bool: "bool", str: "str"}
    columns = {n: pd.Series(dtype=kinds[c.type], name=n) for n, c in TABLES[name].items()}
    empty = pd.DataFrame(columns)
    frames = [pd.DataFrame(dict(part)) for part in parts]
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else empty


def _read_frame(name: str, path: Path) -> pd.DataFrame:
    """Read a table beside a sweep's records, maybe empty. Raises UsageError: as `read_rows`."""
    return _make_frame(name, _read_beside(path, name))


read_steps = partial(_read_frame, STEPS)
read_epochs = partial(_read_frame, EPOCHS)  # only of cases with several epochs
read_work = partial(_read_frame, WORK)
read_ranks = partial(_read_frame, RANKS)  # only of cases on several GPUs
