"""The time of a step, divided among causes: each operation and wait has one or more.

The time that an operation needs at the machine's measured rates is due to memory traffic or
arithmetic, whichever takes longer. The time beyond that has a cause of its own: a kernel below the
rate of copies, products without tensor cores, and so on. Operations that are pure overhead, such as
casts, are entirely due to their own cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.diagnosis.breakdown import Timed
from bench.diagnosis.explanation import Cause, Side
from bench.diagnosis.step import CONVOLUTIONS, Bound, Step, Wait, find_limit, name_arithmetic
from bench.precision import Arithmetic
from bench.record import WorkRow, read_kernels
from bench.work import Kind

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
