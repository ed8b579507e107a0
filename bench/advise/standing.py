"""What the runs of a search for advice show so far, and which run is to be next. Nothing here runs
anything: all state is a list of results, so a search can continue wherever its records end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from statistics import fmean, median, variance
from typing import TYPE_CHECKING

from bench.advise.settings import Belief, believe, expect_start, list_changes, relate, strip
from bench.case import Case
from bench.interval import CONFIDENCE, find_quantile
from bench.limits import MIN_REPEATS, NEAR, STEADY
from bench.questions.settings import list_near
from bench.record import REFUSED, RELIABLE, Status
from bench.verdict import (
    Claim,
    Equivalence,
    is_guessing,
    judge_equivalence,
    withdraw,
    withdraw_if_guessing,
)
from bench.wall import fit_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


UNTIL = 0.01
"""Relative error of the epoch time, within the run, at which a run may end."""

MOST_PART, MOST_S = 0.1, 10.0
"""Largest part of an epoch that a run may take, and most seconds of its steps, as far as they can
be predicted: a tenth of an epoch of ResNet-18 at 224 pixels took two CPU cores 8 minutes."""

LEAST_STEPS, WARMUP_STEPS = 8, 6
"""Steps that a run measures however long they take, as an epoch has no interval below six steps;
and the warm-up steps before them, if few are measured."""

LEARN_PART = 0.2
"""Part of an epoch over which two settings that should learn alike, step by step, are compared."""

LEARN_SEEDS = 5
"""Seeds per setting, all or none: looking after three and going on to five while undecided would
call 8 % of settings that differ by the margin equivalent, instead of 5 %."""

NOISE = 0.03
"""Prior standard deviation between runs of one setting, of the logarithm of a time or an energy:
that of a shared machine. On a card of one's own it is a third."""

FULL = 0.95
"""Share of the available memory up to which a batch is expected to fit."""

LEAST_PROMISE = 0.005
"""Least expected gain for which a setting is tried; less could not be told from none."""

MUCH = 0.1
"""Expected gain from which a setting may use the time reserved for repeats."""

EXPLORE = 0.7
"""Share of the budget for looking for better settings; the rest is for repeats."""

MOST_RIVALS, MOST_REPEATS = 4, 5
"""The most settings, beside the best, that are repeated to tell them from it, and how often."""


@dataclass(frozen=True)
class Result:
    """The outcome of a run; None means not known."""

    case: Case
    status: Status
    took_s: float  # wall time of the whole run
    trained_s: float = 0.0  # part of it: the measured steps
    time_s: float | None = None  # of an epoch
    value: float | None = None  # the quantity to minimise: time, memory or energy
    used_bytes: float | None = None  # peak memory
    room_bytes: float | None = None  # peak that counts against the available memory
    seed: int = 0
    loss: float | None = None  # training loss over its part of an epoch
    reason: str = ""  # why it ended as it did, unless it is ok
    record_id: str = ""  # of its row; empty where it has none

    @cached_property
    def setting(self) -> Case:
        return strip(self.case)

    @property
    def learns(self) -> bool:
        """Whether the run is one of those by which learning is compared."""
        return self.case == learn(self.setting)


def learn(setting: Case) -> Case:
    """Return the case that shows how a setting learns."""
    return replace(setting, fraction=LEARN_PART)


@dataclass(frozen=True)
class Space:
    """The candidate settings. ``prior`` is the expected logarithm of the quantity to minimise of
    each, up to a constant. ``epoch_s`` predicts the seconds of an epoch before any run was seen."""

    settings: Sequence[Case]  # the one that is used now first
    prior: Sequence[float]
    aim: str = ""  # of `bench.questions.settings.AIMS`; empty for the rule of choice
    room_bytes: float | None = None  # available memory; None if not known
    judged: bool = True  # whether to compare learning
    margin: float = 0.01  # relative, by which a loss may be higher
    epoch_s: Callable[[Case], float | None] = lambda case: None  # None if not known
    classes: int | None = None  # that the loss distinguishes; None if it may be any
    items: int = 0  # per epoch; 0 if not known

    @property
    def noise(self) -> float:
        return 0.0 if self.aim == "memory" else NOISE  # peak memory repeats exactly

    @cached_property
    def places(self) -> dict[Case, int]:
        return {setting: place for place, setting in enumerate(self.settings)}

    @cached_property
    def covariance(self) -> NDArray[np.float64]:
        return relate(self.settings)


