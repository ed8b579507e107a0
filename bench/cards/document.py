"""The results of each card in each precision, at a common setting and at its own best, and the page
that shows them.

Cards are compared only within a group: with the same network and data, and the same torch major
version. The rate of learning, its schedule and the optimizer may differ: they change a step by half
a millisecond at most, and what is learnt is not compared here.
"""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, groupby, product
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bench.axis import Trait, Value
from bench.case import AXES, FOLLOWS, SAME_QUESTION, UNTIMED, format_value, list_affecting
from bench.errors import UsageError, nearest
from bench.limits import STEADY
from bench.origin import LABELS
from bench.precision import PRECISIONS
from bench.questions.batch_sizes import Bounds, find_bounds
from bench.questions.notices import name_folder, warn
from bench.questions.overview import OVERVIEW
from bench.questions.report_data import ReportData, gather
from bench.questions.settings import Setting, choose, judge_speeds
from bench.record import MODEL_PARTS, RELIABLE
from bench.render.section import Column, Section, Sheet, join, quantity_column, write_quantity
from bench.render.table import (
    Answer,
    Cell,
    Level,
    NextStep,
    Notice,
    mark_part,
    remarks,
    write_ends,
    write_ratio,
)
from bench.report.document import Report
from bench.store.rows import group
from bench.study.axes import find_default, list_main, name_axis, name_setting, name_value
from bench.study.estimate import TIME
from bench.study.quantities import QUANTITIES
from bench.study.runs import SOURCE, Result
from bench.study.sweeps import Sweep
from bench.text import count, join_words, name_first, write_number
from bench.validate.claims import FAULT, KNOWN, validate
from bench.verdict import Ratio, Verdict

BASELINES = ("fp32", "tf32")
"""The precisions with which each one is compared, on the same card."""

RECIPE = (
    *(
        name
        for name in list_affecting(Trait.LEARNING)
        if name not in ("batch_size", *UNTIMED) and name not in FOLLOWS["precision"]
    ),
    *list_affecting(Trait.RECIPE),
)
"""Axes in which compared cards agree: what is trained, and in what."""

LEVERS = tuple(
    name
    for name in AXES
    if name not in (*RECIPE, *UNTIMED, *SAME_QUESTION, "precision", "batch_size", "device")
    and name not in FOLLOWS["precision"]
)
"""Axes that change the speed of a step, but not the recipe."""

DATA = {"dataset_fingerprint": "images", "train_images": "number of images"} | {
    name: what for name, what in MODEL_PARTS.items() if name != "model_source"
}
"""Columns in which compared cards agree, as far as they are known, and what each describes."""

_tell_setting = attrgetter("batch_size", *LEVERS)


@dataclass(frozen=True)
class Entry:
    """A card in one precision."""

    card: str
    precision: str
    usual: Result  # a case at the batch size and levers at which its group is compared
    equal: Result | None  # its own case there, if it has one
    base: Mapping[str, Result]  # this card's cases there that it is compared with, by precision
    over: Mapping[str, Ratio]  # how many times as fast it is, by the same precisions
    # what `choose` recommends of all its batch sizes and `LEVERS`, or else the case of the lowest
    # time, whatever its warnings; None if none was timed
    best: Result | None
    bounds: Bounds  # the largest batch that fits, the smallest that fails


class CardPair(NamedTuple):
    """A card compared with a slower one in a precision, at a setting that both have; ``speed`` is
    how many times as fast it is."""

    precision: str
    fast: str  # the cards
    slow: str
    cases: tuple[Result, Result]
    speed: Ratio


@dataclass(frozen=True)
class Group:
    """Cards that may be compared, the fastest first; ``traits`` are what they share, by its
    name."""

    traits: Mapping[str, Any]
    entries: Sequence[Entry]
    pairs: Sequence[CardPair]
    of_card: Mapping[str, Result]  # any case of each card, to say what ran it

    @property
    def setting(self) -> Result:
        return self.entries[0].usual

    @property
    def cards(self) -> list[str]:
        return list(dict.fromkeys(entry.card for entry in self.entries))

    def tell_apart(self, other: Group) -> list[str]:
        """List how it differs from another group: ``lr 0.1, not 0.01``."""
        told: list[str] = []
        unknown: list[str] = []
        for name, value in self.traits.items():
            theirs = other.traits[name]
            if value != theirs and name in DATA.values():  # a hash says no more than that
                if value and theirs:
                    told.append(f"other {name}")
                else:
                    unknown.append(name)
            elif value != theirs:
                told.append(f"{name} {value}, not {theirs}".strip())
        if unknown and not told:
            told.append(f"{join_words(unknown)} of one of them are not recorded")
        return told


