"""The terminal report, redrawn as a sweep's records grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from bench.report.model import Report
from bench.store.reader import records_file

POLL_S = 1.0


def watch(build: Callable[[], Report], paths: Sequence[Path]) -> NoReturn:
    """Draw the report whenever a records file has changed, until interrupted.

    Raises:
        UsageError: the records cannot be read, or are gone.
        KeyboardInterrupt: the user has seen enough.
    """
    from rich.console import Console

    from bench.report.text import draw

    console, drawn = Console(), None
    while True:
        stamps = [records_file(path).stat().st_mtime_ns for path in paths]
        if stamps != drawn:
            report = build()
            console.clear()  # only once the new one is ready: no blank screen in between
            draw(report, console)
            console.print(f"records: {len(report.records):,}; Ctrl-C ends", style="dim")
            drawn = stamps
        time.sleep(POLL_S)
