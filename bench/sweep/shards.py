"""Shards: the parts of a sweep that several machines or jobs make independently of each other.

What is planned is split from the command line alone, so that each job finds its part by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.case import Case
from bench.errors import UsageError
from bench.store.plans import Shard
from bench.text import count
from bench.wall.records import name_family

START_IMAGES = 10_000
"""Images that the start of a run is counted as: nothing is known of the machine before it ran."""

EPOCH_IMAGES = 50_000

SEARCH_RUNS = 10
"""Runs that a search for the largest batch and the cases that follow from it are counted as."""


def split_costs(costs: Sequence[float], parts: int) -> list[int]:
    """The part, from 1, that each item goes to, so that parts cost about the same.

    The most expensive first, each to the part that has least so far: the longest part then takes at
    most 4/3 of the best (Graham, Bounds on multiprocessing timing anomalies, 1969). Equal costs go
    round in turn. No part is empty where there are as many items.

    >>> split_costs([5, 1, 1, 3], 2)
    [1, 2, 2, 2]
    """
    load, chosen = [0.0] * parts, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        part = min(range(parts), key=lambda part: (load[part], part))
        load[part] += costs[item]
        chosen[item] = part + 1
    return chosen


def estimate_cost(case: Case) -> float:
    """What a run costs, in images, as far as its settings tell."""
    images = EPOCH_IMAGES * case.epochs * case.fraction
    if case.steps is not None:
        images = min(images, case.steps * case.batch_size)
    return START_IMAGES + images


def choose_part(
    shard: Shard | None, expand: Callable[[Callable[[Case, str], Sequence[int]]], Sequence[Case]]
) -> Callable[[Case], bool]:
    """Which cases of a sweep are of the shard; without one, all.

    Cases that are alike in all but their batch size stay together, with all their repeats: where
    one runs out of memory, the larger ones are not run. So do those whose largest batch is searched
    together. ``expand`` gives all cases of the sweep, given what is asked for a batch size that is
    to be found, as `bench.preset.Preset.cases` does; workloads and devices are not yet examined.
    Raises UsageError: there are more shards than families of cases.
    """
    if shard is None:
        return lambda case: True
    searched: list[Case] = []

    def find(case: Case, text: str) -> Sequence[int]:
        searched.append(case)
        return ()

    cases = expand(find)

    def name_part(case: Case) -> Case:
        return name_family(case) if searched else replace(case, batch_size=0)

    costs: dict[Case, float] = {}
    for case, runs in [*((case, 1) for case in cases), *((case, SEARCH_RUNS) for case in searched)]:
        part = name_part(case)
        costs[part] = costs.get(part, 0.0) + runs * estimate_cost(case)
    if shard.of > len(costs):
        raise UsageError(
            f"--shard {shard}: the sweep has {count(len(costs), 'case')} that differ in more than "
            f"their batch size, and batch sizes stay together; give at most {len(costs)} shards"
        )
    parts = dict(zip(costs, split_costs(list(costs.values()), shard.of), strict=True))
    return lambda case: parts.get(name_part(case)) == shard.number


def default_folder(shard: Shard, preset: str) -> Path:
    """Where the records of a shard go without ``--out``: the same whenever it is run."""
    return Path("results") / Path(preset).stem / shard.folder
