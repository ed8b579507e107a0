"""`python -m bench.sweep`: train every case once and record time, memory and learning."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.anchors import BUSY, CLOSE
from bench.case import Case, telling_axes
from bench.doctor.rates import choose_seconds
from bench.errors import UsageError
from bench.executors import Executor, Lane
from bench.flags import command
from bench.processes import leave
from bench.record import Status
from bench.sweep.anchors import compare_alone, compare_busy, find_anchors, run_anchors
from bench.sweep.crew import Crew
from bench.sweep.display import Display
from bench.sweep.folder import default_out
from bench.sweep.grid import Grid
from bench.sweep.hardware import (
    Hardware,
    describe_places,
    examine_lanes,
    find_kind,
    open_lanes,
    place_classes,
    refuse_world_sizes,
)
from bench.sweep.loop import Loop
from bench.sweep.options import Options, Plan, parse_arguments, plan_cases
from bench.sweep.part import Part
from bench.sweep.preflight import find_lane_inputs, refuse_searches
from bench.sweep.preview import preview, print_registries
from bench.sweep.probing import describe_wall, find_walls
from bench.sweep.schedule import describe_repeats
from bench.sweep.session import hire_crew, open_loop, start_executor
from bench.text import count
from bench.wall.search import Ending


@command
def main(argv: Sequence[str]) -> int:
    """Run a sweep.

    Returns 0; 1 where the disk is full, nothing could be measured or all lanes were lost; 2 for a
    usage error; 130 or 143 where it was stopped.
    """
    options = parse_arguments(argv)
    if options.list:
        return print_registries()
    plan = plan_cases(options)
    return preview(plan, options) if options.dry_run else run_sweep(plan, options)


def run_sweep(asked: Plan, options: Options) -> int:
    every = [*asked.cases, *asked.unsized]
    for device in dict.fromkeys(case.device for case in every):
        choose_seconds(device)  # a wrong variable is refused before anything is opened
    with start_executor(options) as executor:
        lanes = open_lanes(executor, every, options)
        classes = examine_lanes(executor, lanes, asked.cases, options, asked.unsized)
        inputs = classes[0].inputs
        asked = asked.settle(inputs.settle)
        refuse_searches(asked.searched, inputs)
        out = options.out or default_out(inputs.platforms)
        absent = place_classes(classes, out)
        first = [hardware.lanes[0][0] for hardware in classes]
        folders = [out / hardware.folder for hardware in classes]
        refuse_world_sizes(executor, first, folders, every, options)
        with ExitStack() as stores:
            parts = []
            for hardware in classes:
                loop = stores.enter_context(open_loop(hardware, executor, out, options))
                parts.append(Part(loop, hardware, asked, options))
            parts[0].loop.notes += describe_places(classes, absent, out)
            work = {part.loop: hardware for part, hardware in zip(parts, classes, strict=True)}
            admit = partial(admit_lane, executor, work, every, options)
            with hire_crew(work, admit) as (crew, stopped):
                grids = measure(crew, parts, out, options)
    return conclude(parts, grids, out, options, stopped())


def measure(crew: Crew, parts: Sequence[Part], out: Path, options: Options) -> list[Grid]:
    """Find the batch sizes that are asked for and run all that is left; what was run, by part."""
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
        most = not options.repeats_given or any(case.until for case in planned)
        how = f"{count(len(planned), 'case')}, {describe_repeats(times, most)}"
    with Display(out, runs, there, telling_axes(cases), how=how) as display:
        for part in parts:
            part.loop.show_on(display)
        grids = [part.make_grid() for part in parts]
        several = sum(crew.count(part.loop) for part in parts) > 1
        if several and runs and options.anchors:
            measure_between_anchors(crew, parts, grids, options.quiet)
        else:
            crew.work(grids)
    return grids


def measure_between_anchors(
    crew: Crew, parts: Sequence[Part], grids: Sequence[Grid], quiet: bool
) -> None:
    """Run all that is left, with the anchors of its lanes before and after."""
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


def admit_lane(
    executor: Executor,
    work: Mapping[Loop, Hardware],
    cases: Sequence[Case],
    options: Options,
    lane: Lane,
) -> Loop | None:
    """The loop that a lane works for which joined late; None where it can work for none."""
    first = next(iter(work))
    say = first.display.say
    try:
        inputs = find_lane_inputs(work[first].inputs, cases, options, executor, lane)
    except UsageError as error:
        say(f"warning: a lane that joined is left out: {error}")
        return None
    for loop, hardware in work.items():
        if find_kind(hardware.environments) == find_kind(inputs.environments):
            loop.lanes[lane.name] = inputs
            say(f"lane {lane.name} joined")
            return loop
    gpu = next(iter(inputs.platforms.values())).name
    say(
        f"warning: lane {lane.name} that joined is left out: {gpu} is of another class than the "
        "lanes that were there; run the same command again to measure on it too"
    )
    return None


def conclude(
    parts: Sequence[Part], grids: Sequence[Grid], out: Path, options: Options, stopped: int
) -> int:
    """Say what could not be found or is left, else print the report; the return code."""
    walls = [(family, wall) for part in parts for family, wall in part.walls.items()]
    lost = [(family, wall) for family, wall in walls if wall.ending and not wall.recommended]
    for family, wall in lost:
        name = family.label(telling_axes((family for family, _ in walls), but="batch_size"))
        print(f"warning: no batch size for {name}: {describe_wall(wall)}", file=sys.stderr)
    # what the stop cut off is run again
    cut = sum(grid.ended[Status.INTERRUPTED] for grid in grids) if stopped else 0
    runs = sum(grid.waiting for grid in grids) + cut
    searches = sum(wall.ending is None for _, wall in walls)
    if runs or searches:
        done = sum(len(part.plan) - len(part.runs) for part in parts) - cut
        done += sum(grid.ended.total() for grid in grids)
        what = [count(runs, "run")] * bool(runs)
        what += [f"the search for {count(searches, 'largest batch')}"] * bool(searches)
        print(
            f"{'stopped' if stopped else 'not finished'}: {count(done, 'run')} done, "
            f"{' and '.join(what)} left; to go on: {options.resume(out)}",
            file=sys.stderr,
        )
        return 128 + stopped if stopped else 1
    print_report(*(part.folder for part in parts))
    if stopped:
        return 128 + stopped
    found = any(wall.largest is not None for _, wall in walls)
    measured = found or any(grid.measured for grid in grids)
    failed = any(wall.ending is not Ending.UNSUPPORTED for _, wall in lost)
    asked = any(part.runs or part.asked.families for part in parts)
    return 1 if failed or (asked and not measured) else 0


def print_report(*folders: Path) -> None:
    from bench.report.__main__ import main as report

    report([str(folder) for folder in folders])


if __name__ == "__main__":
    leave(main())
