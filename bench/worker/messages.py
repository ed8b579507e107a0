"""The messages between a worker and the process that started it: typed, one JSON line each.

The one place that writes such a line and reads it. A model that prints into the worker's pipe can
send anything, so reading checks everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from bench.case import Case
from bench.record import (
    COLUMNS,
    EPOCH_COLUMNS,
    RANK_COLUMNS,
    STEP_COLUMNS,
    WORK_COLUMNS,
    Column,
    EpochRow,
    Known,
    Measurement,
    RankRow,
    Status,
    Step,
    WorkRow,
)

Phase = Literal["warmup", "epoch", "evaluation"]
"""The phases that a worker announces, in this order; the last two once for each epoch."""

_SHOWN = 200  # characters of an unreadable line that an error repeats


class MessageError(ValueError):
    """A line is no message."""


@dataclass(frozen=True)
class Seat:
    """The place of a worker among those that train one network together.

    ``rank`` is its own of ``size``, from 0; ``store`` a file in a folder of theirs by which they
    find each other, ``gpus`` the UUIDs of all their GPUs by rank, none on a CPU, and ``timeout_s``
    how long one waits for another.
    """

    rank: int
    size: int
    store: str
    gpus: list[str]
    timeout_s: float


@dataclass(frozen=True)
class Assignment:
    """What a worker is to do, the first line it reads.

    ``folder`` is where `bench.data.prepare` left the dataset, ``started`` the time.monotonic() at
    which the worker was asked for, in s, ``gpu_uuid`` the GPU as NVML knows it, ``checkpoints`` the
    folder of the run's checkpoints, ``identity`` what one must be of to be resumed and ``trace``
    the file that the trace of a profile is to be kept in. ``seat`` is None for a worker that
    trains alone. With ``judged`` the worker asks after each epoch but the last whether to go on,
    see `EpochEnded`. What is ``known`` it does not find anew.
    """

    case: Case
    folder: str
    started: float
    gpu_uuid: str | None = None
    checkpoints: str = ""
    identity: dict[str, str] = field(default_factory=dict)
    trace: str = ""
    seat: Seat | None = None
    judged: bool = False
    known: Known = field(default_factory=Known)


@dataclass(frozen=True)
class PhaseEntered:
    """The worker stands before ``phase`` and waits for a line before it goes on. ``epoch`` counts
    from 0: the one that begins, or has just ended where it is evaluated."""

    phase: Phase
    epoch: int = 0


@dataclass(frozen=True)
class StepTaken:
    """Step ``step`` (from 0) of ``total`` was taken; ``total`` is 0 where it is not known."""

    phase: Phase
    step: int
    total: int
    loss: float
    memory_bytes: int


@dataclass(frozen=True)
class EpochEnded:
    """What an epoch of several came to; the worker waits for a line before it goes on: `GO_ON`, or
    `END`, where the case is measured as far as it went, and is truncated."""

    row: EpochRow


GO_ON, END = b"\n", b"end\n"


@dataclass(frozen=True)
class Finished:
    """How the case ended, and what was measured. ``missing`` says why columns are empty.

    ``follows`` are the columns that the worker goes on to fill, in another such message; if none
    comes, the case has ended like this, without them. ``peer`` says that it failed since a process
    that it trains with was gone. ``until`` is the time.monotonic() up to which the parts of its
    time are known, in s; 0 where they are not.
    """

    status: Status
    reason: str = ""
    transient: bool = False
    measurement: Measurement = field(default_factory=Measurement)
    missing: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    epochs: list[EpochRow] = field(default_factory=list)
    work: list[WorkRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)
    peer: bool = False
    until: float = 0.0


Message = PhaseEntered | StepTaken | EpochEnded | Finished

_KINDS: dict[str, type[Message]] = {
    "phase": PhaseEntered,
    "step": StepTaken,
    "epoch": EpochEnded,
    "finished": Finished,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    values = asdict(message)
    if isinstance(message, Finished):
        measured = values["measurement"].items()
        values["measurement"] = {name: value for name, value in measured if value is not None}
        # a whole epoch has thousands of steps: rows, without the names
        for name in ("steps", "epochs", "work", "ranks"):
            values[name] = [list(row.values()) for row in values[name]]
    if isinstance(message, EpochEnded):
        values["row"] = list(values["row"].values())
    return _line({"kind": _NAMES[type(message)], **values})


def decode(line: bytes) -> Message:
    """Read a message. Raises MessageError: it is none; says why."""
    try:
        values = _load(line)
        name = values.pop("kind", None)
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise MessageError(f"no kind {name!r}; right values: {', '.join(_KINDS)}")
        return kind(**_check(kind, values))
    except (ValueError, TypeError) as error:
        shown = line[:_SHOWN].decode(errors="replace")
        raise MessageError(f"the worker sent {shown!r}, which is no message: {error}") from error


def encode_assignment(assignment: Assignment) -> bytes:
    values = asdict(assignment)
    values["known"]["work"] = [list(row.values()) for row in values["known"]["work"]]
    return _line(values)


def decode_assignment(line: str) -> Assignment:
    values = json.loads(line)
    seat = values["seat"] and Seat(**values["seat"])
    known = Known(**values["known"])
    known = replace(known, work=[WorkRow(*row) for row in values["known"]["work"]])
    return Assignment(**{**values, "case": Case(**values["case"]), "seat": seat, "known": known})


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _load(line: bytes) -> dict[str, Any]:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise MessageError("not an object")
    return values


def _check(kind: type[Message], values: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise MessageError(f"no field {unknown[0]!r}; right values: {', '.join(sorted(known))}")
    return {name: _FIELDS[name](value) for name, value in values.items()}


def _phase(value: Any) -> Phase:
    if value not in get_args(Phase):
        raise MessageError(f"no phase {value!r}; right values: {', '.join(get_args(Phase))}")
    phase: Phase = value
    return phase


def _of(type_: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        # JSON knows no difference between 2 and 2.0, and bool is an int to Python
        whole = type_ is float and type(value) is int
        if type(value) is not type_ and not whole:
            raise MessageError(f"{value!r} is not of type {type_.__name__}")
        return type_(value)

    return check


def _measurement(values: Any) -> Measurement:
    types = {f.name: COLUMNS[f.name].type for f in fields(Measurement)}
    if unknown := sorted(_of(dict)(values).keys() - types.keys()):
        raise MessageError(f"no column {unknown[0]!r}")
    return Measurement(**{name: _of(types[name])(value) for name, value in values.items()})


def _missing(values: Any) -> dict[str, str]:
    return {name: _of(str)(why) for name, why in _of(dict)(values).items()}


def _row(kind: type, columns: dict[str, Column]) -> Callable[[Any], Any]:
    known = [columns[f.name] for f in fields(kind)]
    checks = [(_of(column.type), column.optional) for column in known]

    def read(row: Any) -> Any:
        if len(_of(list)(row)) != len(checks):
            raise MessageError(f"{len(row)} values, where {kind.__name__} has {len(checks)}")
        pairs = zip(row, checks, strict=True)
        return kind(*(None if v is None and empty else check(v) for v, (check, empty) in pairs))

    return read


def _rows(kind: type, columns: dict[str, Column]) -> Callable[[Any], list[Any]]:
    read = _row(kind, columns)
    return lambda rows: [read(row) for row in _of(list)(rows)]


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "phase": _phase,
    "epoch": _of(int),
    "step": _of(int),
    "total": _of(int),
    "loss": _of(float),
    "memory_bytes": _of(int),
    "status": Status,
    "reason": _of(str),
    "transient": _of(bool),
    "peer": _of(bool),
    "until": _of(float),
    "follows": lambda names: [_of(str)(name) for name in _of(list)(names)],
    "measurement": _measurement,
    "missing": _missing,
    "row": _row(EpochRow, EPOCH_COLUMNS),
    "steps": _rows(Step, STEP_COLUMNS),
    "epochs": _rows(EpochRow, EPOCH_COLUMNS),
    "work": _rows(WorkRow, WORK_COLUMNS),
    "ranks": _rows(RankRow, RANK_COLUMNS),
}
