"""The page says how to run a sweep again: its commands, to be pasted into a shell as they are."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path

from bench.report.__main__ import main as report
from bench.report.document import build
from bench.study.sweeps import read_sweep
from bench.sweep.__main__ import main as sweep
from bench.sweep.options import parse_arguments, plan_cases
from tests.planted.records import ROOT, write_sweep


def test_each_command_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    out, page = tmp_path / "a sweep", tmp_path / "page.html"
    first = ["--precision", "fp32", "--batch-size", "64", "--executor", "fake", "--out", str(out)]
    second = [*first, "--dataset", "synthetic"]
    for arguments in (first, second):
        assert sweep(arguments) == 0
    assert report([str(out), "--format", "html", "-o", str(page)]) == 0
    again = r"again</h3>\s*<pre[^>]*><code>(.*?)</code></pre>"
    (box,) = re.findall(again, page.read_text(), re.DOTALL)
    lines = html.unescape(re.sub(r"<[^>]*>", "", box)).strip().splitlines()
    start = ["python", "-m", "bench.sweep"]
    assert [shlex.split(line) for line in lines] == [[*start, *first], [*start, *second]]


def test_a_preset_that_has_changed_does_not_change_the_cases() -> None:
    """Those of 2026-11-22 trained with SGD; by now they name another optimizer."""
    card = read_sweep(ROOT / "results" / "nvidia-h100-80gb-hbm3-20261122-112118")
    step = build([card]).next_step
    assert step is not None
    options = parse_arguments(shlex.split(step.command)[3:])
    assert options.repeats == 3
    assert card.plan is not None
    assert plan_cases(options).cases == card.plan.list_cases()


def test_nothing_follows_from_nothing(tmp_path: Path) -> None:
    """As where a sweep was killed before its first case, while it looked at the machine."""
    assert build([read_sweep(write_sweep(tmp_path / "killed", []))]).next_step is None
