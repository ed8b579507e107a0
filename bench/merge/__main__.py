"""`python -m bench.merge FOLDER … --out FOLDER`: join the folders of shards, lanes or machines.

Each record appears once in the joined folder, however often folders are joined. Planned runs that
no folder has are listed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.flags import Parser, command, describe
from bench.merge.gaps import count_duplicates, describe_gaps, list_lost
from bench.merge.union import join_folders
from bench.processes import leave
from bench.store.cells import CONFIG
from bench.store.plans import read_plans
from bench.text import count


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.merge",
        description=describe(__doc__),
        epilog="Return code 1: a shard is missing, or a planned run has no final row. Folders that "
        "were already joined need not be given again.",
    )
    add = parser.add_argument
    add("folders", nargs="+", metavar="FOLDER", type=Path, help="a sweep's folder")
    add("--out", required=True, metavar="DIR", type=Path, help="the folder to join them in")
    add("--mix", action="store_true", help="join rows of different GPUs, versions or models")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Join folders. Return 0; 1 if a planned shard or run is missing; 2 for a usage error."""
    given = build_parser().parse(argv)
    before, union = join_folders(given.folders, given.out, given.mix)
    plans, new = read_plans(given.out), len(union.records) - len(before.records)
    print(
        f"{given.out}: {count(len(union.records), 'record')}, {new:,} of them new, of "
        f"{count(len(plans), 'folder')}"
    )
    if twice := count_duplicates(union):
        print(
            f"note: {count(twice, 'run')} of the same case and repeat stand in several folders, "
            "and tables count the last of each; to see all, give the folders to bench.report "
            "instead",
            file=sys.stderr,
        )
    if forgotten := list_lost(before, plans, given.folders):
        print(
            f"note: {given.out / CONFIG} was edited and could not be read, so the commands and "
            f"environments of {', '.join(forgotten)} are not in it any more; merge these again",
            file=sys.stderr,
        )
    given_as = {str(path.resolve()): str(path) for path in given.folders}
    named = {given_as.get(name, name): plan for name, plan in plans.items()}
    lacks = list(describe_gaps(union, named))
    for line in lacks:
        print(f"missing: {line}", file=sys.stderr)
    return 1 if lacks else 0


if __name__ == "__main__":
    leave(main())