def find_groups(found: ReportData) -> list[Group]:
    """Group cards that may be compared. Measured groups come first, then published and unknown
    ones; in each, those with a sound time, then with most cards and precisions."""
    known = _fill_known(found.results)
    names = _name_cards(found.results, known)
    tell = attrgetter(*RECIPE, "kind")

    def place(row: Result) -> tuple[Any, ...]:
        of = known[row.cell]
        return tell(row), *(of[name] for name in DATA), of["torch"].partition(".")[0]

    groups = [
        _make_group(found, part, known[part[0].cell], names)
        for part in group(found.results, place)
        if any(row.status in RELIABLE for row in part)
    ]
    order = ["measured", *reversed(LABELS)]
    return sorted(groups, key=lambda one: (
        order.index(next(iter(one.of_card.values())).kind),
        not any(rate_card(entry)[0] for entry in one.entries),
        -len(one.cards),
        -len(one.entries),
    ))  # fmt: skip


def _fill_known(results: Sequence[Result]) -> dict[int, dict[str, Any]]:
    """Return by cell what groups and cards are told apart by. A missing value is filled in if its
    folder has only one."""
    found: dict[int, dict[str, Any]] = {row.cell: {} for row in results}
    same = attrgetter("sweep", "machine", "model", "dataset", "input", "classes")
    for part in group(results, same):
        for name in ("gpu_uuid", "torch", *DATA):
            own = {row.cell: getattr(row, name) for row in part}
            held = {value for value in own.values() if value == value and value != ""}
            only = held.pop() if len(held) == 1 else ""
            for cell, value in own.items():
                found[cell][name] = value if value == value and value != "" else only
    return found


def _name_cards(
    results: Sequence[Result], known: Mapping[int, Mapping[str, Any]]
) -> dict[int, str]:
    """Return by cell the name of its card. One physical GPU is one card, and so are GPUs of one
    name in a folder, as in its report; other cards of one name get their folder's name appended."""
    owner = {row.cell: known[row.cell]["gpu_uuid"] or row.sweep for row in results}
    held: dict[str, dict[str, str]] = {}
    for row in results:
        held.setdefault(row.machine, {}).setdefault(owner[row.cell], row.sweep)
    return {
        row.cell: f"{row.machine} · {held[row.machine][owner[row.cell]]}"
        if len({*held[row.machine].values()}) > 1
        else row.machine
        for row in results
    }


def _make_group(
    found: ReportData,
    results: Sequence[Result],
    known: Mapping[str, Any],
    names: Mapping[int, str],
) -> Group:
    cards = list(dict.fromkeys(names[row.cell] for row in results))
    timed = [row for row in results if row.status in RELIABLE]
    first = timed[0]
    traits: dict[str, Any] = {n: name_value(n, getattr(first, n), {}) for n in RECIPE}
    traits = {name_axis(name): value for name, value in traits.items()}
    traits |= {what: known[name] for name, what in DATA.items()}
    traits["torch"] = known["torch"].partition(".")[0] or "unknown"
    traits[""] = LABELS.get(first.kind, first.kind)
    # of a card's cases the first counts: without doubts, with most of an epoch and most repeats
    timed.sort(key=attrgetter("started_at"), reverse=True)
    timed.sort(key=lambda row: (not row.trusted, -row.part, -row.repeats, row.seed))
    places = [(names[row.cell], _tell_setting(row)) for row in timed]
    timed = [timed[at] for at in list_main(timed, places)]
    usual = _choose_setting(timed, names)
    ours = {(row.sweep, row.machine): names[row.cell] for row in results}
    entries: list[Entry] = []
    for card in cards:
        mine = [row for row in timed if names[row.cell] == card]
        every: list[Any] = [row for row in results if names[row.cell] == card]
        every += [
            run
            for run in found.probes
            if ours.get((run.sweep, run.machine)) == card
            and all(getattr(run, name) == getattr(first, name) for name in RECIPE)
        ]
        entries += _list_entries(card, usual, mine, every)
    speeds = {card: max(rate_card(e) for e in entries if e.card == card) for card in cards}
    entries.sort(key=lambda entry: speeds[entry.card], reverse=True)
    ranked = list(dict.fromkeys(entry.card for entry in entries))
    pairs = _judge_pairs(ranked, timed, usual, names)
    return Group(traits, entries, pairs, {names[row.cell]: row for row in reversed(timed)})


