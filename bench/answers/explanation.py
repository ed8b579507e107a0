"""Why one of two cases is faster or slower, and not faster still: causes, and sentences on them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.base.limits import STEADY, waits_for_host
from bench.base.text import Explained
from bench.profile.breakdown import (
    Breakdown,
    Ceiling,
    Change,
    TimedWork,
    find_ceiling,
    list_changes,
    name_part,
)
from bench.profile.rates import COPY, PRODUCT, has_instructions, write_rate
from bench.profile.step import (
    CONVOLUTIONS,
    Bound,
    StepWork,
    Wait,
    find_limit,
    find_rate,
    name_arithmetic,
    write_ms,
)
from bench.results.study.profiled import Straggler
from bench.results.verdict import Ratio
from bench.schema.case import AXES, Case
from bench.schema.precision import Arithmetic
from bench.schema.record import WorkRow, read_kernels
from bench.schema.rules import takes
from bench.schema.work import WorkKind


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
    EXCHANGE = "exchange", "exchange between processes, and waiting for the others"
    CLOCKS = "clocks", "lower clocks"


@dataclass(frozen=True)
class StepSide:
    """One of the two cases of a pair. Times of A are scaled to the number of items in B's step."""

    name: str  # its difference from the other: ``fp32``, ``compile default``
    case: Case
    step: StepWork
    breakdown: Breakdown
    format: str  # what its products' inputs are rounded to, as `bench.schema.precision.Arithmetic`
    times: tuple[float, ...] = ()  # the median step of each repeat, in s
    sm_clock_mhz: float | None = None  # the median; None if not known
    alloc_retries: int = 0  # allocations retried after freeing the cache
    straggler: Straggler | None = None  # the process of a command that the others wait for

    @property
    def counted(self) -> bool:
        """Whether the work of its operations was counted, as it is not of compiled scripts."""
        return any(row.bytes is not None for row in self.step.work)


@dataclass(frozen=True)
class Reason(Change):
    """The time of a cause in both steps; the evidence is a sentence with B's figures, and cures are
    what may remedy it."""

    evidence: str = ""
    cures: tuple[str, ...] = ()
    unsure: bool = False  # concluded from a rate: no kernel of it was named

    @property
    def cause(self) -> Cause:
        return Cause(self.name)


@dataclass(frozen=True)
class Explanation:
    """Why B is faster or slower than A, and not faster still. The changes add up to the difference
    of the steps, with `LEFT_OVER` last; the reasons and ``unexplained_s`` add up to the steps.
    Changes and reasons are sorted, the largest first."""

    a: StepSide
    b: StepSide
    items: int  # per step, which both train on or are scaled to; 0 if not known, as of a command
    speedup: Ratio  # time of A over that of B, with the interval of the repeats
    ceiling: Ceiling | None  # the most that B can gain; None if not known
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

    @property
    def whole_s(self) -> float:
        """What the reasons explain: the loss, if B lost, or else B's step."""
        return self.change_s if self.lost else self.b.step.step_s

    def take(self, reason: Change) -> float:
        """Return the part of a reason in that, in s."""
        return reason.change_s if self.lost else reason.after_s

    def share(self, reason: Change) -> float:
        """Return its share in that."""
        return self.take(reason) / self.whole_s


CURES: dict[Cause, tuple[str, ...]] = {
    Cause.MEMORY: ("--compile default",),  # fused operations move less
    Cause.BELOW_COPY: (),
    Cause.ARITHMETIC: (),
    Cause.PRODUCTS: ("a larger --batch-size", "--cudnn-benchmark on"),
    Cause.NO_TENSOR_CORES: ("--channels-last on",),
    Cause.EMULATED: ("another --precision",),
    Cause.FLOAT32: (),
    Cause.ADDED: ("--compile default",),
    Cause.LAYOUT: ("the other --channels-last",),
    Cause.LAUNCH: ("a larger --batch-size", "--compile default", "--cuda-graphs on"),
    Cause.SYNCHRONISATION: (
        "reading losses (.item(), .cpu(), print) once an epoch, not each step",
    ),
    Cause.MEMORY_LIMIT: ("a smaller --batch-size",),
    Cause.LOADER: ("more --workers", "--loader device"),
    Cause.EXCHANGE: (),
    Cause.CLOCKS: (),
}
"""What may remedy each cause. What begins with a flag is not told where the case has it."""


