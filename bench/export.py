"""`python -m bench.export SWEEP --to TRACKER`: give records to an experiment tracker.

A record that was exported before is left as it is.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from itertools import islice
from math import isfinite
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bench.axis import Value
from bench.case import AXES, NAMED, Case, spell_value
from bench.errors import UsageError, choose
from bench.flags import Parser, command, describe, hold
from bench.origin import describe_origin
from bench.processes import leave
from bench.record import (
    COLUMNS,
    COMPARABLE,
    EPOCH_COLUMNS,
    MEASURED,
    Environment,
    EpochRow,
    Measurement,
    Record,
    Status,
    Step,
)
from bench.report.terminal import follow
from bench.store.reader import find_records, read_beside
from bench.study import runs
from bench.study.doubts import DOUBTS, Doubt
from bench.study.sweeps import Sweep, read_sweeps
from bench.text import clean, count, read_time

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

PROJECT = "gpu-precision-bench"
OUT = Path("trackers")
_PROJECT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_PARTIAL = ".partial"

Fact = str | int | bool

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")  # it becomes part of the name of a file
_LONGEST_NAME = 128  # characters; Weights & Biases takes no more
_LONGEST_TEXT = 5000  # characters; MLflow's tags hold 8000, its older ones 5000

_IDENTITY = [
    f.name
    for f in fields(Record)
    if f.name not in ("record_id", "case", "measurement", "environment")
]
_KINDS = ("sentinel", "probe", "inferred")  # rows that are not ordinary cases
_TEXT = [f.name for f in fields(Measurement) if COLUMNS[f.name].type in (str, bool)]
_STEP = ("loss", "time_s", "loss_scale", "lr")
_EPOCH = [name for name in EPOCH_COLUMNS if name not in ("record_id", "epoch")]
_NUMBERS = [f.name for f in fields(Measurement) if COLUMNS[f.name].type in (int, float)]


@dataclass(frozen=True)
class Point:
    """The values of one step or epoch, at a time in seconds since 1970."""

    number: int
    at_s: float
    values: dict[str, float]


@dataclass(frozen=True)
class Run:
    """One record as trackers take it. Values that a record lacks are left out, never zero.

    ``name`` gives the case and, so that no figure is seen without them, how the case ended if not
    well, and each of its doubts. ``outcome`` has the record's own columns, the sweep and the
    doubts; ``readings`` the readings that are text. The numbers of ``results``, ``steps`` and
    ``epochs`` are finite, in SI units, under our column names prefixed with ``result/``, ``step/``
    and ``epoch/``; ``step/accuracy`` is a fraction.
    """

    record_id: str
    name: str
    status: Status
    kinds: tuple[str, ...]
    doubts: tuple[str, ...]
    axes: dict[str, Value]
    outcome: dict[str, Fact]
    readings: dict[str, Fact]
    environment: dict[str, Fact]
    results: dict[str, float]
    steps: list[Point]
    epochs: list[Point]
    started_s: float
    finished_s: float

    @property
    def measured(self) -> bool:
        return self.status in MEASURED

    @property
    def flags(self) -> list[str]:
        """Return what a reader should know first: the status, the kind of row, its doubts."""
        return list(dict.fromkeys([self.status.value, *self.kinds, *self.doubts]))


def read_runs(sweep: Sweep, known: Collection[str]) -> Iterator[Run]:
    """Yield the runs of a sweep's records, in order, except those whose ids are ``known``. Raises
    UsageError: a record's id is not one that a sweep writes, or a file cannot be read."""
    new = {row.record_id: row for row in reversed(sweep.rows) if row.record_id not in known}
    rows = [*reversed(new.values())]
    if not rows:
        return
    for text in new:
        if not _ID.fullmatch(text):
            raise UsageError(
                f"{sweep.path}: record_id {clean(text)[:40]!r}: an id is letters, digits, - and _, "
                "at most 64; correct it"
            )
    # read after the records: a sweep writes the steps first, so that these are complete
    steps, epochs = read_beside(sweep.path, Step), read_beside(sweep.path, EpochRow)
    judged = runs.read_runs([replace(sweep, rows=rows)])
    # what a record lacks is left out, and not filled in from others
    for run, raw in zip(judged, runs.list_runs(rows), strict=True):
        doubts = {name: _warn(doubt, run) for name, doubt in DOUBTS.items() if doubt.find(run)}
        yield _make_run(sweep.name, vars(raw), raw.case, doubts, steps, epochs)


