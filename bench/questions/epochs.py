"""Epoch by epoch: time, loss and accuracy of each epoch of the cases that train several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import TYPE_CHECKING

from bench.interval import find_quantile
from bench.limits import STEADY
from bench.render.cells import TIMED, iterate, name_place, quantity_head
from bench.render.model import NOTHING, Cell, Head, Table
from bench.study.axes import Machines
from bench.study.quantities import QUANTITIES, is_number
from bench.text import say_left_out

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.sweeps import Sweep

MOST_ROWS = 40
"""Rows of the table; more would not be read."""

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


def collect_epochs(
    rows: pd.DataFrame, cases: pd.DataFrame, sweeps: Sequence[Sweep]
) -> pd.DataFrame:
    """One row for each epoch of a case: ``cell``, ``epoch`` from 0, and `MEASURES`.

    Numbers are medians over the repeats that ended as their case is said to have.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: the same summarized.
    """
    import pandas as pd

    known = cases[(cases["epochs"] > 1) & cases["status"].isin(TIMED)]
    timed = rows[rows["status"] == rows["cell"].map(known.set_index("cell")["status"])]
    parts = []
    for sweep in sweeps:
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


def _write(name: str, value: float) -> Cell:
    return Cell(QUANTITIES[name].write(value), value) if is_number(value) else Cell(NOTHING)


def _count_rows(cells: Sequence[int]) -> int:
    """How many rows are shown: whole cases, unless the first alone has more than `MOST_ROWS`."""
    if len(cells) <= MOST_ROWS:
        return len(cells)
    return cells.index(cells[MOST_ROWS]) or MOST_ROWS


def tabulate_epochs(
    cases: pd.DataFrame, epochs: pd.DataFrame, axes: Sequence[str], machines: Machines
) -> Iterator[Table]:
    """One row for each epoch, the cases in the order of the overview; nothing without epochs.

    Args:
        cases: of `summarize`, sorted.
        epochs: of `collect_epochs`.
        axes: those that tell the cases apart.
    """
    shown = epochs.merge(cases[["cell"]].assign(place=range(len(cases))), on="cell")
    if not len(shown):
        return
    shown = shown.sort_values(["place", "epoch"], kind="stable")
    cut = shown.head(_count_rows(shown["cell"].tolist()))
    trends = find_trends(shown)
    names = [n for n in MEASURES if n not in OPTIONAL or shown[n].notna().any()]
    heads = [Head("epoch", "epoch", "from 1")]
    heads += [quantity_head(QUANTITIES[name]) for name in names]
    told = any(str(trend) for trend in trends.values())
    if told:
        help = f"by the slope over epochs, where that is more than {100 * STEADY:.0f} %"
        heads.append(Head("trend", "trend of the time", help, False, wrap=True))
    by_cell = {row.cell: row for row in iterate(cases)}
    lines: list[tuple[Cell, ...]] = []
    groups: dict[int, str] = {}
    last = cut.groupby("cell")["epoch"].max()
    for number, row in enumerate(iterate(cut)):
        if row.epoch == 0:
            groups[number] = name_place(by_cell[row.cell], axes, machines)
        cells = [Cell(str(int(row.epoch) + 1), int(row.epoch) + 1)]
        cells += [_write(name, getattr(row, name)) for name in names]
        if told:
            trend = trends.get(row.cell) if row.epoch == last[row.cell] else None
            cells.append(Cell(str(trend) if trend else "", trend.change if trend else None))
        lines.append(tuple(cells))
    notes = []
    if told:
        notes.append(
            f"The epochs of a case became slower or faster by more than {100 * STEADY:.0f} %, by "
            "their least-squares slope, whose 95 % interval leaves out 0; the overview has the "
            "mean. Close other programs, or use --repeats 5 or more."
        )
    if len(shown) > len(cut):
        notes.append(
            f"{say_left_out(len(shown) - len(cut), 'row')}; --where chooses, and epochs.csv "
            "has them all."
        )
    yield Table("epochs", "Epoch by epoch", tuple(heads), tuple(lines), tuple(notes), groups)
