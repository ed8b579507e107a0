"""The answers of the checks as lines, and as JSON."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.case import Case, list_varying
from bench.check.checks import CHECKS, Answer, Finding, Result, answer
from bench.text import clean, name_first
from bench.workloads import IMAGES

if TYPE_CHECKING:
    from bench.check.subject import Subject

_WIDTH, _MOST_NAMED = 80, 8


def run_checks(subject: Subject, skip: Sequence[str]) -> list[Answer]:
    """Run the checks of a case except those in ``skip``. Print a line as
    each check ends, then an explanation of each failure, and how many passed."""
    start, answers = time.perf_counter(), list[Answer]()
    for one in CHECKS.values():
        if one.name not in skip:
            answers.append(answer(one, subject))
            print(describe(answers[-1]), flush=True)
    for found in answers:
        if found.result is Result.FAIL:
            print(explain(found))
    results = [found.result for found in answers if found.result is not Result.SKIPPED]
    passed = f"{results.count(Result.PASS)} of {len(results)} checks passed"
    print(f"{passed}, in {time.perf_counter() - start:.0f} s\n", flush=True)
    return answers


def head(case: Case, cases: Iterable[Case]) -> str:
    """Describe a case, and add the header of the table of its checks."""
    names = [n for n in list_varying(cases) if n not in ("model", "dataset", "device")]
    what = f"{case.model} on {case.dataset}" if case.workload == IMAGES else case.model
    title = f"{what}, {case.label(names)}, on {case.device}"
    return f"{title}\n{_row('check', '', 'figure', 'passes')}"


def _row(name: str, result: str, figure: str, bounds: str) -> str:
    return clean(f"{name:<13} {result:<7} {figure:<38} {bounds}")


def describe(found: Answer) -> str:
    figure, bounds = found.why if found.result is Result.SKIPPED else "could not be run", ""
    if finding := found.finding:
        figure, bounds = f"{finding.value:.4g} {finding.unit}", write_bounds(finding)
    return _row(found.check.name, found.result, figure, bounds)


def write_bounds(finding: Finding) -> str:
    """Describe the range in which a check passes.

    >>> write_bounds(Finding(1, "", high=0)), write_bounds(Finding(1, "", low=0.5, high=2))
    ('at most 0', '0.5 to 2')
    """
    low, high = f"{finding.low:.4g}", f"{finding.high:.4g}"
    if math.isinf(finding.low):
        return f"at most {high}"
    return f"at least {low}" if math.isinf(finding.high) else f"{low} to {high}"


def explain(found: Answer) -> str:
    named = name_first(found.finding.named if found.finding else [], _MOST_NAMED, "; ")
    said = f"{found.check.name} failed. Expected: {found.check.shows}. {found.check.fix}"
    lines = [said, *(f"  {text}" for text in (found.why, named) if text)]
    return "\n".join(textwrap.fill(clean(text), _WIDTH, subsequent_indent="    ") for text in lines)


def spell(found: Answer) -> dict[str, Any]:
    """Return an answer as JSON can hold it, with null for inf and NaN."""
    finding = found.finding and {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(found.finding).items()
    }
    about = {"name": found.check.name, "result": found.result, "shows": found.check.shows}
    return {**about, **(finding or {}), "why": found.why}
