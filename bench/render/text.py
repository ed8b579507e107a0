"""The report on a terminal, drawn by rich."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from bench.render.table import Document, Level, Notice, Table
from bench.text import make_printable

WIDTH = 100
"""Columns if there is no terminal to ask and COLUMNS is not set; tables may need more."""

WRAPPED = 12
"""The least width of a column that wraps, such as remarks, before others are left out for it."""

LONGEST = 16  # characters of the longest word that such a column does not break

_GAP = 2
_INDENT = "  "


DOUBTS = 3  # on a first screen, a line each
MORE = "--full"  # the flag that shows what a first screen leaves out


def render(report: Document, full: bool = False) -> str:
    """Return the first screen, or the ``full`` report, as plain text. It is as wide as COLUMNS
    says, a first screen at most `WIDTH`; by default a full report is as wide as its tables need."""
    asked = os.environ.get("COLUMNS", "")
    whole = max([WIDTH, *map(_need_whole, report.tables)]) if full else WIDTH
    width = max(int(asked), 40) if asked.isdecimal() and int(asked) else whole
    console = make_plain(width)
    draw(report, console, full)
    return read_plain(console)


def open_console(width: int = WIDTH) -> Console:
    """Return the console of standard output, as wide as its terminal or COLUMNS, else ``width``."""
    console = Console(highlight=False)
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console.width = width
    return console


def make_plain(width: int) -> Console:
    """Return a console of ``width`` columns that keeps what is printed: no terminal, no colours."""
    return Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)


def read_plain(console: Console) -> str:
    """Return what was printed on a console of `make_plain`, without spaces at the ends of lines."""
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def draw(report: Document, console: Console, full: bool = False) -> None:
    """Print the first screen, or the ``full`` report, on a console of rich's. A first screen has
    the answer, the tables of `Level.TABLE` without notes, and three doubts."""

    def say(text: str, style: str = "") -> None:
        draw_text(text, console, style)

    say(report.title if full else report.subject, "bold")
    for sentence in report.constants if full else report.origin:
        say(sentence)
    answers = list(report.answers)
    if answers:
        console.print()
    for answer in answers:
        told = [said for said in answer.sentences if full or said not in report.origin]
        if len(answers) > 1 and told:
            say(answer.about, "bold")
        for sentence in told:
            say(sentence)
    for table in () if full else report.opening:
        if table.level is Level.ANSWER and table.words:
            say(" ".join(table.words))
    if report.next_step:
        console.print()
        say(f"Next: {report.next_step.why}.")
        for words in _break_command(report.next_step.command, console.width):
            for part in _break_path(words, console.width):
                console.print(part, markup=False, highlight=False, soft_wrap=True)
    if full:
        for warning in report.warnings:
            say(f"! {warning.line}", "yellow")
    for table in report.tables if full else report.opening:
        if full or table.level is Level.TABLE:
            console.print()
            draw_table(table if full else replace(table, words=()), console)
    console.print()
    if full:
        for note in report.notes:
            say(note, "dim")
        say(report.outcomes)
        return
    for notices in group_doubts(report.warnings)[:DOUBTS]:
        say(join_doubts(notices), "yellow")
    say(f"{report.outcomes} {MORE} shows all warnings, tables and notes.")


def _break_command(command: str, width: int) -> list[str]:
    """Break a command between its words, so that it can be pasted."""
    words = [shlex.quote(word) for word in shlex.split(make_printable(command))]
    if not words:
        return []
    lines = [_INDENT + words[0]]
    for word, after in zip_longest(words[1:], words[2:], fillvalue="--"):
        # a flag stays with its first value
        held = word if after.startswith("--") else f"{word} {after}"
        if cell_len(f"{lines[-1]} {held if word.startswith('--') else word} \\") > width:
            lines[-1] += " \\"
            lines.append(f"{2 * _INDENT}{word}")
        else:
            lines[-1] += f" {word}"
    return lines


def _break_path(line: str, width: int) -> Iterator[str]:
    """Break a line of a command after slashes, if it is too wide: the shell joins the parts."""
    while cell_len(line) > width and not {"'", '"'} & set(line):
        end = line.rfind("/", 0, width - 1) + 1
        if not line[:end].strip():
            break
        yield f"{line[:end]}\\"
        line = line[end:]
    yield line


def group_doubts(notices: Sequence[Notice]) -> list[list[Notice]]:
    """Group the doubts of a first screen by their remedy, each label once even if several sweeps
    have the doubt."""
    groups: dict[str, dict[tuple[str, str], Notice]] = {}
    for notice in notices:
        if notice.level is Level.TABLE:
            group = groups.setdefault(notice.remedy or notice.found, {})
            group.setdefault((notice.label, notice.where), notice)
    return [list(group.values()) for group in groups.values()]


def join_doubts(notices: Sequence[Notice]) -> str:
    """Join doubts: ``! Noisy (6 of 18 runs), spread: close other programs``."""
    first, *others = [notice.label for notice in notices]
    labels = [first, *(label[0].lower() + label[1:] for label in others)]
    exact = [
        f"{label} ({notice.where})" if notice.where else label
        for label, notice in zip(labels, notices, strict=True)
    ]
    remedy = notices[0].remedy or notices[0].found
    if remedy[1:2].islower():  # not a name or command
        remedy = remedy[0].lower() + remedy[1:]
    return f"! {', '.join(exact)}: {remedy}"


# -------------------------------------------------------------------------------------- one table


def draw_table(table: Table, console: Console, brief: bool = False) -> None:
    """Print a table: its title, the columns that fit, its notes unless ``brief``, and which columns
    are left out."""
    shown = fit(table, console.width)
    draw_text(table.title, console, "bold")
    if table.words:
        draw_text(" ".join(table.words), console)
        console.print()
    for block in _draw_blocks(shown, console.width, console):
        for line in block:
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    for note in (*(() if brief else table.notes), *_name_missing(table, shown)):
        draw_text(note, console, "dim", _INDENT)


def _name_missing(table: Table, shown: Table) -> list[str]:
    left = [head.label for head in table.heads if head not in shown.heads]
    return [f"Not shown at this width: {', '.join(left)}."] if left else []


def fit(table: Table, room: int) -> Table:
    """Leave out columns until the table fits a page of ``room`` characters, those with the lowest
    ``keep`` first; among equals, the one further right."""
    while _need_whole(table) > room:
        places = range(len(table.heads))
        least = min(places, key=lambda i: (table.heads[i].keep, -i))
        if table.heads[least].keep == 9:
            break
        table = table.take(i for i in places if i != least)
    return table


def _need_whole(table: Table) -> int:
    return sum(_widths(table)) + _gaps(table)


def _gaps(table: Table) -> int:
    return _GAP * (len(table.heads) + 1)


def _widths(table: Table, room: int = 0) -> list[int]:
    """Return the width of each column in characters: what its cells need, broken between words if
    it may wrap. The rest of ``room`` goes to columns that wrap, then to heads."""
    widths, whole = [], []
    for i, head in enumerate(table.heads):
        words = max(map(cell_len, head.label.split()), default=0)
        cells = max((cell_len(row[i].text) for row in table.rows), default=0)
        whole.append(cells)
        if head.wrap:
            longest = (cell_len(word) for row in table.rows for word in row[i].text.split())
            kept = max((length for length in longest if length <= LONGEST), default=0)
            cells = min(cells, max(WRAPPED, kept))
        widths.append(max(words, cells))
    left = room - sum(widths) - _gaps(table)
    for wrapping in (True, False):
        for i, head in enumerate(table.heads):
            wanted = max(whole[i], cell_len(head.label) if not wrapping else 0)
            more = min(max(left, 0), max(wanted - widths[i], 0)) if head.wrap or not wrapping else 0
            widths[i] += more
            left -= more
    return widths


def _draw_blocks(table: Table, width: int, console: Console) -> Iterator[list[Text]]:
    """Yield the lines of the heads, then of each row, after the heading of its group if it is the
    first. No line is wider than ``width``, unless the table has more columns than that."""
    if not table.heads:
        return
    widths = _widths(table, width)
    room = max(width - _gaps(table), len(widths))
    while sum(widths) > room:  # still too wide
        widths[widths.index(max(widths))] -= 1
    heads = [head.label for head in table.heads]
    rule = Text((" " + "─" * (sum(widths) + _GAP * (len(widths) - 1))).rstrip())
    yield [*_draw_row(heads, table, widths, console, upwards=True), rule]
    for number, row in enumerate(table.rows):
        block = []
        if number in table.groups:
            if number:
                block.append(style_text(""))
            if heading := table.groups[number]:
                lines = _break(heading, max(width - _GAP, WRAPPED), console)
                block += [Text(" ").append(line.plain, "bold") for line in lines]
        yield [*block, *_draw_row([cell.text for cell in row], table, widths, console)]


_JOINED = "\ue000%"
"""Replaces `` %`` while lines are broken: rich breaks them at spaces of every kind."""


def _break(text: str, width: int, console: Console) -> list[Text]:
    """Break a text into lines between its words, but not before a per cent sign."""
    joined = Text(make_printable(text).replace(" %", _JOINED))
    lines = list(joined.wrap(console, width, overflow="fold"))
    for line in lines:
        line.rstrip()
        line.plain = line.plain.replace(_JOINED, " %")
    return lines


def _draw_row(
    cells: list[str], table: Table, widths: list[int], console: Console, upwards: bool = False
) -> Iterator[Text]:
    """Yield the lines of a row of cells, each broken to its width; ``upwards`` aligns the ends."""
    broken = [_break(cell, width, console) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, broken))
    for at in range(height):
        line = Text(" ")
        for lines, width, head in zip(broken, widths, table.heads, strict=True):
            place = at - (height - len(lines) if upwards else 0)
            piece = lines[place].copy() if 0 <= place < len(lines) else Text("")
            piece.align("right" if head.number else "left", width)
            line.append_text(piece).append(" " * _GAP)
        line.rstrip()
        yield line


def draw_text(text: str, console: Console, style: str = "", indent: str = "") -> None:
    """Print a text literally, broken between words, without the blanks that rich leaves at the ends
    of lines."""
    for line in _break(text, max(console.width - len(indent), WRAPPED), console):
        said = Text(indent).append(line.plain, style)
        console.print(said, no_wrap=True, overflow="ignore", crop=False)


def style_text(text: str, style: str = "") -> Text:
    """Return text that rich prints literally: markup is not obeyed, control codes not passed on."""
    return Text(make_printable(text), style=style)
