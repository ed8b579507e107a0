"""The tables of batch sizes: speed, memory, precisions at equal and at largest batch, accumulation.

None appears unless what it is about varies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

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
    find_cliffs,
    find_knee,
    fit_growth,
    list_accumulated,
    list_contests,
    list_rivals,
    list_speeds,
    write_drop,
)
from bench.questions.material import Material
from bench.record import RELIABLE
from bench.render.cells import (
    Row,
    axis_column,
    mark_part,
    name_case,
    quantity_cell,
    quantity_column,
    time_cell,
    whole_cell,
    write_ratio,
    write_signed,
    write_tenths,
)
from bench.render.model import NOTHING, Cell
from bench.render.section import MOST_ROWS, Column, Said, Section, Sheet, join
from bench.study.axes import Machines, find_varying
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number
from bench.text import GIB, write_number
from bench.wall.answer import Wall
from bench.wall.search import STEP, Ending
from bench.workloads import IMAGES

MIB = 2**20


def _list_keys(
    cases: Sequence[Row],
    machines: Machines,
    take: Callable[[Any], Row],
    but: Collection[str] = ("batch_size",),
) -> list[Column[Any]]:
    """The axes in which cases differ, as columns; the precision always.

    Args:
        take: a row of the table to its case.
        but: axes that have columns of their own.
    """
    import pandas as pd

    names = ["sweep", "machine", *AXES]
    frame = pd.DataFrame({name: [getattr(case, name) for case in cases] for name in names})
    varying = find_varying(frame)
    shown = [axis for axis in varying if axis not in (*but, *SAME_QUESTION)]
    shown = shown if "precision" in varying else ["precision", *shown]
    return [axis_column(axis, machines, take, number=False) for axis in shown]


def _note_first(families: Sequence[Family]) -> Iterator[str]:
    """That there are more settings than are looked at."""
    if len(families) == MOST_FAMILIES:
        yield f"Only the first {MOST_FAMILIES} settings are looked at; --where chooses others."


def _write_sizes(sizes: Sequence[int]) -> str:
    """Batch sizes as their range: ``32 to 512 (5)``."""
    return f"{sizes[0]} to {sizes[-1]} ({len(sizes)})"


def _write_change(share: float) -> str:
    return f"{write_signed(100 * share, 1)} %"


def _write_difference(value: float) -> str:
    return write_signed(value, 3)


# ------------------------------------------------------------------------------------------- wall


def _tell_walls(found: Material) -> Iterator[Sheet]:
    rows = [(_describe_search(search), search.wall) for search in found.searches]
    fine = all(wall.ending is Ending.FOUND for _, wall in rows)
    margins = " or ".join(sorted({f"{100 * wall.margin:g} %" for _, wall in rows}))
    columns: list[Column[tuple[Row, Wall]]] = [
        *_list_keys([row for row, _ in rows], found.machines, lambda row: row[0]),
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
    """The settings of a search as a row of the frame of cases has them."""
    axes = {name: getattr(search.family, name) for name in AXES}
    spelled = {name: "" if value is None else value for name, value in axes.items()}
    return SimpleNamespace(sweep=search.sweep, machine=search.machine, **spelled)


WALLS = Section("walls", "How large a batch fits in memory?", _tell_walls)


# ------------------------------------------------------------------------------------------ speed

_Speeds = tuple[Family, Knee, list[Cliff]]


def _tell_speeds(found: Material) -> Iterator[Sheet]:
    rows: list[_Speeds] = []
    for family in found.families:
        speeds = list_speeds(family.ended)
        if knee := find_knee(speeds):
            rows.append((family, knee, find_cliffs(speeds)))
    firsts = [family.first for family in found.families]
    near = f"{100 * NEAR:.0f} %"

    def write_speed(family: Family, size: int) -> Cell:
        (row,) = (row for row in family.ended if row.batch_size == size)
        return quantity_cell(QUANTITIES["images_per_s"], row)

    def write_best(row: _Speeds) -> Cell:
        best = write_speed(row[0], row[1].best)
        return Cell(f"{best.text} at {row[1].best}", best.value)

    def write_doubts(row: _Speeds) -> str:
        family, knee, cliffs = row
        sizes = {knee.best, knee.batch_size, *(size for cliff in cliffs for size in cliff.sizes)}
        rested = [row for row in family.ended if row.batch_size in sizes]
        told = [doubt for doubt in DOUBTS.values() if doubt.name not in found.below]
        return ", ".join(d.remark for d in told if any(getattr(row, d.name) for row in rested))

    columns: list[Column[_Speeds]] = [
        *_list_keys(firsts, found.machines, lambda row: row[0].first),
        Column("knee", "knee", f"the smallest batch size that ran within {near} of the best",
               lambda row: Cell(write_knee(row[1], row[0].bounds.fails),
                                row[1].batch_size if row[1].certain else None),
               wrap=True),
        Column("knee_speed", "images/s there", "at the knee",
               lambda row: write_speed(row[0], row[1].batch_size) if row[1].certain else None,
               better="higher", keep=7),
        Column("best", "most images/s", "and the batch size that has them", write_best,
               better="higher"),
        Column("cliffs", "cliffs", f"where images/s drop by more than {100 * DROP:.0f} %",
               lambda row: "; ".join(map(_write_cliff, row[2])) or "none",
               wrap=True, always=True),
        Column("sizes", "batch sizes", "that were timed, and how many they are",
               lambda row: _write_sizes([s.batch_size for s in list_speeds(row[0].ended)]),
               number=False, keep=5),
        Column("remarks", "remarks", "on the rows that these rest on", write_doubts,
               keep=8, wrap=True),
    ]  # fmt: skip
    notes = [
        f"Knee: the smallest batch size that ran within {near} of the most images/s; two batch "
        "sizes where the spread of the runs leaves it between them. Still rising: the largest is "
        f"the best, by more than {near} over half of it. Cliff: more than {100 * DROP:.0f} % fewer "
        "images/s than at the batch size before, and more than the spread of the runs explains."
    ]
    if any(row.repeats < MIN_REPEATS for family, *_ in rows for row in family.ended):
        notes.append(
            f"With fewer than {MIN_REPEATS} repeats, knees and cliffs are as uncertain as the "
            f"runs, and may be chance; use --repeats {MIN_REPEATS}."
        )
    notes += _note_first(found.families)
    yield Sheet("Speed by batch size: knees and cliffs", columns, rows, notes)


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


def _write_cliff(cliff: Cliff) -> str:
    """``256 → 257: 23 % slower, 257 is no multiple of 8``."""
    before, after = cliff.sizes
    said = f"{before} → {after}: {write_drop(cliff)}"
    return ", ".join(filter(None, (said, cliff.misalignment)))


SPEEDS = Section("batch-speed", "From which batch size on is training no faster?", _tell_speeds)


# ----------------------------------------------------------------------------------------- memory


def _tell_growth(found: Material) -> Iterator[Sheet]:
    rows = [(family, growth) for family in found.families if (growth := fit_growth(family))]
    firsts = [family.first for family in found.families]
    gib = partial(Column, write=lambda bytes: f"{bytes / GIB:.2f}")
    columns: list[Column[tuple[Family, Growth]]] = [
        *_list_keys(firsts, found.machines, lambda row: row[0].first),
        gib("fixed", "fixed (GiB)", "what no batch size changes: weights, context, libraries",
            lambda row: row[1].line.fixed_bytes),
        Column("image", "an item (MiB)", "memory that each item of a batch adds",
               lambda row: row[1].line.bytes_per_image,
               write=lambda bytes: write_number(bytes / MIB)),
        Column("miss", "largest miss (%)", "of a batch size that ran, from the line; of the "
               "largest, also from the line through the others",
               lambda row: row[1].miss, write=write_tenths, keep=7),
        Column("predicted", "predicted (GiB)", "for the next power of two", lambda row: "; ".join(
               f"{size}: {bytes / GIB:.2f}" for size, bytes in row[1].predicted.items()) or None,
               number=False, keep=8),
        gib("available", "available (GiB)", "up to the end of the card or the limit",
            lambda row: row[1].available, keep=6),
        Column("largest", "predicted to fit", f"the largest multiple of {STEP}, at most "
               f"{FARTHEST} times the largest that ran", lambda row: None
               if row[1].available is None else Cell(_write_fitting(row[1]), row[1].largest),
               number=True, wrap=True),
        Column("wall", "measured", "the largest batch that fits, where it was found",
               lambda row: _write_bounds(row[0].bounds), number=False),
        Column("sizes", "fitted to", "batch sizes, and how many they are",
               lambda row: _write_sizes(row[1].sizes), number=False, keep=5),
    ]  # fmt: skip
    notes = [
        "Memory as a line over the batch size: least squares through the batch sizes that ran. "
        "What is predicted was not measured."
    ]
    if any(growth.miss > ROUGH or not growth.holds for _, growth in rows):
        notes.append(
            f"Where the line misses by more than {100 * ROUGH:.0f} %, or where what was measured "
            "of the largest batch contradicts it, memory is no line (algorithms and allocators "
            "change with the batch size), and nothing is predicted; python -m bench.fit measures "
            "the largest batch."
        )
    notes += _note_first(found.families)
    yield Sheet("Memory by batch size, as a line", columns, rows, notes)


def _write_fitting(growth: Growth) -> str:
    if not growth.holds:
        return "does not hold"
    if growth.largest is None:
        return NOTHING
    return f"{growth.largest} or more" if growth.more else str(growth.largest or "none")


def _write_bounds(bounds: Bounds) -> str:
    """``512 fits, 640 does not``; empty where nothing ran out of memory."""
    if bounds.fails is None:
        return ""
    if bounds.fits is None:
        return f"not even {bounds.fails} fits"
    return f"{bounds.fits} fits, {bounds.fails} does not"


GROWTH = Section("batch-memory", "How does memory grow with the batch size?", _tell_growth)


# ------------------------------------------------------------------------------ between precisions


def _tell_matches(found: Material) -> Iterator[Sheet]:
    rows, groups = join(
        ("", _choose_matches(base, other))
        for base, others in list_rivals(found.families)
        for other in others
    )
    lossless = not any(is_number(match.loss) for match in rows)
    if lossless and all(is_number(match.after.speedup) for match in rows):
        return  # the overview has it all

    def name_waiting(match: Match) -> str:
        waiting = (row for row in match if row.host_bound)
        return ", ".join(f"{row.precision} {DOUBTS['host_bound'].remark}" for row in waiting)

    speed, memory, loss = _match_columns(lambda match: match)
    columns: list[Column[Match]] = [
        *_list_keys([m.after for m in rows], found.machines, lambda match: match.after),
        Column("batch_size", "batch size", "of both", lambda match: int(match.after.batch_size)),
        speed,
        replace(memory, keep=8),
        loss,
        Column("remarks", "remarks", "which of the two waits for its program", name_waiting,
               wrap=True),
    ]  # fmt: skip
    notes = ["At the smallest batch size, the baseline's knee and the largest that both ran."]
    if any(is_number(m.loss) and min(row.seeds for row in m) < MIN_REPEATS for m in rows):
        notes.append(
            "A difference of loss of one batch size may be chance; the effects have its mean over "
            "all."
        )
    contests = list(list_contests(found.families))
    if not any(contest.ends for contest in contests):
        notes += _note_unended(found.families, contests)
    notes += _note_first(found.families)
    title = f"At the same batch size: each precision against {_name_baselines(rows)}"
    yield Sheet(title, columns, rows, notes, groups)


def _match_columns(take: Callable[[Any], Match | None]) -> list[Column[Any]]:
    """How a case differs from the baseline; nothing for the baseline itself."""

    def of_match(say: Callable[[Match], Said]) -> Callable[[Any], Said]:
        return lambda row: say(match) if (match := take(row)) else None

    def write_speed(match: Match) -> Cell | None:
        text = f"{mark_part(*match)}{write_ratio(match.speed)}×"
        return Cell(text, match.speed) if is_number(match.speed) else None

    return [
        Column("speed", "speed", "epoch time of the baseline over this one's",
               of_match(write_speed), better="higher"),
        Column("memory", "memory change", "of the peak", of_match(lambda match: match.memory),
               write=_write_change, better="lower"),
        Column("loss", "loss difference", "of the training loss",
               of_match(lambda match: match.loss), write=_write_difference, better="lower", keep=8),
    ]  # fmt: skip


def _choose_matches(base: Family, other: Family) -> list[Match]:
    """Of the batch sizes that both ran the smallest, the knee of the baseline and the largest."""
    knee = find_knee(list_speeds(base.ended))
    at_knee = knee.batch_size if knee and knee.shape is Shape.KNEE else None
    ours = {row.batch_size: row for row in base.ended}
    matches = [Match(ours[r.batch_size], r) for r in other.ended if r.batch_size in ours]
    return [
        m for m in matches if m in matches[::-1][:1] + matches[:1] or m.before.batch_size == at_knee
    ]


def _name_baselines(matches: Sequence[Match]) -> str:
    return " or ".join(dict.fromkeys(str(match.before.precision) for match in matches))


MATCHED = Section("matched", "What does each precision gain at the same batch size?", _tell_matches)


_Largest = tuple[Family, Row, Match | None]
"""A family, its largest batch, and how that compares with the baseline's."""


