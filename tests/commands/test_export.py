"""bench.export: what arrives, read back with each tracker's own API; nothing twice or torn."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bench import export as command
from bench.export import TrackedPoint, TrackedRun, read_runs
from bench.results.store.table import RECORDS
from bench.results.store.writer import Store
from bench.results.study.sweeps import SweepFolder, read_sweep
from bench.schema.case import AXES, Case
from bench.schema.record import MEASURED, EpochRow, Record, Status, Step
from tests.planted.records import ROOT, make_run
from tests.pytest_for_tests import Capture, Patch

EXTRAPOLATED = Case(fraction=0.5, dataset="synthetic", model="dpn-small", device="cpu")
STEP_COUNT = 4


@dataclass
class Seen:
    """A run as its tracker tells it: everything as text but the numbers."""

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    well: bool = True


def read_tensorboard(out: Path) -> dict[str, Seen]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen: dict[str, Seen] = {}
    for file in out.glob("*/*tfevents*"):
        events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0})
        events.Reload()
        scalars = {
            tag: [(e.step, e.value) for e in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }
        text = events.Tensors("record")[0].tensor_proto.string_val[0].decode()
        assert all(line.startswith("    ") for line in text.splitlines()), "one block of code"
        facts = dict(line.strip().split(": ", 1) for line in text.splitlines())
        record_id = file.parent.name.rpartition(".")[2]
        assert record_id not in seen, "a record has two event files"
        seen[record_id] = Seen(file.parent.name, facts, scalars, facts["status"] in MEASURED)
    return seen


def read_messages(file: Path) -> Iterator[Any]:
    """The messages in wandb's log: blocks of 32 KiB, as LevelDB's. wandb's reader is not Python."""
    from wandb.proto.wandb_internal_pb2 import Record as Message

    data, at, message = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole one, or the last part of one
            yield Message.FromString(message)
            message = b""


