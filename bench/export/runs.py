"""The data for trackers: one run per record, the same for every tracker."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from bench.axis import Value
from bench.case import AXES, NAMED, Case, spell_value
from bench.errors import UsageError
from bench.record import COLUMNS, EPOCH_COLUMNS, MEASURED, Environment, Measurement, Record, Status
from bench.store.runs import read_cases
from bench.study.doubts import DOUBTS
from bench.study.summaries import read
from bench.text import clean, read_time

if TYPE_CHECKING:
    import pandas as pd

    from bench.study.sweeps import Sweep

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
    new = sweep.records[~sweep.records["record_id"].isin(list(known))]
    records = new.drop_duplicates("record_id").reset_index(drop=True)
    if records.empty:
        return
    for text in records["record_id"]:
        if not _ID.fullmatch(text):
            raise UsageError(
                f"{sweep.file}: record_id {clean(text)[:40]!r}: an id is letters, digits, - and _, "
                "at most 64; correct it"
            )
    # read after the records: a sweep writes the steps first, so that these are complete
    parts: list[dict[str, pd.DataFrame]] = []
    for table in (sweep.read_steps(), sweep.read_epochs()):
        mine = table[table["record_id"].isin(records["record_id"])].groupby("record_id")
        parts.append({str(record_id): rows for record_id, rows in mine})
    steps, epochs = parts
    judged = read([replace(sweep, records=records)])
    rows = records.to_dict("records")
    for at, (row, case) in enumerate(zip(rows, read_cases(records), strict=True)):
        doubts = {name: _warn(name, judged[at : at + 1]) for name in DOUBTS if judged[name][at]}
        yield _make_run(sweep.name, row, case, doubts, steps, epochs)


def _make_run(
    sweep: str,
    row: dict[Any, Any],
    case: Case,
    doubts: dict[str, str],
    steps: dict[str, pd.DataFrame],
    epochs: dict[str, pd.DataFrame],
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
        steps=list(_list_points("step", steps.get(record_id), started)),
        epochs=list(_list_points("epoch", epochs.get(record_id), started)),
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


def _warn(name: str, rows: pd.DataFrame) -> str:
    doubt = DOUBTS[name]
    return f"{clean(doubt.warn(rows))} {doubt.advise(rows)}"


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
        if isfinite(row[name]):
            yield name, float(row[name])


def _list_points(of: str, rows: pd.DataFrame | None, started_s: float) -> Iterator[Point]:
    """Yield the rows of a record's steps or epochs, each at its end."""
    at = started_s
    for row in [] if rows is None else rows.to_dict("records"):
        at += row["time_s"] if isfinite(row["time_s"]) else 0.0
        values = dict(_take_numbers(row, _STEP if of == "step" else _EPOCH))
        if of == "step" and row["images"]:
            values["accuracy"] = row["correct"] / row["images"]
        yield Point(row[of], at, {f"{of}/{name}": value for name, value in values.items()})


def write_facts(facts: Mapping[str, Value]) -> dict[str, str]:
    """Spell facts or axes as flags do: switches as on and off, and None as none."""
    return {name: spell_value(fact) for name, fact in facts.items()}
