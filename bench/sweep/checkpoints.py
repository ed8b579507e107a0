"""The folder of a run's checkpoints: whose they are, and whether the run has ended."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.case import AXES, Case, format_value
from bench.record import COMPARABLE, MEASURED, Environment, Record
from bench.store.cells import BEST, LAST
from bench.text import clean, replace_file

ENDED = "record_id"
"""A file beside the checkpoints of a run that has its row, with the row's ``record_id``. Whatever
else lies there is of a run that was cut short, and is gone on from."""


@dataclass(frozen=True)
class KeptRun:
    """A run, by its repeat or as the sentinel, that may keep checkpoints in a folder that the
    worker makes."""

    folder: Path
    which: str

    def open(self) -> None:
        """Remove the files of a run that has ended: one that is asked for anew starts anew."""
        if (self.folder / ENDED).exists():
            with suppress(OSError):
                for name in (LAST, BEST, ENDED):
                    (self.folder / name).unlink(missing_ok=True)

    def identify(self, case: Case, environment: Environment) -> dict[str, str]:
        """What a checkpoint must be of to be resumed: rows that differ in it are not compared."""
        return {
            **{name: format_value(getattr(case, name)) for name in AXES},
            "run": self.which,
            **{name: clean(getattr(environment, name) or "") for name in COMPARABLE},
        }

    def finish(self, record: Record) -> None:
        """Say that the run has its row, if it has one with a measurement."""
        if record.status in MEASURED and self.folder.is_dir():
            with suppress(OSError):
                replace_file(self.folder / ENDED, record.record_id + "\n")
        with suppress(OSError):
            self.folder.parent.rmdir()  # where no run keeps anything
