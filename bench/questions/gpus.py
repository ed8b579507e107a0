"""Training on several GPUs: how speed goes with their number, and what each precision keeps of it.

Weak scaling keeps the batch of each GPU, strong scaling that of all together. Either is a line: one
case on one GPU, and those on several that differ from it in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, variance
from typing import TYPE_CHECKING

from bench.case import AXES, FOLLOWS, LEGACY, SAME_QUESTION, Case, format_value
from bench.interval import find_reach
from bench.limits import MIN_REPEATS, STEADY
from bench.precision import PRECISIONS
from bench.record import RELIABLE
from bench.render.cells import (
    ESTIMATE,
    Row,
    iterate,
    name_place,
    name_spread,
    quantity_cell,
    quantity_head,
    remarks,
    time_cell,
    write_ratio,
)
from bench.render.model import NOTHING, Cell, Head, Table
from bench.store.attempts import number_groups
from bench.study.axes import Machines, find_varying, list_naming_axes, name_value
from bench.study.doubts import DOUBTS, list_below, list_links, name_links
from bench.study.estimate import TIME
from bench.study.quantities import QUANTITIES, is_number
from bench.study.summaries import SOURCE
from bench.text import say_left_out
from bench.verdict import Ratio, compare

if TYPE_CHECKING:
    import pandas as pd


MOST_ROWS = 60
"""Rows of one of these tables; more would not be read."""

SPREADING = ("parallel", *FOLLOWS["parallel"])
"""Axes in which cases on several GPUs may differ from that on one."""

_WAYS = tuple(name for name in SPREADING if name != "world_size")
"""Of these, the ones that tell lines apart."""

EXCHANGED = ("exposed_s", "exposed_share", "wire_bytes", "wire_rate")
"""What a table says of the exchange of gradients."""


@dataclass(frozen=True)
class Point:
    """Some GPUs of a line.

    Attributes:
        row: its case.
        times: the epoch times of its repeats, in s.
        ratio: of its epoch time over that of one GPU; without a value where there is no such case.
        slowest: the rank that worked longest in most of its repeats; None where none is known.
    """

    row: Row
    times: tuple[float, ...]
    ratio: Ratio
    slowest: int | None

    @property
    def gpus(self) -> int:
        """How many train together."""
        return int(self.row.world_size)

    @property
    def speedup(self) -> float:
        """Images/s over those of one GPU; NaN without one."""
        return 1 / self.ratio.value if self.ratio.value else math.nan

    @property
    def efficiency(self) -> float:
        """Speed-up over the number of GPUs."""
        return self.speedup / self.gpus

    @property
    def beyond(self) -> bool:
        """Whether N GPUs are more than N times as fast as one, by more than runs should vary.

        And by more than they do vary, where there are enough to tell.
        """
        sure = self.ends is None or self.ends[0] > 1
        return self.gpus > 1 and self.efficiency > 1 + STEADY and sure

    @property
    def exposed_error_s(self) -> float:
        """How far exposed communication may be off: in a run, or between runs if that is more.

        Half of an interval; NaN where it is not known.
        """
        row = self.row
        halves = (row.exposed_error_s, (row.exposed_s_high - row.exposed_s_low) / 2)
        return max(filter(is_number, halves), default=math.nan)

    @property
    def hidden(self) -> bool:
        """Whether exposed communication cannot be told from none."""
        return bool(self.row.exposed_s <= self.exposed_error_s)

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % interval of the efficiency; None with too few repeats."""
        if self.ratio.low is None or self.ratio.high is None:
            return None
        return 1 / self.ratio.high / self.gpus, 1 / self.ratio.low / self.gpus


@dataclass(frozen=True)
class Line:
    """A case on one GPU, and the same on several.

    Attributes:
        strong: whether the batch of all GPUs stays, and not that of each.
        base: on one GPU; None where that was not measured.
        points: upwards by their number. There may be another one on one GPU too.
        group: a number that it shares with lines that differ from it in precision only.
    """

    strong: bool
    base: Point | None
    points: tuple[Point, ...]
    group: int

    @property
    def all(self) -> tuple[Point, ...]:
        """All points, that on one GPU first."""
        return (*([self.base] if self.base else []), *self.points)

    @cached_property
    def by_gpus(self) -> dict[int, Point]:
        """The point of each number of GPUs; on one, the base."""
        return {point.gpus: point for point in reversed(self.all)}