def rate_card(entry: Entry) -> tuple[bool, float]:
    """Return the sort key of a card: images per second at its best; doubted ones come last."""
    best = entry.best
    return (False, 0.0) if best is None else (best.trusted, float(best.images_per_s))


def _choose_setting(timed: Sequence[Result], names: Mapping[int, str]) -> Result:
    """Return a case at the batch size and levers that most cards have. Of several settings choose
    the one with most undoubted precisions, then the plainest, then the largest batch."""

    def rate(part: Sequence[Result]) -> tuple[int, ...]:
        def count(rows: Sequence[Result]) -> int:
            return len({(names[row.cell], row.precision) for row in rows})

        sure, first = [row for row in part if row.trusted], part[0]
        several = len({names[row.cell] for row in part})
        plain = -len(list_levers(first))
        return several, count(sure), count(part), plain, int(first.batch_size)

    return max(group(timed, _tell_setting), key=rate)[0]


def list_levers(row: Result, usual: Result | None = None) -> list[str]:
    """List the levers of a case that are not at their defaults, or not as in a ``usual`` case."""
    return name_unusual(row, {
        name: getattr(usual, name) if usual else find_default(name) for name in LEVERS
    })  # fmt: skip


def name_precision(row: Result) -> str:
    """Name the precision of a case, with those of its options that are not at their defaults."""
    usual = {name: find_default(name) for name in FOLLOWS["precision"]}
    usual["loss_scale"] = format_value(PRECISIONS[row.precision].default_loss_scale)
    return " · ".join([row.precision, *name_unusual(row, usual)])


def name_unusual(row: Result, usual: Mapping[str, Value]) -> list[str]:
    """List the axes in which a case differs from ``usual``, each with its value."""
    return [
        name_setting(name, name_value(name, getattr(row, name), {}))
        for name, value in usual.items()
        if getattr(row, name) != value
    ]


def _list_entries(
    card: str, usual: Result, timed: Sequence[Result], every: Sequence[Any]
) -> Iterator[Entry]:
    """Yield a card's entries, from its ``timed`` cases, best evidence first, and ``every`` case and
    probe."""
    here = [row for row in timed if _tell_setting(row) == _tell_setting(usual)]
    equal = {row.precision: row for row in reversed(here)}
    pairs = [
        (base, name)
        for at, base in enumerate(BASELINES)
        for name in PRECISIONS
        if base in equal and equal[base].settled
        if name in equal and name not in BASELINES[: at + 1]
    ]
    ratios = judge_speeds([(equal[name], equal[base]) for base, name in pairs])
    over = dict(zip(pairs, ratios, strict=True))
    plain = [r for r in every if all(getattr(r, n) == getattr(usual, n) for n in LEVERS)]
    for precision in (name for name in PRECISIONS if any(r.precision == name for r in every)):
        own = [row for row in timed if row.precision == precision]
        firsts = [Setting((same[0],)) for same in group(own, _tell_setting)]
        chosen = choose(firsts)
        lowest = min((one.best for one in firsts if one.timed),
                     key=attrgetter("epoch_time_s"), default=None)  # fmt: skip
        bases = [base for base in BASELINES if (base, precision) in over]
        yield Entry(
            card,
            precision,
            usual,
            equal.get(precision),
            {base: equal[base] for base in bases},
            {base: over[base, precision] for base in bases},
            chosen.best if chosen else lowest,
            find_bounds([row for row in plain if row.precision == precision]),
        )


