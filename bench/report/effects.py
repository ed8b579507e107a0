"""What changing one axis does with all else equal: over every pair of cases that differs in it.

Of each pair the ratio of geometric means over the repeats is taken, and the geometric mean over the
pairs. Its 95 % interval is of that mean over just these pairs: each pair's variance is Welch's, the
degrees of freedom are Satterthwaite's, so that a single pair has the interval that `bench.compare`
gives it. The p-values of all changes of one metric are adjusted by Holm, as there. How far the pairs
differ from each other is told by the lowest and the highest of them.

Everything is vectorised over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.case import AXES, FOLLOWS
from bench.limits import MIN_REPEATS, STEADY
from bench.record import COMPARABLE, Status
from bench.report.axes import (
    HOW_MEASURED,
    MACHINE,
    Machines,
    find_varying,
    keep_main,
    name_value,
    order_values,
    take_values,
)
from bench.report.doubts import DOUBTS
from bench.report.metrics import METRICS, Metric
from bench.report.summaries import SOURCE
from bench.store.attempts import number_groups
from bench.verdict import CONFIDENCE, MIN_SEEDS, Ratio, adjust

if TYPE_CHECKING:
    import pandas as pd

NO_QUESTION = ("seed",)
"""Axes that are varied to see the spread, not for what they do."""

BASELINES = {"precision": "fp32"}
"""What other values are compared with, where it was run; else with the first, or the one below."""


@dataclass(frozen=True)
class Estimate:
    """What a change does to one metric.

    Attributes:
        ratio: after over before.
        pairs: how many pairs have a value on both sides.
        lowest: the ratio of the pair with the lowest; ``highest`` of the one with the highest.
        difference: mean of after minus before, in the metric's unit.
        reach: half the 95 % interval of the difference; None with fewer than three runs a side, or
            for what depends on the seed three seeds a side.
    """

    ratio: Ratio
    pairs: int
    lowest: float
    highest: float
    difference: float
    reach: float | None


@dataclass(frozen=True)
class Effect:
    """One change of one axis, with all else equal.

    Attributes:
        axis: an axis of `Case`, or ``machine``.
        before: its value as text; ``after`` is the one it changes to.
        pairs: (position of the case before, of the case after) in the frame of cases.
        estimates: by name of `METRICS`.
        estimated: whether any of its times was extrapolated.
        doubts: remarks of the doubts any of its cases has.
    """

    axis: str
    before: str
    after: str
    pairs: tuple[tuple[int, int], ...]
    estimates: dict[str, Estimate]
    estimated: bool
    doubts: tuple[str, ...]

    @property
    def time(self) -> Estimate | None:
        """What it does to the epoch time."""
        return self.estimates.get("epoch_time_s")