def find_lines(rows: pd.DataFrame, cases: pd.DataFrame) -> list[Line]:
    """The lines of weak scaling, then those of strong scaling, in the order of the overview.

    The base is a case of ``--parallel none``, or of the same kind as the others on one GPU; one
    that ran alone, as those on several GPUs do, comes before one beside other lanes. A case that is
    on no line with another is a line of weak scaling by itself.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: the same summarized.
    """
    timed = cases[cases["status"].isin(RELIABLE) & cases["epoch_time_s"].notna()]
    timed = timed.assign(global_batch=timed["batch_size"] * timed["world_size"])
    if not (timed["world_size"] > 1).any():
        return []
    # of cases that differ only in how they were measured, the one that measured most
    timed = timed.sort_values("part", ascending=False, kind="stable")
    told = [*SOURCE, *(name for name in AXES if name not in SAME_QUESTION), "environment", "kind"]
    timed = timed.drop_duplicates(told).sort_index()
    readings = _Readings(rows)
    weak, strong = (list(_gather(timed, held, readings)) for held in ("batch_size", "global_batch"))
    found = [line for line in (*weak, *strong) if len(line.all) > 1]
    seen = {point.row.cell for line in found for point in line.all}
    alone = [line for line in weak if not seen & {point.row.cell for point in line.all}]
    return sorted([*found, *alone], key=lambda line: line.strong)


class _Readings:
    """What repeats measured, by the ``cell`` of their case.

    Args:
        rows: the runs that count, of `summaries.latest`.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        rows = rows[rows["status"].isin(RELIABLE)]
        of_cells = rows.dropna(subset=[TIME.column]).groupby("cell")[TIME.column]
        self._times = {cell: tuple(times) for cell, times in of_cells}
        ranks = rows.dropna(subset=["slowest_rank"]).groupby("cell")["slowest_rank"]
        self._slowest = {cell: int(found.mode().iloc[0]) for cell, found in ranks}

    def read(self, row: Row, base: Row | None) -> Point:
        """The point of a case, against that on one GPU."""
        times = self._times.get(row.cell, ())
        ratio = Ratio(lack="there is no such case on one GPU")
        if base is not None and base.cell != row.cell:
            (ratio,) = compare([(self._times.get(base.cell, ()), times)])
        return Point(row, times, ratio, self._slowest.get(row.cell))


def _gather(cases: pd.DataFrame, held: str, readings: _Readings) -> Iterator[Line]:
    """The lines of cases that agree in ``held``, also those of one point."""
    free = {*SPREADING, *SAME_QUESTION, "batch_size"}
    equal = [*SOURCE, *(name for name in AXES if name not in free), held, "environment", "kind"]
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
                continue  # of DDP on one GPU alone there is nothing to say
            line = line.sort_values("world_size", kind="stable")
            ones = [*iterate(single), *iterate(line[line["world_size"] == 1])]
            base = min(ones, key=lambda row: bool(row.beside), default=None)
            points = {row.cell: row for row in (*ones[:1], *iterate(line))}
            if base is not None:
                del points[base.cell]
            yield Line(
                held == "global_batch",
                readings.read(base, None) if base is not None else None,
                tuple(readings.read(row, base) for row in points.values()),
                int(groups[line.index[0]]),
            )


# ---------------------------------------------------------------------------------------- the tax


@dataclass(frozen=True)
class Tax:
    """What a precision is faster than fp32 on each number of GPUs, all else equal.

    Attributes:
        line: of the precision.
        speedups: over fp32, by the number of GPUs; at least of one and of one larger number.
        share: of its speed-up on one GPU, the part that is lost on the most GPUs; negative where it
            is more there.
        ends: the 95 % interval of that share; None with too few repeats.
    """

    line: Line
    speedups: Mapping[int, float]
    share: float
    ends: tuple[float, float] | None

    @property
    def most(self) -> Point:
        """On the most GPUs."""
        return self.line.by_gpus[max(self.speedups)]


def find_taxes(lines: Sequence[Line]) -> list[Tax]:
    """The tax of each precision whose line and fp32's have one GPU and more in common."""
    plain = {
        (line.strong, line.group): line
        for line in lines
        if line.points[0].row.precision == Case.precision
    }
    found = []
    for line in lines:
        other = plain.get((line.strong, line.group))
        if other is None or other is line:
            continue
        # the two bases may differ in kind, where one of them ran beside other lanes
        theirs = {point.row.parallel: point for point in other.all if point.gpus == 1}
        ours = {point.row.parallel: point for point in line.all if point.gpus == 1}
        ones = [(theirs[kind], one) for kind, one in ours.items() if kind in theirs]
        if not ones:
            continue
        one = min(ones, key=lambda pair: any(point.row.beside for point in pair))
        pairs = {1: (one[0].times, one[1].times)} | {
            gpus: (other.by_gpus[gpus].times, line.by_gpus[gpus].times)
            for gpus in sorted(line.by_gpus)
            if gpus > 1 and gpus in other.by_gpus
        }
        if len(pairs) > 1 and all(min(map(len, pair)) for pair in pairs.values()):
            speedups = {gpus: math.exp(_lead(pair)) for gpus, pair in pairs.items()}
            found.append(Tax(line, speedups, *_judge(pairs[1], pairs[max(pairs)])))
    return found


