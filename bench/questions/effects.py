"""What changing one axis does, all else equal: each change estimated, and the table of them.

Whether a precision learns as well as its baseline is a test of equivalence, over seeds. Finding no
difference proves nothing; `bench.verdict` tests whether a difference beyond a margin
can be ruled out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from bench.case import AXES
from bench.limits import MIN_REPEATS, STEADY
from bench.record import RELIABLE
from bench.render.section import Column, Said, Section, Sheet, join
from bench.render.table import NOTHING, Cell, Row, name_case, write_ends, write_ratio, write_signed
from bench.study.axes import (
    Machines,
    find_varying,
    name_axis,
    name_setting,
    name_value,
    order_values,
    take_value,
)
from bench.study.doubts import DOUBTS
from bench.study.estimate import (
    ENERGY,
    JUDGED,
    LOSS,
    MEMORY,
    TIME,
    Estimate,
    Seeds,
    average_seeds,
    estimate,
    list_means,
    list_shifts,
    share_seeds,
    take_seeds,
)
from bench.study.pairs import SAME_LOSS, Changed, Pair, find_changes, list_free
from bench.study.quantities import METRICS, Metric
from bench.text import ESTIMATE, name_first, write_range, write_share
from bench.verdict import (
    GUESSING,
    MIN_SEEDS,
    UNCHECKED,
    Claim,
    Equivalence,
    Verdict,
    find_classes,
    is_guessing,
    judge_equivalences,
    withdraw,
)

if TYPE_CHECKING:
    from bench.questions.report_data import ReportData

MIXED = "mixed"  # the verdict on a change that makes some cases faster and others not

KINDS = ("measured", "unknown", "published")
"""Kinds of cases by priority: effects are estimated for the first one that there is."""


@dataclass(frozen=True)
class Effect:
    """One change of one axis, with all else equal."""

    axis: str  # an axis of `Case`, or ``machine``
    before: str  # its value, as displayed
    after: str
    pairs: tuple[tuple[int, int], ...]  # the ``cell`` before and after, of all pairs
    estimates: dict[str, Estimate]  # by the name of a metric of `JUDGED`, each over some pairs
    estimated: bool  # whether any of the times compared was extrapolated
    doubts: tuple[str, ...]  # what speaks against the cases compared, as remarks
    # the settings of other axes at which times are compared, as displayed; empty if these are all
    # settings of all changes of this axis
    over: str = ""
    # whether changes from this baseline are compared at different settings: none is common to all
    apart: bool = False

    @property
    def time(self) -> Estimate | None:
        return self.estimates.get(TIME.name)

    @property
    def memory(self) -> Estimate | None:
        return self.estimates.get(MEMORY.name)

    @property
    def energy(self) -> Estimate | None:
        return self.estimates.get(ENERGY.name)

    @property
    def loss(self) -> Estimate | None:
        return self.estimates.get(LOSS.name)


def find_effects(found: ReportData) -> Iterator[Effect]:
    """Yield what each change of each axis does, in the order of the overview's columns."""
    ended = [result for result in found.results if result.status in RELIABLE]
    kind = min((result.kind for result in ended), key=KINDS.index, default="")
    ended = [result for result in ended if result.kind == kind]
    changes = [
        change
        for axis in find_varying(ended, found.varying)
        if axis != "seed"  # varied to see a spread, not for its effect
        for change in find_changes(axis, ended, found.machines)
    ]
    judged: list[dict[str, Estimate]] = [{} for _ in changes]
    for metric in JUDGED:
        for into, estimated in zip(judged, estimate(metric, changes, found.results), strict=True):
            if estimated is not None:
                into[metric.name] = estimated
    kept = [pair for pair in zip(changes, judged, strict=True) if pair[1]]
    for _, axis in groupby(kept, key=lambda pair: pair[0].axis):
        yield from _describe_axis(list(axis), found)


