"""A comparison in sentences and tables, as text and JSON."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import geometric_mean
from typing import Any

from bench.compare.comparison import Comparison, MetricPair, Result, write_change
from bench.origin import describe_origin
from bench.record import Status
from bench.render.table import NOTHING, Cell, Head, Table, find_wording, write_ends
from bench.render.text import draw_table, draw_text, make_plain
from bench.study.axes import name_axis
from bench.study.pairs import Match
from bench.study.quantities import Metric
from bench.text import (
    ESTIMATE,
    capitalize,
    count,
    make_printable,
    name_first,
    write_number,
    write_percent,
)
from bench.verdict import UNCHECKED

_KEEP = {"p": 2, "runs": 3, "95 % interval": 6}
"""Priorities of columns: the lowest is left out first if a page is too narrow; see `Head`."""

_TEXTS = ("case", "verdict", "remarks")


def _tabulate(title: str, rows: Sequence[Mapping[str, str]], notes: Sequence[str]) -> Table:
    """Make a table of texts by column; one of remarks is left out if all are empty."""
    labels = [label for label in rows[0] if label != "remarks" or any(row[label] for row in rows)]
    heads = tuple(
        Head(n, n, number=n not in _TEXTS, keep=_KEEP.get(n, 9), wrap=n in ("case", "remarks"))
        for n in labels
    )
    cells = tuple(tuple(Cell(make_printable(row[label])) for label in labels) for row in rows)
    return Table("comparison", title, heads, cells, tuple(notes))


def tabulate(comparison: Comparison) -> Iterator[Table]:
    """Yield a table of each metric, and one of equivalence of each loss and error."""
    for metric, findings in comparison.metrics.items():
        if findings:
            yield _tabulate_metric(comparison, metric, findings)
        if judged := comparison.judge_equivalence(metric):
            yield _tabulate_equivalence(comparison, metric, judged)


def _tabulate_metric(
    comparison: Comparison, metric: Metric, findings: Sequence[MetricPair]
) -> Table:
    a, b = comparison.names
    ratio = "speed" if metric.speed else "ratio" if comparison.axis else "B/A"
    rows = []
    for finding in findings:
        shown, apart = metric.show(finding.ratio), finding.ratio.difference
        ends, write = (shown.low, shown.high), write_number
        value = NOTHING if shown.value is None else write(shown.value)
        if apart:
            ends, write = apart[1:], "{:+.4g}".format
            value = write(apart[0])
        rows.append({
            "case": comparison.label(finding.match),
            a: _write_mean(comparison, finding, metric, 0),
            b: _write_mean(comparison, finding, metric, 1),
            ratio: value,
            "95 % interval": "exact" if shown.exact else write_ends(ends, write, " to ") or NOTHING,
            "p": _write_p(None if shown.exact else shown.p_adjusted),
            "runs": f"{len(finding.a)}, {len(finding.b)}",
            "verdict": metric.word(finding.ratio.judge(comparison.margin)),
            "remarks": "; ".join(remark(comparison, metric, finding)),
        })  # fmt: skip
    wording = find_wording([*comparison.a.runs, *comparison.b.runs])
    unit = f" in {metric.unit}" if metric.unit else ""
    counts = Counter(row["verdict"] for row in rows)
    found = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    note = (
        f"Speed: the time of {a} over that of {b}, above 1 is faster; any other ratio is {b} over "
        f"{a}. Means are geometric; p is adjusted for the cases of a table (Holm); the margin is "
        f"{write_percent(comparison.margin)}."
    )
    notes = [note] if metric.speed else []
    notes += [DIFFERENCE] if any(one.ratio.unit for one in findings) else []
    title = f"{wording.say_period(capitalize(metric.label))}{unit}: {found}"
    return _tabulate(title, rows, notes)


DIFFERENCE = (
    "Of values that are not all above zero the difference B - A is compared, with a sign; the "
    "margin is that share of the larger of the two means of the values without their signs."
)


def _write_mean(comparison: Comparison, finding: MetricPair, metric: Metric, place: int) -> str:
    values = [value for _, value in (finding.a, finding.b)[place]]
    if not values:
        return NOTHING
    mean = geometric_mean(values) if min(values) > 0 else sum(values) / len(values)
    part = comparison.ends(finding.match)[place].runs[0].part
    return f"{ESTIMATE * (part < 1)}{write_number(mean / metric.scale)}"


def _write_p(p: float | None) -> str:
    return NOTHING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _tabulate_equivalence(
    comparison: Comparison, metric: Metric, judged: Sequence[tuple[MetricPair, Any]]
) -> Table:
    rows = []
    for finding, found in judged:
        write = found.write if found.unit else write_number
        unknown = any(end.classes is None for end in comparison.ends(finding.match))
        rows.append({
            "case": comparison.label(finding.match),
            "ratio": write(found.ratio or 1.0),
            "90 % interval": write_ends((found.low, found.high), write, " to ") or NOTHING,
            "p": _write_p(found.p),
            "seeds": str(found.seeds),
            "verdict": found.verdict.value,
            "remarks": "; ".join(filter(None, [UNCHECKED * unknown, found.lack])),
        })  # fmt: skip
    note = (
        "Two one-sided tests (TOST) at 5 %; p is adjusted for the number of cases (Holm). Worse or "
        "better: beyond the margin. One seed cannot tell: each of --repeats 5 has its own, without "
        "--same-seed."
    )
    within = write_percent(comparison.equal)
    title = f"No loss of accuracy? {metric.label} equivalent within {within}"
    return _tabulate(title, rows, [note])


def remark(comparison: Comparison, metric: Metric, finding: MetricPair) -> Iterator[str]:
    """Yield what a reader must know about a finding before relying on it."""
    for name, end, values in zip(
        comparison.names, comparison.ends(finding.match), (finding.a, finding.b), strict=True
    ):
        if {*end.outcomes} != {Status.OK} or len(values) < len(end.runs):
            yield f"{name} {end.ended}, {len(values)} with a value"
    pairs = finding.ratio.pairs
    if pairs and max(map(len, finding.seeded)) > pairs:
        yield f"only the {count(pairs, 'seed')} that both sides ran"
    if metric.timed:
        yield from comparison.spoilt([finding.match])
    if why := finding.ratio.explain(comparison.margin):
        yield why


# ---------------------------------------------------------------------------------------- sentences


def describe(comparison: Comparison) -> Iterator[str]:
    """Yield what is compared, what differs, and warnings."""
    a, b, matched = comparison.a, comparison.b, comparison.matched
    both = f"{a.title} ({a.path}) and {b.title} ({b.path})"
    if a.path == b.path:
        both = f"{a.title} and {b.title} in {a.path}"
    yield from describe_origin(run.executor for side in (a, b) for run in side.runs)
    if matched:
        where = f"with both values of {comparison.axis}" if comparison.axis else "in both"
        yield f"{both}: {count(len(matched), 'case')} {where}, {comparison.name_common()}."
    else:
        yield f"{both}: no case in both; --axis NAME compares two values of a setting."
    told = [f"{name} ({one} and {two})" for name, one, two in comparison.list_differences()]
    told += [f"{name_axis(axis)}, so what is learnt is not compared" for axis in comparison.apart]
    if told:
        yield f"! They differ: {name_first(told, 3, '; ')}."
    for change in ("broken", "fixed"):
        cases = [match for match in matched if comparison.change(match) == change]
        if told := [f"{comparison.label(c)} ({write_change(comparison, c)})" for c in cases]:
            yield f"{capitalize(change)}: {name_first(told, 3, '; ')}."
    if spoilt := comparison.spoilt(matched):
        yield (
            f"! Do not rely on these times: {name_first(spoilt, 3)}. Close other programs and run "
            "again, with a new --out."
        )
    for place, side in enumerate((a, b)):
        if alone := comparison.label_alone(place):
            yield f"! Only in {side.title}, not compared: {name_first(alone, 3, '; ')}."


# ------------------------------------------------------------------------------------------ formats


UNLIMITED = 10_000  # width in characters of what goes to a file or a pipe


def render_text(comparison: Comparison, results: Sequence[Result]) -> str:
    """Render what is compared, and a table of each metric."""
    width = shutil.get_terminal_size((UNLIMITED, 0)).columns
    console = make_plain(width)
    for line in describe(comparison):
        draw_text(make_printable(line), console)
    for table in tabulate(comparison):
        console.print()
        draw_table(table, console)
    return console.export_text()


def render_json(comparison: Comparison, results: Sequence[Result]) -> str:
    """Render JSON with all raw values, in SI units."""
    a, b = comparison.sides
    origins = dict.fromkeys(run.kind for side in (a, b) for run in side.runs)
    document = {
        "axis": comparison.axis,
        "a": str(a.path),
        "b": str(b.path),
        "origins": list(origins),
        "margin": comparison.margin,
        "equivalence_margin": comparison.equal,
        "differ": [*comparison.list_differences()],
        "outcomes": [
            {
                **_name_match(comparison, match),
                "ended": write_change(comparison, match),
                "change": comparison.change(match),
            }
            for match in comparison.matched
        ],
        "metrics": {
            metric.name: [_lay_out(comparison, metric, finding) for finding in findings]
            for metric, findings in comparison.metrics.items()
        },
        "equivalence": {
            metric.name: [
                {**_name_match(comparison, finding.match), **asdict(found),
                 "verdict": found.verdict.value}
                for finding, found in comparison.judge_equivalence(metric)
            ]
            for metric in comparison.metrics
            if metric.seeded
        },
        "only_in_a": comparison.label_alone(0),
        "only_in_b": comparison.label_alone(1),
        "gates": [
            {"gate": result.gate.text, "passed": result.passed, "failures": result.failures,
             "judged": result.judged, "unjudged": result.unjudged}
            for result in results
        ],
    }  # fmt: skip
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _lay_out(comparison: Comparison, metric: Metric, finding: MetricPair) -> dict[str, Any]:
    return {
        **_name_match(comparison, finding.match),
        "a": [value for _, value in finding.a],
        "b": [value for _, value in finding.b],
        "seeds_a": [seed for seed, _ in finding.a],
        "seeds_b": [seed for seed, _ in finding.b],
        **metric.lay_out(finding.ratio),
        "pairs": finding.ratio.pairs,
        "verdict": metric.word(finding.ratio.judge(comparison.margin)),
        "spoilt": comparison.spoilt([finding.match]) if metric.timed else [],
        "remarks": list(remark(comparison, metric, finding)),
    }


def _name_match(comparison: Comparison, match: Match) -> dict[str, Any]:
    one, two = (asdict(end.case) for end in comparison.ends(match))
    return {"case": one, "case_b": two, "environment": dict(match.told)}


FORMATS: dict[str, Callable[[Comparison, Sequence[Result]], str]] = {
    "text": render_text,
    "json": render_json,
}
