"""The lanes of a sweep: opened, examined, and all of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.case import Case
from bench.errors import UnsupportedError, UsageError
from bench.executors import Executor, Lane, ShortageError
from bench.record import Status
from bench.store.cells import RECORDS
from bench.store.reader import read_records
from bench.sweep.options import Options
from bench.sweep.preflight import Inputs, find_inputs, find_lane_inputs

if TYPE_CHECKING:
    import pandas as pd

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
    """Return the inputs of each lane. Raises UsageError: as `find_inputs` and
    `find_lane_inputs`."""
    first = find_inputs(cases, options, families, executor, lanes[0], count_beside(lanes))
    look = partial(find_lane_inputs, first, [*cases, *families], options, executor)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(lanes, [first, *pool.map(look, lanes[1:])], strict=True))


def count_beside(lanes: Sequence[Lane]) -> int:
    """Return how many other lanes of the first one's machine may run at the same time."""
    return sum(lane.host == lanes[0].host for lane in lanes[1:])


def refuse_world_sizes(
    executor: Executor, lane: Lane, out: Path | None, cases: Sequence[Case], options: Options
) -> None:
    """Refuse a --world-size for which there are too few GPUs, and were for all rows of ``out``.
    Raises UsageError: the message says how many there are."""
    if "world_size" not in options.axes:
        return
    widest = find_widest(read_records(out)) if out and (out / RECORDS).is_file() else 0
    for device, size in dict.fromkeys((case.device, case.world_size) for case in cases):
        with suppress(ShortageError):
            try:
                executor.gather(lane, device, size)
            except UnsupportedError as error:
                if size > widest:
                    raise UsageError(f"--world-size {size}: {error}") from None


def find_widest(records: pd.DataFrame) -> int:
    """Return the most GPUs that any recorded case had, if it was measured or lost."""
    had = records["world_size"][records["status"] != Status.UNSUPPORTED]
    return int(had.max()) if len(had) else 0