def _describe_axis(
    judged: Sequence[tuple[Changed, dict[str, Estimate]]], found: ReportData
) -> Iterator[Effect]:
    """Yield the effects of one axis, with the settings at which their times are compared."""
    used: list[list[Pair]] = []
    rivals: dict[str, set[frozenset[int]]] = {}
    for change, estimates in judged:
        cells = {*estimates.get(TIME.name, next(iter(estimates.values()))).cells}
        pairs = [pair for pair in change.pairs if pair.cells in cells]
        used.append(pairs)
        rivals.setdefault(change.before, set()).add(frozenset(pair.key for pair in pairs))
    every = frozenset(pair.key for change, _ in judged for pair in change.pairs)
    settings: list[str] = []
    if any(held != {every} for held in rivals.values()):
        before = [pair.a for change, _ in judged for pair in change.pairs]
        free = list_free(judged[0][0].axis)
        settings = [name for name in find_varying(before, found.varying) if name not in free]
    for (change, estimates), pairs in zip(judged, used, strict=True):
        doubts = set[str]().union(*(pair.doubts for pair in pairs))
        yield Effect(
            change.axis,
            change.before,
            change.after,
            tuple(pair.cells for pair in change.pairs),
            estimates,
            any(pair.estimated for pair in pairs),
            tuple(doubt.remark for name, doubt in DOUBTS.items() if name in doubts),
            _name_settings(pairs, settings, found.machines),
            len(rivals[change.before]) > 1,
        )


def _name_settings(pairs: Sequence[Pair], settings: Sequence[str], machines: Machines) -> str:
    said = []
    for axis in settings:
        values = order_values(axis, (take_value(pair.a, axis) for pair in pairs))
        text = name_first([name_value(axis, value, machines) for value in values], 4)
        said.append(name_setting(axis, text))
    return " · ".join(said)


# ------------------------------------------------------------------------------- what is learnt

MARGIN = STEADY  # a loss or an error within this share of the other counts as equal

LEARNT: tuple[Metric, ...] = (LOSS, METRICS["test_top1_error"])


class LearningEffect(NamedTuple):
    """The effect of a change of precision on a loss or an error, over its pairs, seed by seed."""

    effect: Effect
    metric: Metric
    found: Equivalence
    remarks: Sequence[str]  # what to know before believing it


def judge_learning(found: ReportData) -> Iterator[LearningEffect]:
    losses, cells = found.losses, found.by_cell
    told = {c: tuple(getattr(row, name) for name in SAME_LOSS) for c, row in cells.items()}
    for metric in LEARNT:
        seeds = losses if metric is LOSS else take_seeds(metric, found.results)
        concerned = []
        for effect in found.effects:
            pairs = effect.loss.cells if effect.axis == "precision" and effect.loss else ()
            known = [(a, b) for a, b in pairs if a in seeds and b in seeds]
            if known:
                concerned.append((effect, known, share_seeds(known, seeds)))
        means = [list_means(*map(average_seeds, sides)) for _, _, sides in concerned]
        family = [(before, after) for before, after in means]
        judged = judge_equivalences(family, MARGIN)
        for (effect, known, sides), equivalence in zip(concerned, judged, strict=True):
            ratios = [math.exp(shift) for shift in list_shifts(*sides)]
            low, high = min(ratios), max(ratios)
            if equivalence.verdict is Claim.EQUIVALENT and max(high, 1 / low) > 1 + MARGIN:
                equivalence = withdraw(equivalence, "not in every case")
            if all(_guesses(losses.get(c), cells[c]) for pair in known for c in pair):
                equivalence = withdraw(equivalence, GUESSING)
            remarks = [*_list_remarks([cells[a] for a, _ in known], low, high)]
            of = sum(told[a] == told[b] for a, b in effect.pairs)
            remarks += [f"{len(known)} of {of} pairs"] if len(known) < of else []
            yield LearningEffect(effect, metric, equivalence, remarks)


def _guesses(losses: Seeds | None, case: Row) -> bool:
    if losses is None:
        return False
    return is_guessing(
        fmean(one for side in list_means(losses) for (one,) in side.values()), _find_classes(case)
    )


def _find_classes(case: Row) -> int | None:
    return find_classes(case.workload, case.classes, case.dataset_classes, case.dataset_source)


