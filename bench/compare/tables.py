"""A comparison as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from bench.compare.comparison import Comparison, MetricPair
from bench.compare.conditions import Condition, Count, Summarized
from bench.diagnosis.rates import CALL, RATES, write_rate
from bench.origin import LABELS
from bench.record import Status
from bench.render.cells import write_ends
from bench.render.model import NOTHING, Cell, Head, Level, Table
from bench.study.metrics import Metric
from bench.study.pairs import Match
from bench.text import capitalize, count, make_printable, write_number, write_percent
from bench.verdict.equivalence import Claim
from bench.verdict.ratio import Verdict
from bench.verdict.seeds import UNCHECKED


@dataclass(frozen=True)
class Margins:
    """The smallest differences that matter, as fractions: for verdicts and for equivalence."""

    verdict: float
    equivalence: float


_KEEP = {"p": 2, "runs": 3, "95 % interval": 6}
"""Priorities of columns: the lowest is left out first if a page is too narrow; see `Head`."""


def _tabulate(
    title: str,
    labels: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Sequence[str] = (),
    numbers: Sequence[str] = (),
    level: Level = Level.DETAIL,
) -> Table:
    """Make a table of texts. Columns in ``numbers`` are right-aligned; a column of remarks is left
    out if all are empty."""
    rows = [*rows]
    if "remarks" in labels and not any(row[-1] for row in rows):
        labels, rows = labels[:-1], [row[:-1] for row in rows]
    heads = tuple(
        Head(n, n, "", n in numbers, "", _KEEP.get(n, 9), wrap=n in ("case", "remarks"))
        for n in labels
    )
    cells = tuple(tuple(Cell(make_printable(text)) for text in row) for row in rows)
    return Table("comparison", title, heads, cells, tuple(map(make_printable, notes)), level=level)


def tabulate(comparison: Comparison, margins: Margins) -> Iterator[Table]:
    """Yield all tables in reading order; differences between the sides come first."""
    names = comparison.names
    if differing := list(list_differences(comparison)):
        rows = ((*told, "yes" * agree) for *told, agree in differing)
        yield _tabulate("Differences in their environments", ("what", *names, "must agree"), rows)
    outcomes = [
        (comparison.label(match), a.ended, b.ended, comparison.change(match))
        for match, (a, b) in ((match, comparison.ends(match)) for match in comparison.matched)
        if {*a.outcomes, *b.outcomes} != {Status.OK}
    ]
    if outcomes:
        labels = ("case", *names, "change")
        yield _tabulate("Cases with runs that did not end well", labels, outcomes)
    for metric, findings in comparison.metrics.items():
        if findings:
            yield _metric_table(comparison, metric, findings, margins.verdict)
        yield from _equivalence_table(comparison, metric, margins.equivalence)
    for side in (comparison.a, comparison.b):
        if alone := comparison.label_alone(side):
            yield _tabulate(f"Only in {side.title}", ["case"], [[label] for label in alone])


def list_differences(
    comparison: Comparison, mandatory: bool = False
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the differences in environment and conditions: name, A's and B's values, and whether
    they must agree. With ``mandatory``, only environment columns that must agree, and no conditions
    that `write_spoilt` reports."""
    for name, agree, a, b in comparison.environment():
        if agree or not mandatory:
            yield name, " or ".join(a) or NOTHING, " or ".join(b) or NOTHING, agree
    for condition, *both in comparison.differing_conditions():
        if not (mandatory and condition.spoils):
            of_a, of_b = (_write_summary(condition, of) for of in both)
            yield condition.label, of_a, of_b, False


def _write_summary(condition: Condition, value: Summarized) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, Count):
        return f"{value.runs} of {value.of} runs"
    if condition.column in (*RATES, CALL) and isinstance(value, float):
        return write_rate(condition.column, value)
    values = value if isinstance(value, tuple) else (value,)
    text = " or ".join(v if isinstance(v, str) else write_number(v) for v in values)
    return f"{text} {condition.unit}".rstrip()


