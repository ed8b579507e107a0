"""The store: what is written is read back, whatever it is and whatever happened meanwhile."""

from __future__ import annotations

import csv
import io
import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import filelock
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.base.errors import StoreError, UsageError
from bench.base.text import clean
from bench.compare.comparison import read_side
from bench.results.store.reader import read_beside, read_records, read_rows
from bench.results.store.rows import (
    latest,
    read_history,
)
from bench.results.store.table import EPOCHS, LARGEST_READ, RECORDS, STEPS
from bench.results.store.writer import Store
from bench.results.study.runs import read_runs
from bench.results.study.sweeps import read_sweep
from bench.schema.case import Case
from bench.schema.record import (
    COLUMNS,
    SCHEMA,
    WORK_COLUMNS,
    Environment,
    EpochRow,
    Measurement,
    Status,
    Step,
    WorkRow,
    flatten,
)
from tests.frames_for_tests import read_epochs, read_steps, read_work
from tests.planted.records import make_run, write_sweep
from tests.pytest_for_tests import Patch

ONE_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=int(os.environ.get("BENCH_FUZZ", "20")),
)
TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
STEP = Step(0, 32, 2.25, 4, 0.125, 128.0)
EPOCH = EpochRow(0, 1.25, 2.0, 0.5)


def write(folder: Path, *records: Any, epochs: Sequence[EpochRow] = ()) -> Path:
    with Store(folder) as opened:
        for item in records:
            opened.append(item, [STEP], epochs)
    return folder / RECORDS


