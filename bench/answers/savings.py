"""What fits in memory, and what it costs: cases that differ in what is computed again in the
backward pass, or in the optimizer, at one batch size.

Held against the usual way to train, each takes a part of its memory and a multiple of its time. One
is worth it if it saves `_WORTH` of the memory, and no other takes as little of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from bench.answers.render.table import (
    AnyRow,
    Column,
    Prominence,
    Section,
    Sheet,
    axis_column,
    name_case,
    quantity_column,
    ratio_cell,
    write_ratio,
)
from bench.answers.report_data import ReportData, Target
from bench.answers.scaling import find_bounds
from bench.answers.settings import Setting
from bench.base.limits import MIN_REPEATS, STEADY
from bench.base.text import GIB, name_first, write_percent
from bench.results.store.rows import group
from bench.results.study.axes import MACHINE, find_varying
from bench.results.study.comparable import refuse_pair, tell_but
from bench.results.study.quantities import is_number
from bench.results.study.runs import Result, differ_in_memory
from bench.results.study.warnings import WARNINGS
from bench.schema.case import AXES, SAME_QUESTION, UNTIMED, Case
from bench.schema.optimization import OPTIMIZERS

SAVING_AXES = ("recompute", "optimizer")
"""Axes that save memory, and cost time."""

_FREE = ("batch_size", *SAVING_AXES, *UNTIMED, *SAME_QUESTION)

_tell = tell_but(_FREE)

_NAMED = [n for n in AXES if n not in (*_FREE, "model", "dataset", "workload", "precision")]

_USUAL = ("adamw", "sgd", *OPTIMIZERS)

_WORTH = 0.05
"""The least share of the memory that is worth another way to train: the largest batch leaves as
much free, and on a CPU repeats of one case differ by as much, see `VARIES`."""


@dataclass(frozen=True)
class Saving:
    """A setting at the batch size at which all are held against ``base``: the share of its memory
    that it takes, and the multiple of its time, None if the two cannot be compared; and the largest
    batch size that fits, with the smallest above it that does not. Its time is ``sure`` if each of
    the two has repeats enough for an interval."""

    row: Result
    base: Result
    memory: float
    time: float | None
    fits: int | None
    fails: int | None

    @property
    def name(self) -> str:
        return _name(self.row)

    @property
    def sure(self) -> bool:
        return self.time is not None and min(self.row.repeats, self.base.repeats) >= MIN_REPEATS

    def __str__(self) -> str:
        about = "" if self.sure else "about "
        cost = f"and {about}{write_ratio(self.time)} times the time" if self.time else ""
        cost = cost or "(no sure time)"
        return f"{self.name}: {write_ratio(self.memory)} times the memory {cost}"


def _name(row: Result) -> str:
    """Name what may save memory: ``adamw, recompute blocks``."""
    recompute = name_case(row, ["recompute"]) if row.recompute != Case.recompute else ""
    return ", ".join(filter(None, (row.optimizer, recompute)))


def find_ways(place: Target) -> list[list[Saving]]:
    """Return the ways to train that differ in `SAVING_AXES` alone, the usual one first and then by
    memory, at the largest batch size at which most were measured or do not fit, and the usual one
    was measured; none where only optimizers differ, and none saves memory."""
    found = []
    for alike in group(place.settings, lambda setting: _tell(setting.best)):
        known = [s for s in alike if is_number(s.best.memory_bytes)]
        if not known:
            continue
        usual = min((s.best for s in known), key=_rate_usual)
        rows: list[AnyRow] = [row for s in alike for row in s.cases]
        rows += [row for row in place.probes if _tell(row) == _tell(usual)]
        bounds = {_tell_way(some[0]): find_bounds(some) for some in group(rows, _tell_way)}
        same = _choose_size(known, _tell_way(usual), {way: end for way, (_, end) in bounds.items()})
        if not same:
            continue
        base = min(same, key=_rate_usual)
        ways = []
        for row in sorted(same, key=lambda r: (r is not base, -r.memory_bytes)):
            share = row.memory_bytes / base.memory_bytes
            ways.append(Saving(row, base, share, _find_time(row, base), *bounds[_tell_way(row)]))
        again = {way.row.recompute for way in ways}
        if len(again) > 1 or list_worthwhile(ways):
            found.append(ways)
    return found


_Way = tuple[Any, ...]


def _tell_way(row: AnyRow) -> _Way:
    return tuple(getattr(row, name) for name in SAVING_AXES)


def _choose_size(
    settings: Sequence[Setting], usual: _Way, fails: Mapping[_Way, int | None]
) -> list[Result]:
    """Return the rows of one batch size, one of each way: that of the best evidence; none if no
    batch size has the usual way and another one. A way that is known to fail at it, from ``fails``
    on, is as good as measured: it saves nothing there."""
    sizes = []
    for one in group(settings, lambda setting: setting.best.batch_size):
        ways = group(one, lambda setting: _tell_way(setting.best))
        rows = {_tell_way(same[0].best): same[0].best for same in ways}
        size = one[0].best.batch_size
        refused = [way for way, end in fails.items() if end and end <= size and way not in rows]
        if usual in rows and len(rows) > 1:
            sizes.append((len(rows) + len(refused), size, [*rows.values()]))
    return max(sizes, key=itemgetter(0, 1), default=(0, 0, []))[2]


def _rate_usual(row: Result) -> tuple[bool, int]:
    usual = _USUAL.index(row.optimizer) if row.optimizer in _USUAL else len(_USUAL)
    return row.recompute != Case.recompute, usual


def _find_time(row: Result, base: Result) -> float | None:
    sure = all(
        one.timed and one.trusted and (one.device == "cuda" or one.repeats >= MIN_REPEATS)
        for one in (row, base)
    )
    return row.epoch_time_s / base.epoch_time_s if sure and not refuse_pair(row, base) else None


def list_worthwhile(ways: Sequence[Saving]) -> list[Saving]:
    """Return the ways that take less memory than the usual one, by `_WORTH` at least, and of which
    none that takes less takes as little time, within `STEADY`; the most memory first. Without a
    time, only that of the least memory is known to be worth anything: of those within `STEADY` of
    it, the most usual."""
    less = [way for way in ways if differ_in_memory(way.row, way.base)]
    worth = [way for way in less if way.memory <= 1 - _WORTH]
    if not worth:
        return []
    most = (1 + STEADY) * min(way.memory for way in worth)
    kept = [min((w for w in less if w.memory <= most), key=lambda way: _rate_usual(way.row))]
    for way in sorted(worth, key=lambda way: way.memory):
        fastest = min((one.time for one in kept if one.time), default=math.inf)
        if (way.time or math.inf) * (1 + STEADY) < fastest:
            kept.append(way)
    return sorted(kept, key=lambda way: -way.memory)


def tell_savings(place: Target) -> Iterator[str]:
    """Yield what to do if the network or its batch does not fit, what that costs, and what fits."""
    for ways in find_ways(place):
        base, worth = ways[0], list_worthwhile(ways)
        axes = ["precision", *find_varying([s.best for s in place.settings], _NAMED)]
        size = f"batch size {base.row.batch_size}"
        start = f"In {name_case(base.row, axes)} at {size}, {base.name} takes"
        start += f" {base.row.memory_bytes / GIB:#.3g} GiB"
        if worth:
            named = "; or with ".join(map(str, worth[-3:]))
            yield f"{start}. If that does not fit, train with {named}."
        else:
            tried = name_first([way.name for way in ways[1:]], 4, "; ")
            least = write_percent(_WORTH)
            yield f"{start}, and nothing that was tried saves {least} of it: {tried}."
        yield from _tell_unsure([way for way in worth if not way.sure])
        bounded = [way for way in ways if way.fails]
        if bounded:
            limits = (
                f"{way.fits or 'none'} with {way.name} ({way.fails} does not)" for way in bounded
            )
            yield f"Largest batch size that fits: {name_first([*limits], 6, '; ')}."
        if len({way.row.optimizer for way in (base, *worth)}) > 1:
            yield (
                "Another optimizer learns otherwise: hold what they learn against each other by "
                f"--repeats {MIN_REPEATS} --evaluate, and tune --lr for each by bench.search."
            )


def _tell_unsure(ways: Sequence[Saving]) -> Iterator[str]:
    """Yield what makes times sure that are not."""
    rows = list(dict.fromkeys(row for way in ways for row in (way.row, way.base)))
    if any(row.repeats < MIN_REPEATS for row in rows):
        yield f"A sure time takes --repeats {MIN_REPEATS}, without other programs."
        return
    for warning in WARNINGS.values():
        runs = [run for row in rows if warning.forbids(row.repeats) for run in row.every]
        if hit := [run for run in runs if getattr(run, warning.name)]:
            yield f"Times are not sure. {warning.warn(hit)} {warning.fix.advise(hit)}"


def _tabulate_savings(found: ReportData) -> Iterator[Sheet]:
    rows = [way for place in found.places for ways in find_ways(place) for way in ways]
    where = find_varying([way.row for way in rows], (MACHINE, "model", "dataset", *_NAMED))
    columns: list[Column[Saving]] = [
        *(axis_column(name, lambda way: way.row) for name in (*where, "precision")),
        *(axis_column(name, lambda way: way.row) for name in SAVING_AXES),
        axis_column("batch_size", lambda way: way.row),
        quantity_column("memory_bytes", lambda way: way.row, spread=False, always=True),
        Column("memory_share", "of usual", "its memory over that of the first of these rows",
               lambda way: ratio_cell(way.memory), better="lower"),
        quantity_column("optimizer_bytes", lambda way: way.row, spread=False),
        quantity_column("epoch_time_s", lambda way: way.row, spread=False, always=True),
        Column("time_share", "of usual time", "its time over that of the first of these rows",
               lambda way: ratio_cell(way.time), better="lower"),
        Column("fits", "largest batch", "that was trained", lambda way: way.fits, better="higher"),
        Column("fails", "does not fit", "the smallest batch above it that ran out of memory",
               lambda way: way.fails),
    ]  # fmt: skip
    yield Sheet("What saves memory, at one batch size, and what it costs", columns, rows)


SAVINGS = Section(
    "savings", "What fits in memory, and what does it cost?", _tabulate_savings, Prominence.TABLE
)
