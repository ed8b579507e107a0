"""`python -m bench.search`: find the best settings for training, ending poorer trials early.

Trials are cases of several epochs, drawn over learning rate, loss scale, batch size or any other
axis, and run like those of a sweep. After some epochs the poorer ones end, by ASHA; see
docs/learning.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.base.plain import dump_document
from bench.base.processes import leave
from bench.base.text import count
from bench.results.store.reader import read_beside, read_rows
from bench.schema.command import ask_for_seed
from bench.schema.flags import command
from bench.schema.goals import Halving
from bench.schema.record import MEASURED, EpochRow
from bench.search.options import describe_search, parse_arguments
from bench.search.trials import run_search

_WIDTH = 120  # columns if there is no terminal and COLUMNS is not set


@command
def main(argv: Sequence[str]) -> int:
    """Search for the best settings.

    Returns 0; 1 if no trial was measured or the disk is full; 2 for a usage error; 130 or 143 if it
    was stopped.
    """
    asked = parse_arguments(argv, __doc__)
    if asked.options.dry_run:
        print(*describe_search(asked), sep="\n")
        return 0
    trials, loop = run_search(asked)
    measured = print_findings(loop.out, trials.halving, asked.format)
    go_on = f"to continue: {loop.resume}"
    if loop.stopped:
        print(f"stopped; {go_on}", file=sys.stderr)
        return 128 + loop.stopped
    if trials.waiting:
        print(f"{count(trials.waiting, 'trial')} left; {go_on}", file=sys.stderr)
    return 0 if measured else 1


def print_findings(out: Path, halving: Halving, format: str) -> bool:
    """Print trials and how to confirm the best. Return whether any trial was measured."""
    from bench.answers.halving import SEARCH, confirm, lay_out_search, tabulate_trials
    from bench.answers.render.terminal import draw_table, open_console

    rows, epochs = read_rows(out), read_beside(out, EpochRow)
    measured = any(row.status in MEASURED for row in rows)
    if format == "json":
        found = lay_out_search(rows, epochs, halving, out)
        print(dump_document("search", 1, found), end="")
        return measured
    console = open_console(_WIDTH)
    # the commands that confirm the best are printed below
    for table in SEARCH.lay_out(tabulate_trials(rows, epochs, halving, how="")):
        draw_table(table, console)
        console.print()
    if commands := confirm(rows, epochs, halving, out):
        seed = ask_for_seed(rows[0].command)
        print(f"Confirm the best on seeds that did not choose them{seed}, then compare:")
        for command in commands:
            print(f"  {command}")
    return measured


if __name__ == "__main__":
    leave(main())