OF_SCRIPTS: dict[str, str] = {
    "a larger --batch-size": "a larger batch",
    "a smaller --batch-size": "a smaller batch",
    "--compile default": "torch.compile(model)",
    "--cudnn-benchmark on": "torch.backends.cudnn.benchmark = True",
    "--channels-last on": "memory_format=torch.channels_last for model and images",
    "the other --channels-last": "the other memory_format of model and images",
    "--cuda-graphs on": 'torch.compile(model, mode="reduce-overhead")',
    "another --precision": "another number format",
    "more --workers": "more num_workers of the DataLoader",
}
"""What may remedy a cause in a script, whose command has no placeholder for it."""

_OF_GPUS = ("--cudnn-benchmark on", "--cuda-graphs on")


def _list_in_script(cause: Cause, side: StepSide) -> tuple[str, ...]:
    """Return the remedies for a cause of a command, by its placeholders or in its script."""
    compiled = not side.counted  # which alone hides operations, of what a profile shows
    found = []
    for cure in CURES[cause]:
        gone = compiled and "compile" in OF_SCRIPTS.get(cure, "")
        if gone or (side.case.device == "cpu" and cure in _OF_GPUS):
            continue
        found.append(cure if takes(side.case, cure) else OF_SCRIPTS.get(cure, ""))
    return (*filter(None, found),)


def list_cures(cause: Cause, case: Case) -> tuple[str, ...]:
    """Return the remedies for a cause that a case does not have, and can have."""

    def is_open(cure: str) -> bool:
        name = cure.split()[0].removeprefix("--").replace("-", "_")
        if not cure.startswith("--"):
            return True
        return bool((getattr(case, name) == AXES[name].default) != (name == "loader"))

    return tuple(cure for cure in CURES[cause] if takes(case, cure) and is_open(cure))


# ------------------------------------------------------------------------------------------- causes
#
# The time of a step, divided among causes: each operation and wait has one or more.
#
# The time that an operation needs at the machine's measured rates is due to memory traffic or
# arithmetic, whichever takes longer. The time beyond that has a cause of its own: a kernel below
# the rate of copies, products without tensor cores, and so on. Operations that are pure overhead,
# such as casts, are entirely due to their own cause.


LOW = (Arithmetic.FLOAT16, Arithmetic.BFLOAT16, Arithmetic.FLOAT8)
"""Formats of fewer bits than float32."""

OWN_FORMAT = (WorkKind.OPTIMIZER, WorkKind.COPY)
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
class CauseShare:
    """A part of a step's time due to one cause; ``timed`` is its operation, None for a wait."""

    cause: Cause
    time_s: float
    timed: TimedWork | None = None


def find_shares(side: StepSide, clock: float = 1.0) -> Iterator[CauseShare]:
    """Divide a step's time among causes, leaving out time without a cause. ``clock`` is the step's
    clock rate over that of the step it is compared with, at most 1."""
    for timed in side.breakdown.rows:
        for cause, time_s in _divide(timed, side, clock):
            yield CauseShare(cause, time_s, timed)
    limit = Cause.MEMORY_LIMIT if side.alloc_retries else None
    for wait, cause in (
        (Wait.INPUT, Cause.LOADER),
        (Wait.SYNCHRONISATION, limit or Cause.SYNCHRONISATION),
        (Wait.IDLE, limit or Cause.LAUNCH),
    ):
        if time_s := side.breakdown.parts.get(wait, 0.0):
            yield CauseShare(cause, time_s)


_WHOLLY = {
    WorkKind.INPUT: Cause.LOADER,
    WorkKind.EXCHANGE: Cause.EXCHANGE,
    WorkKind.CAST: Cause.ADDED,
    WorkKind.LOSS_SCALING: Cause.ADDED,
    WorkKind.LAYOUT: Cause.LAYOUT,
}


