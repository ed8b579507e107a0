"""The tables of batch sizes: speed, memory, precisions at equal and at largest batch, accumulation.

None appears unless what it is about varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING

from bench.case import AXES, SAME_QUESTION, micro_batch
from bench.limits import MIN_REPEATS
from bench.questions.batch_sizes import (
    DROP,
    FARTHEST,
    MOST_FAMILIES,
    NEAR,
    ROUGH,
    Bounds,
    Cliff,
    Contest,
    Family,
    Growth,
    Knee,
    Match,
    Search,
    Shape,
    divide,
    find_bounds,
    find_cliffs,
    find_knee,
    find_largest,
    fit_growth,
    list_accumulated,
    list_contests,
    list_rivals,
    list_speeds,
    match_sizes,
    write_drop,
)
from bench.record import RELIABLE
from bench.render.cells import (
    ESTIMATE,
    Row,
    name_case,
    quantity_cell,
    time_cell,
    whole_cell,
    write_ratio,
)
from bench.render.model import NOTHING, Cell, Head, Table
from bench.study.axes import MACHINE, Machines, find_varying, name_axis, name_value
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.text import GIB, say_left_out, write_number
from bench.wall.answer import Wall
from bench.wall.search import STEP, Ending
from bench.workloads import IMAGES

if TYPE_CHECKING:
    import pandas as pd

MIB = 2**20

MOST_ROWS = 40
"""Rows of one of these tables; more would not be read."""


def tabulate_batches(
    families: Sequence[Family],
    cases: pd.DataFrame,
    searches: Sequence[Search],
    machines: Machines,
    below: Collection[str],
) -> Iterator[Table]:
    """Every table of batch sizes that there is something to say in.

    Args:
        families: of `find_families`.
        searches: of `find_searches`.
        below: doubts that are said elsewhere.
    """
    contests = list(list_contests(families))
    matched = _tabulate_matches(families, machines)
    largest = _tabulate_largest([contest for contest in contests if contest.ends], machines)
    unended = _note_unended(families, contests)
    if largest.rows:
        largest = replace(largest, notes=(*largest.notes, *unended))
    else:
        matched = replace(matched, notes=(*matched.notes, *unended))
    tables = (
        _tabulate_walls(searches, machines),
        _tabulate_speeds(families, machines, below),
        _tabulate_growth(families, machines),
        matched,
        largest,
        _tabulate_accumulated(cases, machines),
    )
    for table in tables:
        if table.rows:
            cut = _cut(table)
            left = _note_left(table, len(table.rows) - len(cut.rows), len(families))
            yield replace(cut, notes=(*table.notes, *left))


def _cut(table: Table) -> Table:
    """The first rows of a table, up to where one of its groups ends."""
    if len(table.rows) <= MOST_ROWS:
        return table
    end = max((start for start in table.groups if start <= MOST_ROWS), default=0) or MOST_ROWS
    groups = {start: text for start, text in table.groups.items() if start < end}
    return replace(table, rows=table.rows[:end], groups=groups)


def _note_left(table: Table, left: int, families: int) -> Iterator[str]:
    """What a table does not show, of which ``left`` are rows."""
    if left > 0:
        yield f"{say_left_out(left, 'row')}; --where chooses."
    if families == MOST_FAMILIES and table.name not in ("walls", "accumulation"):
        yield f"Only the first {MOST_FAMILIES} settings are looked at; --where chooses others."


# ------------------------------------------------------------------------------------------- axes

Key = tuple[Head, Callable[[Row], Cell]]
"""A column that tells rows apart, and how one fills it."""


def _list_keys(
    rows: Sequence[Row], machines: Machines, but: Collection[str] = (), always: str = ""
) -> list[Key]:
    """The axes in which rows differ, as columns.

    Args:
        but: axes that have columns of their own.
        always: an axis that has a column even where it does not vary.
    """
    import pandas as pd

    names = ["sweep", "machine", *AXES]
    frame = pd.DataFrame({name: [getattr(row, name) for row in rows] for name in names})
    varying = find_varying(frame)
    shown = [always] if always and always not in varying else []
    shown += [axis for axis in varying if axis not in (*but, *SAME_QUESTION)]
    return [_make_key(axis, machines) for axis in shown]


def _make_key(axis: str, machines: Machines) -> Key:
    help = "where it ran" if axis == MACHINE else AXES[axis].metadata["help"]

    def fill(row: Row) -> Cell:
        value = (row.sweep, row.machine) if axis == MACHINE else getattr(row, axis)
        return Cell(name_value(axis, value, machines))

    return Head(axis, name_axis(axis), help, False, wrap=axis in (MACHINE, "model")), fill


def _lay_out(
    name: str,
    title: str,
    keys: Sequence[Key],
    heads: Sequence[Head],
    lines: Iterable[tuple[Row, Sequence[Cell]]],
    notes: Sequence[str] = (),
    keep: Collection[str] = (),
) -> Table:
    """Put each line behind the cells that tell it apart; columns that say nothing are left out."""
    rows = tuple((*(fill(row) for _, fill in keys), *cells) for row, cells in lines)
    table = Table(name, title, (*(head for head, _ in keys), *heads), rows, tuple(notes))
    return table.drop_empty(but=(*(head.name for head, _ in keys), *keep))


def _write_sizes(sizes: Sequence[int]) -> str:
    """Batch sizes as their range: ``32 to 512 (5)``."""
    return f"{sizes[0]} to {sizes[-1]} ({len(sizes)})"


def _write_signed(value: float, unit: str = " %", decimals: int = 1) -> Cell:
    """A difference with its sign; of shares in percent."""
    if not is_number(value):
        return Cell(NOTHING)
    text = f"{100 * value if unit else value:+.{decimals}f}"
    return Cell((text if float(text) else text[1:]) + unit, value)


# ------------------------------------------------------------------------------------------- wall


def _tabulate_walls(searches: Sequence[Search], machines: Machines) -> Table:
    """One row a search for the largest batch."""
    found = [(_describe_search(search), search.wall) for search in searches]
    heads = (
        Head("largest", "largest batch", "that was trained", better="higher"),
        Head("refused", "does not fit", "the smallest batch above it that ran out of memory"),
        Head("thrashes", "retries from", "the allocator frees its cache and tries again", keep=8),
        Head("recommended", "recommended", "its memory leaves a margin free"),
        Head("probes", "probes", "short runs that the search took", better="lower", keep=6),
        Head("predicted", "first prediction", "of the largest, from two small batches", keep=7),
        Head("off", "off by", "items that the prediction was too high", keep=7),
        Head("ending", "ended", "how the search ended", False, keep=8, wrap=True),
    )
    fine = all(wall.ending is Ending.FOUND for _, wall in found)
    margins = " or ".join(sorted({f"{100 * wall.margin:g} %" for _, wall in found}))
    return _lay_out(
        "walls",
        "Largest batch that fits, by probes of a few steps",
        _list_keys([row for row, _ in found], machines, ("batch_size",), "precision"),
        heads,
        ((row, tuple(_write_wall(wall, fine))) for row, wall in found),
        (
            f"Recommended: by the line of memory, {margins} of it stays free. The next "
            "run, another driver or a neighbour may take that much.",
        ),
    )


def _describe_search(search: Search) -> Row:
    """The settings of a search as a row of the frame of cases has them."""
    axes = {name: getattr(search.family, name) for name in AXES}
    spelled = {name: "" if value is None else value for name, value in axes.items()}
    return SimpleNamespace(sweep=search.sweep, machine=search.machine, **spelled)


def _write_wall(wall: Wall, fine: bool) -> Iterator[Cell]:
    sizes = (wall.largest, wall.smallest_failing, wall.thrashes_from, wall.recommended)
    yield from map(whole_cell, (*sizes, wall.probes, wall.predicted))
    yield whole_cell(wall.off, sign=True)
    ending = wall.ending.meaning if wall.ending else "not yet; run the same command again"
    yield Cell("" if fine else ending)


# ------------------------------------------------------------------------------------------ speed


def _tabulate_speeds(
    families: Sequence[Family], machines: Machines, below: Collection[str]
) -> Table:
    """One row a family: where images/s stop rising, and where they fall."""
    told = []
    for family in families:
        speeds = list_speeds(family.ended)
        knee = find_knee(speeds)
        if knee:
            told.append((family, knee, find_cliffs(speeds), [s.batch_size for s in speeds]))
    near = f"{100 * NEAR:.0f} %"
    heads = (
        Head("knee", "knee", f"the smallest batch size that ran within {near} of the best", False,
             wrap=True),
        Head("knee_speed", "images/s there", "at the knee", better="higher", keep=7),
        Head("best", "most images/s", "and the batch size that has them", better="higher"),
        Head("cliffs", "cliffs", f"where images/s drop by more than {100 * DROP:.0f} %", False,
             wrap=True),
        Head("sizes", "batch sizes", "that were timed, and how many they are", False, keep=5),
        Head("remarks", "remarks", "on the rows that these rest on", False, keep=8, wrap=True),
    )  # fmt: skip
    notes = [
        f"Knee: the smallest batch size that ran within {near} of the most images/s; two batch "
        "sizes where the spread of the runs leaves it between them. Still rising: the largest is "
        f"the best, by more than {near} over half of it. Cliff: more than {100 * DROP:.0f} % fewer "
        "images/s than at the batch size before, and more than the spread of the runs explains."
    ]
    if any(row.repeats < MIN_REPEATS for family, *_ in told for row in family.ended):
        notes.append(
            f"With fewer than {MIN_REPEATS} repeats, knees and cliffs are as uncertain as the "
            f"runs, and may be chance; use --repeats {MIN_REPEATS}."
        )
    return _lay_out(
        "batch-speed",
        "Speed by batch size: knees and cliffs",
        _list_keys([family.first for family in families], machines, ("batch_size",), "precision"),
        heads,
        (
            (family.first, tuple(_write_speed(family, knee, cliffs, sizes, below)))
            for family, knee, cliffs, sizes in told
        ),
        notes,
        keep=("cliffs",),
    )


def _write_speed(
    family: Family,
    knee: Knee,
    cliffs: Sequence[Cliff],
    sizes: Sequence[int],
    below: Collection[str],
) -> Iterator[Cell]:
    rows = {int(row.batch_size): row for row in family.ended}
    quantity = QUANTITIES["images_per_s"]
    best = quantity_cell(quantity, rows[knee.best])
    certain = knee.shape is Shape.KNEE and knee.ends is None
    told = write_knee(knee, find_bounds(family).fails)
    yield Cell(told, knee.batch_size if certain else None)
    yield quantity_cell(quantity, rows[knee.batch_size]) if certain else Cell(NOTHING)
    yield Cell(f"{best.text} at {knee.best}", best.value)
    yield Cell("; ".join(map(write_cliff, cliffs)) or "none")
    yield Cell(_write_sizes(sizes))
    rested = {knee.best, knee.batch_size, *(size for c in cliffs for size in _sizes_of(c))}
    yield Cell(_write_doubts([rows[size] for size in sorted(rested)], below))


def write_knee(knee: Knee, fails: int | None) -> str:
    """``128``, ``64 to 256``, ``64 or below``, ``still rising at 512 (640 does not fit)``.

    Args:
        fails: the smallest batch size that does not fit, where one is known.
    """
    first, last = knee.ends or (knee.batch_size, knee.batch_size)
    if knee.shape is Shape.RISING:
        beyond = f" ({fails} does not fit)" if fails else ""
        perhaps = f"{first} or later, or " if first < last else ""
        return f"{perhaps}still rising at {last}{beyond}"
    if knee.shape is Shape.BELOW:
        return f"{last} or below"
    return f"{first} to {last}" if knee.ends else str(first)


def write_cliff(cliff: Cliff) -> str:
    """``256 → 257: 23 % slower, 257 is no multiple of 8``."""
    before, after = _sizes_of(cliff)
    said = f"{before} → {after}: {write_drop(cliff)}"
    return ", ".join(filter(None, (said, cliff.misalignment)))


def _sizes_of(cliff: Cliff) -> tuple[int, int]:
    return cliff.before.batch_size, cliff.after.batch_size


def _write_doubts(rows: Sequence[Row], below: Collection[str]) -> str:
    """What speaks against any of the rows."""
    told = [doubt for doubt in DOUBTS.values() if doubt.name not in below]
    return ", ".join(d.remark for d in told if any(getattr(row, d.name) for row in rows))


# ----------------------------------------------------------------------------------------- memory


def _tabulate_growth(families: Sequence[Family], machines: Machines) -> Table:
    """One row a family: memory as a line, and what it predicts."""
    grown = [(family, growth) for family in families if (growth := fit_growth(family))]
    heads = (
        Head("fixed", "fixed (GiB)", "what no batch size changes: weights, context, libraries"),
        Head("image", "an item (MiB)", "memory that each item of a batch adds"),
        Head("miss", "largest miss (%)", "of a batch size that ran, from the line; of the largest, "
             "also from the line through the others", keep=7),
        Head("predicted", "predicted (GiB)", "for the next power of two", False, keep=8),
        Head("available", "available (GiB)", "up to the end of the card or the limit", keep=6),
        Head("largest", "predicted to fit", f"the largest multiple of {STEP}, at most "
             f"{FARTHEST} times the largest that ran", wrap=True),
        Head("wall", "measured", "the largest batch that fits, where it was found", False),
        Head("sizes", "fitted to", "batch sizes, and how many they are", False, keep=5),
    )  # fmt: skip
    notes = [
        "Memory as a line over the batch size: least squares through the batch sizes that ran. "
        "What is predicted was not measured."
    ]
    if any(growth.miss > ROUGH or not growth.holds for _, growth in grown):
        notes.append(
            f"Where the line misses by more than {100 * ROUGH:.0f} %, or where what was measured "
            "of the largest batch contradicts it, memory is no line (algorithms and allocators "
            "change with the batch size), and nothing is predicted; python -m bench.fit measures "
            "the largest batch."
        )
    return _lay_out(
        "batch-memory",
        "Memory by batch size, as a line",
        _list_keys([family.first for family in families], machines, ("batch_size",), "precision"),
        heads,
        ((family.first, tuple(_write_growth(family, growth))) for family, growth in grown),
        notes,
    )


def _write_growth(family: Family, growth: Growth) -> Iterator[Cell]:
    line = growth.line
    yield Cell(f"{line.fixed_bytes / GIB:.2f}", line.fixed_bytes)
    yield Cell(write_number(line.bytes_per_image / MIB), line.bytes_per_image)
    yield Cell(f"{100 * growth.miss:.1f}", growth.miss)
    said = [f"{size}: {bytes / GIB:.2f}" for size, bytes in growth.predicted.items()]
    yield Cell("; ".join(said) or NOTHING)
    if growth.available is None:
        yield Cell(NOTHING)
        yield Cell(NOTHING)
    else:
        yield Cell(f"{growth.available / GIB:.2f}", growth.available)
        yield Cell(_write_fitting(growth), growth.largest)
    yield Cell(write_bounds(find_bounds(family)))
    yield Cell(_write_sizes(growth.sizes))


def _write_fitting(growth: Growth) -> str:
    if not growth.holds:
        return "does not hold"
    if growth.largest is None:
        return NOTHING
    return f"{growth.largest} or more" if growth.more else str(growth.largest or "none")


def write_bounds(bounds: Bounds) -> str:
    """``512 fits, 640 does not``; empty where nothing ran out of memory."""
    if bounds.fails is None:
        return ""
    if bounds.fits is None:
        return f"not even {bounds.fails} fits"
    return f"{bounds.fits} fits, {bounds.fails} does not"


# ------------------------------------------------------------------------------ between precisions


def _tabulate_matches(families: Sequence[Family], machines: Machines) -> Table:
    """One row a batch size and precision: against the baseline at the same batch size."""
    matches = [
        match
        for base, others in list_rivals(families)
        for other in others
        for match in _choose_matches(match_sizes(base, other), base)
    ]
    lossless = not any(is_number(match.loss) for match in matches)
    if lossless and all(is_number(match.after.speedup) for match in matches):
        matches = []  # the overview has it all
    heads = (
        Head("batch_size", "batch size", "of both", keep=9),
        Head("speed", "speed", "epoch time of the baseline over this one's", better="higher"),
        Head("memory", "memory change", "of the peak", better="lower", keep=8),
        Head("loss", "loss difference", "of the training loss", better="lower", keep=8),
        Head("remarks", "remarks", "which of the two waits for its program", False, wrap=True),
    )
    starts = {i for i in range(1, len(matches)) if _begins(matches[i - 1], matches[i])}
    table = _lay_out(
        "matched",
        f"At the same batch size: each precision against {_name_baselines(matches)}",
        _list_keys([m.after for m in matches], machines, ("batch_size",), "precision"),
        heads,
        (
            (match.after, (Cell(str(match.after.batch_size), match.after.batch_size),
                           *_write_match(match), Cell(_name_host_bound(match))))
            for match in matches
        ),
        [_CHOSEN, *_note_losses(matches)],
    )  # fmt: skip
    return replace(table, groups=dict.fromkeys(starts, ""))


_CHOSEN = "At the smallest batch size, the baseline's knee and the largest that both ran."


def _name_host_bound(match: Match) -> str:
    waiting = (row for row in (match.before, match.after) if row.host_bound)
    return ", ".join(f"{row.precision} {DOUBTS['host_bound'].remark}" for row in waiting)


def _choose_matches(matches: Sequence[Match], base: Family) -> list[Match]:
    """Those at the smallest batch size, the knee of the baseline and the largest."""
    knee = find_knee(list_speeds(base.ended))
    at_knee = knee.batch_size if knee and knee.shape is Shape.KNEE else None
    ends = (matches[0], matches[-1]) if matches else ()
    return [m for m in matches if m in ends or m.before.batch_size == at_knee]


def _begins(previous: Match, match: Match) -> bool:
    """Whether another family begins: batch sizes go upwards within one."""
    same = previous.after.precision == match.after.precision
    return not same or match.after.batch_size <= previous.after.batch_size


def _name_baselines(matches: Sequence[Match]) -> str:
    return " or ".join(dict.fromkeys(str(match.before.precision) for match in matches))


def _write_match(match: Match) -> tuple[Cell, Cell, Cell]:
    mark = ESTIMATE if min(match.before.part, match.after.part) < 1 else ""
    speed = Cell(NOTHING)
    if is_number(match.speed):
        speed = Cell(f"{mark}{write_ratio(match.speed)}×", match.speed)
    return speed, _write_signed(match.memory - 1), _write_signed(match.loss, "", 3)


def _note_losses(matches: Sequence[Match]) -> list[str]:
    few = any(
        is_number(match.loss) and min(match.before.seeds, match.after.seeds) < MIN_REPEATS
        for match in matches
    )
    return [
        "A difference of loss of one batch size may be chance; the effects have its mean over all."
    ] * few


def _tabulate_largest(contests: Sequence[Contest], machines: Machines) -> Table:
    """One row a precision: its largest batch, against the baseline at the baseline's largest."""
    lines = [(family, row, contest) for contest in contests for family, row in contest.ends]
    matches = [Match(c.ends[0][1], row) for _, row, c in lines if row is not c.ends[0][1]]
    starts = [sum(len(c.ends) for c in contests[:i]) for i in range(1, len(contests))]
    heads = (
        Head("batch_size", "timed at", "the largest batch size that was timed and ended well"),
        Head("bound", "does not fit", "the smallest batch size above it that ran out of memory"),
        Head("epoch_time_s", "epoch time (s)", "one training epoch", better="lower"),
        Head("images_per_s", "images/s", "at that batch size", better="higher", keep=6),
        Head("memory_bytes", "memory (GiB)", "peak of the epoch", better="lower", keep=7),
        Head("train_loss", "loss", "mean cross-entropy over the epoch", better="lower", keep=8),
        Head("speed", "speed", "epoch time of the baseline over this one's", better="higher"),
        Head("memory", "memory change", "of the peak", better="lower", keep=5),
        Head("loss", "loss difference", "of the training loss", better="lower", keep=8),
    )
    rough = [
        f"{family.first.precision}: memory ends between {row.batch_size} and {bounds.fails}"
        for family, row, _ in lines
        if (bounds := find_bounds(family)).fails and not (family.wall and family.wall.confirmed)
    ]
    notes = [
        "Another question than the same batch size: what a precision gains by a larger batch "
        "is in it, and what a larger batch costs in loss."
    ]
    if rough:
        notes.append(f"{'; '.join(dict.fromkeys(rough))}. {_AUTO} finds where.")
    table = _lay_out(
        "largest",
        f"Each precision at its own largest batch, against {_name_baselines(matches)} at its "
        "largest",
        _list_keys([row for _, row, _ in lines], machines, ("batch_size",), "precision"),
        heads,
        (
            (row, (*_write_largest(family, row), *_write_against(contest.ends[0][1], row)))
            for family, row, contest in lines
        ),
        notes,
    )
    return replace(table, groups=dict.fromkeys(starts, ""))


