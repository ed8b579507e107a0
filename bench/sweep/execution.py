"""A sweep from its plan to its end: the runs that are left, their order, and what is left to do."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench.base.text import count
from bench.results.store.reader import read_config, read_rows, read_there
from bench.results.store.rows import (
    LatestAttempt,
    PlannedRun,
    collect_times,
    count_checks,
    is_known,
    leave_out_known,
    plan_runs,
    read_history,
)
from bench.results.store.table import RECORDS
from bench.schema.axis import Value
from bench.schema.case import AXES, Case, list_varying
from bench.schema.flags import change_flags
from bench.schema.goals import read_goal
from bench.schema.record import REPEATED, Outcome, Record, Status
from bench.sweep.display import Display
from bench.sweep.folder import (
    find_unlike,
    refuse_mixing,
    refuse_other_part,
)
from bench.sweep.largest_batch import STEP, Ending, LargestBatch
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Options, Plan, plan_cases
from bench.sweep.preflight import GUESSED, check_without_torch, describe_plan, is_own
from bench.sweep.probing import Searches, describe_largest_batch
from bench.workers.executors import ImageRequest
from bench.workers.job import Job, Lane
from bench.workers.rating import choose_seconds

ENDED_ALIKE = 3
"""Runs of a command that end with one error after as many steps, the first ones, after which the
others are left: a module is missing, or a file."""

_FAILED = (Status.ERROR, Status.KILLED, Status.TIMEOUT, Status.LOST)


def remaining_runs(
    runs: Sequence[PlannedRun],
    history: Mapping[PlannedRun, LatestAttempt],
    retry: Collection[Status],
) -> list[PlannedRun]:
    """Return the runs that have no outcome yet, or one that is to be retried."""
    again = REPEATED | set(retry)

    def remains(run: PlannedRun) -> bool:
        past = history.get(run)
        return past is None or past.status in again

    left = [run for run in runs if remains(run)]
    if left:
        # a drift check comes last: an earlier one no longer does if more runs were added
        left += [run for run in runs if run[2] and run not in left]
    return left


_list_others: Callable[[Case], tuple[Value, ...]] = attrgetter(*AXES.keys() - {"batch_size"})


class OomSkips:
    """The smallest batch size that ran out of memory, by the ``family`` of a case: by default, all
    axes but the batch size. ``history`` has the earlier runs, less those to be retried."""

    def __init__(
        self,
        history: Mapping[PlannedRun, LatestAttempt],
        family: Callable[[Case], Hashable] = _list_others,
    ) -> None:
        self._smallest: dict[Hashable, int] = {}
        self._family = family
        for (case, _, _), past in history.items():
            if not past.inferred:
                self.note(case, past.status)

    def note(self, case: Case, status: Status) -> None:
        """Learn from an outcome. A suspected OOM proves nothing."""
        if status is Status.OOM:
            family = self._family(case)
            known = self._smallest.get(family, case.batch_size)
            self._smallest[family] = min(known, case.batch_size)

    def blocks(self, case: Case) -> int | None:
        """Return a smaller batch size that already ran out of memory, or None."""
        smallest = self._smallest.get(self._family(case))
        return smallest if smallest is not None and smallest < case.batch_size else None


class Grid:
    """A source of planned runs; a lost run is run again next.

    Args:
        before: the latest recorded attempt at each run.
        skips: batch sizes that ran out of memory.
        times: epoch times of earlier runs, in s, by which repeats are left out.
    """

    def __init__(
        self,
        loop: Loop,
        runs: Sequence[PlannedRun],
        before: Mapping[PlannedRun, LatestAttempt],
        skips: OomSkips,
        times: Mapping[Case, Sequence[float]],
    ) -> None:
        self.loop = loop
        self.ended = Counter[Status]()
        self._runs, self.asked = deque(runs), len(runs)  # how many are to be made
        self._skips = skips
        self._times = {case: list(of) for case, of in times.items()}
        self._errors: list[str] = []  # of the first runs; "" of one that ended otherwise
        self._ran = Counter[tuple[Case, str]]()  # how often a case ran on a lane
        self.retry: list[str] = []  # flags that also run again what it gave up after
        self.running = 0  # runs that were taken and have not ended
        # the lane of each run, for its drift check; on several GPUs, the lane of the first
        self._lanes = {run: _name_first(past.lane) for run, past in before.items()}

    @property
    def left(self) -> bool:
        return bool(self._runs)

    @property
    def waiting(self) -> int:
        return self.asked - self.ended.total()

    @property
    def measured(self) -> bool:
        """Whether any run ended without failure."""
        return any(status not in _FAILED for status in self.ended)

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Job | None:
        """Return the next run. A drift check is last, if possible on the lane of its first run."""
        if not self._runs:
            return None
        run = self._choose(lane)
        case, repeat, sentinel = run
        if sentinel:
            home = self._lanes.get((case, repeat, False), lane.name)
            if self.running or (home != lane.name and home in [free.name for free in idle]):
                return None
        self._runs.remove(run)
        self._ran[case, lane.name] += 1
        self.running += 1
        self._lanes[run] = lane.name
        return Job(case, repeat=repeat, sentinel=sentinel, smaller=self._skips.blocks(case))

    def _choose(self, lane: Lane) -> PlannedRun:
        """Choose the next run: of the same repeat, the case that ran least often on this lane.

        If cases were assigned in turn, each would have the same GPU in all its repeats whenever the
        number of cases divides evenly, and a slower GPU would look like the effect of a setting.
        """
        _, repeat, sentinel = self._runs[0]
        # with 10,000 cases, it is not worth looking at all of them
        near = islice(self._runs, 2 * len(self.loop.lanes))
        alike = takewhile(lambda run: run[1:] == (repeat, sentinel), near)

        return min(alike, key=lambda run: self._ran[run[0], lane.name])

    def settle(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Learn from an outcome. A lost run comes next, unless the loop gives it up."""
        self.running -= 1
        if (time := record.measurement.epoch_time_s) and record.status is Status.OK:
            times = self._times.setdefault(case := job.run[0], [])
            times.append(time)
            if is_known(case, times):
                kept = deque(r for r in self._runs if r[0] != case or r[1] == 1)
                self.asked -= len(self._runs) - len(kept)
                self.loop.display.leave_out(case, len(self._runs) - len(kept))
                self._runs = kept
        if job.smaller is None:
            self._skips.note(record.case, record.status)
        self._give_up(record)
        if record.status is Status.LOST and not self.loop.gives_up(job):
            self._ran[record.case, self._lanes[job.run]] -= 1  # it does not count for that lane
            self._runs.appendleft(job.run)
        else:
            self.ended[record.status] += 1
        self._lanes[job.run] = _name_first(record.lane)

    def _give_up(self, record: Record) -> None:
        """Leave the rest if nothing but one error came of a command's first runs."""
        alike = record.case.command is not None and record.status is Status.ERROR
        self._errors.append(record.reason if alike else "")
        if self._runs and alike and self._errors == ENDED_ALIKE * [record.reason]:
            self._runs.clear()
            self.retry = ["--retry", *{*self.loop.options.retry, Status.ERROR}]
            fix = "once that is mended, --retry error runs these again, and the others"
            self.loop.say(
                [f"error: the first {ENDED_ALIKE} runs ended alike, and no more are run; {fix}"]
            )


