"""The folder of a run's checkpoints: which run they are from, and whether it has ended."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.case import AXES, Case, format_value
from bench.record import COMPARABLE, MEASURED, Environment, Record
from bench.store.table import BEST, LAST
from bench.text import clean, replace_file

ENDED = "record_id"
"""A file beside the checkpoints of a run that has its row, with the row's ``record_id``. Without
it, the checkpoints are of an interrupted run, and are resumed."""


@dataclass(frozen=True)
class KeptRun:
    """A run that may keep checkpoints in ``folder``, which the worker makes; ``run_name`` is its
    repeat, or marks the sentinel."""

    folder: Path
    run_name: str

    def open(self) -> None:
        """Remove the files of a run that has ended, so that it starts anew."""
        if (self.folder / ENDED).exists():
            with suppress(OSError):
                for name in (LAST, BEST, ENDED):
                    (self.folder / name).unlink(missing_ok=True)

    def identify(self, case: Case, environment: Environment) -> dict[str, str]:
        """Return what a checkpoint must agree on to be resumed, so that rows stay comparable."""
        return {
            **{name: format_value(getattr(case, name)) for name in AXES},
            "run": self.run_name,
            **{name: clean(getattr(environment, name) or "") for name in COMPARABLE},
        }

    def finish(self, record: Record) -> None:
        """Mark the run as ended if its record has a measurement."""
        if record.status in MEASURED and self.folder.is_dir():
            with suppress(OSError):
                replace_file(self.folder / ENDED, record.record_id + "\n")
        with suppress(OSError):
            self.folder.parent.rmdir()  # if no run keeps anything
