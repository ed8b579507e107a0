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
from tests.planted.records import write_sweep


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


def test_nothing_follows_from_nothing(tmp_path: Path) -> None:
    """As where a sweep was killed before its first case, while it looked at the machine."""
    assert build([read_sweep(write_sweep(tmp_path / "killed", []))]).next_step is None
