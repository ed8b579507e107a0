"""The state of a search for advice: the results so far, and the conclusions from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from statistics import fmean, median, variance
from typing import TYPE_CHECKING

from bench.advise.belief import Belief, add_loading, believe, relate
from bench.case import AXES, SAME_QUESTION, Case
from bench.grid import go_together
from bench.interval import CONFIDENCE, find_quantile
from bench.limits import STEADY
from bench.record import REFUSED, RELIABLE, Status
from bench.verdict import (
    Claim,
    Equivalence,
    Ratio,
    Verdict,
    compare,
    is_guessing,
    judge_equivalence,
    withdraw,
    withdraw_if_guessing,
)
from bench.wall.search import fit_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


PRICED = "images-per-price"

GOALS = ("time", "memory", "energy", PRICED)
"""Goals of advice: the time or energy of an epoch, the peak memory, or the items for a price, which
on one machine ranks settings as the time does."""


class Aim(StrEnum):
    """Why a setting is run."""

    LOOK = "look"  # for a rough time
    MEASURE = "measure"  # to tell it from other settings
    LEARN = "learn"  # whether it learns as well


LOOK_UNTIL, MEASURE_UNTIL = 0.05, 0.01
"""Relative error of the epoch time, within the run, at which a run may end."""

MOST_PART = {Aim.LOOK: 0.1, Aim.MEASURE: 0.25}
"""Largest part of an epoch that a run may take, by its aim."""

MOST_S = {Aim.LOOK: 10.0, Aim.MEASURE: 20.0}
"""Most seconds of steps that a run takes, by its aim, as far as they can be predicted: a tenth of
an epoch of ResNet-18 at 224 pixels took two CPU cores 8 minutes."""

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

ALIKE = 0.01
"""Settings that differ by less are equally good; then the simpler one is advised."""

MOST_RIVALS = 4
"""The most settings, beside the best, that are repeated to tell them from it."""

FULL = 0.95
"""Share of the available memory up to which a batch is expected to fit."""


@dataclass(frozen=True)
class Trial:
    """One run of ``setting``. The first measuring run is profiled, so that the answer can say what
    limits the setting."""

    setting: Case
    aim: Aim
    repeat: int = 1

    def make_case(self, fraction: float) -> Case:
        """Return the case to run, over a fraction of an epoch."""
        if self.aim is Aim.LEARN:
            return replace(self.setting, fraction=fraction)
        until = LOOK_UNTIL if self.aim is Aim.LOOK else MEASURE_UNTIL
        case = replace(self.setting, until=until, fraction=fraction)
        profiled = replace(case, profile=True)
        first = self.aim is Aim.MEASURE and self.repeat == 1
        return profiled if first and go_together(profiled) else case


def read_trial(case: Case, repeat: int) -> Trial:
    """Return the trial that a run was, whether this search or another command made it."""
    setting = strip(case)
    if case.until is None and case.steps is None and case.fraction == LEARN_PART:
        return Trial(setting, Aim.LEARN, repeat)
    fine = case.until is not None and case.until <= MEASURE_UNTIL
    return Trial(setting, Aim.MEASURE if fine else Aim.LOOK, repeat)


@dataclass(frozen=True)
class Result:
    """The outcome of a run; None means not known."""

    trial: Trial
    status: Status
    took_s: float  # wall time of the whole run
    start_s: float = 0.0  # part of it: set-up and warm-up, with compilation
    trained_s: float = 0.0  # part of it: the measured steps
    time_s: float | None = None  # of an epoch
    error: float | None = None  # half the 95 % interval of the mean step, relative
    value: float | None = None  # the quantity to minimise: time, memory or energy
    used_bytes: float | None = None  # peak memory
    room_bytes: float | None = None  # peak that counts against the available memory
    loading_s: float | None = None  # an epoch of torch's loader alone, without training
    seed: int = 0
    loss: float | None = None  # training loss over its part of an epoch
    reason: str = ""  # why it ended as it did, unless it is ok
    record_id: str = ""  # of its row; empty where it has none


def list_changes(setting: Case, other: Case) -> list[str]:
    """List the axes in which two settings differ, except those that follow from others."""
    axes = [name for name in AXES if getattr(setting, name) != getattr(other, name)]
    return [name for name in axes if AXES[name].follows not in axes]


def strip(case: Case) -> Case:
    """Return the setting that a case measures, without how it was measured."""
    return replace(case, **{name: getattr(Case, name) for name in SAME_QUESTION})


@dataclass(frozen=True)
class Space:
    """The candidate settings. ``prior`` is the logarithm of the quantity to minimise that counts
    and rates predict for each of ``settings``, up to a constant. ``start_s`` predicts the seconds
    of a run beside its steps, and ``epoch_s`` those of an epoch, before any run was seen."""

    now: Case  # the setting that is used now
    settings: Sequence[Case]  # the candidates, the present one among them
    prior: Sequence[float]
    room_bytes: float | None = None  # available memory; None if not known
    judged: bool = True  # whether to compare learning
    margin: float = 0.01  # relative, by which a loss may be higher
    noise: float = NOISE  # 0 for what repeats exactly, such as peak memory
    start_s: Callable[[Case], float] = lambda case: 10.0
    epoch_s: Callable[[Case], float | None] = lambda case: None  # None if not known
    classes: int | None = None  # that the loss distinguishes; None if it may be any
    items: int = 0  # per epoch; 0 if not known

    @cached_property
    def places(self) -> dict[Case, int]:
        return {setting: place for place, setting in enumerate(self.settings)}

    @cached_property
    def covariance(self) -> NDArray[np.float64]:
        return relate(self.settings)


class Standing:
    """The conclusions from the results so far."""

    def __init__(self, known: Sequence[Result], space: Space) -> None:
        self.known, self.space, self.now = known, space, space.now
        self._timed: dict[Case, list[Result]] = {}
        self._sharing: dict[tuple[object, ...], list[Result]] = {}
        self._learnt: dict[Case, Equivalence] = {}
        for result in known:
            setting = result.trial.setting
            self._sharing.setdefault(_share_memory(setting), []).append(result)
            if result.status in RELIABLE and result.time_s:
                self._timed.setdefault(setting, []).append(result)
        self.tried = {result.trial.setting for result in known}
        self.diverged = {r.trial.setting for r in known if r.status is Status.DIVERGED}

    # ------------------------------------------------------------------ values and noise

    def _divide(self, setting: Case) -> tuple[list[Result], list[Result]]:
        """Return the looks at a setting, and its other runs."""
        runs = [r for r in self._timed.get(setting, ()) if r.value]
        looks = [r for r in runs if r.trial.aim is Aim.LOOK]
        return looks, [r for r in runs if r.trial.aim is not Aim.LOOK]

    def list_fine(self, setting: Case) -> list[Result]:
        """List the runs that a setting is judged by; looks only if there are no other runs."""
        looks, fine = self._divide(setting)
        return fine or looks

    @cached_property
    def values(self) -> dict[Case, list[float]]:
        """The logarithms of the quantity to minimise, by candidate setting. A setting whose loss
        became inf or NaN is left out, unless it is the present one."""
        kept = [s for s in self._timed if s == self.now or s not in self.diverged]
        runs = {s: self.list_fine(s) for s in kept if s in self.space.places}
        return {setting: _list_logs(held) for setting, held in runs.items() if held}

    @cached_property
    def _offset(self) -> float | None:
        """How much higher looks read than measurements of the same settings, as a logarithm; None
        if fewer than two settings have both. A common offset is not noise."""
        apart = [
            fmean(_list_logs(looks)) - fmean(_list_logs(fine))
            for looks, fine in map(self._divide, self.values)
            if looks and fine
        ]
        return fmean(apart) if len(apart) > 1 else None

    @cached_property
    def _repeated(self) -> list[list[float]]:
        """The logarithms of each setting that ran more than once, looks included and corrected by
        `_offset`: they show how much runs differ."""
        found = []
        for looks, fine in map(self._divide, self.values):
            logs = [log - (self._offset or 0.0) for log in _list_logs(looks)] + _list_logs(fine)
            found += [logs] if len(logs) > 1 else []
        return found

    @cached_property
    def _freedom(self) -> int:
        """Degrees of freedom of `noise`, two of them from `Space.noise`."""
        fitted = self._offset is not None
        return 2 + sum(len(logs) - 1 for logs in self._repeated) - fitted

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the logarithm within a setting, pooled with `Space.noise`."""
        total = 2 * self.space.noise**2
        total += sum(variance(logs) * (len(logs) - 1) for logs in self._repeated)
        return math.sqrt(total / self._freedom) + 1e-6

    def error(self, setting: Case) -> float:
        """Return the standard error of a measured setting's mean logarithm."""
        runs = self.list_fine(setting)
        within = median([r.error or 0.0 for r in runs]) / 2 if self.space.noise else 0.0
        return max(self.noise, within) / math.sqrt(len(runs))

    @cached_property
    def belief(self) -> Belief:
        places = self.space.places
        seen = {places[s]: (fmean(logs), self.error(s)) for s, logs in self.values.items()}
        prior = self.space.prior
        loading = [r for r in self._timed.get(self.now, ()) if r.loading_s and self.space.noise]
        if loading:
            told = loading[0].time_s or 0.0, loading[0].loading_s or 0.0
            prior = add_loading(prior, self.space.settings, *told)
        return believe(self.space.covariance, prior, seen)

    def mean(self, setting: Case) -> float:
        """Return a measured setting's logarithm by `believe`: with few noisy runs, others that
        share its levers count too, so that the luckiest does not win by chance."""
        return float(self.belief.mean[self.space.places[setting]])

    @cached_property
    def allowed(self) -> list[Case]:
        """The measured settings that were not seen to learn worse, best first."""
        return sorted((s for s in self.values if s not in self.rejected), key=self.mean)

    @cached_property
    def best(self) -> Case | None:
        """The best of `allowed`. Among those that are as good within `ALIKE`, it is the one that
        changes least: the present one, if it is among them."""
        return self._choose_simplest(self.allowed) if self.allowed else None

    def _choose_simplest(self, settings: Sequence[Case]) -> Case:
        """Return the setting that changes least of those as good as the first, the best."""
        least = self.mean(settings[0])
        alike = [s for s in settings if self.mean(s) - least <= ALIKE]
        return min(alike, key=lambda s: (len(list_changes(s, self.now)), self.mean(s)))

    def list_rivals(self, setting: Case) -> list[Case]:
        """List the settings that may be better by more than `ALIKE`, the likeliest first."""
        leads = {s: self.find_possible_gain(s, setting) for s in self.allowed if s != setting}
        return sorted((s for s, lead in leads.items() if lead > ALIKE), key=lambda s: -leads[s])

    def find_possible_gain(self, setting: Case, other: Case) -> float:
        """Return how far, at most, the logarithm of ``setting`` may be below that of ``other``."""
        both = math.hypot(self.error(setting), self.error(other))
        return self.mean(other) - self.mean(setting) + find_quantile(self._freedom) * both

    # ------------------------------------------------------------------ ratios and advice

    @cached_property
    def _ratios(self) -> dict[Case, Ratio]:
        """The ratio of each other setting's needs to those of the present one, judged as one
        family, since the best of all is chosen by it."""
        others = [s for s in self.values if s != self.now]
        logs = self.values
        family = [([*map(math.exp, logs[self.now])], [*map(math.exp, logs[s])]) for s in others]
        return dict(zip(others, compare(family, deterministic=not self.space.noise), strict=True))

    def compare(self, setting: Case, other: Case | None = None) -> Ratio:
        """Return the ratio of a setting's needs to those of another, by default the present one."""
        if other in (None, self.now):
            return self._ratios[setting]
        pair = [[*map(math.exp, self.values[s])] for s in (other or self.now, setting)]
        return compare([(pair[0], pair[1])], deterministic=not self.space.noise)[0]

    def judge(self, setting: Case) -> Verdict:
        """Return whether a setting is better than the present one: LOWER. If the ratio has no
        interval, its lead must exceed the luck of the best of all measured settings, by Student's
        t, as few runs show how much runs differ."""
        ratio = self.compare(setting)
        if ratio.low is not None:
            return ratio.judge(STEADY)
        others = max(1, len(self.values) - 1)
        quantile = find_quantile(self._freedom, 1 - (1 - CONFIDENCE) / others)
        luck = quantile * math.hypot(self.error(setting), self.error(self.now))
        gain = self.mean(self.now) - self.mean(setting)
        return Verdict.LOWER if gain > max(luck, STEADY) else Verdict.NONE

    @cached_property
    def advised(self) -> Case | None:
        """The setting to train with: the best of those that are seen to be better than the present
        one, if any, else the present one. A setting that was measured less may still be better."""
        if self.best is None or self.best == self.now or self.now not in self.values:
            return self.best
        others = [s for s in self.allowed if s != self.now]
        better = [s for s in others if self.judge(s) is Verdict.LOWER]
        return self._choose_simplest(better) if better else self.now

    # ------------------------------------------------------------------ memory

    def fits(self, setting: Case) -> bool:
        """Return whether a batch should fit: below all failures and by the memory line."""
        here, size = self._sharing.get(_share_memory(setting), []), setting.batch_size
        uncompiled = replace(setting, compile=Case.compile, cuda_graphs=False)
        plain = self._sharing.get(_share_memory(uncompiled), [])
        if any(r.status in REFUSED and size >= r.trial.setting.batch_size for r in (*here, *plain)):
            return False
        points: dict[int, float] = {}
        for result in here:
            if used := result.room_bytes:
                n = result.trial.setting.batch_size
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

    def predict_s(self, trial: Trial) -> float:
        """Return the predicted wall time of a whole run."""
        runs = self._timed.get(trial.setting, [])
        if again := [r.took_s for r in runs if r.trial.aim is trial.aim]:
            return median(again)
        usual_s = self._usual_s or self.space.epoch_s(trial.setting) or 0.0
        epoch_s = (runs[-1].time_s or 0.0) if runs else usual_s
        step_s = epoch_s * self._find_share(trial.setting)
        trained_s = epoch_s * self.find_case(trial).fraction
        known = self._beside.get(trial.setting.compile)
        beside = self.space.start_s(trial.setting) if known is None else known
        return beside + WARMUP_STEPS * step_s + trained_s

    def _find_share(self, setting: Case) -> float:
        """Return the part of an epoch that a step takes; 0 if not known."""
        return setting.batch_size / (self.space.items or math.inf)

    def find_case(self, trial: Trial) -> Case:
        """Return the case to run for a trial: the part of an epoch that takes `MOST_S` by the
        setting's first run, and at least `LEAST_STEPS`, so that repeats measure the same part."""
        if trial.aim is Aim.LEARN:
            return trial.make_case(LEARN_PART)
        runs, most = self._timed.get(trial.setting), MOST_PART[trial.aim]
        epoch_s = (runs[0].time_s if runs else self._usual_s) or self.space.epoch_s(trial.setting)
        least = LEAST_STEPS * self._find_share(trial.setting)
        if epoch_s:
            most = min(most, MOST_S[trial.aim] / epoch_s)
        elif least:  # nothing is known: the network cannot be counted
            most = least
        part = min(1.0, max(least, most))
        return trial.make_case(float(f"{part:.2g}"))

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

    def find_start(self, setting: Case) -> float:
        """Return the seconds of set-up and warm-up of a setting's first run, which compiled it."""
        return next((r.start_s for r in self._timed.get(setting, ()) if r.start_s), 0.0)

    # ------------------------------------------------------------------ learning

    def keep_batch_size(self, setting: Case) -> Case:
        """Return the setting to compare in learning: ``setting`` at the present batch size, as a
        larger batch takes fewer steps and learns differently."""
        return replace(setting, batch_size=self.now.batch_size)

    def count_seeds(self, setting: Case) -> int:
        """Count the seeds that were tried of a setting at the present batch size."""
        trials = (r.trial for r in self.known if r.trial.aim is Aim.LEARN)
        return sum(trial.setting == self.keep_batch_size(setting) for trial in trials)

    def judge_learning(self, setting: Case) -> Equivalence:
        """Return whether a setting at the present batch size learns as well as the present
        setting, by `LEARN_SEEDS` seeds that both ran."""
        twin = self.keep_batch_size(setting)
        if twin in self._learnt:
            return self._learnt[twin]
        a, b = (
            {r.seed: r.loss for r in self.known if r.trial.setting == s and r.loss is not None}
            for s in (self.now, twin)
        )
        both = sorted(a.keys() & b.keys())[:LEARN_SEEDS]
        a, b = ({seed: side[seed] for seed in both} for side in (a, b))
        found = judge_equivalence(a, b, self.space.margin)
        if len(both) < LEARN_SEEDS:
            found = withdraw(found, f"{len(both)} of {LEARN_SEEDS} seeds were run")
        else:
            guessed = [is_guessing(fmean(s.values()), self.space.classes) for s in (a, b)]
            found = withdraw_if_guessing(found, guessed)
        self._learnt[twin] = found
        return found

    @cached_property
    def rejected(self) -> dict[Case, Equivalence]:
        """Settings that were seen to learn worse at the present batch size."""
        judged = {
            s: self.judge_learning(s) for s in self.values if self.keep_batch_size(s) != self.now
        }
        return {s: found for s, found in judged.items() if found.verdict is Claim.WORSE}


def _list_logs(runs: Sequence[Result]) -> list[float]:
    return [math.log(r.value or 1.0) for r in runs]


def _share_memory(setting: Case) -> tuple[object, ...]:
    """Return a key that settings share which take about as much memory at the same batch size. CUDA
    graphs keep buffers of their own, so settings without them take at most as much."""
    return setting.precision, setting.accumulate, setting.compile, setting.cuda_graphs