def lines(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\n")


def edit(file: Path, change: Callable[[list[dict[str, str]]], None]) -> None:
    """Change a records file as a person with a spreadsheet would."""
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    change(rows)
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def expect(folder: Path, *parts: str) -> None:
    with pytest.raises(UsageError) as error:
        read_records(folder)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert str(folder) in message
    for part in parts:
        assert part in message, message


# ------------------------------------------------------------------------------------ round trips


def test_a_record_is_read_back_in_every_column(tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    for i, field in enumerate((*fields(Measurement), *fields(Environment))):
        kind = COLUMNS[field.name].type
        values[field.name] = {int: i, float: i + 0.1, str: f"text {i}", bool: i % 2 == 0}[kind]
    values |= {"status": Status.DIVERGED, "reason": "the loss was inf", "log": "logs/a.log"}
    values |= {"sentinel": True, "inferred": True, "attempt": 3, "repeat": 2, "retries": 1}
    case = Case(precision="fp16", loss_scale="dynamic", evaluate=True, lr=0.1 + 0.2)
    wanted = make_run(case, **values)
    frame = read_records(write(tmp_path, wanted))
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == 1
    read = frame.iloc[0].to_dict()
    for name, value in flatten(wanted).items():
        assert read[name] == ("" if value is None else value), name
        assert type(value) is not str or type(read[name]) is str, name
    assert [row.case for row in read_rows(tmp_path)] == [wanted.case]


def test_an_axis_is_a_value_in_a_row_and_text_in_a_frame(tmp_path: Path) -> None:
    """Also where numbers stand beside empty cells."""
    cases = Case(), Case(precision="fp16", loss_scale=64.0, steps=8, until=0.01)
    write(tmp_path, *map(make_run, cases))
    frame, rows = read_records(tmp_path), read_rows(tmp_path)
    for name, texts in {
        "loss_scale": ["", "64"],
        "steps": ["", "8"],
        "until": ["", "0.01"],
    }.items():
        assert frame[name].tolist() == texts
        assert [getattr(row, name) for row in rows] == [getattr(case, name) for case in cases]


@ONE_FOLDER
@given(TEXT, TEXT, st.sampled_from(list("=+-@＝＋－＠'\t")))
def test_any_text_is_read_back_and_is_no_formula(
    tmp_path_factory: pytest.TempPathFactory, text: str, more: str, start: str
) -> None:
    folder = tmp_path_factory.mktemp("text")
    texts = {"reason": text, "gpu": start + text, "notes": more, "cpu": start + start + more}
    file = write(folder, make_run(**texts))
    read = read_records(file).iloc[0]
    for name, value in texts.items():
        assert read[name] == clean(value), name
    with file.open(newline="") as opened:
        (cells,) = csv.DictReader(opened)
    for name, cell in cells.items():
        assert not cell.startswith(tuple("=+-@＝＋－＠\t\r")), name
        assert len(cell.splitlines()) <= 1
    assert len(lines(file)) == 3


@ONE_FOLDER
@given(st.dictionaries(
    st.sampled_from([f.name for f in fields(Measurement) if COLUMNS[f.name].type is float]),
    st.floats(),
    max_size=4,
))  # fmt: skip
@example({"epoch_time_s": math.inf, "train_loss": math.nan})
def test_any_number_is_read_back_or_left_out_with_its_reason(
    tmp_path_factory: pytest.TempPathFactory, numbers: dict[str, float]
) -> None:
    """One NaN written as such would make the whole file one that is refused."""
    folder = tmp_path_factory.mktemp("numbers")
    read = read_records(write(folder, make_run(**numbers, missing="a: b"))).iloc[0]
    assert read["missing"].startswith("a: b")
    for name, number in numbers.items():
        if math.isfinite(number):
            assert read[name] == number or (abs(number) > LARGEST_READ and math.isnan(read[name]))
            assert f"; {name}: " not in read["missing"]
        else:
            assert math.isnan(read[name])
            assert f"{name}: read as {number}" in read["missing"]


NUMBER, AMOUNT = st.integers(0, 10**6), st.none() | st.floats()
OPERATIONS = st.sampled_from(["mm", "3×3, 32 groups of 3→3", ""])


@ONE_FOLDER
@given(st.lists(st.builds(WorkRow, OPERATIONS, OPERATIONS, OPERATIONS, NUMBER, AMOUNT, AMOUNT)))
def test_what_stands_beside_a_record_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[WorkRow]
) -> None:
    folder = tmp_path_factory.mktemp("work")
    with Store(folder) as opened:
        opened.append(make_run(), work=rows)
    frame = read_work(folder)
    assert list(frame.columns) == list(WORK_COLUMNS)
    for found, row in zip(frame.itertuples(index=False), rows, strict=True):
        assert found.record_id == make_run().record_id
        for name, value in asdict(row).items():
            cell, text = getattr(found, name), WORK_COLUMNS[name].type is str
            taken = text or (value is not None and abs(value) <= LARGEST_READ)
            assert cell == value if taken else math.isnan(cell)


# ------------------------------------------------------------------- which attempt counts

CASE = Case(batch_size=64, dataset="synthetic", device="cpu")
UNKNOWN: dict[str, Any] = dict.fromkeys(
    ("gpu", "driver", "torch", "code", "dataset_fingerprint", "train_images")
)


def test_all_who_read_a_mixed_folder_agree_on_the_attempts_that_count(tmp_path: Path) -> None:
    """Resume, report and compare."""
    mixed = (
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
    count = ["row 1", "row 2", "row 4", "row 6"]
    named = [replace(row, record_id=f"row {number}") for number, row in enumerate(mixed)]
    folder = write_sweep(tmp_path / "mixed", named)
    report = latest(read_runs([read_sweep(folder)]))
    assert [run.record_id for run in report] == count
    assert [run.record_id for run in read_side("A", folder).runs] == count
    for gpu, runs in (("X", {1: 2, 2: 1}), ("Y", {1: 4, 3: 2})):
        past = read_history(row for row in read_rows(folder) if row.gpu == gpu)
        assert {run[1]: p.attempt for run, p in past.items() if not run[2]} == runs
        assert {p.status for p in past.values()} == {Status.OK}


def test_attempts_of_another_card_are_counted_on_from(tmp_path: Path) -> None:
    """With --mix each card's last attempt is a row of its own; the next is a third."""
    rows = [make_run(CASE, gpu="X"), make_run(CASE, gpu="Y", attempt=2, status=Status.ERROR)]
    for number, order in enumerate((rows, rows[::-1])):
        (past,) = read_history(read_rows(write_sweep(tmp_path / str(number), order))).values()
        assert (past.attempt, past.status) == (2, Status.ERROR)


# ------------------------------------------------------------------------------------ on the disk


def test_rows_are_on_disk_when_append_returns(tmp_path: Path, monkeypatch: Patch) -> None:
    synced: list[tuple[str, int]] = []

    def fsync(descriptor: int) -> None:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        synced.append((name, os.fstat(descriptor).st_size))

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    with Store(tmp_path) as opened:
        assert str(tmp_path) in [name for name, _ in synced], "the names of new files too"
        synced.clear()
        opened.append(make_run(), [STEP], [EPOCH])
        assert str(tmp_path) in [name for name, _ in synced], "the name of epochs.csv too"
        synced = [pair for pair in synced if pair[0] != str(tmp_path)]
        del synced[1]  # the header of epochs.csv
        files = [tmp_path / STEPS, tmp_path / EPOCHS, tmp_path / RECORDS]
        sizes = [(str(file), file.stat().st_size) for file in files]
        assert synced == sizes, "the steps first: no row stands without its curve"
        synced.clear()
        opened.append(replace(make_run(repeat=2), finished_at=make_run().started_at))
        assert not synced, "what took no second waits for what comes within one"
    assert str(files[2]) in [name for name, _ in synced], "or for the end"


# ------------------------------------------------------------------------------------- torn lines


@pytest.mark.parametrize(
    "torn",
    [
        b'1,"half a quoted, cell',
        b"\x00" * 3_000_000,  # more than is ever read of a line
        b"1,ab\x00\x00,8\n",  # its pages did not all come
    ],
    ids=["quote", "many zeros", "hole"],
)
def test_a_torn_line_is_set_aside_and_reported(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path, make_run(), make_run(repeat=2), epochs=[EPOCH])
    whole = {name: (tmp_path / name).read_bytes() for name in (RECORDS, STEPS, EPOCHS)}
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data + torn)
    if not torn.endswith(b"\n"):  # a sweep may be writing it at this moment
        assert {len(read(tmp_path)) for read in (read_records, read_steps, read_epochs)} == {2}
    with Store(tmp_path) as opened:
        for (name, data), report in zip(whole.items(), opened.set_aside, strict=True):
            (aside,) = tmp_path.glob(f"{name}.torn-*")
            assert report.startswith(f"{name}: ")
            assert aside.name in report
            assert aside.read_bytes() == torn
            assert (tmp_path / name).read_bytes() == data
        opened.append(make_run(repeat=3), [STEP], [EPOCH])
    assert read_records(tmp_path)["repeat"].tolist() == [1, 2, 3]
    assert len(read_steps(tmp_path)) == len(read_epochs(tmp_path)) == 3
    with Store(tmp_path) as opened:
        assert opened.set_aside == []


def test_torn_at_every_byte(tmp_path: Path) -> None:
    """Wherever the power goes, the rows before are there and the file can be written on."""
    file = write(tmp_path / "whole", make_run(), make_run(repeat=2, reason="é"))
    data = file.read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(0, len(data), 397):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / RECORDS).write_bytes(data[:cut])
        rows = max(0, sum(end < cut for end in ends) - 1)
        assert len(read_records(folder)) == rows
        write(folder, make_run(repeat=3))
        assert read_records(folder)["repeat"].tolist() == [*range(1, rows + 1), 3]


