"""A section of a report as data: its columns fill themselves, and one layouter makes its tables.

A column says what it likes of a row, or a number, an axis or the name of a case that the row has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from bench.case import AXES
from bench.precision import PRECISIONS
from bench.render.cells import TIMED, Row, name_place, outcome
from bench.render.model import NOTHING, Cell, Head, Level, Table
from bench.study.axes import MACHINE, NUMBERS, Machines, name_axis, name_value
from bench.study.quantities import QUANTITIES, Quantity, is_number
from bench.study.spread import Spread
from bench.text import ESTIMATE, say_left_out

MOST_ROWS = 40  # rows of a table, unless it says otherwise; more would not be read

R = TypeVar("R")

Said = Cell | str | float | None  # what a row says in a column: a cell, text, a number, or nothing


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column: its `Head`, and what a row says in it. It is left out where no row says more than
    nothing, unless it is there ``always``. What may ``wrap`` is words, and no ``number``, unless
    that is said. A number that a row says is written by ``write``; NaN is nothing."""

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
        """What stands in a row."""
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
    """What a section says of some data, before it is cut and filled; without rows, nothing. Notes,
    groups and words are those of a `Table`; notes may be a function of the rows shown."""

    title: str
    columns: Sequence[Column[Any]]
    rows: Sequence[Any]  # what the columns are filled from, all of them
    notes: Iterable[str] | Callable[[Sequence[Any]], Iterable[str]] = ()
    groups: Mapping[int, str] = field(default_factory=dict)  # of all rows
    words: Iterable[str] = ()
    name: str = ""  # the section's, unless it has several tables
    most: int = MOST_ROWS
    file: str = ""  # where all rows are, if that is anywhere; or how to get it
    choose: str = "--where chooses"  # how to have others
    empty: Sequence[str] = ("", NOTHING)  # cells that say nothing; without any, all columns stay


@dataclass(frozen=True)
class Section:
    """A question that a report answers, if it can."""

    name: str  # of its table
    question: str  # as a reader would ask it
    tell: Callable[[Any], Iterable[Sheet]]  # of `bench.questions.material.Material`
    level: Level = Level.DETAIL  # how soon its tables are read

    def tabulate(self, found: Any) -> Iterator[Table]:
        """Its tables, those without rows left out."""
        return self.lay_out(self.tell(found))

    def lay_out(self, sheets: Iterable[Sheet]) -> Iterator[Table]:
        """Its tables of sheets that were told elsewhere, as `tabulate` has them."""
        for sheet in sheets:
            if sheet.rows:
                yield self.fill(sheet)

    def fill(self, sheet: Sheet) -> Table:
        """One table, also where it has no rows."""
        end = len(sheet.rows)
        if end > sheet.most:  # up to the end of a group, where that leaves not too few
            group = max((start for start in sheet.groups if start <= sheet.most), default=0)
            end = group if 2 * group >= sheet.most else sheet.most
        shown, left = sheet.rows[:end], len(sheet.rows) - end
        notes = [*(sheet.notes(shown) if callable(sheet.notes) else sheet.notes)]
        if left:
            also = f", and {sheet.file} has them all" if sheet.file else ""
            notes.append(f"{say_left_out(left, 'row')}; {sheet.choose}{also}.")
        table = Table(
            sheet.name or self.name,
            sheet.title,
            tuple(column.head for column in sheet.columns),
            tuple(tuple(column.fill(row) for column in sheet.columns) for row in shown),
            tuple(notes),
            # nothing is set off before the first row, unless something is said there
            {at: said for at, said in sheet.groups.items() if at < end and (at or said)},
            tuple(sheet.words),
            level=self.level,
            question=self.question,
            left=left,
        )
        always = [column.name for column in sheet.columns if column.always]
        return table.drop_empty(sheet.empty, always) if sheet.empty else table


def join(parts: Iterable[tuple[str, Iterable[R]]]) -> tuple[list[R], dict[int, str]]:
    """The rows of parts, each under a heading, and their `Sheet.groups`."""
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
    prefix: str = "",
    *,
    spread: bool = True,
    **head: Any,
) -> Column[Any]:
    """The column of one of `QUANTITIES`, of the case that ``take`` finds in a row of the table; of
    the epoch time also how a case without one ended. A ``label`` is without its unit; ``head`` is
    what else is other than the quantity has it."""
    quantity = QUANTITIES[name]
    unit = f" ({quantity.unit})" if quantity.unit not in ("", "×") else ""
    write = time_cell if name == "epoch_time_s" else partial(quantity_cell, quantity)
    shown = {
        "help": quantity.help,
        "say": lambda one: write(take(one), prefix, spread=spread),
        "better": quantity.better,
        **head,
    }
    return Column(prefix + name, label + unit if label else quantity.title, **shown)


def axis_column(
    axis: str,
    machines: Machines,
    take: Callable[[Any], Row] = lambda row: row,
    number: bool | None = None,
) -> Column[Any]:
    """The column of an axis, or of the machine, of the case that ``take`` finds in a row of the
    table; it is there always. A ``number`` stands to the right, by default if it is one."""
    # on the command line the help of an axis says images, and means items
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
    """The column that names a case by some axes; ``take`` takes a row of the table to it."""
    return Column("case", "case", "the settings that tell it apart",
                  lambda one: name_place(take(one), axes, machines), wrap=True)  # fmt: skip


def quantity_cell(quantity: Quantity, row: Row, prefix: str = "", *, spread: bool = True) -> Cell:
    """Write one number of a case, the ends of its spread and an estimate's mark, without unit; of
    less than an epoch nothing that was learnt. The ends are of repeats in parentheses, within one
    run in brackets."""
    value = getattr(row, prefix + quantity.name)
    if not is_number(value) or (quantity.learnt and not prefix and row.part < 1):
        return Cell(NOTHING)
    text = quantity.write(value)
    if spread and not prefix and quantity.spread:
        low, high = (getattr(row, f"{quantity.name}_{end}", math.nan) for end in ("low", "high"))
        if is_number(low) and is_number(high) and (ends := quantity.write_ends(low, high, value)):
            text += f" [{ends}]" if row.spread == Spread.WITHIN.value else f" ({ends})"
    other = row.base_fraction if quantity.name == "speedup" else 1.0
    estimated = bool(not prefix and quantity.whole and min(row.part, other) < 1)
    return Cell(f"{ESTIMATE * estimated}{text}", value, estimated)


def write_quantity(quantity: Quantity, row: Row, *, spread: bool = True) -> str:
    """Write one number of a case as `quantity_cell` does, with its unit."""
    return quantity.add_unit(quantity_cell(quantity, row, spread=spread).text)


def time_cell(row: Row, prefix: str = "", *, spread: bool = True) -> Cell:
    """Write a case's epoch time, or the outcome that left it without one; as ``published_`` by
    ``prefix``, that of the published case beside it."""
    status = getattr(row, f"{prefix}status")
    if status and status not in TIMED:
        return Cell(outcome(status, bool(row.inferred and not prefix)), status)
    return quantity_cell(QUANTITIES["epoch_time_s"], row, prefix, spread=spread)
