"""What is known of a step before anything runs, from counts and measured rates alone.

How long a case takes at least: steps take longer than the least time of their operations, and the
start of a process comes on top. And how much faster one step may be than another, were both to run
at the machine's rates: a step before that falls further short of them gains more. What a pair can
gain at most, once it has run, is `bench.diagnosis.ceiling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.case import Case, whole_batch
from bench.diagnosis.rates import find_floor, floor_step
from bench.diagnosis.step import Bound, Rates, Step
from bench.models.freezing import NONE
from bench.precision import PRECISIONS, Arithmetic
from bench.record import WorkRow
from bench.work import COMPUTING

WARMUP_STEPS = 4  # `bench.training.timing.warm_up` runs no fewer of long steps


def predict_seconds(
    case: Case, work: Sequence[WorkRow], rates: Rates, samples: int, tests: int = 0
) -> float | None:
    """The s that warm-up, epochs and evaluations of a case take at least. ``work`` is of an item in
    float32, as `bench.training.counting.sketch_work` has it; ``samples`` and ``tests`` are the
    items of the training and the test data. None where the work is not known, a part of it frozen,
    or a rate that it needs was not measured."""
    step_s = predict_step(case, work, rates)
    if step_s is None:
        return None
    steps = math.ceil(case.fraction * math.ceil(samples / whole_batch(case)))
    steps = steps if case.steps is None else min(steps, case.steps)
    # forward is a third of forward, gradients of inputs and gradients of weights
    tested = tests / case.batch_size / 3 if case.evaluate else 0.0
    return step_s * (WARMUP_STEPS + case.epochs * (steps + tested))


def predict_step(case: Case, work: Sequence[WorkRow], rates: Rates) -> float | None:
    """The s that a step of a case takes at least; as `predict_seconds`."""
    if not work or case.freeze != NONE:
        return None
    ran, float32 = PRECISIONS[case.precision].arithmetic, PRECISIONS[case.precision].float32
    if ran is Arithmetic.FLOAT8:  # in linear layers alone
        ran = Arithmetic.BFLOAT16
    half = ran in (Arithmetic.FLOAT16, Arithmetic.BFLOAT16)
    total = 0.0
    for row in work:
        batch = replace(
            row,
            format=ran if half and row.kind in COMPUTING else row.format,
            flop=(row.flop or 0.0) * case.batch_size,
            bytes=(row.bytes or 0.0) * case.batch_size / (2 if half else 1),
        )
        floor = find_floor(batch, rates, float32)
        if floor is None:
            return None
        total += floor
    return total


@dataclass(frozen=True)
class Expectation:
    """What step B may gain on step A, of which ``a`` and ``b`` are the floors. What is measured is
    less where B falls further short of its own than A does, and more where A does."""

    a: Mapping[Bound, float]
    b: Mapping[Bound, float]

    @property
    def speedup(self) -> float:
        return sum(self.a.values()) / sum(self.b.values())


def expect(a: Step, b: Step) -> Expectation | None:
    """What B may gain on A; ``step_s`` of neither is looked at. None as `find_step_floor`."""
    before, after = find_step_floor(a), find_step_floor(b)
    return None if before is None or after is None else Expectation(before, after)


def find_step_floor(step: Step) -> Mapping[Bound, float] | None:
    """The least s of a step, by what limits it, of operations that run one by one, not compiled:
    those of its work, or of starting its operations, if that takes longer. None as
    `bench.diagnosis.rates.floor_step`."""
    working = floor_step(step)
    if working is None:
        return None
    calls = sum(row.calls for row in step.work if row.bytes is not None)
    starting = calls * (step.rates.call_s or 0.0)
    return {Bound.LAUNCH: starting} if starting > sum(working.values()) else working


def describe_expectation(found: Expectation, base: str) -> str:
    """In words, ``base`` for A: ``about 2.4× over fp32, were both to run at these rates: …``."""
    speedup = f"about {found.speedup:.1f}× over {base}, were both to run at these rates"
    before, after = (f.get(Bound.MEMORY, 0.0) / sum(f.values()) for f in (found.a, found.b))
    if Bound.LAUNCH in found.a:
        return f"{speedup}: {base} takes longer to start its operations than to do them"
    traffic = f"{speedup}: {100 * before:.0f} % of {base}'s least time is memory traffic"
    if Bound.LAUNCH in found.b:
        return f"{traffic}, and then the start of its operations takes longest"
    return f"{traffic}, and {100 * after:.0f} % of what remains"
