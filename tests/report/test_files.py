"""What each format writes, against hostile names; tests/golden has what it says."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.record import Status
from bench.report.files import keep_known
from bench.store.table import write_lines
from tests.planted.records import make_record, measured, ran, write_sweep
from tests.planted.sweeps import Folders

Run = Callable[..., tuple[int, str, str]]

HOSTILE = [
    "=HYPERLINK(1) | `a` <b>x</b> [red]r[/red] @x\x1b[31m \u202e*bold* _em_ ~~del~~ \\| \\",
    "-2 $\\alpha$ & 50 % # {x} ^ ~ \\input{/etc/passwd} &lt; \"quoted\", 'n'\u2028new",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose card and reasons try to break out of every format."""
    rows = []
    for name in HOSTILE:
        values = {"torch": "2.13", "gpu": name, **measured(10, 2**30)}
        rows.append(make_record(Case(), **values))
        error = Case(batch_size=256)
        rows.append(make_record(error, status=Status.ERROR, reason=name, gpu=name, torch="2.13"))
    return write_sweep(tmp_path_factory.mktemp("hostile") / "=a|b<i>", rows)


def test_markdown_rows_have_as_many_cells_as_columns(hostile: Path, report: Run) -> None:
    """Where a line is split at pipes that no backslash escapes."""
    code, out, _ = report(hostile, "--format", "md")
    assert code == 0
    for block in re.findall(r"(?:^\|.*\n)+", out, re.MULTILINE):
        pipes = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in block.splitlines()}
        assert len(pipes) == 1
    assert not re.search(r"<b>|\x1b", out)


def test_latex_rows_have_as_many_cells_as_columns(hostile: Path, report: Run) -> None:
    _, out, _ = report(hostile, "--format", "latex")
    for columns, body in re.findall(
        r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", out, re.DOTALL
    ):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 1
        for row in rows:
            spanned = re.match(r"\\multicolumn\{(\d+)\}", row)
            if spanned:
                assert int(spanned[1]) == len(columns)
            else:
                assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1


def test_text_obeys_no_markup_and_passes_no_control_code(hostile: Path, report: Run) -> None:
    _, out, _ = report(hostile, "--full")
    assert "[red]r[/red]" in out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)


def test_csv_holds_no_formula(hostile: Path, report: Run) -> None:
    _, out, _ = report(hostile, "--format", "csv")
    rows = list(csv.reader(io.StringIO(out)))
    assert len(rows) == 1 + 2 * len(HOSTILE)
    for cell in (cell for row in rows for cell in row):
        assert not cell.startswith(("=", "@", "+")), cell
        assert not cell.startswith("-") or float(cell) < 0


@given(st.text() | st.floats() | st.booleans() | st.none())
def test_csv_cells_are_inert(value: object) -> None:
    ((cell,),) = csv.reader(io.StringIO(write_lines([[keep_known(value)]]).decode()))
    assert not isinstance(value, str) or not cell.startswith(tuple("=+-@＝＋－＠"))
    assert "nan" not in cell or isinstance(value, str)


def test_csv_and_json_say_the_same(planted: Folders, report: Run) -> None:
    """Of each case each number; those of one by hand."""
    rows = list(csv.DictReader(io.StringIO(report(planted["tuned"], "--format", "csv")[1])))
    document = json.loads(report(planted["tuned"], "--format", "json")[1])
    for row, case in zip(rows, document["cases"], strict=True):
        numbers = {name: value for name, value in case.items() if type(value) in (int, float)}
        assert len(numbers) > 10
        assert {name: float(row[name]) for name in numbers} == numbers
        assert row["status"] == case["status"]
    fp16 = [c for c in document["cases"] if (c["precision"], c["batch_size"]) == ("fp16", 256)]
    assert max(case["speedup"] or 0 for case in fp16) == pytest.approx(110 / 40)
    assert "speedup" in document["columns"]


def test_files_hold_the_ends_as_numbers(tmp_path: Path, report: Run) -> None:
    folder = write_sweep(tmp_path / "s", ran(Case(), (88.8, 76.6, 90.4)))
    (case,) = json.loads(report(folder, "--format", "json")[1])["cases"]
    assert (case["epoch_time_s_low"], case["epoch_time_s_high"]) == (76.6, 90.4)
    assert case["images_per_s_low"] == pytest.approx(50_000 / 90.4)
    assert (case["spread"], case["seeds"]) == ("range", 3)
