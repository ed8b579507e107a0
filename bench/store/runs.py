"""The cases in a table of records, and the outcome of each of their runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.axis import Value
from bench.case import AXES, Case, make_case, parse_value
from bench.record import Status
from bench.store.attempts import find_truncated, keep_latest, number_groups

if TYPE_CHECKING:
    import pandas as pd


class LatestAttempt(NamedTuple):
    """The latest stored attempt at one run of a case."""

    status: Status
    attempt: int
    inferred: bool = False
    seed: int = 0
    lane: str = ""
    time_s: float | None = None  # of the epoch


Run = tuple[Case, int, bool]
"""A case, its repeat, and whether it is the sentinel."""


def read_cases(frame: pd.DataFrame) -> list[Case]:
    """Return the case of each row of a records table."""
    number = number_groups(frame, AXES)
    first = frame[~number.duplicated()]
    cases = parse_cases({name: first[name].tolist() for name in AXES})
    return [cases[at] for at in number.tolist()]


def parse_cases(cells: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Parse cases from the cells of each axis, as in records and configurations. Raises UsageError:
    a cell is not a value of its axis."""
    values = []
    for name in AXES:
        parsed = {cell: parse_axis(name, cell) for cell in dict.fromkeys(cells[name])}
        values.append(map(parsed.__getitem__, cells[name]))
    return [make_case(*axes) for axes in zip(*values, strict=True)]


def read_history(frame: pd.DataFrame) -> dict[Run, LatestAttempt]:
    """Return each run's latest attempt in a records table: no probe or truncated trial.

    A profiled run also stands for the runs of `list_served` that have no attempt of their own.
    """
    of_run, of_past = ("repeat", "sentinel"), ("attempt", "inferred", "run_seed", "lane")
    history: dict[Run, LatestAttempt] = {}
    aside = frame["probe"] | find_truncated(frame)
    rows = keep_latest(frame[~aside])
    cells = (rows[name].tolist() for name in (*of_run, "status", *of_past, "epoch_time_s"))
    for case, repeat, sentinel, status, *past, time in zip(read_cases(rows), *cells, strict=True):
        run = (case, repeat, sentinel)
        # rows of several environments are separate attempts; numbering goes on from the last
        if run not in history or history[run].attempt <= past[0]:
            time_s = None if math.isnan(time) else time
            history[run] = LatestAttempt._make([Status(status), *past, time_s])
    for run, latest in [*history.items()]:
        for served in list_served(run):
            history.setdefault(served, latest)
    return history


def list_served(run: Run) -> Iterator[Run]:
    """Yield the runs that ``run`` measures: itself, and if it was profiled, itself without that.

    The profiler starts after everything else is measured.
    """
    yield run
    case, repeat, sentinel = run
    if case.profile:
        yield replace(case, profile=False), repeat, sentinel


@cache
def parse_axis(name: str, cell: Any) -> Value:
    """Return the value of an axis from a cell of records and configurations: empty is None. Raises
    UsageError: it is not a value of the axis."""
    return None if cell == "" else parse_value(name, cell, name)