def _make_run(
    sweep: str,
    row: dict[Any, Any],
    case: Case,
    doubts: dict[str, str],
    steps: Mapping[str, Sequence[Step]],
    epochs: Mapping[str, Sequence[EpochRow]],
) -> Run:
    record_id, status = row["record_id"], Status(row["status"])
    started = read_time(row["started_at"])
    remarks = tuple(DOUBTS[name].remark for name in doubts)
    outcome: dict[str, Fact] = {
        "sweep": sweep,
        **_take_facts(row, _IDENTITY),
        "doubts": "; ".join(remarks),
        "warnings": " ".join(doubts.values())[:_LONGEST_TEXT],
    }
    return Run(
        record_id=record_id,
        name=_name(case, row, status, remarks),
        status=status,
        kinds=tuple(_list_kinds(row)),
        doubts=remarks,
        axes={name: getattr(case, name) for name in AXES},
        outcome={name: fact for name, fact in outcome.items() if fact != ""},
        # an empty switch is read as off, so only on is certain
        readings={n: f for n, f in _take_facts(row, _TEXT).items() if f is not False},
        environment=_take_facts(row, [f.name for f in fields(Environment)]),
        results={f"result/{name}": value for name, value in _take_numbers(row, _NUMBERS)},
        steps=list(_list_points("step", steps.get(record_id, ()), started)),
        epochs=list(_list_points("epoch", epochs.get(record_id, ()), started)),
        started_s=started,
        finished_s=max(read_time(row["finished_at"]), started),
    )


def _list_kinds(row: dict[Any, Any]) -> list[str]:
    """Return the kinds of a row that is no measurement of a whole case."""
    kinds = [kind for kind in _KINDS if row[kind]]
    return kinds if math.isnan(row["truncated_after"]) else [*kinds, "truncated"]


def _name(case: Case, row: dict[Any, Any], status: Status, remarks: Iterable[str]) -> str:
    told = [n for n, axis in AXES.items() if n in NAMED or getattr(case, n) != axis.default]
    words = [f"repeat {row['repeat']}"]
    words += [f"attempt {row['attempt']}"] if row["attempt"] > 1 else []
    words += _list_kinds(row)
    words += [status.value] if status is not Status.OK else []
    ending = " · ".join(dict.fromkeys([*words, *remarks]))
    label = clean(case.label(told))
    room = max(_LONGEST_NAME - len(ending) - 3, 16)
    return f"{label if len(label) <= room else label[: room - 1] + '…'} · {ending}"[:_LONGEST_NAME]


def _warn(doubt: Doubt, run: runs.Run) -> str:
    return f"{clean(doubt.warn([run]))} {doubt.fix}"


def _take_facts(row: dict[Any, Any], names: Iterable[str]) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    for name in names:
        value, kind = row[name], COLUMNS[name].type
        if kind is str:
            if text := clean(value)[:_LONGEST_TEXT]:
                facts[name] = text
        elif isfinite(value):
            facts[name] = kind(value)
    return facts


def _take_numbers(row: dict[Any, Any], names: Iterable[str]) -> Iterator[tuple[str, float]]:
    for name in names:
        if (value := row[name]) is not None and isfinite(value):
            yield name, float(value)


def _list_points(
    of: str, rows: Sequence[Step] | Sequence[EpochRow], started_s: float
) -> Iterator[Point]:
    """Yield the rows of a record's steps or epochs, each at its end."""
    at = started_s
    for row in map(vars, rows):
        at += row["time_s"] or 0.0
        values = dict(_take_numbers(row, _STEP if of == "step" else _EPOCH))
        if of == "step" and row["images"] and row["correct"] is not None:
            values["accuracy"] = row["correct"] / row["images"]
        yield Point(row[of], at, {f"{of}/{name}": value for name, value in values.items()})