class Standing:
    """The conclusions from the results so far."""

    def __init__(self, known: Sequence[Result], space: Space) -> None:
        self.known, self.space, self.now = known, space, space.settings[0]
        self._timed: dict[Case, list[Result]] = {}
        self._sharing: dict[tuple[object, ...], list[Result]] = {}
        for result in known:
            self._sharing.setdefault(_share_memory(result.setting), []).append(result)
            if result.status in RELIABLE and result.time_s:
                self._timed.setdefault(result.setting, []).append(result)
        self.tried = {result.setting for result in known}
        self.diverged = {r.setting for r in known if r.status is Status.DIVERGED}

    # ------------------------------------------------------------------ values and noise

    def list_runs(self, setting: Case) -> list[Result]:
        """List the runs that a setting is judged by."""
        return [run for run in self._timed.get(setting, ()) if run.value]

    @cached_property
    def values(self) -> dict[Case, list[float]]:
        """The logarithms of the quantity to minimise, by candidate setting. A setting whose loss
        became inf or NaN is left out, unless it is the present one."""
        kept = [s for s in self._timed if s == self.now or s not in self.diverged]
        runs = {s: self.list_runs(s) for s in kept if s in self.space.places}
        return {s: [math.log(r.value or 1.0) for r in of] for s, of in runs.items() if of}

    @cached_property
    def _freedom(self) -> int:
        """Degrees of freedom of `noise`, two of them from `Space.noise`."""
        return 2 + sum(len(logs) - 1 for logs in self.values.values())

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the logarithm within a setting, pooled with `Space.noise`."""
        repeated = [logs for logs in self.values.values() if len(logs) > 1]
        total = 2 * self.space.noise**2
        total += sum(variance(logs) * (len(logs) - 1) for logs in repeated)
        return math.sqrt(total / self._freedom) + 1e-6

    def error(self, setting: Case) -> float:
        """Return the standard error of a measured setting's mean logarithm."""
        return self.noise / math.sqrt(len(self.values[setting]))

    def find_luck(self, setting: Case, other: Case, among: int = 1) -> float:
        """Return the half-width of the 95 % interval of the difference of two logarithms, adjusted
        by Bonferroni if one of the two was chosen ``among`` several."""
        quantile = find_quantile(self._freedom, 1 - (1 - CONFIDENCE) / among)
        return quantile * math.hypot(self.error(setting), self.error(other))

    def compare(self, setting: Case, other: Case) -> tuple[float, float, float]:
        """Return the ratio of a setting's needs to another's, by their runs, and the ends of its
        interval, adjusted as one of all the settings is chosen by it."""
        log = fmean(self.values[setting]) - fmean(self.values[other])
        luck = self.find_luck(setting, other, max(1, len(self.values) - 1))
        return math.exp(log), math.exp(log - luck), math.exp(log + luck)

    # ------------------------------------------------------------------ what is advised

    @cached_property
    def belief(self) -> Belief:
        places = self.space.places
        seen = {places[s]: (fmean(logs), self.error(s)) for s, logs in self.values.items()}
        return believe(self.space.covariance, self.space.prior, seen)

    def mean(self, setting: Case) -> float:
        """Return a measured setting's logarithm by `believe`: with few noisy runs, others that
        share its levers count too, so that the luckiest does not win by chance."""
        return float(self.belief.mean[self.space.places[setting]])

    @cached_property
    def allowed(self) -> list[Case]:
        """The measured settings that were not seen to learn worse, the lowest value first."""
        return sorted((s for s in self.values if s not in self.rejected), key=self.mean)

    @cached_property
    def _chosen(self) -> list[Case]:
        """The settings of `allowed` at the best batch size, the best first: by the rule of
        `list_near`, or the least of what was asked for."""
        if self.space.aim and self.allowed:
            size = self.allowed[0].batch_size
            return [s for s in self.allowed if s.batch_size == size]
        levels = {setting: math.exp(self.mean(setting)) for setting in self.allowed}
        return list_near(levels, levels.__getitem__, attrgetter("batch_size")) if levels else []

    @property
    def best(self) -> Case | None:
        return self._chosen[0] if self._chosen else None

    @cached_property
    def advised(self) -> Case | None:
        """The setting to train with: the best, or of those that may be as good at its batch size
        the one that changes least."""
        if self.best is None:
            return None
        lead = {s: self.mean(s) - self.mean(self.best) for s in self._chosen}
        among = max(1, len(self.values) - 1)
        alike = [s for s in lead if lead[s] <= max(STEADY, self.find_luck(s, self.best, among))]
        return min(alike, key=lambda s: (len(list_changes(s, self.now)), lead[s]))

    def find_bar(self, setting: Case) -> float:
        """Return the logarithm below which ``setting`` would take the place of `best`: as a smaller
        batch that is within `NEAR` of the lowest time, as a larger one that `best` is not within
        `NEAR` of, and else as the better one."""
        assert self.best is not None
        here, near = self.mean(self.best), math.log1p(NEAR)
        if self.space.aim or setting.batch_size == self.best.batch_size:
            return here
        smaller = setting.batch_size < self.best.batch_size
        return self.mean(self.allowed[0]) + near if smaller else here - near

    @cached_property
    def promises(self) -> dict[Case, float]:
        """How far each candidate is expected to be below its bar; above it counts as 0."""
        return self._expect([*map(self.find_bar, self.space.settings)] if self.best else [])

    @cached_property
    def hopes(self) -> dict[Case, float]:
        """As `promises`, but of a larger batch, how far it is expected to be below the lowest time:
        that is to be known before batches within a tenth of it are looked for."""
        if self.best is None:
            return self._expect([])
        lowest = self.mean(self.allowed[0])
        return self._expect([max(lowest, self.find_bar(s)) for s in self.space.settings])

    def _expect(self, bars: Sequence[float]) -> dict[Case, float]:
        settings = self.space.settings
        if not bars:
            return {s: math.exp(-log) for s, log in zip(settings, self.space.prior, strict=True)}
        return dict(zip(settings, self.belief.expect_gain(bars).tolist(), strict=True))

    def list_rivals(self) -> list[Case]:
        """List the measured settings that may belong in the place of the best by more than
        `STEADY`, the likeliest first."""
        if self.best is None:
            return []
        leads = {
            s: self.find_bar(s) - self.mean(s) + self.find_luck(s, self.best)
            for s in self.allowed
            if s != self.best
        }
        return sorted((s for s in leads if leads[s] > STEADY), key=lambda s: -leads[s])

    # ------------------------------------------------------------------ memory

    def fits(self, setting: Case) -> bool:
        """Return whether a batch should fit: below all failures and by the memory line."""
        here, size = self._sharing.get(_share_memory(setting), []), setting.batch_size
        uncompiled = replace(setting, compile=Case.compile, cuda_graphs=False)
        plain = self._sharing.get(_share_memory(uncompiled), [])
        if any(r.status in REFUSED and size >= r.setting.batch_size for r in (*here, *plain)):
            return False
        points: dict[int, float] = {}
        for result in here:
            if used := result.room_bytes:
                n = result.setting.batch_size
                points[n] = max(used, points.get(n, 0.0))
        room = self.space.room_bytes
        if room is None or not points:
            return True
        if line := fit_line(list(points.items())):
            return line.predict(size) <= FULL * room
        # with one batch size the fixed part is not known: it is mostly a third
        (known, used), *_ = points.items()
        return used * (1 + 2 / 3 * (size / known - 1)) <= FULL * room

    # ------------------------------------------------------------------ cost, in s

    def predict_s(self, case: Case) -> float:
        """Return the predicted wall time of a whole run."""
        setting = strip(case)
        runs = self._timed.get(setting, [])
        if again := [run.took_s for run in runs if run.case == case]:
            return median(again)
        epoch_s = self._find_epoch_s(setting) or 0.0
        known = self._beside.get(setting.compile)
        beside = expect_start(setting) if known is None else known
        return beside + epoch_s * (WARMUP_STEPS * self._find_share(setting) + case.fraction)

    def _find_epoch_s(self, setting: Case) -> float | None:
        runs = self._timed.get(setting)
        return (runs[0].time_s if runs else self._usual_s) or self.space.epoch_s(setting)

    def _find_share(self, setting: Case) -> float:
        """Return the part of an epoch that a step takes; 0 if not known."""
        return setting.batch_size / (self.space.items or math.inf)

    def measure(self, setting: Case) -> Case:
        """Return the case that measures a setting: the part of an epoch that takes `MOST_S` by its
        first run, so that repeats measure the same part, and at least `LEAST_STEPS`."""
        least, epoch_s = LEAST_STEPS * self._find_share(setting), self._find_epoch_s(setting)
        most = min(MOST_PART, MOST_S / epoch_s) if epoch_s else least or MOST_PART
        part = float(f"{min(1.0, max(least, most)):.2g}")
        return replace(setting, until=UNTIL, fraction=part)

    @cached_property
    def _beside(self) -> dict[str, float]:
        """Median seconds of a run beside its steps, by compile mode."""
        beside: dict[str, list[float]] = {}
        for setting, runs in self._timed.items():
            seconds = beside.setdefault(setting.compile, [])
            share = WARMUP_STEPS * self._find_share(setting)
            seconds += [max(0.0, r.took_s - r.trained_s - share * (r.time_s or 0.0)) for r in runs]
        return {compiled: median(of) for compiled, of in beside.items()}

    @cached_property
    def _usual_s(self) -> float:
        times = [r.time_s or 0.0 for runs in self._timed.values() for r in runs]
        return median(times) if times else 0.0

    # ------------------------------------------------------------------ learning

    def keep_batch_size(self, setting: Case) -> Case:
        """Return the setting to compare in learning: ``setting`` at the present batch size, as a
        larger batch takes fewer steps and learns differently."""
        return replace(setting, batch_size=self.now.batch_size)

    def count_seeds(self, setting: Case) -> int:
        """Count the seeds that were tried of a setting at the present batch size."""
        twin = self.keep_batch_size(setting)
        return sum(run.learns and run.setting == twin for run in self.known)

    def judge_learning(self, setting: Case) -> Equivalence:
        """Return whether a setting at the present batch size learns as well as the present
        setting, by `LEARN_SEEDS` seeds that both ran."""
        twin = self.keep_batch_size(setting)
        a, b = (
            {
                r.seed: r.loss
                for r in self.known
                if r.learns and r.setting == s and r.loss is not None
            }
            for s in (self.now, twin)
        )
        both = sorted(a.keys() & b.keys())[:LEARN_SEEDS]
        a, b = ({seed: side[seed] for seed in both} for side in (a, b))
        found = judge_equivalence(a, b, self.space.margin)
        if len(both) < LEARN_SEEDS:
            return withdraw(found, f"{len(both)} of {LEARN_SEEDS} seeds were run")
        guessed = [is_guessing(fmean(s.values()), self.space.classes) for s in (a, b)]
        return withdraw_if_guessing(found, guessed)

    @cached_property
    def rejected(self) -> dict[Case, Equivalence]:
        """Settings that were seen to learn worse at the present batch size."""
        learnt = {run.setting for run in self.known if run.learns} - {self.now}
        judged = {twin: self.judge_learning(twin) for twin in learnt}
        worse = {twin: found for twin, found in judged.items() if found.verdict is Claim.WORSE}
        return {s: worse[t] for s in self.values if (t := self.keep_batch_size(s)) in worse}


