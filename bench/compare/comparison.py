"""Two sides, matched case by case, and what the repeats of each side say about every metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from bench import verdict
from bench.axis import Trait
from bench.case import AXES, SAME_QUESTION, Case, free_axes, list_affecting, telling_axes
from bench.compare import conditions
from bench.compare.conditions import CONDITIONS, Condition, Count, Summarized
from bench.compare.side import Ran, Readings, Side
from bench.diagnosis.explanation import Change
from bench.errors import UsageError
from bench.record import COMPARABLE, MODEL_PARTS, Environment
from bench.study.metrics import METRICS, Metric
from bench.study.pairs import Match, Matches, Told
from bench.study.pairs import match as match_cases
from bench.study.quantities import MEMORY
from bench.text import make_printable
from bench.verdict import Equivalence, Ratio


def choose_metrics(a: Side, b: Side) -> list[Metric]:
    """Time, loss, energy, the first measure of memory and the test error that both sides have."""
    memory = next((c for c in MEMORY if a.has(c) and b.has(c)), next(iter(MEMORY)))
    error = METRICS["test_top1_error"]
    errors = [error] if a.has(error.column) and b.has(error.column) else []
    return [METRICS[c] for c in ("epoch_time_s", memory, "train_loss", "energy_j")] + errors


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
    """A kind of work, or a wait, that takes longer or less long in B than in A."""

    match: Match
    change: Change  # of the mean step
    step_s: float  # the whole step of A
    p: float | None  # that it is by chance, by Holm over all kinds; None with too few repeats


@dataclass(frozen=True)
class Comparison:
    """All that is found about two sides, before it is judged against a margin."""

    a: Side
    b: Side
    matches: Matches
    metrics: dict[Metric, list[MetricPair]]
    axis: str = ""  # whose two values are the sides; empty where two sweeps are compared
    kinds: Sequence[KindChange] | None = None  # of ``--why``; None where that was not asked

    @property
    def names(self) -> tuple[str, str]:
        """What the sides are called."""
        return self.a.name, self.b.name

    @property
    def free(self) -> tuple[str, ...]:
        """The axes in which matched cases may differ, but for how much was measured."""
        return free_axes(self.axis)

    def ends(self, match: Match) -> tuple[Ran, Ran]:
        """The case as either side ran it."""
        return self.a.ran[match.a], self.b.ran[match.b]

    def ended(self, match: Match) -> list[str]:
        """How the runs of either side ended: ``ok ×4, oom``."""
        return [write_outcomes(end.outcomes) for end in self.ends(match)]

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
        return len(cells), sum(len(side.ran[cell].runs) for cell in cells)

    def list_cells(self, side: Side) -> list[int]:
        """The cells of a side that were matched or are alone: not those that others stand for."""
        place = 0 if side is self.a else 1
        return [*(match.cells[place] for match in self.matched), *self.alone(side)]

    def environment(self) -> Iterator[tuple[str, bool, list[str], list[str]]]:
        """What ran them and differs: column, whether it must agree, A's and B's values. Those that
        must agree come first, also where each side mixes the same values. Two models or two
        datasets differ on purpose."""
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
        known = [side.ran[match.cells[of]].know(condition) for match in matches]
        return conditions.summarize(condition, known)

    def differing_conditions(self) -> list[tuple[Condition, Summarized, Summarized]]:
        """Those that differ by so much that it is told."""
        return [found for found in self.conditions if conditions.differ(*found)]

    def spoilt(
        self, matches: Sequence[Match], beside: bool = False
    ) -> Iterator[tuple[Side, Condition, Count]]:
        """What makes the times of some matches unreliable, and in how many of a side's runs; or
        also what is told ``beside`` times that are reliable."""
        for of, side in enumerate((self.a, self.b)):
            for condition in CONDITIONS:
                wanted = condition.spoils or (beside and condition.beside)
                count = self._summarize(of, condition, matches) if wanted else None
                if isinstance(count, Count) and count.runs:
                    yield side, condition, count

    def changed_models(self) -> Iterator[tuple[str, str]]:
        """Models of matched cases that are two networks, and in which columns; unknown are not. Two
        models are different networks on purpose, so are those for two shapes of images, and two
        files to start from are two files."""
        names = [name for name in MODEL_PARTS if not self._is_asked(name)]
        columns = [[dict(side.cells[name]) for name in names] for side in (self.a, self.b)]
        for match in self.matched:
            for name, of_a, of_b in zip(names, *columns, strict=True):
                if of_a[match.a] and of_b[match.b] and of_a[match.a] != of_b[match.b]:
                    yield self.a.ran[match.a].case.model, name

    def change(self, match: Match) -> str:
        """How a matched subject's outcome changed: broken, fixed, changed, or empty for not."""
        one, two = self.ends(match)
        a, b = one.severities, two.severities
        if b[0] > a[0] or b[-1] > a[-1]:
            return "broken"
        if b[0] < a[0] or b[-1] < a[-1]:
            return "fixed"
        return "" if {*one.outcomes} == {*two.outcomes} else "changed"

    def label(self, match: Match) -> str:
        """Name a matched case by what tells it from the others."""
        return self._name(self.a.ran[match.a].case, match.told)

    def label_alone(self, side: Side, cell: int) -> str:
        """Name a case of one side alone."""
        return self._name(side.ran[cell].case, self.alone(side)[cell])

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
        ran = [self.a.ran[match.a] for match in self.matched]
        ran += [side.ran[cell] for side in (self.a, self.b) for cell in self.alone(side)]
        cases = {self.ask(one.case) for one in ran}
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
        The cases are one family. Empty for a metric that does not depend on the seed."""
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
            verdict.learnt_nothing(verdict.average_seeds(_by_seed(read)), end.case.classes)
            for end in self.ends(match)
            if (read := end.readings(METRICS["train_loss"]))
        ]


def compare(a: Side, b: Side, metrics: Sequence[Metric], axis: str = "") -> Comparison:
    """Compare two sides, of sweeps or of values of an axis; the cases of a metric are one family.
    Cases may have been measured on different parts of an epoch; metrics that depend on that are
    then not compared."""
    comparison = Comparison(a, b, match_cases(a.cells, b.cells, axis), {}, axis)
    for metric in metrics:
        found = []
        for match in comparison.matched:
            of_a, of_b = (end.readings(metric) for end in comparison.ends(match))
            if of_a or of_b:
                refused = Ratio(lack=_refuse(comparison, metric, match))
                found.append(MetricPair(match, of_a, of_b, refused))
        judged = iter(_judge(metric, [f for f in found if not f.ratio.lack], comparison.names))
        for place, one in enumerate(found):
            if not one.ratio.lack:
                ratio, guessing = next(judged), metric.seeded and comparison.guessing(one.match)
                if guessing and all(guessing) and not ratio.lack:
                    ratio = replace(ratio, lack=verdict.GUESSING)
                found[place] = replace(one, ratio=ratio)
        comparison.metrics[metric] = found
    return comparison


def _refuse(comparison: Comparison, metric: Metric, match: Match) -> str:
    one, two = (end.part for end in comparison.ends(match))
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


def _judge(metric: Metric, family: Sequence[MetricPair], names: tuple[str, str]) -> list[Ratio]:
    if metric.seeded:
        return verdict.compare_seeds([(_by_seed(f.a), _by_seed(f.b)) for f in family], names)
    samples = [([v for _, v in f.a], [v for _, v in f.b]) for f in family]
    return verdict.compare(samples, metric.deterministic, names)


def _by_seed(readings: Readings) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for seed, value in readings:
        values.setdefault(seed, []).append(value)
    return values


def refuse_other_models(comparison: Comparison) -> None:
    """Refuse to compare two different networks of the same name. Raises UsageError: it says which
    network changed, and what in it."""
    changed: dict[str, dict[str, None]] = {}
    for model, name in comparison.changed_models():
        changed.setdefault(model, {})[MODEL_PARTS[name]] = None
    if changed:
        found = (f"{model} changed in {', '.join(what)}" for model, what in changed.items())
        which = make_printable("; ".join(found))
        raise UsageError(
            f"{comparison.a.title} and {comparison.b.title} trained different networks: {which}; "
            "to compare them anyway, add --mix"
        )


def write_outcomes(outcomes: Mapping[str, int]) -> str:
    """Write how runs ended: ``ok ×4, oom``."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in outcomes.items())
