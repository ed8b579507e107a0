"""The results of each card in each precision, at a common setting and at its own best, and the page
that shows them.

Cards are compared only within a group: with the same network and data, and the same torch major
version. The rate of learning, its schedule and the optimizer may differ: they change a step by half
a millisecond at most, and what is learnt is not compared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bench.answers.money import Tariff, cost_column
from bench.answers.render.table import (
    Answer,
    Cell,
    Column,
    NextStep,
    Prominence,
    Section,
    Sheet,
    find_wording,
    join,
    mark_part,
    quantity_column,
    remarks,
    write_ends,
    write_ratio,
    write_time,
)
from bench.answers.report_data import ReportData, gather
from bench.answers.settings import Setting, choose, choose_base, judge_speeds
from bench.base.limits import STEADY
from bench.base.origin import LABELS
from bench.base.plain import dump_document
from bench.base.text import count, join_words, name_first
from bench.networks.workloads import OWN
from bench.report.document import Report
from bench.report.files import list_warnings
from bench.results.store.rows import group
from bench.results.study.axes import list_main, name_setting
from bench.results.study.comparable import AMOUNT, refuse_alone, refuse_base
from bench.results.study.estimate import TIME
from bench.results.study.runs import Result
from bench.results.study.sweeps import SweepFolder
from bench.results.study.warnings import SAID_BELOW, WARNINGS
from bench.results.verdict import Ratio
from bench.schema.axis import Trait, Value, name_axis
from bench.schema.case import (
    AXES,
    FOLLOWS,
    SAME_QUESTION,
    UNTIMED,
    lay_out,
    list_affecting,
    list_axes,
    spell_value,
)
from bench.schema.optimization import UNFUSED
from bench.schema.precision import PRECISIONS
from bench.schema.record import MODEL_PARTS, RELIABLE

_BASELINES = ("fp32", "tf32")
"""The precisions with which each one is compared, on the same card."""

_RECIPE = (
    *(
        name
        for name in list_affecting(Trait.LEARNING)
        if name not in ("batch_size", *UNTIMED) and name not in FOLLOWS["precision"]
    ),
    *list_affecting(Trait.RECIPE),
)
"""Axes in which compared cards agree: what is trained, and in what."""

_LEVERS = tuple(
    name
    for name in AXES
    if name not in (*_RECIPE, *UNTIMED, *SAME_QUESTION, "precision", "batch_size", "device")
    and name not in FOLLOWS["precision"]
)
"""Axes that change the speed of a step, but not the recipe."""

_DATA = {"dataset_fingerprint": "images", "train_images": "number of images"} | {
    name: what for name, what in MODEL_PARTS.items() if name != "model_source"
}
"""Columns in which compared cards agree, and what each describes."""

_tell_setting = attrgetter("batch_size", *_LEVERS)


@dataclass(frozen=True)
class Entry:
    """A card in one precision."""

    card: str  # as `ran_on` names it: with two versions of torch, or of the harness, it is two
    precision: str
    equal: Result | None  # its case at the setting at which its group is compared
    base: Mapping[str, Result]  # this card's cases there that it is compared with, by precision
    over: Mapping[str, Ratio]  # how many times as fast it is, by the same precisions
    # the case of the lowest time that can be trusted, of all its batch sizes and `_LEVERS`, or of
    # the lowest, whatever its warnings
    best: Result
    chosen: Result | None = None  # what the rule of reports recommends of them
    slow: tuple[Result, ...] = ()  # the baselines' fastest where they are slow at that setting


class CardPair(NamedTuple):
    """A card compared with a slower one in a precision, at a setting that both have; ``speedup`` is
    how many times as fast it is."""

    precision: str
    fast: str  # the cards
    slow: str
    cases: tuple[Result, Result]
    speedup: Ratio


@dataclass(frozen=True)
class CardGroup:
    """Cards that may be compared, the fastest first; ``traits`` are what they share, by its
    name."""

    traits: Mapping[str, Any]
    setting: Result  # a case at the setting at which they are compared
    entries: Sequence[Entry]
    pairs: Sequence[CardPair]

    @property
    def cards(self) -> list[str]:
        return list(dict.fromkeys(entry.card for entry in self.entries))

    def tell_apart(self, other: CardGroup) -> list[str]:
        """List how it differs from another group: ``momentum 0.1, not 0.01``."""
        hashed = _DATA.values()  # a hash says no more than that
        partly = {*hashed, *map(name_axis, AMOUNT)}  # which not all groups have
        both = dict.fromkeys([*self.traits, *other.traits])  # each may have own axes
        values = ((n, self.traits.get(n, "none"), other.traits.get(n, "none")) for n in both)
        differences = [
            f"other {name}" if name in hashed else f"{name} {value}, not {theirs}".strip()
            for name, value, theirs in values
            if value != theirs and (name not in partly or (value and theirs))
        ]
        return differences or ["what one of them trained is not recorded"]


def _tell_traits(row: Result) -> dict[str, Any]:
    axes = list_axes([row], _RECIPE)
    traits = {name_axis(name): spell_value(getattr(row, name)) for name in axes}
    values = {what: getattr(row, name) for name, what in _DATA.items()}
    traits |= {what: str(value) if value == value else "" for what, value in values.items()}
    traits["unit"] = row.period.what
    amount = row.period.amount or ("",) * len(AMOUNT)
    counted = zip(AMOUNT, amount, strict=True)
    traits |= {name_axis(name): value for name, value in counted if name not in _RECIPE}
    if row.optimizer in UNFUSED:
        traits["slow optimizer"] = row.optimizer
    traits["torch"] = row.torch.partition(".")[0] or "unknown"
    return traits | {"": LABELS.get(row.kind, row.kind)}


def find_groups(found: ReportData) -> list[CardGroup]:
    """Group cards that may be compared. Groups with a GPU come first; of these measured ones, then
    published and unknown ones; in each, those with a sound time, then with most cards and
    precisions."""
    timed = [row for row in found.results if row.status in RELIABLE and not refuse_alone(row)]
    parts = group(timed, lambda row: tuple(_tell_traits(row).items()))
    order = ["measured", *reversed(LABELS)]
    return sorted((_make_group(part) for part in parts), key=lambda one: (
        all(entry.best.device == "cpu" for entry in one.entries),
        order.index(one.setting.kind),
        not any(entry.best.trusted for entry in one.entries),
        -len(one.cards),
        -len(one.entries),
    ))  # fmt: skip


def _make_group(timed: Sequence[Result]) -> CardGroup:
    # of a card's cases the first counts: without warnings, with most of an epoch and most repeats
    timed = sorted(timed, key=attrgetter("started_at"), reverse=True)
    timed.sort(key=lambda row: (not row.trusted, -row.part, -row.repeats, row.seed))
    places = [(row.ran_on, _tell_setting(row)) for row in timed]
    timed = [timed[at] for at in list_main(timed, places)]
    usual = _choose_setting(timed)
    parts = group(timed, lambda row: row.ran_on)
    entries = [entry for part in parts for entry in _list_entries(usual, part)]
    speeds = {entry.card: rate_card(entry) for entry in sorted(entries, key=rate_card)}
    entries.sort(key=lambda entry: speeds[entry.card], reverse=True)
    pairs = _judge_pairs([*dict.fromkeys(entry.card for entry in entries)], timed, usual)
    return CardGroup(_tell_traits(usual), usual, entries, pairs)


def rate_card(entry: Entry) -> tuple[bool, float]:
    """Return the sort key of a card: images per second at its best; warned ones come last."""
    return (entry.best.trusted, float(entry.best.images_per_s))


def _choose_setting(timed: Sequence[Result]) -> Result:
    """Return a case at the batch size and levers that most cards have. Of several settings choose
    the one with most unwarned precisions, then the plainest, then the largest batch."""

    def rate(part: Sequence[Result]) -> tuple[int, ...]:
        sure = {(row.ran_on, row.precision) for row in part if row.trusted}
        cards = {row.ran_on for row in part}
        return len(cards), len(sure), -len(list_levers(part[0])), int(part[0].batch_size)

    return max(group(timed, _tell_setting), key=rate)[0]


def list_levers(row: Result) -> list[str]:
    """List the levers of a case that are not at their defaults."""
    return name_unusual(row, {name: AXES[name].default for name in _LEVERS})


def name_precision(row: Result) -> str:
    """Name the precision of a case, with those of its options that are not at their defaults."""
    usual = {name: AXES[name].default for name in FOLLOWS["precision"]}
    usual["loss_scale"] = PRECISIONS[row.precision].default_loss_scale
    return " · ".join([row.precision, *name_unusual(row, usual)])


def name_unusual(row: Result, usual: Mapping[str, Value]) -> list[str]:
    """List the axes in which a case differs from ``usual``, each with its value."""
    return [
        name_setting(name, spell_value(getattr(row, name)))
        for name, value in usual.items()
        if getattr(row, name) != value
    ]


def _list_entries(usual: Result, timed: Sequence[Result]) -> Iterator[Entry]:
    """Yield a card's entries, from its cases, best evidence first."""
    here = [row for row in timed if _tell_setting(row) == _tell_setting(usual)]
    equal = {row.precision: row for row in reversed(here)}
    pairs = [
        (base, name)
        for at, base in enumerate(_BASELINES)
        for name in PRECISIONS
        if base in equal and not refuse_base(equal[base])
        if name in equal and name not in _BASELINES[: at + 1]
    ]
    ratios = judge_speeds([(equal[name], equal[base]) for base, name in pairs])
    over = dict(zip(pairs, ratios, strict=True))
    for precision in PRECISIONS:
        own = [row for row in timed if row.precision == precision]
        if not own:
            continue
        settings = _list_settings(own)
        fastest, chosen = choose(settings, "time"), choose(settings)
        bases = [base for base in _BASELINES if (base, precision) in over]
        fastest_bases = (_find_base(usual, timed, base) for base in bases)
        yield Entry(
            own[0].ran_on,
            precision,
            equal.get(precision),
            {base: equal[base] for base in bases},
            {base: over[base, precision] for base in bases},
            fastest.fastest.best if fastest else min(own, key=attrgetter("epoch_time_s")),
            chosen.chosen.best if chosen else None,
            tuple(row for row in fastest_bases if row.batch_size != usual.batch_size),
        )


