"""What a power limit saves, and what it costs: cases that differ in it alone.

A lower limit takes more time and, down to some limit, less energy. Told is the one of the least
energy of those that are shown to take at most `_LITTLE` more than the lowest time, by the rule of
`bench.answers.choice`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.answers.choice import Choice, choose_among
from bench.answers.render.table import (
    Cell,
    Column,
    Prominence,
    Section,
    Sheet,
    axis_column,
    name_case,
    quantity_column,
    ratio_cell,
    write_ratio,
)
from bench.answers.report_data import ReportData, Target
from bench.answers.settings import AIMS, Setting, list_least, weigh
from bench.base.limits import MIN_REPEATS
from bench.base.text import join_words, write_number, write_percent
from bench.results.store.rows import group
from bench.results.study.axes import list_naming_axes
from bench.results.study.comparable import refuse_part, tell_but
from bench.results.study.quantities import is_number, over
from bench.results.study.runs import Result
from bench.schema.case import SAME_QUESTION

_AXIS = "power_limit"

_LITTLE = 0.05
"""The share of the lowest time that a lower limit may take more."""

_ENERGY = AIMS["energy"]


@dataclass(frozen=True)
class Powered:
    """A setting at one power limit, beside ``first``, the one of the lowest time of those that
    differ in it alone."""

    row: Result
    first: Result

    @property
    def time(self) -> float:
        return float(self.row.epoch_time_s / self.first.epoch_time_s)

    @property
    def energy(self) -> float:
        """The share of the energy; NaN where either is not known, or of another part."""
        if refuse_part(self.row, self.first):
            return math.nan
        return over(_ENERGY.take(self.row), _ENERGY.take(self.first))


def _find_limits(place: Target) -> list[list[Setting]]:
    """Return the settings of a place that differ in their power limit alone, of those of which the
    time can be trusted."""
    known = [s for s in place.settings if s.timed and s.best.trusted and s.best.times]
    tell = tell_but((_AXIS, *SAME_QUESTION))
    alike = group(known, lambda setting: tell(setting.best))
    return [sorted(one, key=_order) for one in alike if len(one) > 1]


def _order(setting: Setting) -> tuple[bool, int]:
    limit = setting.best.power_limit
    return limit is None, limit or 0


def _name(setting: Setting) -> str:
    limit = setting.best.power_limit
    return "the limit of its own" if limit is None else f"{limit} W"


def _list(settings: Sequence[Setting]) -> str:
    return join_words([_name(setting) for setting in sorted(settings, key=_order)])


def _list_axes(found: ReportData) -> list[str]:
    return [name for name in list_naming_axes(found.varying) if name != _AXIS]


def tell_power(found: ReportData, place: Target) -> Iterator[str]:
    """Yield of each setting which power limit takes the least energy for little more time."""
    for alike in _find_limits(place):
        choice = choose_among([weigh(setting) for setting in alike], near=_LITTLE)
        axes = _list_axes(found)
        about = filter(None, ["Power limit", name_case(choice.fastest.best, axes)])
        yield f"{', '.join(about)}: {_tell_least(choice)}."
        if choice.open:
            few = any(s.best.runs < MIN_REPEATS for s in (*choice.open, choice.fastest))
            repeats = f"--repeats {MIN_REPEATS} or more" if few else "more --repeats"
            yield f"Whether {_list(choice.open)} is too, is not known: use {repeats}."


def _tell_least(choice: Choice[Setting]) -> str:
    """Say which of the settings within `_LITTLE` of the lowest time takes the least energy, or why
    that is not known."""
    first = choice.fastest
    within = f"within {write_percent(_LITTLE)} of the lowest time, that at {_name(first)}"
    if len(choice.near) == 1:
        return f"no other is shown to be {within}"
    lack = [one for one in choice.near if not Powered(one.best, first.best).energy > 0]
    if lack:
        return (
            f"which takes the least energy {within}, is not known, as that at {_list(lack)} is "
            "not, or of too short a part of an epoch"
        )
    least = list_least(choice.near, _ENERGY)
    if len(least) > 1:
        return f"the energies at {_list(least)} are the least {within}, and cannot be told apart"
    row = least[0].best
    energy = f"{write_number(row.energy_per_epoch_j)} J an epoch"
    if row is not first.best:
        beside = Powered(row, first.best)
        energy += f", {100 * beside.energy:.0f} % of what {_name(first)} takes, for "
        energy += f"{write_ratio(beside.time)} times its time"
    return f"{_name(least[0])} takes the least energy {within}: {energy}"


def _tabulate_limits(found: ReportData) -> Iterator[Sheet]:
    rows = [
        Powered(setting.best, min((s.best for s in alike), key=lambda row: row.epoch_time_s))
        for place in found.places
        for alike in _find_limits(place)
        for setting in reversed(alike)
    ]
    columns: list[Column[Powered]] = [
        *(axis_column(name, lambda one: one.row) for name in _list_axes(found)),
        axis_column(_AXIS, lambda one: one.row),
        quantity_column("epoch_time_s", lambda one: one.row, spread=False, always=True),
        Column("time_share", "of lowest time", "its time over the lowest of these rows",
               lambda one: ratio_cell(one.time), better="lower"),
        quantity_column("energy_per_epoch_j", lambda one: one.row, spread=False, always=True),
        Column("energy_share", "of its energy", "its energy over that of the lowest time",
               lambda one: ratio_cell(one.energy), better="lower"),
        Column("mean_power", "mean power (W)", "energy over measured time, of all its GPUs",
               lambda one: _find_median(one.row, "mean_power_w"), number=True),
        Column("sm_clock", "SM clock (MHz)", "the median of the epoch",
               lambda one: _find_median(one.row, "sm_clock_mhz"), number=True),
    ]  # fmt: skip
    yield Sheet("What a power limit saves, and what it costs", columns, rows)


def _find_median(row: Result, name: str) -> Cell | None:
    values = [value for run in row.counted if is_number(value := getattr(run, name))]
    return Cell(f"{median(values):.0f}", median(values)) if values else None


POWER_LIMITS = Section(
    "power_limits", "What does a power limit save, and cost?", _tabulate_limits, Prominence.TABLE
)
