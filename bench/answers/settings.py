"""Settings: what was asked of a machine, each with all the cases that answer it.

One setting may be measured in part and whole, with and without a profile or an evaluation. The case
that measured most speaks for it; the others are its repeats, and how far they agree is the noise of
a single run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bench.answers.choice import Candidate, Choice, choose_among
from bench.base.limits import MIN_REPEATS, NEAR, STEADY, find_quantile
from bench.results.store.rows import group
from bench.results.study.comparable import refuse_alone, refuse_pair, tell_but
from bench.results.study.quantities import is_number
from bench.results.study.runs import Result, Trust
from bench.results.study.warnings import bound_energy
from bench.results.verdict import Ratio, compare, pool_noise
from bench.schema.case import AXES, SAME_QUESTION, UNTIMED, Case
from bench.schema.precision import PRECISIONS

NEUTRAL = tuple(axis for axis in UNTIMED if axis != "optimizer")
"""Axes that cost neither time nor memory."""

UNRANKED = ("vary", "command", *(axis for axis in NEUTRAL if axis != "seed"))
"""Axes of which no value is the usual one: what is as fast in several is not chosen from."""


class Aim(NamedTuple):
    """What a recommendation may be for instead of the usual rule: the least of what ``take``
    returns of a case, NaN where it is not known, of which a share of ``tolerance`` makes no
    difference."""

    take: Callable[[Any], float]
    tolerance: float


AIMS = {
    "time": Aim(lambda row: row.epoch_time_s, STEADY),
    "memory": Aim(lambda row: row.memory_bytes, STEADY),
    # of a part and a whole epoch, the part's may read too little; and an epoch of one setting took
    # up to 3 % more or less from one run to the next
    "energy": Aim(bound_energy, 0.03),
}

_TOLD = tuple(name for name in AXES if name not in SAME_QUESTION)


class Setting:
    """A question, and the cases that answer it, best evidence first: those without a fatal warning,
    of these the largest part of an epoch, then the most repeats. It is ``timed`` if it has a time
    that others may be compared with."""

    def __init__(self, cases: Sequence[Result]) -> None:
        self.cases = cases
        self.best = cases[0]
        self.timed = is_number(self.best.epoch_time_s) and not refuse_alone(self.best)

    def find_learnt(self, name: str) -> float | None:
        """Return what a whole epoch ended with, of the case of best evidence that has it."""
        ends = (float(getattr(row, name)) for row in self.cases if row.learnt_whole)
        return next((end for end in ends if is_number(end)), None)

    def differs_in(self, other: Setting, free: Collection[str]) -> bool:
        """Return whether the two, of one machine and environment, may be compared and differ in
        some of the axes ``free`` and in nothing else."""
        a, b = self.best, other.best
        unlike = {name for name in _TOLD if getattr(a, name) != getattr(b, name)}
        place = ("environment", "kind", "ran_on")
        alike = all(getattr(a, name) == getattr(b, name) for name in place)
        return alike and bool(unlike) and unlike <= {*free} and not refuse_pair(a, b)


def list_settings(results: Sequence[Result]) -> list[Setting]:
    """Return the settings of some results, in their order."""
    settings = []
    for alike in group(results, tell_but(SAME_QUESTION)):
        alike.sort(key=lambda row: (
            not row.trusted, not is_number(row.epoch_time_s), -row.part, -row.repeats
        ))  # fmt: skip
        settings.append(Setting(alike))
    return settings


def choose(
    settings: Sequence[Setting], aim: str = "", present: int | None = None
) -> Choice[Setting] | None:
    """Return the setting to recommend, by the rule of `bench.answers.choice`; with an ``aim``, of
    those that are within its tolerance of the least. ``present`` is the batch size in use.

    None if no time can be trusted, if half of them cannot and one of those is lower by more than
    `NEAR`, or if nothing is known of the aim.
    """
    # a noisy time says nothing against the memory or the energy of a run that ended well
    least = Trust.TRUSTED if aim in ("", "time") else Trust.WARNED
    known = [s for s in settings if s.timed and s.best.times and s.best.trust >= least]
    if aim in AIMS:
        known = list_least(known, AIMS[aim])
    if not known:
        return None
    timed = [s for s in settings if s.timed and s.best.trust]
    known_s, timed_s = (min(s.best.epoch_time_s for s in group) for group in (known, timed))
    few = not aim and 2 * len(known) <= len(timed)
    if few and known_s > (1 + NEAR) * timed_s:
        return None
    return choose_among([weigh(setting) for setting in known], present)


def choose_base(settings: Sequence[Setting], size: int | None) -> Setting:
    """Return the setting of a baseline, of one or more that differ in their batch size, against
    which one of batch size ``size`` is held: the baseline at that batch size, as long as it is not
    shown to take more than `NEAR` longer than at another, by the rule of choice; then its fastest.
    What nobody would train with is nothing to gain over: on a CPU a disturbed fp32 at batch size
    256 made bf16-amp 2.60 times as fast, against 1.41 and 1.52 times at 64 and 128."""
    nearest = min(settings, key=lambda s: (s.best.batch_size != size, s.best.epoch_time_s))
    if nearest.best.batch_size != size or not nearest.best.times:
        return nearest
    sure = [s for s in settings if s.best.trusted]
    choice = choose_among([weigh(s) for s in dict.fromkeys((nearest, *sure))], size)
    return nearest if choice.chosen.best.batch_size == size else choice.fastest


def list_least(settings: Sequence[Setting], aim: Aim) -> list[Setting]:
    """Return the settings that have the least of an aim, or more by no more than it tolerates."""
    known = [(aim.take(s.best), s) for s in settings if is_number(aim.take(s.best))]
    repeats = [[aim.take(run) for run in setting.best.counted] for _, setting in known]
    deviation, freedom = pool_noise([[v for v in values if v > 0] for values in repeats])
    noise = math.sqrt(2) * find_quantile(freedom) * deviation if freedom >= MIN_REPEATS else 0.0
    most = math.exp(max(math.log1p(aim.tolerance), noise)) * min((v for v, _ in known), default=0)
    return [setting for value, setting in known if value <= most]


def weigh(setting: Setting) -> Candidate[Setting]:
    row = setting.best
    again = [time for case in setting.cases if case.trusted for time in case.times]
    return Candidate(setting, row.times, row.batch_size, rate_unusual(row), again)


def rate_unusual(case: Case | Result) -> tuple[bool, int]:
    """Return how unusual a case is, as a sort key: whether it trains by a recipe that rounds the
    network's weights, where autocast is what people use, and how many axes are not at their
    defaults."""
    precision = PRECISIONS[case.precision]
    usual = {name: AXES[name].default for name in _TOLD if name not in ("batch_size", *NEUTRAL)}
    usual["loss_scale"] = precision.default_loss_scale
    return precision.casts, sum(getattr(case, name) != value for name, value in usual.items())


def judge_speeds(pairs: Sequence[tuple[Result, Result]]) -> list[Ratio]:
    """Return how many times as fast the first of each pair is as the second: the ratio of the
    medians that are shown, with the interval over the runs of both, judged as one family."""
    ratios = compare([(after.times, before.times) for after, before in pairs])
    return [
        replace(ratio, value=before.epoch_time_s / after.epoch_time_s)
        for ratio, (after, before) in zip(ratios, pairs, strict=True)
    ]
