"""A sweep from its plan to its end, on each class of hardware, and what is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.anchors import BUSY, CLOSE
from bench.case import Case, list_varying
from bench.doctor.rates import choose_seconds
from bench.errors import UsageError
from bench.executors import Lane
from bench.record import Status
from bench.sweep.anchors import compare_alone, compare_busy, find_anchors, run_anchors
from bench.sweep.crew import Crew
from bench.sweep.display import Display
from bench.sweep.grid import Grid
from bench.sweep.hardware import describe_places, find_kind, place_classes, refuse_world_sizes
from bench.sweep.loop import Loop
from bench.sweep.options import Options, Plan
from bench.sweep.part import Part
from bench.sweep.preflight import find_lane_inputs, refuse_searches
from bench.sweep.probing import describe_wall, find_walls
from bench.sweep.schedule import describe_repeats
from bench.sweep.session import Session, start_session
from bench.text import count
from bench.wall.search import Ending


@dataclass(frozen=True)
class Conclusion:
    """How a sweep ended."""

    folders: Sequence[Path]
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
        classes, out = session.classes, session.out
        asked = asked.settle(session.inputs.settle)
        refuse_searches(asked.searched, session.inputs)
        absent = place_classes(classes, out)
        first = [hardware.lanes[0][0] for hardware in classes]
        folders = [out / hardware.folder for hardware in classes]
        refuse_world_sizes(session.executor, first, folders, every, options)
        parts = [Part(session.open_loop(hardware), asked, hardware.folder) for hardware in classes]
        parts[0].loop.notes += describe_places(classes, absent, out)
        with session.start_crew(partial(admit_lane, session, every)) as crew:
            grids = measure(crew, parts, session)
    return conclude(session, parts, grids)


def measure(crew: Crew, parts: Sequence[Part], session: Session) -> list[Grid]:
    """Search the requested batch sizes, then run all that is left. Return the grid of each part."""
    if parts[0].asked.families:
        found = find_walls(crew, [part.search() for part in parts])
        for part, walls in zip(parts, found, strict=True):
            part.fill_in(walls)
    for part in parts:
        part.plan_runs()
    runs = sum(len(part.runs) for part in parts)
    there = sum(len(part.plan) - len(part.runs) for part in parts)
    cases = [case for part in parts for case, _, _ in [*part.plan, *part.before]]
    how, (times, *others) = "", {part.options.repeats for part in parts}
    if runs and not there and times > 1 and not others:
        planned = dict.fromkeys(case for part in parts for case in part.cases)
        most = not session.options.repeats_given or any(case.until for case in planned)
        how = f"{count(len(planned), 'case')}, {describe_repeats(times, most)}"
    with Display(session.out, runs, there, list_varying(cases), how=how) as display:
        for part in parts:
            part.loop.show_on(display)
        grids = [part.make_grid() for part in parts]
        several = sum(crew.count(part.loop) for part in parts) > 1
        if several and runs and session.options.anchors:
            measure_between_anchors(crew, parts, grids, session.options.quiet)
        else:
            crew.work(grids)
    return grids


def measure_between_anchors(
    crew: Crew, parts: Sequence[Part], grids: Sequence[Grid], quiet: bool
) -> None:
    """Run all that is left, with anchors on its lanes before and after."""
    choices = {part.loop: part.choose_anchors() for part in parts if part.runs}
    before = {part.loop: part.anchored for part in parts}
    cases, alone = find_anchors(crew, choices, before)
    for loop, records in alone.items():
        loop.say(compare_alone(records))
    if cases and not quiet:
        busy = run_anchors(crew, cases, BUSY, before, alone, together=True)
        for loop, records in busy.items():
            loop.say(compare_busy(alone[loop], records))
    crew.work(grids)
    if cases:
        run_anchors(crew, cases, CLOSE, before, alone, together=not quiet)


def admit_lane(session: Session, cases: Sequence[Case], lane: Lane) -> Loop | None:
    """Return the loop for a lane that joined late, or None if it fits none."""
    executor, say = session.executor, next(iter(session.loops)).display.say
    try:
        inputs = find_lane_inputs(session.inputs, cases, session.options, executor, lane)
    except UsageError as error:
        say(f"warning: a lane that joined is left out: {error}")
        return None
    for loop, hardware in session.loops.items():
        if find_kind(hardware.environments) == find_kind(inputs.environments):
            loop.lanes[lane.name] = inputs
            say(f"lane {lane.name} joined")
            return loop
    gpu = next(iter(inputs.platforms.values())).name
    say(
        f"warning: lane {lane.name} that joined is left out: {gpu} is of another kind than the "
        "lanes that were there; run the same command again to measure on it too"
    )
    return None


def conclude(session: Session, parts: Sequence[Part], grids: Sequence[Grid]) -> Conclusion:
    walls = [(family, wall) for part in parts for family, wall in part.walls.items()]
    lost = [(family, wall) for family, wall in walls if wall.ending and not wall.recommended]
    axes = list_varying((family for family, _ in walls), but="batch_size")
    lines = [f"{family.label(axes)}: {describe_wall(wall)}" for family, wall in lost]
    # runs that the stop interrupted are run again
    cut = sum(grid.ended[Status.INTERRUPTED] for grid in grids) if session.stopped else 0
    runs = sum(grid.waiting for grid in grids) + cut
    searches = sum(wall.ending is None for _, wall in walls)
    left = ""
    if runs or searches:
        done = sum(len(part.plan) - len(part.runs) for part in parts) - cut
        done += sum(grid.ended.total() for grid in grids)
        what = [count(runs, "run")] * bool(runs)
        what += [f"the search for {count(searches, 'largest batch')}"] * bool(searches)
        left = (
            f"{'stopped' if session.stopped else 'not finished'}: {count(done, 'run')} done, "
            f"{' and '.join(what)} left; to continue: {session.resume}"
        )
    found = any(wall.largest is not None for _, wall in walls)
    measured = found or any(grid.measured for grid in grids)
    asked = any(part.runs or part.asked.families for part in parts)
    failed = any(wall.ending is not Ending.UNSUPPORTED for _, wall in lost)
    failed |= asked and not measured
    return Conclusion([part.folder for part in parts], lines, left, failed, session.stopped)
