"""The report as JSON: the content of the CSV, with the tables, answers and warnings."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from bench.diagnosis.explanation import Explanation, Side
from bench.diagnosis.sentences import describe
from bench.limits import STEADY
from bench.questions.effects import Effect
from bench.render.model import Cell, Table
from bench.report.csvfile import column_names, keep_known, list_cells
from bench.report.document import Report
from bench.study.estimate import JUDGED, Estimate
from bench.study.metrics import Metric
from bench.study.quantities import describe_columns


def render(report: Report) -> str:
    """Return the report as JSON; empty cells are null, and nothing is rounded."""
    names = column_names()
    described = describe_columns()
    document = {
        "title": report.title,
        "subject": report.subject,
        "axes": report.varying,
        "constants": report.constants,
        "answers": [asdict(answer) for answer in report.answers],
        "next_step": report.next_step and asdict(report.next_step),
        "warnings": [_take(said, "label", "text", "remedy") for said in report.warnings],
        "tables": [_table(table) for table in report.tables],
        "effects": [describe_effect(effect) for effect in report.effects],
        "notes": report.notes,
        "outcomes": report.outcomes,
        "columns": {name: described[name] for name in names if name in described},
        "cases": [{name: _value(cells[name]) for name in names} for cells in list_cells(report)],
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _take(one: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names}


def describe_effect(effect: Effect) -> dict[str, Any]:
    """Return a change with its effect on each metric, in the form of `Metric.lay_out`."""
    return {
        **_take(effect, "axis", "before", "after"),
        "pairs": len(effect.pairs),
        "extrapolated": effect.estimated,
        "doubts": effect.doubts,
        "metrics": {
            name: {
                **METRIC_OF[name].lay_out(estimate.ratio),
                "verdict": METRIC_OF[name].word(estimate.ratio.judge(STEADY)),
                "pairs": estimate.pairs,
                **_show_ends(METRIC_OF[name], estimate),
                "difference": estimate.difference,
                "difference_reach": estimate.reach,
            }
            for name, estimate in effect.estimates.items()
        },
    }


def _show_ends(metric: Metric, estimate: Estimate) -> dict[str, float]:
    """Return the lowest and the highest pair, inverted if the metric is shown as a speed."""
    if metric.speed:
        return {"lowest": 1 / estimate.highest, "highest": 1 / estimate.lowest}
    return {"lowest": estimate.lowest, "highest": estimate.highest}


METRIC_OF = {metric.name: metric for metric in JUDGED}


def _table(table: Table) -> dict[str, Any]:
    def write(cell: Cell) -> dict[str, Any]:
        mark = {"estimated": True} if cell.estimated else {}
        return {"text": cell.text, "value": _value(cell.value), **mark}

    return {
        **_take(table, "name", "question"),
        "level": table.level.name.lower(),
        **_take(table, "title", "words"),
        "heads": [asdict(head) for head in table.heads],
        "groups": {str(row): heading for row, heading in table.groups.items()},
        "rows": [[write(cell) for cell in row] for row in table.rows],
        "notes": table.notes,
    }


def _value(value: Any) -> Any:
    value = keep_known(value)
    if value is None or isinstance(value, (str, bool)):
        return value
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)


def lay_out(found: Explanation) -> dict[str, Any]:
    """Return an explanation as data for JSON."""
    estimated = ("before_estimated", "after_estimated")
    return {
        **_take(found, "axis", "about", "items"),
        "a": _lay_out_side(found.a),
        "b": _lay_out_side(found.b),
        "speedup": found.speedup.value,
        **_take(found.speedup, "low", "high", "lack"),
        "ceiling": found.ceiling and asdict(found.ceiling),
        "beaten": found.violation and asdict(found.violation),
        "changes": [_take(c, "name", "before_s", "after_s", *estimated) for c in found.changes],
        "reasons": [
            {
                "cause": reason.name,
                **_take(reason, "before_s", "after_s", "evidence"),
                "advice": [asdict(advice) for advice in reason.advice],
                **_take(reason, *estimated),
                "share": found.share(reason),
            }
            for reason in found.reasons
        ],
        "unexplained_s": found.unexplained_s,
        "words": describe(found),
    }


def _lay_out_side(side: Side) -> dict[str, Any]:
    told = ("name", "time_s", "estimated", "calls", "flop", "bytes", "floor_s")
    return {
        "name": side.name,
        "case": asdict(side.case),
        "step_s": side.step.step_s,
        "verdict": side.breakdown.verdict,
        "bounds": dict(side.breakdown.bounds),
        "parts": [_take(part, *told) for part in side.breakdown.parts],
        "left_over_s": side.breakdown.left_over_s,
    }
