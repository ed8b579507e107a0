"""A step as the diagnosis sees it: what it did, how long that took, and the machine's rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.base.text import Explained
from bench.schema.precision import Arithmetic
from bench.schema.record import WorkRow
from bench.schema.work import Kind


class Bound(Explained):
    """What limits a part of a step."""

    COMPUTE = "compute", "arithmetic"
    MEMORY = "memory", "memory traffic"
    LAUNCH = "launch", "starting operations that are shorter than their start"
    LOADER = "loader", "waiting for batches"
    SYNCHRONISATION = "synchronisation", "waiting of the program for the device"


class Wait(Explained):
    """Time in which nothing was computed."""

    INPUT = "input_wait", "waiting for a batch"
    SYNCHRONISATION = "sync_wait", "after the program waited for the device"
    IDLE = "idle", "between operations"


@dataclass(frozen=True)
class Rates:
    """The machine's rates, measured before its cases; None or absent if not measured."""

    products: Mapping[str, float] = field(default_factory=dict)  # FLOP/s of large ones, by format
    copy: float | None = None  # bytes a second that a large copy reads and writes
    call_s: float | None = None  # time of the smallest operation, in a long sequence
    convolutions: Mapping[str, float] = field(default_factory=dict)  # FLOP/s; only on a CPU


@dataclass(frozen=True)
class Profile:
    """A step under the profiler, the mean of several; times in s."""

    step_s: float  # wall time
    busy_s: float  # time with a running kernel; on a CPU the sum of operators' own times
    input_wait_s: float = 0.0  # time without one, waiting for a batch
    sync_wait_s: float = 0.0  # time without one, as the program had waited for the device


PROFILED = ("profiled_step_s", "busy_s", "input_wait_s", "sync_wait_s")
"""The columns of a record with a `Profile`, in the order of its fields."""


@dataclass(frozen=True)
class Step:
    """A median step of a case, not profiled, with the work in it."""

    step_s: float
    work: Sequence[WorkRow]  # without a profile each row's ``time_s`` is None
    rates: Rates
    device: str  # cuda or cpu
    arithmetic: str = "float32"  # what float32 products are rounded to: this or tfloat32
    profile: Profile | None = None
    peaks: Rates = field(default_factory=Rates)  # from the card's data sheet; none for a CPU


# -------------------------------------------------------------------------------------------- rates
#
# The measured rates of a machine, their comparison, and the least time of counted work at them.
#
# If a row's floor is above its time, its data was in a cache, which the copy was too large for.
#
# In all functions, ``row`` is of a step, ``rates`` are the machine's, ``format`` is as in
# `bench.schema.work.Label`, and ``arithmetic`` is what products of float32 are rounded to. None
# means not counted, or that a rate was not measured.


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

EMULATED, FASTER = 0.1, 1.1
"""Shares of float32's rate below which a format of fewer bits is emulated, and from which there are
instructions for it: CPUs without them stayed below 3 %, and those with them reached 130 to 380 %.
What is between is not known of a CPU. A GPU's tensor cores at least double the rate."""

CONVOLUTIONS = (Kind.CONVOLUTION_1X1, Kind.CONVOLUTION, Kind.GROUPED)


def take_rates(columns: Mapping[str, Any], peaks: Mapping[str, float] | None = None) -> Rates:
    """Return the rates in the columns of a record, its environment or of
    `bench.machine.peaks.list_peaks`. Rates above ``peaks`` were measured wrongly, and are left
    out."""
    known = {
        name: float(value)
        for name in (*RATES, CALL)
        if (value := columns.get(name)) is not None
        and value == value
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


def write_ms(time_s: float) -> str:
    """Write a time of a step in ms, to three digits.

    >>> write_ms(0.3124), write_ms(0.0052), write_ms(1.5)
    ('312', '5.2', '1,500')
    """
    value = time_s * 1e3
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


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
    found: dict[str, bool] = {}
    if row.get("gpu"):
        return found
    for half in (Arithmetic.FLOAT16, Arithmetic.BFLOAT16):
        known = has_instructions(row.get(RATE_COLUMNS[half]), row.get(PRODUCT), "cpu")
        if known is not None:
            found[str(half)] = known
    return found


def find_emulated(format: str, row: Mapping[Any, Any], convolves: bool = True) -> str:
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


def name_arithmetic(format: str, arithmetic: str) -> str:
    """Return what products of a format are computed in; for float32 what they are rounded to."""
    if format == Arithmetic.FLOAT32:
        return arithmetic
    return Arithmetic.FLOAT8 if format.startswith(Arithmetic.FLOAT8) else format


def find_rate(format: str, rates: Rates, arithmetic: str, kind: str = "") -> float | None:
    """Return the FLOP/s of products of a format, in work of a `Kind`. For convolutions it is the
    higher of their rate and that of products, as neither alone bounds other convolutions, unless
    convolutions are emulated: then it is theirs."""
    name = name_arithmetic(format, arithmetic)
    rate = rates.products.get(name)
    if kind not in CONVOLUTIONS or (own := rates.convolutions.get(name)) is None:
        return rate
    usual = rates.convolutions.get(Arithmetic.FLOAT32)
    emulated = has_instructions(own, usual, "cpu") is False  # of a GPU there are none
    return own if rate is None or emulated else max(own, rate)


def find_limit(row: WorkRow, rates: Rates, arithmetic: str) -> tuple[float, Bound] | None:
    """Return the s that a row's work takes at the machine's rates, and which of arithmetic and
    memory traffic sets it: the longer, as they overlap. The time to start calls is not included."""
    rate = find_rate(row.format, rates, arithmetic, row.kind)
    if row.flop is None or row.bytes is None or rates.copy is None or (row.flop and rate is None):
        return None
    times = row.flop / rate if rate else 0.0, row.bytes / rates.copy
    return max(times), Bound.COMPUTE if times[0] >= times[1] else Bound.MEMORY
