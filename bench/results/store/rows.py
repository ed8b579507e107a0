"""The rows of a records table, and which of them count: the last attempt at each run under each
environment; the plan of a sweep, of which the rows may not all be there yet, and shards.

Defined once for all code that reads records: resume, report and compare.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from statistics import variance
from typing import Any, NamedTuple, TypeVar

from bench.base.errors import UsageError
from bench.base.limits import find_half_width
from bench.schema.axis import Value, is_own
from bench.schema.case import AXES, Case, format_value, list_values, make_case, parse_value
from bench.schema.command import read_vary
from bench.schema.record import COMPARABLE, Status

_T = TypeVar("_T")
_R = TypeVar("_R", bound="Row")

_tell_axes = attrgetter(*AXES)


def group(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Group items by their key, in the order in which the keys first appear."""
    groups: dict[Hashable, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [*groups.values()]


class Row:
    """A row of a records table: its cells as attributes, see
    `bench.results.store.table.read_columns`."""

    status: Status
    sweep = ""  # where rows of several are read, the name of theirs

    def __init__(self, cells: dict[str, Any]) -> None:
        self.__dict__ = cells  # not a copy: there are 190 a row

    def __getattr__(self, name: str) -> Any:
        """Return its value of a user's own axis."""
        if not is_own(name):
            raise AttributeError(name)
        return read_vary(self.vary).get(name)

    @cached_property
    def axes(self) -> tuple[Any, ...]:
        """The values of its axes."""
        values: tuple[Any, ...] = _tell_axes(self)
        return values

    @cached_property
    def case(self) -> Case:
        return make_case(*self.axes)

    @property
    def is_repeat(self) -> bool:
        """Whether it is a repeat of its case: no drift check or probe. A probe trains a few steps
        to see whether a batch fits; its time says nothing."""
        return not (self.sentinel or self.probe)

    @property
    def truncated(self) -> bool:
        """Whether it is a trial that a search ended before the last epoch of its case: its loss is
        not that of the case."""
        return self.number("truncated_after") is not None

    def number(self, name: str) -> float | None:
        """Return a number, None if it is not known."""
        value = getattr(self, name)
        return None if value in ("", None) or value != value else float(value)


def keep_latest(rows: Iterable[_R]) -> list[_R]:
    """Return the rows that count, in their order: each run's last attempt under each environment.

    A run is a case of a sweep, a repeat and whether it is the drift check or a probe. Two
    environments are the same if they agree on `COMPARABLE`, as far as both are known. Rows of
    another GPU or another torch (``--mix``) are not attempts at the same run.
    """
    rows = [*rows]
    counting: set[int] = set()
    for tries in group(rows, attrgetter("sweep", "axes", "repeat", "sentinel", "probe")):
        if len(tries) > 1:
            tries.sort(key=lambda row: float(row.attempt))
            last = dict(zip(fill_unknown(tries), tries, strict=True))
            tries = [*last.values()]
        counting.update(map(id, tries))
    return [row for row in rows if id(row) in counting]


def latest(rows: Iterable[_R]) -> list[_R]:
    """Return the last attempt at each run of a whole case: no drift checks, probes or truncated
    trials."""
    return keep_latest(row for row in rows if row.is_repeat and not row.truncated)


def fill_unknown(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of `COMPARABLE` of some rows, with unknown ones filled in.

    A run that fails early may not know its torch, card or network, which does not make it an
    environment of its own. Such a cell takes the value of the next row that has one, else of the
    last row before. Empty ``variables`` are known in rows that know their torch: none was set.
    """
    columns = []
    for name in COMPARABLE:
        known: list[str | None] = [
            None if (cell := getattr(row, name)) == "" and (name != "variables" or row.torch == "")
            else cell
            for row in rows
        ]  # fmt: skip
        for order, step in ((range(len(rows) - 2, -1, -1), 1), (range(1, len(rows)), -1)):
            for at in order:
                known[at] = known[at + step] if known[at] is None else known[at]
        columns.append([cell or "" for cell in known])
    return [*zip(*columns, strict=True)]


class LatestAttempt(NamedTuple):
    """The latest stored attempt at one run of a case."""

    status: Status
    attempt: int
    inferred: bool = False
    lane: str = ""
    time_s: float | None = None  # of the epoch


PlannedRun = tuple[Case, int, bool]
"""A case, its repeat, and whether it is the drift check."""


def read_history(rows: Iterable[Row]) -> dict[PlannedRun, LatestAttempt]:
    """Return each run's latest attempt in a records table: no probe or truncated trial.

    A profiled run also stands for the same run without that, if it has no attempt of its own: the
    profiler starts after everything else is measured.
    """
    history: dict[PlannedRun, LatestAttempt] = {}
    for row in keep_latest(row for row in rows if not (row.probe or row.truncated)):
        run = (row.case, row.repeat, row.sentinel)
        # rows of several environments are separate attempts; numbering goes on from the last
        if run not in history or history[run].attempt <= row.attempt:
            ending = (row.status, row.attempt, row.inferred, row.lane)
            history[run] = LatestAttempt(*ending, row.number("epoch_time_s"))
    for (case, repeat, sentinel), past in [*history.items()]:
        if case.profile:
            history.setdefault((replace(case, profile=False), repeat, sentinel), past)
    return history


# -------------------------------------------------------------------------------- plans, and shards


_MOST_RUNS = 10_000_000  # a plan with more was edited

SHARD = "shard"
"""The key of the shard in a folder's configuration."""

SOURCES = "sources"
"""The key of what was trained: by script or network, the files of each version, see
`bench.sweep.versions`."""


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


def plan_runs(cases: Sequence[Case], repeats: int) -> list[PlannedRun]:
    """Return every case ``repeats`` times, interleaved, so that drift of the machine affects all
    alike. With several repeats, the first case runs once more at the end as the drift check: its
    difference from its first runs is the drift."""
    runs = [(case, repeat, False) for repeat in range(1, repeats + 1) for case in cases]
    return [*runs, (cases[0], 1, True)] if repeats > 1 and cases else runs


def count_checks(runs: Iterable[PlannedRun]) -> str:
    """Return what a sentence about a number of runs adds of drift checks; empty without one."""
    checks = sum(run[2] for run in runs)
    return f", {checks} of them a drift check" if checks else ""


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


def collect_times(history: Mapping[PlannedRun, LatestAttempt]) -> dict[Case, list[float]]:
    """Return the epoch times, in s, of the successful runs of each case."""
    times: dict[Case, list[float]] = {}
    for (case, _, _), past in history.items():
        if past.status is Status.OK and past.time_s:
            times.setdefault(case, []).append(past.time_s)
    return times


def leave_out_known(
    runs: Iterable[PlannedRun], history: Mapping[PlannedRun, LatestAttempt]
) -> list[PlannedRun]:
    """Leave out repeats of cases that are known without them; drift checks and past runs stay."""
    times = collect_times(history)
    return [
        run
        for run in runs
        if run[1] == 1 or run in history or not is_known(run[0], times.get(run[0], ()))
    ]


@cache
def parse_axis(name: str, cell: Any) -> Value:
    """Return the value of an axis from a cell of a configuration: empty is None. Raises UsageError:
    it is not a value of the axis."""
    return None if cell == "" else parse_value(name, cell, name)


@dataclass(frozen=True)
class PlannedRuns:
    """The plan of a folder's sweep: its ``shard``, if it is one, and its ``runs``."""

    shard: Shard | None = None
    runs: Sequence[PlannedRun] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> PlannedRuns:
        """Read the plan in a folder's configuration. If somebody edited it, nothing is known."""
        planned, shared = config.get("cases") or (), config.get("settings", {})
        defaults = dict(zip(AXES, map(format_value, list_values(Case())), strict=True))
        try:
            shard = parse_shard(str(config[SHARD])) if SHARD in config else None
            repeats = config.get("repeats", 1)
            if not 1 <= repeats <= _MOST_RUNS / max(1, len(planned)):
                raise ValueError(f"{repeats} repeats")
            alike = {name: parse_axis(name, shared.get(name, defaults[name])) for name in AXES}
            cells = [
                {name: parse_axis(name, own[name]) for name in own if name in AXES}
                for own in planned
            ]
            cases = [make_case(*(alike | own).values()) for own in cells]
            return cls(shard, plan_runs(cases, repeats))
        except (AttributeError, TypeError, ValueError, UsageError):
            return cls()