def write_facts(facts: Mapping[str, Value]) -> dict[str, str]:
    """Spell facts or axes as flags do: switches as on and off, and None as none."""
    return {name: spell_value(fact) for name, fact in facts.items()}


class Tracker(Protocol):
    """The destination of runs. A complete run is never written again. ``hint`` is the command that
    shows the runs, or uploads them."""

    hint: str

    def find_exported(self) -> set[str]:
        """Return the ids of the records that are exported completely."""

    def export(self, run: Run) -> None:
        """Write a run; one that was left unfinished is written again."""


class EventFiles:
    """TensorBoard: one folder with one event file per record, for ``tensorboard --logdir``.

    The events are written with TensorBoard's own writer and messages, which need neither TensorFlow
    nor torch. The file gets its final name once it is complete.
    """

    _LARGEST = 3.4e38  # TensorBoard's scalars are float32

    def __init__(self, folder: Path, project: str) -> None:
        self._folder = folder / project
        self.hint = f"tensorboard --logdir {quote(str(self._folder))}"

    def find_exported(self) -> set[str]:
        files = self._folder.glob("*/events.out.tfevents.*")
        return {file.parent.name.rpartition(".")[2] for file in files}

    def export(self, run: Run) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        readable = re.sub(r"[^0-9A-Za-z.]+", "-", run.name).strip("-.")
        place = self._folder / f"{readable}.{run.record_id}"
        place.mkdir(parents=True, exist_ok=True)
        partial = place / _PARTIAL
        with partial.open("wb") as file:
            writer = RecordWriter(file)
            for event in self._list_events(run):
                writer.write(event.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place / f"events.out.tfevents.{run.started_s:010.0f}.{run.record_id}")

    def _list_events(self, run: Run) -> Iterator[Event]:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb

        def note(at_s: float, tag: str, **content: Any) -> Event:
            about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**content))
            value = Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
            return Event(wall_time=at_s, summary=Summary(value=[value]))

        def plot(at_s: float, step: int, values: Mapping[str, float]) -> Event:
            shown = {tag: value for tag, value in values.items() if abs(value) < self._LARGEST}
            scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in shown.items()]
            return Event(wall_time=at_s, step=step, summary=Summary(value=scalars))

        yield Event(wall_time=run.started_s, file_version="brain.Event:2")
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=run.started_s)
        comparable = {n: fact for n, fact in run.environment.items() if n in COMPARABLE}
        for name, value in {**run.axes, **run.outcome, **comparable}.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, (int, float)):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = "none" if value is None else value
        yield note(run.started_s, metadata.SESSION_START_INFO_TAG, session_start_info=start)
        yield Event(wall_time=run.started_s, summary=text_pb("record", self._write_text(run)))
        for point in (*run.steps, *run.epochs):
            yield plot(point.at_s, point.number, point.values)
        yield plot(run.finished_s, 0, run.results)
        status = api_pb2.STATUS_SUCCESS if run.measured else api_pb2.STATUS_FAILURE
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=run.finished_s)
        yield note(run.finished_s, metadata.SESSION_END_INFO_TAG, session_end_info=end)

    @staticmethod
    def _write_text(run: Run) -> str:
        """Format the whole record as a code block, so that nothing is read as Markdown or HTML."""
        lines = [run.name]
        for title in ("axes", "outcome", "readings", "environment"):
            facts = write_facts(getattr(run, title))
            lines += ["", title, *(f"  {name}: {text}" for name, text in facts.items())]
        return "\n".join(f"    {line}" for line in lines)


