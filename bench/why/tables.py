"""Explanations in text, Markdown and JSON: the tables of the report, for each pair."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.diagnosis.explanation import Explanation
from bench.diagnosis.sentences import describe
from bench.questions import reasons
from bench.render import text
from bench.render.markdown import escape, table_lines
from bench.render.section import Sheet
from bench.report.jsonfile import lay_out
from bench.text import count
from bench.why.answer import Answer

MOST_ROWS = 5  # most rows of a table without --full


def render_text(answer: Answer, full: bool = False) -> str:
    """Render each pair for a terminal: a summary, the reasons, and the changes between the two
    steps; with ``full``, all rows and all evidence."""
    width = shutil.get_terminal_size((text.WIDTH, 0)).columns
    console = text.make_plain(width)
    for line in answer.conditions:
        console.print(line, markup=False, highlight=False)
    tabulate = reasons.tabulate_explained if full else _tabulate_short
    for table in reasons.CAUSES.lay_out(tabulate(answer.explanations)):
        console.print()
        text.draw_table(table, console, brief=not full)
    if answer.doubts:
        console.print()
    if full:
        said = [notice.line for notice in answer.doubts]
    else:
        groups = text.group_doubts(answer.doubts)[: text.DOUBTS]
        said = [text.join_doubts(notices) for notices in groups]
        said.append(
            f"{text.MORE} shows all rows, the evidence and {count(len(answer.doubts), 'doubt')}."
        )
    for line in said:
        text.draw_text(line, console)
    return text.read_plain(console)


def _tabulate_short(explanations: Sequence[Explanation]) -> Iterator[Sheet]:
    """Like `tabulate_explained`, with few rows, and sentences that no row or title repeats."""
    said: set[str] = set()
    for why in explanations:
        words = [word for word in describe(replace(why, about=""), True) if word not in said]
        said.update(words)
        sheet = reasons.tabulate_reasons("reasons", why, MOST_ROWS)
        yield replace(sheet, title=reasons.name_pair(why), words=words)
        yield replace(
            reasons.tabulate_changes("changes", why, MOST_ROWS), title="By part of the step"
        )


def render_markdown(answer: Answer, full: bool = True) -> str:
    """Render each pair as GitHub-flavoured Markdown, to paste."""
    lines = [*(f"- {escape(line)}" for line in answer.conditions), ""]
    for table in reasons.CAUSES.lay_out(reasons.tabulate_explained(answer.explanations)):
        lines += table_lines(table)
    lines += [f"> {escape(said.line)}\n" for said in answer.doubts]
    return "\n".join(lines).rstrip() + "\n"


def render_json(answer: Answer, full: bool = True) -> str:
    """Render every figure, in SI units."""
    document = {
        "conditions": list(answer.conditions),
        "doubts": [notice.line for notice in answer.doubts],
        "explanations": [lay_out(found) for found in answer.explanations],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}