def spell(value: object) -> str:
    words = {None: "none", True: "on", False: "off"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_wandb(out: Path) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    for file in out.glob("wandb/offline-run-*/*.wandb"):
        record_id = file.stem.removeprefix("run-")
        assert record_id not in seen, "a record has two offline runs"
        run = seen[record_id] = Seen("")
        for message in read_messages(file):
            kind = message.WhichOneof("record_type")
            if kind == "run":
                run.name = message.run.display_name
                config = {i.key: json.loads(i.value_json) for i in message.run.config.update}
                run.facts |= {name: spell(value) for name, value in config.items()}
            elif kind == "history":
                items = message.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                for name, value in row.items():
                    number = row.get(f"{name.partition('/')[0]}/number")
                    if number is not None and not name.endswith("/number"):
                        run.curves.setdefault(name, []).append((number, value))
            elif kind == "summary":
                for item in message.summary.update:
                    if item.key.startswith("result/"):
                        run.curves[item.key] = [(0, json.loads(item.value_json))]
            elif kind == "exit":
                run.well = message.exit.exit_code == 0
    return seen


def read_mlflow(out: Path) -> dict[str, Seen]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    seen: dict[str, Seen] = {}
    for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        record_id = run.data.tags["bench.record_id"]
        assert record_id not in seen, "a record has two runs"
        assert run.info.status in ("FINISHED", "FAILED")
        metrics = {
            name: sorted(
                (m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)
            )
            for name in run.data.metrics
        }
        tags = {n.removeprefix("bench."): t for n, t in run.data.tags.items()}
        well = run.info.status == "FINISHED"
        seen[record_id] = Seen(run.info.run_name, {**run.data.params, **tags}, metrics, well)
    return seen


READERS: dict[str, Callable[[Path], dict[str, Seen]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("wandb", "mlflow")]


@pytest.fixture(scope="module", params=["tensorboard", *SLOW])
def tracker(request: pytest.FixtureRequest) -> str:
    """Its name, where it is installed."""
    name: str = request.param
    pytest.importorskip(name)
    return name


def export(tracker: str, out: Path, *sweeps: Path) -> int:
    return command.main([*map(str, sweeps), "--to", tracker, "--out", str(out)])


def measure(record_id: str, **values: Any) -> Record:
    """A record with a time, by its id."""
    given = {"case": EXTRAPOLATED, "epoch_time_s": 12.5, "measured_steps": STEP_COUNT}
    given |= {"peak_process_bytes": 2**31, "warmup_steady": True, "warmup_steps": 3}
    return make_run(**{**given, **values, "record_id": record_id})


def write_sweep(folder: Path, *records: Record) -> Path:
    """Append records to a sweep's folder, those that were measured with steps, of several epochs
    with these."""
    with Store(folder) as store:
        for record in records:
            steps = STEPS_OF_EACH if record.measurement.epoch_time_s else []
            store.append(record, steps, EPOCHS if record.case.epochs > 1 else [])
    return folder


STEPS_OF_EACH = [Step(i, 8, 2.5 - i / 8, i + 1, 0.25, 64.0, 0.125) for i in range(STEP_COUNT)]
EPOCHS = [EpochRow(0, 1.5, 2.5, 0.25, 2.25, 0.375, 0.5, 1), EpochRow(1, 1.25, 2.0, 0.5)]
HOSTILE = "<script>alert(1)</script> ![x](http://x/) | `a` \u202e\x1b[31m ☃ '\"; DROP TABLE runs;--"


@pytest.fixture(scope="module")
def arrived(tracker: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """What arrived of a sweep of all kinds of records."""
    folder = tmp_path_factory.mktemp("arrived")
    records = []
    for number, status in enumerate(Status):
        known = {"record_id": f"id-{number}", "status": status, "reason": f"why {status}"}
        timed = status in MEASURED
        records.append(measure(**known, test_loss=math.nan) if timed else make_run(**known))
    records += [
        measure("last", sentinel=True, case=Case(epochs=2)),
        make_run(record_id="bad", status=Status.ERROR, notes="x" * 20_000, reason=HOSTILE),
    ]
    sweep = write_sweep(folder / f"{HOSTILE[:8]} 'sweep' $(x)", *records)
    assert export(tracker, folder / "out", sweep) == 0
    return READERS[tracker](folder / "out")


def test_what_arrives(arrived: dict[str, Seen]) -> None:
    run = arrived["id-0"]
    assert {*AXES} - {"vary"} <= set(run.facts)
    assert run.facts["fraction"] == "0.5"
    assert {run.facts[name].lower() for name in ("sentinel", "probe")} <= {"off", "false"}
    assert (run.facts["batch_size"], run.facts["loss_scale"]) == ("128", "none")
    assert (run.facts["gpu"], run.facts["torch"]) == ("NVIDIA Imaginary", "2.13.0")
    assert run.curves["result/epoch_time_s"] == [(0, 12.5)]
    assert run.curves["result/peak_process_bytes"] == [(0, 2**31)]
    assert not {"result/test_loss", "result/energy_j"} & set(run.curves), "missing is not zero"
    assert {n: points[1] for n, points in run.curves.items() if not n.startswith("result/")} == {
        "step/loss": (1, 2.375),
        "step/accuracy": (1, 0.25),
        "step/time_s": (1, 0.25),
        "step/loss_scale": (1, 64),
        "step/lr": (1, 0.125),
    }
    assert len(run.curves["step/loss"]) == STEP_COUNT
    # no figure travels without its warnings
    assert run.facts["remarks"] == "extrapolated; synthetic data"
    assert "extrapolated" in run.name
    epochs = arrived["last"].curves
    assert epochs["epoch/train_loss"] == [(0, 2.5), (1, 2.0)]
    assert epochs["epoch/test_accuracy"] == [(0, 0.375)], "missing is not zero"


def test_what_helps_a_run_of_advice_is_a_flag_of_the_command_that_takes_it() -> None:
    sweep = read_sweep(ROOT / "results" / "advice-epyc-20261129")
    noisy = [run for run in read_runs(sweep, ()) if "noisy" in str(run.facts["remarks"])]
    warned = [str(run.facts["warnings"]) for run in noisy]
    assert warned
    assert all("For --repeats use python -m bench.sweep." in text for text in warned)


def test_every_outcome_arrives(arrived: dict[str, Seen]) -> None:
    assert len(arrived) == len(Status) + 2
    for number, status in enumerate(Status):
        run = arrived[f"id-{number}"]
        assert (run.facts["status"], run.facts["reason"]) == (status, f"why {status}")
        assert run.well == (status in MEASURED) == ("result/epoch_time_s" in run.curves)
        words = re.split("[^a-z]+", run.name)
        assert status is Status.OK or set(status.value.split("_")) <= set(words)
    bad = arrived["bad"].facts  # hostile text: on one line, and of a bounded length
    assert bad["reason"].startswith("<script>alert(1)</script> ![x](http://x/) | `a`")
    assert not {"\x1b", "\u202e", "\n"} & set(bad["reason"])
    assert len(bad["notes"]) == 5000


class Deadly(list[TrackedPoint]):
    """Points of which the third is never reached."""

    def __iter__(self) -> Iterator[TrackedPoint]:
        yield from self[:2]
        raise KeyboardInterrupt


def test_interrupted_within_a_record_it_is_mended_and_again_nothing_is_doubled(
    tracker: str, tmp_path: Path, capfd: Capture, monkeypatch: Patch
) -> None:
    """And it is silent: two lines of ours on the terminal."""
    records = [measure(name, repeat=n) for n, name in enumerate(("a1", "b2", "c-3_"), 1)]
    sweep, out = write_sweep(tmp_path / "sweep", *records), tmp_path / "out"

    def read_and_die(sweep: SweepFolder, known: set[str]) -> Iterator[TrackedRun]:
        for run in read_runs(sweep, known):
            yield replace(run, points=Deadly(run.points)) if run.record_id == "b2" else run

    with monkeypatch.context() as patch:
        patch.setattr(command, "read_runs", read_and_die)
        assert export(tracker, out, sweep) == 130
    capfd.readouterr()
    assert export(tracker, out, sweep) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith(
        f"2 records exported to {out}, which had 1 before\nto see them: "
    )
    assert (captured.out.count("\n"), captured.err) == (2, "")
    before = READERS[tracker](out)
    assert set(before) == {"a1", "b2", "c-3_"}
    assert before["b2"].curves == before["a1"].curves
    assert export(tracker, out, sweep) == 0
    assert "0 records exported" in capfd.readouterr().out
    assert READERS[tracker](out) == before


def test_points_have_times_and_what_was_not_read_is_left_out(tmp_path: Path) -> None:
    failed = make_run(EXTRAPOLATED, record_id="b2", status=Status.OOM)
    sweep = read_sweep(write_sweep(tmp_path, measure("a1"), failed))
    run, unknown = read_runs(sweep, set())
    assert [point.at_s - run.started_s for point in run.points] == [0.25, 0.5, 0.75, 1.0, 60]
    assert time.gmtime(run.started_s)[:4] == (2026, 11, 20, 10)
    assert run.facts["warmup_steady"] is True
    assert "warmup_steady" not in unknown.facts


def test_on_a_full_disk_a_run_is_whole_or_is_not_there(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """The second run finds half of the space that it takes; later the same command goes on."""
    sweep = write_sweep(tmp_path / "sweep", *(measure(name) for name in ("a1", "a2", "a3")))
    real, left = Path.write_bytes, iter([1.0, 0.5])

    def write(path: Path, content: bytes) -> int:
        written = real(path, content[: round(next(left) * len(content))])
        if written < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    words = [str(sweep), "--to", "tensorboard", "--out", str(tmp_path / "out")]
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write)
        assert command.main(words) == 1
    assert capsys.readouterr().err == (
        f"error: --out {tmp_path}/out: No space left on device, after 1 record; free some, then "
        "the same command goes on\n"
    )
    assert [*read_tensorboard(tmp_path / "out")] == ["a1"]
    assert not [*(tmp_path / "out").glob("*/.*")]
    assert command.main(words) == 0
    assert {*read_tensorboard(tmp_path / "out")} == {"a1", "a2", "a3"}


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True])
def test_on_a_full_disk_a_database_is_whole_or_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], begun: bool
) -> None:
    """SQLite says of one that may have no more pages what it says of a full disk. 70 are too few
    for its tables, or it is to stay as large as it was after the first run."""
    pytest.importorskip("mlflow")
    from sqlalchemy import Pool, event

    pages = 1 if begun else 70

    def limit(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    names = [f"a{number}" for number in range(40)]
    sweep, out = write_sweep(tmp_path / "sweep", *map(measure, names)), tmp_path / "out"
    if begun:
        assert export("mlflow", out, write_sweep(tmp_path / "first", measure("a0"))) == 0
    capfd.readouterr()
    event.listen(Pool, "checkout", limit)
    assert export("mlflow", out, sweep) == 1
    assert re.fullmatch(
        rf"error: --out {out}: No space left on device, after \d+ records?; free some, .*\n",
        capfd.readouterr().err,
    )
    left = {command.EXPORTED, "mlflow.db"} if begun else set()
    assert {path.name for path in out.iterdir()} == left
    pages = 10**6
    assert export("mlflow", out, sweep) == 0
    event.remove(Pool, "checkout", limit)
    assert {*read_mlflow(out)} == {*names}


def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    sweep = write_sweep(tmp_path / "sweep", measure("a1"))
    for words, expected in (
        (["tensorbord"], "--to 'tensorbord': did you mean 'tensorboard'?"),
        (["mlflow", "--out", str(tmp_path / "out")], "or pip install mlflow"),
        (["wandb", "--out", str(sweep / RECORDS)], "--to wandb: FileExistsError"),
    ):
        assert command.main([str(sweep), "--to", *words]) == 2
        err = capsys.readouterr().err
        assert expected in err
        assert err.count("\n") == 1
