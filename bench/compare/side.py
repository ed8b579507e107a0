"""One side of a comparison: a sweep, or its cases with one value of an axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench.case import Case
from bench.errors import UsageError
from bench.record import COMPARABLE, RELIABLE, REPEATED, Status
from bench.store.reader import read_rows
from bench.store.rows import fill_unknown, group, keep_cases, keep_latest
from bench.study.quantities import Metric
from bench.study.runs import Run, link_runs, list_runs
from bench.verdict import find_classes

Readings = list[tuple[int, float]]  # seed and value of each repeat


@dataclass(frozen=True)
class Part:
    """The part of an epoch that a side measured of a case."""

    share: float  # of an epoch: at most the case's fraction
    steps: int | None  # the limit of ``--steps``, if it reduced the share
    known: bool  # false with ``--steps`` if no step was measured; ``share`` is then the fraction

    def __str__(self) -> str:
        """Return the part as it was requested: ``fraction 0.25`` or ``20 steps``."""
        return f"fraction {self.share:.3g}" if self.steps is None else f"{self.steps} steps"


@dataclass(frozen=True, eq=False)
class SideCase:
    """A case as one side ran it, in one environment."""

    side: str  # its name
    runs: list[Run]

    @property
    def case(self) -> Case:
        return self.runs[0].case

    @property
    def part(self) -> Part:
        run = self.runs[0]  # all runs of one case measure the same part
        steps = run.case.steps if run.part < run.fraction else None
        return Part(run.part, steps, run.part_known)

    def readings(self, metric: Metric) -> Readings:
        """Return seed and value of each usable repeat that has a value."""
        counted = RELIABLE if metric.diverged else {Status.OK}
        return [
            (int(run.run_seed), metric.read(value))
            for run in self.runs
            if run.status in counted and (value := getattr(run, metric.column)) == value
        ]

    @property
    def classes(self) -> int | None:
        """The classes that the loss distinguishes; see `find_classes`."""
        run, case = self.runs[0], self.case
        return find_classes(case.workload, case.classes, run.dataset_classes, run.dataset_source)

    @property
    def usable(self) -> list[Run]:
        """The runs that ended with a time."""
        return [run for run in self.runs if run.status in RELIABLE]

    @cached_property
    def outcomes(self) -> dict[str, int]:
        return dict(Counter(run.status + " (inferred)" * run.inferred for run in self.runs))

    @property
    def ended(self) -> str:
        """The outcomes of its runs: ``ok ×4, oom``."""
        return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in self.outcomes.items())

    @property
    def severities(self) -> tuple[int, ...]:
        """The best and the worst of its runs: 0 is ok, 1 diverged, 2 unusable. Empty if all runs
        were stopped from outside, which says nothing about the case."""
        order = {Status.OK: 0, Status.DIVERGED: 1}
        found = [order.get(run.status, 2) for run in self.runs if run.status not in REPEATED]
        return (min(found), max(found)) if found else ()


@dataclass(frozen=True, eq=False)
class Side:
    """One side: the latest attempt at each of its runs, without sentinels. Their ``cell`` tells
    cases in each environment apart."""

    name: str  # in tables: A, B, or a value of an axis, such as ``on``
    title: str  # in sentences, such as ``compile default``
    path: Path
    runs: list[Run]

    @property
    def cases(self) -> list[Case]:
        """The case of each run."""
        return [run.case for run in self.runs]

    @cached_property
    def ran(self) -> dict[int, SideCase]:
        groups = group(self.runs, lambda run: run.cell)
        return {runs[0].cell: SideCase(self.name, runs) for runs in groups}

    @property
    def cells(self) -> list[Run]:
        """A run of each cell, as `bench.study.pairs.match` takes it."""
        return [one.runs[0] for one in self.ran.values()]

    def environment(self, name: str) -> list[str]:
        """Return the distinct values of an environment column, without empty ones."""
        values = dict.fromkeys(getattr(run, name) for run in self.runs)
        known = (value for value in values if value == value and value != "")
        return [f"{value:.0f}" if isinstance(value, float) else str(value) for value in known]

    def mixes(self, name: str) -> bool:
        """Return whether runs on one device, dataset or model differ where they must agree."""
        found: dict[tuple[Any, ...], set[str]] = {}
        for run in self.runs if name in COMPARABLE else ():
            place = tuple(getattr(run, axis) for axis in COMPARABLE[name])
            found.setdefault(place, set()).add(getattr(run, name))
        return any(len(values - {""}) > 1 for values in found.values())


def read_side(name: str, path: Path) -> Side:
    """Read one side. Raises UsageError: it has no records of sweeps, or they cannot be read."""
    every = link_runs(list_runs(read_rows(path)))
    kept = keep_cases(every)
    if every and not kept:
        raise UsageError(f"{path}: has only probes of bench.fit; compare sweeps")
    if not kept:
        raise UsageError(f"{path}: no records yet; compare sweeps that have run")
    runs = link_runs(keep_latest(kept))
    # a run that ended before reading its environment takes that of its case
    for part in group(runs, lambda run: run.asked):
        for run, told in zip(part, fill_unknown(part), strict=True):
            vars(run).update(zip(COMPARABLE, told, strict=True))
    tell, cells = attrgetter("asked", *COMPARABLE), dict[Any, int]()
    for run in runs:
        run.cell = cells.setdefault(tell(run), len(cells))
    return Side(name, name, path, runs)
