"""Cases on one GPU and on several.

Weak scaling keeps the batch size of each GPU, strong scaling the global batch size. A line of
either is a case on one GPU, and the cases on several that differ from it in nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING

from bench.case import AXES, FOLLOWS, SAME_QUESTION, Case
from bench.limits import STEADY
from bench.record import RELIABLE
from bench.render.cells import (
    Row,
    iterate,
    mark_part,
    name_place,
    name_spread,
    remarks,
    write_ends,
    write_ratio,
    write_tenths,
)
from bench.render.model import Cell
from bench.render.section import (
    Column,
    Section,
    Sheet,
    axis_column,
    join,
    quantity_cell,
    quantity_column,
)
from bench.store.attempts import number_groups
from bench.study.axes import Machines, name_value
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.study.summaries import list_equal
from bench.verdict.ratio import Ratio, compare

if TYPE_CHECKING:
    import pandas as pd

    from bench.questions.report_data import ReportData


SPREADING = ("parallel", *FOLLOWS["parallel"])
"""Axes in which cases on several GPUs may differ from the case on one."""

_WAYS = tuple(name for name in SPREADING if name != "world_size")
"""The axes of `SPREADING` that distinguish lines."""


@dataclass(frozen=True)
class Point:
    """The case of a line on one number of GPUs."""

    row: Row  # the case
    base: Row | None  # the case on one GPU that it is compared with; None for that case itself
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

    @cached_property
    def by_gpus(self) -> dict[int, Point]:
        """The points by number of GPUs; on one GPU, the base."""
        return {point.gpus: point for point in reversed(self.all)}

    @property
    def precision(self) -> str:
        return str(self.points[0].row.precision)

    @property
    def place(self) -> tuple[bool, int]:
        """The key shared by lines that are compared precision by precision."""
        return self.strong, self.group


def find_lines(found: ReportData) -> list[Line]:
    """Return the lines of weak scaling, then of strong scaling, in the order of the overview. The
    base is a case of ``--parallel none``, or of the same kind as the others on one GPU, preferably
    one that ran alone, as cases on several GPUs do, not beside other lanes. A case that is on no
    line with another is a line of weak scaling by itself."""
    rows, cases, times = found.rows, found.cases, found.times
    timed = cases[cases["status"].isin(RELIABLE) & cases["epoch_time_s"].notna()]
    timed = timed.assign(global_batch=timed["batch_size"] * timed["world_size"])
    if not (timed["world_size"] > 1).any():
        return []
    # of cases that differ only in how they were measured, keep the one that measured most
    timed = timed.sort_values("part", ascending=False, kind="stable")
    timed = timed.drop_duplicates(list_equal(SAME_QUESTION)).sort_index()
    # the rank that worked longest in most repeats
    ranks = rows[rows["status"].isin(RELIABLE)].dropna(subset=["slowest_rank"])
    slowest = {c: held.mode().iloc[0] for c, held in ranks.groupby("cell")["slowest_rank"]}
    timed["slowest"] = timed["cell"].map(slowest).astype(float)

    def read(row: Row, base: Row | None) -> Point:
        ratio, own = Ratio(lack="there is no such case on one GPU"), times.get(row.cell, ())
        if base is not None:
            (ratio,) = compare([(times.get(base.cell, ()), own)])
        return Point(row, base, own, ratio)

    weak, strong = (list(_gather(timed, held, read)) for held in ("batch_size", "global_batch"))
    lines = [line for line in (*weak, *strong) if len(line.all) > 1]
    seen = {point.row.cell for line in lines for point in line.all}
    alone = [line for line in weak if not seen & {point.row.cell for point in line.all}]
    return sorted([*lines, *alone], key=lambda line: line.strong)


def _gather(
    cases: pd.DataFrame, held: str, read: Callable[[Row, Row | None], Point]
) -> Iterator[Line]:
    equal = [*list_equal({*SPREADING, *SAME_QUESTION, "batch_size"}), held]
    question = number_groups(cases, equal)
    wide = (cases["world_size"] > 1).groupby(question).transform("any")
    cases, question = cases[wide], question[wide]
    alike = [name for name in equal if name not in ("precision", *FOLLOWS["precision"])]
    groups = number_groups(cases, [*alike, *_WAYS])
    for _, part in cases.groupby(question, sort=False):
        single = part[part["parallel"] == Case.parallel]
        several = part[part["parallel"] != Case.parallel]
        for _, line in several.groupby(number_groups(several, _WAYS), sort=False):
            if not (line["world_size"] > 1).any():
                continue  # DDP on one GPU only: there is nothing to compare
            line = line.sort_values("world_size", kind="stable")
            ones = [*iterate(single), *iterate(line[line["world_size"] == 1])]
            base = min(ones, key=lambda row: bool(row.beside), default=None)
            points = {row.cell: row for row in (*ones[:1], *iterate(line))}
            if base is not None:
                del points[base.cell]
            yield Line(
                held == "global_batch",
                read(base, None) if base is not None else None,
                tuple(read(row, base) for row in points.values()),
                int(groups[line.index[0]]),
            )


def name_line(line: Line, named: Sequence[str], machines: Machines, but: str = "") -> str:
    """Name the settings that all points of a line share."""
    first = line.points[-1].row
    hidden = ("world_size", "parallel", but, *(["batch_size"] if line.strong else []))
    axes = [name for name in named if name not in hidden]
    words = [name_place(first, axes, machines)] if axes else []
    if line.strong:
        words.append(f"global batch {first.global_batch}")
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
        rank, late_by = point.row.slowest, point.row.straggle
        known = not math.isnan(rank + late_by)
        return Cell(f"{rank:.0f}, +{late.write(late_by)} %", late_by) if known else None

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
               lambda point: int(point.row.global_batch)),
        replace(quantity("epoch_time_s", spread=True, help="of the slowest process"),
                label=time.title + name_spread(found.cases)),
        quantity("images_per_s"),
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
    links = {
        point.gpus: kinds
        for line in lines
        for point in line.points
        if (kinds := list_links(str(point.row.links)))
    }
    if len({tuple(kinds) for kinds in links.values()}) > 1:
        yield (
            f"Runs with different numbers of GPUs use different links ({name_links(links)}), so a "
            "slower link may explain a drop. CUDA_VISIBLE_DEVICES chooses GPUs that are linked "
            "alike; nvidia-smi topo -m shows how they are."
        )
    if any(row.parallel in AXES["parallel"].legacy for row in rows):
        yield "dp is torch's DataParallel, which torch itself advises against; use --parallel ddp."


_LINK = re.compile(r"\d+-\d+ ([^,]+)")


def list_links(text: str) -> list[str]:
    """Return the distinct kinds of links in the column ``links``.

    >>> list_links("0-1 NV18, 0-2 SYS, 1-2 SYS")
    ['NV18', 'SYS']
    """
    return sorted(set(_LINK.findall(text)))


def name_links(kinds: Mapping[int, Sequence[str]]) -> str:
    """Write the kinds of links for each number of GPUs.

    >>> name_links({2: ["NV18"], 4: ["NV18", "SYS"]})
    '2 GPUs: NV18; 4 GPUs: NV18 and SYS'
    """
    return "; ".join(f"{gpus} GPUs: {' and '.join(kinds[gpus])}" for gpus in sorted(kinds))


SCALING = Section("scaling", "How much faster do several train one network?", _tabulate_scaling)
