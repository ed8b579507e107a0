"""Reports on records: tables, figures, one page. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.schema.flags import command


@command
def print_report(folders: Sequence[str]) -> int:
    """Print the first screen of some sweeps. An error is printed as that of a command is: it does
    not change how the caller ends, which has measured the sweeps."""
    from bench.answers.render.terminal import show
    from bench.report.document import build
    from bench.results.study.sweeps import read_sweeps

    show(build(read_sweeps([*map(Path, folders)])))
    return 0
