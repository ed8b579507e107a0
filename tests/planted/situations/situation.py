"""A small sweep of which a report has one thing to say, and the parts that say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from bench.case import Case
from bench.record import Record
from tests.planted.records import GIB, Row, make_record, measured, ran

FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)
AMP = Case(precision="fp16-amp", loss_scale="dynamic")
COMPILED = replace(FP32, compile="default")
THREE = (100, 101, 99)
HALF = (50, 51, 49)


@dataclass(frozen=True)
class Situation:
    """A sweep in which there is one thing to see.

    Attributes:
        about: what is to be seen.
        rows: the records of the sweep.
        parts: what of the report is kept: names of sections; ``answers``, ``doubts`` and ``notes``;
            or ``numbers``, which are those behind the effects.
        config: what the sweep's ``config.json`` has, if it has one.
    """

    about: str
    rows: Sequence[Row]
    parts: tuple[str, ...]
    config: Mapping[str, Any] | None = None


def plant(about: str, parts: str, *rows: Sequence[Row], **config: Any) -> Situation:
    """A situation of several runs of cases."""
    return Situation(about, list(chain(*rows)), tuple(parts.split()), config or None)


def at(batch: int, *cases: Case) -> list[Case]:
    """Cases with another batch size."""
    return [replace(case, batch_size=batch) for case in cases]


def learn(case: Case, losses: Mapping[int, float] | Sequence[float], **values: Any) -> list[Record]:
    """A run of each seed, with its loss; of the repeats of one where values have a run_seed."""
    seeds = losses if isinstance(losses, Mapping) else dict(enumerate(losses))
    rows = ran(case, [100 + i for i in range(len(seeds))], **values)
    for row, (seed, loss) in zip(rows, seeds.items(), strict=True):
        row.measurement.train_loss, row.run_seed = loss, values.get("run_seed", seed)
    return rows


def some_steps(case: Case, steps: int, of: int, time_s: float, **values: Any) -> list[Record]:
    """A run of so many steps of an epoch."""
    counts = {"measured_steps": min(steps, of), "steps_per_epoch": of}
    return ran(replace(case, steps=steps), (time_s,), **counts, **values)


def start(case: Case, times: Sequence[float], firsts: Sequence[float]) -> list[Record]:
    """Runs that start in 2 s, and warm up in 2 s and their first steps."""
    rows = ran(case, times, setup_time_s=2.0)
    for row, first in zip(rows, firsts, strict=True):
        row.measurement.first_steps_time_s = first
        row.measurement.warmup_time_s = 2.0 + first
    return rows


def change(rows: list[Record], number: int, **values: Any) -> list[Record]:
    """The same, with other measurements of one of them."""
    for name, value in values.items():
        setattr(rows[number].measurement, name, value)
    return rows


def once(case: Case, time_s: float = 50.0, gib: float = 1, **values: Any) -> Record:
    """One run of a case on a machine that nobody names."""
    return make_record(case, **measured(time_s, gib * GIB), **values)


SEEDS = (1.0, 1.1, 1.2, 1.3)
SHARED = {"neighbours_computing": 1}

LOST = {"gpu": "A card", "torch": "2.13"}
MIB = 2**20
