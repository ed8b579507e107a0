"""The parts of an explanation: why one of two cases is faster or slower, and not faster still."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from bench.axis import Value, axis_flag
from bench.case import Case, format_value
from bench.diagnosis.breakdown import Breakdown, Ceiling, RateViolation
from bench.diagnosis.step import Step
from bench.limits import STEADY
from bench.rules import applies, go_together
from bench.text import Explained
from bench.verdict import Ratio


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


@dataclass(frozen=True)
class Option:
    """A change of one axis that may remedy a cause."""

    axis: str  # the axis that it changes
    flag: str  # as advice shows it
    better: Callable[[Value, Value], bool]  # whether the second value may remedy the first


def _turn(to: bool) -> Callable[[Value, Value], bool]:
    return lambda old, new: new is to and old is not to


def _is_more(old: Value, new: Value) -> bool:
    return isinstance(old, int) and isinstance(new, int) and new > old


LARGER = Option("batch_size", "a larger --batch-size", _is_more)
SMALLER = Option("batch_size", "a smaller --batch-size", lambda old, new: _is_more(new, old))
COMPILE = Option("compile", "--compile default", lambda old, new: old == Case.compile != new)
GRAPHS = Option("cuda_graphs", "--cuda-graphs on", _turn(True))
TUNED = Option("cudnn_benchmark", "--cudnn-benchmark on", _turn(True))
NHWC, NCHW = (
    Option("channels_last", f"--channels-last {'on' if to else 'off'}", _turn(to))
    for to in (True, False)
)
ON_DEVICE = Option("loader", "--loader device", lambda old, new: new == "device" != old)
WORKERS = Option("workers", "more --workers", _is_more)
NO_LIMIT = Option("memory_limit", "no --memory-limit", lambda old, new: new is None is not old)
FP32 = Option("precision", "--precision fp32", lambda old, new: new == "fp32" != old)
HALF = Option("precision", "--precision fp16", lambda old, new: (old, new) == ("fp16-amp", "fp16"))

CURES: dict[Cause, tuple[Option | str, ...]] = {
    Cause.MEMORY: (COMPILE,),  # fused operations move less
    Cause.BELOW_COPY: (),
    Cause.ARITHMETIC: (),
    Cause.PRODUCTS: (LARGER, TUNED),
    Cause.NO_TENSOR_CORES: (NHWC,),
    Cause.EMULATED: (FP32,),
    Cause.FLOAT32: (HALF,),
    Cause.ADDED: (COMPILE, HALF),
    Cause.LAYOUT: (NHWC, NCHW),
    Cause.LAUNCH: (LARGER, COMPILE, GRAPHS),
    Cause.SYNCHRONISATION: (
        "reading losses (.item(), .cpu(), print) once an epoch, not each step",
    ),
    Cause.MEMORY_LIMIT: (SMALLER, NO_LIMIT),
    Cause.LOADER: (WORKERS, ON_DEVICE),
    Cause.CLOCKS: (),
}
"""The remedies of every cause: options of this harness, or other advice."""

_ABSENT_AXES: dict[str, Callable[[Case], bool]] = {
    "cudnn_benchmark": lambda case: case.device == "cpu",
    "cuda_graphs": lambda case: not go_together(replace(case, cuda_graphs=True, profile=False)),
}
"""Axes that have no effect in some cases."""


def advise(cause: Cause, case: Case, alternatives: Alternatives) -> Iterator[Advice]:
    """Yield remedies for a cause in a case, with the measured speed-ups."""
    for option in CURES[cause]:
        if isinstance(option, str):
            yield Advice(option)
            continue
        old = getattr(case, option.axis)
        absent = _ABSENT_AXES.get(option.axis, lambda _: False)(case)
        # a number can always be larger or smaller
        open_ = type(old) is int or any(option.better(old, value) for value in _VALUES)
        if applies(option.axis, case) and not absent and open_:
            measured = alternatives.get(option.axis, {})
            tried = [
                Advice(_write_flag(option.axis, value), speedup)
                for value, speedup in measured.items()
                if option.better(old, value)
            ]
            if not tried and any(
                speedup > 1 and option.better(value, old) for value, speedup in measured.items()
            ):
                continue  # what was measured says the contrary
            best = max(tried, key=lambda one: one.speedup or 0.0, default=None)
            yield best or Advice(option.flag)


_VALUES: tuple[Value, ...] = (True, False, None, "default", "device", "fp32", "fp16")
"""Values that an option may prefer."""


def _write_flag(axis: str, value: Value) -> str:
    return f"{axis_flag(axis)} {format_value(value) or 'none'}"
