"""What a folder of results holds, read once for all claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.base.origin import EXECUTORS
from bench.results.store.reader import read_beside, read_config
from bench.results.study.runs import Run, list_runs
from bench.results.study.sweeps import SweepFolder, read_sweep
from bench.schema.case import Case, list_varying
from bench.schema.record import MEASURED, Step, WorkRow


@dataclass(frozen=True)
class EvidenceRow:
    """A measured row: its name within the folder, its run, and its rows of the ``steps`` and
    ``work`` tables. Its cells are given by column, None for empty numbers."""

    name: str
    run: Run
    steps: Sequence[Step]
    work: Sequence[WorkRow]

    @property
    def case(self) -> Case:
        return self.run.case

    @property
    def epochs(self) -> int:
        """How many epochs it trained; a search may end a case after some of its own."""
        return int(self["truncated_after"] or self.case.epochs)

    @cached_property
    def times(self) -> list[float]:
        """The time of each step, in s."""
        return [step.time_s or 0.0 for step in self.steps]

    def __getitem__(self, column: str) -> Any:
        value = getattr(self.run, column)
        return None if value != value else value

    def has(self, *columns: str) -> bool:
        return all(self[column] not in (None, "") for column in columns)


@dataclass(frozen=True)
class Evidence:
    """The tables and plans of a folder, and its records as they are written."""

    sweep: SweepFolder
    runs: list[Run]
    steps: dict[str, list[Step]]
    config: dict[str, Any]

    @cached_property
    def own(self) -> list[Run]:
        """The records that this harness measured. Others, such as published ones, are read but make
        no claim about how they were measured."""
        return [run for run in self.runs if run.executor in EXECUTORS]

    @cached_property
    def rows(self) -> list[EvidenceRow]:
        """The own rows whose status says that they were measured."""
        return [
            EvidenceRow(self.name(run), run, self.steps.get(run.record_id, ()), work)
            for run in self.own
            if run.status in MEASURED
            for work in [self.sweep.work.get(run.record_id, ())]
        ]

    @cached_property
    def _varying(self) -> list[str]:
        return list_varying([run.case for run in self.runs])

    def name(self, run: Run) -> str:
        repeat = f", repeat {run.repeat}" if run.repeat > 1 else ""
        return f"{run.case.label(self._varying)}{repeat}{', drift check' if run.sentinel else ''}"


def read_evidence(folder: Path) -> Evidence:
    """Raises UsageError: as `read_sweep`."""
    sweep = read_sweep(folder)
    steps, config = read_beside(sweep.path, Step), read_config(sweep.path)
    return Evidence(sweep, list_runs(sweep.rows), steps, config)
