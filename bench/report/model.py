"""What a report is made of, free of any format: cells, tables, sections, answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.notices import Notice

if TYPE_CHECKING:
    import pandas as pd

    from bench.report.sweeps import Sweep


MOST_SECTIONS = 8
"""Groups of tables in one report; more would not be read."""

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table: text for people, the number behind it for machines."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Head:
    """A column's head. Numbers stand to the right; ``better`` is lower, higher or empty."""

    name: str
    label: str
    help: str = ""
    number: bool = True
    better: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under heads, a title above and, below, what must never part from the numbers."""

    name: str
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Tables whose cases agree on all axes but precision, loss scale and batch size."""

    title: str
    cases: pd.DataFrame
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Answer:
    """Two sentences on one machine."""

    about: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All a renderer needs."""

    title: str
    sweeps: Sequence[Sweep]
    reference: Sweep | None
    records: pd.DataFrame
    cases: pd.DataFrame
    machines: dict[tuple[str, str], str]
    answers: tuple[Answer, ...]
    warnings: tuple[Notice, ...]
    sections: tuple[Section, ...]
    left_out: str
    environments: Table
    home: Path

    @property
    def tables(self) -> list[Table]:
        """The tables of all sections, in order."""
        return [table for section in self.sections for table in section.tables]
