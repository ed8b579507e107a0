"""Why one step is faster or slower than another, and not faster still.

Each step's time is divided among causes (`bench.diagnosis.causes`), beside the most that the second
can gain on the first (`bench.diagnosis.breakdown`). The times of all causes, and time without a
cause, add up to each step exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.diagnosis.breakdown import find_ceiling, find_violation
from bench.diagnosis.causes import find_shares
from bench.diagnosis.explanation import (
    LEFT_OVER,
    Alternatives,
    Cause,
    Change,
    Explanation,
    Reason,
    Side,
    advise,
)
from bench.diagnosis.sentences import FEWEST_MS, show
from bench.limits import STEADY
from bench.verdict import Ratio


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