def _tell_largest(found: Material) -> Iterator[Sheet]:
    contests = list(list_contests(found.families))
    rows, groups = join(("", _list_largest(contest)) for contest in contests if contest.ends)
    matches = [match for *_, match in rows if match]
    case = partial(quantity_column, take=lambda row: row[1], spread=False)
    speed, memory, loss = _match_columns(lambda row: row[2])
    columns: list[Column[_Largest]] = [
        *_list_keys([row for _, row, _ in rows], found.machines, lambda row: row[1]),
        Column("batch_size", "timed at", "the largest batch size that was timed and ended well",
               lambda row: int(row[1].batch_size)),
        Column("bound", "does not fit", "the smallest batch size above it that ran out of memory",
               lambda row: row[0].bounds.fails),
        case("epoch_time_s", help="one training epoch"),
        case("images_per_s", help="at that batch size", keep=6),
        case("memory_bytes", keep=7),
        case("train_loss", help="mean cross-entropy over the epoch", keep=8),
        speed,
        replace(memory, keep=5),
        loss,
    ]  # fmt: skip
    rough = dict.fromkeys(
        f"{family.first.precision}: memory ends between {row.batch_size} and {family.bounds.fails}"
        for family, row, _ in rows
        if family.bounds.fails and not (family.wall and family.wall.confirmed)
    )
    notes = [
        "Another question than the same batch size: what a precision gains by a larger batch "
        "is in it, and what a larger batch costs in loss.",
        *([f"{'; '.join(rough)}. {_AUTO} finds where."] if rough else []),
        *_note_unended(found.families, contests),
        *_note_first(found.families),
    ]
    baselines = _name_baselines(matches)
    title = f"Each precision at its own largest batch, against {baselines} at its largest"
    yield Sheet(title, columns, rows, notes, groups)


