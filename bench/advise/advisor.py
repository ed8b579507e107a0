"""The search for advice, as a source of runs for a lane, whose folder may hold earlier runs; and
its answer: what to train with, how sure that is, what was not tried."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from bench.advise.findings import (
    Findings,
    list_changes,
    list_levers,
    measure_length,
    strip,
)
from bench.answers.advice import BUDGET, parse_budget, propose
from bench.answers.choice import tell_choice
from bench.answers.halving import spell_case
from bench.answers.recommendation import tell_learnt
from bench.answers.render.table import write_ends, write_ratio
from bench.answers.report_data import ReportData, gather
from bench.base.errors import UsageError
from bench.base.plain import dump_document
from bench.base.text import (
    count,
    join_words,
    name_first,
    parse_bytes,
    read_time,
    write_seconds,
)
from bench.results.store.rows import Row, keep_latest, read_history
from bench.results.study.axes import name_setting
from bench.results.study.remedies import name_taker
from bench.results.study.sweeps import read_sweep
from bench.results.study.warnings import WARNINGS
from bench.results.verdict import Ratio, compare
from bench.schema.axis import name_axis, name_column
from bench.schema.case import Case, format_value, lay_out, list_axes
from bench.schema.command import ITEMS, ask_for_seed, list_places
from bench.schema.record import REPEATED, Outcome, Record, Status, flatten
from bench.sweep.display import Display
from bench.sweep.execution import Grid, OomSkips
from bench.sweep.largest_batch import read_peak
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Options, Plan
from bench.workers.job import Job, Lane

UNTIL = 0.01
"""Relative error of the epoch time, within the run, at which a run on a GPU may end. On two shared
cores none of 24 runs became so certain, and all had the warning that they did not; without it their
intervals, which then need not allow for a drift, were of 2 to 32 %."""

MOST_S = 10.0
"""Most seconds of a run's steps, as far as they can be predicted; `UNTIL` ends most before."""

_LEAST_STEPS = 8
"""Steps that a run measures however long they take: an epoch has no interval below six steps."""

_LONGER = 1.5  # how many times as many steps of a command are worth another run

EXPLORE = 0.7
"""Share of the budget for looking for better settings; the rest is for repeats."""

_RUNS = 10
"""The fewest runs that a proposed budget has time for."""

_LATE = 0.1
"""Share of the budget by which a run that has begun may end after it, as one that takes somewhat
longer than others did; then it is stopped."""

SEEDS = 5
"""Seeds by which to compare what two settings learn."""