def _judge_pairs(
    cards: Sequence[str], timed: Sequence[Result], usual: Result, names: Mapping[int, str]
) -> list[CardPair]:
    """Compare each card with each slower one in each precision, judged as one family: at the
    group's setting, or else at the plainest and largest that both have; with equal parts of an
    epoch, if there are any, and with most repeats of both."""
    lines: dict[tuple[str, str], dict[Any, list[Result]]] = {}
    for row in timed:
        line = lines.setdefault((row.precision, names[row.cell]), {})
        line.setdefault(_tell_setting(row), []).append(row)
    pairs: list[tuple[str, str, tuple[Result, Result]]] = []
    for precision in PRECISIONS:
        for fast, slow in combinations(cards, 2):
            ours, theirs = (lines.get((precision, card), {}) for card in (fast, slow))
            keys = [key for key in ours if key in theirs]
            if not keys:
                continue
            key = max(keys, key=lambda key: (
                key == _tell_setting(usual),
                -len(list_levers(ours[key][0])),
                ours[key][0].batch_size,
            ))  # fmt: skip
            both = max(product(ours[key], theirs[key]), key=lambda ends: (
                ends[0].part == ends[1].part, min(r.repeats for r in ends), ends[1].part
            ))  # fmt: skip
            pairs.append((fast, slow, both))
    judged = judge_speeds([both for *_, both in pairs])
    return [
        CardPair(both[0].precision, fast, slow, both, speed)
        for (fast, slow, both), speed in zip(pairs, judged, strict=True)
    ]


UNIT = "unit"
"""The key of the currency; all others are cards."""


@dataclass(frozen=True)
class Prices:
    """Prices per hour, by the name of a card or a part of it; ``unit`` is the currency."""

    unit: str
    of_hour: Mapping[str, float]

    def find(self, card: str) -> float | None:
        """Return the price per hour of a card, or None: by the longest name that is a part of the
        card's name, in whole words, so that A10 does not match an A100."""
        held = [name for name in self.of_hour if _is_named(name, card)]
        return self.of_hour[max(held, key=len)] if held else None


