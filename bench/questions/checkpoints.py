"""The cost of checkpoints: bytes, seconds, and whether training resumes bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.questions.report_data import ReportData
from bench.record import read_missing
from bench.render.cells import TIMED, Row, iterate
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet, case_column, quantity_column

if TYPE_CHECKING:
    import pandas as pd

COSTS = ("checkpoint_bytes", "checkpoint_save_s", "checkpoint_share", "checkpoint_load_s")

EXACT, DIFFERS, UNKNOWN = "exact", "differs", "not known"


def _judge(runs: pd.DataFrame) -> tuple[str, str]:
    if differences := [*filter(None, runs["resume_difference"])]:
        return DIFFERS, f"Resumed steps differ, first in {differences[0]}"
    if runs["resume_exact"].astype(bool).any():
        return EXACT, ""
    told = (read_missing(str(text)).get("resume_exact") for text in runs["missing"])
    why = next(filter(None, told), "the run did not come so far")
    return UNKNOWN, f"Whether resumed steps are the same is not known ({why})"


def _tabulate_checkpoints(found: ReportData) -> Iterator[Sheet]:
    cases = found.cases
    kept = cases[cases["checkpoint"].astype(bool) & cases["status"].isin(TIMED)]
    of_these = found.rows[found.rows["cell"].isin(kept["cell"])]
    judged = {cell: _judge(runs) for cell, runs in of_these.groupby("cell")}
    axes = [axis for axis in found.order if axis != "checkpoint"] or ["precision", "batch_size"]
    columns: list[Column[Row]] = [
        case_column(axes, found.machines),
        *map(quantity_column, COSTS),
        Column("resume", "resume", "the next steps after it and without it",
               lambda row: Cell(judged[row.cell][0], judged[row.cell][0]), number=False),
    ]  # fmt: skip
    rows = list(iterate(kept))
    # for each precision, whether a resume is exact in all of its cases, or why not
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        reasons.setdefault(judged[row.cell][1], {})[row.precision] = None
    exact = reasons.pop("", {})
    unsure = {name for names in reasons.values() for name in names}
    sure = [name for name in exact if name not in unsure]
    told = {
        "Training resumed in a new network takes the same next steps, bit for bit (weights, "
        "master weights, optimizer, loss scale, random numbers, data)": sure,
        **reasons,
    }
    notes = [f"{text}: {', '.join(names)}." for text, names in told.items() if names]
    yield Sheet("Checkpoints", columns, rows, notes, empty=())


CHECKPOINTS = Section(
    "checkpoints", "What does a checkpoint cost, and is a resume exact?", _tabulate_checkpoints
)
