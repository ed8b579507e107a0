"""Costs beside training: set-up, autotuning, compilation, proof; and when they pay off.

`torch.compile` and cuDNN's autotuning make epochs faster and the start slower. Compiled code is
cached for later repeats of a case, so only the first one pays for it: for the first steps, where
both happen, the slowest repeat counts, and for the rest the median one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.limits import MIN_REPEATS
from bench.questions.report_data import ReportData
from bench.render.section import Column, Section, Sheet
from bench.render.table import Cell, Row, mark_part, name_case
from bench.study.axes import find_varying, name_axis
from bench.text import count, write_number
from bench.verdict import Ratio, compare

PREPARING = {
    "compile": "compiling",
    "cudnn_benchmark": "autotuning",
    "cuda_graphs": "capturing",
}
"""Switches that take time before the first epoch to shorten each, and what takes that time."""


@dataclass(frozen=True)
class Price:
    """What a switch of `PREPARING` costs at the start of a case and saves in each epoch. A start is
    set-up and first steps."""

    axis: str
    value: str  # what it is switched to: ``on`` or a mode
    off: Row  # the case without it
    on: Row
    ratio: Ratio  # epoch time with it over without it, from the repeats

    @property
    def saved(self) -> float:
        """Seconds by which an epoch is shorter with it; negative if it is longer."""
        return float(self.off.epoch_time_s - self.on.epoch_time_s)

    def count_epochs(self, saved: float, start: float) -> float:
        """Return after how many whole epochs it pays off: 0 if at once, infinite if never."""
        extra = start - self.off.start_time_s
        if extra <= 0:
            return 0 if saved >= 0 else math.inf
        return math.ceil(extra / saved) if saved > 0 else math.inf

    @property
    def epochs(self) -> float:
        return self.count_epochs(self.saved, self.on.start_time_s)

    @property
    def ends(self) -> list[float]:
        """The fewest and most epochs by the interval of the ratio; empty without one."""
        savings = (self.off.epoch_time_s * (1 - end) for end in self._interval)
        return [self.count_epochs(saved, self.on.start_time_s) for saved in savings]

    @property
    def unclear(self) -> bool:
        """Whether the interval includes epochs of equal length with and without it."""
        return bool(self._interval) and self._interval[0] <= 1 <= self._interval[1]

    @property
    def _interval(self) -> list[float]:
        return [end for end in (self.ratio.low, self.ratio.high) if end is not None]

    @property
    def switch(self) -> str:
        """What is switched on: ``cudnn benchmark``, ``compile default``."""
        return name_axis(self.axis) + (f" {self.value}" if self.value != "on" else "")


def _find_prices(found: ReportData) -> Iterator[Price]:
    pairs = [
        (effect, *pair)
        for effect in found.effects
        if effect.axis in PREPARING and effect.before == "off"
        for pair in effect.pairs
    ]
    times, rows = found.times, found.by_cell
    ratios = compare([(times.get(off, []), times.get(on, [])) for _, off, on in pairs])
    for (effect, off, on), ratio in zip(pairs, ratios, strict=True):
        price = Price(effect.axis, effect.after, rows[off], rows[on], ratio)
        if math.isfinite(rows[off].start_time_s + rows[on].start_time_s + price.saved):
            yield price


def _tabulate_prices(found: ReportData) -> Iterator[Sheet]:
    prices = list(_find_prices(found))
    varying = find_varying([price.on for price in prices])
    named = ["precision", *(axis for axis in varying if axis != "precision")]

    def name_rest(price: Price) -> str:
        return name_case(price.on, [axis for axis in named if axis != price.axis])

    def write_saved(price: Price) -> Cell:
        return Cell(mark_part(price.off, price.on) + write_number(price.saved), price.saved)

    def write_epochs(price: Price, epochs: float, ends: Sequence[float] = ()) -> Cell:
        if price.unclear:
            return Cell("cannot tell")
        if math.isinf(epochs):
            return Cell("never")
        if epochs == 0:
            return Cell("at once", 0)
        text = mark_part(price.off, price.on) + count(int(epochs), "epoch")
        if len({*ends}) > 1:
            text += f" ({'–'.join(map(_write_whole, ends))})"
        return Cell(text, epochs)

    columns: list[Column[Price]] = [
        Column("switch", "switch", "what is switched on", lambda price: price.switch, number=False),
        Column("case", "case", "in which case", name_rest, wrap=True),
        Column("off", "start-up without (s)", "set-up and first steps without it",
               lambda price: price.off.start_time_s, write=write_number, keep=7),
        Column("on", "start-up with (s)", "set-up and first steps with it",
               lambda price: price.on.start_time_s, write=write_number, keep=7),
        Column("saved", "saved per epoch (s)", "how much shorter an epoch is", write_saved),
        Column("epochs", "pays off after", "whole epochs until it has paid off",
               lambda price: write_epochs(price, price.epochs, price.ends), better="lower"),
    ]  # fmt: skip
    axes = {price.axis for price in prices}
    *most, last = [what for axis, what in PREPARING.items() if axis in axes] or [""]
    what = f"{', '.join(most)} and {last}" if most else last
    title = f"What {what} costs before the first epoch, and when it pays off"
    yield Sheet(title, columns, prices, _note_prices(prices))


def _write_whole(epochs: float) -> str:
    return f"{epochs:,.0f}" if math.isfinite(epochs) else "never"


def _note_prices(prices: Sequence[Price]) -> Iterator[str]:
    yield (
        "Start-up: set-up and the first step of each batch shape, where compiling, autotuning and "
        "capturing happen; of these the slowest repeat, because later ones find compiled code in a "
        "cache."
    )
    if not all(price.ends for price in prices):
        yield (
            f"Without {MIN_REPEATS} repeats of both cases the saving may be chance; use --repeats "
            f"{MIN_REPEATS}."
        )
    elif any(price.unclear for price in prices):
        yield "Cannot tell: the 95 % interval of the times includes no saving; use more --repeats."


PRICES = Section(
    "start-up", "When has compiling, autotuning or capturing paid off?", _tabulate_prices
)