def _list_largest(contest: Contest) -> Iterator[_Largest]:
    (base, first), *others = contest.ends
    yield base, first, None
    yield from ((family, row, Match(first, row)) for family, row in others)


_AUTO = "python -m bench.sweep --batch-size auto"


def _note_unended(families: Sequence[Family], contests: Sequence[Contest]) -> list[str]:
    """Which precisions are not compared at their own largest batch, and what would tell."""
    left = [family for contest in contests for family in contest.left]
    if not left or not any(family.bounds.fails for family in families):
        return []
    limits = {family.first.memory_limit for family in left}
    axes = ["precision", *(["memory_limit"] if len(limits) > 1 else [])]
    told = "; ".join(f"{name_case(f.first, axes)}: {_describe_end(f)}" for f in left)
    return [f"Not compared each at its largest batch: {told}. {_AUTO} measures it."]


def _describe_end(family: Family) -> str:
    (fits, fails), row = family.bounds, family.largest
    if row is None:
        return "none was timed"
    timed = f"timed up to {row.batch_size}"
    if fits is not None and fits > row.batch_size:
        return f"{fits} fits, {timed}"
    return f"{fails} does not fit, {timed}" if fails else f"nothing failed, {timed}"


LARGEST = Section("largest", "What does each gain at its own largest batch?", _tell_largest)


