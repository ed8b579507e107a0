"""A step as the diagnosis sees it: what it did, how long that took, and the machine's rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.base.text import Explained
from bench.profile.rates import Rates, has_instructions
from bench.schema.precision import Arithmetic
from bench.schema.record import WorkRow
from bench.schema.work import WorkKind


class Bound(Explained):
    """What limits a part of a step."""

    COMPUTE = "compute", "arithmetic"
    MEMORY = "memory", "memory traffic"
    LAUNCH = "launch", "starting operations that are shorter than their start"
    LOADER = "loader", "waiting for batches"
    SYNCHRONISATION = "synchronisation", "waiting of the program for the device"
    EXCHANGE = "exchange", "exchange between processes, or waiting for the others"


class Wait(Explained):
    """Time in which nothing was computed."""

    INPUT = "input_wait", "waiting for a batch"
    SYNCHRONISATION = "sync_wait", "after the program waited for the device"
    IDLE = "idle", "between operations"


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
class StepWork:
    """A median step of a case, not profiled, with the work in it."""

    step_s: float
    work: Sequence[WorkRow]  # without a profile each row's ``time_s`` is None
    rates: Rates
    device: str  # cuda or cpu
    arithmetic: str = "float32"  # what float32 products are rounded to: this or tfloat32
    profile: Profile | None = None
    peaks: Rates = field(default_factory=Rates)  # from the card's data sheet; none for a CPU


# ------------------------------------------------------------------------------ work at these rates
#
# If a row's floor is above its time, its data was in a cache, which the copy was too large for.
#
# In all functions, ``row`` is of a step, ``rates`` are the machine's, ``format`` is as in
# `bench.schema.work.Label`, and ``arithmetic`` is what products of float32 are rounded to. None
# means not counted, or that a rate was not measured.


CONVOLUTIONS = (WorkKind.CONVOLUTION_1X1, WorkKind.CONVOLUTION, WorkKind.GROUPED)


def write_ms(time_s: float) -> str:
    """Write a time of a step in ms, to three digits.

    >>> write_ms(0.3124), write_ms(0.0052), write_ms(1.5)
    ('312', '5.2', '1,500')
    """
    value = time_s * 1e3
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def name_arithmetic(format: str, arithmetic: str) -> str:
    """Return what products of a format are computed in; for float32 what they are rounded to."""
    if format == Arithmetic.FLOAT32:
        return arithmetic
    return Arithmetic.FLOAT8 if format.startswith(Arithmetic.FLOAT8) else format


def find_rate(format: str, rates: Rates, arithmetic: str, kind: str = "") -> float | None:
    """Return the FLOP/s of products of a format, in work of a `WorkKind`. For convolutions it is
    the higher of their rate and that of products, as neither alone bounds other convolutions,
    unless convolutions are emulated: then it is theirs."""
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
