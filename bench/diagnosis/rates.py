"""The measured rates of a machine, for people and held against those of another time, and the least
time that counted work takes at them.

A row whose floor is above its time had its data in a cache, which the copy was too large for.

Everywhere ``row`` is of a step, ``rates`` are the machine's, ``format`` is of `bench.work.Label`,
and ``arithmetic`` is what the products of float32 are rounded to. What is None was not counted, or
needs a rate that was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.diagnosis.step import Bound, Rates, Step
from bench.limits import SLOWED
from bench.precision import Arithmetic
from bench.record import WorkRow
from bench.work import Kind

RATE_COLUMNS: dict[str, str] = {
    arithmetic: f"rate_{arithmetic}"
    for arithmetic in Arithmetic
    if arithmetic not in (Arithmetic.UNCLEAR, Arithmetic.WRONG)
}
"""The column of a record that has the rate of products, by number format."""

CONVOLUTION_COLUMNS: dict[str, str] = {
    arithmetic: f"rate_conv_{arithmetic}"
    for arithmetic in (Arithmetic.FLOAT32, Arithmetic.FLOAT16, Arithmetic.BFLOAT16)
}
"""That of convolutions, which are measured on a CPU."""

RATES: dict[str, str] = {
    **{column: f"{format} products" for format, column in RATE_COLUMNS.items()},
    **{column: f"{format} convolutions" for format, column in CONVOLUTION_COLUMNS.items()},
    "rate_copy": "copies",
}
"""Columns that are higher on a faster machine, and what of it each is the rate of."""

UNITS = {column: "B/s" if column == "rate_copy" else "FLOP/s" for column in RATES}

COPY, PRODUCT = "rate_copy", RATE_COLUMNS[Arithmetic.FLOAT32]
"""Columns of one rate of each unit, to write others of that unit by."""

CALL = "call_time_s"  # the column of the time that an operation takes at least

SAME_DEVICE = ("gpu", "cpu", "torch", "torch_threads", "variables")
"""Columns on which two rows agree whose rates should be alike."""

_EMULATED = 0.1
"""Of the rate of float32 products: CPUs without instructions for a half stayed below 3 % of it, and
those with them reached 130 to 380 %."""

CONVOLUTIONS = (Kind.CONVOLUTION_1X1, Kind.CONVOLUTION, Kind.GROUPED)


def take_rates(columns: Mapping[str, Any], peaks: Mapping[str, float] | None = None) -> Rates:
    """The rates in the columns of a record, its environment or of `bench.gpu.peaks.list_peaks`. One
    above that of ``peaks``, by the same columns, was measured wrongly, and is left out."""

    def take(name: str) -> float | None:
        value = columns.get(name)
        if value is None or math.isnan(value) or value > (peaks or {}).get(name, math.inf):
            return None
        return float(value)

    products, convolutions = (
        {str(format): rate for format, name in columns_of.items() if (rate := take(name))}
        for columns_of in (RATE_COLUMNS, CONVOLUTION_COLUMNS)
    )
    return Rates(products, take("rate_copy"), take("call_time_s"), convolutions)


def choose_prefix(rate: float) -> tuple[float, str]:
    """What a rate is counted in, and the letter of it: T where there are as many, or else G."""
    return (1e12, "T") if rate >= 1e12 else (1e9, "G")


def write_rate(column: str, value: float) -> str:
    """A rate with its unit, to three digits; or the time of a call, to two.

    >>> write_rate("rate_float32", 51.24e12), write_rate("rate_copy", 4.4e9)
    ('51.2 TFLOP/s', '4.4 GB/s')
    """
    if column == CALL:
        return f"{1e6 * value:.2g} µs"
    scale, prefix = choose_prefix(value)
    shown = f"{value / scale:,.0f}" if value >= 100 * scale else f"{value / scale:.3g}"
    return f"{shown} {prefix}{UNITS[column]}"


def find_losses(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[str, float]:
    """Which rates are lower than before by more than `SLOWED`, and by which share, largest first.
    Both are columns of a record; None or NaN for a rate that was not measured."""
    losses = {}
    for column in RATES:
        a, b = before.get(column), now.get(column)
        if a and b and not math.isnan(a) and not math.isnan(b) and 1 - b / a > SLOWED:
            losses[column] = 1 - b / a
    return dict(sorted(losses.items(), key=lambda item: -item[1]))


def find_halves(row: Mapping[Any, Any]) -> dict[str, bool]:
    """Which halves a CPU has instructions for, as far as the rates of a row of it tell; nothing of
    a GPU, which is what its name says."""
    found: dict[str, bool] = {}
    if row.get("gpu"):
        return found
    for half in (Arithmetic.FLOAT16, Arithmetic.BFLOAT16):
        share = (row.get(RATE_COLUMNS[half]) or math.nan) / (row.get(PRODUCT) or math.nan)
        if share > 1 or share < _EMULATED:
            found[str(half)] = share > 1
    return found


def are_other_cpus(one: Mapping[str, bool], two: Mapping[str, bool]) -> bool:
    """Whether two CPUs are known to be unlike by their `find_halves`. In virtual machines they may
    have one name all the same."""
    return any(one[half] != two[half] for half in one.keys() & two.keys())


def write_losses(losses: Mapping[str, float]) -> str:
    """What is lost, for people: ``float32 products −32 %, copies −12 %``."""
    return ", ".join(f"{RATES[column]} −{100 * share:.0f} %" for column, share in losses.items())


def name_arithmetic(format: str, arithmetic: str) -> str:
    """What products of a number format are computed in: of float32, what these are rounded to."""
    if format == Arithmetic.FLOAT32:
        return arithmetic
    return Arithmetic.FLOAT8 if format.startswith(Arithmetic.FLOAT8) else format


def find_rate(format: str, rates: Rates, arithmetic: str, kind: str = "") -> float | None:
    """FLOP/s of products of a number format, in work of a `Kind`. Of convolutions it is the higher
    of their own and the products': neither alone is what another convolution reaches at most."""
    return max(find_rates(format, rates, arithmetic, kind).values(), default=None)


