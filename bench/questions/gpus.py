"""Cases on one GPU and on several.

Weak scaling keeps the batch size of each GPU, strong scaling the global batch size. A line of
either is a case on one GPU, and the cases on several that differ from it in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from statistics import mode
from typing import TYPE_CHECKING, Any

from bench.case import FOLLOWS, SAME_QUESTION, Case, free_axes
from bench.limits import STEADY
from bench.questions.settings import list_settings
from bench.record import RELIABLE
from bench.render.section import (
    Column,
    Section,
    Sheet,
    axis_column,
    join,
    quantity_cell,
    quantity_column,
)
from bench.render.table import (
    Cell,
    mark_part,
    name_place,
    name_spread,
    remarks,
    write_ends,
    write_ratio,
    write_tenths,
)
from bench.store.rows import group
from bench.study.axes import Machines, name_value
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.study.runs import Result, tell_but
from bench.verdict import Ratio, compare

if TYPE_CHECKING:
    from bench.questions.report_data import ReportData


SPREADING = ("parallel", *FOLLOWS["parallel"])
"""Axes in which cases on several GPUs may differ from the case on one."""

_WAYS = tuple(name for name in SPREADING if name != "world_size")
"""The axes of `SPREADING` that distinguish lines."""


@dataclass(frozen=True)
class Point:
    """The case of a line on one number of GPUs."""

    row: Result  # the case
    base: Result | None  # the case on one GPU that it is compared with; None for that case itself
    times: Sequence[float]  # epoch times of its repeats, in s
    ratio: Ratio  # its epoch time over that of one GPU; no value without such a case

    @property
    def gpus(self) -> int:
        return int(self.row.world_size)

    @property
    def speedup(self) -> float:
        """Images/s over the images/s of one GPU; NaN without a case on one."""
        return 1 / self.ratio.value if self.ratio.value else math.nan

    @property
    def efficiency(self) -> float:
        return self.speedup / self.gpus

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % interval of the efficiency; None with too few repeats."""
        if self.ratio.low is None or self.ratio.high is None:
            return None
        return 1 / self.ratio.high / self.gpus, 1 / self.ratio.low / self.gpus

    @property
    def beyond(self) -> bool:
        """Whether N GPUs are over N times as fast as one: by more than `STEADY` and, with enough
        repeats, with a 95 % interval above 1."""
        sure = self.ends is None or self.ends[0] > 1
        return self.gpus > 1 and self.efficiency > 1 + STEADY and sure

    @property
    def exposed_error_s(self) -> float:
        """The error of exposed communication in s: half of its interval within a run or of its
        range between runs, whichever is larger; NaN if unknown."""
        row = self.row
        halves = (row.exposed_error_s, (row.exposed_s_high - row.exposed_s_low) / 2)
        return max(filter(is_number, halves), default=math.nan)


@dataclass(frozen=True)
class Line:
    """A case on one GPU and the same on several; ``points`` may hold another one on one GPU."""

    strong: bool  # whether the global batch is constant, and not the batch of each GPU
    base: Point | None  # on one GPU; None if that was not measured
    points: tuple[Point, ...]  # the others, by ascending number of GPUs
    group: int  # the same number for all lines that differ in precision only

    @property
    def all(self) -> tuple[Point, ...]:
        """All points, the base first."""
        return (*([self.base] if self.base else []), *self.points)


def find_lines(results: Sequence[Result], times: Mapping[int, Sequence[float]]) -> list[Line]:
    """Return the lines of weak scaling, then of strong scaling, in the order of the overview. The
    base is a case of ``--parallel none``, or of the same kind as the others on one GPU, preferably
    one that ran alone, as cases on several GPUs do, not beside other lanes. A case that is on no
    line with another is a line of weak scaling by itself."""
    timed = [row for row in results if row.status in RELIABLE and is_number(row.epoch_time_s)]
    if not any(row.world_size > 1 for row in timed):
        return []
    timed = [setting.best for setting in list_settings(timed)]

    def read(row: Result, base: Result | None) -> Point:
        ratio, own = Ratio(lack="there is no such case on one GPU"), times.get(row.cell, ())
        if base is not None:
            (ratio,) = compare([(times.get(base.cell, ()), own)])
        return Point(row, base, own, ratio)

    weak, strong = ([*_gather(timed, strong, read)] for strong in (False, True))
    lines = [line for line in (*weak, *strong) if len(line.all) > 1]
    seen = {point.row.cell for line in lines for point in line.all}
    alone = [line for line in weak if not seen & {point.row.cell for point in line.all}]
    return sorted([*lines, *alone], key=lambda line: line.strong)


