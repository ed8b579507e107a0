"""A comparison in sentences and tables, as text and JSON."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from operator import attrgetter, itemgetter
from statistics import median
from typing import Any

from bench.answers.money import Tariff
from bench.answers.render.documents import escape, table_lines
from bench.answers.render.table import (
    MIXED,
    NOTHING,
    Column,
    Section,
    Sheet,
    Table,
    mark_part,
    write_ends,
    write_ratio,
)
from bench.answers.render.terminal import draw_table, draw_text, make_plain
from bench.base.origin import describe_origin
from bench.base.plain import dump_document
from bench.base.text import (
    ESTIMATE,
    capitalize,
    count,
    join_words,
    make_printable,
    name_first,
    write_number,
    write_percent,
)
from bench.compare.comparison import (
    Comparison,
    Gate,
    Match,
    MetricVerdict,
    describe_gate,
    refuse_runs,
)
from bench.results.store.rows import group
from bench.results.store.table import RECORDS
from bench.results.study.estimate import TIME
from bench.results.study.quantities import Metric
from bench.results.study.warnings import WARNINGS
from bench.results.verdict import UNCHECKED, Equivalence, Verdict, average_seeds
from bench.schema.axis import name_axis, name_column
from bench.schema.case import AXES, SAME_QUESTION, lay_out
from bench.schema.record import MODEL_PARTS, RELIABLE, Status

_Row = tuple[MetricVerdict, str]
"""A row of a table: what was found of a case, and what a reader must know of it."""


def _list_sheets(comparison: Comparison) -> Iterator[Sheet]:
    for metric, findings in comparison.metrics.items():
        if findings:
            yield _tabulate_metric(comparison, metric, findings)
        if judged := [(one.match, one.equivalence) for one in findings if one.equivalence]:
            yield _tabulate_equivalence(comparison, metric, judged)


COMPARISON = Section("comparison", "What changed?", _list_sheets)


def tabulate(comparison: Comparison) -> Iterator[Table]:
    """Yield a table of each metric, and one of equivalence of each loss and error."""
    return COMPARISON.lay_out(_list_sheets(comparison))


def _share(remarks: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the remarks of each row, and as a note those of every row, which are said once."""
    shared = [one for one in remarks[0] if len(remarks) > 1 and all(one in of for of in remarks)]
    own = [make_printable("; ".join(one for one in of if one not in shared)) for of in remarks]
    return own, [make_printable(f"Every case: {'; '.join(shared)}.")] * bool(shared)


DIFFERENCE = (
    "Of values that are not all above zero the difference B - A is compared, with a sign; the "
    "margin is that share of the larger of the two means of the values without their signs."
)


def _tabulate_metric(
    comparison: Comparison, metric: Metric, findings: Sequence[MetricVerdict]
) -> Sheet:
    (a, b), margin = comparison.names, comparison.margin
    tariff = comparison.tariff if metric is TIME else None
    wording = comparison.wording
    counts = Counter(metric.word(one.ratio.judge(margin)) for one in findings)
    own, shared = _share([[*remark(comparison, metric, one)] for one in findings])
    columns: list[Column[_Row]] = [
        Column("case", "case", "", lambda row: make_printable(row[0].match.label), wrap=True,
               always=True),
        *[Column("of", "of", "", lambda row: str(row[0].match.ran[0].runs[0].period),
                 number=False)] * (metric is TIME and wording.period == MIXED),
        Column("a", a, "", lambda row: _write_level(row[0], metric, 0)),
        Column("b", b, "", lambda row: _write_level(row[0], metric, 1)),
        Column("ratio", "speed-up" if metric.speedup else "ratio" if comparison.axis else "B/A", "",
               lambda row: _write_ratio(row[0], metric)[0]),
        Column("interval", "95 % interval", "", lambda row: _write_ratio(row[0], metric)[1],
               keep=6),
        Column("p", "p", "", lambda row: _write_p(
            None if row[0].ratio.exact else row[0].ratio.p_adjusted), keep=2),
        *([Column("cost", "cost", "", lambda row: _write_costs(row[0], tariff))]
          if tariff else []),
        Column("runs", "runs", "", lambda row: ", ".join(str(len(of)) for of in row[0].values),
               keep=3),
        Column("verdict", "verdict", "", lambda row: metric.word(row[0].ratio.judge(margin)),
               number=False),
        Column("remarks", "remarks", "", itemgetter(1), wrap=True),
    ]  # fmt: skip
    notes = []
    if metric.speedup:
        notes.append(
            f"Speed-up: the time of {a} over that of {b}, above 1 is faster; any other ratio is "
            f"{b} over {a}. Both are medians of their runs; p is adjusted for the cases of a "
            f"table (Holm); the margin is {write_percent(margin)}."
        )
    if tariff:
        costs = chain.from_iterable(one.list_costs(tariff) for one in findings)
        notes.append(f"{tariff.describe(costs)} The first is of {a}, the second of {b}.")
    notes += [DIFFERENCE] * any(one.ratio.unit for one in findings)
    unit = f" in {metric.unit}" if metric.unit else ""
    found = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    title = f"{wording.say_period(capitalize(metric.label))}{unit}: {found}"
    rows = [*zip(findings, own, strict=True)]
    return Sheet(title, columns, rows, [*notes, *shared], empty=("",))


