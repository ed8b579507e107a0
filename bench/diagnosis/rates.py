"""The measured rates of a machine, for people, and held against those of another time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.diagnosis.floors import CONVOLUTION_COLUMNS, RATE_COLUMNS
from bench.limits import SLOWED
from bench.precision import Arithmetic

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


def write_losses(losses: Mapping[str, float]) -> str:
    """What is lost, for people: ``float32 products −32 %, copies −12 %``."""
    return ", ".join(f"{RATES[column]} −{100 * share:.0f} %" for column, share in losses.items())