def _name_first(lane: str) -> str:
    return lane.partition("+")[0]


# ---------------------------------------------------------------------------------------- the sweep


@dataclass(frozen=True)
class Conclusion:
    """How a sweep ended."""

    folder: Path
    unsized: Sequence[str]  # a line on each family that no batch size was found for
    left: str  # what is still to be done, and by which command; empty for nothing
    failed: bool  # whether anything that was asked for has no result
    stopped: int  # the number of the signal that stopped it, 0 for none


def run_sweep(asked: Plan, options: Options) -> Conclusion:
    """Search the requested batch sizes, then run all that is left. Raises UsageError: as
    `open_loop`, `Loop.find_comparable`, `refuse_other_part` and `Inputs.check_batches`."""
    for device in dict.fromkeys(case.device for case in asked.all_cases):
        choose_seconds(device)  # refuses a wrong environment variable before anything is opened
    if options.out is not None and (there := count_known(asked, options, options.out)):
        with Display(options.out, 0, there):
            return Conclusion(options.out, [], "", False, 0)
    with open_loop(options, asked) as loop:
        return _run(loop, loop.inputs.plan)


def count_known(asked: Plan, options: Options, out: Path) -> int:
    """Return the number of runs of a sweep that is started again with nothing left to run, in the
    environment of its rows as far as that is known without torch, which takes seconds to start. 0
    if there may be something to do, or torch has to tell. Raises UsageError: as `open_loop`."""
    last = str(read_config(out).get("command", "")).splitlines()[-1:]
    if last != [options.invocation] or not (options.here and (out / RECORDS).is_file()):
        return 0
    if asked.searched or any(map(is_own, asked.cases)):
        return 0
    rows, runs = read_rows(out), plan_runs(asked.cases, options.repeats)
    if list_left(runs, read_history(rows), options):
        return 0
    inputs = check_without_torch(asked, options, rows, ImageRequest.prepare)
    if {case.device for case in asked.cases} - inputs.platforms.keys():
        return 0  # as of a card whose driver cannot be asked
    columns = (*GUESSED, "dataset_fingerprint")
    return 0 if find_unlike(rows, inputs, asked.cases, columns)[1] else len(runs)


