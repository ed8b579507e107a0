"""bench.export: what arrives, read back with each tracker's own API; nothing twice or torn."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from pytest_for_tests import Capture, Patch

from bench import export as command
from bench.case import AXES, Case
from bench.export import TRACKERS, read_runs
from bench.record import MEASURED, EpochRow, Record, Status, Step
from bench.report import terminal
from bench.store.table import RECORDS, STEPS
from bench.store.writer import Store
from bench.study.sweeps import read_sweep
from tests.planted.records import make_run

EXTRAPOLATED = Case(fraction=0.5, dataset="synthetic", model="dpn-small", device="cpu")
STEP_COUNT = 4


@dataclass
class Seen:
    """A run as its tracker tells it: everything as text but the numbers."""

    name: str
    well: bool
    axes: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    text: str = ""


def read_tensorboard(out: Path) -> dict[str, Seen]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS

    seen: dict[str, Seen] = {}
    for file in out.glob("*/*/*tfevents*"):
        events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0})
        events.Reload()

        def about(tag: str, events: Any = events) -> bytes:
            content: bytes = events.SummaryMetadata(tag).plugin_data.content
            return content

        start = metadata.parse_session_start_info_plugin_data(
            about(metadata.SESSION_START_INFO_TAG)
        )
        end = metadata.parse_session_end_info_plugin_data(about(metadata.SESSION_END_INFO_TAG))
        given = {
            name: spell(getattr(value, value.WhichOneof("kind")))
            for name, value in start.hparams.items()
        }
        scalars = {
            tag: [(e.step, e.value) for e in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }
        record_id = file.parent.name.rpartition(".")[2]
        assert record_id not in seen, "a record has two event files"
        seen[record_id] = Seen(
            name=file.parent.name,
            well=end.status == STATUS_SUCCESS,
            axes={name: text for name, text in given.items() if name in AXES},
            facts={name: text for name, text in given.items() if name not in AXES},
            results={t: p[0][1] for t, p in scalars.items() if t.startswith("result/")},
            curves={t: p for t, p in scalars.items() if not t.startswith("result/")},
            text=events.Tensors("record")[0].tensor_proto.string_val[0].decode(),
        )
    return seen


def spell(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


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


def read_wandb(out: Path) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    for file in out.glob("*/wandb/offline-run-*/*.wandb"):
        run = Seen("", False)
        for message in read_messages(file):
            if message.WhichOneof("record_type") == "run":
                run.name = message.run.display_name
                config = {i.key: json.loads(i.value_json) for i in message.run.config.update}
                run.axes = {n: spell(config[n]) for n in AXES if n in config}
                for group in ("outcome", "readings", "environment"):
                    run.facts |= {n: spell(v) for n, v in config.get(group, {}).items()}
                run.text = f"{message.run.notes} {sorted(message.run.tags)}"
                assert file.name == f"run-{message.run.run_id}.wandb"
                record_id = message.run.run_id
            elif message.WhichOneof("record_type") == "history":
                row = {
                    i.key or "/".join(i.nested_key): json.loads(i.value_json)
                    for i in message.history.item
                }
                for name, value in row.items():
                    axis = name.partition("/")[0]
                    if f"{axis}/number" in row and not name.endswith("/number"):
                        points = run.curves.setdefault(name, [])
                        points.append((row[f"{axis}/number"], value))
            elif message.WhichOneof("record_type") == "summary":
                for item in message.summary.update:
                    if item.key.startswith("result/"):
                        run.results[item.key] = json.loads(item.value_json)
            elif message.WhichOneof("record_type") == "exit":
                run.well = message.exit.exit_code == 0
        assert record_id not in seen, "a record has two offline runs"
        seen[record_id] = run
    return seen


def read_mlflow(out: Path) -> dict[str, Seen]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    seen: dict[str, Seen] = {}
    experiments = [e.experiment_id for e in client.search_experiments()]
    for run in client.search_runs(experiments):
        record_id = run.data.tags["bench.record_id"]
        assert record_id not in seen, "a record has two runs"
        assert run.info.status in ("FINISHED", "FAILED", "KILLED")
        metrics = {
            name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        seen[record_id] = Seen(
            name=run.info.run_name,
            well=run.info.status == "FINISHED",
            axes=dict(run.data.params),
            facts={n.removeprefix("bench."): t for n, t in run.data.tags.items()},
            results={n: p[0][1] for n, p in metrics.items() if n.startswith("result/")},
            curves={n: sorted(p) for n, p in metrics.items() if not n.startswith("result/")},
        )
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
    for package in TRACKERS[name].packages:
        pytest.importorskip(package)
    return name


def export(tracker: str, out: Path, *sweeps: Path, flags: Sequence[str] = ()) -> int:
    return command.main([*map(str, sweeps), "--to", tracker, "--out", str(out), *flags])


def measure(record_id: str, **values: Any) -> Record:
    """A record with a time, by its id."""
    given = {"case": EXTRAPOLATED, "epoch_time_s": 12.5, "measured_steps": STEP_COUNT}
    given |= {"peak_process_bytes": 2**31, "warmup_steady": True, "warmup_steps": 3}
    given |= {"step_time_median_s": 0.25, "step_time_mad_s": 0.001}
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


Arrived = tuple[str, dict[str, Seen]]


@pytest.fixture(scope="module")
def arrived(tracker: str, tmp_path_factory: pytest.TempPathFactory) -> Arrived:
    """The tracker, and what arrived in it of a sweep of all kinds of records."""
    folder = tmp_path_factory.mktemp("arrived")
    records = []
    for number, status in enumerate(Status):
        known = {"record_id": f"id-{number}", "status": status, "reason": f"why {status}"}
        timed = status in MEASURED
        records.append(measure(**known, test_loss=math.nan) if timed else make_run(**known))
    hostile = {"reason": HOSTILE, "neighbours": HOSTILE, "neighbours_computing": 1, "cpu": "=cmd()"}
    records += [
        measure("last", sentinel=True),
        measure("search", probe=True),
        measure("epochs", case=Case(epochs=2)),
        make_run(record_id="bad", status=Status.ERROR, notes="x" * 20_000, **hostile),
    ]
    sweep = write_sweep(folder / f"{HOSTILE[:8]} 'sweep' $(x)", *records)
    assert export(tracker, folder / "out", sweep) == 0
    return tracker, READERS[tracker](folder / "out")


def test_what_arrives(arrived: Arrived) -> None:
    run = arrived[1]["id-0"]
    assert set(run.axes) == set(AXES)
    assert run.axes["fraction"] == "0.5"
    assert (run.axes["batch_size"], run.axes["loss_scale"]) == ("128", "none")
    assert run.axes["compile"] == "off"
    assert run.facts["gpu"] == "NVIDIA Imaginary"
    assert run.facts["torch"] == "2.13.0"
    assert run.facts["sweep"] == "<script> 'sweep' $(x)"
    assert (run.facts["probe"], run.facts["repeat"]) == ("off", "1")
    assert run.results["result/epoch_time_s"] == 12.5
    assert run.results["result/peak_process_bytes"] == 2**31
    assert not {"result/test_loss", "result/energy_j"} & set(run.results), "missing is not zero"
    assert {name: points[1] for name, points in run.curves.items()} == {
        "step/loss": (1, 2.375),
        "step/accuracy": (1, 0.25),
        "step/time_s": (1, 0.25),
        "step/loss_scale": (1, 64),
        "step/lr": (1, 0.125),
    }
    assert {len(points) for points in run.curves.values()} == {STEP_COUNT}


def test_no_figure_travels_without_its_doubts(arrived: Arrived) -> None:
    """In the run's name, which trackers show beside every figure, and among its facts."""
    tracker, runs = arrived
    run = runs["id-0"]
    assert run.facts["doubts"] == "extrapolated; synthetic images"
    assert "Use --fraction 1 without --steps" in run.facts["warnings"]
    name = re.sub("[^a-z]+", " ", run.name)
    assert "extrapolated" in name
    assert "synthetic images" in name
    if tracker == "wandb":
        assert "'extrapolated'" in run.text
    if tracker == "tensorboard":
        assert "  doubts: extrapolated; synthetic images\n" in run.text


