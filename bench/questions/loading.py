"""What costs time beside training: loading data, and the start of a case.

For the first, each case of torch's DataLoader stands beside the same on the device's loader.

The device's loader makes batches from data that the device holds already, so its epoch waits for no
loader. The loader-bound share is the part of the DataLoader's epoch that this saves::

    share = (t_torch - t_device) / t_torch

That is the differential method of DS-Analyzer (Mohan, Phanishayee, Raniwala & Chidambaram,
"Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021), which trains on data held by the
GPU to find what data stalls cost. A profiler would count every moment that a worker or the training
process waits; here, only what makes the epoch longer counts. A batch that is prepared while the
device is busy costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from bench.case import Case, free_axes
from bench.limits import MIN_REPEATS, STEADY
from bench.questions.report_data import ReportData
from bench.render.section import Column, Section, Sheet, join, quantity_column
from bench.render.table import Cell, Row, mark_part, name_case, name_place, write_ends, write_tenths
from bench.store.rows import group
from bench.study.axes import find_varying, name_axis, sort_cases
from bench.study.runs import Result, tell_but
from bench.text import ESTIMATE, count, write_number
from bench.verdict import Ratio, Verdict, compare

SETTINGS = free_axes("loader")  # the axes in which cases of a `Comparison` may differ


@dataclass(frozen=True)
class Loaded:
    """A case of torch's DataLoader, and its comparison with the same on the device's loader."""

    row: Row
    ratio: Ratio  # its epoch time over the device loader's; no value without a time
    estimated: bool  # whether either was extrapolated

    @property
    def share(self) -> float:
        """The loader-bound share; negative where the DataLoader is faster, NaN without a ratio."""
        return _share(self.ratio.value)

    @property
    def ends(self) -> tuple[float, float]:
        """The 95 % interval of the share; NaN with too few repeats."""
        return _share(self.ratio.low), _share(self.ratio.high)

    @property
    def free(self) -> bool | None:
        """Whether the epoch takes at most `STEADY` longer than the device loader's; None if that is
        uncertain. One or two runs never prove it."""
        if self.ratio.judge(STEADY) in (Verdict.SAME, Verdict.LOWER):
            return True
        near = self.ratio.value is not None and self.ratio.value <= 1 + STEADY
        return None if near else False


def _share(ratio: float | None) -> float:
    return math.nan if ratio is None else 1 - 1 / ratio


@dataclass(frozen=True)
class Comparison:
    """A case of the device's loader, and the cases of torch's that differ in nothing else."""

    device: Row
    loaded: tuple[Loaded, ...]


def _find_loaded(found: ReportData) -> Iterator[Comparison]:
    sets: list[tuple[Result, list[Result]]] = []
    for part in group(found.results, tell_but(SETTINGS)):
        ours = [row for row in part if row.loader == Case.loader]
        theirs = sort_cases([row for row in part if row.loader != Case.loader], SETTINGS)
        if len(ours) == 1 and ours[0].cell in found.times and theirs:
            sets.append((ours[0], theirs))
    pairs = [(device, row) for device, others in sets for row in others]
    times = found.times
    ratios = iter(compare([(times[a.cell], times.get(b.cell, [])) for a, b in pairs]))
    for device, others in sets:
        loaded = (Loaded(row, next(ratios), min(device.part, row.part) < 1) for row in others)
        yield Comparison(device, tuple(loaded))


def describe_enough(comparison: Comparison, axes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on the number of workers from which the loader no longer matters: ``fp32 ·
    batch size 128: from 4 workers on, the loader no longer matters.`` From that number on, every
    one tried is as fast as the device's loader. Nothing is said where no case has a time."""
    timed = [one for one in comparison.loaded if one.ratio.value is not None]
    if not timed:
        return
    tried = sorted(timed, key=lambda one: one.row.workers)
    enough = [*takewhile(lambda one: one.free is not False, reversed(tried))]
    name = name_case(tried[-1].row, [a for a in axes if a not in SETTINGS])
    slower = (one.ratio.judge(STEADY) is Verdict.HIGHER for one in tried)
    certain = all(one.free for one in enough) if enough else all(slower)
    few = min(row.repeats for row in (comparison.device, *(one.row for one in tried))) < 5
    doubt = "" if certain else f", but that is not certain{'; use --repeats 5' * few}"
    if not enough:
        numbers = ", ".join(str(int(one.row.workers)) for one in tried)
        said = f"the loader matters with every number of workers tried ({numbers})"
    elif workers := int(enough[-1].row.workers):
        said = f"from {workers} workers on, the loader no longer matters"
    else:
        said = "the loader does not matter, even without workers"
    yield f"{name}: {said}{doubt}."


_Line = tuple[Comparison, Row, Loaded | None]
"""A row of the table: its comparison, its case, and the result if that is of torch's DataLoader."""


def _tabulate_loading(found: ReportData) -> Iterator[Sheet]:
    named = [axis for axis in found.named if axis not in SETTINGS]
    rows, groups = join(
        (
            name_place(sets.device, named, found.machines),
            [(sets, sets.device, None), *((sets, one.row, one) for one in sets.loaded)],
        )
        for sets in _find_loaded(found)
    )
    case = partial(quantity_column, take=lambda line: line[1], spread=False)

    def write_share(line: _Line) -> Cell | None:
        one = line[2]
        if one is None or math.isnan(one.share):
            return None
        return Cell(f"{ESTIMATE * one.estimated}{write_tenths(one.share)}", one.share)

    columns: list[Column[_Line]] = [
        Column("loader", "loader", "what made the batches",
               lambda line: Cell(line[1].loader, line[1].loader), number=False, always=True),
        Column("workers", "workers", "processes that load; 0: the training process itself",
               lambda line: int(line[1].workers) if line[2] else None, always=True),
        case("epoch_time_s", help="one training epoch"),
        Column("share", "loader-bound (%)", "part of the epoch that the device's loader does not "
               "take", write_share, better="lower", always=True),
        Column("interval", "95 % interval", "of that part", lambda line:
               write_ends(line[2].ends, write_tenths, " to ") if line[2] else None, keep=8),
        replace(case("loader_first_batch_s", help="start of the epoch to its first batch", keep=7),
                name="first_batch"),
        replace(case("loader_samples_per_s", help="without training", keep=7), name="alone"),
    ]  # fmt: skip

    def note() -> Iterator[str]:
        for sets in {id(sets): sets for sets, *_ in rows}.values():
            yield from describe_enough(sets, named)
        yield (
            "Loader-bound: the part of the epoch time that would be saved if the batches were made "
            "on the device. Waiting for the loader while the device is busy is not counted. The "
            f"loader no longer matters where the epoch is at most {100 * STEADY:.0f} % longer."
        )
        if any(sets.device.device == "cpu" for sets, *_ in rows):
            yield "On a CPU the workers take cores from the training, which counts as loading."

    title = "Loading: torch's DataLoader beside the device's loader"
    yield Sheet(title, columns, rows, note(), groups)


LOADING = Section("loading", "Does training wait for the data loader?", _tabulate_loading)


# ------------------------------------------------------------------------------------------ startup
#
# Costs beside training: set-up, autotuning, compilation, proof; and when they pay off.
#
# `torch.compile` and cuDNN's autotuning make epochs faster and the start slower. Compiled code is
# cached for later repeats of a case, so only the first one pays for it: for the first steps, where
# both happen, the slowest repeat counts, and for the rest the median one.


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
