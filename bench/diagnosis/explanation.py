"""The parts of an explanation: why one of two cases is faster or slower, and not faster still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.axis import Value
from bench.case import Case
from bench.diagnosis.breakdown import Breakdown
from bench.diagnosis.ceiling import Ceiling, RateViolation
from bench.diagnosis.step import Step
from bench.limits import STEADY
from bench.text import Explained
from bench.verdict.ratio import Ratio


class Cause(Explained):
    """What the time of a step is spent on."""

    MEMORY = "memory", "memory traffic"
    BELOW_COPY = "below_copy", "memory-bound kernels below the rate of copies"
    ARITHMETIC = "arithmetic", "arithmetic of products"
    PRODUCTS = "products", "products below the machine's rate"
    NO_TENSOR_CORES = "no_tensor_cores", "convolutions without tensor cores"
    EMULATED = "emulated", "products in a number format that this device emulates"
    FLOAT32 = "float32", "operations kept in fp32"
    ADDED = "added", "casts and loss scaling"
    LAYOUT = "layout", "changes of memory layout"
    LAUNCH = "launch", "starting operations"
    SYNCHRONISATION = "synchronisation", "waiting of the program for the device"
    MEMORY_LIMIT = "memory_limit", "an allocator short of memory"
    LOADER = "loader", "the loader"
    CLOCKS = "clocks", "lower clocks"


@dataclass(frozen=True)
class Side:
    """One of the two cases of a pair. Times of A are scaled to the number of items in B's step."""

    name: str  # its difference from the other: ``fp32``, ``compile default``
    case: Case
    step: Step
    breakdown: Breakdown
    format: str  # what its products' inputs are rounded to, as `bench.precision.Arithmetic`
    times: tuple[float, ...] = ()  # the median step of each repeat, in s
    sm_clock_mhz: float | None = None  # the median; None if not known
    alloc_retries: int = 0  # allocations retried after freeing the cache


@dataclass(frozen=True)
class Change:
    """The time of one part in A's step and in B's, and whether some of it is estimated."""

    name: str  # a `bench.work.Kind`, a `bench.diagnosis.step.Wait`, or `LEFT_OVER`
    before_s: float
    after_s: float
    before_estimated: bool = False
    after_estimated: bool = False

    @property
    def change_s(self) -> float:
        return self.after_s - self.before_s

    @property
    def estimated(self) -> bool:
        return self.before_estimated or self.after_estimated


LEFT_OVER = "left_over"  # the name of the change that no kind of work or wait explains


@dataclass(frozen=True)
class Advice:
    """A change that may remedy a cause, and its measured effect."""

    what: str  # a flag with its value, or what to do
    speedup: float | None = None  # time per item without it over with it, in this sweep; None if
    # it was not measured


@dataclass(frozen=True)
class Reason(Change):
    """The time of a cause in both steps; the evidence is a sentence with B's figures."""

    evidence: str = ""
    advice: tuple[Advice, ...] = ()

    @property
    def cause(self) -> Cause:
        return Cause(self.name)


@dataclass(frozen=True)
class Explanation:
    """Why B is faster or slower than A, and not faster still. With a ``violation``, something was
    faster than the machine's rates allow: these were measured too low, and there is neither a
    ceiling nor reasons. The changes add up to the difference of the steps, with `LEFT_OVER` last;
    the reasons and ``unexplained_s`` add up to the steps. Changes and reasons are sorted, the
    largest first."""

    axis: str  # the axis in which the two differ
    a: Side
    b: Side
    items: int  # per step, which both train on or are scaled to
    speedup: Ratio  # time of A over that of B, with the interval of the repeats
    ceiling: Ceiling | None  # the most that B can gain; None if not known
    violation: RateViolation | None
    changes: tuple[Change, ...]
    reasons: tuple[Reason, ...]
    unexplained_s: tuple[float, float]  # the rest of A's step, and of B's
    about: str = ""  # what the two have in common, unlike other pairs

    @property
    def change_s(self) -> float:
        """B's step time less A's."""
        return self.b.step.step_s - self.a.step.step_s

    @property
    def lost(self) -> bool:
        """Whether B is slower by more than noise: then the reasons explain the loss."""
        return self.change_s > STEADY * self.a.step.step_s

    def share(self, reason: Reason) -> float:
        """Return the share of a reason in the loss, if B lost, or else in B's step."""
        return reason.change_s / self.change_s if self.lost else reason.after_s / self.b.step.step_s

    def estimates(self, reason: Reason) -> bool:
        return reason.after_estimated or (self.lost and reason.before_estimated)


Alternatives = Mapping[str, Mapping[Value, float]]
"""B's time per item over that of cases that differ in one axis, by that axis and its value."""