def read_prices(file: Path, cards: Iterable[str]) -> Prices:
    """Read lines such as ``"H100 80GB" = 2.49`` (TOML), and ``unit = "EUR"``.

    Raises UsageError: the file cannot be read, a price is not a number above 0, or a name matches
    none of ``cards``.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--price {file}: {error.strerror}; give a file of prices") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--price {file}: {error}") from None
    unit, known = table.pop(UNIT, "unit of money"), [*dict.fromkeys(cards)]
    if not isinstance(unit, str):
        raise UsageError(f'--price {file}: {UNIT} should be text, such as "EUR"')
    for name, price in table.items():
        if type(price) not in (int, float) or not 0 < price < math.inf:
            raise UsageError(f"--price {file}: {name!r} should be a price of an hour above 0")
        if not any(_is_named(name, card) for card in known):
            raise UsageError(f"--price {file}: no card is {name!r}; {nearest(name, known)}")
    return Prices(unit, table)


def _is_named(name: str, card: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", card, re.IGNORECASE))


# ----------------------------------------------------------------------------------------- document


MOST_CARDS = 4
"""The most cards of a group that sentences name."""

CODE = 7  # digits of a hash that are shown


class Faults(NamedTuple):
    """The failed checks of a folder by `bench.validate`: ``new`` faults, or ``known`` ones that are
    kept."""

    new: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"faults in {name_first(self.new, 4)}"] if self.new else []
        said += [f"known faults in {name_first(self.known, 4)}"] if self.known else []
        return "; ".join(said) or "all checks passed"


def write_speed(speed: Ratio, *rows: Result) -> str:
    """Write a ratio of speeds, with its interval if repeats give one: ``1.91 (1.90–1.92)``."""
    ends = write_ends((speed.low, speed.high), write_ratio)
    return f"{mark_part(*rows)}{write_ratio(speed.value or 0)}" + (f" ({ends})" if ends else "")


def _name_setup(row: Result, usual: Result | None = None) -> str:
    return ", ".join([f"batch size {row.batch_size}", *list_levers(row, usual)])


def _tabulate_cards(found: Cards) -> Iterator[Sheet]:
    rows, headings = join(_list_cards(found))
    take_equal, take_best = attrgetter("equal"), attrgetter("best")

    def name_entry(entry: Entry) -> str:
        row = entry.equal if entry.equal is not None else entry.best
        return entry.precision if row is None else name_precision(row)

    def say_over(base: str, entry: Entry) -> Cell | None:
        if (speed := entry.over.get(base)) is None or entry.equal is None:
            return None
        return Cell(write_speed(speed, entry.equal, entry.base[base]), speed.value)

    def say_best(entry: Entry) -> Cell | None:
        if (best := entry.best) is None:
            return None
        setup = [str(best.batch_size), *list_levers(best, entry.usual)]
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

    def say_doubts(entry: Entry) -> str:
        of = {"equal": entry.equal, "best": entry.best}
        said = {name: found.list_doubts(row) for name, row in of.items() if row is not None}
        if len(set(said.values())) == 1:
            return next(iter(said.values()))
        return "; ".join(f"{name}: {text}" for name, text in said.items() if text)

    def of(name: str, take: Callable[[Entry], Any], **head: Any) -> Column[Entry]:
        return quantity_column(name, take, spread=False, **head)

    money = found.prices.unit if found.prices else ""
    columns: list[Column[Entry]] = [
        Column("precision", "precision", "number formats", name_entry, number=False, always=True),
        replace(of("epoch_time_s", take_equal, label="epoch"), name="equal_time_s",
                help="one epoch, at the setting above"),
        *(Column(f"over_{base}", f"over {base} (×)", f"epoch time of {base} on this card over this "
                 "one's", partial(say_over, base), better="higher", keep=keep)
          for base, keep in (("fp32", 9), ("tf32", 8))),
        of("memory_bytes", take_equal, help="peak of the epoch, at that setting", keep=6),
        Column("best", "best at", "the smallest batch within a tenth of the lowest time on this "
               "card, and its settings", say_best, wrap=True),
        replace(of("epoch_time_s", take_best, label="best epoch"), name="best_time_s",
                help="one training epoch there"),
        of("images_per_s", take_best, help="images of an epoch over its time, there", keep=8),
        of("images_per_j", take_best, help="images of an epoch over its energy, there", keep=5),
        Column("bought", f"million images per {money}", "at that setting, by the price of an hour",
               find_bought, better="higher", keep=8),
        Column("bounds", "largest batch", "the largest batch that was trained at these settings, "
               "and the smallest that ran out of memory", write_bounds, number=True, keep=5),
        Column("remarks", "remarks", "what to know before believing the row", say_doubts,
               wrap=True, keep=8),
    ]  # fmt: skip
    notes = [
        "Epoch, over fp32 and tf32, and memory: at the batch size and settings that most cards of "
        "a group have. Best: of what was tried on a card. Learning rates and optimizers may "
        "differ, which changes a step by half a millisecond at most.",
    ]
    if any(e.best and e.best.repeats == 1 and e.best.kind == "measured" for e in rows):
        notes.append("Of single runs, the fastest may only be the luckiest; use --repeats 5.")
    if found.prices:
        cards = dict.fromkeys(entry.card for entry in rows)
        priced = [f"{card} {price:g}" for card in cards if (price := found.prices.find(card))]
        notes.append(f"{found.prices.unit} an hour: {'; '.join(priced)}.")
    yield Sheet("Each card in each precision", columns, rows, notes, headings)


def _list_cards(found: Cards) -> Iterator[tuple[str, list[Entry]]]:
    """Yield a heading and rows for each card; a group's first heading describes the group."""
    for number, one in enumerate(found.groups, 1):
        usual = {n: find_default(n) for n in RECIPE if n not in ("model", "dataset")}
        what = f"{one.setting.model} on {one.setting.dataset}"
        about = [", ".join([what, *name_unusual(one.setting, usual)])]
        about.append(f"at {_name_setup(one.setting)}")
        if apart := "; ".join(one.tell_apart(found.groups[0])):
            about.append(f"apart from 1: {apart}")
        for card, entries in groupby(one.entries, lambda entry: entry.card):
            told = filter(None, [f"{number}. {card}", _describe_card(one.of_card[card]), *about])
            yield " · ".join(told), [*entries]
            about = []


def _describe_card(row: Result) -> str:
    """Describe what ran on a card, and its power: ``torch 2.11.0+cu130, driver 580.1, 700 W``."""
    power = row.power_limit_w
    said = [f"{name} {value}" for name in ("torch", "driver") if (value := getattr(row, name))]
    said += [f"{power:.0f} W"] if power == power else []
    usual = {name: find_default(name) for name in UNTIMED if name != "seed"}
    return ", ".join([*said, *name_unusual(row, usual)])


