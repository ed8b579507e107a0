"""Why one step is not faster than another by as much as was hoped, row by row.

Of a pair A, B and a hoped speed-up R, the gap is B's time less A's over R. It is the sum, over the
operations of B, of their time less R-th of what the same operations take in A; each of these terms
is given to one cause. So the reasons, and what none of them explains, add up to the gap exactly.

What is hoped for of a number format is the ratio of the rates of large products, but at least that
of the bits that have to be moved. Other axes promise nothing: R is 1, and the gap is the difference
of the two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.case import Case, Value, axis_flag, spell_value
from bench.diagnosis.breakdown import Timed
from bench.diagnosis.explanation import (
    LEFT_OVER,
    Cause,
    Change,
    Explanation,
    Reason,
    Side,
    Trial,
)
from bench.diagnosis.floors import find_rate, floor_step
from bench.diagnosis.rates import choose_prefix
from bench.diagnosis.step import Bound, Step, Wait
from bench.limits import STEADY
from bench.precision import Arithmetic
from bench.record import WorkRow
from bench.verdict import Ratio
from bench.work import Kind

FASTER = 1.1
"""A format whose products are faster than float32's by less than this is called emulated."""

FEWEST_MS = 1e-3
"""What is below this many ms of a step is not told."""

BITS = {
    Arithmetic.FLOAT32: 32,
    Arithmetic.TFLOAT32: 32,
    Arithmetic.FLOAT16: 16,
    Arithmetic.BFLOAT16: 16,
    Arithmetic.FLOAT8: 8,
}
"""That a number of each format takes in memory."""

CONVOLUTIONS = (Kind.CONVOLUTION_1X1, Kind.CONVOLUTION, Kind.GROUPED)

OWN_FORMAT = (Kind.OPTIMIZER, Kind.LOSS_SCALING, Kind.CAST, Kind.COPY, Kind.LAYOUT, Kind.INPUT)
"""Kinds that are in float32 for what they do, and not because autocast keeps them there."""

Alternatives = Mapping[str, Mapping[Value, float]]
"""Cases equal to B but for one axis, by that axis and its value: B's time an item over theirs."""


@dataclass(frozen=True)
class Item:
    """Operations of B beside the same of A.

    Attributes:
        row: those of B, or of A where B has none.
        after_s: the time of B's.
        before_s: the time of A's.
        before_bytes: what A's move.
    """

    row: WorkRow
    after_s: float
    before_s: float
    bound: Bound | None
    before_bytes: float = 0.0


@dataclass
class _Account:
    """What is known of one cause so far."""

    time_s: float = 0.0
    items: list[tuple[float, Item]] = field(default_factory=list)

    def add(self, time_s: float, item: Item | None = None) -> None:
        self.time_s += time_s
        if item is not None:
            self.items.append((time_s, item))


@dataclass(frozen=True)
class _Pair:
    """Two sides, and what is hoped of the second."""

    a: Side
    b: Side
    hoped: float  # over A as it ran

    @property
    def lowered(self) -> bool:
        """Whether B computes in numbers of fewer bits."""
        return self.hoped > 1 and BITS[Arithmetic(self.b.format)] < 32

    @property
    def clock(self) -> float:
        """B's clock over A's where it sank by more than noise, else 1."""
        a, b = self.a.sm_clock_mhz, self.b.sm_clock_mhz
        return b / a if a and b and b < a * (1 - STEADY) else 1.0


