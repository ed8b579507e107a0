"""Two sides, matched case by case, and the comparison of their repeats for every metric, with the
findings for which ``--fail-on`` returns 1. A side is a sweep, or its cases with one value of an
axis.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice, product
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from bench.axis import Trait, Value, axis_flag
from bench.case import (
    AXES,
    NAMED,
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
from bench.diagnosis.step import CALL, RATES, UNITS
from bench.errors import UsageError, nearest
from bench.flags import parse_percent
from bench.limits import SLOWED
from bench.record import COMPARABLE, MODEL_PARTS, RELIABLE, REPEATED, Environment, Status
from bench.rules import applies
from bench.store.reader import read_rows
from bench.store.rows import fill_unknown, group, keep_cases, keep_latest
from bench.study.axes import name_axis, name_setting, parse_name
from bench.study.pairs import EnvironmentKey, Match, Matches
from bench.study.pairs import match as match_cases
from bench.study.quantities import MEMORY, METRICS, Metric
from bench.study.runs import Run, link_runs, list_runs
from bench.text import make_printable, write_number, write_percent
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


@dataclass(frozen=True)
class Part:
    """The part of an epoch that a side measured of a case."""

    share: float  # of an epoch: at most the case's fraction
    steps: int | None  # the limit of ``--steps``, if it reduced the share
    known: bool  # false with ``--steps`` if no step was measured; ``share`` is then the fraction

    def __str__(self) -> str:
        """Return the part as it was requested: ``fraction 0.25`` or ``20 steps``."""
        return f"fraction {self.share:.3g}" if self.steps is None else f"{self.steps} steps"


@dataclass(frozen=True, eq=False)
class SideCase:
    """A case as one side ran it, in one environment."""

    side: str  # its name
    runs: list[Run]

    @property
    def case(self) -> Case:
        return self.runs[0].case

    @property
    def part(self) -> Part:
        run = self.runs[0]  # all runs of one case measure the same part
        steps = run.case.steps if run.part < run.fraction else None
        return Part(run.part, steps, run.part_known)

    def readings(self, metric: Metric) -> Readings:
        """Return seed and value of each usable repeat that has a value."""
        counted = RELIABLE if metric.diverged else {Status.OK}
        return [
            (int(run.run_seed), metric.read(value))
            for run in self.runs
            if run.status in counted and (value := getattr(run, metric.column)) == value
        ]

    @property
    def classes(self) -> int | None:
        """The classes that the loss distinguishes; see `find_classes`."""
        run, case = self.runs[0], self.case
        return find_classes(case.workload, case.classes, run.dataset_classes, run.dataset_source)

    @property
    def usable(self) -> list[Run]:
        """The runs that ended with a time."""
        return [run for run in self.runs if run.status in RELIABLE]

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

    @property
    def cases(self) -> list[Case]:
        """The case of each run."""
        return [run.case for run in self.runs]

    @cached_property
    def ran(self) -> dict[int, SideCase]:
        groups = group(self.runs, lambda run: run.cell)
        return {runs[0].cell: SideCase(self.name, runs) for runs in groups}

    @property
    def cells(self) -> list[Run]:
        """A run of each cell, as `bench.study.pairs.match` takes it."""
        return [one.runs[0] for one in self.ran.values()]

    def environment(self, name: str) -> list[str]:
        """Return the distinct values of an environment column, without empty ones."""
        values = dict.fromkeys(getattr(run, name) for run in self.runs)
        known = (value for value in values if value == value and value != "")
        return [f"{value:.0f}" if isinstance(value, float) else str(value) for value in known]

    def mixes(self, name: str) -> bool:
        """Return whether runs on one device, dataset or model differ where they must agree."""
        found: dict[tuple[Any, ...], set[str]] = {}
        for run in self.runs if name in COMPARABLE else ():
            place = tuple(getattr(run, axis) for axis in COMPARABLE[name])
            found.setdefault(place, set()).add(getattr(run, name))
        return any(len(values - {""}) > 1 for values in found.values())


def read_side(name: str, path: Path) -> Side:
    """Read one side. Raises UsageError: it has no records of sweeps, or they cannot be read."""
    every = link_runs(list_runs(read_rows(path)))
    kept = keep_cases(every)
    if every and not kept:
        raise UsageError(f"{path}: has only probes of bench.fit; compare sweeps")
    if not kept:
        raise UsageError(f"{path}: no records yet; compare sweeps that have run")
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


STOPPED = "interrupted"
"""The change of a match of which a run was stopped from outside, and is made again."""

SPOILING = ("throttled", "contended", "unsettled", "noisy", "trend")
BESIDE = ("host_bound",)
"""Doubts with which times are not relied on, and one that is told beside a time."""

_SLOWED = 1 / (1 - SLOWED) - 1  # as a ratio of the higher to the lower

READINGS: dict[str, tuple[str, str, float]] = {
    "power_limit_w": ("power limit", "W", 0.0),
    # cards step their clocks by 15 MHz, 1 % of an SM clock of 1.5 GHz
    "sm_clock_mhz": ("SM clock", "MHz", 0.02),
    "memory_clock_mhz": ("memory clock", "MHz", 0.02),
    **{column: (f"rate of {what}", UNITS[column], _SLOWED) for column, what in RATES.items()},
    CALL: ("smallest operation", "s", _SLOWED),
}
"""Readings of the machine during runs: label, unit, and the largest relative difference of two
sides that is not told."""


def choose_metrics(a: Side, b: Side) -> list[Metric]:
    """Return time, loss, energy, and the first measure of memory and test error of both sides."""

    def have(column: str) -> bool:
        told = ([getattr(run, column) for run in side.runs] for side in (a, b))
        return all(any(value == value for value in values) for values in told)

    memory = next(filter(have, MEMORY), next(iter(MEMORY)))
    error = METRICS["test_top1_error"]
    errors = [error] if have(error.column) else []
    return [METRICS[c] for c in ("epoch_time_s", memory, "train_loss", "energy_j")] + errors


@dataclass(frozen=True)
class MetricPair:
    """One metric of one match: the seed and value of each repeat of both sides, and their ratio."""

    match: Match
    a: Readings
    b: Readings
    ratio: Ratio

    @property
    def compared(self) -> tuple[Readings, Readings]:
        """The readings that the ratio compares: if seeds are paired, those that both sides ran."""
        if not self.ratio.pairs:
            return self.a, self.b
        shared = {seed for seed, _ in self.a} & {seed for seed, _ in self.b}
        a, b = ([(s, x) for s, x in side if s in shared] for side in (self.a, self.b))
        return a, b

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
    """The comparison of two sides, before it is judged against a margin."""

    a: Side
    b: Side
    matches: Matches
    metrics: dict[Metric, list[MetricPair]]
    axis: str = ""  # the axis whose two values are the sides; empty for two sweeps
    apart: tuple[str, ...] = ()  # axes of `UNTIMED` of which the sides share no value

    @property
    def names(self) -> tuple[str, str]:
        return self.a.name, self.b.name

    @property
    def free(self) -> tuple[str, ...]:
        """The axes in which matched cases may differ, besides how much was measured."""
        return (*free_axes(self.axis), *self.apart)

    @property
    def matched(self) -> Sequence[Match]:
        """Cases on both sides, in the order of A."""
        return self.matches.pairs

    def ends(self, match: Match) -> tuple[SideCase, SideCase]:
        """Return a matched case as run by A and by B."""
        return self.a.ran[match.a], self.b.ran[match.b]

    def alone(self, side: Side) -> Mapping[int, EnvironmentKey]:
        """Return the unmatched cells of a side, with the environment that tells them apart."""
        return self.matches.alone[0 if side is self.a else 1]

    def list_cells(self, side: Side) -> list[int]:
        """Return the matched and unmatched cells of a side, not those that others represent."""
        matched = [match.a if side is self.a else match.b for match in self.matched]
        return [*matched, *self.alone(side)]

    def count(self, side: Side) -> tuple[int, int]:
        """Return the number of cases (`list_cells`) and of runs of a side."""
        cells = self.list_cells(side)
        return len(cells), sum(len(side.ran[cell].runs) for cell in cells)

    def environment(self) -> Iterator[tuple[str, bool, list[str], list[str]]]:
        """Yield the environment columns that differ: column, whether it must agree, A's and B's
        values. Those that must agree come first, and are also included if each side mixes the same
        values. Two models or two datasets differ on purpose."""
        every = (f.name for f in fields(Environment) if f.name not in READINGS)
        names = [name for name in every if not self.is_asked(name)]
        for name in sorted(names, key=lambda name: name not in COMPARABLE):
            a, b = self.a.environment(name), self.b.environment(name)
            if set(a) != set(b) or self.a.mixes(name):
                yield name, name in COMPARABLE and self.axis not in COMPARABLE[name], a, b

    def is_asked(self, name: str) -> bool:
        """Return whether an environment column depends on the compared axis."""
        return self.axis != "device" and self.axis in COMPARABLE.get(name, ())

    def list_readings(self) -> Iterator[tuple[str, float, float]]:
        """Yield the readings of the machine during the matched cases that differ: column, and the
        median of the cases' medians of A and B."""
        for column, (_, _, least) in READINGS.items():
            medians = []
            for of in (0, 1):
                ends = [self.ends(match)[of] for match in self.matched]
                known = [[v for run in end.usable if (v := getattr(run, column)) == v]
                         for end in ends]  # fmt: skip
                medians.append([median(values) for values in known if values])
            if all(medians):
                a, b = map(median, medians)
                if max(a, b) > min(a, b) * (1 + least):
                    yield column, float(a), float(b)

    def spoilt(
        self, matches: Sequence[Match], beside: bool = False
    ) -> list[tuple[Side, str, int, int]]:
        """Return the doubts that make the times of these matches unreliable, each with how many of
        a side's runs have it, and of how many; with ``beside``, also what is told beside a time."""
        found = []
        for place, side in enumerate((self.a, self.b)):
            runs = [run for match in matches for run in self.ends(match)[place].usable]
            for name in (*SPOILING, *(BESIDE if beside else ())):
                if hit := sum(getattr(run, name) for run in runs):
                    found.append((side, name, hit, len(runs)))
        return found

    def change(self, match: Match) -> str:
        """Return how a match's outcome changed: broken, fixed, `STOPPED` or changed; empty if it
        did not."""
        one, two = self.ends(match)
        both = list(zip(one.severities, two.severities, strict=False))
        if any(after > before for before, after in both):
            return "broken"
        if any(after < before for before, after in both):
            return "fixed"
        if not REPEATED.isdisjoint([*one.outcomes, *two.outcomes]):
            return STOPPED
        return "" if {*one.outcomes} == {*two.outcomes} else "changed"

    def label(self, match: Match) -> str:
        return self._name(self.a.ran[match.a].case, match.told)

    def label_alone(self, side: Side) -> list[str]:
        return [self._name(side.ran[cell].case, told) for cell, told in self.alone(side).items()]

    def _name(self, case: Case, told: EnvironmentKey) -> str:
        where = (f"{name} {value or 'none'}" for name, value in told)
        return " · ".join([self.ask(case).label(self.telling), *where])

    def ask(self, case: Case) -> Case:
        """Return the case with the defaults of the axes in which matched cases may differ."""
        return _neutralize(case, self.free)

    @cached_property
    def telling(self) -> list[str]:
        ran = [self.a.ran[match.a] for match in self.matched]
        ran += [side.ran[cell] for side in (self.a, self.b) for cell in self.alone(side)]
        cases = {self.ask(one.case) for one in ran}
        whole = {_neutralize(case, SAME_QUESTION) for case in cases}
        names = [name for name in list_varying(whole) if name not in self.free]
        if len(whole) == len(cases):
            return names
        # how it was measured names a case only if one was measured in several ways
        return [*names, *(n for n in SAME_QUESTION if len({getattr(c, n) for c in cases}) > 1)]

    def judge_equivalence(
        self, metric: Metric, margin: float
    ) -> list[tuple[MetricPair, Equivalence]]:
        """Test each case with a ratio for equivalence of B's loss or error to A's, as one family.
        Empty for a metric that does not depend on the seed."""
        findings = [f for f in self.metrics[metric] if metric.seeded and f.ratio.value is not None]
        judged = judge_equivalences([f.seeded for f in findings], margin, self.names)
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


