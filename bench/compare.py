"""`python -m bench.compare A B`: what changed from sweep A, the baseline, to sweep B.

Cases are matched by all their axes and, where a side holds runs of one case on several GPUs or
under several versions, by what ran them too. Of each run the latest attempt counts; sentinels do
not. Every metric is better when lower. How a verdict is reached stands in `bench.verdict`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import conditions, verdict
from bench.attempts import fill_unknown, keep_latest, number_groups
from bench.case import AXES, Case, telling_axes
from bench.conditions import CONDITIONS, TREND, Condition, Count, Summarized
from bench.errors import UsageError, nearest
from bench.flags import Parser, run_command
from bench.record import COMPARABLE, Environment, Status
from bench.report.derive import DOUBTS, GIB, MEMORY, write_number
from bench.report.tables import NOTHING, Cell, Head, Table
from bench.store import clean, read_cases, read_records
from bench.verdict import Ratio, Verdict

if TYPE_CHECKING:
    import pandas as pd

# ---------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True)
class Metric:
    """What is compared: a column, how it is named and written.

    Attributes:
        name: the column's, unless ``error_of`` has it.
        error_of: a column of accuracies, fractions of 1, where what is compared is 1 minus these.
        lower: the verdict where B is below A; ``higher`` where it is above.
        scale: base units in a ``unit``, for people.
        deterministic: may repeat to the last digit, and is then judged exactly. An allocator
            serves the same requests with the same bytes. NVML counts in steps of 2 MiB, which hide
            a spread smaller than that; against a margin of 2 % they matter below 100 MiB.
        seeded: depends on the seed, and is judged over seeds.
        timed: depends on what else the machine did, and is in doubt where that was much.
        diverged: is a measurement even where the loss became inf or NaN. Loss is not, nor is
            energy: arithmetic on NaN toggles fewer transistors.
    """

    name: str
    label: str
    lower: str
    higher: str
    unit: str = ""
    scale: float = 1
    deterministic: bool = False
    seeded: bool = False
    timed: bool = False
    diverged: bool = False
    error_of: str = ""

    @property
    def column(self) -> str:
        """The column of the records that is read."""
        return self.error_of or self.name

    def read(self, cell: float) -> float:
        """What is compared of a cell of that column."""
        return 1 - cell if self.error_of else float(cell)

    def word(self, verdict: Verdict) -> str:
        """Name a verdict on this metric."""
        words = {Verdict.LOWER: self.lower, Verdict.HIGHER: self.higher}
        return words.get(verdict, verdict.value)


def _time(column: str, label: str) -> Metric:
    return Metric(column, label, "faster", "slower", "s", timed=True, diverged=True)


def _memory(column: str, label: str) -> Metric:
    return Metric(column, label, "less", "more", "GiB", GIB, deterministic=True, diverged=True)


def _loss(column: str, label: str) -> Metric:
    return Metric(column, label, "lower", "higher", seeded=True)


def _error(name: str, label: str, accuracy: str) -> Metric:
    return Metric(name, label, "lower", "higher", "%", 0.01, seeded=True, error_of=accuracy)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _time("epoch_time_s", "epoch time"),
        _time("step_time_median_s", "median step time"),
        _time("eval_time_s", "evaluation time"),
        _time("warmup_time_s", "warm-up time"),
        *(_memory(column, f"peak memory of {what}") for column, what in MEMORY.items()),
        _loss("train_loss", "training loss"),
        _loss("test_loss", "test loss"),
        _error("train_top1_error", "training top-1 error", "train_accuracy"),
        _error("test_top1_error", "test top-1 error", "test_accuracy"),
        Metric("energy_j", "energy of the measured steps", "less", "more", "J", timed=True),
    )
}

OUTCOME_FINDINGS = {
    "broken": "ends worse in B: a repeat fails or diverges where none did",
    "missing": "in A, not in B",
    "unjudged": "measured on both sides, but no verdict",
}
"""What --fail-on takes beside the verdicts on metrics."""


def choose_metrics(a: Side, b: Side) -> list[Metric]:
    """Time, loss, energy, and the first measure of memory that both sides have."""
    memory = next((c for c in MEMORY if a.has(c) and b.has(c)), next(iter(MEMORY)))
    return [METRICS[c] for c in ("epoch_time_s", memory, "train_loss", "energy_j")]


# ------------------------------------------------------------------------------------------ sides


@dataclass(frozen=True)
class Subject:
    """What is compared: a case and, where a side holds it of several environments, which of them.

    ``environment`` has columns of `COMPARABLE` and their values; mostly it is empty.
    """

    case: Case
    environment: tuple[tuple[str, str], ...] = ()

    def label(self, axes: Iterable[str]) -> str:
        """Name it by ``axes`` of the case, and by its environment."""
        where = (f"{name} {value or 'none'}" for name, value in self.environment)
        return " · ".join([self.case.label(axes), *where])


@dataclass(frozen=True)
class Side:
    """One sweep: the latest attempt at each of its runs, sentinels left out.

    Attributes:
        rows: positions among the records of the runs of each subject.
    """

    name: str
    path: Path
    records: pd.DataFrame
    rows: dict[Subject, list[int]]

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        names = {m.column for m in METRICS.values()}
        names |= {"status", "inferred", "executor", "run_seed"}
        names |= {c.column for c in CONDITIONS} | {c.known or c.column for c in CONDITIONS}
        return {name: self.records[name].tolist() for name in names}

    @cached_property
    def environments(self) -> dict[str, list[str]]:
        """The columns of `COMPARABLE`; what a run did not get to know is its case's."""
        filled = fill_unknown(self.records, number_groups(self.records, AXES))
        return {name: filled[name].tolist() for name in COMPARABLE}

    def has(self, column: str) -> bool:
        """Whether any run has a value of ``column``."""
        return bool(self.records[column].notna().any())

    def readings(self, subject: Subject, metric: Metric) -> list[tuple[int, float]]:
        """What the subject's runs measured: seed and value of each repeat that has one."""
        values, statuses = self._columns[metric.column], self._columns["status"]
        counted = {Status.OK, Status.DIVERGED} if metric.diverged else {Status.OK}
        rows = [i for i in self.rows.get(subject, []) if statuses[i] in counted]
        seeds = self._columns["run_seed"]
        # NaN is empty
        return [(int(seeds[i]), metric.read(values[i])) for i in rows if values[i] == values[i]]

    def cells(self, subject: Subject, condition: Condition) -> list[Any]:
        """What those of the subject's runs that were measured and are used know of a condition."""
        cells, statuses = self._columns[condition.column], self._columns["status"]
        known = self._columns[condition.known or condition.column]
        rows = [i for i in self.rows[subject] if statuses[i] in {Status.OK, Status.DIVERGED}]
        return [cells[i] for i in rows if known[i] == known[i]]

    def outcomes(self, subject: Subject) -> dict[str, int]:
        """How many of the subject's runs ended in each way."""
        statuses, inferred = self._columns["status"], self._columns["inferred"]
        rows = self.rows.get(subject, [])
        return dict(Counter(statuses[i] + " (inferred)" * inferred[i] for i in rows))

    def severities(self, subject: Subject) -> list[int]:
        """Of the subject's runs, best first: 0 is ok, 1 diverged, 2 not to be used."""
        order = {Status.OK: 0, Status.DIVERGED: 1}
        return sorted(order.get(self._columns["status"][i], 2) for i in self.rows.get(subject, []))

    def executors(self, subject: Subject) -> set[str]:
        """What ran the subject."""
        return {self._columns["executor"][i] for i in self.rows.get(subject, [])}

    def ran_on(self, rows: Iterable[int], names: Iterable[str]) -> set[tuple[tuple[str, str], ...]]:
        """The distinct environments of some runs, as far as ``names`` tell them apart."""
        columns, names = self.environments, list(names)
        return {tuple((name, columns[name][i]) for name in names) for i in rows}

    def environment(self, name: str) -> list[str]:
        """The distinct values of an environment column; none where all are empty."""
        values = dict.fromkeys(self.records[name].tolist())  # as many calls as columns: no pandas
        return [write_plain(value) for value in values if value == value and value != ""]

    def mixes(self, name: str) -> bool:
        """Whether runs on one device, of one dataset or one model disagree on what must agree."""
        if name not in COMPARABLE:
            return False
        known = self.records[self.records[name] != ""]
        return bool((known.groupby(COMPARABLE[name])[name].nunique() > 1).any())