_AUTO = "python -m bench.sweep --batch-size auto"


def _note_unended(families: Sequence[Family], contests: Sequence[Contest]) -> list[str]:
    """Which precisions are not compared at their own largest batch, and what would tell."""
    left = [family for contest in contests for family in contest.left]
    if not left or not any(find_bounds(family).fails for family in families):
        return []
    limits = {family.first.memory_limit for family in left}
    axes = ["precision", *(["memory_limit"] if len(limits) > 1 else [])]
    told = "; ".join(f"{name_case(f.first, axes)}: {_describe_end(f)}" for f in left)
    return [f"Not compared each at its largest batch: {told}. {_AUTO} measures it."]


def _describe_end(family: Family) -> str:
    bounds, row = find_bounds(family), find_largest(family)
    if row is None:
        return "none was timed"
    timed = f"timed up to {row.batch_size}"
    if bounds.fits is not None and bounds.fits > row.batch_size:
        return f"{bounds.fits} fits, {timed}"
    return f"{bounds.fails} does not fit, {timed}" if bounds.fails else f"nothing failed, {timed}"


def _write_largest(family: Family, row: Row) -> Iterator[Cell]:
    fails = find_bounds(family).fails
    yield Cell(str(row.batch_size), int(row.batch_size))
    yield Cell(NOTHING if fails is None else str(fails), fails)
    for name in ("epoch_time_s", "images_per_s", "memory_bytes", "train_loss"):
        yield quantity_cell(QUANTITIES[name], row, spread=False)


