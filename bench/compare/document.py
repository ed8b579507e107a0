"""A comparison in sentences and tables, as text, Markdown and JSON."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from bench.case import AXES, SAME_QUESTION, spell_value
from bench.compare.comparison import (
    READINGS,
    STOPPED,
    Comparison,
    MetricPair,
    Result,
    Side,
    explain_unmatched,
)
from bench.diagnosis.step import CALL, RATES, write_rate
from bench.interval import CONFIDENCE
from bench.limits import MIN_REPEATS, MOST_REPEATS
from bench.origin import LABELS, describe_origin, find_origin
from bench.record import Status
from bench.render.table import (
    NOTHING,
    Cell,
    Head,
    Level,
    Table,
    find_period,
    say_period,
    write_ends,
)
from bench.render.text import MORE, WIDTH, draw_table, make_plain, read_plain
from bench.study.axes import name_axis
from bench.study.doubts import DOUBTS, SPARE_HOST
from bench.study.pairs import Match
from bench.study.quantities import Metric
from bench.text import (
    capitalize,
    count,
    make_printable,
    name_first,
    write_number,
    write_percent,
    write_range,
)
from bench.verdict import MIN_SEEDS, UNCHECKED, Claim, Verdict


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
    """Yield the differences in environment and readings: name, A's and B's values, and whether
    they must agree. With ``mandatory``, only environment columns that must agree, and readings."""
    for name, agree, a, b in comparison.environment():
        if agree or not mandatory:
            yield name, " or ".join(a) or NOTHING, " or ".join(b) or NOTHING, agree
    for column, *both in comparison.list_readings():
        label, unit, _ = READINGS[column]
        rated = column in (*RATES, CALL)
        one, two = (write_rate(column, v) if rated else f"{write_number(v)} {unit}" for v in both)
        yield label, one, two, False


def write_spoilt(
    comparison: Comparison, matches: Sequence[Match], beside: bool = False
) -> Iterator[str]:
    """Yield each doubt of `Comparison.spoilt` once, with the runs of either side."""
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    for side, name, hit, of in comparison.spoilt(matches, beside):
        counts.setdefault(DOUBTS[name].remark, {})[side.name] = hit, of
    for remark, sides in counts.items():
        every = len(sides) == 2 and all(hit == of for hit, of in sides.values())
        where = (f"{name} in {hit} of {of} runs" for name, (hit, of) in sides.items())
        yield f"{remark}: all runs" if every else f"{remark}: {', '.join(where)}"


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
    period = find_period([*comparison.a.runs, *comparison.b.runs])
    title = f"{say_period(capitalize(metric.label), period)}{unit}: {summary}"
    labels = ("case", *numbers, "verdict", "remarks")
    first = metric is next(iter(comparison.metrics))
    several = any(len(side) > 1 for finding in findings for side in finding.compared)
    if first:
        one, two = comparison.names
        notes.append(
            f"Speed: the time of {one} over that of {two}, above 1 is faster; any other ratio is "
            f"{two} / {one}. p is adjusted for the cases of a table (Holm); the margin is "
            f"{write_percent(margin)}."
        )
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
    "margin is that share of the larger of the two means of the values without their signs."
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


QUIETER = "Close other programs and run again, with a new --out"
"""The remedy for times that were disturbed."""


def warn_of_origin(comparison: Comparison) -> Iterator[str]:
    """Yield the opening lines if neither side was measured."""
    both = (comparison.a, comparison.b)
    return describe_origin(executor for side in both for executor in side.environment("executor"))


def conclude(comparison: Comparison, margin: float) -> Iterator[str]:
    """Yield a sentence per metric measured on both sides, and per kind of changed outcome."""
    for metric, findings in comparison.metrics.items():
        known = [finding for finding in findings if finding.a and finding.b]
        if known and not (comparison.apart and metric.seeded):
            yield f"{capitalize(metric.label)}: {_sum_up(metric, known, margin)}."
    changes: dict[str, list[str]] = {}
    for match in comparison.matched:
        if change := comparison.change(match):
            ended = " → ".join(end.ended for end in comparison.ends(match))
            said = f"{comparison.label(match)} ({ended})"
            changes.setdefault(change, []).append(said)
    for change, labels in changes.items():
        yield f"{capitalize(change)}: {name_first(labels, 3, '; ')}."


def _sum_up(metric: Metric, findings: Sequence[MetricPair], margin: float) -> str:
    held: dict[Verdict, list[MetricPair]] = {}
    for finding in findings:
        held.setdefault(finding.ratio.judge(margin), []).append(finding)
    words = {
        Verdict.SAME: f"the same within {write_percent(margin)}",
        Verdict.AMBIGUOUS: "not certain",
        Verdict.NONE: "no verdict",
    }
    said = []
    for verdict in (v for v in Verdict if v in held):
        word = words.get(verdict) or metric.word(verdict)
        where = f" in {len(held[verdict])} of {count(len(findings), 'case')}"
        lacks = dict.fromkeys(f.ratio.lack for f in held[verdict] if not metric.seeded)
        why = ": " + name_first([*filter(None, lacks)], 2, "; ") if any(lacks) else ""
        size = _write_size(metric, held[verdict])
        said.append(word + where * (len(findings) > 1) + f" ({size})" * bool(size) + why)
    return ", ".join(said)


def _write_size(metric: Metric, findings: Sequence[MetricPair]) -> str:
    """Write the range of the cases' ratios as displayed; for one case, with its interval."""
    ratios = [metric.show(finding.ratio) for finding in findings]
    values = [ratio.value for ratio in ratios if ratio.value is not None]
    if not values:
        return ""
    text = write_range(values, _write_digits)
    text += " times as fast" if metric.speed else " times as much"
    if apart := [f.ratio.difference for f in findings if f.ratio.difference]:
        low, high = (end(value for value, *_ in apart) for end in (min, max))
        return f"by {low:+.3g}" + f" to {high:+.3g}" * (low < high)
    (first, *others) = ratios
    if others or first.exact or first.low is None or first.high is None:
        return text
    return f"{text}; 95 %: {_write_digits(first.low)} to {_write_digits(first.high)}"


