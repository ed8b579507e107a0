"""The parts of a report in any format: cells, tables, answers, notices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the text for people, and the value behind it for machines. The text of a
    number that is ``estimated`` begins with `bench.text.ESTIMATE`."""

    text: str
    value: float | str | None = None
    estimated: bool = False


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


class Level(Enum):
    """The prominence of a table: what the first screen shows of it."""

    ANSWER = "its words, as answers"
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
    level: Level = Level.DETAIL
    question: str = ""

    def take(self, columns: Iterable[int]) -> Table:
        """Return the same table with these of its columns."""
        kept = list(columns)
        return replace(
            self,
            heads=tuple(self.heads[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
        )

    def drop_empty(
        self, empty: Collection[str] = ("", NOTHING), but: Collection[str] = ()
    ) -> Table:
        """Return the same table without the columns whose cells are all in ``empty``, except the
        columns named in ``but``."""
        return self.take(
            i
            for i, head in enumerate(self.heads)
            if head.name in but or any(row[i].text not in empty for row in self.rows)
        )


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
    good: bool = False  # worth knowing, but nothing to worry about
    level: Level = Level.TABLE  # `Level.DETAIL` if a first screen says it in another way

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


class Document(Protocol):
    """The parts of a document, in reading order; each may be computed on demand."""

    @property
    def title(self) -> str: ...
    @property
    def subject(self) -> str: ...  # what was measured, in one line
    @property
    def constants(self) -> Sequence[str]: ...  # what is the same in every case, as sentences
    @property
    def origin(self) -> Sequence[str]: ...  # what comes first if nothing was measured
    @property
    def answers(self) -> Sequence[Answer]: ...
    @property
    def next_step(self) -> NextStep | None: ...  # the one that would help most, if one is known
    @property
    def warnings(self) -> Sequence[Notice]: ...  # notices that are not good, most serious first
    @property
    def opening(self) -> Sequence[Table]: ...  # tables that a first screen shows in part
    @property
    def tables(self) -> Sequence[Table]: ...  # all of them, including these
    @property
    def notes(self) -> Sequence[str]: ...  # must stay with the numbers of the tables
    @property
    def outcomes(self) -> str: ...  # how many cases and runs there are, and how they ended