def _list_remarks(before: Sequence[Row], low: float, high: float) -> Iterator[str]:
    if high / low > 1 + MARGIN:
        yield f"from {low:.3f} to {high:.3f} over the cases"
    if any(case.dataset == "synthetic" for case in before):
        yield "synthetic"
    if any(_find_classes(case) is None for case in before):
        yield UNCHECKED
    parts = [case.part for case in before]
    if min(parts) < 1:
        yield f"after {write_range(parts, write_share)} % of an epoch"


def _tabulate_effects(found: ReportData) -> Iterator[Sheet]:
    effects, starts = join(("", part) for _, part in groupby(found.effects, lambda e: e.axis))
    learnt = [one for one in judge_learning(found) if one.found.seeds > 1]

    def say_learnt(effect: Effect) -> str:
        said = [one for one in learnt if one.effect is effect]
        verdicts = {one.found.verdict.value for one in said}
        if len(verdicts) == 1:
            return verdicts.pop()
        return "; ".join(f"{one.metric.label}: {one.found.verdict.value}" for one in said)

    def write_change(effect: Effect) -> Cell:
        change = f"{name_axis(effect.axis)}: {effect.before} → {effect.after}"
        return Cell(change, change)

    columns: list[Column[Effect]] = [
        Column("change", "change", "what changes, all else equal", write_change, wrap=True),
        Column("speed", "speed", "epoch time before over after, geometric mean",
               _of_time(_write_speed), better="higher"),
        Column("verdict", "verdict", f"against a margin of {100 * STEADY:.0f} %",
               _of_time(lambda effect, time:
                        MIXED if time.mixed else TIME.word(time.ratio.judge(STEADY))),
               number=False),
        Column("interval", "95 % interval", "of the speed over these pairs",
               _of_time(lambda effect, time: _write_speeds(time.ratio.low, time.ratio.high)),
               keep=8),
        Column("range", "range of pairs", "speed of the pairs",
               _of_time(lambda effect, time: _write_speeds(time.lowest, time.highest)
                        if time.pairs > 1 else None), keep=7),
        Column("pairs", "pairs", "how many pairs of cases differ in that alone", _write_pairs,
               keep=8),
        Column("over", "over", "the settings at which it is compared", lambda effect: effect.over,
               keep=8, wrap=True),
        Column("memory", "memory", "change of the peak",
               lambda effect: _write_percent(effect, effect.memory), better="lower", keep=6),
        Column("energy", "energy", "change of an epoch's",
               lambda effect: _write_percent(effect, effect.energy, ESTIMATE * effect.estimated),
               better="lower", keep=4),
        Column("loss", "loss", "difference of the training loss", _write_loss, better="lower",
               keep=5),
        Column("learnt", "learns as well?", f"equivalence within {100 * MARGIN:.0f} %, over seeds",
               say_learnt, keep=7, wrap=True),
        Column("doubts", "remarks", "what speaks against a case of these",
               lambda effect: ", ".join([*effect.doubts, *_describe_ends(effect.time, found)]),
               keep=8, wrap=True),
    ]  # fmt: skip
    yield Sheet(
        "What each change does, all else equal",
        columns,
        effects,
        [*_note_effects(effects), *_note_learning(learnt)],
        starts if len(starts) < len(effects) else {},
        empty=("", NOTHING, TIME.word(Verdict.NONE)),
    )


def _of_time(say: Callable[[Effect, Estimate], Said]) -> Callable[[Effect], Said]:
    def write(effect: Effect) -> Said:
        time = effect.time
        return say(effect, time) if time is not None and time.ratio.value else None

    return write


def _write_speed(effect: Effect, time: Estimate) -> Cell:
    speed = 1 / (time.ratio.value or 1)
    return Cell(f"{ESTIMATE * effect.estimated}{write_ratio(speed)}×", speed)


def _write_speeds(low: float | None, high: float | None) -> str | None:
    return write_ends((high, low), lambda ratio: write_ratio(1 / ratio))


def _count_pairs(effect: Effect) -> int:
    return effect.time.pairs if effect.time else len(effect.pairs)


def _write_pairs(effect: Effect) -> Cell:
    pairs, every = _count_pairs(effect), len(effect.pairs)
    return Cell(f"{pairs} of {every}" if pairs < every else str(pairs), pairs)