def _list_settings(timed: Sequence[Result]) -> list[Setting]:
    return [Setting((same[0],)) for same in group(timed, _tell_setting)]


def _find_base(usual: Result, timed: Sequence[Result], base: str) -> Result:
    """Return the case in a baseline that a report holds others against, at any batch size."""
    tell = attrgetter(*_LEVERS)
    alike = [row for row in timed if row.precision == base and tell(row) == tell(usual)]
    return choose_base(_list_settings(alike), usual.batch_size).best


def _judge_pairs(cards: Sequence[str], timed: Sequence[Result], usual: Result) -> list[CardPair]:
    """Compare each card with each slower one in each precision, judged as one family: at the
    group's setting, or else at the plainest and largest that both have."""
    rows: dict[tuple[str, str], dict[Any, Result]] = {}
    for row in timed:
        rows.setdefault((row.precision, row.ran_on), {}).setdefault(_tell_setting(row), row)
    pairs: list[tuple[str, str, tuple[Result, Result]]] = []
    for precision in PRECISIONS:
        for fast, slow in combinations(cards, 2):
            ours, theirs = (rows.get((precision, card), {}) for card in (fast, slow))
            if keys := [key for key in ours if key in theirs]:
                key = max(keys, key=lambda key: (
                    key == _tell_setting(usual), -len(list_levers(ours[key])), key[0]
                ))  # fmt: skip
                pairs.append((fast, slow, (ours[key], theirs[key])))
    judged = judge_speeds([both for *_, both in pairs])
    return [
        CardPair(both[0].precision, fast, slow, both, speedup)
        for (fast, slow, both), speedup in zip(pairs, judged, strict=True)
    ]


