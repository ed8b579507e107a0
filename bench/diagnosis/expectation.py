"""How much faster one step can be than another at most, from counts and measured rates alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.diagnosis.floors import find_floor, find_limit, floor_step
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
    """What step B can gain on step A.

    Attributes:
        speedup: A's least time over B's: where both do all that the machine was measured to do.
            What is measured is less where B falls short of that, and can be more only where A does.
        a: the floor of the slower.
        b: that of the other.
    """

    speedup: float
    a: Floor
    b: Floor


def expect(a: Step, b: Step) -> Expectation | None:
    """What B can gain on A; ``step_s`` of neither is looked at.

    Returns:
        None where the work of one was not counted, or a rate that it needs was not measured.
    """
    before, after = find_step_floor(a), find_step_floor(b)
    if before is None or after is None:
        return None
    return Expectation(before.time_s / after.time_s, before, after)


def find_step_floor(step: Step) -> Floor | None:
    """The least time of a step; None as `bench.diagnosis.floors.floor_step`, or where it is 0."""
    working, calls = floor_step(step), sum(row.calls for row in step.work if row.bytes is not None)
    if not working:
        return None
    if (starting := calls * (step.rates.call_s or 0.0)) > working:
        return Floor(starting, {Bound.LAUNCH: 1.0})
    shares = dict.fromkeys((Bound.COMPUTE, Bound.MEMORY), 0.0)
    for row in step.work:
        floor = find_floor(row, step.rates, step.arithmetic)
        limit = find_limit(row, step.rates, step.arithmetic)
        if floor is not None and limit is not None:
            shares[limit] += floor / working
    return Floor(working, shares)


def describe_expectation(found: Expectation, base: str) -> str:
    """In words, such as ``at most 2.4× over fp32, if both reach these rates: 58 % of …``.

    Args:
        found: what is expected.
        base: what A is called.
    """
    speedup = f"at most {found.speedup:.1f}× over {base}, if both reach these rates"
    if Bound.LAUNCH in found.a.bounds:
        return f"{speedup}: {base} takes longer to start its operations than to do them"
    share = found.a.bounds[Bound.MEMORY]
    traffic = f"{speedup}: {100 * share:.0f} % of {base}'s least time is memory traffic"
    if Bound.LAUNCH in found.b.bounds:
        return f"{traffic}, and then the start of its operations takes longest"
    return f"{traffic}, and {100 * found.b.bounds[Bound.MEMORY]:.0f} % of what remains"
