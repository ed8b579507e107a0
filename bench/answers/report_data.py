"""Results of some sweeps, derived once for all sections of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

from bench.answers.choice import Choice
from bench.answers.money import Tariff
from bench.answers.settings import UNRANKED, Setting, choose, list_settings
from bench.base.limits import MIN_REPEATS
from bench.networks.workloads import OWN
from bench.results.store.rows import group, latest
from bench.results.study.axes import (
    GROUPS,
    MACHINE,
    Filter,
    find_varying,
    name_setting,
    refuse_unknown,
    select,
    sort_cases,
)
from bench.results.study.comparable import refuse_alone, refuse_together
from bench.results.study.effects import Effect, find_effects
from bench.results.study.profiled import Profiled, read_steps
from bench.results.study.runs import SOURCE, Result, Run, make_results, read_runs
from bench.results.study.sweeps import SweepFolder
from bench.schema.axis import Trait
from bench.schema.case import SAME_QUESTION, list_affecting, list_axes

PLACE = ("ran_on", "model", *list_affecting(Trait.DATA))
"""What a recommendation is for: a network on its data, of one shape, on one machine. That images
are smaller, or texts shorter, makes them no better to train on."""

_tell_place = attrgetter(*PLACE)


@dataclass(frozen=True)
class Target:
    """A network and its data on one machine, and what is known of them."""

    machine: str  # its display name
    model: str
    name: str  # the model, with its data unless it brings its own, and their shape if it varies
    settings: Sequence[Setting]
    tried: Sequence[Setting]  # the same, and those that a filter leaves out
    probes: Sequence[Run]
    choice: Choice[Setting] | None  # by `choose`
    searched: bool  # whether its cases are trials of a search for what learns best
    apart: str  # why its times say nothing of each other, and what fixes that; empty if they do
    # the user's own axes in which its settings differ, if some of these tell no loss and nothing
    # was asked for: what another value trains is not known then
    unknown: Sequence[str]

    @property
    def chosen(self) -> Setting | None:
        """The setting to train with; None if none is recommended."""
        return self.choice.chosen if self.choice else None

    @property
    def alike(self) -> list[Setting]:
        """The chosen setting, and those that differ from it in `UNRANKED` alone and are not shown
        to be slower: nothing chooses one of these."""
        among = self.choice.alike if self.choice else ()
        return [s for s in among if s is self.chosen or s.differs_in(among[0], UNRANKED)]

    @property
    def unsteady(self) -> bool:
        """Whether it has several times, all of few runs on a CPU: on two cores single ones made
        bf16-amp 3.05 times as fast as fp32, later 0.64 times, and three each on idle ones 1.49."""
        rows = [s.best for s in self.settings if s.timed and s.best.kind == "measured"]
        few = all(row.device == "cpu" and row.repeats < MIN_REPEATS for row in rows)
        return few and len(rows) > 1

    @property
    def recommended(self) -> list[Setting]:
        """The settings that are told to train with, of which any is as good: no unsteady one, no
        only one, and none of a search, which is for what learns best and not for what is fastest;
        and none of which it is not known what it trains."""
        alone = sum(setting.timed for setting in self.settings) == 1
        unsure = self.searched or self.unsteady or self.unknown or alone
        return [] if unsure else self.alike

    @property
    def lowest(self) -> Setting | None:
        """The setting of the lowest time, whatever its warnings, but an invalid one, as of another
        arithmetic than its label's, only where no other was timed; None if none was."""
        timed = [setting for setting in self.settings if setting.timed]
        return min(timed, key=lambda one: (one.best.invalid, one.best.epoch_time_s), default=None)


