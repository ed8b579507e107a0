"""The store: what is written is read back, whatever it is and whatever happened meanwhile."""

from __future__ import annotations

import csv
import io
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import filelock
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest_for_tests import Patch

from bench import record
from bench.axis import Axis, parse_number
from bench.case import AXES, Case
from bench.errors import StoreError, UsageError
from bench.record import (
    COLUMNS,
    EPOCH_COLUMNS,
    OLDEST,
    SCHEMA,
    STEP_COLUMNS,
    WORK_COLUMNS,
    Column,
    Environment,
    EpochRow,
    Measurement,
    Status,
    Step,
    WorkRow,
    flatten,
)
from bench.store import reader, table, writer
from bench.store.cells import EPOCHS, RECORDS, STEPS
from bench.store.reader import read_epochs, read_records, read_steps, read_work
from bench.store.runs import LatestAttempt, read_cases, read_history
from bench.store.writer import Store
from bench.text import clean
from bench.work import Kind
from tests.planted.records import make_run

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
    assert read_cases(frame) == [wanted.case]


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
def test_any_number_is_read_back_or_left_out_with_its_reason(
    tmp_path_factory: pytest.TempPathFactory, numbers: dict[str, float]
) -> None:
    """One NaN written as such would make the whole file one that is refused."""
    folder = tmp_path_factory.mktemp("numbers")
    read = read_records(write(folder, make_run(**numbers, missing="a: b"))).iloc[0]
    assert read["missing"].startswith("a: b")
    for name, number in numbers.items():
        if math.isfinite(number):
            assert read[name] == number
            assert name not in read["missing"]
        else:
            assert math.isnan(read[name])
            assert f"{name}: read as {number}" in read["missing"]


OPTIONAL = st.none() | st.floats()
NUMBER, SECONDS, SHARE = st.integers(0, 10**6), st.floats(0, 10**6), st.floats(0, 1)
KINDS = st.sampled_from([*map(str, Kind)])
OPERATIONS = st.sampled_from(["mm", "3×3, 32 groups of 3→3"])
FORMATS = st.sampled_from(["float32", "float32→bfloat16", ""])
MOSTLY_ANY = {
    "steps": st.builds(Step, NUMBER, NUMBER, OPTIONAL, NUMBER, OPTIONAL, OPTIONAL),
    "epochs": st.builds(
        EpochRow, NUMBER, SECONDS, OPTIONAL, SHARE, OPTIONAL,
        *(st.none() | values for values in (SHARE, SECONDS, NUMBER)),
    ),
    "work": st.builds(WorkRow, KINDS, OPERATIONS, FORMATS, NUMBER, OPTIONAL, OPTIONAL, OPTIONAL),
}  # fmt: skip
READERS = {
    "steps": (read_steps, STEP_COLUMNS),
    "epochs": (read_epochs, EPOCH_COLUMNS),
    "work": (read_work, WORK_COLUMNS),
}


@pytest.mark.parametrize("kind", READERS)
@ONE_FOLDER
@given(data=st.data())
def test_what_stands_beside_a_record_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    rows, (read, columns) = data.draw(st.lists(MOSTLY_ANY[kind])), READERS[kind]
    folder = tmp_path_factory.mktemp(kind)
    with Store(folder) as opened:
        opened.append(make_run(), **{kind: rows})
    frame = read(folder)
    assert list(frame.columns) == list(columns)
    for found, row in zip(frame.itertuples(index=False), rows, strict=True):
        assert found.record_id == make_run().record_id
        for name, value in asdict(row).items():
            cell, text = getattr(found, name), columns[name].type is str
            taken = text or (value is not None and math.isfinite(value))
            assert cell == value if taken else math.isnan(cell)


@given(TEXT)
def test_cleaning_again_changes_nothing(text: str) -> None:
    assert clean(clean(text)) == clean(text)
    clean(text).encode()


# ------------------------------------------------------------------------------ history, resuming


