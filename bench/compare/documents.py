"""A comparison as text, Markdown and JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.compare.answer import describe, open_screen
from bench.compare.comparison import Comparison, MetricPair
from bench.compare.conditions import Count
from bench.compare.gates import Result
from bench.compare.side import Side
from bench.compare.tables import Margins, remarks, tabulate
from bench.interval import CONFIDENCE
from bench.origin import find_origin
from bench.render.model import Level, Table
from bench.render.text import MORE, WIDTH, draw_table, make_plain, read_plain
from bench.study.metrics import Metric
from bench.study.pairs import Match
from bench.text import count, make_printable

UNLIMITED = 10_000  # width in characters of full tables that go to a file or a pipe


def render_text(
    comparison: Comparison, margins: Margins, results: Sequence[Result], full: bool = False
) -> str:
    """Render verdicts, warnings and the first table on one screen, or with ``full`` everything."""
    width = shutil.get_terminal_size((UNLIMITED if full else WIDTH, 0)).columns
    tables = list(tabulate(comparison, margins))
    said = describe if full else open_screen
    lines = [piece for line in said(comparison, margins) for piece in _wrap(line, width)]
    if full:
        for table in tables:
            lines += ["", *_draw(table, width)]
        return "\n".join(lines) + "\n"
    wanted = [table for table in tables if table.level is Level.TABLE]
    if shown := wanted[-1] if wanted else None:
        lines += ["", *_draw(shown, width)]
    more = count(len(tables) - bool(shown), "more table")
    return "\n".join([*lines, "", f"{MORE} shows {more} and the conditions of both sides."]) + "\n"


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        make_printable(text), width, subsequent_indent="  ", break_on_hyphens=False
    )


def _draw(table: Table, width: int) -> list[str]:
    console = make_plain(width)
    draw_table(table, console)
    return read_plain(console).splitlines()


def render_markdown(
    comparison: Comparison, margins: Margins, results: Sequence[Result], full: bool = True
) -> str:
    """Render GitHub-flavoured Markdown, to paste: the verdicts, then all tables."""
    from bench.render.markdown import escape, table_lines

    said = list(describe(comparison, margins))
    lines = [*(f"- {escape(make_printable(line))}" for line in said), ""]
    for table in tabulate(comparison, margins):
        if table.heads:
            lines += table_lines(table)
        else:
            lines += [f"### {escape(table.title)}", "", *map(escape, table.notes), ""]
    return "\n".join(lines).rstrip() + "\n"


def render_json(
    comparison: Comparison, margins: Margins, results: Sequence[Result], full: bool = True
) -> str:
    """Render JSON with all raw values, in SI units."""
    a, b, margin = comparison.a, comparison.b, margins.verdict
    document = {
        "axis": comparison.axis or None,
        **{
            key: {
                "name": s.name,
                "path": str(s.path),
                "runs": comparison.count(s)[1],
                "origins": list(dict.fromkeys(map(find_origin, s.environment("executor")))),
            }
            for key, s in (("a", a), ("b", b))
        },
        "margin": margin,
        "confidence": CONFIDENCE,
        "environment": [
            {"name": name, "must_agree": agree, "a": of_a, "b": of_b}
            for name, agree, of_a, of_b in comparison.environment()
        ],
        "conditions": [
            {
                **{k: getattr(condition, k) for k in ("name", "column", "summary", "unit")},
                "a": asdict(of_a) if isinstance(of_a, Count) else of_a,
                "b": asdict(of_b) if isinstance(of_b, Count) else of_b,
                "differs": condition.differs(of_a, of_b),
                "spoils_times": condition.spoils,
            }
            for condition, of_a, of_b in comparison.conditions
        ],
        "outcomes": [
            {
                **_name_match(comparison, match),
                "a": a.ran[match.a].outcomes,
                "b": b.ran[match.b].outcomes,
                "change": comparison.change(match),
            }
            for match in comparison.matched
        ],
        "metrics": {
            metric.name: [_lay_out(comparison, metric, f, margin) for f in findings]
            for metric, findings in comparison.metrics.items()
        },
        "equivalence_margin": margins.equivalence,
        "equivalence": {
            metric.name: [
                {
                    **_name_match(comparison, finding.match),
                    **asdict(found),
                    "verdict": found.verdict.value,
                    "sentence": found.sentence(),
                }
                for finding, found in comparison.judge_equivalence(metric, margins.equivalence)
            ]
            for metric in comparison.metrics
            if metric.seeded
        },
        "only_in_a": _name_alone(comparison, a),
        "only_in_b": _name_alone(comparison, b),
        "failures": {result.gate.text: result.failures for result in results},
        "gates": [
            {
                "gate": result.gate.text,
                "margin": result.gate.margin,
                "passed": result.passed,
                "judged": result.judged,
                "unjudged": result.unjudged,
                "why_unjudged": list(result.why),
            }
            for result in results
        ],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _lay_out(
    comparison: Comparison, metric: Metric, finding: MetricPair, margin: float
) -> dict[str, Any]:
    spoilt = comparison.spoilt([finding.match]) if metric.timed else ()
    return {
        **_name_match(comparison, finding.match),
        "a": [value for _, value in finding.a],
        "b": [value for _, value in finding.b],
        "n_a": len(finding.a),
        "n_b": len(finding.b),
        "seeds_a": [seed for seed, _ in finding.a],
        "seeds_b": [seed for seed, _ in finding.b],
        **metric.lay_out(finding.ratio),
        "pairs": finding.ratio.pairs,
        "verdict": metric.word(finding.ratio.judge(margin)),
        "spoilt": [
            {"side": side.name, "condition": condition.name, **asdict(held)}
            for side, condition, held in spoilt
        ],
        "remarks": list(remarks(comparison, metric, finding, margin)),
    }


def _name_match(comparison: Comparison, match: Match) -> dict[str, Any]:
    one, two = (asdict(end.case) for end in comparison.ends(match))
    common = {name: value for name, value in one.items() if two[name] == value}
    both = {"case_a": one, "case_b": two} if one != two else {}
    return {"case": common, **both, "environment": dict(match.told)}


def _name_alone(comparison: Comparison, side: Side) -> list[dict[str, Any]]:
    return [
        {**asdict(side.ran[cell].case), "environment": dict(told)}
        for cell, told in comparison.alone(side).items()
    ]


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}
