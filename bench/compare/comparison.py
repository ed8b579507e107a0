"""Two sides, matched case by case, and the comparison of their repeats for every metric, with the
findings for which ``--fail-on`` returns 1. A side is a sweep, or its cases with one value of an
axis.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from bench.answers.money import Cost, Tariff
from bench.answers.render.table import Wording, find_wording
from bench.base.errors import UsageError, nearest
from bench.base.text import make_printable, write_number
from bench.networks.models import MODELS
from bench.results.store.reader import Sources, find_records, read_sources
from bench.results.store.rows import group, latest
from bench.results.study.axes import COMPARED, name_setting, refuse_unknown
from bench.results.study.comparable import (
    CONDITIONS,
    find_factor,
    refuse_alone,
    refuse_learnt,
    refuse_part,
    refuse_together,
    take_alike,
    tell_condition,
    tell_known,
)
from bench.results.study.estimate import LOSS, TIME
from bench.results.study.pairs import EnvironmentKey, list_free
from bench.results.study.pairs import match as match_cases
from bench.results.study.quantities import MEMORY_MEASURES, METRICS, Metric
from bench.results.study.runs import Run, find_middle, list_readings, read_runs
from bench.results.study.sweeps import read_sweep
from bench.results.study.warnings import WARNINGS, WarningRule
from bench.results.verdict import (
    GUESSING,
    Equivalence,
    Ratio,
    Verdict,
    average_seeds,
    compare_seeds,
    find_classes,
    is_guessing,
    judge_equivalences,
    withdraw_if_guessing,
)
from bench.results.verdict import compare as compare_repeats
from bench.schema.axis import Value, is_own, name_axis, name_column
from bench.schema.case import (
    SAME_QUESTION,
    SWITCHES,
    UNTIMED,
    Case,
    change_axes,
    find_axis,
    format_value,
    list_axes,
    list_varying,
    spell_value,
)
from bench.schema.command import hide_words, runs_from
from bench.schema.flags import parse_percent
from bench.schema.optimization import UNFUSED
from bench.schema.record import COMPARABLE, MODEL_PARTS, REPEATED, Status
from bench.schema.rules import applies
from bench.training.sources import list_edited
from bench.workers.fingerprint import name_source

# ------------------------------------------------------------------------------------------- sides

Readings = dict[int, list[float]]  # the values of each seed


@dataclass(frozen=True, eq=False)
class SideCase:
    """A case as one side ran it, in one environment."""

    runs: list[Run]

    @property
    def case(self) -> Case:
        return self.runs[0].case

    def read(self, metric: Metric) -> Readings:
        """Return the values of the usable repeats of each seed."""
        found: Readings = {}
        for seed, value in list_readings(metric, self.runs):
            found.setdefault(seed, []).append(value)
        return found

    @property
    def classes(self) -> int | None:
        """The classes that the loss distinguishes; see `find_classes`."""
        run, case = self.runs[0], self.case
        return find_classes(case.workload, case.classes, run.dataset_classes)

    @property
    def ended(self) -> str:
        """The outcomes of its runs: ``ok ×4, oom``."""
        ends = Counter(run.status + " (inferred)" * run.inferred for run in self.runs)
        return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in ends.items())

    @property
    def severities(self) -> tuple[int, ...]:
        """The best and the worst of its runs: 0 is ok, 1 diverged, 2 unusable. Empty if all runs
        were stopped from outside, which says nothing about the case."""
        order = {Status.OK: 0, Status.DIVERGED: 1}
        found = [order.get(run.status, 2) for run in self.runs if run.status not in REPEATED]
        return (min(found), max(found)) if found else ()


@dataclass(frozen=True, eq=False)
class _Side:
    """One side: the latest attempt at each of its runs, without drift checks. Their ``cell`` tells
    cases in each environment apart."""

    name: str  # in tables: A, B, or a value of an axis, such as ``on``
    title: str  # in sentences, such as ``compile default``
    path: Path
    runs: list[Run]

    @cached_property
    def ran(self) -> dict[int, SideCase]:
        return {runs[0].cell: SideCase(runs) for runs in group(self.runs, attrgetter("cell"))}

    def list_values(self, axis: str) -> list[Value]:
        """Return the values of an axis, in order, from cases to which it applies."""
        cases = (run.case for run in self.runs)
        return list(dict.fromkeys(getattr(c, axis) for c in cases if applies(axis, c)))

    def take(self, axis: str, value: Value) -> _Side:
        """Return the cases with one value of an axis."""
        runs = [r for r in self.runs if getattr(r.case, axis) == value and applies(axis, r.case)]
        title = name_setting(axis, spell_value(value))
        if is_own(axis) and all(runs_from(r.command, name_column(axis)) for r in runs):
            title = spell_value(value)  # base and head need no name of what they are
        name = format_value(value) if axis in SWITCHES else title
        return replace(self, name=name, title=title, runs=runs)


def read_side(name: str, path: Path) -> _Side:
    """Read one side. Raises UsageError: it has no records of sweeps, or they cannot be read."""
    if not (runs := latest(read_runs([read_sweep(path)]))):
        raise UsageError(f"{path}: no records of a sweep yet; compare sweeps that have run")
    return _Side(name, name, path, runs)


def read_versions(path: Path) -> Sources:
    """Read what the folders of one side tell of the user's files in each version."""
    found: Sources = {}
    for records in find_records(path):
        for what, known in read_sources(records.parent).items():
            found.setdefault(what, {}).update(known)
    return found