def _describe_pairs(effect: Effect, estimate: Estimate) -> str:
    """Return how many of the pairs an estimate is over, if not as many as the row says."""
    same = estimate.pairs == _count_pairs(effect)
    return "" if same else f" ({estimate.pairs} of {len(effect.pairs)})"


def _write_percent(effect: Effect, estimate: Estimate | None, mark: str = "") -> Cell | None:
    if estimate is None or estimate.ratio.value is None:
        return None
    change = estimate.ratio.value - 1
    return Cell(
        f"{mark}{write_signed(100 * change, 1)} %{_describe_pairs(effect, estimate)}", change
    )


def _write_loss(effect: Effect) -> Cell | None:
    if (loss := effect.loss) is None:
        return None
    reach = f" ±{loss.reach:.3f}" if loss.reach is not None else ""
    text = f"{write_signed(loss.difference, 3)}{reach}{_describe_pairs(effect, loss)}"
    return Cell(text, loss.difference)


def _describe_ends(time: Estimate | None, found: ReportData) -> Iterator[str]:
    """Name the slowest and fastest pair of a mixed effect: ``1.00× at fp32, 1.11× at bf16-amp``."""
    if time is None or not time.mixed:
        return
    after = [found.by_cell[cell] for _, cell in time.cells]
    named = [axis for axis in find_varying(after, found.varying) if axis in AXES]
    fast, slow = time.ends
    for ratio, cell in ((time.highest, slow), (time.lowest, fast)):
        place = name_case(found.by_cell[cell], named) or "the other machine"
        yield f"{write_ratio(1 / ratio)}× at {place}"


def _note_effects(effects: Sequence[Effect]) -> Iterator[str]:
    yield (
        "Speed: epoch time before the change over that after it, geometric mean over the pairs of "
        "cases that differ in it alone. Precisions are compared at their default loss scale, or "
        "the most common."
    )
    if any(effect.over for effect in effects):
        yield (
            "Over: the settings of the compared pairs. Changes from one value are compared at the "
            "settings that all of them have."
        )
    fewer = [e for e in effects if e.axis in AXES and e.time and e.time.pairs < len(e.pairs)]
    if fewer and not fewer[0].apart:
        both = f"{fewer[0].axis}={fewer[0].before},{fewer[0].after}"
        yield f"--where {both} compares these two at all settings that both have."
    if any(effect.apart for effect in effects):
        yield (
            "Changes from one value that are over different settings have none in common; do not "
            "rank them."
        )
    times = [effect.time for effect in effects if effect.time]
    if any(time.ratio.p is not None for time in times):
        yield (
            "Interval: 95 %, of the mean over these pairs (Welch). Verdict: against a margin of "
            f"{100 * STEADY:.0f} %, p adjusted for all changes by Holm. python -m bench.compare "
            "RESULTS --axis AXIS BEFORE AFTER judges each pair by itself."
        )
    if any(time.mixed for time in times):
        yield "Mixed: pairs differ in their verdicts; the remarks name the two ends."
    if any(
        time.ratio.value is not None and time.ratio.p is None and not time.ratio.exact
        for time in times
    ):
        yield f"A verdict needs {MIN_REPEATS} repeats of each case; use --repeats {MIN_REPEATS}."
    if any(effect.loss and effect.loss.reach is None for effect in effects):
        yield (
            f"A difference of loss without ± rests on fewer than {MIN_SEEDS} seeds and may be "
            f"chance; use --repeats {MIN_SEEDS}."
        )


def _note_learning(learnt: Sequence[LearningEffect]) -> Iterator[str]:
    for one in learnt:
        change = f"{one.effect.before} → {one.effect.after}, {one.metric.label}"
        yield f"{change}: {'; '.join([one.found.sentence(), *one.remarks])}."
    if learnt:
        yield (
            "Equivalent: two one-sided tests at 5 % rule out a difference beyond the margin; worse "
            "or better: the difference is beyond it. Holm over all changes of a metric. Losses are "
            "compared seed by seed, each the mean over all pairs of the change."
        )


EFFECTS = Section("effects", "What does each change do?", _tabulate_effects)
