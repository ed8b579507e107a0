"""Documents of parts that are given."""

from __future__ import annotations

from dataclasses import dataclass

from bench.render.model import Answer, Level, NextStep, Notice, Table


@dataclass(frozen=True)
class Made:
    """A document of parts that are given."""

    title: str
    subject: str
    constants: tuple[str, ...]
    origin: tuple[str, ...]
    answers: tuple[Answer, ...]
    warnings: tuple[Notice, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    outcomes: str
    next_step: NextStep | None

    @property
    def opening(self) -> tuple[Table, ...]:
        return tuple(table for table in self.tables if table.level is not Level.DETAIL)
