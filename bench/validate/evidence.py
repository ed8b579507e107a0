"""The contents of a results folder, read once for all claims, and private data in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import Case, list_varying
from bench.errors import UsageError
from bench.origin import EXECUTORS
from bench.record import MEASURED
from bench.store.cells import RECORDS
from bench.store.reader import find_records, read_ranks
from bench.store.runs import read_cases
from bench.study.sweeps import Sweep, read_sweep
from bench.text import name_first

if TYPE_CHECKING:
    import pandas as pd

KNOWN_FAULTS = "known-faults.txt"

OWN = tuple(EXECUTORS)
"""Executors whose rows are measured by this harness."""


@dataclass(frozen=True)
class Row:
    """A measured row: its name within the folder, its cells by column (None for empty numbers), its
    case, and its rows of the ``steps`` and ``work`` tables."""

    name: str
    cells: dict[str, Any]
    case: Case
    steps: pd.DataFrame
    work: pd.DataFrame

    def __getitem__(self, column: str) -> Any:
        return self.cells[column]

    def has(self, *columns: str) -> bool:
        return all(self.cells[column] is not None for column in columns)


@dataclass(frozen=True)
class Evidence:
    """The tables and plans of a folder. Rows of executors other than this harness's, such as
    published ones, are read but make no claim about how they were measured."""

    sweep: Sweep
    beside: dict[str, pd.DataFrame]

    @property
    def records(self) -> pd.DataFrame:
        return self.sweep.records

    @cached_property
    def own(self) -> pd.DataFrame:
        """Return the records that this harness measured."""
        return self.records[self.records["executor"].isin(OWN)]

    @cached_property
    def cases(self) -> list[Case]:
        return read_cases(self.records)

    @cached_property
    def rows(self) -> list[Row]:
        """Return the rows whose status says that they were measured, without inferred ones."""
        import pandas as pd

        tables = [self.beside["steps"], self.beside["work"]]
        parts: list[dict[Any, pd.DataFrame]] = [
            dict(iter(table.groupby("record_id"))) for table in tables
        ]
        axes, rows = list_varying(self.cases), []
        names, measured = [str(name) for name in self.records], {*map(str, MEASURED)}
        cells = self.records.itertuples(index=False, name=None)
        for case, told in zip(self.cases, cells, strict=True):
            pairs = zip(names, told, strict=True)
            row: dict[str, Any] = {n: None if pd.isna(cell) else cell for n, cell in pairs}
            if row["status"] not in measured or row["inferred"]:
                continue
            which = f", repeat {row['repeat']}" if row["repeat"] > 1 else ""
            name = f"{case.label(axes)}{which}{', sentinel' if row['sentinel'] else ''}"
            beside = zip(parts, tables, strict=True)
            steps, work = (part.get(row["record_id"], table[:0]) for part, table in beside)
            rows.append(Row(name, row, case, steps, work))
        return rows

    def group(self, *columns: str) -> Iterator[list[Row]]:
        """Yield the rows that agree on these columns, as lists of two or more."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault(tuple(row[column] for column in columns), []).append(row)
        return (rows for rows in groups.values() if len(rows) > 1)


def read_evidence(folder: Path, sweep: Sweep | None = None) -> Evidence:
    """Read a folder, or a records file alone; ``sweep`` if it was read already. Raises UsageError:
    a file is not as it was written; gives the wrong line and column."""
    sweep = sweep or read_sweep(folder)
    if not len(sweep.records):
        raise UsageError(f"{sweep.path} has no rows")
    beside = {
        "steps": sweep.read_steps(),
        "work": sweep.work,
        "epochs": sweep.read_epochs(),
        "ranks": read_ranks(sweep.path),
    }
    return Evidence(sweep, beside)


def read_known_faults(folder: Path) -> dict[str, str]:
    """Return why faults are kept, by claim, from lines of ``known-faults.txt`` such as ``code:
    measured before the last commit; times are not concerned``. Raises UsageError."""
    try:
        lines = (folder / KNOWN_FAULTS).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    faults = {}
    for line in filter(str.strip, lines):
        name, colon, reason = line.partition(": ")
        if not colon:
            raise UsageError(f"{folder / KNOWN_FAULTS}: {line!r} is not 'check: reason'")
        faults[name] = reason
    return faults


_PATH = re.compile(r"(?<![\w.:/~-])/[\w.-]+(?:/[\w.@+-]+)+")
"""An absolute path of two or more parts that is not part of a URL."""

_PUBLIC = ("/proc/", "/sys/", "/dev/", "/usr/")
_MOST = 3


def list_disclosed(folder: Path, records: pd.DataFrame) -> Iterator[str]:
    """Yield what identifies a machine or a person: host, GPU and environment variables of the
    records, and paths in the folder's text files."""
    for column, what in (
        ("host", "the host name"),
        ("gpu_uuid", "the UUID of the GPU"),
        ("variables", "environment variables"),
    ):
        if found := sorted({*records[column]} - {""}):
            yield f"{what} {name_first(found, _MOST)}"
    folders = [file.parent for file in find_records(folder)] if folder.is_dir() else []
    for file in sorted(file for place in folders for file in place.iterdir()) or [folder]:
        if file.suffix not in (".json", ".txt", ".log", ".html") and file.name != RECORDS:
            continue
        found = _PATH.findall(file.read_text(encoding="utf-8", errors="replace"))
        if paths := sorted({path for path in found if not path.startswith(_PUBLIC)}):
            yield f"paths in {file.name}: {name_first(paths, _MOST)}"
