"""What training costs, by the price of an hour and of a kWh, in whatever currency these are. It is
derived for a table, and stored nowhere."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from bench.answers.render.table import NOTHING, AnyRow, Cell, Column, mark_part
from bench.base.errors import UsageError, nearest
from bench.base.text import join_words, read_number, write_number
from bench.schema.flags import add_flag, parse_number

_HOUR_S, _KWH_J = 3600, 3.6e6

_LACKS = "*"
"""Marks a cost that lacks the energy."""


class Cost(NamedTuple):
    """What one epoch, or what else a time is of, costs: ``value`` is NaN where it is not known, and
    ``lacks_energy`` if the price of a kWh is not in it, since the energy is not known. ``of_slice``
    if it is not known since the prices are of whole GPUs, and this is of a MIG slice of one."""

    value: float
    lacks_energy: bool = False
    of_slice: bool = False

    def write(self) -> str:
        if math.isnan(self.value):
            return NOTHING
        return write_number(self.value) + _LACKS * self.lacks_energy


@dataclass(frozen=True)
class Tariff:
    """Prices in one currency.

    Attributes:
        hours: the price of an hour of a GPU, or of a machine without one, by a part of its name;
            of all others by an empty one.
        kwh: the price of a kWh; None if energy is not to be paid.
    """

    hours: Mapping[str, float]
    kwh: float | None

    def find_cost(
        self, row: AnyRow, time_s: float | None = None, energy_j: float | None = None
    ) -> Cost:
        """Return the cost of an epoch of a run or a result, by its time and energy unless they are
        given, in s and J. Of a machine without a price, where others have one, it is not known; nor
        of a MIG slice without one that names it, as others use the rest of the GPU."""
        time_s = row.epoch_time_s if time_s is None else time_s
        energy_j = row.energy_per_epoch_j if energy_j is None else energy_j
        energy = (self.kwh or 0.0) * energy_j / _KWH_J
        if not self.hours:
            return Cost(energy)
        name = row.machine.casefold()
        whole, part_of, _ = name.partition(" mig")
        named = [part for part in self.hours if part.casefold() in name]
        priced = [part for part in named if not part_of or part.casefold() not in whole]
        if not priced:
            return Cost(math.nan, of_slice=bool(named))
        used = self.hours[max(priced, key=len)] * row.used_gpus * time_s / _HOUR_S
        if self.kwh is None:
            return Cost(used)
        lacks = math.isnan(energy)
        return Cost(used if lacks else used + energy, lacks and not math.isnan(used))

    def fill(self, row: AnyRow) -> Cell:
        """Return the cell of a case."""
        cost = self.find_cost(row)
        if math.isnan(cost.value):
            return Cell(NOTHING)
        mark = mark_part(row)
        return Cell(f"{mark}{cost.write()}", cost.value, bool(mark))

    def describe(self, costs: Iterable[Cost]) -> str:
        """Say what is in these costs, as a note of their table."""
        prices = [
            f"{price:g} an hour of each {name or 'GPU (or machine without one)'}"
            for name, price in self.hours.items()
        ]
        if self.kwh is not None:
            prices.append(f"{self.kwh:g} a kWh of the energy that was measured, of GPUs alone")
        costs = [*costs]
        lacks = (
            f" {_LACKS} without the energy, which is not known: compare it with none that has it."
        )
        notes = lacks * any(one.lacks_energy for one in costs)
        if any(one.of_slice for one in costs):
            notes += " Of a MIG slice, a part of a GPU, it is known by its own price: add MIG=1/h."
        return f"Cost: {join_words(prices)}.{notes}"

    def refuse_unknown(self, rows: Collection[AnyRow]) -> None:
        """Raises UsageError: a price is of a machine, or of an energy, that none of these has."""
        if not self.hours and not any(row.energy_j > 0 for row in rows):
            raise UsageError(
                "--kwh: no energy was measured, as of no CPU; give the price of an hour by --price"
            )
        known = sorted({row.machine for row in rows})
        for name in self.hours:
            if not any(name.casefold() in machine.casefold() for machine in known):
                raise UsageError(
                    f"--price: no machine has {name!r} in its name; {nearest(name, known)}"
                )


def cost_column(tariff: Tariff, take: Callable[[Any], AnyRow] = lambda row: row) -> Column[Any]:
    """Return the column of the costs of the cases that ``take`` finds in the rows of a table."""
    help = "what an epoch costs, by --price and --kwh"
    return Column("cost", "cost", help, lambda one: tariff.fill(take(one)), number=True,
                  better="lower")  # fmt: skip


def add_prices(parser: argparse.ArgumentParser) -> None:
    """Add ``--price`` and ``--kwh``, for `read_prices`."""
    help = (
        "what an hour of a GPU, or of a machine without one, costs, such as 2.49/h, or H100=2.49/h "
        "A100=1.29/h: adds the cost of an epoch"
    )
    parser.add_argument("--price", nargs="+", action="extend", metavar="PRICE", help=help,
                        type=_parse_price)  # fmt: skip
    right = "the price of a kWh, such as 0.30"
    add_flag(parser, "--kwh", "PRICE", f"{right}: adds that of an epoch's energy to its cost",
             partial(parse_number, right=right))  # fmt: skip


def _parse_price(text: str) -> tuple[str, float]:
    name, equals, price = text.rpartition("=")
    number, _, unit = price.partition("/")
    value = read_number(number)
    if not value > 0 or unit != "h" or bool(equals) != bool(name):
        raise UsageError(
            f"--price {text[:40]!r}: give the price of an hour, such as 2.49/h, or of one machine "
            "of several by a part of its name, such as H100=2.49/h"
        )
    return name, value


def read_prices(given: argparse.Namespace) -> Tariff | None:
    """Return the prices given; None if there are none. Raises UsageError: one is given twice."""
    hours: dict[str, float] = {}
    for name, price in given.price or ():
        if name in hours:
            raise UsageError(f"--price: give one price of {name or 'all machines'}, not two")
        hours[name] = price
    return None if not hours and given.kwh is None else Tariff(hours, given.kwh)
