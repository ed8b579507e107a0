"""Searches in a sweep's records: the probes of each family of cases, and its wall."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import itemgetter
from typing import Any

from bench.axis import Trait
from bench.case import AXES, Case, default_lr, list_affecting
from bench.record import MEASURED, Status
from bench.store.rows import Row, fill_unknown, group
from bench.text import parse_bytes
from bench.wall.answer import Wall, conclude
from bench.wall.search import MARGIN, START, STEP, Goal, Probe, list_sizes

SHORT_STEPS, LONG_STEPS = 4, 16
"""Steps of a probe after its warm-up, and of the longer run that confirms the result. An allocator
reaches its peak within the warm-up; only a sweep shows growth after more than 16 steps."""

_LESS = 0.05
"""Share of a card's memory by which the memory left by others may differ between probes."""

APART = tuple(name for name in AXES if name not in list_affecting(Trait.FIT))
"""Axes that do not change which batches fit: all families have their defaults."""


def name_family(case: Case) -> Case:
    """Return the key of all cases that are searched together: ``case`` without the axes that do not
    matter, with the optimizer's default learning rate. Its batch size is a placeholder."""
    plain = {name: getattr(Case, name) for name in APART}
    plain |= {"lr": default_lr(case.optimizer), "batch_size": Case.batch_size * case.accumulate}
    return replace(case, **plain)


def make_probe(family: Case, batch_size: int, long: bool) -> Case:
    steps = LONG_STEPS if long else SHORT_STEPS
    return replace(family, batch_size=batch_size, steps=steps)


@dataclass
class Trial:
    """The probes of a family so far, in order, and what their rows say about the machine.

    ``train_images`` is None if no row has it. ``retried`` are the batch sizes of cases (not probes)
    that made the allocator retry. ``spilled`` is whether a driver moved to the host what the card
    had no room for, as on Windows and in WSL: such a batch does not fit. ``batchnorm`` is whether
    the network may have BatchNorm; None if it must be inferred from the rows.
    """

    family: Case
    rows: list[Probe] = field(default_factory=list)
    train_images: int | None = None
    retried: set[int] = field(default_factory=set)
    spilled: bool = False
    batchnorm: bool | None = None

    def add(self, row: Row) -> None:
        """Add a row of the records; a row that was cut off is ignored."""
        if images := row.number("train_images"):
            self.train_images = int(images)
        if row.status in (Status.INTERRUPTED, Status.LOST):
            return
        # a peak that was clipped in warm-up would not be on the line either
        counts = [row.number(name) for name in ("warmup_alloc_retries", "alloc_retries")]
        retries = [int(count) for count in counts if count is not None]
        status = row.status
        limit, card = self.family.memory_limit, row.number("gpu_memory_bytes")
        left = card - (row.number("baseline_device_bytes") or 0) if card else None
        # an allocator that is short of memory frees its cache, and the context grows after that, by
        # some 150 MB on an H100: the two peaks are not simultaneous
        held = _peak(row, "reserved") if sum(retries) else _read_reserved(row)
        if status in MEASURED and not limit and held and left and held > left:
            status, self.spilled = Status.OOM, True
        known = [*([parse_bytes(limit)] if limit else []), *([left] if left else [])]
        self.rows.append(
            Probe(
                batch_size=row.batch_size,
                status=status,
                used_bytes=read_peak(row),
                alloc_retries=sum(retries) if retries else None,
                long=(row.number("steps") or math.inf) > SHORT_STEPS,
                setup_bytes=row.number("setup_process_bytes"),
                room_bytes=min(known, default=None),
                # without --allow-shared, such a lack of memory is an error
                crowded=status is Status.ERROR and bool(row.number("neighbours_computing")),
            )
        )

    @property
    def probes(self) -> list[Probe]:
        """The probes; a refused one with clearly less memory left than others had is crowded."""
        most = max((p.room_bytes for p in self.rows if p.room_bytes), default=0.0)
        return [
            replace(p, crowded=True)
            if p.refused and p.room_bytes and p.room_bytes < (1 - _LESS) * most
            else p
            for p in self.rows
        ]

    @property
    def rooms(self) -> list[float]:
        """The memory available to each probe that trained or ran out of memory, if known."""
        return [p.room_bytes for p in self.probes if p.room_bytes and (p.trained or p.refused)]

    @property
    def available_bytes(self) -> float | None:
        """The least memory that was available to any of these probes (`rooms`)."""
        return min(self.rooms, default=None)

    def describe_others(self) -> str:
        """Describe how the memory left by others on the card changed; empty if it did not."""
        low, high = min(self.rooms, default=0.0), max(self.rooms, default=0.0)
        if low >= (1 - _LESS) * high:
            return ""
        return (
            f"others on the GPU left between {low / 2**30:.1f} and {high / 2**30:.1f} GiB during "
            f"the search; what is recommended fits in {low / 2**30:.1f} GiB"
        )

    def aim(self, images: int, step: int) -> Goal:
        batchnorm = self.batchnorm
        if batchnorm is None:
            # only a network without BatchNorm was tried at sizes that BatchNorm cannot train
            every, usual = (list_sizes(self.family, images, step, b) for b in (False, True))
            batchnorm = not {p.batch_size for p in self.rows} & (set(every) - set(usual))
        sizes = list_sizes(self.family, images, step, batchnorm)
        return Goal(sizes, self.available_bytes, START * self.family.accumulate)


