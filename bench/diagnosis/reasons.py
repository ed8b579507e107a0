"""Why one step is faster or slower than another, and not faster still.

Each step's time is divided among causes (`bench.diagnosis.causes`), beside the most that the second
can gain on the first (`bench.diagnosis.ceiling`). The times of all causes, and time without a
cause, add up to each step exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.diagnosis.advice import advise
from bench.diagnosis.breakdown import Timed
from bench.diagnosis.causes import find_shares
from bench.diagnosis.ceiling import find_ceiling, find_violation
from bench.diagnosis.explanation import (
    LEFT_OVER,
    Alternatives,
    Cause,
    Change,
    Explanation,
    Reason,
    Run,
    Side,
    Swap,
)
from bench.diagnosis.sentences import FEWEST_MS, name_kernel, name_operation, show
from bench.limits import SLOWED, STEADY
from bench.verdict.ratio import Ratio
from bench.work import COMPUTING

NOTABLE = 0.05  # share of a step from which a swapped operation is listed

IMPLEMENTATIONS = ("native", "cudnn", "miopen", "mkldnn", "flash", "efficient", "math")
"""Words in torch's names of operations for the library or algorithm that does them."""


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
    changes, swaps = tuple(list_changes(a, b)), tuple(find_swaps(a, b))
    return Explanation(
        axis, a, b, items, speedup, ceiling, violation, changes, swaps, tuple(reasons), unexplained,
        about,
    )  # fmt: skip


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


def find_swaps(a: Side, b: Side) -> list[Swap]:
    """Find work that another operation or kernel does in B, with a clearly different time or a
    lower rate. The rate is that of memory traffic: half the bytes in the same time mean a slower
    kernel. Each number format has other kernels for products, so these are listed only if B lost
    time by them."""
    ours, theirs = (_group(side.breakdown.rows) for side in (a, b))
    smaller = min(a.step.step_s, b.step.step_s)
    found = []
    for key in ours.keys() & theirs.keys():
        before, after = _join(ours[key]), _join(theirs[key])
        notable = (
            after.time_s >= NOTABLE * b.step.step_s or before.time_s >= NOTABLE * a.step.step_s
        )
        lost = after.time_s - before.time_s
        if not notable or (abs(lost) <= STEADY * smaller and not _is_slowed(before, after)):
            continue
        if before.row.operation != after.row.operation:
            found.append(Swap(before, after))
        elif lost > 0 or before.row.kind not in COMPUTING:
            one, other = name_kernel(before.row), name_kernel(after.row)
            if one and other and one != other:
                before = replace(before, name=f"{before.name} by {one}")
                found.append(Swap(before, replace(after, name=f"{after.name} by {other}")))
    return sorted(found, key=lambda swap: -swap.after.time_s)


def _is_slowed(before: Run, after: Run) -> bool:
    if before.row.kind in COMPUTING or not (before.row.bytes and after.row.bytes):
        return False
    kept = after.row.bytes / after.time_s * before.time_s / before.row.bytes
    return kept < 1 - SLOWED


def _group(rows: Sequence[Timed]) -> dict[tuple[str, str], list[Timed]]:
    """Group operations by kind and name, whichever library does them."""
    groups: dict[tuple[str, str], list[Timed]] = {}
    for timed in rows:
        words = timed.row.operation.split("_")
        name = "_".join(word for word in words if word and word not in IMPLEMENTATIONS)
        groups.setdefault((timed.row.kind, name), []).append(timed)
    return groups


def _join(group: Sequence[Timed]) -> Run:
    longest = max(group, key=lambda timed: timed.time_s).row

    def add(name: str) -> float | None:
        amounts = (getattr(timed.row, name) or 0.0 for timed in group)
        return None if any(timed.beyond for timed in group) else sum(amounts)

    row = replace(longest, flop=add("flop"), bytes=add("bytes"))
    time_s = sum(timed.time_s for timed in group)
    return Run(name_operation(longest), row, time_s, any(timed.estimated for timed in group))
