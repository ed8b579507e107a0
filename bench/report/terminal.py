"""The report on standard output: a first screen, or all of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.flags import command

if TYPE_CHECKING:
    from bench.report.document import Report


@command
def print_report(folders: Sequence[str]) -> int:
    """Print the first screen of some sweeps. As of a command, an error becomes a line: the caller,
    which has measured them, ends as it would."""
    from bench.report.document import build
    from bench.study.sweeps import read_sweeps

    show(build(read_sweeps([*map(Path, folders)])))
    return 0


def show(report: Report, full: bool = False) -> None:
    from bench.render.text import draw, render

    if not sys.stdout.isatty():
        sys.stdout.write(render(report, full))
        return
    from rich.console import Console

    draw(report, Console(), full)