def find_rates(format: str, rates: Rates, arithmetic: str, kind: str = "") -> dict[str, float]:
    """The rates that `find_rate` takes the highest of, by their columns."""
    name = name_arithmetic(format, arithmetic)
    known = {RATE_COLUMNS.get(name, ""): rates.products.get(name)}
    if kind in CONVOLUTIONS:
        known[CONVOLUTION_COLUMNS.get(name, "")] = rates.convolutions.get(name)
    return {column: rate for column, rate in known.items() if rate is not None}


def find_times(row: WorkRow, rates: Rates, arithmetic: str) -> tuple[float, float] | None:
    """The s of a row's arithmetic and of its memory traffic, each at its rate."""
    if row.flop is None or row.bytes is None or rates.copy is None:
        return None
    rate = find_rate(row.format, rates, arithmetic, row.kind)
    if row.flop and rate is None:
        return None
    return row.flop / rate if rate else 0.0, row.bytes / rates.copy


def find_floor(row: WorkRow, rates: Rates, arithmetic: str) -> float | None:
    """The s of a step that a row's work takes at the machine's rates. That is its arithmetic or its
    memory traffic, whichever takes longer: they overlap. What calls take to start is not in it."""
    found = find_limit(row, rates, arithmetic)
    return found and found[0]


def find_limit(row: WorkRow, rates: Rates, arithmetic: str) -> tuple[float, Bound] | None:
    """A row's floor, and which of arithmetic and memory traffic it is."""
    if (times := find_times(row, rates, arithmetic)) is None:
        return None
    return max(times), Bound.COMPUTE if times[0] >= times[1] else Bound.MEMORY


def find_bound(row: WorkRow, rates: Rates, arithmetic: str) -> Bound | None:
    """What limits a row: launch where its work is done before another call has started."""
    found = find_limit(row, rates, arithmetic)
    if found and rates.call_s is not None and found[0] < row.calls * rates.call_s:
        return Bound.LAUNCH
    return found and found[1]


def floor_step(step: Step, times: Mapping[int, float] | None = None) -> dict[Bound, float] | None:
    """The s that all counted work of a step takes at the machine's rates, by what limits it. Its
    own ``step_s`` is not looked at. ``times`` are what operations took, by ``id(row)``: one that
    was faster than its floor takes that."""
    found = dict.fromkeys((Bound.COMPUTE, Bound.MEMORY), 0.0)
    for row in (row for row in step.work if row.bytes is not None):
        if (least := find_limit(row, step.rates, step.arithmetic)) is None:
            return None
        floor, limit = least
        found[limit] += min(floor, (times or {}).get(id(row), floor))
    return found if any(found.values()) else None
