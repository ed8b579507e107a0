"""Where the time of a step goes, and why a case is not faster: what tests/golden does not show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.questions.step_time import CAUSES, explain_pairs, tabulate_changes, tabulate_reasons
from bench.render.table import Table
from bench.report.document import Report, build
from bench.study.sweeps import read_sweeps
from tests.planted.results import read_report
from tests.planted.sweeps import Folders, list_profiled


def find(report: Report, name: str) -> Table:
    return next(table for table in report.tables if table.name == name)


def read_rows(table: Table) -> list[dict[str, object]]:
    """The numbers behind each row, by the names of the columns."""
    names = [head.name for head in table.heads]
    return [
        {name: cell.text if cell.value is None else cell.value for name, cell in pairs}
        for pairs in (zip(names, row, strict=True) for row in table.rows)
    ]


def forget(row: Any) -> Any:
    """The same without its profile."""
    record, steps, epochs, work = row
    lost = dict.fromkeys(("profiled_steps", "profiled_step_s", "busy_s"))
    bare = replace(record, measurement=replace(record.measurement, **lost))
    return bare, steps, epochs, [replace(one, time_s=None) for one in work]


def test_cases_without_a_profile_have_no_row(tmp_path: Path) -> None:
    rows = [*list_profiled(repeats=1)]
    bare = read_report(tmp_path / "bare", map(forget, rows))
    assert "time" not in {table.name for table in bare.tables}
    some = read_report(tmp_path / "some", [rows[0], *map(forget, rows[1:])])
    assert len(find(some, "time").rows) == 1


def test_the_parts_and_the_reasons_add_up_to_the_step(planted: Folders) -> None:
    page = build(read_sweeps([planted["profiled"]]))
    for why in explain_pairs(page.steps, page.results, page.machines):
        *parts, whole = read_rows(CAUSES.fill(tabulate_changes(why)))
        for column in ("before", "after", "change"):
            total = sum(part[column] for part in parts)  # type: ignore[misc]
            assert total == pytest.approx(whole[column], abs=5e-6)
        shares = [row["share"] for row in read_rows(CAUSES.fill(tabulate_reasons(why)))]
        assert sum(shares) == pytest.approx(1)  # type: ignore[arg-type]