def _neutralize(case: Case, names: Sequence[str]) -> Case:
    neutral: dict[str, Any] = {name: AXES[name].default for name in names}
    return replace(case, **neutral)


def compare(a: Side, b: Side, metrics: Sequence[Metric], axis: str = "") -> Comparison:
    """Compare two sweeps, or two values of an axis; the cases of a metric are one family. For cases
    measured on different parts of an epoch, metrics that depend on that are not compared."""
    apart = () if axis else find_apart(a, b)
    matches = match_cases(a.cells, b.cells, axis, apart)
    comparison = Comparison(a, b, matches, {}, axis, apart)
    for metric in metrics:
        found = []
        for match in comparison.matched:
            of_a, of_b = (end.readings(metric) for end in comparison.ends(match))
            if of_a or of_b:
                refused = Ratio(lack=_refuse(comparison, metric, match))
                found.append(MetricPair(match, of_a, of_b, refused))
        family = [one for one in found if not one.ratio.lack]
        if metric.seeded:
            ratios = compare_seeds([one.seeded for one in family], comparison.names)
        else:
            samples = [([v for _, v in one.a], [v for _, v in one.b]) for one in family]
            ratios = compare_repeats(samples, metric.deterministic, comparison.names)
        judged = iter(ratios)
        for place, one in enumerate(found):
            if not one.ratio.lack:
                ratio, guessing = next(judged), metric.seeded and comparison.guessing(one.match)
                if guessing and all(guessing) and not ratio.lack:
                    ratio = replace(ratio, lack=GUESSING)
                found[place] = replace(one, ratio=ratio)
        comparison.metrics[metric] = found
    return comparison


