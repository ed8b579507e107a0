"""Two sides, matched case by case, and the comparison of their repeats for every metric, with the
findings for which ``--fail-on`` returns 1. A side is a sweep, or its cases with one value of an
axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench.axis import Trait, Value
from bench.case import (
    AXES,
    SAME_QUESTION,
    SWITCHES,
    UNTIMED,
    Case,
    format_value,
    free_axes,
    list_affecting,
    list_varying,
    parse_value,
    spell_value,
)
from bench.errors import UsageError, nearest
from bench.flags import parse_percent
from bench.record import COMPARABLE, MODEL_PARTS, REPEATED, Status
from bench.rules import applies
from bench.store.reader import read_rows
from bench.store.rows import fill_unknown, group, keep_cases, keep_latest
from bench.study.axes import name_axis, name_setting, parse_name
from bench.study.doubts import DOUBTS
from bench.study.pairs import EnvironmentKey, Match, Matches
from bench.study.pairs import match as match_cases
from bench.study.quantities import MEMORY, METRICS, Metric
from bench.study.runs import Run, link_runs, list_readings, list_runs
from bench.text import make_printable, write_number
from bench.verdict import (
    GUESSING,
    Equivalence,
    Ratio,
    Seeded,
    Verdict,
    average_seeds,
    compare_seeds,
    find_classes,
    is_guessing,
    judge_equivalences,
    withdraw_if_guessing,
)
from bench.verdict import compare as compare_repeats

Readings = list[tuple[int, float]]  # seed and value of each repeat


@dataclass(frozen=True, eq=False)
class SideCase:
    """A case as one side ran it, in one environment."""

    runs: list[Run]

    @property
    def case(self) -> Case:
        return self.runs[0].case

    def readings(self, metric: Metric) -> Readings:
        """Return seed and value of each usable repeat that has a value."""
        return list_readings(metric, self.runs)

    @property
    def classes(self) -> int | None:
        """The classes that the loss distinguishes; see `find_classes`."""
        run, case = self.runs[0], self.case
        return find_classes(case.workload, case.classes, run.dataset_classes)

    @cached_property
    def outcomes(self) -> dict[str, int]:
        return dict(Counter(run.status + " (inferred)" * run.inferred for run in self.runs))

    @property
    def ended(self) -> str:
        """The outcomes of its runs: ``ok ×4, oom``."""
        return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in self.outcomes.items())

    @property
    def severities(self) -> tuple[int, ...]:
        """The best and the worst of its runs: 0 is ok, 1 diverged, 2 unusable. Empty if all runs
        were stopped from outside, which says nothing about the case."""
        order = {Status.OK: 0, Status.DIVERGED: 1}
        found = [order.get(run.status, 2) for run in self.runs if run.status not in REPEATED]
        return (min(found), max(found)) if found else ()


@dataclass(frozen=True, eq=False)
class Side:
    """One side: the latest attempt at each of its runs, without sentinels. Their ``cell`` tells
    cases in each environment apart."""

    name: str  # in tables: A, B, or a value of an axis, such as ``on``
    title: str  # in sentences, such as ``compile default``
    path: Path
    runs: list[Run]

    @cached_property
    def ran(self) -> dict[int, SideCase]:
        return {runs[0].cell: SideCase(runs) for runs in group(self.runs, attrgetter("cell"))}

    @property
    def cells(self) -> list[Run]:
        """A run of each cell, as `bench.study.pairs.match` takes it."""
        return [one.runs[0] for one in self.ran.values()]

    def list_values(self, axis: str) -> list[Value]:
        """Return the values of an axis, in order, from cases to which it applies."""
        cases = (run.case for run in self.runs)
        return list(dict.fromkeys(getattr(c, axis) for c in cases if applies(axis, c)))

    def take(self, axis: str, value: Value) -> Side:
        """Return the cases with one value of an axis."""
        title = name_setting(axis, spell_value(value))
        name = format_value(value) if axis in SWITCHES else title
        runs = [r for r in self.runs if getattr(r.case, axis) == value and applies(axis, r.case)]
        return replace(self, name=name, title=title, runs=runs)

    def environment(self, name: str) -> list[str]:
        """Return the distinct values of an environment column, without empty ones."""
        values = dict.fromkeys(str(getattr(run, name)) for run in self.runs)
        return [value for value in values if value not in ("", "nan")]


def read_side(name: str, path: Path) -> Side:
    """Read one side. Raises UsageError: it has no records of sweeps, or they cannot be read."""
    kept = keep_cases(link_runs(list_runs(read_rows(path))))
    if not kept:
        raise UsageError(f"{path}: no records of a sweep yet; compare sweeps that have run")
    runs = link_runs(keep_latest(kept))
    # a run that ended before reading its environment takes that of its case
    for part in group(runs, lambda run: run.asked):
        for run, told in zip(part, fill_unknown(part), strict=True):
            vars(run).update(zip(COMPARABLE, told, strict=True))
    tell, cells = attrgetter("asked", *COMPARABLE), dict[Any, int]()
    for run in runs:
        run.cell = cells.setdefault(tell(run), len(cells))
    return Side(name, name, path, runs)


# --------------------------------------------------------------------------------------- comparison


SPOILING = ("throttled", "contended", "unsettled", "noisy")
"""Doubts with which times are not relied on."""


def choose_metrics(a: Side, b: Side) -> list[Metric]:
    """Return time, loss, energy, and the first measure of memory and test error of both sides."""

    def have(column: str) -> bool:
        told = ([getattr(run, column) for run in side.runs] for side in (a, b))
        return all(any(value == value for value in values) for values in told)

    memory = next(filter(have, MEMORY), next(iter(MEMORY)))
    error = METRICS["test_top1_error"]
    errors = [error] if have(error.error_of) else []
    return [METRICS[c] for c in ("epoch_time_s", memory, "train_loss", "energy_j")] + errors


@dataclass(frozen=True)
class MetricPair:
    """One metric of one match: the seed and value of each repeat of both sides, and their ratio."""

    match: Match
    a: Readings
    b: Readings
    ratio: Ratio

    @property
    def seeded(self) -> Seeded:
        return group_seeds(self.a), group_seeds(self.b)


def group_seeds(readings: Readings) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for seed, value in readings:
        values.setdefault(seed, []).append(value)
    return values


@dataclass(frozen=True)
class Comparison:
    """The comparison of two sides. Margins are fractions: the smallest differences that matter, for
    verdicts and for equivalence."""

    a: Side
    b: Side
    matches: Matches
    metrics: dict[Metric, list[MetricPair]]
    axis: str  # the axis whose two values are the sides; empty for two sweeps
    apart: tuple[str, ...]  # axes of `UNTIMED` of which the sides share no value
    margin: float
    equal: float  # the margin of equivalence

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.b

    @property
    def names(self) -> tuple[str, str]:
        return self.a.name, self.b.name

    @property
    def matched(self) -> Sequence[Match]:
        """Cases on both sides, in the order of A."""
        return self.matches.pairs

    def ends(self, match: Match) -> tuple[SideCase, SideCase]:
        """Return a matched case as run by A and by B."""
        return self.a.ran[match.a], self.b.ran[match.b]

    def is_asked(self, name: str) -> bool:
        """Return whether an environment column depends on the compared axis."""
        return self.axis != "device" and self.axis in COMPARABLE.get(name, ())

    def list_differences(self) -> Iterator[tuple[str, str, str]]:
        """Yield the columns, of those on which rows of one sweep agree, in which the sides differ,
        with A's and B's values."""
        for name in (*COMPARABLE, "power_limit_w"):
            a, b = (side.environment(name) for side in self.sides)
            if not self.is_asked(name) and {*a} != {*b}:
                yield name, " or ".join(a) or "none", " or ".join(b) or "none"

    def spoilt(self, matches: Sequence[Match]) -> list[str]:
        """Name the doubts that make the times of these matches unreliable: ``noisy in B``."""
        found = []
        for name in SPOILING:
            for place, side in enumerate(self.sides):
                if any(getattr(run, name) for m in matches for run in self.ends(m)[place].runs):
                    found.append(f"{DOUBTS[name].remark} in {side.name}")
        return found

    def change(self, match: Match) -> str:
        """Return whether a match is broken or fixed in B; empty if neither."""
        one, two = self.ends(match)
        both = list(zip(one.severities, two.severities, strict=False))
        if any(after > before for before, after in both):
            return "broken"
        return "fixed" if any(after < before for before, after in both) else ""

    def label(self, match: Match) -> str:
        return self._name(self.a.ran[match.a].case, match.told)

    def label_alone(self, place: int) -> list[str]:
        """Name the cases that only A (0) or only B (1) has."""
        ran, alone = self.sides[place].ran, self.matches.alone[place]
        return [self._name(ran[cell].case, told) for cell, told in alone.items()]

    def _name(self, case: Case, told: EnvironmentKey) -> str:
        where = (f"{name} {value or 'none'}" for name, value in told)
        return " · ".join([self._ask(case).label(self._telling), *where])

    def name_common(self) -> str:
        """Name the settings that all cases share."""
        hidden = {*self._telling, *self._free, *SAME_QUESTION}
        case = self._ask(self.a.ran[self.matched[0].a].case)
        return case.label(name for name in AXES if name not in hidden)

    @property
    def _free(self) -> tuple[str, ...]:
        return (*free_axes(self.axis), *self.apart)

    def _ask(self, case: Case) -> Case:
        neutral: dict[str, Any] = {name: AXES[name].default for name in self._free}
        return replace(case, **neutral)

    @cached_property
    def _telling(self) -> list[str]:
        """The axes that tell the cases apart; of B only those that A lacks. How a case was measured
        tells it apart only if one was measured in several ways."""
        ran = [*self.a.ran.values(), *(self.b.ran[cell] for cell in self.matches.alone[1])]
        cases = {self._ask(one.case) for one in ran}
        neutral: dict[str, Any] = {name: AXES[name].default for name in SAME_QUESTION}
        whole = {replace(case, **neutral) for case in cases}
        varying = list_varying(whole if len(whole) == len(cases) else cases)
        return [name for name in varying if name not in self._free]

    def judge_equivalence(self, metric: Metric) -> list[tuple[MetricPair, Equivalence]]:
        """Test each case with a ratio for equivalence of B's loss or error to A's, as one family.
        Empty for a metric that does not depend on the seed."""
        findings = [f for f in self.metrics[metric] if metric.seeded and f.ratio.value is not None]
        judged = judge_equivalences([f.seeded for f in findings], self.equal)
        return [
            (f, withdraw_if_guessing(e, self.guessing(f.match)))
            for f, e in zip(findings, judged, strict=True)
        ]

    def guessing(self, match: Match) -> list[bool]:
        """Return for each side with a training loss whether it is still that of guessing."""
        return [
            is_guessing(average_seeds(group_seeds(read)), end.classes)
            for end in self.ends(match)
            if (read := end.readings(METRICS["train_loss"]))
        ]


def compare(
    a: Side,
    b: Side,
    metrics: Sequence[Metric],
    axis: str = "",
    margin: float = 0.02,
    equal: float = 0.02,
) -> Comparison:
    """Compare two sweeps, or two values of an axis; the cases of a metric are one family. For cases
    measured on different parts of an epoch, metrics that depend on that are not compared."""
    held = [{name: {getattr(run, name) for run in s.runs} for name in UNTIMED} for s in (a, b)]
    apart = tuple(name for name in UNTIMED if not axis and held[0][name].isdisjoint(held[1][name]))
    matches = match_cases(a.cells, b.cells, axis, apart)
    comparison = Comparison(a, b, matches, {}, axis, apart, margin, equal)
    for metric in metrics:
        found = []
        for match in comparison.matched:
            of_a, of_b = (end.readings(metric) for end in comparison.ends(match))
            if of_a or of_b:
                refused = Ratio(lack=_refuse(comparison, metric, match))
                found.append(MetricPair(match, of_a, of_b, refused))
        family = [one for one in found if not one.ratio.lack]
        if metric.seeded:
            ratios = compare_seeds([one.seeded for one in family])
        else:
            samples = [([v for _, v in one.a], [v for _, v in one.b]) for one in family]
            ratios = compare_repeats(samples, metric.deterministic)
        judged = iter(ratios)
        for place, one in enumerate(found):
            if not one.ratio.lack:
                ratio, guessing = next(judged), metric.seeded and comparison.guessing(one.match)
                if guessing and all(guessing) and not ratio.lack:
                    ratio = replace(ratio, lack=GUESSING)
                found[place] = replace(one, ratio=ratio)
        comparison.metrics[metric] = found
    return comparison


def _refuse(comparison: Comparison, metric: Metric, match: Match) -> str:
    if comparison.apart and metric.seeded:
        return f"the sides differ in {' and '.join(map(name_axis, comparison.apart))}"
    one, two = (end.runs[0] for end in comparison.ends(match))
    # times are per epoch or step, memory is a peak; all other metrics are of the measured steps
    of_part = metric.seeded or metric is METRICS["energy_j"]
    if not (of_part and one.part_known and two.part_known):
        return ""
    if one.part != two.part:
        return f"{one.part:.3g} and {two.part:.3g} of an epoch cannot be compared; use --fraction 1"
    learnt = metric.seeded and comparison.axis in list_affecting(Trait.LEARNING)
    if learnt and one.part < 1:
        return "less than an epoch does not show what it does to learning; use --fraction 1"
    return ""


def refuse_other_models(comparison: Comparison) -> None:
    """Refuse to compare different networks of one name. Parts that are not known, or that depend on
    the compared axis, do not count; nor do source files between two machines, which may have two
    versions of this harness. Raises UsageError."""
    here, there = ({(run.gpu, run.cpu) for run in side.runs} for side in comparison.sides)
    for match in comparison.matched:
        one, two = (end.runs[0] for end in comparison.ends(match))
        for name, what in MODEL_PARTS.items():
            ours, theirs = getattr(one, name), getattr(two, name)
            elsewhere = name == "model_source" and here.isdisjoint(there)
            if elsewhere or comparison.is_asked(name):
                continue
            if ours and theirs and ours != theirs:
                raise UsageError(
                    f"{comparison.a.title} and {comparison.b.title} trained different networks: "
                    f"{make_printable(one.model)} changed in {what}; to compare them anyway, add "
                    "--mix"
                )


def parse_axis(texts: Sequence[str]) -> tuple[str, list[Value]]:
    """Read the name of an axis and no values or two. Raises UsageError: the axis is unknown, there
    are not two different values, or one is invalid for the axis."""
    name, *values = texts
    name = parse_name("--axis", name, list(AXES))
    parsed = [parse_value(name, text, f"--axis {name}") for text in values]
    if len({*parsed}) != len(parsed) or len(parsed) not in (0, 2):
        raise UsageError(
            f"--axis {' '.join(texts)}: give two different values of {name}, after the sweeps"
        )
    return name, parsed


def take_values(a: Side, b: Side | None, axis: str, values: Sequence[Value]) -> tuple[Side, Side]:
    """Take one value of ``axis`` from each sweep, or both from ``a``; ``values`` may be empty if
    there is only one choice. Raises UsageError: a sweep has no case with a value, or the values
    must be given."""
    held = [side.list_values(axis) for side in (a, b) if side]
    wanted = values or [value for found in held for value in found]
    if len({*wanted}) == len(wanted) == 2 and wanted[0] in held[0] and wanted[1] in held[-1]:
        return a.take(axis, wanted[0]), (b or a).take(axis, wanted[1])
    has = " and ".join(", ".join(map(spell_value, found)) or "none" for found in held)
    told = " ".join(map(spell_value, values))
    raise UsageError(
        f"--axis {axis} {told}".rstrip()
        + f": name two values of {axis} that were measured, one of each sweep if there are two; "
        f"there is {has}"
    )


# -------------------------------------------------------------------------------------------- gates


OUTCOME_FINDINGS = {
    "broken": "a repeat fails or diverges in B where none did in A",
    "missing": "a case is in A and not in B",
    "unjudged": "a case was measured on both sides and has no verdict",
}
"""Words that --fail-on accepts besides the verdicts on metrics."""


@dataclass(frozen=True)
class Gate:
    """A finding for which --fail-on returns 1, and how large it must be."""

    text: str
    word: str
    margin: float


def parse_gate(text: str, margin: float) -> Gate:
    """Read ``slower:5%``, or ``slower`` with the margin of the comparison. Raises UsageError: the
    word is not a finding, or the percentage is not valid."""
    word, colon, percent = text.partition(":")
    verdicts = list(dict.fromkeys(w for m in METRICS.values() for w in (m.lower, m.higher)))
    if word not in verdicts and (word not in OUTCOME_FINDINGS or colon):
        raise UsageError(f"--fail-on {text!r}: {nearest(text, [*verdicts, *OUTCOME_FINDINGS])}")
    return Gate(text, word, parse_percent(f"--fail-on {text!r}", percent) if colon else margin)


def _find(comparison: Comparison, gate: Gate) -> Iterator[str]:
    if gate.word == "broken":
        for match in comparison.matched:
            if comparison.change(match) == "broken":
                yield f"{comparison.label(match)}: {write_change(comparison, match)}"
    elif gate.word == "missing":
        yield from comparison.label_alone(0)
    for metric, findings in comparison.metrics.items():
        for finding in findings:
            judged = finding.ratio.judge(gate.margin)
            unjudged = judged is Verdict.NONE and finding.a and finding.b
            if metric.word(judged) == gate.word or (unjudged and gate.word == "unjudged"):
                shown = metric.show(finding.ratio).value or 0
                what = finding.ratio.lack or f"{'speed ' * metric.speed}{write_number(shown)}×"
                yield f"{comparison.label(finding.match)}: {metric.label}: {what}"


def write_change(comparison: Comparison, match: Match) -> str:
    """Write how the runs of a match ended: ``ok ×3 → oom ×3``."""
    return " → ".join(end.ended for end in comparison.ends(match))


@dataclass(frozen=True)
class Result:
    """The result of a gate: its findings, and how many verdicts it checked (one for each case and
    metric), or for a gate on outcomes, how many cases."""

    gate: Gate
    failures: list[str]  # one line each
    judged: int
    unjudged: int  # measured, without a verdict or with an interval that rules nothing out
    why: str  # a reason for these

    @property
    def passed(self) -> bool:
        """Whether it found nothing, and had something to check."""
        return bool(self.judged) and not self.failures


def pass_gate(comparison: Comparison, gate: Gate) -> Result:
    """Check a gate, and count what it could judge."""
    failures = list(_find(comparison, gate))
    if gate.word in OUTCOME_FINDINGS:
        checked = len(comparison.matched)
        if gate.word == "missing":
            checked += len(failures)
        return Result(gate, failures, checked, 0, "no case is in both")
    ratios = [
        finding.ratio
        for metric, findings in comparison.metrics.items()
        if gate.word in (metric.lower, metric.higher)
        for finding in findings
    ]
    lacks = [r.lack for r in ratios if r.judge(gate.margin) is Verdict.NONE]
    lacks += ["its interval rules nothing out" for r in ratios if r.rules_out_nothing(gate.margin)]
    why = next(iter(lacks), f"no metric that can be {gate.word} was measured in both")
    return Result(gate, failures, len(ratios) - len(lacks), len(lacks), why)


def describe_result(result: Result) -> Iterator[str]:
    """Yield lines on a gate that failed, or that could not judge all cases."""
    for line in result.failures:
        yield f"fail: {result.gate.text}: {make_printable(line)}"
    why = make_printable(result.why)
    if not result.judged:
        yield f"fail: {result.gate.text}: no case could be judged: {why}"
    elif result.unjudged:
        yield (
            f"warning: --fail-on {result.gate.text}: {result.unjudged} of "
            f"{result.judged + result.unjudged} cases could not be judged: {why}"
        )
