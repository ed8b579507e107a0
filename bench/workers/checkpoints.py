"""The checkpoints of one run: saved after each epoch, and resumed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.base.errors import UsageError
from bench.base.text import clean, sync_folder
from bench.results.store.table import BEST, LAST
from bench.schema.case import Case
from bench.schema.record import EpochRow
from bench.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from bench.training.loop import Training


@dataclass
class Checkpoints:
    """The checkpoint files of a run in ``folder``, which is created with the first one; without a
    folder nothing is saved. ``identity`` describes the run by name: a checkpoint with another
    identity is not resumed. What fails is said by ``note``."""

    case: Case
    folder: Path | None
    identity: Mapping[str, str]
    note: Callable[[str], None]

    @property
    def kept(self) -> bool:
        """Whether checkpoints of this run are saved and resumed."""
        return self.case.checkpoint and self.folder is not None

    def resume(self, training: Training) -> dict[str, Any] | None:
        """Resume from the last checkpoint of this run, if there is one. Return the ``progress``
        saved with it, or None if training starts anew."""
        if not self.kept:
            return None
        try:
            found = load_checkpoint(self._place(LAST))
            if found["identity"] != dict(self.identity):
                raise CheckpointError("it is of another run, or of other code, data or packages")
            restore_checkpoint(found, training)
        except FileNotFoundError:
            return None
        except Exception as error:
            self.note(f"an earlier checkpoint was not resumed: {_word(error)}")
            with suppress(OSError):
                self._place(BEST).unlink(missing_ok=True)  # it is not of this run either
            training.reset()
            return None
        progress: dict[str, Any] = found["progress"]
        return progress

    def save(
        self, training: Training, epochs: Sequence[EpochRow], progress: Mapping[str, Any]
    ) -> None:
        """Save the last checkpoint, and a copy as the best if its epoch is the best. If that fails,
        note the reason and let training go on.
        ``epochs`` tell which epoch is the best; ``progress`` holds what a resuming process needs
        of them, in plain containers."""
        file, best = self._place(LAST), self._place(BEST)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_checkpoint(
                file,
                training,
                identity=dict(self.identity),
                seed=self.case.seed,
                epoch=len(epochs),
                progress=dict(progress),
            )
            if find_best(epochs) == len(epochs) - 1:
                temporary = best.with_name(f".{BEST}")
                shutil.copyfile(file, temporary)
                with temporary.open("rb") as copied:
                    os.fsync(copied.fileno())
                temporary.replace(best)
                sync_folder(best.parent)
        except Exception as error:
            self.note(f"no checkpoint was saved after an epoch: {_word(error)}")

    def _place(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name


def find_best(epochs: Sequence[EpochRow]) -> int | None:
    """Return the epoch with the highest test accuracy, else the lowest test loss, else the lowest
    training loss. The first of equal epochs wins; None if no epoch has a finite loss."""
    ranks: tuple[Callable[[EpochRow], float | None], ...] = (
        # with a NaN loss the argmax is still some class, which may be right by chance
        lambda e: None if e.test_accuracy is None or e.test_loss is None else -e.test_accuracy,
        lambda e: e.test_loss,
        lambda e: e.train_loss,
    )
    for rank in ranks:
        known = [(value, e.epoch) for e in epochs if (value := rank(e)) is not None]
        if known:
            return min(known)[1]
    return None


def _word(error: Exception) -> str:
    text = getattr(error, "strerror", None) or clean(str(error))[:200]
    plain = isinstance(error, OSError | UsageError | CheckpointError)
    return text if plain else f"{type(error).__name__}: {text}"