def explain(
    axis: str,
    a: Side,
    b: Side,
    items: int,
    speedup: Ratio,
    alternatives: Alternatives | None = None,
    about: str = "",
) -> Explanation:
    """Explain why B is not faster than A by as much as was hoped.

    Args:
        axis: in which the two differ.
        a: the side before.
        b: the side after.
        items: that both steps train on, or are scaled to.
        speedup: of their repeats.
        alternatives: what else the sweep measured.
        about: what the two have in common.
    """
    before, after = a.step.step_s, b.step.step_s
    hoped = _hope(a.format, b) if axis == "precision" else None
    promised = _hope(a.format, b, a.step.arithmetic) if hoped else None
    pair = _Pair(a, b, promised or 1.0)
    gap = after - before / (hoped or 1.0)
    accounts: dict[Cause, _Account] = {cause: _Account() for cause in Cause}
    accounts[Cause.TF32].add(before / pair.hoped - before / (hoped or 1.0))
    for item in match_rows(a.breakdown.rows, b.breakdown.rows):
        for cause, time_s in _blame(item, pair):
            accounts[cause].add(time_s, item)
    for wait in Wait:
        time_s = b.breakdown.find_time(wait) - a.breakdown.find_time(wait) / pair.hoped
        accounts[_blame_wait(wait, pair)].add(time_s)
    reasons = [
        _tell(cause, account, gap, pair, alternatives or {})
        for cause, account in accounts.items()
        if abs(account.time_s) * 1e3 >= FEWEST_MS
    ]
    # compiled, it moves less than was counted, and may be faster than that floor
    floor = None if b.case.compile else floor_step(b.step)
    return Explanation(
        axis,
        a,
        b,
        items,
        speedup,
        hoped,
        before / floor if floor else None,
        tuple(list_changes(a, b)),
        gap,
        tuple(sorted(reasons, key=lambda reason: -reason.time_s * (1 if gap >= 0 else -1))),
        _drop_dust(gap - sum(reason.time_s for reason in reasons), after),
        about,
    )


def _drop_dust(time_s: float, step_s: float) -> float:
    """A sum that should be 0, without what rounding left of it."""
    return 0.0 if abs(time_s) < 1e-9 * step_s else time_s


def _hope(before: str, b: Side, arithmetic: str = Arithmetic.FLOAT32) -> float | None:
    """The speed-up that B's number format promises; None where it promises none.

    Args:
        before: what the products of A are rounded to.
        b: the side after.
        arithmetic: what products of float32 were rounded to on side A.
    """
    if before in (Arithmetic.FLOAT32, Arithmetic.TFLOAT32):
        before = arithmetic
    fast, slow = (find_rate(name, b.step.rates, name) for name in (b.format, before))
    bits = BITS[Arithmetic(before)] / BITS[Arithmetic(b.format)]
    if bits < 1:
        return None
    ratio = max(bits, fast / slow) if fast and slow else bits
    return ratio if ratio > 1 else None


def list_changes(a: Side, b: Side) -> Iterator[Change]:
    """The kinds of work and waits, those that changed most first, and what is left over."""
    names = dict.fromkeys(part.name for side in (a, b) for part in side.breakdown.parts)
    found = [Change(n, a.breakdown.find_time(n), b.breakdown.find_time(n)) for n in names]
    yield from sorted(found, key=lambda change: -abs(change.change_s))
    yield Change(LEFT_OVER, a.breakdown.left_over_s, b.breakdown.left_over_s)


def match_rows(ours: Sequence[Timed], theirs: Sequence[Timed]) -> Iterator[Item]:
    """Each operation of B with the time of the same operation of A; their sums are as they were.

    The same are those of one kind and name, whatever their format. What is left of a kind in A, as
    where compilation gave its operations other names, is divided among what is left of it in B.

    Args:
        ours: the rows of A.
        theirs: those of B.
    """
    for kind in Kind:
        a = [one for one in ours if one.row.kind == kind]
        b = [one for one in theirs if one.row.kind == kind]
        shared = {one.row.operation for one in a} & {one.row.operation for one in b}
        for name in sorted(shared):
            yield from _divide(
                [one for one in a if one.row.operation == name],
                [one for one in b if one.row.operation == name],
            )
        rest_a = [one for one in a if one.row.operation not in shared]
        rest_b = [one for one in b if one.row.operation not in shared]
        yield from _divide(rest_a, rest_b)


def _divide(a: Sequence[Timed], b: Sequence[Timed]) -> Iterator[Item]:
    """Divide the time of A's operations among those of B by the time that these take."""
    before, whole = sum(one.time_s for one in a), sum(one.time_s for one in b)
    moved = sum(one.row.bytes or 0.0 for one in a)
    for one in b:
        share = one.time_s / whole if whole else 1 / len(b)
        yield Item(one.row, one.time_s, before * share, one.bound, moved * share)
    if not b:
        for one in a:
            yield Item(one.row, 0.0, one.time_s, one.bound, one.row.bytes or 0.0)


def _blame(item: Item, pair: _Pair) -> Iterator[tuple[Cause, float]]:
    """The causes of an operation's part of the gap; nothing where none is known."""
    excess = item.after_s - item.before_s / pair.hoped
    kind = item.row.kind
    if kind == Kind.OPTIMIZER and item.after_s > item.before_s:
        yield Cause.ADDED, item.after_s - item.before_s
        excess -= item.after_s - item.before_s
    cause = _find_cause(item, pair)
    if cause is None:
        return
    if item.bound is Bound.COMPUTE and pair.clock < 1:
        sank = item.after_s * (1 - pair.clock)
        yield Cause.CLOCKS, sank
        excess -= sank
    yield cause, excess


