"""Why one of two cases is faster or slower, and not faster still: what an explanation holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.axis import Value
from bench.case import Case
from bench.diagnosis.breakdown import Breakdown
from bench.diagnosis.ceiling import Beaten, Ceiling
from bench.diagnosis.step import Step
from bench.limits import STEADY
from bench.record import WorkRow
from bench.text import Explained
from bench.verdict import Ratio


class Cause(Explained):
    """What the time of a step goes to."""

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
    """One of the two cases of a pair.

    Attributes:
        name: what tells it from the other: ``fp32``, ``compile default``.
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
        before_estimated: whether the first is an estimate, of which some is no measured time.
        after_estimated: whether the second is.
    """

    name: str
    before_s: float
    after_s: float
    before_estimated: bool = False
    after_estimated: bool = False

    @property
    def change_s(self) -> float:
        """What it adds to the step; below 0 where it gained."""
        return self.after_s - self.before_s

    @property
    def estimated(self) -> bool:
        """Whether one of the two is an estimate."""
        return self.before_estimated or self.after_estimated


LEFT_OVER = "left_over"
"""The name of the change that no kind of work or wait explains."""


@dataclass(frozen=True)
class Run:
    """What ran for a part of a network's work: an operation, or a kernel of it.

    ``estimated`` is as `bench.diagnosis.breakdown.Timed` has it.
    """

    name: str
    row: WorkRow
    time_s: float
    estimated: bool = False


@dataclass(frozen=True)
class Swap:
    """The same work done by another operation or kernel in B than in A."""

    before: Run
    after: Run


@dataclass(frozen=True)
class Advice:
    """A change that may mend a cause, and what was measured of it.

    Attributes:
        what: a flag with its value, or what to do.
        speedup: time per item without it over that with it; None where nobody measured it.
        source: where that was measured: ``in this sweep``.
        case: of what, where that is another.
    """

    what: str
    speedup: float | None = None
    source: str = ""
    case: str = ""


@dataclass(frozen=True)
class Reason:
    """What a cause takes of both steps.

    Attributes:
        cause: why.
        before_s: of A's step.
        after_s: of B's.
        evidence: a sentence with B's figures.
        advice: what may mend it.
        before_estimated: whether the first is of operations of which a time is an estimate.
        after_estimated: whether the second is.
    """

    cause: Cause
    before_s: float
    after_s: float
    evidence: str = ""
    advice: tuple[Advice, ...] = ()
    before_estimated: bool = False
    after_estimated: bool = False

    @property
    def change_s(self) -> float:
        """What it adds to the step; below 0 where it gained."""
        return self.after_s - self.before_s


@dataclass(frozen=True)
class Explanation:
    """Why B is faster or slower than A, and not faster still.

    Attributes:
        axis: in which the two differ.
        items: that both steps train on, or are scaled to.
        speedup: time of A over that of B, with the interval of the repeats.
        ceiling: the most that B can gain; None where it is not known.
        beaten: what was faster than the machine's rates allow: these were measured too low, and
            nothing that rests on them is told; None where nothing was.
        changes: from A's step to B's, those that changed most first, `LEFT_OVER` last; they add up
            to the difference.
        swaps: work that another operation or kernel does in B, what takes longest first.
        reasons: what both steps' times go to, what matters most first; with ``unexplained_s`` they
            add up to the steps. None with ``beaten``.
        unexplained_s: what is left of A's step, and of B's.
        about: what the two have in common, by which they are told from other pairs.
    """

    axis: str
    a: Side
    b: Side
    items: int
    speedup: Ratio
    ceiling: Ceiling | None
    beaten: Beaten | None
    changes: tuple[Change, ...]
    swaps: tuple[Swap, ...]
    reasons: tuple[Reason, ...]
    unexplained_s: tuple[float, float]
    about: str = ""

    @property
    def change_s(self) -> float:
        """B's step less A's."""
        return self.b.step.step_s - self.a.step.step_s

    @property
    def lost(self) -> bool:
        """Whether B is slower by more than noise: then the question is what it lost by."""
        return self.change_s > STEADY * self.a.step.step_s

    def share(self, reason: Reason) -> float:
        """What a reason has of the answer: of what was lost, or else of B's step."""
        return reason.change_s / self.change_s if self.lost else reason.after_s / self.b.step.step_s

    def estimates(self, reason: Reason) -> bool:
        """Whether that share is an estimate."""
        return reason.after_estimated or (self.lost and reason.before_estimated)


Alternatives = Mapping[str, Mapping[Value, float]]
"""Cases equal to B but for one axis, by that axis and its value: B's time an item over theirs."""
