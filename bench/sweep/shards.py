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


def choose_part(
    shard: Shard | None, expand: Callable[[Callable[[Case, str], Sequence[int]]], Sequence[Case]]
) -> Callable[[Case], bool]:
    """Return a function that tells whether a case is in the shard; without one, all are.

    Families of cases are dealt to the shards in turn. Cases that differ only in their batch size
    stay together, with all their repeats: if one runs out of memory, the larger ones are not run.
    So do cases that share a search for the largest batch. ``expand`` returns all cases of the
    sweep, as `bench.preset.Preset.cases` does, and calls its argument for each batch size still to
    be found; workloads and devices are not examined yet. Raises UsageError: there are more shards
    than families.
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

    families = list(dict.fromkeys(map(name_part, [*cases, *searched])))
    if shard.of > len(families):
        raise UsageError(
            f"--shard {shard}: the sweep has {count(len(families), 'case')} apart from their batch "
            f"sizes, which stay together; give at most {count(len(families), 'shard')}"
        )
    mine = {*families[shard.number - 1 :: shard.of]}
    return lambda case: name_part(case) in mine


def default_folder(shard: Shard, preset: str) -> Path:
    """Return the default folder of a shard, without ``--out``: the same at every start."""
    return Path("results") / Path(preset).stem / shard.folder