def write_plain(value: object) -> str:
    """Write an environment's value; a whole number without ``.0``."""
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def read_side(name: str, path: Path) -> Side:
    """Read one side of the comparison.

    Raises:
        UsageError: it has no records, or they cannot be read.
    """
    records = read_records(path)
    records = records[~records["sentinel"]]
    if not len(records):
        raise UsageError(f"{path}: no record there yet; compare sweeps that have run")
    records = keep_latest(records).reset_index(drop=True)
    records[TREND] = DOUBTS[TREND].find(records)
    rows: dict[Subject, list[int]] = {}
    for position, case in enumerate(read_cases(records)):
        rows.setdefault(Subject(case), []).append(position)
    return Side(name, path, records, rows)


def part(a: Side, b: Side) -> tuple[Side, Side]:
    """Tell apart, on both sides, what one of them ran under several environments.

    The columns in which a side's runs of one case differ are matched as the axes are, those of them
    that have a value on both sides; runs that then still are of several environments stay
    unmatched, each by itself.
    """
    parted: tuple[dict[Subject, list[int]], dict[Subject, list[int]]] = ({}, {})
    for subject in dict.fromkeys([*a.rows, *b.rows]):
        sides = [(side, side.rows.get(subject, [])) for side in (a, b)]
        found = {
            name: [{value for ((_, value),) in side.ran_on(rows, [name])} for side, rows in sides]
            for name in COMPARABLE
        }
        varying = [name for name, (x, y) in found.items() if len(x) > 1 or len(y) > 1]
        shared = [name for name in varying if found[name][0] & found[name][1]]
        keys = [side.ran_on(rows, shared) for side, rows in sides]
        pure = {
            key
            for key in keys[0] & keys[1]
            if all(len(side.ran_on(_within(side, rows, key), varying)) == 1 for side, rows in sides)
        }
        for (side, rows), into in zip(sides, parted, strict=True):
            for i in rows:
                (key,) = side.ran_on([i], shared)
                (every,) = side.ran_on([i], varying)
                which = replace(subject, environment=key if key in pure else every)
                into.setdefault(which, []).append(i)
    return replace(a, rows=parted[0]), replace(b, rows=parted[1])


