"""A sweep from its plan to its end, and what is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.case import Case, list_varying
from bench.doctor.rates import choose_seconds
from bench.record import Status
from bench.store.reader import read_config
from bench.store.rows import collect_times, leave_out_known, plan_runs, read_history
from bench.sweep.display import Display
from bench.sweep.folder import read_past, refuse_other_part, write_config
from bench.sweep.grid import Grid
from bench.sweep.loop import Loop, open_loop
from bench.sweep.options import Options, Plan, plan_cases
from bench.sweep.probing import Searches, describe_wall, find_walls
from bench.sweep.schedule import OomSkips, remaining_runs
from bench.text import count
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
    """Search the requested batch sizes, then run all that is left. Raises UsageError: as
    `open_loop`, `read_past`, `refuse_other_part` and `Inputs.check_batches`."""
    for device in dict.fromkeys(case.device for case in [*asked.cases, *asked.unsized]):
        choose_seconds(device)  # refuses a wrong environment variable before anything is opened
    with open_loop(options, asked) as loop:
        loop.lock()
        return _run(loop, loop.inputs.plan)


def _run(loop: Loop, asked: Plan) -> Conclusion:
    options, config = loop.options, read_config(loop.store.folder)
    refuse_other_part(loop.out, config, options.shard)
    comparable, rows = read_past(loop, [*asked.cases, *asked.unsized])
    # the last attempt at each run, and the same of rows that new ones can be compared with
    before = done = read_history(rows)
    if len(comparable) < len(rows):
        done = read_history(comparable)
    told, cases, walls = dict[str, Any](), asked.cases, dict[Case, Wall]()
    if asked.families:
        step, margin = read_goal(config.get("search"))
        told["search"] = {"step": step or STEP, "margin": margin}
        write_config(loop, cases, **told)
        walls = find_walls(Searches(loop, asked.families, comparable, step or STEP, margin))
        cases = plan_cases(options, walls, loop.inputs.settle).cases
        for case in cases:  # whose batch sizes were just found
            loop.inputs.check_batches(case)
    plan = plan_runs(cases, options.repeats)
    write_config(loop, cases, **told)
    known = leave_out_known(plan, done)
    runs = remaining_runs(known, done, options.retry)
    loop.planned = list(dict.fromkeys(case for case, _, _ in runs))
    left = set(runs)
    ended = {run: past for run, past in done.items() if run not in left}
    axes = list_varying(case for case, _, _ in [*plan, *before])
    with Display(loop.out, len(runs), len(plan) - len(runs), axes) as display:
        loop.show_on(display)
        grid = Grid(loop, runs, before, OomSkips(ended), collect_times(done))
        loop.work(grid)
    return _conclude(loop, grid, walls, len(plan) - len(runs))


def _conclude(loop: Loop, grid: Grid, walls: dict[Case, Wall], there: int) -> Conclusion:
    """Say how a sweep ended, of which so many runs were ``there`` before."""
    lost = {f: wall for f, wall in walls.items() if wall.ending and not wall.recommended}
    axes = list_varying(walls, but="batch_size")
    lines = [f"{family.label(axes)}: {describe_wall(wall)}" for family, wall in lost.items()]
    # runs that the stop interrupted are run again
    cut = grid.ended[Status.INTERRUPTED] if loop.stopped else 0
    runs = grid.waiting + cut
    searches = sum(wall.ending is None for wall in walls.values())
    left = ""
    if runs or searches:
        left = (
            f"{'stopped' if loop.stopped else 'not finished'}: "
            f"{count(there - cut + grid.ended.total(), 'run')} done, {count(runs, 'run')} left"
            f"{f' and {searches} batch sizes to be found' if searches else ''}; "
            f"to continue: {loop.resume}"
        )
    measured = grid.measured or any(wall.largest is not None for wall in walls.values())
    failed = any(wall.ending is not Ending.UNSUPPORTED for wall in lost.values())
    failed |= bool(grid.asked or walls) and not measured
    return Conclusion(loop.out, lines, left, failed, loop.stopped)
