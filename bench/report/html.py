"""The report as one self-contained page, for a screen of any width and for print."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from bench.case import AXES, NAMED, format_value
from bench.render.table import COLOURS, Table, count_in, find_units
from bench.render.text import group_doubts
from bench.report.document import Report
from bench.report.figures import draw_figures, inline, list_sketches, tabulate
from bench.store.reader import find_records
from bench.study.axes import name_axis
from bench.study.quantities import QUANTITIES
from bench.study.runs import Run
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
    figures, units = draw_figures(report), find_units(report.results)
    templates.filters |= {
        "clean": clean,
        "count_axes": count_axes,
        "count_in": lambda text: count_in(text, units),
        "inline": inline,
        "keep_whole": keep_whole,
        "tabulate": tabulate,
    }
    drawn = {figure.sketch.name: figure for figure in figures}
    leads = (*LEADS, *drawn) if report.pictured else ()
    lead = next((drawn[name] for name in leads if name in drawn), None)
    rest = [figure for figure in figures if figure is not lead]
    held = Counter[str]()
    anchors = []  # the name of each table, numbered from its second use on
    for table in report.tables:
        held[table.name] += 1
        anchors.append(f"table-{table.name}" + f"-{held[table.name]}" * (held[table.name] > 1))
    return templates.get_template("page.html").render(
        report=report,
        lead=lead,
        doubts=group_doubts(report.warnings),
        tables=list(zip(anchors, report.tables, strict=True)),
        figures=rest,
        undrawn=[sketch.title for sketch in list_sketches(report) if sketch.name not in drawn],
        constants=_constants(report.runs),
        links=[
            (sweep.name, _link(file, report.home))
            for sweep in report.sweeps
            for file in find_records(sweep.path)
        ],
        colours=COLOURS,
        glossary=[q for q in QUANTITIES.values() if q.help != q.label],
    )


LEADS = ("gpu-scaling", "images-per-s")
"""Candidates for a page's opening figure: the first with data, else the first figure."""


def count_axes(table: Table) -> int:
    """Count the first columns, which name the rows."""
    return sum(1 for _ in takewhile(lambda head: head.name in AXES, table.heads))


def keep_whole(text: str) -> Markup:
    """Escape a text whose flags and shares must not be broken over lines: ``--`` at the end of a
    line reads as a dash, and ``%`` at the start of one as nothing."""
    whole = _SHARE.sub("\N{NO-BREAK SPACE}", str(escape(text)))
    return Markup(_FLAG.sub(r'<span class="flag">\g<0></span>', whole))


_SHARE = re.compile(r"(?<=\d) (?=%)")
_FLAG = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def _link(file: Path, home: Path) -> str:
    try:
        return quote(Path(os.path.relpath(file.resolve(), home)).as_posix())
    except ValueError:  # on another drive
        return file.resolve().as_uri()


_OTHERS = tuple(name for name in AXES if name not in NAMED)


def _constants(runs: Sequence[Run]) -> str:
    """Return the axes with the same value in every run, as one line."""
    held = {name: {getattr(run, name) for run in runs} for name in _OTHERS}
    told = {name_axis(n): format_value(*same) for n, same in held.items() if len(same) == 1}
    return ", ".join(f"{name} {value}" for name, value in told.items() if value)
