"""The largest batch that fits, and cases that differ only in the number of GPUs.

Weak scaling keeps the batch size of each GPU, strong scaling the global batch size; a line of
either is a case on one GPU, and the cases on several that differ from it in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from bench.answers.render.table import (
    AnyRow,
    Cell,
    Column,
    Section,
    Sheet,
    axis_column,
    join,
    mark_part,
    name_place,
    name_spread,
    quantity_cell,
    quantity_column,
    remarks,
    write_ends,
    write_ratio,
    write_tenths,
)
from bench.answers.report_data import ReportData
from bench.answers.settings import list_settings
from bench.results.store.rows import group
from bench.results.study.axes import find_varying, list_naming_axes
from bench.results.study.comparable import refuse_pair, tell_but
from bench.results.study.quantities import QUANTITIES, is_number
from bench.results.study.runs import SOURCE, Result, Run
from bench.results.study.sweeps import SweepFolder
from bench.results.study.warnings import SAID_BELOW
from bench.results.verdict import Ratio, compare
from bench.schema.case import FOLLOWS, SAME_QUESTION, Case, spell_value
from bench.schema.record import MEASURED, REFUSED, RELIABLE
from bench.sweep.largest_batch import Ending, LargestBatch, read_largest_batches

_OTHERS = ("batch_size", *SAME_QUESTION)


def find_bounds(rows: Sequence[AnyRow]) -> tuple[int | None, int | None]:
    """Return the largest batch size that was trained, and the smallest above it that ran out of
    memory, by cases and probes."""
    fits = max((int(row.batch_size) for row in rows if row.status in MEASURED), default=None)
    failed = (int(row.batch_size) for row in rows if row.status in REFUSED)
    return fits, min((size for size in failed if size > (fits or 0)), default=None)


class BatchSearch(NamedTuple):
    """A search for the largest batch: where it ran, for which cases, and what it found."""

    ran_on: str
    family: Case
    largest_batch: LargestBatch


def find_searches(runs: Sequence[Run], sweeps: Sequence[SweepFolder]) -> list[BatchSearch]:
    """Return the searches in runs, each with the step and margin of its sweep."""
    if not any(run.probe for run in runs):
        return []
    asked = {sweep.name: sweep for sweep in sweeps}
    found = []
    for part in group(runs, attrgetter(*SOURCE)):
        sweep = asked[part[0].sweep]
        mine = {run.record_id for run in part}
        rows = [row for row in sweep.rows if row.record_id in mine]
        largest_batches = read_largest_batches(rows, sweep.step, sweep.margin)
        found += [BatchSearch(part[0].ran_on, *largest_batch) for largest_batch in largest_batches]
    return found


def list_keys(cases: Sequence[AnyRow], take: Callable[[Any], AnyRow]) -> list[Column[Any]]:
    """Return columns for the precision and the other axes in which ``cases`` differ. ``take`` maps
    a row of the table to its case."""
    shown = dict.fromkeys(["precision", *find_varying(cases)])
    return [axis_column(axis, take, number=False) for axis in shown if axis not in _OTHERS]


def _tabulate_largest_batches(found: ReportData) -> Iterator[Sheet]:
    rows = [
        (SimpleNamespace(ran_on=search.ran_on, **vars(search.family)), search.largest_batch)
        for search in find_searches(found.runs, found.sweeps)
    ]
    fine = all(largest_batch.ending is Ending.FOUND for _, largest_batch in rows)
    columns: list[Column[tuple[AnyRow, LargestBatch]]] = [
        *list_keys([row for row, _ in rows], lambda row: row[0]),
        Column("largest", "largest batch", "that was trained", lambda row: row[1].largest,
               better="higher"),
        Column("refused", "does not fit", "the smallest batch above it that ran out of memory",
               lambda row: row[1].smallest_failing),
        Column("thrashes", "retries from", "the allocator frees its cache and tries again",
               lambda row: row[1].thrashes_from, keep=8),
        Column("recommended", "recommended", "its memory leaves a margin free",
               lambda row: row[1].recommended),
        Column("probes", "probes", "short runs that the search took", lambda row: row[1].probes,
               better="lower", keep=6),
        Column("ending", "ended", "how the search ended", lambda row: "" if fine else
               row[1].ending.meaning if row[1].ending else "not yet; run the same command again",
               keep=8, wrap=True),
    ]  # fmt: skip
    note = (
        "Recommended: by the line of memory, the margin of the sweep stays free, as the next run, "
        "another driver or a neighbour may take that much."
    )
    yield Sheet("Largest batch that fits, by probes of a few steps", columns, rows, [note])


LARGEST_BATCH = Section(
    "largest_batches", "How large a batch fits in memory?", _tabulate_largest_batches
)
# ---------------------------------------------------------------------------------- on several GPUs


SPREADING = ("parallel", *FOLLOWS["parallel"])
"""Axes in which cases on several GPUs may differ from the case on one."""

_WAYS = tuple(name for name in SPREADING if name != "world_size")
"""The axes of `SPREADING` that distinguish lines."""


@dataclass(frozen=True)
class _Point:
    """The case of a line on one number of GPUs."""

    row: Result  # the case
    base: Result | None  # the case on one GPU that it is compared with; None for that case itself
    ratio: Ratio  # its epoch time over that of one GPU; no value without such a case

    @property
    def gpus(self) -> int:
        return int(self.row.world_size)

    @property
    def speedup(self) -> float:
        """Images/s over the images/s of one GPU; NaN without a case on one."""
        return 1 / self.ratio.value if self.ratio.value else math.nan

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % interval of the efficiency; None with too few repeats."""
        if self.ratio.low is None or self.ratio.high is None:
            return None
        return 1 / self.ratio.high / self.gpus, 1 / self.ratio.low / self.gpus


