"""`python -m bench.check`: check that a training is sound, with a figure for each check."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench.axis import Value
from bench.case import AXES, Case, format_value, list_absent, telling_axes
from bench.check.checks import CHECKS, Checked, Finding, Result, answer
from bench.environment.asking import ask
from bench.environment.host import list_devices
from bench.environment.packages import refuse_missing
from bench.errors import UsageError, choose
from bench.flags import Parser, add_axes, command, parse_whole, read_axes, writable
from bench.grid import grid
from bench.precision import PRECISIONS
from bench.preset import default_preset, load_preset
from bench.processes import leave
from bench.sweep.preflight import gather_inputs, list_examined
from bench.text import clean, replace_file
from bench.workloads import IMAGES

FILE = "check.json"
STEPS, LEAST_STEPS = 60, 20
_WIDTH = 80
_MOST_NAMED = 8


def build_parser() -> Parser:
    names = "".join(f"\n  {check.name:<14}{check.shows}" for check in CHECKS.values())
    parser = Parser(
        prog="python -m bench.check",
        usage="%(prog)s [--precision NAME …] [--AXIS VALUE …] [--out DIR] […]",
        absent=list_absent("check"),
        description="Check that a training is sound before it is measured: for every precision "
        "asked for, short runs of the harness's own training, each with a figure and the bounds it "
        "must lie within. A network is trained on images of 3x32x32; --workload brings its own "
        "data. Return code 1: a check failed. 2: a wrong flag or model.",
        epilog=f"checks:{names}",
    )
    add = parser.add_argument
    add(
        "--steps",
        type=lambda text: parse_whole("--steps", text, LEAST_STEPS),
        default=STEPS,
        metavar="N",
        help=f"first steps to look at ({STEPS}); four times as many where the loss falls late",
    )
    add("--skip", nargs="+", default=[], metavar="CHECK", help="leave these checks out")
    add("--data-dir", metavar="DIR", type=Path, help="where CIFAR-10 is (./data)")
    add("--data-url", metavar="URL", help="a mirror of the CIFAR-10 archive")
    add("--out", metavar="DIR", type=Path, help="results/check- and the time by default")
    add("--json", action="store_true", help="print JSON on standard output")
    add_axes(
        parser,
        "one value or several; network and images default to those of a sweep, which on a CPU are "
        "dpn-small and synthetic images, and the batch size there to 64",
    )
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Check; returns 0, 1 where a check failed, 2 for a usage error, before anything is trained."""
    given = build_parser().parse(argv)
    for name in given.skip:
        choose("--skip", name, CHECKS)
    axes = read_axes(given)
    cases = choose_cases(axes)
    out = given.out or Path("results") / f"check-{datetime.now():%Y%m%d-%H%M%S}"
    screen = sys.stderr if given.json else sys.stdout
    refuse_missing(["torch", "numpy", "seaborn"])
    with _show_running("machine and model"):
        asked = ask([cases[0].device], list_examined(cases))
    inputs = gather_inputs(cases, asked, axes, given.data_dir, given.data_url)
    cases = [inputs.settle(case) for case in cases]
    for case in cases:
        if why := inputs.platforms[case.device].discourage(PRECISIONS[case.precision]):
            print(f"warning: {case.precision}: {why}, so it will be slow", file=sys.stderr)
    with writable("--out", out):
        out.mkdir(parents=True, exist_ok=True)
        _write({}, out)
    from bench.check.pictures import draw_pictures
    from bench.check.subject import Subject

    say = partial(print, file=screen, flush=True)
    findings: list[dict[str, Any]] = []
    report = {"command": given.command, "steps": given.steps, "cases": findings}
    failed = 0
    for case in cases:
        checks: list[dict[str, Any]] = []
        entry: dict[str, Any] = {
            "case": {name: format_value(getattr(case, name)) for name in AXES},
            "environment": asdict(inputs.describe(case)),
            "checks": checks,
        }
        findings.append(entry)
        say(f"{_title(case, cases)}\n{_row('check', '', 'figure', 'passes')}")
        subject, start = Subject(case, inputs.data(case).folder, given.steps), time.perf_counter()
        answers = []
        for one in CHECKS.values():
            with _show_running(one.name):
                found = Checked(one) if one.name in given.skip else answer(one, subject)
            answers.append(found)
            say(describe(found))
            checks.append(_plain(found))
            _write(report, out)
        folder = out / case.slug()
        folder.mkdir(exist_ok=True)
        with _show_running("pictures"):
            pictures = draw_pictures(subject, folder)
        entry["pictures"] = [str(file.relative_to(out)) for file in pictures]
        entry["seconds"] = time.perf_counter() - start
        _write(report, out)
        failures = [found for found in answers if found.result is Result.FAIL]
        failed += len(failures)
        run = sum(found.result is not Result.SKIPPED for found in answers)
        for found in failures:
            say(explain(found))
        passed = f"{run - len(failures)} of {run} checks passed, in {entry['seconds']:.0f} s"
        say(f"{passed}; pictures in {folder.name}/\n")
    say(f"figures and pictures: {out}")
    if given.json:
        print(json.dumps(report, indent=2))
    return 1 if failed else 0


