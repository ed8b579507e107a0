"""Epoch by epoch: time, loss and accuracy of each epoch of the cases that train several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, linear_regression
from typing import TYPE_CHECKING

from bench.interval import find_quantile
from bench.limits import STEADY
from bench.questions.material import Material
from bench.render.cells import TIMED, Row, iterate, name_place
from bench.render.model import NOTHING, Cell
from bench.render.section import Column, Section, Sheet, join
from bench.study.quantities import QUANTITIES, is_number

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

LEAST_EPOCHS = 3
"""Epochs that a trend needs."""

OPTIONAL = ("test_loss", "test_accuracy")
"""Those of `MEASURES` that only an evaluation fills."""


def collect_epochs(found: Material) -> pd.DataFrame:
    """One row for each epoch of a case: ``cell``, ``epoch`` from 0, and `MEASURES`.

    Numbers are medians over the repeats that ended as their case is said to have.
    """
    import pandas as pd

    rows, cases = found.rows, found.cases
    known = cases[(cases["epochs"] > 1) & cases["status"].isin(TIMED)]
    timed = rows[rows["status"] == rows["cell"].map(known.set_index("cell")["status"])]
    parts = []
    for sweep in found.sweeps:
        mine = timed.loc[timed["sweep"] == sweep.name, ["record_id", "cell"]]
        if len(mine):
            parts.append(sweep.read_epochs().merge(mine, on="record_id"))
    names = {column: name for name, column in MEASURES.items()}
    if not parts:
        return pd.DataFrame({name: [] for name in ("cell", "epoch", *MEASURES)})
    every = pd.concat(parts, ignore_index=True).rename(columns=names)
    numbers = every.groupby(["cell", "epoch"])[list(MEASURES)].median()
    return numbers.reset_index()


@dataclass(frozen=True)
class Trend:
    """How times went: ``change`` is by how much they rose from first to last along their slope."""

    change: float

    @property
    def steady(self) -> bool:
        """Whether that is no more than `STEADY`."""
        return abs(self.change) <= STEADY

    def __str__(self) -> str:
        """In words: ``3.1 % slower from first to last``; nothing where it is steady."""
        word = "slower" if self.change > 0 else "faster"
        return "" if self.steady else f"{100 * abs(self.change):.1f} % {word} from first to last"


def find_trends(epochs: pd.DataFrame) -> dict[int, Trend]:
    """The trend of each cell that has one.

    That is the least-squares slope of the times over the epochs, where its 95 % interval (Student's
    t of the residuals) leaves out 0. Two epochs show none.

    Args:
        epochs: of `collect_epochs`.
    """
    trends = {}
    for cell, part in epochs.dropna(subset=["epoch_time_s"]).groupby("cell"):
        change = _find_change(part["epoch"].tolist(), part["epoch_time_s"].tolist())
        if change is not None:
            trends[int(cell)] = Trend(change)  # type: ignore[arg-type]
    return trends


def _find_change(epochs: Sequence[float], times: Sequence[float]) -> float | None:
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


def _tell_epochs(found: Material) -> Iterator[Sheet]:
    cases = found.cases
    epochs = collect_epochs(found)
    shown = epochs.merge(cases[["cell"]].assign(place=range(len(cases))), on="cell")
    shown = shown.sort_values(["place", "epoch"], kind="stable")
    trends, last = find_trends(shown), shown.groupby("cell")["epoch"].max()
    told = any(str(trend) for trend in trends.values())
    by_cell = {row.cell: row for row in iterate(cases)}

    def write_trend(row: Row) -> Cell:
        trend = trends.get(row.cell) if row.epoch == last[row.cell] else None
        return Cell(str(trend), trend.change) if trend else Cell("")

    columns: list[Column[Row]] = [
        Column("epoch", "epoch", "from 1", lambda row: int(row.epoch) + 1),
        *(
            _measure_column(name)
            for name in MEASURES
            if name not in OPTIONAL or shown[name].notna().any()
        ),
    ]
    if told:
        columns.append(
            Column("trend", "trend of the time", "by the slope over epochs, where that is more "
                   f"than {100 * STEADY:.0f} %", write_trend, wrap=True)
        )  # fmt: skip
    note = (
        f"The epochs of a case became slower or faster by more than {100 * STEADY:.0f} %, by their "
        "least-squares slope, whose 95 % interval leaves out 0; the overview has the mean. Close "
        "other programs, or use --repeats 5 or more."
    )
    rows, groups = join(
        (name_place(by_cell[cell], found.order, found.machines), part)
        for cell, part in groupby(iterate(shown), lambda row: row.cell)
    )
    notes = [note] if told else []
    yield Sheet("Epoch by epoch", columns, rows, notes, groups, file="epochs.csv", empty=())


def _measure_column(name: str) -> Column[Row]:
    quantity = QUANTITIES[name]

    def write(row: Row) -> Cell:
        value = getattr(row, name)
        return Cell(quantity.write(value), value) if is_number(value) else Cell(NOTHING)

    return Column(name, quantity.title, quantity.help, write, better=quantity.better)


EPOCHS = Section("epochs", "How did time, loss and accuracy change by epoch?", _tell_epochs)