def write_spoilt(
    comparison: Comparison, matches: Sequence[Match], beside: bool = False
) -> Iterator[str]:
    """Yield each condition of `Comparison.spoilt` once, with the runs of either side."""
    counts: dict[str, dict[str, Count]] = {}
    for side, condition, held in comparison.spoilt(matches, beside):
        counts.setdefault(condition.label, {})[side.name] = held
    for label, of in counts.items():
        every = len(of) == 2 and all(held.runs == held.of for held in of.values())
        where = (f"{name} in {held.runs} of {held.of} runs" for name, held in of.items())
        yield f"{label}: all runs" if every else f"{label}: {', '.join(where)}"


def _metric_table(
    comparison: Comparison, metric: Metric, findings: Sequence[MetricPair], margin: float
) -> Table:
    counts = Counter(finding.ratio.judge(margin) for finding in findings)
    summary = ", ".join(f"{counts[v]} {metric.word(v)}" for v in Verdict if v in counts)
    unit = f" in {metric.unit}" if metric.unit else ""
    ratio = "speed" if metric.speed else "ratio" if comparison.axis else "B/A"
    numbers = (*comparison.names, ratio, "95 % interval", "p", "runs")
    said, notes = _gather(
        [list(remarks(comparison, metric, finding, margin)) for finding in findings]
    )
    notes += [DIFFERENCE] if any(finding.ratio.unit for finding in findings) else []
    notes += [PAIRED] if any(finding.ratio.pairs for finding in findings) else []
    rows = []
    for finding, text in zip(findings, said, strict=True):
        shown, judged = metric.show(finding.ratio), finding.ratio.judge(margin)
        means = (_write_mean(side, metric) for side in finding.compared)
        value = NOTHING if shown.value is None else write_number(shown.value)
        between = write_ends((shown.low, shown.high), write_number, " to ") or NOTHING
        if apart := finding.ratio.difference:
            value = f"{apart[0]:+.4g}"
            between = write_ends(apart[1:], "{:+.4g}".format, " to ") or NOTHING
        between = "exact" if shown.exact else between
        p = _write_p(None if shown.exact else shown.p_adjusted)
        runs = ", ".join(str(len(side)) for side in finding.compared)
        label = comparison.label(finding.match)
        rows.append((label, *means, value, between, p, runs, metric.word(judged), text))
    title = f"{capitalize(metric.label)}{unit}: {summary}"
    labels = ("case", *numbers, "verdict", "remarks")
    first = metric is next(iter(comparison.metrics))
    several = any(len(side) > 1 for finding in findings for side in finding.compared)
    notes += [MEANS] if first and several else []
    return _tabulate(title, labels, rows, notes, numbers, Level.TABLE if first else Level.DETAIL)


