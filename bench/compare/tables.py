"""A comparison as tables, in text, Markdown and JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench import verdict
from bench.case import AXES, FOLLOWS, SAME_QUESTION
from bench.compare import conditions
from bench.compare.answer import advise, conclude
from bench.compare.comparison import (
    Comparison,
    KindChange,
    MetricPair,
    Side,
    write_outcomes,
)
from bench.compare.conditions import Condition, Count, Summarized
from bench.compare.gates import Result
from bench.compare.values import explain_unmatched, list_left_out
from bench.diagnosis.evidence import write_ms
from bench.diagnosis.rates import CALL, RATES, write_rate
from bench.diagnosis.sentences import name_part
from bench.interval import CONFIDENCE
from bench.limits import MIN_REPEATS, STEADY
from bench.record import Status
from bench.render.model import NOTHING, Cell, Head, Level, Table
from bench.render.text import LINES, MORE, WIDTH, draw_table, make_plain, read_plain
from bench.study.axes import name_axis
from bench.study.metrics import Metric
from bench.study.pairs import Match
from bench.text import (
    capitalize,
    count,
    make_printable,
    name_first,
    say_left_out,
    write_number,
    write_percent,
)
from bench.verdict import Claim, Equivalence, Ratio, Verdict


@dataclass(frozen=True)
class Margins:
    """Which difference matters, as fractions: of the verdicts, and of equivalence."""

    verdict: float
    equivalence: float


_KEEP = {"p": 2, "runs": 3, "95 % interval": 6}
"""What goes first where a page is too narrow; see `Head`."""


def _tabulate(
    name: str,
    title: str,
    labels: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Sequence[str] = (),
    numbers: Sequence[str] = (),
    level: Level = Level.DETAIL,
) -> Table:
    """A table of texts; of its columns those in ``numbers`` stand to the right."""
    heads = tuple(
        Head(
            label,
            label,
            number=label in numbers,
            keep=_KEEP.get(label, 9),
            wrap=label in ("case", "remarks"),
        )
        for label in labels
    )
    cells = tuple(tuple(Cell(make_printable(text)) for text in row) for row in rows)
    return Table(name, title, heads, cells, tuple(map(make_printable, notes)), level=level)


def introduce(comparison: Comparison, margins: Margins) -> Iterator[str]:
    """What is compared, and how to read it."""
    for side, role in ((comparison.a, "baseline"), (comparison.b, "candidate")):
        cases, runs = comparison.count(side)
        said = f"{count(runs, 'run')} of {count(cases, 'case')}"
        yield f"{side.title} ({role}): {side.path}, {said}"
        for name in FOLLOWS.get(comparison.axis, ()):
            used, left = list_left_out(comparison, side, name)
            if used and left:
                kept, rest = ([value or "none" for value in part] for part in (used, left))
                yield (
                    f"{side.title}: only {name_axis(name)} {' or '.join(kept)} is compared, "
                    f"{', '.join(rest)} left out; --axis {name} compares one with another"
                )
    matched = comparison.matched
    if matched:
        both = f"with both values of {comparison.axis}" if comparison.axis else "in both"
        yield f"{count(len(matched), 'case')} {both}: {_write_common(comparison)}"
    else:
        yield f"no case in both: {explain_unmatched(comparison)}"
    if not any(comparison.environment()) and not comparison.differing_conditions():
        yield "no recorded difference in what ran them"
    if spoilt := list(_write_spoilt(comparison, matched)):
        yield (
            f"warning: do not rely on these times: {'; '.join(spoilt)}. Close other "
            "programs, or use --repeats 5 or more; a new --out keeps the old rows"
        )
    empty = [metric.name for metric, found in comparison.metrics.items() if not found]
    if matched and empty:
        yield f"not compared, because no run has a value: {', '.join(empty)}"
    limit, (one, two) = 1 + margins.verdict, comparison.names
    yield (
        f"speed is the time of {one} over that of {two}: above 1 is faster; any other ratio is "
        f"{two} / {one}; both of geometric means"
    )
    yield (
        "each has a 95 % interval; p is adjusted for the number of cases in a table (Holm); "
        f"the margin of {write_percent(margins.verdict)} is from {1 / limit:.4g} to {limit:.4g}"
    )


def _write_common(comparison: Comparison) -> str:
    """What all matched cases have in common."""
    hidden = {*comparison.telling, *comparison.free}
    ran = [case for match in comparison.matched for case in comparison.ran(match)]
    hidden |= {name for name in SAME_QUESTION if len({getattr(case, name) for case in ran}) > 1}
    return comparison.ask(ran[0]).label(name for name in AXES if name not in hidden)


def tabulate(comparison: Comparison, margins: Margins) -> Iterator[Table]:
    """All tables, in reading order: what ran the sides comes first."""
    names = comparison.names
    environment = [
        (name, " or ".join(a) or NOTHING, " or ".join(b) or NOTHING, "yes" * agree)
        for name, agree, a, b in comparison.environment()
    ]
    environment += [
        (condition.label, _write_summary(condition, a), _write_summary(condition, b), "")
        for condition, a, b in comparison.differing_conditions()
    ]
    if environment:
        labels = ("what", *names, "must agree")
        yield _tabulate("environment", "Differences in what ran them", labels, environment)
    outcomes = [
        (comparison.label(match), *comparison.ended(match), comparison.change(match))
        for match in comparison.matched
        if any({*side.outcomes(cell)} != {Status.OK} for side, cell in comparison.ends(match))
    ]
    if outcomes:
        labels = ("case", *names, "change")
        yield _tabulate("outcomes", "Cases with runs that did not end well", labels, outcomes)
    for metric, findings in comparison.metrics.items():
        if findings:
            yield _metric_table(comparison, metric, findings, margins.verdict)
        yield from _equivalence_table(comparison, metric, margins.equivalence)
    if comparison.kinds is not None:
        yield _kinds_table(comparison, comparison.kinds)
    for side in (comparison.a, comparison.b):
        if alone := [[comparison.label_alone(side, cell)] for cell in comparison.alone(side)]:
            yield _tabulate(f"only-{side.name}", f"Only in {side.title}", ["case"], alone)


def _kinds_table(comparison: Comparison, kinds: Sequence[KindChange]) -> Table:
    """The kinds of work that changed between two profiles of a case."""
    title = "Kinds of work that changed, of a step in ms"
    if not kinds:
        return Table("kinds", f"{title}: none beyond noise", (), (), (BEYOND,), level=Level.TABLE)
    numbers = (*comparison.names, "change", "of a step", "p")
    rows = [
        (
            comparison.label(kind.match),
            name_part(kind.change.name),
            write_ms(kind.change.before_s, kind.change.before_estimated),
            write_ms(kind.change.after_s, kind.change.after_estimated),
            ("+" if kind.change.change_s > 0 else "") + write_ms(kind.change.change_s),
            f"{100 * kind.change.change_s / kind.step_s:+.1f} %",
            _write_p(kind.p),
        )
        for kind in kinds
    ]
    labels = ("case", "kind of work", *numbers)
    return _tabulate("kinds", title, labels, rows, [BEYOND], numbers, Level.TABLE)


BEYOND = (
    f"Those that changed by more than {write_percent(STEADY)} of the step of "
    f"A; from {MIN_REPEATS} profiled repeats a side on, only what differs beyond chance."
)


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


def _write_spoilt(
    comparison: Comparison, matches: Sequence[Match], beside: bool = False
) -> Iterator[str]:
    """Each thing that `Comparison.spoilt` finds, once, with the runs of either side."""
    counts: dict[str, list[str]] = {}
    for side, condition, held in comparison.spoilt(matches, beside):
        where = f"{side.name} in {held.runs} of {held.of} runs"
        counts.setdefault(condition.label, []).append(where)
    yield from (f"{label}: {', '.join(where)}" for label, where in counts.items())


def _metric_table(
    comparison: Comparison, metric: Metric, findings: Sequence[MetricPair], margin: float
) -> Table:
    counts = Counter(finding.ratio.judge(margin) for finding in findings)
    summary = ", ".join(f"{counts[v]} {metric.word(v)}" for v in Verdict if v in counts)
    unit = f" in {metric.unit}" if metric.unit else ""
    ratio = "speed" if metric.speed else "ratio" if comparison.axis else "B/A"
    numbers = (*comparison.names, ratio, "95 % interval", "p", "runs")
    said = [list(remarks(comparison, metric, finding, margin)) for finding in findings]
    rest, notes = _gather(said)
    notes += [PAIRED] if any(finding.ratio.pairs for finding in findings) else []
    return _tabulate(
        metric.name,
        f"{capitalize(metric.label)}{unit}: {summary}",
        ("case", *numbers, "verdict", "remarks"),
        [
            (
                comparison.label(finding.match),
                *(_write_mean(side, metric) for side in finding.compared),
                *_write_ratio(metric.show(finding.ratio)),
                ", ".join(str(len(side)) for side in finding.compared),
                metric.word(finding.ratio.judge(margin)),
                text,
            )
            for finding, text in zip(findings, rest, strict=True)
        ],
        notes,
        numbers,
        Level.TABLE if metric is next(iter(comparison.metrics)) else Level.DETAIL,
    )


def _gather(said: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """The remarks of each row; those that every one of several rows has become a note."""
    common = [text for text in said[0] if len(said) > 1 and all(text in each for each in said)]
    notes = [f"All cases: {'; '.join(common)}."] if common else []
    return ["; ".join(text for text in each if text not in common) for each in said], notes


PAIRED = "Runs with the same seed are compared as pairs; without a pair they are left out."


def _equivalence_table(comparison: Comparison, metric: Metric, margin: float) -> Iterator[Table]:
    """Whether B may replace A without harm to a loss or an error, where several seeds were run."""
    judged = comparison.judge_equivalence(metric, margin)
    if not judged:
        return
    title = f"No loss of accuracy? {metric.label} equivalent within {write_percent(margin)}"
    if all(equivalence.seeds < 2 for _, equivalence in judged):
        note = (
            "One seed cannot tell. Run the sweep again with --repeats 5 and without --same-seed: "
            "each repeat then has its own seed."
        )
        yield Table(f"{metric.name}-equivalence", title, (), (), (note,))
        return
    counts = Counter(equivalence.verdict for _, equivalence in judged)
    summary = ", ".join(f"{counts[claim]} {claim.value}" for claim in Claim if claim in counts)
    numbers = ("ratio", "90 % interval", "p", "seeds", "seeds needed")
    rest, common = _gather(
        [
            [*describe_runs(comparison, metric, finding.match), *filter(None, [found.lack])]
            for finding, found in judged
        ]
    )
    notes = [
        *common,
        "Two one-sided tests (TOST) at 5 %; p is adjusted for the number of cases (Holm).",
        f"Worse or better: beyond the margin. {SEEDS_NEEDED}",
    ]
    yield _tabulate(
        f"{metric.name}-equivalence",
        f"{title}: {summary}",
        ("case", *numbers, "verdict", "remarks"),
        [
            (comparison.label(finding.match), *_write_equivalence(found), found.verdict.value, text)
            for (finding, found), text in zip(judged, rest, strict=True)
        ],
        notes,
        numbers,
    )


SEEDS_NEEDED = (
    f"Seeds needed: with which a verdict has a probability of {write_percent(verdict.POWER)}, "
    "estimated from the spread of these runs."
)


def _write_equivalence(found: Equivalence) -> tuple[str, str, str, str, str]:
    needed = NOTHING if found.seeds_needed is None else str(found.seeds_needed)
    if found.seeds_needed is None and found.verdict is Claim.UNCLEAR and found.p is not None:
        needed = f">{verdict.MOST_SEEDS}"
    interval = _write_interval(found.low, found.high)
    return write_number(found.ratio or 0), interval, _write_p(found.p), str(found.seeds), needed


def _write_interval(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return NOTHING
    return f"{write_number(low)} to {write_number(high)}"


def _write_p(p: float | None) -> str:
    return NOTHING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


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
    if ratio.exact:
        return write_number(ratio.value), "exact", NOTHING
    interval = _write_interval(ratio.low, ratio.high)
    return write_number(ratio.value), interval, _write_p(ratio.p_adjusted)


def describe_runs(comparison: Comparison, metric: Metric, match: Match) -> Iterator[str]:
    """What kind of runs a finding is of: of part of an epoch, of synthetic images, not measured."""
    if min(part.share for part in comparison.parts(match)) < 1:
        yield _write_parts(comparison, metric, match)
    for kind in ("synthetic", "fake", "published"):
        where = [
            side.name
            for side, cell in comparison.ends(match)
            if kind in (side.case(cell).dataset, *side.executors(cell))
        ]
        if where:
            yield kind if len(where) == 2 else f"{kind} in {where[0]}"


def remarks(
    comparison: Comparison, metric: Metric, finding: MetricPair, margin: float
) -> Iterator[str]:
    """What a reader must know about a finding before relying on it."""
    match = finding.match
    yield from describe_runs(comparison, metric, match)
    both = zip(comparison.ends(match), (finding.a, finding.b), strict=True)
    for (side, cell), values in both:
        outcomes = side.outcomes(cell)
        if set(outcomes) != {Status.OK}:
            yield f"{side.name} {write_outcomes(outcomes)}"
        elif len(values) < outcomes[Status.OK]:
            yield f"{side.name} lacks {outcomes[Status.OK] - len(values)} of its values"
    pairs = finding.ratio.pairs
    if pairs and any(len({seed for seed, _ in side}) > pairs for side in (finding.a, finding.b)):
        be = "is" if pairs == 1 else "are"
        yield f"only the {count(pairs, 'seed')} that both sides ran {be} compared"
    if metric.timed:
        yield from _write_spoilt(comparison, [match], beside=True)
    if why := finding.ratio.explain(margin):
        yield why


def _write_parts(comparison: Comparison, metric: Metric, match: Match) -> str:
    """Say that less than an epoch was measured, and on which side where only one did."""
    what = "extrapolated" if metric.name == "epoch_time_s" else "part of an epoch"
    one, two = comparison.parts(match)
    if one.share == two.share:
        return what
    named = zip(comparison.names, (one, two), strict=True)
    return f"{what}: " + ", ".join(f"{part} in {name}" for name, part in named if part.share < 1)


UNLIMITED = 10_000
"""Columns of all tables in full, where they go to a file or a pipe."""


def render_text(
    comparison: Comparison, margins: Margins, results: Sequence[Result], full: bool = False
) -> str:
    """The verdict, what to doubt and the first table on one screen; ``full`` for all there is."""
    width = shutil.get_terminal_size((UNLIMITED if full else WIDTH, 0)).columns
    tables = list(tabulate(comparison, margins))
    if full:
        said = [*conclude(comparison, margins.verdict), *introduce(comparison, margins)]
    else:
        said = list(_open(comparison, margins))
    lines = [piece for line in said for piece in _wrap(line, width)]
    if full:
        for table in tables:
            lines += ["", *_draw(table, width)]
        return "\n".join(lines) + "\n"
    wanted = [table for table in tables if table.level is Level.TABLE]
    shown = wanted[-1] if wanted else None  # the kinds of work, where they are asked for
    left = len(tables) - bool(shown)
    last = [f"{MORE} shows {count(left, 'more table')} and the conditions of both sides."]
    if shown:
        rows = len(shown.rows)
        while len(drawn := _draw(_cut(shown, rows), width)) + len(lines) + 3 > LINES and rows > 1:
            rows -= 1
        lines += ["", *drawn]
    return "\n".join([*lines, "", *last]) + "\n"


def _cut(table: Table, rows: int) -> Table:
    """The first rows of a table, and how many are left out."""
    left = len(table.rows) - rows
    notes = (
        (*table.notes, f"{say_left_out(left, 'row')}; {MORE} has them.") if left else table.notes
    )
    return replace(table, rows=table.rows[:rows], notes=notes)


def _open(comparison: Comparison, margins: Margins) -> Iterator[str]:
    """What is compared, the verdicts, and what to know before believing them."""
    a, b = comparison.a, comparison.b
    paths = "" if a.path == b.path else f" ({a.path}) and {b.title} ({b.path})"
    both = f"{a.title}{paths}" if paths else f"{a.title} and {b.title} in {a.path}"
    matched = comparison.matched
    if not matched:
        yield f"{both}: no case in both: {explain_unmatched(comparison)}"
        return
    cases = count(len(matched), "case")
    yield f"{both}: {cases} in both, {_write_common(comparison)}."
    yield from conclude(comparison, margins.verdict)
    if said := advise(comparison, margins.verdict):
        yield said
    differing = [
        f"{name} {' or '.join(of_a) or NOTHING} and {' or '.join(of_b) or NOTHING}"
        for name, agree, of_a, of_b in comparison.environment()
        if agree
    ]
    differing += [
        f"{condition.label} {_write_summary(condition, of_a)} and {_write_summary(condition, of_b)}"
        for condition, of_a, of_b in comparison.differing_conditions()
    ]
    if differing:
        yield f"! They differ in {name_first(differing, 2, '; ')}."
    if spoilt := list(_write_spoilt(comparison, matched)):
        yield (
            f"! Do not rely on these times: {name_first(spoilt, 2, '; ')}. Close other programs "
            "and run again, into a new --out."
        )
    alone = [
        f"{count(len(cells), 'case')} only in {side.title}"
        for side in (a, b)
        if (cells := comparison.alone(side))
    ]
    if alone:
        yield f"! Not compared: {', '.join(alone)}."


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        make_printable(text),
        width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _draw(table: Table, width: int) -> list[str]:
    console = make_plain(width)
    draw_table(table, console)
    return read_plain(console).splitlines()


def render_markdown(
    comparison: Comparison, margins: Margins, results: Sequence[Result], full: bool = True
) -> str:
    """The comparison as GitHub-flavoured Markdown, to paste: the verdict, then all tables."""
    from bench.render.markdown import escape, table_lines

    said = [*conclude(comparison, margins.verdict), *introduce(comparison, margins)]
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
    """The comparison with all raw values, for machines; SI units."""
    margin = margins.verdict
    document = {
        "axis": comparison.axis or None,
        **{
            key: {
                "name": side.name,
                "path": str(side.path),
                "runs": comparison.count(side)[1],
            }
            for key, side in (("a", comparison.a), ("b", comparison.b))
        },
        "margin": margin,
        "confidence": CONFIDENCE,
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
                **_name_match(comparison, match),
                **{
                    k: s.outcomes(c) for k, (s, c) in zip("ab", comparison.ends(match), strict=True)
                },
                "change": comparison.change(match),
            }
            for match in comparison.matched
        ],
        "metrics": {
            metric.name: [
                {
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
                        {"side": side.name, "condition": condition.name, **asdict(count)}
                        for side, condition, count in comparison.spoilt([finding.match])
                        if metric.timed
                    ],
                    "remarks": list(remarks(comparison, metric, finding, margin)),
                }
                for finding in findings
            ]
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
        "kinds": None
        if comparison.kinds is None
        else [
            {
                **_name_match(comparison, kind.match),
                "kind": kind.change.name,
                "a_s": kind.change.before_s,
                "b_s": kind.change.after_s,
                "a_estimated": kind.change.before_estimated,
                "b_estimated": kind.change.after_estimated,
                "step_a_s": kind.step_s,
                "p": kind.p,
            }
            for kind in comparison.kinds
        ],
        "only_in_a": _name_alone(comparison, comparison.a),
        "only_in_b": _name_alone(comparison, comparison.b),
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


def _name_match(comparison: Comparison, match: Match) -> dict[str, Any]:
    """Name a match by what its cases have in common, and by both cases."""
    one, two = map(asdict, comparison.ran(match))
    common = {name: value for name, value in one.items() if two[name] == value}
    both = {"case_a": one, "case_b": two} if one != two else {}
    return {"case": common, **both, "environment": dict(match.told)}


def _name_alone(comparison: Comparison, side: Side) -> list[dict[str, Any]]:
    return [
        {**asdict(side.case(cell)), "environment": dict(told)}
        for cell, told in comparison.alone(side).items()
    ]


def _to_json(value: Summarized) -> Any:
    return asdict(value) if isinstance(value, Count) else value


FORMATS = {"text": render_text, "md": render_markdown, "json": render_json}
