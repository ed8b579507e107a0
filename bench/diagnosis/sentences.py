"""An explanation in words, to be pasted where the question was asked."""

from __future__ import annotations

from collections.abc import Iterator

from bench.diagnosis.explanation import LEFT_OVER, Change, Explanation, Reason
from bench.diagnosis.reasons import write_ms
from bench.diagnosis.step import Wait
from bench.limits import STEADY
from bench.work import Kind

TOLD = 3
"""Reasons or changes that the words name; the tables have all."""

WORTH = 0.1
"""Share of the gap from which a reason is named in words, but for the first."""


def describe(found: Explanation) -> list[str]:
    """A few sentences: the speed-up, what limits it, and what may be done."""
    return [
        _say_speed(found),
        *_say_doubt(found),
        *_say_hope(found),
        *(_say_reasons(found) if found.hoped else _say_changes(found)),
        *_say_option(found),
    ]


def write_speedup(found: Explanation) -> str:
    """Write the speed-up with its interval: ``2.40× (2.35 to 2.45)``."""
    ratio = found.speedup
    value = ratio.value or found.a.step.step_s / found.b.step.step_s
    ends = (
        "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    )
    return f"{value:.2f}×{ends}"


def name_part(name: str) -> str:
    """Name a kind of work, a wait or what is left over."""
    if name == LEFT_OVER:
        return "left over"
    return Wait(name).meaning if name in list(Wait) else Kind(name).meaning


def write_percent(share: float) -> str:
    """Write a share as whole percents.

    >>> write_percent(0.614)
    '61 %'
    """
    return f"{100 * share:.0f} %"


def _say_speed(found: Explanation) -> str:
    a, b = found.a, found.b
    where = f" ({found.about})" if found.about else ""
    limits = " and ".join(
        f"{side.name} is {side.breakdown.verdict}" for side in (a, b) if side.breakdown.verdict
    )
    return (
        f"{b.name} is {write_speedup(found)} as fast as {a.name}{where}: "
        f"{write_ms(a.step.step_s)} → {write_ms(b.step.step_s)} ms for {found.items:,} items"
        f"{'; ' + limits if limits else ''}."
    )


def _say_doubt(found: Explanation) -> Iterator[str]:
    low, high = found.speedup.low, found.speedup.high
    if low is not None and high is not None and low < 1 < high:
        yield (
            "The repeats do not tell which is faster: close other programs, or use --repeats 5 or "
            "more."
        )


def _say_hope(found: Explanation) -> Iterator[str]:
    most = f"at most {found.ceiling:.2g}×" if found.ceiling else ""
    if found.hoped:
        first = f"Its number format promises {found.hoped:.2g}×"
        more = f"; at the rates measured here, the work of its step allows {most}" if most else ""
        yield f"{first}{more}."
    elif most:
        yield f"At the rates measured here, the work of its step allows {most}."


def _say_reasons(found: Explanation) -> Iterator[str]:
    if found.gap_s < 0 or not has_gap(found):
        if has_gap(found):
            yield f"It is faster than that promises, by {write_ms(-found.gap_s)} ms."
        else:
            yield f"It is as fast as was hoped, within {write_percent(STEADY)}."
        return
    told = list_main(found)
    if not told:
        yield f"Nothing explains the gap of {write_ms(found.gap_s)} ms."
        return
    listed = ", ".join(f"{write_percent(r.share)} {r.cause.meaning}" for r in told)
    rest = ""
    if abs(found.unexplained_s) > WORTH * found.gap_s:
        rest = f"; {write_percent(found.unexplained_s / found.gap_s)} is not explained"
    missing = f"{write_ms(found.gap_s)} ms are missing to the promised {found.hoped:.2g}×"
    yield f"{missing}: {listed}{rest}."
    if told[0].evidence:
        yield told[0].evidence


def has_gap(found: Explanation) -> bool:
    """Whether the gap is more than noise; shares of a smaller one say nothing."""
    return abs(found.gap_s) > STEADY * found.b.step.step_s


def list_main(found: Explanation) -> list[Reason]:
    """The reasons that words name: of those that make the gap larger, the first few."""
    return [
        reason
        for place, reason in enumerate(found.reasons[:TOLD])
        if reason.share >= WORTH or (place == 0 and reason.share > 0)
    ]


def _say_changes(found: Explanation) -> Iterator[str]:
    whole = found.b.step.step_s - found.a.step.step_s
    if not has_gap(found):
        yield f"The two steps take the same time, within {write_percent(STEADY)}."
        return
    told = [change for change in found.changes if change.change_s * whole > 0][:TOLD]
    if told and abs(whole) > STEADY * found.a.step.step_s:
        listed = ", ".join(_say_change(change, whole) for change in told)
        verb = "lost" if whole > 0 else "gained"
        yield f"Of the {write_ms(abs(whole))} ms {verb}: {listed}."


def _say_change(change: Change, whole: float) -> str:
    return (
        f"{write_percent(change.change_s / whole)} {name_part(change.name)} "
        f"({write_ms(change.before_s)} → {write_ms(change.after_s)} ms)"
    )


def _say_option(found: Explanation) -> Iterator[str]:
    """What may mend the first reason that can be mended, and what was measured of it."""
    for reason in list_main(found) if found.gap_s > 0 and has_gap(found) else []:
        if reason.option:
            yield f"{reason.option}{write_tried(reason)}"
            return


def write_tried(reason: Reason) -> str:
    """What the sweep measured of a reason's options, by items a second; empty for nothing."""
    if not reason.tried:
        return ""
    trials = ", ".join(f"{trial.speedup:.2f}× as fast with {trial.flag}" for trial in reason.tried)
    return f" In this sweep it is {trials}."
