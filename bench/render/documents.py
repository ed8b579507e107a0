"""A document as GitHub-flavoured Markdown, to paste; and its tables as LaTeX, for a document that
uses booktabs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from bench.render.table import Document, Level, Table
from bench.text import clean

_SPECIAL = re.compile(r"([\\`*_\[\]~|#$@!])")


def render_markdown(report: Document) -> str:
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


_SPELLED = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after \\ it would open an optional argument
    "]": "{]}",
    "≈": r"$\approx$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "–": "--",
    "°": r"$^\circ$",
    "→": r"$\rightarrow$",
}


def render_latex(report: Document) -> str:
    """Return the report's tables, with its answers and warnings as comments above them."""
    answers = (f"{clean(a.about)}: {clean(' '.join(a.sentences))}" for a in report.answers)
    warnings = (f"{clean(w.label)}: {clean(w.text)}" for w in report.warnings)
    lines = [r"% \usepackage{booktabs}"]
    lines += [f"% {said}" for said in (*map(clean, report.constants), *answers, *warnings)]
    for table in report.tables:
        lines += ["", *_table_lines(table)]
    lines += ["", *map(_latex_note, (*report.notes, report.outcomes))]
    return "\n".join(lines) + "\n"


def _table_lines(table: Table) -> Iterator[str]:
    if table.words:
        yield escape_latex(" ".join(table.words))
        yield ""
    yield r"\begin{table}"
    yield r"\centering"
    yield rf"\caption{{{escape_latex(table.title)}}}"
    yield rf"\begin{{tabular}}{{{''.join('r' if head.number else 'l' for head in table.heads)}}}"
    yield r"\toprule"
    yield _latex_row(head.label for head in table.heads)
    yield r"\midrule"
    for number, row in enumerate(table.rows):
        if number in table.groups:
            if number:
                yield r"\midrule"
            if heading := table.groups[number]:
                width = len(table.heads)
                yield rf"\multicolumn{{{width}}}{{l}}{{\textbf{{{escape_latex(heading)}}}}} \\"
        yield _latex_row(cell.text for cell in row)
    yield r"\bottomrule"
    yield r"\end{tabular}"
    yield from map(_latex_note, table.notes)
    yield r"\end{table}"


def _latex_note(text: str) -> str:
    return rf"\par\footnotesize {escape_latex(text)}"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def escape_latex(text: str) -> str:
    r"""Escape a text for LaTeX, on one line.

    >>> escape_latex("50 % of a_b")
    '50 \\% of a\\_b'
    """
    return "".join(_SPELLED.get(c, c) for c in clean(text))