# ----------------------------------------------------------------------------------------- document


MOST_CARDS = 4
"""The most cards of a group that sentences name."""

_NUMBERS = ("epoch_time_s", "images_per_s", "memory_bytes", "images_per_j", "repeats")
"""Columns of a report that a JSON document has of a case."""


def write_speedup(speedup: Ratio, *rows: Result) -> str:
    """Write a ratio of speeds, with its interval if repeats give one: ``1.91 [1.90–1.92]``. A range
    of repeats is in round brackets."""
    ends = write_ends((speedup.low, speedup.high), write_ratio)
    return f"{mark_part(*rows)}{write_ratio(speedup.value or 0)}" + (f" [{ends}]" if ends else "")


def _name_setup(row: Result) -> str:
    size = [f"batch size {row.batch_size}"] * bool(row.batch_size)
    return ", ".join([*size, *list_levers(row)]) or "its own settings"


def _tabulate_cards(found: Cards) -> Iterator[Sheet]:
    rows, headings = join(_list_cards(found))
    take_equal, take_best = attrgetter("equal"), attrgetter("best")

    def say_over(base: str, entry: Entry) -> Cell | None:
        if (speedup := entry.over.get(base)) is None or entry.equal is None:
            return None
        return Cell(write_speedup(speedup, entry.equal, entry.base[base]), speedup.value)

    def say_warnings(entry: Entry) -> str:
        of = [row for row in (entry.equal, entry.best) if row is not None]
        notes = [*filter(None, (remarks(row, SAID_BELOW) for row in of))]
        notes += [
            f"{row.precision} is faster at batch size {row.batch_size}: {write_time(row)}"
            for row in entry.slow
        ]
        return "; ".join(dict.fromkeys(notes))

    def say_chosen(entry: Entry) -> str:
        if entry.chosen is None or entry.chosen is entry.best:
            return ""
        return f"{_name_setup(entry.chosen)}: {write_time(entry.chosen)}"

    of = partial(quantity_column, spread=False)
    columns: list[Column[Entry]] = [
        Column("precision", "precision", "number formats",
               lambda entry: name_precision(entry.equal or entry.best), number=False, always=True),
        replace(of("epoch_time_s", take_equal, label="epoch"), name="equal_time_s",
                help="one epoch, at the setting above"),
        *(Column(f"over_{base}", f"over {base} (×)", f"epoch time of {base} on this card over this "
                 "one's", partial(say_over, base), better="higher", keep=keep)
          for base, keep in (("fp32", 9), ("tf32", 8))),
        of("memory_bytes", take_equal, help="peak of the epoch, at that setting", keep=6),
        Column("best", "best at", "the batch size and settings of the lowest time on this card",
               lambda entry: _name_setup(entry.best), wrap=True),
        replace(of("epoch_time_s", take_best, label="best epoch"), name="best_time_s",
                help="the lowest time of an epoch on this card"),
        of("images_per_s", take_best, help="images of an epoch over its time, there", keep=7),
        *([cost_column(found.tariff, take_best)] if found.tariff else []),
        of("images_per_j", take_best, help="images of an epoch over its energy, there", keep=5),
        Column("chosen", "recommended", "what a report recommends where that is not the fastest: a "
               "smaller batch whose time is near", say_chosen, wrap=True, keep=8),
        Column("remarks", "remarks", "what to know before believing the row", say_warnings,
               wrap=True, keep=8),
    ]  # fmt: skip
    note = (
        "Epoch, over fp32 and tf32, and memory: at the batch size and settings that most cards of "
        "a group have. Best: of what was tried on a card; of single runs, the fastest may only be "
        "the luckiest. Learning rates and optimizers of one kernel may differ, which changes a "
        "step by half a millisecond at most."
    )
    notes = [note]
    if found.tariff:
        notes.append(found.tariff.describe(found.tariff.find_cost(entry.best) for entry in rows))
    yield Sheet("Each card in each precision", columns, rows, notes, headings)


