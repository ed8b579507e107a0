"""The search for advice, as a source of runs for a lane, whose folder may hold earlier runs; and
its answer: what to train with, how sure that is, what was not tried."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic

from bench.advise.findings import Findings, list_changes, list_levers, strip
from bench.case import Case, format_value
from bench.errors import UsageError
from bench.flags import join_flags
from bench.limits import NEAR
from bench.questions.halving import spell_case
from bench.record import REPEATED, Outcome, Record, Status, flatten
from bench.store.rows import Row, keep_latest, read_history
from bench.study.axes import name_setting
from bench.sweep.display import Display
from bench.sweep.execution import Grid, OomSkips
from bench.sweep.folder import read_past, write_config
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Options, Plan
from bench.text import name_first, parse_bytes, read_time, write_percent, write_seconds
from bench.verdict import compare
from bench.wall import read_peak
from bench.worker import Job, Lane

UNTIL = 0.01
"""Relative error of the epoch time, within the run, at which a run may end."""

MOST_PART, MOST_S = 0.1, 10.0
"""Largest part of an epoch that a run may take, and most seconds of its steps, as far as they can
be predicted: a tenth of an epoch of ResNet-18 at 224 pixels took two CPU cores 8 minutes."""

LEAST_STEPS = 8
"""Steps that a run measures however long they take: an epoch has no interval below six steps."""

EXPLORE = 0.7
"""Share of the budget for looking for better settings; the rest is for repeats."""


MORE = 2
"""Multiple of the budget to propose if the budget was too small."""

SEEDS = 5
"""Seeds by which to compare what two settings learn."""


@dataclass(frozen=True)
class Question:
    """A command line, parsed and checked."""

    now: Case  # the setting that is used now
    options: Options
    budget_s: float


def find_advice(asked: Question, until: float) -> Answer:
    """Search until ``until``, by `time.monotonic`, and return what was found."""
    with open_loop(asked.options, Plan([asked.now])) as loop:
        now, given = strip(loop.inputs.plan.cases[0]), asked.options.axes
        levers = list_levers(now, given, loop.inputs.data(now).train_images)
        loop.lock()
        comparable, _ = read_past(loop, [now])
        write_config(loop)
        advisor = Advisor(loop, Findings(now, levers, given), comparable, asked.budget_s, until)
        known = sum(map(len, advisor.findings.runs.values()))
        with Display(loop.out, None, known, [*levers], "the best setting") as display:
            loop.show_on(display)
            loop.work(advisor)
        pending = advisor.choose(math.inf) is not None
    resume = propose(loop.resume, asked.budget_s, loop.stopped) if pending else ""
    return Answer(advisor.findings, advisor.left_out, loop.out, resume, loop.stopped)


class Advisor(Grid):
    """Source of runs, one at a time: what `Findings.explore` asks for, then repeats.

    Args:
        rows: those of the folder that new ones can be compared with.
        until: the time.monotonic() at which the budget ends.
    """

    def __init__(
        self, loop: Loop, findings: Findings, rows: Sequence[Row], budget_s: float, until: float
    ) -> None:
        super().__init__(loop, [], read_history(rows), OomSkips({}), {})
        self.findings, self._budget_s, self._until = findings, budget_s, until
        self.left_out = self._refuse_precisions()
        again = REPEATED | set(loop.options.retry)
        for row in keep_latest(row for row in rows if row.is_repeat):
            if row.status not in again:
                findings.add(row.case, row)

    def _refuse_precisions(self) -> dict[str, str]:
        """Return why precisions are not tried on this machine."""
        now = self.findings.now
        names = [str(name) for name in self.findings.levers["precision"]]
        why = {name: self.loop.refuse(replace(now, precision=name)) for name in names}
        return {name: reason for name, reason in why.items() if reason and name != now.precision}

    @property
    def left(self) -> bool:
        return not self.running and (super().left or self._choose_now() is not None)

    def _choose_now(self) -> Case | None:
        return self.choose(self._until - monotonic())

    def choose(self, left_s: float) -> Case | None:
        """Return the next setting to run, with so much time left; None if no run fits in it, or
        none would help."""
        runs = self.findings.runs
        spare_s = (1 - EXPLORE) * self._budget_s
        for setting in self.findings.explore():
            if setting in runs or not self._may_run(setting):
                continue
            if not runs or self._predict_s(setting) <= left_s - spare_s:
                return setting
            break
        again = self.findings.list_unrepeated()
        return next((s for s in again if self._predict_s(s) <= left_s), None)

    def _may_run(self, setting: Case) -> bool:
        """Return whether a setting can run, and should fit: a CPU's system kills what does not."""
        if setting.precision in self.left_out:
            return False
        try:
            self.loop.inputs.check_batches(setting)
        except UsageError:
            return False
        alike = [row for row in self.findings.rows if row.precision == setting.precision]
        if any(r.status is Status.OOM and r.batch_size <= setting.batch_size for r in alike):
            return False
        each = [used / row.batch_size for row in alike if (used := read_peak(row))]
        room = _find_room(setting) if setting.device == "cpu" and each else math.inf
        return min(each, default=0.0) * setting.batch_size <= room

    def _predict_s(self, setting: Case) -> float:
        """Return the seconds that a run takes, like those so far that were compiled alike."""
        took = [
            read_time(row.finished_at) - read_time(row.started_at)
            for row in self.findings.rows
            if row.compile == setting.compile and row.status is Status.OK
        ]
        return median(took) if took else 0.0

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        self.loop.rate(lane, self.findings.now.device)
        if self.running:
            return None
        if not self._runs and (setting := self._choose_now()):
            case = self.findings.cases.get(setting) or self._size(setting)
            self._runs.append((case, len(self.findings.runs.get(setting, ())) + 1, False))
        return super().take(lane, idle)

    def _size(self, setting: Case) -> Case:
        """Return the case that measures a setting for `MOST_S`, and at least `LEAST_STEPS`."""
        times = [median(of) for of in self.findings.times.values()]
        epoch_s = median(times) if times else 0.0  # not known before the first run
        items = max(1, self.loop.inputs.data(setting).train_images)
        part = LEAST_STEPS * setting.batch_size / items
        if epoch_s:
            part = max(part, min(MOST_PART, MOST_S / epoch_s))
        return replace(setting, until=UNTIL, fraction=float(f"{min(1.0, part):.2g}"))

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        super().settle(job, record, outcome)
        if record.status not in REPEATED:
            self.findings.add(job.case, Row(flatten(record)))
            left_s = self._until - monotonic()
            self.loop.display.say(f"    {describe_progress(self.findings, left_s)}")


