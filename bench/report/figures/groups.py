"""The cases of each panel: those of one machine, model and dataset.

Within a panel, a line is cases of one precision that differ only in batch size. All other axes are
at the panel's baseline: the values that most of its cases have, or the defaults if several are
equally common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pandas as pd

from bench.case import AXES, FOLLOWS, SAME_QUESTION, Case
from bench.origin import LABELS
from bench.questions.gpus import Line, name_line
from bench.record import Status
from bench.render.cells import TIMED, take_first
from bench.report.document import Report
from bench.store.attempts import number_groups
from bench.study.axes import find_varying, name_axis, name_value
from bench.study.summaries import SOURCE
from bench.study.sweeps import MOST_STEP_BYTES

MOST_PANELS = 6  # of one figure: the machines, models and datasets with the most cases
MOST_LINES = 6  # panels of a figure: the first lines that differ in more than their precision

PANEL = (*SOURCE, "model", "dataset", "kind", "environment")  # what the cases of one panel agree on

_FREE = (*PANEL, "device", "precision", *FOLLOWS["precision"], "batch_size", *SAME_QUESTION)
HELD = tuple(name for name in AXES if name not in _FREE)
"""The axes that are held at a panel's baseline."""


@dataclass(frozen=True)
class Group:
    """The cases of one panel."""

    place: str  # machine, model and dataset, as far as the panels differ in them
    baseline: str  # its values of the axes that vary, as far as panels differ in them
    cases: pd.DataFrame  # at the baseline
    all: pd.DataFrame  # at any value of `HELD`
    settings: dict[str, Any]  # the value at the baseline of each axis of `HELD` that varies


@dataclass(frozen=True)
class View:
    """A report, cut into panels once for all figures."""

    report: Report
    steps: Callable[[str], pd.DataFrame]  # of a sweep, by its name; empty for the published one
    groups: tuple[Group, ...] = ()  # those with the most cases, in the order of the overview
    place: str = ""  # the machine, model and dataset that all share
    baseline: str = ""  # the values that all share of the axes that vary


def view_report(report: Report) -> View:
    sweeps = {sweep.name: sweep for sweep in report.sweeps}
    if report.reference:
        sweeps[""] = report.reference
    steps = cache(lambda name: sweeps[name].read_steps(MOST_STEP_BYTES))
    cases = report.cases[report.cases["status"] != Status.INVALID.value]
    if not len(cases):
        return View(report, steps)
    numbers = number_groups(cases, PANEL)
    kept = sorted(numbers.value_counts().index[:MOST_PANELS])
    parts = [_drop_shorter(cases[numbers == number]) for number in kept]
    varying = [name for name in find_varying(cases) if name in HELD]
    baselines = [_keep_baseline(part) for part in parts]
    firsts = [take_first(part) for part in baselines]
    settings = [{name: getattr(first, name) for name in varying} for first in firsts]
    places, place = _share([_describe(part, report) for part in baselines])
    titles, baseline = _share([[name_setting(*item) for item in s.items()] for s in settings])
    groups = map(Group, places, titles, baselines, parts, settings)
    return View(report, steps, tuple(groups), place, baseline)


def _share(phrases: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    """Return for each list of phrases what not all lists have, and then what all have."""
    shared = [text for text in phrases[0] if all(text in other for other in phrases)]
    own = [" · ".join(text for text in phrase if text not in shared) for phrase in phrases]
    return own, ", ".join(shared)


def _drop_shorter(cases: pd.DataFrame) -> pd.DataFrame:
    """Keep, of cases that differ only in how they were measured, the one that measured most."""
    axes = [name for name in AXES if name not in SAME_QUESTION]
    ordered = cases.sort_values(list(SAME_QUESTION), ascending=False, kind="stable")
    return cases.loc[sorted(ordered.drop_duplicates(axes).index)]


def _keep_baseline(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases at the most common values of `HELD`, or at the defaults if several are as
    common. Settings timed at several batch sizes come first, then those without accumulation and
    memory limit."""

    def judge(cases: pd.DataFrame) -> tuple[int, int, int, int]:
        first, timed = take_first(cases), cases[cases["status"].isin(TIMED)]
        plain = 2 * (first.accumulate == 1) + (first.memory_limit == "")
        defaults = sum(getattr(first, name) == getattr(Case, name) for name in HELD)
        return min(timed["batch_size"].nunique(), 2), plain, len(timed), defaults

    settings = number_groups(cases, HELD)
    parts: list[pd.DataFrame] = [cases[settings == n] for n in sorted(settings.unique())]
    return max(parts, key=judge)


def name_setting(axis: str, value: Any) -> str:
    """Name an axis of `Case` with its value: ``compile off``."""
    return f"{name_axis(axis)} {name_value(axis, value, {})}"


def _describe(cases: pd.DataFrame, report: Report) -> list[str]:
    """Describe where a panel's cases ran and what they are, as phrases."""
    first = take_first(cases)
    several = [name for name in ("model", "dataset") if report.cases[name].nunique() > 1]
    facts = {
        first.apart: bool(first.apart),
        LABELS["unknown"]: (cases["kind"] == "unknown").all(),
        "synthetic images": cases["synthetic"].any(),
        "extrapolated from part of an epoch": cases["extrapolated"].all(),
        "some extrapolated from part of an epoch": 0 < cases["extrapolated"].mean() < 1,
    }
    named = [report.machines[first.sweep, first.machine], *(getattr(first, n) for n in several)]
    return named + [fact for fact, holds in facts.items() if holds]


def split_lines(report: Report) -> Iterator[tuple[str, list[Line]]]:
    """Yield groups of lines that differ only in their precision, each with its title. Of a
    precision with several loss scales, the first is drawn."""
    axes = [name for name in report.named if name not in FOLLOWS["precision"]]
    parts: dict[tuple[bool, int], dict[str, Line]] = {}
    for line in report.lines:
        part = parts.setdefault((line.strong, line.group), {})
        part.setdefault(line.points[0].row.precision, line)
    for (strong, _), part in list(parts.items())[:MOST_LINES]:
        lines = list(part.values())
        name = name_line(lines[0], axes, report.machines, but="precision")
        yield f"{'strong' if strong else 'weak'}: {name}", lines