def find_apart(a: Side, b: Side) -> tuple[str, ...]:
    """Return the axes of `UNTIMED` of which two sweeps share no value."""
    cases = (set(a.cases), set(b.cases))
    return tuple(
        name
        for name in UNTIMED
        if not {getattr(case, name) for case in cases[0]}
        & {getattr(case, name) for case in cases[1]}
    )


def _refuse(comparison: Comparison, metric: Metric, match: Match) -> str:
    if comparison.apart and metric.seeded:
        return f"the sides differ in {' and '.join(map(name_axis, comparison.apart))}"
    one, two = (end.part for end in comparison.ends(match))
    known = one.known and two.known
    learnt = metric.seeded and comparison.axis in list_affecting(Trait.LEARNING)
    if known and learnt and one.share == two.share < 1:
        return "less than an epoch does not show what it does to learning; use --fraction 1"
    # times are per epoch or step, memory is a peak; all other metrics are of the measured steps
    of_part = metric.seeded or metric is METRICS["energy_j"]
    if one.share == two.share or not known or not of_part:
        return ""
    if one.steps is None and two.steps is None:
        parts = f"{100 * one.share:.3g} % and {100 * two.share:.3g} % of an epoch"
        return f"{parts}: not comparable; use --fraction 1 and --until none in both"
    said = (
        f"{part} of an epoch" if part.steps is None else f"{part} ({part.share:.3g} of an epoch)"
        for part in (one, two)
    )
    return f"{' and '.join(said)}: not comparable"