def test_the_latest_attempt_counts(tmp_path: Path) -> None:
    case = Case(batch_size=64)
    write(
        tmp_path,
        make_run(case, status=Status.ERROR),
        make_run(case, status=Status.OK, attempt=2),
        make_run(case, repeat=2, status=Status.OOM, inferred=True),
        make_run(case, sentinel=True, status=Status.TIMEOUT),
    )
    assert read_history(read_records(tmp_path)) == {
        (case, 1, False): LatestAttempt(Status.OK, 2, False),
        (case, 2, False): LatestAttempt(Status.OOM, 1, True, seed=1),
        (case, 1, True): LatestAttempt(Status.TIMEOUT, 1, False),
    }


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
        longer = make_run(repeat=3)
        quick = replace(longer, repeat=2, finished_at=longer.started_at)
        opened.append(quick, [STEP], [EPOCH])
        assert not synced, "what took no second waits for what comes within one"
        opened.append(longer, [STEP])
        order = [files[1], files[0], files[2]]
        assert synced == [(str(file), file.stat().st_size) for file in order]
        synced.clear()
        opened.append(replace(quick, repeat=4))
        assert not synced
    assert synced[0] == (str(files[2]), files[2].stat().st_size), "when it is closed"


# ------------------------------------------------------------------------------------- torn lines