def _divide(timed: TimedWork, side: StepSide, clock: float) -> Iterator[tuple[Cause, float]]:
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


def _find_whole(timed: TimedWork, side: StepSide) -> Cause | None:
    row, kind = timed.row, WorkKind(timed.row.kind)
    if cause := _WHOLLY.get(kind):
        return cause
    if timed.bound is Bound.LAUNCH:
        return Cause.LAUNCH
    if side.format in LOW and row.format == Arithmetic.FLOAT32 and kind not in OWN_FORMAT:
        return Cause.FLOAT32
    if timed.bound is not Bound.COMPUTE or row.format == Arithmetic.FLOAT32:
        return None
    emulated = has_instructions(*_find_rates(row, side.step), side.step.device) is False
    return Cause.EMULATED if emulated else None


def _find_rates(row: WorkRow, step: StepWork) -> tuple[float, float]:
    """Return the rates of a row's format and of float32; 0 if not measured. Both are rates of
    convolutions if the row is one and both were measured, else of products."""
    name = name_arithmetic(row.format, step.arithmetic)
    own = step.rates.convolutions if row.kind in CONVOLUTIONS else {}
    rates = own if {Arithmetic.FLOAT32, name} <= own.keys() else step.rates.products
    return rates.get(name, 0.0), rates.get(Arithmetic.FLOAT32, 0.0)


def lacks_tensor_cores(timed: TimedWork, step: StepWork) -> bool:
    """Return whether products ran without the tensor cores that their format has. The names of
    kernels decide. If none was recorded, a rate below float32's decides: weaker evidence, as a
    convolution on tensor cores may be as slow."""
    rate, usual = _find_rates(timed.row, step)
    if step.device != "cuda" or not has_instructions(rate, usual, step.device):
        return False
    using = plain = 0.0
    for kernel in read_kernels(timed.row.kernels):
        name = kernel.name.lower()
        if any(part in name for part in PLAIN):
            plain += kernel.time_s
        elif any(part in name for part in TENSOR_CORES):
            using += kernel.time_s
    if using or plain:
        return plain >= using
    return (timed.row.flop or 0.0) / timed.time_s < usual


# ---------------------------------------------------------------------------------------- sentences


_MOST_NAMED = 3  # operations that a sentence names
FEWEST_MS = 1e-3  # less than this many ms of a step is not mentioned
_TOLD = 3  # most reasons or changes to name in sentences; tables have all
WORTH = 0.1  # share of the answer from which a reason after the first is named


def name_operation(row: WorkRow) -> str:
    """Name an operation; a convolution with its kind, a cast with its format."""
    if row.kind in CONVOLUTIONS:
        return f"{'grouped ' * (row.kind == WorkKind.GROUPED)}convolution {row.operation}"
    if row.kind == WorkKind.CAST:
        return f"{row.operation} {row.format}"
    return row.operation


_SLOW = {
    Cause.BELOW_COPY: COPY,
    **dict.fromkeys(
        (Cause.ARITHMETIC, Cause.PRODUCTS, Cause.EMULATED, Cause.NO_TENSOR_CORES), PRODUCT
    ),
}
"""Causes whose operations are told with their rate, and a column of its unit."""

_WAITED = {
    Cause.LOADER: Wait.INPUT,
    Cause.SYNCHRONISATION: Wait.SYNCHRONISATION,
    Cause.LAUNCH: Wait.IDLE,
}


