"""Steps of cases with a profile, made by hand: what limits them is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.answers.explanation import StepSide
from bench.profile.breakdown import Breakdown, divide
from bench.profile.rates import Rates
from bench.profile.step import Profile, StepWork
from bench.results.store.writer import Store
from bench.schema.case import Case
from bench.schema.precision import find_formats
from bench.schema.record import Record, WorkRow
from bench.schema.work import WorkKind
from tests.planted.records import make_run

RATES = Rates(
    {"float32": 50e12, "tfloat32": 400e12, "float16": 600e12, "bfloat16": 600e12}, 4e12, 5e-6
)
"""Of a card much like an H200."""

CPU_RATES = Rates({"float32": 200e9, "bfloat16": 800e9, "float16": 2e9}, 20e9, 2e-6)
"""Of a CPU that has bfloat16 and emulates float16."""

HOLD = {f"rate_{format}": rate for format, rate in RATES.products.items()}
HOLD |= {"rate_copy": RATES.copy, "call_time_s": RATES.call_s}
"""`RATES` as a record has them."""


def make_row(
    kind: WorkKind,
    operation: str,
    ms: float | None,
    *,
    format: str = "float32",
    calls: int = 10,
    flop: float | None = 0.0,
    bytes: float | None = 0.0,
) -> WorkRow:
    """A row of work; its time is in ms."""
    time_s = None if ms is None else ms / 1e3
    return WorkRow(kind, operation, format, calls, flop, bytes, time_s)


def make_step(
    ms: float, rows: Sequence[WorkRow], *, device: str = "cuda", **values: Any
) -> StepWork:
    """A step that took so many ms without a profiler, and twice its idle time under it."""
    busy = sum(row.time_s or 0.0 for row in rows)
    waits = {name: values.pop(name, 0.0) / 1e3 for name in ("input_wait", "sync_wait")}
    largest_batch = values.pop("profiled_ms", ms + (ms - 1e3 * busy)) / 1e3
    profile = Profile(largest_batch, busy, waits["input_wait"], waits["sync_wait"])
    rates = values.pop("rates", RATES if device == "cuda" else CPU_RATES)
    return StepWork(ms / 1e3, rows, rates, device, profile=profile, **values)


def divided(step: StepWork) -> Breakdown:
    """The breakdown of a step that has a profile."""
    breakdown = divide(step)
    assert breakdown is not None
    return breakdown


def make_side(precision: str, step: StepWork, **values: Any) -> StepSide:
    """A side of a pair of precisions."""
    case = values.pop("case", None) or Case(precision=precision, device=step.device)
    format = find_formats(case.precision, case.opt_level).arithmetic
    return StepSide(precision, case, step, divided(step), format, (step.step_s,), **values)


def make_profiled(case: Case, step: StepWork, repeat: int = 1, **values: Any) -> Record:
    """A record of a case with the profile of a step; `HOLD` are its rates."""
    profile = step.profile
    assert profile is not None
    measured = {
        "epoch_time_s": step.step_s * 100,
        "step_time_median_s": step.step_s,
        "step_time_mad_s": step.step_s / 1000,
        "measured_steps": 100,
        "steps_per_epoch": 100,
        "measured_images": 100 * case.batch_size,
        "measured_time_s": step.step_s * 100,
        "profiled_steps": 3,
        "profiled_step_s": profile.step_s,
        "busy_s": profile.busy_s,
        "input_wait_s": profile.input_wait_s,
        "sync_wait_s": profile.sync_wait_s,
        "warmup_steady": True,
    }
    return make_run(case, repeat=repeat, **{**measured, **HOLD, **values})


def write_profiled(
    folder: Path, runs: Sequence[tuple[Case, StepWork]], repeats: int = 3, **values: Any
) -> Path:
    """A sweep of profiled cases; repeats are 0.5 % apart. ``values`` are columns of all records."""
    with Store(folder) as store:
        for number, (case, step) in enumerate(runs):
            for repeat in range(1, repeats + 1):
                slower = 1 + 0.005 * (repeat - (repeats + 1) / 2)
                step_s, name = step.step_s * slower, f"{number:08x}{repeat:08x}"
                times = {"step_time_median_s": step_s, "epoch_time_s": step_s * 100}
                record = make_profiled(case, step, repeat, record_id=name, **times, **values)
                store.append(record, work=step.work)
    return folder
