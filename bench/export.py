"""`python -m bench.export SWEEP --to TRACKER`: give records to an experiment tracker.

A record that was exported to the same folder before is left as it is.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from io import BytesIO
from math import isfinite
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

from bench.base.errors import StoreError, UsageError, choose
from bench.base.processes import leave
from bench.base.text import clean, count, read_time, replace_file
from bench.results.store.reader import name_newest, read_beside
from bench.results.study import runs
from bench.results.study.axes import read_own
from bench.results.study.remedies import name_taker
from bench.results.study.sweeps import SweepFolder, read_sweeps
from bench.results.study.warnings import WARNINGS
from bench.schema.axis import Value, name_column
from bench.schema.case import AXES, NAMING_AXES, Case, find_axis, list_axes, spell_value
from bench.schema.flags import Parser, command, describe
from bench.schema.record import (
    COLUMNS,
    COMPARABLE,
    EPOCH_COLUMNS,
    MEASURED,
    EpochRow,
    Measurement,
    Status,
    Step,
)

PROJECT = "precision-bench"
_OUT = Path("trackers")
EXPORTED = "exported.txt"
"""The ids of the records that are in a tracker's folder, each added once it is complete."""

_LONGEST_NAME = 128  # characters; Weights & Biases takes no more
_LONGEST_TEXT = 5000  # characters; MLflow's tags hold 8000, its older ones 5000

_READ = [f.name for f in fields(Measurement)]
_NUMBERS = [name for name in _READ if COLUMNS[name].type in (int, float)]
_OF_STEP = ("loss", "time_s", "loss_scale", "lr")
_OF_EPOCH = [name for name in EPOCH_COLUMNS if name not in ("record_id", "epoch")]


