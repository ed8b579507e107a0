"""The cost of loading data: each case of torch's DataLoader beside the same on the device's loader.

The device's loader makes batches from data that the device holds already, so its epoch waits for no
loader. The loader-bound share is the part of the DataLoader's epoch that this saves::

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
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from bench.case import Case, free_axes
from bench.limits import STEADY
from bench.questions.report_data import ReportData
from bench.render.section import Column, Section, Sheet, join, quantity_column
from bench.render.table import Cell, Row, name_case, name_place, write_ends, write_tenths
from bench.store.rows import group
from bench.study.axes import sort_cases
from bench.study.runs import Result, tell_but
from bench.text import ESTIMATE
from bench.verdict import Ratio, Verdict, compare

SETTINGS = free_axes("loader")  # the axes in which cases of a `Comparison` may differ


@dataclass(frozen=True)
class Loaded:
    """A case of torch's DataLoader, and its comparison with the same on the device's loader."""

    row: Row
    ratio: Ratio  # its epoch time over the device loader's; no value without a time
    estimated: bool  # whether either was extrapolated

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
        """Whether the epoch takes at most `STEADY` longer than the device loader's; None if that is
        uncertain. One or two runs never prove it."""
        if self.ratio.judge(STEADY) in (Verdict.SAME, Verdict.LOWER):
            return True
        near = self.ratio.value is not None and self.ratio.value <= 1 + STEADY
        return None if near else False


def _share(ratio: float | None) -> float:
    return math.nan if ratio is None else 1 - 1 / ratio


@dataclass(frozen=True)
class Comparison:
    """A case of the device's loader, and the cases of torch's that differ in nothing else."""

    device: Row
    loaded: tuple[Loaded, ...]


def _find_loaded(found: ReportData) -> Iterator[Comparison]:
    sets: list[tuple[Result, list[Result]]] = []
    for part in group(found.results, tell_but(SETTINGS)):
        ours = [row for row in part if row.loader == Case.loader]
        theirs = sort_cases([row for row in part if row.loader != Case.loader], SETTINGS)
        if len(ours) == 1 and ours[0].cell in found.times and theirs:
            sets.append((ours[0], theirs))
    pairs = [(device, row) for device, others in sets for row in others]
    times = found.times
    ratios = iter(compare([(times[a.cell], times.get(b.cell, [])) for a, b in pairs]))
    for device, others in sets:
        loaded = (Loaded(row, next(ratios), min(device.part, row.part) < 1) for row in others)
        yield Comparison(device, tuple(loaded))


def describe_enough(comparison: Comparison, axes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on the number of workers from which the loader no longer matters: ``fp32 ·
    batch size 128: from 4 workers on, the loader no longer matters.`` From that number on, every
    one tried is as fast as the device's loader. Nothing is said where no case has a time."""
    timed = [one for one in comparison.loaded if one.ratio.value is not None]
    if not timed:
        return
    tried = sorted(timed, key=lambda one: one.row.workers)
    enough = [*takewhile(lambda one: one.free is not False, reversed(tried))]
    name = name_case(tried[-1].row, [a for a in axes if a not in SETTINGS])
    slower = (one.ratio.judge(STEADY) is Verdict.HIGHER for one in tried)
    certain = all(one.free for one in enough) if enough else all(slower)
    few = min(row.repeats for row in (comparison.device, *(one.row for one in tried))) < 5
    doubt = "" if certain else f", but that is not certain{'; use --repeats 5' * few}"
    if not enough:
        numbers = ", ".join(str(int(one.row.workers)) for one in tried)
        said = f"the loader matters with every number of workers tried ({numbers})"
    elif workers := int(enough[-1].row.workers):
        said = f"from {workers} workers on, the loader no longer matters"
    else:
        said = "the loader does not matter, even without workers"
    yield f"{name}: {said}{doubt}."


_Line = tuple[Comparison, Row, Loaded | None]
"""A row of the table: its comparison, its case, and the result if that is of torch's DataLoader."""


def _tabulate_loading(found: ReportData) -> Iterator[Sheet]:
    named = [axis for axis in found.named if axis not in SETTINGS]
    rows, groups = join(
        (
            name_place(sets.device, named, found.machines),
            [(sets, sets.device, None), *((sets, one.row, one) for one in sets.loaded)],
        )
        for sets in _find_loaded(found)
    )
    case = partial(quantity_column, take=lambda line: line[1], spread=False)

    def write_share(line: _Line) -> Cell | None:
        one = line[2]
        if one is None or math.isnan(one.share):
            return None
        return Cell(f"{ESTIMATE * one.estimated}{write_tenths(one.share)}", one.share)

    columns: list[Column[_Line]] = [
        Column("loader", "loader", "what made the batches",
               lambda line: Cell(line[1].loader, line[1].loader), number=False, always=True),
        Column("workers", "workers", "processes that load; 0: the training process itself",
               lambda line: int(line[1].workers) if line[2] else None, always=True),
        case("epoch_time_s", help="one training epoch"),
        Column("share", "loader-bound (%)", "part of the epoch that the device's loader does not "
               "take", write_share, better="lower", always=True),
        Column("interval", "95 % interval", "of that part", lambda line:
               write_ends(line[2].ends, write_tenths, " to ") if line[2] else None, keep=8),
        replace(case("loader_first_batch_s", help="start of the epoch to its first batch", keep=7),
                name="first_batch"),
        replace(case("loader_samples_per_s", help="without training", keep=7), name="alone"),
    ]  # fmt: skip

    def note() -> Iterator[str]:
        for sets in {id(sets): sets for sets, *_ in rows}.values():
            yield from describe_enough(sets, named)
        yield (
            "Loader-bound: the part of the epoch time that would be saved if the batches were made "
            "on the device. Waiting for the loader while the device is busy is not counted. The "
            f"loader no longer matters where the epoch is at most {100 * STEADY:.0f} % longer."
        )
        if any(sets.device.device == "cpu" for sets, *_ in rows):
            yield "On a CPU the workers take cores from the training, which counts as loading."

    title = "Loading: torch's DataLoader beside the device's loader"
    yield Sheet(title, columns, rows, note(), groups)


LOADING = Section("loading", "Does training wait for the data loader?", _tabulate_loading)
