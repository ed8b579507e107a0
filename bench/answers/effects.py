"""What changing one axis does, all else equal, as a table; and after how many epochs what takes
longer to start has paid off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from bench.answers.render.table import (
    NOTHING,
    Cell,
    Column,
    Section,
    Sheet,
    join,
    mark_part,
    name_case,
    ratio_cell,
    write_ends,
    write_ratio,
)
from bench.answers.report_data import ReportData
from bench.answers.settings import judge_speeds
from bench.base.limits import MIN_REPEATS, STEADY
from bench.base.text import ESTIMATE, capitalize, count, join_words, name_first, write_number
from bench.results.store.rows import group
from bench.results.study.axes import find_varying, list_naming_axes, name_setting, take_value
from bench.results.study.effects import EQUAL_MARGIN, Effect, judge_learning
from bench.results.study.estimate import ENERGY, LOSS, MEMORY_METRIC, TIME
from bench.results.study.pairs import find_changes, is_usual, list_followers
from bench.results.study.quantities import Metric
from bench.results.study.runs import Result
from bench.results.verdict import Verdict
from bench.schema.axis import DYNAMICS, name_axis, name_column
from bench.schema.case import spell_value

_MIXED = "mixed"  # the verdict on a change that makes some cases faster and others not


def _tabulate_effects(found: ReportData) -> Iterator[Sheet]:
    effects, starts = join(("", part) for _, part in groupby(found.effects, lambda e: e.axis))
    learnt = [one for one in judge_learning(found.effects, found.results) if one.found.seeds > 1]

    def say_learnt(effect: Effect) -> str:
        judged = [one for one in learnt if one.effect is effect]
        return "; ".join(f"{one.metric.label}: {one.found.verdict.value}" for one in judged)

    columns: list[Column[Effect]] = [
        Column("change", "change", "what changes, all else equal",
               lambda effect: f"{name_axis(effect.axis)}: {effect.before} → {effect.after}",
               wrap=True),
        Column("speedup", "speed-up", "epoch time before over after, geometric mean",
               _write_speedup, better="higher"),
        Column("verdict", "verdict", f"against a margin of {100 * STEADY:.0f} %",
               lambda effect: _judge_time(found, effect),
               number=False, wrap=True),
        Column("interval", "95 % interval", "of the speed-up over these pairs",
               _write_interval, keep=8),
        Column("pairs", "pairs", "how many pairs of cases differ in that alone", _write_pairs,
               number=True, keep=8),
        Column("memory", "memory", "change of the peak",
               partial(_write_change, MEMORY_METRIC), number=True, better="lower", keep=6),
        Column("energy", "energy", "change of an epoch's",
               partial(_write_change, ENERGY), number=True, better="lower", keep=4),
        Column("loss", "loss", "change of the training loss; below zero the difference",
               partial(_write_change, LOSS), better="lower", keep=5),
        Column("learnt", "learns as well?",
               f"equivalence within {100 * EQUAL_MARGIN:.0f} %, over seeds",
               say_learnt, keep=7, wrap=True),
        Column("warnings", "remarks", "what speaks against a case of these",
               lambda effect: ", ".join(effect.warnings), keep=8, wrap=True),
    ]  # fmt: skip
    note = (
        "Speed: epoch time before over after, geometric mean over the pairs of cases that differ "
        "in it alone, at the settings that all changes from one value have; where these differ, "
        "that of each pair. Mixed: their verdicts differ. A verdict needs "
        f"{MIN_REPEATS} repeats of each case; python -m bench.compare RESULTS --axis AXIS BEFORE "
        "AFTER judges each pair by itself."
    )
    yield Sheet(
        "What each change does, all else equal",
        columns,
        effects,
        [note],
        starts if len(starts) < len(effects) else {},
        [*_tell_later_starts(found), *_tell_left_out(found)],
        empty=("", NOTHING, TIME.word(Verdict.NONE)),
    )


_MOST_LISTED = 4  # ratios that a cell lists, or cases that a sentence does

PREPARING = ("compile", "cudnn_benchmark", "cuda_graphs")
"""Switches that take time before the first epoch to shorten each."""


class LaterStart(NamedTuple):
    """A switch that makes a case start later, and its epochs shorter."""

    axis: str  # one of `PREPARING`
    after: str  # its value
    on: Result
    cost: str  # how much later, what that saves, and after how many epochs it has paid off


def find_later_starts(found: ReportData) -> Iterator[LaterStart]:
    """Yield what each of `PREPARING` does that starts later and makes epochs shorter, in each pair
    of cases that differ in it alone, compiled ones of each ``--dynamic``: as repeats show it or, of
    fewer than `MIN_REPEATS` runs on a GPU, as these took. A command starts anew for each of its
    runs, and what it prepares then is not known."""
    known = [result for result in found.results if result.trusted and result.command is None]
    by_cell = {result.cell: result for result in known}
    switched = [
        (change, by_cell[off], by_cell[on])
        for axis in PREPARING
        for shapes in (DYNAMICS if axis == "compile" else [""])
        for change in find_changes(
            axis, [r for r in known if not shapes or r.compile == "off" or r.dynamic == shapes]
        )
        if change.before == "off"
        for off, on in (pair.cells for pair in change.pairs)
    ]
    speeds = judge_speeds([(on, off) for _, off, on in switched])
    for (change, off, on), speed in zip(switched, speeds, strict=True):
        extra, low, high = on.start_time_s - off.start_time_s, speed.low, speed.high
        fewest = min(on.repeats, off.repeats)
        if once := fewest < MIN_REPEATS and on.device != "cpu":
            low = high = speed.value
        faster = (low or 0) > 1 + STEADY if once else speed.invert().judge(STEADY) is Verdict.LOWER
        if not faster or not low or low <= 1 or not high:
            continue
        if not extra > 0:  # NaN too, where a start is not known
            continue
        # compiled code is found in a cache by later repeats: of first steps the slowest counts
        least, most = (math.ceil(extra / (on.epoch_time_s * (end - 1))) for end in (high, low))
        epochs = f"{least:,} to {most:,} epochs" if least < most else count(most, "epoch")
        mark, saved = mark_part(off, on), write_number(off.epoch_time_s - on.epoch_time_s)
        cost = f"{write_number(extra)} s longer to start and saves {mark}{saved} s an epoch"
        cost += f" (of {count(fewest, 'run')})" * once
        cost += f", so that it pays off after {mark}{epochs}"
        yield LaterStart(change.axis, change.after, on, cost)


def _tell_later_starts(found: ReportData) -> Iterator[str]:
    """Yield a sentence for each switch of `find_later_starts`."""
    starts = [*find_later_starts(found)]
    for alike in group(starts, lambda start: start[:2]):
        axis, after, *_ = alike[0]
        others = [name for name in list_naming_axes(found.varying) if name != axis]
        each = [f"in {name_case(start.on, others)} it takes {start.cost}" for start in alike]
        switch = f"{name_axis(axis)} {after}"
        yield f"{capitalize(switch)}: {name_first(each, _MOST_LISTED, '; ')}."


def _tell_left_out(found: ReportData) -> Iterator[str]:
    """Yield a sentence for each axis of which a value is in no change, as it ran with several
    values of what follows from it, such as an optimizer with several learning rates."""
    for axis in (axis for axis in found.varying if axis != "precision"):  # which has a main one
        changed = {end for e in found.effects if e.axis == axis for end in (e.before, e.after)}
        for alike in group(
            [row for row in found.results if row.timed], partial(take_value, axis=axis)
        ):
            value = spell_value(take_value(alike[0], axis))
            followers = list_followers(axis)
            apart = [n for n in followers if len({getattr(row, n) for row in alike}) > 1]
            if (
                apart
                and value not in changed
                and not any(is_usual(row.first.case, followers) for row in alike)
            ):
                names = join_words([*map(name_axis, apart)])
                yield (
                    f"{capitalize(name_setting(axis, value))} ran with several values of {names}, "
                    "of which none is the usual one, and is in no change; give one by --where "
                    f"{name_column(apart[0])}=VALUE."
                )


def _write_speedup(effect: Effect) -> Cell | None:
    if (time := effect.time) is None:
        return None
    mark, speed = ESTIMATE * effect.estimated, 1 / (time.ratio.value or 1)
    if time.apart:
        return Cell(f"{mark}{_list_ratios(time.each)}")
    return ratio_cell(speed, mark)


def _write_interval(effect: Effect) -> str | None:
    if effect.time is None or effect.time.apart:
        return None
    ends = effect.time.ratio.high, effect.time.ratio.low
    return write_ends(ends, lambda ratio: write_ratio(1 / ratio))


def _write_pairs(effect: Effect) -> str:
    pairs, every = effect.time.pairs if effect.time else 0, len(effect.pairs)
    return f"{pairs} of {every}" if 0 < pairs < every else str(every)


def _write_change(metric: Metric, effect: Effect) -> Cell | None:
    change = effect.estimates.get(metric.name)
    if change is None or change.ratio.value is None:
        return None
    if apart := change.ratio.difference:
        return Cell(_write_signed(apart[0], 3), apart[0])
    mark = ESTIMATE * (effect.estimated and metric is ENERGY)
    share = change.ratio.value - 1
    return Cell(f"{mark}{_write_signed(100 * share, 1)} %", share)


def _list_ratios(each: Sequence[float]) -> str:
    """List the speeds of pairs that have no common one, or from which to which they are."""
    speeds = sorted(1 / ratio for ratio in each)
    if len(speeds) > _MOST_LISTED:
        return f"{write_ratio(speeds[0])} to {write_ratio(speeds[-1])}×"
    return f"{', '.join(map(write_ratio, speeds))}×"


def _judge_time(found: ReportData, effect: Effect) -> str | None:
    """Return the verdict on a change, and by what axis its pairs differ if they do."""
    if (time := effect.time) is None:
        return None
    word = _MIXED if time.mixed else TIME.word(time.ratio.judge(STEADY))
    if not time.apart:
        return word
    known = word not in (_MIXED, TIME.word(Verdict.NONE), TIME.word(Verdict.AMBIGUOUS))
    cells = {before for before, _ in time.cells}
    axes = find_varying([result for result in found.results if result.cell in cells])
    spread = f"differs by {name_axis(axes[0])}" if len(axes) == 1 else "differs"
    return f"{word}, {spread}" if known else spread


def _write_signed(value: float, decimals: int) -> str:
    """Write a difference with its sign, or without one if it rounds to zero."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


EFFECTS_SECTION = Section("effects", "What does each change do?", _tabulate_effects)
