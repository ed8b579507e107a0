"""What is paid beside training: set-up, autotuning, compilation, proof; and when it pays.

`torch.compile` and cuDNN's autotuning make epochs faster and the start slower. What compiling made
is kept for later repeats of a case, so that only the first of them pays for it: of the first steps,
where both happen, the slowest repeat counts, and of the rest the median one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.limits import MIN_REPEATS
from bench.questions.material import Material
from bench.record import BESIDE, COLUMNS, RELIABLE
from bench.render.cells import iterate, mark_part, name_case, number_cell
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet
from bench.study import axes
from bench.study.axes import name_axis
from bench.study.summaries import SOURCE
from bench.text import count, write_number
from bench.verdict import Ratio, compare

PREPARING = {"compile": "compiling", "cudnn_benchmark": "autotuning", "cuda_graphs": "capturing"}
"""Switches that trade time before the first epoch for time in each, and what takes it."""

MOST_ROWS = 16
"""Pairs of cases of which the costs of starting up are shown."""


@dataclass(frozen=True)
class Price:
    """What a switch costs at the start of one case, and what it brings in each epoch, in s.

    Both starts are of set-up and first steps, by `Material.cases`.

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


def find_prices(found: Material) -> Iterator[Price]:
    """What each switch of `PREPARING` costs, for each pair of cases that differs in it alone."""
    pairs = [
        (e, *pair)
        for e in found.effects
        if e.axis in PREPARING and e.before == "off"
        for pair in e.pairs
    ]
    times, by_cell = found.times, found.cases.set_index("cell")
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


# -------------------------------------------------------------------------------------- the tables


def _tell_prices(found: Material) -> Iterator[Sheet]:
    prices = list(find_prices(found))
    by_cell = {row.cell: row for row in iterate(found.cases)}
    pairs = found.cases[found.cases["cell"].isin([price.on for price in prices])]
    named = ["precision", *(axis for axis in axes.find_varying(pairs) if axis != "precision")]

    def mark(price: Price) -> str:
        return mark_part(by_cell[price.off], by_cell[price.on])

    def name_place(price: Price) -> str:
        return name_case(by_cell[price.on], [axis for axis in named if axis != price.axis])

    columns: list[Column[Price]] = [
        Column("switch", "switch", "what is switched on", _name_switch, number=False),
        Column("case", "case", "in which case", name_place, wrap=True),
        Column("off", "start-up without (s)", "set-up and first steps without it",
               lambda price: number_cell(price.start_off), keep=7),
        Column("on", "start-up with (s)", "set-up and first steps with it",
               lambda price: number_cell(price.start_on), keep=7),
        Column("cached", "cached (s)", "the same of a repeat that found compiled code",
               lambda price: number_cell(price.start_cached), keep=6),
        Column("saved", "saved per epoch (s)", "how much shorter an epoch is",
               lambda price: Cell(mark(price) + write_number(price.saved), price.saved)),
        Column("epochs", "pays off after", "whole epochs until it has paid off",
               lambda price: _write_epochs(price, price.epochs, price.ends, mark(price)),
               better="lower"),
        Column("again", "cached, after", "whole epochs where compiled code is found",
               lambda price: _write_epochs(price, price.epochs_cached, None, mark(price)), keep=6),
    ]  # fmt: skip
    prepared = [what for axis, what in PREPARING.items() if any(p.axis == axis for p in prices)]
    what = " and ".join(filter(None, (", ".join(prepared[:-1]), *prepared[-1:])))
    title = f"What {what} costs before the first epoch, and when it pays off"
    yield Sheet(title, columns, prices, _note_prices(prices), most=MOST_ROWS)


def _name_switch(price: Price) -> str:
    """What is switched on: ``cudnn benchmark``, ``compile default``."""
    return " ".join([name_axis(price.axis), *([price.value] if price.value != "on" else [])])


def _note_prices(prices: Sequence[Price]) -> Iterator[str]:
    """What all pairs say together, and how sure it is."""
    yield (
        "Start-up: set-up and the first step of each batch shape, where compiling, autotuning and "
        "capturing happen; of these the slowest repeat, because later ones find compiled code in a "
        "cache. Cached: with those of the fastest repeat."
    )
    if any(price.ends is None for price in prices):
        yield (
            f"Without {MIN_REPEATS} repeats of both cases the saving may be chance; use --repeats "
            f"{MIN_REPEATS}."
        )
    elif any(_is_unclear(price) for price in prices):
        yield "Cannot tell: the 95 % interval of the times includes no saving; use more --repeats."
    if len(prices) <= MOST_ROWS:
        return
    for switch in dict.fromkeys(map(_name_switch, prices)):
        epochs = sorted(price.epochs for price in prices if _name_switch(price) == switch)
        low, middle, high = epochs[0], epochs[len(epochs) // 2], epochs[-1]
        said = ["never" if math.isinf(e) else f"{e:,.0f}" for e in (low, middle, high)]
        yield (
            f"Epochs until {switch} pays off, over all {len(epochs):,} pairs: "
            f"{said[0]} at best, {said[1]} in the median, {said[2]} at worst."
        )


def _is_unclear(price: Price) -> bool:
    """Whether the epochs with and without may be equally long."""
    low, high = price.ratio.low, price.ratio.high
    return low is not None and high is not None and low <= 1 <= high


def _write_epochs(
    price: Price, epochs: float | None, ends: tuple[float, float] | None, mark: str
) -> Cell | None:
    if epochs is None:
        return None
    if _is_unclear(price):
        return Cell("cannot tell")
    if math.isinf(epochs):
        return Cell("never")
    if epochs == 0:
        return Cell("at once", 0)
    text = mark + count(int(epochs), "epoch")
    if ends is not None and ends[0] != ends[1]:
        low, high = (f"{end:,.0f}" if math.isfinite(end) else "never" for end in ends)
        text += f" ({low}–{high})"
    return Cell(text, epochs)


PRICES = Section("start-up", "When has compiling, autotuning or capturing paid off?", _tell_prices)


_Part = tuple[tuple[str, str], dict[Hashable, Any]]
"""A machine, and where the time of its runs went that is neither warm-up nor training: medians."""


def _tell_parts(found: Material) -> Iterator[Sheet]:
    told = found.rows[found.rows["status"].isin(RELIABLE)].dropna(subset=[*BESIDE])
    seconds = told[[*BESIDE]].astype(float)
    parts = seconds.assign(all=seconds.sum(axis=1)).groupby(
        [told[name] for name in SOURCE], sort=False
    )
    medians = parts.median().assign(runs=parts.size())
    rows: list[_Part] = list(zip(medians.index, medians.to_dict("records"), strict=True))

    def write(name: str, row: _Part) -> Cell:
        return Cell(f"{row[1][name]:.2f}", row[1][name])

    columns: list[Column[_Part]] = [
        Column("machine", "machine", "where the runs were",
               lambda row: found.machines[row[0]] if len(rows) > 1 else None,
               wrap=True),
        Column("runs", "runs", "how many", lambda row: int(row[1]["runs"])),
        *(
            Column(name, label, COLUMNS[name].help, partial(write, name), better="lower")
            for name, label in BESIDE.items()
        ),
        Column("all", "all of these", "the median of their sum", partial(write, "all"),
               better="lower"),
    ]  # fmt: skip
    yield Sheet("Seconds of a run beside warm-up and training (median)", columns, rows)


PARTS = Section("beside", "What does a run take beside warm-up and training?", _tell_parts)
