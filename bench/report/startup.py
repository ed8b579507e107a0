"""What is paid before the first epoch: set-up, warm-up, autotuning, compilation; and when it pays.

`torch.compile` and cuDNN's autotuning make epochs faster and the start slower. What compiling made
is kept for later repeats of a case, so that only the first of them pays for it: of the first steps,
where both happen, the slowest repeat counts, and of the rest the median one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.record import RELIABLE
from bench.report.effects import TIME, Effect
from bench.verdict import Ratio, compare

if TYPE_CHECKING:
    import pandas as pd

PREPARING = ("compile", "cudnn_benchmark")
"""Switches that trade time before the first epoch for time in each."""


@dataclass(frozen=True)
class Price:
    """What a switch costs at the start of one case, and what it brings in each epoch, in s.

    Both starts are of set-up and first steps, by `find_start`.

    Attributes:
        axis: one of `PREPARING`.
        off: the ``cell`` of the case without it; ``on`` of the case with it.
        start_off: time before the first epoch without it; ``start_on`` with it.
        epoch_off: median epoch without it; ``epoch_on`` with it.
        ratio: of the epochs, with over without, as far as the repeats tell.
    """

    axis: str
    off: int
    on: int
    start_off: float
    start_on: float
    epoch_off: float
    epoch_on: float
    ratio: Ratio

    @property
    def saved(self) -> float:
        """How much shorter an epoch is with it; negative if it is longer."""
        return self.epoch_off - self.epoch_on

    @property
    def epochs(self) -> float:
        """After how many whole epochs it has paid: 0 if at once, infinite if never."""
        return self._count(self.saved)

    @property
    def ends(self) -> tuple[float, float] | None:
        """The fewest and the most epochs within the interval of the ratio; None without one."""
        if self.ratio.low is None or self.ratio.high is None:
            return None
        savings = [self.epoch_off * (1 - end) for end in (self.ratio.low, self.ratio.high)]
        return self._count(savings[0]), self._count(savings[1])

    def _count(self, saved: float) -> float:
        extra = self.start_on - self.start_off
        if extra <= 0:
            return 0 if saved >= 0 else math.inf
        return math.ceil(extra / saved) if saved > 0 else math.inf


def find_start(rows: pd.DataFrame) -> pd.Series:
    """Seconds of set-up and first steps of each cell, the latter of its slowest repeat.

    The rest of the warm-up is left out: it goes on until steps are steady, however long that takes.
    Records without first steps (before schema 2) have the whole warm-up instead.
    """
    rows = rows[rows["status"].isin(RELIABLE)]
    setup, first = rows["setup_time_s"].astype(float), rows["first_steps_time_s"].astype(float)
    first = first.fillna(rows["warmup_time_s"].astype(float).fillna(0.0))
    return setup.groupby(rows["cell"]).median() + first.groupby(rows["cell"]).max()


def find_prices(
    rows: pd.DataFrame, cases: pd.DataFrame, effects: Sequence[Effect]
) -> Iterator[Price]:
    """What each switch of `PREPARING` costs, for each pair of cases that differs in it alone.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: of `summarize`, with `find_start` of each as ``start_time_s``.
    """
    pairs = [(e.axis, *pair) for e in effects if e.axis in PREPARING for pair in e.pairs]
    if not pairs:
        return
    timed = rows[rows["status"].isin(RELIABLE)]
    times = timed.dropna(subset=[TIME.column]).groupby("cell")[TIME.column].apply(list)
    by_cell = cases.set_index("cell")
    ratios = compare([(times.get(off, []), times.get(on, [])) for _, off, on in pairs])
    for (axis, off, on), ratio in zip(pairs, ratios, strict=True):
        start = by_cell["start_time_s"]
        epochs = by_cell["epoch_time_s"]
        price = Price(axis, off, on, start[off], start[on], epochs[off], epochs[on], ratio)
        if math.isfinite(price.start_off + price.start_on + price.saved):
            yield price