def _within(side: Side, rows: Iterable[int], key: tuple[tuple[str, str], ...]) -> list[int]:
    return [i for i in rows if all(side.environments[name][i] == value for name, value in key)]


# ------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Finding:
    """One metric of one subject on both sides: seed and value of each repeat."""

    subject: Subject
    a: list[tuple[int, float]]
    b: list[tuple[int, float]]
    ratio: Ratio


@dataclass(frozen=True)
class Comparison:
    """All that is said of two sweeps, before it is judged against a margin."""

    a: Side
    b: Side
    metrics: dict[Metric, list[Finding]]

    @property
    def matched(self) -> list[Subject]:
        """Subjects on both sides, in the order of A."""
        return [subject for subject in self.a.rows if subject in self.b.rows]

    def only_in(self, side: Side) -> list[Subject]:
        """Subjects on one side alone."""
        other = self.b if side is self.a else self.a
        return [subject for subject in side.rows if subject not in other.rows]

    def environment(self) -> Iterator[tuple[str, bool, list[str], list[str]]]:
        """What ran them and differs: column, whether it must agree, A's and B's values.

        Those that must agree come first, also where each side mixes the same values.
        """
        names = [field.name for field in fields(Environment)]
        for name in sorted(names, key=lambda name: name not in COMPARABLE):
            a, b = self.a.environment(name), self.b.environment(name)
            if set(a) != set(b) or self.a.mixes(name):
                yield name, name in COMPARABLE, a, b

    @cached_property
    def conditions(self) -> list[tuple[Condition, Summarized, Summarized]]:
        """What was read while the matched subjects ran, A's and B's, where a side knows it."""
        both = (
            (
                condition,
                self._summarize(self.a, condition, self.matched),
                self._summarize(self.b, condition, self.matched),
            )
            for condition in CONDITIONS
        )
        return [(condition, a, b) for condition, a, b in both if a is not None or b is not None]

    @staticmethod
    def _summarize(side: Side, condition: Condition, subjects: Sequence[Subject]) -> Summarized:
        return conditions.summarize(condition, [side.cells(s, condition) for s in subjects])

    def differing_conditions(self) -> list[tuple[Condition, Summarized, Summarized]]:
        """Those that differ by so much that it is told."""
        return [found for found in self.conditions if conditions.differ(*found)]

    def spoilt(self, subjects: Sequence[Subject]) -> Iterator[tuple[Side, Condition, Count]]:
        """What puts times of ``subjects`` in doubt, and in how many of a side's runs."""
        for side in (self.a, self.b):
            for condition in CONDITIONS:
                count = self._summarize(side, condition, subjects) if condition.spoils else None
                if isinstance(count, Count) and count.runs:
                    yield side, condition, count

    def changed_models(self) -> Iterator[tuple[Subject, str]]:
        """Matched subjects whose networks differ, and in which columns; unknown ones do not."""
        for subject in self.matched:
            for name in MODEL:
                a, b = (
                    {value for ((_, value),) in side.ran_on(side.rows[subject], [name]) if value}
                    for side in (self.a, self.b)
                )
                if a and b and a != b:
                    yield subject, name

    def change(self, subject: Subject) -> str:
        """How a matched subject's outcome changed: broken, mended, changed, or empty for not."""
        a, b = self.a.severities(subject), self.b.severities(subject)
        if b[0] > a[0] or b[-1] > a[-1]:
            return "broken"
        if b[0] < a[0] or b[-1] < a[-1]:
            return "mended"
        same = set(self.a.outcomes(subject)) == set(self.b.outcomes(subject))
        return "" if same else "changed"

    def label(self, subject: Subject) -> str:
        """Name a subject by what tells it from the others."""
        return subject.label(self.telling)

    @cached_property
    def telling(self) -> list[str]:
        """The axes to name a case by."""
        return telling_axes(subject.case for subject in (*self.a.rows, *self.b.rows))


