"""The findings of the checks, as lines and in a file that is rewritten as each check ends."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import AXES, Case, format_value, list_varying
from bench.check.checks import CHECKS, Checked, Finding, Result, answer
from bench.text import clean, replace_file
from bench.workloads import IMAGES

if TYPE_CHECKING:
    from bench.check.subject import Subject
    from bench.record import Environment

FILE = "check.json"
_WIDTH = 80
_MOST_NAMED = 8


class Report:
    """The findings for some cases: ``content``, and `FILE` in ``folder``."""

    def __init__(self, folder: Path, command: str, steps: int) -> None:
        """Raises OSError: the folder cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.content: dict[str, Any] = {"command": command, "steps": steps, "cases": []}
        self._write()

    @property
    def passed(self) -> bool:
        results = (found["result"] for case in self.content["cases"] for found in case["checks"])
        return Result.FAIL not in results

    def check(
        self, case: Case, environment: Environment, subject: Subject, skip: Collection[str]
    ) -> Iterator[str]:
        """Run the checks of a case except those in ``skip``, and draw its pictures. Yield a line as
        each check ends, then an explanation of each failure, and how many passed."""
        from bench.check.pictures import draw_pictures

        start = time.perf_counter()
        answers: list[Checked] = []
        entry: dict[str, Any] = {
            "case": {name: format_value(getattr(case, name)) for name in AXES},
            "environment": asdict(environment),
        }
        self.content["cases"].append(entry)
        for one in CHECKS.values():
            with show_running(one.name):
                found = Checked(one) if one.name in skip else answer(one, subject)
            answers.append(found)
            yield describe(found)
            entry["checks"] = [*map(_spell, answers)]
            self._write()
        folder = self.folder / case.slug()
        folder.mkdir(exist_ok=True)
        with show_running("pictures"):
            pictures = draw_pictures(subject, folder)
        entry["pictures"] = [str(file.relative_to(self.folder)) for file in pictures]
        entry["seconds"] = time.perf_counter() - start
        self._write()
        failures = [found for found in answers if found.result is Result.FAIL]
        yield from map(explain, failures)
        run = sum(found.result is not Result.SKIPPED for found in answers)
        passed = f"{run - len(failures)} of {run} checks passed, in {entry['seconds']:.0f} s"
        yield f"{passed}; pictures in {folder.name}/\n"

    def _write(self) -> None:
        """Replace the file atomically, so that an interrupt leaves the results that it had."""
        replace_file(self.folder / FILE, json.dumps(self.content, indent=1) + "\n")


@contextmanager
def show_running(name: str) -> Iterator[None]:
    """Show ``name`` on a terminal while the block runs, then clear the line; not in a pipe."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"\r{name} …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{'':<{len(name) + 2}}\r", end="", file=sys.stderr, flush=True)


def head(case: Case, cases: Iterable[Case]) -> str:
    """Describe a case, and add the header of the table of its checks."""
    names = [n for n in list_varying(cases) if n not in ("model", "dataset", "device")]
    what = f"{case.model} on {case.dataset}" if case.workload == IMAGES else case.model
    title = f"{what}, {case.label(names)}, on {case.device}"
    return f"{title}\n{_row('check', '', 'figure', 'passes')}"


def _row(name: str, result: str, figure: str, bounds: str) -> str:
    return clean(f"{name:<13} {result:<7} {figure:<38} {bounds}")


def describe(found: Checked) -> str:
    figure, bounds = "could not be run" if found.error else found.lacks, ""
    if finding := found.finding:
        value = str(finding.value) if isinstance(finding.value, int) else f"{finding.value:.4g}"
        figure, bounds = f"{value} {finding.unit}", write_bounds(finding)
    return _row(found.check.name, found.result, figure, bounds)


def write_bounds(finding: Finding) -> str:
    """Describe the range in which a check passes.

    >>> write_bounds(Finding(1, "", high=0)), write_bounds(Finding(1, "", low=0.5, high=2))
    ('0', '0.5 to 2')
    """
    low, high = f"{finding.low:.4g}", f"{finding.high:.4g}"
    if math.isinf(finding.low):
        return f"at most {high}" if finding.high else "0"
    return f"at least {low}" if math.isinf(finding.high) else f"{low} to {high}"


def explain(found: Checked) -> str:
    parts = [("", f"{found.check.name} failed. Expected: {found.check.shows}. {found.check.fix}")]
    if found.error:
        parts.append(("  ", found.error))
    if found.finding and (named := found.finding.named):
        more = len(named) - _MOST_NAMED
        ending = f" and {more} more, in {FILE}" if more > 0 else ""
        parts.append(("  ", "; ".join(named[:_MOST_NAMED]) + ending))
    return "\n".join(
        textwrap.fill(clean(text), _WIDTH, initial_indent=indent, subsequent_indent=f"  {indent}")
        for indent, text in parts
    )


def _spell(found: Checked) -> dict[str, Any]:
    """Return a result as JSON can hold it, with null for inf and NaN."""
    said = {"name": found.check.name, "result": found.result, "shows": found.check.shows}
    finding = json.dumps(asdict(found.finding) if found.finding else {})
    read: dict[str, Any] = json.loads(finding, parse_constant=lambda _: None)
    return {**said, **read, "error": found.error, "lacks": found.lacks}