_Pair = tuple[Sequence[float], Sequence[float]]


def _lead(pair: _Pair) -> float:
    """The logarithm of a speed-up, of geometric means."""
    before, after = (fmean(map(math.log, times)) for times in pair)
    return before - after


def _judge(one: _Pair, most: _Pair) -> tuple[float, tuple[float, float] | None]:
    """The share of a lead that is lost, and its 95 % interval: Welch's, of four sets of repeats."""
    shift = _lead(most) - _lead(one)
    sets = [[math.log(time) for time in times] for pair in (one, most) for times in pair]
    parts = [(variance(logs), len(logs)) for logs in sets if len(logs) >= MIN_REPEATS]
    if len(parts) < len(sets) or not (reach := find_reach(parts)):
        return 1 - math.exp(shift), None
    return 1 - math.exp(shift), (1 - math.exp(shift + reach), 1 - math.exp(shift - reach))


# ------------------------------------------------------------------------------------- the tables


def tabulate_gpus(
    lines: Sequence[Line], cases: pd.DataFrame, machines: Machines
) -> Iterator[Table]:
    """Weak and strong scaling, and each precision's tax.

    Args:
        lines: of `find_lines`.
        cases: those that the report is about.
    """
    if not lines:
        return
    named = list_naming_axes(find_varying(cases))
    both = [[line for line in lines if line.strong is strong] for strong in (False, True)]
    for of_kind in filter(None, both):
        again = bool(both[0]) and of_kind is both[1]  # what the first says of both is not repeated
        yield _tabulate_lines(of_kind, cases, named, machines, again)
    yield from _tabulate_taxes(find_taxes(lines), named, machines)


def name_line(line: Line, named: Sequence[str], machines: Machines, but: str = "") -> str:
    """Name what all points of a line share."""
    first = line.points[-1].row
    axes = [n for n in named if n not in ("world_size", "parallel", but)]
    if line.strong:
        axes = [name for name in axes if name != "batch_size"]
    words = [name_place(first, axes, machines)] if axes else []
    if line.strong:
        words.append(f"global batch {first.global_batch}")
    elif "batch_size" in axes:
        words[0] += " on each GPU" if first.device == "cuda" else " in each process"
    words.append(name_value("parallel", first.parallel, machines))
    return " · ".join(filter(None, words))


def _name_base(line: Line) -> str:
    """What the points of a line are compared with."""
    if line.base is None:
        return "nothing: add --parallel none, which measures one"
    if line.base.row.parallel == Case.parallel:
        return "--parallel none"
    return f"--parallel {name_value('parallel', line.base.row.parallel, {})} --world-size 1"