@contextmanager
def _show_running(name: str) -> Iterator[None]:
    """Show on a terminal what runs while it runs, on a line that is then empty; not in a pipe."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"\r{name} …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{'':<{len(name) + 2}}\r", end="", file=sys.stderr, flush=True)


def choose_cases(axes: Mapping[str, list[Value]]) -> list[Case]:
    device = list_devices(axes, "bench.check")
    if len(device) > 1:
        raise UsageError(f"--device {' '.join(map(str, device))}: give one")
    if any(level is not None for level in axes.get("opt_level", [])):
        # amp.initialize is for once in a process: at O1 it patches torch again each time
        raise UsageError(
            "--opt-level: apex's amp starts once in a process and the checks start many times; "
            "leave it out, and check the precision without opt level"
        )
    first = load_preset(default_preset(str(device[0]))).grids[0]
    defaults = {name: list(first[name][:1]) for name in ("model", "dataset") if name in first}
    if device == ["cpu"]:
        defaults["batch_size"] = [64]
    return grid({**defaults, **axes, "device": device})


def _title(case: Case, cases: Iterable[Case]) -> str:
    names = [n for n in telling_axes(cases) if n not in ("model", "dataset", "device")]
    what = f"{case.model} on {case.dataset}" if case.workload == IMAGES else case.model
    return f"{what}, {case.label(names)}, on {case.device}"


def _row(name: str, result: str, figure: str, bounds: str) -> str:
    return clean(f"{name:<13} {result:<7} {figure:<38} {bounds}")


def describe(found: Checked) -> str:
    figure, bounds = "could not be run" if found.error else found.lacks, ""
    if finding := found.finding:
        value = str(finding.value) if isinstance(finding.value, int) else f"{finding.value:.4g}"
        figure, bounds = f"{value} {finding.unit}", write_bounds(finding)
    return _row(found.check.name, found.result, figure, bounds)


def write_bounds(finding: Finding) -> str:
    """From where to where a check passes.

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


def _plain(found: Checked) -> dict[str, Any]:
    said = {"name": found.check.name, "result": found.result, "shows": found.check.shows}
    finding = asdict(found.finding) if found.finding else {}
    return {**said, **_simplify(finding), "error": found.error, "lacks": found.lacks}


def _simplify(value: Any) -> Any:
    """What JSON can say; inf and NaN are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _simplify(item) for key, item in value.items()}
    return [_simplify(item) for item in value] if isinstance(value, list | tuple) else value


def _write(report: Mapping[str, Any], out: Path) -> None:
    """Write the file whole or not at all, so that an interrupt leaves the checks that ended."""
    replace_file(out / FILE, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    leave(main())