def _write_digits(value: float) -> str:
    # keep trailing zeros: they show the precision of a ratio such as 1.00
    return f"{value:#.3g}".rstrip(".")


def advise(comparison: Comparison, margin: float) -> str:
    """Return how to get the missing verdicts; empty if none is missing."""
    if any(comparison.change(match) == STOPPED for match in comparison.matched):
        return "Next: give the commands of the sweeps again, which run what was stopped."
    known = [
        (metric.seeded, finding, finding.ratio.judge(margin))
        for metric, findings in comparison.metrics.items()
        for finding in findings
        if finding.a and finding.b
    ]
    # if there are enough repeats but no verdict, more of them do not help
    few = [
        (seeded, finding)
        for seeded, finding, verdict in known
        if verdict is Verdict.NONE and _is_short(finding, seeded)
    ]
    if not all(seeded for seeded, _ in few):
        both = "the sweep" if comparison.axis else "both"
        return f"Next: run {both} again with --repeats {MIN_REPEATS}, and compare again."
    if any(_share_seeds(finding) for _, finding in few):
        return (
            f"Next: a loss needs {MIN_SEEDS} seeds a side, and these repeats have fewer; run both "
            f"again with --repeats {MIN_SEEDS}, into a new --out and without --same-seed."
        )
    if few:
        return f"Next: a loss needs {MIN_SEEDS} seeds a side; run both with --repeats {MIN_SEEDS}."
    unsure = [
        (finding.ratio, min(len(finding.a), len(finding.b)))
        for _, finding, verdict in known
        if verdict is Verdict.AMBIGUOUS
    ]
    if not unsure:
        return ""
    most = max(repeats for _, repeats in unsure)
    needed = max(ratio.estimate_repeats(margin, repeats) for ratio, repeats in unsure)
    if math.isinf(needed):
        return (
            f"Next: {MOST_REPEATS} repeats would not decide what is not certain; measure on an "
            "idle machine, or give a larger --margin."
        )
    return f"Next: --repeats {max(int(needed), most + 2)} may decide what is not certain."


def _is_short(finding: MetricPair, seeded: bool) -> bool:
    """Return whether a side has fewer repeats, or seeds if ``seeded``, than a verdict needs."""
    if not seeded:
        return min(len(finding.a), len(finding.b)) < MIN_REPEATS
    a, b = finding.seeded
    return min(len(a), len(b), len(a.keys() & b.keys()) or MIN_SEEDS) < MIN_SEEDS


def _share_seeds(finding: MetricPair) -> bool:
    """Return whether a side has enough repeats, but of too few seeds."""
    return any(
        len(seeds) < MIN_SEEDS <= len(readings)
        for seeds, readings in zip(finding.seeded, (finding.a, finding.b), strict=True)
    )


