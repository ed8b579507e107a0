"""The report on a terminal, drawn by rich."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.text import Text

from bench.answers.render.table import Document, Head, Level, Notice, Table
from bench.base.text import make_printable

WIDTH = 100
"""Columns if there is no terminal to ask and COLUMNS is not set; tables may need more."""

WRAPPED = 12
"""The least width of a column that wraps, such as remarks, before others are left out for it."""

DOUBTS = 3  # on a first screen, a line each
MORE = "--full"  # the flag that shows what a first screen leaves out

_GAP = "  "


def render(report: Document, full: bool = False) -> str:
    """Return the first screen, or the ``full`` report, as plain text. It is as wide as COLUMNS
    says, a first screen at most `WIDTH`; by default a full report is as wide as its tables need."""
    asked = os.environ.get("COLUMNS", "")
    width = max([WIDTH, *map(_need_whole, report.tables)]) if full else WIDTH
    console = make_plain(max(int(asked), 40) if asked.isdecimal() and int(asked) else width)
    draw(report, console, full)
    return console.export_text()


def show(report: Document, full: bool = False) -> None:
    """Print the first screen, or the ``full`` report, on standard output."""
    if sys.stdout.isatty():
        draw(report, Console(), full)
    else:
        sys.stdout.write(render(report, full))


def open_console(width: int = WIDTH) -> Console:
    """Return the console of standard output, as wide as its terminal or COLUMNS, else ``width``."""
    console = Console(highlight=False)
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console.width = width
    return console


def make_plain(width: int) -> Console:
    """Return a console of ``width`` columns whose ``export_text`` is what is printed on it."""
    return Console(file=io.StringIO(), width=width, record=True)


def draw(report: Document, console: Console, full: bool = False) -> None:
    """Print the first screen, or the ``full`` report, on a console of rich's. A first screen has
    the answer, the tables of `Level.TABLE`, and three doubts."""
    say = partial(draw_text, console=console)
    say(report.title if full else report.subject, style="bold")
    for sentence in report.constants if full else ():
        say(sentence)
    console.print()
    for answer in report.answers:
        if len(report.answers) > 1:
            say(answer.about, style="bold")
        for sentence in answer.sentences:
            say(sentence)
    if step := report.next_step:
        console.print()
        say(f"Next: {step.why}.")
        if step.command:  # whole, so that it can be pasted
            console.print(Text(f"{_GAP}{make_printable(step.command)}"), soft_wrap=True)
    for warning in report.warnings if full else ():
        say(f"! {warning.line}", style="yellow")
    for table in report.tables if full else report.opening:
        if full or table.level is Level.TABLE:
            console.print()
            draw_table(table, console)
    console.print()
    for note in report.notes if full else ():
        say(note, style="dim")
    for line in () if full else list_doubts(report.warnings):
        say(f"! {line}", style="yellow")
    say(report.outcomes + f" {MORE} shows all warnings, tables and notes." * (not full))


def list_doubts(notices: Sequence[Notice]) -> list[str]:
    """Return the doubts of a first screen, those of one remedy together: ``Noisy (6 of 18 runs),
    Spread: Close other programs.``"""
    groups: dict[str, list[str]] = {}
    for notice in notices:
        if notice.level is Level.TABLE:
            where = f" ({notice.where})" if notice.where else ""
            groups.setdefault(notice.remedy or notice.found, []).append(notice.label + where)
    said = (f"{', '.join(dict.fromkeys(labels))}: {end}" for end, labels in groups.items())
    return [*said][:DOUBTS]


def draw_table(table: Table, console: Console, brief: bool = False) -> None:
    """Print a table: its title, the columns that fit, its notes unless ``brief``, and which columns
    are left out: those with the lowest `Head.keep`, of equals the one further right."""
    shown = table
    while _need_whole(shown) > console.width and min(head.keep for head in shown.heads) < 9:
        least = min(reversed(shown.heads), key=lambda head: head.keep)
        kept = [i for i, head in enumerate(shown.heads) if head is not least]
        heads = tuple(shown.heads[i] for i in kept)
        rows = tuple(tuple(row[i] for i in kept) for row in shown.rows)
        shown = replace(shown, heads=heads, rows=rows)
    draw_text(table.title, console, "bold")
    if table.words:
        draw_text(" ".join(table.words), console)
        console.print()
    lines = (Text(line, style) for line, style in _draw_lines(shown, console.width))
    console.print(Text("\n").join(lines), no_wrap=True)
    left = [head.label for head in table.heads if head not in shown.heads]
    missing = [f"Not shown at this width: {', '.join(left)}."] if left else []
    for note in [*(() if brief else table.notes), *missing]:
        draw_text(note, console, "dim", _GAP)


def _need_whole(table: Table) -> int:
    return sum(_find_widths(table, 0)) + len(_GAP) * len(table.heads)


def _find_widths(table: Table, room: int) -> list[int]:
    """Return the width of each column in characters: what its cells need. The rest of ``room`` goes
    to columns that wrap, then to heads. The widest shrinks where there is less."""
    cells = [[len(row[i].text) for row in table.rows] for i in range(len(table.heads))]
    needed = [max(lengths, default=0) for lengths in cells]
    widths = [
        max(1, min(need, WRAPPED) if head.wrap else need, *map(len, head.label.split()))
        for head, need in zip(table.heads, needed, strict=True)
    ]
    room -= len(_GAP) * len(widths)
    wrapping = [need * head.wrap for head, need in zip(table.heads, needed, strict=True)]
    for wanted in (wrapping, [len(head.label) for head in table.heads]):
        for i, want in enumerate(wanted):
            widths[i] += max(0, min(want - widths[i], room - sum(widths)))
    while len(widths) < room < sum(widths):
        widths[widths.index(max(widths))] -= 1
    return widths


def _draw_lines(table: Table, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of the heads, then of each row, after the heading of its group if it is the
    first, with their styles."""
    widths = _find_widths(table, width)
    labels = [head.label for head in table.heads]
    yield from ((line, "") for line in _lay_out(labels, table.heads, widths, upwards=True))
    yield " " + "─" * (sum(widths) + len(_GAP) * (len(widths) - 1)), ""
    for number, row in enumerate(table.rows):
        if number in table.groups:
            if number:
                yield "", ""
            yield from ((f" {line}", "bold") for line in _break(table.groups[number], width - 1))
        cells = [cell.text for cell in row]
        yield from ((line, "") for line in _lay_out(cells, table.heads, widths))


def _lay_out(
    cells: Sequence[str], heads: Sequence[Head], widths: Sequence[int], upwards: bool = False
) -> Iterator[str]:
    """Yield the lines of a row, each cell broken to its width; ``upwards`` aligns the ends."""
    broken = [_break(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, broken), default=0)
    for at in range(height):
        line = " "
        for lines, head, width in zip(broken, heads, widths, strict=True):
            place = at - (height - len(lines)) * upwards
            text = lines[place] if 0 <= place < len(lines) else ""
            line += (text.rjust(width) if head.number else text.ljust(width)) + _GAP
        yield line.rstrip()


def _break(text: str, width: int) -> list[str]:
    """Break a text into lines between its words, but not before a per cent sign."""
    kept = make_printable(text).replace(" %", "\xa0%")
    if 0 < len(kept) <= width:  # as most cells of a long table
        return [kept.replace("\xa0", " ")]
    lines = textwrap.wrap(kept, max(width, 1), break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def draw_text(text: str, console: Console, style: str = "", indent: str = "") -> None:
    """Print a text literally, broken between words."""
    for line in _break(text, console.width - len(indent)):
        console.print(Text(indent).append(line, style), no_wrap=True)
