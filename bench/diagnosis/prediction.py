"""Predictions for a step before anything runs, from counts and measured rates alone.

`predict_seconds` returns the least time of a case, without the start of its process: real steps
take longer than the least time of their operations. `expect` returns how much faster one step may
be than another if both ran at the machine's rates; B gains more if A falls further short of them
than B does. The most that a pair can gain, once it has run, is in `bench.diagnosis.ceiling`.
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

WARMUP_STEPS = 4  # the fewest that `bench.training.timing.warm_up` runs


def predict_seconds(
    case: Case, work: Sequence[WorkRow], rates: Rates, samples: int, tests: int = 0
) -> float | None:
    """Return the least s that warm-up, epochs and evaluations of a case take. ``work`` is per item,
    in float32, as from `bench.training.counting.sketch_work`; ``samples`` and ``tests`` are the
    numbers of training and test items. None if the work is not known, a part of it is frozen, or a
    rate that it needs was not measured."""
    step_s = predict_step(case, work, rates)
    if step_s is None:
        return None
    steps = math.ceil(case.fraction * math.ceil(samples / whole_batch(case)))
    steps = steps if case.steps is None else min(steps, case.steps)
    # forward is a third of a step; gradients of inputs and of weights are the rest
    tested = tests / case.batch_size / 3 if case.evaluate else 0.0
    return step_s * (WARMUP_STEPS + case.epochs * (steps + tested))


def predict_step(case: Case, work: Sequence[WorkRow], rates: Rates) -> float | None:
    """Return the least s that a step of a case takes; None as in `predict_seconds`."""
    if not work or case.freeze != NONE:
        return None
    ran, float32 = PRECISIONS[case.precision].arithmetic, PRECISIONS[case.precision].float32
    if ran is Arithmetic.FLOAT8:  # only in linear layers
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
    """The gain of step B on step A if both ran at their floors, ``a`` and ``b``. The measured gain
    is lower if B falls further short of its floor than A does, and higher if A does."""

    a: Mapping[Bound, float]
    b: Mapping[Bound, float]

    @property
    def speedup(self) -> float:
        return sum(self.a.values()) / sum(self.b.values())


def expect(a: Step, b: Step) -> Expectation | None:
    """Return what B may gain on A, without using their ``step_s``. None as in `find_step_floor`."""
    before, after = find_step_floor(a), find_step_floor(b)
    return None if before is None or after is None else Expectation(before, after)


def find_step_floor(step: Step) -> Mapping[Bound, float] | None:
    """Return the least s of a step, by what limits it, for operations that run one by one, not
    compiled: the time of their work, or of starting them, if that takes longer. None as in
    `bench.diagnosis.rates.floor_step`."""
    working = floor_step(step)
    if working is None:
        return None
    calls = sum(row.calls for row in step.work if row.bytes is not None)
    starting = calls * (step.rates.call_s or 0.0)
    return {Bound.LAUNCH: starting} if starting > sum(working.values()) else working


def describe_expectation(found: Expectation, base: str) -> str:
    """Describe it, with ``base`` for A: ``about 2.4× over fp32, were both to run at …``."""
    speedup = f"about {found.speedup:.1f}× over {base}, were both to run at these rates"
    before, after = (f.get(Bound.MEMORY, 0.0) / sum(f.values()) for f in (found.a, found.b))
    if Bound.LAUNCH in found.a:
        return f"{speedup}: {base} takes longer to start its operations than to do them"
    traffic = f"{speedup}: {100 * before:.0f} % of {base}'s least time is memory traffic"
    if Bound.LAUNCH in found.b:
        return f"{traffic}, and then the start of its operations takes longest"
    return f"{traffic}, and {100 * after:.0f} % of what remains"
