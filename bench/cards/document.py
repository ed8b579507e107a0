"""All cards in one document: a report whose sections are about cards, not about cases."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from bench.cards.entries import Entry, Group, find_groups, list_levers, rate_card
from bench.cards.prices import Prices
from bench.cards.sections import (
    CARD_PAIRS,
    CARDS,
    FOLDERS,
    Faults,
    name_group,
    name_setup,
    speed_at_best,
    write_speed,
)
from bench.limits import STEADY
from bench.questions.next_step import name_folder
from bench.questions.notices import warn
from bench.questions.overview import OVERVIEW, PUBLISHED
from bench.questions.reasons import PAIRS
from bench.questions.report_data import gather
from bench.render.cells import mark_part, remarks, write_ends, write_ratio
from bench.render.model import Answer, Level, NextStep, Notice
from bench.render.section import Section, quantity_cell
from bench.report.document import Report
from bench.study.quantities import QUANTITIES
from bench.study.sweeps import Sweep
from bench.text import count, name_first
from bench.validate.judgement import FAULT, KNOWN, validate
from bench.verdict.ratio import Verdict

MOST_CARDS = 4
"""The most cards of a group that sentences name."""


@dataclass(frozen=True)
class Cards(Report):
    """A report on cards; ``prices`` are per hour, if known."""

    prices: Prices | None = None

    sections: ClassVar[tuple[Section, ...]] = (
        CARDS,
        CARD_PAIRS,
        FOLDERS,
        replace(OVERVIEW, level=Level.DETAIL),
        PAIRS,
        PUBLISHED,
    )
    figures: ClassVar[tuple[str, ...]] = ("images-per-s",)
    pictured: ClassVar[bool] = False

    @cached_property
    def groups(self) -> list[Group]:
        return find_groups(self)

    @cached_property
    def title(self) -> str:
        cards = [card for group in self.groups for card in group.cards]
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
            Answer(
                name_group(self, group),
                (_describe_group(group, self.below) + _explain_apart(group, self.groups[0]),),
            )
            for group in self.groups
        )

    @cached_property
    def faults(self) -> Mapping[str, Faults]:
        """What `bench.validate` finds, by sweep."""
        return {sweep.name: _find_faults(sweep) for sweep in self.sweeps}

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
        return warn(self.records, self.cases, self.everything, across=False)

    @cached_property
    def next_step(self) -> NextStep | None:
        return NextStep("measure your own card, and send it in", "make card")


def _find_faults(sweep: Sweep) -> Faults:
    checks = validate(sweep.path, sweep)["checks"]
    new, known = (
        tuple(check["name"] for check in checks if check["result"] == result)
        for result in (FAULT, KNOWN)
    )
    return Faults(new, known)


def _describe_group(group: Group, below: Sequence[str]) -> str:
    """Say which case of a group is fastest, and how much faster it is than other cards."""
    entry = max(group.entries, key=rate_card)
    best = entry.best
    assert best is not None
    time = QUANTITIES["epoch_time_s"]
    shown = time.add_unit(quantity_cell(time, best, spread=False).text)
    setup = ", ".join([f"batch size {best.batch_size}", *list_levers(best)])
    card = f"{entry.card} has the lowest time: " if len(group.cards) > 1 else "Lowest time: "
    told = f"{card}{shown} an epoch, in {entry.precision} ({setup})"
    if best.doubted:
        own = remarks(best, below)  # empty if all share it, as that is said below
        told += ", but every case has a warning" + (f" (this one: {own})" if own else "")
    if speed := speed_at_best(entry):
        told += f", {speed.text} times as fast as fp32 at its fastest"
    if over := [
        f"{write_speed(entry.over[base], entry.equal)} times as fast as {base}"
        f"{' (which has a warning)' if row.doubted else ''}"
        for base, row in entry.base.items()
    ]:
        told += f"; at {name_setup(group)}, {' and '.join(over)}"
    return f"{told}.{_describe_pairs(entry, group)}"


def _explain_apart(group: Group, first: Group) -> str:
    """`` Not compared with 1: lr 0.01, not 0.0003.``"""
    apart = group.tell_apart(first)
    return f" Not compared with 1: {name_first(apart, 3, '; ')}." if apart else ""


def _describe_pairs(entry: Entry, group: Group) -> str:
    """`` In fp16 it is 1.42 times as fast as Y (95 %: 1.40 to 1.44).``"""
    pairs = [pair for pair in group.pairs if pair.fast.card == entry.card]
    shared = {pair.precision for pair in pairs}
    precision = entry.precision if entry.precision in shared else min(shared, default="")
    pairs = [pair for pair in pairs if pair.precision == precision]
    said = []
    for _, fast, slow, speed in pairs[:MOST_CARDS]:
        ends = write_ends((speed.low, speed.high), write_ratio, " to ")
        certain = speed.judge(STEADY) is not Verdict.AMBIGUOUS
        sure = f" (95 %: {ends}{'' if certain else ', not certain'})" if ends else ""
        value = f"{mark_part(fast, slow)}{write_ratio(speed.value or 0)}"
        said.append(f"{value} times as fast as {slow.card} at batch size {fast.batch_size}{sure}")
    left = len(pairs) - len(said)
    more = f"; and so on for {count(left, 'more card')}" if left else ""
    return f" In {precision} it is {'; '.join(said)}{more}." if said else ""


def build(sweeps: Sequence[Sweep], home: Path, prices: Prices | None = None) -> Cards:
    return gather(sweeps, make=partial(Cards, home=home, prices=prices))