def _write_ratio(finding: MetricVerdict, metric: Metric) -> tuple[str, str]:
    """Write the ratio of a metric or, where there is none, the difference, and its interval."""
    shown = metric.show(finding.ratio)
    value, low, high = finding.ratio.difference or (shown.value, shown.low, shown.high)
    write = "{:+.4g}".format if finding.ratio.difference else write_number
    ends = "exact" if shown.exact else write_ends((low, high), write, " to ")
    return NOTHING if value is None else write(value), ends or NOTHING


def _write_costs(finding: MetricVerdict, tariff: Tariff) -> str:
    both = zip(finding.match.ran, finding.list_costs(tariff), strict=True)
    return ", ".join(f"{mark_part(side.runs[0])}{cost.write()}" for side, cost in both)


def _write_level(finding: MetricVerdict, metric: Metric, place: int) -> str:
    """Write what the ratio is of: the median of repeats, or the mean over seeds."""
    values = finding.values[place]
    if not values:
        return NOTHING
    level = average_seeds(finding.readings[place]) if metric.seeded else median(values)
    part = finding.match.ran[place].runs[0].part
    return f"{ESTIMATE * (part < 1 and metric.speedup)}{write_number(level / metric.scale)}"


def _write_p(p: float | None) -> str:
    return NOTHING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _tabulate_equivalence(
    comparison: Comparison, metric: Metric, judged: Sequence[tuple[Match, Equivalence]]
) -> Sheet:
    unknown = [any(side.classes is None for side in match.ran) for match, _ in judged]
    own, shared = _share([
        [*filter(None, [UNCHECKED * one, found.lack])]
        for one, (_, found) in zip(unknown, judged, strict=True)
    ])  # fmt: skip

    def find_write(found: Equivalence) -> Callable[[float], str]:
        return found.write if found.unit else write_number

    columns: list[Column[tuple[Match, Equivalence, str]]] = [
        Column("case", "case", "", lambda row: make_printable(row[0].label), wrap=True,
               always=True),
        Column("ratio", "ratio", "", lambda row: find_write(row[1])(row[1].ratio or 1.0)),
        Column("interval", "90 % interval", "", lambda row: write_ends(
            (row[1].low, row[1].high), find_write(row[1]), " to ") or NOTHING),
        Column("p", "p", "", lambda row: _write_p(row[1].p), keep=2),
        Column("seeds", "seeds", "", lambda row: str(row[1].seeds)),
        Column("verdict", "verdict", "", lambda row: row[1].verdict.value, number=False),
        Column("remarks", "remarks", "", itemgetter(2), wrap=True),
    ]  # fmt: skip
    note = (
        "Two one-sided tests (TOST) at 5 %; p is adjusted for the number of cases (Holm). Worse or "
        "better: beyond the margin. One seed cannot tell: each of --repeats 5 has its own, without "
        "--same-seed."
    )
    within = write_percent(comparison.equal)
    title = f"No loss of accuracy? {metric.label} equivalent within {within}"
    rows = [(*one, remark) for one, remark in zip(judged, own, strict=True)]
    return Sheet(title, columns, rows, [note, *shared], empty=("",))


def remark(comparison: Comparison, metric: Metric, finding: MetricVerdict) -> Iterator[str]:
    """Yield what a reader must know about a finding before relying on it."""
    for name, side, values in zip(comparison.names, finding.match.ran, finding.values, strict=True):
        if {run.status for run in side.runs} != {Status.OK} or len(values) < len(side.runs):
            yield f"{name} {side.ended}, {len(values)} with a value"
    pairs = finding.ratio.pairs
    if pairs and max(map(len, finding.readings)) > pairs:
        yield f"only the {count(pairs, 'seed')} that both sides ran"
    if metric is TIME and finding.match.factor != 1 and not finding.ratio.lack:
        whose = finding.match.ran[0].runs[0].period
        first, second = comparison.names
        yield f"the time of {second} is given for {whose}, as that of {first} is"
    if metric.timed:
        yield from comparison.list_spoilt([finding.match])
    if why := finding.ratio.explain(comparison.margin):
        yield why