def test_every_outcome_arrives(arrived: Arrived) -> None:
    runs = arrived[1]
    assert len(runs) == len(Status) + 4
    for number, status in enumerate(Status):
        run = runs[f"id-{number}"]
        assert (run.facts["status"], run.facts["reason"]) == (status, f"why {status}")
        assert run.well == (status in MEASURED)
        assert ("result/epoch_time_s" in run.results) == (status in MEASURED)
        assert bool(run.curves) == (status in MEASURED)
        words = re.split("[^a-z]+", run.name)
        assert status is Status.OK or set(status.value.split("_")) <= set(words)
    for record_id, kind in (("last", "sentinel"), ("search", "probe")):
        assert runs[record_id].facts[kind] == "on"
        assert kind in runs[record_id].name


def test_epochs_arrive(arrived: Arrived) -> None:
    curves = arrived[1]["epochs"].curves
    epochs = {n: points for n, points in curves.items() if n.startswith("epoch/")}
    assert epochs["epoch/train_loss"] == [(0, 2.5), (1, 2.0)]
    assert epochs["epoch/time_s"] == [(0, 1.5), (1, 1.25)]
    assert epochs["epoch/test_accuracy"] == [(0, 0.375)], "missing is not zero"
    assert len(epochs) == 7
    assert len(curves["step/loss"]) == STEP_COUNT