def take_values(
    a: _Side, b: _Side | None, axis: str, values: Sequence[Value]
) -> tuple[_Side, _Side]:
    """Take one value of ``axis`` from each sweep, or both from ``a``; ``values`` may be empty if
    there is only one choice. Raises UsageError: a sweep has no case with a value, or the values
    must be given."""
    refuse_unknown("--axis", axis, [*a.runs, *(b.runs if b else ())], COMPARED)
    measured = [side.list_values(axis) for side in (a, b) if side]
    wanted = values or [value for found in measured for value in found]
    if (
        len({*wanted}) == len(wanted) == 2
        and wanted[0] in measured[0]
        and wanted[1] in measured[-1]
    ):
        return a.take(axis, wanted[0]), (b or a).take(axis, wanted[1])
    has = " and ".join(", ".join(map(spell_value, found)) or "none" for found in measured)
    asked = " ".join(map(spell_value, values))
    name = name_column(axis)
    raise UsageError(
        f"--axis {name} {asked}".rstrip()
        + f": name two values of {name} that were measured, one of each sweep if there are two; "
        f"there is {has}"
    )


# --------------------------------------------------------------------------------------- comparison

_ENERGY = METRICS["energy_j"]

SPOILING = tuple(
    name
    for name, warning in WARNINGS.items()
    if warning.fatal and name not in ("invalid", "diverged", "uneven", "mislabelled")
)
"""Warnings with which times are not relied on, as far as they forbid it: those with which a report
trusts none, but for rows that are told as outcomes, or are not compared at all."""


@dataclass(frozen=True, eq=False)
class Match:
    """A case as run by A and by B. ``environment`` tells it apart if a side ran it in
    several environments."""

    label: str
    ran: tuple[SideCase, SideCase]
    environment: EnvironmentKey

    @property
    def ended(self) -> str:
        """How its runs ended: ``ok ×3 → oom ×3``."""
        return " → ".join(side.ended for side in self.ran)

    @property
    def factor(self) -> float:
        """What an epoch time of B, or the energy of an equal part of it, is multiplied by to be of
        as many items as one of A."""
        one, two = (take_alike(side.runs)[0] for side in self.ran)
        return find_factor(one, two)

    @property
    def change(self) -> str:
        """Whether it is broken or fixed in B; empty if neither."""
        both = list(zip(*(side.severities for side in self.ran), strict=False))
        if any(after > before for before, after in both):
            return "broken"
        return "fixed" if any(after < before for before, after in both) else ""

    @property
    def guessing(self) -> list[bool]:
        """Of each side with a training loss whether it is still that of guessing."""
        known = ((side.read(LOSS), side.classes) for side in self.ran)
        return [is_guessing(average_seeds(losses), classes) for losses, classes in known if losses]


@dataclass(eq=False)
class MetricVerdict:
    """One metric of one match: the readings of both sides, their ratio and, for a loss or an error
    with a ratio, whether B's is equivalent to A's."""

    match: Match
    readings: tuple[Readings, Readings]
    ratio: Ratio
    equivalence: Equivalence | None = None

    @property
    def values(self) -> tuple[list[float], list[float]]:
        """The value of each repeat of A and of B."""
        a, b = ([v for values in side.values() for v in values] for side in self.readings)
        return a, b

    def list_costs(self, tariff: Tariff) -> list[Cost]:
        """Return what the times of A and of B cost, of as many items each, by the median time and
        energy of its repeats."""
        factors = 1.0, 1.0 if self.ratio.lack else self.match.factor
        costs = []
        for side, times, factor in zip(self.match.ran, self.values, factors, strict=True):
            energies = [run.energy_per_epoch_j * factor for run in side.runs if run.timed]
            energy_j = median([one for one in energies if one == one] or [math.nan])
            time_s = median(times) if times else math.nan
            costs.append(tariff.find_cost(side.runs[0], time_s, energy_j))
        return costs


