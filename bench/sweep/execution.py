"""A sweep from its plan to its end, and what is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.case import Case, list_varying
from bench.doctor.rates import choose_seconds
from bench.record import Status
from bench.store.plans import collect_times, leave_out_known, plan_runs
from bench.store.reader import read_config
from bench.store.rows import Run, read_history
from bench.sweep.display import Display
from bench.sweep.folder import read_past, refuse_other_part, refuse_other_seeds, write_config
from bench.sweep.grid import Grid
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Options, Plan, plan_cases
from bench.sweep.preflight import leave_out_batches
from bench.sweep.probing import Searches, describe_wall, find_walls
from bench.sweep.schedule import OomSkips, Pace, remaining_runs
from bench.text import count, read_time
from bench.wall import STEP, Ending, Wall, read_goal


@dataclass(frozen=True)
class Conclusion:
    """How a sweep ended."""

    folder: Path
    unsized: Sequence[str]  # a line on each family that no batch size was found for
    left: str  # what is still to be done, and by which command; empty for nothing
    failed: bool  # whether anything that was asked for has no result
    stopped: int  # the number of the signal that stopped it, 0 for none


def run_sweep(asked: Plan, options: Options) -> Conclusion:
    """Run a sweep. Raises UsageError: as `open_loop` and `Part`."""
    for device in dict.fromkeys(case.device for case in [*asked.cases, *asked.unsized]):
        choose_seconds(device)  # refuses a wrong environment variable before anything is opened
    with open_loop(options, asked) as loop:
        loop.lock()
        part = Part(loop, loop.inputs.plan)
        grid = measure(part)
    return conclude(part, grid)


def measure(part: Part) -> Grid:
    """Search the requested batch sizes, then run all that is left."""
    if part.asked.families:
        part.fill_in(find_walls(part.search()))
    part.plan_runs()
    runs, there = len(part.runs), len(part.plan) - len(part.runs)
    cases = [case for case, _, _ in [*part.plan, *part.before]]
    with Display(part.folder, runs, there, list_varying(cases)) as display:
        part.loop.show_on(display)
        grid = part.make_grid()
        part.loop.work(grid)
    return grid


def conclude(part: Part, grid: Grid) -> Conclusion:
    walls, loop = part.walls, part.loop
    lost = {f: wall for f, wall in walls.items() if wall.ending and not wall.recommended}
    axes = list_varying(walls, but="batch_size")
    lines = [f"{family.label(axes)}: {describe_wall(wall)}" for family, wall in lost.items()]
    # runs that the stop interrupted are run again
    cut = grid.ended[Status.INTERRUPTED] if loop.stopped else 0
    runs = grid.waiting + cut
    searches = sum(wall.ending is None for wall in walls.values())
    left = ""
    if runs or searches:
        done = len(part.plan) - len(part.runs) - cut + grid.ended.total()
        what = [count(runs, "run")] * bool(runs)
        what += [f"the search for {count(searches, 'largest batch')}"] * bool(searches)
        left = (
            f"{'stopped' if loop.stopped else 'not finished'}: {count(done, 'run')} done, "
            f"{' and '.join(what)} left; to continue: {loop.resume}"
        )
    measured = grid.measured or any(wall.largest is not None for wall in walls.values())
    failed = any(wall.ending is not Ending.UNSUPPORTED for wall in lost.values())
    failed |= bool(part.runs or part.asked.families) and not measured
    return Conclusion(part.folder, lines, left, failed, loop.stopped)


class Part:
    """The full grid: the runs in the folder, and those still to make.

    Raises UsageError: as `refuse_other_part` and `read_past`.
    """

    def __init__(self, loop: Loop, asked: Plan) -> None:
        self.loop, self.asked, self.cases = loop, asked, asked.cases
        refuse_other_part(self.folder, read_config(loop.store.folder), self.options.shard)
        # rows that new ones can be compared with, and all rows
        self._comparable, rows = read_past(loop, [*asked.cases, *asked.unsized])
        # the last attempt at each run, and the same of comparable rows alone
        self.before = self._done = read_history(rows)
        if len(self._comparable) < len(rows):
            self._done = read_history(self._comparable)
        self.plan = list[Run]()
        self.runs = list[Run]()
        self.walls: dict[Case, Wall] = {}
        self._told: dict[str, Any] = {}
        if asked.families:
            step, margin = read_goal(read_config(loop.store.folder).get("search"))
            self._told["search"] = {"step": step or STEP, "margin": margin}
        self.write_config()

    @property
    def folder(self) -> Path:
        return self.loop.out

    @property
    def options(self) -> Options:
        return self.loop.options

    def search(self) -> Searches:
        how = self._told.get("search", {})
        return Searches(self.loop, self.asked.families, self._comparable, **how)

    def fill_in(self, walls: dict[Case, Wall]) -> None:
        """Use the batch sizes that the searches found, and write the configuration again."""
        self.walls, inputs = walls, self.loop.inputs
        planned = plan_cases(self.options, walls, inputs.settle).cases
        self.cases, left_out = leave_out_batches(planned, inputs)
        self.loop.notes += left_out
        self.write_config()

    def write_config(self) -> None:
        write_config(self.loop, self.cases, **self._told)

    def plan_runs(self) -> None:
        """Decide which runs to make, in `runs`. Raises UsageError: as `refuse_other_seeds`."""
        if not self.options.repeats_given and not self._list_remaining(plan_runs(self.cases, 1)):
            self.limit_repeats(self.read_pace())
        self.plan = plan_runs(self.cases, self.options.repeats)
        refuse_other_seeds(self.folder, self.plan, self._done, self.options.same_seed)
        self.runs = self._list_remaining(self.plan)
        self.loop.planned = list(dict.fromkeys(case for case, _, _ in self.runs))

    def read_pace(self) -> Pace:
        """Return the wall times of the recorded first runs."""
        seconds = [
            read_time(row.finished_at) - read_time(row.started_at)
            for row in self._comparable
            if row.is_repeat
            and row.repeat == 1
            and not row.inferred
            and row.status is not Status.LOST
        ]
        return Pace(len(self.cases), len(self.loop.lanes), seconds)

    def limit_repeats(self, pace: Pace) -> int:
        """Leave out repeats that would take too long. Return how often each case is to run."""
        wanted = self.options.repeats
        if (fits := pace.fit(wanted)) < wanted:
            self.loop.notes.append(pace.describe(wanted))
            self.loop.options = replace(self.options, repeats=fits)
            self.write_config()
        return fits

    def make_grid(self) -> Grid:
        left = set(self.runs)
        known = {run: past for run, past in self._done.items() if run not in left}
        skips = None if self.options.no_skip else OomSkips(known)
        grid = Grid(self.loop, self.runs, self.before, skips, collect_times(self._done))
        if not self.options.repeats_given and self.options.repeats > 1:
            grid.limit_repeats(self.read_pace(), self._limit_while_running)
        return grid

    def _limit_while_running(self, pace: Pace) -> int:
        fits = self.limit_repeats(pace)
        self.loop.say_notes()
        return fits

    def _list_remaining(self, plan: Sequence[Run]) -> list[Run]:
        plan = leave_out_known(plan, self._done)
        return remaining_runs(plan, self._done, self.options.retry, self.options.no_skip)