def count_items(row: Result) -> int:
    """Return the items of a step of the optimizer, of all GPUs together."""
    return int(row.batch_size * row.world_size)


def _gather(
    results: Sequence[Result], strong: bool, read: Callable[[Result, Result | None], Point]
) -> Iterator[Line]:
    free = {*SPREADING, *SAME_QUESTION, "batch_size"}
    tell, tell_rivals = tell_but(free), tell_but({*free, *free_axes("precision")})
    ways = attrgetter(*_WAYS)
    groups: dict[Any, int] = {}

    def ask(row: Result) -> tuple[Any, int]:
        return tell(row), count_items(row) if strong else int(row.batch_size)

    for part in group(results, ask):
        single = [row for row in part if row.parallel == Case.parallel]
        several = [row for row in part if row.parallel != Case.parallel]
        for line in group(several, ways):
            if not any(row.world_size > 1 for row in line):
                continue  # DDP on one GPU only: there is nothing to compare
            line.sort(key=lambda row: int(row.world_size))
            ones = [*single, *(row for row in line if row.world_size == 1)]
            base = min(ones, key=lambda row: bool(row.beside), default=None)
            points = {row.cell: row for row in (*ones[:1], *line)}
            if base is not None:
                del points[base.cell]
            place = (tell_rivals(line[0]), ask(line[0])[1], ways(line[0]))
            yield Line(
                strong,
                read(base, None) if base is not None else None,
                tuple(read(row, base) for row in points.values()),
                groups.setdefault(place, len(groups)),
            )


def name_line(line: Line, named: Sequence[str], machines: Machines, but: str = "") -> str:
    """Name the settings that all points of a line share."""
    first = line.points[-1].row
    hidden = ("world_size", "parallel", but, *(["batch_size"] if line.strong else []))
    axes = [name for name in named if name not in hidden]
    words = [name_place(first, axes, machines)] if axes else []
    if line.strong:
        words.append(f"global batch {count_items(first)}")
    elif "batch_size" in axes:
        words[0] += " on each GPU" if first.device == "cuda" else " in each process"
    words.append(name_value("parallel", first.parallel, machines))
    return " · ".join(filter(None, words))


def _name_base(line: Line) -> str:
    if line.base is None:
        return "nothing: add --parallel none, which measures one"
    way = line.base.row.parallel
    alone = "" if way == Case.parallel else " --world-size 1"
    return f"--parallel {name_value('parallel', way, {})}{alone}"


def name_devices(points: Sequence[Point]) -> str:
    return "GPUs" if any(point.row.device == "cuda" for point in points) else "processes"


def _tabulate_scaling(found: ReportData) -> Iterator[Sheet]:
    for again, (_, lines) in enumerate(groupby(found.lines, lambda line: line.strong)):
        # notes that hold for both kinds stand below the first only
        yield _tabulate_lines(list(lines), found, bool(again))