def _write_against(first: Row, row: Row) -> tuple[Cell, Cell, Cell]:
    return (Cell(NOTHING),) * 3 if row is first else _write_match(Match(first, row))


# ----------------------------------------------------------------------------------- accumulation


def _tabulate_accumulated(cases: pd.DataFrame, machines: Machines) -> Table:
    """One row a case: a batch in one piece, and one of the same size in micro-batches."""
    sets = list(islice(list_accumulated(cases), 10 * MOST_ROWS))
    rows = [row for rows in sets for row in rows]
    heads = (
        Head("batch_size", "batch size", "items per step of the optimizer"),
        Head("micro", "computed as", "micro-batches times their size", False),
        Head("epoch_time_s", "epoch time (s)", "one training epoch", better="lower"),
        Head("time", "time change", "from the plain batch", better="lower"),
        Head("memory_bytes", "memory (GiB)", "peak of the epoch", better="lower", keep=7),
        Head("memory", "memory change", "from the plain batch", better="lower", keep=8),
        Head("train_loss", "loss", "mean cross-entropy over the epoch", better="lower", keep=6),
        Head("loss", "loss difference", "from the plain batch", better="lower", keep=7),
    )
    starts = [sum(map(len, sets[:i])) for i in range(1, len(sets))]
    same = {row.workload == IMAGES for row in rows}
    notes = {
        "Networks with BatchNorm see each micro-batch's own statistics, so their loss differs "
        "from that of the plain batch.": True in same,
        "A workload of your own draws each micro-batch by itself: the data of the plain batch are "
        "others, and the losses are not compared.": False in same,
    }
    table = _lay_out(
        "accumulation",
        "Accumulation: a batch in one piece, and in micro-batches",
        _list_keys(rows, machines, ("batch_size", "accumulate"), "precision"),
        heads,
        ((row, tuple(_write_accumulated(rows[0], row))) for rows in sets for row in rows),
        [note for note, told in notes.items() if told],
    )
    return replace(table, groups=dict.fromkeys(starts, ""))


def _write_accumulated(plain: Row, row: Row) -> Iterator[Cell]:
    """The cells of one case; changes are from the batch in one piece, where it was trained."""
    beside = Match(plain, row)
    known = plain.accumulate == 1 != row.accumulate and plain.status in RELIABLE
    size = micro_batch(row)
    yield Cell(str(row.batch_size), int(row.batch_size))
    yield Cell("one piece" if row.accumulate == 1 else f"{row.accumulate} × {size}")
    yield time_cell(row, spread=False)
    mark = ESTIMATE if min(plain.part, row.part) < 1 else ""
    change = divide(row.epoch_time_s, plain.epoch_time_s) - 1 if known else math.nan
    written = _write_signed(change)
    yield replace(written, text=mark + written.text) if is_number(change) else written
    yield quantity_cell(QUANTITIES["memory_bytes"], row, spread=False)
    yield _write_signed(beside.memory - 1 if known else math.nan)
    yield quantity_cell(QUANTITIES["train_loss"], row, spread=False)
    yield _write_signed(beside.loss if known and row.workload == IMAGES else math.nan, "", 3)