def _list_cards(found: Cards) -> Iterator[tuple[str, list[Entry]]]:
    """Yield a heading and rows for each card; a group's first heading describes the group."""
    for number, one in enumerate(found.groups, 1):
        data = f" on {one.setting.dataset}" * (one.setting.dataset != OWN)
        about = [f"{one.setting.model}{data} at {_name_setup(one.setting)}"]
        if not one.setting.period.whole:
            about.append(f"times of {one.setting.period}")
        if number > 1:
            about.append(f"apart from 1: {'; '.join(one.tell_apart(found.groups[0]))}")
        for card, part in groupby(one.entries, attrgetter("card")):
            entries = [*part]
            torch = f"torch {entries[0].best.torch or 'unknown'}"
            words = [f"{number}. {card}", *([] if torch in card else [torch]), *about]
            yield " · ".join(words), entries
            about = []


def _tabulate_pairs(found: Cards) -> Iterator[Sheet]:
    pairs = [(number, pair) for number, one in enumerate(found.groups, 1) for pair in one.pairs]
    parts = groupby(pairs, lambda one: f"{one[0]}. {one[1].precision}")
    rows, headings = join((name, [pair for _, pair in part]) for name, part in parts)

    def say_verdict(pair: CardPair) -> str:
        word = TIME.word(pair.speedup.invert().judge(STEADY))
        return f"{word}: {pair.speedup.lack}" if pair.speedup.lack else word

    columns: list[Column[CardPair]] = [
        Column("pair", "cards", "the first, against the second",
               lambda pair: f"{pair.fast} over {pair.slow}", wrap=True),
        Column("setting", "at", "the setting of both", lambda pair: _name_setup(pair.cases[0]),
               wrap=True, keep=8),
        Column("speedup", "speed-up (×)", "epoch time of the second over the first's, with its "
               "95 % interval", lambda pair: write_speedup(pair.speedup, *pair.cases), number=True,
               better="higher"),
        Column("verdict", "verdict", f"against a margin of {100 * STEADY:.0f} %", say_verdict,
               wrap=True),
    ]  # fmt: skip
    note = (
        "Judged as python -m bench.compare judges a case of two folders, which also says in what "
        "else they differ; the verdicts of a group are one family."
    )
    yield Sheet("Card against card", columns, rows, [note], headings)


