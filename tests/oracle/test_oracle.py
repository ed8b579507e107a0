"""The oracle sees a changed number or text, and moves nothing else where either goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.__main__ import compare, say
from tests.planted.records import ROOT

FOLDER = Path("results/nvidia-h200-20261126-040407")


def test_an_answer_equals_itself_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    answer = {"q": say("report", FOLDER)}
    assert compare(answer, answer)[0] == 0
    other = {
        "q": {**answer["q"], "cases": [{**case, "runs": -1.5} for case in answer["q"]["cases"]]}
    }
    assert compare(answer, other)[0] == len(answer["q"]["cases"]) > 10
    other = {"q": {**answer["q"], "title": "another"}}
    assert compare(answer, other) == (
        1, [*compare(answer, answer)[1][:-1], compare(answer, answer)[1][-1].replace(" 0 ", " 1 "),
            "    + q/title: another", f"    - q/title: {FOLDER.name}"],
    )  # fmt: skip


def test_what_goes_moves_nothing_else() -> None:
    old = {"q": {"tables": [{"name": "a", "n": 1.0}, {"name": "b", "n": 2.0}]}}
    new = {"q": {"tables": [{"name": "b", "n": 2.0000000000000004}], "more": 3}}
    assert compare(old, new) == (
        0, ["2 values compared, 0 changed", "2 values went", "        2 q", "1 values came",
            "        1 q", "0 texts compared, 0 changed"],
    )  # fmt: skip


def test_a_sentence_that_goes_or_comes_changes_no_other() -> None:
    old = {"q": {"notes": ["Memory: of the device.", "Losses: of one run."]}}
    new = {"q": {"notes": ["Losses: of one run."], "warnings": [{"remedy": ""}]}}
    assert compare(old, new) == (
        1, ["0 values compared, 0 changed", "0 values went", "0 values came",
            "2 texts compared, 1 changed", "    - q/notes: Memory: of the device."],
    )  # fmt: skip


def test_an_axis_that_was_text_is_the_same() -> None:
    old, new = {"q": {"a": "", "b": "128", "c": "off"}}, {"q": {"a": None, "b": 128, "c": "on"}}
    assert compare(old, new)[1][:2] == ["3 values compared, 1 changed", "    /q/c: 'off' -> 'on'"]
