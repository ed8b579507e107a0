"""`python -m bench.export SWEEP --to TRACKER`: give records to an experiment tracker.

A record that was exported before is left as it is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from bench.errors import UsageError, choose
from bench.export.runs import Run, read_runs
from bench.export.trackers import TRACKERS, Tracker, say_errors
from bench.flags import Parser, command, describe, hold
from bench.origin import describe_origin
from bench.processes import leave
from bench.report.terminal import follow
from bench.store.reader import records_file
from bench.study.sweeps import read_sweeps
from bench.text import count

PROJECT = "gpu-precision-bench"
OUT = Path("trackers")
_PROJECT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")


def build_parser() -> Parser:
    lines = "\n".join(f"  {name:13}{kind.help}" for name, kind in TRACKERS.items())
    parser = Parser(
        prog="python -m bench.export",
        description=describe(__doc__),
        epilog=f"trackers:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sweeps", nargs="+", type=Path, metavar="SWEEP", help="a sweep's folder or records file")
    add("--to", required=True, metavar="TRACKER", help="see below")
    add("--out", type=Path, metavar="DIR", help=f"folder to write to (default: {OUT}/TRACKER)")
    add(
        "--project",
        default=PROJECT,
        metavar="NAME",
        help=f"project, or experiment, that the runs are put in (default: {PROJECT})",
    )
    add("--watch", action="store_true", help="follow a running sweep, until Ctrl-C")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Export. Returns 0, or 2 for a usage error."""
    given = build_parser().parse(argv)
    kind = choose("--to", given.to, TRACKERS)
    if not _PROJECT.fullmatch(given.project):
        raise UsageError(
            f"--project {given.project[:70]!r}: a name is at most 64 letters, digits and ._- "
            "and starts with a letter or a digit"
        )
    for path in given.sweeps:
        records_file(path)
    if missing := [package for package in kind.packages if find_spec(package) is None]:
        raise UsageError(
            f"--to {given.to}: {' and '.join(missing)} not installed; "
            f"pip install {kind.packages[0]}"
        )
    folder = given.out or OUT / given.to
    # two exports at once would write each record twice
    busy = f"--out {folder}: another export writes there; end it, or choose another --out"
    with ExitStack() as held:
        with say_errors(given.to, folder):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold(folder / ".lock", busy))
            module, _, name = kind.place.partition(":")
            tracker: Tracker = getattr(import_module(module), name)(folder, given.project)
            known = tracker.find_exported()

        def export() -> Iterator[Run]:
            for sweep in read_sweeps(given.sweeps):
                for run in read_runs(sweep, known):
                    with say_errors(given.to, folder):
                        tracker.export(run)
                    known.add(run.record_id)
                    yield run

        there = len(known)
        new = list(export())
        for line in describe_origin(str(run.outcome["executor"]) for run in new):
            print(line)
        print(f"{count(len(new), 'record')} exported to {folder}, which had {there:,} before")
        print(f"to see them: {tracker.hint}", flush=True)
        if given.watch:
            print("waiting for more records; Ctrl-C ends", flush=True)
            for _ in follow(given.sweeps):
                for run in export():
                    print(f"exported: {run.name}", flush=True)
    return 0


if __name__ == "__main__":
    leave(main())
