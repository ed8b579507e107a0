"""An explanation in words, to be pasted where the question was asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from bench.diagnosis.ceiling import Beaten
from bench.diagnosis.evidence import name_operation, write_ms, write_run
from bench.diagnosis.explanation import LEFT_OVER, Advice, Change, Explanation, Side
from bench.diagnosis.rates import RATES, write_rate
from bench.diagnosis.step import Wait
from bench.limits import STEADY
from bench.precision import Arithmetic
from bench.text import ESTIMATE, capitalize
from bench.work import Kind

TOLD = 3  # reasons, changes or swaps that the words name; the tables have all
WORTH = 0.1  # share of the answer from which a reason is named in words, but for the first
BUSY = 0.9  # a GPU that works for less than this share of a step is held up by its program


def describe(found: Explanation, beside: bool = False) -> list[str]:
    """A few sentences: the speed-up, what changed, what is possible, and where the time goes.
    ``beside`` tables of reasons and of changes, their figures are left out."""
    return list(_tell(found, beside))


def _tell(found: Explanation, beside: bool) -> Iterator[str]:
    a, b, ratio = found.a, found.b, found.speedup
    where = f" ({found.about})" if found.about else ""
    held = "".join(f"; {said}" for side in (a, b) if (said := write_host(side)))
    ends = (
        "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    )
    yield (
        f"{b.name} is {ratio.value or a.step.step_s / b.step.step_s:.2f}×{ends} as fast as "
        f"{a.name}{where}: {write_ms(a.step.step_s)} → {write_ms(b.step.step_s)} ms for "
        f"{found.items:,} items{held}."
    )
    if ratio.low is not None and ratio.high is not None and ratio.low < 1 < ratio.high:
        yield (
            "The repeats do not tell which is faster: close other programs, or use --repeats 5 or "
            "more."
        )
    if a.format == Arithmetic.FLOAT32 and a.step.arithmetic == Arithmetic.TFLOAT32:
        yield (
            f"{a.name} rounded its products to TF32, so a part of the gain is in it already: "
            "look whether the model or NVIDIA_TF32_OVERRIDE switches TF32 on."
        )
    if not beside:
        yield from _say_changes(found)
        if swaps := found.swaps[:TOLD]:
            before, after = (
                " and ".join(write_run(getattr(swap, end)) for swap in swaps)
                for end in ("before", "after")
            )
            yield f"{b.name} runs {after} where {a.name} runs {before}."
    if found.beaten:
        yield write_beaten(found.beaten)
    elif most := found.ceiling:
        yield (
            f"At most {most.speedup:.2f}× is possible without fusing operations: at the rates "
            f"measured on this machine {b.name}'s work takes {write_ms(most.least_s)} ms, "
            f"{write_percent(most.memory)} of it memory traffic."
        )
    # those of the first few that matter
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
    """That a GPU had nothing to do for much of a step; empty where it had."""
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


def write_beaten(beaten: Beaten) -> str:
    """That the machine's rates were measured too low, and how to measure them again."""
    which = name_operation(beaten.row) if beaten.row else "a step"
    measured, reached = (write_rate(beaten.rate, r) for r in (beaten.measured, beaten.reached))
    return (
        "The rates of this machine were measured too low, so neither a bound nor reasons are told: "
        f"{RATES[beaten.rate]} at {measured}, but {which} reached at least {reached}. Close other "
        "programs, look at what python -m bench.doctor measures now, and run the sweep again with "
        "another --out."
    )


def _say_advice(advice: Collection[Advice]) -> Iterator[str]:
    """What may mend the main reasons: by where it was measured, and what nobody measured."""
    for source in dict.fromkeys(one.source for one in advice if one.source):
        told = [one for one in advice if one.source == source]
        listed = ", ".join(_write_tried(one, one.speedup or 0.0) for one in told)
        yield f"{capitalize(source)}: {listed}."
    if untested := [one.what for one in advice if one.speedup is None]:
        yield f"Untested: {', '.join(untested)}."


def _write_tried(advice: Advice, speedup: float) -> str:
    case = f" ({advice.case})" if advice.case else ""
    if abs(speedup - 1) <= STEADY:
        return f"{advice.what} changed nothing{case}"
    verdict = "as fast" if speedup > 1 else "as fast, which is slower"
    return f"{advice.what} was {speedup:.2f}× {verdict}{case}"
