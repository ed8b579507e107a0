"""The conditions under which runs were measured, and when two sides differ in them.

Hardware and software are in `bench.record.Environment` and are compared cell by cell. Readings
during a run vary from run to run. For each such column, this module defines how the runs of a side
are summarized, and the smallest difference that is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from bench.diagnosis.rates import CALL, RATES, UNITS
from bench.gpu.nvml import EFFECTS
from bench.limits import BUSY_CORES, SLOWED


class Summary(StrEnum):
    MEDIAN = "median"  # of the cases' medians, so that all cases have equal weight
    SET = "set"
    COUNT = "count"  # of runs in which it happened


@dataclass(frozen=True)
class Count:
    """The number of ``runs``, out of ``of``, in which something happened."""

    runs: int
    of: int


Summarized = float | tuple[float | str, ...] | Count | None
"""The summary of a side's runs; None if no run has a value."""


@dataclass(frozen=True)
class Condition:
    """A reading from the machine during a run, and how the two sides are compared. Medians are
    reported if their ratio minus 1 is above ``least``, counts if their shares of the runs differ by
    more than it, sets if they differ at all."""

    name: str  # in JSON
    label: str  # displayed; for a count, what happened to a run
    column: str  # of the records, or a doubt (`bench.study.doubts.DOUBTS`)
    summary: Summary = Summary.COUNT
    unit: str = ""
    least: float = 0.0
    happened: Callable[[Any], bool] = bool  # for a count: whether a cell of a run counts
    known: str = ""  # a column that is empty if this was not read; by default ``column``
    spoils: bool = False  # times measured under it are unreliable
    beside: bool = False  # reported beside the times of a case, as are all that spoil them
    both: bool = False  # reported only if both sides have it

    def summarize(self, cases: Sequence[Sequence[Any]]) -> Summarized:
        """Summarize one side, given for each case the cells of the runs that have a value."""
        cells = [cell for case in cases for cell in case]
        if not cells:
            return None
        if self.summary is Summary.MEDIAN:
            return float(median(median(case) for case in cases if case))
        if self.summary is Summary.SET:
            return tuple(sorted(set(cells)))
        return Count(sum(map(self.happened, cells)), len(cells))

    def differs(self, a: Summarized, b: Summarized) -> bool:
        """Return whether two sides differ by enough to be reported; unknown differs from known."""
        if a is None or b is None:
            return a is not b and not self.both
        if isinstance(a, Count) and isinstance(b, Count):
            return abs(a.runs / a.of - b.runs / b.of) > self.least
        if isinstance(a, float | int) and isinstance(b, float | int):
            return max(a, b) > min(a, b) * (1 + self.least)
        return a != b


def _names(effect: str) -> Callable[[str], bool]:
    reasons = {name for name, its in EFFECTS.items() if its == effect}
    return lambda cell: not reasons.isdisjoint(cell.split("; "))


def _median(name: str, label: str, column: str, unit: str, least: float, **more: Any) -> Condition:
    return Condition(name, label, column, Summary.MEDIAN, unit, least, **more)


def _spoiling(name: str, label: str, column: str, **more: Any) -> Condition:
    return Condition(name, label, column, spoils=True, **more)


_SLOWED = 1 / (1 - SLOWED) - 1  # as a ratio of the higher to the lower

CONDITIONS: tuple[Condition, ...] = (
    Condition("power_limit", "power limit", "power_limit_w", Summary.SET, "W"),
    # cards step their clocks by 15 MHz, 1 % of an SM clock of 1.5 GHz
    _median("sm_clock", "SM clock", "sm_clock_mhz", "MHz", 0.02),
    _median("memory_clock", "memory clock", "memory_clock_mhz", "MHz", 0.02),
    # a card near its limit reaches it in some runs and not in others
    Condition("power_capped", "at the power limit", "throttle_during", least=0.25,
              happened=_names("capped")),
    _spoiling("throttled", "throttled", "throttle_during", happened=_names("slowed")),
    _spoiling("gpu_shared", "shared the GPU", "neighbours_computing", happened=lambda n: n > 0),
    _spoiling("cpu_shared", "shared the CPU", "other_cores", happened=lambda n: n > BUSY_CORES),
    _spoiling("unsteady", "was not steady after warm-up", "warmup_steady", known="warmup_steps",
              happened=lambda steady: not steady),
    _spoiling("trend", "had a trend within the epoch", "trend", known="step_time_first_s"),
    Condition("host_bound", "host-bound", "host_bound", known="busy_step_s", beside=True,
              both=True),
    *(_median(column, f"rate of {what}", column, UNITS[column], _SLOWED, both=True)
      for column, what in RATES.items()),
    _median(CALL, "smallest operation", CALL, "s", _SLOWED, both=True),
)  # fmt: skip
