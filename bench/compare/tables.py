"""A comparison as tables, in text, Markdown and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bench import verdict
from bench.case import AXES
from bench.compare import conditions
from bench.compare.comparison import (
    Comparison,
    Finding,
    Side,
    Subject,
    explain_unmatched,
    printable,
    write_outcomes,
)
from bench.compare.conditions import Condition, Count, Summarized
from bench.compare.gates import Result
from bench.record import Status
from bench.report.metrics import Metric
from bench.report.model import NOTHING, Cell, Head, Table
from bench.report.quantities import write_number
from bench.verdict import Ratio, Verdict


def _cells(*texts: str) -> tuple[Cell, ...]:
    return tuple(Cell(printable(text)) for text in texts)


def _heads(*labels: str, numbers: Sequence[str] = ()) -> tuple[Head, ...]:
    return tuple(Head(label, label, number=label in numbers) for label in labels)


def introduce(comparison: Comparison, margin: float) -> Iterator[str]:
    """What is compared, and how to read it."""
    for side in (comparison.a, comparison.b):
        role = "baseline" if side is comparison.a else "candidate"
        yield printable(
            f"{side.name} ({role}): {side.path}, {len(side.records)} runs of {len(side.rows)} cases"
        )
    matched = comparison.matched
    if matched:
        common = matched[0].case.label(name for name in AXES if name not in comparison.telling)
        yield printable(f"{len(matched)} cases in both, all of them {common}")
    else:
        yield printable(f"no case in both: {explain_unmatched(comparison)}")
    if not any(comparison.environment()) and not comparison.differing_conditions():
        yield "no recorded difference in what ran them"
    for side, condition, count in comparison.spoilt(matched):
        yield (
            f"warning: {_write_spoilt(side, condition, count)}; do not rely on times of these, "
            "measure again with another --out"
        )
    empty = [metric.name for metric, found in comparison.metrics.items() if not found]
    if matched and empty:
        yield f"not compared, as no run has a value: {', '.join(empty)}"
    limit = 1 + margin
    yield (
        f"B/A is of geometric means, with Welch's 95 % interval; p is Holm's over a table's cases; "
        f"the margin of {write_percent(margin)} ends at {1 / limit:.4g} and {limit:.4g}"
    )


def write_percent(fraction: float) -> str:
    """Write 0.02 as ``2 %``."""
    return f"{100 * fraction:.4g} %"


def tabulate(comparison: Comparison, margin: float) -> Iterator[Table]:
    """All tables, in the order a reader needs them: what differs underneath comes first."""
    environment = tuple(
        _cells(name, " or ".join(a) or NOTHING, " or ".join(b) or NOTHING, "yes" * agree)
        for name, agree, a, b in comparison.environment()
    ) + tuple(
        _cells(condition.label, _write_summary(condition, a), _write_summary(condition, b), "")
        for condition, a, b in comparison.differing_conditions()
    )
    if environment:
        heads = _heads("what", "A", "B", "must agree")
        yield Table("environment", "What ran them differs", heads, environment, ())
    outcomes = tuple(_outcome_rows(comparison))
    if outcomes:
        heads = _heads("case", "A", "B", "change")
        yield Table("outcomes", "Cases that did not all end well", heads, outcomes, ())
    for metric, findings in comparison.metrics.items():
        if findings:
            yield _metric_table(comparison, metric, findings, margin)
    for side in (comparison.a, comparison.b):
        alone = tuple(_cells(comparison.label(s)) for s in comparison.only_in(side))
        if alone:
            yield Table(f"only-{side.name}", f"Only in {side.name}", _heads("case"), alone, ())


def _outcome_rows(comparison: Comparison) -> Iterator[tuple[Cell, ...]]:
    for subject in comparison.matched:
        a, b = comparison.a.outcomes(subject), comparison.b.outcomes(subject)
        if {*a, *b} != {Status.OK}:
            yield _cells(
                comparison.label(subject),
                write_outcomes(a),
                write_outcomes(b),
                comparison.change(subject),
            )


def _write_summary(condition: Condition, value: Summarized) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, Count):
        return f"{value.runs} of {value.of} runs"
    values = value if isinstance(value, tuple) else (value,)
    text = " or ".join(v if isinstance(v, str) else write_number(v) for v in values)
    return f"{text} {condition.unit}".rstrip()


def _write_spoilt(side: Side, condition: Condition, count: Count) -> str:
    return f"{side.name} {condition.label} in {count.runs} of {count.of} runs"


def _metric_table(
    comparison: Comparison, metric: Metric, findings: Sequence[Finding], margin: float
) -> Table:
    counts = Counter(finding.ratio.judge(margin) for finding in findings)
    summary = ", ".join(f"{counts[v]} {metric.word(v)}" for v in Verdict if v in counts)
    unit = f" in {metric.unit}" if metric.unit else ""
    numbers = ("A", "B", "B/A", "95 % interval", "p", "runs")
    return Table(
        metric.name,
        f"{metric.label[0].upper()}{metric.label[1:]}{unit}: {summary}",
        _heads("case", *numbers, "verdict", "remarks", numbers=numbers),
        tuple(
            _cells(
                comparison.label(finding.subject),
                _write_mean(finding.a, metric),
                _write_mean(finding.b, metric),
                *_write_ratio(finding.ratio),
                f"{len(finding.a)}, {len(finding.b)}",
                metric.word(finding.ratio.judge(margin)),
                "; ".join(remarks(comparison, metric, finding, margin)),
            )
            for finding in findings
        ),
        (),
    )


def _write_mean(readings: Sequence[tuple[int, float]], metric: Metric) -> str:
    from statistics import geometric_mean

    values = [value for _, value in readings]
    if not values:
        return NOTHING
    mean = geometric_mean(values) if min(values) > 0 else sum(values) / len(values)
    return write_number(mean / metric.scale)


def _write_ratio(ratio: Ratio) -> tuple[str, str, str]:
    if ratio.value is None:
        return NOTHING, NOTHING, NOTHING
    value = write_number(ratio.value)
    if ratio.exact:
        return value, "exact", NOTHING
    if ratio.low is None or ratio.high is None or ratio.p_adjusted is None:
        return value, NOTHING, NOTHING
    p = "<0.001" if ratio.p_adjusted < 0.001 else f"{ratio.p_adjusted:.3f}"
    return value, f"{write_number(ratio.low)} to {write_number(ratio.high)}", p


def remarks(
    comparison: Comparison, metric: Metric, finding: Finding, margin: float
) -> Iterator[str]:
    """What a reader must know of a finding before believing it."""
    subject, case = finding.subject, finding.subject.case
    if case.fraction < 1:
        yield "extrapolated" if metric.name == "epoch_time_s" else "part of an epoch"
    if case.dataset == "synthetic":
        yield "synthetic"
    for kind in ("fake", "published"):
        where = [s.name for s in (comparison.a, comparison.b) if kind in s.executors(subject)]
        if where:
            yield kind if len(where) == 2 else f"{kind} in {where[0]}"
    for side, values in ((comparison.a, finding.a), (comparison.b, finding.b)):
        outcomes = side.outcomes(subject)
        if set(outcomes) != {Status.OK}:
            yield f"{side.name} {write_outcomes(outcomes)}"
        elif len(values) < outcomes[Status.OK]:
            yield f"{side.name} lacks {outcomes[Status.OK] - len(values)} of its values"
    if metric.timed:
        for spoilt in comparison.spoilt([subject]):
            yield _write_spoilt(*spoilt)
    if why := finding.ratio.explain(margin):
        yield why


def render_text(comparison: Comparison, margin: float, results: Sequence[Result]) -> str:
    """The comparison as aligned columns."""
    lines = list(introduce(comparison, margin))
    for table in tabulate(comparison, margin):
        lines += ["", table.title, *_align(table)]
    return "\n".join(lines) + "\n"


def _align(table: Table) -> Iterator[str]:
    rows = [[head.label for head in table.heads]]
    rows += [[cell.text for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            text.rjust(width) if head.number else text.ljust(width)
            for text, width, head in zip(row, widths, table.heads, strict=True)
        )
        yield ("  " + "  ".join(cells)).rstrip()


def render_markdown(comparison: Comparison, margin: float, results: Sequence[Result]) -> str:
    """The comparison as GitHub-flavoured Markdown, to paste."""
    from bench.report.markdown import escape, table_lines

    lines = [*(f"- {escape(line)}" for line in introduce(comparison, margin)), ""]
    for table in tabulate(comparison, margin):
        lines += table_lines(table)
    return "\n".join(lines).rstrip() + "\n"


def render_json(comparison: Comparison, margin: float, results: Sequence[Result]) -> str:
    """The comparison with all raw values, for machines; SI units."""
    document = {
        **{
            side.name.lower(): {"path": str(side.path), "runs": len(side.records)}
            for side in (comparison.a, comparison.b)
        },
        "margin": margin,
        "confidence": verdict.CONFIDENCE,
        "environment": [
            {"name": name, "must_agree": agree, "a": a, "b": b}
            for name, agree, a, b in comparison.environment()
        ],
        "conditions": [
            {
                "name": condition.name,
                "column": condition.column,
                "summary": condition.summary,
                "unit": condition.unit,
                "a": _to_json(a),
                "b": _to_json(b),
                "differs": conditions.differ(condition, a, b),
                "spoils_times": condition.spoils,
            }
            for condition, a, b in comparison.conditions
        ],
        "outcomes": [
            {
                **_name_subject(subject),
                "a": comparison.a.outcomes(subject),
                "b": comparison.b.outcomes(subject),
                "change": comparison.change(subject),
            }
            for subject in comparison.matched
        ],
        "metrics": {
            metric.name: [
                {
                    **_name_subject(finding.subject),
                    "a": [value for _, value in finding.a],
                    "b": [value for _, value in finding.b],
                    "n_a": len(finding.a),
                    "n_b": len(finding.b),
                    "seeds_a": [seed for seed, _ in finding.a],
                    "seeds_b": [seed for seed, _ in finding.b],
                    "ratio": finding.ratio.value,
                    "low": finding.ratio.low,
                    "high": finding.ratio.high,
                    "p": finding.ratio.p,
                    "p_adjusted": finding.ratio.p_adjusted,
                    "exact": finding.ratio.exact,
                    "verdict": metric.word(finding.ratio.judge(margin)),
                    "lack": finding.ratio.lack,
                    "spoilt": [
                        {"side": side.name, "condition": condition.name, **asdict(count)}
                        for side, condition, count in comparison.spoilt([finding.subject])
                        if metric.timed
                    ],
                    "remarks": list(remarks(comparison, metric, finding, margin)),
                }
                for finding in findings
            ]
            for metric, findings in comparison.metrics.items()
        },
        "only_in_a": [_name_alone(s) for s in comparison.only_in(comparison.a)],
        "only_in_b": [_name_alone(s) for s in comparison.only_in(comparison.b)],
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


def _name_subject(subject: Subject) -> dict[str, Any]:
    return {"case": asdict(subject.case), "environment": dict(subject.environment)}


def _name_alone(subject: Subject) -> dict[str, Any]:
    return {**asdict(subject.case), "environment": dict(subject.environment)}


def _to_json(value: Summarized) -> Any:
    return asdict(value) if isinstance(value, Count) else value


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}