def find_other_models(comparison: Comparison) -> dict[str, list[str]]:
    """Return by model name the parts in which matched networks of that name differ. Unknown parts
    do not differ, and parts that depend on the compared axis differ on purpose, as between two
    models, image shapes or starting weights. Between two machines the source files may differ, as
    two versions of this harness have them: a table of the environments says so."""
    changed: dict[str, dict[str, None]] = {}
    names = [name for name in MODEL_PARTS if not comparison.is_asked(name)]
    sides = (comparison.a, comparison.b)
    here, there = ({*s.environment("gpu")} or {*s.environment("cpu")} for s in sides)
    if here and there and not here & there:
        names = [name for name in names if name != "model_source"]
    for match in comparison.matched:
        one, two = (end.runs[0] for end in comparison.ends(match))
        for name in names:
            ours, theirs = getattr(one, name), getattr(two, name)
            if ours and theirs and ours != theirs:
                changed.setdefault(one.model, {})[MODEL_PARTS[name]] = None
    return {model: list(what) for model, what in changed.items()}


def refuse_other_models(comparison: Comparison) -> None:
    """Refuse to compare different networks. Raises UsageError: `find_other_models` found some."""
    if changed := find_other_models(comparison):
        found = (f"{model} changed in {', '.join(what)}" for model, what in changed.items())
        which = make_printable("; ".join(found))
        raise UsageError(
            f"{comparison.a.title} and {comparison.b.title} trained different networks: {which}; "
            "to compare them anyway, add --mix"
        )


def parse_axis(texts: Sequence[str]) -> tuple[str, list[Value]]:
    """Read the name of an axis and no values or two. Raises UsageError: the axis is unknown, there
    are not two different values, or one is invalid for the axis."""
    name, *values = texts
    name = parse_name("--axis", name, list(AXES))
    if len(values) not in (0, 2):
        raise UsageError(
            f"--axis {' '.join(texts)}: give two values of {name}, "
            "after the sweeps: SWEEP --axis NAME VALUE VALUE"
        )
    parsed = [parse_value(name, text, f"--axis {name}") for text in values]
    if parsed and parsed[0] == parsed[1]:
        raise UsageError(f"--axis {' '.join(texts)}: give two different values of {name}")
    return name, parsed