MODEL = {
    "model_parameters": "names, shapes or dtypes of its parameters",
    "model_structure": "its printed modules",
    "model_source": "the source files that build it",
}
"""The columns that tell a network from another of the same name, and what of it differs."""


def compare(a: Side, b: Side, metrics: Sequence[Metric]) -> Comparison:
    """Compare two sweeps case by case; each metric's cases are one family."""
    a, b = part(a, b)
    compared = {}
    subjects = [subject for subject in a.rows if subject in b.rows]
    for metric in metrics:
        pairs = [(s, a.readings(s, metric), b.readings(s, metric)) for s in subjects]
        pairs = [pair for pair in pairs if pair[1] or pair[2]]
        if metric.seeded:
            ratios = verdict.compare_seeds([(_by_seed(x), _by_seed(y)) for _, x, y in pairs])
        else:
            samples = [([v for _, v in x], [v for _, v in y]) for _, x, y in pairs]
            ratios = verdict.compare(samples, metric.deterministic)
        compared[metric] = [Finding(*p, ratio=r) for p, r in zip(pairs, ratios, strict=True)]
    return Comparison(a, b, compared)


def _by_seed(readings: Sequence[tuple[int, float]]) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for seed, value in readings:
        values.setdefault(seed, []).append(value)
    return values


def refuse_other_models(comparison: Comparison) -> None:
    """Refuse to call two networks of one name one case.

    Raises:
        UsageError: it says whose network changed, and what of it.
    """
    changed: dict[str, dict[str, None]] = {}
    for subject, name in comparison.changed_models():
        changed.setdefault(subject.case.model, {})[MODEL[name]] = None
    if changed:
        which = "; ".join(
            f"{model} changed in {', '.join(what)}" for model, what in changed.items()
        )
        raise UsageError(
            f"A and B trained different networks: {printable(which)}; "
            "to compare them all the same, add --mix"
        )


# ------------------------------------------------------------------------------------------ gates


@dataclass(frozen=True)
class Gate:
    """A finding that --fail-on turns into return code 1, and how large it must be."""

    text: str
    word: str
    margin: float


def parse_gate(text: str, margin: float) -> Gate:
    """Read ``slower:5%`` or, against the comparison's own margin, ``slower``.

    Raises:
        UsageError: the word names no finding, or the percentage is none.
    """
    word, colon, percent = text.partition(":")
    verdicts = list(dict.fromkeys(w for m in METRICS.values() for w in (m.lower, m.higher)))
    if word not in verdicts and word not in OUTCOME_FINDINGS:
        raise UsageError(f"--fail-on {text!r}: {nearest(word, [*verdicts, *OUTCOME_FINDINGS])}")
    if not colon:
        return Gate(text, word, margin)
    if word in OUTCOME_FINDINGS:
        raise UsageError(f"--fail-on {text!r}: {word!r} takes no percentage; leave {percent!r} out")
    return Gate(text, word, parse_percent(f"--fail-on {text!r}", percent))


