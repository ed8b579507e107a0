"""Two sides, matched case by case, and what the repeats of each side say about every metric.

A side is a sweep, or the part of one that has one value of an axis (`bench.compare.values`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import verdict
from bench.axis import Trait
from bench.case import AXES, SAME_QUESTION, Case, free_axes, list_affecting, telling_axes
from bench.compare import conditions
from bench.compare.conditions import CONDITIONS, HOST_BOUND, TREND, Condition, Count, Summarized
from bench.diagnosis.explanation import Change
from bench.errors import UsageError
from bench.record import COMPARABLE, MODEL_PARTS, RELIABLE, Environment, Status
from bench.store.attempts import fill_unknown, keep_cases, keep_latest, number_groups
from bench.store.reader import read_cases, read_records, records_file
from bench.study.columns import Columns
from bench.study.doubts import DOUBTS
from bench.study.metrics import METRICS, Metric
from bench.study.pairs import Match, Matches, Told
from bench.study.pairs import match as match_cases
from bench.study.quantities import MEMORY
from bench.study.summaries import measure_part
from bench.study.sweeps import mend_ends
from bench.text import make_printable
from bench.verdict import Equivalence, Ratio

if TYPE_CHECKING:
    import pandas as pd

Readings = list[tuple[int, float]]
"""Seed and value of each repeat."""


def choose_metrics(a: Side, b: Side) -> list[Metric]:
    """Time, loss, energy, the first measure of memory and the test error that both sides have."""
    memory = next((c for c in MEMORY if a.has(c) and b.has(c)), next(iter(MEMORY)))
    error = METRICS["test_top1_error"]
    errors = [error] if a.has(error.column) and b.has(error.column) else []
    return [METRICS[c] for c in ("epoch_time_s", memory, "train_loss", "energy_j")] + errors


@dataclass(frozen=True)
class Part:
    """How much of an epoch a side measured of a case.

    Attributes:
        share: of an epoch: at most the case's fraction.
        steps: those that ``--steps`` allowed, where they are what made it less; else None.
        known: false for steps none of which was measured; ``share`` is then the fraction.
    """

    share: float
    steps: int | None = None
    known: bool = True

    def __str__(self) -> str:
        """As it was asked for: ``fraction 0.25`` or ``20 steps``."""
        return f"fraction {self.share:.3g}" if self.steps is None else f"{self.steps} steps"


@dataclass(frozen=True)
class Side:
    """One side: the latest attempt at each of its runs, without sentinels.

    Attributes:
        name: what tables call it: A, B, or a value of an axis, such as ``on``.
        title: what lines call it that stand alone, such as ``compile default``.
        records: with a ``cell``, a number for each case in each environment.
        cases: that of each record.
    """

    name: str
    title: str
    path: Path
    records: pd.DataFrame
    cases: list[Case]

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        names = {m.column for m in METRICS.values()}
        names |= {"status", "inferred", "executor", "run_seed"}
        names |= {c.column for c in CONDITIONS} | {c.known or c.column for c in CONDITIONS}
        return {name: self.records[name].tolist() for name in names}

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """Positions among the records of the runs of each cell."""
        rows: dict[int, list[int]] = {}
        for position, cell in enumerate(self.records["cell"].tolist()):
            rows.setdefault(cell, []).append(position)
        return rows

    @cached_property
    def cells(self) -> pd.DataFrame:
        """A row for each cell, as `bench.study.pairs.match` takes it."""
        wanted = ["cell", "part", *AXES, *COMPARABLE]
        first = self.records.loc[~self.records["cell"].duplicated(), wanted]
        known = [self.parts[self.cases[i]].known for i in first.index]
        return first.assign(known=known).set_index("cell")

    @cached_property
    def parts(self) -> dict[Case, Part]:
        """How much of an epoch was measured of each case."""
        shares, steps = (self.records[name].tolist() for name in ("part", "measured_steps"))
        ran = {case for case, n in zip(self.cases, steps, strict=True) if n == n}
        return {
            case: Part(
                share,
                case.steps if share < case.fraction else None,
                case.steps is None or case in ran,
            )
            for case, share in zip(self.cases, shares, strict=True)
        }

    def case(self, cell: int) -> Case:
        """The case that this side ran."""
        return self.cases[self.rows[cell][0]]

    def has(self, column: str) -> bool:
        """Whether any run has a value of ``column``."""
        return bool(self.records[column].notna().any())

    def readings(self, cell: int, metric: Metric) -> Readings:
        """What the runs of a cell measured: seed and value of each repeat that has one."""
        values, statuses = self._columns[metric.column], self._columns["status"]
        counted = RELIABLE if metric.diverged else {Status.OK}
        rows = [i for i in self.rows[cell] if statuses[i] in counted]
        seeds = self._columns["run_seed"]
        # NaN is empty
        return [(int(seeds[i]), metric.read(values[i])) for i in rows if values[i] == values[i]]

    def know(self, cell: int, condition: Condition) -> list[Any]:
        """What those runs of a cell that were measured and are used know of a condition."""
        cells, statuses = self._columns[condition.column], self._columns["status"]
        known = self._columns[condition.known or condition.column]
        rows = [i for i in self.rows[cell] if statuses[i] in RELIABLE]
        return [cells[i] for i in rows if known[i] == known[i]]

    def outcomes(self, cell: int) -> dict[str, int]:
        """How many runs of a cell ended in each way."""
        statuses, inferred = self._columns["status"], self._columns["inferred"]
        return dict(Counter(statuses[i] + " (inferred)" * inferred[i] for i in self.rows[cell]))

    def severities(self, cell: int) -> list[int]:
        """Of the runs of a cell, best first: 0 is ok, 1 diverged, 2 not to be used."""
        order = {Status.OK: 0, Status.DIVERGED: 1}
        return sorted(order.get(self._columns["status"][i], 2) for i in self.rows[cell])

    def executors(self, cell: int) -> set[str]:
        """What ran a cell."""
        return {self._columns["executor"][i] for i in self.rows[cell]}

    def environment(self, name: str) -> list[str]:
        """The distinct values of an environment column; none where all are empty."""
        values = dict.fromkeys(self.records[name].tolist())  # as many calls as columns: no pandas
        known = (value for value in values if value == value and value != "")
        return [f"{value:.0f}" if isinstance(value, float) else str(value) for value in known]

    def mixes(self, name: str) -> bool:
        """Whether runs on one device, of one dataset or one model disagree on what must agree."""
        if name not in COMPARABLE:
            return False
        cells = self.records[[name, *COMPARABLE[name]]]
        if cells[name].nunique() < 2:
            return False
        known = cells[cells[name] != ""]
        return bool((known.groupby(list(COMPARABLE[name]))[name].nunique() > 1).any())


def read_side(name: str, path: Path) -> Side:
    """Read one side of the comparison.

    Raises:
        UsageError: it has no records, or they cannot be read.
    """
    records = mend_ends(read_records(path), records_file(path))
    kept = keep_cases(records)
    if len(records) and not len(kept):
        raise UsageError(f"{path}: has only probes of bench.fit; compare sweeps")
    records = kept
    if not len(records):
        raise UsageError(f"{path}: no records yet; compare sweeps that have run")
    records = keep_latest(records).reset_index(drop=True)
    for column in (TREND, HOST_BOUND):
        records[column] = DOUBTS[column].find(Columns(records))
    records["part"] = measure_part(records)
    # what a run did not get to know of what ran it is its case's
    filled = fill_unknown(records, number_groups(records, AXES))
    records = records.assign(**{name: filled[name] for name in COMPARABLE})
    records["cell"] = number_groups(records, [*AXES, *COMPARABLE])
    return Side(name, name, path, records, read_cases(records))


@dataclass(frozen=True)
class MetricPair:
    """One metric of one match on both sides: seed and value of each repeat."""

    match: Match
    a: Readings
    b: Readings
    ratio: Ratio

    @property
    def compared(self) -> tuple[Readings, Readings]:
        """Of both sides what the ratio is of: where seeds are compared, those that both ran."""
        if not self.ratio.pairs:
            return self.a, self.b
        shared = {seed for seed, _ in self.a} & {seed for seed, _ in self.b}
        a, b = ([(s, x) for s, x in side if s in shared] for side in (self.a, self.b))
        return a, b


@dataclass(frozen=True)
class KindChange:
    """A kind of work, or a wait, that takes longer or less long in B than in A.

    Attributes:
        match: the matched case.
        change: of the mean step.
        step_s: the whole step of A.
        p: that the repeats differ by chance, by Holm over all kinds; None with too few repeats.
    """

    match: Match
    change: Change
    step_s: float
    p: float | None


@dataclass(frozen=True)
class Comparison:
    """All that is found about two sides, before it is judged against a margin.

    Attributes:
        axis: whose two values are the sides; empty where two sweeps are compared.
        kinds: the kinds of work that changed, of ``--why``; None where that was not asked.
    """

    a: Side
    b: Side
    matches: Matches
    metrics: dict[Metric, list[MetricPair]]
    axis: str = ""
    kinds: Sequence[KindChange] | None = None

    @property
    def names(self) -> tuple[str, str]:
        """What the sides are called."""
        return self.a.name, self.b.name

    @property
    def titles(self) -> tuple[str, str]:
        """What the sides are called where nothing near says the axis."""
        return self.a.title, self.b.title

    @property
    def free(self) -> tuple[str, ...]:
        """The axes in which matched cases may differ, but for how much was measured."""
        return free_axes(self.axis)

    def ends(self, match: Match) -> tuple[tuple[Side, int], tuple[Side, int]]:
        """Each side, and its cell."""
        return (self.a, match.a), (self.b, match.b)

    def parts(self, match: Match) -> list[Part]:
        """Which part of an epoch each side measured of a matched case."""
        return [side.parts[side.case(cell)] for side, cell in self.ends(match)]

    def ran(self, match: Match) -> list[Case]:
        """The cases that the two sides ran."""
        return [side.case(cell) for side, cell in self.ends(match)]

    def ended(self, match: Match) -> list[str]:
        """How the runs of either side ended: ``ok ×4, oom``."""
        return [write_outcomes(side.outcomes(cell)) for side, cell in self.ends(match)]

    @property
    def matched(self) -> Sequence[Match]:
        """Cases on both sides, in the order of A."""
        return self.matches.pairs

    def alone(self, side: Side) -> Mapping[int, Told]:
        """Cells on one side alone, with what tells those of one case apart."""
        return self.matches.alone[0 if side is self.a else 1]

    def count(self, side: Side) -> tuple[int, int]:
        """How many cases of a side were matched or are alone, and how many runs those are."""
        cells = self.list_cells(side)
        return len(cells), sum(len(side.rows[cell]) for cell in cells)

    def list_cells(self, side: Side) -> list[int]:
        """The cells of a side that were matched or are alone: not those that others stand for."""
        place = 0 if side is self.a else 1
        return [*(match.cells[place] for match in self.matched), *self.alone(side)]

    def environment(self) -> Iterator[tuple[str, bool, list[str], list[str]]]:
        """What ran them and differs: column, whether it must agree, A's and B's values.

        Those that must agree come first, also where each side mixes the same values. Two models or
        two datasets differ on purpose.
        """
        told = {condition.column for condition in CONDITIONS}  # with what they may vary by
        every = [f.name for f in fields(Environment) if f.name not in told]
        names = [name for name in every if not self._is_asked(name)]
        for name in sorted(names, key=lambda name: name not in COMPARABLE):
            a, b = self.a.environment(name), self.b.environment(name)
            if set(a) != set(b) or self.a.mixes(name):
                yield name, name in COMPARABLE and self.axis not in COMPARABLE[name], a, b

    def _is_asked(self, name: str) -> bool:
        """Whether an environment column says nothing but the value of the compared axis."""
        return self.axis != "device" and self.axis in COMPARABLE.get(name, ())

    @cached_property
    def conditions(self) -> list[tuple[Condition, Summarized, Summarized]]:
        """What was read while the matched subjects ran, on A and B, where a side knows it."""
        read = [[self._summarize(of, c, self.matched) for c in CONDITIONS] for of in (0, 1)]
        both = zip(CONDITIONS, *read, strict=True)
        return [(condition, a, b) for condition, a, b in both if a is not None or b is not None]

    def _summarize(self, of: int, condition: Condition, matches: Sequence[Match]) -> Summarized:
        side = (self.a, self.b)[of]
        return conditions.summarize(
            condition, [side.know(match.cells[of], condition) for match in matches]
        )

    def differing_conditions(self) -> list[tuple[Condition, Summarized, Summarized]]:
        """Those that differ by so much that it is told."""
        return [found for found in self.conditions if conditions.differ(*found)]

    def spoilt(
        self, matches: Sequence[Match], beside: bool = False
    ) -> Iterator[tuple[Side, Condition, Count]]:
        """What makes the times of ``matches`` unreliable, and in how many of a side's runs.

        Args:
            matches: some of those compared.
            beside: whether what is told beside times that are reliable is wanted too.
        """
        for of, side in enumerate((self.a, self.b)):
            for condition in CONDITIONS:
                wanted = condition.spoils or (beside and condition.beside)
                count = self._summarize(of, condition, matches) if wanted else None
                if isinstance(count, Count) and count.runs:
                    yield side, condition, count

    def changed_models(self) -> Iterator[tuple[str, str]]:
        """Models of matched cases that are two networks, and in which columns; unknown are not.

        Two models are different networks on purpose, so are those for two shapes of images, and two
        files to start from are two files.
        """
        names = [name for name in MODEL_PARTS if not self._is_asked(name)]
        columns = [[side.cells[name] for name in names] for side in (self.a, self.b)]
        for match in self.matched:
            for name, of_a, of_b in zip(names, *columns, strict=True):
                if of_a[match.a] and of_b[match.b] and of_a[match.a] != of_b[match.b]:
                    yield self.a.case(match.a).model, name

    def change(self, match: Match) -> str:
        """How a matched subject's outcome changed: broken, fixed, changed, or empty for not."""
        a, b = (side.severities(cell) for side, cell in self.ends(match))
        if b[0] > a[0] or b[-1] > a[-1]:
            return "broken"
        if b[0] < a[0] or b[-1] < a[-1]:
            return "fixed"
        ended = (set(side.outcomes(cell)) for side, cell in self.ends(match))
        return "" if next(ended) == next(ended) else "changed"

    def label(self, match: Match) -> str:
        """Name a matched case by what tells it from the others."""
        return self._name(self.a.case(match.a), match.told)

    def label_alone(self, side: Side, cell: int) -> str:
        """Name a case of one side alone."""
        return self._name(side.case(cell), self.alone(side)[cell])

    def _name(self, case: Case, told: Told) -> str:
        where = (f"{name} {value or 'none'}" for name, value in told)
        return " · ".join([self.ask(case).label(self.telling), *where])

    def ask(self, case: Case) -> Case:
        """The case with the defaults of the axes in which matched cases may differ."""
        neutral: dict[str, Any] = {name: AXES[name].default for name in self.free}
        return replace(case, **neutral)

    @cached_property
    def telling(self) -> list[str]:
        """The axes to name a case by."""
        cells = [(self.a, match.a) for match in self.matched]
        cells += [(side, cell) for side in (self.a, self.b) for cell in self.alone(side)]
        cases = {self.ask(side.case(cell)) for side, cell in cells}
        neutral: dict[str, Any] = {name: AXES[name].default for name in SAME_QUESTION}
        whole = {replace(case, **neutral) for case in cases}
        names = [name for name in telling_axes(whole) if name not in self.free]
        if len(whole) == len(cases):
            return names
        # how it was measured names a case only where the sides measured one in several ways
        return [*names, *(n for n in SAME_QUESTION if len({getattr(c, n) for c in cases}) > 1)]

    def judge_equivalence(
        self, metric: Metric, margin: float
    ) -> list[tuple[MetricPair, Equivalence]]:
        """Whether B's loss or error is equivalent to A's, of each case that has it on both sides.

        The cases are one family. Empty for a metric that does not depend on the seed.
        """
        findings = [f for f in self.metrics[metric] if metric.seeded and f.ratio.value is not None]
        family = [(_by_seed(f.a), _by_seed(f.b)) for f in findings]
        judged = verdict.judge_equivalences(family, margin, self.names)
        return [
            (f, verdict.doubt_guessing(e, self.guessing(f.match)))
            for f, e in zip(findings, judged, strict=True)
        ]

    def guessing(self, match: Match) -> list[bool]:
        """Whether a side's training loss is still that of guessing; of the sides that have one."""
        return [
            verdict.learnt_nothing(verdict.average_seeds(_by_seed(read)), side.case(cell).classes)
            for side, cell in self.ends(match)
            if (read := side.readings(cell, METRICS["train_loss"]))
        ]


