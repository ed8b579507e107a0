"""The table of checkpoints, from sweeps written through the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.case import Case
from bench.record import Record
from bench.render.text import render
from bench.report.document import Report, build
from bench.study.sweeps import read_sweep
from tests.planted.records import make_record, measured, write_sweep

MIB = 2**20
COSTS = {"checkpoint_bytes": 3 * MIB, "checkpoint_save_s": 0.5, "checkpoint_load_s": 0.25}


def run(precision: str, repeat: int = 1, **values: object) -> Record:
    case = Case(precision=precision, checkpoint=True)
    values = {**COSTS, "resume_exact": True, **values}
    return make_record(case, repeat=repeat, **measured(10.0, 2**30), **values)


def report(folder: Path, *runs: Record) -> Report:
    return build([read_sweep(write_sweep(folder / "sweep", runs))])


@pytest.mark.slow
def test_each_case_has_what_its_checkpoint_takes(tmp_path: Path) -> None:
    why = "resume_exact: this device does not repeat a step bitwise; energy_j: this is a CPU"
    made = report(
        tmp_path,
        run("fp32"),
        run("fp32", 2, checkpoint_save_s=0.7),
        run("bf16", checkpoint_bytes=2 * MIB),
        run("tf32", resume_exact=None, missing=why),
        run("bf16-amp"),
        run("bf16-amp", 2, resume_exact=False, resume_difference="loss of step 2"),
    )
    (table,) = [table for table in made.tables if table.name == "checkpoints"]
    assert [head.label for head in table.heads] == [
        "case",
        "checkpoint (MiB)",
        "save (s)",
        "save, of an epoch (%)",
        "load (s)",
        "resume",
    ]
    found = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert found == {
        "fp32": ["3.000", "0.6000 (0.5000–0.7000)", "6.000", "0.2500", "exact"],
        "tf32": ["3.000", "0.5000", "5.000", "0.2500", "not known"],
        "bf16": ["2.000", "0.5000", "5.000", "0.2500", "exact"],
        "bf16-amp": ["3.000", "0.5000", "5.000", "0.2500", "differs"],
    }
    exact, *others = table.notes
    assert exact.endswith("random numbers, data): fp32, bf16.")
    assert sorted(others) == [
        "Resumed steps differ, first in loss of step 2: bf16-amp.",
        "Whether resumed steps are the same is not known (this device does not repeat a step "
        "bitwise): tf32.",
    ]
    page = render(made, full=True)
    assert "Resume differs: 1 of 6 runs" in page
    assert "(loss of step 2)" in page


def test_without_checkpoints_there_is_no_table(tmp_path: Path) -> None:
    made = report(tmp_path, make_record(Case(), **measured(10.0, 2**30)))
    assert not [table for table in made.tables if table.name == "checkpoints"]
