"""What a report is made of, free of any format: cells, tables, sections, answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

MOST_SECTIONS = 8
"""Machines, and networks on each, that a report opens with; more would not be read."""

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table: text for people, the number behind it for machines. Of a
    number that is ``estimated``, the text begins with `bench.text.ESTIMATE`."""

    text: str
    value: float | str | None = None
    estimated: bool = False


@dataclass(frozen=True)
class Head:
    """A column's head. Numbers stand to the right; ``better`` is lower, higher or empty. Where a
    page is too narrow, columns that ``keep`` least go first; those of 9 never do. A column that may
    ``wrap`` is no wider than what is left."""

    name: str
    label: str
    help: str = ""
    number: bool = True
    better: str = ""
    keep: int = 9
    wrap: bool = False


class Level(Enum):
    """How soon a table is read: what the first screen shows of it."""

    ANSWER = "its words, as answers"
    TABLE = "its rows, as many as there is room for"
    DETAIL = "nothing: a document shows it in full, and a terminal by --full"


@dataclass(frozen=True)
class Table:
    """Rows under heads, a title above and, below, what must never part from the numbers. ``words``
    are sentences between the title and the rows, which the rows bear out. ``groups`` are the rows
    before which one is set off, by what is said there of those that follow; nothing, where a line
    is enough. ``question`` is what it answers, as a reader would ask; ``left`` counts the rows that
    it is without, which a note says."""

    name: str
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    groups: Mapping[int, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    level: Level = Level.DETAIL
    question: str = ""
    left: int = 0

    def take(self, columns: Iterable[int]) -> Table:
        """The same table with these of its columns."""
        kept = list(columns)
        return replace(
            self,
            heads=tuple(self.heads[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
        )

    def drop_empty(
        self, empty: Collection[str] = ("", NOTHING), but: Collection[str] = ()
    ) -> Table:
        """The same table without the columns of which no cell says more than ``empty``, ``but``
        for those of some names."""
        return self.take(
            i
            for i, head in enumerate(self.heads)
            if head.name in but or any(row[i].text not in empty for row in self.rows)
        )


@dataclass(frozen=True)
class Answer:
    """A few sentences on one machine, what matters most first."""

    about: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Notice:
    """Something to know before believing the numbers."""

    label: str
    found: str  # as sentences
    remedy: str = ""  # a sentence with the flag or the command that helps; empty for none
    where: str = ""  # in how much of what was measured: ``6 of 18 runs``; empty for no such thing
    good: bool = False  # to know, but nothing to worry about
    level: Level = Level.TABLE  # `Level.DETAIL` where a first screen says it otherwise

    @property
    def text(self) -> str:
        """All of it but the label."""
        return " ".join(filter(None, (self.where and f"{self.where}.", self.found, self.remedy)))

    @property
    def line(self) -> str:
        """The label, and all of it."""
        return f"{self.label}: {self.text}"


@dataclass(frozen=True)
class NextStep:
    """What to do next: a reason, and the command line that does it."""

    why: str
    command: str


class Document(Protocol):
    """What stands in a document, in the order in which it is read; each part may be made late."""

    @property
    def title(self) -> str: ...
    @property
    def subject(self) -> str: ...  # what was measured, in one line
    @property
    def constants(self) -> Sequence[str]: ...  # what is the same in every case, as sentences
    @property
    def origin(self) -> Sequence[str]: ...  # what is said first where nothing was measured
    @property
    def answers(self) -> Sequence[Answer]: ...
    @property
    def next_step(self) -> NextStep | None: ...  # the one that would help most, if one is known
    @property
    def warnings(self) -> Sequence[Notice]: ...  # those that are not good, most serious first
    @property
    def opening(self) -> Sequence[Table]: ...  # those that a first screen shows something of
    @property
    def tables(self) -> Sequence[Table]: ...  # all of them, these too
    @property
    def notes(self) -> Sequence[str]: ...  # what must never part from the numbers of the tables
    @property
    def outcomes(self) -> str: ...  # how many cases and runs there are, and how they ended
