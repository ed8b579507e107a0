"""A diagnosis in sentences: the evidence of a cause in a step, and an explanation that can be
pasted where the question was asked."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from bench.diagnosis.breakdown import RateViolation, Timed
from bench.diagnosis.causes import Share, find_tensor_cores
from bench.diagnosis.explanation import LEFT_OVER, Advice, Cause, Change, Explanation, Side
from bench.diagnosis.step import (
    CONVOLUTION_COLUMNS,
    CONVOLUTIONS,
    COPY,
    PRODUCT,
    RATES,
    Wait,
    find_rates,
    name_arithmetic,
    write_rate,
)
from bench.limits import STEADY
from bench.precision import Arithmetic
from bench.record import WorkRow, read_kernels
from bench.text import ESTIMATE
from bench.work import Kind

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
