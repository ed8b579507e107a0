"""The report as GitHub-flavoured Markdown, to paste."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from bench.render.model import Document, Level, Table
from bench.text import clean

_SPECIAL = re.compile(r"([\\`*_\[\]~|#$@!])")


def render(report: Document) -> str:
    """Return the report as Markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Document) -> Iterator[str]:
    yield f"# {escape(report.title)}\n"
    for sentence in report.constants:
        yield f"- {escape(sentence)}"
    yield ""
    for answer in report.answers:
        about = f"**{escape(answer.about)}.** " if len(report.answers) > 1 else ""
        yield f"{about}{escape(' '.join(answer.sentences))}\n"
    if step := report.next_step:
        yield f"Next: {escape(step.why)}.\n"
        if step.command:
            yield f"```sh\n{clean(step.command)}\n```\n"
    for table in report.tables:
        if table.level is not Level.DETAIL:
            yield from table_lines(table)
    for warning in report.warnings:
        yield f"> **{escape(warning.label)}**: {escape(warning.text)}\n"
    for table in report.tables:
        if table.level is Level.DETAIL:
            yield from table_lines(table)
    for note in (*report.notes, report.outcomes):
        yield f"- {escape(note)}"


def table_lines(table: Table) -> Iterator[str]:
    """Yield the lines of a table, with its title above and its notes below."""
    yield f"### {escape(table.title)}\n"
    if table.words:
        yield f"{escape(' '.join(table.words))}\n"
    yield _row(head.label for head in table.heads)
    yield "|" + "|".join("---:" if head.number else ":---" for head in table.heads) + "|"
    for number, row in enumerate(table.rows):
        if heading := table.groups.get(number):
            yield f"| **{escape(heading)}** |" + " |" * (len(table.heads) - 1)
        yield _row(cell.text for cell in row)
    yield ""
    for note in table.notes:
        yield f"- {escape(note)}"
    yield ""


def _row(cells: Iterator[str]) -> str:
    return "| " + " | ".join(map(escape, cells)) + " |"


def escape(text: str) -> str:
    """Escape a text for Markdown, on one line, also within a table's cell.

    >>> escape("a|b `c` <d>")
    'a\\\\|b \\\\`c\\\\` &lt;d&gt;'
    """
    return _SPECIAL.sub(r"\\\1", html.escape(clean(text), quote=False))
