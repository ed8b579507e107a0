"""Why one of two cases is faster or slower, and not faster still: causes, and sentences on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.axis import Value, axis_flag
from bench.case import Case, format_value
from bench.diagnosis.breakdown import (
    Breakdown,
    Ceiling,
    RateViolation,
    Timed,
    find_ceiling,
    find_violation,
)
from bench.diagnosis.step import (
    CONVOLUTION_COLUMNS,
    CONVOLUTIONS,
    COPY,
    PRODUCT,
    RATES,
    Bound,
    Step,
    Wait,
    find_limit,
    find_rates,
    name_arithmetic,
    write_rate,
)
from bench.limits import STEADY
from bench.precision import Arithmetic
from bench.record import WorkRow, read_kernels
from bench.rules import applies, go_together
from bench.text import ESTIMATE, Explained
from bench.verdict import Ratio
from bench.work import Kind


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


# ------------------------------------------------------------------------------------------- causes
#
# The time of a step, divided among causes: each operation and wait has one or more.
#
# The time that an operation needs at the machine's measured rates is due to memory traffic or
# arithmetic, whichever takes longer. The time beyond that has a cause of its own: a kernel below
# the rate of copies, products without tensor cores, and so on. Operations that are pure overhead,
# such as casts, are entirely due to their own cause.


FASTER = 1.1
"""Speed-up over float32 products below which a format counts as emulated."""

LOW = (Arithmetic.FLOAT16, Arithmetic.BFLOAT16, Arithmetic.FLOAT8)
"""Formats of fewer bits than float32."""

OWN_FORMAT = (Kind.OPTIMIZER, Kind.COPY)
"""Kinds that use float32 by design, not because autocast keeps them there."""


PLAIN = (
    *("ffma", "simt", "sgemm", "scudnn", "_direct_kernel", "depthwise", "dgrad_engine"),
    *("wgrad_alg", "convolve_common_engine"),
)
"""Parts of the names of kernels of cuBLAS, cuDNN and torch that multiply without tensor cores.
These names may also have a part of `TENSOR_CORES`: cuBLAS's ``sm80_xmma_gemm_..._ffma_...``."""

TENSOR_CORES = (
    *("h884", "s884", "h1688", "s1688", "i8816", "16816", "hmma", "xmma"),
    *("tensorop", "_tensor16", "wmma", "gmma", "nvjet", "flash_", "fmha"),
)
"""Parts of the names of kernels that use tensor cores: the first eight from NVIDIA's PyProf
(pyprof/prof/tc.py), the others from CUTLASS, and from cuBLAS and attention since Hopper."""


@dataclass(frozen=True)
class Share:
    """A part of a step's time due to one cause; ``timed`` is its operation, None for a wait."""

    cause: Cause
    time_s: float
    timed: Timed | None = None


def find_shares(side: Side, clock: float = 1.0) -> Iterator[Share]:
    """Divide a step's time among causes, leaving out time without a cause. ``clock`` is the step's
    clock rate over that of the step it is compared with, at most 1."""
    for timed in side.breakdown.rows:
        for cause, time_s in _divide(timed, side, clock):
            yield Share(cause, time_s, timed)
    limit = Cause.MEMORY_LIMIT if side.alloc_retries else None
    for wait, cause in (
        (Wait.INPUT, Cause.LOADER),
        (Wait.SYNCHRONISATION, limit or Cause.SYNCHRONISATION),
        (Wait.IDLE, limit or Cause.LAUNCH),
    ):
        if time_s := side.breakdown.find_time(wait):
            yield Share(cause, time_s)


_WHOLLY = {
    Kind.INPUT: Cause.LOADER,
    Kind.CAST: Cause.ADDED,
    Kind.LOSS_SCALING: Cause.ADDED,
    Kind.LAYOUT: Cause.LAYOUT,
}