def _tabulate_pairs(found: Cards) -> Iterator[Sheet]:
    pairs = [(number, pair) for number, one in enumerate(found.groups, 1) for pair in one.pairs]
    parts = groupby(pairs, lambda one: f"{one[0]}. {one[1].precision}")
    rows, headings = join((name, [pair for _, pair in part]) for name, part in parts)

    def say_speed(pair: CardPair) -> Cell:
        speed = f"{mark_part(*pair.cases)}{write_ratio(pair.speed.value or 0)}×"
        return Cell(speed, pair.speed.value)

    def say_verdict(pair: CardPair) -> str:
        word = TIME.word(pair.speed.invert().judge(STEADY))
        return f"{word}: {pair.speed.lack}" if pair.speed.lack else word

    def say_doubts(pair: CardPair) -> str:
        both = zip((pair.fast, pair.slow), pair.cases, strict=True)
        said = ((card, found.list_doubts(row)) for card, row in both)
        return "; ".join(f"{card}: {text}" for card, text in said if text)

    columns: list[Column[CardPair]] = [
        Column("pair", "cards", "the first, against the second",
               lambda pair: f"{pair.fast} over {pair.slow}", wrap=True),
        Column("setting", "at", "the setting of both", lambda pair: _name_setup(pair.cases[0]),
               wrap=True, keep=8),
        Column("speed", "speed", "epoch time of the second over the first's", say_speed,
               better="higher"),
        Column("interval", "95 % interval", "of the speed",
               lambda pair: write_ends((pair.speed.low, pair.speed.high), write_ratio), keep=8),
        Column("verdict", "verdict", f"against a margin of {100 * STEADY:.0f} %", say_verdict,
               wrap=True),
        Column("remarks", "remarks", "what to know before believing it", say_doubts, wrap=True,
               keep=6),
    ]  # fmt: skip
    note = (
        "Judged as python -m bench.compare judges a case of two folders, which also says in what "
        "else they differ; the verdicts of a group are one family."
    )
    yield Sheet("Card against card", columns, rows, [note], headings)


