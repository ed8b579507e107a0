"""MLflow: one run per record in a SQLite store, without a server.

A run is found by its tag ``bench.record_id``, and marked as running until it is complete. A run
left by an interrupted export is written again over itself; this duplicates nothing, because each
metric has the time of its record.
"""

from __future__ import annotations

import logging
import os
from itertools import islice
from pathlib import Path
from shlex import quote

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from bench.export.runs import Point, Run, write_facts
from bench.record import Status

_KEY = "bench.record_id"
_AT_ONCE = {"metrics": 1000, "params": 100, "tags": 100}  # limits of MLflow per call
_KILLED = frozenset({Status.KILLED, Status.INTERRUPTED, Status.TIMEOUT})


class SqliteStore:
    """A store in one file, which ``mlflow ui`` shows."""

    def __init__(self, folder: Path, project: str) -> None:
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
                identity = run.data.tags.get(_KEY)  # runs of other programs have none
                if identity and run.info.status == "RUNNING":
                    self._unfinished[identity] = run.info.run_id
                elif identity:
                    exported.add(identity)
            token = page.token
            if not token:
                return exported

    def export(self, run: Run) -> None:
        start, end = _milliseconds(run.started_s), _milliseconds(run.finished_s)
        run_id = self._unfinished.pop(run.record_id, "")
        if not run_id:
            tags = {_KEY: run.record_id}
            made = self._client.create_run(self._experiment, start, tags, run.name)
            run_id = made.info.run_id
        facts = {**run.outcome, **run.readings, **run.environment}
        given = {
            "params": (Param(name, text) for name, text in write_facts(run.axes).items()),
            "tags": (RunTag(f"bench.{name}", text) for name, text in write_facts(facts).items()),
            "metrics": (
                Metric(name, value, _milliseconds(point.at_s), point.number)
                for point in (*run.steps, *run.epochs, Point(0, run.finished_s, run.results))
                for name, value in point.values.items()
            ),
        }
        for kind, items in given.items():
            while some := list(islice(items, _AT_ONCE[kind])):
                self._client.log_batch(run_id, **{kind: some})
        ending = "FINISHED" if run.measured else "KILLED" if run.status in _KILLED else "FAILED"
        self._client.set_terminated(run_id, ending, end)


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
