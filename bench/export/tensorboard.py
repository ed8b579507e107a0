"""TensorBoard: one folder with one event file per record.

The events are written with TensorBoard's own writer and messages, which need neither TensorFlow nor
torch. The file gets its final name once it is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status as SessionStatus
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
    SessionStartInfo,
)
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from bench.export.runs import Fact, Run, write_facts
from bench.record import COMPARABLE

_LARGEST = 3.4e38  # TensorBoard's scalars are float32
_PARTIAL = ".partial"


class Folder:
    """A folder for ``tensorboard --logdir``, with a run for each record."""

    def __init__(self, folder: Path, project: str) -> None:
        self._folder = folder / project
        self.hint = f"tensorboard --logdir {quote(str(self._folder))}"

    def find_exported(self) -> set[str]:
        files = self._folder.glob("*/events.out.tfevents.*")
        return {file.parent.name.rpartition(".")[2] for file in files}

    def export(self, run: Run) -> None:
        readable = re.sub(r"[^0-9A-Za-z.]+", "-", run.name).strip("-.")
        place = self._folder / f"{readable}.{run.record_id}"
        place.mkdir(parents=True, exist_ok=True)
        partial = place / _PARTIAL
        with partial.open("wb") as file:
            writer = RecordWriter(file)
            for event in _list_events(run):
                writer.write(event.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place / f"events.out.tfevents.{run.started_s:010.0f}.{run.record_id}")


def _list_events(run: Run) -> Iterator[Event]:
    yield Event(wall_time=run.started_s, file_version="brain.Event:2")
    comparable = {n: fact for n, fact in run.environment.items() if n in COMPARABLE}
    start = SessionStartInfo(start_time_secs=run.started_s)
    for name, value in {**run.axes, **run.outcome, **comparable}.items():
        _set(start, name, value)
    yield _note(run.started_s, metadata.SESSION_START_INFO_TAG, session_start_info=start)
    yield Event(wall_time=run.started_s, summary=text_pb("record", _write_text(run)))
    for point in (*run.steps, *run.epochs):
        yield _plot(point.at_s, point.number, point.values)
    yield _plot(run.finished_s, 0, run.results)
    status = SessionStatus.STATUS_SUCCESS if run.measured else SessionStatus.STATUS_FAILURE
    end = SessionEndInfo(status=status, end_time_secs=run.finished_s)
    yield _note(run.finished_s, metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _set(start: SessionStartInfo, name: str, value: Fact | float | None) -> None:
    if isinstance(value, bool):
        start.hparams[name].bool_value = value
    elif isinstance(value, (int, float)):
        start.hparams[name].number_value = value
    else:
        start.hparams[name].string_value = "none" if value is None else value


def _note(at_s: float, tag: str, **content: SessionStartInfo | SessionEndInfo) -> Event:
    about = metadata.create_summary_metadata(HParamsPluginData(**content))
    value = Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)
    return Event(wall_time=at_s, summary=Summary(value=[value]))


def _plot(at_s: float, step: int, values: dict[str, float]) -> Event:
    shown = {tag: value for tag, value in values.items() if abs(value) < _LARGEST}
    scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in shown.items()]
    return Event(wall_time=at_s, step=step, summary=Summary(value=scalars))


def _write_text(run: Run) -> str:
    """Format the whole record as a code block, so that nothing is read as Markdown or HTML."""
    lines = [run.name]
    for title in ("axes", "outcome", "readings", "environment"):
        facts = write_facts(getattr(run, title))
        lines += ["", title, *(f"  {name}: {text}" for name, text in facts.items())]
    return "\n".join(f"    {line}" for line in lines)
