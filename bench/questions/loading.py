"""What costs time beside training: loading data, and the start of a case.

For the first, each case of torch's DataLoader stands beside the same on the device's loader, which
makes batches from data that the device holds already, so that its epoch waits for no loader. The
loader-bound share is the part of the DataLoader's epoch that this saves::

    share = (t_torch - t_device) / t_torch

That is the differential method of DS-Analyzer (Mohan, Phanishayee, Raniwala & Chidambaram,
"Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021). A batch that is prepared while
the device is busy costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from bench.case import Case, free_axes
from bench.limits import MIN_REPEATS, STEADY
from bench.questions.report_data import ReportData
from bench.render.section import Column, Section, Sheet, join, quantity_column
from bench.render.table import Cell, mark_part, name_case, name_place, write_ends, write_tenths
from bench.store.rows import group
from bench.study.axes import name_axis, sort_cases
from bench.study.runs import Result, tell_but
from bench.text import count, write_number
from bench.verdict import Ratio, compare

SETTINGS = free_axes("loader")
"""The axes in which a case of torch's DataLoader may differ from that of the device's loader."""


class Loaded(NamedTuple):
    """A case of a loader, that of the device's loader, and how many times its time it takes."""

    row: Result
    device: Result
    ratio: Ratio


def _find_loaded(found: ReportData) -> list[list[Loaded]]:
    pairs: list[tuple[Result, Result]] = []
    for part in group(found.results, tell_but(SETTINGS)):
        ours = [row for row in part if row.loader == Case.loader]
        theirs = sort_cases([row for row in part if row.loader != Case.loader], SETTINGS)
        if len(ours) == 1 and ours[0].cell in found.times and theirs:
            pairs += [(ours[0], row) for row in (*ours, *theirs)]
    times = found.times
    ratios = compare([(times[a.cell], times.get(b.cell, [])) for a, b in pairs if a is not b])
    rest = iter(ratios)
    loaded = [Loaded(b, a, Ratio() if a is b else next(rest)) for a, b in pairs]
    return group(loaded, lambda one: one.device.cell)


def _tabulate_loading(found: ReportData) -> Iterator[Sheet]:
    named = [axis for axis in found.named if axis not in SETTINGS]
    rows, groups = join(
        (name_place(part[0].device, named, found.machines), part) for part in _find_loaded(found)
    )
    case = partial(quantity_column, take=lambda one: one.row, spread=False)

    def share(ratio: float | None) -> float:
        return math.nan if ratio is None else 1 - 1 / ratio

    def write_share(one: Loaded) -> Cell | None:
        lost = share(one.ratio.value)
        text = mark_part(one.device, one.row) + write_tenths(lost)
        return None if math.isnan(lost) else Cell(text, lost)

    columns: list[Column[Loaded]] = [
        Column("loader", "loader", "what made the batches", lambda one: one.row.loader,
               number=False, always=True),
        Column("workers", "workers", "processes that load; 0: the training process itself",
               lambda one: int(one.row.workers) if one.row is not one.device else None,
               always=True),
        case("epoch_time_s", help="one training epoch"),
        Column("share", "loader-bound (%)", "part of the epoch that the device's loader does not "
               "take", write_share, better="lower", always=True),
        Column("interval", "95 % interval", "of that part", lambda one: write_ends(
               (share(one.ratio.low), share(one.ratio.high)), write_tenths, " to "), keep=8),
        replace(case("loader_first_batch_s", help="start of the epoch to its first batch", keep=7),
                name="first_batch"),
        replace(case("loader_samples_per_s", help="without training", keep=7), name="alone"),
    ]  # fmt: skip
    note = (
        "Loader-bound: the part of the epoch time that would be saved if the batches were made on "
        f"the device; below {100 * STEADY:.0f} % there are enough workers. On a CPU the workers "
        "take cores from the training, which counts as loading."
    )
    title = "Loading: torch's DataLoader beside the device's loader"
    yield Sheet(title, columns, rows, [note], groups)


LOADING = Section("loading", "Does training wait for the data loader?", _tabulate_loading)


# ------------------------------------------------------------------------------------------ startup
#
# `torch.compile` and cuDNN's autotuning make epochs faster and the start slower. Compiled code is
# cached for later repeats of a case, so only the first one pays for it: for the first steps, where
# both happen, the slowest repeat counts, and for the rest the median one.


PREPARING = ("compile", "cudnn_benchmark", "cuda_graphs")
"""Switches that take time before the first epoch to shorten each."""


class Price(NamedTuple):
    """A case without and with a switch of `PREPARING`."""

    switch: str  # what is switched on: ``cudnn benchmark``, ``compile default``
    axis: str
    off: Result
    on: Result

    @property
    def saved(self) -> float:
        """Seconds by which an epoch is shorter with it; negative if it is longer."""
        return float(self.off.epoch_time_s - self.on.epoch_time_s)

    @property
    def extra(self) -> float:
        """Seconds by which the start is longer with it."""
        return float(self.on.start_time_s - self.off.start_time_s)


def _tabulate_prices(found: ReportData) -> Iterator[Sheet]:
    switched = [e for e in found.effects if e.axis in PREPARING and e.before == "off"]
    prices = [
        Price(name_axis(e.axis) + f" {e.after}" * (e.after != "on"), e.axis,
              *(found.by_cell[cell] for cell in pair))
        for e in switched
        for pair in e.pairs
    ]  # fmt: skip
    prices = [price for price in prices if math.isfinite(price.extra + price.saved)]

    def name_rest(price: Price) -> str:
        return name_case(price.on, [axis for axis in found.named if axis != price.axis])

    def write_epochs(price: Price) -> Cell:
        if price.saved <= 0:
            return Cell("never")
        epochs = max(0, math.ceil(price.extra / price.saved))
        return Cell(mark_part(price.off, price.on) + count(epochs, "epoch"), epochs)

    columns: list[Column[Price]] = [
        Column("switch", "switch", "what is switched on", lambda price: price.switch, number=False),
        Column("case", "case", "in which case", name_rest, wrap=True),
        Column("off", "start-up without (s)", "set-up and first steps without it",
               lambda price: price.off.start_time_s, write=write_number, keep=7),
        Column("on", "start-up with (s)", "set-up and first steps with it",
               lambda price: price.on.start_time_s, write=write_number, keep=7),
        Column("saved", "saved per epoch (s)", "how much shorter an epoch is",
               lambda price: price.saved, write=write_number),
        Column("epochs", "pays off after", "whole epochs until it has paid off", write_epochs,
               better="lower"),
    ]  # fmt: skip
    note = (
        "Start-up: set-up and the first step of each batch shape, of the slowest repeat, as later "
        f"ones find compiled code in a cache. With fewer than {MIN_REPEATS} repeats of both cases "
        "the saving may be chance."
    )
    yield Sheet("What a switch costs before the first epoch", columns, prices, [note])


PRICES = Section(
    "start-up", "When has compiling, autotuning or capturing paid off?", _tabulate_prices
)