def write_json(found: Cards) -> str:
    """Write every group with its entries and pairs, as a JSON document."""

    def lay_out_row(row: Result | None) -> dict[str, Any] | None:
        if row is None:
            return None
        cost = {"cost": found.tariff.find_cost(row).value} if found.tariff else {}
        return {
            "case": lay_out(row.first.case),
            **{name: getattr(row, name) for name in _NUMBERS},
            **cost,
            "part": row.part,
            "warnings": [name for name in WARNINGS if getattr(row, name)],
        }

    def lay_out_speedup(speedup: Ratio) -> dict[str, Any]:
        ends = {"speedup_low": speedup.low, "speedup_high": speedup.high}
        return {"speedup": speedup.value, **ends, "lack": speedup.lack}

    groups = [
        {
            "setting": lay_out(one.setting.first.case),
            "time_of": str(one.setting.period),
            "apart": one.tell_apart(found.groups[0]) if one is not found.groups[0] else [],
            "cards": [
                {
                    "card": entry.card,
                    "torch": entry.best.torch,
                    "kind": entry.best.kind,
                    "precision": entry.precision,
                    "at_setting": lay_out_row(entry.equal),
                    "over": {base: lay_out_speedup(ratio) for base, ratio in entry.over.items()},
                    "best": lay_out_row(entry.best),
                    "recommended": lay_out_row(entry.chosen),
                }
                for entry in one.entries
            ],
            "pairs": [
                {
                    "precision": pair.precision,
                    "a": pair.slow,
                    "b": pair.fast,
                    "case": lay_out(pair.cases[0].first.case),
                    **lay_out_speedup(pair.speedup),
                    "verdict": TIME.word(pair.speedup.invert().judge(STEADY)),
                }
                for pair in one.pairs
            ],
        }
        for one in found.groups
    ]
    content = {"answers": found.answers, "warnings": list_warnings(found), "groups": groups}
    return dump_document("cards", 2, content)


