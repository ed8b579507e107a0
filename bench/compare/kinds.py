"""Kinds of work that changed between two sweeps with profiles of the same cases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from bench.compare.comparison import Comparison, KindChange
from bench.compare.side import Side
from bench.diagnosis.breakdown import Breakdown, divide
from bench.diagnosis.explanation import Change
from bench.errors import UsageError
from bench.limits import STEADY
from bench.questions.profiles import STEP, make_step, take_runs
from bench.record import RELIABLE
from bench.store.reader import read_work
from bench.verdict.ratio import compare


def find_kinds(comparison: Comparison) -> list[KindChange]:
    """Return the kinds of work that changed beyond noise, by case, the largest change first.

    A change must exceed the share `STEADY` of A's step. With enough profiled repeats on both sides,
    it must also be significant; otherwise the ranges of the two sides must not overlap. Raises
    UsageError: no case has a profile on both sides, or two values of an axis are compared."""
    if comparison.axis:
        raise UsageError(
            f"--why is for two sweeps; python -m bench.why {comparison.a.path} --axis "
            f"{comparison.axis} explains two values of an axis"
        )
    a, b = (_divide_runs(side) for side in (comparison.a, comparison.b))
    both = [m for m in comparison.matched if m.a in a and m.b in b]
    if not both:
        lacking = [s.path for s, held in ((comparison.a, a), (comparison.b, b)) if not held]
        where = f" in {' or '.join(map(str, lacking))}" if lacking else " on both sides"
        raise UsageError(f"--why: no case has a profile{where}; run both sweeps with --profile on")
    found = [(match, *change) for match in both for change in _list_changes(a[match.a], b[match.b])]
    ratios = compare([samples for *_, samples in found])
    kinds = []
    for (match, step_s, change, (before, after)), ratio in zip(found, ratios, strict=True):
        apart = max(before) < min(after) or max(after) < min(before)
        # a ratio without an interval has too few repeats
        beyond_noise = apart if ratio.low is None else ratio.differs
        if beyond_noise and abs(change.change_s) > STEADY * step_s:
            kinds.append(KindChange(match, change, step_s, ratio.p_adjusted))
    order = {match: place for place, match in enumerate(both)}
    return sorted(kinds, key=lambda kind: (order[kind.match], -abs(kind.change.change_s)))


def _divide_runs(side: Side) -> dict[int, list[Breakdown]]:
    """Return by cell the breakdowns of the steps of its profiled repeats."""
    work = dict(list(read_work(side.path).groupby("record_id", sort=False)))
    told = (side.records[name].tolist() for name in ("cell", "record_id", "status"))
    found: dict[int, list[Breakdown]] = {}
    for case, run, cell, name, status in zip(
        side.cases, take_runs(side.records), *told, strict=True
    ):
        if status in RELIABLE and not math.isnan(run[STEP]):
            step = make_step(case, [(run, work.get(name))])
            if step and (breakdown := divide(step.step)):
                found.setdefault(cell, []).append(breakdown)
    return found


def _list_changes(
    a: list[Breakdown], b: list[Breakdown]
) -> Iterator[tuple[float, Change, tuple[list[float], list[float]]]]:
    """Yield for each part of the step: A's mean step in s, the change of the mean times, and the
    times of all repeats on both sides. Very short times are raised to a third of the reporting
    threshold: the ratio of two near-zero times means nothing."""
    step_s = fmean(one.step_s for one in a)
    for name in dict.fromkeys(part.name for one in (*a, *b) for part in one.parts):
        before, after = ([one.find_time(name) for one in side] for side in (a, b))
        estimated = (any(name in one.estimates for one in side) for side in (a, b))
        least = STEADY / 3 * step_s
        first, second = ([max(least, time_s) for time_s in side] for side in (before, after))
        yield step_s, Change(name, fmean(before), fmean(after), *estimated), (first, second)
