"""`python -m bench.sweep`: train every case once and record time, memory and learning."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.flags import command
from bench.processes import leave
from bench.report import print_report
from bench.sweep.execution import run_sweep
from bench.sweep.options import parse_arguments, plan_cases
from bench.sweep.preview import preview, print_registries


@command
def main(argv: Sequence[str]) -> int:
    """Run a sweep.

    Returns 0; 1 if the disk is full or nothing could be measured; 2 for a usage error; 130 or 143
    if it was stopped.
    """
    options = parse_arguments(argv)
    if options.list:
        return print_registries()
    plan = plan_cases(options)
    if options.dry_run:
        return preview(plan, options)
    done = run_sweep(plan, options)
    for line in done.unsized:
        print(f"warning: no batch size for {line}", file=sys.stderr)
    if done.left:
        print(done.left, file=sys.stderr)
    elif options.report:
        print_report([str(done.folder)])
    if done.stopped:
        return 128 + done.stopped
    return 1 if done.left or done.failed else 0


if __name__ == "__main__":
    leave(main())
