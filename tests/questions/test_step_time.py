"""Where the time of a step goes, and why a case is not faster: what tests/golden does not show."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.questions.step_time import CAUSES, tabulate_changes, tabulate_reasons
from bench.render.model import Table
from bench.report.document import Report, build
from bench.store.cells import WORK as WORK_FILE
from bench.study.sweeps import read_sweeps
from tests.planted.sweeps import Folders


def find(report: Report, name: str) -> Table:
    return next(table for table in report.tables if table.name == name)


def read_rows(table: Table) -> list[dict[str, object]]:
    """The numbers behind each row, by the names of the columns."""
    names = [head.name for head in table.heads]
    return [
        {name: cell.text if cell.value is None else cell.value for name, cell in pairs}
        for pairs in (zip(names, row, strict=True) for row in table.rows)
    ]


def test_cases_without_a_profile_have_no_table(planted: Folders, tmp_path: Path) -> None:
    kept = {"none": (), "one": ("fp32-b512",), "three": ("fp32", "bf16-amp-b512")}
    for name, records in kept.items():
        forget_times(planted["profiled"], tmp_path / name, records)
    bare, one, three = (build(read_sweeps([tmp_path / name])) for name in kept)
    names = {table.name for table in bare.tables}
    assert not names & {"time", "operations", "why"}
    assert not bare.pairs
    assert len(find(one, "time").rows) == 1
    assert "3 other cases have no profile" in find(one, "time").notes[-1]
    assert "--profile" in find(one, "time").notes[-1]
    assert "1 other case has no profile" in find(three, "time").notes[-1]


def forget_times(source: Path, folder: Path, but: tuple[str, ...] = ()) -> None:
    """Copy a sweep without its profiles, but for those of records that begin with ``but``."""
    folder.mkdir()
    for name, lost in (
        (WORK_FILE, ("time_s",)),
        ("records.csv", ("profiled_steps", "profiled_step_s", "busy_s")),
    ):
        with (source / name).open(newline="") as file:
            rows = [*csv.DictReader(file)]
        for row in rows:
            if not row["record_id"].startswith(but):
                row |= dict.fromkeys(lost, "")
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def test_the_parts_and_the_reasons_add_up_to_the_step(planted: Folders) -> None:
    page = build(read_sweeps([planted["profiled"]]))
    for why in page.pairs:
        *parts, whole = read_rows(CAUSES.fill(tabulate_changes("changes", why)))
        for column in ("before", "after", "change"):
            total = sum(part[column] for part in parts)  # type: ignore[misc]
            assert total == pytest.approx(whole[column], abs=5e-6)
        shares = [row["share"] for row in read_rows(CAUSES.fill(tabulate_reasons("reasons", why)))]
        assert sum(shares) == pytest.approx(1)  # type: ignore[arg-type]