def _tabulate_lines(
    lines: Sequence[Line],
    cases: pd.DataFrame,
    named: Sequence[str],
    machines: Machines,
    again: bool,
) -> Table:
    strong, on_gpus = lines[0].strong, any(p.row.device == "cuda" for p in lines[0].all)
    what = "GPUs" if on_gpus else "processes"
    time, below = QUANTITIES["epoch_time_s"], list_below(cases)
    heads = (
        Head("world_size", what, "that train one network together"),
        Head("parallel", "parallel", "how they do", False, keep=8),
        Head("batch_size", "batch size", "of each"),
        Head("global_batch", "global batch", "of all together, a step of the optimizer"),
        Head(time.name, f"{time.title}{name_spread(cases)}", "of the slowest process",
             better=time.better),
        quantity_head(QUANTITIES["images_per_s"]),
        Head("gpu_speedup", "speed-up (×)", "images/s over those of one", better="higher"),
        Head("gpu_efficiency", "efficiency (%)", "speed-up over their number", better="higher"),
        Head("gpu_interval", "95 % interval", "of the efficiency", keep=7),
        *(replace(quantity_head(QUANTITIES[name]), keep=6) for name in EXCHANGED),
        Head("slowest", "longest work", "the process that works longest before gradients are "
             "exchanged, and how much longer than the others' median", keep=5),
        Head("remarks", "remarks", "what to know before believing the row", False, wrap=True),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    groups: dict[int, str] = {}
    shown, bases = 0, {_name_base(line) for line in lines}
    ways = len({point.row.parallel for line in lines for point in line.all})
    for line in lines:
        if rows and len(rows) + len(line.all) > MOST_ROWS:
            break
        said = f" (against {_name_base(line)})" if len(bases) > 1 else ""
        groups[len(rows)] = name_line(line, named, machines) + said
        rows += [tuple(_write_point(point, line, ways > 1, below)) for point in line.all]
        shown += 1
    notes = list(_explain_lines(lines[:shown], strong, what, again))
    if shown < len(lines):
        notes.append(f"{say_left_out(len(lines) - shown, 'line')}; --where chooses.")
    kind = "Strong" if strong else "Weak"
    held = "the global batch stays" if strong else "the batch of each stays"
    return Table(
        f"{kind.lower()}-scaling",
        f"Scaling over {what}: {kind.lower()}, {held}",
        heads,
        tuple(rows),
        tuple(notes),
        groups,
    ).drop_empty(but=("world_size", "gpu_speedup", "gpu_efficiency"))


def _write_point(point: Point, line: Line, ways: bool, below: Sequence[str]) -> Iterator[Cell]:
    """The cells of a point.

    Args:
        ways: whether rows of the table differ in ``parallel``.
        below: doubts that are not said beside a row.
    """
    row = point.row
    yield Cell(str(point.gpus), point.gpus)
    yield Cell(name_value("parallel", row.parallel, {}) if ways else NOTHING, row.parallel)
    yield Cell(str(row.batch_size), int(row.batch_size))
    yield Cell(str(row.global_batch), int(row.global_batch))
    yield time_cell(row)
    yield quantity_cell(QUANTITIES["images_per_s"], row, spread=False)
    bases = [line.base.row] if line.base else []
    mark = ESTIMATE if min(one.part for one in (row, *bases)) < 1 else ""
    if math.isnan(point.speedup):
        yield from (Cell(NOTHING),) * 3
    else:
        yield Cell(mark + write_ratio(point.speedup), point.speedup)
        yield Cell(mark + _write_percent(point.efficiency), point.efficiency)
        ends = point.ends
        yield Cell(" to ".join(map(_write_percent, ends)) if ends else NOTHING)
    exposed = QUANTITIES["exposed_s"]
    for name in EXCHANGED:
        cell = quantity_cell(QUANTITIES[name], row, spread=False)
        if name == exposed.name and is_number(cell.value) and is_number(point.exposed_error_s):
            cell = replace(cell, text=f"{cell.text} ± {exposed.write(point.exposed_error_s)}")
        yield cell
    late = QUANTITIES["straggle"]
    if point.slowest is None or math.isnan(row.straggle):
        yield Cell(NOTHING)
    else:
        yield Cell(f"{point.slowest}, +{late.write(row.straggle)} %", float(row.straggle))
    yield Cell(", ".join(filter(None, [remarks(row, below), *_list_remarks(point, line)])))


def _list_remarks(point: Point, line: Line) -> Iterator[str]:
    """What to know of a point that its case alone does not tell."""
    if line.base and line.base.row.beside and not (point is line.base or point.row.beside):
        yield f"against one {DOUBTS['beside'].remark}"
    if point.beyond:
        yield "above 100 %"
    if point.hidden:
        yield "exchange not above noise"


def _write_percent(share: float) -> str:
    text = f"{100 * share:.1f}"
    return text if float(text) else "0.0"  # and not -0.0


def _explain_lines(lines: Sequence[Line], strong: bool, what: str, again: bool) -> Iterator[str]:
    one = "GPU" if what == "GPUs" else "process"
    rows = [point.row for line in lines for point in line.all]
    grows = (
        f"the batch of each {one} shrinks as their number grows"
        if strong
        else f"the global batch grows with the number of {what}, and an epoch has fewer steps"
    )
    yield f"{'Strong' if strong else 'Weak'} scaling: {grows}."
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
        f"Efficiency is the speed-up over the number of {what}. An epoch is as long as that of the "
        "slowest process."
    )
    if rows[0].device == "cpu":
        yield (
            "One process uses all cores of the CPU, and several share them: where N processes are "
            "as fast as one, their efficiency is 1/N, and nothing is lost."
        )
    if any(not math.isnan(row.exposed_s) for row in rows):
        yield (
            "Exposed communication is what the exchange of gradients adds to a step: a step with "
            "it less one without, measured after the epoch, ± half of its 95 % interval within a "
            "run, or of the range of the runs where that is wider. Not above noise: none at all is "
            "within that. What goes on beside the backward pass adds nothing. "
            "On the wire: what a ring all-reduce sends from each, 2 (N - 1) / N of the gradients, "
            "over the time of a step."
        )
    links = {
        point.gpus: kinds
        for line in lines
        for point in line.points
        if (kinds := list_links(str(point.row.links)))
    }
    if len({tuple(kinds) for kinds in links.values()}) > 1:
        doubt = DOUBTS["unlike_links"]
        yield (
            f"The GPUs of different numbers are not linked alike ({name_links(links)}), so that a "
            f"drop may be that of a slower link. {doubt.fix}"
        )
    if any(row.parallel in LEGACY for row in rows):
        yield "dp is torch's DataParallel, which torch itself advises against; use --parallel ddp."