def _share_memory(setting: Case) -> tuple[object, ...]:
    """Return a key that settings share which take about as much memory at the same batch size. CUDA
    graphs keep buffers of their own, so settings without them take at most as much."""
    return setting.precision, setting.accumulate, setting.compile, setting.cuda_graphs


# ------------------------------------------------------------------ what to run next


@dataclass(frozen=True)
class Budget:
    """The total time of a search, and the time left, in s."""

    whole_s: float
    left_s: float


UNLIMITED = Budget(1e9, 1e9)


def choose(standing: Standing, budget: Budget) -> Case | None:
    """Return the next case to run; None if no run that fits the budget would help.

    In this order: the present setting; what may take the place of the best; repeats of the best,
    of the present setting and of rivals; seeds of the advised and the present one, to compare
    learning.
    """
    looks = [r.status for r in standing.known if r.setting == standing.now]
    if not looks or looks == [Status.INVALID]:
        return standing.measure(standing.now)
    if not standing.values and any(result.time_s for result in standing.known):
        return None  # the quantity to minimise is not measured here
    for decide in (_explore, _tell_apart, _compare_learning):
        if case := decide(standing, budget):
            return case
    return None


def _explore(standing: Standing, budget: Budget) -> Case | None:
    """Return the setting of the highest hopes for its time, of those that promise anything.

    The hope is divided by the square root of the seconds. Divided by the seconds themselves (J.
    Snoek et al., Practical Bayesian Optimization of Machine Learning Algorithms, 2012), compiled
    settings came last, and in budgets of minutes never.
    """
    worth: dict[Case, float] = {}
    for setting, gain in standing.promises.items():
        if setting in standing.tried or (standing.best and gain < LEAST_PROMISE):
            continue
        case = standing.measure(setting)
        cost_s = standing.predict_s(case)
        kept_s = 0.0 if gain > MUCH else (1 - EXPLORE) * budget.whole_s
        if cost_s <= budget.left_s - kept_s and standing.fits(setting):
            worth[case] = standing.hopes[setting] / math.sqrt(max(1e-3, cost_s))
    return max(worth, key=worth.__getitem__, default=None)


