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
    """What the machine was measured to do, before its cases; None or absent where it was not."""

    products: Mapping[str, float] = field(default_factory=dict)  # FLOP/s of large ones, by format
    copy: float | None = None  # bytes a second that a large copy reads and writes
    call_s: float | None = None  # the smallest operation, of many one after the other
    convolutions: Mapping[str, float] = field(default_factory=dict)  # FLOP/s; on a CPU alone


@dataclass(frozen=True)
class Profile:
    """A step under the profiler, the mean of several; times in s."""

    step_s: float  # wall time
    busy_s: float  # in which any kernel ran; on a CPU the sum of the operators' own times
    input_wait_s: float = 0.0  # in which none ran, for want of a batch
    sync_wait_s: float = 0.0  # in which none ran, since the program had waited for the device


PROFILED = ("profiled_step_s", "busy_s", "input_wait_s", "sync_wait_s")
"""The columns of a record that have a `Profile`, in the order of its fields."""


@dataclass(frozen=True)
class Step:
    """A median step of a case, not profiled, with the work in it."""

    step_s: float
    work: Sequence[WorkRow]  # of each row ``time_s`` is None without a profile
    rates: Rates
    device: str  # cuda or cpu
    arithmetic: str = "float32"  # what products of float32 are rounded to; or tfloat32
    profile: Profile | None = None
    peaks: Rates = field(default_factory=Rates)  # of the card's data sheet; none of a CPU


@dataclass(frozen=True)
class Part:
    """A part of a step's time, of the time not profiled: a kind of work, or a wait. ``flop`` and
    ``bytes`` are of its operations that were counted, which take ``counted_s``: all but what
    compilation fused."""

    name: str  # a `bench.work.Kind` or a `Wait`
    time_s: float  # all parts of a step add up to its time, but for what is left over
    calls: int = 0
    flop: float = 0.0
    bytes: float = 0.0
    floor_s: float | None = None  # what that work would take at the machine's measured rates
    bounds: Mapping[Bound, float] = field(default_factory=dict)  # its time by what limits it
    counted_s: float = 0.0
    estimated: bool = False  # some of this time is `bench.diagnosis.breakdown.Timed.estimated`
