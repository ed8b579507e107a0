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


@dataclass(frozen=True)
class Rates:
    """What the machine was measured to do, before its cases; None or absent where it was not.

    Attributes:
        products: FLOP/s of a large matrix product, by number format as `bench.precision.Arithmetic`
            names it.
        copy: bytes a second that a large copy reads and writes.
        call_s: the smallest operation, of many one after the other, in s.
        convolutions: FLOP/s of convolutions, likewise; on a CPU alone.
    """

    products: Mapping[str, float] = field(default_factory=dict)
    copy: float | None = None
    call_s: float | None = None
    convolutions: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """A step under the profiler, the mean of several; times in s.

    Attributes:
        step_s: wall time of the step.
        busy_s: time in which kernels ran, any of them (a union over streams); on a CPU the sum of
            the operators' own times.
        input_wait_s: time in which none ran, for want of a batch.
        sync_wait_s: time in which none ran, since the program had waited for the device.
    """

    step_s: float
    busy_s: float
    input_wait_s: float = 0.0
    sync_wait_s: float = 0.0


PROFILED = ("profiled_step_s", "busy_s", "input_wait_s", "sync_wait_s")
"""The columns of a record that have a `Profile`, in the order of its fields."""


@dataclass(frozen=True)
class Step:
    """A median step of a case, not profiled, with the work in it.

    Attributes:
        step_s: its time in s.
        work: each row's ``time_s`` is None without a profile.
        arithmetic: what the products of float32 tensors are rounded to: float32 or tfloat32.
        device: cuda or cpu.
        peaks: the rates of the card's data sheet, which nothing exceeds; none of a CPU.
    """

    step_s: float
    work: Sequence[WorkRow]
    rates: Rates
    device: str
    arithmetic: str = "float32"
    profile: Profile | None = None
    peaks: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class Part:
    """A part of a step's time, of the time not profiled: a kind of work, or a wait.

    Attributes:
        name: a `bench.work.Kind` or a `bench.diagnosis.step.Wait`.
        time_s: all parts of a step add up to its time, but for what is left over.
        flop: of its operations that were counted; ``bytes`` likewise.
        floor_s: what that work would take at the machine's measured rates.
        bounds: its time by what limits it.
        counted_s: the time of its operations that were counted, all but what compilation fused.
        estimated: whether some of this time is `bench.diagnosis.breakdown.Timed.estimated`.
    """

    name: str
    time_s: float
    calls: int = 0
    flop: float = 0.0
    bytes: float = 0.0
    floor_s: float | None = None
    bounds: Mapping[Bound, float] = field(default_factory=dict)
    counted_s: float = 0.0
    estimated: bool = False


class Wait(Explained):
    """Time in which nothing was computed."""

    INPUT = "input_wait", "waiting for a batch"
    SYNCHRONISATION = "sync_wait", "after the program waited for the device"
    IDLE = "idle", "between operations"
