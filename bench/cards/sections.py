"""The tables of the page: each card in each precision, card against card, and their folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.cards.entries import (
    CODE,
    RECIPE,
    CardPair,
    Entry,
    Group,
    list_levers,
    name_precision,
    name_unusual,
)
from bench.case import AXES, UNTIMED
from bench.limits import STEADY
from bench.questions.reasons import name_reasons
from bench.render.cells import (
    Row,
    mark_part,
    number_cell,
    remarks,
    take_first,
    write_ends,
    write_ratio,
)
from bench.render.model import Cell, Level
from bench.render.section import Column, Said, Section, Sheet, join, quantity_column, time_cell
from bench.study.axes import find_default
from bench.study.estimate import TIME
from bench.text import name_first, write_number
from bench.verdict.ratio import Ratio

if TYPE_CHECKING:
    from bench.cards.document import Cards


class Faults(NamedTuple):
    """The failed checks of a folder by `bench.validate`: ``new`` faults, or ``known`` ones that are
    kept."""

    new: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"faults in {name_first(self.new, 4)}"] if self.new else []
        said += [f"known faults in {name_first(self.known, 4)}"] if self.known else []
        return "; ".join(said) or "all checks passed"


def name_group(found: Cards, group: Group) -> str:
    """Return a group's number and cards: ``1. NVIDIA H100 80GB HBM3 and 2 more``."""
    return f"{found.groups.index(group) + 1}. {name_first(group.cards, 1)}"


def name_setup(group: Group) -> str:
    """Return the setting at which the cards of a group are compared."""
    return ", ".join([f"batch size {group.setting.batch_size}", *list_levers(group.setting)])


def _describe_group(found: Cards, group: Group) -> list[str]:
    """Describe what a group trained, its setting, and why it is apart from the first group."""
    setting = group.setting
    usual = {name: find_default(name) for name in RECIPE if name not in ("model", "dataset")}
    what = ", ".join([f"{setting.model} on {setting.dataset}", *name_unusual(setting, usual)])
    apart = "; ".join(group.tell_apart(found.groups[0]))
    return [what, f"at {name_setup(group)}", *([f"apart from 1: {apart}"] if apart else [])]


def _describe_card(row: Row) -> str:
    """Describe what ran on a card, and its power: ``torch 2.11.0+cu130, driver 580.1, 700 W``."""
    power = row.power_limit_w
    said = [f"{name} {value}" for name in ("torch", "driver") if (value := getattr(row, name))]
    said += [f"{power:.0f} W"] if power == power else []
    usual = {name: find_default(name) for name in UNTIMED if not AXES[name].spread}
    return ", ".join([*said, *name_unusual(row, usual)])


def write_speed(speed: Ratio, *rows: Row) -> str:
    """Write a ratio of speeds, with its interval if repeats give one: ``1.91 (1.90–1.92)``."""
    ends = write_ends((speed.low, speed.high), write_ratio)
    return f"{mark_part(*rows)}{write_ratio(speed.value or 0)}" + (f" ({ends})" if ends else "")


def speed_at_best(entry: Entry) -> Cell | None:
    """Return the speed of its fastest epoch over that of the card's fastest fp32 epoch."""
    if entry.over_fp32 is None or entry.over_fp32.value is None:
        return None
    return number_cell(entry.over_fp32.value, write_ratio, bool(mark_part(entry.best, entry.fp32)))


def describe_remarks(found: Cards, row: Row) -> str:
    """Return what to know before believing a case, including faults of its folder."""
    faulty = "faults of its folder" if found.faults[row.sweep].new else ""
    return ", ".join(filter(None, [remarks(row, found.below), faulty]))


def _of(take: Callable[[Entry], Row | None], column: Column[Any]) -> Column[Entry]:
    """Return a column of the case that ``take`` finds; empty if there is none."""

    def say(entry: Entry) -> Said:
        row = take(entry)
        return None if row is None else column.say(row)

    return replace(column, say=say)


