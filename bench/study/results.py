"""Results: what the runs of a case on one machine come to, beside fp32 with all else equal."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cache, cached_property
from math import comb
from typing import Any

from bench.case import SAME_QUESTION, free_axes
from bench.interval import CONFIDENCE
from bench.limits import MIN_REPEATS, STEADY
from bench.record import COMPARABLE, MEASURED, MODEL_PARTS, RELIABLE, Status
from bench.store.rows import group
from bench.study.doubts import DOUBTS, LEAST_KNOWN
from bench.study.quantities import STORED, over
from bench.study.runs import Run, tell_but

# a case has the best-ranked status of its repeats: the one that tells most about its time
_RANK = [Status.OK, Status.DIVERGED, Status.INVALID, Status.OOM, Status.OOM_SUSPECTED]


def _rank(run: Run) -> int:
    return _RANK.index(run.status) if run.status in _RANK else len(_RANK)


class Result:
    """A case on one machine, in one environment.

    Each of `STORED` is the median over the runs that ended with the status of the case. The ends of
    its spread are ``NAME_low`` and ``NAME_high``, which ``spread`` and ``coverage`` describe (see
    `bench.study.results`). Each of `DOUBTS` is of any of its runs. Other attributes, such as axes,
    are those of the first of its runs that count.

    Attributes:
        every: all its runs, of which there are ``runs``; ``repeats`` count, with ``seeds`` seeds.
        wide: whether repeats spread by more than ±`STEADY` (half the width of the spread).
        base: the case in fp32 that this one is compared with.
        apart: what tells it from the same case in other environments.
    """

    base: Result | None = None
    apart = ""

    def __init__(self, every: Sequence[Run]) -> None:
        best = min(map(_rank, every))
        counted = [run for run in every if _rank(run) == best]
        self.every, self.first = every, counted[0]
        self.repeats, self.runs = len(counted), len(every)
        self.seeds = len({run.run_seed for run in counted})
        found: dict[str, Any] = {}
        untimed = () if self.status in MEASURED else ("epoch_time_s", "images_per_s")
        for q in STORED:
            values = [] if q.name in untimed else [getattr(run, q.name) for run in counted]
            middle, low, high = find_middle(values)
            if q.rate:
                middle = 1 / find_middle(1 / value for value in values if value > 0)[0]
            found |= {q.name: middle, f"{q.name}_low": low, f"{q.name}_high": high}
        half = (found["epoch_time_s_high"] - found["epoch_time_s_low"]) / 2
        self.wide = over(half, found["epoch_time_s"]) > STEADY
        self.spread, self.coverage = Spread.NONE.value, math.nan
        if self.repeats == 1:
            found |= self._take_own_ends(found["epoch_time_s"], found["images_per_s"])
        elif self.repeats < ENOUGH:
            self.spread = Spread.RANGE.value
        else:
            self.spread = Spread.PREDICTION.value
            self.coverage = find_coverage(self.repeats, choose_depth(self.repeats))
        # a run that diverged is reported
        found |= {name: any(getattr(run, name) for run in every) for name in DOUBTS}
        vars(self).update(found, noisy=found["noisy"] or self.wide)

    def _take_own_ends(self, time: float, rate: float) -> dict[str, float]:
        """Return the ends within a single run. Too wide an interval is left out: the doubt
        ``unknown`` reports it."""
        low, high = self.first.epoch_time_low_s, self.first.epoch_time_high_s
        if not (high - low) / 2 <= LEAST_KNOWN * time:
            return {}
        self.spread, self.coverage = Spread.WITHIN.value, CONFIDENCE
        ends = {"images_per_s_low": over(rate * time, high)}
        ends["images_per_s_high"] = over(rate * time, low)
        return {"epoch_time_s_low": low, "epoch_time_s_high": high, **ends}

    def __getattr__(self, name: str) -> Any:
        vars(self)[name] = value = getattr(self.first, name)
        return value

    @property
    def sound(self) -> bool:
        """Whether it ended well, by an executor that is known."""
        return bool(self.status == Status.OK and self.kind != "unknown")

    @cached_property
    def trusted(self) -> bool:
        """Whether it is sound, has an epoch time, and raises no fatal doubt."""
        doubted = any(doubt.fatal and getattr(self, doubt.name) for doubt in DOUBTS.values())
        return bool(self.sound and not doubted and self.epoch_time_s == self.epoch_time_s)

    @property
    def settled(self) -> bool:
        """Whether others may be compared with its time: that of steps which wait for the host, and
        do not settle, is known by repeats alone."""
        return not self.unsettled or self.repeats >= MIN_REPEATS

    @property
    def base_fraction(self) -> float:
        return self.base.part if self.base else 1.0

    @property
    def speedup(self) -> float:
        if not (self.base and self.base.settled):
            return math.nan
        return over(self.base.epoch_time_s, self.epoch_time_s)

    @property
    def memory_saved(self) -> float:
        return 1 - over(self.memory_bytes, self.base.memory_bytes) if self.base else math.nan

    @property
    def tensors_saved(self) -> float:
        if not self.base:
            return math.nan
        return 1 - over(self.peak_allocated_bytes, self.base.peak_allocated_bytes)

    @property
    def start_time_s(self) -> float:
        """The seconds of set-up and first steps, with the first steps of the slowest repeat. The
        rest of the warm-up is left out: it goes on until steps are steady, however long that takes.
        Runs without first steps, as published ones, have the whole warm-up instead."""
        runs = [run for run in self.every if run.status in RELIABLE]
        firsts = [(run.first_steps_time_s, run.warmup_time_s, 0.0) for run in runs]
        least = (next(time for time in known if time == time) for known in firsts)
        return find_middle(run.setup_time_s for run in runs)[0] + max(least, default=math.nan)


def make_results(runs: Sequence[Run]) -> list[Result]:
    """Return the results of the runs that count, in the order in which they first ran."""
    place = {id(run): number for number, run in enumerate(runs)}
    results = [*map(Result, group(runs, lambda run: run.cell))]
    results.sort(key=lambda result: place[id(result.first)])
    free = {*free_axes("precision"), *SAME_QUESTION}
    sound = [result for result in results if result.status in RELIABLE]
    tell = tell_but(free)
    for alike in group(sound, lambda result: tell(result.first)):
        # of those that differ only in how they were measured, the one that measured most, profiled
        # or not as the other if there is such a one
        plain = [r for r in alike if r.precision == "fp32"]
        plain.sort(key=lambda r: (not r.settled, -r.part))
        for other in (r for r in alike if plain and r.precision != "fp32"):
            other.base = next((r for r in plain if r.profile == other.profile), plain[0])
    for alike in group(results, lambda r: (r.sweep, r.machine, r.asked, r.kind)):
        _tell_apart(alike)
    return results


def _tell_apart(results: Sequence[Result]) -> None:
    """Set what tells results of one case apart: the columns of `COMPARABLE` in which they differ,
    of those of the network the first."""
    said: list[tuple[str, str, int]] = []
    for name in COMPARABLE:
        if len({getattr(result, name) for result in results}) > 1:
            part = name in MODEL_PARTS
            if part and any(what == "network" for _, what, _ in said):
                continue
            said.append((name, "network", 8) if part else (name, name.replace("_", " "), 40))
    for result in results if said else ():
        told = (f"{what} {str(getattr(result, name))[:most]}" for name, what, most in said)
        result.apart = ", ".join(told)


ENOUGH = 5
"""Fewest repeats for a prediction interval; with fewer, only their range is given."""


class Spread(StrEnum):
    """The meaning of the two ends beside a median."""

    NONE = "none"
    WITHIN = "within the run"
    RANGE = "range"
    PREDICTION = "prediction interval"


@cache
def find_coverage(runs: int, depth: int = 1) -> float:
    """Return how often the median of as many more runs lies between the ``depth``-th from each end.

    Exact for an odd number of runs without ties; otherwise the true share is higher.

    >>> [round(find_coverage(n), 3) for n in (3, 5, 7, 9)]
    [0.6, 0.833, 0.93, 0.971]
    """
    middle = (runs + 1) // 2
    # the median of the second sample is below the depth-th of the first if fewer than ``depth`` of
    # the ``drawn`` smallest pooled values are of the first: a hypergeometric tail
    drawn = middle + depth - 1
    term = below = comb(runs, drawn)
    for of_first in range(1, depth):
        term = term * (runs - of_first + 1) * (drawn - of_first + 1)
        term //= of_first * (runs - drawn + of_first)
        below += term
    return max(0.0, 1 - 2 * below / comb(2 * runs, drawn))


@cache
def choose_depth(runs: int) -> int:
    """Return the depth of the narrowest interval with `CONFIDENCE`; 1, the range, if none has it.

    >>> [choose_depth(n) for n in (3, 5, 9, 15, 30)]
    [1, 1, 1, 2, 7]
    """
    depths = range(1, (runs + 1) // 2 + 1)
    wide = bisect_left(depths, True, key=lambda d: find_coverage(runs, d) < CONFIDENCE)
    return max(wide, 1)


def find_middle(values: Iterable[float]) -> tuple[float, float, float]:
    """Return median, lower end and upper end of the known values; the ends of a single one are
    NaN."""
    known = sorted(value for value in values if value == value)
    number = len(known)
    if not number:
        return math.nan, math.nan, math.nan
    middle = (known[(number - 1) // 2] + known[number // 2]) / 2
    if number < 2:
        return middle, math.nan, math.nan
    depth = choose_depth(number)
    return middle, known[depth - 1], known[-depth]