@pytest.mark.parametrize(
    "torn",
    [
        b"1,ab",
        b"1",
        b'1,"half a quoted, cell',
        b"caf\xc3",  # in the middle of a character
        b"\x00" * 5000,
        b"\x00" * 3_000_000,  # more than is ever read of a line
        b"1,ab\x00\x00,8\n",  # its pages did not all come
    ],
    ids=["start", "digit", "quote", "character", "zeros", "many zeros", "hole"],
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
    for cut in range(0, len(data), 173):
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
    monkeypatch.setattr(writer.io, "FileIO", Disk)
    Disk.room = 10**9
    return Disk


@pytest.mark.parametrize("room", [0, 1, 40, 90, 130, 300])
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


def test_a_disk_that_cannot_even_cut_off_the_torn_line(
    tmp_path: Path, disk: type[Disk], monkeypatch: Patch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(5, os.strerror(5))

    with Store(tmp_path) as opened:
        opened.append(make_run())
        disk.room = 50
        monkeypatch.setattr(disk, "truncate", refuse)
        with pytest.raises(StoreError):
            opened.append(make_run(repeat=2))
    disk.room = 10**9
    with Store(tmp_path) as opened:
        assert len(opened.set_aside) == 1
        assert read_records(tmp_path)["repeat"].tolist() == [1]


def test_a_config_that_cannot_be_written(tmp_path: Path) -> None:
    with Store(tmp_path) as opened:
        opened.write_config({"command": "a"})
        (tmp_path / ".config.json").mkdir()
        with pytest.raises(StoreError, match=r"config\.json: Is a directory"):
            opened.write_config({"command": "b"})
    assert "a" in (tmp_path / "config.json").read_text()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(UsageError, match=r"cannot be written \(FileSystem does not"):
        Store(tmp_path)


# -------------------------------------------------------------------------------------- the lock


@pytest.mark.parametrize("wait_s", [0, 0.2])
def test_a_second_writer_is_told_who_holds_the_folder(tmp_path: Path, wait_s: float) -> None:
    holder = f"in use by pid {os.getpid()} on {socket.gethostname()}; wait"
    with Store(tmp_path), pytest.raises(UsageError, match=holder):
        Store(tmp_path, wait_s)
    Store(tmp_path).__exit__(None, None, None)


def test_a_second_writer_may_wait(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.append(make_run())
    told: list[str] = []

    def hear(who: str) -> None:  # from here on the second waits, however slow the machine is
        told.append(who)
        threading.Timer(0.3, first.__exit__, (None, None, None)).start()

    with Store(tmp_path, wait_s=200, on_wait=hear) as second:
        second.append(make_run(repeat=2))
    assert told == [f"pid {os.getpid()} on {socket.gethostname()}"]
    assert read_records(tmp_path)["repeat"].tolist() == [1, 2]


def test_a_writer_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from bench.store.writer import Store\n"
        "s = Store(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match=f"in use by pid {holder.pid} on "):
        Store(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with Store(tmp_path) as opened:
        opened.append(make_run())
    assert len(read_records(tmp_path)) == 1


def test_a_writer_that_could_not_open_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text("a,b\n1,2\n")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"not written by `bench\.sweep`"):
            Store(tmp_path)
    assert (tmp_path / RECORDS).read_text() == "a,b\n1,2\n"
    (tmp_path / RECORDS).unlink()
    Store(tmp_path).__exit__(None, None, None)


# ----------------------------------------------------------------------------------------- schema


NEXT = SCHEMA + 1


def declare(monkeypatch: Patch, column: Column, after: str) -> None:
    """Add a column that the next schema brings, and make that today's."""
    columns: dict[str, Column] = {}
    for name, known in COLUMNS.items():
        columns[name] = known
        if name == after:
            columns[column.name] = column
    for module in (table, writer):
        monkeypatch.setattr(module, "SCHEMA", NEXT)
    for module in (reader, table):
        monkeypatch.setattr(module, "COLUMNS", columns)
    monkeypatch.setitem(writer.TABLES, RECORDS, columns)
    monkeypatch.setattr(record, "SCHEMA", NEXT)


def test_files_of_an_older_schema_are_written_anew_before_anything_runs(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """And not by opening them: a command that is refused leaves them as they are."""
    file = write(tmp_path, make_run(epoch_time_s=3.5))
    before = file.read_bytes()
    declare(monkeypatch, Column("fan_speed", float, "fan", True), "seed")
    with Store(tmp_path):
        pass
    assert file.read_bytes() == before
    with Store(tmp_path) as opened:
        opened.migrate()
    assert read_records(tmp_path)["schema"].tolist() == [NEXT]
    assert read_records(tmp_path)["epoch_time_s"].tolist() == [3.5]


def test_a_new_column_never_shifts_old_ones(tmp_path: Path, monkeypatch: Patch) -> None:
    """A file of an older schema that is written on."""
    old = make_run(Case(lr=0.25), epoch_time_s=3.5, reason="=1+1", gpu="'quoted'")
    write(tmp_path, old)
    declare(monkeypatch, Column("fan_speed", float, "fan", True), "batch_size")
    plain = writer.flatten

    def flatten_anew(item: Any) -> dict[str, Any]:
        values = {**plain(item), "schema": NEXT, "fan_speed": 7.5}
        return {name: values[name] for name in writer.TABLES[RECORDS]}

    monkeypatch.setattr(writer, "flatten", flatten_anew)
    write(tmp_path, make_run(Case(lr=0.5), repeat=2, epoch_time_s=4.5))
    frame = read_records(tmp_path)
    assert frame["lr"].tolist() == [0.25, 0.5]
    assert frame["epoch_time_s"].tolist() == [3.5, 4.5]
    assert frame["reason"].tolist() == ["=1+1", ""]
    assert frame["gpu"].tolist() == ["'quoted'", "NVIDIA Imaginary"]
    assert math.isnan(frame["fan_speed"][0])
    assert frame["fan_speed"][1] == 7.5
    assert lines(tmp_path / RECORDS)[0].decode().split(",") == list(writer.TABLES[RECORDS])
    assert not list(tmp_path.glob(".records*"))


def test_a_new_axis_has_its_default_in_files_without_it(tmp_path: Path, monkeypatch: Patch) -> None:
    write(tmp_path, make_run())
    axis = Axis(1.5, parse_number("a momentum", 0), "momentum", name="momentum")
    monkeypatch.setitem(AXES, "momentum", axis)
    monkeypatch.setattr(Case, "momentum", 1.5, raising=False)
    declare(monkeypatch, record.make_axis_column(axis), "lr")
    frame = read_records(tmp_path)
    assert frame["momentum"].tolist() == [1.5]
    assert list(frame.columns).index("momentum") == list(frame.columns).index("lr") + 1


def write_schema_10(folder: Path, **columns: str) -> Path:
    """A row as schema 10 had it, with columns that are gone."""
    file = write(folder, make_run(epoch_time_s=3.5))
    edit(file, lambda rows: rows[0].update(schema=str(OLDEST), **columns))
    return file


def test_columns_that_are_gone_are_left_out_and_kept(tmp_path: Path) -> None:
    """Also once the file is written on: what was there stays beside it."""
    file = write_schema_10(tmp_path, pin_memory="off", prefetch="2", checkpoint_save_s="0.5")
    before = file.read_bytes()
    assert read_records(tmp_path)["epoch_time_s"].tolist() == [3.5]
    with Store(tmp_path) as opened:
        opened.migrate()
        opened.append(make_run(repeat=2))
    assert read_records(tmp_path)["schema"].tolist() == [SCHEMA, SCHEMA]
    assert (tmp_path / f"{RECORDS}.before-{SCHEMA}").read_bytes() == before


def test_a_case_of_an_axis_that_is_gone_is_not_read_as_another(tmp_path: Path) -> None:
    write_schema_10(tmp_path, pin_memory="on")
    expect(tmp_path, "pin_memory 'on' is not measured any more; commit 8645d459 of this project")


def test_an_older_schema_is_refused_with_what_reads_it(tmp_path: Path) -> None:
    file = write(tmp_path, make_run())
    edit(file, lambda rows: rows[0].update(schema=str(OLDEST - 1)))
    expect(tmp_path, f"schema {OLDEST - 1} is older than the {OLDEST}", "commit 8645d459 of this")


def test_a_newer_file_is_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path, make_run())
    edit(file, lambda rows: rows[0].update(schema=str(SCHEMA + 1), warp_speed="9"))
    expect(tmp_path, f"schema {SCHEMA + 1} is newer than the {SCHEMA} this harness reads", "update")
    before = file.read_bytes()
    with pytest.raises(UsageError, match="is newer"):
        write(tmp_path, make_run())
    assert file.read_bytes() == before


# --------------------------------------------------------------------------- strangers' files


WRONG_CELLS = {
    ("epoch_time_s", "a finite number, or empty"): (
        "nan NaN inf -inf 1e999 --3.5 fast 1_000.0 1,5 ١"
    ),
    ("peak_device_bytes", "a whole number"): "1.5",
    ("peak_device_bytes", "a finite number, or empty"): "- -1-",
    ("peak_device_bytes", "a whole number, at most"): "99999999999999999999",
    ("status", "a status is one of ok, oom"): "fine",
    ("inferred", "'on' or 'off'"): "maybe",
    ("batch_size", "at least 1"): "-1",
    ("batch_size", "a whole number, at most"): "99999999999999999999",
    ("lr", "above 0"): "-1",
    ("lr", "a finite number"): "1_0",
    ("precision", "did you mean 'fp16'?"): "fp61",
    ("loss_scale", "a loss scale is"): "nan",
    ("schema", "a schema version is a whole number"): "0 one -1",
}


def test_a_wrong_cell_is_named_by_file_line_and_column(tmp_path: Path) -> None:
    file = write(tmp_path, *(make_run(repeat=n, epoch_time_s=1.0) for n in (1, 2, 3)))
    good = file.read_bytes()
    for (name, right), texts in WRONG_CELLS.items():
        for text in texts.split(" "):
            file.write_bytes(good)
            edit(file, lambda rows, cell=(name, text): rows[1].update([cell]))
            expect(tmp_path, f"{file}:3: column '{name}': {text!r}"[:60], right)


def first_row(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        header, row, rest = data.split(b"\n", 2)
        return b"\n".join((header, change(row), rest))

    return apply


WRONG_FILES = [
    ("byte-order mark", lambda d: b"\xef\xbb\xbf" + d, ":1: column 1: a byte-order mark"),
    ("CRLF", lambda d: d.replace(b"\n", b"\r\n"), ":1: character", "Unix line ends"),
    ("one CR", first_row(lambda r: r[:5] + b"\r" + r[5:]), ":2: character 6: a carriage return"),
    ("NUL", first_row(lambda r: r[:3] + b"\0" + r[3:]), ":2: character 4: a NUL byte"),
    ("Latin-1", first_row(lambda r: r[:3] + b"\xe9" + r[3:]), ":2: character 4: not UTF-8"),
    ("a long line", lambda d: d + b"9" * 10_000_000 + b"\n", ":4: character", "10000000 bytes"),
    ("another tool", lambda d: b"name,mean,stddev\na,1,2\n", ":1: column 'schema' is missing"),
    ("no line", lambda d: b"hello", ":1: column 1: not written by `bench.sweep`"),
    ("a blank line", lambda d: d + b"\n" + d.split(b"\n")[1] + b"\n", ":4: column 'schema'"),
    ("a short line", first_row(lambda r: r.rsplit(b",", 1)[0]), ":2: column", "cells where the"),
    ("a long row", first_row(lambda r: r + b",9"), ":2: column", "cells where the header has"),
    ("an unknown column", lambda d: d.replace(b"reason", b"raisin", 1), "unknown column 'raisin'"),
    ("a missing column", lambda d: d.replace(b",notes,", b",gpu_x,", 1), ":1: column"),
    ("an open quote", first_row(lambda r: b'"' + r), ":2"),
    ("a broken cell", first_row(lambda r: r.replace(b",ok,", b',"o\nk",')), ":2", "line break"),
    ("a huge cell", lambda d: d + b"1," + b"9" * 200_000 + b"\n", ":4"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "change", "parts"), [(w, c, p) for w, c, *p in WRONG_FILES])
def test_a_file_that_is_none_is_refused_by_line(
    tmp_path: Path, why: str, change: Callable[[bytes], bytes], parts: list[str]
) -> None:
    file = write(tmp_path, make_run(reason="é"), make_run(repeat=2))
    file.write_bytes(change(file.read_bytes()))
    expect(tmp_path, f"{file}:", *parts)


def test_steps_and_epochs_are_checked_alike(tmp_path: Path) -> None:
    write(tmp_path, make_run(), epochs=[EPOCH])
    for read, name, old, new, part in (
        (read_steps, STEPS, b"2.25", b"nan", "2: column 'loss': 'nan'"),
        (read_steps, STEPS, b"correct", b"corect", "1: column"),
        (read_steps, STEPS, b"2.25", b"2.25,1", "2: column"),
        (read_epochs, EPOCHS, b"1.25", b"-x", "2: column 'time_s': '-x': a finite number"),
    ):
        file = tmp_path / name
        good = file.read_bytes()
        file.write_bytes(good.replace(old, new))
        with pytest.raises(UsageError, match=f"{name}:{part}"):
            read(tmp_path)
        file.write_bytes(good)


def test_a_long_file_is_checked_for_long_lines(tmp_path: Path) -> None:
    """The check for one long line does not take a long file for one."""
    file = write(tmp_path, make_run())
    header, row, _ = lines(file)
    rows = 1_500_000 // len(row)
    file.write_bytes(b"\n".join((header, *[row] * rows, b"")))
    assert len(read_records(tmp_path)) == rows


def test_a_scale_that_sank_to_zero_is_a_reading(tmp_path: Path) -> None:
    """After some 165 overflows in a row torch's scale is 0, which no axis may be."""
    with Store(tmp_path) as store:
        store.append(make_run(), [Step(0, 64, None, 0, 0.1, 0.0)])
    assert read_steps(tmp_path)["loss_scale"].tolist() == [0.0]
