"""The sections of a report as data: columns that fill themselves, laid out as tables by `Section`.

A column shows any function of a row; those of a quantity, an axis and a case's name are made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from bench.case import AXES
from bench.precision import PRECISIONS
from bench.record import MEASURED
from bench.render.table import NOTHING, Cell, Head, Level, Row, Table, name_place, outcome
from bench.study.axes import MACHINE, NUMBERS, Machines, name_axis, name_value
from bench.study.quantities import QUANTITIES, Quantity, is_number
from bench.study.runs import Spread
from bench.text import ESTIMATE

R = TypeVar("R")

Said = Cell | str | float | None  # what a column shows of a row: a cell, text, a number, or nothing


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column: its `Head`, and ``say``, which returns what it shows of a row. An empty column is
    left out unless ``always`` is set. One that may ``wrap`` holds words, others numbers, unless
    ``number`` says otherwise. Numbers are written by ``write``; NaN is empty."""

    name: str
    label: str
    help: str
    say: Callable[[R], Said]
    number: bool | None = None
    better: str = ""
    keep: int = 9
    wrap: bool = False
    always: bool = False
    write: Callable[[Any], str] = str

    def fill(self, row: R) -> Cell:
        """Return the cell of a row."""
        said = self.say(row)
        if isinstance(said, Cell):
            return said
        if isinstance(said, str):
            return Cell(said)
        return Cell(NOTHING) if said is None or said != said else Cell(self.write(said), said)

    @property
    def head(self) -> Head:
        number = not self.wrap if self.number is None else self.number
        return Head(self.name, self.label, self.help, number, self.better, self.keep, self.wrap)


@dataclass(frozen=True)
class Sheet:
    """The content of a table, before it is filled; without rows there is no table. Notes, groups
    and words are as in `Table`."""

    title: str
    columns: Sequence[Column[Any]]
    rows: Sequence[Any]  # from which the columns are filled
    notes: Iterable[str] = ()
    groups: Mapping[int, str] = field(default_factory=dict)
    words: Iterable[str] = ()
    name: str = ""  # the section's, unless it has several tables
    empty: Sequence[str] = ("", NOTHING)  # texts of empty cells; if (), all columns stay


@dataclass(frozen=True)
class Section:
    """A question that a report answers, if it can."""

    name: str  # of its table
    question: str  # as a reader would ask it
    list_sheets: Callable[[Any], Iterable[Sheet]]  # from a `bench.questions.report_data.ReportData`
    level: Level = Level.DETAIL  # of its tables

    def tabulate(self, found: Any) -> Iterator[Table]:
        """Return its tables, without those that have no rows."""
        return self.lay_out(self.list_sheets(found))

    def lay_out(self, sheets: Iterable[Sheet]) -> Iterator[Table]:
        """Return its tables from sheets that were made elsewhere, as `tabulate` does."""
        return (self.fill(sheet) for sheet in sheets if sheet.rows)

    def fill(self, sheet: Sheet) -> Table:
        """Return one table, even without rows."""
        table = Table(
            sheet.name or self.name,
            sheet.title,
            tuple(column.head for column in sheet.columns),
            tuple(tuple(column.fill(row) for column in sheet.columns) for row in sheet.rows),
            tuple(sheet.notes),
            # no line before the first row, only a heading if there is one
            {at: said for at, said in sheet.groups.items() if at or said},
            tuple(sheet.words),
            level=self.level,
            question=self.question,
        )
        always = [column.name for column in sheet.columns if column.always]
        return table.drop_empty(sheet.empty, always) if sheet.empty else table


def join(parts: Iterable[tuple[str, Iterable[R]]]) -> tuple[list[R], dict[int, str]]:
    """Return the rows of parts, each under a heading, and their `Sheet.groups`."""
    rows: list[R] = []
    groups: dict[int, str] = {}
    for heading, part in parts:
        groups[len(rows)] = heading
        rows += part
    return rows, groups


