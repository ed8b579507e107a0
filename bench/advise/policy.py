"""What to measure next, within a budget, to find the best setting; nothing here runs anything.

In turn: the setting that is used now; what promises most for its seconds; the best with each of its
changes taken back, so that only what gains something stays; repeats of what may be better still, of
the best and of the one used now; seeds of these two, for learning. What is known is a list of
results, so that a search goes on wherever its records end.
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
"""No setting is tried of which less than this is expected: it could not be told from none."""

MUCH = 0.1
"""A setting of which so much is expected may use what is kept for the repeats of others."""

EXPLORE = 0.7
"""The part of the budget that looking for a better setting may take; the rest is for repeats."""

MOST_REPEATS = 5


@dataclass(frozen=True)
class Budget:
    """Seconds: of the whole search, and what is left of them."""

    whole_s: float
    left_s: float


UNLIMITED = Budget(1e9, 1e9)


def choose(standing: Standing, budget: Budget) -> Trial | None:
    """The run to make next; None where nothing is left that fits the budget and would help."""
    looks = [r.status for r in standing.known if r.trial.setting == standing.now]
    if not looks or looks == [Status.INVALID]:
        return Trial(standing.now, Aim.LOOK, len(looks) + 1)
    if not standing.values and any(result.time_s for result in standing.known):
        return None  # what is to be small is not measured here
    for decide in (_explore, _take_back, _tell_apart, _judge_learning):
        if trial := decide(standing, budget):
            return trial
    return None


def _explore(standing: Standing, budget: Budget) -> Trial | None:
    """The setting of which most is expected for its seconds, if that is worth a run.

    Of the seconds the root counts: by gain over seconds (J. Snoek et al., Practical Bayesian
    Optimization of Machine Learning Algorithms, 2012), what has to be compiled came last, and in
    budgets of minutes never.
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
    """The best with one of its changes taken back, if that was not tried."""
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
    """A repeat of the one used now, of the best or of a rival of it, the one that ran least."""
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
    """A seed of the advised setting's twin or of the present one, if there is time for all; once
    that has begun, as long as there is time for the next, since fewer seeds would say nothing."""
    advised, now = standing.advised, standing.now
    if not standing.space.judged or advised is None or now not in standing.values:
        return None
    twin = standing.find_twin(advised)
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