class Offline:
    """Weights & Biases, offline: one folder per record, for ``wandb sync`` to upload.

    A run is written to a separate folder, and moved to its place once it is complete.
    """

    def __init__(self, folder: Path, project: str) -> None:
        # read when wandb is imported and its service starts: nothing is sent or printed
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        os.environ["WANDB_SILENT"] = "true"
        import wandb

        self._wandb = wandb
        self._folder, self._project = folder / project, project
        self._place = self._folder / "wandb"
        self.hint = f"wandb sync {quote(str(self._place))}/offline-run-*"
        shutil.rmtree(self._folder / _PARTIAL, ignore_errors=True)
        # nothing about the exporting machine: it is not the one that measured
        self._settings = wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            symlink=False,
            disable_git=True,
            disable_code=True,
            host="",
            program="bench.export",
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_disable_viewer=True,
            x_save_requirements=False,
        )

    def find_exported(self) -> set[str]:
        # offline-run-20261121_102030-ID; an id may have a hyphen too
        return {place.name.split("-", 3)[3] for place in self._place.glob("offline-run-*-*")}

    def export(self, run: Run) -> None:
        partial = self._folder / _PARTIAL / run.record_id
        partial.mkdir(parents=True, exist_ok=True)
        config = {
            **run.axes,
            "outcome": run.outcome,
            "readings": run.readings,
            "environment": run.environment,
        }
        with self._wandb.init(
            dir=partial,
            project=self._project,
            id=run.record_id,
            name=run.name,
            notes=str(run.outcome.get("warnings", "")),
            tags=run.flags,
            config=config,
            settings=self._settings,
        ) as written:
            for axis, points in (("step", run.steps), ("epoch", run.epochs)):
                if points:
                    written.define_metric(f"{axis}/number", hidden=True)
                    written.define_metric(f"{axis}/*", step_metric=f"{axis}/number")
                for point in points:
                    written.log({f"{axis}/number": point.number, **point.values})
            written.summary.update(run.results)
            written.finish(exit_code=0 if run.measured else 1)
        # the service would write the file milliseconds later; ending it takes 0.3 s
        self._wandb.teardown()
        (whole,) = (partial / "wandb").glob("offline-run-*")
        self._place.mkdir(parents=True, exist_ok=True)
        whole.rename(self._place / whole.name)
        shutil.rmtree(self._folder / _PARTIAL)


class SqliteStore:
    """MLflow: one run per record in a SQLite file, which ``mlflow ui`` shows, without a server.

    A run is found by its tag ``bench.record_id``, and marked as running until it is complete. A run
    left by an interrupted export is written again over itself; this duplicates nothing, because
    each metric has the time of its record.
    """

    _KEY = "bench.record_id"
    _AT_ONCE = MappingProxyType({"metrics": 1000, "params": 100, "tags": 100})  # MLflow's limits
    _KILLED = frozenset({Status.KILLED, Status.INTERRUPTED, Status.TIMEOUT})

    def __init__(self, folder: Path, project: str) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        store = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self.hint = "mlflow ui --backend-store-uri " + quote(f"sqlite:///{folder / 'mlflow.db'}")
        self._client = MlflowClient(tracking_uri=store)
        if found := self._client.get_experiment_by_name(project):
            self._experiment = found.experiment_id
        else:
            place = (folder / "artifacts").resolve().as_uri()
            self._experiment = self._client.create_experiment(project, artifact_location=place)
        self._unfinished: dict[str, str] = {}

    def find_exported(self) -> set[str]:
        exported: set[str] = set()
        token: str | None = None
        while True:
            page = self._client.search_runs([self._experiment], page_token=token)
            for run in page:
                identity = run.data.tags.get(self._KEY)  # runs of other programs have none
                if identity and run.info.status == "RUNNING":
                    self._unfinished[identity] = run.info.run_id
                elif identity:
                    exported.add(identity)
            token = page.token
            if not token:
                return exported

    def export(self, run: Run) -> None:
        from mlflow.entities import Metric, Param, RunTag

        start, end = round(1000 * run.started_s), round(1000 * run.finished_s)
        run_id = self._unfinished.pop(run.record_id, "")
        if not run_id:
            tags = {self._KEY: run.record_id}
            made = self._client.create_run(self._experiment, start, tags, run.name)
            run_id = made.info.run_id
        facts = {**run.outcome, **run.readings, **run.environment}
        given: dict[str, Iterator[Any]] = {
            "params": (Param(name, text) for name, text in write_facts(run.axes).items()),
            "tags": (RunTag(f"bench.{name}", text) for name, text in write_facts(facts).items()),
            "metrics": (
                Metric(name, value, round(1000 * point.at_s), point.number)
                for point in (*run.steps, *run.epochs, Point(0, run.finished_s, run.results))
                for name, value in point.values.items()
            ),
        }
        for kind, items in given.items():
            while some := list(islice(items, self._AT_ONCE[kind])):
                self._client.log_batch(run_id, **{kind: some})
        killed = run.status in self._KILLED
        ending = "FINISHED" if run.measured else "KILLED" if killed else "FAILED"
        self._client.set_terminated(run_id, ending, end)


