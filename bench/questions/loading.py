"""What loading the data costs: each case of torch's DataLoader beside that of the device's loader.

The device makes its batches from data that are there already, so its epoch is one that waits for no
loader. The loader-bound share is the part of the DataLoader's epoch that this one does not take::

    share = (t_torch - t_device) / t_torch

That is the differential method of DS-Analyzer (Mohan, Phanishayee, Raniwala & Chidambaram,
"Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021), which trains on data held by the
GPU to find what data stalls cost. A profiler would count every moment that a worker or the training
process waits; here, only what makes the epoch longer counts. A batch that is prepared while the
device is busy costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.case import AXES, Case, format_value, free_axes
from bench.limits import STEADY
from bench.record import RELIABLE
from bench.render.cells import (
    ESTIMATE,
    Row,
    iterate,
    name_case,
    name_place,
    quantity_cell,
    time_cell,
)
from bench.render.model import NOTHING, Cell, Head, Table
from bench.store.attempts import number_groups
from bench.study.axes import Machines, find_varying, list_naming_axes, sort_cases
from bench.study.estimate import TIME
from bench.study.quantities import QUANTITIES
from bench.study.summaries import SOURCE
from bench.verdict import Ratio, Verdict, compare

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 40
"""Rows of the table; more would not be read."""

SETTINGS = free_axes("loader")
"""The axes in which cases of the table's sets may differ."""


@dataclass(frozen=True)
class Loaded:
    """A case of torch's DataLoader beside that of the device's loader, equal in all else.

    Attributes:
        row: the case, of the frame of cases; it has a time or says why not.
        ratio: of epoch times, over that of the device's loader; without a value where either ended
            without a time.
        estimated: whether either was extrapolated.
    """

    row: Row
    ratio: Ratio
    estimated: bool

    @property
    def share(self) -> float:
        """The loader-bound share; negative where the DataLoader is faster, NaN without a ratio."""
        return _share(self.ratio.value)

    @property
    def ends(self) -> tuple[float, float]:
        """The 95 % interval of the share; NaN with too few repeats."""
        return _share(self.ratio.low), _share(self.ratio.high)

    @property
    def free(self) -> bool | None:
        """Whether the epoch takes no longer than the device loader's; None where it is not certain.

        No longer is within `STEADY`. By one or two runs it is never certain.
        """
        if self.ratio.judge(STEADY) in (Verdict.SAME, Verdict.LOWER):
            return True
        near = self.ratio.value is not None and self.ratio.value <= 1 + STEADY
        return None if near else False


def _share(ratio: float | None) -> float:
    return math.nan if ratio is None else 1 - 1 / ratio


@dataclass(frozen=True)
class Comparison:
    """A case of the device's loader, and those of torch's that differ in nothing else."""

    device: Row
    loaded: tuple[Loaded, ...]


def find_loaded(rows: pd.DataFrame, cases: pd.DataFrame) -> list[Comparison]:
    """The cases of torch's DataLoader that have one of the device's loader beside them.

    Args:
        rows: the runs that count, of `summaries.latest`.
        cases: the same summarized.
    """
    if cases["loader"].nunique() < 2:
        return []
    equal = [*SOURCE, *(name for name in AXES if name not in SETTINGS), "environment", "kind"]
    timed = rows[rows["status"].isin(RELIABLE)].dropna(subset=[TIME.column])
    times = timed.groupby("cell")[TIME.column].apply(list).to_dict()
    sets: list[tuple[Row, list[Row]]] = []
    for _, part in cases.groupby(number_groups(cases, equal), sort=False):
        ours = list(iterate(part[part["loader"] == Case.loader]))
        theirs = list(iterate(sort_cases(part[part["loader"] != Case.loader], SETTINGS)))
        if len(ours) == 1 and ours[0].cell in times and theirs:
            sets.append((ours[0], theirs))
    pairs = [(device, row) for device, others in sets for row in others]
    ratios = iter(compare([(times[a.cell], times.get(b.cell, [])) for a, b in pairs]))
    return [
        Comparison(
            device,
            tuple(
                Loaded(row, _leave_out(next(ratios), times.get(row.cell)), _cut(device, row))
                for row in others
            ),
        )
        for device, others in sets
    ]


def _leave_out(ratio: Ratio, times: Sequence[float] | None) -> Ratio:
    return ratio if times else Ratio(lack="it has no time")


def _cut(*rows: Row) -> bool:
    return any(row.part < 1 for row in rows)


# ------------------------------------------------------------------------------- how many workers


@dataclass(frozen=True)
class Enough:
    """From how many workers on the loader no longer matters, among cases that differ in no more.

    Attributes:
        first: the first of these cases.
        tried: numbers of workers, upwards.
        workers: the smallest from which every one tried is as fast as the device's loader; None
            where there is none.
        certain: whether repeats show that.
    """

    first: Row
    tried: tuple[int, ...]
    workers: int | None
    certain: bool


