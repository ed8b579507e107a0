"""The forms of a report that other programs and pages read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.base.text import GIB
from bench.report.__main__ import main
from bench.schema.record import Status
from tests.planted.records import FP16, FP32, make_record, ran, write_sweep
from tests.pytest_for_tests import Capture

TIMES = (20.0, 21.0, 19.0)


def export(form: str, sweep: Path, capsys: Capture) -> str:
    assert main([str(sweep), "--format", form]) == 0
    return capsys.readouterr().out


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """fp32 by three repeats, fp16 by one with a warning that failed once, and one out of memory."""
    rows = [*ran(FP32, TIMES, peak_device_bytes=2 * GIB)]
    rows += [*ran(FP16, (10.0,), peak_device_bytes=GIB)]
    write_sweep(tmp_path / "one", rows)
    return tmp_path / "one"


def test_of_those_that_follow_commits_one_reads_a_list_where_less_is_better(
    sweep: Path, capsys: Capture
) -> None:
    """As customSmallerIsBetter is described: name, unit and value, and a range and extra text."""
    entries = json.loads(export("action", sweep, capsys))
    for entry in entries:
        assert {"name", "unit", "value", "extra"} <= {*entry} <= {*entry, "range"}
        assert isinstance(entry["value"], float | int)
        assert entry["extra"].startswith("A card, torch 2")
    found = {entry["name"]: entry for entry in entries}
    assert len(found) == len(entries)
    time, memory = found["fp32: time of an epoch"], found["fp32: memory"]
    assert (time["value"], time["unit"]) == (20.0, "s")
    assert time["range"] == "19 to 21 of 3 repeats"
    assert (memory["value"], memory["unit"]) == (2.0, "GiB")


def test_the_other_reads_measures_of_benchmarks_with_their_ends(
    sweep: Path, capsys: Capture
) -> None:
    """By the schema that it publishes: numbers, of which ``value`` has to be there."""
    found = json.loads(export("bencher", sweep, capsys))
    assert found["fp32"]["time"] == {"value": 20.0, "lower_value": 19.0, "upper_value": 21.0}
    assert found["fp32"]["memory"]["value"] == 2 * GIB
    for measures in found.values():
        for metric in measures.values():
            assert {"value"} <= {*metric} <= {"value", "lower_value", "upper_value"}
            assert all(isinstance(number, float | int) for number in metric.values())


@pytest.mark.parametrize("form", ["action", "bencher"])
def test_what_failed_has_no_figure(form: str, tmp_path: Path, capsys: Capture) -> None:
    failed = make_record(FP16, status=Status.INVALID)
    write_sweep(tmp_path / "two", [*ran(FP32, TIMES), failed])
    text = export(form, tmp_path / "two", capsys)
    assert "fp32" in text
    assert "fp16" not in text


def test_a_readme_gets_the_answer_the_first_table_and_what_it_is_of(
    sweep: Path, capsys: Capture
) -> None:
    text = export("readme", sweep, capsys)
    answer, _, rest = text.partition("\n")
    assert "on A card in fp16" in answer
    rows = [line for line in rest.splitlines() if line.startswith("| fp")]
    assert [row.split(" | ")[0] for row in rows] == ["| fp32", "| fp16"]
    assert re.search("^- .*torch 2", rest, re.M)


def test_a_model_card_has_the_headings_of_its_template(sweep: Path, capsys: Capture) -> None:
    text = export("model-card", sweep, capsys)
    assert re.findall("^#+ .*", text, re.M) == [
        *("#### Speeds, Sizes, Times", "### Compute Infrastructure"),
        *("#### Hardware", "#### Software"),
    ]
    hardware, software = text.split("#### Hardware")[1].split("#### Software")
    assert "A card" in hardware
    assert "torch 2" in software


def test_names_that_could_break_a_page_are_escaped(tmp_path: Path, capsys: Capture) -> None:
    case: Any = type(FP32)(**{**vars(FP32), "model": "mine:f(a='|<b>')"})
    write_sweep(tmp_path / "odd", ran(case, TIMES))
    for form in ("readme", "model-card"):
        assert "<b>" not in export(form, tmp_path / "odd", capsys)
