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
    """Return the report's tables, with its answers and warnings as comments above them."""
    answers = (f"{clean(a.about)}: {clean(' '.join(a.sentences))}" for a in report.answers)
    warnings = (f"{clean(w.label)}: {clean(w.text)}" for w in report.warnings)
    lines = [r"% \usepackage{booktabs}"]
    lines += [f"% {said}" for said in (*map(clean, report.constants), *answers, *warnings)]
    for table in report.tables:
        lines += ["", *_table_lines(table)]
    lines += ["", *map(_note, (*report.notes, report.outcomes))]
    return "\n".join(lines) + "\n"


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
    yield from map(_note, table.notes)
    yield r"\end{table}"


def _note(text: str) -> str:
    return rf"\par\footnotesize {escape(text)}"


def _row(cells: Iterable[str]) -> str:
    return " & ".join(map(escape, cells)) + r" \\"


def escape(text: str) -> str:
    r"""Escape a text for LaTeX, on one line.

    >>> escape("50 % of a_b")
    '50 \\% of a\\_b'
    """
    return "".join(_SPELLED.get(c, c) for c in clean(text))