@dataclass(frozen=True)
class Line:
    """A case on one GPU, if it was measured, and the same on several, by their number."""

    strong: bool  # whether the global batch is constant, and not the batch of each GPU
    points: tuple[_Point, ...]


def find_lines(results: Sequence[Result]) -> list[Line]:
    """Return the lines of weak scaling, then of strong scaling, in the order of the overview. The
    base is a case of ``--parallel none``, or of the same kind as the others on one GPU, preferably
    one that ran alone, as cases on several GPUs do, not beside other lanes. A case that is on no
    line with another is a line of weak scaling by itself."""
    timed = [row for row in results if row.status in RELIABLE and is_number(row.epoch_time_s)]
    if not any(row.world_size > 1 for row in timed):
        return []
    timed = [setting.best for setting in list_settings(timed)]

    def read(row: Result, base: Result | None) -> _Point:
        if base is None or row is base or refuse_pair(base, row):
            return _Point(row, None, Ratio())
        (ratio,) = compare([(base.times, row.times)])
        return _Point(row, base, ratio)

    weak, strong = ([*_gather(timed, strong, read)] for strong in (False, True))
    lines = [line for line in (*weak, *strong) if len(line.points) > 1]
    seen = {point.row.cell for line in lines for point in line.points}
    alone = [line for line in weak if not seen & {point.row.cell for point in line.points}]
    return sorted([*lines, *alone], key=lambda line: line.strong)


def count_items(row: Result) -> int:
    """Return the items of a step of the optimizer, of all GPUs together."""
    return int(row.batch_size * row.world_size)


def _gather(
    results: Sequence[Result], strong: bool, read: Callable[[Result, Result | None], _Point]
) -> Iterator[Line]:
    tell, ways = tell_but({*SPREADING, *SAME_QUESTION, "batch_size"}), attrgetter(*_WAYS)

    def ask(row: Result) -> tuple[Any, int]:
        return tell(row), count_items(row) if strong else int(row.batch_size)

    for part in group(results, ask):
        single = [row for row in part if row.parallel == Case.parallel]
        several = [row for row in part if row.parallel != Case.parallel]
        for line in group(several, ways):
            if not any(row.world_size > 1 for row in line):
                continue  # DDP on one GPU only: there is nothing to compare
            ones = [*single, *(row for row in line if row.world_size == 1)]
            base = min(ones, key=lambda row: bool(row.beside), default=None)
            rest = sorted((row for row in line if row.world_size > 1), key=attrgetter("world_size"))
            rows = [base, *rest] if base is not None else rest
            yield Line(strong, tuple(read(row, base) for row in rows))


