"""Comparisons of precisions, at equal batch sizes and each at its largest, and of micro-batches.

A table appears only if what it compares varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

from bench.case import micro_batch
from bench.limits import MIN_REPEATS
from bench.precision import PRECISIONS
from bench.questions.batch_sizes import Shape, find_knee, list_speeds
from bench.questions.families import EQUAL, Family, keep_one, list_keys, note_first
from bench.questions.report_data import ReportData
from bench.record import RELIABLE
from bench.render.cells import Row, mark_part, name_case, write_ratio, write_signed
from bench.render.model import Cell
from bench.render.section import (
    Column,
    Said,
    Section,
    Sheet,
    join,
    quantity_column,
)
from bench.study.doubts import DOUBTS
from bench.study.estimate import share_seeds
from bench.study.quantities import is_number
from bench.study.results import Result
from bench.study.runs import group
from bench.workloads import IMAGES


class Match(NamedTuple):
    """Two cases to compare: of two precisions, or a plain batch and one in micro-batches."""

    before: Row
    after: Row

    @property
    def speed(self) -> float:
        """How many times as fast the second case is; NaN if a time is unknown."""
        return divide(self.before.epoch_time_s, self.after.epoch_time_s)

    @property
    def memory(self) -> float:
        """The relative change of memory from the first to the second; NaN if one is unknown."""
        return divide(self.after.memory_bytes, self.before.memory_bytes) - 1

    @property
    def loss(self) -> float:
        """The second's training loss minus the first's, over the seeds that both ran, or all if
        they share none. NaN if a loss is unknown, if they trained unequal parts of an epoch, or a
        part of one at unequal batch sizes."""
        before, after = self
        early = before.part < 1 and before.batch_size != after.batch_size
        if before.part != after.part or early or not (before.losses and after.losses):
            return math.nan
        sides = share_seeds([(0, 1)], {0: before.losses, 1: after.losses})
        ours, theirs = (fmean(value for value, _ in side.values()) for (side,) in sides)
        return theirs - ours


def divide(a: float, b: float) -> float:
    """Return ``a / b``; NaN if one is missing or ``b`` is not positive."""
    return a / b if is_number(a) and is_number(b) and b > 0 else math.nan


def list_rivals(families: Sequence[Family]) -> Iterator[tuple[Family, list[Family]]]:
    """Yield each group of families that differ in precision only: the baseline and the others. The
    baseline is the first of `PRECISIONS` with a case that ended: fp32, if it has one."""
    groups: dict[int, list[Family]] = {}
    for family in families:
        if family.ended:
            groups.setdefault(family.group, []).append(family)
    for rivals in groups.values():
        # if the overview is sorted by batch size first, families are in the order they first ran
        base, *others = sorted(rivals, key=lambda one: list(PRECISIONS).index(one.first.precision))
        if others and len({row.batch_size for family in rivals for row in family.ended}) > 1:
            yield base, others


class Contest(NamedTuple):
    """Families that differ in precision only, each at its own largest batch. ``ends`` are those
    with a `Family.end`, and that case, the baseline first; empty if all are at one batch size or
    only one has one. ``left`` are the families without."""

    ends: list[tuple[Family, Row]]
    left: list[Family]


def list_contests(families: Sequence[Family]) -> Iterator[Contest]:
    """Yield the precisions that may be compared, each at its own largest batch."""
    for base, others in list_rivals(families):
        ends = [(family, row) for family in (base, *others) if (row := family.end) is not None]
        left = [family for family in (base, *others) if family.end is None]
        yield Contest(ends if len({row.batch_size for _, row in ends}) > 1 else [], left)


def _write_change(share: float) -> str:
    return f"{write_signed(100 * share, 1)} %"


_write_difference = partial(write_signed, decimals=3)


def _match_columns(take: Callable[[Any], Match | None], keep: int) -> list[Column[Any]]:
    def of_match(say: Callable[[Match], Said]) -> Callable[[Any], Said]:
        return lambda row: say(match) if (match := take(row)) else None

    def write_speed(match: Match) -> Cell | None:
        text = f"{mark_part(*match)}{write_ratio(match.speed)}×"
        return Cell(text, match.speed) if is_number(match.speed) else None

    return [
        Column("speed", "speed", "epoch time of the baseline over this one's",
               of_match(write_speed), better="higher"),
        Column("memory", "memory change", "of the peak", of_match(lambda match: match.memory),
               write=_write_change, better="lower", keep=keep),
        Column("loss", "loss difference", "of the training loss",
               of_match(lambda match: match.loss), write=_write_difference, better="lower", keep=8),
    ]  # fmt: skip


def _name_baselines(matches: Sequence[Match]) -> str:
    return " or ".join(dict.fromkeys(match.before.precision for match in matches))


def _tabulate_matches(found: ReportData) -> Iterator[Sheet]:
    rows, groups = join(
        ("", _choose_matches(base, other))
        for base, others in list_rivals(found.families)
        for other in others
    )
    lossless = not any(is_number(match.loss) for match in rows)
    if lossless and all(is_number(match.after.speedup) for match in rows):
        return  # the overview has it all

    def name_waiting(match: Match) -> str:
        doubt = DOUBTS["host_bound"]
        return ", ".join(f"{row.precision} {doubt.remark}" for row in match if row.host_bound)

    columns: list[Column[Match]] = [
        *list_keys([m.after for m in rows], found.machines, lambda match: match.after),
        Column("batch_size", "batch size", "of both", lambda match: int(match.after.batch_size)),
        *_match_columns(lambda match: match, keep=8),
        Column("remarks", "remarks", "which of the two waits for its program", name_waiting,
               wrap=True),
    ]  # fmt: skip
    notes = [
        "Shown at three batch sizes: the smallest, the baseline's knee, and the largest that both "
        "ran."
    ]
    if any(is_number(m.loss) and min(row.seeds for row in m) < MIN_REPEATS for m in rows):
        notes.append(
            "A difference of loss of one batch size may be chance; the table of changes "
            "shows the mean over all batch sizes."
        )
    contests = list(list_contests(found.families))
    if not any(contest.ends for contest in contests):
        notes += _note_unended(found.families, contests)
    notes += note_first(found.families)
    title = f"At the same batch size: each precision against {_name_baselines(rows)}"
    yield Sheet(title, columns, rows, notes, groups)


def _choose_matches(base: Family, other: Family) -> list[Match]:
    """Match cases at the smallest batch size that both ran, the baseline's knee and the largest."""
    knee = find_knee(list_speeds(base.ended))
    at_knee = knee.batch_size if knee and knee.shape is Shape.KNEE else None
    ours = {row.batch_size: row for row in base.ended}
    matches = [Match(ours[r.batch_size], r) for r in other.ended if r.batch_size in ours]
    ends = (matches[0], matches[-1]) if matches else ()
    return [m for m in matches if m in ends or m.before.batch_size == at_knee]


