"""Explanations in text, Markdown and JSON: the tables of the report, for each pair."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from bench.diagnosis.explanation import Explanation
from bench.report.jsonfile import lay_out
from bench.report.markdown import table_lines
from bench.report.why import tabulate_explained


def render_text(explanations: Sequence[Explanation], width: int) -> str:
    """Each pair for a terminal."""
    from rich.console import Console

    from bench.report.text import draw_table

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False)
    for place, table in enumerate(tabulate_explained(explanations)):
        if place:
            console.print()
        draw_table(table, console)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def render_markdown(explanations: Sequence[Explanation], width: int = 0) -> str:
    """Each pair as GitHub-flavoured Markdown, to paste."""
    lines = [line for table in tabulate_explained(explanations) for line in table_lines(table)]
    return "\n".join(lines).rstrip() + "\n"


def render_json(explanations: Sequence[Explanation], width: int = 0) -> str:
    """Every figure, in SI units."""
    document = {"explanations": [lay_out(found) for found in explanations]}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}
