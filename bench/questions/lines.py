"""Cases on one GPU and on several, and what each precision keeps of its speed-up there.

Weak scaling keeps the batch of each GPU, strong scaling that of all together. Either is a line: one
case on one GPU, and those on several that differ from it in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, variance
from typing import TYPE_CHECKING

from bench.case import FOLLOWS, SAME_QUESTION, Case
from bench.interval import find_reach
from bench.limits import MIN_REPEATS, STEADY
from bench.record import RELIABLE
from bench.render.cells import Row, iterate
from bench.store.attempts import number_groups
from bench.study.quantities import is_number
from bench.study.summaries import list_equal
from bench.verdict import Ratio, compare

if TYPE_CHECKING:
    import pandas as pd

SPREADING = ("parallel", *FOLLOWS["parallel"])
"""Axes in which cases on several GPUs may differ from that on one."""

_WAYS = tuple(name for name in SPREADING if name != "world_size")
"""Of these, the ones that tell lines apart."""


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
    times: Sequence[float]
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


def find_lines(
    rows: pd.DataFrame, cases: pd.DataFrame, times: Mapping[int, Sequence[float]]
) -> list[Line]:
    """The lines of weak scaling, then those of strong scaling, in the order of the overview.

    The base is a case of ``--parallel none``, or of the same kind as the others on one GPU; one
    that ran alone, as those on several GPUs do, comes before one beside other lanes. A case that is
    on no line with another is a line of weak scaling by itself.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: the same summarized.
        times: of `take_times`, of these runs.
    """
    timed = cases[cases["status"].isin(RELIABLE) & cases["epoch_time_s"].notna()]
    timed = timed.assign(global_batch=timed["batch_size"] * timed["world_size"])
    if not (timed["world_size"] > 1).any():
        return []
    # of cases that differ only in how they were measured, the one that measured most
    timed = timed.sort_values("part", ascending=False, kind="stable")
    timed = timed.drop_duplicates(list_equal(SAME_QUESTION)).sort_index()
    ranks = rows[rows["status"].isin(RELIABLE)].dropna(subset=["slowest_rank"])
    slowest = {c: int(found.mode().iloc[0]) for c, found in ranks.groupby("cell")["slowest_rank"]}

    def read(row: Row, base: Row | None) -> Point:
        """The point of a case, against that on one GPU."""
        ratio = Ratio(lack="there is no such case on one GPU")
        if base is not None and base.cell != row.cell:
            (ratio,) = compare([(times.get(base.cell, ()), times.get(row.cell, ()))])
        return Point(row, times.get(row.cell, ()), ratio, slowest.get(row.cell))

    weak, strong = (list(_gather(timed, held, read)) for held in ("batch_size", "global_batch"))
    found = [line for line in (*weak, *strong) if len(line.all) > 1]
    seen = {point.row.cell for line in found for point in line.all}
    alone = [line for line in weak if not seen & {point.row.cell for point in line.all}]
    return sorted([*found, *alone], key=lambda line: line.strong)


def _gather(
    cases: pd.DataFrame, held: str, read: Callable[[Row, Row | None], Point]
) -> Iterator[Line]:
    """The lines of cases that agree in ``held``, also those of one point."""
    free = {*SPREADING, *SAME_QUESTION, "batch_size"}
    equal = [*list_equal(free), held]
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
                read(base, None) if base is not None else None,
                tuple(read(row, base) for row in points.values()),
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
