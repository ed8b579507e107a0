"""Every setting once: its epoch time and speed-up, and what it costs, by precision and batch size;
and all cases with all their numbers.

Of many networks there is one row each, with what is recommended for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from bench.answers.money import cost_column
from bench.answers.recommendation import (
    MOST_PLACES,
    describe_setting,
    name_places,
    write_caveat,
)
from bench.answers.render.table import (
    MIXED,
    NOTHING,
    Cell,
    Column,
    Prominence,
    Section,
    Sheet,
    axis_column,
    find_wording,
    join,
    name_case,
    name_spread,
    quantity_cell,
    quantity_column,
    remarks,
    write_ratio,
)
from bench.answers.report_data import ReportData, Target
from bench.answers.settings import Setting
from bench.base.limits import MIN_REPEATS
from bench.base.text import GIB, capitalize, count, write_number, write_range
from bench.networks.workloads import OWN
from bench.results.store.rows import group
from bench.results.study.axes import (
    MACHINE,
    name_setting,
    order_values,
    sort_cases,
    take_value,
)
from bench.results.study.quantities import QUANTITIES, is_number
from bench.results.study.runs import Result
from bench.results.study.warnings import SAID_BELOW
from bench.schema.case import spell_value
from bench.schema.precision import PRECISIONS

MOST_DOWN = 2  # axes beside precision and loss scale that have a column each, not one for all
MOST_ACROSS = 5  # columns of 15 characters that fit beside the names of the rows

WARNED = "?"
"""Marks a time with a warning that keeps it from being recommended."""

HEADINGS = (MACHINE, "model", "dataset", "start")
"""Axes shown above their rows, if other axes distinguish these rows: a path of 60 characters in a
column left no room for loss and memory in a width of 100."""


# ------------------------------------------------------------------------------------- the pivot


class _Pivot(NamedTuple):
    across: str  # the axis of the columns
    down: list[str]  # those of the rows
    lines: list[dict[Any, Setting]]  # the settings of each row, by value of the axis across


def _pivot(found: ReportData) -> _Pivot | None:
    """Return the settings as a pivot; None if no axis has few values, a cell would hold two
    settings, the rows are to be grouped by an axis, or their times are of several things."""
    settings = [] if found.by or len(found.places) > MOST_PLACES else found.settings
    if find_wording(found.results).period == MIXED:
        return None
    for across in ("batch_size", "precision"):
        values = {getattr(setting.best, across) for setting in settings}
        down = [axis for axis in found.order if axis in found.varying and axis != across]
        lines: dict[tuple[Any, ...], dict[Any, Setting]] = {}
        of = {setting.best.cell: setting for setting in settings}
        for row in sort_cases([setting.best for setting in settings], down):
            lines.setdefault(_place(row, down), {})[getattr(row, across)] = of[row.cell]
        if 1 < len(values) <= MOST_ACROSS and (len(lines) > 1 or len(values) > 2):
            whole = sum(map(len, lines.values())) == len(settings)
            return _Pivot(across, down, [*lines.values()]) if whole else None
    return None


def _place(case: Result, axes: Sequence[str]) -> tuple[Any, ...]:
    return tuple(take_value(case, axis) for axis in axes)


def _tabulate_times(found: ReportData) -> Iterator[Sheet]:
    if (pivot := _pivot(found)) is None:
        if len(found.places) <= MOST_PLACES:
            cases = [setting.best for setting in found.settings]
            yield _lay_out_cases(found, cases, f"Results: {count(len(cases), 'setting')}")
        return

    cells = {}
    for setting in found.settings:
        row = setting.best
        time = quantity_cell("epoch_time_s", row, spread=False)
        text = time.text + WARNED * (is_number(row.epoch_time_s) and not row.trusted)
        # one run on a CPU says no ratio: what else it does changes the time
        alone = row.device == "cpu" and row.repeats < MIN_REPEATS
        if setting.timed and is_number(row.speedup) and not alone:
            text += f" · {write_ratio(row.speedup)}×"
        cells[row.cell] = Cell(text, time.value, time.estimated)
    texts = "".join(cell.text for cell in cells.values())
    title = "Epoch time (s)" + " · speed-up over fp32" * ("×" in texts)
    title += f" ({WARNED} has a warning)" * (WARNED in texts)
    yield replace(_lay_out(found, pivot, title, cells), notes=_explain_precisions(found))


def _explain_precisions(found: ReportData) -> list[str]:
    """Say in plain words what each precision is, if there are several. A command decides that by
    itself."""
    ours = (row.precision for row in found.results if row.command is None)
    precisions = order_values("precision", ours)
    briefs = [f"{name}: {PRECISIONS[name].brief}" for name in precisions]
    return [f"{'; '.join(briefs)}."] if len(briefs) > 1 else []


def _tabulate_money(found: ReportData) -> Iterator[Sheet]:
    pivot, tariff = _pivot(found), found.tariff
    if pivot is not None and tariff is not None:
        cells = {}
        for row in (setting.best for setting in found.settings):
            cost = tariff.fill(row)
            mark = WARNED * (is_number(cost.value) and not row.trusted)
            cells[row.cell] = replace(cost, text=cost.text + mark)
        warned = any(cell.text.endswith(WARNED) for cell in cells.values())
        title = "Cost of an epoch" + f" ({WARNED} has a warning)" * warned
        yield replace(_lay_out(found, pivot, title, cells), notes=[_describe_costs(found)])


def _describe_costs(found: ReportData) -> str:
    assert found.tariff is not None
    return found.tariff.describe(map(found.tariff.find_cost, found.results))


def _tabulate_costs(found: ReportData) -> Iterator[Sheet]:
    if (pivot := _pivot(found)) is None:
        return
    real = any(setting.best.dataset != "synthetic" for setting in found.settings)
    ends = ("test_accuracy", "train_loss") if real else ()
    learnt = next(
        (n for n in ends if any(s.find_learnt(n) is not None for s in found.settings)), ""
    )
    cells = {}
    for setting in found.settings:
        memory, end = setting.best.memory_bytes, setting.find_learnt(learnt) if learnt else None
        text = f" · {QUANTITIES[learnt].write(end)}" if end is not None else ""
        known = Cell(f"{memory / GIB:#.3g}{text}", memory) if is_number(memory) else Cell(NOTHING)
        cells[setting.best.cell] = known
    more = f" · {QUANTITIES[learnt].title} after the epoch" if learnt else ""
    sheet = _lay_out(found, pivot, f"Peak memory (GiB){more}", cells)
    several = len({setting.best.batch_size for setting in found.settings}) > 1
    yield replace(sheet, notes=[write_caveat(found.settings)] if learnt and several else [])


_Line = tuple[Result, dict[Any, Cell]]
"""A row of a pivot: one of its cases, and a cell for each value of the axis across."""


def _lay_out(found: ReportData, pivot: _Pivot, title: str, cells: dict[int, Cell]) -> Sheet:
    """Return a pivot as a table of ``cells``, by the cell of a setting's best case, without the
    rows in which nothing is written."""
    across, down, lines = pivot
    headings = [axis for axis in down if axis in HEADINGS]
    own = [axis for axis in down if axis not in headings]
    others = [axis for axis in own if axis not in ("precision", "loss_scale")]
    others = others if len(others) > MOST_DOWN else []
    rows: list[_Line] = []
    for line in lines:
        filled = {
            value: replace(cells[setting.best.cell], chosen=setting in found.recommended)
            for value, setting in line.items()
        }
        if any(cell.text != NOTHING for cell in filled.values()):
            rows.append((next(iter(line.values())).best, filled))
    first = "batch size " if across == "batch_size" else ""
    columns: list[Column[_Line]] = [
        axis_column(axis, itemgetter(0)) for axis in own if axis not in others
    ]
    if others:
        columns.append(Column("with", "with", "what else is set; empty where nothing is",
                              lambda line: name_case(line[0], others), wrap=True))  # fmt: skip
    for value in order_values(across, (value for line in lines for value in line)):
        column: Column[_Line] = Column(
            f"{across}_{value}", f"{first}{value}", f"{across.replace('_', ' ')} {value}",
            partial(_take_cell, value), number=False,
        )  # fmt: skip
        columns.append(column)
    rows, groups = join(
        (_name_values(part[0][0], headings), part)
        for part in group(rows, lambda line: _place(line[0], headings))
    )
    return Sheet(title, columns, rows, groups=groups)


def _take_cell(value: Any, line: _Line) -> Cell | None:
    return line[1].get(value)


def _name_values(row: Result, axes: Sequence[str]) -> str:
    """Name the values of some axes, the machine among them, as a heading."""
    return " · ".join(name_setting(axis, spell_value(take_value(row, axis))) for axis in axes)


# ---------------------------------------------------------------------------------- many networks


def _tabulate_places(found: ReportData) -> Iterator[Sheet]:
    if len(found.places) <= MOST_PLACES:
        return
    rows = [
        (place, setting)
        for place in found.places
        for setting in place.recommended or filter(None, [place.chosen or place.lowest])
    ]
    several = len({place.machine for place in found.places}) > 1

    def name(pair: tuple[Target, Setting]) -> str:
        where = f" · {pair[0].machine}" if several else ""
        return f"{pair[0].name}{where}"

    def take(pair: tuple[Target, Setting]) -> Result:
        return pair[1].best

    yield Sheet(
        capitalize(name_places(found.places)),
        [
            Column("place", "network", "what is trained", name, wrap=True),
            Column("setting", "train it in",
                   "the smallest batch shown to take at most a tenth more than the fastest",
                   lambda pair: describe_setting(found, pair[1])
                   + ("" if pair[0].recommended else f" ({_warning(*pair)})"),
                   wrap=True),
            quantity_column("epoch_time_s", take, spread=False, always=True),
            quantity_column("images_per_s", take),
            quantity_column("speedup", take, label="speed-up over fp32", spread=False),
            quantity_column("memory_bytes", take),
            quantity_column("memory_saved", take, spread=False, keep=6),
        ],
        rows,
    )  # fmt: skip


def _warning(place: Target, setting: Setting) -> str:
    """Say why a setting is shown and not recommended."""
    if place.unsteady and not setting.best.invalid:
        return f"lowest of fewer than {MIN_REPEATS} runs on a CPU, which are not ranked"
    if place.unknown:
        return "the lowest time; whether it trains as well is not known"
    return remarks(setting.best) or "the only one that can be compared"


# --------------------------------------------------------------------------------------- all cases


def _mark(column: Column[Result], recommended: Sequence[Setting]) -> Column[Result]:
    """Return a column whose cells of what is recommended are marked."""
    chosen = {setting.best.cell for setting in recommended}
    return replace(column, say=lambda row: replace(column.fill(row), chosen=row.cell in chosen))


def _lay_out_cases(found: ReportData, cases: Sequence[Result], title: str) -> Sheet:
    """Return the table of some cases, a row each, with all that was measured of it: under the axis
    that they are grouped by, or else under machines, networks and files."""
    headings = [axis for axis in found.order if axis in HEADINGS][: len(found.order) - 1]
    headings = [found.by] if found.by in found.order else headings
    columns = [axis for axis in found.order if axis not in headings] or ["precision", "batch_size"]
    columns = [axis for axis in columns if {getattr(c, axis, 1) for c in cases} not in _OWN]
    mixed = len({str(case.period) for case in cases if case.timed}) > 1
    folders = len({case.sweep for case in cases}) > len({case.ran_on for case in cases})
    stems = {case.sweep.rpartition("-")[0] for case in cases}
    rows, groups = join(
        (_name_values(part[0], headings), part)
        for part in group(sort_cases(cases, headings), lambda case: _place(case, headings))
    )
    return Sheet(
        title,
        [
            *(axis_column(axis) for axis in columns),
            *[Column("sweep", "folder", "where its rows are",
                     lambda row: row.sweep if len(stems) > 1 else
                     f"…{row.sweep.rpartition('-')[2]}", wrap=True)] * folders,
            replace(_mark(quantity_column("epoch_time_s", always=True), found.recommended),
                    label=QUANTITIES["epoch_time_s"].title + name_spread(cases)),
            *[Column("period", "of", "what the time is of",
                     lambda row: str(row.period) if row.timed else "", wrap=True)] * mixed,
            quantity_column(
                # a run's rate is none of items
                "images_per_s", lambda row: None if mixed and row.period.amount else row, keep=5),
            quantity_column("sequences_per_s", keep=1),
            quantity_column("speedup", label="speed-up over fp32", keep=7),
            quantity_column("memory_bytes", keep=8),
            quantity_column("memory_saved", keep=2),
            quantity_column("train_loss", label="loss", keep=8),
            quantity_column("train_accuracy", label="accuracy", keep=3),
            quantity_column("test_accuracy", label="test accuracy", keep=6),
            quantity_column("overflow_steps", keep=6),
            quantity_column("energy_per_epoch_j", keep=4),
            *([cost_column(found.tariff)] if found.tariff else []),
            Column("start_time_s", "start-up (s)",
                   "set-up, and the slowest first steps of all repeats",
                   lambda row: row.start_time_s, write=write_number, better="lower", keep=3),
            quantity_column("recompilations", keep=2),
            Column("remarks", "remarks", "what to know before believing the row",
                   lambda row: remarks(row, SAID_BELOW), wrap=True),
        ],
        rows,
        [
            *_explain_precisions(found),
            *_explain_losses(cases),
            *([_describe_costs(found)] if found.tariff else []),
        ],
        groups=groups,
        empty=(NOTHING, "", "0"),
    )  # fmt: skip


def _explain_losses(cases: Sequence[Result]) -> Iterator[str]:
    """Say over how many steps losses of commands without epochs are, where that differs."""
    steps = {
        row.measured_steps for row in cases if row.tells_no_epoch and is_number(row.train_loss)
    }
    if len(steps) > 1:
        span = write_range(steps, "{:,.0f}".format)
        yield f"Each loss is the mean over as many steps as were measured, {span}."


_OWN = ({OWN}, {0})
"""What a command without placeholders for them has as precision and batch size."""


def _tabulate_reached(found: ReportData) -> Iterator[Sheet]:
    columns: list[Column[Setting]] = [
        *(axis_column(axis, lambda one: one.best)
          for axis in found.order if axis in (*found.varying, "precision")),
        *(quantity_column(name, lambda one: one.best, spread=False)
          for name in ("achieved_flops", "mfu", "measured_share", "recomputed_share", "traffic",
                       "copy_share")),
        Column("mean_power_w", "power (W)", "mean of the epoch", lambda one: one.best.mean_power_w,
               write="{:.0f}".format),
        quantity_column("images_per_j", lambda one: one.best, spread=False),
        Column("sm_clock_mhz", "SM clock (MHz)", "median of the epoch",
               lambda one: one.best.sm_clock_mhz, write="{:,.0f}".format),
    ]  # fmt: skip
    quantities = ("achieved_flops", "traffic", "mean_power_w", "sm_clock_mhz")
    rows = [s for s in found.settings if any(is_number(getattr(s.best, n)) for n in quantities)]
    note = (
        "MFU: model FLOP/s over the dense peak of the card's data sheet, of the arithmetic that "
        "ran, so that each format has another; of measured, and of a copy: over what a large "
        "product, and a large copy, reached on this machine before its cases."
    )
    title = "What the hardware did: FLOP/s, traffic, power and clocks"
    yield Sheet(title, columns, rows, [note])


PLACES = Section(
    "places", "What should each network be trained with?", _tabulate_places, Prominence.TABLE
)
TIMES = Section("times", "How long does each setting take?", _tabulate_times, Prominence.TABLE)
MONEY = Section("money", "What does an epoch cost?", _tabulate_money, Prominence.TABLE)
COSTS = Section(
    "costs", "What memory does each take, and what did it learn?", _tabulate_costs, Prominence.TABLE
)
OVERVIEW = Section(
    "overview",
    "How did each case do?",
    lambda found: [
        _lay_out_cases(found, found.results, f"Overview: {count(len(found.results), 'case')}")
    ],
)
REACHED = Section("hardware", "How much of the hardware does each setting use?", _tabulate_reached)