def _tabulate_cards(found: Cards) -> Iterator[Sheet]:
    rows, headings = join(_list_cards(found))
    take_equal, take_best = attrgetter("equal"), attrgetter("best")

    def name_entry(entry: Entry) -> str:
        row = entry.equal if entry.equal is not None else entry.best
        return entry.precision if row is None else name_precision(row)

    def describe_over(base: str, entry: Entry) -> Cell | None:
        if (speed := entry.over.get(base)) is None:
            return None
        return Cell(write_speed(speed, entry.equal), speed.value)

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
        if not price or entry.best is None:
            return None
        bought = entry.best.images_per_s * 3600 / (price * entry.best.world_size)
        return Cell(f"{mark_part(entry.best)}{write_number(bought / 1e6)}", bought)

    def describe_doubts(entry: Entry) -> str:
        of = {"equal": entry.equal, "fastest": entry.best}
        said = {name: describe_remarks(found, row) for name, row in of.items() if row is not None}
        if len(set(said.values())) == 1:
            return next(iter(said.values()))
        return "; ".join(f"{name}: {text}" for name, text in said.items() if text)

    money = found.prices.unit if found.prices else ""
    columns: list[Column[Entry]] = [
        Column("precision", "precision", "number formats", name_entry, number=False, always=True),
        _of(take_equal, Column("equal_time_s", "epoch (s)", "one epoch, at the setting above",
               lambda row: time_cell(row, spread=False), better="lower")),
        Column("over_fp32", "over fp32 (×)", "epoch time of fp32 on this card over this one's",
               partial(describe_over, "fp32"), better="higher"),
        Column("over_tf32", "over tf32 (×)", "epoch time of tf32 on this card over this one's",
               partial(describe_over, "tf32"), better="higher", keep=8),
        _of(take_equal, quantity_column("memory_bytes", help="peak of the epoch, at that setting",
                                        keep=6)),
        Column("best", "best at", "batch size and settings of the fastest epoch on this card",
               name_best, wrap=True),
        _of(take_best, Column("best_time_s", "best epoch (s)", "one training epoch there",
               lambda row: time_cell(row, spread=False), better="lower")),
        Column("best_over", "best over fp32 (×)", "the fastest epoch of fp32 on this "
               "card over this one", speed_at_best, better="higher", keep=7),
        _of(take_best, quantity_column("images_per_s", help="images of an epoch over its time, at "
                                       "the fastest", keep=8)),
        _of(take_best, quantity_column("images_per_j", help="images of an epoch over its energy, "
                                       "at the fastest", spread=False, keep=5)),
        Column("bought", f"million images per {money}", "at the fastest, by the price of an hour",
               find_bought, better="higher", keep=8),
        Column("bounds", "largest batch", "the largest batch that was trained at these settings, "
               "and the smallest that ran out of memory", write_bounds, number=True, keep=5),
        Column("why", "mostly", "what takes most of a step, of the largest batch with a profile",
               lambda entry: name_reasons(entry.why) if entry.why else "", wrap=True,
               keep=3),
        Column("remarks", "remarks", "what to know before believing the row", describe_doubts,
               wrap=True, keep=8),
    ]  # fmt: skip
    notes = [
        "Cards are compared only within a group of one number. Epoch, over fp32 and tf32, and "
        "memory: at the batch size and settings that most cards of a group have. Best: at the "
        "fastest of the batch sizes and settings that were tried on a card. Their learning rates "
        "and optimizers may differ, which changes a step by half a millisecond at most.",
        *(["Of single runs, the fastest may only be the luckiest; use --repeats 5."]
          if any(e.best is not None and e.best.repeats == 1 and e.best.kind == "measured"
                 for e in rows) else []),
    ]  # fmt: skip
    if found.prices:
        cards = dict.fromkeys(entry.card for entry in rows)
        priced = [f"{card} {price:g}" for card in cards if (price := found.prices.find(card))]
        notes.append(f"{found.prices.unit} an hour: {'; '.join(priced)}.")
    title = "Each card in each precision"
    yield Sheet(title, columns, rows, notes, headings)