CLOCK_STEPS = 0.02
"""Clocks further apart, as a share, are not the same: cards step them by 15 MHz, 1 % of 1.5 GHz."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two sides. Margins are fractions: the smallest differences that matter, for
    verdicts and for equivalence."""

    sides: tuple[_Side, _Side]
    axis: str  # the axis whose two values are the sides; empty for two sweeps
    free: tuple[str, ...]  # that axis, and those that follow from it of which they share no value
    apart: tuple[str, ...]  # axes of `UNTIMED` of which the sides share no value
    margin: float
    equal: float  # the margin of equivalence
    common: str  # the settings that all cases share
    matches: list[Match]  # in the order of A
    alone: tuple[list[str], list[str]]  # the cases that only A or only B has
    metrics: dict[Metric, list[MetricVerdict]]
    tariff: Tariff | None = None  # what an hour and a kWh cost

    @property
    def names(self) -> tuple[str, str]:
        a, b = self.sides
        return a.name, b.name

    @property
    def wording(self) -> Wording:
        return find_wording([run for side in self.sides for run in side.runs])

    def list_differences(self) -> Iterator[tuple[str, str, str]]:
        """Yield the columns, of those on which rows of one sweep agree, in which the sides differ,
        with A's and B's values; and the axes that follow from the one that is compared. Which they
        are of a precision, cases are not named by either."""
        for name in self.free[1:] if self.axis != "precision" else ():
            ran = ([getattr(m.ran[at].case, name) for m in self.matches] for at in (0, 1))
            one, two = (" or ".join(dict.fromkeys(map(spell_value, values))) for values in ran)
            if one != two:
                yield name, one, two
        for name, *sides in _list_unlike([side.runs for side in self.sides], self.axis):
            a, b = (" or ".join(values) or "none" for values in sides)
            yield name, a, b
        yield from self._list_clocks()

    def _list_clocks(self) -> Iterator[tuple[str, str, str]]:
        """Yield the clocks of one kind of GPU that differ where two sweeps ran the same cases: one
        may be locked, which no power limit tells. A case of which one side knows none has no
        part in that: clocks depend on what is computed."""
        gpus = {run.gpu for match in self.matches for side in match.ran for run in side.runs}
        if self.axis or len(gpus) > 1:
            return
        for name in ("sm_clock_mhz", "memory_clock_mhz"):
            each = [
                [find_middle(getattr(run, name) for run in side.runs)[0] for side in match.ran]
                for match in self.matches
            ]
            known = [both for both in each if not any(map(math.isnan, both))]
            a, b = (find_middle(both[at] for both in known)[0] for at in (0, 1))
            if abs(a - b) > CLOCK_STEPS * max(a, b):
                yield name, f"{a:g}", f"{b:g}"

    def list_edited(self) -> list[str]:
        """Return the user's files that runs of both sides opened, with another content in each."""
        recorded = [read_versions(side.path) for side in self.sides]
        runs = (product(*(side.runs for side in match.ran)) for match in self.matches)
        versions = dict.fromkeys(
            tuple((name_source(run.case), run.model_source) for run in pair)
            for pair in chain.from_iterable(runs)
        )
        edited = dict[str, None]()
        for sides in versions:
            files = (
                known.get(what, {}).get(version, {})
                for known, (what, version) in zip(recorded, sides, strict=True)
            )
            edited |= dict.fromkeys(list_edited(*files))
        return [*edited]

    def list_spoilt(self, matches: Sequence[Match]) -> list[str]:
        """Name the warnings that make the times of these matches unreliable: ``noisy in B``."""
        found = self._find_spoilt(matches)
        return [f"{warning.remark} in {side}" for warning, side, _ in found]

    def advise_spoilt(self, matches: Sequence[Match]) -> str:
        """Return what helps against the warnings of `list_spoilt`, by the sentence."""
        found = self._find_spoilt(matches)
        return " ".join(dict.fromkeys(warning.fix.advise(runs) for warning, _, runs in found))

    def _find_spoilt(
        self, matches: Sequence[Match]
    ) -> Iterator[tuple[WarningRule, str, list[Run]]]:
        for warning in map(WARNINGS.__getitem__, SPOILING):
            for place, side in enumerate(self.names):
                ran = (one.ran[place].runs for one in matches)
                relied = [runs for runs in ran if warning.forbids(sum(run.timed for run in runs))]
                if hit := [run for runs in relied for run in runs if getattr(run, warning.name)]:
                    yield warning, side, hit


