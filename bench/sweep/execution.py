"""A sweep from its plan to its end, and what is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.case import list_varying
from bench.doctor.rates import choose_seconds
from bench.record import Status
from bench.sweep.crew import Crew
from bench.sweep.display import Display
from bench.sweep.grid import Grid
from bench.sweep.hardware import refuse_world_sizes
from bench.sweep.options import Options, Plan
from bench.sweep.part import Part
from bench.sweep.preflight import refuse_searches
from bench.sweep.probing import describe_wall, find_walls
from bench.sweep.schedule import describe_repeats
from bench.sweep.session import Session, start_session
from bench.text import count
from bench.wall.search import Ending


@dataclass(frozen=True)
class Conclusion:
    """How a sweep ended."""

    folder: Path
    unsized: Sequence[str]  # a line on each family that no batch size was found for
    left: str  # what is still to be done, and by which command; empty for nothing
    failed: bool  # whether anything that was asked for has no result
    stopped: int  # the number of the signal that stopped it, 0 for none


def run_sweep(asked: Plan, options: Options) -> Conclusion:
    """Run a sweep. Raises UsageError: as `start_session` and `Part`."""
    every = [*asked.cases, *asked.unsized]
    for device in dict.fromkeys(case.device for case in every):
        choose_seconds(device)  # refuses a wrong environment variable before anything is opened
    with start_session(options, asked.cases, asked.unsized) as session:
        asked = session.inputs.keep(asked.settle(session.inputs.settle))
        refuse_searches(asked.searched, session.inputs)
        refuse_world_sizes(session.executor, next(iter(session.lanes)), every, options)
        part = Part(session.open_loop(), asked)
        with session.start_crew() as crew:
            grid = measure(crew, part)
    return conclude(session, part, grid)


def measure(crew: Crew, part: Part) -> Grid:
    """Search the requested batch sizes, then run all that is left."""
    if part.asked.families:
        part.fill_in(find_walls(crew, part.search()))
    part.plan_runs()
    runs, there = len(part.runs), len(part.plan) - len(part.runs)
    cases = [case for case, _, _ in [*part.plan, *part.before]]
    how, times = "", part.options.repeats
    if runs and not there and times > 1:
        planned = dict.fromkeys(part.cases)
        most = not part.options.repeats_given or any(case.until for case in planned)
        how = f"{count(len(planned), 'case')}, {describe_repeats(times, most)}"
    with Display(part.folder, runs, there, list_varying(cases), how=how) as display:
        part.loop.show_on(display)
        grid = part.make_grid()
        crew.work(grid)
    return grid


def conclude(session: Session, part: Part, grid: Grid) -> Conclusion:
    walls = part.walls
    lost = {f: wall for f, wall in walls.items() if wall.ending and not wall.recommended}
    axes = list_varying(walls, but="batch_size")
    lines = [f"{family.label(axes)}: {describe_wall(wall)}" for family, wall in lost.items()]
    # runs that the stop interrupted are run again
    cut = grid.ended[Status.INTERRUPTED] if session.stopped else 0
    runs = grid.waiting + cut
    searches = sum(wall.ending is None for wall in walls.values())
    left = ""
    if runs or searches:
        done = len(part.plan) - len(part.runs) - cut + grid.ended.total()
        what = [count(runs, "run")] * bool(runs)
        what += [f"the search for {count(searches, 'largest batch')}"] * bool(searches)
        left = (
            f"{'stopped' if session.stopped else 'not finished'}: {count(done, 'run')} done, "
            f"{' and '.join(what)} left; to continue: {session.resume}"
        )
    measured = grid.measured or any(wall.largest is not None for wall in walls.values())
    failed = any(wall.ending is not Ending.UNSUPPORTED for wall in lost.values())
    failed |= bool(part.runs or part.asked.families) and not measured
    failed |= bool(session.inputs.broken)
    return Conclusion(part.folder, lines, left, failed, session.stopped)