def show(cause: Cause, shares: Sequence[CauseShare], side: StepSide, other: StepSide) -> str:
    """Return the evidence of a cause in a side's step as a sentence; ``shares`` are the cause's."""
    # fp16 copies gradients to the masters, and these to the weights, by one operation
    operations: dict[str, list[tuple[float, TimedWork]]] = {}
    for share in shares:
        if share.timed:
            own = operations.setdefault(name_operation(share.timed.row), [])
            own.append((share.time_s, share.timed))
    longest = sorted(operations.items(), key=lambda item: -sum(time_s for time_s, _ in item[1]))
    evidence, step = [], side.step
    wait_s = side.breakdown.parts.get(_WAITED.get(cause, ""), 0.0)
    if wait_s * 1e3 >= FEWEST_MS:
        evidence.append(f"{_WAITED[cause].meaning} {write_ms(wait_s)} ms")
    if cause is Cause.MEMORY_LIMIT:
        evidence.append(f"{side.alloc_retries:,} allocations were retried after freeing memory")
    if cause is Cause.CLOCKS:
        evidence.append(
            f"the SM clock sank from {other.sm_clock_mhz:,.0f} to {side.sm_clock_mhz:,.0f} MHz; "
            "nvidia-smi -q -d POWER,CLOCK shows the limit"
        )
    named = []
    for name, of in longest[:_MOST_NAMED]:
        rate = of[0][1].traffic if cause is Cause.BELOW_COPY else of[0][1].flops
        speed = f" at {write_rate(_SLOW[cause], rate)}" if rate and cause in _SLOW else ""
        named.append(f"{name} {write_ms(sum(time_s for time_s, _ in of))} ms{speed}")
    if not named:
        return f"{'; '.join(evidence)}." if evidence else ""
    evidence.append(f"most in {', '.join(named)}")
    row = longest[0][1][0][1].row
    reach = find_rate(row.format, step.rates, step.arithmetic, row.kind)
    reach = step.rates.copy if cause is Cause.BELOW_COPY else reach
    if reach and cause in _SLOW:
        evidence.append(f"this machine reaches {write_rate(_SLOW[cause], reach)}")
    if cause is Cause.NO_TENSOR_CORES and (kernels := read_kernels(row.kernels)):
        kernel = re.sub(r"\w+::", "", max(kernels, key=lambda kernel: kernel.time_s).name)
        evidence.append(f"most runs in {kernel}")
    return f"{'; '.join(evidence)}."


def describe(found: Explanation) -> Iterator[str]:
    """Yield a few sentences: the speed-up, what changed, what is possible, and where the time
    goes."""
    a, b, ratio = found.a, found.b, found.speedup
    where = f" ({found.about})" if found.about else ""
    low, high = ratio.low or math.nan, ratio.high or math.nan
    ends = f" ({low:.2f} to {high:.2f})" if low < high else ""
    of = f" of {found.items:,} items" if found.items else ""
    yield (
        f"{b.name} is {ratio.value or a.step.step_s / b.step.step_s:.2f}×{ends} as fast as "
        f"{a.name}{where}, by median steps{of}: {write_ms(a.step.step_s)} → "
        f"{write_ms(b.step.step_s)} ms{write_host(a)}{write_host(b)}."
    )
    if not ends and not ratio.exact:
        yield "Too few repeats for an interval: --repeats 3 gives one."
    if a.format == Arithmetic.FLOAT32 and a.step.arithmetic == Arithmetic.TFLOAT32:
        yield (
            f"{a.name} rounded its products to TF32, so a part of the gain is in it already: "
            "look whether the model or NVIDIA_TF32_OVERRIDE switches TF32 on."
        )
    yield from _say_changes(found)
    if most := found.ceiling:
        yield (
            f"At most {most.speedup:.2f}× is possible without fusing operations: at the rates "
            f"measured on this machine {b.name}'s work takes {write_ms(most.least_s)} ms, "
            f"{100 * most.memory:.0f} % of it memory traffic."
        )
    elif not b.counted:
        yield "How much is possible is not known, since its operations were not counted."
    elif not b.case.compiled:
        yield (
            "How much is possible is not known, since rates of this machine are missing or were "
            "measured too low: python -m bench.doctor measures them."
        )
    # the first few that matter
    main = [
        reason
        for place, reason in enumerate(found.reasons[:_TOLD])
        if found.share(reason) >= (WORTH if place else 0)
    ]
    if main:
        shares = (
            f"{write_ms(found.take(r))} ms {r.cause.meaning}{' (perhaps)' * r.unsure}" for r in main
        )
        whole = f"{write_ms(found.whole_s)} ms"
        of = f"the {whole} lost" if found.lost else f"{b.name}'s {whole}"
        yield f"By cause, of {of}: {', '.join(shares)}."
    for side in (a, b):
        if (late := side.straggler) is not None:
            yield (
                f"In {side.name} rank {late.rank} computes {write_ms(late.longer_s)} ms longer a "
                f"step than the others, who wait for it{late.waits_in and f' in {late.waits_in}'}."
            )
    if cures := dict.fromkeys(cure for reason in main for cure in reason.cures):
        yield f"What may help: {', '.join(cures)}."