def _tabulate_taxes(
    taxes: Sequence[Tax], named: Sequence[str], machines: Machines
) -> Iterator[Table]:
    """One row a precision: its speed-up over fp32 on each number of GPUs, and what is lost."""
    if not taxes:
        return
    order = list(PRECISIONS)
    taxes = sorted(
        taxes,
        key=lambda tax: (
            tax.line.strong,
            tax.line.group,
            order.index(tax.line.points[0].row.precision),
        ),
    )[:MOST_ROWS]
    on_gpus = any(point.row.device == "cuda" for tax in taxes for point in tax.line.all)
    sizes = sorted({gpus for tax in taxes for gpus in tax.speedups})
    what = "GPU" if on_gpus else "process"
    heads = (
        Head("precision", "precision", "and what follows from it", False),
        *(
            Head(f"over_fp32_{n}", f"over fp32 on {n} (×)", f"speed-up over fp32 on as many {what}"
                 f"{'s' if on_gpus else 'es'}", better="higher")
            for n in sizes
        ),
        Head("tax", "scaling tax (%)", "part of the speed-up on one that is lost on the most",
             better="lower"),
        Head("tax_interval", "95 % interval", "of the tax", keep=7),
        replace(quantity_head(QUANTITIES["wire_bytes"]), keep=6),
        replace(quantity_head(QUANTITIES["exposed_share"]), keep=6),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    groups: dict[int, str] = {}
    before = None
    for tax in taxes:
        place = tax.line.strong, tax.line.group
        if place != before:
            groups[len(rows)] = name_line(tax.line, named, machines, but="precision")
        before, row = place, tax.most.row
        followers = [n for n in FOLLOWS["precision"] if n in named]
        speeds = (tax.speedups.get(n, math.nan) for n in sizes)
        rows.append(
            (
                Cell(name_place(row, ["precision", *followers], {})),
                *(Cell(NOTHING) if math.isnan(s) else Cell(write_ratio(s), s) for s in speeds),
                Cell(_write_percent(tax.share), tax.share),
                Cell(" to ".join(map(_write_percent, tax.ends)) if tax.ends else NOTHING),
                quantity_cell(QUANTITIES["wire_bytes"], row, spread=False),
                quantity_cell(QUANTITIES["exposed_share"], row, spread=False),
            )
        )
    yield Table(
        "scaling-tax",
        f"Precision's scaling tax: the speed-up over fp32 by the number of {what}"
        + ("s" if on_gpus else "es"),
        heads,
        tuple(rows),
        tuple(_explain_taxes(taxes)),
        groups,
    ).drop_empty(but=("tax",))


def _explain_taxes(taxes: Sequence[Tax]) -> Iterator[str]:
    yield (
        "A faster step leaves less time to exchange gradients in. Under autocast (fp16-amp, "
        "bf16-amp) gradients stay in fp32, so that as many bytes are exchanged as in fp32; fp16 "
        "and bf16 halve them, as does --grad-compression. In NVIDIA's own figures "
        "(DeepLearningExamples, ResNet-50 v1.5), 8 A100 are 7.72 times as fast as one in TF32 and "
        "6.72 times in mixed precision: a tax of 13 %."
    )
    unsure = [tax for tax in taxes if tax.ends and tax.ends[0] <= 0 <= tax.ends[1]]
    if unsure:
        names = dict.fromkeys(format_value(tax.line.points[0].row.precision) for tax in unsure)
        yield (
            f"Whether there is a tax is not certain for {', '.join(names)}: the interval has 0 in "
            "it; --repeats 5 narrows it."
        )
    if any(tax.ends is None for tax in taxes):
        yield f"An interval needs {MIN_REPEATS} runs of each of the four cases; use --repeats 5."
