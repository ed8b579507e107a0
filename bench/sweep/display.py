"""The progress of a sweep: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.base.processes import discard_output
from bench.base.text import GIB, clean, write_number, write_seconds
from bench.results.study.comparable import Period
from bench.schema.case import Case
from bench.schema.record import MEASURED, Record, Status, describe_unmet
from bench.workers.executors import Event
from bench.workers.job import PhaseEntered

_PLAIN_EVERY_S = 30.0


@dataclass
class _Lane:
    name: str  # of the lane and its case
    phase: str = "set-up"
    began: float = 0.0
    due: float = 0.0  # when it is next told of, where there is no terminal


class Display:
    """The running cases with phase, step and memory, and how each ended.

    On a terminal the last line is that of the lane that was heard of last; the only lane of a sweep
    has no name. ``runs`` is the number of runs to make, ``done`` that of runs already there;
    ``runs`` is None if each run decides on the next, as in a ``search``. ``axes`` name each case,
    see `bench.schema.case.list_varying`; ``cases`` are those of the runs to make, as far as known.
    """

    def __init__(
        self,
        out: Path,
        runs: int | None,
        done: int,
        axes: Sequence[str] | None = None,
        search: str = "the largest batch",
        cases: Iterable[Case] = (),
    ) -> None:
        self._out, self._runs, self._done, self._axes = out, runs, done, axes
        self._search = search
        self._index, self._began = 0, time.monotonic()
        self._left = Counter(cases)
        self._took: dict[Case, list[float]] = {}  # of ended runs, in s
        self._lanes: dict[str, _Lane] = {}
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Display:
        kept = f", {self._done} already there" if self._done else ""
        what = f"looking for {self._search}" if self._runs is None else f"{self._runs} to run"
        self.say(f"{what}{kept}, into {self._out}")
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def leave_out(self, case: Case, runs: int) -> None:
        """Leave out the other runs of a case, of which there are so many."""
        self._left.pop(case, None)
        if self._runs is not None:
            self._runs -= runs

    def say(self, line: str) -> None:
        """Print a line above the live one."""
        self._show("")
        self._print(f"{clean(line)}\n")

    def begin(self, case: Case, repeat: int, sentinel: bool, lane: str = "") -> None:
        again = "again, for drift" if sentinel else f"repeat {repeat}" if repeat > 1 else ""
        here = _Lane(" · ".join(filter(None, [lane, case.label(self._axes), again])))
        here.began = time.monotonic()
        self._lanes[lane], here.due = here, here.began + _PLAIN_EVERY_S
        self._show(f"{here.name}: {here.phase}")

    def show(self, event: Event, lane: str = "") -> None:
        here = self._lanes[lane]
        if isinstance(event, PhaseEntered):
            here.phase = f"{event.phase} {event.epoch + 1}" if event.epoch else event.phase
            self._show(f"{here.name}: {here.phase}")
            return
        of = f" of {event.total}" if event.total else ""
        now = f"{here.phase}, step {event.step + 1}{of}, {event.memory_bytes / GIB:.2f} GiB"
        self._show(f"{here.name}: {now}")
        if not self._live and time.monotonic() >= here.due:
            here.due = time.monotonic() + _PLAIN_EVERY_S
            self.say(f"  {here.name}: {now}")

    def end(self, record: Record, lane: str = "") -> None:
        place = ""
        if record.status is not Status.LOST:  # it counts when it is run again
            self._index += 1
            self._left[record.case] -= 1
            took_s = time.monotonic() - self._lanes[lane].began
            self._took.setdefault(record.case, []).append(took_s)
            place = f"[{self._index}] " if self._runs is None else f"[{self._index}/{self._runs}] "
        name = self._lanes[lane].name
        self.say(f"{place}{name}: {_describe(record)}{self._estimate_left()}")

    def _estimate_left(self) -> str:
        """Say how long the other runs take: as long as those of their case did, and of cases that
        have none, as long as all did. Of more of these than have ended nothing is said: the first
        of a sweep may take a seventh of the next."""
        known = [fmean(self._took[case]) for case in self._left.elements() if case in self._took]
        unknown = (self._runs or 0) - self._index - len(known)
        if unknown > self._index or not self._took:
            return ""
        every = [took_s for of in self._took.values() for took_s in of]
        # lanes run side by side, and something is done between two runs
        share = (time.monotonic() - self._began) / (sum(every) or 1.0)
        left_s = (sum(known) + max(0, unknown) * fmean(every)) * share
        guess = " if the others take as long" if unknown > 0 else ""
        return f"; about {write_seconds(left_s)} left{guess}" if left_s > _PLAIN_EVERY_S else ""

    def _show(self, line: str) -> None:
        """Write a line over the live one, on a terminal."""
        if self._live:
            self._print(line, live=True)

    def _print(self, text: str, live: bool = False) -> None:
        try:
            if live:
                width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
                text = f"\r\x1b[K{clean(text)[: width - 1]}"
            print(text, end="", file=sys.stderr, flush=True)
        except OSError as error:  # of a terminal that was closed, or some other
            if error.errno not in (errno.EIO, errno.ENOTTY):
                raise
            discard_output()
            self._live = False


def _describe(record: Record) -> str:
    case, m, words = record.case, record.measurement, list[str]()
    if record.status not in MEASURED:
        return f"{record.status}: {record.reason}"
    if record.probe:  # its few steps measure memory only
        words.append("trains")
    elif m.epoch_time_s is not None:
        cut = case.fraction < 1 or case.steps is not None or m.epoch_time_error is not None
        what = "an epoch"
        if case.command is not None:  # which need not tell of epochs
            number, unit = record.environment.train_images or 0, record.environment.unit or ""
            cut |= (m.measured_images or 0) < number
            period = Period(unit, number, whole=m.steps_per_epoch is not None)
            what = str(period) if unit == "runs" else f"for {period}"
        words.append(f"{'≈' if cut else ''}{write_number(m.epoch_time_s)} s {what}")
    memory = m.peak_device_bytes if m.peak_device_bytes is not None else m.peak_process_bytes
    if memory is not None:
        words.append(f"{memory / GIB:.2f} GiB")
    if m.train_loss is not None and not record.probe:
        words.append(f"loss {m.train_loss:.3f}")
    if m.train_accuracy is not None and not record.probe:
        words.append(f"accuracy {100 * m.train_accuracy:.1f} %")
    if unmet := describe_unmet(m.missing or ""):
        words.append(unmet)
    if m.truncated_after is not None:
        words.append(f"ended after {m.truncated_after} of {case.epochs} epochs")
    if record.status is not Status.OK:
        words.append(f"{record.status}: {record.reason}")
    return ", ".join(words)
