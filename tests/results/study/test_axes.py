"""A user's own axes are axes: what is asked of them by name, and how their values are read."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.api import read
from bench.compare.__main__ import main as compare
from bench.report.__main__ import main as report
from bench.report.files import write_json
from bench.results.study.axes import order_values, parse_filter
from bench.schema.command import (
    fill_places,
    parse_varied,
    place_varied,
    quote_value,
    read_vary,
    write_vary,
    write_words,
)
from tests.planted.records import write_sweep
from tests.planted.results import read_report, tell
from tests.planted.scripts import counted, script
from tests.pytest_for_tests import Capture

SLOWER = {"0": 1.0, "1": 1.1, "10": 1.0, "2": 1.0}


def plant(folder: Path) -> Path:
    """A sweep over two axes of a script: clipping by 1 takes a tenth longer, and amp half."""
    rows = []
    for clip, amp in product(("10", "0", "1"), ("off", "on")):
        time_s = 0.01 * SLOWER[clip] * (0.5 if amp == "on" else 1)
        case = script(vary=f"clip={clip} amp={amp}", command="t.py {batch_size} {clip} {amp}")
        rows += counted(case, [time_s, 1.002 * time_s, 0.998 * time_s], steps=300)
    return write_sweep(folder / "sweep", rows)


def test_each_is_an_axis_of_the_report(tmp_path: Path, capsys: Capture) -> None:
    folder = plant(tmp_path)
    assert json.loads(write_json(read(folder).report))["axes"] == ["clip", "amp"]
    changes = tell(read(folder).report, "effects", "change speedup verdict pairs")
    assert changes == [
        "clip: 0 → 1 | 0.91× | slower | 2",
        "clip: 1 → 10 | 1.10× | faster | 2",
        "amp: off → on | 2.00× | faster | 3",
    ], "one axis changes at a time, and numbers ascend"
    assert report([str(folder), "--where", "clip=0,1", "amp=on"]) == 0
    assert "2 cases" in capsys.readouterr().out
    assert report([str(folder), "--by", "amp"]) == 0
    assert "amp off\n" in capsys.readouterr().out


def test_two_values_of_one_are_compared(tmp_path: Path, capsys: Capture) -> None:
    folder = str(plant(tmp_path))
    assert compare([folder, "--axis", "clip", "0", "1", "--fail-on", "slower:3%"]) == 1
    captured = capsys.readouterr()
    assert "2 cases with both values of clip" in captured.out
    assert captured.err.count("slower") >= 2
    assert compare([folder, "--axis", "clip", "0", "10", "--fail-on", "slower:3%"]) == 0


def test_programs_read_each_by_its_name(tmp_path: Path) -> None:
    found = read(plant(tmp_path))
    cases = json.loads(write_json(found.report))["cases"]
    assert [(case["clip"], case["amp"]) for case in cases[:2]] == [(0, "off"), (0, "on")]
    assert "vary" not in cases[0]
    frame = found.frame()
    assert frame.groupby("amp")["clip"].max().to_dict() == {"off": 10, "on": 10}


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (["--where", "clp=1"], "--where 'clp': did you mean 'clip'?"),
        (["--where", "clip=3"], "--where clip=3: no case has it; there is 10, 0, 1"),
        (["--by", "ampl"], "--by 'ampl': did you mean 'amp'?"),
        (["--where", "no name=1"], "--where 'no name': right values: "),
    ],
)
def test_a_wrong_name_is_one_line(
    asked: list[str], error: str, tmp_path: Path, capsys: Capture
) -> None:
    assert report([str(plant(tmp_path)), *asked]) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")


def test_a_change_of_an_unknown_axis_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert compare([str(plant(tmp_path)), "--axis", "clp", "0", "1"]) == 2
    assert capsys.readouterr().err == "error: --axis 'clp': did you mean 'clip'?\n"


def test_numbers_ascend_and_versions_stay_texts() -> None:
    assert order_values("{a}", ["1e1", "2", "-3"]) == ["-3", "2", "1e1"]
    assert order_values("{a}", ["2.10", "2.9", "2.1"]) == ["2.10", "2.9", "2.1"]
    assert order_values("{a}", ["pr", "main"]) == ["pr", "main"], "the first is the baseline"


def test_sweeps_with_other_axes_stand_in_one_report(tmp_path: Path) -> None:
    rows = counted(script(vary="rate=1"), [0.01]) + counted(script(vary="clip=2"), [0.01])
    report = read_report(tmp_path, rows)
    assert report.varying == ("{rate}", "{clip}")
    assert tell(report, "overview", "rate clip") == ["none | 2", "1 | none"]


TEXTS = st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs", "Cc"]))


@given(st.dictionaries(st.from_regex(r"[A-Za-z_]\w*", fullmatch=True), TEXTS, min_size=1))
def test_values_survive_a_cell(values: dict[str, str]) -> None:
    text = write_vary({f"{{{name}}}": value for name, value in values.items()})
    assert {name[1:-1]: value for name, value in read_vary(text).items()} == values


@given(TEXTS.filter(lambda text: not text.endswith("=")))
def test_any_value_can_be_given_as_it_stands(text: str) -> None:
    assert parse_varied("x", [quote_value(text)]) == {text: None}


def test_lists_that_cannot_be_meant_as_several_values_stand_as_they_are() -> None:
    for texts in (["[0.1,0.2]"], ["data/a,b"], ["1,2", "3,4"]):
        assert parse_varied("x", texts) == dict.fromkeys(texts)


NAMES = TEXTS.map(str.strip).filter(lambda text: text != "" and "=" not in text)


@given(st.dictionaries(NAMES, TEXTS, min_size=2))
def test_any_words_can_be_given_for_a_value(words: dict[str, str]) -> None:
    assert parse_varied("x", [write_words(words)]) == words


SHORT = st.from_regex(r"[a-z,]+", fullmatch=True)
FLAGS = st.from_regex(r"(--[a-z]+( [0-9,=]+)?)?", fullmatch=True)


@given(st.dictionaries(SHORT, FLAGS, min_size=2))
def test_words_stand_in_the_command_as_they_are(words: dict[str, str]) -> None:
    varied, (command,) = place_varied([["x", write_words(words)]], ["t {x}"])
    assert varied == {"x": [*words]}
    for value, word in words.items():
        assert fill_places(str(command), {"x": value}, lambda _, text: text) == f"t {word}"


def test_an_older_axis_of_the_name_of_a_column_replaces_none(tmp_path: Path) -> None:
    rows = [one for n in "12" for one in counted(script(vary=f"repeats={n}"), [0.01] * 3)]
    cases = json.loads(write_json(read_report(tmp_path, rows)))["cases"]
    assert [(case["repeats"], case["{repeats}"]) for case in cases] == [(3, 1), (3, 2)]


def test_a_command_or_a_call_with_commas_is_a_value_of_a_filter() -> None:
    command = "t.py {batch_size} {precision:fp32=,bf16-amp=--amp}"
    assert command in parse_filter(f"command={command}").values
    assert parse_filter("model=m:f(a=1,b=2)").values == ("m:f(a=1,b=2)",)
    assert parse_filter("precision=fp16,bf16").values == ("fp16", "bf16")
