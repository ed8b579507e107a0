"""Cases that differ only in their batch size, and the largest batch of each that fits.

Probes of the largest batch do not measure speed, but show memory as well as cases do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.case import SAME_QUESTION, Case, free_axes
from bench.record import REFUSED, RELIABLE, Status
from bench.render.cells import TIMED, Row, whole_cell
from bench.render.section import Column, Section, Sheet, axis_column
from bench.study.axes import Machines, find_varying, list_main
from bench.study.results import Result
from bench.study.runs import Run, group
from bench.study.summaries import SOURCE, list_equal
from bench.wall.answer import Wall
from bench.wall.records import APART, name_family, read_walls
from bench.wall.search import Ending

if TYPE_CHECKING:
    import pandas as pd

    from bench.questions.report_data import ReportData
    from bench.study.sweeps import Sweep

MOST_FAMILIES = 60  # families that a report looks at; more would not be read
CLOSE = 0.9  # a batch of at least this share of the largest that trained represents it

EQUAL = list_equal(("batch_size", *SAME_QUESTION))


class Bounds(NamedTuple):
    """The largest batch size that was trained, and the smallest above it that ran out of memory."""

    fits: int | None
    fails: int | None


def find_bounds(rows: Sequence[Row]) -> Bounds:
    """Return the largest batch that fits and the smallest that does not, by cases and probes."""
    fits = max((int(row.batch_size) for row in rows if row.status in TIMED), default=None)
    failed = (int(row.batch_size) for row in rows if row.status in REFUSED)
    return Bounds(fits, min((size for size in failed if size > (fits or 0)), default=None))


@dataclass(frozen=True)
class Family:
    """Cases of one precision that differ in nothing but their batch size."""

    cases: tuple[Result, ...]  # one a batch size, ascending; at least one
    probes: tuple[Run, ...]  # that take as much memory, in the order in which they ran
    group: int  # the same number for all families that differ in precision only
    wall: Wall | None = None  # what a search for its largest batch found, if there was one

    @property
    def first(self) -> Result:
        """Any of its cases, for the settings that all of them share."""
        return self.cases[0]

    @cached_property
    def ended(self) -> list[Result]:
        """The cases with a comparable time, by batch size."""
        return [row for row in self.cases if row.status in RELIABLE]

    @property
    def rows(self) -> Sequence[Row]:
        """Its probes and its cases."""
        return (*self.probes, *self.cases)

    @cached_property
    def bounds(self) -> Bounds:
        """The limits of its memory, by cases and probes alike."""
        return find_bounds(self.rows)

    @property
    def largest(self) -> Result | None:
        """The case at the largest batch size that was measured and ended well."""
        return next((row for row in self.ended[::-1] if row.status == Status.OK.value), None)

    @property
    def end(self) -> Result | None:
        """`largest`, if that is about the largest batch that fits: memory is known to end there, by
        a confirmed search or by a batch of at most twice its size that ran out of memory. And no
        much larger batch trained: it has at least `CLOSE` of the largest that did, or is what the
        search recommends."""
        row, (fits, fails) = self.largest, self.bounds
        if row is None or fits is None:
            return None
        searched = self.wall if self.wall is not None and self.wall.confirmed else None
        ends = searched or (fails is not None and fails <= 2 * row.batch_size)
        recommended = searched.recommended if searched else None
        least = CLOSE * fits if recommended is None else min(CLOSE * fits, recommended)
        return row if ends and row.batch_size >= least else None


class Search(NamedTuple):
    """A search for the largest batch: where it ran, for which cases, and what it found."""

    sweep: str
    machine: str
    family: Case
    wall: Wall


def find_searches(records: pd.DataFrame, sweeps: Sequence[Sweep]) -> list[Search]:
    """Return the searches in records of `summaries.read`, by probes and by cases that may have
    retried, each with the step and margin of its sweep."""
    if not records["probe"].any():
        return []
    asked = {sweep.name: sweep for sweep in sweeps}
    return [
        Search(str(sweep), str(machine), *found)
        for (sweep, machine), part in records.groupby(list(SOURCE), sort=False)
        for found in read_walls(part, asked[str(sweep)].step, asked[str(sweep)].margin)
    ]


def find_families(
    results: Sequence[Result], probes: Iterable[Run], searches: Sequence[Search] = ()
) -> list[Family]:
    """Return families of results, in the order of the overview, and of probes, each precision at
    its main loss scale. Left out are groups with only one batch size and all families after the
    first `MOST_FAMILIES`."""
    tell, tell_alike, tell_memory = (
        attrgetter(*(name for name in EQUAL if name not in free))
        for free in ((), free_axes("precision"), APART)
    )
    results = [results[at] for at in list_main(results, [*map(tell_alike, results)])]
    rivals = [part for part in group(results, tell_alike) if len({r.batch_size for r in part}) > 1]
    number = {tell_alike(part[0]): place for place, part in enumerate(rivals)}
    probed = {tell_memory(part[0]): part for part in group(probes, tell_memory)}
    families = group((r for r in results if tell_alike(r) in number), tell)[:MOST_FAMILIES]
    return [
        Family(
            tuple(keep_one(family, "batch_size")),
            tuple(probed.get(tell_memory(family[0]), ())),
            number[tell_alike(family[0])],
            _find_wall(family[0], searches) if searches else None,
        )
        for family in families
    ]


def _find_wall(result: Result, searches: Sequence[Search]) -> Wall | None:
    here = [s for s in searches if (s.sweep, s.machine) == (result.sweep, result.machine)]
    family = name_family(result.case) if here else None
    return next((search.wall for search in here if search.family == family), None)


def keep_one(results: Sequence[Result], axis: str) -> list[Result]:
    """Of cases that differ only in ``axis`` and in how they were measured, keep for each value, in
    order, the one that measured most."""
    tell = attrgetter(axis)
    return [
        min(alike, key=lambda one: (one.status not in TIMED, one.steps != "", -one.part))
        for alike in group(sorted(results, key=tell), tell)
    ]


def list_keys(
    cases: Sequence[Row],
    machines: Machines,
    take: Callable[[Any], Row],
    but: Collection[str] = ("batch_size",),
) -> list[Column[Any]]:
    """Return columns for the precision and the axes in which cases differ, except those in ``but``,
    which have columns of their own. ``take`` maps a row of the table to its case."""
    varying = find_varying(cases)
    shown = [axis for axis in varying if axis not in (*but, *SAME_QUESTION)]
    shown = shown if "precision" in varying else ["precision", *shown]
    return [axis_column(axis, machines, take, number=False) for axis in shown]


def note_first(families: Sequence[Family]) -> Iterator[str]:
    """Yield a note if there are more settings than are looked at."""
    if len(families) == MOST_FAMILIES:
        yield f"Only the first {MOST_FAMILIES} settings are looked at; --where chooses others."


def _tabulate_walls(found: ReportData) -> Iterator[Sheet]:
    rows = [(_describe_search(search), search.wall) for search in found.searches]
    fine = all(wall.ending is Ending.FOUND for _, wall in rows)
    margins = " or ".join(sorted({f"{100 * wall.margin:g} %" for _, wall in rows}))
    columns: list[Column[tuple[Row, Wall]]] = [
        *list_keys([row for row, _ in rows], found.machines, lambda row: row[0]),
        Column("largest", "largest batch", "that was trained", lambda row: row[1].largest,
               better="higher"),
        Column("refused", "does not fit", "the smallest batch above it that ran out of memory",
               lambda row: row[1].smallest_failing),
        Column("thrashes", "retries from", "the allocator frees its cache and tries again",
               lambda row: row[1].thrashes_from, keep=8),
        Column("recommended", "recommended", "its memory leaves a margin free",
               lambda row: row[1].recommended),
        Column("probes", "probes", "short runs that the search took", lambda row: row[1].probes,
               better="lower", keep=6),
        Column("predicted", "first prediction", "of the largest, from two small batches",
               lambda row: row[1].predicted, keep=7),
        Column("off", "off by", "items that the prediction was too high",
               lambda row: whole_cell(row[1].off, sign=True), keep=7),
        Column("ending", "ended", "how the search ended", lambda row: "" if fine else
               row[1].ending.meaning if row[1].ending else "not yet; run the same command again",
               keep=8, wrap=True),
    ]  # fmt: skip
    note = (
        f"Recommended: by the line of memory, {margins} of it stays free. The next run, another "
        "driver or a neighbour may take that much."
    )
    yield Sheet("Largest batch that fits, by probes of a few steps", columns, rows, [note])


def _describe_search(search: Search) -> Row:
    spelled = {name: "" if value is None else value for name, value in vars(search.family).items()}
    return SimpleNamespace(sweep=search.sweep, machine=search.machine, **spelled)


WALLS = Section("walls", "How large a batch fits in memory?", _tabulate_walls)
