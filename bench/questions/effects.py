"""What changing one axis does with all else equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from bench.case import AXES
from bench.record import RELIABLE
from bench.study.axes import (
    Machines,
    find_varying,
    name_setting,
    name_value,
    order_values,
    take_values,
)
from bench.study.doubts import DOUBTS
from bench.study.estimate import ENERGY, JUDGED, LOSS, MEMORY, TIME, Estimate, estimate
from bench.study.pairs import Changed, Pair, find_changes, list_free
from bench.text import name_first

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Effect:
    """One change of one axis, with all else equal.

    Attributes:
        axis: an axis of `Case`, or ``machine``.
        before: its value, for people; ``after`` is the one it changes to.
        pairs: the ``cell`` of the case before and of the case after, of all that differ in it.
        estimates: by the name of one of `JUDGED`, each over some of these pairs.
        estimated: whether any of the times compared was extrapolated.
        doubts: what speaks against the cases compared, as remarks.
        over: at which settings of other axes times are compared, for people; empty where that is at
            all that any change of this axis has.
        apart: whether changes of the same baseline are compared at other settings, for want of any
            that all have.
    """

    axis: str
    before: str
    after: str
    pairs: tuple[tuple[int, int], ...]
    estimates: dict[str, Estimate]
    estimated: bool
    doubts: tuple[str, ...]
    over: str = ""
    apart: bool = False

    @property
    def time(self) -> Estimate | None:
        """What it does to the epoch time."""
        return self.estimates.get(TIME.name)

    @property
    def memory(self) -> Estimate | None:
        """What it does to the peak of memory."""
        return self.estimates.get(MEMORY.name)

    @property
    def energy(self) -> Estimate | None:
        """What it does to the energy of an epoch."""
        return self.estimates.get(ENERGY.name)

    @property
    def loss(self) -> Estimate | None:
        """What it does to the training loss."""
        return self.estimates.get(LOSS.name)


KINDS = ("measured", "fake", "published")
"""Where there are cases of several kinds, the effects are of the first of these."""


def find_effects(rows: pd.DataFrame, cases: pd.DataFrame, machines: Machines) -> list[Effect]:
    """What each change of each axis does, in the order of the overview's columns.

    Args:
        rows: the runs that count, of `summaries.latest`, with the ``cell`` of each.
        cases: the same summarized; ``cell`` names their runs.
    """
    ended = cases[cases["status"].isin(RELIABLE)]
    kind = next((kind for kind in KINDS if (ended["kind"] == kind).any()), "")
    ended = ended[ended["kind"] == kind]
    changes = [
        change
        for axis in find_varying(ended)
        if axis not in AXES or not AXES[axis].spread
        for change in find_changes(axis, ended, machines)
    ]
    found: list[dict[str, Estimate]] = [{} for _ in changes]
    for metric in JUDGED:
        for into, estimated in zip(found, estimate(metric, changes, rows), strict=True):
            if estimated is not None:
                into[metric.name] = estimated
    kept = [pair for pair in zip(changes, found, strict=True) if pair[1]]
    return [
        effect
        for _, axis in groupby(kept, key=lambda pair: pair[0].axis)
        for effect in _describe_axis(list(axis), ended, machines)
    ]


def _describe_axis(
    found: Sequence[tuple[Changed, dict[str, Estimate]]], cases: pd.DataFrame, machines: Machines
) -> Iterator[Effect]:
    """The effects of one axis, each with the settings at which it was compared: in time, if any."""
    used: list[list[Pair]] = []
    rivals: dict[str, set[frozenset[int]]] = {}
    for change, estimates in found:
        cells = {*estimates.get(TIME.name, next(iter(estimates.values()))).cells}
        pairs = [pair for pair in change.pairs if (pair.a, pair.b) in cells]
        used.append(pairs)
        rivals.setdefault(change.before, set()).add(frozenset(pair.key for pair in pairs))
    every = frozenset(pair.key for change, _ in found for pair in change.pairs)
    everywhere = all(held == {every} for held in rivals.values())
    settings: dict[str, dict[int, Any]] = {}
    if not everywhere:
        before = cases[cases["cell"].isin({p.a for change, _ in found for p in change.pairs})]
        free = list_free(found[0][0].axis)
        settings = {
            name: dict(zip(before["cell"], take_values(before, name), strict=True))
            for name in find_varying(before)
            if name not in free
        }
    for (change, estimates), pairs in zip(found, used, strict=True):
        yield Effect(
            change.axis,
            change.before,
            change.after,
            tuple((pair.a, pair.b) for pair in change.pairs),
            estimates,
            any(pair.estimated for pair in pairs),
            tuple(_list_doubts(pairs)),
            _name_settings(pairs, settings, machines),
            len(rivals[change.before]) > 1,
        )


def _name_settings(
    pairs: Sequence[Pair], settings: Mapping[str, Mapping[int, Any]], machines: Machines
) -> str:
    """Name the settings of pairs, by axis and cell: ``fp32, fp16 · batch size 128, 256``."""
    said = []
    for axis, value_of in settings.items():
        values = order_values(axis, [value_of[pair.a] for pair in pairs])
        text = name_first([name_value(axis, value, machines) for value in values], 4)
        said.append(name_setting(axis, text))
    return " · ".join(said)


def _list_doubts(pairs: Sequence[Pair]) -> Iterator[str]:
    held = frozenset[str]().union(*(pair.doubts for pair in pairs))
    yield from (DOUBTS[name].remark for name in DOUBTS if name in held)