def _find_room(setting: Case) -> float:
    """Return the bytes that training may use: a limit, or half of what the CPU has available, as
    other programs need some."""
    import psutil

    if setting.memory_limit:
        return parse_bytes(setting.memory_limit)
    half: float = psutil.virtual_memory().available / 2
    return half


# --------------------------------------------------------------------------------------- the answer


def name(setting: Case, now: Case) -> str:
    """Name a setting by its precision, batch size and what else it changes of the present one."""
    axes = dict.fromkeys(["precision", "batch_size", *list_changes(setting, now)])
    values = {axis: format_value(getattr(setting, axis)) or "none" for axis in axes}
    return ", ".join(name_setting(axis, text) for axis, text in values.items())


def describe_progress(findings: Findings, left_s: float) -> str:
    """Return a line for after a run: what would be advised, and what is left of the budget."""
    advised = findings.advised
    said = f"so far: {name(advised, findings.now)}; " if advised else ""
    return said + (f"{write_seconds(left_s)} left" if left_s > 0 else "nothing left of the budget")


def propose(command: str, budget_s: float, stopped: int) -> str:
    """Return the command that continues a search, with the budget that it should have."""
    minutes = math.ceil(budget_s * (1 if stopped else MORE) / 60)
    words = shlex.split(command)
    return shlex.join([*words[:3], *join_flags(words[3:], ["--budget", f"{minutes}m"])])