def _tell_apart(standing: Standing, budget: Budget) -> Case | None:
    """Return a repeat of the present setting, the best or a rival of it, whichever ran least."""
    rivals = standing.list_rivals()[:MOST_RIVALS]
    wanted = [s for s in dict.fromkeys([standing.now, standing.best, *rivals]) if s]
    counts = {s: len(standing.values[s]) for s in wanted if s in standing.values}
    # the present setting is compared with the winner, whichever it is
    most = MOST_REPEATS if rivals else MIN_REPEATS
    for setting in sorted(counts, key=lambda s: counts[s]):
        case = standing.measure(setting)
        if counts[setting] < most and standing.predict_s(case) <= budget.left_s:
            return case
    return None


def _compare_learning(standing: Standing, budget: Budget) -> Case | None:
    """Return the next run that compares learning, of the advised setting at the present batch size
    or of the present setting, if there is time for all of them; once begun, if there is time for
    the next, since fewer would say nothing."""
    advised, now = standing.advised, standing.now
    if not standing.space.judged or advised is None or now not in standing.values:
        return None
    twin = standing.keep_batch_size(advised)
    lacking = {s: LEARN_SEEDS - standing.count_seeds(s) for s in (now, twin)}
    if twin == now or not any(lacking.values()):
        return None
    case = learn(max(lacking, key=lambda setting: lacking[setting]))
    needed_s = sum(count * standing.predict_s(learn(s)) for s, count in lacking.items())
    if lacking[twin] < LEARN_SEEDS:
        needed_s = standing.predict_s(case)
    return case if needed_s <= budget.left_s else None
