"""The step of each case: what it did, as counted and profiled, and what the machine can do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.diagnosis.breakdown import Breakdown, divide
from bench.diagnosis.floors import take_rates
from bench.diagnosis.step import Profile, Step
from bench.precision import Arithmetic
from bench.record import WORK_COLUMNS, WorkRow
from bench.report.cells import TIMED, Row, iterate
from bench.report.sweeps import Sweep

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Worked:
    """A case with its step.

    Attributes:
        row: of the frame of cases.
        run: of the repeats that have a profile, or else of all, the one with the median step.
        step: what it did; its time is the median of all repeats.
        breakdown: where its time went; None without a profile.
    """

    row: Row
    run: Row
    step: Step
    breakdown: Breakdown | None


def read_work(rows: pd.DataFrame, cases: pd.DataFrame, sweeps: Sequence[Sweep]) -> list[Worked]:
    """The cases whose work was counted or profiled, in the order of ``cases``.

    Args:
        rows: the runs that count, of `bench.report.summaries.latest`.
        cases: the same summarized.
        sweeps: that they are of.
    """
    timed = rows[rows["status"].isin(TIMED) & (rows["step_time_median_s"] > 0)]
    work: dict[tuple[str, str], list[WorkRow]] = {}
    for sweep in sweeps:
        ids = timed.loc[timed["sweep"] == sweep.name, "record_id"]
        work |= {(sweep.name, id): found for id, found in _read_rows(sweep, set(ids))}
    if not work:
        return []
    runs = {int(cell): part for cell, part in timed.groupby("cell")}  # type: ignore[arg-type]
    found = ((row, _choose_run(runs.get(row.cell), work)) for row in iterate(cases))
    return [_make(row, run, work[run.sweep, run.record_id]) for row, run in found if run]


def _read_rows(sweep: Sweep, ids: set[str]) -> Iterator[tuple[str, list[WorkRow]]]:
    """The work of some records of a sweep, by their ids."""
    frame = sweep.read_work()
    for id, part in frame[frame["record_id"].isin(ids)].groupby("record_id", sort=False):
        columns = (part[name].tolist() for name in WORK_COLUMNS if name != "record_id")
        rows = zip(*columns, strict=True)
        yield str(id), [WorkRow(*(_or_none(value) for value in row)) for row in rows]


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _choose_run(runs: pd.DataFrame | None, work: dict[tuple[str, str], list[WorkRow]]) -> Row:
    """The run whose work stands for its case's; None where none was counted."""
    if runs is None:
        return None
    left = [run for run in iterate(runs) if (run.sweep, run.record_id) in work]
    left = [run for run in left if run.profiled_step_s > 0] or left
    left.sort(key=lambda run: run.step_time_median_s)
    return left[(len(left) - 1) // 2] if left else None


def _make(row: Row, run: Row, work: list[WorkRow]) -> Worked:
    profile = None
    if run.profiled_step_s > 0:
        waits = (_or_none(value) or 0.0 for value in (run.input_wait_s, run.sync_wait_s))
        profile = Profile(run.profiled_step_s, _or_none(run.busy_s) or 0.0, *waits)
    # what an autocast region leaves in float32 is rounded to it
    rounded = run.arithmetic.partition("/")[0] == Arithmetic.TFLOAT32
    step = Step(
        row.step_time_median_s,
        work,
        take_rates(run._asdict()),
        row.device,
        Arithmetic.TFLOAT32 if rounded else Arithmetic.FLOAT32,
        profile,
    )
    return Worked(row, run, step, divide(step))
