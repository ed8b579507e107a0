"""What reports say of planted sweeps, as data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.answers.render.table import NOTHING
from bench.report.document import SECTIONS, Report, build
from bench.results.store.rows import latest
from bench.results.study.runs import Result, Run, make_results, read_runs
from bench.results.study.sweeps import SweepFolder, read_sweep
from tests.planted.records import Row, write_sweep


def read_results(*sweeps: SweepFolder) -> tuple[list[Run], list[Result]]:
    """All runs of sweeps, and the results of those that count."""
    runs = read_runs(sweeps)
    return runs, make_results(latest(runs))


def read_report(folder: Path, rows: Iterable[Row]) -> Report:
    """The report on planted rows, in a new sweep of ``folder``."""
    return build([read_sweep(write_sweep(folder / "sweep", rows))])


def tell(report: Report, section: str, columns: str) -> list[str]:
    """What some columns of a section's tables hold, a line a row, without empty cells."""
    (asked,) = (one for one in SECTIONS if one.name == section)
    lines = []
    for table in asked.lay_out(asked.list_sheets(report)):
        places = {head.name: place for place, head in enumerate(table.heads)}
        for row in table.rows:
            texts = [row[places[name]].text for name in columns.split() if name in places]
            lines.append(" | ".join(text for text in texts if text not in ("", NOTHING)))
    return lines
