"""What to measure next, within a budget, to find the best setting; nothing here runs anything.

In turn: the setting that is used now; what promises most for its seconds; the best with each of its
changes taken back, so that only what gains something stays; repeats of what may be better still, of
the best and of the one used now; seeds of these two, for learning. What is known is a list of
results, so that a search goes on wherever its records end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from statistics import fmean, median, variance
from typing import TYPE_CHECKING

from bench.advise.belief import Belief, believe, relate
from bench.case import AXES, SAME_QUESTION, Case, find_leader, go_together
from bench.interval import find_quantile
from bench.limits import MIN_REPEATS
from bench.record import REFUSED, RELIABLE, Status
from bench.verdict import (
    GUESSING,
    Claim,
    Equivalence,
    judge_equivalence,
    learnt_nothing,
    take_back,
)
from bench.wall.line import fit_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Aim(StrEnum):
    """Why a setting is run."""

    LOOK = "look"  # about how fast it is
    MEASURE = "measure"  # to tell it from others
    LEARN = "learn"  # whether it learns as well


LOOK_UNTIL, MEASURE_UNTIL = 0.05, 0.01
"""How well a run is to know its epoch time, within the run."""

MOST_PART = {Aim.LOOK: 0.1, Aim.MEASURE: 0.25}
"""Part of an epoch that such a run may take at most."""

PART = 0.2
"""Of an epoch, over which two settings are compared that are to learn alike step by step."""

LEAST_GAIN = 0.005
"""No setting is tried of which less than this is expected: it could not be told from none."""

MUCH = 0.1
"""As long as so much is expected of a setting, a look at it goes before all else."""

EXPLORE = 0.7
"""The part of the budget that looking for a better setting may take; the rest is to confirm it."""

NOISE = 0.03
"""Between two runs of one setting, as a standard deviation of the logarithm, before any is known:
that of a shared machine. An own card's is a third."""

ALIKE = 0.01
"""Settings that differ by less are as good as each other; then the simpler one is the advice."""

MOST_REPEATS, MOST_SEEDS = 5, 5
MOST_RIVALS = 4
"""Settings that are told apart by repeats."""

FULL = 0.95
"""Part of the memory there is that a batch may be expected to take."""


