"""Why one case is not faster than another by as much as was hoped: what an explanation holds."""

from __future__ import annotations

from dataclasses import dataclass

from bench.case import Case
from bench.diagnosis.breakdown import Breakdown
from bench.diagnosis.step import Step
from bench.text import Explained
from bench.verdict import Ratio


class Cause(Explained):
    """What a step may lose time by."""

    TF32 = "tf32", "TF32 in the baseline"
    LOADER = "loader", "the loader"
    SYNCHRONISATION = "synchronisation", "waiting of the program for the device"
    MEMORY_LIMIT = "memory_limit", "an allocator short of memory"
    LAUNCH = "launch", "starting operations"
    ADDED = "added", "casts, loss scaling and master weights"
    LAYOUT = "layout", "changes of memory layout"
    EMULATED = "emulated", "a number format that this device emulates"
    NO_TENSOR_CORES = "no_tensor_cores", "convolutions without tensor cores"
    CLOCKS = "clocks", "lower clocks"
    FLOAT32 = "float32", "operations kept in fp32"
    MEMORY = "memory", "memory traffic"
    PRODUCTS = "products", "products below the machine's rate"


@dataclass(frozen=True)
class Side:
    """One of the two cases of a pair.

    Attributes:
        name: what tells it from the other: ``fp32``, ``compile on``.
        case: its settings.
        step: its step; times of the side before are scaled to as many items as the other's has.
        breakdown: of that step.
        format: what the inputs of its products are rounded to, as `bench.precision.Arithmetic`.
        times: median step of each repeat in s, scaled likewise.
        sm_clock_mhz: median SM clock; None where it is not known.
        alloc_retries: allocations retried after freeing the cache.
    """

    name: str
    case: Case
    step: Step
    breakdown: Breakdown
    format: str
    times: tuple[float, ...] = ()
    sm_clock_mhz: float | None = None
    alloc_retries: int = 0


@dataclass(frozen=True)
class Change:
    """A part of the way from one step time to the other.

    Attributes:
        name: a `bench.work.Kind`, a `bench.diagnosis.step.Wait`, or `LEFT_OVER`.
        before_s: what side A takes for it.
        after_s: what side B takes.
    """

    name: str
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        """What it adds to the step; below 0 where it gained."""
        return self.after_s - self.before_s


LEFT_OVER = "left_over"
"""The name of the change that no kind of work or wait explains."""


@dataclass(frozen=True)
class Trial:
    """What the sweep measured of an option that may mend a cause.

    Attributes:
        flag: as a command line has it: ``--compile on``.
        speedup: time per item of B over that of B with this option.
    """

    flag: str
    speedup: float


@dataclass(frozen=True)
class Reason:
    """What a cause adds to the gap.

    Attributes:
        cause: why.
        time_s: of the gap; below 0 where the case gained more than was hoped.
        share: of the gap.
        evidence: a sentence with the figures.
        option: what may mend it, a sentence; empty for nothing.
        tried: what the sweep's own cases with that option measured.
    """

    cause: Cause
    time_s: float
    share: float
    evidence: str
    option: str = ""
    tried: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Why B is not faster than A by as much as was hoped.

    Attributes:
        axis: in which the two differ.
        items: that both steps train on, or are scaled to.
        speedup: time of A over that of B, with the interval of the repeats.
        hoped: what the speed-up would be were all time products at the rates of large ones; None
            where the axis promises none: ``gap_s`` is then all of the difference.
        ceiling: the speed-up were all of B's work done at the machine's rates; None where these
            were not measured, and of compiled work, which moves less than was counted.
        changes: from A's step to B's, those that changed most first, `LEFT_OVER` last; they add up
            to the difference.
        gap_s: B's time less A's over what was hoped.
        reasons: of the gap, those that explain most first; with ``unexplained_s`` they add up to
            it.
        unexplained_s: what is left of the gap.
        about: what the two have in common, by which they are told from other pairs.
    """

    axis: str
    a: Side
    b: Side
    items: int
    speedup: Ratio
    hoped: float | None
    ceiling: float | None
    changes: tuple[Change, ...]
    gap_s: float
    reasons: tuple[Reason, ...]
    unexplained_s: float
    about: str = ""
