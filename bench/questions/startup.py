"""What is paid beside training: set-up, autotuning, compilation, proof; and when it pays.

`torch.compile` and cuDNN's autotuning make epochs faster and the start slower. What compiling made
is kept for later repeats of a case, so that only the first of them pays for it: of the first steps,
where both happen, the slowest repeat counts, and of the rest the median one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.questions.effects import Effect
from bench.record import BESIDE, RELIABLE
from bench.study.estimate import TIME
from bench.study.summaries import SOURCE
from bench.verdict import Ratio, compare

if TYPE_CHECKING:
    import pandas as pd

PREPARING = {"compile": "compiling", "cudnn_benchmark": "autotuning", "cuda_graphs": "capturing"}
"""Switches that trade time before the first epoch for time in each, and what takes it."""


@dataclass(frozen=True)
class Price:
    """What a switch costs at the start of one case, and what it brings in each epoch, in s.

    Both starts are of set-up and first steps, by `find_start`.

    Attributes:
        axis: one of `PREPARING`.
        value: what it is switched to: ``on``, or a mode.
        off: the ``cell`` of the case without it; ``on`` of the case with it.
        start_off: time before the first epoch without it; ``start_on`` with it.
        start_cached: that with it, of what compiled code was kept for; None without such a repeat.
        epoch_off: median epoch without it; ``epoch_on`` with it.
        ratio: of the epochs, with over without, as far as the repeats tell.
    """

    axis: str
    value: str
    off: int
    on: int
    start_off: float
    start_on: float
    start_cached: float | None
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
    def epochs_cached(self) -> float | None:
        """The same where compiled code is found in a cache; None where that was not measured."""
        return None if self.start_cached is None else self._count(self.saved, self.start_cached)

    @property
    def ends(self) -> tuple[float, float] | None:
        """The fewest and the most epochs within the interval of the ratio; None without one."""
        if self.ratio.low is None or self.ratio.high is None:
            return None
        savings = [self.epoch_off * (1 - end) for end in (self.ratio.low, self.ratio.high)]
        return self._count(savings[0]), self._count(savings[1])

    def _count(self, saved: float, start_on: float | None = None) -> float:
        extra = (self.start_on if start_on is None else start_on) - self.start_off
        if extra <= 0:
            return 0 if saved >= 0 else math.inf
        return math.ceil(extra / saved) if saved > 0 else math.inf


def find_start(rows: pd.DataFrame) -> pd.DataFrame:
    """Seconds of set-up and first steps of each cell: ``start_time_s``, ``cached_time_s``.

    The first steps are those of its slowest repeat, and where several ran, of its fastest. The rest
    of the warm-up is left out: it goes on until steps are steady, however long that takes. Records
    without first steps (before schema 2) have the whole warm-up instead.
    """
    import pandas as pd

    rows = rows[rows["status"].isin(RELIABLE)]
    setup, first = rows["setup_time_s"].astype(float), rows["first_steps_time_s"].astype(float)
    first = first.fillna(rows["warmup_time_s"].astype(float).fillna(0.0))
    starts, firsts = setup.groupby(rows["cell"]).median(), first.groupby(rows["cell"])
    cached = (starts + firsts.min()).where(firsts.count() > 1)
    return pd.DataFrame({"start_time_s": starts + firsts.max(), "cached_time_s": cached})


def find_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Where the time of each run went that is neither warm-up nor training, by machine, in s.

    Args:
        rows: the runs that count, of `summaries.latest`.

    Returns:
        The median of each column of `BESIDE`, of their sum as ``all``, and ``runs`` as far as they
        say it; indexed as `summaries.SOURCE`.
    """
    parts = [*BESIDE]
    told = rows[rows["status"].isin(RELIABLE)].dropna(subset=parts)
    seconds = told[parts].astype(float)
    seconds = seconds.assign(all=seconds.sum(axis=1))
    by_machine = [told[name] for name in SOURCE]
    medians = seconds.groupby(by_machine, sort=False).median()
    return medians.assign(runs=seconds.groupby(by_machine, sort=False).size())


def find_prices(
    rows: pd.DataFrame, cases: pd.DataFrame, effects: Sequence[Effect]
) -> Iterator[Price]:
    """What each switch of `PREPARING` costs, for each pair of cases that differs in it alone.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: of `summarize`, with the columns of `find_start`.
    """
    pairs = [
        (e, *pair) for e in effects if e.axis in PREPARING and e.before == "off" for pair in e.pairs
    ]
    if not pairs:
        return
    timed = rows[rows["status"].isin(RELIABLE)]
    times = timed.dropna(subset=[TIME.column]).groupby("cell")[TIME.column].apply(list)
    by_cell = cases.set_index("cell")
    ratios = compare([(times.get(off, []), times.get(on, [])) for _, off, on in pairs])
    start, epochs = by_cell["start_time_s"], by_cell["epoch_time_s"]
    for (effect, off, on), ratio in zip(pairs, ratios, strict=True):
        again = float(by_cell["cached_time_s"][on])
        cached = again if effect.axis == "compile" and math.isfinite(again) else None
        price = Price(
            *(effect.axis, effect.after, off, on, start[off], start[on], cached),
            *(epochs[off], epochs[on], ratio),
        )
        if math.isfinite(price.start_off + price.start_on + price.saved):
            yield price
