"""Measured rates of a device, and how they were measured, as stored in rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Tries:
    """How a rate was measured: the best of ``number`` tries, and its SM clock and power draw."""

    number: int
    clock_mhz: float | None = None
    power_w: float | None = None


def write_tries(tries: Mapping[str, Tries]) -> str:
    """Format how rates were measured, by column, as a cell of ``rate_tries``.

    >>> write_tries({"rate_float16": Tries(16, 1365, 723.4), "call_time_s": Tries(8)})
    'rate_float16 16 1365 MHz 723 W; call_time_s 8'
    """
    units = [(name, t.number, (t.clock_mhz, "MHz"), (t.power_w, "W")) for name, t in tries.items()]
    return "; ".join(
        " ".join([name, str(number), *(f"{v:.0f} {unit}" for v, unit in read if v is not None)])
        for name, number, *read in units
    )


def read_tries(cell: str) -> dict[str, Tries]:
    """Parse the output of `write_tries`.

    >>> read_tries("rate_float16 16 1365 MHz 723 W; call_time_s 8")["rate_float16"]
    Tries(number=16, clock_mhz=1365.0, power_w=723.0)
    """
    found = {}
    for part in cell.split("; ") if cell else []:
        name, number, *rest = part.split()
        read = {unit: float(value) for value, unit in zip(rest[::2], rest[1::2], strict=True)}
        found[name] = Tries(int(number), read.get("MHz"), read.get("W"))
    return found


@dataclass(frozen=True)
class Collapse:
    """FLOP/s in float32 of ``threads`` together, and the higher rate of one of them alone.

    Threads that wait for each other, on cores shared with other programs, slowed products from 51
    GFLOP/s to 0.1.
    """

    rate: float
    alone: float
    threads: int

    def __str__(self) -> str:
        rate, alone = (f"{flops / 1e9:.3g} GFLOP/s" for flops in (self.rate, self.alone))
        return f"{self.threads} threads reach {rate} in float32, where one of them reaches {alone}"


@dataclass(frozen=True)
class Yardstick:
    """The measured rates of a device, by column of `Environment`, and how they were measured.

    Each column that the device should have is in ``rates`` and ``tries``, or ``reasons`` says why
    it could not be measured, or the measurement ``collapsed`` and was dropped. ``measured_at`` is
    UTC; empty if unknown.
    """

    rates: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    tries: dict[str, Tries] = field(default_factory=dict)
    collapsed: dict[str, Collapse] = field(default_factory=dict)
    measured_at: str = ""

    def improve(self, other: Yardstick, peaks: Mapping[str, float] | None = None) -> Yardstick:
        """Return the better of two measurements of each rate, with the tries of both. A rate above
        its entry in ``peaks``, as from `bench.gpu.peaks.list_peaks`, counts as none."""
        rates, tries = dict(self.rates), dict(self.tries)
        for column, rate in other.rates.items():
            most = (peaks or {}).get(column, math.inf)
            then, now = (0.0 if one > most else one for one in (rate, rates.get(column, 0.0)))
            better = column not in rates or (then > now) != (column == "call_time_s")
            rates[column] = rate if better else rates[column]
            best, rest = (other.tries, tries) if better else (tries, other.tries)
            number = best[column].number + (rest[column].number if column in rest else 0)
            tries[column] = replace(best[column], number=number)
        return replace(self, rates=rates, tries=tries)

    @property
    def columns(self) -> dict[str, Any]:
        how = {"rate_tries": write_tries(self.tries), "rates_at": self.measured_at}
        return {**self.rates, **{name: cell or None for name, cell in how.items()}}

    @property
    def missing(self) -> dict[str, str]:
        return self.reasons | {column: str(one) for column, one in self.collapsed.items()}
