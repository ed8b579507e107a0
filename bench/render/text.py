"""The report on a terminal, by rich."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.render.model import Document, Table
from bench.text import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 100
"""Columns where there is no terminal to ask and COLUMNS is not set; tables may need more."""

WRAPPED = 12
"""Columns that a column of remarks or names gets at least, before others are left out for it."""

LONGEST = 16
"""Characters of a word in such a column that is not broken."""

_GAP = 2


def render(report: Document) -> str:
    """The report as plain text, as wide as COLUMNS says, or else as its tables need."""
    from rich.console import Console

    buffer = io.StringIO()
    asked = os.environ.get("COLUMNS", "")
    whole = max([WIDTH, *map(_need_whole, report.tables)])
    width = max(int(asked), 40) if asked.isdecimal() and int(asked) else whole
    draw(report, Console(file=buffer, width=width, color_system=None, force_terminal=False))
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def draw(report: Document, console: Console) -> None:
    """Print the report on a console of rich's, as wide and as colourful as that is."""

    def say(text: str, style: str = "") -> None:
        console.print(style_text(text, style))

    say(report.title, "bold")
    for sentence in report.constants:
        say(sentence)
    if report.answers:
        console.print()
    for answer in report.answers:
        if len(report.answers) > 1:
            say(answer.about, "bold")
        for sentence in answer.sentences:
            say(sentence)
    for warning in report.warnings:
        say(f"! {warning.label}: {warning.text}", "yellow")
    for table in report.tables:
        console.print()
        draw_table(table, console)
    console.print()
    for note in report.notes:
        say(note, "dim")
    say(report.outcomes)


def draw_table(table: Table, console: Console) -> None:
    """Print a table: its title, the columns there is room for, its notes, and what is left out."""
    from rich.padding import Padding

    shown = fit(table, console.width)
    console.print(style_text(table.title, "bold"))
    if table.words:
        console.print(style_text(" ".join(table.words)))
        console.print()
    for line in _draw_lines(shown, console) if shown.heads else ():
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    left = [head.label for head in table.heads if head not in shown.heads]
    more = [f"Not shown at this width: {', '.join(left)}."] if left else []
    for note in (*table.notes, *more):
        console.print(Padding(style_text(note, "dim"), (0, 0, 0, 2)))


def fit(table: Table, room: int) -> Table:
    """Leave out the columns that a page of ``room`` characters is too narrow for.

    Those that ``keep`` least go first; of two that keep alike, the one further right.
    """
    while _need_whole(table) > room:
        places = range(len(table.heads))
        least = min(places, key=lambda i: (table.heads[i].keep, -i))
        if table.heads[least].keep == 9:
            break
        table = table.take(i for i in places if i != least)
    return table


def _need_whole(table: Table) -> int:
    return sum(_need(table)) + _gaps(table)


def _gaps(table: Table) -> int:
    return _GAP * (len(table.heads) + 1)


def _need(table: Table) -> list[int]:
    """Characters each column needs: its cells, broken between words where it may wrap."""
    from rich.cells import cell_len

    widths = []
    for i, head in enumerate(table.heads):
        words = max(map(cell_len, head.label.split()), default=0)
        cells = max((cell_len(row[i].text) for row in table.rows), default=0)
        if head.wrap:
            longest = (cell_len(word) for row in table.rows for word in row[i].text.split())
            kept = max((length for length in longest if length <= LONGEST), default=0)
            cells = min(cells, max(WRAPPED, kept))
        widths.append(max(words, cells))
    return widths


def _widths(table: Table, room: int) -> list[int]:
    """Widths that fill no more than the room: what is left goes to cells that wrap, then heads."""
    from rich.cells import cell_len

    widths = _need(table)
    left = room - sum(widths) - _gaps(table)
    for wrapping in (True, False):
        for i, head in enumerate(table.heads):
            cells = max((cell_len(row[i].text) for row in table.rows), default=0)
            wanted = max(cells, cell_len(head.label) if not wrapping else 0)
            more = min(max(left, 0), max(wanted - widths[i], 0)) if head.wrap or not wrapping else 0
            widths[i] += more
            left -= more
    return widths


def _draw_lines(table: Table, console: Console) -> Iterator[Text]:
    """The lines of a table; what groups have in common stands above them, over all columns."""
    from rich.text import Text

    widths = _widths(table, console.width)
    if _need_whole(table) > console.width:  # it is wider than the page all the same
        widths = [max(width, 1) for width in _shrink(widths, console.width - _gaps(table))]
    heads = [head.label for head in table.heads]
    yield from _draw_row(heads, table, widths, console, upwards=True)
    yield Text(" " + "─" * (sum(widths) + _GAP * (len(widths) - 1)))
    for number, row in enumerate(table.rows):
        if number in table.groups:
            if number:
                yield style_text("")
            if heading := table.groups[number]:
                yield Text(" ").append_text(style_text(heading, "bold"))
        yield from _draw_row([cell.text for cell in row], table, widths, console)


def _shrink(widths: list[int], room: int) -> list[int]:
    """Take from the widest until all fit."""
    widths = list(widths)
    while sum(widths) > max(room, len(widths)):
        widths[widths.index(max(widths))] -= 1
    return widths


_JOINED = "\ue000%"
"""Stands for `` %`` while lines are broken: rich breaks them at spaces of every kind."""


def _draw_row(
    cells: list[str], table: Table, widths: list[int], console: Console, upwards: bool = False
) -> Iterator[Text]:
    """Cells beside each other, each broken into lines of its width; heads end at the bottom."""
    from rich.text import Text

    broken = [
        list(Text(_printable(cell).replace(" %", _JOINED)).wrap(console, width, overflow="fold"))
        for cell, width in zip(cells, widths, strict=True)
    ]
    height = max(map(len, broken))
    for at in range(height):
        line = Text(" ")
        for lines, width, head in zip(broken, widths, table.heads, strict=True):
            place = at - (height - len(lines) if upwards else 0)
            piece = lines[place].copy() if 0 <= place < len(lines) else Text("")
            piece.rstrip()
            piece.plain = piece.plain.replace(_JOINED, " %")
            piece.align("right" if head.number else "left", width)
            line.append_text(piece).append(" " * _GAP)
        line.rstrip()
        yield line


def style_text(text: str, style: str = "") -> Text:
    """Text that rich prints as it stands: no markup in it is obeyed, no control code passed on."""
    from rich.text import Text

    return Text(_printable(text), style=style)


def _printable(text: str) -> str:
    # C1 controls and bidirectional overrides act on a terminal too
    return "".join(c for c in clean(text) if c.isprintable())