def list_left(
    runs: Sequence[PlannedRun], done: Mapping[PlannedRun, LatestAttempt], options: Options
) -> list[PlannedRun]:
    """Return the runs of a plan that those ``done`` leave to do."""
    return remaining_runs(leave_out_known(runs, done), done, options.retry)


def rehearse(asked: Plan, options: Options) -> Iterator[str]:
    """Yield what a start would do. Raises UsageError: as `run_sweep`, as far as torch need not be
    asked."""
    out, cases = options.out, asked.all_cases
    rows = read_there(out)
    inputs = check_without_torch(asked, options, rows)
    if out is not None:
        refuse_other_part(out, read_config(out), options.shard)
        if not options.mix:
            refuse_mixing(out, find_unlike(rows, inputs, cases, GUESSED)[1])
    yield from describe_plan(inputs.plan, options)
    if rows:
        runs = plan_runs(inputs.plan.cases, options.repeats)
        left = list_left(runs, read_history(rows), options)
        there = f"{len(runs) - len(left):,} of them already there, in {out}"
        yield f"{there}; {len(left):,} to run{count_checks(left)}"
    yield from inputs.warnings


def _run(loop: Loop, asked: Plan) -> Conclusion:
    options, config = loop.options, read_config(loop.store.folder)
    refuse_other_part(loop.out, config, options.shard)
    comparable = loop.find_comparable(asked.all_cases)
    # the last attempt at each run, and the same of rows that new ones can be compared with
    before = done = read_history(loop.rows)
    if len(comparable) < len(loop.rows):
        done = read_history(comparable)
    settings, cases, largest_batches = dict[str, Any](), asked.cases, dict[Case, LargestBatch]()
    if asked.families:
        step, margin = read_goal(config.get("search"))
        settings["search"] = {"step": step or STEP, "margin": margin}
        loop.write_config(cases, **settings)
        largest_batches = Searches(
            loop, asked.families, comparable, step or STEP, margin
        ).find_largest_batches()
        cases = plan_cases(options, largest_batches, loop.inputs.settle).cases
        for case in cases:  # whose batch sizes were just found
            loop.inputs.check_batches(case)
    plan = plan_runs(cases, options.repeats)
    loop.write_config(cases, **settings)
    runs = list_left(plan, done, options)
    loop.planned = list(dict.fromkeys(case for case, _, _ in runs))
    left = set(runs)
    ended = {run: past for run, past in done.items() if run not in left}
    axes = list_varying(case for case, _, _ in [*plan, *before])
    with Display(loop.out, len(runs), len(plan) - len(runs), axes, planned=runs) as display:
        loop.show_on(display)
        grid = Grid(loop, runs, before, OomSkips(ended), collect_times(done))
        loop.work(grid)
    return _conclude(loop, grid, largest_batches, len(plan) - len(runs))


def _conclude(
    loop: Loop, grid: Grid, largest_batches: dict[Case, LargestBatch], there: int
) -> Conclusion:
    """Say how a sweep ended, of which so many runs were ``there`` before."""
    lost = {
        f: largest_batch
        for f, largest_batch in largest_batches.items()
        if largest_batch.ending and not largest_batch.recommended
    }
    axes = list_varying(largest_batches, but="batch_size")
    lines = [
        f"{family.label(axes)}: {describe_largest_batch(largest_batch)}"
        for family, largest_batch in lost.items()
    ]
    # runs that the stop interrupted are run again
    cut = grid.ended[Status.INTERRUPTED] if loop.stopped else 0
    runs = grid.waiting + cut
    searches = sum(largest_batch.ending is None for largest_batch in largest_batches.values())
    left, to_find = "", f" and {count(searches, 'batch size')} to be found" * bool(searches)
    if runs or searches:
        left = (
            f"{'stopped' if loop.stopped else 'not finished'}: "
            f"{count(there - cut + grid.ended.total(), 'run')} done, {count(runs, 'run')} left"
            f"{to_find}; "
            f"to continue: {change_flags(loop.resume, grid.retry)}"
        )
    measured = grid.measured or any(
        largest_batch.largest is not None for largest_batch in largest_batches.values()
    )
    failed = any(largest_batch.ending is not Ending.UNSUPPORTED for largest_batch in lost.values())
    failed |= bool(grid.asked or largest_batches) and not measured
    return Conclusion(loop.out, lines, left, failed, loop.stopped)