def _warn_of_differences(
    comparison: Comparison, told: Iterable[tuple[str, str, str, bool]]
) -> Iterator[str]:
    """Warn of other differences between the sides, which may explain a verdict."""
    one, two = comparison.names
    differing = [f"{name} ({of_a} in {one}, {of_b} in {two})" for name, of_a, of_b, _ in told]
    if differing and comparison.matched:
        yield f"They differ: {name_first(differing, 2, '; ')}."


def _tell_apart(comparison: Comparison) -> Iterator[str]:
    """Say which axes of the recipe differ, of which cases were matched nevertheless."""
    if comparison.apart and comparison.matched:
        ends = [comparison.ends(match) for match in comparison.matched]
        told = []
        for axis in comparison.apart:
            a, b = (
                list(dict.fromkeys(spell_value(getattr(end[of].case, axis)) for end in ends))
                for of in (0, 1)
            )
            told.append(f"{name_axis(axis)} ({name_first(a, 2)} and {name_first(b, 2)})")
        yield f"They differ in {', '.join(told)}: what is learnt is not compared."


def _write_common(comparison: Comparison) -> str:
    hidden = {*comparison.telling, *comparison.free}
    ran = [end.case for match in comparison.matched for end in comparison.ends(match)]
    hidden |= {name for name in SAME_QUESTION if len({getattr(case, name) for case in ran}) > 1}
    return comparison.ask(ran[0]).label(name for name in AXES if name not in hidden)


def describe(comparison: Comparison, margins: Margins) -> Iterator[str]:
    """Yield what is compared, the verdicts, advice and warnings."""
    a, b = comparison.a, comparison.b
    paths = "" if a.path == b.path else f" ({a.path}) and {b.title} ({b.path})"
    both = f"{a.title}{paths}" if paths else f"{a.title} and {b.title} in {a.path}"
    matched = comparison.matched
    yield from warn_of_origin(comparison)
    if not matched:
        yield f"{both}: no case in both: {explain_unmatched(comparison)}"
        return
    cases = count(len(matched), "case")
    where = f"with both values of {comparison.axis}" if comparison.axis else "in both"
    yield f"{both}: {cases} {where}, {_write_common(comparison)}."
    told = list_differences(comparison, mandatory=True)
    yield from (f"! {said}" for said in _warn_of_differences(comparison, told))
    yield from _tell_apart(comparison)
    yield from conclude(comparison, margins.verdict)
    if said := advise(comparison, margins.verdict):
        yield said
    if spoilt := list(write_spoilt(comparison, matched)):
        waiting = any(name == "unsettled" for _, name, *_ in comparison.spoilt(matched))
        spare = f" Where a step waits for the host, use {SPARE_HOST}." * waiting
        yield f"! Do not rely on these times: {name_first(spoilt, 2, '; ')}. {QUIETER}.{spare}"
    empty = [metric.label for metric, found in comparison.metrics.items() if not found]
    if empty:
        yield f"Not compared, because no run has a value: {', '.join(empty)}."
    alone = {side.title: len(comparison.alone(side)) for side in (a, b)}
    if any(alone.values()):
        told_alone = (f"{count(n, 'case')} only in {title}" for title, n in alone.items() if n)
        yield f"! Not compared: {', '.join(told_alone)}."


UNLIMITED = 10_000  # width in characters of full tables that go to a file or a pipe


def render_text(
    comparison: Comparison, margins: Margins, results: Sequence[Result], full: bool = False
) -> str:
    """Render verdicts, warnings and the first table on one screen, or with ``full`` everything."""
    width = shutil.get_terminal_size((UNLIMITED if full else WIDTH, 0)).columns
    tables = list(tabulate(comparison, margins))
    said = describe(comparison, margins)
    lines = [piece for line in said for piece in _wrap(line, width)]
    if full:
        for table in tables:
            lines += ["", *_draw(table, width)]
        return "\n".join(lines) + "\n"
    wanted = [table for table in tables if table.level is Level.TABLE]
    if shown := wanted[-1] if wanted else None:
        lines += ["", *_draw(shown, width)]
    if more := len(tables) - bool(shown):
        lines += ["", f"{MORE} shows {count(more, 'more table')}."]
    return "\n".join(lines) + "\n"


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
    from bench.render.documents import escape, table_lines

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
        "readings": [
            {"name": column, "a": a, "b": b} for column, a, b in comparison.list_readings()
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
            {"side": side.name, "doubt": doubt, "runs": hit, "of": of}
            for side, doubt, hit, of in spoilt
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
