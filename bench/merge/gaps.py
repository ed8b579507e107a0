"""Planned runs that a joined folder lacks, and runs that it has several times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bench.case import list_varying
from bench.merge.union import Source
from bench.record import REPEATED
from bench.store.attempts import find_truncated, keep_cases, keep_latest
from bench.store.plans import Plan, list_lost_shards, parse_shard
from bench.store.runs import read_cases, read_history
from bench.text import count

_SHOWN = 10
"""Missing runs that are listed one by one."""


def count_duplicates(union: Source) -> int:
    """Count the runs that are in several of the joined folders."""
    cases = keep_cases(union.records)
    first = cases[cases["attempt"] == 1]
    return len(first) - len(keep_latest(first))


def list_lost(before: Source, plans: Mapping[str, Plan], given: Iterable[Path]) -> list[str]:
    """Return the folders that were joined earlier and are not ``given`` now, if the configuration
    of the joined folder, with their commands and environments, cannot be read any more. Their plans
    still have their cases."""
    if before.config or not len(before.records):
        return []
    return sorted(plans.keys() - {str(path.resolve()) for path in (*given, before.folder)})


def describe_gaps(union: Source, plans: Mapping[str, Plan]) -> Iterator[str]:
    """Yield a line on each shard or run of ``plans``, by folder, that ``union`` does not have."""
    shards = [parse_shard(plan.shard) for plan in plans.values() if plan.shard]
    for shard in list_lost_shards(shards):
        yield f"shard {shard}; run its command, and merge its folder"
    history, cut = read_history(union.records), union.records[find_truncated(union.records)]
    final = {run for run, past in history.items() if past.status not in REPEATED}
    # a search does not repeat the trials that it ended early
    repeats = map(int, cut["repeat"])
    truncated = {(case, n, False) for case, n in zip(read_cases(cut), repeats, strict=True)}
    for folder, plan in plans.items():
        planned = plan.list_runs()
        if planned is None:
            yield (
                f"{folder} has no config.json that says what it planned: it is not there, or was "
                "edited; run its command again, and merge it again"
            )
            continue
        made = final | truncated if plan.searched else final
        runs = [run for run in planned if run not in made]
        axes = list_varying(case for case, _, _ in planned) if runs else []
        for case, repeat, sentinel in runs[:_SHOWN]:
            which = "sentinel" if sentinel else f"repeat {repeat}"
            yield f"{folder}: {case.label(axes)}, {which}"
        if len(runs) > _SHOWN:
            yield f"{folder}: {count(len(runs) - _SHOWN, 'more run')}"
        if runs:
            yield f"{folder}: run its command again, and merge it again"