def compare(a: Side, b: Side, metrics: Sequence[Metric], axis: str = "") -> Comparison:
    """Compare two sides case by case; the cases of one metric are one family.

    Cases may have been measured on different parts of an epoch; metrics that depend on that are
    then not compared.

    Args:
        axis: whose values the sides are; empty for two sweeps.
    """
    comparison = Comparison(a, b, match_cases(a.cells, b.cells, axis), {}, axis)
    for metric in metrics:
        readings = [
            (m, a.readings(m.a, metric), b.readings(m.b, metric)) for m in comparison.matched
        ]
        pairs = [pair for pair in readings if pair[1] or pair[2]]
        refused = [_refuse(comparison, metric, match) for match, _, _ in pairs]
        family = [pair[1:] for pair, lack in zip(pairs, refused, strict=True) if not lack]
        judged = iter(_judge(metric, family, comparison.names))
        ratios = [Ratio(lack=lack) if lack else next(judged) for lack in refused]
        if metric.seeded:
            for place, (match, *_) in enumerate(pairs):
                guessing = comparison.guessing(match)
                if guessing and all(guessing) and not ratios[place].lack:
                    ratios[place] = replace(ratios[place], lack=verdict.GUESSING)
        comparison.metrics[metric] = [
            MetricPair(*pair, ratio) for pair, ratio in zip(pairs, ratios, strict=True)
        ]
    return comparison