def find_enough(comparison: Comparison) -> Iterator[Enough]:
    """The answer for each way of loading; loading without workers belongs to each of them."""
    rest = [name for name in SETTINGS if name not in ("loader", "workers")]
    timed = [one for one in comparison.loaded if one.ratio.value is not None]
    alone = [one for one in timed if not one.row.workers]
    ways: dict[tuple[object, ...], list[Loaded]] = {}
    for one in timed:
        if one.row.workers:
            ways.setdefault(tuple(getattr(one.row, name) for name in rest), []).append(one)
    if not ways and alone:
        ways[()] = []
    for loaded in ways.values():
        pinned = {one.row.pin_memory for one in loaded} or {one.row.pin_memory for one in alone}
        tried = [one for one in alone if one.row.pin_memory in pinned] + loaded
        tried.sort(key=lambda one: one.row.workers)
        enough: list[Loaded] = []
        for one in reversed(tried):
            if one.free is False:
                break
            enough.append(one)
        yield Enough(
            tried[-1].row,
            tuple(int(one.row.workers) for one in tried),
            int(enough[-1].row.workers) if enough else None,
            all(one.free for one in enough) and bool(enough),
        )


def write_enough(enough: Enough, axes: Sequence[str]) -> str:
    """In a sentence: ``fp32 · batch size 128: from 4 workers on, the loader no longer matters.``"""
    shown = [axis for axis in axes if axis not in ("loader", "workers")]
    tried = ", ".join(map(str, enough.tried))
    name = name_case(enough.first, shown)
    if enough.workers is None:
        return f"{name}: the loader matters with every number of workers tried ({tried})."
    few = "" if enough.certain else ", but there are too few runs to be certain; use --repeats 5"
    if enough.workers == 0:
        return f"{name}: the loader does not matter, even without workers{few}."
    return f"{name}: from {enough.workers} workers on, the loader no longer matters{few}."


# ----------------------------------------------------------------------------------------- a table


def tabulate_loaded(
    comparisons: Sequence[Comparison], cases: pd.DataFrame, machines: Machines
) -> Iterator[Table]:
    """One row a case: that of the device's loader, then those of torch's DataLoader.

    Args:
        comparisons: of `find_loaded`.
        cases: those that the report is about.
    """
    if not comparisons:
        return
    varying = find_varying(cases)
    named = [axis for axis in list_naming_axes(varying) if axis not in SETTINGS]
    settings = [axis for axis in SETTINGS[2:] if axis in varying]
    heads = (
        Head("loader", "loader", "what made the batches", False),
        Head("workers", "workers", "processes that load; 0: the training process itself"),
        *(Head(axis, axis.replace("_", " "), AXES[axis].metadata["help"]) for axis in settings),
        Head("epoch_time_s", "epoch time (s)", "one training epoch", better="lower"),
        Head("share", "loader-bound (%)", "part of the epoch that the device's loader does not "
             "take", better="lower"),
        Head("interval", "95 % interval", "of that part", keep=8),
        Head("first_batch", "first batch (s)", "start of the epoch to its first batch",
             better="lower", keep=7),
        Head("alone", "loader alone (items/s)", "without training", better="higher", keep=7),
    )  # fmt: skip
    lines: list[tuple[Cell, ...]] = []
    groups: dict[int, str] = {}
    for comparison in comparisons:
        rows = [comparison.device, *(one.row for one in comparison.loaded)]
        if len(lines) + len(rows) > MOST_ROWS and lines:
            break
        groups[len(lines)] = name_place(comparison.device, named, machines)
        beside = [None, *comparison.loaded]
        lines += [tuple(_write(row, one, settings)) for row, one in zip(rows, beside, strict=True)]
    told = [enough for one in comparisons[: len(groups)] for enough in find_enough(one)]
    notes = [
        *(write_enough(enough, [*named, *settings]) for enough in told),
        "Loader-bound: the part of the epoch time that would be saved if the batches were made on "
        "the device. Waiting for the loader while the device is busy is not counted. "
        f"The loader no longer matters where the epoch is at most {100 * STEADY:.0f} % longer.",
    ]
    if any(row.device == "cpu" for row in (one.device for one in comparisons)):
        notes.append("On a CPU the workers take cores from the training, which counts as loading.")
    if len(groups) < len(comparisons):
        notes.append(f"{len(comparisons) - len(groups):,} more sets are left out; --where chooses.")
    yield Table(
        "loading",
        "Loading: torch's DataLoader beside the device's loader",
        heads,
        tuple(lines),
        tuple(notes),
        groups,
    ).drop_empty(but=("loader", "workers", "share"))


def _write(row: Row, one: Loaded | None, settings: Sequence[str]) -> Iterator[Cell]:
    yield Cell(row.loader, row.loader)
    yield Cell(str(row.workers), int(row.workers)) if one else Cell(NOTHING)
    for axis in settings:
        said = format_value(getattr(row, axis))
        yield Cell(said, said) if one else Cell(NOTHING)
    yield time_cell(row, spread=False)
    mark = ESTIMATE if one and one.estimated else ""
    known = one is not None and not math.isnan(one.share)
    yield Cell(f"{mark}{100 * one.share:.1f}", one.share) if one and known else Cell(NOTHING)
    if one and known and not math.isnan(one.ends[0]):
        yield Cell(" to ".join(f"{100 * end:.1f}" for end in one.ends))  # either may be below 0
    else:
        yield Cell(NOTHING)
    for name in ("loader_first_batch_s", "loader_samples_per_s"):
        yield quantity_cell(QUANTITIES[name], row, spread=False)
