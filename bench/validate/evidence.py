"""The contents of a results folder, read once for all claims, and private data in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.case import Case, list_varying
from bench.errors import UsageError
from bench.origin import EXECUTORS
from bench.record import MEASURED, Step, WorkRow
from bench.store.reader import find_records, read_beside
from bench.store.rows import group
from bench.store.table import RECORDS
from bench.study.runs import Run, list_runs
from bench.study.sweeps import Sweep, read_sweep
from bench.text import name_first

KNOWN_FAULTS = "known-faults.txt"

OWN = tuple(EXECUTORS)
"""Executors whose rows are measured by this harness."""


@dataclass(frozen=True)
class Row:
    """A measured row: its name within the folder, its run, and its rows of the ``steps`` and
    ``work`` tables. Its cells are given by column, None for empty numbers."""

    name: str
    run: Run
    steps: Sequence[Step]
    work: Sequence[WorkRow]

    @property
    def case(self) -> Case:
        return self.run.case

    def __getitem__(self, column: str) -> Any:
        value = getattr(self.run, column)
        return None if value != value else value

    def has(self, *columns: str) -> bool:
        return all(self[column] is not None for column in columns)


@dataclass(frozen=True)
class Evidence:
    """The tables and plans of a folder. Rows of executors other than this harness's, such as
    published ones, are read but make no claim about how they were measured."""

    sweep: Sweep
    steps: dict[str, list[Step]]

    @cached_property
    def runs(self) -> list[Run]:
        """All records, as they are written."""
        return list_runs(self.sweep.rows)

    @cached_property
    def own(self) -> list[Run]:
        """The records that this harness measured."""
        return [run for run in self.runs if run.executor in OWN]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows whose status says that they were measured, without inferred ones."""
        axes, rows = list_varying([run.case for run in self.runs]), []
        for run in self.runs:
            if run.status in MEASURED and not run.inferred:
                which = f", repeat {run.repeat}" if run.repeat > 1 else ""
                name = f"{run.case.label(axes)}{which}{', sentinel' if run.sentinel else ''}"
                work = self.sweep.work.get(run.record_id, ())
                rows.append(Row(name, run, self.steps.get(run.record_id, ()), work))
        return rows

    def group(self, *columns: str) -> Iterator[list[Row]]:
        """Yield the rows that agree on these columns, as lists of two or more."""
        groups = group(self.rows, lambda row: tuple(row[column] for column in columns))
        return (rows for rows in groups if len(rows) > 1)


def read_evidence(folder: Path, sweep: Sweep | None = None) -> Evidence:
    """Read a folder, or a records file alone; ``sweep`` if it was read already. Raises UsageError:
    a file is not as it was written; gives the wrong line and column."""
    sweep = sweep or read_sweep(folder)
    if not sweep.rows:
        raise UsageError(f"{sweep.path} has no rows")
    return Evidence(sweep, read_beside(sweep.path, Step))


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


def list_disclosed(folder: Path, runs: Sequence[Run]) -> Iterator[str]:
    """Yield what identifies a machine or a person: host, GPU and environment variables of the
    records, and paths in the folder's text files."""
    for column, what in (
        ("host", "the host name"),
        ("gpu_uuid", "the UUID of the GPU"),
        ("variables", "environment variables"),
    ):
        if found := sorted({getattr(run, column) for run in runs} - {""}):
            yield f"{what} {name_first(found, _MOST)}"
    folders = [file.parent for file in find_records(folder)] if folder.is_dir() else []
    for file in sorted(file for place in folders for file in place.iterdir()) or [folder]:
        if file.suffix not in (".json", ".txt", ".log", ".html") and file.name != RECORDS:
            continue
        found = _PATH.findall(file.read_text(encoding="utf-8", errors="replace"))
        if paths := sorted({path for path in found if not path.startswith(_PUBLIC)}):
            yield f"paths in {file.name}: {name_first(paths, _MOST)}"
