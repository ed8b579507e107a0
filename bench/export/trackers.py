"""The experiment trackers, and one-line messages for their errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.errors import UsageError
from bench.export.runs import Run
from bench.text import clean


class Tracker(Protocol):
    """The destination of runs. A complete run is never written again. ``hint`` is the command that
    shows the runs, or uploads them."""

    hint: str

    def find_exported(self) -> set[str]:
        """Return the ids of the records that are exported completely."""

    def export(self, run: Run) -> None:
        """Write a run; one that was left unfinished is written again."""


@dataclass(frozen=True)
class Kind:
    """A tracker: ``place`` is the class of its `Tracker` as ``module:class``, made from a folder
    and a project; ``packages`` are what it imports, the one to install first."""

    place: str
    help: str
    packages: tuple[str, ...]


TRACKERS = {
    "tensorboard": Kind(
        "bench.export.tensorboard:Folder", "event files, one folder per record", ("tensorboard",)
    ),
    "wandb": Kind(
        "bench.export.wandb:Offline", "Weights & Biases, offline; wandb sync uploads", ("wandb",)
    ),
    "mlflow": Kind(
        "bench.export.mlflow:SqliteStore",
        "MLflow, in a SQLite file, without a server",
        ("mlflow", "sqlalchemy", "alembic"),
    ),
}


@contextmanager
def say_errors(name: str, folder: Path) -> Iterator[None]:
    """Report errors of the folder or the tracker in one line. Raises UsageError: instead of any
    exception, as most exceptions of trackers are meaningless to users."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"--out {folder}: cannot be written ({error.strerror or error}); "
            "choose a folder that can"
        ) from error
    except Exception as error:
        raise UsageError(
            f"--to {name}: {type(error).__name__}: {clean(str(error))[:300]}; check {folder}, or "
            "choose another --out"
        ) from error