def _divide(timed: Timed, side: Side, clock: float) -> Iterator[tuple[Cause, float]]:
    row, time_s, step = timed.row, timed.time_s, side.step
    if whole := _find_whole(timed, side):
        yield whole, time_s
        return
    if timed.bound is None:
        return
    if timed.layout_s:
        yield Cause.LAYOUT, timed.layout_s
        time_s -= timed.layout_s
    if timed.bound is Bound.COMPUTE and clock < 1:
        yield Cause.CLOCKS, time_s * (1 - clock)
        time_s *= clock
    moves = timed.bound is Bound.MEMORY
    if (least := find_limit(row, step.rates, step.arithmetic)) is None:
        # compiled into a kernel that was not counted
        yield Cause.MEMORY if moves else Cause.PRODUCTS, time_s
        return
    floor, limit = least
    yield Cause.MEMORY if limit is Bound.MEMORY else Cause.ARITHMETIC, min(floor, time_s)
    if time_s > floor:
        plain = row.kind in CONVOLUTIONS and lacks_tensor_cores(timed, step)
        slow = Cause.NO_TENSOR_CORES if plain else Cause.PRODUCTS
        yield Cause.BELOW_COPY if moves else slow, time_s - floor


def _find_whole(timed: Timed, side: Side) -> Cause | None:
    row, kind = timed.row, Kind(timed.row.kind)
    if cause := _WHOLLY.get(kind):
        return cause
    if timed.bound is Bound.LAUNCH:
        return Cause.LAUNCH
    if side.format in LOW and row.format == Arithmetic.FLOAT32 and kind not in OWN_FORMAT:
        return Cause.FLOAT32
    if timed.bound is not Bound.COMPUTE or row.format == Arithmetic.FLOAT32:
        return None
    usual, rate = _find_rates(row, side.step)
    return Cause.EMULATED if 0 < rate < FASTER * usual else None


def _find_rates(row: WorkRow, step: Step) -> tuple[float, float]:
    """Return the rates of float32 and of a row's format; 0 if not measured. Both are rates of
    convolutions if the row is one and both were measured, else of products."""
    name = name_arithmetic(row.format, step.arithmetic)
    own = step.rates.convolutions if row.kind in CONVOLUTIONS else {}
    rates = own if {Arithmetic.FLOAT32, name} <= own.keys() else step.rates.products
    return rates.get(Arithmetic.FLOAT32, 0.0), rates.get(name, 0.0)


def lacks_tensor_cores(timed: Timed, step: Step) -> bool:
    """Return whether products ran without the tensor cores that their format has. The names of
    kernels decide. If none was recorded, a rate below float32's decides: weaker evidence, as a
    convolution on tensor cores may be as slow."""
    usual, rate = _find_rates(timed.row, step)
    if step.device != "cuda" or not usual or rate < FASTER * usual:
        return False
    used = find_tensor_cores(timed.row)
    return (timed.row.flop or 0.0) / timed.time_s < usual if used is None else not used


def find_tensor_cores(row: WorkRow) -> bool | None:
    """Return whether a row's products spend most time in kernels with tensor cores; None if no name
    of a kernel tells, or none was recorded."""
    using = plain = 0.0
    for kernel in read_kernels(row.kernels):
        name = kernel.name.lower()
        if any(part in name for part in PLAIN):
            plain += kernel.time_s
        elif any(part in name for part in TENSOR_CORES):
            using += kernel.time_s
    return using > plain if using or plain else None


# ---------------------------------------------------------------------------------------- sentences


MOST_NAMED = 3  # operations that a sentence names
FEWEST_MS = 1e-3  # less than this many ms of a step is not mentioned

GROUPED_KERNELS = (
    "by its list of engines cuDNN 9.24 has grouped fp16 kernels on tensor cores for 4, 8, 16 and "
    "32 channels a group only; other versions may have others"
)
"""DPN has 3, 6, 12 and 24 channels a group."""

TOLD = 3  # most reasons or changes to name in sentences; tables have all
WORTH = 0.1  # share of the answer from which a reason after the first is named
BUSY = 0.9  # a GPU that is busy for less than this share of a step waits for its program