_ALWAYS = {
    Kind.INPUT: Cause.LOADER,
    Kind.CAST: Cause.ADDED,
    Kind.LOSS_SCALING: Cause.ADDED,
}


def _find_cause(item: Item, pair: _Pair) -> Cause | None:
    row, bound = item.row, item.bound
    if cause := _ALWAYS.get(Kind(row.kind)):
        return cause
    if bound is Bound.LAUNCH:
        return Cause.LAUNCH
    if row.kind == Kind.LAYOUT:
        return Cause.LAYOUT
    if pair.lowered and row.format == Arithmetic.FLOAT32 and row.kind not in OWN_FORMAT:
        return Cause.FLOAT32
    if bound is None:
        return None
    if bound is Bound.MEMORY:
        return Cause.MEMORY
    if pair.lowered and _is_emulated(row, pair.b.step):
        return Cause.EMULATED
    if pair.lowered and row.kind in CONVOLUTIONS and _lacks_tensor_cores(item, pair.b.step):
        return Cause.NO_TENSOR_CORES
    return Cause.PRODUCTS


def _is_emulated(row: WorkRow, step: Step) -> bool:
    rate, usual = (find_rate(name, step.rates, name) for name in (row.format, Arithmetic.FLOAT32))
    return rate is not None and usual is not None and rate < FASTER * usual


def _lacks_tensor_cores(item: Item, step: Step) -> bool:
    """Whether half-precision products run below the rate that float32's reach without them."""
    usual = step.rates.products.get(Arithmetic.FLOAT32)
    low = item.row.format in (Arithmetic.FLOAT16, Arithmetic.BFLOAT16)
    if step.device != "cuda" or not low or not usual or not item.row.flop or not item.after_s:
        return False
    return item.row.flop / item.after_s < usual


def _blame_wait(wait: Wait, pair: _Pair) -> Cause:
    if wait is Wait.INPUT:
        return Cause.LOADER
    if pair.b.alloc_retries:
        return Cause.MEMORY_LIMIT
    return Cause.SYNCHRONISATION if wait is Wait.SYNCHRONISATION else Cause.LAUNCH


# --------------------------------------------------------------------------------------- evidence


@dataclass(frozen=True)
class Option:
    """A setting that may mend a cause.

    Attributes:
        axis: whose value it changes.
        flag: as advice has it.
        better: whether a value may mend what B's value has.
    """

    axis: str
    flag: str
    better: Callable[[Value, Value], bool]


def _turn(to: bool) -> Callable[[Value, Value], bool]:
    return lambda old, new: new is to and old is not to


def _is_more(old: Value, new: Value) -> bool:
    return isinstance(old, int) and isinstance(new, int) and new > old


def _is_less(old: Value, new: Value) -> bool:
    return _is_more(new, old)


LARGER = Option("batch_size", "a larger --batch-size", _is_more)
SMALLER = Option("batch_size", "a smaller --batch-size", _is_less)
COMPILE = Option("compile", "--compile on", _turn(True))
NHWC, NCHW = (
    Option("channels_last", f"--channels-last {'on' if to else 'off'}", _turn(to))
    for to in (True, False)
)
ON_DEVICE = Option("loader", "--loader device", lambda old, new: new == "device" != old)
WORKERS = Option("workers", "more --workers", _is_more)
NO_LIMIT = Option("memory_limit", "no --memory-limit", lambda old, new: new is None is not old)
FP32 = Option("precision", "--precision fp32", lambda old, new: new == "fp32" != old)
HALF = Option("precision", "--precision fp16", lambda old, new: (old, new) == ("fp16-amp", "fp16"))


@dataclass(frozen=True)
class Cure:
    """What may mend a cause: settings of this harness, and what else."""

    options: tuple[Option, ...] = ()
    advice: str = ""


