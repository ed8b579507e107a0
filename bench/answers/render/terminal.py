"""The report on a terminal, drawn by rich."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from bench.answers.render.table import Document, Notice, Prominence, Table
from bench.base.text import make_printable

WIDTH = 100
"""Columns if there is no terminal to ask and COLUMNS is not set; tables may need more."""

WRAPPED = 14
"""The least width of a column that wraps, such as remarks, before others are left out for it."""

_MOST_WARNINGS = 3  # on a first screen, a line each
MORE = "--full"  # the flag that shows what a first screen leaves out

_GAP = "  "

_HEIGHTS = range(1, 7)  # lines of heads
_RULE = "─"
_RULED = Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")  # under heads and groups

_GLUE = "\ue000"  # as wide as a space, but of no line's end; nothing printable


def render(report: Document, full: bool = False) -> str:
    """Return the first screen, or the ``full`` report, as plain text. It is as wide as COLUMNS
    says, a first screen at most `WIDTH`; by default a full report is as wide as its tables need."""
    asked = os.environ.get("COLUMNS", "")
    width = max([WIDTH, *map(_need, report.tables)]) if full else WIDTH
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
    the answer, the tables of `Prominence.TABLE`, and three warnings."""
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
        if full or table.level is Prominence.TABLE:
            console.print()
            draw_table(table, console)
    console.print()
    for note in report.notes if full else ():
        say(note, style="dim")
    for line in () if full else list_warnings(report.warnings):
        say(f"! {line}", style="yellow")
    say(report.outcomes + f" {MORE} shows all warnings, tables and notes." * (not full))


def list_warnings(notices: Sequence[Notice]) -> list[str]:
    """Return the warnings of a first screen, those of one remedy together: ``Noisy (6 of 18 runs),
    Spread: Close other programs.``"""
    groups: dict[str, list[str]] = {}
    for notice in notices:
        if notice.level is Prominence.TABLE:
            where = f" ({notice.where})" if notice.where else ""
            groups.setdefault(notice.remedy or notice.found, []).append(notice.label + where)
    lines = (f"{', '.join(dict.fromkeys(labels))}: {end}" for end, labels in groups.items())
    return [*lines][:_MOST_WARNINGS]


def draw_table(table: Table, console: Console, brief: bool = False) -> None:
    """Print a table: its title, the columns that fit, its notes unless ``brief``, and which columns
    are left out: those with the lowest `Head.keep`, of equals the one further right."""
    shown = table
    while _need(shown) > console.width and min(head.keep for head in shown.heads) < 9:
        least = min(reversed(shown.heads), key=lambda head: head.keep)
        kept = [i for i, head in enumerate(shown.heads) if head is not least]
        heads = tuple(shown.heads[i] for i in kept)
        rows = tuple(tuple(row[i] for i in kept) for row in shown.rows)
        shown = replace(shown, heads=heads, rows=rows)
    draw_text(table.title, console, "bold")
    if table.words:
        draw_text(" ".join(table.words), console)
        console.print()
    headings = iter([shown.groups.get(0, ""), *(shown.groups[i] for i in shown.groups if i)])
    begun, options = False, console.options.update(width=console.width - 1)
    for parts in console.render_lines(_build(shown, console.width), options, pad=False):
        line = _unglue(Text.assemble(" ", *((part.text, part.style or "") for part in parts)))
        ruled = {*line.plain[1:]} == {_RULE}
        console.print(Text() if ruled and begun else line, no_wrap=True)
        if ruled:
            begun = True
            draw_text(next(headings), console, "bold", " ")
    left = [head.label for head in table.heads if head not in shown.heads]
    missing = [f"Not shown at this width: {', '.join(left)}."] if left else []
    for note in [*(() if brief else table.notes), *missing]:
        draw_text(note, console, "dim", _GAP)


def _build(table: Table, width: int) -> Grid:
    """Return what rich draws of the heads and the rows; a rule ends each group. Heads take as few
    lines as leave the cells whole or, where that takes more than three, broken. Only columns that
    wrap give way, as long as that is enough."""
    for height, whole in [*((h, True) for h in _HEIGHTS[:3]), *((h, False) for h in _HEIGHTS)]:
        if fits := _need(table, height, whole) <= width:
            break
    grid = Grid(box=_RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head, need in zip(table.heads, _measure(table, height, whole=True), strict=True):
        grid.add_column(
            Text(make_printable(head.label), no_wrap=False),
            justify="right" if head.number else "left",
            width=need if fits and not head.wrap else None,
            no_wrap=fits and not head.wrap,
            overflow="fold",
        )
    for number, row in enumerate(table.rows, 1):
        cells = (Text(_glue(cell.text), "bold" if cell.chosen else "") for cell in row)
        grid.add_row(*cells, end_section=number in table.groups)
    return grid


def _need(table: Table, height: int = _HEIGHTS[-1], whole: bool = False) -> int:
    """Return how wide a table is at least, with its margin; as `_measure`."""
    return sum(_measure(table, height, whole)) + len(_GAP) * len(table.heads) - 1


def _measure(table: Table, height: int, whole: bool) -> list[int]:
    """Return the width that each column needs under heads of about ``height`` lines. Cells of a
    column that wraps need no more than `WRAPPED`, unless they are to be ``whole``."""
    widths = []
    for i, head in enumerate(table.heads):
        need = max((cell_len(row[i].text) for row in table.rows), default=1)
        need = min(need, WRAPPED) if head.wrap and not whole else need
        words = map(cell_len, head.label.split())
        line = -(-len(head.label) // height) + (height > 1)  # as its words seldom divide evenly
        widths.append(max(need, *words, line, 1))
    return widths


def _glue(text: str) -> str:
    """Join a per cent sign to its number, so that no line ends between them."""
    return make_printable(text).replace(" %", f"{_GLUE}%")


def _unglue(line: Text) -> Text:
    line.plain = line.plain.replace(_GLUE, " ")
    line.rstrip()
    return line


def draw_text(text: str, console: Console, style: str = "", indent: str = "") -> None:
    """Print a text literally, broken between words."""
    lines = Text(_glue(text), style).wrap(console, console.width - len(indent))
    for line in lines if text else ():
        console.print(Text(indent) + _unglue(line), no_wrap=True)