def write_ms(time_s: float, estimated: bool = False) -> str:
    """Write a time of a step in ms, to three digits, an estimate with its mark.

    >>> write_ms(0.3124), write_ms(0.0052), write_ms(1.5), write_ms(0.0744, estimated=True)
    ('312', '5.2', '1,500', '≈74.4')
    """
    value = time_s * 1e3
    mark = ESTIMATE if estimated else ""
    return f"{mark}{value:,.0f}" if abs(value) >= 99.95 else f"{mark}{value:.3g}"


def name_operation(row: WorkRow) -> str:
    """Name an operation; a convolution with its kind, a cast with its format."""
    if row.kind in CONVOLUTIONS:
        return f"{'grouped ' * (row.kind == Kind.GROUPED)}convolution {row.operation}"
    if row.kind == Kind.CAST:
        return f"{row.operation} {row.format}"
    return row.operation


def name_kernel(row: WorkRow) -> str:
    """Name the kernel that takes longest, without namespaces; empty if none was recorded."""
    kernels = read_kernels(row.kernels)
    longest = max(kernels, key=lambda kernel: kernel.time_s).name if kernels else ""
    return re.sub(r"\w+::", "", longest)


def show(cause: Cause, shares: Sequence[Share], side: Side, other: Side) -> str:
    """Return the evidence of a cause in a side's step as a sentence; ``shares`` are the cause's."""
    ranked = sorted(shares, key=lambda share: -share.time_s)
    said = "; ".join(filter(None, _show(cause, ranked, side, other)))
    return f"{said}." if said else ""


def _show(cause: Cause, shares: Sequence[Share], side: Side, other: Side) -> Iterator[str]:
    rates, wait_s = side.step.rates, side.breakdown.find_time
    timed = [share.timed for share in shares if share.timed]
    match cause:
        case Cause.MEMORY:
            ours, theirs = (
                sum(one.row.bytes or 0.0 for one in each.breakdown.rows) for each in (side, other)
            )
            if theirs and not (side.case.compiled or other.case.compiled):
                yield (
                    f"all operations of a step move {ours / 1e9:.3g} GB, where those of "
                    f"{other.name} move {theirs / 1e9:.3g}"
                )
        case Cause.BELOW_COPY:
            yield _name_speeds(timed, COPY)
            if rates.copy:
                yield f"copies reach {write_rate(COPY, rates.copy)}"
        case Cause.ARITHMETIC:
            yield f"{sum(one.row.flop or 0.0 for one in timed) / 1e12:.3g} TFLOP a step"
            yield _name_rates(timed, side)
        case Cause.PRODUCTS | Cause.EMULATED:
            yield _name_speeds(timed, PRODUCT)
            yield _name_rates(timed, side)
        case Cause.NO_TENSOR_CORES:
            yield _name_speeds(timed, PRODUCT)
            yield from _describe_plain_products([one.row for one in timed], side)
        case Cause.LAUNCH:
            if (idle_s := wait_s(Wait.IDLE)) * 1e3 >= FEWEST_MS:
                yield f"nothing runs for {write_ms(idle_s)} ms a step"
            calls = sum(one.row.calls for one in timed)
            if calls and rates.call_s:
                yield (
                    f"{calls:,} operations have less work than the {rates.call_s * 1e6:.2g} µs "
                    "that one takes to start"
                )
        case Cause.MEMORY_LIMIT:
            yield f"{side.alloc_retries:,} allocations were retried after freeing memory"
        case Cause.CLOCKS:
            yield (
                f"the SM clock sank from {other.sm_clock_mhz:,.0f} to {side.sm_clock_mhz:,.0f} "
                "MHz; nvidia-smi -q -d POWER,CLOCK shows the limit"
            )
        case _:
            waits = {Cause.SYNCHRONISATION: Wait.SYNCHRONISATION, Cause.LOADER: Wait.INPUT}
            if (wait := waits.get(cause)) and wait_s(wait) * 1e3 >= FEWEST_MS:
                yield f"{wait.meaning} {write_ms(wait_s(wait))} ms"
            yield _name_longest(shares)


