"""The checkpoints of one run: saved after each epoch, resumed, and measured."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.case import Case
from bench.data.batches import Supply
from bench.errors import UsageError
from bench.record import EpochRow
from bench.scratch import Scratch
from bench.store.cells import BEST, LAST
from bench.text import clean, sync_folder
from bench.training.building import build_training, open_workload
from bench.training.checkpoint import (
    CheckpointError,
    drop_cache,
    find_difference,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    trace,
)
from bench.training.loop import Training
from bench.training.timing import find_accelerator
from bench.worker.messages import Finished
from bench.worker.preparation import end_workers, open_supply

_STEPS = 3
"""Number of compared steps. The second one depends on the optimizer's state, the third on the state
that the second one left."""

_SAVED = ("checkpoint_bytes", "checkpoint_save_s", "checkpoint_load_s", "resume_exact")

NOT_REPEATABLE = "this device does not repeat a step bitwise, with or without a checkpoint"


@dataclass
class Checkpoints:
    """The checkpoint files of a run in ``folder``, which is created with the first one. If it is
    empty, a temporary folder is used. Only files of runs with several epochs are kept at the end.
    ``identity`` describes the run by name: a checkpoint with another identity is not resumed."""

    case: Case
    folder: str
    identity: Mapping[str, str]
    stay: bool = field(init=False)  # for later processes
    _notes: list[str] = field(default_factory=list)
    _failure: str = "no epoch was saved"
    _bytes: int = 0
    _times: list[float] = field(default_factory=list)
    _scratch: Scratch | None = None

    def __post_init__(self) -> None:
        self.stay = self.case.checkpoint and self.case.epochs > 1 and bool(self.folder)

    def resume(self, training: Training) -> dict[str, Any] | None:
        """Resume from the last checkpoint of this run, if there is one. Return the ``progress``
        saved with it, or None if training starts anew."""
        if not self.stay:
            return None
        try:
            kept = load_checkpoint(self._place(LAST))
            if other := self._find_other(kept["identity"]):
                raise CheckpointError(f"it is of another run: {other}")
            restore_checkpoint(kept, training)
        except FileNotFoundError:
            return None
        except Exception as error:
            why = str(error) if isinstance(error, CheckpointError) else _word(error)
            self._notes.append(f"an earlier checkpoint was not resumed: {why}")
            with suppress(OSError):
                self._place(BEST).unlink(missing_ok=True)  # it is not of this run either
            training.reset()
            return None
        self._failure = ""
        self._bytes = self._place(LAST).stat().st_size
        progress: dict[str, Any] = kept["progress"]
        return progress

    def save(
        self, training: Training, epochs: Sequence[EpochRow], progress: Mapping[str, Any]
    ) -> None:
        """Save the last checkpoint. If that fails, note the reason and let training go on.
        ``epochs`` tell which epoch is the best; ``progress`` holds what a resuming process needs
        of them, in plain containers."""
        try:
            file = self._place(LAST)
            file.parent.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            self._bytes = save_checkpoint(
                file,
                training,
                identity=dict(self.identity),
                seed=self.case.seed,
                epoch=len(epochs),
                progress=dict(progress),
            )
            self._times.append(time.perf_counter() - start)
            self._failure = ""
        except Exception as error:
            self._failure = _word(error)
            if self.stay:
                self._notes.append(
                    f"no checkpoint was saved after epoch {len(epochs)}: {self._failure}"
                )
        else:
            self.keep_best(epochs)

    def keep_best(self, epochs: Sequence[EpochRow]) -> None:
        """Keep the last checkpoint as the best too, if its epoch is the best: as a hard link."""
        if not self.stay or find_best(epochs) != len(epochs) - 1:
            return
        last, best = self._place(LAST), self._place(BEST)
        temporary = best.with_name(f".{BEST}")
        try:
            temporary.unlink(missing_ok=True)
            try:
                os.link(last, temporary)
            except OSError:  # a file system without links
                shutil.copyfile(last, temporary)
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
            temporary.replace(best)
            temporary.unlink(missing_ok=True)  # it stays if both were the same file already
            sync_folder(best.parent)
        except OSError as error:
            self._notes.append(f"epoch {len(epochs)} was not kept as the best: {_word(error)}")

    def load_into(self, training: Training) -> tuple[dict[str, Any], float]:
        """Restore ``training`` from the last checkpoint; return its contents and the time in s."""
        drop_cache(self._place(LAST))
        start = time.perf_counter()
        kept = load_checkpoint(self._place(LAST))
        restore_checkpoint(kept, training)
        return kept, time.perf_counter() - start

    def measure(self, training: Training, batches: Supply, folder: str, found: Finished) -> None:
        """Record the cost of saving, time a load into a new network and compare the next steps. The
        new network starts from another seed and its data in ``folder`` are opened again, so that no
        leftover state can help. Files that are not kept are removed at the end."""
        m, case = found.measurement, self.case
        with found.leave_out_on_error(*_SAVED):
            if self._failure:
                raise UsageError(self._failure)
            m.checkpoint_bytes = self._bytes
            m.checkpoint_save_s = median(self._times) if self._times else None
            live = trace(training, batches.divide(case.epochs, steps=_STEPS))
            end_workers(batches)  # their prefetching would slow the load
            other = replace(case, seed=(case.seed + 1) % 2**31)

            def resume() -> dict[str, str]:
                workload = open_workload(case, folder)
                resumed = build_training(other, workload, training.device)
                kept, seconds = self.load_into(resumed)
                m.checkpoint_load_s = m.checkpoint_load_s or seconds
                supply = open_supply(replace(case, seed=kept["seed"]), workload, training.device)
                try:
                    return trace(resumed, supply.divide(kept["epoch"], steps=_STEPS))
                finally:
                    end_workers(supply)

            difference, repeats = _compare(live, resume)
            if repeats:
                m.resume_exact, m.resume_difference = not difference, difference or None
            else:
                found.leave_out(NOT_REPEATABLE, "resume_exact")
        for name in _SAVED:
            if getattr(m, name) is not None:
                found.missing.pop(name, None)
        if m.checkpoint_bytes and m.checkpoint_save_s is None:
            found.leave_out("an earlier process saved it", "checkpoint_save_s")
        self._close()
        for note in self._notes:
            found.note(note)
        if accelerator := find_accelerator(training.device):
            # the precision proof needs the memory that the new network had
            gc.collect()
            accelerator.empty_cache()

    def _close(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
        elif not self.stay and self.folder:
            self._place(LAST).unlink(missing_ok=True)
            with suppress(OSError):
                Path(self.folder).rmdir()

    def _place(self, name: str) -> Path:
        if not self.folder:
            self._scratch = Scratch("checkpoint")
            self.folder = self._scratch.name
        return Path(self.folder) / name

    def _find_other(self, identity: Mapping[str, str]) -> str:
        """Return how ``identity`` differs from this run's; empty if it does not."""
        for name in dict.fromkeys([*self.identity, *identity]):
            was, now = identity.get(name, ""), self.identity.get(name, "")
            if was != now:
                return f"{name.replace('_', ' ')} was {was or 'none'}, now {now or 'none'}"
        return ""


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


def _compare(live: Mapping[str, str], resume: Callable[[], Mapping[str, str]]) -> tuple[str, bool]:
    """Return the first difference between the trace ``live`` of a training's steps and the trace
    that ``resume`` returns (empty if none), and whether the device repeats a step at all. If they
    differ, two resumes, which start from the same bits, are compared with each other."""
    difference = find_difference(live, first := resume())
    return difference, not difference or not find_difference(first, resume())


def _word(error: Exception) -> str:
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {clean(str(error))[:200]}"