def _tabulate_lines(lines: Sequence[Line], found: ReportData, again: bool) -> Sheet:
    what = name_devices(lines[0].all)
    time, exposed, late = (QUANTITIES[n] for n in ("epoch_time_s", "exposed_s", "straggle"))
    several_bases = len({_name_base(line) for line in lines}) > 1
    several_ways = len({point.row.parallel for line in lines for point in line.all}) > 1

    def write(point: Point, value: float, write: Callable[[float], str]) -> Cell | None:
        mark = mark_part(*(row for row in (point.row, point.base) if row is not None))
        return None if math.isnan(value) else Cell(mark + write(value), value)

    def write_exposed(point: Point) -> Cell:
        cell, error = quantity_cell(exposed, point.row, spread=False), point.exposed_error_s
        if not (is_number(cell.value) and is_number(error)):
            return cell
        return replace(cell, text=f"{cell.text} ± {exposed.write(error)}")

    def write_slowest(point: Point) -> Cell | None:
        ranks = [run.slowest_rank for run in point.row.every if run.status in RELIABLE]
        known = [rank for rank in ranks if is_number(rank)]
        # the one that worked longest in most repeats
        rank = mode(sorted(known)) if known else math.nan
        late_by = point.row.straggle
        if math.isnan(rank + late_by):
            return None
        return Cell(f"{rank:.0f}, +{late.write(late_by)} %", late_by)

    def list_remarks(point: Point) -> Iterator[str]:
        yield remarks(point.row, found.below)
        if point.base is not None and point.base.beside and not point.row.beside:
            yield f"against one {DOUBTS['beside'].remark}"
        if point.beyond:
            yield "above 100 %"
        if point.row.exposed_s <= point.exposed_error_s:
            yield "exchange not above noise"

    def explain(shown: Sequence[Point]) -> Iterator[str]:
        return _explain_lines([line for line in lines if line.all[0] in shown], what, again)

    quantity = partial(quantity_column, take=lambda point: point.row, spread=False)
    columns: list[Column[Point]] = [
        Column("world_size", what, "that train one network together", lambda point: point.gpus,
               always=True),
        *([replace(axis_column("parallel", found.machines, lambda point: point.row),
                   help="how they do", keep=8, always=False)] if several_ways else []),
        Column("batch_size", "batch size", "of each", lambda point: int(point.row.batch_size)),
        Column("global_batch", "global batch", "of all together, a step of the optimizer",
               lambda point: count_items(point.row)),
        replace(quantity("epoch_time_s", spread=True, help="of the slowest process"),
                label=time.title + name_spread(found.results)),
        quantity("images_per_s"),
        quantity("speedup", label="over fp32", help="epoch time of fp32 on as many over its own"),
        Column("gpu_speedup", "speed-up (×)", "images/s over those of one; of repeats, "
               "geometric means",
               lambda point: write(point, point.speedup, write_ratio),
               better="higher", always=True),
        Column("gpu_efficiency", "efficiency (%)", "speed-up over their number",
               lambda point: write(point, point.efficiency, write_tenths),
               better="higher", always=True),
        Column("gpu_interval", "95 % interval", "of the efficiency",
               lambda point: write_ends(point.ends, write_tenths, " to "), keep=7),
        replace(quantity("exposed_s", keep=6), say=write_exposed),
        quantity("exposed_share", keep=6),
        quantity("wire_bytes", keep=6),
        quantity("wire_rate", keep=6),
        Column("slowest", "longest work", "the process that works longest before gradients are "
               "exchanged, and how much longer than the others' median", write_slowest, keep=5),
        Column("remarks", "remarks", "what to know before believing the row",
               lambda point: ", ".join(filter(None, list_remarks(point))), wrap=True),
    ]  # fmt: skip
    rows, groups = join(
        (
            name_line(line, found.named, found.machines)
            + (f" (against {_name_base(line)})" if several_bases else ""),
            line.all,
        )
        for line in lines
    )
    held = "the global batch stays" if lines[0].strong else "the batch of each stays"
    kind = "strong" if lines[0].strong else "weak"
    return Sheet(
        f"Scaling over {what}: {kind}, {held}", columns, rows, explain(rows), groups,
        name=f"{kind}-scaling",
    )  # fmt: skip


def _explain_lines(lines: Sequence[Line], what: str, again: bool) -> Iterator[str]:
    one = "GPU" if what == "GPUs" else "process"
    rows = [point.row for line in lines for point in line.all]
    yield (
        f"Strong scaling: the batch of each {one} shrinks as their number grows."
        if lines[0].strong
        else f"Weak scaling: the global batch grows with the number of {what}, and an epoch has "
        "fewer steps."
    )
    bases = {_name_base(line) for line in lines}
    if len(bases) == 1:
        yield f"Each is compared with {bases.pop()}."
    if any(point.beyond for line in lines for point in line.points):
        yield (
            f"Above 100 %: more {what} do not make each of them faster. The case on one was "
            "slowed, or smaller batches take less time an item, as they may where the global batch "
            "stays. Look at its remarks, and run both again on an idle machine with --repeats 5."
        )
    if again:
        return
    yield (
        f"Efficiency is the speed-up over the number of {what}. An epoch takes as long as in the "
        "slowest process."
    )
    if rows[0].device == "cpu":
        yield (
            "One process uses all cores of the CPU, and several share them: where N processes are "
            "as fast as one, their efficiency is 1/N, and nothing is lost."
        )
    if any(not math.isnan(row.exposed_s) for row in rows):
        yield (
            "Exposed communication is the time that the exchange of gradients adds to a step: a "
            "step with it minus one without, measured after the epoch, ± half of its 95 % "
            "interval within a run, or of the range of the runs where that is wider. Not above "
            "noise: zero is within this. An exchange during the backward pass adds nothing. On "
            "the wire: the bytes that each process sends in a ring all-reduce, 2 (N - 1) / N of "
            "the gradients, over the time of a step."
        )
    if any(row.parallel == "dp" for row in rows):
        yield "dp is torch's DataParallel, which torch itself advises against; use --parallel ddp."


SCALING = Section("scaling", "How much faster do several train one network?", _tabulate_scaling)
