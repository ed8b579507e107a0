"""A section of a report as data: its columns fill themselves, and one layouter makes its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bench.render.model import NOTHING, Cell, Head, Level, Table
from bench.text import say_left_out

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
