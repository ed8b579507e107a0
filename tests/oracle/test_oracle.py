"""The oracle sees a changed number, and moves nothing else where a value goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.__main__ import compare, say
from tests.planted.records import ROOT

FOLDER = Path("results/nvidia-h200-20261126-040407")


def test_an_answer_equals_itself_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said = {"q": say("report", FOLDER)}
    assert compare(said, said)[0] == 0
    other = {"q": {**said["q"], "cases": [{**case, "runs": -1.5} for case in said["q"]["cases"]]}}
    assert compare(said, other)[0] == len(said["q"]["cases"]) > 10


def test_what_goes_moves_nothing_else() -> None:
    old = {"q": {"tables": [{"name": "a", "n": 1.0}, {"name": "b", "n": 2.0}]}}
    new = {"q": {"tables": [{"name": "b", "n": 2.0000000000000004}], "more": 3}}
    assert compare(old, new) == (
        0, ["2 values compared, 0 changed", "2 values went", "        2 q", "1 values came",
            "        1 q"],
    )  # fmt: skip


def test_an_axis_that_was_text_is_the_same() -> None:
    old, new = {"q": {"a": "", "b": "128", "c": "off"}}, {"q": {"a": None, "b": 128, "c": "on"}}
    assert compare(old, new)[1][:2] == ["3 values compared, 1 changed", "    /q/c: 'off' -> 'on'"]
