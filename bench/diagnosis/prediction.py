"""How long a case takes at least, before it runs: its work at the machine's measured rates.

An estimate from below: steps take longer than the least time of their operations, and the start of
a process comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bench.case import Case, whole_batch
from bench.diagnosis.floors import find_floor
from bench.diagnosis.step import Rates
from bench.models.freezing import NONE
from bench.precision import PRECISIONS, Arithmetic
from bench.record import WorkRow
from bench.work import COMPUTING

WARMUP_STEPS = 4
"""`bench.training.timing.warm_up` runs no fewer of long steps."""


def predict_seconds(
    case: Case, work: Sequence[WorkRow], rates: Rates, samples: int, tests: int = 0
) -> float | None:
    """The s that warm-up, epochs and evaluations of a case take at least.

    Args:
        case: that nothing is frozen in.
        work: of an item in float32, as `bench.training.counting.sketch_work` has it.
        samples: items of the training data.
        tests: items of the test data.

    Returns:
        None where the work is not known, or a rate that it needs was not measured.
    """
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
    total = 0.0
    for row in work:
        floor = find_floor(_cast(row, case), rates, PRECISIONS[case.precision].float32)
        if floor is None:
            return None
        total += floor
    return total


def _cast(row: WorkRow, case: Case) -> WorkRow:
    """A row of an item in float32 as the batch of a case does it."""
    ran = PRECISIONS[case.precision].arithmetic
    if ran is Arithmetic.FLOAT8:  # in linear layers alone
        ran = Arithmetic.BFLOAT16
    half = ran in (Arithmetic.FLOAT16, Arithmetic.BFLOAT16)
    return replace(
        row,
        format=ran if half and row.kind in COMPUTING else row.format,
        flop=(row.flop or 0.0) * case.batch_size,
        bytes=(row.bytes or 0.0) * case.batch_size / (2 if half else 1),
    )
