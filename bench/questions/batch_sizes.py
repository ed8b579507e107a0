"""Cases that differ only in their batch size: from which one on training is no faster, memory as a
straight line, and the largest batch that fits.

Probes of the largest batch do not measure speed, but show memory as well as cases do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.case import SAME_QUESTION, Case
from bench.limits import MIN_REPEATS, NEAR
from bench.record import MEASURED, REFUSED, RELIABLE
from bench.render.section import Column, Section, Sheet, axis_column, quantity_cell
from bench.render.table import Cell, Row
from bench.store.rows import group
from bench.study.axes import Machines, find_varying
from bench.study.quantities import QUANTITIES, is_number
from bench.study.runs import SOURCE, Result, Run, tell_but
from bench.study.sweeps import Sweep
from bench.text import GIB, write_number
from bench.wall import APART, Ending, MemoryLine, Wall, fit_line, read_walls

if TYPE_CHECKING:
    from bench.questions.report_data import ReportData

LEAST_SIZES = 3
"""Fewest batch sizes of a row of the table: any two points lie on a line."""

ROUGH = 0.05  # largest relative deviation from the line at which memory counts as linear

MIB = 2**20

_OTHERS = ("batch_size", *SAME_QUESTION)


class Bounds(NamedTuple):
    """The largest batch size that was trained, and the smallest above it that ran out of memory."""

    fits: int | None
    fails: int | None


def find_bounds(rows: Sequence[Row]) -> Bounds:
    """Return the largest batch that fits and the smallest that does not, by cases and probes."""
    fits = max((int(row.batch_size) for row in rows if row.status in MEASURED), default=None)
    failed = (int(row.batch_size) for row in rows if row.status in REFUSED)
    return Bounds(fits, min((size for size in failed if size > (fits or 0)), default=None))


class Search(NamedTuple):
    """A search for the largest batch: where it ran, for which cases, and what it found."""

    sweep: str
    machine: str
    family: Case
    wall: Wall


def find_searches(runs: Sequence[Run], sweeps: Sequence[Sweep]) -> list[Search]:
    """Return the searches in runs, each with the step and margin of its sweep."""
    if not any(run.probe for run in runs):
        return []
    asked = {sweep.name: sweep for sweep in sweeps}
    found = []
    for part in group(runs, attrgetter(*SOURCE)):
        sweep = asked[part[0].sweep]
        mine = {run.record_id for run in part}
        rows = [row for row in sweep.rows if row.record_id in mine]
        walls = read_walls(rows, sweep.step, sweep.margin)
        found += [Search(*attrgetter(*SOURCE)(part[0]), *wall) for wall in walls]
    return found


def list_keys(
    cases: Sequence[Row], machines: Machines, take: Callable[[Any], Row]
) -> list[Column[Any]]:
    """Return columns for the precision and the other axes in which ``cases`` differ. ``take`` maps
    a row of the table to its case."""
    shown = dict.fromkeys(["precision", *find_varying(cases)])
    return [
        axis_column(axis, machines, take, number=False) for axis in shown if axis not in _OTHERS
    ]


class Family(NamedTuple):
    """Cases of several batch sizes that differ in nothing else."""

    timed: list[Result]
    memory: MemoryLine | None
    bounds: Bounds


def _find_families(found: ReportData) -> Iterator[Family]:
    tell, tell_memory = tell_but(_OTHERS), tell_but((*_OTHERS, *APART))
    probes = {tell_memory(part[0]): part for part in group(found.probes, tell_memory)}
    for part in group([setting.best for setting in found.settings], tell):
        timed = [row for row in part if row.status in RELIABLE and is_number(row.images_per_s)]
        if len({row.batch_size for row in timed}) >= LEAST_SIZES:
            rows = [*part, *probes.get(tell_memory(part[0]), ())]
            yield Family(timed, fit_memory(rows), find_bounds(rows))


def fit_memory(rows: Sequence[Row]) -> MemoryLine | None:
    """Fit memory over the batch size; None for fewer than `LEAST_SIZES`, or if it is no line. Runs
    in which the allocator retried are left out: their memory had reached its limit."""
    points = {
        int(row.batch_size): float(row.memory_bytes)
        for row in rows
        if row.status in RELIABLE and is_number(row.memory_bytes) and not row.alloc_retries > 0
    }
    line = fit_line(list(points.items()))
    if len(points) < LEAST_SIZES or line is None:
        return None
    straight = all(abs(line.predict(size) / of - 1) <= ROUGH for size, of in points.items())
    return line if straight else None


def _tabulate_batches(found: ReportData) -> Iterator[Sheet]:
    rows = [*_find_families(found)]

    def find_enough(row: Family) -> int:
        enough = max(one.images_per_s for one in row.timed) / (1 + NEAR)
        return min(int(one.batch_size) for one in row.timed if one.images_per_s >= enough)

    def write_best(row: Family) -> Cell:
        best = max(row.timed, key=attrgetter("images_per_s"))
        cell = quantity_cell(QUANTITIES["images_per_s"], best)
        return Cell(f"{cell.text} at {best.batch_size}", cell.value)

    def write_bounds(row: Family) -> str:
        fits, fails = row.bounds
        return f"{fits} fits, {fails} does not" if fails else ""

    columns: list[Column[Family]] = [
        *list_keys([row.timed[0] for row in rows], found.machines, lambda row: row.timed[0]),
        Column("enough", "as fast from", f"the smallest batch size within {100 * NEAR:.0f} % of "
               "the most images/s", find_enough),
        Column("best", "most images/s", "and the batch size that has them", write_best,
               better="higher"),
        Column("fixed", "fixed (GiB)", "memory that no batch size changes: weights, context, "
               "libraries", lambda row: row.memory.fixed_bytes / GIB if row.memory else None,
               write="{:.2f}".format, keep=7),
        Column("image", "an item (MiB)", "memory that each item of a batch adds",
               lambda row: row.memory.bytes_per_image / MIB if row.memory else None,
               write=write_number, keep=7),
        Column("wall", "largest", "the largest batch that fits, where it was found", write_bounds,
               number=False),
    ]  # fmt: skip
    note = (
        f"As fast: within {100 * NEAR:.0f} % of the most images/s; with fewer than {MIN_REPEATS} "
        "repeats that may be chance. Memory is shown where it is a line over the batch size."
    )
    yield Sheet("By batch size: speed and memory", columns, rows, [note])


def _tabulate_walls(found: ReportData) -> Iterator[Sheet]:
    rows = [(_describe_search(search), search.wall) for search in found.searches]
    fine = all(wall.ending is Ending.FOUND for _, wall in rows)
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
        Column("ending", "ended", "how the search ended", lambda row: "" if fine else
               row[1].ending.meaning if row[1].ending else "not yet; run the same command again",
               keep=8, wrap=True),
    ]  # fmt: skip
    note = (
        "Recommended: by the line of memory, the margin of the sweep stays free, as the next run, "
        "another driver or a neighbour may take that much."
    )
    yield Sheet("Largest batch that fits, by probes of a few steps", columns, rows, [note])


def _describe_search(search: Search) -> Row:
    spelled = {name: "" if value is None else value for name, value in vars(search.family).items()}
    return SimpleNamespace(sweep=search.sweep, machine=search.machine, **spelled)


WALLS = Section("walls", "How large a batch fits in memory?", _tabulate_walls)
BATCHES = Section(
    "batches", "From which batch size on is training no faster, and what fits?", _tabulate_batches
)
