"""Every setting once: its epoch time and speed-up, and what it costs, by precision and batch size.

Of many networks there is one row each, with what is recommended for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bench.limits import MIN_REPEATS
from bench.questions.overview import HEADINGS, lay_out_cases
from bench.questions.recommendation import MOST_PLACES, Place, list_places, name_data
from bench.questions.report_data import ReportData
from bench.questions.settings import Setting
from bench.render.cells import Row, remarks, write_ratio
from bench.render.model import NOTHING, Cell, Level
from bench.render.section import (
    Column,
    Section,
    Sheet,
    axis_column,
    join,
    quantity_column,
    time_cell,
)
from bench.study.axes import name_setting, name_value, order_values, take_value
from bench.study.quantities import QUANTITIES, is_number
from bench.study.runs import group
from bench.text import GIB, count

MOST_ACROSS = 5  # columns of 15 characters that fit beside the names of the rows

WARNED = "?"
"""Marks a time with a warning that keeps it from being recommended."""


class _Line(NamedTuple):
    """A row of a pivot: any of its settings, and each by its value of the axis across."""

    first: Row
    held: dict[Any, Setting]


class _Pivot(NamedTuple):
    across: str  # the axis of the columns
    down: list[str]  # those of the rows
    lines: list[_Line]


def _pivot(found: ReportData) -> _Pivot | None:
    """Return the settings as a pivot; None if no axis has few values, a cell would hold two
    settings, or the rows are to be grouped by an axis."""
    settings = [] if found.by else found.settings
    for across in ("batch_size", "precision"):
        values = {getattr(setting.best, across) for setting in settings}
        if not 1 < len(values) <= MOST_ACROSS:
            continue
        down = [axis for axis in found.order if axis in found.varying and axis != across]
        lines: dict[tuple[Any, ...], _Line] = {}
        for setting in settings:
            key = tuple(take_value(setting.best, axis) for axis in down)
            line = lines.setdefault(key, _Line(setting.best, {}))
            if line.held.setdefault(getattr(setting.best, across), setting) is not setting:
                return None
        if len(lines) > 1 or len(values) > 2:
            return _Pivot(across, down, list(lines.values()))
    return None


def _tabulate_times(found: ReportData) -> Iterator[Sheet]:
    if len(list_places(found)) > MOST_PLACES:
        return
    if (pivot := _pivot(found)) is None:
        cells = [setting.best.cell for setting in found.settings]
        cases = found.cases[found.cases["cell"].isin(cells)]
        yield lay_out_cases(found, cases, f"Results: {count(len(cells), 'setting')}")
        return

    def write(setting: Setting) -> Cell:
        row = setting.best
        time = time_cell(row, spread=False)
        text = time.text
        if setting.timed and not row.trusted:
            text += WARNED
        # one run on a CPU says no ratio: what else it does changes the time
        alone = row.device == "cpu" and row.repeats < MIN_REPEATS
        if setting.timed and is_number(row.speedup) and not alone:
            text += f" · {write_ratio(row.speedup)}×"
        return Cell(text, time.value, time.estimated)

    title = "Epoch time (s)"
    if found.cases["speedup"].notna().any():
        title += " · speed-up over fp32"
    doubted = any(s.timed and not s.best.trusted for s in found.settings)
    yield _lay_out(found, pivot, f"{title}{f' ({WARNED} has a warning)' * doubted}", write)


def _tabulate_costs(found: ReportData) -> Iterator[Sheet]:
    if len(list_places(found)) > MOST_PLACES or (pivot := _pivot(found)) is None:
        return
    real = any(setting.best.dataset != "synthetic" for setting in found.settings)
    ends = ("test_accuracy", "train_loss") if real else ()
    known = (n for n in ends if any(s.find_learnt(n) is not None for s in found.settings))
    learnt = next(known, "")

    def write(setting: Setting) -> Cell:
        row = setting.best
        if not is_number(row.memory_bytes):
            return Cell(NOTHING)
        text = f"{row.memory_bytes / GIB:#.3g}"
        end = setting.find_learnt(learnt) if learnt else None
        text += f" · {QUANTITIES[learnt].write(end)}" if end is not None else ""
        return Cell(text, row.memory_bytes)

    title = "Peak memory (GiB)"
    if learnt:
        title += f" · {QUANTITIES[learnt].title} after the epoch"
    yield _lay_out(found, pivot, title, write)


def _lay_out(
    found: ReportData, pivot: _Pivot, title: str, write: Callable[[Setting], Cell]
) -> Sheet:
    """Return a pivot as a table, without the rows in which nothing is written."""
    across, down, lines = pivot
    headings = [axis for axis in down if axis in HEADINGS]
    values = order_values(across, (value for line in lines for value in line.held))

    def say(value: Any) -> Callable[[_Line], Cell]:
        return lambda line: write(line.held[value]) if value in line.held else Cell(NOTHING)

    def name(line: _Line) -> str:
        return " · ".join(
            name_setting(axis, name_value(axis, take_value(line.first, axis), found.machines))
            for axis in headings
        )

    told = [one for one in lines if any(write(s).text != NOTHING for s in one.held.values())]
    rows, groups = join((name(alike[0]), alike) for alike in group(told, name))
    first = "batch size " if across == "batch_size" else ""
    return Sheet(
        title,
        [
            *(axis_column(axis, found.machines, lambda line: line.first)
              for axis in down if axis not in headings),
            *(Column(f"{across}_{value}", f"{first}{value}", f"{across.replace('_', ' ')} {value}",
                     say(value), number=False)
              for value in values),
        ],
        rows,
        groups=groups,
    )  # fmt: skip


def _tabulate_places(found: ReportData) -> Iterator[Sheet]:
    places = list_places(found)
    if len(places) <= MOST_PLACES:
        return
    rows = [
        (place, setting)
        for place in places
        if (setting := place.chosen or place.lowest) is not None
    ]

    def name(pair: tuple[Place, Setting]) -> str:
        place, _ = pair
        machine = found.machines[place.machine]
        network = f"{place.key[2]}{name_data(place.key[3])}"
        return f"{network} · {machine}" if len(found.machines) > 1 else network

    def take(pair: tuple[Place, Setting]) -> Row:
        return pair[1].best

    yield Sheet(
        f"What to train each with: {count(len(rows), 'network')}",
        [
            Column("place", "network", "what is trained", name, wrap=True),
            Column("setting", "train it in", "the smallest batch within a tenth of the lowest time",
                   lambda pair: pair[0].name(pair[1])
                   + ("" if pair[0].chosen else f" ({remarks(pair[1].best)})"),
                   wrap=True),
            quantity_column("epoch_time_s", take, spread=False, always=True),
            quantity_column("images_per_s", take),
            quantity_column("speedup", take, label="speed-up over fp32", spread=False),
            quantity_column("memory_bytes", take),
            Column("largest", "largest batch", "the largest in this precision that fits, where one "
                   "ran out of memory",
                   lambda pair: pair[0].bounds.fits if pair[0].bounds.fails else None, keep=5),
            quantity_column("memory_saved", take, spread=False, keep=6),
        ],
        rows,
    )  # fmt: skip


PLACES = Section(
    "places", "What should each network be trained with?", _tabulate_places, Level.TABLE
)
TIMES = Section("times", "How long does each setting take?", _tabulate_times, Level.TABLE)
COSTS = Section(
    "costs", "What memory does each take, and what did it learn?", _tabulate_costs, Level.TABLE
)
