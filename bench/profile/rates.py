"""The rates of a device, as data: the columns that have them, how they were measured, which number
formats they show instructions for.

None means not measured. `bench.training.device_rates` measures them, in a process of
`bench.workers.rating`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.schema.precision import Arithmetic

RATE_COLUMNS: dict[str, str] = {
    arithmetic: f"rate_{arithmetic}"
    for arithmetic in Arithmetic
    if arithmetic not in (Arithmetic.UNCLEAR, Arithmetic.WRONG)
}
"""The columns of a record with the rate of products, by number format."""

CONVOLUTION_COLUMNS: dict[str, str] = {
    arithmetic: f"rate_conv_{arithmetic}"
    for arithmetic in (Arithmetic.FLOAT32, Arithmetic.FLOAT16, Arithmetic.BFLOAT16)
}
"""The columns with the rate of convolutions, which is measured only on a CPU."""

RATES: dict[str, str] = {
    **{column: f"{format} products" for format, column in RATE_COLUMNS.items()},
    **{column: f"{format} convolutions" for format, column in CONVOLUTION_COLUMNS.items()},
    "rate_copy": "copies",
}
"""Columns that are higher on a faster machine, and what each is the rate of."""

UNITS = {column: "B/s" if column == "rate_copy" else "FLOP/s" for column in RATES}

COPY, PRODUCT = "rate_copy", RATE_COLUMNS[Arithmetic.FLOAT32]
"""One column of each unit, to write other rates of that unit by."""

CALL = "call_time_s"  # the column of the least time of an operation

SAME_DEVICE = ("gpu", "cpu", "torch", "torch_threads", "variables")
"""Columns in which two rows must agree for their rates to be comparable."""


@dataclass(frozen=True)
class Rates:
    """The machine's rates, measured before its cases; None or absent if not measured."""

    products: Mapping[str, float] = field(default_factory=dict)  # FLOP/s of large ones, by format
    copy: float | None = None  # bytes a second that a large copy reads and writes
    call_s: float | None = None  # time of the smallest operation, in a long sequence
    convolutions: Mapping[str, float] = field(default_factory=dict)  # FLOP/s; only on a CPU


def take_rates(columns: Mapping[str, Any], peaks: Mapping[str, float] | None = None) -> Rates:
    """Return the rates in the columns of a record, its environment or of
    `bench.machine.peaks.list_peaks`. Rates of none, or above ``peaks``, were measured wrongly, and
    are left out."""
    known = {
        name: float(value)
        for name in (*RATES, CALL)
        if (value := columns.get(name)) is not None
        and value > 0  # not of NaN
        and not value > (peaks or {}).get(name, math.inf)
    }
    products, convolutions = (
        {str(format): known[name] for format, name in names.items() if known.get(name)}
        for names in (RATE_COLUMNS, CONVOLUTION_COLUMNS)
    )
    return Rates(products, known.get(COPY), known.get(CALL), convolutions)


def write_rate(column: str, value: float) -> str:
    """Write a rate with its unit, to three digits; or the time of a call, to two.

    >>> write_rate("rate_float32", 51.24e12), write_rate("rate_copy", 4.4e9)
    ('51.2 TFLOP/s', '4.4 GB/s')
    """
    if column == CALL:
        return f"{1e6 * value:.2g} µs"
    scale, prefix = (1e12, "T") if value >= 1e12 else (1e9, "G")
    shown = f"{value / scale:,.0f}" if value >= 100 * scale else f"{value / scale:.3g}"
    return f"{shown} {prefix}{UNITS[column]}"


EMULATED, FASTER = 0.1, 1.1
"""Shares of float32's rate below which a format of fewer bits is emulated, and from which there are
instructions for it: CPUs without them stayed below 3 %, and those with them reached 130 to 380 %.
What is between is not known of a CPU. A GPU's tensor cores at least double the rate."""


def has_instructions(rate: float | None, usual: float | None, device: str) -> bool | None:
    """Return whether a device, cuda or cpu, has instructions for a format of fewer bits, by the
    rates of that format and of float32; None if they do not tell."""
    share = (rate or math.nan) / (usual or math.nan)
    if share >= FASTER:
        return True
    return False if share < (FASTER if device == "cuda" else EMULATED) else None


def find_halves(row: Mapping[Any, Any]) -> dict[str, bool]:
    """Return whether a CPU has instructions for each 16-bit format, as far as the rates of its row
    tell; empty for a GPU, whose name tells it."""
    halves = [] if row.get("gpu") else [Arithmetic.FLOAT16, Arithmetic.BFLOAT16]
    rates = {str(half): row.get(RATE_COLUMNS[half]) for half in halves}
    found = {name: has_instructions(rate, row.get(PRODUCT), "cpu") for name, rate in rates.items()}
    return {name: has for name, has in found.items() if has is not None}


def find_emulated(format: str, row: Mapping[Any, Any], convolves: bool) -> str:
    """Return what reaches so little of float32's rate in a format that it is emulated, by the rates
    in the columns of a row: ``float16 convolutions reach 0.5 % of float32's rate``. It is the worse
    of products and, if the network ``convolves``, convolutions; empty if both are fast enough, or
    were not measured, and for the formats of float32's products."""
    shares, device = dict[str, float](), "cuda" if row.get("gpu") else "cpu"
    if format in (Arithmetic.FLOAT32, Arithmetic.TFLOAT32):
        return ""
    for columns in (RATE_COLUMNS, CONVOLUTION_COLUMNS)[: 1 + convolves]:
        rate, usual = (row.get(columns.get(f, "")) or 0.0 for f in (format, Arithmetic.FLOAT32))
        if has_instructions(rate, usual, device) is False:
            shares[columns[format]] = rate / usual
    worst = min(shares, key=shares.__getitem__, default="")
    return worst and f"{RATES[worst]} reach {100 * shares[worst]:.2g} % of float32's rate"


# ------------------------------------------------------------------------- how they were measured


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
class DeviceRates:
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
