"""The plan of the sweep in a folder, of which the rows may not all be there yet, and shards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import variance
from typing import Any, NamedTuple

from bench.case import AXES, Case, format_value, list_values
from bench.errors import UsageError
from bench.interval import find_half_width
from bench.record import Status
from bench.store.rows import LatestAttempt, Run, parse_cases

_MOST_RUNS = 10_000_000  # a plan with more was edited

SHARD = "shard"
"""The key of the shard in a folder's configuration."""


class Shard(NamedTuple):
    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def parse_shard(text: str) -> Shard:
    """Read a shard. Raises UsageError: the text is not one.

    >>> parse_shard("2/8")
    Shard(number=2, of=8)
    """
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.of:
        raise UsageError(f"--shard {text!r}: give K/N with K from 1 to N, such as 1/8")
    return shard


def plan_runs(cases: Sequence[Case], repeats: int) -> list[Run]:
    """Return every case ``repeats`` times, interleaved, so that drift of the machine affects all
    alike. With several repeats, the first case runs once more at the end as the sentinel: its
    difference from its first runs is the drift."""
    runs = [(case, repeat, False) for repeat in range(1, repeats + 1) for case in cases]
    return [*runs, (cases[0], 1, True)] if repeats > 1 and cases else runs


def find_width(times: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of a case's epoch time, as a share:
    Student's interval of the mean logarithm of ``times``, infinite for fewer than two."""
    if len(times) < 2:
        return math.inf
    logs = [math.log(time) for time in times]
    return math.expm1(find_half_width([(variance(logs), len(logs))]))


def is_known(case: Case, times: Sequence[float]) -> bool:
    """Return whether repeats with these times are as precise as the case's ``--until`` asks."""
    return case.until is not None and find_width(times) <= case.until


def collect_times(history: Mapping[Run, LatestAttempt]) -> dict[Case, list[float]]:
    """Return the epoch times, in s, of the successful runs of each case."""
    times: dict[Case, list[float]] = {}
    for (case, _, _), past in history.items():
        if past.status is Status.OK and past.time_s:
            times.setdefault(case, []).append(past.time_s)
    return times


def leave_out_known(runs: Iterable[Run], history: Mapping[Run, LatestAttempt]) -> list[Run]:
    """Leave out repeats of cases that are known without them; sentinels and past runs stay."""
    times = collect_times(history)
    return [
        run
        for run in runs
        if run[1] == 1 or run in history or not is_known(run[0], times.get(run[0], ()))
    ]


@dataclass(frozen=True)
class Plan:
    """The plan of a folder's sweep: its ``shard``, if it is one, and its ``runs``."""

    shard: Shard | None = None
    runs: Sequence[Run] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Plan:
        """Read the plan in a folder's configuration. If somebody edited it, nothing is known."""
        cases, shared = config.get("cases"), config.get("settings", {})
        try:
            shard = parse_shard(str(config[SHARD])) if SHARD in config else None
            cells = {
                name: [case.get(name, shared.get(name, default)) for case in cases or ()]
                for name, default in zip(AXES, map(format_value, list_values(Case())), strict=True)
            }
            repeats = config.get("repeats", 1)
            if not 1 <= repeats <= _MOST_RUNS / max(1, len(cases or ())):
                raise ValueError(f"{repeats} repeats")
            return cls(shard, plan_runs(parse_cases(cells), repeats))
        except (AttributeError, TypeError, ValueError, UsageError):
            return cls()