def _describe_plain_products(rows: Sequence[WorkRow], side: Side) -> Iterator[str]:
    kernels = [name_kernel(row) for row in rows if find_tensor_cores(row) is not None]
    if kernels:
        yield f"most runs in {', '.join([*dict.fromkeys(kernels)][:MOST_NAMED])}"
    elif usual := side.step.rates.products.get(Arithmetic.FLOAT32):
        yield (
            "judged by their rates, as no kernels' names were recorded: float32 reaches "
            f"{write_rate(PRODUCT, usual)} without tensor cores"
        )
    halves = any(row.format == Arithmetic.FLOAT16 for row in rows)
    if halves and any(row.kind == Kind.GROUPED for row in rows):
        yield GROUPED_KERNELS


def _name_longest(shares: Sequence[Share]) -> str:
    # fp16 copies gradients to the masters, and these to the weights, by one operation
    sums: dict[str, tuple[float, bool]] = {}
    for share in shares:
        if one := share.timed:
            time_s, estimated = sums.get(name_operation(one.row), (0.0, False))
            sums[name_operation(one.row)] = (time_s + share.time_s, estimated or one.estimated)
    longest = sorted(sums.items(), key=lambda item: -item[1][0])[:MOST_NAMED]
    said = ", ".join(f"{name} {write_ms(*one)} ms" for name, one in longest)
    return f"most in {said}" if said else ""


def _name_rates(timed: Sequence[Timed], side: Side) -> str:
    """Say what large products, or faster convolutions, reach in the operations' formats."""
    step, found = side.step, dict[str, dict[str, None]]()
    for one in timed:
        rates = find_rates(one.row.format, step.rates, step.arithmetic, one.row.kind)
        if rates:
            column, rate = max(rates.items(), key=lambda item: item[1])
            what = "convolutions" if column in CONVOLUTION_COLUMNS.values() else "large products"
            name = name_arithmetic(one.row.format, step.arithmetic)
            found.setdefault(what, {})[f"{write_rate(PRODUCT, rate)} in {name}"] = None
    return "; ".join(f"{what} reach {', '.join(rates)}" for what, rates in found.items())


def _name_speeds(timed: Sequence[Timed], like: str) -> str:
    """Name the operations with the rates that they reached, in the unit of ``like``."""
    named = [
        f"{name_operation(one.row)} at {ESTIMATE * one.estimated}{write_rate(like, rate)}"
        for one in timed
        if (rate := one.traffic if like == COPY else one.flops)
    ]
    return ", ".join(named[:MOST_NAMED])


def describe(found: Explanation, beside: bool = False) -> list[str]:
    """Return a few sentences: the speed-up, what changed, what is possible, and where the time
    goes. With ``beside``, figures that are in tables of reasons and of changes are left out."""
    return list(_list_sentences(found, beside))


