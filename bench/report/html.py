"""The report as one self-contained page, for a screen of any width and for print."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from bench.answers.render.table import Head
from bench.answers.render.terminal import list_warnings
from bench.base.text import clean
from bench.report.document import Report
from bench.report.figures import COLOURS, draw, inline, list_figures, list_panels
from bench.results.store.reader import find_records

TEMPLATES = Path(__file__).with_name("templates")


def render(report: Report) -> str:
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"clean": clean, "prose": prose, "align": align}
    templates.globals["zip"] = zip
    say = report.wording.say
    names = [table.name for table in report.tables]
    anchors = (f"table-{name}" + f"-{i}" * (name in names[:i]) for i, name in enumerate(names))
    return templates.get_template("page.html").render(
        report=report,
        say=say,
        figures=[
            (kind, [panel.title for panel in panels], inline(draw(kind, panels, 1, say), kind.name))
            for kind, panels in list_figures(list_panels(report))
        ],
        warnings=list_warnings(report.warnings),
        tables=list(zip(anchors, report.tables, strict=True)),
        links=[
            (sweep.name, quote(Path(os.path.relpath(file.resolve(), report.home)).as_posix()))
            for sweep in report.sweeps
            for file in find_records(sweep.path)
        ],
        colours=COLOURS,
    )


def align(head: Head) -> str:
    """Return the class of the cells below a head, as an attribute."""
    kind = "n" if head.number else "long" if head.wrap else ""
    return Markup(f' class="{kind}"' if kind else "")


_WHOLE = re.compile(r"(?<!\S)--[a-z][a-z-]*|≈?\d[\d.,]* [%×°µA-Za-z]\S{,11}(?!\S)")


def prose(text: str) -> Markup:
    """Escape a text whose flags are not broken over lines, nor a number and its unit, which is the
    next word: ``--`` at the end of a line reads as a dash, and ``%`` at the start of one as
    nothing. A space that does not break would be copied with a command."""
    return Markup(_WHOLE.sub(r"<span>\g<0></span>", str(escape(clean(text)))))
