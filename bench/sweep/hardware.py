"""The lanes of a sweep: opened, examined, and all of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.case import Case
from bench.errors import UnsupportedError, UsageError
from bench.executors import Executor, Lane
from bench.sweep.options import Options
from bench.sweep.preflight import Inputs, find_inputs, find_lane_inputs

_AT_ONCE = 8  # lanes examined at once, each by a process that imports torch


def open_lanes(executor: Executor, cases: Sequence[Case], options: Options) -> Sequence[Lane]:
    """Open the requested lanes. Raises UsageError: they are too many, of several kinds, or of
    several devices."""
    devices = list(dict.fromkeys(case.device for case in cases))
    if len(devices) > 1 and options.lanes not in (None, 1):
        raise UsageError(f"--lanes: the cases are of {' and '.join(devices)}; give one --device")
    return executor.open_lanes(devices[0], options.lanes)


def examine_lanes(
    executor: Executor,
    lanes: Sequence[Lane],
    cases: Sequence[Case],
    options: Options,
    families: Sequence[Case] = (),
) -> dict[Lane, Inputs]:
    """Return the inputs of each lane; on a cluster all are those of the first. Raises UsageError:
    as `find_inputs` and `find_lane_inputs`."""
    beside = count_beside(lanes) if options.here else 0
    first = find_inputs(cases, options, families, executor, lanes[0], beside)
    if not options.here:
        return dict.fromkeys(lanes, first)
    look = partial(find_lane_inputs, first, [*cases, *families], options, executor)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(lanes, [first, *pool.map(look, lanes[1:])], strict=True))


def count_beside(lanes: Sequence[Lane]) -> int:
    """Return how many other lanes of this machine may run at the same time."""
    return len(lanes) - 1


def refuse_world_sizes(
    executor: Executor, lane: Lane, cases: Sequence[Case], options: Options
) -> None:
    """Refuse a --world-size for which there are too few GPUs. Raises UsageError: the message says
    how many there are."""
    if "world_size" not in options.axes:
        return
    for device, size in dict.fromkeys((case.device, case.world_size) for case in cases):
        try:
            executor.gather(lane, device, size)
        except UnsupportedError as error:
            raise UsageError(f"--world-size {size}: {error}") from None
