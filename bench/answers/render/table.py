"""The parts of a report in any format: cells, tables, answers, notices; and its sections as
data, as columns that fill themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from bench.base.text import ESTIMATE, capitalize
from bench.networks.workloads import IMAGES
from bench.results.study.axes import MACHINE, NUMBERS, read_numbers, take_value
from bench.results.study.quantities import QUANTITIES, is_number
from bench.results.study.runs import Spread
from bench.results.study.warnings import WARNINGS
from bench.schema.axis import is_own, name_axis, name_column
from bench.schema.case import AXES, Case, change_axes, find_axis, spell_value
from bench.schema.precision import PRECISIONS
from bench.schema.record import MEASURED, Status

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the text for people, and the value behind it for machines. The text of a
    number that is ``estimated`` begins with `bench.base.text.ESTIMATE`. One of what is recommended
    is ``chosen``."""

    text: str
    value: float | str | None = None
    estimated: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class Head:
    """The head of a column. A ``number`` is aligned right; ``better`` is lower, higher or empty. If
    a page is too narrow, the columns with the lowest ``keep`` are left out first; those with 9
    never are. A column that may ``wrap`` gets no more than the width that is left."""

    name: str
    label: str
    help: str = ""
    number: bool = True
    better: str = ""
    keep: int = 9
    wrap: bool = False


class Prominence(Enum):
    """The prominence of a table: what the first screen shows of it."""

    TABLE = "its rows"
    DETAIL = "nothing: a document shows it in full, and a terminal by --full"