_Largest = tuple[Family, Row, Match | None]
"""A family, its largest batch, and how that compares with the baseline's."""


def _tabulate_largest(found: ReportData) -> Iterator[Sheet]:
    contests = list(list_contests(found.families))
    rows, groups = join(("", _list_largest(contest)) for contest in contests if contest.ends)
    case = partial(quantity_column, take=lambda row: row[1], spread=False)
    columns: list[Column[_Largest]] = [
        *list_keys([row for _, row, _ in rows], found.machines, lambda row: row[1]),
        Column("batch_size", "timed at", "the largest batch size that was timed and ended well",
               lambda row: int(row[1].batch_size)),
        Column("bound", "does not fit", "the smallest batch size above it that ran out of memory",
               lambda row: row[0].bounds.fails),
        case("epoch_time_s", help="one training epoch"),
        case("images_per_s", help="at that batch size", keep=6),
        case("memory_bytes", keep=7),
        case("train_loss", help="mean cross-entropy over the epoch", keep=8),
        *_match_columns(lambda row: row[2], keep=5),
    ]  # fmt: skip
    rough = dict.fromkeys(
        f"{family.first.precision}: memory ends between {row.batch_size} and {family.bounds.fails}"
        for family, row, _ in rows
        if family.bounds.fails and not (family.wall and family.wall.confirmed)
    )
    compared = any(match and is_number(match.loss) for *_, match in rows)
    notes = [
        "Another question than the same batch size: what a precision gains by a larger batch "
        f"is in it{', and what a larger batch costs in loss' if compared else ''}.",
        *([f"{'; '.join(rough)}. {_AUTO} finds where."] if rough else []),
        *_note_unended(found.families, contests),
        *note_first(found.families),
    ]
    title = (
        "Each precision at its own largest batch, against "
        f"{_name_baselines([match for *_, match in rows if match])} at its largest"
    )
    yield Sheet(title, columns, rows, notes, groups)


def _list_largest(contest: Contest) -> Iterator[_Largest]:
    (base, first), *others = contest.ends
    yield base, first, None
    yield from ((family, row, Match(first, row)) for family, row in others)


_AUTO = "python -m bench.sweep --batch-size auto"


def _note_unended(families: Sequence[Family], contests: Sequence[Contest]) -> list[str]:
    left = [family for contest in contests for family in contest.left]
    if not left or not any(family.bounds.fails for family in families):
        return []
    limited = len({family.first.memory_limit for family in left}) > 1
    axes = ["precision", *["memory_limit"] * limited]
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


def list_accumulated(results: Sequence[Result]) -> Iterator[list[Result]]:
    """Yield cases that differ only in how many micro-batches make their batch, the fewest first. If
    the plain batch did not fit, its row says so."""
    equal = [name for name in (*EQUAL, "batch_size") if name != "accumulate"]
    sets = (keep_one(alike, "accumulate") for alike in group(results, attrgetter(*equal)))
    yield from (kept for kept in sets if len(kept) > 1)


def _tabulate_accumulated(found: ReportData) -> Iterator[Sheet]:
    sets = list(list_accumulated(found.results))
    rows, groups = join(("", [Match(rows[0], row) for row in rows]) for rows in sets)
    case = partial(quantity_column, take=lambda match: match.after, spread=False)

    def is_known(match: Match) -> bool:
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
        *list_keys([match.after for match in rows], found.machines, lambda match: match.after,
                    ("batch_size", "accumulate")),
        Column("batch_size", "batch size", "items per step of the optimizer",
               lambda match: int(match.after.batch_size)),
        Column("micro", "computed as", "micro-batches times their size", write_pieces,
               number=False),
        case("epoch_time_s", help="one training epoch"),
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
    notes = {
        True: "Networks with BatchNorm see each micro-batch's own statistics, so their loss "
        "differs from that of the plain batch.",
        False: "A workload of your own draws each micro-batch by itself: the data of the plain "
        "batch are others, and the losses are not compared.",
    }
    images = {match.after.workload == IMAGES for match in rows}
    told = [note for of_images, note in notes.items() if of_images in images]
    title = "Accumulation: a batch in one piece, and in micro-batches"
    yield Sheet(title, columns, rows, told, groups)


MATCHED = Section(
    "matched", "What does each precision gain at the same batch size?", _tabulate_matches
)
LARGEST = Section("largest", "What does each gain at its own largest batch?", _tabulate_largest)
ACCUMULATION = Section(
    "accumulation", "What do micro-batches cost and save?", _tabulate_accumulated
)
