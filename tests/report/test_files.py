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
from bench.store.cells import write_lines
from tests.planted.records import make_record, measured, ran, write_sweep
from tests.planted.sweeps import Folders

Run = Callable[..., tuple[int, str, str]]

HOSTILE = [
    "=HYPERLINK(1) | `a` <b>x</b> [red]r[/red]",
    "@x\x1b[31m \u202e*bold* _em_ ~~del~~ \\| \\",
    "+1 $\\alpha$ & 50 % # {x} ^ ~ \\input{/etc/passwd}",
    "-2 ![i](http://x) &lt; \"quoted\", 'n'\u2028new",
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


def split_row(line: str) -> list[str]:
    """Cells of a line of a GitHub table: split at pipes that no backslash escapes."""
    assert line.startswith("| ")
    assert line.endswith(" |")
    return re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]


def markdown_tables(text: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [split_row(line) for line in block.splitlines() if not line.startswith("|-")
         and not line.startswith("|:")]
        for block in blocks
    ]  # fmt: skip


def test_markdown_tables_parse_back_whole(hostile: Path, report: Run) -> None:
    code, out, _ = report(hostile, "--format", "md")
    assert code == 0
    for rows in markdown_tables(out):
        assert len({len(row) for row in rows}) == 1
        assert len(rows) > 1
    assert "<b>" not in out
    assert "\x1b" not in out


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
    assert len({len(row) for row in rows}) == 1
    for row in rows:
        for cell in row:
            assert not cell.startswith(("=", "@", "+")), cell
            assert not cell.startswith("-") or float(cell) < 0


@given(st.text() | st.floats() | st.booleans() | st.none())
def test_csv_cells_are_inert(value: object) -> None:
    ((cell,),) = csv.reader(io.StringIO(write_lines([[keep_known(value)]]).decode()))
    assert not isinstance(value, str) or not cell.startswith(tuple("=+-@＝＋－＠"))
    assert "nan" not in cell or isinstance(value, str)


KEY = ("precision", "loss_scale", "batch_size")


def test_csv_and_json_say_the_same(planted: Folders, report: Run) -> None:
    _, text, _ = report(planted["made-up"], "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    _, text, _ = report(planted["made-up"], "--format", "json")
    document = json.loads(text)
    assert [row["status"] for row in rows] == [case["status"] for case in document["cases"]]
    key = {"precision": "fp16", "loss_scale": "128"}
    fp16 = next(r for r in rows if key | {"batch_size": "512"} == {n: r[n] for n in KEY})
    case = next(c for c in document["cases"] if key | {"batch_size": 512} == {n: c[n] for n in KEY})
    assert float(fp16["speedup"]) == case["speedup"]
    assert case["speedup"] == pytest.approx(
        (100 + 1000 / 512 + 0.3) / (0.4 * (100 + 1000 / 512) + 0.3)
    )
    assert float(fp16["published_epoch_time_s"]) == 140.061
    assert document["tables"][0]["rows"][0][:3] == [
        {"text": "fp32", "value": "fp32"},
        {"text": "none", "value": ""},
        {"text": "108.1", "value": pytest.approx(108.1125)},
    ]
    assert "speedup" in document["columns"]


def test_files_hold_the_ends_as_numbers(tmp_path: Path, report: Run) -> None:
    folder = write_sweep(tmp_path / "s", ran(Case(), (88.8, 76.6, 90.4)))
    _, text, _ = report(folder, "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(text))
    _, text, _ = report(folder, "--format", "json")
    (case,) = json.loads(text)["cases"]
    for values in (row, case):
        assert float(values["epoch_time_s_low"]) == 76.6
        assert float(values["epoch_time_s_high"]) == 90.4
        assert float(values["images_per_s_low"]) == pytest.approx(50_000 / 90.4)
        assert (values["spread"], int(values["seeds"])) == ("range", 3)
    assert not row["coverage"]