@dataclass(frozen=True)
class Trial:
    """One run: of ``setting``, the how manyeth for this aim, of ``part`` of an epoch to learn. The
    first that measures is profiled, so that the answer can say what limits the setting."""

    setting: Case
    aim: Aim
    repeat: int = 1
    part: float = 1.0

    @property
    def case(self) -> Case:
        """What runs."""
        if self.aim is Aim.LEARN:
            return replace(self.setting, fraction=self.part)
        until = LOOK_UNTIL if self.aim is Aim.LOOK else MEASURE_UNTIL
        case = replace(self.setting, until=until, fraction=MOST_PART[self.aim])
        profiled = replace(case, profile=True)
        first = self.aim is Aim.MEASURE and self.repeat == 1
        return profiled if first and go_together(profiled) else case


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        took_s: wall time with everything.
        time_s: of an epoch; None where none was measured.
        error: half of its 95 % interval within the run, as a share; None where it is not known.
        value: what is to be small, see `Goal`; None where it is not known.
        used_bytes: the peak of memory.
        loss: over what it trained, of ``seed``.
    """

    trial: Trial
    status: Status
    took_s: float
    time_s: float | None = None
    error: float | None = None
    value: float | None = None
    used_bytes: float | None = None
    seed: int = 0
    loss: float | None = None


def list_changes(setting: Case, other: Case) -> list[str]:
    """The axes in which a setting differs from another, less what follows from others of them."""
    axes = [name for name in AXES if getattr(setting, name) != getattr(other, name)]
    return [name for name in axes if find_leader(name) not in axes]


def strip(case: Case) -> Case:
    """The setting that a case measures."""
    return replace(case, **{name: getattr(Case, name) for name in SAME_QUESTION})


def read_trial(case: Case, repeat: int) -> Trial:
    """What a run was for, that this search or another command made."""
    setting = strip(case)
    if case.until is None and case.steps is None:
        return Trial(setting, Aim.LEARN, repeat, case.fraction)
    rough = case.until is None or case.until > MEASURE_UNTIL
    return Trial(setting, Aim.LOOK if rough else Aim.MEASURE, repeat)


@dataclass(frozen=True)
class Space:
    """What may be chosen from.

    Attributes:
        now: the setting that is used now.
        settings: those that may be chosen, ``now`` among them.
        prior: the logarithm of what is to be small that counts and rates expect, but for a
            constant; shape of ``settings``.
        room_bytes: the memory there is; None where it is not known.
        judged: whether learning is to be compared.
        margin: by which a loss may be higher, as a share.
    """

    now: Case
    settings: Sequence[Case]
    prior: Sequence[float]
    room_bytes: float | None = None
    judged: bool = True
    margin: float = 0.01
    start_s: Callable[[Case], float] = field(default=lambda case: 10.0)
    """About how long a run of a setting takes beside its steps, before any was seen."""

    @cached_property
    def places(self) -> dict[Case, int]:
        return {setting: place for place, setting in enumerate(self.settings)}

    @cached_property
    def covariance(self) -> NDArray[np.float64]:
        return relate(self.settings)


@dataclass(frozen=True)
class Budget:
    """Seconds: of the whole search, and what is left of them."""

    whole_s: float
    left_s: float


class Standing:
    """What the results so far have shown."""

    def __init__(self, known: Sequence[Result], space: Space) -> None:
        self.known, self.space = known, space
        self._timed = [r for r in known if r.status in RELIABLE and r.value]
        self._runs: dict[Case, list[Result]] = {}
        for result in self._timed:
            self._runs.setdefault(result.trial.setting, []).append(result)

    @cached_property
    def values(self) -> dict[Case, list[float]]:
        """The logarithms that each setting showed: of its best runs alone, where some looked."""
        found: dict[Case, dict[bool, list[float]]] = {}
        for result in self._timed:
            rough = result.trial.aim is Aim.LOOK
            logs = found.setdefault(result.trial.setting, {}).setdefault(rough, [])
            logs.append(math.log(result.value or 1.0))
        return {setting: by.get(False) or by[True] for setting, by in found.items()}

    @cached_property
    def noise(self) -> float:
        """The spread of the logarithm between runs of one setting, pooled with `NOISE`, which
        counts as two of its degrees of freedom."""
        several = [logs for logs in self.values.values() if len(logs) > 1]
        freedom = 2 + sum(len(logs) - 1 for logs in several)
        total = 2 * NOISE**2 + sum(variance(logs) * (len(logs) - 1) for logs in several)
        return math.sqrt(total / freedom)

    def error(self, setting: Case) -> float:
        """The standard error of the mean logarithm of a setting that was measured."""
        within = median([r.error or 0.0 for r in self._runs[setting]]) / 2
        return math.hypot(self.noise, within) / math.sqrt(len(self.values[setting]))

    @cached_property
    def rejected(self) -> dict[Case, Equivalence]:
        """Settings that were seen to learn worse, or not to learn."""
        return {s: e for s in self.values if (e := self.compare(s)).verdict is Claim.WORSE}

    @cached_property
    def allowed(self) -> list[Case]:
        """The settings that were measured and may be chosen, best first."""
        bad = {r.trial.setting for r in self.known if r.status is Status.DIVERGED}
        bad = set() if self.space.now in bad else bad
        kept = [s for s in self.values if s not in self.rejected and s not in bad]
        return sorted(kept, key=self.mean)

    @cached_property
    def best(self) -> Case | None:
        """The best of these; of those that are as good within `ALIKE`, the one that changes least,
        which is the one used now if it is among them."""
        if not self.allowed:
            return None
        least = self.mean(self.allowed[0])
        alike = [s for s in self.allowed if self.mean(s) - least <= ALIKE]
        return min(alike, key=lambda s: (len(list_changes(s, self.space.now)), self.mean(s)))

    @cached_property
    def rivals(self) -> list[Case]:
        """Those that may be better than the best by more than `ALIKE`, most likely first."""
        leads = {s: self.find_lead(s) for s in self.allowed if s != self.best}
        near = [s for s, lead in leads.items() if lead > ALIKE]
        return sorted(near, key=lambda s: -leads[s])[:MOST_RIVALS]

    def mean(self, setting: Case) -> float:
        """The logarithm of a setting that was measured, as `believe` has it: with few noisy runs,
        the others that share its levers have their say, and the luckiest does not win by luck."""
        return float(self.belief.mean[self.space.places[setting]])

    def find_lead(self, setting: Case) -> float:
        """By how much the logarithm of a setting may be below that of the best, at most."""
        assert self.best is not None
        freedom = len(self.values[setting]) + len(self.values[self.best])
        both = math.hypot(self.error(setting), self.error(self.best))
        return self.mean(self.best) - self.mean(setting) + find_quantile(freedom) * both

    @cached_property
    def belief(self) -> Belief:
        space = self.space
        seen = {
            space.places[setting]: (fmean(logs), self.error(setting))
            for setting, logs in self.values.items()
            if setting in space.places
        }
        return believe(space.covariance, space.prior, seen)

    # ------------------------------------------------------------------ what fits

    @cached_property
    def tried(self) -> set[Case]:
        return {result.trial.setting for result in self.known}

    def fits(self, setting: Case) -> bool:
        """Whether a batch should fit: below all that did not, and on the line of memory."""
        here = self._sharing.get(_share_memory(setting), [])
        size = setting.batch_size
        if any(r.status in REFUSED and size >= r.trial.setting.batch_size for r in here):
            return False
        room = self.space.room_bytes
        points = {r.trial.setting.batch_size: r.used_bytes for r in here if r.used_bytes}
        if room is None or not points:
            return True
        if line := fit_line(list(points.items())):
            return line.predict(size) <= FULL * room
        # of one batch size it is not known how much of it is fixed: a third of it mostly is
        (known, used), *_ = points.items()
        return used * (1 + 2 / 3 * (size / known - 1)) <= FULL * room

    @cached_property
    def _sharing(self) -> dict[tuple[object, ...], list[Result]]:
        found: dict[tuple[object, ...], list[Result]] = {}
        for result in self.known:
            found.setdefault(_share_memory(result.trial.setting), []).append(result)
        return found

    # ------------------------------------------------------------------ what it costs

    def predict_s(self, trial: Trial) -> float:
        """About how long a run takes with everything."""
        setting = trial.setting
        again = [r.took_s for r in self._runs.get(setting, ()) if r.trial.aim is trial.aim]
        if again:
            return median(again)
        share = trial.part if trial.aim is Aim.LEARN else MOST_PART[trial.aim] / 2
        return self.start_s(setting) + share * self._epoch_s(setting)

    def start_s(self, setting: Case) -> float:
        """Seconds beside the steps: of runs that were compiled alike, else as expected before."""
        known = self._starts.get(setting.compile)
        return self.space.start_s(setting) if known is None else known

    @cached_property
    def _starts(self) -> dict[str, float]:
        beside: dict[str, list[float]] = {}
        for result in self._timed:
            seconds = max(0.0, result.took_s - _trained_s(result))
            beside.setdefault(result.trial.setting.compile, []).append(seconds)
        return {compiled: median(of) for compiled, of in beside.items()}

    def _epoch_s(self, setting: Case) -> float:
        """The seconds of an epoch: measured, or the median of what was."""
        runs = self._runs.get(setting)
        return (runs[-1].time_s or 0.0) if runs else self._usual_s

    @cached_property
    def _usual_s(self) -> float:
        return median([r.time_s or 0.0 for r in self._timed]) if self._timed else 0.0

    # ------------------------------------------------------------------ learning

    def losses(self, setting: Case, part: float) -> dict[int, float]:
        """The loss of each seed."""
        return {
            r.seed: r.loss
            for r in self.known
            if r.trial.setting == setting
            and r.trial.aim is Aim.LEARN
            and r.trial.part == part
            and r.loss is not None
            and r.status in RELIABLE
        }

    @cached_property
    def _compared(self) -> dict[Case, Equivalence]:
        return {}

    def compare(self, setting: Case) -> Equivalence:
        """Whether a setting learns as well as the one used now, by the seeds that both ran."""
        if setting not in self._compared:
            part = self.choose_part(setting)
            a, b = self.losses(self.space.now, part), self.losses(setting, part)
            both = sorted(a.keys() & b.keys())
            a, b = ({seed: side[seed] for seed in both} for side in (a, b))
            self._compared[setting] = self._doubt(judge_equivalence(a, b, self.space.margin), a, b)
        return self._compared[setting]

    def _doubt(
        self, found: Equivalence, a: Mapping[int, float], b: Mapping[int, float]
    ) -> Equivalence:
        """Take back a verdict on networks that guess; that only one of them learnt is one."""
        classes = self.space.now.classes
        guesses = [learnt_nothing(fmean(side.values()), classes) for side in (a, b) if side]
        differs = found.verdict in (Claim.BETTER, Claim.WORSE)
        if not any(guesses) or (differs and not all(guesses)):
            return found
        return take_back(found, GUESSING)

    def choose_part(self, setting: Case) -> float:
        """The part of an epoch over which learning is compared: with another batch size only a
        whole one will do, as a larger batch has taken fewer steps before."""
        return PART if setting.batch_size == self.space.now.batch_size else 1.0


def _trained_s(result: Result) -> float:
    """About how long the measured steps of a run took."""
    trial = result.trial
    part = trial.part if trial.aim is Aim.LEARN else MOST_PART[trial.aim] / 2
    return part * (result.time_s or 0.0)


def _share_memory(setting: Case) -> tuple[object, ...]:
    """What settings agree in that take about as much memory at the same batch size."""
    return setting.precision, setting.accumulate


def choose(known: Sequence[Result], space: Space, budget: Budget) -> Trial | None:
    """The run to make next; None where nothing is left that fits the budget and would help."""
    standing = Standing(known, space)
    for decide in (_measure_now, _explore, _take_back, _tell_apart, _judge_learning):
        if trial := decide(standing, budget):
            return trial
    return None


def _count(standing: Standing, setting: Case, aim: Aim) -> int:
    trials = (result.trial for result in standing.known)
    return sum(trial.setting == setting and trial.aim is aim for trial in trials)


def _measure_now(standing: Standing, budget: Budget) -> Trial | None:
    now = standing.space.now
    return None if now in standing.tried else Trial(now, Aim.LOOK)


def _explore(standing: Standing, budget: Budget) -> Trial | None:
    """The setting of which most is expected for its seconds, if that is worth a run."""
    import numpy as np

    settings = standing.space.settings
    best = standing.best
    if best is None:
        gains = np.exp(-np.asarray(standing.space.prior))
    else:
        gains = standing.belief.expect_gain(standing.mean(best))
    costs = np.array([max(1e-3, standing.predict_s(Trial(s, Aim.LOOK))) for s in settings])
    for place in np.argsort(-gains / np.sqrt(costs)):
        setting, gain = settings[place], gains[place]
        if best is not None and gain < LEAST_GAIN:
            continue
        kept = 0.0 if gain > MUCH else (1 - EXPLORE) * budget.whole_s
        if costs[place] > budget.left_s - kept:
            continue
        if setting not in standing.tried and standing.fits(setting):
            return Trial(setting, Aim.LOOK)
    return None


def _take_back(standing: Standing, budget: Budget) -> Trial | None:
    """The best with one of its changes taken back, if that was not tried."""
    best, now = standing.best, standing.space.now
    if best is None:
        return None
    for axis in list_changes(best, now):
        setting = next(
            (s for s in standing.space.settings if _is_without(s, best, axis, now)), None
        )
        if setting is None or setting in standing.tried or not standing.fits(setting):
            continue
        trial = Trial(setting, Aim.LOOK)
        if standing.predict_s(trial) <= budget.left_s:
            return trial
    return None


def _is_without(setting: Case, best: Case, axis: str, now: Case) -> bool:
    """Whether a setting is ``best`` with an axis as it is now."""
    return getattr(setting, axis) == getattr(now, axis) and list_changes(setting, best) == [axis]


def _tell_apart(standing: Standing, budget: Budget) -> Trial | None:
    """A repeat of the one used now, of the best or of a rival of it, the one that ran least."""
    if standing.best is None:
        return None
    rivals = standing.rivals
    wanted = dict.fromkeys([standing.space.now, standing.best, *rivals])
    counts = {s: _count(standing, s, Aim.MEASURE) for s in wanted if s in standing.values}
    for setting in sorted(counts, key=lambda s: counts[s]):
        apart = setting == standing.space.now or not rivals
        trial = Trial(setting, Aim.MEASURE, counts[setting] + 1)
        enough = MIN_REPEATS if apart else MOST_REPEATS
        if counts[setting] < enough and standing.predict_s(trial) <= budget.left_s:
            return trial
    return None


def _judge_learning(standing: Standing, budget: Budget) -> Trial | None:
    """A seed of the best or of the one used now, if there is time for as many as tell anything."""
    now, best = standing.space.now, standing.best
    if not standing.space.judged or best in (None, now) or now not in standing.values:
        return None
    assert best is not None
    part = standing.choose_part(best)
    found = standing.compare(best)
    if found.verdict is not Claim.UNCLEAR:
        return None
    ran = {s: _count_seeds(standing, s, part) for s in (now, best)}
    aim = next((n for n in (MIN_REPEATS, MOST_SEEDS) if min(ran.values()) < n), 0)
    missing = [Trial(s, Aim.LEARN, n + 1, part) for s, n in ran.items() for n in range(n, aim)]
    if not missing or sum(map(standing.predict_s, missing)) > budget.left_s:
        return None
    return min(missing, key=lambda trial: trial.repeat)


def _count_seeds(standing: Standing, setting: Case, part: float) -> int:
    return sum(
        r.trial.setting == setting and r.trial.aim is Aim.LEARN and r.trial.part == part
        for r in standing.known
    )
