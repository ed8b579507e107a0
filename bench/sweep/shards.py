"""Shards: the parts of a sweep that several machines or jobs make independently of each other.

The split depends on the command line alone, so that each job finds its part by itself.
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
"""Cost of the start of a run, in images: nothing is known of the machine before it ran."""

EPOCH_IMAGES = 50_000

SEARCH_RUNS = 10
"""Cost, in runs, of a search for the largest batch and the cases that follow from it."""


def split_costs(costs: Sequence[float], parts: int) -> list[int]:
    """Return the part of each item, from 1, so that all parts cost about the same.

    Items go in order of falling cost to the part with the lowest cost so far: the longest part then
    takes at most 4/3 of the optimum (Graham, Bounds on multiprocessing timing anomalies, 1969).
    Equal costs go round-robin. No part is empty if there are at least as many items.

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
    """Estimate the cost of a run from its settings, in images."""
    images = EPOCH_IMAGES * case.epochs * case.fraction
    if case.steps is not None:
        images = min(images, case.steps * case.batch_size)
    return START_IMAGES + images


def choose_part(
    shard: Shard | None, expand: Callable[[Callable[[Case, str], Sequence[int]]], Sequence[Case]]
) -> Callable[[Case], bool]:
    """Return a function that tells whether a case is in the shard; without one, all are.

    Cases that differ only in their batch size stay together, with all their repeats: if one runs
    out of memory, the larger ones are not run. So do cases that share a search for the largest
    batch. ``expand`` returns all cases of the sweep, as `bench.preset.Preset.cases` does, and calls
    its argument for each batch size still to be found; workloads and devices are not examined yet.
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
    """Return the default folder of a shard, without ``--out``: the same at every start."""
    return Path("results") / Path(preset).stem / shard.folder
