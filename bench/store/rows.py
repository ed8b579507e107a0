"""The rows of a records table, and which of them count: the last attempt at each run under each
environment.

Defined once for all code that reads records: resume, report and compare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bench.axis import Value
from bench.case import AXES, Case, make_case, parse_value
from bench.record import COMPARABLE, Status

T = TypeVar("T")
R = TypeVar("R", bound="Row")

_tell_axes = attrgetter(*AXES)


def group(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Group items by their key, in the order in which the keys first appear."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [*groups.values()]


class Row:
    """A row of a records table: its cells as attributes, see `bench.store.table.read_columns`."""

    status: Status
    sweep = ""  # where rows of several are read, the name of theirs

    def __init__(self, cells: Mapping[str, Any], **beside: Any) -> None:
        vars(self).update(cells, **beside)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @cached_property
    def axes(self) -> tuple[Any, ...]:
        """The cells of its axes."""
        told: tuple[Any, ...] = _tell_axes(self)
        return told

    @cached_property
    def case(self) -> Case:
        return make_case(*map(parse_axis, AXES, self.axes))

    @property
    def is_repeat(self) -> bool:
        """Whether it is a repeat of its case: no sentinel or probe. A probe trains a few steps to
        see whether a batch fits; its time says nothing."""
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


def keep_cases(rows: Iterable[R]) -> list[R]:
    """Return the rows that measure a whole case: no sentinels, probes or truncated trials."""
    return [row for row in rows if row.is_repeat and not row.truncated]


def keep_latest(rows: Iterable[R]) -> list[R]:
    """Return the rows that count, in their order: each run's last attempt under each environment.

    A run is a case of a sweep, a repeat and whether it is the sentinel or a probe. Two environments
    are the same if they agree on `COMPARABLE`, as far as both are known. Rows of another GPU or
    another torch (``--mix``) are not attempts at the same run.
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


def latest(rows: Iterable[R]) -> list[R]:
    """Return the last attempt at each run of a whole case."""
    return keep_latest(keep_cases(rows))


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


Run = tuple[Case, int, bool]
"""A case, its repeat, and whether it is the sentinel."""


def read_history(rows: Iterable[Row]) -> dict[Run, LatestAttempt]:
    """Return each run's latest attempt in a records table: no probe or truncated trial.

    A profiled run also stands for the runs of `list_served` that have no attempt of their own.
    """
    history: dict[Run, LatestAttempt] = {}
    for row in keep_latest(row for row in rows if not (row.probe or row.truncated)):
        run = (row.case, row.repeat, row.sentinel)
        # rows of several environments are separate attempts; numbering goes on from the last
        if run not in history or history[run].attempt <= row.attempt:
            told = (row.status, row.attempt, row.inferred, row.lane)
            history[run] = LatestAttempt(*told, row.number("epoch_time_s"))
    for run, past in [*history.items()]:
        for served in list_served(run):
            history.setdefault(served, past)
    return history


def list_served(run: Run) -> Iterator[Run]:
    """Yield the runs that ``run`` measures: itself, and if it was profiled, itself without that.

    The profiler starts after everything else is measured.
    """
    yield run
    case, repeat, sentinel = run
    if case.profile:
        yield replace(case, profile=False), repeat, sentinel


def parse_cases(cells: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Parse cases from the cells of each axis, as in configurations. Raises UsageError: a cell is
    not a value of its axis."""
    values = (map(parse_axis, [name] * len(cells[name]), cells[name]) for name in AXES)
    return [make_case(*axes) for axes in zip(*values, strict=True)]


@cache
def parse_axis(name: str, cell: Any) -> Value:
    """Return the value of an axis from a cell of records and configurations: empty is None. Raises
    UsageError: it is not a value of the axis."""
    return None if cell == "" else parse_value(name, cell, name)
