"""Epoch by epoch: time, loss and accuracy of each epoch of the cases that train several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from bench.questions.report_data import ReportData
from bench.render.cells import TIMED, Row, iterate, name_place
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


def _tabulate_epochs(found: ReportData) -> Iterator[Sheet]:
    epochs = _collect_epochs(found)
    shown = epochs.merge(found.cases[["cell"]].assign(place=range(len(found.cases))), on="cell")
    shown = shown.sort_values(["place", "epoch"], kind="stable")

    def measure_column(name: str) -> Column[Row]:
        quantity = QUANTITIES[name]
        return Column(name, quantity.title, quantity.help, lambda row: getattr(row, name),
                      write=quantity.write, better=quantity.better,
                      always=name not in OPTIONAL)  # fmt: skip

    columns: list[Column[Row]] = [
        Column("epoch", "epoch", "from 1", lambda row: int(row.epoch) + 1),
        *map(measure_column, MEASURES),
    ]
    rows, groups = join(
        (name_place(found.by_cell[cell], found.order, found.machines), part)
        for cell, part in groupby(iterate(shown), lambda row: row.cell)
    )
    yield Sheet("Epoch by epoch", columns, rows, groups=groups)


EPOCHS = Section("epochs", "How did time, loss and accuracy change by epoch?", _tabulate_epochs)