@dataclass(frozen=True)
class TrackedPoint:
    """The values of one step or epoch, or of the result, at a time in seconds since 1970."""

    of: str
    number: int
    at_s: float
    values: dict[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """One record as trackers take it. Values that a record lacks are left out, never zero.

    ``name`` gives the case and, so that no figure is seen without them, how the case ended if not
    well, and each of its warnings. ``facts`` has the sweep, the warnings, and what a record has
    besides numbers. The numbers of ``points`` are finite, in SI units, under our column names
    prefixed with ``step/``, ``epoch/`` and, in the last one, ``result/``; ``step/accuracy`` is a
    fraction."""

    record_id: str
    name: str
    measured: bool
    axes: dict[str, Value]
    facts: dict[str, Value]
    points: list[TrackedPoint]
    started_s: float


def read_runs(sweep: SweepFolder, known: Collection[str]) -> Iterator[TrackedRun]:
    """Yield the runs of a sweep's records, in order, except those whose ids are ``known``. Raises
    UsageError: a file cannot be read."""
    rows = [*{r.record_id: r for r in sweep.rows if r.record_id not in known}.values()]
    if not rows:
        return
    # read after the records: a sweep writes the steps first, so that these are complete
    steps, epochs = read_beside(sweep.path, Step), read_beside(sweep.path, EpochRow)
    judged = runs.read_runs([replace(sweep, rows=rows)])
    own = read_own(rows)
    # what a record lacks is left out, and not filled in from others
    for run, raw in zip(judged, runs.list_runs(rows), strict=True):
        row: dict[Any, Any] = vars(raw)
        rules = [rule for rule in WARNINGS.values() if rule.find(run)]
        remarks = [rule.label([run]) for rule in rules]
        fixes = (name_taker(rule.fix.advise([run]), [sweep.maker]) for rule in rules)
        sentences = (f"{clean(d.warn([run]))} {fix}" for d, fix in zip(rules, fixes, strict=True))
        warnings = " ".join(sentences)
        facts = _read_facts(row) | {"sweep": sweep.name}
        if rules:
            facts |= {"remarks": "; ".join(remarks), "warnings": warnings[:_LONGEST_TEXT]}
        started = read_time(row["started_at"])
        ended = max(read_time(row["finished_at"]), started)
        yield TrackedRun(
            record_id=row["record_id"],
            name=_name(raw.case, row, remarks),
            measured=Status(row["status"]) in MEASURED,
            axes={name_column(n): _take(raw.case, n, own) for n in list_axes([raw])},
            facts=facts,
            points=[
                *_list_points("step", steps.get(row["record_id"], ()), started),
                *_list_points("epoch", epochs.get(row["record_id"], ()), started),
                TrackedPoint("result", 0, ended, _read_numbers(row, "result", _NUMBERS)),
            ],
            started_s=started,
        )


def _take(case: Case, axis: str, own: Mapping[str, Mapping[Any, float]]) -> Value:
    value: Value = getattr(case, axis)
    return own[axis].get(value, value) if axis in own else value


def _name(case: Case, row: Mapping[Any, Any], remarks: Iterable[str]) -> str:
    named = [
        n for n in list_axes([case]) if n in NAMING_AXES or getattr(case, n) != find_axis(n).default
    ]
    kinds = [kind for kind in ("sentinel", "probe", "inferred") if row[kind]]
    ended = [row["status"]] if row["status"] != Status.OK else []
    ending = " · ".join(dict.fromkeys([f"repeat {row['repeat']}", *kinds, *ended, *remarks]))
    label = clean(case.label(named))[: max(_LONGEST_NAME - len(ending) - 3, 16)]
    return f"{label} · {ending}"[:_LONGEST_NAME]


def _read_facts(row: Mapping[Any, Any]) -> dict[str, Value]:
    """Return what a record has besides axes and numbers. A reading that is a switch is off in the
    row also where it was not read, so only those that are on are certain."""
    facts: dict[str, Value] = {}
    for name, column in COLUMNS.items():
        value = row[name]
        unread = value == "" or value != value or (value is False and name in _READ)
        if name in AXES or name in _NUMBERS or unread:
            continue
        facts[name] = clean(value)[:_LONGEST_TEXT] if column.type is str else column.type(value)
    return facts


def _read_numbers(row: Mapping[Any, Any], of: str, names: Iterable[str]) -> dict[str, float]:
    known = {name: row[name] for name in names if row[name] is not None}
    return {f"{of}/{name}": float(value) for name, value in known.items() if isfinite(value)}


def _list_points(
    of: str, rows: Sequence[Step] | Sequence[EpochRow], started_s: float
) -> Iterator[TrackedPoint]:
    """Yield the rows of a record's steps or epochs, each at its end."""
    at = started_s
    for row in map(vars, rows):
        at += row["time_s"] or 0.0
        values = _read_numbers(row, of, _OF_STEP if of == "step" else _OF_EPOCH)
        if of == "step" and row["images"] and row["correct"] is not None:
            values["step/accuracy"] = row["correct"] / row["images"]
        yield TrackedPoint(of, row[of], at, values)


def write_tensorboard(folder: Path, run: TrackedRun) -> None:
    """Write one folder with one event file, without TensorFlow and torch."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    place = folder / re.sub(r"[^0-9A-Za-z._]+", "-", f"{run.name}.{run.record_id}")
    shutil.rmtree(place, ignore_errors=True)
    settings = {**run.axes, **run.facts}
    # in a block of code nothing is read as Markdown or HTML
    text = "\n".join(f"    {name}: {spell_value(value)}" for name, value in settings.items())
    shown = (*run.axes, *COMPARABLE, "sweep", "repeat", "status", "remarks")
    settings = {n: value for n, value in settings.items() if n in shown and value is not None}
    about = hparams_pb(settings, start_time_secs=run.started_s), text_pb("record", text)
    events = [Event(wall_time=run.started_s, file_version="brain.Event:2")]
    events += [Event(wall_time=run.started_s, summary=summary) for summary in about]
    for point in run.points:
        values = [Summary.Value(tag=n, simple_value=v) for n, v in point.values.items()]
        summary = Summary(value=values)
        events.append(Event(wall_time=point.at_s, step=point.number, summary=summary))
    # EventFileWriter writes in a thread, which on a full disk dies and leaves a part of the file
    writer = RecordWriter(content := BytesIO())
    for event in events:
        writer.write(event.SerializeToString())
    place.mkdir(parents=True)
    replace_file(place / f"events.out.tfevents.{run.started_s:.0f}", content.getvalue())


def write_wandb(folder: Path, run: TrackedRun) -> None:
    """Write one offline run of Weights & Biases; nothing is sent or printed."""
    # read when wandb is imported and its service starts
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    import wandb

    for left in folder.glob(f"wandb/offline-run-????????_??????-{run.record_id}"):
        shutil.rmtree(left)
    # nothing about the exporting machine: it is not the one that measured
    settings = wandb.Settings(
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
    with wandb.init(
        dir=folder,
        project=PROJECT,
        id=run.record_id,
        name=run.name,
        notes=str(run.facts.get("warnings", "")),
        config={**run.axes, **run.facts},
        settings=settings,
    ) as written:
        for of in ("step", "epoch"):
            written.define_metric(f"{of}/*", step_metric=f"{of}/number")
        *curves, results = run.points
        for point in curves:
            written.log({f"{point.of}/number": point.number, **point.values})
        written.summary.update(results.values)
        written.finish(exit_code=0 if run.measured else 1)
    # the service would write the file milliseconds later; ending it takes 0.3 s
    wandb.teardown()


def write_mlflow(folder: Path, run: TrackedRun) -> None:
    """Write one run into a SQLite file of MLflow, without a server."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are raised too
    database = folder.resolve() / "mlflow.db"
    if not database.exists():  # with a part of its tables, MLflow does not go on
        with TemporaryDirectory(dir=folder, prefix=".") as making:
            made = Path(making).resolve() / database.name
            MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments()
            made.replace(database)
    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    found = client.get_experiment_by_name(PROJECT)
    place = (folder / "artifacts").resolve().as_uri()
    experiment = found.experiment_id if found else client.create_experiment(PROJECT, place)
    for left in client.search_runs([experiment], f"tags.`bench.record_id` = '{run.record_id}'"):
        client.delete_run(left.info.run_id)
    tags = {f"bench.{name}": spell_value(fact) for name, fact in run.facts.items()}
    made = client.create_run(experiment, round(1000 * run.started_s), tags, run.name)
    metrics = [
        Metric(name, value, round(1000 * point.at_s), point.number)
        for point in run.points
        for name, value in point.values.items()
    ]
    params = [Param(name, spell_value(value)) for name, value in run.axes.items()]
    client.log_batch(made.info.run_id, params=params)
    for first in range(0, len(metrics), 1000):  # MLflow takes no more at once
        client.log_batch(made.info.run_id, metrics=metrics[first : first + 1000])
    ended = round(1000 * run.points[-1].at_s)
    client.set_terminated(made.info.run_id, "FINISHED" if run.measured else "FAILED", ended)


TRACKERS = {
    "tensorboard": (write_tensorboard, "tensorboard --logdir {}"),
    "wandb": (write_wandb, "wandb sync {}/wandb/offline-run-*"),
    "mlflow": (write_mlflow, "mlflow ui --backend-store-uri sqlite:///{}/mlflow.db"),
}
"""What writes a run to a folder, in place of what an interrupted export left of it; and the command
that shows or uploads the runs there."""


@command
def main(argv: Sequence[str]) -> int:
    """Export. Returns 0; 1 if the disk is full; 2 for a usage error."""
    parser = Parser(
        prog="python -m bench.export", suggest=name_newest, description=describe(__doc__)
    )
    add = parser.add_argument
    add("sweeps", nargs="+", type=Path, metavar="SWEEP", help="a sweep's folder or records file")
    add("--to", required=True, metavar="TRACKER", help=f"one of: {', '.join(TRACKERS)}")
    add("--out", type=Path, metavar="DIR", help=f"folder to write to (default: {_OUT}/TRACKER)")
    given = parser.parse(argv)
    write, show = choose("--to", given.to, TRACKERS)
    sweeps, folder = read_sweeps(given.sweeps), given.out or _OUT / given.to
    exported = folder / EXPORTED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = {*exported.read_text().split()} if exported.exists() else set[str]()
        there = len(known)
        for run in (run for sweep in sweeps for run in read_runs(sweep, known)):
            write(folder, run)
            known.add(run.record_id)
            with exported.open("a") as file:
                print(run.record_id, file=file)
    except UsageError:
        raise
    except Exception as error:  # most exceptions of trackers mean little to users
        of_system = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if of_system or "database or disk is full" in str(error):  # as SQLite says it
            raise StoreError(
                f"--out {folder}: {os.strerror(errno.ENOSPC)}, after "
                f"{count(len(known) - there, 'record')}; free some, then the same command goes on"
            ) from error
        what = clean(f"{type(error).__name__}: {error}")[:300]
        fix = f"check {folder}, or pip install {given.to}"
        raise UsageError(f"--to {given.to}: {what}; {fix}") from error
    print(f"{count(len(known) - there, 'record')} exported to {folder}, which had {there:,} before")
    print("to see them:", show.format(quote(str(folder))))
    return 0


if __name__ == "__main__":
    leave(main())
