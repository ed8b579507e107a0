"""Rows of older schemas: what they said in sentences stands in columns once they are read."""

from __future__ import annotations

import csv
from math import nan
from pathlib import Path
from typing import Any

import pytest

from bench.case import Case
from bench.errors import UsageError
from bench.record import COLUMNS, SCHEMA, Step
from bench.store.cells import RECORDS, STEPS
from bench.store.plans import Plan
from bench.store.reader import read_records, read_steps
from bench.store.runs import read_cases
from bench.study import summaries
from bench.study.sweeps import read_sweep
from tests.planted.records import make_run, write_sweep


def write_schema_1(folder: Path, **cells: str) -> Path:
    """A sweep of one row as schema 1 wrote it: without the columns of schema 2."""
    write_sweep(folder, [make_run(Case(seed=7), repeat=3, epoch_time_s=3.5)])
    file = folder / RECORDS
    with file.open() as lines:
        (row,) = csv.DictReader(lines)
    kept = {name: row[name] for name, column in COLUMNS.items() if column.since == 1}
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(kept), lineterminator="\n")
        writer.writeheader()
        writer.writerow({**kept, "schema": "1", **cells})
    return file


ROOT = Path(__file__).parents[1]
TWO = "pid 11 (python): 5 B; pid 12: memory unknown"
SHARED = ("neighbours_computing", "neighbours_drawing", "neighbours_late", "other_cores")


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({}, (0, 0, 0, nan)),
        ({"neighbours": TWO, "reason": f"the card was shared: {TWO}"}, (2, 0, 0, nan)),
        ({"neighbours": TWO, "notes": f"x; the card was shared: {TWO}; y"}, (2, 0, 0, nan)),
        ({"neighbours": TWO}, (2, 0, 0, nan)),
        (
            {"neighbours": "pid 9: 5 B", "notes": "the card also drives a display: pid 9"},
            (0, 1, 0, nan),
        ),
        (
            {"neighbours": "pid 9: 5 B", "notes": "another process came after the epoch: pid 9"},
            (0, 0, 1, nan),
        ),
        # what was unknown stays unknown
        ({"missing": "power_limit_w: no; neighbours: the case ran on a CPU"}, (nan,) * 4),
        ({"notes": "the CPU was shared: others used 0.40 cores during the epoch"}, (0, 0, 0, 0.4)),
    ],
)
def test_who_shared_the_machine(
    tmp_path: Path, cells: dict[str, str], told: tuple[float, ...]
) -> None:
    write_schema_1(tmp_path, **cells)
    row: Any = read_records(tmp_path).iloc[0]
    assert [row[name] for name in SHARED] == pytest.approx(told, nan_ok=True)
    assert (row["seed"], row["repeat"], row["run_seed"]) == (7, 3, 7), "repeats shared their seed"


def test_a_shared_cpu_is_doubted_as_before(tmp_path: Path) -> None:
    write_schema_1(tmp_path, notes="the CPU was shared: others used 0.40 cores during the epoch")
    assert summaries.read([read_sweep(tmp_path)])["contended"].tolist() == [True]


@pytest.mark.parametrize("cores", [1, 11, 2])
def test_a_cpu_of_one_core_is_spelled_as_today(tmp_path: Path, cores: int) -> None:
    write_schema_1(tmp_path, cpu=f"A 1 cores CPU, {cores} cores")
    (cpu,) = read_records(tmp_path)["cpu"]
    assert cpu == f"A 1 cores CPU, {cores} core{'s' if cores > 1 else ''}"


def test_what_was_compiled_was_so_in_the_default_mode(tmp_path: Path) -> None:
    """A switch until schema 8; what is written on says the mode."""
    file = write_schema_1(tmp_path, compile="on")
    (case,) = read_cases(read_records(tmp_path))
    assert case.compile == "default"
    assert read_records(tmp_path)["compile"].tolist() == ["default"]
    write_sweep(tmp_path, [make_run(Case(seed=8, compile="max-autotune"))])
    with file.open() as lines:
        found = [row["compile"] for row in csv.DictReader(lines)]
    assert found == ["default", "max-autotune"]
    # a folder's plan of that time has the same runs, so that it is not measured again
    ((planned, _, _),) = Plan(cases=[{"compile": "on", "seed": "7"}]).list_runs() or []
    assert planned == case


def test_writing_on_makes_the_file_todays(tmp_path: Path) -> None:
    file = write_schema_1(tmp_path, neighbours=TWO)
    write_sweep(tmp_path, [make_run(Case(seed=8))])
    assert file.read_text().partition("\n")[0].split(",") == list(COLUMNS)
    frame = read_records(tmp_path)
    assert frame["schema"].tolist() == [SCHEMA, SCHEMA]
    assert frame["neighbours_computing"].fillna(-1).tolist() == [2, -1]
    assert frame["run_seed"].tolist() == [7, 8]


def test_the_committed_sweep_is_read() -> None:
    """Of schema 2: no case had an opt level, and no step told its scale."""
    folder = ROOT / "results" / "cpu-epyc-20261120"
    frame, steps = read_records(folder), read_steps(folder)
    assert frame["run_seed"].tolist() == [0] * 19
    assert {case.opt_level for case in read_cases(frame)} == {None}
    assert len(steps) > 19
    assert steps["loss_scale"].isna().all()
    assert steps["lr"].isna().all(), "the axis's default is no reading"


def test_steps_of_an_older_schema_are_written_on(tmp_path: Path) -> None:
    """Their scales stay unknown; a column that was always there is missed as before."""
    write_sweep(tmp_path, [(make_run(Case()), [Step(0, 8, 2.5, 1, 0.5, 64.0)])])
    file = tmp_path / STEPS
    older = [line.rsplit(",", 2)[0] for line in file.read_text().splitlines()]
    file.write_text("\n".join(older) + "\n")
    assert read_steps(tmp_path)["loss_scale"].isna().all()
    write_sweep(tmp_path, [(make_run(Case(seed=1)), [Step(0, 8, 2.5, 1, 0.5, 128.0)])])
    assert read_steps(tmp_path)["loss_scale"].fillna(0).tolist() == [0, 128]
    file.write_text("\n".join(line.rpartition(",")[0] for line in older) + "\n")
    with pytest.raises(UsageError, match="column 'time_s' is missing"):
        read_steps(tmp_path)
