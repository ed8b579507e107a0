"""The progress of a sweep: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Self

from bench.base.progress import EVERY_S, Progress
from bench.base.text import GIB, count, write_number, write_seconds
from bench.results.store.rows import PlannedRun, Row, count_checks
from bench.results.study.comparable import Period
from bench.schema.case import Case, knows_epochs
from bench.schema.record import MEASURED, Record, Status, describe_unmet, flatten
from bench.sweep.largest_batch import read_peak, took_too_few
from bench.workers.executors import CaseEvent
from bench.workers.job import PhaseEntered, WorkBegun

_NAMES = {"warmup": "warm-up"}  # of phases, where their own is not a word


class Display(Progress):
    """The running cases with phase, step and memory, and how each ended.

    The only lane of a sweep has no name. ``runs`` is the number of runs to make, ``done`` that of
    runs already there; ``runs`` is None if each run decides on the next, as in a ``search``, which
    may have ``limit_s``. ``axes`` name each case, see `bench.schema.case.list_varying`; ``planned``
    are the runs to make, as far as known.
    """

    def __init__(
        self,
        out: Path,
        runs: int | None,
        done: int,
        axes: Sequence[str] | None = None,
        search: str = "the largest batch",
        planned: Sequence[PlannedRun] = (),
        limit_s: float | None = None,
    ) -> None:
        super().__init__(runs, "run", limit_s)
        self._out, self._there, self._axes, self._search = out, done, axes, search
        self._checks = count_checks(planned)
        self._left = Counter(case for case, _, _ in planned)
        self._took: dict[
            Case, list[float]
        ] = {}  # of ended runs of cases that have others left, in s
        self._ended, self._spent_s = 0, 0.0
        self._began_at: dict[str, float] = {}  # by lane
        self._names: dict[str, str] = {}  # of what runs, by lane

    def __enter__(self) -> Self:
        kept = f", {self._there} already there" if self._there else ""
        what = (
            f"looking for {self._search}"
            if self.total is None
            else f"{self.total} to run{self._checks}"
        )
        self.say(f"{what}{kept}, into {self._out}")
        return super().__enter__()

    def leave_out(self, case: Case, runs: int) -> None:
        """Leave out the other runs of a case, of which there are so many."""
        self._left.pop(case, None)
        self._took.pop(case, None)
        if self.total is not None:
            self.total -= runs

    def start(self, case: Case, repeat: int, sentinel: bool, lane: str = "") -> None:
        """Show a run that is set up."""
        again = "again, for drift" if sentinel else f"repeat {repeat}" if repeat > 1 else ""
        name = " · ".join(filter(None, [lane, case.label(self._axes), again]))
        self._names[lane], self._began_at[lane] = name, time.monotonic()
        self.begin(name, "set-up", lane)

    def hear(self, event: CaseEvent, lane: str) -> None:
        """Show what a run tells."""
        if isinstance(event, PhaseEntered):
            number = f" {event.epoch + 1}" if event.epoch else ""
            self.enter(f"{_NAMES.get(event.phase, event.phase)}{number}", lane)
        elif isinstance(event, WorkBegun):
            self.enter(event.what, lane)
        else:
            memory = f"{event.memory_bytes / GIB:.2f} GiB"
            self.show(event.step + 1, event.total, memory, lane)

    def conclude(self, record: Record, lane: str = "") -> None:
        """Say how a run ended, and where there is no live bar how long the others take."""
        place, counts = "", record.status is not Status.LOST  # it counts when it is run again
        if counts:
            self._left[record.case] -= 1
            took_s = time.monotonic() - self._began_at[lane]
            self._ended, self._spent_s = self._ended + 1, self._spent_s + took_s
            if self._left[record.case] > 0:
                self._took.setdefault(record.case, []).append(took_s)
            else:
                self._took.pop(record.case, None)
            of = "" if self.total is None else f"/{self.total}"
            place = f"[{self.done + 1}{of}] "
        left_s, guess = self._estimate_left(self.done + counts)
        self.end(lane, int(counts), left_s)
        left = f"; about {write_seconds(left_s)} left{guess}" if left_s > EVERY_S else ""
        self.say(f"{place}{self._names[lane]}: {_describe(record)}{left * (not self.live)}")

    def _estimate_left(self, done: int) -> tuple[float, str]:
        """Return how long the other runs take, in s, and on what that depends: as long as those of
        their case did, and of cases that have none, as long as all did. Of more of these than have
        ended it is 0, not known: the first of a sweep may take a seventh of the next."""
        unknown = (self.total or 0) - done - sum(self._left[case] for case in self._took)
        if unknown > done or not self._ended:
            return 0.0, ""
        known_s = sum(self._left[case] * fmean(took) for case, took in self._took.items())
        unknown_s = max(0, unknown) * self._spent_s / self._ended
        # lanes run side by side, and something is done between two runs
        share = (time.monotonic() - self._began) / (self._spent_s or 1.0)
        left_s = (known_s + unknown_s) * share
        return left_s, " if the others take as long" if unknown > 0 else ""


def _describe(record: Record) -> str:
    case, m, words = record.case, record.measurement, list[str]()
    if record.status not in MEASURED:
        return f"{record.status}: {record.reason}"
    device, process = m.peak_device_bytes, m.peak_process_bytes
    memory: float | None = device if device is not None else process
    if record.probe:  # its few steps measure memory only, of which that of warm-up is a part
        words.append(
            "takes too few steps" if took_too_few(row := Row(flatten(record))) else "trains"
        )
        memory = read_peak(row)
    elif m.epoch_time_s is not None:
        cut = case.fraction < 1 or case.steps is not None or m.epoch_time_error is not None
        what = "an epoch"
        if case.command is not None:  # which need not tell of epochs
            number, unit = record.environment.train_images or 0, record.environment.unit or ""
            cut |= (m.measured_images or 0) < number
            period = Period(unit, number, whole=m.steps_per_epoch is not None)
            what = str(period) if unit == "runs" else f"for {period}"
        words.append(f"{'≈' if cut else ''}{write_number(m.epoch_time_s)} s {what}")
    if memory is not None:
        words.append(f"{memory / GIB:.2f} GiB")
    if m.train_loss is not None and not record.probe:
        words.append(f"loss {m.train_loss:.3f}")
    if m.train_accuracy is not None and not record.probe:
        words.append(f"accuracy {100 * m.train_accuracy:.1f} %")
    if unmet := describe_unmet(m.missing or ""):
        words.append(unmet)
    if m.truncated_after is not None:
        whole = f"{m.truncated_after} of {case.epochs} epochs"
        known = knows_epochs(case)
        words.append(f"ended after {whole if known else count(m.truncated_after, 'epoch')}")
    if record.status is not Status.OK:
        words.append(f"{record.status}: {record.reason}")
    return ", ".join(words)