CURES: dict[Cause, Cure] = {
    Cause.TF32: Cure(advice="Compare with --precision fp32, which switches TF32 off."),
    Cause.LOADER: Cure((WORKERS, ON_DEVICE)),
    Cause.SYNCHRONISATION: Cure(
        advice="Read losses (.item(), .cpu(), print) once an epoch, not each step."
    ),
    Cause.MEMORY_LIMIT: Cure((SMALLER, NO_LIMIT)),
    Cause.LAUNCH: Cure((LARGER, COMPILE)),
    Cause.ADDED: Cure((COMPILE, HALF)),
    Cause.LAYOUT: Cure((NHWC, NCHW)),
    Cause.EMULATED: Cure((FP32,)),
    Cause.NO_TENSOR_CORES: Cure(
        (NHWC,), "Tensor cores need channels per group that are a multiple of 8."
    ),
    Cause.CLOCKS: Cure(
        advice="nvidia-smi -q -d POWER,CLOCK shows the limit; compare energies, not only times."
    ),
    Cause.FLOAT32: Cure((HALF,)),
    Cause.MEMORY: Cure((COMPILE,), "Operations that are fused move less memory."),
    Cause.PRODUCTS: Cure((LARGER,)),
}
"""Every cause, and what may mend it."""

_ABSENT_AXES = {"workers": lambda case: case.loader == "device"}
"""Axes that mean nothing in some cases."""


def _advise(cause: Cause, case: Case, alternatives: Alternatives) -> tuple[str, tuple[Trial, ...]]:
    """What may mend a cause in a case, and what the sweep has of it."""
    cure, flags, trials = CURES[cause], [], []
    for option in cure.options:
        old = getattr(case, option.axis)
        if _ABSENT_AXES.get(option.axis, lambda _: False)(case) or not _is_open(option, old):
            continue
        flags.append(option.flag)
        for value, speedup in alternatives.get(option.axis, {}).items():
            if option.better(old, value):
                trials.append(Trial(f"{axis_flag(option.axis)} {spell_value(value)}", speedup))
    said = [f"Try {' or '.join(flags)}."] if flags else []
    return " ".join([*said, *filter(None, [cure.advice])]), tuple(trials)


def _is_open(option: Option, old: Value) -> bool:
    """Whether there is any better value than a case has already."""
    values: tuple[Value, ...] = (True, False, None, "device", "fp32", "fp16")
    numbers = isinstance(old, int) and not isinstance(old, bool)
    return numbers or any(option.better(old, value) for value in values)


def _tell(
    cause: Cause, account: _Account, gap: float, pair: _Pair, alternatives: Alternatives
) -> Reason:
    option, tried = _advise(cause, pair.b.case, alternatives)
    evidence = "; ".join(filter(None, _EVIDENCE.get(cause, _show_items)(account, pair)))
    return Reason(
        cause,
        account.time_s,
        account.time_s / gap if gap else 0.0,
        f"{evidence[:1].upper()}{evidence[1:]}." if evidence else "",
        option,
        tried,
    )


def write_ms(time_s: float) -> str:
    """Write a time of a step in ms, to three digits.

    >>> write_ms(0.3124), write_ms(0.0052), write_ms(1.5)
    ('312', '5.2', '1,500')
    """
    value = time_s * 1e3
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def write_flops(rate: float) -> str:
    """Write FLOP/s in the unit that suits it.

    >>> write_flops(6.1e13), write_flops(2.34e10)
    ('61.0 TFLOP/s', '23.4 GFLOP/s')
    """
    scale, prefix = choose_prefix(rate)
    shown = rate / scale
    return f"{shown:.3g} {prefix}FLOP/s" if shown >= 100 else f"{shown:.1f} {prefix}FLOP/s"


def name_operation(row: WorkRow) -> str:
    """Name an operation with what it is: a convolution by its kind too, a cast by its formats."""
    if row.kind in CONVOLUTIONS:
        return f"{'grouped ' * (row.kind == Kind.GROUPED)}convolution {row.operation}"
    if row.kind == Kind.CAST:
        return f"{row.operation} {row.format}"
    return row.operation


MOST_NAMED = 3
"""Operations that a sentence names."""


def _rank(account: _Account) -> list[Item]:
    """The items that make most of an account, in its direction."""
    sign = 1 if account.time_s >= 0 else -1
    return [item for time_s, item in sorted(account.items, key=lambda entry: -sign * entry[0])]


def _show_items(account: _Account, pair: _Pair) -> Iterator[str]:
    """The operations, each from A's time to B's."""
    items = _rank(account)
    yield "most in " + ", ".join(
        f"{name_operation(i.row)} ({write_ms(i.before_s)} → {write_ms(i.after_s)} ms)"
        for i in items[:MOST_NAMED]
    )
    if len(items) > MOST_NAMED:
        yield from _show_total(items)