def name_line(line: Line, named: Sequence[str]) -> str:
    """Name the settings that all points of a line share."""
    first = line.points[-1].row
    hidden = ("world_size", "parallel", *(["batch_size"] if line.strong else []))
    axes = [name for name in named if name not in hidden]
    constant = f"global batch {count_items(first)}" if line.strong else "batch of each constant"
    way = spell_value(first.parallel)
    return " · ".join(filter(None, [name_place(first, axes), constant, way]))


def _tabulate_scaling(found: ReportData) -> Iterator[Sheet]:
    exposed = QUANTITIES["exposed_s"]
    lines, named = find_lines(found.results), list_naming_axes(found.varying)
    on_cards = any(point.row.device == "cuda" for line in lines for point in line.points)
    what = "GPUs" if on_cards else "processes"

    def write(point: _Point, value: float, write: Callable[[float], str]) -> Cell | None:
        mark = mark_part(*(row for row in (point.row, point.base) if row is not None))
        return None if math.isnan(value) else Cell(mark + write(value), value)

    def write_exposed(point: _Point) -> Cell:
        row, cell = point.row, quantity_cell("exposed_s", point.row, spread=False)
        # within a run, or between the runs where that is wider
        halves = (row.exposed_error_s, (row.exposed_s_high - row.exposed_s_low) / 2)
        error = max(filter(is_number, halves), default=math.nan)
        known = is_number(cell.value) and is_number(error)
        return replace(cell, text=f"{cell.text} ± {exposed.write(error)}") if known else cell

    quantity = partial(quantity_column, take=lambda point: point.row, spread=False)
    columns: list[Column[_Point]] = [
        Column("world_size", what, "that train one network together", lambda point: point.gpus,
               always=True),
        Column("batch_size", "batch size", "of each", lambda point: int(point.row.batch_size)),
        Column("global_batch", "global batch", "of all together, a step of the optimizer",
               lambda point: count_items(point.row)),
        replace(quantity("epoch_time_s", spread=True, help="of the slowest process"),
                label=QUANTITIES["epoch_time_s"].title + name_spread(found.results)),
        quantity("images_per_s"),
        quantity("speedup", label="over fp32", help="epoch time of fp32 on as many over its own"),
        Column("gpu_speedup", "speed-up (×)", "images/s over those of one; of repeats, medians",
               lambda point: write(point, point.speedup, write_ratio),
               better="higher", always=True),
        Column("gpu_efficiency", "efficiency (%)", "speed-up over their number",
               lambda point: write(point, point.speedup / point.gpus, write_tenths),
               better="higher", always=True),
        Column("gpu_interval", "95 % interval", "of the efficiency",
               lambda point: write_ends(point.ends, write_tenths, " to "), number=True, keep=7),
        replace(quantity("exposed_s", keep=6), say=write_exposed),
        quantity("exposed_share", keep=6),
        quantity("wire_bytes", keep=6),
        quantity("gathered_bytes", keep=6),
        quantity("wire_rate", keep=6),
        Column("remarks", "remarks", "what to know before believing the row",
               lambda point: remarks(point.row, SAID_BELOW), wrap=True),
    ]  # fmt: skip
    rows, groups = join((name_line(line, named), line.points) for line in lines)
    notes = [
        f"Weak scaling keeps the batch of each, strong scaling the global batch; efficiency is "
        f"the speed-up over the number of {what}, of which several share the cores on a CPU.",
        "Exposed communication is what the exchange of gradients, and of weights with fsdp, adds "
        "to a step, ± half of its 95 % interval: what is exchanged while a process computes adds "
        "nothing.",
    ]
    yield Sheet(f"Scaling over {what}", columns, rows, notes, groups)


SCALING = Section("scaling", "How much faster do several train one network?", _tabulate_scaling)
