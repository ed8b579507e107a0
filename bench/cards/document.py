"""All cards in one document: a report whose sections are about cards, not about cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from bench.cards.entries import BASELINES, Entry, Group, find_groups, list_levers
from bench.cards.prices import Prices
from bench.cards.sections import (
    CARDS,
    DUELS,
    FOLDERS,
    name_group,
    name_setting,
    speed_over,
)
from bench.limits import STEADY
from bench.questions.effects import Effect
from bench.questions.material import gather
from bench.questions.notices import warn
from bench.questions.overview import OVERVIEW, PUBLISHED
from bench.questions.reasons import PAIRS
from bench.render.cells import Row, quantity_cell, write_ends, write_ratio
from bench.render.model import Answer, Level, NextStep, Notice
from bench.render.section import Section
from bench.report.document import Report
from bench.store.cells import RECORDS
from bench.study.quantities import QUANTITIES
from bench.study.sweeps import Sweep
from bench.text import ESTIMATE, count, name_first
from bench.validate.judgement import FAULT, KNOWN, validate
from bench.verdict import Verdict

MOST_CARDS = 4
"""Cards of a group that are said in sentences."""


@dataclass(frozen=True)
class Cards(Report):
    """What was found of cards; ``prices`` of an hour of them, where they are known."""

    prices: Prices | None = None

    sections: ClassVar[tuple[Section, ...]] = (
        CARDS,
        DUELS,
        FOLDERS,
        replace(OVERVIEW, level=Level.DETAIL),
        PAIRS,
        PUBLISHED,
    )
    figures: ClassVar[tuple[str, ...]] = ("images-per-s",)
    leads: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def groups(self) -> list[Group]:
        return find_groups(self)

    @cached_property
    def duels(self) -> dict[str, list[Effect]]:
        """By group and precision, of the groups that have several cards."""
        found: dict[str, list[Effect]] = {}
        for number, group in enumerate(self.groups, 1):
            for precision, effect in group.duels:
                found.setdefault(f"{number}. {precision}", []).append(effect)
        return found

    @cached_property
    def title(self) -> str:
        return f"{count(len({c for g in self.groups for c in g.cards}), 'card')} compared"

    @cached_property
    def subject(self) -> str:
        return f"{self.title}: {name_first([card for g in self.groups for card in g.cards], 3)}"

    @cached_property
    def constants(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        return tuple(
            Answer(name_group(self, group), tuple(_tell_group(group))) for group in self.groups
        )

    @cached_property
    def faults(self) -> Mapping[str, str]:
        """What `bench.validate` finds of each sweep."""
        return {sweep.name: _describe_faults(sweep) for sweep in self.sweeps}

    @cached_property
    def warnings(self) -> tuple[Notice, ...]:
        failed = [f"{name}: {text}" for name, text in self.faults.items() if text != SOUND]
        told = f"{'; '.join(failed)}."
        mend = "python -m bench.validate FOLDER says what they are."
        return (*([Notice("Faults", told, mend)] if failed else []), *super().warnings)

    @cached_property
    def _notices(self) -> list[Notice]:
        # what of a plan has no row, `bench.validate` says
        return warn(self.records, self.cases, self.everything)

    @cached_property
    def next_step(self) -> NextStep | None:
        return NextStep("measure your own card, and send it in", "make card")


SOUND = "all checks passed"


def _describe_faults(sweep: Sweep) -> str:
    folder = sweep.file.parent if sweep.file.name == RECORDS else sweep.file
    checks = validate(folder)["checks"]
    known, new = (
        [check["name"] for check in checks if check["result"] == result]
        for result in (KNOWN, FAULT)
    )
    said = [
        *([f"faults in {name_first(new, 4)}"] if new else []),
        *([f"known faults in {name_first(known, 4)}"] if known else []),
    ]
    return "; ".join(said) or SOUND


def _tell_group(group: Group) -> Iterator[str]:
    """The fastest case of all its cards, and what the card gains over the others."""
    timed = [(e, e.best) for e in group.entries if e.best is not None]
    entry, best = min(timed, key=lambda one: one[1].epoch_time_s)
    yield _tell_card(entry, best, group)
    over = [
        _tell_duel(effect)
        for precision, effect in group.duels
        if (precision, effect.after) == (entry.precision, entry.card)
    ]
    if over:
        left = f"; and {count(len(over) - MOST_CARDS, 'more card')}" * (len(over) > MOST_CARDS)
        yield f"In {entry.precision} it is {'; '.join(over[:MOST_CARDS])}{left}."


def _tell_card(entry: Entry, best: Row, group: Group) -> str:
    """``X: 12.50 s an epoch in fp16 (batch size 128), at best; at batch size 256 …``."""
    said = " and ".join(
        f"{cell.text} times as fast as {base}"
        for base in BASELINES
        if (cell := speed_over(entry, base))
    )
    time = QUANTITIES["epoch_time_s"]
    shown = time.add_unit(quantity_cell(time, best, spread=False).text)
    setup = ", ".join([f"batch size {best.batch_size}", *list_levers(best, entry.setting)])
    over = f"; at {name_setting(group)}, {said}" if said else ""
    card = f"{entry.card}: at best" if len(group.cards) > 1 else "At best"
    return f"{card} {shown} an epoch, in {entry.precision} ({setup}){over}."


def _tell_duel(effect: Effect) -> str:
    """``1.42 times as fast as Y (95 %: 1.40 to 1.44)``."""
    time = effect.time
    assert time is not None
    speed = time.ratio.invert()
    ends = write_ends((speed.low, speed.high), write_ratio, " to ")
    doubt = ", not certain" if time.ratio.judge(STEADY) is Verdict.AMBIGUOUS else ""
    sure = f" (95 %: {ends}{doubt})" if ends else ""
    value = f"{ESTIMATE * effect.estimated}{write_ratio(speed.value or 1)}"
    return f"{value} times as fast as {effect.before}{sure}"


def build(sweeps: Sequence[Sweep], home: Path, prices: Prices | None = None) -> Cards:
    """Derive what several parts need."""
    return gather(sweeps, make=partial(Cards, home=home, prices=prices))