def _show_wait(wait: Wait) -> Callable[[_Account, _Pair], Iterator[str]]:
    def show(account: _Account, pair: _Pair) -> Iterator[str]:
        before, after = (side.breakdown.find_time(wait) for side in (pair.a, pair.b))
        if max(before, after) * 1e3 >= FEWEST_MS:
            yield f"{wait.meaning} {write_ms(before)} → {write_ms(after)} ms"
        if account.items:
            yield from _show_items(account, pair)

    return show


def _show_launches(account: _Account, pair: _Pair) -> Iterator[str]:
    yield from _show_wait(Wait.IDLE)(account, pair)
    call = pair.b.step.rates.call_s
    calls = sum(item.row.calls for _, item in account.items if item.after_s)
    if call and calls:
        yield (
            f"{calls:,} operations a step have less work than the {call * 1e6:.2g} µs that one "
            "takes to start"
        )


def _show_memory(account: _Account, pair: _Pair) -> Iterator[str]:
    yield from _show_items(account, pair)
    counted = [item for _, item in account.items if item.row.bytes and item.before_bytes]
    before = sum(item.before_bytes for item in counted)
    after = sum(item.row.bytes or 0.0 for item in counted if item.after_s)
    times = [sum(getattr(i, name) for i in counted) for name in ("before_s", "after_s")]
    if before and after and all(times) and pair.lowered:
        yield (
            f"they move {before / 1e9:.3g} → {after / 1e9:.3g} GB a step, so that they can gain "
            f"{before / after:.2g}×, and gained {times[0] / times[1]:.2g}×"
        )


def _show_rates(account: _Account, pair: _Pair) -> Iterator[str]:
    """Products, each with the rate that it reached."""
    step = pair.b.step
    items = [item for item in _rank(account) if item.after_s]
    timed = [item for item in items if item.row.flop]
    yield ", ".join(
        f"{name_operation(i.row)} at {write_flops((i.row.flop or 0) / i.after_s)}"
        for i in timed[:MOST_NAMED]
    )
    formats = dict.fromkeys(item.row.format for item in timed)
    rates = {name: find_rate(name, step.rates, step.arithmetic) for name in [*formats, "float32"]}
    yield "large products reach " + ", ".join(
        f"{write_flops(rate)} in {name}" for name, rate in rates.items() if rate
    )
    yield from _show_total(items)


def _show_total(items: Sequence[Item]) -> Iterator[str]:
    before, after = (sum(getattr(i, n) for i in items) for n in ("before_s", "after_s"))
    yield f"together {write_ms(before)} → {write_ms(after)} ms"


def _show_tf32(account: _Account, pair: _Pair) -> Iterator[str]:
    products = pair.b.step.rates.products
    usual, ran = products.get(Arithmetic.FLOAT32), products.get(Arithmetic.TFLOAT32)
    if usual and ran:
        yield (
            f"{pair.a.name} rounds its products to TF32, at {write_flops(ran)} instead of "
            f"{write_flops(usual)} in float32"
        )


def _show_clocks(account: _Account, pair: _Pair) -> Iterator[str]:
    yield f"the SM clock sank from {pair.a.sm_clock_mhz:,.0f} to {pair.b.sm_clock_mhz:,.0f} MHz"


def _show_retries(account: _Account, pair: _Pair) -> Iterator[str]:
    yield f"{pair.b.alloc_retries:,} allocations were retried after freeing memory"
    for wait in (Wait.IDLE, Wait.SYNCHRONISATION):
        yield from _show_wait(wait)(account, pair)


_EVIDENCE: dict[Cause, Callable[[_Account, _Pair], Iterator[str]]] = {
    Cause.TF32: _show_tf32,
    Cause.LOADER: _show_wait(Wait.INPUT),
    Cause.SYNCHRONISATION: _show_wait(Wait.SYNCHRONISATION),
    Cause.MEMORY_LIMIT: _show_retries,
    Cause.LAUNCH: _show_launches,
    Cause.EMULATED: _show_rates,
    Cause.NO_TENSOR_CORES: _show_rates,
    Cause.CLOCKS: _show_clocks,
    Cause.MEMORY: _show_memory,
    Cause.PRODUCTS: _show_rates,
}
"""What shows each cause; of others, their operations."""
