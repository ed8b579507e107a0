"""Measured rates of a device, and how they were measured, as stored in rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tries:
    """How a rate was measured: the best of ``number`` tries, with the SM clock while it ran."""

    number: int
    clock_mhz: float | None = None


def write_tries(tries: Mapping[str, Tries]) -> str:
    """Format how rates were measured, by column, as a cell of ``rate_tries``.

    >>> write_tries({"rate_float16": Tries(16, 1365), "call_time_s": Tries(8)})
    'rate_float16 16 1365 MHz; call_time_s 8'
    """
    return "; ".join(
        f"{name} {t.number}" + (f" {t.clock_mhz:.0f} MHz" if t.clock_mhz is not None else "")
        for name, t in tries.items()
    )


def read_tries(cell: str) -> dict[str, Tries]:
    """Parse the output of `write_tries`; older rows have NVML's power as well.

    >>> read_tries("rate_float16 16 1365 MHz 723 W; call_time_s 8")["rate_float16"]
    Tries(number=16, clock_mhz=1365.0)
    """
    found = {}
    for part in cell.split("; ") if cell else []:
        name, number, *rest = part.split()
        found[name] = Tries(int(number), float(rest[0]) if "MHz" in rest else None)
    return found


@dataclass(frozen=True)
class Yardstick:
    """The measured rates of a device, by column of `Environment`, and how they were measured.

    Each column that the device should have is in ``rates`` and ``tries``, or ``reasons`` says why
    it could not be measured. ``measured_at`` is UTC; empty if unknown.
    """

    rates: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    tries: dict[str, Tries] = field(default_factory=dict)
    measured_at: str = ""

    @property
    def columns(self) -> dict[str, Any]:
        how = {"rate_tries": write_tries(self.tries), "rates_at": self.measured_at}
        return {**self.rates, **{name: cell or None for name, cell in how.items()}}