def take_values(a: Side, b: Side | None, axis: str, values: Sequence[Value]) -> tuple[Side, Side]:
    """Take one value of ``axis`` from each sweep, or both from ``a``; ``values`` may be empty if
    there is only one choice. Raises UsageError: a sweep has no case with a value, or the values
    must be given."""
    sweeps = [a, b] if b else [a]
    held = [list_values(side, axis) for side in sweeps]
    if not values:
        values = [value for found in held for value in found]
        if len(values) != 2 or not all(held) or values[0] == values[1]:
            found = zip(sweeps, held, strict=True)
            has = " and ".join(f"{side.path} has {_write(known)}" for side, known in found)
            if len({format_value(value) for value in values}) >= 2:
                raise UsageError(f"--axis {axis}: name two values, as {has}")
            more = "; leave --axis out to compare equal cases" if b else ""
            raise UsageError(f"--axis {axis}: needs two values, and {has}{more}")
    sides = []
    for side, known, value in zip((a, b or a), (held[0], held[-1]), values, strict=True):
        if value not in known:
            raise UsageError(
                f"no case with {axis} {spell_value(value)} in {side.path}; it has {_write(known)}"
            )
        sides.append(_take(side, axis, value))
    return sides[0], sides[1]


def list_values(side: Side, axis: str) -> list[Value]:
    """Return the values of an axis in a sweep, in order, from cases to which it applies."""
    values = dict.fromkeys(getattr(case, axis) for case in side.cases if applies(axis, case))
    return list(values)


def _write(values: Iterable[Value], most: int = 8) -> str:
    texts = [spell_value(value) for value in values]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "") or "none"


def _take(side: Side, axis: str, value: Value) -> Side:
    title = name_setting(axis, spell_value(value))
    name = format_value(value) if axis in SWITCHES else title
    runs = [r for r in side.runs if getattr(r.case, axis) == value and applies(axis, r.case)]
    return replace(side, name=name, title=title, runs=runs)


def explain_unmatched(comparison: Comparison) -> str:
    """Return why no case is on both sides, with a command that compares the values, if any."""
    one, two = comparison.a, comparison.b
    a, b = ({comparison.ask(s.ran[c].case) for c in comparison.alone(s)} for s in (one, two))
    if a & b:
        mixed = {
            n: None for s in (one, two) for told in comparison.alone(s).values() for n, _ in told
        }
        return f"within a side, runs of one case differ in {', '.join(mixed)}; none has an equal"
    parted = [
        name
        for name in AXES
        if not {getattr(case, name) for case in a} & {getattr(case, name) for case in b}
        and name not in SAME_QUESTION
    ]
    why = f"they share no value of {', '.join(parted)}" if parted else "no combination is shared"
    devices = [set(s.environment("gpu") or s.environment("cpu")) for s in (one, two)]
    asked = comparison.axis or "device" in parted
    if parted and not asked and all(devices) and not devices[0] & devices[1]:
        # two values on two machines: neither the values nor the machines would be compared
        flags = ", ".join(map(axis_flag, parted))
        return f"{why}; to compare their devices, sweep both with the same {flags}"
    command = "" if comparison.axis else suggest(one, two, parted)
    return f"{why}; to compare these values: {command}" if command else why


def suggest(a: Side, b: Side, axes: Iterable[str]) -> str:
    """Return a command that compares a value of one of ``axes`` per sweep; empty if none works."""
    for axis in axes:
        pairs = product(list_values(a, axis), list_values(b, axis))
        for one, two in islice(pairs, 16):
            sides = _take(a, axis, one), _take(b, axis, two)
            matches = match_cases(sides[0].cells, sides[1].cells, axis)
            if one != two and matches.pairs:
                sweeps = " ".join(shlex.quote(str(side.path)) for side in (a, b))
                mix = " --mix" * bool(find_other_models(Comparison(*sides, matches, {}, axis)))
                return f"python -m bench.compare {sweeps} {_write_flag(axis, one, two)}{mix}"
    return ""