CARDS = Section(
    "cards", "What does each card do in each precision?", _tabulate_cards, Prominence.TABLE
)
PAIRS = Section("pairs", "Is one card faster than another?", _tabulate_pairs, Prominence.TABLE)


@dataclass(frozen=True)
class Cards(Report):
    """A report on cards."""

    sections: ClassVar[tuple[Section, ...]] = (CARDS, PAIRS)

    @cached_property
    def groups(self) -> list[CardGroup]:
        return find_groups(self)

    @cached_property
    def _machines(self) -> tuple[list[str], list[str]]:
        """The cards by name, one in two groups, or with two versions of torch, once; likewise the
        machines that trained without one."""
        best = [entry.best for one in self.groups for entry in one.entries]
        cards = {row.gpu_uuid or row.machine: row.machine for row in best if row.device != "cpu"}
        return [*cards.values()], [*dict.fromkeys(r.machine for r in best if r.device == "cpu")]

    @cached_property
    def title(self) -> str:
        cards, others = (len(of) for of in self._machines)
        alone = [count(others, "machine") + " without a GPU"] * bool(others)
        return join_words([*[count(cards, "card")] * bool(cards or not others), *alone])

    @cached_property
    def subject(self) -> str:
        cards, others = self._machines
        return f"{self.title}: {name_first(cards + others, 3)}"

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
    def next_step(self) -> NextStep | None:
        return NextStep("measure your own card, and send it in", "python -m bench.card")

    def _describe_group(self, one: CardGroup) -> str:
        """Say what a group's fastest card is best trained in, how much faster it is than other
        cards there, and why it is apart from the first group."""
        entry = max(one.entries, key=rate_card)
        time = find_wording([entry.best]).say_period(f"{write_time(entry.best)} an epoch")
        line = f"{entry.card}: {time}, in {entry.precision} ({_name_setup(entry.best)})"
        if entry.precision == OWN:  # a command that says nothing of it
            line = f"{entry.card}: {time}, at {_name_setup(entry.best)}"
        line += "" if entry.best.trusted else ", but every case has a warning"
        speeds = [
            f"{write_speedup(pair.speedup, *pair.cases)} times as fast as {pair.slow} at "
            f"{_name_setup(pair.cases[0])}"
            for pair in one.pairs
            if (pair.fast, pair.precision) == (entry.card, entry.precision)
        ]
        line += f"; {name_first(speeds, MOST_CARDS, '; ')}" if speeds else ""
        if entry.chosen is not None and entry.chosen is not entry.best:
            line += f". Recommended is {_name_setup(entry.chosen)}, {write_time(entry.chosen)}"
        apart = name_first(one.tell_apart(self.groups[0]), 3, "; ")
        return f"{line}." + (f" Not compared with 1: {apart}." if one is not self.groups[0] else "")


def build(sweeps: Sequence[SweepFolder], home: Path, tariff: Tariff | None = None) -> Cards:
    return gather(partial(Cards, home=home, tariff=tariff), sweeps)