def write_host(side: StepSide) -> str:
    """Say that a GPU was idle for much of a step; empty if it was not."""
    step_s = side.step.step_s
    busy_s = step_s - sum(side.breakdown.parts.get(wait, 0.0) for wait in Wait)
    if side.step.device != "cuda" or not waits_for_host(busy_s, step_s):
        return ""
    return f"; {side.name} keeps the GPU busy for only {write_ms(busy_s)} of {write_ms(step_s)} ms"


def _say_changes(found: Explanation) -> Iterator[str]:
    whole = found.change_s
    if abs(whole) <= STEADY * found.b.step.step_s:
        yield f"The two steps take the same time, within {100 * STEADY:.0f} %."
        return
    largest = [change for change in found.changes if change.change_s / whole >= WORTH][:_TOLD]
    listed = ", ".join(
        f"{write_ms(abs(change.change_s))} ms {name_part(change.name)} "
        f"({write_ms(change.before_s)} → {write_ms(change.after_s)} ms)"
        for change in largest
    )
    if listed:
        yield f"Of the {write_ms(abs(whole))} ms {'lost' if whole > 0 else 'gained'}: {listed}."
    if found.a.breakdown.estimated or found.b.breakdown.estimated:
        yield "Kernels overlapped, and how they shared the time is estimated."


# ------------------------------------------------------------------------------------------ reasons
#
# Why one step is faster or slower than another, and not faster still.
#
# Each step's time is divided among causes (`bench.answers.explanation`), beside the most that the
# second can gain on the first (`bench.profile.breakdown`). The times of all causes, and time
# without a cause, add up to each step exactly.


def explain(a: StepSide, b: StepSide, items: int, speedup: Ratio, about: str = "") -> Explanation:
    """Explain why B is faster or slower than A."""
    before, after = a.step.step_s, b.step.step_s
    ceiling = find_ceiling(a.step, b.step, b.case.compiled, b.breakdown)
    reasons, lost = [*_list_reasons(a, b)], after - before > STEADY * before
    reasons.sort(key=lambda reason: -(reason.change_s if lost else reason.after_s))

    def subtract(step_s: float, explained_s: float) -> float:
        left_s = step_s - explained_s
        return 0.0 if abs(left_s) < 1e-9 * step_s else left_s

    unexplained = (
        subtract(before, sum(reason.before_s for reason in reasons)),
        subtract(after, sum(reason.after_s for reason in reasons)),
    )
    changes = tuple(list_changes(a.breakdown, b.breakdown))
    return Explanation(a, b, items, speedup, ceiling, changes, tuple(reasons), unexplained, about)


def _list_reasons(a: StepSide, b: StepSide) -> Iterator[Reason]:
    clock = b.sm_clock_mhz / a.sm_clock_mhz if a.sm_clock_mhz and b.sm_clock_mhz else 1.0
    ours, theirs = list(find_shares(a)), list(find_shares(b, clock if clock < 1 - STEADY else 1.0))
    for cause in Cause:
        there, here = ([s for s in shares if s.cause is cause] for shares in (ours, theirs))
        before, after = (sum(share.time_s for share in shares) for shares in (there, here))
        if max(before, after) * 1e3 >= FEWEST_MS:
            unsure = cause is Cause.NO_TENSOR_CORES and not any(
                share.timed and share.timed.row.kernels for share in here
            )
            cures: tuple[str, ...] = ()
            if here and not unsure:
                own = b.case.command is None
                cures = list_cures(cause, b.case) if own else _list_in_script(cause, b)
            yield Reason(cause, before, after, show(cause, here, b, a), cures, unsure)
