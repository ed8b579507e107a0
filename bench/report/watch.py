"""The terminal report, redrawn as a sweep's records grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.report.document import Report
from bench.store.reader import records_file

POLL_S = 1.0


def follow(paths: Sequence[Path]) -> Iterator[None]:
    """Yield at once, and again whenever a records file has changed. Raises UsageError: there are no
    records, or they are gone."""
    seen = None
    while True:
        files = [records_file(path).stat() for path in paths]
        stamps = [(file.st_mtime_ns, file.st_size) for file in files]
        if stamps != seen:
            seen = stamps
            yield
        time.sleep(POLL_S)


def watch(build: Callable[[], Report], paths: Sequence[Path], full: bool = False) -> None:
    """Draw the report whenever a records file has changed, until the user interrupts it. Raises
    UsageError: the records cannot be read, or are gone."""
    from rich.console import Console

    from bench.render.text import draw

    console = Console()
    for _ in follow(paths):
        report = build()
        with console.capture() as drawn:
            draw(report, console, full)
        console.clear()  # only once the new one is ready: no blank screen in between
        console.file.write(drawn.get())
        console.print(f"records: {len(report.records):,}; Ctrl-C ends", style="dim")
