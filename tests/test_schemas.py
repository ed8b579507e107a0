"""The JSON documents of commands, held by docs/schemas/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bench.base.plain import dump
from bench.cards.__main__ import main as cards
from bench.compare.__main__ import main as compare
from bench.doctor.__main__ import write_json
from bench.report.__main__ import main as report
from bench.results.study.sweeps import REFERENCE, read_sweep
from bench.schema.axis import name_column
from bench.search.__main__ import print_findings
from bench.validate.__main__ import main as validate
from bench.why import main as why
from bench.workers.judgement import judge
from tests.machines_for_tests import RECORDINGS, read_machine
from tests.planted.comparisons import COMPARISONS
from tests.planted.records import ROOT, list_committed
from tests.planted.sweeps import Folders
from tests.pytest_for_tests import Capture, Patch
from tests.schemas_for_tests import SCHEMAS, find_faults, list_described, read_document

COMMITTED = {folder.name: folder for folder in list_committed("records.csv")}
LAB = REFERENCE.with_name("h200-lab.csv")
CARD = COMMITTED["nvidia-h100-80gb-hbm3-20261122-113040"]
PROFILED = COMMITTED["cpu-profiles-20261122"]
SEARCH = COMMITTED["search-epyc-20261129"]


@pytest.fixture
def ask(capsys: Capture) -> Callable[..., Any]:
    """Run a command and read the document that it prints."""

    def run(main: Callable[[list[str]], int], *words: object) -> Any:
        assert main([*map(str, words), "--format", "json"]) in (0, 1)
        return read_document(capsys.readouterr().out)

    return run


def test_reports(planted: Folders, ask: Callable[..., Any]) -> None:
    for folder in [*planted.values(), *COMMITTED.values(), LAB, REFERENCE]:
        # a search for the largest batch has probes, and no case
        assert ask(report, folder)["cases"] or folder.name.startswith("fit"), folder


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(
    name: str, tmp_path: Path, monkeypatch: Patch, ask: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    planted = COMPARISONS[name]
    planted.write(tmp_path)
    ask(compare, *planted.command.split(), "--price", "2/h")


def test_explanations(ask: Callable[..., Any]) -> None:
    assert ask(why, PROFILED)["explanations"]
    assert ask(why, CARD)["explanations"]


def test_cards(ask: Callable[..., Any], monkeypatch: Patch) -> None:
    """The page has the same: where it names a speed-up, so does the document, with the interval."""
    monkeypatch.chdir(ROOT)
    groups = ask(cards, "--price", "2/h")["groups"]
    pair, *_ = [p for p in groups[0]["pairs"] if p["precision"] == "fp16" and "H100" in p["a"]]
    assert "H200" in pair["b"]
    assert pair["speedup"] > 1
    (fp16,) = [e for e in groups[0]["cards"] if e["precision"] == "fp16" and e["card"] == pair["b"]]
    assert fp16["best"]["epoch_time_s"] <= fp16["recommended"]["epoch_time_s"]
    equal, over = fp16["at_setting"]["epoch_time_s"], fp16["over"]["fp32"]["speedup"]
    (fp32,) = [e for e in groups[0]["cards"] if e["precision"] == "fp32" and e["card"] == pair["b"]]
    assert fp32["at_setting"]["epoch_time_s"] / equal == pytest.approx(over)


def test_folders_that_are_checked(ask: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "records.csv").write_text("x\n")
    ask(validate, PROFILED, LAB, tmp_path)


@pytest.mark.parametrize("file", sorted(RECORDINGS.glob("*.json")), ids=lambda file: file.stem)
def test_machines(file: Path) -> None:
    machine = read_machine(file)
    assert read_document(write_json(machine, judge(machine)))["facts"]


def test_trials(capsys: Capture) -> None:
    halving = read_sweep(SEARCH).halving
    assert print_findings(SEARCH, halving, "json")
    found = read_document(capsys.readouterr().out)
    best, *_ = found["trials"]
    assert best["settings"].keys() == {*map(name_column, halving.trials[0])}
    assert len(best["values"]) == found["epochs"]
    whole = [t["values"][-1] for t in found["trials"] if not t["ended_early"] and t["values"]]
    assert best["values"][-1] == (max if found["better"] == "higher" else min)(whole)


OPTIONAL = {
    *("estimated", "recommended", "cost", "reason", "lacks"),
    *(
        f"{what}{end}"
        for what in ("speedup", "ratio", "difference")
        for end in ("", "_low", "_high")
    ),
}


def test_a_key_that_is_gone_is_noticed(planted: Folders, ask: Callable[..., Any]) -> None:
    """Anywhere in a document, but in maps whose keys are names; and so is one that no schema
    describes, and another version."""
    documents = [
        ask(report, LAB),
        ask(compare, LAB, "--axis", "precision", "fp32", "fp16", "--fail-on", "slower"),
        ask(why, PROFILED),
        ask(cards, *COMMITTED.values()),
        ask(validate, PROFILED),
    ]
    for document in documents:
        schema = SCHEMAS[document["format"].removeprefix("precision-bench ")]
        valid = Draft202012Validator(schema)
        number = 0
        for part, value in list_described(schema, document, schema):
            assert part["properties"].keys() - {*part["required"]} <= OPTIONAL
            one = Draft202012Validator({**part, "$defs": schema.get("$defs", {})})
            for key in part["required"]:
                assert not one.is_valid({k: v for k, v in value.items() if k != key}), key
                number += 1
        assert number > 10
        assert not valid.is_valid(document | {"version": 99})
        assert find_faults(document | {"more": 1})
        assert valid.is_valid(document | {"more": 1}), "programs go on with a key that was added"


def test_every_schema_is_one_and_named_on_the_page() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    for name, schema in SCHEMAS.items():
        Draft202012Validator.check_schema(schema)
        assert schema["title"] == f"python -m bench.{name} --format json"
        assert f"(schemas/{name}.json)" in page


def test_json_has_no_nan_and_is_utf_8() -> None:
    text = dump({"a": [float("nan"), float("inf"), 1.5, True], "µ": "≈"})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, None, 1.5, True], "µ": "≈"}
    assert "≈" in text