def _list_cards(found: Cards) -> Iterator[tuple[str, list[Entry]]]:
    """Yield a heading and rows for each card; a group's first heading describes the group."""
    for number, group in enumerate(found.groups, 1):
        about = _describe_group(found, group)
        for card, entries in groupby(group.entries, lambda entry: entry.card):
            told = filter(None, [f"{number}. {card}", _describe_card(group.of_card[card]), *about])
            yield " · ".join(told), [*entries]
            about = []


def _tabulate_card_pairs(found: Cards) -> Iterator[Sheet]:
    pairs = [(number, pair) for number, group in enumerate(found.groups, 1)
             for pair in group.pairs]  # fmt: skip
    parts = groupby(pairs, lambda one: f"{one[0]}. {one[1].precision}")
    rows, headings = join((name, [pair for _, pair in part]) for name, part in parts)

    def name_pair(pair: CardPair) -> str:
        return f"{pair.fast.card} over {pair.slow.card}"

    def describe_speed(pair: CardPair) -> Cell:
        speed = f"{mark_part(pair.fast, pair.slow)}{write_ratio(pair.speed.value or 0)}×"
        return Cell(speed, pair.speed.value)

    def describe_verdict(pair: CardPair) -> str:
        word = TIME.word(pair.speed.invert().judge(STEADY))
        return f"{word}: {pair.speed.lack}" if pair.speed.lack else word

    def describe_doubts(pair: CardPair) -> str:
        said = {row.card: describe_remarks(found, row) for row in (pair.fast, pair.slow)}
        return "; ".join(f"{card}: {text}" for card, text in said.items() if text)

    columns: list[Column[CardPair]] = [
        Column("pair", "cards", "the first, against the second", name_pair, wrap=True),
        Column("setting", "at", "the setting of both", lambda pair: ", ".join(
            [f"batch size {pair.fast.batch_size}", *list_levers(pair.fast)]), wrap=True, keep=8),
        Column("speed", "speed", "epoch time of the second over the first's", describe_speed,
               better="higher"),
        Column("interval", "95 % interval", "of the speed",
               lambda pair: write_ends((pair.speed.low, pair.speed.high), write_ratio), keep=8),
        Column("verdict", "verdict", f"against a margin of {100 * STEADY:.0f} %", describe_verdict,
               wrap=True),
        Column("remarks", "remarks", "what to know before believing it", describe_doubts, wrap=True,
               keep=6),
    ]  # fmt: skip
    note = (
        "Judged as python -m bench.compare judges a case of two folders, which also says in what "
        "else they differ; the verdicts of a group are one family."
    )
    yield Sheet("Card against card", columns, rows, [note], headings)


def _tabulate_folders(found: Cards) -> Iterator[Sheet]:
    parts = found.cases.groupby(["sweep", "machine", "torch"], sort=False)
    rows = [take_first(part) for _, part in parts]
    numbers = found.records.groupby(["sweep", "machine"]).size()

    def of(name: str, label: str, help: str) -> Column[Row]:
        return Column(name, label, help, lambda row: str(getattr(row, name)), wrap=True)

    yield Sheet(
        "Folders",
        [
            of("sweep", "folder", "of a sweep, or a file of records"),
            of("machine", "card", "what trained"),
            Column("rows", "rows", "records", lambda row: int(numbers[row.sweep, row.machine])),
            of("torch", "torch", "version"),
            of("cuda", "CUDA", "version that torch was built for"),
            of("driver", "driver", "version"),
            of("commit", "commit", "of the harness"),
            Column("code", "code", "hash of what measures", lambda row: row.code[:CODE],
                   number=False),
            Column("faults", "python -m bench.validate", "what it says",
                   lambda row: str(found.faults[row.sweep]), wrap=True),
        ],
        rows,
        empty=("",),
    )  # fmt: skip


CARDS = Section("cards", "What does each card do in each precision?", _tabulate_cards, Level.TABLE)
CARD_PAIRS = Section("pairs", "Is one card faster than another?", _tabulate_card_pairs, Level.TABLE)
FOLDERS = Section("folders", "Who measured it, and can it be believed?", _tabulate_folders)