# ---------------------------------------------------------------------------------------- sentences


def describe(comparison: Comparison) -> Iterator[str]:
    """Yield what is compared, what differs, and warnings."""
    (a, b), matches = comparison.sides, comparison.matches
    both = f"{a.title} ({a.path}) and {b.title} ({b.path})"
    if a.path == b.path:  # what a runner of CI calls its folders tells nothing
        folder = a.path.parent if a.path.name == RECORDS else a.path
        there = folder.name if folder.is_absolute() else a.path
        both = f"{a.title} and {b.title} in {there}"
    yield from describe_origin(run.executor for side in (a, b) for run in side.runs)
    if matches:
        axis = name_column(comparison.axis)
        where = f"with both values of {axis}" if axis else "in both"
        yield f"{both}: {count(len(matches), 'case')} {where}, {comparison.common}."
    else:
        yield f"{both}: no case in both; --axis NAME compares two values of a setting."
    yield from _tell_speed(comparison)
    refused = (refuse_runs(TIME, *one.ran) for one in matches)
    if apart := [*dict.fromkeys(filter(None, refused))]:
        reasons = [why if why.endswith(".") else f"Not compared: {why}." for why in apart]
        yield f"! {name_first(reasons, 3, ' ')}"
    label = WARNINGS["unproven"]
    runs = [run for one in matches for side in one.ran for run in side.runs if run.unproven]
    if comparison.axis == "precision" and runs:
        yield f"! {label.warning}: both sides may have done the same work. {label.fix.advise(runs)}"
    edited = comparison.list_edited()
    scripts = all(run.command is not None for side in (a, b) for run in side.runs)
    what = "script" if scripts else "network"
    differences = [
        f"the {MODEL_PARTS[name]} of the {what}" if name in MODEL_PARTS and one != "none" != two
        else f"{name} ({one} and {two})"
        for name, one, two in comparison.list_differences()
        if name != "model_source" or not edited
    ]  # fmt: skip
    differences += [f"the files {name_first(edited, 5)}"] if edited else []
    differences += [
        f"{name_axis(axis)}, so what is learnt is not compared" for axis in comparison.apart
    ]
    if differences:
        yield f"! They differ: {name_first(differences, 3, '; ')}."
    for change in ("broken", "fixed"):
        changed = [one for one in matches if one.change == change]
        if cases := [f"{one.label} ({_tell_end(one)})" for one in changed]:
            yield f"{capitalize(change)}: {name_first(cases, 3, '; ')}."
    if spoilt := comparison.list_spoilt(matches):
        yield (
            f"! Do not rely on these times: {name_first(spoilt, 3)}. "
            f"{comparison.advise_spoilt(matches)}"
        )
    for side, alone in zip((a, b), comparison.alone, strict=True):
        if alone:
            yield f"! Only in {side.title}, not compared: {name_first(alone, 3, '; ')}."


def _tell_end(match: Match) -> str:
    """Say how the runs of a case ended, and why one that broke did."""
    reasons = [run.reason for run in match.ran[1].runs if run.status not in RELIABLE and run.reason]
    why = f": {make_printable(reasons[0])}" if reasons and match.change == "broken" else ""
    return f"{match.ended}{why}"


_MOST_LISTED = 5  # ratios that a sentence lists

_ask = attrgetter(*(name for name in AXES if name not in SAME_QUESTION))


def _tell_speed(comparison: Comparison) -> Iterator[str]:
    """Yield how many times as fast the second side is, or as long it takes if that is more, and
    whether repeats show it."""
    a, b = comparison.names
    for metric, findings in comparison.metrics.items():
        if not metric.speedup:
            continue
        # a setting that was measured in part and whole is one
        settings = group(
            sorted(findings, key=lambda one: -one.match.ran[0].runs[0].part),
            lambda one: _ask(one.match.ran[0].case),
        )
        first = [metric.show(alike[0].ratio).value for alike in settings]
        speeds = sorted(ratio for ratio in first if ratio is not None)
        if not speeds:
            continue
        verb, word = "is", "fast"
        if median(speeds) < 1:
            verb, word, speeds = "takes", "long", [1 / speed for speed in reversed(speeds)]
        sentence = f"{b} {verb} {write_ratio(median(speeds))} times as {word} as {a}"
        if len(speeds) > _MOST_LISTED:
            ends = f"from {write_ratio(speeds[0])} to {write_ratio(speeds[-1])}"
            sentence += f" (median of {len(speeds)} settings, {ends})"
        elif len(speeds) > 1:
            listed = join_words([*map(write_ratio, speeds)])
            sentence += f" (median of {len(speeds)} settings: {listed})"
        judged = {finding.ratio.judge(comparison.margin) for finding in findings}
        if judged <= {Verdict.NONE, Verdict.AMBIGUOUS}:
            what = "which is ambiguous" if Verdict.AMBIGUOUS in judged else "with no verdict"
            sentence += f", {what}: more --repeats on both sides would tell"
        yield f"{sentence}."


