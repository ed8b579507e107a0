"""Pairs of cases that differ in one axis alone, for every question about a change.

Changes from one baseline, such as fp32 to each other precision, are compared with each other. So
each of their metrics is taken over the same settings of all other axes (`select_common`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise, product
from operator import attrgetter
from typing import Any, NamedTuple

from bench.base.errors import UsageError
from bench.base.text import join_words
from bench.results.store.rows import group
from bench.results.study.axes import (
    MACHINE,
    is_number_axis,
    list_main,
    name_setting,
    order_values,
    take_value,
)
from bench.results.study.comparable import find_factor, refuse_alone, refuse_learnt, refuse_together
from bench.results.study.runs import Result, Run
from bench.results.study.warnings import SAID_BELOW, WARNINGS
from bench.schema.axis import is_own, name_axis
from bench.schema.case import (
    AXES,
    FOLLOWS,
    SAME_QUESTION,
    Case,
    free_axes,
    list_axes,
    spell_value,
)
from bench.schema.record import COMPARABLE
from bench.schema.rules import settle


class Pair(NamedTuple):
    """Two results that differ in one axis alone: before the change and after it.

    Attributes:
        key: a number that identifies the settings of all other axes.
        same_loss: whether their losses can be compared.
    """

    a: Result
    b: Result
    key: int
    same_loss: bool

    @property
    def cells(self) -> tuple[int, int]:
        return self.a.cell, self.b.cell

    @property
    def factor(self) -> float:
        """What a time after the change is multiplied by to be of as many items as the one before;
        NaN if they say nothing of each other."""
        return math.nan if refuse_together((self.a, self.b)) else find_factor(self.a, self.b)

    @property
    def estimated(self) -> bool:
        """Whether either measured only a part of an epoch."""
        return bool(min(self.a.part, self.b.part) < 1)

    @property
    def warnings(self) -> set[str]:
        """The `WARNINGS` of either."""
        names = (name for name in WARNINGS if name not in SAID_BELOW)
        return {name for name in names if getattr(self.a, name) or getattr(self.b, name)}


@dataclass(frozen=True)
class Changed:
    """A change of one axis, and its pairs."""

    axis: str
    before: str
    after: str
    pairs: Sequence[Pair]


def find_changes(axis: str, results: Sequence[Result]) -> Iterator[Changed]:
    """Yield the changes of one axis for which there are pairs.

    A number is compared with the next lower one that ran with all else equal, any other value with
    the baseline. Of cases that differ only in what follows from the axis, those with its usual
    values are compared, without any none; of those that differ only in how much of an epoch was
    measured, those with equal parts are compared, else those that measured most. None is compared
    that `refuse_alone` refuses. Cases of one machine in several folders are compared where no
    folder has both.
    """
    free = {axis, *list_followers(axis), *SAME_QUESTION}
    equal = [name for name in list_axes(results) if name not in free]
    compared = "device" if axis == MACHINE else "vary" if is_own(axis) else axis
    equal += [column for column, of in COMPARABLE.items() if compared not in of]
    if axis == MACHINE:
        equal.remove("device")
    else:
        equal.append("ran_on")
    tell, ask = attrgetter(*equal), attrgetter(*SAME_QUESTION)
    results = [result for result in results if not refuse_alone(result)]
    if axis in FOLLOWS:
        results = [results[at] for at in list_main(results, [*map(tell, results)])]
    values = order_values(axis, (take_value(result, axis) for result in results))
    numbers = is_number_axis(axis, values)
    places = {value: place for place, value in enumerate(values)}
    about = AXES.get(axis)
    first = places.get(about.default, 0) if about and about.from_default else 0
    steps: dict[tuple[int, int], list[Pair]] = {}

    def list_steps(alike: Sequence[Result]) -> Iterator[tuple[int, int, Result, Result]]:
        # of several values of what follows from the axis, the usual one; cases that ran in two
        # environments of one machine are ambiguous, and left out
        asked = group(alike, lambda r: (r.sweep, take_value(r, axis), ask(r)))
        known: dict[int, list[Result]] = {place: [] for place in range(len(values))}
        for cases in asked:
            if len(cases) > 1:
                follow = list_followers(axis)
                cases = [one for one in cases if is_usual(one.first.case, follow)]
            if len(cases) == 1:
                known[places[take_value(cases[0], axis)]].append(cases[0])
        there = [place for place, cases in known.items() if cases]
        # as many GPUs never train one by one: of several ways, the first is the baseline
        base = there[0] if axis == "parallel" and there and first not in there else first
        others = [(base, place) for place in there if place != base and base in there]
        for before, after in pairwise(there) if numbers else others:
            # prefer equal parts, then the largest
            a, b = max(
                product(known[before], known[after]),
                key=lambda ends: (ends[0].part == ends[1].part, ends[0].part, ends[1].part),
            )
            yield before, after, a, b

    for key, alike in enumerate(group(results, tell)):
        folders = group(alike, attrgetter("sweep"))
        found = [step for folder in folders for step in list_steps(folder)]
        within = {step[:2] for step in found}
        if len(folders) > 1:
            found += [step for step in list_steps(alike) if step[:2] not in within]
        for before, after, a, b in found:
            same_loss = not refuse_learnt(a, b, axis)
            steps.setdefault((before, after), []).append(Pair(a, b, key, same_loss))
    for before, after in sorted(steps):
        one, other = (spell_value(values[place]) for place in (before, after))
        yield Changed(axis, one, other, steps[before, after])


def select_common(
    changes: Sequence[Changed],
    fits: Callable[[Pair], bool],
    measured: Set[int],
    sure: Set[int],
) -> list[tuple[tuple[int, int], ...]]:
    """Select the pairs to compare for each change, as cells before and after.

    Changes from one baseline keep only the settings that all of them share; without any, each keeps
    its own. Of these, settings with enough repeats are preferred: shared ones must have enough in
    all changes that have any such pair. ``fits`` returns whether the metric of a pair can be
    compared; ``measured`` are the cells that have it, ``sure`` those with enough repeats.
    """
    known = [[p for p in change.pairs if {*p.cells} <= measured and fits(p)] for change in changes]
    families: dict[tuple[str, str], list[int]] = {}
    for place, change in enumerate(changes):
        if known[place]:
            families.setdefault((change.axis, change.before), []).append(place)
    kept = known[:]
    for places in families.values():
        keys = [{pair.key for pair in known[place]} for place in places]
        good = [{pair.key for pair in known[place] if {*pair.cells} <= sure} for place in places]
        shared = set.intersection(*keys)
        best = shared.intersection(*filter(None, good))
        for place, mine, enough in zip(places, keys, good, strict=True):
            wanted = (best or shared) if shared else (enough or mine)
            kept[place] = [pair for pair in known[place] if pair.key in wanted]
    return [tuple(pair.cells for pair in pairs) for pairs in kept]


# --------------------------------------------------------------------------------------- two sides

EnvironmentKey = tuple[tuple[str, str], ...]
"""Columns of `COMPARABLE` and their values, which tell one case in several environments apart."""


class _Match(NamedTuple):
    """A case of each side that are compared, by ``cell``. ``environment`` tells it apart if a
    side ran the case in several environments."""

    a: int
    b: int
    environment: EnvironmentKey = ()


class Matches(NamedTuple):
    """The cases of two sides: compared ``pairs``, and by ``cell`` the cases on one side alone, with
    what tells the environment of each from others of its case."""

    pairs: Sequence[_Match]
    alone: tuple[Mapping[int, EnvironmentKey], Mapping[int, EnvironmentKey]]


def match(a: Sequence[Run], b: Sequence[Run], axis: str, apart: Collection[str]) -> Matches:
    """Match the cases of two sides: two sweeps, or the cases with either of two values of an axis.

    Matched cases are equal in all axes except:

    - those of `list_free`. Of several loss scales, each precision's main one is taken; of other
      cases that differ only in what follows from the compared axis, the usual one;
    - the axes ``apart`` of a recipe, of which the sides share no value; the last is taken;
    - the axes that say how a case was measured. Cases that measured an equal part of an epoch are
      matched, first those with equal settings of these axes; then cases with equal settings that
      ended elsewhere, as with ``--until``; else the largest part of each side, of an equal
      ``--fraction`` if there is one. What a side measured of a matched case beside that is neither
      compared nor alone.

    If a side ran a case in several environments, the columns of `COMPARABLE` that vary are matched
    like axes, where the two sides share a value. What is still ambiguous is not matched.

    Args:
        a: a run of each ``cell``; likewise ``b``.

    Raises UsageError: of several such cases none is the usual one.
    """
    free = (*list_free(axis, a, b), *apart)
    candidates = [_list_candidates(side, axis, free) for side in (a, b)]
    pairs = list[_Match]()
    alone = (dict[int, EnvironmentKey](), dict[int, EnvironmentKey]())
    tell = attrgetter(*COMPARABLE)
    for key in dict.fromkeys([*candidates[0], *candidates[1]]):
        ours, theirs = (side.get(key, []) for side in candidates)
        found = [one for ends in _match_parts(ours, theirs) for one in _match_environments(*ends)]
        pairs += found
        for number, side in enumerate((ours, theirs)):
            runs = [run for group in side for run in group]
            taken = {pair[number] for pair in found}
            compared = {tell(run) for run in runs if run.cell in taken}
            alone[number].update({run.cell: () for run in runs if tell(run) not in compared})
    places = {run.cell: place for place, run in enumerate(a)}
    return Matches(sorted(pairs, key=lambda pair: places[pair.a]), alone)


def list_free(axis: str, a: Sequence[Run], b: Sequence[Run]) -> tuple[str, ...]:
    """Return the axes in which matched cases of two sides may differ where ``axis`` is compared: it
    and, of the axes that follow from it (`FOLLOWS`), those of which the sides share no value, as an
    optimizer has a learning rate of its own, and those of a precision."""
    return tuple(
        name
        for name in free_axes(axis)
        if name == axis
        or axis == "precision"
        or {getattr(run, name) for run in a}.isdisjoint(getattr(run, name) for run in b)
    )


def _list_candidates(
    side: Sequence[Run], axis: str, free: Collection[str]
) -> dict[Any, list[list[Run]]]:
    """Return the cases of one side by what matched cases have in common, each with a run of every
    environment that it ran in."""
    names = (name for name in list_axes(side) if name not in {*free, *SAME_QUESTION})
    tell = attrgetter(*names)
    if FOLLOWS.get(axis):
        side = [side[at] for at in list_main(side, [*map(tell, side)])]
    found: dict[Any, list[list[Run]]] = defaultdict(list)
    for alike in group(side, lambda run: (tell(run), _ask(run))):
        found[tell(alike[0])].append(_take_usual(axis, group(alike, attrgetter("axes"))))
    return found


def _take_usual(axis: str, cases: Sequence[list[Run]]) -> list[Run]:
    """Return of cases that differ only in what follows from ``axis`` the one whose values are the
    usual ones; without such an axis the last. Raises UsageError: there is none."""
    followers = FOLLOWS.get(axis, ())
    if len(cases) == 1 or not followers:
        return cases[-1]
    ran = [runs[0].case for runs in cases]
    for runs, case in zip(cases, ran, strict=True):
        if is_usual(case, followers):
            return runs
    apart = [name for name in followers if len({getattr(case, name) for case in ran}) > 1]
    value = name_setting(axis, spell_value(getattr(ran[0], axis)))
    values = join_words([*dict.fromkeys(spell_value(getattr(case, apart[0])) for case in ran)])
    raise UsageError(
        f"--axis {axis}: cases with {value} differ in {name_axis(apart[0])} too ({values}), of "
        "which none is the usual one; compare a folder that has one of them"
    )


def list_followers(axis: str) -> list[str]:
    """Return the axes that may change together with ``axis`` in one sweep; as many GPUs take part
    before the change and after it."""
    return [name for name in FOLLOWS.get(axis, ()) if name != "world_size"]


def is_usual(case: Case, followers: Collection[str]) -> bool:
    """Return whether a case has the values of these axes that it has where none is given; False
    without any axis."""
    usual = settle({name: getattr(case, name) for name in AXES if name not in followers})
    alike = all(getattr(case, name) == getattr(usual, name) for name in followers)
    return bool(followers) and alike


_ask = attrgetter(*SAME_QUESTION)


def _match_parts(
    ours: Sequence[list[Run]], theirs: Sequence[list[Run]]
) -> list[tuple[list[Run], list[Run]]]:
    """Pair cases that measured equal parts of an epoch, or were set alike though one ended
    elsewhere or failed; without any, pair the largest of each side, of an equal fraction if there
    is one."""

    def differ(pair: tuple[list[Run], list[Run]]) -> tuple[bool, bool]:
        (one, *_), (two, *_) = pair
        return one.part != two.part, _ask(one) != _ask(two)

    pairs: list[tuple[list[Run], list[Run]]] = []
    for one, two in sorted(product(ours, theirs), key=differ):
        if not all(differ((one, two))) and not any(one is x or two is y for x, y in pairs):
            pairs.append((one, two))
    if pairs or not (ours and theirs):
        return pairs

    def size(pair: tuple[list[Run], list[Run]]) -> tuple[bool, float, float]:
        (one, *_), (two, *_) = pair
        return one.fraction == two.fraction, one.part, two.part

    return [max(product(ours, theirs), key=size)]


def _match_environments(ours: Sequence[Run], theirs: Sequence[Run]) -> Iterator[_Match]:
    """Match the cells of one case by the columns of `COMPARABLE` that vary within a side, where the
    sides share a value."""
    values = {n: [{getattr(r, n) for r in side} for side in (ours, theirs)] for n in COMPARABLE}
    shared = [n for n, (x, y) in values.items() if max(len(x), len(y)) > 1 and x & y]

    def tell(run: Run) -> EnvironmentKey:
        return tuple((name, getattr(run, name)) for name in shared)

    one, two = ({tell(runs[0]): runs for runs in group(side, tell)} for side in (ours, theirs))
    for environment in one.keys() & two.keys():
        if len(one[environment]) == len(two[environment]) == 1:
            yield _Match(one[environment][0].cell, two[environment][0].cell, environment)
