"""The table of epochs, from sweeps written through the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.case import Case
from bench.limits import STEADY
from bench.questions.epochs import Trend
from bench.record import EpochRow, Record, Status, Step
from bench.render.model import Table
from bench.render.text import render
from bench.report.document import Report, build
from bench.study.sweeps import read_sweep
from tests.planted.records import make_record, measured, write_sweep

CASE = Case(epochs=3, evaluate=True, precision="bf16-amp")
Written = tuple[Record, list[Step], list[EpochRow]]


def run(case: Case, times: list[float], repeat: int = 1, **values: object) -> Written:
    """A run of ``case`` whose losses fall by a tenth from epoch to epoch."""
    mean = sum(times) / len(times)
    record = make_record(case, repeat=repeat, **measured(mean, 2**30), **values)
    epochs = [
        EpochRow(i, time, 2 - i / 10, 0.25 + i / 8, 1.5 - i / 10, 0.5 + i / 8, 1.0)
        for i, time in enumerate(times)
    ]
    return record, [], epochs


def report(folder: Path, *runs: Written) -> Report:
    return build([read_sweep(write_sweep(folder / "sweep", runs))])


def find(made: Report) -> Table:
    (table,) = [table for table in made.tables if table.name == "epochs"]
    return table


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


@pytest.mark.slow
def test_each_epoch_has_a_row_under_its_case(tmp_path: Path) -> None:
    other = replace(CASE, batch_size=256)
    table = find(report(tmp_path, run(CASE, [10, 10.1, 10.1]), run(other, [8, 8, 8])))
    assert [head.name for head in table.heads] == [
        "epoch",
        "epoch_time_s",
        "train_loss",
        "train_accuracy",
        "test_loss",
        "test_accuracy",
    ]
    assert texts(table)[:2] == [
        ["1", "10.00", "2.000", "25.0", "1.500", "50.0"],
        ["2", "10.10", "1.900", "37.5", "1.400", "62.5"],
    ]
    assert [row[0].text for row in table.rows] == ["1", "2", "3"] * 2
    assert table.groups == {0: "batch size 128", 3: "batch size 256"}
    assert table.notes == ()


@pytest.mark.slow
def test_a_trend_above_what_counts_as_steady_is_said(tmp_path: Path) -> None:
    case = replace(CASE, epochs=4)
    rising = run(case, [10, 10.5, 11, 11.5])
    falling = run(replace(case, batch_size=256), [8, 7.4, 7.1, 6.5])
    noisy = run(replace(case, batch_size=512), [8, 9.5, 7.9, 9])
    table = find(report(tmp_path, rising, falling, noisy))
    said = [row[-1].text for row in table.rows]
    assert said[3] == "15.0 % slower from first to last"
    assert said[7] == "18.1 % faster from first to last"
    assert not any(text for i, text in enumerate(said) if i not in (3, 7))
    assert "--repeats" in table.notes[0]


@pytest.mark.slow
def test_two_epochs_are_no_trend(tmp_path: Path) -> None:
    table = find(report(tmp_path, run(replace(CASE, epochs=2), [10, 20])))
    assert "trend" not in [head.name for head in table.heads]


@pytest.mark.slow
def test_a_table_too_long_ends_between_cases(tmp_path: Path) -> None:
    cases = [replace(CASE, epochs=15, batch_size=size) for size in (64, 128, 256)]
    table = find(report(tmp_path / "a", *(run(case, [10] * 15) for case in cases)))
    assert (len(table.rows), list(table.groups)) == (30, [0, 15])
    assert table.notes[-1].startswith("15 more rows are left out")
    table = find(report(tmp_path / "b", run(replace(CASE, epochs=50), [10] * 50)))
    assert len(table.rows) == 40


@pytest.mark.parametrize(("change", "said"), [(STEADY, False), (-STEADY, False), (0.03, True)])
def test_what_counts_as_steady(change: float, said: bool) -> None:
    assert bool(str(Trend(change))) is said


def test_repeats_are_shown_by_their_median(tmp_path: Path) -> None:
    runs = [run(CASE, [t, 10, 10], repeat) for repeat, t in enumerate([10, 10.1, 99], 1)]
    failed = run(CASE, [1, 1, 1], 4, status=Status.DIVERGED)
    table = find(report(tmp_path, *runs, failed))
    assert [row[1].value for row in table.rows] == [10.1, 10, 10]


def test_without_evaluation_its_columns_are_left_out(tmp_path: Path) -> None:
    record, steps, epochs = run(CASE, [10, 10, 10])
    for epoch in epochs:
        epoch.test_loss = epoch.test_accuracy = epoch.eval_time_s = None
    epochs[1].train_loss = None
    table = find(report(tmp_path, (record, steps, epochs)))
    assert [head.name for head in table.heads][-1] == "train_accuracy"
    assert texts(table)[1][2] == "–"


def test_one_epoch_is_in_the_overview_alone(tmp_path: Path) -> None:
    once = make_record(replace(CASE, epochs=1), **measured(10, 2**30))
    made = report(tmp_path, (once, [], []))
    assert [table.name for table in made.tables if table.name == "epochs"] == []
    assert "Epochs: whole, timed warm." in made.notes


def test_the_report_says_what_the_overview_has_of_several(tmp_path: Path) -> None:
    made = report(tmp_path, run(CASE, [10, 10, 10]))
    (note,) = [note for note in made.notes if note.startswith("Epochs: ")]
    assert note.endswith("the time is the mean epoch's, and loss and accuracy are of the last.")
    assert "Epoch by epoch" in render(made, full=True)


@pytest.mark.slow
def test_a_short_energy_is_one_short_in_each_epoch(tmp_path: Path) -> None:
    """Each epoch has two ends at which the sensor is read: 3 s in three epochs are short."""
    record, steps, epochs = run(CASE, [1, 1, 1])
    record.measurement.energy_j, record.measurement.measured_time_s = 100.0, 3.0
    short = report(tmp_path / "a", (record, steps, epochs)).records
    record.measurement.measured_time_s = 6.0
    long = report(tmp_path / "b", (record, steps, epochs)).records
    assert (short["energy"].all(), long["energy"].any()) == (True, False)
