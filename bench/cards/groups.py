"""The results of each card in each precision: at a common setting, and at its own best.

Cards are compared only within a group: with the same network and data, and the same torch major
version. The rate of learning, its schedule and the optimizer may differ: they change a step by half
a millisecond at most, and what is learnt is not compared here.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from bench.axis import Trait, Value
from bench.case import AXES, FOLLOWS, SAME_QUESTION, UNTIMED, format_value, list_affecting
from bench.errors import UsageError, nearest
from bench.origin import LABELS
from bench.precision import PRECISIONS
from bench.questions.batch_sizes import Bounds, find_bounds
from bench.questions.report_data import ReportData
from bench.questions.settings import Setting, choose, judge_speeds
from bench.record import MODEL_PARTS, RELIABLE
from bench.store.rows import group
from bench.study.axes import find_default, list_main, name_axis, name_setting, name_value
from bench.study.runs import Result
from bench.text import join_words
from bench.verdict import Ratio

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
