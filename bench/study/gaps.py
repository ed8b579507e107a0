"""Planned runs without a row, because a table that lacks rows looks like a complete one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from bench.case import Case, list_varying
from bench.record import REPEATED
from bench.store.plans import Plan, leave_out_known, list_lost_shards, parse_shard
from bench.store.runs import Run, list_served, read_cases, read_history
from bench.text import count, name_first

if TYPE_CHECKING:
    import pandas as pd

_NAMED = 4  # missing runs or shards named in a message


def describe_gaps(
    name: str, rows: pd.DataFrame, plans: Sequence[Plan]
) -> Iterator[tuple[str, str]]:
    """Describe missing shards of a sweep, and planned runs without a row. Each gap is a sentence on
    what is missing and one on how to fix it.

    A row of any environment counts; only the sweep itself reruns those of another environment.
    ``rows`` are the records of the sweep, ``plans`` its plan or those of its shards.
    """
    shards = [parse_shard(plan.shard) for plan in plans if plan.shard]
    if lost := list_lost_shards(shards):
        names = name_first([f"shard {shard}" for shard in lost], _NAMED, "; ")
        yield (
            f"{name} is without {names}.",
            "Run what is missing with --out beside the others, and give the folder that holds all.",
        )
    planned = dict.fromkeys(run for plan in plans for run in plan.list_runs() or ())
    if not planned:
        return
    if any(case.until for case, _, _ in planned):
        planned = dict.fromkeys(leave_out_known(planned, read_history(rows)))
    # the notice "No result" reports other runs that did not end
    cut = rows["sentinel"].astype(bool) & rows["status"].isin(list(REPEATED))
    rows = rows[~rows["probe"].astype(bool) & ~cut]
    made = zip(read_cases(rows), rows["repeat"].tolist(), rows["sentinel"].tolist(), strict=True)
    done = {served for run in made for served in list_served(run)}
    left = [run for run in planned if run not in done]
    if not left:
        return
    known = {case for case, _, _ in done}
    axes = list_varying(known | {case for case, _, _ in planned})
    names = name_first(
        list(dict.fromkeys(_name_run(run, axes, known) for run in left)), _NAMED, "; "
    )
    runs = f"{len(left):,} of the {count(len(planned), 'run')}"
    yield (
        f"{name} has no row of {runs if len(planned) > 1 else 'the only run'} that its last "
        f"command planned ({names}).",
        "Run the last command of the sweep again, unless it still runs.",
    )


def _name_run(run: Run, axes: Iterable[str], known: Collection[Case]) -> str:
    case, repeat, sentinel = run
    which = "sentinel" if sentinel else f"repeat {repeat}"
    return f"{case.label(axes)}, {which}" if case in known else case.label(axes)
