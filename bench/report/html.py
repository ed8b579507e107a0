"""The report as one self-contained page, for a screen of any width and for print."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.render.table import COLOURS
from bench.render.text import list_doubts
from bench.report.document import Report
from bench.report.figures import draw_figures, inline
from bench.store.reader import find_records
from bench.text import clean

TEMPLATES = Path(__file__).with_name("templates")


def render(report: Report) -> str:
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"clean": clean, "inline": inline}
    figures = draw_figures(report)
    lead = figures[0] if figures and report.pictured else None
    names = [table.name for table in report.tables]
    anchors = (f"table-{name}" + f"-{i}" * (name in names[:i]) for i, name in enumerate(names))
    return templates.get_template("page.html").render(
        report=report,
        lead=lead,
        doubts=list_doubts(report.warnings),
        tables=list(zip(anchors, report.tables, strict=True)),
        figures=[figure for figure in figures if figure is not lead],
        links=[
            (sweep.name, _link(file, report.home))
            for sweep in report.sweeps
            for file in find_records(sweep.path)
        ],
        colours=COLOURS,
    )


def _link(file: Path, home: Path) -> str:
    try:
        return quote(Path(os.path.relpath(file.resolve(), home)).as_posix())
    except ValueError:  # on another drive
        return file.resolve().as_uri()
