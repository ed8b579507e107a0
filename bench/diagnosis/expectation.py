"""How much faster one step may be than another, from counts and measured rates alone.

An estimate, for before anything has run: it takes both to run at the machine's rates. A step before
that falls further short of them gains more. What a pair can gain at most, once it has run, is
`bench.diagnosis.ceiling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.diagnosis.floors import floor_step
from bench.diagnosis.step import Bound, Step


@dataclass(frozen=True)
class Floor:
    """The least time of a step, of operations that run one by one, not compiled.

    Attributes:
        time_s: what its work takes at the machine's rates, or to start its operations, if that
            takes longer.
        bounds: that time by what limits it, in shares: all of it is launch, or none.
    """

    time_s: float
    bounds: Mapping[Bound, float]


@dataclass(frozen=True)
class Expectation:
    """What step B may gain on step A.

    Attributes:
        speedup: A's least time over B's: what is measured is less where B falls further short of
            that than A does, and more where A does.
        a: the floor of the slower.
        b: that of the other.
    """

    speedup: float
    a: Floor
    b: Floor


def expect(a: Step, b: Step) -> Expectation | None:
    """What B may gain on A; ``step_s`` of neither is looked at.

    Returns:
        None where the work of one was not counted, or a rate that it needs was not measured.
    """
    before, after = find_step_floor(a), find_step_floor(b)
    if before is None or after is None:
        return None
    return Expectation(before.time_s / after.time_s, before, after)


def find_step_floor(step: Step) -> Floor | None:
    """The least time of a step; None as `bench.diagnosis.floors.floor_step`."""
    working = floor_step(step)
    if working is None:
        return None
    time_s = sum(working.values())
    calls = sum(row.calls for row in step.work if row.bytes is not None)
    if (starting := calls * (step.rates.call_s or 0.0)) > time_s:
        return Floor(starting, {Bound.LAUNCH: 1.0})
    return Floor(time_s, {bound: part / time_s for bound, part in working.items()})


def describe_expectation(found: Expectation, base: str) -> str:
    """In words, such as ``about 2.4× over fp32, were both to run at these rates: 58 % of …``.

    Args:
        base: what A is called.
    """
    speedup = f"about {found.speedup:.1f}× over {base}, were both to run at these rates"
    if Bound.LAUNCH in found.a.bounds:
        return f"{speedup}: {base} takes longer to start its operations than to do them"
    share = found.a.bounds[Bound.MEMORY]
    traffic = f"{speedup}: {100 * share:.0f} % of {base}'s least time is memory traffic"
    if Bound.LAUNCH in found.b.bounds:
        return f"{traffic}, and then the start of its operations takes longest"
    return f"{traffic}, and {100 * found.b.bounds[Bound.MEMORY]:.0f} % of what remains"
