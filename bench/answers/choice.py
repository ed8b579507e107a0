"""The rule by which reports, `bench.cards` and `bench.advise` choose what to train with.

1. A setting is near if it is shown to take at most `NEAR` more than the fastest one: by the
   interval of their ratio over repeats or, where one of them has too few, by the noise of all
   repeats. The fastest one is near itself. A setting that is neither shown to be near nor shown
   not to be is open.
2. The batch size that is in use is kept, as long as it is near or open: to change it takes proof.
   Where none is in use, the smallest one that is near is chosen: to call it near takes proof.
3. Of the settings of that batch size that are not shown to be slower than the fastest of them by
   more than `STEADY`, the least unusual is chosen.

So, but for the batch size in use, one that truly takes more than `NEAR` longer than the fastest is
called near in at most 2.5 % of searches. tests/answers/test_choice.py simulates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from bench.base.limits import MIN_REPEATS, NEAR, STEADY, find_quantile
from bench.base.text import join_words, write_percent
from bench.results.verdict import compare, pool_noise

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Candidate(Generic[_T]):
    """A setting that may be chosen.

    Attributes:
        times: the epoch times of its repeats, in s; at least one.
        size: its batch size.
        unusual: how unusual it is, as a sort key: the lowest is preferred.
        again: its epoch times of all ways in which it was measured; they tell the noise.
    """

    of: _T
    times: Sequence[float]
    size: int
    unusual: Any = ()
    again: Sequence[float] = ()

    @property
    def time_s(self) -> float:
        return median(self.times)


@dataclass(frozen=True)
class Choice(Generic[_T]):
    """What is chosen, and what it was chosen from.

    Attributes:
        why: the reason, as it follows "is recommended".
        fastest: the setting of the lowest time.
        near: those shown to take at most `NEAR` more, the fastest first.
        open: those of which that is not known.
        alike: what is chosen, then others of its batch size that are as usual and not shown to take
            more than `STEADY` longer.
    """

    chosen: _T
    why: str
    fastest: _T
    near: tuple[_T, ...]
    open: tuple[_T, ...]
    alike: tuple[_T, ...]


def choose_among(
    candidates: Sequence[Candidate[_T]],
    present: int | None = None,
    near: float = NEAR,
    *,
    exact: bool = False,
) -> Choice[_T]:
    """Choose from one candidate or more; ``present`` is the batch size that is in use, and ``near``
    the share of the lowest time that a setting that is near may take more. Times that are ``exact``
    have no noise."""
    bound = _divide if exact else _Noise(candidates).bound
    ranked = sorted(candidates, key=lambda one: one.time_s)
    fastest = ranked[0]
    gaps = [(one, *bound(one, fastest)) for one in ranked]
    close = [one for one, _, high in gaps if one is fastest or high <= 1 + near]
    unsure = [one for one, low, _ in gaps if one not in close and low <= 1 + near]
    same_size = [one for one in (*close, *unsure) if one.size == present]
    smallest = min(one.size for one in close)
    same_size = same_size or [one for one in close if one.size == smallest]
    first = min(same_size, key=lambda one: one.time_s)
    alike = [one for one in same_size if one is first or bound(one, first)[0] <= 1 + STEADY]
    chosen = min(alike, key=lambda one: (one.unusual, one.time_s))
    if chosen is fastest:
        why = "for its lowest time"
    elif chosen.size == fastest.size:
        why = "as what is as fast and changes the fewest settings"
    elif chosen.size == present:
        why = "as the batch size in use, until another is shown to take a tenth less"
    else:
        why = f"as the smallest batch shown to be within {write_percent(near)} of the lowest time"
    sure, unknown = (tuple(one.of for one in group) for group in (close, unsure))
    equal = tuple(
        one.of
        for one in (*close, *unsure)
        if one is not chosen and (one.size, one.unusual) == (chosen.size, chosen.unusual)
        if bound(one, chosen)[0] <= 1 + STEADY
    )
    return Choice(chosen.of, why, fastest.of, sure, unknown, (chosen.of, *equal))


def tell_choice(
    choice: Choice[_T],
    size: Callable[[_T], int],
    memory: Callable[[_T], float],
    name: Callable[[_T], str],
) -> str:
    """Say why what is chosen is, and which settings could as well be, by what is known; empty for
    one of the lowest time beside which none is open. ``memory`` returns its bytes, NaN if they are
    not known."""
    if not choice.open:
        return "" if choice.chosen == choice.fastest else f"It is recommended {choice.why}."
    alike = [*dict.fromkeys((choice.chosen, choice.fastest, *choice.open))]
    others, sizes = [one for one in alike if one != choice.chosen], sorted({*map(size, alike)})
    if len(sizes) > 1:
        names = join_words([*map(str, sizes)])
        sentence = f"Batch sizes {names} cannot be told apart within {write_percent(NEAR)}: "
        sentence += f"{size(choice.chosen)} is recommended {choice.why}"
    else:
        names = join_words([*map(name, others[:MOST_NAMED])])
        sentence = f"Within {write_percent(NEAR)} it cannot be told from {names}: "
        sentence += f"it is recommended {choice.why}"
    least = min(alike, key=memory)
    if all(memory(one) > 0 for one in alike) and memory(least) < memory(choice.chosen) / (
        1 + STEADY
    ):
        other = name(least) if len(others) > 1 else "the other"
        sentence += f"; {size(least) if len(sizes) > 1 else other} needs least memory"
    return f"{sentence}."


def _divide(one: Candidate[Any], other: Candidate[Any]) -> tuple[float, float]:
    return (ratio := one.time_s / other.time_s), ratio


MOST_NAMED = 4  # settings that a sentence names


class _Noise:
    """How far times of one setting differ, by all that were measured more than once.

    Where fewer than `MIN_REPEATS` differences tell it, a ratio of times is known within the largest
    of them, and within `STEADY`: on an H200 parts and whole epochs of settings that fill it agreed
    within 0.4 %.
    """

    def __init__(self, candidates: Sequence[Candidate[Any]]) -> None:
        repeats = [one.again or one.times for one in candidates]
        self._deviation, self._freedom = pool_noise(repeats)
        self._apart = max((math.log(max(times) / min(times)) for times in repeats), default=0.0)

    def bound(self, one: Candidate[Any], other: Candidate[Any]) -> tuple[float, float]:
        """Return the ends of the 95 % interval of the ratio of two times."""
        if min(len(one.times), len(other.times)) >= MIN_REPEATS:
            (ratio,) = compare([(other.times, one.times)])
            if ratio.low is not None and ratio.high is not None:
                return ratio.low, ratio.high
        reach = max(math.log1p(STEADY), self._apart)
        if self._freedom >= MIN_REPEATS and self._deviation:  # copies of a run have none
            number = 1 / len(one.times) + 1 / len(other.times)
            reach = find_quantile(self._freedom) * self._deviation * math.sqrt(number)
        value = one.time_s / other.time_s
        return value * math.exp(-reach), value * math.exp(reach)
