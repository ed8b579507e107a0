"""What the runs of a search for advice show so far, and which setting is to be measured next.

Nothing here runs anything, so a search can continue wherever its records end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median

from bench.answers.choice import Candidate, Choice, choose_among
from bench.base.errors import UsageError
from bench.base.limits import MIN_REPEATS, NEAR, STEADY
from bench.results.store.rows import Row
from bench.schema.axis import Value, is_own
from bench.schema.case import (
    AXES,
    FOLLOWS,
    SAME_QUESTION,
    Case,
    change_axes,
    list_axes,
    parse_value,
)
from bench.schema.command import BESIDE_COMMAND, ITEMS, list_places, list_worded, read_vary
from bench.schema.grid import grid
from bench.schema.precision import PRECISIONS
from bench.schema.record import Status
from bench.schema.rules import check

LEVERS: dict[str, dict[str, Sequence[Value]]] = {
    "cuda": {
        "precision": ("fp32", "tf32", "fp16", "fp16-amp", "bf16", "bf16-amp"),
        "batch_size": (),
        "compile": ("off", "default", "reduce-overhead"),
        "channels_last": (False, True),
        "cudnn_benchmark": (False, True),
        "cuda_graphs": (False, True),
    },
    "cpu": {
        "precision": ("fp32", "bf16-amp"),
        "batch_size": (),
        "compile": ("off", "default"),
        "channels_last": (False, True),
    },
}
"""Values that are tried by default, in this order: what people change without changing the network.
Batch sizes follow from the present one. max-autotune is left out: it takes minutes to compile."""

OCTAVES = range(-2, 6)
"""Doublings of the present batch size that are tried."""

_FEWEST_STEPS = 8
"""Fewest steps of an epoch; with fewer, a larger batch would be all of the data."""

ROUNDS = 3
"""How often all levers are gone through, as long as the best setting changes: in a small batch the
GPU may wait for the host, so that precisions differ only in a larger one."""

CONTENDERS = 3
"""The most settings that are repeated beside the present one, the best and the fastest."""


def strip(case: Case) -> Case:
    """Return the setting that a case measures, without how it was measured."""
    return replace(case, **{name: getattr(Case, name) for name in SAME_QUESTION})


def list_changes(setting: Case, other: Case) -> list[str]:
    """List the axes in which two settings differ, except those that follow from others."""
    axes = list_axes([setting, other])
    axes = [name for name in axes if getattr(setting, name) != getattr(other, name)]
    led = {name for axis in axes for name in FOLLOWS.get(axis, ())}
    return [name for name in axes if name not in led]


def list_levers(
    now: Case, given: Mapping[str, Sequence[Value]], items: int
) -> dict[str, Sequence[Value]]:
    """Return the values of each lever to try.

    Args:
        given: the values that flags give.
        items: the number of training items of an epoch.
    """
    sizes = [round(now.batch_size * 2.0**octave) for octave in OCTAVES]
    if now.command is not None:
        return _list_levers_of_command(now, given, [n for n in sizes if n >= 1])
    most = max(now.batch_size, items // _FEWEST_STEPS)
    levers = {**LEVERS[now.device], "batch_size": [n for n in sizes if 1 <= n <= most]}
    asked = {name: values for name, values in given.items() if name in levers or len(values) > 1}
    return levers | asked


def _list_levers_of_command(
    now: Case, given: Mapping[str, Sequence[Value]], sizes: Sequence[int]
) -> dict[str, Sequence[Value]]:
    """Return the values to try of each placeholder: those that flags give, or those that it has
    words for, or multiples of the present batch size."""
    levers: dict[str, Sequence[Value]] = {
        name: [parse_value(name, value, "--command") for value in values]
        for name, values in list_worded(str(now.command)).items()
        if name in AXES and name not in BESIDE_COMMAND
    }
    if "batch_size" in list_places(str(now.command)):
        levers["batch_size"] = sizes
    levers |= {name: values for name, values in given.items() if name in levers}
    levers |= {name: values for name, values in given.items() if len(values) > 1 and name != "vary"}
    for axis in read_vary(now.vary):
        texts = [read_vary(None if text is None else str(text)) for text in given.get("vary", ())]
        levers[axis] = list(dict.fromkeys(values[axis] for values in texts))
    order = [*LEVERS["cuda"], *levers]
    return {name: levers[name] for name in dict.fromkeys(order) if name in levers}


def measure_length(case: Case) -> float:
    """Return for how long a case was measured: its share of an epoch, or steps of a command."""
    return case.fraction if case.command is None else case.steps or 0


def change(
    setting: Case, axis: str, value: Value, given: Mapping[str, Sequence[Value]]
) -> Case | None:
    """Return the setting with another value of an axis, and what follows from it by ``given`` or by
    default; None if they cannot be combined."""
    if setting.command is not None:
        changed = change_axes(setting, {axis: value})
        try:
            check(changed)
        except UsageError:
            return None
        return strip(changed)
    fixed = {name: [getattr(setting, name)] for name in AXES}
    if value != getattr(setting, axis):
        for name in FOLLOWS.get(axis, ()):
            del fixed[name]
            if name in given:
                fixed[name] = [given[name][0]]
    try:
        (changed,) = grid({**fixed, axis: [value]}, asked=())
    except UsageError:
        return None
    return strip(changed)


class Findings:
    """What the rows of a search show.

    Args:
        now: the setting that is used now.
        levers: the values of each axis to try.
        given: the values that flags give.
        for_time: whether a value of a user's own flag is advised although it may train something
            else: without that, only where every run tells its loss.
    """

    def __init__(
        self,
        now: Case,
        levers: Mapping[str, Sequence[Value]],
        given: Mapping[str, Sequence[Value]],
        for_time: bool = False,
    ) -> None:
        self.now, self.levers, self.given, self._for_time = now, levers, given, for_time
        self.runs: dict[Case, list[Row]] = {}  # of each setting
        self.times: dict[Case, list[float]] = {}  # the epoch times of those that trained, in s
        self.cases: dict[Case, Case] = {}  # the longest by which each was measured

    def add(self, case: Case, row: Row) -> None:
        """Add a run, if its setting is the present one but for values of levers. Of the runs of a
        setting only the longest count: those of the largest part of an epoch."""
        setting = strip(case)
        for name in list_changes(setting, self.now):
            if getattr(setting, name) not in self.levers.get(name, ()):
                return
        longest = self.cases.setdefault(setting, case)
        if measure_length(case) < measure_length(longest):
            return
        if measure_length(case) > measure_length(longest):
            self.cases[setting] = case
            self.runs[setting] = []
            self.times.pop(setting, None)
        self.runs.setdefault(setting, []).append(row)
        time = row.number("epoch_time_s")
        if case.command is not None:  # of which each may tell of epochs of another size
            rate = row.number("images_per_s") if row.unit == self.unit else None
            time = ITEMS / rate if rate else None
        if time and row.status is Status.OK:
            self.times.setdefault(setting, []).append(time)

    @property
    def unit(self) -> str:
        """What the present setting counts, of a command; times of anything else do not compare."""
        return next((row.unit for row in self.runs.get(self.now, ())), "")

    @property
    def kept(self) -> list[str]:
        """The axes of a user's own whose present values are kept, since what others train is not
        known."""
        own = [axis for axis in self.levers if is_own(axis)]
        timed = chain.from_iterable(self.runs[setting] for setting in self.times)
        known = all(row.number("train_loss") is not None for row in timed)
        return [] if self._for_time or known else own

    @property
    def rows(self) -> list[Row]:
        return [row for of in self.runs.values() for row in of]

    def find_time(self, setting: Case) -> float:
        """Return the median epoch time, in s; inf if it is not known."""
        return median(self.times.get(setting, [math.inf]))

    def choose(self, among: Iterable[Case], *, exact: bool = False) -> Choice[Case] | None:
        """Choose the setting to train with, by the rule of `bench.answers.choice`, of those with a
        time and the present value of `kept`; None if none was measured."""
        fixed = {axis: getattr(self.now, axis) for axis in self.kept}
        weighed = [
            Candidate(one, self.times[one], one.batch_size, self._rate_unusual(one))
            for one in among
            if one in self.times and all(getattr(one, axis) == fixed[axis] for axis in fixed)
        ]
        return choose_among(weighed, self.now.batch_size, exact=exact) if weighed else None

    def _rate_unusual(self, setting: Case) -> tuple[bool, int]:
        """Return how far a setting is from the present one, as a sort key: whether it is another
        recipe that rounds the network's weights, and how much it changes."""
        other = setting.precision != self.now.precision
        return other and PRECISIONS[setting.precision].casts, len(list_changes(setting, self.now))

    @property
    def advised(self) -> Case | None:
        """The setting to train with; None if none was measured."""
        choice = self.choose(self.times)
        return choice.chosen if choice else None

    def explore(self) -> Iterator[Case]:
        """Yield the settings to try in turn, each once it was measured, as the next ones follow
        from it: the present one, and the values of one lever after the other at the best so far."""
        yield self.now
        best = self.now
        for _ in range(ROUNDS):
            before = best
            for axis, values in self.levers.items():
                tried = [best]
                steps = self._climb(best) if axis == "batch_size" else iter(values)
                for value in steps:
                    if (setting := change(best, axis, value, self.given)) is not None:
                        yield setting
                        tried.append(setting)
                # single runs prove little, and of a gain that nothing proves yet another lever may
                # make more
                lead = self.choose(tried, exact=True)
                best = lead.chosen if lead else best
            if best == before:
                return

    def _climb(self, best: Case) -> Iterator[Value]:
        """Yield larger batch sizes as long as each is faster than the one before by more than
        `STEADY`, then smaller ones as long as they are within `NEAR` of the lowest time."""
        sizes = sorted(int(str(value)) for value in self.levers["batch_size"])
        lowest = self.find_time(best)
        for size in (n for n in sizes if n > best.batch_size and best in self.times):
            yield size
            time = self.find_time(replace(best, batch_size=size))
            if time > (1 - STEADY) * lowest:
                break
            lowest = time
        for size in (n for n in reversed(sizes) if n < best.batch_size):
            yield size
            if (1 + NEAR) * lowest < self.find_time(replace(best, batch_size=size)) < math.inf:
                return

    def list_unrepeated(self) -> list[Case]:
        """List the present and the best settings that ran less often than `MIN_REPEATS`, those that
        ran least first."""
        choice = self.choose(self.times)
        if choice is None:
            return []
        rivals = [one for one in (*choice.near, *choice.open) if one != choice.chosen]
        rivals.sort(key=lambda one: one.batch_size)
        wanted = dict.fromkeys([self.now, choice.chosen, choice.fastest, *rivals[:CONTENDERS]])
        few = [s for s in wanted if 0 < len(self.times.get(s, ())) < MIN_REPEATS]
        return sorted(few, key=lambda s: len(self.times[s]))