@dataclass(frozen=True)
class Table:
    """Rows under heads, with a title above and notes below that must never be separated from the
    numbers. ``words`` are sentences between the title and the rows, which the rows support.
    ``groups`` maps the first row of each group to its heading, empty if a line is enough.
    ``question`` is what the table answers, as a reader would ask."""

    name: str
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    groups: Mapping[int, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    level: Prominence = Prominence.DETAIL
    question: str = ""


@dataclass(frozen=True)
class Answer:
    """A few sentences on one machine, the most important first."""

    about: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Notice:
    """Something to know before believing the numbers."""

    label: str
    found: str  # as sentences
    remedy: str = ""  # a sentence with the flag or the command that helps; empty for none
    where: str = ""  # how much of the data it affects: ``6 of 18 runs``; may be empty
    level: Prominence = (
        Prominence.TABLE
    )  # `Prominence.DETAIL` if a first screen says it in another way

    @property
    def text(self) -> str:
        """All of it except the label."""
        return " ".join(filter(None, (self.where and f"{self.where}.", self.found, self.remedy)))

    @property
    def line(self) -> str:
        """The label and the text."""
        return f"{self.label}: {self.text}"


@dataclass(frozen=True)
class NextStep:
    """What to do next, as a sentence, and the command line that does it; empty for none."""

    why: str
    command: str = ""


Document = Any
"""What is written in a format: an object with the parts of a document, each may be computed on
demand: texts ``title``, ``subject`` (what was measured) and ``outcomes`` (how cases ended);
sentences ``constants`` and ``notes``;
``answers``, the ``next_step`` or None, ``warnings`` (most serious first), all ``tables``, and the
``opening`` ones, which a first screen shows in part."""


# -------------------------------------------------------------------------------------------- cells


AnyRow = Any  # a run or a result, its cells and quantities as attributes


def mark_part(*rows: AnyRow) -> str:
    """Return the mark of an estimate if one of these cases measured less than an epoch."""
    return ESTIMATE if any(row.part < 1 for row in rows) else ""


def write_tenths(share: float) -> str:
    """Write a share in per cent with one decimal, without the % sign: 0.0312 as ``3.1``."""
    return f"{100 * share:z.1f}"  # 0.0, not -0.0


def write_ends(
    ends: Iterable[float | None] | None, write: Callable[[float], str], between: str = "–"
) -> str | None:
    """Write the two ends of an interval; None if they are not known, as None or NaN."""
    known = [end for end in ends or () if end is not None and not math.isnan(end)]
    return between.join(map(write, known)) if len(known) == 2 else None


def write_ratio(value: float) -> str:
    """Write a ratio with two decimals, or two significant digits below a tenth."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def ratio_cell(value: float | None, mark: str = "") -> Cell:
    """Return the cell of a ratio, such as ``1.25×``; a question mark where it is not known."""
    if value is None or not is_number(value):
        return Cell("?", value)
    return Cell(f"{mark}{write_ratio(value)}×", value)


def name_spread(cases: Iterable[AnyRow]) -> str:
    """Return the suffix of the times' column head, which names the kind of their spread."""
    kinds = {case.spread for case in cases} - {Spread.NONE.value}
    words = {Spread.WITHIN.value: " [within the run]", Spread.RANGE.value: ", range"}
    return ", spread" if len(kinds) > 1 else "".join(map(words.__getitem__, kinds))


def name_outcome(row: AnyRow) -> str:
    """Name how a row without a time ended: out of memory in words, else by its status."""
    names = {Status.OOM: "out of memory", Status.OOM_SUSPECTED: "out of memory?"}
    return names.get(row.status, str(row.status)) + " (inferred)" * bool(row.inferred)


def remarks(row: AnyRow, but: Iterable[str] = ()) -> str:
    """Return what a reader must know before believing a row, except the warnings in ``but``."""
    marks = [d.mark(row) for d in WARNINGS.values() if d.name not in but and getattr(row, d.name)]
    if row.runs > row.repeats:
        marks.append(f"{row.repeats} of {row.runs} runs")
    return ", ".join(marks)


def name_place(row: AnyRow, axes: Collection[str]) -> str:
    """Name a case as `name_case`, after its machine if that is among the axes."""
    where = [row.ran_on] if MACHINE in axes else []
    return " · ".join([*where, name_case(row, axes)])


def name_case(row: AnyRow, axes: Iterable[str]) -> str:
    """Return the `Case.label` of a run or a result, by those of some axes that a `Case` has."""
    values = {name: getattr(row, name) for name in axes if name in AXES or is_own(name)}
    return change_axes(Case(), values).label(values)


# ------------------------------------------------------------------------------------------ wording


EPOCH, MIXED = "epoch", "time"
"""What times are of unless all are of commands that tell of no epoch, and where they are of several
things, which each row says."""

SEVERAL = "items"  # the word for several kinds at once; the notes say which model has which


@dataclass(frozen=True)
class Wording:
    """The words for what some cases count, and for what their times are of: an epoch, or where all
    are of commands that tell of none, a run or as many items or steps."""

    units: str = IMAGES
    period: str = EPOCH

    def say_period(self, text: str) -> str:
        """Replace the epoch in a text of the harness by what times are of.

        >>> Wording(period="run").say_period("Epoch time (s)")
        'Run time (s)'
        >>> Wording(period="10,000 items").say_period("12 s an epoch")
        '12 s for 10,000 items'
        >>> Wording(period="10,000 items").say_period("whole epochs, 25 % of an epoch")
        'all of 10,000 items, 25 % of 10,000 items'
        >>> Wording(period=MIXED).say_period("Epoch time (s), with --until an epoch")
        'Time (s), with --until an epoch'
        >>> Wording(period="run").say_period("Train my_epoch.py --epoch 2: 3 s an epoch.")
        'Train my_epoch.py --epoch 2: 3 s a run.'
        >>> Wording(period="50 steps").say_period("86 % after 5 epochs, at 3 s an epoch")
        '86 % after 5 epochs, at 3 s for 50 steps'
        """
        words = {"an epoch": "a run", "epoch": "run", "epochs": "runs"}
        if self.period == MIXED:
            words = {"epoch time": "time", "whole epochs, ": "", "of an epoch": "of the whole"}
        elif self.period != "run":
            words = {"of an epoch": f"of {self.period}", "an epoch": f"for {self.period}"}
            words |= {"whole epochs": f"all of {self.period}"}
            words |= {"epoch time": f"time of {self.period}", "the epoch": self.period}
            words |= {"epochs": self.period, "epoch": self.period}
        if self.period == EPOCH:
            return text
        words |= {capitalize(old): capitalize(new) for old, new in words.items()}
        # a longer one before what it begins with; no part of a name or a flag of the user's, and no
        # number of epochs, which is of them whatever times are of
        found = "|".join(sorted(words, key=len, reverse=True))
        found = rf"(?<![\w./=-])(?<!\d )({found})(?![\w=-]|[./]\w)"
        return re.sub(found, lambda m: words[m[1]], text)

    def say(self, text: str) -> str:
        """Replace images by the units too, in a label, a help or a caption.

        A batch consists of items, each of which may have several units. A text of the harness says
        items where it means them; they are called images if images are counted.

        >>> Wording("tokens").say("images/s"), Wording("tokens").say("Images per second")
        ('tokens/s', 'Tokens per second')
        >>> Wording("tokens").say("items per step"), Wording("images").say("items per step")
        ('items per step', 'images per step')
        """
        noun = "items" if self.units == IMAGES else "images"
        for old, new in ((noun, self.units), (noun[:-1], self.units.removesuffix("s"))):
            text = text.replace(old, new).replace(old.capitalize(), new.capitalize())
        return self.say_period(text)


def find_wording(cases: Iterable[AnyRow]) -> Wording:
    every = list(cases)
    units = {case.unit or IMAGES for case in every} or {IMAGES}
    unit = units.pop() if len(units) == 1 else SEVERAL
    periods = {case.period for case in every if is_number(case.epoch_time_s)}
    if every and not periods and all(case.command is not None for case in every):
        return Wording(unit, MIXED)
    if not periods or all(period.whole for period in periods):
        return Wording(unit)
    names = {str(period).removeprefix("a ") for period in periods}
    return Wording(unit, names.pop() if len(names) == 1 else MIXED)


# ----------------------------------------------------------------------------------------- sections


_R = TypeVar("_R")

Said = Cell | str | float | None  # what a column shows of a row: a cell, text, a number, or nothing


@dataclass(frozen=True)
class Column(Generic[_R]):
    """A column: its `Head`, and ``say``, which returns what it shows of a row. An empty column is
    left out unless ``always`` is set. One that may ``wrap`` holds words, others numbers, unless
    ``number`` says otherwise. Numbers are written by ``write``; NaN is empty."""

    name: str
    label: str
    help: str
    say: Callable[[_R], Said]
    number: bool | None = None
    better: str = ""
    keep: int = 9
    wrap: bool = False
    always: bool = False
    write: Callable[[Any], str] = str

    def fill(self, row: _R) -> Cell:
        """Return the cell of a row."""
        value = self.say(row)
        if isinstance(value, Cell):
            return value
        if isinstance(value, str):
            return Cell(value)
        return Cell(NOTHING) if value is None or value != value else Cell(self.write(value), value)

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
    list_sheets: Callable[[Any], Iterable[Sheet]]  # from a `bench.answers.report_data.ReportData`
    level: Prominence = Prominence.DETAIL  # of its tables

    def lay_out(self, sheets: Iterable[Sheet]) -> Iterator[Table]:
        """Fill the sheets that have rows, without the columns in which all cells are empty."""
        for sheet in (sheet for sheet in sheets if sheet.rows):
            columns = list(sheet.columns)
            rows = [[column.fill(row) for column in columns] for row in sheet.rows]
            shown = [
                place
                for place, column in enumerate(columns)
                if column.always
                or not sheet.empty
                or any(row[place].text not in sheet.empty for row in rows)
            ]
            yield Table(
                sheet.name or self.name,
                sheet.title,
                tuple(columns[place].head for place in shown),
                tuple(tuple(row[place] for place in shown) for row in rows),
                tuple(sheet.notes),
                # no line before the first row, only a heading if there is one
                {at: heading for at, heading in sheet.groups.items() if at or heading},
                tuple(sheet.words),
                self.level,
                self.question,
            )


def join(parts: Iterable[tuple[str, Iterable[_R]]]) -> tuple[list[_R], dict[int, str]]:
    """Return the rows of parts, each under a heading, and their `Sheet.groups`."""
    rows: list[_R] = []
    groups: dict[int, str] = {}
    for heading, part in parts:
        groups[len(rows)] = heading
        rows += part
    return rows, groups


def quantity_column(
    name: str,
    take: Callable[[Any], AnyRow] = lambda row: row,
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

    def say(one: Any) -> Cell | None:
        row = take(one)
        return None if row is None else quantity_cell(name, row, spread=spread)

    shown = {"help": quantity.help, "say": say, "better": quantity.better, **head}
    return Column(name, label + unit if label else quantity.title, **shown)


def axis_column(
    axis: str,
    take: Callable[[Any], AnyRow] = lambda row: row,
    number: bool | None = None,
) -> Column[Any]:
    """Return the column of an axis, or of the machine, for the case that ``take`` finds in a row.
    It is never left out. A ``number`` is aligned right; the default depends on the axis."""
    # on the command line the help of an axis says images where it means items
    meaning = "where it ran" if axis == MACHINE else find_axis(axis).help

    def say(one: Any) -> Cell:
        row = take(one)
        if axis == "fp8_recipe" and not PRECISIONS[row.precision].float8:
            return Cell(NOTHING)
        value = take_value(row, axis)
        number = read_numbers([value]).get(value, value) if is_own(axis) else value
        return Cell(spell_value(value), number)

    return Column(
        name_column(axis),
        name_axis(axis),
        meaning.replace("images", "items"),
        say,
        number=axis in NUMBERS if number is None else number,
        wrap=axis in (MACHINE, "model"),
        always=True,
    )


def quantity_cell(name: str, row: AnyRow, *, spread: bool) -> Cell:
    """Return the cell of one of `QUANTITIES` of a case, with the ends of its spread and the mark of
    an estimate, without unit. A case of less than an epoch shows nothing that was learnt, unless
    its command tells of none; one without a time shows how it ended in place of the epoch time.
    Ends over repeats are in parentheses, within one run in brackets."""
    if name == "epoch_time_s" and row.status not in MEASURED:
        return Cell(name_outcome(row), row.status)
    quantity, value = QUANTITIES[name], getattr(row, name)
    if not is_number(value) or (quantity.learnt and not (row.learnt_whole or row.tells_no_epoch)):
        return Cell(NOTHING)
    text = quantity.write(value)
    if spread:
        low, high = (getattr(row, f"{name}_{end}", math.nan) for end in ("low", "high"))
        wide = high - low >= quantity.spread * abs(value)  # False where an end is not known
        if wide and (ends := quantity.write_ends(low, high, value)):
            text += f" [{ends}]" if row.spread == Spread.WITHIN.value else f" ({ends})"
    other = row.base.part if name == "speedup" and row.base else 1.0
    estimated = bool(quantity.whole and min(row.part, other) < 1)
    return Cell(f"{ESTIMATE * estimated}{text}", value, estimated)


def write_time(row: AnyRow) -> str:
    """Write the epoch time of a case with its unit."""
    return f"{quantity_cell('epoch_time_s', row, spread=False).text} s"