class Kind(NamedTuple):
    """A tracker, made from a folder and a project; ``packages`` are what it imports, the one to
    install first."""

    make: Callable[[Path, str], Tracker]
    help: str
    packages: tuple[str, ...]


TRACKERS = {
    "tensorboard": Kind(EventFiles, "event files, one folder per record", ("tensorboard",)),
    "wandb": Kind(Offline, "Weights & Biases, offline; wandb sync uploads", ("wandb",)),
    "mlflow": Kind(
        SqliteStore,
        "MLflow, in a SQLite file, without a server",
        ("mlflow", "sqlalchemy", "alembic"),
    ),
}


@contextmanager
def say_errors(name: str, folder: Path) -> Iterator[None]:
    """Report errors of the folder or the tracker in one line. Raises UsageError: instead of any
    exception, as most exceptions of trackers are meaningless to users."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"--out {folder}: cannot be written ({error.strerror or error}); "
            "choose a folder that can"
        ) from error
    except Exception as error:
        raise UsageError(
            f"--to {name}: {type(error).__name__}: {clean(str(error))[:300]}; check {folder}, or "
            "choose another --out"
        ) from error


def build_parser() -> Parser:
    lines = [f"  {name:13}{kind.help}\n" for name, kind in TRACKERS.items()]
    parser = Parser(
        prog="python -m bench.export",
        description=describe(__doc__),
        epilog=f"trackers:\n{''.join(lines)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sweeps", nargs="+", type=Path, metavar="SWEEP", help="a sweep's folder or records file")
    add("--to", required=True, metavar="TRACKER", help="see below")
    add("--out", type=Path, metavar="DIR", help=f"folder to write to (default: {OUT}/TRACKER)")
    add(
        "--project",
        default=PROJECT,
        metavar="NAME",
        help=f"project, or experiment, that the runs are put in (default: {PROJECT})",
    )
    add("--watch", action="store_true", help="follow a running sweep, until Ctrl-C")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Export. Returns 0, or 2 for a usage error."""
    given = build_parser().parse(argv)
    kind = choose("--to", given.to, TRACKERS)
    if not _PROJECT.fullmatch(given.project):
        raise UsageError(
            f"--project {given.project[:70]!r}: a name is at most 64 letters, digits and ._- "
            "and starts with a letter or a digit"
        )
    for path in given.sweeps:
        find_records(path)
    require(kind.packages, given.to)
    folder = given.out or OUT / given.to
    # two exports at once would write each record twice
    busy = f"--out {folder}: another export writes there; end it, or choose another --out"
    with ExitStack() as held:
        with say_errors(given.to, folder):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold(folder / ".lock", busy))
            tracker = kind.make(folder, given.project)
            known = tracker.find_exported()

        def export() -> Iterator[Run]:
            for sweep in read_sweeps(given.sweeps):
                for run in read_runs(sweep, known):
                    with say_errors(given.to, folder):
                        tracker.export(run)
                    known.add(run.record_id)
                    yield run

        there = len(known)
        new = list(export())
        for line in describe_origin(str(run.outcome["executor"]) for run in new):
            print(line)
        print(f"{count(len(new), 'record')} exported to {folder}, which had {there:,} before")
        print(f"to see them: {tracker.hint}", flush=True)
        if given.watch:
            print("waiting for more records; Ctrl-C ends", flush=True)
            for _ in follow(given.sweeps):
                for run in export():
                    print(f"exported: {run.name}", flush=True)
    return 0


def require(packages: Sequence[str], to: str) -> None:
    """Raises UsageError: a package of a tracker is not installed."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise UsageError(
            f"--to {to}: {' and '.join(missing)} not installed; pip install {packages[0]}"
        )


if __name__ == "__main__":
    leave(main())
