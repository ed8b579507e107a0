"""Epoch by epoch: time, loss and accuracy of each epoch of the cases that train several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean, linear_regression
from typing import TYPE_CHECKING

from bench.interval import find_quantile
from bench.limits import STEADY
from bench.questions.report_data import ReportData
from bench.render.cells import TIMED, Row, iterate, name_place
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet, join
from bench.study.quantities import QUANTITIES

if TYPE_CHECKING:
    import pandas as pd

MEASURES = {
    "epoch_time_s": "time_s",
    "train_loss": "train_loss",
    "train_accuracy": "train_accuracy",
    "test_loss": "test_loss",
    "test_accuracy": "test_accuracy",
}
"""The quantities that are shown of each epoch, and their columns in epochs.csv."""

LEAST_EPOCHS = 3  # fewest epochs for a trend
OPTIONAL = ("test_loss", "test_accuracy")  # `MEASURES` that only an evaluation provides


def _collect_epochs(found: ReportData) -> pd.DataFrame:
    """Return one row for each epoch of a case: ``cell``, ``epoch`` from 0, and `MEASURES`, as
    medians over the repeats that ended with the status of their case."""
    import pandas as pd

    rows, cases = found.rows, found.cases
    known = cases[(cases["epochs"] > 1) & cases["status"].isin(TIMED)]
    timed = rows[rows["status"] == rows["cell"].map(known.set_index("cell")["status"])]
    parts = []
    for sweep in found.sweeps:
        mine = timed.loc[timed["sweep"] == sweep.name, ["record_id", "cell"]]
        if len(mine):
            parts.append(sweep.read_epochs().merge(mine, on="record_id"))
    if not parts:
        return pd.DataFrame({name: [] for name in ("cell", "epoch", *MEASURES)})
    names = {column: name for name, column in MEASURES.items()}
    every = pd.concat(parts, ignore_index=True).rename(columns=names)
    return every.groupby(["cell", "epoch"])[list(MEASURES)].median().reset_index()


def find_trend(epochs: Sequence[float], times: Sequence[float]) -> float | None:
    """Return how much times rose from first to last, as a share of the first, along the
    least-squares slope. None if the slope's 95 % interval (Student's t of the residuals) includes
    0, or for fewer than `LEAST_EPOCHS`."""
    if len(times) < LEAST_EPOCHS:
        return None
    slope, start = linear_regression(epochs, times)
    fitted = [start + slope * epoch for epoch in epochs]
    freedom = len(times) - 2
    squares = sum((time - at) ** 2 for time, at in zip(times, fitted, strict=True)) / freedom
    around = sum((epoch - fmean(epochs)) ** 2 for epoch in epochs)
    reach = find_quantile(freedom) * math.sqrt(squares / around)
    rise = slope * (max(epochs) - min(epochs))
    return rise / (start + slope * min(epochs)) if abs(slope) > reach else None


def write_trend(change: float) -> str:
    """Return ``3.1 % slower from first to last``; empty if it is no more than `STEADY`."""
    word = "slower" if change > 0 else "faster"
    said = f"{100 * abs(change):.1f} % {word} from first to last"
    return said if abs(change) > STEADY else ""


def _tabulate_epochs(found: ReportData) -> Iterator[Sheet]:
    epochs = _collect_epochs(found)
    shown = epochs.merge(found.cases[["cell"]].assign(place=range(len(found.cases))), on="cell")
    shown = shown.sort_values(["place", "epoch"], kind="stable")
    trends = {
        cell: find_trend(part["epoch"].tolist(), part["epoch_time_s"].tolist())
        for cell, part in shown.dropna(subset=["epoch_time_s"]).groupby("cell")
    }
    last = shown.groupby("cell")["epoch"].max()

    def describe_trend(row: Row) -> Cell:
        trend = trends.get(row.cell) if row.epoch == last[row.cell] else None
        return Cell("") if trend is None else Cell(write_trend(trend), trend)

    def measure_column(name: str) -> Column[Row]:
        quantity = QUANTITIES[name]
        return Column(name, quantity.title, quantity.help, lambda row: getattr(row, name),
                      write=quantity.write, better=quantity.better,
                      always=name not in OPTIONAL)  # fmt: skip

    columns: list[Column[Row]] = [
        Column("epoch", "epoch", "from 1", lambda row: int(row.epoch) + 1),
        *map(measure_column, MEASURES),
        Column("trend", "trend of the time", "by the slope over epochs, where that is more than "
               f"{100 * STEADY:.0f} %", describe_trend, wrap=True),
    ]  # fmt: skip
    note = (
        f"The epochs of a case became slower or faster by more than {100 * STEADY:.0f} %, by their "
        "least-squares slope, whose 95 % interval leaves out 0; the overview has the mean. Close "
        "other programs, or use --repeats 5 or more."
    )
    rows, groups = join(
        (name_place(found.by_cell[cell], found.order, found.machines), part)
        for cell, part in groupby(iterate(shown), lambda row: row.cell)
    )
    notes = [note] if any(trend and write_trend(trend) for trend in trends.values()) else []
    yield Sheet("Epoch by epoch", columns, rows, notes, groups, file="epochs.csv")


EPOCHS = Section("epochs", "How did time, loss and accuracy change by epoch?", _tabulate_epochs)