def _gather(said: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the remarks of each row, and a note with the remarks that all rows share."""
    common = [text for text in said[0] if all(text in each for each in said)]
    of = "All cases" if len(said) > 1 else "Remarks"
    notes = [f"{of}: {'; '.join(common)}."] if common else []
    return ["; ".join(text for text in each if text not in common) for each in said], notes


DIFFERENCE = (
    "Of values that are not all above zero the difference B - A is compared, with a sign; the "
    "margin is that share of the larger of the two means, without its sign."
)
MEANS = "Of several runs the geometric mean is compared, where a report shows the median."
PAIRED = "Runs with the same seed are compared as pairs; without a pair they are left out."


def _equivalence_table(comparison: Comparison, metric: Metric, margin: float) -> Iterator[Table]:
    judged = comparison.judge_equivalence(metric, margin)
    if not judged:
        return
    title = f"No loss of accuracy? {metric.label} equivalent within {write_percent(margin)}"
    if all(equivalence.seeds < 2 for _, equivalence in judged):
        note = (
            "One seed cannot tell. Run the sweep again with --repeats 5 and without --same-seed: "
            "each repeat then has its own seed."
        )
        yield _tabulate(title, (), (), [note])
        return
    counts = Counter(equivalence.verdict for _, equivalence in judged)
    summary = ", ".join(f"{counts[claim]} {claim.value}" for claim in Claim if claim in counts)
    numbers = ("ratio", "90 % interval", "p", "seeds")
    said, notes = _gather(
        [[*_describe_learning(comparison, metric, one.match), *filter(None, [found.lack])]
         for one, found in judged]
    )  # fmt: skip
    notes += [
        "Two one-sided tests (TOST) at 5 %; p is adjusted for the number of cases (Holm).",
        "Worse or better: beyond the margin.",
    ]
    rows = []
    for (finding, found), text in zip(judged, said, strict=True):
        write = found.write if found.unit else write_number
        between = write_ends((found.low, found.high), write, " to ") or NOTHING
        ratio, label = write(found.ratio or 1.0), comparison.label(finding.match)
        told = (ratio, between, _write_p(found.p), str(found.seeds), found.verdict.value)
        rows.append((label, *told, text))
    labels = ("case", *numbers, "verdict", "remarks")
    yield _tabulate(f"{title}: {summary}", labels, rows, notes, numbers)


def _describe_learning(comparison: Comparison, metric: Metric, match: Match) -> Iterator[str]:
    yield from describe_runs(comparison, metric, match)
    if any(end.classes is None for end in comparison.ends(match)):
        yield UNCHECKED


def _write_p(p: float | None) -> str:
    return NOTHING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _write_mean(readings: Sequence[tuple[int, float]], metric: Metric) -> str:
    values = [value for _, value in readings]
    if not values:
        return NOTHING
    mean = geometric_mean(values) if min(values) > 0 else sum(values) / len(values)
    return write_number(mean / metric.scale)


def describe_runs(comparison: Comparison, metric: Metric, match: Match) -> Iterator[str]:
    """Yield what limits a match's runs: a part of an epoch, synthetic images, not measured."""
    if min(end.part.share for end in comparison.ends(match)) < 1:
        yield _write_parts(comparison, metric, match)
    for kind, said in {"synthetic": "synthetic", **LABELS}.items():
        where = [
            end.side
            for end in comparison.ends(match)
            if kind in (end.case.dataset, *(run.kind for run in end.runs))
        ]
        if where:
            yield said if len(where) == 2 or where == [said] else f"{said} in {where[0]}"


def remarks(
    comparison: Comparison, metric: Metric, finding: MetricPair, margin: float
) -> Iterator[str]:
    """Yield what a reader must know about a finding before relying on it."""
    match = finding.match
    yield from describe_runs(comparison, metric, match)
    for end, values in zip(comparison.ends(match), (finding.a, finding.b), strict=True):
        if {*end.outcomes} != {Status.OK}:
            yield f"{end.side} {end.ended}"
        elif lacking := len(end.runs) - len(values):
            yield f"{end.side} lacks {lacking} of its values"
    pairs = finding.ratio.pairs
    if pairs and any(len({seed for seed, _ in side}) > pairs for side in (finding.a, finding.b)):
        be = "is" if pairs == 1 else "are"
        yield f"only the {count(pairs, 'seed')} that both sides ran {be} compared"
    if metric.timed:
        yield from write_spoilt(comparison, [match], beside=True)
    if why := finding.ratio.explain(margin):
        yield why


def _write_parts(comparison: Comparison, metric: Metric, match: Match) -> str:
    what = "extrapolated" if metric.name == "epoch_time_s" else "part of an epoch"
    one, two = comparison.ends(match)
    if one.part.share == two.part.share:
        return what
    ends = [end for end in (one, two) if end.part.known and end.part.share < 1]
    told = (f"{end.part} in {end.side}" for end in ends)
    return f"{what}: {', '.join(told)}"
