"""Results of some sweeps, derived once for all sections of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from bench.case import SAME_QUESTION
from bench.diagnosis.explanation import Explanation
from bench.origin import describe_origin
from bench.questions.effects import Effect, find_effects
from bench.questions.families import Family, Search, find_families, find_searches
from bench.questions.gpus import Line, find_lines
from bench.questions.profiles import Profiled, explain_pairs, read_steps
from bench.questions.settings import Setting, list_settings
from bench.render.cells import Row
from bench.scale_map import ScaleMap
from bench.store.attempts import keep, number_groups
from bench.store.scale_map import read_scale_map
from bench.study import axes, summaries
from bench.study.axes import MACHINE, Machines, list_naming_axes
from bench.study.doubts import list_below
from bench.study.estimate import LOSS, Seeds, take_seeds, take_times
from bench.study.filters import Filter, select
from bench.study.results import Result

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.sweeps import Sweep


@dataclass(frozen=True)
class ReportData:
    """The data of a report, and results that several of its sections share."""

    sweeps: Sequence[Sweep]
    reference: Sweep | None  # published figures, some of which may be shown beside cases
    everything: pd.DataFrame  # all records, of `summaries.read`
    records: pd.DataFrame  # those of ``everything`` that ``--where`` selects
    rows: pd.DataFrame  # the runs that count, of `summaries.latest`
    cases: pd.DataFrame  # summaries of ``rows``, in the order of the overview
    machines: Machines  # the display name of each
    varying: tuple[str, ...]  # the axes in which the cases differ
    order: tuple[str, ...]  # the axes with a column in the overview, the grouping one first
    by: str  # the axis to group the overview by; empty if none was given
    aim: str  # what the recommendation is for, of `AIMS`; empty for its usual rule
    tried: Sequence[Result]  # the cases before ``--where``
    steps: Mapping[int, Profiled]  # of `read_steps`, for ``tried``

    @cached_property
    def origin(self) -> tuple[str, ...]:
        """The opening sentences if nothing was measured."""
        return tuple(describe_origin(self.records["executor"].unique()))

    @cached_property
    def named(self) -> list[str]:
        """The axes by which a sentence names a case."""
        return list_naming_axes(self.varying)

    @cached_property
    def below(self) -> Sequence[str]:
        """Doubts that are stated once, and not beside each row."""
        return list_below(self.results)

    @property
    def results(self) -> list[Result]:
        """The cases, in the order of the overview."""
        results: list[Result] = self.cases["result"].tolist()
        return results

    @cached_property
    def settings(self) -> list[Setting]:
        """What the cases answer, in the order of the overview."""
        return list_settings(self.results)

    @cached_property
    def tried_settings(self) -> list[Setting]:
        """The same of ``tried``."""
        return list_settings(self.tried)

    @cached_property
    def by_cell(self) -> dict[int, Result]:
        return {result.cell: result for result in self.results}

    @cached_property
    def beside(self) -> pd.DataFrame:
        """The cases with the published figures for each, of `summaries.join_published`."""
        published, names = self.rows.head(0), ["model", "dataset"]
        if self.reference:
            asked = self.cases[names].drop_duplicates()
            if not asked.merge(self.reference.records[names]).empty:
                published = summaries.latest(summaries.read([self.reference]))
        return summaries.join_published(self.cases, summaries.summarize(published))

    @cached_property
    def probes(self) -> pd.DataFrame:
        return self.records[self.records["probe"].astype(bool)]

    @cached_property
    def times(self) -> Mapping[int, Sequence[float]]:
        return take_times(self.results)

    @cached_property
    def losses(self) -> Mapping[int, Seeds]:
        return take_seeds(LOSS, self.results)

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        return tuple(find_effects(self))

    @cached_property
    def searches(self) -> list[Search]:
        return find_searches(self.records, self.sweeps)

    @cached_property
    def families(self) -> list[Family]:
        return find_families(self.results, self.probes["run"].tolist(), self.searches)

    @cached_property
    def lines(self) -> list[Line]:
        return find_lines(self)

    @cached_property
    def counted(self) -> list[tuple[Row, Profiled]]:
        """The cases whose work was counted."""
        return [(row, self.steps[c]) for c, row in self.by_cell.items() if c in self.steps]

    @cached_property
    def pairs(self) -> list[Explanation]:
        """Explanations of each precision against fp32, for the cases with profiles."""
        return explain_pairs(self.steps, self.results, self.machines, tried=self.tried)

    @cached_property
    def scale_maps(self) -> tuple[ScaleMap, ...]:
        """The maps that `bench.scales` stored in the folders of the sweeps."""
        return tuple(filter(None, (read_scale_map(sweep.path) for sweep in self.sweeps)))


M = TypeVar("M", bound=ReportData)


def gather(
    sweeps: Sequence[Sweep],
    reference: Sweep | None = None,
    where: Sequence[Filter] = (),
    by: str = "",
    aim: str = "",
    make: Callable[..., M] = ReportData,  # type: ignore[assignment]
) -> M:
    """Read the cases of some sweeps that ``where`` selects, with the overview grouped ``by`` an
    axis; ``make`` takes the fields of `ReportData`. Raises UsageError: ``where`` leaves nothing."""
    import pandas as pd

    everything = summaries.read(sweeps)
    rows = summaries.latest(everything)
    tried = summaries.summarize(rows)
    steps = read_steps(rows["run"], sweeps)
    cases, records = select(tried, where), select(everything, where)
    rows = keep(rows, rows["cell"].isin(cases["cell"]))
    probes = records[records["probe"].astype(bool)]
    machines = label_machines(pd.concat([p[list(summaries.SOURCE)] for p in (cases, probes)]))
    varying = axes.find_varying(cases)
    order = _order_columns(cases, varying, by)
    cases = axes.sort_cases(cases, order).reset_index(drop=True)
    found = make(
        sweeps,
        reference,
        everything,
        records,
        rows,
        cases,
        machines,
        varying,
        order,
        by,
        aim,
        tried["result"].tolist(),
        steps,
    )
    for result in found.results:
        result.losses = found.losses.get(result.cell, {})
    return found


def label_machines(cases: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Name each (sweep, machine) by the machine, and also by its sweep if two share a name."""
    pairs = summaries.list_machines(cases)
    names = [machine for _, machine in pairs]
    return {
        (sweep, machine): machine if names.count(machine) == 1 else f"{machine} · {sweep}"
        for sweep, machine in pairs
    }


def _order_columns(cases: pd.DataFrame, varying: Sequence[str], by: str) -> tuple[str, ...]:
    """Return the axes that have a column, the grouping one first. How much was measured has one
    only if nothing else distinguishes two cases."""
    order = sorted(varying, key=lambda name: name != by)
    for name in SAME_QUESTION:
        axes_shown = [axis for axis in order if axis != MACHINE]
        alike = number_groups(cases, [*summaries.SOURCE, *axes_shown, "environment", "kind"])
        if (cases[name].groupby(alike).nunique() > 1).any():
            order.append(name)
    return tuple(order)
