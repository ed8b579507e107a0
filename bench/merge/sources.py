"""The folders that are joined, as they are read, and whether they may be joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError
from bench.record import COLUMNS, COMPARABLE
from bench.store.attempts import find_unknown, number_groups
from bench.store.cells import RECORDS, TABLES
from bench.store.reader import read_config, read_text, records_file, type_table
from bench.store.writer import find_torn_tail

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


@dataclass
class Source:
    """A folder that is joined: its tables as text, by file, its configuration, and typed records.
    These were read before its other tables. A sweep writes a record last, so all rows of each
    record are there, also where the sweep still runs."""

    folder: Path
    tables: dict[str, pa.Table]
    records: pd.DataFrame
    config: Mapping[str, Any] = field(default_factory=dict)


def read_source(folder: Path) -> Source:
    """Read a sweep's folder. Raises UsageError: there are no records, a file has an unfinished last
    line, or as `read_records`."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no folder there; give one that `bench.sweep --out` wrote")
    tables = {}
    for name, columns in TABLES.items():
        file = records_file(folder) if name == RECORDS else folder / name
        if not file.is_file():
            continue
        if find_torn_tail(file):
            raise UsageError(
                f"{file}: its last line is not finished; wait for its sweep, or run the sweep's "
                "command again, which sets the line aside"
            )
        tables[name] = read_text(file, columns)
    records = type_table(folder / RECORDS, tables[RECORDS], COLUMNS)
    return Source(folder, tables, records, read_config(folder))


def refuse_schemas(sources: Sequence[Source]) -> None:
    """Refuse records that were written by versions with different columns."""
    found = {
        str(schema): source.folder
        for source in reversed(sources)
        for schema in source.records["schema"].unique()
    }
    if len(found) > 1:
        each = ", ".join(f"{folder} has schema {schema}" for schema, folder in found.items())
        raise UsageError(
            f"{each}; run the sweeps' commands again with this version, which writes their records "
            "in its own, or merge these folders apart"
        )


def refuse_unlike(sources: Sequence[Source], mix: bool) -> None:
    """Refuse records that could not be compared: rows of the fake executor beside measured ones,
    and without ``mix`` another GPU, torch, network or data. Raises UsageError: it says in which
    respects they differ, and in which folders.

    Rows agree on a column of `COMPARABLE` as far as they agree on the axes that it belongs to. What
    a row did not get to know speaks against none.
    """
    import pandas as pd

    parts = [s.records.assign(folder=str(s.folder)) for s in sources]
    rows = pd.concat(parts, ignore_index=True)
    kinds = rows.groupby(rows["executor"] == "fake")["folder"].first()
    if len(kinds) > 1:
        raise UsageError(
            f"{kinds[True]} has rows of --executor fake, which nothing measured, and "
            f"{kinds[False]} has measured ones; merge them into a folder each"
        )
    differing = []
    for name, owners in COMPARABLE.items() if not mix else ():
        known = rows[~find_unknown(rows, name)]
        for _, alike in known.groupby(number_groups(known, owners)):
            values = alike.groupby(name)["folder"].first()
            if len(values) > 1:
                each = (f"{value or 'none'} in {folder}" for value, folder in values.items())
                differing.append(f"{name} is {', '.join(each)}")
    if differing:
        raise UsageError(
            f"the records would not be comparable: {'; '.join(dict.fromkeys(differing))}; merge "
            "what is comparable into a folder each, or join all with --mix"
        )