def follows(column: str, axis: str) -> bool:
    """Return whether an environment column depends on the compared axis."""
    owner = "vary" if is_own(axis) else axis
    if column in CONDITIONS:
        return owner in CONDITIONS[column]
    return owner != "device" and owner in COMPARABLE.get(column, ())


def choose_metrics(a: _Side, b: _Side) -> list[Metric]:
    """Return time, loss, energy, and the first measure of memory and test error, as far as both
    sides have them."""

    def have(column: str) -> bool:
        columns = ([getattr(run, column) for run in side.runs] for side in (a, b))
        return all(any(value == value for value in values) for values in columns)

    memory = next(filter(have, MEMORY_MEASURES), "")
    names = ("epoch_time_s", memory, "train_loss", "energy_j", "test_top1_error")
    known = [METRICS[name] for name in names if name]
    return [metric for metric in known if have(metric.error_of or metric.name)]


def compare(
    a: _Side,
    b: _Side,
    metrics: Sequence[Metric],
    axis: str = "",
    margin: float = 0.02,
    equal: float = 0.02,
) -> Comparison:
    """Compare two sweeps, or two values of an axis; the cases of a metric are one family."""
    used = [{name: {getattr(run, name) for run in s.runs} for name in UNTIMED} for s in (a, b)]
    apart = tuple(name for name in UNTIMED if not axis and used[0][name].isdisjoint(used[1][name]))
    ours, theirs = ([one.runs[0] for one in side.ran.values()] for side in (a, b))
    pairs, alone = match_cases(ours, theirs, axis, apart)
    cases = [one.case for one in (*a.ran.values(), *(b.ran[cell] for cell in alone[1]))]
    free = list_free(axis, ours, theirs)
    names, common = _name_cases(cases, (*free, *apart))

    def label(case: Case, environment: EnvironmentKey) -> str:
        return " · ".join(
            [names[case], *(f"{name} {value or 'none'}" for name, value in environment)]
        )

    matches = []
    for one, two, environment in pairs:
        ran = a.ran[one], b.ran[two]
        matches.append(Match(label(ran[0].case, environment), ran, environment))
    only_a, only_b = (
        [label(side.ran[cell].case, environment) for cell, environment in only.items()]
        for side, only in zip((a, b), alone, strict=True)
    )
    found = {metric: _judge(metric, matches, axis, apart, equal) for metric in metrics}
    alone_in = (only_a, only_b)
    return Comparison((a, b), axis, free, apart, margin, equal, common, matches, alone_in, found)


def _name_cases(cases: Sequence[Case], free: Sequence[str]) -> tuple[dict[Case, str], str]:
    """Name each case by the axes that tell it apart from others, but those in which matched cases
    may differ, and name what all cases share. How a case was measured tells it apart only if one
    was measured in several ways."""
    asked = {case: change_axes(case, _list_defaults(free)) for case in cases}
    distinct = {*asked.values()}
    alike = {change_axes(case, _list_defaults(SAME_QUESTION)) for case in distinct}
    varying = list_varying(alike if len(alike) == len(distinct) else distinct)
    telling = [name for name in varying if name not in free]
    hidden = {*telling, *free, *SAME_QUESTION}
    first = asked[cases[0]]
    first = replace(first, command=first.command and hide_words(first.command))
    common = first.label(name for name in list_axes(cases) if name not in hidden)
    return {case: one.label(telling) for case, one in asked.items()}, common


def _list_defaults(axes: Sequence[str]) -> dict[str, Any]:
    return {name: find_axis(name).default for name in axes}


