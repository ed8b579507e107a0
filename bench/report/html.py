"""The report as one self-contained page, for a screen of any width and for print."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from bench.case import AXES, NAMED, format_value
from bench.questions.loss_scales import summarize_scale_map
from bench.questions.notes import join_notes
from bench.questions.scale_drawing import draw_scale_map
from bench.render.model import Table
from bench.render.palette import COLOURS
from bench.render.text import group_doubts
from bench.render.units import count_in, find_units
from bench.report.document import Report
from bench.report.figures.panels import draw_figures, inline, tabulate
from bench.report.figures.sketches import CHANGES, list_sketches
from bench.store.attempts import find_truncated
from bench.study.axes import name_axis
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.study.summaries import latest
from bench.text import ESTIMATE, clean

TEMPLATES = Path(__file__).with_name("templates")


def render(report: Report) -> str:
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures, units = draw_figures(report), find_units(report.cases)
    templates.filters |= {
        "clean": clean,
        "count_axes": count_axes,
        "count_in": lambda text: count_in(text, units),
        "inline": inline,
        "keep_whole": keep_whole,
        "tabulate": lambda panel, figure: tabulate(figure, panel),
    }
    drawn = {figure.name: figure for figure in figures}
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
        changes=[figure for figure in rest if figure.name == CHANGES],
        figures=[figure for figure in rest if figure.name != CHANGES],
        undrawn=[sketch.title for sketch in list_sketches(report) if sketch.name not in drawn],
        maps=[
            (inline(draw_scale_map(scales)), summarize_scale_map(scales))
            for scales in report.scale_maps
        ],
        constants=_constants(report.records),
        records=_embed(_records(report)),
        links=[(sweep.name, _link(sweep.file, report.home)) for sweep in report.sweeps],
        colours=COLOURS,
        glossary=[q for q in QUANTITIES.values() if q.help != q.label],
    )


LEADS = ("gpu-scaling", "images-per-s", CHANGES)
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


def _embed(data: Any) -> str:
    """Return JSON that is safe within a script element."""
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
    """Return all records as columns: ``label``, whether ``number``, and the cells as text. Text
    columns have ``names`` and, per row, an index into them, as most repeat. Columns with ``more``
    are shown on demand: a page cannot be wide enough for all."""
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
    numbers = []
    for name in (*_SHOWN, *_MORE):
        quantity = QUANTITIES[name]
        values = rows[name].mask(estimated & quantity.learnt)
        if values.notna().any():
            numbers.append(
                {
                    "label": count_in(quantity.title, units),
                    "number": True,
                    "more": name in _MORE,
                    "help": count_in(quantity.help, units),
                    "cells": [
                        ESTIMATE * (quantity.whole and part) + quantity.write(value)
                        if is_number(value)
                        else ""
                        for part, value in zip(estimated.tolist(), values.tolist(), strict=True)
                    ],
                }
            )
    at = 1 + next(i for i, column in enumerate(columns) if column["label"] == "remarks")
    return columns[:at] + numbers + columns[at:]


def _text_columns(rows: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Yield machine, axes and outcome, without what is the same in every row (see `_constants`).
    The share of an epoch that was measured is an axis like any other here."""
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
    """Return the axes with the same value in every row, as one line."""
    same = {name: rows[name].tolist()[0] for name in _OTHERS if rows[name].nunique() == 1}
    told = {name_axis(name): format_value(value) for name, value in same.items()}
    return ", ".join(f"{name} {value}" for name, value in told.items() if value)


def _remarks(rows: pd.DataFrame) -> pd.Series:
    remarks = rows["status"].map(lambda _: "")
    facts = {doubt.remark: rows[doubt.name] for doubt in DOUBTS.values()}
    facts["inferred"] = rows["inferred"].astype(bool)
    aside = {
        "sentinel": rows["sentinel"].astype(bool),
        "probe": rows["probe"].astype(bool),
        "truncated": find_truncated(rows),
        "anchor of a lane": rows["anchor"] != "",
    }
    superseded = ~rows.index.to_series().isin(latest(rows).index)
    for held in aside.values():
        superseded &= ~held
    for remark, holds in {**facts, **aside, "superseded by a later attempt": superseded}.items():
        apart = remarks.where(remarks == "", remarks + ", ")
        remarks = remarks.where(~holds, apart + remark)
    return remarks