def quantity_column(
    name: str,
    take: Callable[[Any], Row] = lambda row: row,
    label: str = "",
    *,
    spread: bool = True,
    **head: Any,
) -> Column[Any]:
    """Return the column of one of `QUANTITIES`, for the case that ``take`` finds in a row of the
    table, if any. The epoch time's also shows how a case without one ended. A ``label`` is without
    its unit; ``head`` replaces further fields of the `Column`."""
    quantity = QUANTITIES[name]
    unit = f" ({quantity.unit})" if quantity.unit not in ("", "×") else ""
    write = time_cell if name == "epoch_time_s" else partial(quantity_cell, quantity)
    shown = {
        "help": quantity.help,
        "say": lambda one: write(row, spread=spread) if (row := take(one)) is not None else None,
        "better": quantity.better,
        **head,
    }
    return Column(name, label + unit if label else quantity.title, **shown)


def axis_column(
    axis: str,
    machines: Machines,
    take: Callable[[Any], Row] = lambda row: row,
    number: bool | None = None,
) -> Column[Any]:
    """Return the column of an axis, or of the machine, for the case that ``take`` finds in a row.
    It is never left out. A ``number`` is aligned right; the default depends on the axis."""
    # on the command line the help of an axis says images where it means items
    told = "where it ran" if axis == MACHINE else AXES[axis].help

    def say(one: Any) -> Cell:
        row = take(one)
        if axis == "fp8_recipe" and not PRECISIONS[row.precision].float8:
            return Cell(NOTHING)
        if axis == MACHINE:
            where = machines[row.sweep, row.machine]
            return Cell(where, where)
        return Cell(name_value(axis, getattr(row, axis), machines), getattr(row, axis))

    return Column(
        axis,
        name_axis(axis),
        told.replace("images", "items"),
        say,
        number=axis in NUMBERS if number is None else number,
        wrap=axis in (MACHINE, "model"),
        always=True,
    )


def case_column(
    axes: Collection[str], machines: Machines, take: Callable[[Any], Row] = lambda row: row
) -> Column[Any]:
    """Return the column that names a case by some axes; ``take`` finds the case in a row."""
    return Column("case", "case", "the settings that tell it apart",
                  lambda one: name_place(take(one), axes, machines), wrap=True)  # fmt: skip


def quantity_cell(quantity: Quantity, row: Row, *, spread: bool = True) -> Cell:
    """Return the cell of a quantity of a case, with the ends of its spread and the mark of an
    estimate, without unit. A case of less than an epoch shows nothing that was learnt. Ends over
    repeats are in parentheses, within one run in brackets."""
    value = getattr(row, quantity.name)
    if not is_number(value) or (quantity.learnt and not row.learnt_whole):
        return Cell(NOTHING)
    text = quantity.write(value)
    if spread and quantity.spread:
        low, high = (getattr(row, f"{quantity.name}_{end}", math.nan) for end in ("low", "high"))
        if is_number(low) and is_number(high) and (ends := quantity.write_ends(low, high, value)):
            text += f" [{ends}]" if row.spread == Spread.WITHIN.value else f" ({ends})"
    other = row.base_fraction if quantity.name == "speedup" else 1.0
    estimated = bool(quantity.whole and min(row.part, other) < 1)
    return Cell(f"{ESTIMATE * estimated}{text}", value, estimated)


def write_quantity(quantity: Quantity, row: Row, *, spread: bool = True) -> str:
    """Write one number of a case as `quantity_cell` does, with its unit."""
    return quantity.add_unit(quantity_cell(quantity, row, spread=spread).text)


def time_cell(row: Row, *, spread: bool = True) -> Cell:
    """Return the cell of a case's epoch time, or of the outcome that left it without one."""
    if row.status not in MEASURED:
        return Cell(outcome(row.status, bool(row.inferred)), row.status)
    return quantity_cell(QUANTITIES["epoch_time_s"], row, spread=spread)
