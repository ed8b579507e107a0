"""What shows a cause in a step: a sentence with its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.diagnosis.breakdown import Timed
from bench.diagnosis.causes import Share
from bench.diagnosis.explanation import Cause, Run, Side
from bench.diagnosis.floors import CONVOLUTION_COLUMNS, CONVOLUTIONS, find_rates, name_arithmetic
from bench.diagnosis.kernels import find_tensor_cores, name_kernel
from bench.diagnosis.rates import COPY, PRODUCT, write_rate
from bench.diagnosis.step import Wait
from bench.precision import Arithmetic
from bench.record import WorkRow
from bench.text import ESTIMATE
from bench.work import COMPUTING, Kind

MOST_NAMED = 3
"""Operations that a sentence names."""

FEWEST_MS = 1e-3
"""What is below this many ms of a step is not told."""

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
    said = "; ".join(filter(None, _EVIDENCE.get(cause, _show_operations)(timed, side, other)))
    return f"{said}." if said else ""


_Show = Callable[[Sequence[Timed], Side, Side], Iterator[str]]
"""What shows a cause: of its operations, those that take longest first, in a side's step."""


def _show_operations(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    # fp16 copies gradients to the masters, and these to the weights, by one operation
    sums: dict[str, tuple[float, bool]] = {}
    for one in timed:
        time_s, estimated = sums.get(name_operation(one.row), (0.0, False))
        sums[name_operation(one.row)] = (time_s + one.time_s, estimated or one.estimated)
    longest = sorted(sums.items(), key=lambda item: -item[1][0])[:MOST_NAMED]
    if longest:
        yield "most in " + ", ".join(f"{name} {write_ms(*one)} ms" for name, one in longest)


def _show_traffic(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    def move(one: Side) -> float:
        return sum(timed.row.bytes or 0.0 for timed in one.breakdown.rows)

    before = move(other)
    if before and not (side.case.compiled or other.case.compiled):
        yield (
            f"all operations of a step move {move(side) / 1e9:.3g} GB, where those of {other.name} "
            f"move {before / 1e9:.3g}"
        )


def _show_slow_traffic(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    yield _name_speeds(timed, COPY)
    if copy := side.step.rates.copy:
        yield f"copies reach {write_rate(COPY, copy)}"


def _show_arithmetic(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    yield f"{sum(one.row.flop or 0.0 for one in timed) / 1e12:.3g} TFLOP a step"
    yield _name_rates(timed, side)


def _show_products(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    yield _name_speeds(timed, PRODUCT)
    yield _name_rates(timed, side)


def _show_plain_products(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    yield _name_speeds(timed, PRODUCT)
    named = [one.row for one in timed if find_tensor_cores(one.row) is not None]
    if named:
        kernels = dict.fromkeys(name_kernel(row) for row in named)
        yield f"most runs in {', '.join(list(kernels)[:MOST_NAMED])}"
    else:
        usual = write_rate(PRODUCT, side.step.rates.products[Arithmetic.FLOAT32])
        yield (
            f"judged by their rates, as no kernels' names were recorded: float32 reaches {usual} "
            "without tensor cores"
        )
    halves = any(one.row.format == Arithmetic.FLOAT16 for one in timed)
    if halves and any(one.row.kind == Kind.GROUPED for one in timed):
        yield GROUPED_KERNELS


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


def _show_wait(wait: Wait) -> _Show:
    def show(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
        if (time_s := side.breakdown.find_time(wait)) * 1e3 >= FEWEST_MS:
            yield f"{wait.meaning} {write_ms(time_s)} ms"
        yield from _show_operations(timed, side, other)

    return show


def _show_launches(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    idle = side.breakdown.find_time(Wait.IDLE)
    if idle * 1e3 >= FEWEST_MS:
        yield f"nothing runs for {write_ms(idle)} ms a step"
    calls = sum(one.row.calls for one in timed)
    if calls and (call := side.step.rates.call_s):
        yield (
            f"{calls:,} operations have less work than the {call * 1e6:.2g} µs that one takes to "
            "start"
        )


def _show_clocks(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    yield (
        f"the SM clock sank from {other.sm_clock_mhz:,.0f} to {side.sm_clock_mhz:,.0f} MHz; "
        "nvidia-smi -q -d POWER,CLOCK shows the limit"
    )


def _show_retries(timed: Sequence[Timed], side: Side, other: Side) -> Iterator[str]:
    yield f"{side.alloc_retries:,} allocations were retried after freeing memory"


_EVIDENCE: dict[Cause, _Show] = {
    Cause.MEMORY: _show_traffic,
    Cause.BELOW_COPY: _show_slow_traffic,
    Cause.ARITHMETIC: _show_arithmetic,
    Cause.PRODUCTS: _show_products,
    Cause.NO_TENSOR_CORES: _show_plain_products,
    Cause.EMULATED: _show_products,
    Cause.LAUNCH: _show_launches,
    Cause.SYNCHRONISATION: _show_wait(Wait.SYNCHRONISATION),
    Cause.MEMORY_LIMIT: _show_retries,
    Cause.LOADER: _show_wait(Wait.INPUT),
    Cause.CLOCKS: _show_clocks,
}
"""What shows each cause; of others, their operations."""