def parse_percent(where: str, text: str) -> float:
    """Read ``2%`` as 0.02.

    Raises:
        UsageError: it is not a percentage from 0 to 1000, or lacks its sign.
    """
    number, sign, rest = text.strip().partition("%")
    try:
        value = float(number) if sign and not rest and number.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1000:
        raise UsageError(f"{where}: a margin is a percentage from 0 to 1000 %, such as 2%")
    return value / 100


def find(comparison: Comparison, gate: Gate) -> Iterator[str]:
    """Name, one line each, the cases that a gate does not let pass."""
    if gate.word == "broken":
        for subject in comparison.matched:
            if comparison.change(subject) == "broken":
                a, b = (side.outcomes(subject) for side in (comparison.a, comparison.b))
                yield (
                    f"{comparison.label(subject)}: {write_outcomes(a)} in A, "
                    f"{write_outcomes(b)} in B"
                )
    elif gate.word == "missing":
        for subject in comparison.only_in(comparison.a):
            yield f"{comparison.label(subject)}: in A, not in B"
    for metric, findings in comparison.metrics.items():
        for finding in findings:
            judged = finding.ratio.judge(gate.margin)
            unjudged = judged is Verdict.NONE and finding.a and finding.b
            if metric.word(judged) == gate.word or (unjudged and gate.word == "unjudged"):
                what = finding.ratio.lack or f"{write_number(finding.ratio.value or 0)}×"
                yield f"{comparison.label(finding.subject)}: {metric.label}: {what}"


@dataclass(frozen=True)
class Result:
    """What a gate came to.

    Attributes:
        failures: what it found, one line each.
        judged: how many verdicts it looked at, one a case and metric; of a gate on outcomes, how
            many cases.
        unjudged: how many measured cases had no verdict to look at, or an interval so wide that
            it rules nothing out.
        why: the reasons of these, the most frequent first, each with its number.
    """

    gate: Gate
    failures: list[str]
    judged: int
    unjudged: int
    why: dict[str, int]

    @property
    def passed(self) -> bool:
        """Whether it found nothing, and had something to look at."""
        return bool(self.judged) and not self.failures


def pass_gate(comparison: Comparison, gate: Gate) -> Result:
    """Ask what a gate finds, and how much it had to look at."""
    failures = list(find(comparison, gate))
    if gate.word in OUTCOME_FINDINGS:
        sides = comparison.a.rows if gate.word == "missing" else comparison.matched
        why = {} if sides else {_why_unmatched(comparison): 0}
        return Result(gate, failures, len(sides), 0, why)
    ratios = [
        finding.ratio
        for metric, findings in comparison.metrics.items()
        if gate.word in (metric.lower, metric.higher)
        for finding in findings
    ]
    lacks = Counter(r.lack for r in ratios if r.judge(gate.margin) is Verdict.NONE)
    if wide := sum(r.rules_out_nothing(gate.margin) for r in ratios):
        limit = f"{100 * gate.margin:g} %"
        lacks[f"the interval reaches beyond {limit} both ways; more repeats would tell"] = wide
    why = dict(lacks.most_common())
    if not ratios:
        columns = [m.name for m in comparison.metrics if gate.word in (m.lower, m.higher)]
        none = f"no run has a value of {' or '.join(columns)}"
        why = {none if comparison.matched else _why_unmatched(comparison): 0}
    unjudged = lacks.total()
    return Result(gate, failures, len(ratios) - unjudged, unjudged, why)


def describe_result(result: Result) -> Iterator[str]:
    """What a person must know of a gate that failed, or that could not judge all; lines."""
    for line in result.failures:
        yield f"fail: {result.gate.text}: {printable(line)}"
    reasons = [f"{lack} ({n} times)" if n > 1 else lack for lack, n in result.why.items()]
    why = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    if not result.judged:
        yield f"fail: {result.gate.text}: no case could be judged: {printable(why)}"
    elif result.unjudged:
        total = result.judged + result.unjudged
        yield (
            f"warning: --fail-on {result.gate.text}: {result.unjudged} of {total} cases could not "
            f"be judged: {printable(why)}"
        )


# ----------------------------------------------------------------------------------------- tables


def printable(text: str) -> str:
    """Drop what would act on a terminal or turn the reading direction around."""
    return text if text.isprintable() else "".join(c for c in clean(text) if c.isprintable())


