"""The report as one self-contained page, for a screen of any width and for print."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bench.case import AXES, NAMED, format_value
from bench.questions.loss_scales import summarize_scale_map
from bench.questions.notes import join_notes
from bench.questions.scale_drawing import draw_scale_map
from bench.render.cells import ESTIMATE
from bench.render.model import Table
from bench.render.palette import COLOURS
from bench.render.text import group_doubts
from bench.render.units import count_in, find_units
from bench.report.document import Report
from bench.report.figures.panels import Figure, draw_figures, inline, tabulate
from bench.report.figures.sketches import CHANGES, SKETCHES
from bench.store.attempts import find_truncated
from bench.study.axes import name_axis
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, Quantity, is_number
from bench.study.summaries import latest
from bench.text import clean

if TYPE_CHECKING:
    import pandas as pd
    from markupsafe import Markup

TEMPLATES = Path(__file__).with_name("templates")


def render(report: Report) -> str:
    """The report as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "clean": clean,
        "count_axes": count_axes,
        "inline": inline,
        "keep_whole": keep_whole,
        "tabulate": lambda panel, figure: tabulate(figure, panel),
    }
    figures, units = draw_figures(report), find_units(report.cases)
    lead = choose_lead(figures)
    rest = [figure for figure in figures if figure is not lead]
    drawn = {figure.name for figure in figures}
    return templates.get_template("page.html").render(
        report=report,
        lead=lead,
        doubts=group_doubts(report.warnings),
        tables=list(zip(_name_anchors(report.tables), report.tables, strict=True)),
        changes=[figure for figure in rest if figure.name == CHANGES],
        figures=[figure for figure in rest if figure.name != CHANGES],
        undrawn=[count_in(s.title, units) for s in SKETCHES if s.name not in drawn],
        maps=[
            (inline(draw_scale_map(scales)), summarize_scale_map(scales))
            for scales in report.scale_maps
        ],
        constants=_constants(report.records),
        records=_embed(_records(report)),
        links=[(sweep.name, _link(sweep.file, report.home)) for sweep in report.sweeps],
        colours=COLOURS,
        glossary=[
            replace(
                q,
                label=count_in(q.label, units),
                unit=count_in(q.unit, units),
                help=count_in(q.help, units),
            )
            for q in QUANTITIES.values()
            if q.help != q.label
        ],
    )


LEADS = ("gpu-scaling", "epoch-time", CHANGES)
"""The figures that a page opens with, the first that the records have data for."""


def choose_lead(figures: Sequence[Figure]) -> Figure | None:
    """The figure that a page opens with: of `LEADS`, else the first."""
    by_name = {figure.name: figure for figure in figures}
    return next((by_name[name] for name in (*LEADS, *by_name) if name in by_name), None)


def _name_anchors(tables: Iterable[Table]) -> Iterator[str]:
    """An id for each table: its name, with a number where others before have it too."""
    held: Counter[str] = Counter()
    for table in tables:
        held[table.name] += 1
        number = f"-{held[table.name]}" if held[table.name] > 1 else ""
        yield f"table-{table.name}{number}"


def count_axes(table: Table) -> int:
    """How many of its first columns name its rows."""
    return sum(1 for _ in takewhile(lambda head: head.name in AXES, table.heads))


def keep_whole(text: str) -> Markup:
    """Escape a text whose flags and shares are not broken over lines.

    ``--`` at a line's end reads as a dash, and ``%`` at its beginning as nothing.
    """
    from markupsafe import Markup, escape

    whole = _SHARE.sub("\N{NO-BREAK SPACE}", str(escape(text)))
    return Markup(_FLAG.sub(r'<span class="flag">\g<0></span>', whole))


_SHARE = re.compile(r"(?<=\d) (?=%)")
_FLAG = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def _link(file: Path, home: Path) -> str:
    try:
        return quote(Path(os.path.relpath(file.resolve(), home)).as_posix())
    except ValueError:  # on another drive
        return file.resolve().as_uri()


