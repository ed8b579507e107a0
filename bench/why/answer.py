"""Explanations of why profiled cases that differ in one axis differ in speed, and doubts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.case import AXES, format_value
from bench.diagnosis.explanation import Explanation
from bench.errors import UsageError
from bench.questions.notes import describe_constants
from bench.questions.notices import warn
from bench.questions.profiles import doubt_profiles, explain_pairs, read_steps
from bench.questions.report_data import label_machines
from bench.render.model import Notice
from bench.study.axes import Filter, find_varying, order_values, select
from bench.study.results import make_results
from bench.study.runs import latest, read_runs
from bench.study.sweeps import read_sweeps


@dataclass(frozen=True)
class Answer:
    """The explained pairs, what they were measured on, and doubts about them."""

    explanations: Sequence[Explanation]
    conditions: Sequence[str]
    doubts: Sequence[Notice]


def explain(
    sweep: Path, axis: str, ends: Mapping[str, str | None], where: Sequence[Filter]
) -> Answer:
    """Explain the pairs of a sweep that differ in ``axis`` alone. ``ends`` are its values before
    and after as text, by flag; None is any. Raises UsageError: there is no such pair, or none was
    profiled."""
    sweeps = read_sweeps([sweep])
    runs = read_runs(sweeps)
    tried = make_results(latest(runs))
    results = select(tried, where)
    steps = read_steps(tried, sweeps)
    known = {cell for cell, one in steps.items() if one.step.profile is not None}
    profiled = [result for result in results if result.cell in known]
    if not profiled:
        raise UsageError(
            f"{sweep}: no case that is asked for has a profile; run its command again with "
            "--profile on and a new --out, or ask for other cases"
        )
    values = order_values(axis, (getattr(result, axis) for result in profiled))
    held = [format_value(value) or "none" for value in values]
    for flag, end in ends.items():
        if end is not None and (end or "none") not in held:
            raise UsageError(
                f"{flag} {end or 'none'}: no profiled case of {sweep} has this {axis}; "
                f"there is {', '.join(held)}"
            )
    machines, (before, after) = label_machines(results), ends.values()
    found = explain_pairs(steps, results, machines, axis, before, after, tried)
    if not found:
        varying = [name for name in AXES if len({getattr(r, name) for r in profiled}) > 1]
        if len(held) > 1:
            raise UsageError(
                f"{sweep}: no two profiled cases differ in {axis} alone; {', '.join(varying)} vary"
            )
        others = f"; try --axis {' or --axis '.join(varying)}" if varying else ""
        raise UsageError(f"{sweep}: {axis} is {held[0]} in all profiled cases{others}")
    shown = (steps[result.cell] for result in profiled)
    notices = [*warn(select(runs, where), results, runs), *doubt_profiles(shown)]
    doubts = [notice for notice in notices if not notice.good]
    return Answer(found, list(describe_constants(results, find_varying(results))), doubts)
