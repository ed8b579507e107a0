"""Two sweeps, matched case by case, and what the repeats of each side say of every metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import verdict
from bench.case import AXES, Case, telling_axes
from bench.compare import conditions
from bench.compare.conditions import CONDITIONS, TREND, Condition, Count, Summarized
from bench.errors import UsageError
from bench.record import COMPARABLE, MODEL_PARTS, Environment, Status
from bench.report.doubts import DOUBTS
from bench.report.metrics import METRICS, Metric
from bench.report.quantities import MEMORY
from bench.store.attempts import fill_unknown, keep_latest, number_groups
from bench.store.reader import read_cases, read_records
from bench.text import clean
from bench.verdict import Ratio

if TYPE_CHECKING:
    import pandas as pd


def choose_metrics(a: Side, b: Side) -> list[Metric]:
    """Time, loss, energy, and the first measure of memory that both sides have."""
    memory = next((c for c in MEMORY if a.has(c) and b.has(c)), next(iter(MEMORY)))
    return [METRICS[c] for c in ("epoch_time_s", memory, "train_loss", "energy_j")]


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
            for name in MODEL_PARTS:
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
        changed.setdefault(subject.case.model, {})[MODEL_PARTS[name]] = None
    if changed:
        which = "; ".join(
            f"{model} changed in {', '.join(what)}" for model, what in changed.items()
        )
        raise UsageError(
            f"A and B trained different networks: {printable(which)}; "
            "to compare them all the same, add --mix"
        )


def printable(text: str) -> str:
    """Drop what would act on a terminal or turn the reading direction around."""
    return text if text.isprintable() else "".join(c for c in clean(text) if c.isprintable())


def write_outcomes(outcomes: Mapping[str, int]) -> str:
    """Write how runs ended: ``ok ×4, oom``."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in outcomes.items())


def explain_unmatched(comparison: Comparison) -> str:
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
