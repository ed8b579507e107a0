"""Explanations as words and tables, in text, Markdown and JSON."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Iterator, Sequence

from bench.diagnosis.explanation import Explanation
from bench.diagnosis.reasons import write_ms
from bench.diagnosis.sentences import describe, name_part, write_percent, write_tried
from bench.report.jsonfile import lay_out
from bench.report.markdown import escape, table_lines
from bench.report.model import NOTHING, Cell, Head, Table


def tabulate_changes(found: Explanation) -> Table:
    """The way from one step time to the other, by kind of work; it adds up."""
    a, b = found.a, found.b
    whole = b.step.step_s - a.step.step_s
    rows = [
        (
            Cell(name_part(change.name)),
            *(Cell(write_ms(s), s) for s in (change.before_s, change.after_s)),
            _write_change(change.change_s),
        )
        for change in found.changes
        if max(abs(change.before_s), abs(change.after_s)) * 1e3 >= 5e-3
    ]
    rows.append(
        (
            Cell("a step"),
            *(Cell(write_ms(side.step.step_s), side.step.step_s) for side in (a, b)),
            _write_change(whole),
        )
    )
    heads = (
        Head("part", "part of a step", number=False),
        Head("before", f"{a.name} (ms)"),
        Head("after", f"{b.name} (ms)"),
        Head("change", "change (ms)"),
    )
    return Table("changes", f"From {a.name} to {b.name}", heads, tuple(rows), ())


def _write_change(time_s: float) -> Cell:
    text = write_ms(time_s)
    return Cell(text if text.startswith("-") or time_s <= 0 else f"+{text}", time_s)


def tabulate_reasons(found: Explanation) -> Table:
    """What the gap consists of; it adds up."""
    rows = [
        (
            Cell(reason.cause.meaning, reason.cause.value),
            Cell(write_ms(reason.time_s), reason.time_s),
            Cell(write_percent(reason.share), reason.share),
            Cell(reason.evidence),
            Cell(f"{reason.option}{write_tried(reason)}".strip()),
        )
        for reason in found.reasons
    ]
    share = found.unexplained_s / found.gap_s if found.gap_s else 0.0
    rows.append(
        (
            Cell("not explained"),
            Cell(write_ms(found.unexplained_s), found.unexplained_s),
            Cell(write_percent(share), share),
            Cell(NOTHING),
            Cell(NOTHING),
        )
    )
    heads = (
        Head("reason", "reason", number=False),
        Head("time", "ms"),
        Head("share", "share"),
        Head("evidence", "evidence", number=False, wrap=True),
        Head("option", "what may help", number=False, wrap=True),
    )
    return Table("reasons", title_gap(found), heads, tuple(rows), ())


def title_gap(found: Explanation) -> str:
    """What the reasons are of."""
    if found.hoped:
        return (
            f"The gap of {write_ms(found.gap_s)} ms to the {found.hoped:.2g}× that "
            f"{found.b.name} promises"
        )
    return f"The difference of {write_ms(found.gap_s)} ms"


def render_text(explanations: Sequence[Explanation], width: int) -> str:
    """Each pair: its words, then both tables, for a terminal."""
    from rich.console import Console

    from bench.report.text import draw_table

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False)
    for place, found in enumerate(explanations):
        if place:
            console.print()
        for sentence in describe(found):
            console.print(sentence, markup=False, highlight=False)
        for table in (tabulate_changes(found), _shorten(tabulate_reasons(found))):
            console.print()
            draw_table(table, console)
        console.print()
        for line in _list_evidence(found, width):
            console.print(line, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _list_evidence(found: Explanation, width: int) -> Iterator[str]:
    for reason in found.reasons:
        said = f"{reason.evidence} {reason.option}{write_tried(reason)}".strip()
        if said:
            yield from textwrap.wrap(
                f"{reason.cause.meaning}: {said}", width, subsequent_indent="  "
            )


def _shorten(table: Table) -> Table:
    """Only the figures: on a terminal, sentences follow below."""
    return table.take(range(3))


def render_markdown(explanations: Sequence[Explanation], width: int = 0) -> str:
    """Each pair as GitHub-flavoured Markdown, to paste."""
    lines: list[str] = []
    for found in explanations:
        lines += [f"## {escape(title_pair(found))}", "", escape(" ".join(describe(found))), ""]
        for table in (tabulate_changes(found), tabulate_reasons(found)):
            lines += table_lines(table)
    return "\n".join(lines).rstrip() + "\n"


def title_pair(found: Explanation) -> str:
    """Name a pair: ``fp32 → fp16: dpn92 · batch size 512``."""
    return f"{found.a.name} → {found.b.name}" + (f": {found.about}" if found.about else "")


def render_json(explanations: Sequence[Explanation], width: int = 0) -> str:
    """Every figure, in SI units."""
    document = {"explanations": [lay_out(found) for found in explanations]}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}