def _refuse(comparison: Comparison, metric: Metric, match: Match) -> str:
    one, two = comparison.parts(match)
    known = one.known and two.known
    learnt = metric.seeded and comparison.axis in list_affecting(Trait.LEARNING)
    if known and learnt and one.share == two.share < 1:
        return "less than an epoch does not show what it does to learning; use --fraction 1"
    # times are of an epoch or a step, memory is a peak; all else is of the measured steps
    of_part = metric.seeded or metric is METRICS["energy_j"]
    if one.share == two.share or not known or not of_part:
        return ""
    if one.steps is None and two.steps is None:
        return f"fractions {one.share:g} and {two.share:g} of an epoch: not comparable"
    said = (
        f"{part} of an epoch" if part.steps is None else f"{part} ({part.share:.3g} of an epoch)"
        for part in (one, two)
    )
    return f"{' and '.join(said)}: not comparable"


def _judge(
    metric: Metric, family: Sequence[tuple[Readings, Readings]], names: tuple[str, str]
) -> list[Ratio]:
    if metric.seeded:
        return verdict.compare_seeds([(_by_seed(x), _by_seed(y)) for x, y in family], names)
    samples = [([v for _, v in x], [v for _, v in y]) for x, y in family]
    return verdict.compare(samples, metric.deterministic, names)


def _by_seed(readings: Sequence[tuple[int, float]]) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for seed, value in readings:
        values.setdefault(seed, []).append(value)
    return values


def refuse_other_models(comparison: Comparison) -> None:
    """Refuse to compare two different networks of the same name.

    Raises:
        UsageError: it says which network changed, and what in it.
    """
    changed: dict[str, dict[str, None]] = {}
    for model, name in comparison.changed_models():
        changed.setdefault(model, {})[MODEL_PARTS[name]] = None
    if changed:
        found = (f"{model} changed in {', '.join(what)}" for model, what in changed.items())
        which = make_printable("; ".join(found))
        raise UsageError(
            f"{' and '.join(comparison.titles)} trained different networks: {which}; to compare "
            "them anyway, add --mix"
        )


def write_outcomes(outcomes: Mapping[str, int]) -> str:
    """Write how runs ended: ``ok ×4, oom``."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in outcomes.items())
