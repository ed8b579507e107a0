"""One side of a comparison: a sweep, or its cases with one value of an axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import AXES, Case
from bench.compare.conditions import CONDITIONS, DOUBTED, Condition
from bench.errors import UsageError
from bench.record import COMPARABLE, RELIABLE, REPEATED, Status
from bench.store.attempts import fill_unknown, keep_cases, keep_latest, number_groups
from bench.store.reader import read_records
from bench.store.runs import read_cases
from bench.study.metrics import METRICS, Metric
from bench.study.runs import link_runs, list_runs
from bench.verdict.seeds import find_classes

if TYPE_CHECKING:
    import pandas as pd

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
    case: Case
    part: Part
    runs: list[Mapping[Any, Any]]  # its records, with the columns that are needed

    def readings(self, metric: Metric) -> Readings:
        """Return seed and value of each usable repeat that has a value."""
        counted = RELIABLE if metric.diverged else {Status.OK}
        return [
            (int(run["run_seed"]), metric.read(value))
            for run in self.runs
            if run["status"] in counted and (value := run[metric.column]) == value  # NaN is empty
        ]

    @property
    def classes(self) -> int | None:
        """The classes that the loss distinguishes; see `find_classes`."""
        run, case = self.runs[0], self.case
        counted, source = run["dataset_classes"], run["dataset_source"]
        return find_classes(case.workload, case.classes, counted, source)

    def know(self, condition: Condition) -> list[Any]:
        """Return the cells of a condition in the usable runs that have it."""
        used = [run for run in self.runs if run["status"] in RELIABLE]
        told = ((run[condition.column], run[condition.known or condition.column]) for run in used)
        return [cell for cell, known in told if known == known]

    @cached_property
    def outcomes(self) -> dict[str, int]:
        return dict(Counter(run["status"] + " (inferred)" * run["inferred"] for run in self.runs))

    @property
    def ended(self) -> str:
        """The outcomes of its runs: ``ok ×4, oom``."""
        return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in self.outcomes.items())

    @property
    def severities(self) -> tuple[int, ...]:
        """The best and the worst of its runs: 0 is ok, 1 diverged, 2 unusable. Empty if all runs
        were stopped from outside, which says nothing about the case."""
        order = {Status.OK: 0, Status.DIVERGED: 1}
        found = [order.get(run["status"], 2) for run in self.runs if run["status"] not in REPEATED]
        return (min(found), max(found)) if found else ()


@dataclass(frozen=True, eq=False)
class Side:
    """One side: the latest attempt at each of its runs, without sentinels."""

    name: str  # in tables: A, B, or a value of an axis, such as ``on``
    title: str  # in sentences, such as ``compile default``
    path: Path
    records: pd.DataFrame  # with a ``cell``, a number for each case in each environment
    cases: list[Case]  # the case of each record

    @cached_property
    def ran(self) -> dict[int, SideCase]:
        names = {"cell", "part", "measured_steps", "status", "inferred", "executor", "run_seed"}
        names |= {"dataset_classes", "dataset_source"}
        names |= {metric.column for metric in METRICS.values()}
        names |= {name for c in CONDITIONS for name in (c.column, c.known) if name}
        runs = self.records[[*names]].to_dict("records")
        both = list(zip(self.cases, runs, strict=True))
        known = {
            case
            for case, run in both
            if case.steps is None or run["measured_steps"] == run["measured_steps"]
        }
        found: dict[int, SideCase] = {}
        for case, run in both:  # all runs of one case measure the same part
            steps = case.steps if run["part"] < case.fraction else None
            part = Part(run["part"], steps, case in known)
            found.setdefault(run["cell"], SideCase(self.name, case, part, [])).runs.append(run)
        return found

    @cached_property
    def cells(self) -> pd.DataFrame:
        """A row for each cell, as `bench.study.pairs.match` takes it."""
        wanted = ["cell", "part", *AXES, *COMPARABLE]
        first = self.records.loc[~self.records["cell"].duplicated(), wanted].set_index("cell")
        return first.assign(known=[self.ran[cell].part.known for cell in first.index])

    def environment(self, name: str) -> list[str]:
        """Return the distinct values of an environment column, without empty ones."""
        values = dict.fromkeys(self.records[name].tolist())  # called for every column: no pandas
        known = (value for value in values if value == value and value != "")
        return [f"{value:.0f}" if isinstance(value, float) else str(value) for value in known]

    def mixes(self, name: str) -> bool:
        """Return whether runs on one device, dataset or model differ where they must agree."""
        if name not in COMPARABLE or self.records[name].nunique() < 2:
            return False
        cells = self.records[[name, *COMPARABLE[name]]]
        known = cells[cells[name] != ""]
        return bool((known.groupby(list(COMPARABLE[name]))[name].nunique() > 1).any())


def read_side(name: str, path: Path) -> Side:
    """Read one side. Raises UsageError: it has no records of sweeps, or they cannot be read."""
    every = read_records(path)
    records = keep_cases(every)
    if len(every) and not len(records):
        raise UsageError(f"{path}: has only probes of bench.fit; compare sweeps")
    if not len(records):
        raise UsageError(f"{path}: no records yet; compare sweeps that have run")
    records = keep_latest(records).reset_index(drop=True)
    runs = link_runs(list_runs(records))
    for column in ("busy_step_s", *DOUBTED, "part"):
        records[column] = [getattr(run, column) for run in runs]
    # a run that ended before reading its environment takes that of its case
    filled = fill_unknown(records, number_groups(records, AXES))
    records = records.assign(**{name: filled[name] for name in COMPARABLE})
    records["cell"] = number_groups(records, [*AXES, *COMPARABLE])
    return Side(name, name, path, records, read_cases(records))