def find_advice(
    now: Case, options: Options, budget_s: float, until: float, for_time: bool
) -> Advice:
    """Search from the setting that is used ``now``, until ``until`` by `time.monotonic`, and return
    what was found; ``for_time`` as of `Findings`."""
    with open_loop(options, Plan([now])) as loop:
        now, given = strip(loop.inputs.plan.cases[0]), options.axes
        levers = list_levers(now, given, loop.inputs.data(now).train_images)
        comparable = loop.find_comparable([now])
        loop.write_config()
        findings = Findings(now, levers, given, for_time)
        advisor = Advisor(loop, findings, comparable, budget_s, until)
        known = sum(map(len, findings.runs.values()))
        what, left_s = "the best setting", until - monotonic()
        # the present setting runs first for a few steps, by which the length of all is chosen
        axes = [*levers, "fraction" if now.command is None else "steps"]
        with Display(loop.out, None, known, axes, what, limit_s=left_s) as display:
            loop.show_on(display)
            loop.work(advisor)
        pending = advisor.choose(math.inf) is not None
    found = gather(ReportData, [read_sweep(loop.out)])
    run_s, left_out, resume = advisor.predict_s(now), advisor.left_out, loop.resume
    return Advice(findings, left_out, loop.out, resume, pending, loop.stopped, found, run_s)


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
        self._cut_s = 0.0  # how long the run had taken that the budget's end stopped
        self.left_out: dict[str, str] = {}  # precisions that cannot be tried here, and why
        for precision in map(str, findings.levers.get("precision", ())):
            reason = loop.refuse(replace(findings.now, precision=precision))
            if reason and precision != findings.now.precision:
                self.left_out[precision] = reason
        again = REPEATED | set(loop.options.retry)
        for row in keep_latest(row for row in rows if row.is_repeat):
            if row.status not in again:
                findings.add(row.case, row)

    @property
    def left(self) -> bool:
        left_s = self._until - monotonic()
        return not self.running and (super().left or self.choose(left_s) is not None)

    def choose(self, left_s: float) -> Case | None:
        """Return the next setting to run, with so much time left; None if no run fits in it, or
        none would help."""
        if left_s <= 0:
            return None
        runs = self.findings.runs
        spare_s = (1 - EXPLORE) * self._budget_s
        for setting in self.findings.explore():
            if self._has_run(setting) or not self._may_run(setting):
                continue
            if not runs or self.predict_s(setting) <= left_s - spare_s:
                return setting
            break
        again = self.findings.list_unrepeated()
        return next((s for s in again if self.predict_s(s) <= left_s), None)

    def _has_run(self, setting: Case) -> bool:
        """Return whether a setting was measured for as long as others: the first run of a search,
        by which the length of others is chosen, was not."""
        if setting not in self.findings.times:
            return setting in self.findings.runs
        known = self.findings.cases[setting]
        return measure_length(self._size(setting)) <= measure_length(known)

    def _may_run(self, setting: Case) -> bool:
        """Return whether a setting can run, and should fit: a CPU's system kills what does not, so
        that a batch is to fit in the limit, or in half of what is available, as by the runs so
        far."""
        if setting.precision in self.left_out:
            return False
        try:
            self.loop.inputs.check_batches(setting)
        except UsageError:
            return False
        alike = [row for row in self.findings.rows if row.precision == setting.precision]
        if not setting.batch_size:  # the choice of a command
            return True
        if any(r.status is Status.OOM and r.batch_size <= setting.batch_size for r in alike):
            return False
        each = [used / row.batch_size for row in alike if (used := read_peak(row))]
        if setting.device != "cpu" or not each:
            return True
        import psutil

        limit = setting.memory_limit
        room = parse_bytes(limit) if limit else psutil.virtual_memory().available / 2
        return bool(min(each) * setting.batch_size <= room)

    def predict_s(self, setting: Case) -> float:
        """Return the seconds that a run takes, like those so far, of which some were compiled
        alike; if none has trained, what the one took that was stopped, or 0."""
        rows = [row for row in self.findings.rows if row.status is Status.OK]
        alike = [row for row in rows if row.compile == setting.compile] or rows
        return median([*map(_time_run, alike)] or [self._cut_s])

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        if not self.left:
            return None
        self.loop.rate(lane, self.findings.now.device)
        if not self._runs and (setting := self.choose(self._until - monotonic())):
            case = self._size(setting)
            again = case == self.findings.cases.get(setting)
            repeat = len(self.findings.runs[setting]) + 1 if again else 1
            self._runs.append((case, repeat, False))
        job = super().take(lane, idle)
        return job and replace(job, until=self._until + _LATE * self._budget_s)

    def _size(self, setting: Case) -> Case:
        """Return the case that measures a setting: the one that did, if it was for longer than
        `_LEAST_STEPS`, or else one for `MOST_S`, and at least `_LEAST_STEPS`."""
        if setting.command is not None:
            return self._size_command(setting)
        items = max(1, self.loop.inputs.data(setting).train_images)
        part = _LEAST_STEPS * setting.batch_size / items
        known = self.findings.cases.get(setting)
        if known and known.fraction > 1.1 * part:  # it was rounded
            return known
        if times := [median(of) for of in self.findings.times.values()]:  # none at first
            part = max(part, MOST_S / median(times))
        until = UNTIL if setting.device == "cuda" else None
        return replace(setting, until=until, fraction=float(f"{min(1.0, part):.2g}"))

    def _size_command(self, setting: Case) -> Case:
        """Return the case that measures a setting of a command, by the time of its steps, or of the
        present one's, which grows with the batch."""
        findings, known = self.findings, self.findings.cases.get(setting)
        of = setting if setting in findings.times else findings.now
        took = [
            time / steps
            for row in findings.runs.get(of, ())
            if (time := row.number("measured_time_s")) and (steps := row.number("measured_steps"))
        ]
        steps = _LEAST_STEPS
        if took:
            grown = setting.batch_size / of.batch_size if of.batch_size else 1.0
            steps = max(steps, int(float(f"{MOST_S / (grown * median(took)):.2g}")))
        if known and steps <= _LONGER * (known.steps or 0):
            return known
        return replace(setting, steps=steps)

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn from a run, and say what would be advised and what is left of the budget."""
        super().settle(job, record, outcome)
        if record.status is Status.INTERRUPTED and not self.loop.stopped:
            self._cut_s = _time_run(record)
        if record.status in REPEATED:
            return
        self.findings.add(job.case, Row(flatten(record)))
        advised, left_s = self.findings.advised, self._until - monotonic()
        so_far = f"so far: {name(advised, self.findings.now)}; " if advised else ""
        left = f"{write_seconds(left_s)} left" if left_s > 0 else "nothing left of the budget"
        self.loop.display.say(f"    {so_far}{left}")


def _time_run(run: Row | Record) -> float:
    """Return how long a run took as a whole, in s."""
    return read_time(run.finished_at) - read_time(run.started_at)


# --------------------------------------------------------------------------------------- the answer


def name(setting: Case, now: Case) -> str:
    """Name a setting by its precision, batch size and what else it changes of the present one."""
    named = ["precision", "batch_size"]
    if now.command is not None:
        named = [axis for axis in list_axes([now]) if name_column(axis) in list_places(now.command)]
    axes = dict.fromkeys([*named, *list_changes(setting, now)])
    values = {axis: format_value(getattr(setting, axis)) or "none" for axis in axes}
    return ", ".join(name_setting(axis, text) for axis, text in values.items()) or "the command"


@dataclass(frozen=True)
class Advice:
    """The outcome of a search."""

    findings: Findings
    left_out: Mapping[str, str]  # precisions that are not tried, and why
    folder: Path  # where the runs are
    command: str  # by which it ran
    pending: bool = False  # whether anything is left to run
    stopped: int = 0  # the signal that stopped it before the budget was used; 0 for none
    found: ReportData | None = None  # what a report has of the folder
    run_s: float = 0.0  # that a run takes, or took until it was stopped; 0 if none ran

    @property
    def advised(self) -> Case | None:
        """The setting to train with; None if fewer than two settings were measured."""
        return self.findings.advised if len(self.findings.times) > 1 else None

    def write(self) -> Iterator[str]:
        """Yield the lines of the answer, the most important first."""
        findings, advised, now = self.findings, self.advised, self.findings.now
        warnings = list[str]()
        if advised is None:
            why = f"python -m bench.report {shlex.quote(str(self.folder))} says why"
            if self.pending and not self.stopped and (self.run_s or not findings.runs):
                why = "the budget was over before a run began"
                if self.run_s:
                    at_least = "at least " * (not findings.times)
                    why = f"a run takes {at_least}{write_seconds(self.run_s)}"
                why += "; the last command here has more time"
            measured = count(len(findings.times), "setting")
            yield f"No advice: {measured} measured, and it takes two: {why}."
        else:
            lowest = min(findings.times, key=findings.find_time)
            yield self._recommend(advised)
            warnings += self._warn({advised, now, lowest})
            yield from warnings
            yield from self._tell_rivals(advised, lowest)
        last = {name(setting, now): rows[-1] for setting, rows in findings.runs.items()}
        failed = [
            f"{which} ({row.status}: {row.reason})"
            for which, row in last.items()
            if row.status is not Status.OK
        ]
        if failed:
            yield f"Did not train: {name_first(failed, 3, '; ')}."
        untried = [f"{what} ({why})" if why else what for what, why in self._list_untried()]
        if untried:
            yield f"Not tried: {'; '.join(untried)}."
        if kept := [name_axis(axis) for axis in findings.kept]:
            yield (
                f"Values of {join_words(kept)} are measured and none is advised: it may train "
                "something else, and no loss is known; --for time advises the fastest, and "
                "bench.step(loss=…) in the script tells it."
            )
        yield from self._tell_learnt(advised)
        if commands := self._list_whole():
            seed = ask_for_seed(self.findings.now.command)
            yield f"Does it learn as well? Train both whole, over several seeds{seed}, and see:"
            yield from (f"  {command}" for command in commands)
        if following := self._propose_next(anew=bool(warnings)):
            yield f"Next: {following}"

    def write_json(self) -> str:
        """Write the answer with all settings and their times, as a JSON document."""
        findings, advised, now = self.findings, self.advised, self.findings.now
        gain, remarks = None, list[str]()
        if advised is not None:
            lowest = min(findings.times, key=findings.find_time)
            warned = self._list_warnings({advised, now, lowest})
            remarks = [*dict.fromkeys(chain.from_iterable(warned))]
            if advised != now and now in findings.times:
                speedup, ratio, chance = self._rate(advised, now)
                here, there = (self._find_memory(setting) for setting in (advised, now))
                gain = {
                    "speedup": speedup,
                    "speedup_low": ratio.low,
                    "speedup_high": ratio.high,
                    "chance": chance,
                    "memory": here / there if here and there else None,
                }
        content = {
            "now": self._lay_out(now),
            "advised": advised and self._lay_out(advised),
            "gain": gain,
            "warnings": remarks,
            "time_of": "an epoch" if now.command is None else f"{ITEMS:,} {findings.unit}".strip(),
            "tried": [self._lay_out(one) | self._tell_runs(one) for one in findings.runs],
            "not_tried": [{"setting": what, "reason": why} for what, why in self._list_untried()],
            "kept": [name_column(axis) for axis in findings.kept],
            "whole": self._list_whole(),
            "next": self._propose_next(anew=bool(remarks)) or None,
            "folder": str(self.folder),
            "stopped": self.stopped,
        }
        return dump_document("advise", 2, content)

    def _lay_out(self, setting: Case) -> dict[str, Any]:
        return {"name": name(setting, self.findings.now), "case": lay_out(setting)}

    def _tell_runs(self, setting: Case) -> dict[str, Any]:
        last = self.findings.runs[setting][-1]
        return {
            "status": last.status,
            "reason": last.reason,
            "times_s": self.findings.times.get(setting, []),
            "memory_bytes": self._find_memory(setting) or None,
        }

    def _list_whole(self) -> list[str]:
        """List the commands that train the present and the advised setting whole, and compare what
        they learn; none if the present one is advised."""
        now, advised = self.findings.now, self.advised
        if advised in (None, now):
            return []
        folder = str(self.folder.with_name(f"{self.folder.name}-whole"))
        how = ["--fraction", "1", "--evaluate"] if now.command is None else []
        how += ["--repeats", str(SEEDS), "--out", folder]
        words = [["bench.sweep", *spell_case(setting), *how] for setting in (now, advised)]
        words.append(["bench.report", folder])
        return [shlex.join(["python", "-m", *of]) for of in words]

    def _propose_next(self, anew: bool) -> str:
        """Return the command that goes on, or begins ``anew``; empty if nothing is left to run."""
        if not (self.pending or anew):
            return ""
        known = self.run_s or self.findings.runs
        least_s = _RUNS * self.run_s if known else parse_budget("--budget", BUDGET)
        return propose(
            self.command, self.folder, longer=not self.stopped, anew=anew, least_s=least_s
        )

    def _recommend(self, advised: Case) -> str:
        """Say what to train with, and what that gains over the present setting."""
        now, times = self.findings.now, self.findings.times
        of = f"of {len(times)} settings measured"
        if advised == now:
            return f"Stay with {name(now, now)}, {of}."
        sentence = f"Train with {name(advised, now)}, {of}"
        if now not in times:
            return f"{sentence}; what you have now ({name(now, now)}) could not be."
        here, there = (self._find_memory(setting) for setting in (advised, now))
        share = f", with {100 * here / there:.0f} % of its memory" if here and there else ""
        gain = self._compare(advised, now)
        return f"{sentence}: {gain} what you have now ({name(now, now)}){share}."

    def _tell_rivals(self, advised: Case, lowest: Case) -> Iterator[str]:
        """Yield why what is advised is, and what could as well be, by what is known; and which has
        the lowest time, or is the next."""
        findings, now = self.findings, self.findings.now

        def call(one: Case) -> str:  # the present setting has its name in the first sentence
            return "what you have now" if one == now else name(one, now)

        others = sorted(findings.times.keys() - {advised, now}, key=findings.find_time)
        # those that a report may recommend, as long as the advised one is of them
        sure = [one for one in findings.times if not any(self._list_warnings({one}))]
        choices = filter(None, map(findings.choose, (sure, findings.times)))
        alike = (one for one in choices if (one.chosen, one.fastest) == (advised, lowest))
        if (choice := next(alike, None)) and (more := tell_choice(
            choice, attrgetter("batch_size"), self._find_memory, call
        )):  # fmt: skip
            yield more
        if lowest != advised:
            speed = self._compare(lowest, advised)
            yield f"The lowest time is that of {call(lowest)}, {speed} what is advised."
        elif others:
            speed = self._compare(others[0], advised)
            yield f"The next is {name(others[0], now)}, {speed} what is advised."

    def _tell_learnt(self, advised: Case | None) -> Iterator[str]:
        """Yield what a report says of how the advised setting learns, if it is not the present
        one."""
        found = self.found
        if found is None or advised == self.findings.now:
            return
        for place in found.places:
            for setting in place.settings:
                if strip(setting.best.case) == advised:
                    learnt = tell_learnt(found, place, setting)
                    yield from (name_taker(sentence, ["advise"]) for sentence in learnt)

    def _warn(self, settings: Collection[Case]) -> Iterator[str]:
        """Yield which warnings keep a report from recommending by the runs of these settings."""
        warnings = self._list_warnings(settings)
        if warned := [of for of in warnings if of]:
            remarks = ", ".join(dict.fromkeys(chain.from_iterable(warned)))
            yield (
                f"! Do not rely on it yet: {len(warned)} of {len(warnings)} runs compared have a "
                f"warning ({remarks}). Close other programs, and search anew by the last command "
                "here, in another folder: runs with a warning stay in theirs."
            )

    def _list_warnings(self, settings: Collection[Case]) -> list[list[str]]:
        """Return of each run of these settings that counts the warnings that forbid to rely on
        it."""
        known = self.findings.cases.items()
        longest = {s: measure_length(case) for s, case in known if s in settings}
        every = self.found.everything if self.found else ()
        ended = [run for run in every if run.status == Status.OK]
        runs = [run for run in ended if longest.get(strip(run.case)) == measure_length(run.case)]
        repeats = Counter(strip(run.case) for run in runs)
        return [
            [
                warning.remark
                for name, warning in WARNINGS.items()
                if warning.forbids(repeats[strip(run.case)]) and getattr(run, name)
            ]
            for run in runs
        ]

    def _compare(self, setting: Case, other: Case) -> str:
        """Return ``3.10× (2.90 to 3.31) as fast as``; without an interval if there are too few
        repeats."""
        speedup, ratio, chance = self._rate(setting, other)
        ends = write_ends((ratio.low, ratio.high), write_ratio, " to ")
        parts = [*filter(None, [ends, "which may be chance" * chance])]
        note = f" ({', '.join(parts)})" if parts else ""
        return f"{write_ratio(speedup)}×{note} as fast as"

    def _rate(self, setting: Case, other: Case) -> tuple[float, Ratio, bool]:
        """Return how many times as fast a setting is as another, the same with its interval, and
        whether it may be chance: by a warning, or by the interval."""
        findings, times = self.findings, self.findings.times
        (ratio,) = compare([(times[setting], times[other])])
        chance = any(self._list_warnings({setting, other}))
        if ratio.low is not None and ratio.high is not None:
            chance |= ratio.low < 1 < ratio.high
        return findings.find_time(other) / findings.find_time(setting), ratio, chance

    def _find_memory(self, setting: Case) -> float:
        return max(read_peak(row) or 0.0 for row in self.findings.runs[setting])

    def _list_untried(self) -> Iterator[tuple[str, str]]:
        """Yield what could not be tried, with the reason, and values of levers that no run had,
        without one."""
        yield from self.left_out.items()
        for axis, values in self.findings.levers.items():
            seen = {str(getattr(setting, axis)) for setting in self.findings.runs}
            left = [v for v in values if str(v) not in {*seen, *self.left_out}]
            yield from ((name_setting(axis, format_value(value)), "") for value in left)