def _list_sentences(found: Explanation, beside: bool) -> Iterator[str]:
    a, b, ratio = found.a, found.b, found.speedup
    where = f" ({found.about})" if found.about else ""
    held = "".join(f"; {said}" for side in (a, b) if (said := write_host(side)))
    ends = (
        "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    )
    yield (
        f"{b.name} is {ratio.value or a.step.step_s / b.step.step_s:.2f}×{ends} as fast as "
        f"{a.name}{where}, by median steps of {found.items:,} items: {write_ms(a.step.step_s)} → "
        f"{write_ms(b.step.step_s)} ms{held}."
    )
    if ratio.low is not None and ratio.high is not None and ratio.low < 1 < ratio.high:
        yield (
            "The repeats do not show which is faster: close other programs, or use more --repeats."
        )
    if a.format == Arithmetic.FLOAT32 and a.step.arithmetic == Arithmetic.TFLOAT32:
        yield (
            f"{a.name} rounded its products to TF32, so a part of the gain is in it already: "
            "look whether the model or NVIDIA_TF32_OVERRIDE switches TF32 on."
        )
    if not beside:
        yield from _say_changes(found)
    if found.violation:
        yield write_violation(found.violation)
    elif most := found.ceiling:
        yield (
            f"At most {most.speedup:.2f}× is possible without fusing operations: at the rates "
            f"measured on this machine {b.name}'s work takes {write_ms(most.least_s)} ms, "
            f"{write_percent(most.memory)} of it memory traffic."
        )
    elif not (b.step.rates.products and b.step.rates.copy):
        yield (
            "How much is possible is not known, since rates of this machine are missing: "
            "python -m bench.doctor tells what disturbs them."
        )
    # the first few that matter
    main = [
        reason
        for place, reason in enumerate(found.reasons[:TOLD])
        if found.share(reason) >= WORTH or (place == 0 and found.share(reason) > 0)
    ]
    if main and not beside:
        shares = (
            f"{write_percent(found.share(r), found.estimates(r))} {r.cause.meaning}" for r in main
        )
        of = "the loss" if found.lost else f"{b.name}'s {write_ms(b.step.step_s)} ms"
        yield f"By cause, of {of}: {', '.join(shares)}."
    yield from _say_advice(dict.fromkeys(one for reason in main for one in reason.advice))


def name_part(name: str) -> str:
    """Name a kind of work, a wait or what is left over."""
    if name == LEFT_OVER:
        return "left over"
    return Wait(name).meaning if name in list(Wait) else Kind(name).meaning


def write_percent(share: float, estimated: bool = False) -> str:
    """Write a share as whole percents, an estimate with its mark.

    >>> write_percent(0.614), write_percent(0.2, estimated=True)
    ('61 %', '≈20 %')
    """
    return f"{ESTIMATE if estimated else ''}{100 * share:.0f} %"


def write_host(side: Side) -> str:
    """Say that a GPU was idle for much of a step; empty if it was not."""
    step_s = side.step.step_s
    busy_s = step_s - sum(side.breakdown.find_time(wait) for wait in Wait)
    if side.step.device != "cuda" or busy_s >= BUSY * step_s:
        return ""
    return f"{side.name} keeps the GPU busy for only {write_ms(busy_s)} of {write_ms(step_s)} ms"


def _say_changes(found: Explanation) -> Iterator[str]:
    whole = found.change_s
    if abs(whole) <= STEADY * found.b.step.step_s:
        yield f"The two steps take the same time, within {write_percent(STEADY)}."
        return
    told = [change for change in found.changes if change.change_s / whole >= WORTH][:TOLD]
    against = [change for change in found.changes if change.change_s / whole <= -WORTH][:TOLD]
    if told:
        listed = ", ".join(_say_change(change, whole) for change in told)
        verb, other = ("lost", "gained") if whole > 0 else ("gained", "lost")
        if against:
            listed += f"; {other} at the same time: "
            listed += ", ".join(_say_change(change, -whole) for change in against)
        yield f"Of the {write_ms(abs(whole))} ms {verb}: {listed}."


def _say_change(change: Change, whole: float) -> str:
    return (
        f"{write_percent(change.change_s / whole, change.estimated)} {name_part(change.name)} "
        f"({write_ms(change.before_s, change.before_estimated)} → "
        f"{write_ms(change.after_s, change.after_estimated)} ms)"
    )


def write_violation(violation: RateViolation) -> str:
    """Say that the machine's rates were measured too low, and how to measure them again."""
    which = name_operation(violation.row) if violation.row else "a step"
    measured, reached = (
        write_rate(violation.rate, r) for r in (violation.measured, violation.reached)
    )
    return (
        "The rates of this machine were measured too low, so neither a bound nor reasons are told: "
        f"{RATES[violation.rate]} at {measured}, but {which} reached at least {reached}. Close "
        "other programs, look at what python -m bench.doctor measures now, and run the sweep again "
        "with another --out."
    )


def _say_advice(advice: Collection[Advice]) -> Iterator[str]:
    """Yield remedies for the main reasons: those that this sweep measured, then the untested."""
    if tried := [_write_tried(one, one.speedup) for one in advice if one.speedup is not None]:
        yield f"In this sweep: {', '.join(tried)}."
    if untested := [one.what for one in advice if one.speedup is None]:
        yield f"Untested: {', '.join(untested)}."


def _write_tried(advice: Advice, speedup: float) -> str:
    if abs(speedup - 1) <= STEADY:
        return f"{advice.what} changed nothing"
    verdict = "as fast" if speedup > 1 else "as fast, which is slower"
    return f"{advice.what} was {speedup:.2f}× {verdict}"


# ------------------------------------------------------------------------------------------ reasons
#
# Why one step is faster or slower than another, and not faster still.
#
# Each step's time is divided among causes (`bench.diagnosis.explanation`), beside the most that the
# second can gain on the first (`bench.diagnosis.breakdown`). The times of all causes, and time
# without a cause, add up to each step exactly.


def explain(
    axis: str,
    a: Side,
    b: Side,
    items: int,
    speedup: Ratio,
    alternatives: Alternatives | None = None,
    about: str = "",
) -> Explanation:
    """Explain why B is faster or slower than A, by other measurements of the sweep too."""
    violation = find_violation(b.step, b.case.compiled) or find_violation(a.step, a.case.compiled)
    before, after = a.step.step_s, b.step.step_s
    reasons, ceiling = list[Reason](), None
    if violation is None:
        ceiling = find_ceiling(a.step, b.step, b.case.compiled, b.breakdown)
        reasons += _list_reasons(a, b, alternatives or {})
        lost = after - before > STEADY * before
        reasons.sort(key=lambda reason: -(reason.change_s if lost else reason.after_s))

    def subtract(step_s: float, explained_s: float) -> float:
        left_s = step_s - explained_s
        return 0.0 if abs(left_s) < 1e-9 * step_s else left_s

    unexplained = (
        subtract(before, sum(reason.before_s for reason in reasons)),
        subtract(after, sum(reason.after_s for reason in reasons)),
    )
    changes = tuple(list_changes(a, b))
    return Explanation(
        axis, a, b, items, speedup, ceiling, violation, changes, tuple(reasons), unexplained, about
    )


def _list_reasons(a: Side, b: Side, alternatives: Alternatives) -> Iterator[Reason]:
    clock = b.sm_clock_mhz / a.sm_clock_mhz if a.sm_clock_mhz and b.sm_clock_mhz else 1.0
    ours, theirs = list(find_shares(a)), list(find_shares(b, clock if clock < 1 - STEADY else 1.0))
    for cause in Cause:
        there, here = ([s for s in shares if s.cause is cause] for shares in (ours, theirs))
        before, after = (sum(share.time_s for share in shares) for shares in (there, here))
        if max(before, after) * 1e3 >= FEWEST_MS:
            guessed, guess = (
                any(share.timed and share.timed.estimated for share in own) for own in (there, here)
            )
            advice = tuple(advise(cause, b.case, alternatives)) if here else ()
            evidence = show(cause, here, b, a)
            yield Reason(cause, before, after, guessed, guess, evidence, advice)


def list_changes(a: Side, b: Side) -> Iterator[Change]:
    """Yield the kinds of work and waits, those that changed most first, then what is left over."""
    names = dict.fromkeys(part.name for side in (a, b) for part in side.breakdown.parts)
    one, two = a.breakdown, b.breakdown
    found = [
        Change(n, one.find_time(n), two.find_time(n), n in one.estimates, n in two.estimates)
        for n in names
    ]
    yield from sorted(found, key=lambda change: -abs(change.change_s))
    yield Change(LEFT_OVER, one.left_over_s, two.left_over_s)