def _embed(data: Any) -> str:
    """JSON that may stand within a script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


_SHOWN = ("epoch_time_s", "images_per_s", "memory_bytes", "train_loss", "train_accuracy")

_MORE = (
    "test_accuracy",
    "overflow_steps",
    "energy_per_epoch_j",
    "images_per_j",
    "achieved_flops",
    "peak_share",
    "measured_share",
    "traffic",
    "copy_share",
    "fragmentation",
    "step_time_median_s",
    "step_noise",
    "setup_time_s",
    "warmup_time_s",
)


def _records(report: Report) -> list[dict[str, Any]]:
    """Every record as columns: ``label``, whether ``number``, and its cells as text.

    Text columns are ``names`` and, per row, an index into them: most repeat. Columns with ``more``
    are shown when asked for: a page cannot be wide enough for all.
    """
    rows = report.records
    columns = []
    for label, cells in _text_columns(rows):
        codes, names = cells.factorize()
        columns.append(
            {
                "label": label,
                "number": label in ("batch size", "repeat"),
                "more": label in ("notes", "repeat"),
                "names": [clean(str(name)) for name in names],
                "cells": codes.tolist(),
            }
        )
    estimated, units = rows["part"] < 1, find_units(rows)
    numbers = [
        {
            "label": count_in(q.title, units),
            "number": True,
            "more": name in _MORE,
            "help": count_in(q.help, units),
            "cells": _write(rows[name], q, estimated),
        }
        for name in (*_SHOWN, *_MORE)
        for q in [QUANTITIES[name]]
        if rows.loc[~(estimated & q.learnt), name].notna().any()
    ]
    at = 1 + next(i for i, column in enumerate(columns) if column["label"] == "remarks")
    return columns[:at] + numbers + columns[at:]


def _write(values: pd.Series, quantity: Quantity, estimated: pd.Series) -> list[str]:
    if quantity.learnt:
        values = values.mask(estimated)
    marks = [ESTIMATE if quantity.whole and part else "" for part in estimated.tolist()]
    return [
        mark + quantity.write(value) if is_number(value) else ""
        for mark, value in zip(marks, values.tolist(), strict=True)
    ]


def _text_columns(rows: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Machine, axes and outcome, without what is the same in every row (see `_constants`).

    How much of an epoch was measured is an axis here like any other.
    """
    if rows["machine"].nunique() > 1:
        yield "machine", rows["machine"]
    for name in NAMED:
        yield name_axis(name), rows[name]
    yield "status", rows["status"]
    yield "remarks", _remarks(rows)
    if (rows["reason"] != "").any():
        yield "reason", rows["reason"]
    if ((notes := join_notes(rows)) != "").any():
        yield "notes", notes
    yield "repeat", rows["repeat"]
    for name in _OTHERS:
        if rows[name].nunique() > 1:
            yield name_axis(name), rows[name].astype(object).map(format_value)
    if rows["sweep"].nunique() > 1:
        yield "sweep", rows["sweep"]


_OTHERS = tuple(name for name in AXES if name not in NAMED)


def _constants(rows: pd.DataFrame) -> str:
    """The axes that have one value, the same in every row, as one line."""
    same = {name: rows[name].tolist()[0] for name in _OTHERS if rows[name].nunique() == 1}
    told = {name_axis(name): format_value(value) for name, value in same.items()}
    return ", ".join(f"{name} {value}" for name, value in told.items() if value)


def _remarks(rows: pd.DataFrame) -> pd.Series:
    counted = latest(rows).index
    remarks = rows["status"].map(lambda _: "")
    sentinel, probe = rows["sentinel"].astype(bool), rows["probe"].astype(bool)
    truncated = find_truncated(rows)
    facts = {doubt.remark: rows[doubt.name] for doubt in DOUBTS.values()}
    facts["inferred"] = rows["inferred"].astype(bool)
    facts["sentinel"], facts["probe"], facts["truncated"] = sentinel, probe, truncated
    facts["anchor of a lane"] = anchor = rows["anchor"] != ""
    aside = sentinel | probe | truncated | anchor
    superseded = ~rows.index.to_series().isin(counted) & ~aside
    facts["superseded by a later attempt"] = superseded
    for remark, holds in facts.items():
        apart = remarks.where(remarks == "", remarks + ", ")
        remarks = remarks.where(~holds, apart + remark)
    return remarks
