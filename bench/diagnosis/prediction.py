"""The least time of a case before anything runs, from counts and measured rates alone.

It is without the start of its process, and real steps take longer than the least time of their
operations. The most that a pair can gain, once it has run, is in `bench.diagnosis.ceiling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bench.case import Case, whole_batch
from bench.diagnosis.rates import find_floor
from bench.diagnosis.step import Rates
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
