"""The report, independent of its format. Each part is computed once, on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from bench.answers.effects import EFFECTS_SECTION
from bench.answers.halving import SEARCH
from bench.answers.money import Tariff
from bench.answers.notices import (
    choose_next,
    describe_constants,
    describe_subject,
    warn,
    write_notes,
)
from bench.answers.overview import COSTS, MONEY, OVERVIEW, PLACES, REACHED, TIMES
from bench.answers.power_limits import POWER_LIMITS
from bench.answers.recommendation import recommend
from bench.answers.render.table import (
    Answer,
    NextStep,
    Notice,
    Prominence,
    Section,
    Table,
    Wording,
    find_wording,
    name_outcome,
)
from bench.answers.report_data import ReportData, gather
from bench.answers.savings import SAVINGS
from bench.answers.scaling import LARGEST_BATCH, SCALING, find_searches
from bench.answers.step_time import BREAKDOWNS
from bench.base.text import count, name_first
from bench.results.study.axes import Filter
from bench.results.study.remedies import name_taker
from bench.results.study.sweeps import SweepFolder
from bench.schema.record import Status

SECTIONS: tuple[Section, ...] = (
    PLACES,
    SAVINGS,
    POWER_LIMITS,
    TIMES,
    MONEY,
    COSTS,
    OVERVIEW,
    EFFECTS_SECTION,
    BREAKDOWNS,
    REACHED,
    LARGEST_BATCH,
    SCALING,
    SEARCH,
)
"""In reading order."""


@dataclass(frozen=True)
class Report(ReportData):
    """The results of some sweeps as a `Document`; each part is computed on demand."""

    home: Path  # the folder of the document; links are relative to it

    sections: ClassVar[tuple[Section, ...]] = SECTIONS

    @cached_property
    def title(self) -> str:
        return name_first([sweep.name for sweep in self.sweeps], 3)

    @cached_property
    def wording(self) -> Wording:
        return find_wording(self.results)

    @cached_property
    def subject(self) -> str:
        machines = [place.machine for place in self.places]
        text = describe_subject(self.title, self.results, self.varying, machines)
        return self.wording.say_period(text)

    @cached_property
    def constants(self) -> tuple[str, ...]:
        return tuple(describe_constants(self.results, self.varying))

    @property
    def _makers(self) -> list[str]:
        return [sweep.maker for sweep in self.sweeps]

    def _say(self, sentence: str) -> str:
        return name_taker(self.wording.say_period(sentence), self._makers)

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        return tuple(
            replace(answer, sentences=tuple(map(self._say, answer.sentences)))
            for answer in recommend(self)
        )

    @cached_property
    def warnings(self) -> tuple[Notice, ...]:
        chosen = [setting for place in self.places for setting in place.alike]
        spoken = {
            True: {setting.best.cell for setting in self.settings},
            False: {setting.best.cell for setting in chosen},
        }
        known = warn(self.runs, self.results, self.everything, self.sweeps, spoken=spoken)
        return tuple(
            replace(
                one,
                found=self.wording.say_period(one.found),
                remedy=name_taker(one.remedy, self._makers),
            )
            for one in known
        )

    @cached_property
    def opening(self) -> tuple[Table, ...]:
        return self._lay_out(opening=True)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        return self._lay_out(opening=False)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        notes = write_notes(self.results, self.varying)
        return tuple(self.wording.say_period(text) for text in notes)

    @cached_property
    def outcomes(self) -> str:
        """The numbers of cases and of their runs, and how the cases ended: OK first, then the most
        frequent."""
        if not self.runs:
            return "No run has ended here yet."
        if not self.results and (probes := [run for run in self.runs if run.probe]):
            ends = Counter(map(name_outcome, probes))
            numbers = ", ".join(f"{number:,} {end}" for end, number in ends.most_common())
            return f"{count(len(probes), 'probe')} of a few steps, and no case: {numbers}."
        ends = Counter(name_outcome(row) for row in self.results)
        ordered = sorted(ends.items(), key=lambda pair: (pair[0] != Status.OK.value, -pair[1]))
        numbers = ", ".join(f"{number:,} {end}" for end, number in ordered) or "none"
        runs = count(sum(row.runs for row in self.results), "run")
        return f"{count(len(self.results), 'case')} in {runs}: {numbers}."

    @cached_property
    def next_step(self) -> NextStep | None:
        searches = () if self.results else find_searches(self.runs, self.sweeps)
        return choose_next(self.sweeps, self.results, searches)

    def _lay_out(self, opening: bool) -> tuple[Table, ...]:
        """Return the tables of all sections, or those that a first screen shows; what probes found
        is on it if nothing else would be."""
        say = self.wording.say
        sections = self.sections
        if not self.results:
            sections = tuple(
                replace(s, level=Prominence.TABLE) if s is LARGEST_BATCH else s for s in sections
            )

        return tuple(
            replace(
                table,
                title=self.wording.say_period(table.title),
                heads=tuple(replace(h, label=say(h.label), help=say(h.help)) for h in table.heads),
                words=tuple(map(say, table.words)),
                notes=tuple(map(say, table.notes)),
            )
            for section in sections
            if not opening or section.level is not Prominence.DETAIL
            for table in section.lay_out(section.list_sheets(self))
        )


def build(
    sweeps: Sequence[SweepFolder],
    home: Path | None = None,
    where: Sequence[Filter] = (),
    by: str = "",
    aim: str = "",
    tariff: Tariff | None = None,
) -> Report:
    """Build a report as `gather` does. Raises UsageError: ``where`` leaves nothing."""
    make = partial(Report, home=home or Path.cwd(), tariff=tariff)
    return gather(make, sweeps, where, by, aim)
