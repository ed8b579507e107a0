"""What shows a cause in a step: a sentence with its figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bench.diagnosis.breakdown import Timed
from bench.diagnosis.causes import Share, find_tensor_cores
from bench.diagnosis.explanation import Cause, Run, Side
from bench.diagnosis.rates import (
    CONVOLUTION_COLUMNS,
    CONVOLUTIONS,
    COPY,
    PRODUCT,
    find_rates,
    name_arithmetic,
    write_rate,
)
from bench.diagnosis.step import Wait
from bench.precision import Arithmetic
from bench.record import WorkRow, read_kernels
from bench.text import ESTIMATE
from bench.work import COMPUTING, Kind

MOST_NAMED = 3  # operations that a sentence names
FEWEST_MS = 1e-3  # what is below this many ms of a step is not told

GROUPED_KERNELS = (
    "by its list of engines cuDNN 9.24 has grouped fp16 kernels on tensor cores for 4, 8, 16 and "
    "32 channels a group only; other versions may have others"
)
"""DPN has 3, 6, 12 and 24 channels a group."""


def write_ms(time_s: float, estimated: bool = False) -> str:
    """Write a time of a step in ms, to three digits, an estimate with its mark.

    >>> write_ms(0.3124), write_ms(0.0052), write_ms(1.5), write_ms(0.0744, estimated=True)
    ('312', '5.2', '1,500', '≈74.4')
    """
    value = time_s * 1e3
    mark = ESTIMATE if estimated else ""
    return f"{mark}{value:,.0f}" if abs(value) >= 99.95 else f"{mark}{value:.3g}"


def name_operation(row: WorkRow) -> str:
    """Name an operation with what it is: a convolution by its kind too, a cast by its formats."""
    if row.kind in CONVOLUTIONS:
        return f"{'grouped ' * (row.kind == Kind.GROUPED)}convolution {row.operation}"
    if row.kind == Kind.CAST:
        return f"{row.operation} {row.format}"
    return row.operation


def name_kernel(row: WorkRow) -> str:
    """Name the kernel that takes longest, without namespaces; empty where none was recorded."""
    kernels = read_kernels(row.kernels)
    longest = max(kernels, key=lambda kernel: kernel.time_s).name if kernels else ""
    return re.sub(r"\w+::", "", longest)


def write_run(run: Run) -> str:
    """What ran, its time, and its rate: ``native_batch_norm (24.8 ms at 709 GB/s)``."""
    computes = run.row.kind in COMPUTING
    rate = ""
    if amount := run.row.flop if computes else run.row.bytes:
        mark = ESTIMATE * run.estimated
        rate = f" at {mark}{write_rate(PRODUCT if computes else COPY, amount / run.time_s)}"
    return f"{run.name} ({write_ms(run.time_s, run.estimated)} ms{rate})"


def show(cause: Cause, shares: Sequence[Share], side: Side, other: Side) -> str:
    """The evidence of a cause in a side's step, a sentence; ``shares`` are those of the cause."""
    ranked = sorted(shares, key=lambda share: -share.time_s)
    timed = [share.timed for share in ranked if share.timed]
    said = "; ".join(filter(None, _tell(cause, timed, side, other)))
    return f"{said}." if said else ""


def _tell(cause: Cause, timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    """What shows a cause, by its operations, those that take longest first."""
    rates, wait_s = side.step.rates, side.breakdown.find_time
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
            yield from _tell_plain_products([one.row for one in timed], side)
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
            yield _name_longest(timed)


def _tell_plain_products(rows: Sequence[WorkRow], side: Side) -> Iterator[str]:
    """What runs without tensor cores."""
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


def _name_longest(timed: Sequence[Timed]) -> str:
    # fp16 copies gradients to the masters, and these to the weights, by one operation
    sums: dict[str, tuple[float, bool]] = {}
    for one in timed:
        time_s, estimated = sums.get(name_operation(one.row), (0.0, False))
        sums[name_operation(one.row)] = (time_s + one.time_s, estimated or one.estimated)
    longest = sorted(sums.items(), key=lambda item: -item[1][0])[:MOST_NAMED]
    said = ", ".join(f"{name} {write_ms(*one)} ms" for name, one in longest)
    return f"most in {said}" if said else ""


def _name_rates(timed: Sequence[Timed], side: Side) -> str:
    """What large products, or convolutions where these reach more, do in operations' formats."""
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
    """The operations with the rates that they reached, of the unit of one."""
    named = [
        f"{name_operation(one.row)} at {ESTIMATE * one.estimated}{write_rate(like, rate)}"
        for one in timed
        if (rate := one.traffic if like == COPY else one.flops)
    ]
    return ", ".join(named[:MOST_NAMED])
