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
from dataclasses import dataclass, replace
from functools import partial

from bench.case import AXES, Case, format_value, free_axes
from bench.limits import STEADY
from bench.questions.material import Material
from bench.render.cells import (
    ESTIMATE,
    Row,
    iterate,
    name_case,
    name_place,
    quantity_column,
    time_cell,
)
from bench.render.model import Cell
from bench.render.section import Column, Section, Sheet, join
from bench.store.attempts import number_groups
from bench.study.axes import name_axis, sort_cases
from bench.study.summaries import list_equal
from bench.verdict import Ratio, Verdict, compare

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


def find_loaded(found: Material) -> list[Comparison]:
    """The cases of torch's DataLoader that have one of the device's loader beside them."""
    times, cases = found.times, found.cases
    if cases["loader"].nunique() < 2:
        return []
    sets: list[tuple[Row, list[Row]]] = []
    for _, part in cases.groupby(number_groups(cases, list_equal(SETTINGS)), sort=False):
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
                Loaded(
                    row,
                    next(ratios) if times.get(row.cell) else Ratio(lack="it has no time"),
                    min(device.part, row.part) < 1,
                )
                for row in others
            ),
        )
        for device, others in sets
    ]


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

_Line = tuple[Comparison, Row, Loaded | None]
"""A row of the table: a case, and what is known of it where it is of torch's DataLoader."""


def _tell_loading(found: Material) -> Iterator[Sheet]:
    named = [axis for axis in found.named if axis not in SETTINGS]
    settings = [axis for axis in SETTINGS[2:] if axis in found.varying]
    rows, groups = join(
        (
            name_place(sets.device, named, found.machines),
            [(sets, sets.device, None), *((sets, one.row, one) for one in sets.loaded)],
        )
        for sets in find_loaded(found)
    )
    case = partial(quantity_column, take=lambda line: line[1], spread=False)
    columns: list[Column[_Line]] = [
        Column("loader", "loader", "what made the batches",
               lambda line: Cell(line[1].loader, line[1].loader),
               number=False, always=True),
        Column("workers", "workers", "processes that load; 0: the training process itself",
               lambda line: int(line[1].workers) if line[2] else None, always=True),
        *(
            Column(axis, name_axis(axis), AXES[axis].help,
                   partial(_write_setting, axis))
            for axis in settings
        ),
        Column("epoch_time_s", "epoch time (s)", "one training epoch",
               lambda line: time_cell(line[1], spread=False), better="lower"),
        Column("share", "loader-bound (%)", "part of the epoch that the device's loader does not "
               "take", lambda line: _write_share(line[2]), better="lower", always=True),
        Column("interval", "95 % interval", "of that part",
               lambda line: _write_ends(line[2]), keep=8),
        replace(case("loader_first_batch_s", help="start of the epoch to its first batch", keep=7),
                name="first_batch"),
        replace(case("loader_samples_per_s", help="without training", keep=7), name="alone"),
    ]  # fmt: skip

    def note(shown: Sequence[_Line]) -> Iterator[str]:
        for sets in {id(sets): sets for sets, *_ in shown}.values():
            yield from (write_enough(one, [*named, *settings]) for one in find_enough(sets))
        yield (
            "Loader-bound: the part of the epoch time that would be saved if the batches were made "
            "on the device. Waiting for the loader while the device is busy is not counted. The "
            f"loader no longer matters where the epoch is at most {100 * STEADY:.0f} % longer."
        )
        if any(sets.device.device == "cpu" for sets, *_ in rows):
            yield "On a CPU the workers take cores from the training, which counts as loading."

    title = "Loading: torch's DataLoader beside the device's loader"
    yield Sheet(title, columns, rows, note, groups)


def _write_setting(axis: str, line: _Line) -> Cell | None:
    said = format_value(getattr(line[1], axis))
    return Cell(said, said) if line[2] else None


def _write_share(one: Loaded | None) -> Cell | None:
    if one is None or math.isnan(one.share):
        return None
    return Cell(f"{ESTIMATE * one.estimated}{100 * one.share:.1f}", one.share)


def _write_ends(one: Loaded | None) -> str | None:
    if one is None or math.isnan(one.share + one.ends[0]):
        return None
    return " to ".join(f"{100 * end:.1f}" for end in one.ends)  # either may be below 0


LOADING = Section("loading", "Does training wait for the data loader?", _tell_loading)
