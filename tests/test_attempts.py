"""The attempt that counts: one answer for resume, report, compare and the import into asv."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.compare.side import read_side
from bench.record import COLUMNS, Record, Status, flatten
from bench.store.attempts import find_mixed, keep_latest
from bench.store.reader import read_records
from bench.store.runs import read_cases, read_history
from bench.study.runs import latest, read_runs
from bench.study.sweeps import read_sweep
from tests.planted.records import make_run, write_sweep

CASE = Case(batch_size=64, dataset="synthetic", device="cpu")
UNKNOWN: dict[str, Any] = dict.fromkeys(
    ("gpu", "driver", "torch", "code", "dataset_fingerprint", "train_images")
)


def write(folder: Path, *records: Record) -> Path:
    rows = [replace(row, record_id=f"row {number}") for number, row in enumerate(records)]
    return write_sweep(folder, rows)


def frame_of(*records: Record) -> pd.DataFrame:
    """Records as `read_records` types the columns that matter here."""
    rows = [flatten(replace(row, record_id=f"row {i}")) for i, row in enumerate(records)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    text = [name for name, column in COLUMNS.items() if column.type is str]
    frame[text] = frame[text].astype(object).where(frame[text].notna(), "").astype(str)
    return frame


MIXED = (
    make_run(CASE, gpu="X", status=Status.ERROR, attempt=1),
    make_run(CASE, gpu="X", epoch_time_s=10.0, attempt=2),
    make_run(CASE, gpu="X", epoch_time_s=11.0, repeat=2),
    # --mix: another card answers the same runs
    make_run(CASE, gpu="Y", status=Status.INTERRUPTED, attempt=3),
    make_run(CASE, gpu="Y", epoch_time_s=20.0, attempt=4),
    # a first attempt that ended before it knew its machine
    make_run(CASE, repeat=3, status=Status.KILLED, attempt=1, **UNKNOWN),
    make_run(CASE, repeat=3, gpu="Y", epoch_time_s=21.0, attempt=2),
    make_run(CASE, gpu="Y", epoch_time_s=22.0, sentinel=True),
)
COUNT = ["row 1", "row 2", "row 4", "row 6"]


def test_all_who_read_a_mixed_folder_agree_on_the_attempts_that_count(tmp_path: Path) -> None:
    pytest.importorskip("asv", reason="asv is not installed (the 'asv' extra)")
    from bench.asv.results import read_measured

    folder = write(tmp_path / "mixed", *MIXED)
    report = latest(read_runs([read_sweep(folder)]))
    assert [run.record_id for run in report] == COUNT
    assert [run.record_id for run in read_side("A", folder).runs] == COUNT
    assert read_measured(folder)["record_id"].tolist() == COUNT

    frame = read_records(folder)
    rows = frame.set_index("record_id")
    for gpu, count in (("X", COUNT[:2]), ("Y", COUNT[2:])):
        past = read_history(frame[frame["gpu"] == gpu])
        ran = {run: p for run, p in past.items() if not run[2]}
        assert [(run[1], p.status, p.attempt) for run, p in ran.items()] == [
            (rows.at[name, "repeat"], rows.at[name, "status"], rows.at[name, "attempt"])
            for name in count
        ]


def test_another_environment_is_no_attempt_at_the_same_run() -> None:
    rows = [make_run(CASE, attempt=1), make_run(CASE, attempt=2, torch="2.14.0")]
    assert len(keep_latest(frame_of(*rows))) == 2
    variables = [make_run(CASE, attempt=1, variables="X=1"), make_run(CASE, attempt=2)]
    assert len(keep_latest(frame_of(*variables))) == 2  # none set is an answer


@pytest.mark.parametrize("known_first", [True, False])
def test_what_a_run_did_not_get_to_know_is_no_environment(known_first: bool) -> None:
    known = make_run(CASE, attempt=2 - known_first, model_source="abc", variables="X=1")
    lost = make_run(CASE, attempt=1 + known_first, status=Status.KILLED, **UNKNOWN)
    kept = keep_latest(frame_of(known, lost))
    assert kept["status"].tolist() == ["killed" if known_first else "ok"]
    unread = make_run(CASE, attempt=1 + known_first, variables="X=1")  # knows all but the model
    assert len(keep_latest(frame_of(known, unread))) == 1


def test_mixed_is_what_differs_within_a_case() -> None:
    other = replace(CASE, batch_size=8)
    assert find_mixed(frame_of(make_run(CASE), make_run(other, torch="2.14.0"))) == []
    rows = frame_of(make_run(CASE), make_run(CASE, repeat=2, torch="2.14.0", gpu="Y"))
    assert find_mixed(rows) == ["gpu", "torch"]
    lost = make_run(CASE, repeat=2, status=Status.ERROR, **UNKNOWN)
    assert find_mixed(frame_of(make_run(CASE), lost)) == []


ROW = st.builds(
    make_run,
    st.sampled_from([replace(CASE, batch_size=size) for size in (8, 16)]),
    repeat=st.integers(1, 2),
    attempt=st.integers(1, 3),
    gpu=st.sampled_from(["X", "Y"]),
    sentinel=st.booleans(),
)
ROWS = st.lists(ROW, min_size=1, max_size=12)


@given(ROWS)
def test_one_row_counts_of_each_run_and_environment(records: list[Record]) -> None:
    frame = frame_of(*records)
    kept = keep_latest(frame)
    names = ["repeat", "sentinel", "gpu"]

    def key(row: Any) -> tuple[Any, ...]:
        return (row["batch_size"], *(row[name] for name in names))

    last: dict[Any, Any] = {}
    for _, row in frame.iterrows():
        if row["attempt"] >= last.get(key(row), row)["attempt"]:
            last[key(row)] = row
    assert kept["record_id"].tolist() == sorted(
        (row["record_id"] for row in last.values()), key=lambda name: int(name.split()[1])
    )
    assert read_cases(kept) == [
        case
        for case, name in zip(read_cases(frame), frame["record_id"], strict=True)
        if name in set(kept["record_id"])
    ]


def test_attempts_of_another_card_are_counted_on_from(tmp_path: Path) -> None:
    """With --mix each card's last attempt is a row of its own; the next is a third."""
    rows = [make_run(CASE, gpu="X"), make_run(CASE, gpu="Y", attempt=2, status=Status.ERROR)]
    for number, order in enumerate((rows, rows[::-1])):
        (past,) = read_history(read_records(write(tmp_path / str(number), *order))).values()
        assert (past.attempt, past.status) == (2, Status.ERROR)