def read_peak(row: Row) -> float | None:
    """Return the peak memory that counts against the available memory. With a memory limit, it is
    what torch's allocator reserves, plus the context. Otherwise it is the process's memory, else
    the device's over its baseline, else the same as with a limit."""
    readings = [_peak(row, "process"), _peak(row, "device")]
    readings.insert(0 if row.memory_limit else 2, _read_reserved(row))
    return next((reading for reading in readings if reading is not None), None)


def _read_reserved(row: Row) -> float | None:
    """Return the peak of torch's allocator plus the context: all of a process's GPU memory."""
    reserved, context = _peak(row, "reserved"), row.number("context_bytes")
    return None if reserved is None or context is None else reserved + context


def _peak(row: Row, owner: str) -> float | None:
    peaks = (row.number(f"{phase}_{owner}_bytes") for phase in ("warmup", "peak"))
    return max((peak for peak in peaks if peak is not None), default=None)


def read_trials(rows: Iterable[Row]) -> list[Trial]:
    """Return the searches in the rows of a folder, in order. Each environment, as with ``--mix``,
    has its own search."""
    rows = [*rows]
    probes = [(name_family(row.case), row) for row in rows if row.probe]
    trials: dict[Any, Trial] = {}
    for alike in group(probes, itemgetter(0)):
        for (family, row), environment in zip(
            alike, fill_unknown([row for _, row in alike]), strict=True
        ):
            trials.setdefault((family, environment), Trial(family)).add(row)
    for row in rows if trials else ():
        if not row.probe and row.status in MEASURED and (row.number("alloc_retries") or 0) > 0:
            for trial in trials.values():
                if trial.family == name_family(row.case):
                    trial.retried.add(row.case.batch_size)
    return [*trials.values()]


def read_goal(told: Any) -> tuple[int | None, float]:
    """Read the step and the margin of a folder's last search from ``search`` in its configuration;
    None and `MARGIN` by default."""
    told = told if isinstance(told, dict) else {}
    step, margin = told.get("step"), told.get("margin")
    return (
        step if isinstance(step, int) and step > 0 else None,
        margin if isinstance(margin, float) and 0 <= margin < 1 else MARGIN,
    )


def read_walls(
    rows: Iterable[Row], step: int | None = None, margin: float = MARGIN
) -> list[tuple[Case, Wall]]:
    """Return the family (`name_family`) and the wall of each search in the rows of a
    folder. ``step`` is the resolution in images, by default the greatest
    common divisor of the tried batch sizes; the recommended batch leaves ``margin`` free."""
    found = []
    for trial in read_trials(rows):
        common = reduce(math.gcd, (probe.batch_size for probe in trial.probes), 0) or STEP
        found.append((trial.family, conclude_trial(trial, step or common, margin)))
    return found


def conclude_trial(trial: Trial, step: int, margin: float = MARGIN) -> Wall:
    largest = max((probe.batch_size for probe in trial.probes), default=step)
    goal = trial.aim(trial.train_images or largest, step)
    return conclude(trial.probes, goal, margin, trial.retried)