@dataclass(frozen=True)
class Answer:
    """The outcome of a search."""

    findings: Findings
    left_out: Mapping[str, str]  # precisions that are not tried, and why
    folder: Path  # where the runs are
    resume: str  # the command that continues; empty if nothing is left to run
    stopped: int = 0  # the signal that stopped it before the budget was used; 0 for none

    @property
    def advised(self) -> Case | None:
        """The setting to train with; None if fewer than two settings were measured."""
        return self.findings.advised if len(self.findings.times) > 1 else None

    def write(self) -> Iterator[str]:
        """Yield the lines of the answer, the most important first."""
        findings, advised = self.findings, self.advised
        if advised is None:
            yield (
                f"No advice: {len(findings.times)} settings were measured, and it takes two; "
                f"python -m bench.report {shlex.quote(str(self.folder))} says why."
            )
        else:
            yield self._recommend(advised)
            lowest = min(findings.times, key=lambda setting: median(findings.times[setting]))
            if lowest != advised:
                yield (
                    f"The lowest time is that of {name(lowest, findings.now)}, "
                    f"{self._compare(lowest, advised)} it: the smallest batch within "
                    f"{write_percent(NEAR)} is advised, and of equals what changes least."
                )
        if failed := "; ".join(self._list_failed()):
            yield f"Did not train: {failed}."
        if untried := "; ".join(self._list_untried()):
            yield f"Not tried: {untried}."
        if advised not in (None, findings.now):
            yield "Does it learn as well? Train both whole, over several seeds, and see:"
            yield from (f"  {command}" for command in self._list_commands(advised))
        if self.resume:
            yield f"Next: {self.resume}"

    def _recommend(self, advised: Case) -> str:
        """Say what to train with, and what that gains over the present setting."""
        now, times = self.findings.now, self.findings.times
        of = f"of {len(times)} settings measured"
        if advised == now:
            return f"Stay with {name(now, now)}, {of}."
        said = f"Train with {name(advised, now)}, {of}"
        if now not in times:
            return f"{said}; what you have now ({name(now, now)}) could not be."
        here, there = (self._find_memory(setting) for setting in (advised, now))
        share = f", with {100 * here / there:.0f} % of its memory" if here and there else ""
        gain = self._compare(advised, now)
        return f"{said}: {gain} what you have now ({name(now, now)}){share}."

    def _compare(self, setting: Case, other: Case) -> str:
        """Return ``3.10× (2.90 to 3.31) as fast as``; without an interval if there are too few
        repeats."""
        times = self.findings.times
        (ratio,) = compare([(times[setting], times[other])])
        ends = ""
        if ratio.low is not None and ratio.high is not None:
            chance = ", which may be chance," * (ratio.low < 1 < ratio.high)
            ends = f" ({ratio.low:.2f} to {ratio.high:.2f}{chance})".replace(",)", ")")
        return f"{median(times[other]) / median(times[setting]):.2f}×{ends} as fast as"

    def _find_memory(self, setting: Case) -> float | None:
        peaks = [read_peak(row) for row in self.findings.runs[setting]]
        return max((peak for peak in peaks if peak), default=None)

    def _list_failed(self) -> Iterator[str]:
        """Yield the settings that did not train, by how they ended."""
        found: dict[str, list[str]] = {}
        for setting, rows in self.findings.runs.items():
            if rows[-1].status is not Status.OK:
                why = f"{rows[-1].status}: {rows[-1].reason}"
                found.setdefault(why, []).append(name(setting, self.findings.now))
        yield from (f"{name_first(names, 3, '; ')} ({why})" for why, names in found.items())

    def _list_untried(self) -> Iterator[str]:
        """Yield what could not be tried, with the reason, and values of levers that no run had."""
        yield from (f"{what} ({why})" for what, why in self.left_out.items())
        for axis, values in self.findings.levers.items():
            seen = {str(getattr(setting, axis)) for setting in self.findings.runs}
            left = [v for v in values if str(v) not in {*seen, *self.left_out}]
            yield from (name_setting(axis, format_value(value)) for value in left)

    def _list_commands(self, advised: Case) -> Iterator[str]:
        folder = str(self.folder.with_name(f"{self.folder.name}-whole"))
        for setting in (self.findings.now, advised):
            how = ["--evaluate", "--repeats", str(SEEDS), "--out", folder]
            yield shlex.join(["python", "-m", "bench.sweep", *spell_case(setting), *how])
        yield shlex.join(["python", "-m", "bench.report", folder])