# --------------------------------------------------------------------------------- failing writes


class Disk(io.FileIO):
    """A file on a disk that takes so many bytes, and short writes until then."""

    room = 10**9

    def write(self, data: Any) -> int:
        if Disk.room <= 0:
            raise OSError(28, os.strerror(28))
        taken = bytes(data[: min(100, Disk.room)])
        Disk.room -= len(taken)
        return super().write(taken)


@pytest.fixture
def disk(monkeypatch: Patch) -> type[Disk]:
    monkeypatch.setattr(io, "FileIO", Disk)
    Disk.room = 10**9
    return Disk


@pytest.mark.parametrize("room", [0, 300])
def test_a_full_disk_leaves_the_rows_before(tmp_path: Path, disk: type[Disk], room: int) -> None:
    with Store(tmp_path) as opened:
        opened.append(make_run(), [STEP])
        before = {name: (tmp_path / name).read_bytes() for name in (RECORDS, STEPS)}
        disk.room = room
        with pytest.raises(StoreError, match="No space left on device; the rows before are intact"):
            opened.append(make_run(repeat=2), [STEP])
        assert (tmp_path / RECORDS).read_bytes() == before[RECORDS]
        assert (tmp_path / STEPS).read_bytes().startswith(before[STEPS])
        assert read_records(tmp_path)["repeat"].tolist() == [1]
        disk.room = 10**9
        opened.append(make_run(repeat=2), [STEP])
    assert read_records(tmp_path)["repeat"].tolist() == [1, 2]
    read_steps(tmp_path)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(UsageError, match=r"cannot be written \(FileSystem does not"):
        Store(tmp_path)


# -------------------------------------------------------------------------------------- the lock


HOLDER = f"pid {os.getpid()} on {socket.gethostname()}"


def test_a_second_writer_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with (
        Store(tmp_path),
        pytest.raises(UsageError, match=f"in use by {HOLDER}; wait until that ends"),
    ):
        Store(tmp_path)
    with Store(tmp_path) as second:
        second.append(make_run(repeat=2))
    assert read_records(tmp_path)["repeat"].tolist() == [2]


# ----------------------------------------------------------------------------------------- schema