def write_outcomes(outcomes: Mapping[str, int]) -> str:
    """Write how runs ended: ``ok ×4, oom``."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in outcomes.items())


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
        yield printable(f"no case in both: {_why_unmatched(comparison)}")
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


def _why_unmatched(comparison: Comparison) -> str:
    """The axes on which two sweeps share no value, which is why no case is in both."""
    a, b = ({s.case for s in side.rows} for side in (comparison.a, comparison.b))
    if a & b:
        mixed = {
            n: None
            for side in (comparison.a, comparison.b)
            for s in side.rows
            for n, _ in s.environment
        }
        return f"within a side, runs of one case differ in {', '.join(mixed)}; none has an equal"
    parted = [
        name
        for name in AXES
        if not {getattr(case, name) for case in a} & {getattr(case, name) for case in b}
    ]
    return f"they share no value of {', '.join(parted)}" if parted else "no combination is shared"


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


# ---------------------------------------------------------------------------------------- formats


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

# ------------------------------------------------------------------------------------ command line


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="python -m bench.compare",
        description="Say what changed from sweep A, the baseline, to sweep B, and how sure it is.",
        epilog="a margin of 2% is a ratio above 1.02 or below 1/1.02; a verdict needs "
        f"{verdict.MIN_REPEATS} repeats a side, and on a loss or an error {verdict.MIN_SEEDS} "
        "seeds, which repeats have unless swept with --same-seed. Return code: 0; 1 where "
        "--fail-on found something, or could judge no case; 2 for a usage error.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("a", metavar="A", type=Path, help="the baseline: a sweep's folder or records file")
    add("b", metavar="B", type=Path, help="the candidate")
    add("--margin", metavar="P%", default="2%", help="what difference matters (default: 2%%)")
    add(
        "--metric",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"what to compare, of {', '.join(METRICS)} (default: time, memory, loss, energy)",
    )
    add("--format", default="text", metavar="FORMAT", help="text, md or json (default: text)")
    add("-o", "--output", type=Path, metavar="FILE", help="write there instead of on the terminal")
    add(
        "--fail-on",
        action="append",
        default=[],
        metavar="WORD[:P%]",
        help="return 1 where a verdict against P%% (default: the margin) is slower, more, …; or on "
        + "; ".join(f"{word} ({meaning})" for word, meaning in OUTCOME_FINDINGS.items()),
    )
    add("--mix", action="store_true", help="compare cases even where their networks differ")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two sweeps.

    Returns:
        0; 1 where a --fail-on found something or could judge no case; 2 for a usage error.
    """
    return run_command(_run, argv)


def _run(argv: Sequence[str]) -> int:
    options = build_parser().parse(argv)
    if options.format not in FORMATS:
        raise UsageError(f"--format {options.format!r}: {nearest(options.format, list(FORMATS))}")
    margin = parse_percent(f"--margin {options.margin!r}", options.margin)
    named = [_parse_metric(text) for text in dict.fromkeys(options.metric or [])]
    gates = [parse_gate(text, margin) for text in dict.fromkeys(options.fail_on)]
    a, b = read_side("A", options.a), read_side("B", options.b)
    metrics = named or choose_metrics(a, b)
    for gate in gates:
        _check_compared(gate, metrics)
    comparison = compare(a, b, metrics)
    if not options.mix:
        refuse_other_models(comparison)
    results = [pass_gate(comparison, gate) for gate in gates]
    _write(FORMATS[options.format](comparison, margin, results), options.output)
    for result in results:
        for line in describe_result(result):
            print(line, file=sys.stderr)
    return int(not all(result.passed for result in results))


def _write(document: str, output: Path | None) -> None:
    if output is None:
        try:
            sys.stdout.write(document)
            sys.stdout.flush()
        except BrokenPipeError:  # `| head`; the gates are still read
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        output.write_text(document, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"-o {output}: {error.strerror}; choose a place that can be written"
        ) from error


def _parse_metric(text: str) -> Metric:
    if text not in METRICS:
        raise UsageError(f"--metric {text!r}: {nearest(text, list(METRICS))}")
    return METRICS[text]


def _check_compared(gate: Gate, metrics: Sequence[Metric]) -> None:
    """Refuse a gate that no compared metric could ever trip.

    Raises:
        UsageError: it names the metrics that could.
    """
    fitting = [m.name for m in METRICS.values() if gate.word in (m.lower, m.higher)]
    if fitting and not any(metric.name in fitting for metric in metrics):
        raise UsageError(
            f"--fail-on {gate.text}: no metric compared can be {gate.word}; "
            f"add --metric {' or '.join(fitting)}"
        )


if __name__ == "__main__":
    sys.exit(main())
