"""What is paid before the first epoch: set-up, warm-up, autotuning, compilation; and when it pays.

`torch.compile` and cuDNN's autotuning make epochs faster and the start slower. Compiled code stays
in a cache on disk, so that of several repeats only the first compiles: the slowest start counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.report.effects import Effect

if TYPE_CHECKING:
    import pandas as pd

PREPARING = ("compile", "cudnn_benchmark")
"""Switches that trade time before the first epoch for time in each."""


@dataclass(frozen=True)
class Price:
    """What a switch costs at the start of one case, and what it brings in each epoch, in s.

    Attributes:
        axis: one of `PREPARING`.
        off: the ``cell`` of the case without it; ``on`` of the case with it.
        start_off: time before the first epoch without it; ``start_on`` with it.
        saved: how much shorter its epoch is; negative if it is longer.
    """

    axis: str
    off: int
    on: int
    start_off: float
    start_on: float
    saved: float

    @property
    def epochs(self) -> float:
        """After how many whole epochs it has paid: 0 if at once, infinite if never."""
        extra = self.start_on - self.start_off
        if extra <= 0:
            return 0 if self.saved >= 0 else math.inf
        return math.ceil(extra / self.saved) if self.saved > 0 else math.inf


def find_start(rows: pd.DataFrame) -> pd.Series:
    """Seconds before the first epoch of each cell: set-up and warm-up of its slowest repeat."""
    start = rows[["setup_time_s", "warmup_time_s"]].astype(float).sum(axis=1, min_count=1)
    return start.groupby(rows["cell"]).max()


def find_prices(cases: pd.DataFrame, effects: Sequence[Effect]) -> Iterator[Price]:
    """What each switch of `PREPARING` costs, for each pair of cases that differs in it alone.

    Args:
        cases: of `summarize`, with `find_start` of each as ``start_time_s``.
    """
    by_cell = cases.set_index("cell")
    times, start = by_cell["epoch_time_s"], by_cell["start_time_s"]
    for effect in effects:
        for off, on in effect.pairs if effect.axis in PREPARING else ():
            saved = times[off] - times[on]
            if math.isfinite(start[off] + start[on] + saved):
                yield Price(effect.axis, off, on, start[off], start[on], saved)
