"""The report on a terminal, by rich."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from bench.report.model import Report, Table
from bench.text import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 120
"""Columns where there is no terminal to ask."""

_GAP = 2


def render(report: Report) -> str:
    """The report as plain text, as wide as its tables need."""
    from rich.console import Console

    buffer = io.StringIO()
    width = max([WIDTH, *map(_needed_width, report.tables)])
    draw(report, Console(file=buffer, width=width, color_system=None, force_terminal=False))
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def _column_widths(table: Table, room: float = 0) -> list[int]:
    """Columns each column needs: its cells unbroken, its head too where there is room for it."""
    from rich.cells import cell_len

    texts = zip(*([cell.text for cell in row] for row in table.rows), strict=True)
    cells = [max(map(cell_len, column)) for column in texts] or [0] * len(table.heads)
    widths = []
    for head, width in zip(table.heads, cells, strict=True):
        words = [cell_len(word) for word in head.label.split()]
        widths.append(max([width, *words]))
    room -= sum(widths) + _GAP * (len(widths) + 1)
    for i, head in enumerate(table.heads):
        more = min(max(room, 0), max(cell_len(head.label) - widths[i], 0))
        widths[i] += int(more)
        room -= more
    return widths


def _needed_width(table: Table) -> int:
    widths = _column_widths(table)
    return sum(widths) + _GAP * (len(widths) + 1)


def draw(report: Report, console: Console) -> None:
    """Print the report on a console of rich's, as wide and as colourful as that is."""

    from rich.padding import Padding

    def say(text: str, style: str = "") -> None:
        console.print(_text(text, style))

    say(report.title, "bold")
    for answer in report.answers:
        if len(report.answers) > 1:
            say(answer.about, "bold")
        for sentence in answer.sentences:
            say(sentence)
    for warning in report.warnings:
        say(f"! {warning.label}: {warning.text}", "yellow")
    for table in report.tables:
        console.print()
        say(table.title, "bold")
        console.print(_draw_table(table, console.width))
        for note in table.notes:
            console.print(Padding(_text(note, "dim"), (0, 0, 0, 2)))
    if report.left_out:
        console.print()
        say(report.left_out)


def _draw_table(table: Table, room: int) -> object:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    fits = _needed_width(table) <= room
    for head, width in zip(table.heads, _column_widths(table, room), strict=True):
        grid.add_column(
            _text(head.label),
            justify="right" if head.number else "left",
            overflow="fold",
            width=width if fits else None,
        )
    for row in table.rows:
        grid.add_row(*(_text(cell.text) for cell in row))
    return grid


def _text(text: str, style: str = "") -> Text:
    """Text that rich prints as it stands: no markup in it is obeyed, no control code passed on."""
    from rich.text import Text

    return Text(_printable(text), style=style)


def _printable(text: str) -> str:
    # C1 controls and bidirectional overrides act on a terminal too
    return "".join(c for c in clean(text) if c.isprintable())
