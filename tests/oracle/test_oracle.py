"""The comparer sees each kind of change, and a real answer is equal to itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle.compare import are_equal, compare, flatten, read_answer, write
from tests.oracle.dump import ask
from tests.planted.records import ROOT

FOLDER = ROOT / "results" / "nvidia-h200-20261126-040407"


@pytest.mark.parametrize("format", ["csv", "json"])
def test_an_answer_equals_itself_and_no_other(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    question = f"report {format}: H200"
    said = ask("report", str(FOLDER.relative_to(ROOT)), "--format", format)
    before = {question: read_answer(question, said)}
    assert compare(before, before).changed == []
    assert compare(before, before).compared > 500
    after = {question: read_answer(question, said.replace("11.9", "11.8"))}
    changed = compare(before, after).changed
    assert changed
    assert all("11.9" in str(old) for _, old, _ in changed)


def test_what_goes_moves_nothing_else() -> None:
    old = {"q": dict(flatten({"tables": [{"name": "a", "n": 1}, {"name": "b", "n": 2}]}))}
    new = {"q": dict(flatten({"tables": [{"name": "b", "n": 2}], "more": 3}))}
    found = compare(old, new)
    assert (found.changed, found.new) == ([], ["q: /more"])
    assert {*found.gone} == {"q: /tables/a/name", "q: /tables/a/n"}
    assert next(write(found)) == "2 values compared, 0 changed"


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(1e-6, 1e6))
def test_numbers(number: float, factor: float) -> None:
    assert are_equal(number, json.loads(json.dumps(number)))
    assert not are_equal(number, None)
    other = (number or 1.0) * (1 + factor)
    assert not are_equal(number, other)
    assert not are_equal("2.5", "2.5000000000000004", exact=True)
    assert are_equal("2.5", "2.5000000000000004")


def test_a_refusal_is_an_answer(tmp_path: Path) -> None:
    assert json.loads(ask("report", str(tmp_path))) == {"rc": 2}