def _judge(
    metric: Metric, matches: Sequence[Match], axis: str, apart: Sequence[str], equal: float
) -> list[MetricVerdict]:
    """Judge one metric of all matches in which a side has it, as one family."""
    found = []
    for match in matches:
        ours, theirs = (side.read(metric) for side in match.ran)
        if ours or theirs:
            lack = _refuse(metric, match, axis, apart)
            if metric in (TIME, _ENERGY) and not lack:
                theirs = {
                    seed: [v * match.factor for v in values] for seed, values in theirs.items()
                }
            found.append(MetricVerdict(match, (ours, theirs), Ratio(lack=lack)))
    family = [one for one in found if not one.ratio.lack]
    if not metric.seeded:
        ratios = compare_repeats([one.values for one in family], metric.deterministic)
        for one, ratio in zip(family, ratios, strict=True):
            one.ratio = ratio
        return found
    for one, ratio in zip(family, compare_seeds([one.readings for one in family]), strict=True):
        guessing = one.match.guessing
        if guessing and all(guessing) and not ratio.lack:
            ratio = replace(ratio, lack=GUESSING)
        one.ratio = ratio
    learnt = [one for one in family if one.ratio.value is not None]
    judged = judge_equivalences([one.readings for one in learnt], equal)
    for one, equivalence in zip(learnt, judged, strict=True):
        one.equivalence = withdraw_if_guessing(equivalence, one.match.guessing)
    return found


def _refuse(metric: Metric, match: Match, axis: str, apart: Sequence[str]) -> str:
    """Say why a metric of a match is not compared: it depends on how much of an epoch was measured,
    or on a recipe that differs."""
    if why := refuse_runs(metric, *match.ran) or _find_other(match, axis):
        return why
    one, two = (side.runs[0] for side in match.ran)
    slow = "optimizer" in apart and {one.optimizer, two.optimizer} & {*UNFUSED}
    if apart and (metric.seeded or slow):
        return f"the sides differ in {' and '.join(map(name_axis, apart))}" + (
            "; give --axis optimizer and its two values" if slow else ""
        )
    # times are per epoch or step, memory is a peak; all other metrics are of the measured steps
    if metric.seeded:
        return refuse_learnt(one, two, axis)
    return refuse_part(one, two) if metric is _ENERGY else ""


def _find_other(match: Match, axis: str) -> str:
    """Say in what else the sides differ, where two values of an axis are compared within a folder:
    what another torch or driver did is not the axis's. Two folders are compared for that."""
    sweeps = {run.sweep for side in match.ran for run in side.runs}
    if axis in ("", "device") or len(sweeps) > 1:
        return ""
    for name, a, b in _list_unlike([side.runs for side in match.ran], axis):
        if name in COMPARABLE and a and b and {*a}.isdisjoint(b):
            return f"the sides ran with another {name.replace('_', ' ')}: measure both with one"
    return ""