def test_hostile_text(arrived: Arrived) -> None:
    """It arrives as text: on one line, in nobody's markup, and of a bounded length."""
    tracker, runs = arrived
    run = runs["bad"]
    assert run.facts["reason"].startswith("<script>alert(1)</script> ![x](http://x/) | `a`")
    assert "DROP TABLE" in run.facts["reason"]
    assert not {"\x1b", "\u202e", "\n"} & set(run.facts["reason"])
    assert run.facts["cpu"] == "=cmd()"
    assert tracker == "tensorboard" or len(run.facts["notes"]) == 5000
    if tracker == "tensorboard":
        assert all(line.startswith("    ") for line in run.text.splitlines()), "one block of code"


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """All but locks and logs, to which a tracker's own process may write later."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    files = (file for file in files if "logs" not in file.relative_to(folder).parts)
    return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in files}


DEADLY = """
import os, signal, sys
from dataclasses import replace
told = open(sys.argv.pop(1), "w", buffering=1)
def listen(event, arguments):
    if event == "socket.getaddrinfo":
        print(arguments[0], file=told)
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        print(arguments[1][0], file=told)
sys.addaudithook(listen)
from bench import export as command
class Deadly(list):
    def __iter__(self):
        for at, point in enumerate(list.__iter__(self)):
            if at == 2:
                print(*{"torch", "tensorflow", "bench.worker"} & {*sys.modules}, file=told)
                os.kill(os.getpid(), signal.SIGKILL)
            yield point
whole = command.read_runs
def read_runs(sweep, known):
    for run in whole(sweep, known):
        yield replace(run, steps=Deadly(run.steps)) if run.record_id == "b2" else run