# ------------------------------------------------------------------------------------------ formats


UNLIMITED = 10_000  # width in characters of what goes to a file or a pipe


def render_text(comparison: Comparison, gates: Sequence[Gate]) -> str:
    """Render what is compared, and a table of each metric."""
    width = shutil.get_terminal_size((UNLIMITED, 0)).columns
    console = make_plain(width)
    for line in describe(comparison):
        draw_text(make_printable(line), console)
    for table in tabulate(comparison):
        console.print()
        draw_table(table, console)
    return console.export_text()


def render_markdown(comparison: Comparison, gates: Sequence[Gate]) -> str:
    """Render it as Markdown, for a page of a change: what --fail-on found, then all else."""
    found = [line for gate in gates for line in describe_gate(gate)]
    found += [f"passed: {gate.gate}" for gate in gates if gate.passed]
    lines = [*(f"- **{escape(line)}**" for line in found), ""]
    lines += [f"{escape(line)}\n" for line in describe(comparison)]
    return "\n".join((*lines, *chain.from_iterable(map(table_lines, tabulate(comparison))))) + "\n"


def render_json(comparison: Comparison, gates: Sequence[Gate]) -> str:
    """Render JSON with all raw values, in SI units."""
    a, b = comparison.sides
    found: dict[str, list[Any]] = {}
    equivalent: dict[str, list[Any]] = {}
    for metric, findings in comparison.metrics.items():
        found[metric.name] = [_lay_out(comparison, metric, one) for one in findings]
        if metric.seeded:
            ends = {"low": "ratio_low", "high": "ratio_high"}
            equivalent[metric.name] = [
                {**_lay_out_match(one.match),
                 **{ends.get(name, name): value for name, value in asdict(one.equivalence).items()},
                 "verdict": one.equivalence.verdict.value}
                for one in findings if one.equivalence
            ]  # fmt: skip
    content = {
        "axis": name_column(comparison.axis),
        "a": str(a.path),
        "b": str(b.path),
        "origins": list(dict.fromkeys(run.kind for side in (a, b) for run in side.runs)),
        "margin": comparison.margin,
        "equivalence_margin": comparison.equal,
        "differ": [*comparison.list_differences()],
        "outcomes": [
            {**_lay_out_match(one), "ended": one.ended, "change": one.change}
            for one in comparison.matches
        ],
        "metrics": found,
        "equivalence": equivalent,
        "only_in_a": comparison.alone[0],
        "only_in_b": comparison.alone[1],
        "gates": [
            {"gate": gate.gate, "passed": gate.passed, "failures": gate.failures,
             "judged": gate.judged, "undecided": gate.undecided, "unjudged": gate.unjudged}
            for gate in gates
        ],
    }  # fmt: skip
    return dump_document("compare", 2, content)


def _lay_out(comparison: Comparison, metric: Metric, finding: MetricVerdict) -> dict[str, Any]:
    a, b = finding.values
    seeds = [
        [seed for seed, readings in side.items() for _ in readings] for side in finding.readings
    ]
    return {
        **_lay_out_match(finding.match),
        "a": a,
        "b": b,
        "seeds_a": seeds[0],
        "seeds_b": seeds[1],
        **metric.lay_out(finding.ratio),
        **_lay_out_costs(comparison, metric, finding),
        "pairs": finding.ratio.pairs,
        "verdict": metric.word(finding.ratio.judge(comparison.margin)),
        "warnings": comparison.list_spoilt([finding.match]) if metric.timed else [],
        "remarks": list(remark(comparison, metric, finding)),
    }


def _lay_out_costs(
    comparison: Comparison, metric: Metric, finding: MetricVerdict
) -> dict[str, list[float]]:
    if metric is not TIME or comparison.tariff is None:
        return {}
    return {"cost": [cost.value for cost in finding.list_costs(comparison.tariff)]}


def _lay_out_match(match: Match) -> dict[str, Any]:
    one, two = (lay_out(side.case) for side in match.ran)
    return {"case": one, "case_b": two, "environment": dict(match.environment)}


FORMATS: dict[str, Callable[[Comparison, Sequence[Gate]], str]] = {
    "text": render_text,
    "md": render_markdown,
    "json": render_json,
}
