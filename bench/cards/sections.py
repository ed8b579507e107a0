"""The tables of the page: each card in each precision, card against card, and their folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from bench.cards.entries import BASELINES, CODE, Entry, Group, list_levers
from bench.questions.effects import Effect, list_columns
from bench.questions.reasons import name_reasons
from bench.render.cells import (
    Row,
    mark_part,
    quantity_column,
    remarks,
    take_first,
    time_cell,
    write_ratio,
)
from bench.render.model import Cell, Level
from bench.render.section import Column, Said, Section, Sheet, join
from bench.study.quantities import is_number
from bench.text import name_first, write_number

if TYPE_CHECKING:
    from bench.cards.document import Cards

CSV = "python -m bench.report FOLDERS --format csv"


def name_group(found: Cards, group: Group) -> str:
    """The cards of a group: ``1. NVIDIA H100 80GB HBM3 and 2 more``."""
    return f"{found.groups.index(group) + 1}. {name_first(group.cards, 1)}"


def name_setting(group: Group) -> str:
    """At which setting the precisions of a group are compared."""
    return ", ".join([f"batch size {group.setting.batch_size}", *list_levers(group.setting)])


def speed_over(entry: Entry, base: str) -> Cell | None:
    """How many times as fast it is at the equal setting as the same card in another precision."""
    other, row = entry.base.get(base), entry.equal
    slower = entry.precision in BASELINES[: BASELINES.index(base) + 1]
    if other is None or row is None or slower:
        return None
    speed = other.epoch_time_s / row.epoch_time_s
    return Cell(f"{mark_part(other, row)}{write_ratio(speed)}", speed)


def _of(take: Callable[[Entry], Row | None], column: Column[Any]) -> Column[Entry]:
    """A column of the case that ``take`` finds; nothing where there is none."""

    def say(entry: Entry) -> Said:
        row = take(entry)
        return None if row is None else column.say(row)

    return Column(column.name, column.label, column.help, say, better=column.better,
                  keep=column.keep)  # fmt: skip


def _tell_cards(found: Cards) -> Iterator[Sheet]:
    rows, headings = join(_list_cards(found))

    def take_equal(entry: Entry) -> Row | None:
        return entry.equal

    def take_best(entry: Entry) -> Row | None:
        return entry.best

    def name_best(entry: Entry) -> Cell | None:
        if (best := entry.best) is None:
            return None
        setup = [str(best.batch_size), *list_levers(best, entry.setting)]
        return Cell(", ".join(setup), int(best.batch_size))

    def write_bounds(entry: Entry) -> str | None:
        fits, fails = entry.bounds
        if fits is None:
            return f"below {fails}" if fails else None
        return f"{fits} (not {fails})" if fails else f"at least {fits}"

    def find_bought(entry: Entry) -> Cell | None:
        price = found.prices and found.prices.find(entry.card)
        if not price or entry.best is None or not is_number(entry.best.images_per_s):
            return None
        bought = entry.best.images_per_s * 3600 / price
        return Cell(f"{mark_part(entry.best)}{write_number(bought / 1e6)}", bought)

    def tell_doubts(entry: Entry) -> str:
        of = {"equal": entry.equal, "fastest": entry.best}
        said = {name: remarks(row, found.below) for name, row in of.items() if row is not None}
        if len(set(said.values())) == 1:
            return next(iter(said.values()))
        return "; ".join(f"{name}: {text}" for name, text in said.items() if text)

    money = found.prices.unit if found.prices else ""
    columns: list[Column[Entry]] = [
        Column("precision", "precision", "number formats", lambda entry: entry.precision,
               number=False, always=True),
        _of(take_equal, Column("equal_time_s", "epoch (s)", "one epoch, at the setting above",
               lambda row: time_cell(row, spread=False), better="lower")),
        Column("over_fp32", "over fp32 (×)", "epoch time of fp32 on this card over this one's",
               lambda entry: speed_over(entry, "fp32"), better="higher"),
        Column("over_tf32", "over tf32 (×)", "epoch time of tf32 on this card over this one's",
               lambda entry: speed_over(entry, "tf32"), better="higher", keep=8),
        _of(take_equal, quantity_column("memory_bytes", help="peak of the epoch, at that setting",
                                        keep=7)),
        Column("best", "fastest at", "batch size and settings of the fastest epoch on this card",
               name_best, wrap=True),
        _of(take_best, Column("best_time_s", "its epoch (s)", "one training epoch there",
               lambda row: time_cell(row, spread=False), better="lower")),
        _of(take_best, quantity_column("images_per_s", help="images of an epoch over its time, at "
                                       "the fastest", keep=8)),
        _of(take_best, quantity_column("images_per_j", help="images of an epoch over its energy, "
                                       "at the fastest", spread=False, keep=5)),
        Column("bought", f"million images per {money}", "at the fastest, by the price of an hour",
               find_bought, better="higher", keep=8),
        Column("bounds", "largest batch", "the largest batch that was trained, and the smallest "
               "that ran out of memory", write_bounds, number=True, keep=6),
        Column("why", "mostly", "the largest share of a profiled step",
               lambda entry: name_reasons(entry.why, most=1) if entry.why else "", wrap=True,
               keep=3),
        Column("remarks", "remarks", "what to know before believing the row", tell_doubts,
               wrap=True, keep=4),
    ]  # fmt: skip
    notes = [
        "Cards are compared only within a group of one number. Epoch, over fp32 and tf32, and "
        "memory: at the batch size and settings that most cards and precisions of a group have. "
        "Fastest: at any batch size and setting that leaves the recipe as it is.",
        *(["Of single runs the fastest is in part the luckiest; --repeats 5 tells."]
          if any(e.best is not None and e.best.repeats == 1 for e in rows) else []),
    ]  # fmt: skip
    yield Sheet("Each card in each precision", columns, rows, notes, headings, file=CSV)


def _list_cards(found: Cards) -> Iterator[tuple[str, list[Entry]]]:
    """The rows of each card, under its name; the first of a group says what that is."""
    for number, group in enumerate(found.groups, 1):
        traits, apart = group.traits, "; ".join(group.tell_apart(found.groups[0]))
        what = f"apart from 1: {apart}" if apart else f"torch {traits['torch']}"
        about = [f"{traits['model']} on {traits['dataset']}", f"at {name_setting(group)}", what]
        for card, entries in groupby(group.entries, lambda entry: entry.card):
            yield " · ".join([f"{number}. {card}", *about]), [*entries]
            about = []


def _tell_duels(found: Cards) -> Iterator[Sheet]:
    rows, headings = join((precision, list(part)) for precision, part in found.duels.items())
    columns = [column for column in list_columns(found) if column.name != "change"]

    def name_duel(effect: Effect) -> str:
        return f"{effect.after} over {effect.before}"

    first: Column[Effect] = Column(
        "duel", "cards", "the first, against the second, at all settings that both have",
        name_duel, wrap=True,
    )  # fmt: skip
    note = (
        "Speed: epoch time of the second over the first's, geometric mean over the cases that both "
        "ran. Judged as python -m bench.compare judges two folders; p is adjusted over all rows."
    )
    yield Sheet("Card against card", [first, *columns], rows, [note], headings)


def _tell_folders(found: Cards) -> Iterator[Sheet]:
    rows = [take_first(part) for _, part in found.cases.groupby("sweep", sort=False)]
    numbers = found.records["sweep"].value_counts()

    def of(name: str, label: str, help: str, **more: Any) -> Column[Row]:
        return Column(name, label, help, lambda row: str(getattr(row, name)), wrap=True, **more)

    yield Sheet(
        "Folders",
        [
            of("sweep", "folder", "of a sweep, or a file of records"),
            of("machine", "card", "what trained"),
            Column("rows", "rows", "records", lambda row: int(numbers[row.sweep])),
            of("torch", "torch", "version"),
            of("cuda", "CUDA", "version that torch was built for"),
            of("driver", "driver", "version"),
            of("commit", "commit", "of the harness"),
            Column("code", "code", "hash of what measures", lambda row: row.code[:CODE],
                   number=False),
            Column("faults", "python -m bench.validate", "what it says",
                   lambda row: found.faults.get(row.sweep, ""), wrap=True),
        ],
        rows,
        empty=("",),
    )  # fmt: skip


CARDS = Section("cards", "What does each card do in each precision?", _tell_cards, Level.TABLE)
DUELS = Section("duels", "Is one card faster than another?", _tell_duels, Level.TABLE)
FOLDERS = Section("folders", "Who measured it, and can it be believed?", _tell_folders)