# ----------------------------------------------------------------------------------- accumulation


def _tell_accumulated(found: Material) -> Iterator[Sheet]:
    sets = list(islice(list_accumulated(found.cases), 10 * MOST_ROWS))
    rows, groups = join(("", [Match(rows[0], row) for row in rows]) for rows in sets)
    case = partial(quantity_column, take=lambda match: match.after, spread=False)

    def is_known(match: Match) -> bool:
        """Whether there is a batch in one piece, and that was trained."""
        plain, parted = match
        return plain.accumulate == 1 != parted.accumulate and plain.status in RELIABLE

    def write_time(match: Match) -> Cell | None:
        change = divide(match.after.epoch_time_s, match.before.epoch_time_s) - 1
        known = is_known(match) and is_number(change)
        return Cell(mark_part(*match) + _write_change(change), change) if known else None

    def write_pieces(match: Match) -> str:
        parts = match.after.accumulate
        return "one piece" if parts == 1 else f"{parts} × {micro_batch(match.after)}"

    columns: list[Column[Match]] = [
        *_list_keys([match.after for match in rows], found.machines, lambda match: match.after,
                    ("batch_size", "accumulate")),
        Column("batch_size", "batch size", "items per step of the optimizer",
               lambda match: int(match.after.batch_size)),
        Column("micro", "computed as", "micro-batches times their size", write_pieces,
               number=False),
        replace(case("epoch_time_s", help="one training epoch"),
                say=lambda match: time_cell(match.after, spread=False)),
        Column("time", "time change", "from the plain batch", write_time, better="lower"),
        case("memory_bytes", keep=7),
        Column("memory", "memory change", "from the plain batch",
               lambda match: match.memory if is_known(match) else None,
               write=_write_change, better="lower", keep=8),
        case("train_loss", help="mean cross-entropy over the epoch", keep=6),
        Column("loss", "loss difference", "from the plain batch",
               lambda match: match.loss
               if is_known(match) and match.after.workload == IMAGES else None,
               write=_write_difference, better="lower", keep=7),
    ]  # fmt: skip
    images = {match.after.workload == IMAGES for match in rows}
    notes = {
        "Networks with BatchNorm see each micro-batch's own statistics, so their loss differs "
        "from that of the plain batch.": True in images,
        "A workload of your own draws each micro-batch by itself: the data of the plain batch are "
        "others, and the losses are not compared.": False in images,
    }
    told = [note for note, holds in notes.items() if holds]
    title = "Accumulation: a batch in one piece, and in micro-batches"
    yield Sheet(title, columns, rows, told, groups)


ACCUMULATION = Section("accumulation", "What do micro-batches cost and save?", _tell_accumulated)
