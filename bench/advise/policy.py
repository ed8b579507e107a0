"""The choice of the next measurement, within a budget; nothing here runs anything.

In this order: the present setting; what promises most for its time; the best setting with each of
its changes undone, so that only useful changes stay; repeats of the best, of the present setting
and of what may be better still; seeds of the advised and the present setting, to compare learning.
All state is a list of results, so a search can continue wherever its records end.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.advise.standing import (
    LEARN_SEEDS,
    MOST_RIVALS,
    Aim,
    Standing,
    Trial,
    list_changes,
)
from bench.limits import MIN_REPEATS
from bench.record import Status

LEAST_PROMISE = 0.005
"""Least expected gain for which a setting is tried; less could not be told from none."""

MUCH = 0.1
"""Expected gain from which a setting may use the time reserved for repeats."""

EXPLORE = 0.7
"""Share of the budget for looking for better settings; the rest is for repeats."""

MOST_REPEATS = 5


@dataclass(frozen=True)
class Budget:
    """The total time of a search, and the time left, in s."""

    whole_s: float
    left_s: float


UNLIMITED = Budget(1e9, 1e9)


def choose(standing: Standing, budget: Budget) -> Trial | None:
    """Return the next run; None if no run that fits the budget would help."""
    looks = [r.status for r in standing.known if r.trial.setting == standing.now]
    if not looks or looks == [Status.INVALID]:
        return Trial(standing.now, Aim.LOOK, len(looks) + 1)
    if not standing.values and any(result.time_s for result in standing.known):
        return None  # the quantity to minimise is not measured here
    for decide in (_explore, _take_back, _tell_apart, _judge_learning):
        if trial := decide(standing, budget):
            return trial
    return None


def _explore(standing: Standing, budget: Budget) -> Trial | None:
    """Return the setting with the highest expected gain for its time, if that is worth a run.

    The gain is divided by the square root of the seconds. Divided by the seconds themselves (J.
    Snoek et al., Practical Bayesian Optimization of Machine Learning Algorithms, 2012), compiled
    settings came last, and in budgets of minutes never.
    """
    import numpy as np

    settings, best = standing.space.settings, standing.best
    if best is None:
        gains = np.exp(-np.asarray(standing.space.prior))
    else:
        gains = standing.belief.expect_gain(standing.mean(best))
    costs = np.array([max(1e-3, standing.predict_s(Trial(s, Aim.LOOK))) for s in settings])
    for place in np.argsort(-gains / np.sqrt(costs)):
        setting, gain = settings[place], gains[place]
        if best is not None and gain < LEAST_PROMISE:
            continue
        kept = 0.0 if gain > MUCH else (1 - EXPLORE) * budget.whole_s
        if costs[place] > budget.left_s - kept:
            continue
        if setting not in standing.tried and standing.fits(setting):
            return Trial(setting, Aim.LOOK)
    return None


def _take_back(standing: Standing, budget: Budget) -> Trial | None:
    """Return the best setting with one of its changes undone, if that was not tried."""
    best, now = standing.best, standing.now
    for axis in list_changes(best, now) if best else ():
        for setting in standing.space.settings:
            as_now = getattr(setting, axis) == getattr(now, axis)
            if not as_now or best is None or list_changes(setting, best) != [axis]:
                continue
            trial = Trial(setting, Aim.LOOK)
            if setting in standing.tried or not standing.fits(setting):
                continue
            if standing.predict_s(trial) <= budget.left_s:
                return trial
    return None


def _tell_apart(standing: Standing, budget: Budget) -> Trial | None:
    """Return a repeat of the present setting, the best or a rival of it, whichever ran least."""
    best, now = standing.best, standing.now
    if best is None:
        return None
    rivals = standing.list_rivals(best)[:MOST_RIVALS]
    wanted = [s for s in dict.fromkeys([now, best, *rivals]) if s in standing.values]
    measured = [r.trial.setting for r in standing.known if r.trial.aim is Aim.MEASURE]
    counts = {setting: measured.count(setting) for setting in wanted}
    # the present setting is compared with the winner, whichever it is
    most = MOST_REPEATS if rivals else MIN_REPEATS
    for setting in sorted(counts, key=lambda s: counts[s]):
        trial = Trial(setting, Aim.MEASURE, counts[setting] + 1)
        if counts[setting] < most and standing.predict_s(trial) <= budget.left_s:
            return trial
    return None


def _judge_learning(standing: Standing, budget: Budget) -> Trial | None:
    """Return the next run that compares learning, of the advised setting at the present batch size
    or of the present setting, if there is time for all of them; once begun, if there is time for
    the next, since fewer would say nothing."""
    advised, now = standing.advised, standing.now
    if not standing.space.judged or advised is None or now not in standing.values:
        return None
    twin = standing.keep_batch_size(advised)
    if twin == now:
        return None
    missing = [
        Trial(setting, Aim.LEARN, repeat)
        for setting in (now, twin)
        for repeat in range(standing.count_seeds(setting) + 1, LEARN_SEEDS + 1)
    ]
    if not missing:
        return None
    next_one = min(missing, key=lambda trial: trial.repeat)
    begun = standing.count_seeds(twin) > 0
    needed = [next_one] if begun else missing
    return next_one if sum(map(standing.predict_s, needed)) <= budget.left_s else None