def _write_flag(axis: str, one: Value, two: Value) -> str:
    return f"--axis {axis} {shlex.quote(spell_value(one))} {shlex.quote(spell_value(two))}"


def explain_one_sweep(side: Side) -> str:
    """Return the error for one sweep without an axis: what can be compared."""
    varying = {axis: values for axis in AXES if len(values := list_values(side, axis)) > 1}
    if not varying:
        return f"{side.path}: name a second sweep to compare with; nothing varies within this one"
    axis = next((name for name in NAMED if name in varying), next(iter(varying)))
    held = "; ".join(f"{name} ({_write(found)})" for name, found in varying.items())
    return (
        f"{side.path}: name a second sweep to compare with, or two values to compare within this "
        f"one, such as {_write_flag(axis, *varying[axis][:2])}; what varies: {held}"
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
    if word not in verdicts and word not in OUTCOME_FINDINGS:
        raise UsageError(f"--fail-on {text!r}: {nearest(word, [*verdicts, *OUTCOME_FINDINGS])}")
    if not colon:
        return Gate(text, word, margin)
    if word in OUTCOME_FINDINGS:
        raise UsageError(f"--fail-on {text!r}: {word!r} takes no percentage; leave {percent!r} out")
    return Gate(text, word, parse_percent(f"--fail-on {text!r}", percent))


def _find(comparison: Comparison, gate: Gate) -> Iterator[str]:
    one, two = comparison.a.title, comparison.b.title
    if gate.word == "broken":
        for match in comparison.matched:
            if comparison.change(match) == "broken":
                a, b = comparison.ends(match)
                yield f"{comparison.label(match)}: {a.ended} in {one}, {b.ended} in {two}"
    elif gate.word == "missing":
        for label in comparison.label_alone(comparison.a):
            yield f"{label}: in {one}, not in {two}"
    for metric, findings in comparison.metrics.items():
        for finding in findings:
            judged = finding.ratio.judge(gate.margin)
            unjudged = judged is Verdict.NONE and finding.a and finding.b
            if metric.word(judged) == gate.word or (unjudged and gate.word == "unjudged"):
                shown = metric.show(finding.ratio).value or 0
                what = finding.ratio.lack or f"{'speed ' * metric.speed}{write_number(shown)}×"
                yield f"{comparison.label(finding.match)}: {metric.label}: {what}"


@dataclass(frozen=True)
class Result:
    """The result of a gate: its findings, and how many verdicts it checked (one for each case and
    metric), or for a gate on outcomes, how many cases."""

    gate: Gate
    failures: list[str]  # one line each
    judged: int
    unjudged: int  # measured, without a verdict or with an interval that rules nothing out
    why: dict[str, int]  # the count of each reason for these, most frequent first

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
            checked, _ = comparison.count(comparison.a)
        why = {} if checked else {explain_unmatched(comparison): 0}
        return Result(gate, failures, checked, 0, why)
    ratios = [
        finding.ratio
        for metric, findings in comparison.metrics.items()
        if gate.word in (metric.lower, metric.higher)
        for finding in findings
    ]
    lacks = Counter(r.lack for r in ratios if r.judge(gate.margin) is Verdict.NONE)
    if wide := sum(r.rules_out_nothing(gate.margin) for r in ratios):
        limit = write_percent(gate.margin)
        lacks[f"the interval reaches beyond {limit} both ways; more repeats would decide"] = wide
    why = dict(lacks.most_common())
    if not ratios:
        columns = [m.name for m in comparison.metrics if gate.word in (m.lower, m.higher)]
        none = f"no run has a value of {' or '.join(columns)}"
        why = {none if comparison.matched else explain_unmatched(comparison): 0}
    unjudged = lacks.total()
    return Result(gate, failures, len(ratios) - unjudged, unjudged, why)


def describe_result(result: Result) -> Iterator[str]:
    """Yield lines on a gate that failed, or that could not judge all cases."""
    for line in result.failures:
        yield f"fail: {result.gate.text}: {make_printable(line)}"
    reasons = [f"{lack} ({n} times)" if n > 1 else lack for lack, n in result.why.items()]
    why = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    if not result.judged:
        yield f"fail: {result.gate.text}: no case could be judged: {make_printable(why)}"
    elif result.unjudged:
        total = result.judged + result.unjudged
        yield (
            f"warning: --fail-on {result.gate.text}: {result.unjudged} of {total} cases could not "
            f"be judged: {make_printable(why)}"
        )
