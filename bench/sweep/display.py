"""The progress of a sweep: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.case import Case
from bench.executors import Event
from bench.limits import is_shared
from bench.record import MEASURED, Record, Status, Step, describe_unmet
from bench.text import GIB, clean, write_number, write_seconds
from bench.worker.messages import PhaseEntered

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PLAIN_EVERY_S = 30.0


@dataclass
class _Lane:
    name: str = ""
    phase: str = ""
    epochs: int = 1
    due: float = 0.0
    task: TaskID | None = None


class Display:
    """The running cases with phase, step, running loss and memory, and the overall progress.

    Each lane has a line of its own; the only lane of a sweep has no name. ``runs`` is the number of
    runs to make, ``done`` that of runs already there; ``runs`` is None if each run decides on the
    next, as in a ``search``. ``axes`` name each case, see `bench.case.list_varying`, and ``how``
    explains the number of runs.
    """

    def __init__(
        self,
        out: Path,
        runs: int | None,
        done: int,
        axes: Sequence[str] | None = None,
        search: str = "the largest batch",
        how: str = "",
    ) -> None:
        self._out, self._runs, self._done, self._axes = out, runs, done, axes
        self._search, self._how = search, how
        self._index, self._began = 0, time.monotonic()
        self._lanes: dict[str, _Lane] = {}
        self._live: Progress | None = None

    def __enter__(self) -> Display:
        kept = f", {self._done} already there" if self._done else ""
        what = f"looking for {self._search}" if self._runs is None else f"{self._runs} to run"
        self.say(f"{what}{self._how and f' ({self._how})'}{kept}, into {self._out}")
        if sys.stderr.isatty() and self._runs != 0:
            self._live = _build_progress()
            self._live.start()
            self._all = self._live.add_task("all", total=self._runs, phase="", now="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def leave_out(self, runs: int) -> None:
        if self._runs is not None:
            self._runs -= runs
            if self._live:
                self._live.update(self._all, total=self._runs)

    def say(self, line: str) -> None:
        """Print a line above whatever is live."""
        text = clean(line)
        if self._live:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def begin(self, case: Case, repeat: int, sentinel: bool, lane: str = "") -> None:
        again = "sentinel" if sentinel else f"repeat {repeat}" if repeat > 1 else ""
        here = self._lanes.setdefault(lane, _Lane())
        here.name = " · ".join(filter(None, [lane, case.label(self._axes), again]))
        here.phase, here.epochs = "set-up", case.epochs
        here.due = time.monotonic() + _PLAIN_EVERY_S
        self._show(here)

    def show(self, event: Event, lane: str = "") -> None:
        here = self._lanes[lane]
        if isinstance(event, PhaseEntered):
            here.phase = _name_phase(event, here.epochs)
            self._show(here)
            return
        now = f"loss {event.loss:.3f}  {event.memory_bytes / GIB:.2f} GiB"
        total = event.total or None
        self._show(here, total, event.step + 1, now)
        if self._live is None and time.monotonic() >= here.due:
            here.due = time.monotonic() + _PLAIN_EVERY_S
            of = f" of {total}" if total else ""
            self.say(f"  {here.name}: {here.phase} step {event.step + 1}{of}, {now}")

    def end(self, record: Record, lane: str = "") -> None:
        here = self._lanes[lane]
        if record.status is Status.LOST:  # it counts when it is run again
            self.say(f"{here.name}: {_describe(record)}")
        else:
            self._index += 1
            of = "" if self._runs is None else f"/{self._runs}"
            left = "" if self._live else self._estimate_left()
            self.say(f"[{self._index}{of}] {here.name}: {_describe(record)}{left}")
            if self._live:
                self._live.update(self._all, advance=1)
        if lane:  # other lanes run on; this line must not look as if its case did
            here.name, here.phase = lane, ""
            self._show(here)

    def _estimate_left(self) -> str:
        """Say how long the other runs take if they take as long as those so far."""
        took_s = time.monotonic() - self._began
        left_s = took_s * ((self._runs or 0) - self._index) / self._index
        return f"; about {write_seconds(left_s)} left" if left_s > _PLAIN_EVERY_S else ""

    def _show(self, here: _Lane, total: int | None = None, done: int = 0, now: str = "") -> None:
        if self._live is None:
            return
        if here.task is None:
            here.task = self._live.add_task("", total=None, phase="", now="")
        update = partial(self._live.update, here.task, description=here.name, phase=here.phase)
        update(total=total, completed=done, now=now)


def _name_phase(event: PhaseEntered, epochs: int) -> str:
    if epochs == 1 or event.phase == "warmup":
        return event.phase
    place = f"epoch {event.epoch + 1} of {epochs}"
    return place if event.phase == "epoch" else f"{event.phase} after {place}"


def _build_progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[phase]}", style="cyan", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}", markup=False),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _describe(record: Record) -> str:
    m, words = record.measurement, []
    if record.status not in MEASURED:
        return f"{record.status}: {record.reason}"
    if record.probe:  # its few steps measure memory only
        words.append("trains")
        m = replace(m, epoch_time_s=None, train_loss=None, train_accuracy=None, warmup_steady=None)
    if m.epoch_time_s is not None:
        cut = record.case.fraction < 1 or record.case.steps is not None
        if record.case.command is not None:
            cut |= (m.measured_images or 0) < (record.environment.train_images or 0)
        about = "≈" if cut or m.epoch_time_error is not None else ""
        words.append(f"{about}{write_number(m.epoch_time_s)} s {_name_period(record)}")
    memory = m.peak_device_bytes if m.peak_device_bytes is not None else m.peak_process_bytes
    if memory is not None:
        words.append(f"{memory / GIB:.2f} GiB")
    if m.train_loss is not None:
        words.append(f"loss {m.train_loss:.3f}")
    if m.train_accuracy is not None:
        words.append(f"accuracy {100 * m.train_accuracy:.1f} %")
    if m.truncated_after is not None:
        words.append(f"ended after {m.truncated_after} of {record.case.epochs} epochs")
    if record.case.dataset == "synthetic":
        words.append(" ".join(filter(None, ["synthetic", record.case.input, "images"])))
    if m.switched:
        words.append(f"set back what your code had set ({m.switched})")
    if m.switched_within:
        words.append(f"your code set within steps {m.switched_within}")
    if unmet := describe_unmet(m.missing or ""):
        words.append(unmet)
    if m.warmup_steady is False:
        words.append("step times not steady")
    if is_shared(m.neighbours_computing or 0, m.other_cores or 0.0):
        words.append("shared with others")
    if record.status != "ok":
        words.append(f"{record.status}: {record.reason}")
    return ", ".join(words)


def _name_period(record: Record) -> str:
    """Say what the time of a run is of; a command need not tell of epochs."""
    unit, items = record.environment.unit, record.environment.train_images or 0
    if record.case.command is None or record.measurement.steps_per_epoch:
        return "an epoch"
    return "a run" if unit == "runs" else f"for {items:,} {unit}"


def write_curve(steps: Sequence[Step], steps_per_epoch: int | None, every: int = 50) -> list[str]:
    """Return lines of running means over images, every ``every`` steps, in the format of the page
    of 2019: ``50 391 Loss: 2.351 | Acc: 14.982% (978/6528)``. With several epochs, the means start
    again in each, under a line with its number from 0."""
    lines, images, total, correct = [], 0, 0.0, 0
    length = steps_per_epoch or math.inf
    several = bool(steps) and steps[-1].step >= length
    for step in steps:
        index = int(step.step % length)
        if several and index == 0:
            lines.append(f"Epoch: {int(step.step // length)}")
            images, total, correct = 0, 0.0, 0
        images, correct = images + step.images, correct + (step.correct or 0)
        total += step.images * (math.nan if step.loss is None else step.loss)
        if index % every == 0:
            line = f"{index} {steps_per_epoch} Loss: {total / images:.3f}"
            if step.correct is not None:
                line += f" | Acc: {100 * correct / images:.3f}% ({correct}/{images})"
            lines.append(line)
    return lines