def _tabulate_folders(found: Cards) -> Iterator[Sheet]:
    rows = [part[0] for part in group(found.results, attrgetter(*SOURCE, "torch"))]

    def of(name: str, label: str, help: str) -> Column[Result]:
        return Column(name, label, help, lambda row: str(getattr(row, name)), wrap=True)

    def count_rows(row: Result) -> int:
        return sum((run.sweep, run.machine) == (row.sweep, row.machine) for run in found.runs)

    yield Sheet(
        "Folders",
        [
            of("sweep", "folder", "of a sweep, or a file of records"),
            of("machine", "card", "what trained"),
            Column("rows", "rows", "records", count_rows),
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
PAIRS = Section("pairs", "Is one card faster than another?", _tabulate_pairs, Level.TABLE)
FOLDERS = Section("folders", "Who measured it, and can it be believed?", _tabulate_folders)


@dataclass(frozen=True)
class Cards(Report):
    """A report on cards; ``prices`` are per hour, if known."""

    prices: Prices | None = None

    sections: ClassVar[tuple[Section, ...]] = (
        CARDS,
        PAIRS,
        FOLDERS,
        replace(OVERVIEW, level=Level.DETAIL),
    )
    figures: ClassVar[tuple[str, ...]] = ("images-per-s",)
    pictured: ClassVar[bool] = False

    @cached_property
    def groups(self) -> list[Group]:
        return find_groups(self)

    @cached_property
    def title(self) -> str:
        cards = [card for one in self.groups for card in one.cards]
        alone = 1 < len(self.groups) == len(cards)
        return count(len({*cards}), "card") + "; none can be compared with another" * alone

    @cached_property
    def subject(self) -> str:
        return f"{self.title}: {name_first([card for g in self.groups for card in g.cards], 3)}"

    @cached_property
    def constants(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        return tuple(
            Answer(f"{number}. {name_first(one.cards, 1)}", (self._describe_group(one),))
            for number, one in enumerate(self.groups, 1)
        )

    @cached_property
    def faults(self) -> Mapping[str, Faults]:
        """What `bench.validate` finds, by sweep."""
        return {sweep.name: _find_faults(sweep) for sweep in self.sweeps}

    def list_doubts(self, row: Result) -> str:
        """Return what to know before believing a case, including faults of its folder."""
        faulty = "faults of its folder" if self.faults[row.sweep].new else ""
        return ", ".join(filter(None, [remarks(row, self.below), faulty]))

    @cached_property
    def warnings(self) -> tuple[Notice, ...]:
        failed = [sweep for sweep in self.sweeps if any(self.faults[sweep.name])]
        told = "; ".join(f"{sweep.name}: {self.faults[sweep.name]}" for sweep in failed) + "."
        # a line of the screen has room for one folder, and is cut at a comma
        more = f", and so for {len(failed) - 1} more" if len(failed) > 1 else ""
        command = shlex.join(["python", "-m", "bench.validate", *map(name_folder, failed[:1])])
        mend = f"{command} tells{more}."
        known = not any(self.faults[sweep.name].new for sweep in failed)
        label = "Known faults" if known else "Faults"
        return (*([Notice(label, told, mend)] if failed else []), *super().warnings)

    @cached_property
    def _notices(self) -> list[Notice]:
        # `bench.validate` says what was planned and has no row; headings say what ran a card
        return warn(self.runs, self.results, self.everything, across=False)

    @cached_property
    def next_step(self) -> NextStep | None:
        return NextStep("measure your own card, and send it in", "make card")

    def _describe_group(self, one: Group) -> str:
        """Say what a group's fastest card is best trained in, how much faster it is than other
        cards, and why it is apart from the first group."""
        entry = max(one.entries, key=rate_card)
        best = entry.best
        assert best is not None
        time = write_quantity(QUANTITIES["epoch_time_s"], best, spread=False)
        card = ""
        if len(one.cards) > 1:
            faster = max(rate_card(other)[1] for other in one.entries) > best.images_per_s
            card = f"{entry.card} is the fastest{' without a warning' * faster}: "
        told = f"{card}{time} an epoch, in {entry.precision} ({_name_setup(best)})"
        if not best.trusted:
            own = remarks(best, self.below)  # empty if all share it, as that is said below
            told += ", but every case has a warning" + (f" (this one: {own})" if own else "")
        if over := [
            f"{write_speed(entry.over[base], entry.usual, row)} times as fast as {base}"
            f"{'' if row.trusted else ' (which has a warning)'}"
            for base, row in entry.base.items()
        ]:
            told += f"; at {_name_setup(one.setting)}, {' and '.join(over)}"
        apart = one.tell_apart(self.groups[0])
        why = f" Not compared with 1: {name_first(apart, 3, '; ')}." if apart else ""
        return f"{told}.{_describe_pairs(entry, one.pairs)}{why}"


def _find_faults(sweep: Sweep) -> Faults:
    checks = validate(sweep.path, sweep)["checks"]
    new, known = (
        tuple(check["name"] for check in checks if check["result"] == result)
        for result in (FAULT, KNOWN)
    )
    return Faults(new, known)


def _describe_pairs(entry: Entry, pairs: Sequence[CardPair]) -> str:
    """`` In fp16 it is 1.42 times as fast as Y (95 %: 1.40 to 1.44).``"""
    pairs = [pair for pair in pairs if pair.fast == entry.card]
    shared = {pair.precision for pair in pairs}
    precision = entry.precision if entry.precision in shared else min(shared, default="")
    pairs = [pair for pair in pairs if pair.precision == precision]
    said = []
    for pair in pairs[:MOST_CARDS]:
        ends = write_ends((pair.speed.low, pair.speed.high), write_ratio, " to ")
        certain = pair.speed.judge(STEADY) is not Verdict.AMBIGUOUS
        sure = f" (95 %: {ends}{'' if certain else ', not certain'})" if ends else ""
        value = f"{mark_part(*pair.cases)}{write_ratio(pair.speed.value or 0)}"
        size = pair.cases[0].batch_size
        said.append(f"{value} times as fast as {pair.slow} at batch size {size}{sure}")
    left = len(pairs) - len(said)
    more = f"; and so on for {count(left, 'more card')}" if left else ""
    return f" In {precision} it is {'; '.join(said)}{more}." if said else ""


def build(sweeps: Sequence[Sweep], home: Path, prices: Prices | None = None) -> Cards:
    return gather(sweeps, make=partial(Cards, home=home, prices=prices))