@dataclass(frozen=True)
class ReportData:
    """The data of a report, and results that several of its sections share."""

    sweeps: Sequence[SweepFolder]
    everything: Sequence[Run]  # all records
    runs: Sequence[Run]  # those of ``everything`` that ``--where`` selects
    results: Sequence[Result]  # the cases, in the order of the overview
    varying: tuple[str, ...]  # the axes in which the cases differ
    order: tuple[str, ...]  # the axes with a column in the overview, the grouping one first
    by: str  # the axis to group the overview by; empty if none was given
    aim: str  # what the recommendation is for, of `AIMS`; empty for its usual rule
    tried: Sequence[Result]  # the cases before ``--where``
    steps: Mapping[int, Profiled]  # of `read_steps`, for ``tried``
    tariff: Tariff | None = field(default=None, kw_only=True)  # what an hour and a kWh cost

    @cached_property
    def settings(self) -> list[Setting]:
        """What the cases answer, in the order of the overview."""
        return list_settings(self.results)

    @cached_property
    def places(self) -> list[Target]:
        """The networks, each on its data and a machine, machine by machine."""
        searched = {sweep.name for sweep in self.sweeps if sweep.halving is not None}
        present = {sweep.name: find_present(sweep) for sweep in self.sweeps}

        def tell(case: Any) -> tuple[Any, ...]:
            # trials of a search say which learns best, and nothing of other rows
            return (*_tell_place(case), case.sweep if case.sweep in searched else "")

        tried = list_settings(self.tried)
        probes = [run for run in self.runs if run.probe]
        keys = dict.fromkeys(map(tell, (*(one.best for one in self.settings), *probes)))
        cases: list[Result | Run] = [*self.tried, *probes]
        order = [*dict.fromkeys(case.ran_on for case in cases)]
        found = []
        for key in sorted(keys, key=lambda key: order.index(key[0])):
            ran_on, model, dataset, *shape, search = key
            mine = [one for one in self.settings if tell(one.best) == key]
            used = (present[one.best.sweep] for one in mine)
            apart = refuse_together([one.best for one in mine])
            if apart and (unfit := next(filter(None, (refuse_alone(s.best) for s in mine)), "")):
                apart = f"No time is compared with another: {unfit}."
            named = [model if dataset == OWN else f"{model} on {dataset}"]
            shapes = zip(PLACE[-len(shape) :], shape, strict=True)
            named += [name_setting(n, str(v)) for n, v in shapes if n in self.varying and v]
            place = Target(
                ran_on,
                model,
                ", ".join(named),
                mine,
                [one for one in tried if tell(one.best) == key],
                [run for run in probes if tell(run) == key],
                None
                if apart and self.aim != "memory"
                else choose(mine, self.aim, next(filter(None, used), None)),
                bool(search),
                apart,
                () if self.aim else _list_unknown(mine),
            )
            found.append(place)
        return found

    @cached_property
    def recommended(self) -> list[Setting]:
        """What is recommended of all places."""
        return [setting for place in self.places for setting in place.recommended]

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        return tuple(find_effects(self.results, self.varying))


def _list_unknown(settings: Sequence[Setting]) -> list[str]:
    """Return the user's own axes in which timed settings differ of which one tells no loss."""
    rows = [one.best for one in settings if one.timed]
    own = list_axes(rows, ["vary"]) if any(row.train_loss != row.train_loss for row in rows) else []
    return [axis for axis in own if len({getattr(row, axis) for row in rows}) > 1]


def find_present(sweep: SweepFolder) -> int | None:
    """Return the batch size that is in use, which a search for advice measures first; None of any
    other sweep."""
    repeats = (row.case.batch_size for row in sweep.rows if row.is_repeat)
    return next(repeats, None) if sweep.advised else None


M = TypeVar("M", bound=ReportData)


def gather(
    make: Callable[..., M],
    sweeps: Sequence[SweepFolder],
    where: Sequence[Filter] = (),
    by: str = "",
    aim: str = "",
) -> M:
    """Read the cases of some sweeps that ``where`` selects, with the overview grouped ``by`` an
    axis; ``make`` takes the fields of `ReportData`. Raises UsageError: ``where`` leaves nothing."""
    everything = read_runs(sweeps)
    tried = make_results(latest(everything))
    refuse_unknown("--by", by, tried, GROUPS)
    results, runs = select(tried, where), select(everything, where)
    varying = find_varying(results)
    order = _order_columns(results, varying, by)
    results = sort_cases(results, order)
    return make(
        sweeps,
        everything,
        runs,
        results,
        varying,
        order,
        by,
        aim,
        tried,
        read_steps(tried, sweeps),
    )


def _order_columns(results: Sequence[Result], varying: Sequence[str], by: str) -> tuple[str, ...]:
    """Return the axes that have a column, the grouping one first. How much was measured has one
    only if nothing else distinguishes two cases."""
    order = sorted(varying, key=lambda name: name != by)
    for name in find_varying(results, SAME_QUESTION):
        shown = [axis for axis in order if axis != MACHINE]
        tell = attrgetter(*SOURCE, *shown, "environment", "kind")
        if any(len({getattr(one, name) for one in alike}) > 1 for alike in group(results, tell)):
            order.append(name)
    return tuple(order)
