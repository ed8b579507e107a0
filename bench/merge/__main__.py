"""`python -m bench.merge FOLDER … --out FOLDER`: join the folders of shards, lanes or machines.

Each record stands in the joined folder once, whichever folders and however often they are joined.
What the sweeps planned and no folder has is named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.case import telling_axes
from bench.flags import Parser, command, describe, writable
from bench.merge.union import Source, claim, read_source, refuse_schemas, refuse_unlike, write_union
from bench.processes import leave
from bench.record import REPEATED
from bench.store.attempts import find_truncated, keep_cases, keep_latest
from bench.store.plans import Plan, list_lost_shards, parse_shard, read_plans
from bench.store.runs import read_cases, read_history
from bench.store.writer import Store
from bench.text import count

_SHOWN = 10
"""Runs that are named one by one of those that are missing."""


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.merge",
        description=describe(__doc__),
        epilog="It returns 1 where a shard is not among the folders, or a planned run has no final "
        "row. Folders that were joined before need not be given again.",
    )
    add = parser.add_argument
    add("folders", nargs="+", metavar="FOLDER", type=Path, help="a sweep's folder")
    add("--out", required=True, metavar="DIR", type=Path, help="the folder to join them in")
    add("--mix", action="store_true", help="join rows of different GPUs, versions or models")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Join folders; returns 0, 1 where a shard or a run that was planned is missing, 2 for a usage
    error."""
    given = build_parser().parse(argv)
    out: Path = given.out
    folders = {path.resolve(): path for path in given.folders}
    folders.pop(out.resolve(), None)  # it is joined in any case
    sources = [read_source(path) for path in folders.values()]
    # first, so that nothing is made for what cannot be joined
    refuse_schemas(sources)
    refuse_unlike(sources, given.mix)
    with writable("--out", out):
        claim(out)
        with Store(out):
            # read under its lock, and in today's schema, which opening it has seen to
            before = read_source(out)
            refuse_unlike([*sources, before], given.mix)
            union = write_union(out, [*sources, before])
    plans = read_plans(out)
    new = len(union.records) - len(before.records)
    print(
        f"{out}: {count(len(union.records), 'record')}, {new:,} of them new, of "
        f"{count(len(plans), 'folder')}"
    )
    cases = keep_cases(union.records)
    first = cases[cases["attempt"] == 1]
    if twice := len(first) - len(keep_latest(first)):
        print(
            f"note: {count(twice, 'run')} of the same case and repeat stand in several folders, "
            "and tables count the last of each; to see all, give the folders to bench.report "
            "instead",
            file=sys.stderr,
        )
    given_as = {str(path): str(given) for path, given in folders.items()}
    named = {given_as.get(name, name): plan for name, plan in plans.items()}
    lacks = list(describe_gaps(union, named))
    for line in lacks:
        print(f"missing: {line}", file=sys.stderr)
    return 1 if lacks else 0


def describe_gaps(union: Source, plans: Mapping[str, Plan]) -> Iterator[str]:
    """Say what the sweeps planned, by the folder of each, and ``union`` does not have, a line
    each."""
    shards = [parse_shard(plan.shard) for plan in plans.values() if plan.shard]
    for shard in list_lost_shards(shards):
        yield f"shard {shard}; run its command, and merge its folder"
    history, cut = read_history(union.records), union.records[find_truncated(union.records)]
    final = {run for run, past in history.items() if past.status not in REPEATED}
    # what a search ended early it does not make again
    repeats = map(int, cut["repeat"])
    truncated = {(case, n, False) for case, n in zip(read_cases(cut), repeats, strict=True)}
    for folder, plan in plans.items():
        planned = plan.list_runs()
        if planned is None:
            yield f"{folder} has no config.json that says what it planned"
            continue
        made = final | truncated if plan.searched else final
        runs = [run for run in planned if run not in made]
        axes = telling_axes(case for case, _, _ in planned) if runs else []
        for case, repeat, sentinel in runs[:_SHOWN]:
            which = "sentinel" if sentinel else f"repeat {repeat}"
            yield f"{folder}: {case.label(axes)}, {which}"
        if len(runs) > _SHOWN:
            yield f"{folder}: {count(len(runs) - _SHOWN, 'more run')}"
        if runs:
            yield f"{folder}: run its command again, and merge it again"


if __name__ == "__main__":
    leave(main())