def _list_unlike(
    sides: Sequence[Sequence[Run]], axis: str
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the columns of `COMPARABLE` that do not depend on ``axis`` and of which the two sides
    know other values, with these; then those of `CONDITIONS` that both know. Another GPU has
    another UUID."""
    tells = dict.fromkeys(COMPARABLE, tell_known) | dict.fromkeys(CONDITIONS, tell_condition)
    other = set[str]()
    for name, tell in tells.items():
        a, b = ([*filter(None, dict.fromkeys(tell(run, name) for run in runs))] for runs in sides)
        if follows(name, axis) or {*a} == {*b} or (name == "gpu_uuid" and "gpu" in other):
            continue
        if name in COMPARABLE or (a and b):
            other.add(name)
            yield name, a, b


def refuse_runs(metric: Metric, *sides: SideCase) -> str:
    """Say why runs of the two sides are not compared in a metric; empty if they are."""
    every = [run for side in sides for run in side.runs]
    unfit = next(filter(None, map(refuse_alone, every)), "")
    return unfit or (refuse_together(every) if metric in (TIME, _ENERGY) else "")


def refuse_other_models(comparison: Comparison) -> None:
    """Refuse to compare different networks of one name of this harness; to compare two versions of
    one's own is what a user does, and is told. Parts that are not known, or that depend on the
    compared axis, do not count; nor do source files between two machines, which may have two
    versions of this harness. Raises UsageError."""
    a, b = comparison.sides
    here, there = ({(run.gpu, run.cpu) for run in side.runs} for side in (a, b))
    for match in comparison.matches:
        one, two = (side.runs[0] for side in match.ran)
        for name, what in MODEL_PARTS.items() if one.model in MODELS else ():
            ours, theirs = getattr(one, name), getattr(two, name)
            elsewhere = name == "model_source" and here.isdisjoint(there)
            if elsewhere or follows(name, comparison.axis):
                continue
            if ours and theirs and ours != theirs:
                raise UsageError(
                    f"{a.title} and {b.title} trained different networks: "
                    f"{make_printable(one.model)} changed in {what}; to compare them anyway, add "
                    "--mix"
                )


# -------------------------------------------------------------------------------------------- gates


OUTCOME_FINDINGS = {
    "broken": "a repeat fails or diverges in B where none did in A",
    "missing": "B has no run of a case of A",
    "unjudged": "a case was measured on both sides and has no verdict",
}
"""Words that --fail-on accepts besides the verdicts on metrics."""


@dataclass
class Gate:
    """A finding for which --fail-on returns 1, such as ``slower:5%``: where it was found, and how
    many verdicts were checked (one for each case and metric), or for a gate on outcomes, how many
    cases."""

    gate: str
    failures: list[str] = field(default_factory=list)  # one line each
    judged: int = 0
    undecided: int = 0  # of the judged, those whose interval leaves the finding possible
    unjudged: int = 0  # measured, without a verdict or with an interval that rules nothing out
    why: str = ""  # the reason of the first of these, or for nothing to judge

    @property
    def passed(self) -> bool:
        """Whether it found nothing, and had something to check."""
        return bool(self.judged) and not self.failures


def check_gate(comparison: Comparison, text: str) -> Gate:
    """Look for ``slower:5%``, or for ``slower`` by the margin of the comparison. Raises UsageError:
    the word is not a finding, or the percentage is not valid."""
    word, colon, percent = text.partition(":")
    verdicts = list(dict.fromkeys(w for m in METRICS.values() for w in (m.lower, m.higher)))
    if word not in verdicts and (word not in OUTCOME_FINDINGS or colon):
        raise UsageError(f"--fail-on {text!r}: {nearest(text, [*verdicts, *OUTCOME_FINDINGS])}")
    margin = parse_percent(f"--fail-on {text!r}", percent) if colon else comparison.margin
    if word in verdicts:
        return _check_verdicts(comparison, Gate(text), word, margin)
    matches = comparison.matches
    gate = Gate(text, judged=len(matches), why="no case is in both")
    if word == "broken":
        gate.failures = [f"{m.label}: {m.ended}" for m in matches if m.change == "broken"]
    elif word == "missing":
        gate.failures = comparison.alone[0]
        gate.judged += len(gate.failures)
    else:
        for metric, findings in comparison.metrics.items():
            for one in findings:
                if one.ratio.judge(margin) is Verdict.NONE and all(one.readings):
                    what = comparison.wording.say_period(metric.label)
                    failure = f"{one.match.label}: {what}: {one.ratio.lack}"
                    gate.failures.append(failure)
    return gate


def _check_verdicts(comparison: Comparison, gate: Gate, word: str, margin: float) -> Gate:
    lacks = []
    for metric, findings in comparison.metrics.items():
        for one in findings if word in (metric.lower, metric.higher) else ():
            judged = one.ratio.judge(margin)
            possible = [v for v in (Verdict.LOWER, Verdict.HIGHER) if one.ratio.allows(v, margin)]
            if judged is Verdict.NONE:
                lacks.append(one.ratio.lack)
            elif len(possible) == 2:
                lacks.append("its interval rules nothing out: more --repeats tell")
            else:
                gate.judged += 1
                gate.undecided += judged not in possible and word in map(metric.word, possible)
            if metric.word(judged) == word:
                ratio = write_number(metric.show(one.ratio).value or 0)
                what = f"{'speed-up ' * metric.speedup}{ratio}×"
                label = comparison.wording.say_period(metric.label)
                gate.failures.append(f"{one.match.label}: {label}: {what}")
    gate.unjudged = len(lacks)
    gate.why = lacks[0] if lacks else f"no metric that can be {word} was measured in both"
    return gate


def describe_gate(gate: Gate) -> Iterator[str]:
    """Yield lines on a gate that failed, or that could not judge all cases."""
    for line in gate.failures:
        yield f"fail: {gate.gate}: {make_printable(line)}"
    why = make_printable(gate.why)
    if not gate.judged:
        yield f"not judged: {gate.gate}: {why}"
    elif gate.unjudged:
        yield (
            f"warning: --fail-on {gate.gate}: {gate.unjudged} of {gate.judged + gate.unjudged} "
            f"cases could not be judged: {why}"
        )
    if gate.undecided:
        yield (
            f"warning: --fail-on {gate.gate}: {gate.undecided} of {gate.judged + gate.unjudged} "
            "cases may still be so, as their intervals reach beyond it: more --repeats tell"
        )
