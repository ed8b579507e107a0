"""What a sweep's folder says of itself: what its last command planned and did not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.answers.notices import warn
from bench.results.study.sweeps import read_sweep, read_sweeps
from bench.schema.case import AXES, Case, format_value
from bench.sweep.__main__ import main as run_sweep
from tests.planted.records import FP32, ran, write_sweep
from tests.planted.results import read_results

pytestmark = pytest.mark.usefixtures("fake")

FAKE = ["--executor", "fake", "--precision", "fp32", "fp16", "--batch-size", "8", "16"]


def say_gaps(folder: Path) -> str:
    return " ".join(f"{found} {fix}" for found, fix in read_sweep(folder).gaps)


def test_what_was_planned_and_did_not_run_is_named(tmp_path: Path) -> None:
    """A table from which rows are missing looks like a whole one."""
    out = tmp_path / "sweep"
    assert run_sweep([*FAKE, "--repeats", "2", "--out", str(out)]) == 0
    assert say_gaps(out) == ""
    file = out / "records.csv"
    head, *lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([head, *lines[:-2]]))
    assert say_gaps(out) == (
        "sweep has no row of 2 of the 9 runs that its last command planned (fp16 · loss scale 128 "
        "· batch size 16, repeat 2; fp32 · batch size 8, drift check). Run the last "
        "command of the sweep again, unless it still runs."
    )
    # a drift check that was stopped shows no drift
    cut = lines[-1].replace(",ok,", ",interrupted,")
    file.write_text("".join([head, *lines[:-1], cut]))
    assert "1 of the 9 runs that its last command planned (fp32 · batch size 8, drift check)" in (
        say_gaps(out)
    )
    # rows by themselves were not planned by anybody
    (out / "mine.csv").write_text("".join([head, lines[0]]))
    assert say_gaps(out / "mine.csv") == ""


def test_a_missing_case_is_named_by_what_tells_it_from_the_rows(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", [*ran(FP32, (1,))])
    texts = {name: format_value(getattr(Case(seed=7), name)) for name in AXES}
    (out / "config.json").write_text(json.dumps({"cases": [texts]}))
    gaps = say_gaps(out)
    assert gaps.startswith(
        "sweep has no row of 1 of the 1 run that its last command planned (fp32 · batch size 128 · "
        "seed 7, repeat 1)."
    )
    sweep = read_sweep(out)
    notice, *_ = warn(*read_results(sweep), sweeps=[sweep])
    assert (notice.label, notice.text) == ("Incomplete", gaps)


@pytest.mark.parametrize(
    "config",
    [
        *({"cases": cases} for cases in (None, "abc", [3], [{"precision": 7}])),
        *({"cases": [{"seed": "1"}], "repeats": n} for n in (10**9, "2")),
        {"cases": [{"seed": "1"}], "shard": "3/2"},
    ],
)
def test_a_plan_that_somebody_edited_is_not_known(config: Any, tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", [*ran(FP32, (1,))])
    (out / "config.json").write_text(json.dumps(config))
    assert say_gaps(out) == ""


def test_sweeps_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_sweep(tmp_path / lab / "run", ran(FP32, (10,))) for lab in ("a", "b")]
    assert [sweep.name for sweep in read_sweeps([*paths, paths[0]])] == ["a/run", "b/run"]
