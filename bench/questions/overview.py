"""Every setting once: its epoch time and speed-up, and what it costs, by precision and batch size;
and all cases with all their numbers.

Of many networks there is one row each, with what is recommended for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from bench.limits import MIN_REPEATS
from bench.precision import OWN, PRECISIONS
from bench.questions.recommendation import MOST_PLACES, Place, list_places, name_data
from bench.questions.report_data import ReportData
from bench.questions.settings import Setting
from bench.render.section import (
    Column,
    Section,
    Sheet,
    axis_column,
    join,
    quantity_column,
    time_cell,
)
from bench.render.table import NOTHING, Cell, Level, name_case, name_spread, remarks, write_ratio
from bench.store.rows import group
from bench.study.axes import (
    MACHINE,
    Machines,
    name_setting,
    name_value,
    order_values,
    sort_cases,
    take_value,
)
from bench.study.quantities import QUANTITIES, is_number
from bench.study.runs import Result
from bench.text import GIB, count, write_number

FEW_AXES = 3  # most columns of axes with which the overview has room for the memory saved
MOST_DOWN = 2  # axes beside precision and loss scale that have a column each, not one for all
MOST_ACROSS = 5  # columns of 15 characters that fit beside the names of the rows

WARNED = "?"
"""Marks a time with a warning that keeps it from being recommended."""

HEADINGS = (MACHINE, "model", "dataset", "start")
"""Axes shown above their rows, if other axes distinguish these rows: a path of 60 characters in a
column left no room for loss and memory in a width of 100."""


# ------------------------------------------------------------------------------------- the pivot


class _Line(NamedTuple):
    """A row of a pivot: any of its settings, and each by its value of the axis across."""

    first: Result
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
        cases = [setting.best for setting in found.settings]
        yield _lay_out_cases(found, cases, f"Results: {count(len(cases), 'setting')}")
        return
    compared = False

    def write(setting: Setting) -> Cell:
        nonlocal compared
        row = setting.best
        time = time_cell(row, spread=False)
        text = time.text
        if setting.timed and not row.trusted:
            text += WARNED
        # one run on a CPU says no ratio: what else it does changes the time
        alone = row.device == "cpu" and row.repeats < MIN_REPEATS
        if setting.timed and is_number(row.speedup) and not alone:
            text += f" · {write_ratio(row.speedup)}×"
            compared = True
        return Cell(text, time.value, time.estimated)

    sheet = _lay_out(found, pivot, "", write)
    doubted = any(s.timed and not s.best.trusted for s in found.settings)
    title = f"Epoch time (s){' · speed-up over fp32' * compared}"
    notes = _explain_precisions(found)
    yield replace(sheet, title=f"{title}{f' ({WARNED} has a warning)' * doubted}", notes=notes)


def _explain_precisions(found: ReportData) -> list[str]:
    """Say in plain words what each precision is, if there are several."""
    held = order_values("precision", (row.precision for row in found.results))
    said = [f"{name}: {PRECISIONS[name].brief}" for name in held]
    return [f"{'; '.join(said)}."] if len(said) > 1 else []


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
    cells = {id(s): write(s) for line in lines for s in line.held.values()}

    def say(value: Any) -> Callable[[_Line], Cell]:
        return lambda line: cells[id(line.held[value])] if value in line.held else Cell(NOTHING)

    def name(line: _Line) -> str:
        return name_values(line.first, headings, found.machines)

    own = [axis for axis in down if axis not in headings]
    others = [axis for axis in own if axis not in ("precision", "loss_scale")]
    if len(others) > MOST_DOWN:
        own = [axis for axis in own if axis not in others]
    beside: Column[_Line] = Column(
        "with", "with", "what else is set; empty where nothing is",
        lambda line: name_case(line.first, others), wrap=True,
    )  # fmt: skip
    told = [one for one in lines if any(cells[id(s)].text != NOTHING for s in one.held.values())]
    rows, groups = join((name(alike[0]), alike) for alike in group(told, name))
    first = "batch size " if across == "batch_size" else ""
    return Sheet(
        title,
        [
            *(axis_column(axis, found.machines, lambda line: line.first) for axis in own),
            *([beside] if len(others) > MOST_DOWN else []),
            *(Column(f"{across}_{value}", f"{first}{value}", f"{across.replace('_', ' ')} {value}",
                     say(value), number=False)
              for value in values),
        ],
        rows,
        groups=groups,
    )  # fmt: skip


def name_values(row: Result, axes: Sequence[str], machines: Machines) -> str:
    """Name the values of some axes, the machine among them, as a heading."""
    return " · ".join(
        name_setting(axis, name_value(axis, take_value(row, axis), machines)) for axis in axes
    )


# ---------------------------------------------------------------------------------- many networks


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

    def take(pair: tuple[Place, Setting]) -> Result:
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
            quantity_column("memory_saved", take, spread=False, keep=6),
        ],
        rows,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- all cases


def _tabulate_cases(found: ReportData) -> Iterator[Sheet]:
    yield _lay_out_cases(found, found.results, f"Overview: {count(len(found.results), 'case')}")


def _lay_out_cases(found: ReportData, cases: Sequence[Result], title: str) -> Sheet:
    """Return the table of some cases, a row each, with all that was measured of it."""
    order, machines = found.order, found.machines
    word = "synthetic " if all(case.dataset == "synthetic" for case in cases) else ""
    seconds = [case.start_time_s for case in cases if is_number(case.start_time_s)]
    slow = seconds and max(seconds) > max(2 * min(seconds), min(seconds) + 1)
    headings = _choose_headings(cases, order, found.by)
    cases = sort_cases(cases, headings)
    columns = [axis for axis in order if axis not in headings] or ["precision", "batch_size"]
    columns = [axis for axis in columns if {getattr(c, axis, 1) for c in cases} not in _OWN]
    several: Column[Result] = Column(
        "global_batch", "global batch", "items of a step of the optimizer, of all GPUs together",
        lambda row: int(row.batch_size * row.world_size), always=True,
    )  # fmt: skip
    time = QUANTITIES["epoch_time_s"].title
    # the effects show these too, and the table is full
    saved = [quantity_column("memory_saved", keep=2), quantity_column("tensors_saved", keep=1)]
    return Sheet(
        title,
        [
            *(axis_column(axis, machines) for axis in columns),
            *([several] if "world_size" in columns else []),
            replace(quantity_column("epoch_time_s", always=True), label=time + name_spread(cases)),
            quantity_column("images_per_s", keep=5),
            quantity_column("speedup", label="speed-up over fp32", keep=7),
            quantity_column("memory_bytes", keep=8),
            *(saved if len(columns) <= FEW_AXES else []),
            quantity_column("train_loss", label=f"{word}loss", keep=8),
            quantity_column("train_accuracy", label=f"{word}accuracy", keep=3),
            quantity_column("test_accuracy", label=f"{word}test accuracy", keep=6),
            quantity_column("overflow_steps", keep=6),
            quantity_column("energy_per_epoch_j", keep=4),
            Column("start_time_s", "start-up (s)",
                   "set-up, and the slowest first steps of all repeats",
                   lambda row: row.start_time_s if slow else None,
                   write=write_number, better="lower", keep=3),
            Column("remarks", "remarks", "what to know before believing the row",
                   lambda row: remarks(row, found.below), wrap=True),
        ],
        cases,
        _explain_precisions(found),
        groups=_find_groups(cases, order, headings, machines),
        empty=_EMPTY,
    )  # fmt: skip


_EMPTY = (NOTHING, "", "0")

_OWN = ({OWN}, {0})
"""What a command without placeholders for them has as precision and batch size."""


def _choose_headings(cases: Sequence[Result], order: Sequence[str], by: str) -> tuple[str, ...]:
    """Choose the axes shown once above their rows: ``by``, or else machines, networks and files. At
    least one axis is left for the columns."""
    if by in order:
        return (by,)
    headings = [axis for axis in order if axis in HEADINGS][: len(order) - 1]
    # axes that are constant under each heading become part of it
    held = tuple(headings)
    parts = group(cases, lambda case: _place(case, held))
    for axis in order if headings else ():
        alike = all(len({take_value(case, axis) for case in part}) == 1 for part in parts)
        if alike and axis not in headings and axis not in ("precision", "batch_size"):
            headings.append(axis)
    return tuple(headings)


def _place(case: Result, axes: Sequence[str]) -> tuple[Any, ...]:
    return tuple(take_value(case, axis) for axis in axes)


def _find_groups(
    cases: Sequence[Result], order: Sequence[str], headings: Sequence[str], machines: Machines
) -> dict[int, str]:
    """Return where groups of rows begin, and their headings. Without headings, rows are grouped by
    as many leading axes as leave at least three rows a group on average."""
    if headings:
        return _find_starts(cases, headings, machines)
    found: dict[int, str] = {}
    for depth in range(1, len(order)):
        starts = _find_starts(cases, order[:depth], machines)
        if depth > 1 and len(cases) < 3 * len(starts):
            break
        found = starts
    return dict.fromkeys(found, "")


def _find_starts(
    cases: Sequence[Result], leading: Sequence[str], machines: Machines
) -> dict[int, str]:
    parts = (list(part) for _, part in groupby(cases, lambda case: _place(case, leading)))
    return join((name_values(part[0], leading, machines), part) for part in parts)[1]


def _tabulate_reached(found: ReportData) -> Iterator[Sheet]:
    columns: list[Column[Setting]] = [
        *(axis_column(axis, found.machines, lambda one: one.best)
          for axis in found.order if axis in (*found.varying, "precision")),
        *(quantity_column(name, lambda one: one.best, spread=False)
          for name in ("achieved_flops", "peak_share", "measured_share", "traffic", "copy_share")),
        Column("mean_power_w", "power (W)", "mean of the epoch", lambda one: one.best.mean_power_w,
               write="{:.0f}".format),
        quantity_column("images_per_j", lambda one: one.best, spread=False),
        Column("sm_clock_mhz", "SM clock (MHz)", "median of the epoch",
               lambda one: one.best.sm_clock_mhz, write="{:,.0f}".format),
    ]  # fmt: skip
    told = ("achieved_flops", "traffic", "mean_power_w", "sm_clock_mhz")
    rows = [s for s in found.settings if any(is_number(getattr(s.best, n)) for n in told)]
    note = (
        "Of peak: by the data sheet of the card; of measured, and of a copy: of what a large "
        "product, and a large copy, reached on this machine before its cases."
    )
    title = "What the hardware did: FLOP/s, traffic, power and clocks"
    yield Sheet(title, columns, rows, [note])


PLACES = Section(
    "places", "What should each network be trained with?", _tabulate_places, Level.TABLE
)
TIMES = Section("times", "How long does each setting take?", _tabulate_times, Level.TABLE)
COSTS = Section(
    "costs", "What memory does each take, and what did it learn?", _tabulate_costs, Level.TABLE
)
OVERVIEW = Section("overview", "How did each case do?", _tabulate_cases)
REACHED = Section("hardware", "How much of the hardware does each setting use?", _tabulate_reached)