command.read_runs = read_runs
command.main()
"""
"""An export that is killed within its second record, and tells whom it called over the network."""


def test_killed_within_a_record_it_is_mended_and_again_nothing_is_doubled_or_rewritten(
    tracker: str, tmp_path: Path, capfd: Capture
) -> None:
    """And it is silent and alone: no torch, nobody called, two lines of ours on the terminal."""
    records = [measure(name, repeat=n) for n, name in enumerate(("a1", "b2", "c-3_"), 1)]
    sweep, out = write_sweep(tmp_path / "sweep", *records), tmp_path / "out"
    told = tmp_path / "told"
    # without what makes it a process of this one's wandb
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    words = [str(told), str(sweep), "--to", tracker, "--out", str(out)]
    killed = subprocess.run(
        [sys.executable, "-c", DEADLY, *words], env=own, capture_output=True, text=True
    )
    assert (killed.returncode, killed.stdout, killed.stderr) == (-9, "", "")
    assert {*told.read_text().split()} <= {"127.0.0.1", "localhost", "::1"}
    capfd.readouterr()
    assert export(tracker, out, sweep) == 0
    said = capfd.readouterr()
    assert said.out.startswith(f"2 records exported to {out}, which had 1 before\nto see them: ")
    assert (said.out.count("\n"), said.err) == (2, "")
    before, files = READERS[tracker](out), list_files(out)
    assert set(before) == {"a1", "b2", "c-3_"}
    assert before["b2"].curves == before["a1"].curves
    assert [step for step, _ in before["b2"].curves["step/loss"]] == list(range(STEP_COUNT))
    assert before["b2"].results == before["a1"].results
    assert not list(out.rglob(".partial*"))
    # the same records from elsewhere are the same records
    assert export(tracker, out, Path(shutil.copytree(sweep, tmp_path / "copy")), sweep) == 0
    assert "0 records exported" in capfd.readouterr().out
    assert READERS[tracker](out) == before
    if tracker != "mlflow":  # a database may write its log anew
        assert list_files(out) == files


def test_a_command_of_the_documentation_runs(
    tracker: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "results.md").read_text()
    (words,) = re.findall(rf"^python -m bench.export (.* --to {tracker})$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    write_sweep(Path(words.split()[0]), measure("a1"))
    assert command.main(words.split()) == 0
    assert set(READERS[tracker](tmp_path / "trackers" / tracker)) == {"a1"}


# ---------------------------------------------------------------- what is the same for all trackers


def test_a_sweep_that_goes_on_is_followed(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """A record is exported as it ends; half a line is no record yet."""
    pytest.importorskip("tensorboard")
    sweep, out = write_sweep(tmp_path / "sweep", measure("a1")), tmp_path / "out"
    other = write_sweep(tmp_path / "other", measure("c3", repeat=3))
    line = (other / RECORDS).read_bytes().splitlines(keepends=True)[-1]
    steps = (other / STEPS).read_bytes().splitlines(keepends=True)[1:]
    seen: list[set[str]] = []

    def append(file: str, data: bytes) -> None:
        with (sweep / file).open("ab") as stream:
            stream.write(data)

    happens: Iterator[Callable[[], object]] = iter(
        (
            lambda: write_sweep(sweep, measure("b2", repeat=2)),
            lambda: append(STEPS, b"".join(steps)),
            lambda: append(RECORDS, line[:200]),
            lambda: append(RECORDS, line[200:]),
        )
    )

    def sleep(_: float) -> None:
        seen.append(set(read_tensorboard(out)))
        try:
            next(happens)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(terminal, "time", type("Clock", (), {"sleep": staticmethod(sleep)}))
    assert export("tensorboard", out, sweep, flags=["--watch"]) == 130
    assert seen == [{"a1"}, {"a1", "b2"}, {"a1", "b2"}, {"a1", "b2"}, {"a1", "b2", "c3"}]
    assert read_tensorboard(out)["c3"].curves == read_tensorboard(out)["a1"].curves
    lines = capsys.readouterr().out.splitlines()
    assert sum(text.startswith("exported: ") for text in lines) == 2


def test_points_have_times_and_what_was_not_read_is_left_out(tmp_path: Path) -> None:
    failed = make_run(EXTRAPOLATED, record_id="b2", status=Status.OOM)
    sweep = read_sweep(write_sweep(tmp_path, measure("a1"), failed))
    run, unknown = read_runs(sweep, set())
    assert [point.at_s - run.started_s for point in run.steps] == [0.25, 0.5, 0.75, 1.0]
    assert run.finished_s - run.started_s == 60
    assert time.gmtime(run.started_s)[:4] == (2026, 11, 20, 10)
    assert run.readings["warmup_steady"] is True
    assert "warmup_steady" not in unknown.readings


@pytest.mark.parametrize(
    ("words", "record_id", "said"),
    [
        (["tensorbord"], "a1", "--to 'tensorbord': did you mean 'tensorboard'?"),
        (["wandb", "--project", "../x"], "a1", "--project '../x': a name is at most 64"),
        (["tensorboard"], "../../a1", "record_id '../../a1': an id is letters, digits"),
        (["tensorboard", "--out", "locked"], "a1", "another export writes there"),
        (["mlflow"], "a1", "--to mlflow: sqlalchemy not installed; pip install mlflow"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    words: list[str],
    record_id: str,
    said: str,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: Patch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        command, "find_spec", lambda name: None if name == "sqlalchemy" else find_spec("json")
    )
    sweep = write_sweep(tmp_path / "sweep", measure("a1"))
    records = sweep / RECORDS
    records.write_text(records.read_text().replace(",a1,", f",{record_id},"))
    Path("locked").mkdir()
    with FileLock("locked/.lock"):
        assert command.main([str(sweep), "--to", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_figures_that_are_not_known_to_be_measured_are_told(
    tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("tensorboard")
    said = "Nothing here is known to be measured: these rows came from the x executor, which "
    for name, executor in (("a1", "x"), ("a2", "subprocess")):
        sweep = write_sweep(tmp_path / name, measure(name, executor=executor))
        assert export("tensorboard", tmp_path / "out", sweep) == 0
        assert capsys.readouterr().out.startswith(said) is (executor == "x")
