"""Settings: what was asked of a machine, each with all the cases that answer it.

One setting may be measured in part and whole, with and without a profile or an evaluation. The case
that measured most speaks for it; the others are its repeats, and how far they agree is the noise of
a single run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from bench.case import AXES, SAME_QUESTION, UNTIMED
from bench.limits import NEAR
from bench.store.rows import group
from bench.study.comparable import refuse_alone, refuse_pair
from bench.study.doubts import bound_energy
from bench.study.quantities import is_number
from bench.study.runs import SOURCE, Result, tell_but
from bench.verdict import Ratio, compare

NEUTRAL = tuple(axis for axis in UNTIMED if axis != "optimizer")
"""Axes that cost neither time nor memory."""

AIMS: dict[str, Callable[[Result], float]] = {
    "time": lambda row: row.epoch_time_s,
    "memory": lambda row: row.memory_bytes,
    "energy": bound_energy,  # of a part and a whole epoch, the part's may read too little
}
"""What a recommendation may be for instead, and what it then minimises."""

_T = TypeVar("_T")

_TOLD = tuple(name for name in AXES if name not in SAME_QUESTION)


class Setting:
    """A question, and the cases that answer it, best evidence first: those without a fatal doubt,
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
        place = ("environment", "kind", *SOURCE)
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


def list_near(
    settings: Collection[_T], time: Callable[[_T], float], size: Callable[[_T], int]
) -> list[_T]:
    """Return the settings of the smallest batch within `NEAR` of the lowest time, fastest first.
    The first is to be trained with, by the rule of reports, `bench.cards` and `bench.advise`. There
    is at least one setting; ``time`` and ``size`` return its time and its batch size."""
    most = (1 + NEAR) * min(map(time, settings))
    near = [setting for setting in settings if time(setting) <= most]
    smallest = min(map(size, near))
    return sorted((setting for setting in near if size(setting) == smallest), key=time)


def choose(settings: Sequence[Setting], aim: str = "") -> Setting | None:
    """Return the setting to recommend, by the rule of `list_near`; with an ``aim``, the least of
    that. None if no time can be trusted, if half of them cannot and one of those is lower by more
    than `NEAR`, or if nothing is known of the aim."""
    # a noisy time says nothing against the memory or the energy of a run that ended well
    sound = "trusted" if aim in ("", "time") else "sound"
    take = AIMS[aim or "time"]
    known = [s for s in settings if s.timed and getattr(s.best, sound) and is_number(take(s.best))]
    if not known:
        return None
    if aim:
        return min(known, key=lambda setting: (take(setting.best), setting.best.epoch_time_s))
    time: Callable[[Setting], float] = attrgetter("best.epoch_time_s")
    timed = [s for s in settings if s.timed and s.best.sound]
    if 2 * len(known) <= len(timed) and min(map(time, known)) > (1 + NEAR) * min(map(time, timed)):
        return None
    fastest, *_ = list_near(known, time, lambda one: one.best.batch_size)
    return fastest


def judge_speeds(pairs: Sequence[tuple[Result, Result]]) -> list[Ratio]:
    """Return how many times as fast the first of each pair is as the second: the ratio of the
    medians that are shown, with the interval over the runs of both, judged as one family."""
    ratios = compare([(after.times, before.times) for after, before in pairs])
    return [
        replace(ratio, value=before.epoch_time_s / after.epoch_time_s)
        for ratio, (after, before) in zip(ratios, pairs, strict=True)
    ]
