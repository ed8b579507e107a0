"""The report's tables as LaTeX, for a document that uses booktabs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bench.render.model import Document, Table
from bench.text import clean

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


def render(report: Document) -> str:
    """The report's tables, its answers and warnings above them as comments."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Document) -> Iterator[str]:
    yield r"% \usepackage{booktabs}"
    for sentence in report.constants:
        yield f"% {clean(sentence)}"
    for answer in report.answers:
        yield f"% {clean(answer.about)}: {clean(' '.join(answer.sentences))}"
    for warning in report.warnings:
        yield f"% {clean(warning.label)}: {clean(warning.text)}"
    for table in report.tables:
        yield ""
        yield from _table_lines(table)
    yield ""
    for note in (*report.notes, report.outcomes):
        yield rf"\par\footnotesize {escape(note)}"


def _table_lines(table: Table) -> Iterator[str]:
    if table.words:
        yield escape(" ".join(table.words))
        yield ""
    yield r"\begin{table}"
    yield r"\centering"
    yield rf"\caption{{{escape(table.title)}}}"
    yield rf"\begin{{tabular}}{{{''.join('r' if head.number else 'l' for head in table.heads)}}}"
    yield r"\toprule"
    yield _row(head.label for head in table.heads)
    yield r"\midrule"
    for number, row in enumerate(table.rows):
        if number in table.groups:
            if number:
                yield r"\midrule"
            if heading := table.groups[number]:
                width = len(table.heads)
                yield rf"\multicolumn{{{width}}}{{l}}{{\textbf{{{escape(heading)}}}}} \\"
        yield _row(cell.text for cell in row)
    yield r"\bottomrule"
    yield r"\end{tabular}"
    for note in table.notes:
        yield rf"\par\footnotesize {escape(note)}"
    yield r"\end{table}"


def _row(cells: Iterable[str]) -> str:
    return " & ".join(map(escape, cells)) + r" \\"


def escape(text: str) -> str:
    r"""Make any text stand as itself in LaTeX, on one line.

    >>> escape("50 % of a_b")
    '50 \\% of a\\_b'
    """
    return "".join(_SPELLED.get(c, c) for c in clean(text))