def write_older(folder: Path, schema: int = SCHEMA, **columns: str) -> Path:
    """A row of a schema that had these columns, before there were an axis and a measurement."""
    run = make_run(Case(lr=0.25), epoch_time_s=3.5, reason="=1+1", gpu="'quoted'")
    file = write(folder, run)

    def change(rows: list[dict[str, str]]) -> None:
        del rows[0]["schedule"], rows[0]["missing"]
        rows[0].update(schema=str(schema), **columns)

    edit(file, change)
    return file


def test_a_file_with_fewer_columns_is_read_and_not_written_on(tmp_path: Path) -> None:
    file = write_older(tmp_path)
    before = file.read_bytes()
    with pytest.raises(UsageError, match=r"records\.csv has other columns .* choose another --out"):
        Store(tmp_path)
    assert file.read_bytes() == before
    (row,) = read_rows(tmp_path)
    assert (row.case.schedule, row.missing) == (Case.schedule, "")
    assert (row.lr, row.reason, row.gpu) == (0.25, "=1+1", "'quoted'")


def test_what_another_version_wrote_is_refused_with_what_reads_it(tmp_path: Path) -> None:
    write_older(tmp_path / "old", SCHEMA - 1, pin_memory="on")
    old = "commit 8645d459 of this project reads it"
    expect(tmp_path / "old", f"schema {SCHEMA - 1} is older than the {SCHEMA}", old)
    file = write_older(tmp_path / "new", SCHEMA + 1, warp_speed="9")
    expect(tmp_path / "new", f"schema {SCHEMA + 1} is newer than the {SCHEMA} this harness reads")
    before = file.read_bytes()
    with pytest.raises(UsageError, match="is newer"):
        write(tmp_path / "new", make_run())
    assert file.read_bytes() == before


# --------------------------------------------------------------------------- strangers' files


WRONG_CELLS = {
    ("epoch_time_s", "a finite number, or empty"): "nan -inf 1e999 --3.5 fast 1,5",
    ("peak_device_bytes", "a whole number"): "1.5",
    ("status", "one of ok, oom"): "fine",
    ("inferred", "one of on, off"): "maybe",
    ("batch_size", "at least 1"): "-1",
    ("precision", "did you mean 'fp16'?"): "fp61",
}


def test_a_wrong_cell_is_named_by_file_line_and_column(tmp_path: Path) -> None:
    file = write(tmp_path, *(make_run(repeat=n, epoch_time_s=1.0) for n in (1, 2, 3)))
    good = file.read_bytes()
    for (name, right), texts in WRONG_CELLS.items():
        for text in texts.split(" "):
            file.write_bytes(good)
            edit(file, lambda rows, cell=(name, text): rows[1].update([cell]))  # type: ignore[misc]
            expect(tmp_path, f"{file}:3: column '{name}': {text!r}"[:60], right)


def first_row(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        header, row, rest = data.split(b"\n", 2)
        return b"\n".join((header, change(row), rest))

    return apply


WRONG_FILES: list[tuple[Callable[[bytes], bytes], str]] = [
    (first_row(lambda r: r[:3] + b"\xe9" + r[3:]), ":1: not CSV in UTF-8"),
    (lambda d: d + b"9" * 10_000_000 + b"\n", ":4: not CSV"),
    (lambda d: b"hello", ":1: column 'schema' is missing: not written by `bench.sweep`"),
    (first_row(lambda r: r.rsplit(b",", 1)[0]), ":2: [0-9]+ cells, and [0-9]+ in the header"),
    (lambda d: d.replace(b"reason", b"notes", 1), ":1: column 'notes' is unknown or twice"),
    (
        lambda d: d.replace(b",status,", b",state,", 1),
        ":1: column 'state' is unknown or twice; rem",
    ),
    (
        first_row(lambda r: r.replace(b",ok,", b',"o\nk",')),
        ": a line break within a cell; give each record one line",
    ),
]


@pytest.mark.parametrize(("change", "expected"), WRONG_FILES)
def test_a_file_that_is_none_is_refused_by_line(
    tmp_path: Path, change: Callable[[bytes], bytes], expected: str
) -> None:
    file = write(tmp_path, make_run(reason="é"), make_run(repeat=2))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UsageError, match=f"{file}{expected}") as refused:
        read_records(tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_steps_are_checked_alike(tmp_path: Path) -> None:
    file = write(tmp_path, make_run()).with_name(STEPS)
    file.write_bytes(file.read_bytes().replace(b"2.25", b"nan"))
    with pytest.raises(UsageError, match=f"{STEPS}:2: column 'loss': 'nan'"):
        read_beside(tmp_path, Step)
