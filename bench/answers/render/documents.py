"""A document as GitHub-flavoured Markdown, to paste; and its tables as LaTeX, for a document that
uses booktabs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from bench.answers.render.table import Document, Table
from bench.base.text import clean

_SPECIAL = re.compile(r"([\\`*_\[\]~|#$@!])")


def write_answers(report: Document) -> Iterator[str]:
    """Yield a paragraph of Markdown, with an empty line, for each answer; of several each says what
    it is about."""
    for answer in report.answers:
        about = f"**{escape(answer.about)}.** " if len(report.answers) > 1 else ""
        yield f"{about}{escape(' '.join(answer.sentences))}\n"


def render_markdown(report: Document) -> str:
    """Return the report as Markdown."""
    lines = [f"# {escape(report.title)}", "", *(f"- {escape(one)}" for one in report.constants), ""]
    lines += write_answers(report)
    if step := report.next_step:
        lines += [f"Next: {escape(step.why)}.", ""]
        lines += ["```sh", clean(step.command), "```", ""] if step.command else []
    for warning in report.warnings:
        lines += [f"> **{escape(warning.label)}**: {escape(warning.text)}", ""]
    for table in report.tables:
        lines += table_lines(table)
    lines += [f"- {escape(note)}" for note in (*report.notes, report.outcomes)]
    return "\n".join(lines) + "\n"


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
    yield from (f"- {escape(note)}" for note in table.notes)
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
    comments = [*report.constants, *(f"{a.about}: {' '.join(a.sentences)}" for a in report.answers)]
    comments += [warning.line for warning in report.warnings]
    lines = [r"% \usepackage{booktabs}", *(f"% {clean(sentence)}" for sentence in comments)]
    for table in report.tables:
        lines += ["", *_draw_latex(table)]
    lines += ["", *map(_write_note, (*report.notes, report.outcomes))]
    return "\n".join(lines) + "\n"


def _draw_latex(table: Table) -> Iterator[str]:
    yield r"\begin{table}\centering"
    yield rf"\caption{{{escape_latex(' '.join((table.title, *table.words)))}}}"
    yield rf"\begin{{tabular}}{{{''.join('r' if head.number else 'l' for head in table.heads)}}}"
    yield r"\toprule"
    rows = [[head.label for head in table.heads], *([c.text for c in row] for row in table.rows)]
    for number, row in enumerate(rows, -1):
        if number == 0 or number in table.groups:
            yield r"\midrule"
        if heading := table.groups.get(number):
            yield rf"\multicolumn{{{len(row)}}}{{l}}{{\textbf{{{escape_latex(heading)}}}}} \\"
        yield " & ".join(map(escape_latex, row)) + r" \\"
    yield r"\bottomrule\end{tabular}"
    yield from map(_write_note, table.notes)
    yield r"\end{table}"


def _write_note(text: str) -> str:
    return rf"\par\footnotesize {escape_latex(text)}"


def escape_latex(text: str) -> str:
    r"""Escape a text for LaTeX, on one line.

    >>> escape_latex("50 % of a_b")
    '50 \\% of a\\_b'
    """
    return "".join(_SPELLED.get(c, c) for c in clean(text))
