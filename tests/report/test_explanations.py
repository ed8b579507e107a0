"""Where the time of a step goes, and why a case is not faster: what tests/golden does not show."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from bench.case import Case
from bench.questions.reasons import EXPLAINED, choose_pairs, tabulate_changes, tabulate_reasons
from bench.render.model import Table
from bench.report.document import Report, build
from bench.report.figures.frames import FLOOR
from bench.report.figures.groups import view_report
from bench.report.figures.sketches import SKETCHES
from bench.store.cells import WORK as WORK_FILE
from bench.study.sweeps import read_sweeps
from tests.planted.sweeps import RATES, WORK, Folders

BUSY_MS = {
    precision: sum(row[3 + half] for row in WORK.values())
    for half, precision in enumerate(("fp32", "bf16-amp"))
}
"""Of 512 items."""

STEP_MS = {precision: busy + 2 for precision, busy in BUSY_MS.items()}


@pytest.fixture(scope="module")
def page(planted: Folders) -> Report:
    return build(read_sweeps([planted["profiled"]]))


def find(report: Report, name: str) -> Table:
    return next(table for table in report.tables if table.name == name)


def read_rows(table: Table) -> list[dict[str, object]]:
    """The numbers behind each row, by the names of the columns."""
    names = [head.name for head in table.heads]
    return [
        {name: cell.text if cell.value is None else cell.value for name, cell in pairs}
        for pairs in (zip(names, row, strict=True) for row in table.rows)
    ]


# ------------------------------------------------------------------------------------------ tables


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


def forget_times(source: Path, folder: Path, but: tuple[str, ...] = (), **others: str) -> None:
    """Copy a sweep without its profiles, but for those of records that begin with ``but``, and with
    other cells of the records."""
    folder.mkdir()
    for name, lost, changed in (
        (WORK_FILE, ("time_s",), {}),
        ("records.csv", ("profiled_steps", "profiled_step_s", "busy_s"), others),
    ):
        with (source / name).open(newline="") as file:
            rows = [row | changed for row in csv.DictReader(file)]
        for row in rows:
            if not row["record_id"].startswith(but):
                row |= dict.fromkeys(lost, "")
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def test_the_parts_and_the_reasons_add_up_to_the_step(page: Report) -> None:
    for why in page.pairs:
        *parts, whole = read_rows(EXPLAINED.fill(tabulate_changes("changes", why)))
        for column in ("before", "after", "change"):
            total = sum(part[column] for part in parts)  # type: ignore[misc]
            assert total == pytest.approx(whole[column], abs=5e-6)
        shares = [
            row["share"] for row in read_rows(EXPLAINED.fill(tabulate_reasons("reasons", why)))
        ]
        assert sum(shares) == pytest.approx(1)  # type: ignore[arg-type]


def test_of_each_value_one_pair_is_explained_before_a_second(page: Report) -> None:
    (why,) = (w for w in page.pairs if w.b.case.batch_size == 512)
    pairs = [
        replace(why, b=replace(why.b, name=name, case=Case(batch_size=size)))
        for name, sizes in (("tf32", (1, 2, 4)), ("bf16", (1, 2)), ("fp16", (8,)))
        for size in sizes
    ]
    chosen = [(pair.b.name, pair.b.case.batch_size) for pair in choose_pairs(pairs, most=4)]
    assert chosen == [("tf32", 2), ("tf32", 4), ("bf16", 2), ("fp16", 8)]


# ----------------------------------------------------------------------------------------- figures


def take(report: Report, name: str) -> dict[str, object]:
    sketch = next(sketch for sketch in SKETCHES if sketch.name == name)
    return dict(sketch.take(view_report(report)))


def test_the_waterfall_leads_from_one_step_to_the_other(page: Report) -> None:
    frames = take(page, "waterfall")
    (title,) = (title for title in frames if title.endswith("512"))
    frame = frames[title]
    assert frame["part"].iloc[0] == "fp32"  # type: ignore[index]
    assert frame["part"].iloc[-1] == "bf16-amp"  # type: ignore[index]
    before, after = frame["before (ms)"].iloc[0], frame["after (ms)"].iloc[-1]  # type: ignore[index]
    assert (before, after) == pytest.approx((STEP_MS["fp32"], STEP_MS["bf16-amp"]), rel=1e-3)
    assert before + frame["change (ms)"].sum() == pytest.approx(after)  # type: ignore[index]
    inner = frame.set_index("part")  # type: ignore[attr-defined]
    floor = max(11.76e9 / RATES["rate_bfloat16"], 117e6 / 2 / RATES["rate_copy"])
    assert inner.loc["1×1 convolutions", FLOOR] == pytest.approx(512e3 * floor)
    assert inner.loc["casts to another number format", "change (ms)"] == pytest.approx(7)
    assert "loss" not in inner.index, "what hardly changed is summed"
    assert inner.loc["all others", "before (ms)"] > 0
