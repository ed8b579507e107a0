"""A step as the diagnosis sees it: what it did, how long that took, and what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.record import WorkRow
from bench.text import Explained


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


@dataclass(frozen=True)
class Part:
    """A part of the time of a step that is not profiled: a kind of work, or a wait. ``flop`` and
    ``bytes`` are of its counted operations, which take ``counted_s``: all but what compilation
    fused."""

    name: str  # a `bench.work.Kind` or a `Wait`
    time_s: float  # all parts add up to the step's time, less what is left over
    calls: int = 0
    flop: float = 0.0
    bytes: float = 0.0
    floor_s: float | None = None  # time of that work at the machine's measured rates
    bounds: Mapping[Bound, float] = field(default_factory=dict)  # its time by what limits it
    counted_s: float = 0.0
    estimated: bool = False  # some of this time is `bench.diagnosis.breakdown.Timed.estimated`
