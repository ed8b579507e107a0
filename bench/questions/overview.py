"""All cases with their numbers, also beside other machines and published figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from bench.axis import Trait
from bench.case import Case, list_affecting
from bench.questions import notes
from bench.questions.report_data import ReportData
from bench.render.cells import Row, iterate, name_spread, remarks
from bench.render.model import NOTHING
from bench.render.section import (
    Column,
    Section,
    Sheet,
    axis_column,
    join,
    quantity_column,
)
from bench.study import axes
from bench.study.axes import MACHINE, Machines, name_setting, name_value, sort_cases
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES
from bench.text import GIB, count, write_number

if TYPE_CHECKING:
    import pandas as pd

FEW_AXES = 3  # most columns of axes with which the overview has room for the memory saved

HEADINGS = (MACHINE, "model", "dataset", "start")
"""Axes shown above their rows, if other axes distinguish these rows: a path of 60 characters in a
column left no room for loss and memory in a width of 100."""

EMPTY = (NOTHING, "", "0")


def _tabulate_cases(found: ReportData) -> Iterator[Sheet]:
    yield lay_out_cases(found, found.cases, f"Overview: {count(len(found.cases), 'case')}")


def lay_out_cases(found: ReportData, cases: pd.DataFrame, title: str) -> Sheet:
    """Return the table of some cases, a row each, with all that was measured of it."""
    order, machines = found.order, found.machines
    word = "synthetic " if (cases["dataset"] == "synthetic").all() else ""
    seconds = cases["start_time_s"]
    slow = len(seconds.dropna()) and seconds.max() > max(2 * seconds.min(), seconds.min() + 1)
    headings = _choose_headings(cases, order, found.by)
    cases = sort_cases(cases, headings)
    columns = [axis for axis in order if axis not in headings] or ["precision", "batch_size"]
    several: Column[Row] = Column(
        "global_batch", "global batch", "items of a step of the optimizer, of all GPUs together",
        lambda row: int(row.batch_size * row.world_size), always=True,
    )  # fmt: skip
    time = QUANTITIES["epoch_time_s"].title
    # the effects show these too, and the table is full
    saved = [quantity_column("memory_saved", keep=2), quantity_column("tensors_saved", keep=1)]
    return Sheet(
        title,
        [
            *(axis_column(axis, machines) for axis in columns),
            *([several] if "world_size" in columns else []),
            replace(quantity_column("epoch_time_s", always=True), label=time + name_spread(cases)),
            quantity_column("images_per_s", keep=5),
            quantity_column("speedup", label="speed-up over fp32", keep=7),
            quantity_column("memory_bytes", keep=8),
            *(saved if len(columns) <= FEW_AXES else []),
            quantity_column("train_loss", label=f"{word}loss", keep=8),
            quantity_column("train_accuracy", label=f"{word}accuracy", keep=3),
            quantity_column("test_accuracy", label=f"{word}test accuracy", keep=6),
            quantity_column("overflow_steps", keep=6),
            quantity_column("energy_per_epoch_j", keep=4),
            Column("start_time_s", "start-up (s)",
                   "set-up, and the slowest first steps of all repeats",
                   lambda row: row.start_time_s if slow else None,
                   write=write_number, better="lower", keep=3),
            Column("remarks", "remarks", "what to know before believing the row",
                   lambda row: remarks(row, found.below), wrap=True),
        ],
        list(iterate(cases)),
        groups=_find_groups(cases, order, headings, machines),
        empty=EMPTY,
    )  # fmt: skip


def _choose_headings(cases: pd.DataFrame, order: Sequence[str], by: str) -> tuple[str, ...]:
    """Choose the axes shown once above their rows: ``by``, or else machines, networks and files. At
    least one axis is left for the columns."""
    if by in order:
        return (by,)
    headings = [axis for axis in order if axis in HEADINGS][: len(order) - 1]
    # axes that are constant under each heading become part of it
    places = [axes.rank(cases, axis) for axis in headings]
    for axis in order if headings else ():
        alike = axis in headings or axes.rank(cases, axis).groupby(places).nunique().max() == 1
        if alike and axis not in headings and axis not in ("precision", "batch_size"):
            headings.append(axis)
    return tuple(headings)


def _find_groups(
    cases: pd.DataFrame, order: Sequence[str], headings: Sequence[str], machines: Machines
) -> dict[int, str]:
    """Return where groups of rows begin, and their headings. Without headings, rows are grouped by
    as many leading axes as leave at least three rows a group on average."""
    if headings:
        return _find_starts(cases, headings, machines)
    found: dict[int, str] = {}
    for depth in range(1, len(order)):
        starts = _find_starts(cases, order[:depth], machines)
        if depth > 1 and len(cases) < 3 * len(starts):
            break
        found = starts
    return dict.fromkeys(found, "")


def _find_starts(cases: pd.DataFrame, leading: Sequence[str], machines: Machines) -> dict[int, str]:
    columns = [axes.take_values(cases, axis).tolist() for axis in leading]

    def name(key: Sequence[Any]) -> str:
        values = zip(leading, key, strict=True)
        return " · ".join(name_setting(axis, name_value(axis, v, machines)) for axis, v in values)

    return join((name(key), part) for key, part in groupby(zip(*columns, strict=True)))[1]


def _tabulate_published(found: ReportData) -> Iterator[Sheet]:
    cases, machines = found.beside, found.machines
    beside = cases[(cases["published_status"] != "") & (cases["device"] == "cuda")]
    for axis in list_affecting(Trait.KERNELS):  # unknown in 2019
        beside = beside[beside[axis] == getattr(Case, axis)]
    if not len(beside):
        return
    order = [axis for axis in axes.ORDER if axis in ("precision", "loss_scale", "batch_size")]
    several = [axis for axis in axes.find_varying(beside) if axis not in order]
    headings = [axis for axis in several if axis in HEADINGS]
    columns = [*order, *(axis for axis in several if axis not in headings)]
    beside = sort_cases(beside, [*headings, *columns])
    starts = _find_starts(beside, headings, machines) if headings else {}
    lines = dict.fromkeys(_find_starts(beside, [*headings, "precision"], machines), "")
    yield Sheet(
        "Beside the published RTX Titan of 2019",
        [
            *(axis_column(axis, machines) for axis in columns),
            quantity_column("epoch_time_s", always=True),
            quantity_column("epoch_time_s", label="2019 epoch time", prefix="published_",
                            help="published for the RTX Titan", better="", always=True),
            quantity_column("speedup", label="speed-up over fp32"),
            quantity_column("speedup", label="2019 speed-up", prefix="published_"),
            quantity_column("memory_bytes", keep=7),
            quantity_column("memory_bytes", label="2019 memory", prefix="published_", keep=7),
            quantity_column("memory_saved", keep=6),
            quantity_column("memory_saved", label="2019 memory saved", prefix="published_", keep=6),
            Column("remarks", "remarks", "whether the GPU waits for the host",
                   lambda row: DOUBTS["host_bound"].remark * row.host_bound, number=False),
        ],
        list(iterate(beside)),
        (
            "2019: PyTorch 1.0, CUDA 10.0, cuDNN 7.4.2; each the cold first epoch of a process, "
            "with autotuning in it; single runs; memory as published, not over a baseline. The "
            "epochs beside them are timed warm.",
        ),
        groups=lines | starts,
        empty=EMPTY,
    )  # fmt: skip


def tabulate_environment(found: ReportData) -> Sheet:
    cases, pairs = found.cases, list(found.machines)
    parts = [cases[(cases["sweep"] == s) & (cases["machine"] == machine)] for s, machine in pairs]

    def write(name: str, part: pd.DataFrame) -> str:
        if name == "gpu_memory_bytes":
            sizes = [f"{bytes / GIB:.1f} GiB" for bytes in part[name].dropna().unique()]
            return " or ".join(sizes[:4])
        return notes.name_values(part, name, 4)

    rows = [
        (label, *(write(name, part) or NOTHING for part in parts))
        for name, label in notes.ENVIRONMENT.items()
    ]
    return Sheet(
        "Environment",
        [
            Column("what", "", "", itemgetter(0), number=False),
            *(Column(f"m{i}", found.machines[pair], "", itemgetter(i + 1), number=False)
              for i, pair in enumerate(pairs)),
        ],
        [row for row in rows if any(said != NOTHING for said in row[1:])],
        empty=(),
    )  # fmt: skip


OVERVIEW = Section("overview", "How did each case do?", _tabulate_cases)
PUBLISHED = Section("rtx-titan", "How fast was the same case in 2019?", _tabulate_published)
ENVIRONMENT = Section(
    "environment", "What ran the cases?", lambda found: [tabulate_environment(found)]
)
