"""Explanations in text, Markdown and JSON: the tables of the report, for each pair."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass

from bench.diagnosis.explanation import Explanation
from bench.questions.reasons import tabulate_explained
from bench.render.markdown import escape, table_lines
from bench.report.jsonfile import lay_out


@dataclass(frozen=True)
class Answer:
    """The pairs explained, what they were measured on, and what is doubtful of it, in sentences."""

    explanations: Sequence[Explanation]
    conditions: Sequence[str]
    doubts: Sequence[str]


def render_text(answer: Answer, width: int) -> str:
    """Each pair for a terminal: its words, the reasons, the way from one step to the other."""
    from rich.console import Console

    from bench.render.text import draw_table

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False)
    for line in answer.conditions:
        console.print(line, markup=False, highlight=False)
    for table in tabulate_explained(answer.explanations):
        console.print()
        draw_table(table, console)
    if answer.doubts:
        console.print()
    for line in answer.doubts:
        console.print(line, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def render_markdown(answer: Answer, width: int = 0) -> str:
    """Each pair as GitHub-flavoured Markdown, to paste."""
    lines = [*(f"- {escape(line)}" for line in answer.conditions), ""]
    for table in tabulate_explained(answer.explanations):
        lines += table_lines(table)
    lines += [f"> {escape(line)}\n" for line in answer.doubts]
    return "\n".join(lines).rstrip() + "\n"


def render_json(answer: Answer, width: int = 0) -> str:
    """Every figure, in SI units."""
    document = {
        "conditions": list(answer.conditions),
        "doubts": list(answer.doubts),
        "explanations": [lay_out(found) for found in answer.explanations],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}
