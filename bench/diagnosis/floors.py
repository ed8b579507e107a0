"""The least time that counted work takes at the rates that the machine was measured to reach.

A row whose floor is above its time had its data in a cache, which the copy was too large for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.diagnosis.step import Bound, Rates, Step
from bench.precision import Arithmetic
from bench.record import WorkRow

RATE_COLUMNS = {
    arithmetic: f"rate_{arithmetic}"
    for arithmetic in Arithmetic
    if arithmetic not in (Arithmetic.UNCLEAR, Arithmetic.WRONG)
}
"""The column of a record that has the rate of products, by number format."""


def take_rates(columns: Mapping[str, Any]) -> Rates:
    """The rates in a record's columns, or in the fields of its `bench.record.Environment`."""

    def take(name: str) -> float | None:
        value = columns.get(name)
        return None if value is None or math.isnan(value) else float(value)

    products = {str(format): take(name) for format, name in RATE_COLUMNS.items()}
    return Rates(
        {format: rate for format, rate in products.items() if rate},
        take("rate_copy"),
        take("call_time_s"),
    )


def find_rate(format: str, rates: Rates, arithmetic: str) -> float | None:
    """FLOP/s of products of a number format; None where it was not measured.

    Args:
        format: as `bench.work.Label` has it.
        rates: of the machine.
        arithmetic: what products of float32 are rounded to.
    """
    if format == Arithmetic.FLOAT32:
        format = arithmetic
    return rates.products.get("float8" if format.startswith("float8") else format)


def find_floor(row: WorkRow, rates: Rates, arithmetic: str) -> float | None:
    """The s of a step that a row's work takes at the machine's rates.

    That is its arithmetic or its memory traffic, whichever takes longer: they overlap. What calls
    take to start is not in it.

    Args:
        row: of a step.
        rates: of the machine.
        arithmetic: what products of float32 are rounded to.

    Returns:
        None where the row was not counted, or a rate that it needs was not measured.
    """
    times = _find_times(row, rates, arithmetic)
    return None if times is None else max(times)


def find_bound(row: WorkRow, rates: Rates, arithmetic: str) -> Bound | None:
    """What limits a row: launch where its work is done before another call has started.

    Args:
        row: of a step.
        rates: of the machine.
        arithmetic: what products of float32 are rounded to.

    Returns:
        None as `find_floor`.
    """
    floor = find_floor(row, rates, arithmetic)
    if floor is not None and rates.call_s is not None and floor < row.calls * rates.call_s:
        return Bound.LAUNCH
    return find_limit(row, rates, arithmetic)


def find_limit(row: WorkRow, rates: Rates, arithmetic: str) -> Bound | None:
    """Which of arithmetic and memory traffic a row's floor is; None as `find_floor`."""
    times = _find_times(row, rates, arithmetic)
    if times is None:
        return None
    computing, moving = times
    return Bound.COMPUTE if computing >= moving else Bound.MEMORY


def floor_step(step: Step) -> float | None:
    """The s that all counted work of a step takes at the machine's rates, one row after another.

    Returns:
        None where nothing was counted, or `find_floor` tells none of a row that was.
    """
    counted = [row for row in step.work if row.bytes is not None]
    floors = [find_floor(row, step.rates, step.arithmetic) for row in counted]
    known = [floor for floor in floors if floor is not None]
    return sum(known) if known and len(known) == len(counted) else None


def _find_times(row: WorkRow, rates: Rates, arithmetic: str) -> tuple[float, float] | None:
    """The s of a row's arithmetic and of its memory traffic, each at its rate."""
    if row.flop is None or row.bytes is None or rates.copy is None:
        return None
    rate = find_rate(row.format, rates, arithmetic)
    if row.flop and rate is None:
        return None
    return row.flop / rate if rate else 0.0, row.bytes / rates.copy
