"""What is derived of records: one row a case, its quantities and its warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.answers.settings import choose, list_settings
from bench.machine.peaks import list_peaks
from bench.results.study.comparable import refuse_base
from bench.results.study.runs import Result, Trust
from bench.results.study.sweeps import read_sweep
from bench.schema.case import Case
from bench.schema.record import Record, Status
from tests.planted.records import (
    GIB,
    make_record,
    measured,
    write_sweep,
)
from tests.planted.results import read_results

FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)
CARD = {"gpu": "A card", "torch": "2.13"}


def cases_of(folder: Path, *records: Record) -> list[Result]:
    return read_results(read_sweep(write_sweep(folder / "sweep", records)))[1]


def ran(case: Case, time_s: float, memory: float = GIB, **values: Any) -> Record:
    common = {**CARD, "gpu_memory_bytes": 24 * GIB}
    return make_record(case, **{**common, **measured(time_s, memory), **values})


def fail(case: Case, status: Status = Status.ERROR, **values: Any) -> Record:
    return make_record(case, status=status, reason="boom", **{**CARD, **values})


def repeat(times: Sequence[float], case: Case = FP32, **values: Any) -> list[Record]:
    return [ran(case, t, repeat=i, **values) for i, t in enumerate(times, 1)]


def pick(cases: Sequence[Result], case: Case) -> Result:
    wanted = (case.precision, case.batch_size)
    (row,) = (row for row in cases if (row.precision, row.batch_size) == wanted)
    return row


# ------------------------------------------------------------------- what becomes of a case's runs

NAN = math.nan
RATED = {"energy_j": 5000.0, "flop_per_image": 1e9}
HALF = Case(fraction=0.5)
WITHIN = {"epoch_time_low_s": 9.5, "epoch_time_high_s": 10.8}
TWO_STEPS = {"measured_steps": 2, "steps_per_epoch": 391}
BY_HAND: dict[str, Any] = {
    "gpu": "NVIDIA H200", "images_per_s": None, "measured_images": 10_000, "energy_j": 600.0,
    "flop_per_image": 17e9, "arithmetic": "float32", "step_time_median_s": 0.2,
    "step_time_mad_s": 0.004,
}  # fmt: skip
MOVES: dict[str, Any] = {
    "flop_per_image": 17e9, "arithmetic": "float16", "step_bytes": 10**11,
    "step_time_median_s": 0.1,
}  # fmt: skip
REACHED = MOVES | {
    "rate_float16": 17e12, "rate_bfloat16": 10e12, "rate_float8": 20e12, "rate_copy": 4e12
}  # fmt: skip
ON_H100 = MOVES | {"gpu": "NVIDIA H100 80GB HBM3", "rate_float16": 700e12, "rate_copy": 3e12}


RUNS: dict[str, tuple[Sequence[Record], dict[str, Any]]] = {
    "memory": (
        [ran(case, 10, (2 + gib) * GIB, peak_allocated_bytes=gib * GIB)
         for case, gib in ((FP16, 2), (FP32, 4))],
        {"memory_saved": 1 / 3},
    ),
    "within a run": (
        [ran(HALF, 10, **WITHIN)], {"spread": "within the run", "images_per_s_low": 50_000 / 10.8},
    ),
    # repeats are told by each other, not by what each says of itself
    "two runs": (
        repeat((10, 10.1), HALF, **WITHIN),
        {"epoch_time_s_low": 10, "epoch_time_s_high": 10.1, "spread": "range", "noisy": False},
    ),
    # of an even number of repeats, the median of rates is not the rate at the median time
    "rates": (
        repeat((300, 100), **RATED),
        {
            "epoch_time_s": 200, "images_per_s": 50_000 / 200, "images_per_j": 10,
            "achieved_flops": 1e9 * 50_000 / 200, "images_per_s_low": 50_000 / 300,
            "images_per_s_high": 50_000 / 100,
        },
    ),
    "a repeat failed": (
        [ran(FP32, 10), fail(FP32, repeat=2)],
        {"status": "ok", "epoch_time_s": 10, "repeats": 1, "runs": 2, "trusted": True},
    ),
    "a repeat diverged": (
        [ran(FP32, 10), ran(FP32, 9, repeat=2, status=Status.DIVERGED)],
        {"status": "ok", "epoch_time_s": 10, "diverged": True, "trusted": False},
    ),
    "the last attempt failed": ([ran(FP32, 10), fail(FP32, attempt=2)], {"status": "error"}),
    "the last attempt ended": ([fail(FP32), ran(FP32, 10, attempt=2)], {"epoch_time_s": 10}),
    "by hand": (
        [ran(FP32, 100, 10 * GIB, **BY_HAND)],
        {
            "images_per_s": 500, "images_per_j": 10_000 / 600, "achieved_flops": 8.5e12,
            "energy_per_epoch_j": 3000,  # a fifth of the images was measured
            "step_noise": 0.02,
            "mfu": 8.5e12 / list_peaks("NVIDIA H200")["rate_float32"],
        },
    ),
    **{
        f"peak of {arithmetic}": (
            [ran(FP16, 100, gpu="NVIDIA H200", flop_per_image=17e9, arithmetic=arithmetic)],
            {"mfu": 8.5e12 / peak},
        )
        for arithmetic, peak in (
            ("tfloat32/float32", 494.5e12),  # no kernel took one of the gradients in TF32
            ("unclear/float16", NAN),  # what the forward pass ran in is not known
            ("", 989.5e12),  # not probed: what the label says
        )
    },
    "of each GPU that a command was seen on": (
        [ran(FP16, 100, gpu="NVIDIA H200", flop_per_image=17e9, gpus=4)],
        {"achieved_flops": 8.5e12 / 4, "mfu": 8.5e12 / 4 / 989.5e12},
    ),
    "more than the peak": (
        [ran(FP16, 100, gpu="NVIDIA H200", flop_per_image=1e13)], {"mfu": NAN},
    ),
    "of what the device does": (
        [ran(FP16, 100, **REACHED)], {"measured_share": 0.5, "copy_share": 0.25},  # 8.5 TFLOP/s
    ),
    "of a CPU that two processes share": (
        [ran(replace(FP16, device="cpu", parallel="ddp", world_size=2), 100, **REACHED)],
        {"measured_share": 0.5, "copy_share": 0.5},
    ),
    "more than the device does": (
        [ran(FP16, 100, **REACHED | {"rate_float16": 7e12, "rate_bfloat16": 5e12})],
        {"measured_share": NAN},
    ),
    "far more than the device does, by which slower steps have no share either": (
        [ran(replace(FP16, batch_size=64), 1000, **REACHED | {"rate_float16": 1e12}),
         ran(FP16, 100, **REACHED | {"rate_float16": 1e12})],
        {"measured_share": NAN, "rate_float16": NAN, "rate_bfloat16": 10e12},
    ),
    "half in fp8": (
        [ran(FP16, 100, **REACHED | {"arithmetic": "float8", "fp8_flop_share": 0.5})],
        {"measured_share": 8.5 / (1 / (0.5 / 20 + 0.5 / 10))},
    ),
    # it moves less than was counted
    "compiled": ([ran(replace(FP16, compile="default"), 100, **REACHED)], {"copy_share": NAN}),
    "a rate above the data sheet": (
        [ran(FP16, 100, **ON_H100 | {"rate_float16": 5e15})],
        {"measured_share": NAN, "copy_share": 1 / 3},
    ),
    "a few steps": (
        [ran(Case(steps=2), 10, **TWO_STEPS), fail(Case(steps=2), Status.OOM, repeat=2)],
        {"part": 2 / 391, "runs": 2, "repeats": 1, "extrapolated": True, "unknown": True},
    ),
    # --steps above the epoch measures all of it
    "all steps": (
        [ran(Case(steps=500), 10, measured_steps=196, steps_per_epoch=196)],
        {"part": 1, "extrapolated": False},
    ),
}  # fmt: skip
"""Runs, and what the case of the first of them then is."""


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """All of `RUNS` in one sweep, each with a network of its own."""
    rows = [
        replace(row, case=replace(row.case, model=f"m:n{place}"), record_id=f"{place}-{number}")
        for place, (runs, _) in enumerate(RUNS.values())
        for number, row in enumerate(runs)
    ]
    return cases_of(tmp_path_factory.mktemp("runs"), *rows)


@pytest.mark.parametrize("name", RUNS)
def test_what_runs_become(name: str, summed: list[Result]) -> None:
    runs, expected = RUNS[name]
    place = list(RUNS).index(name)
    row = pick([row for row in summed if row.model == f"m:n{place}"], runs[0].case)
    assert {column: getattr(row, column) for column in expected} == {
        column: value if isinstance(value, str) else pytest.approx(value, nan_ok=True)
        for column, value in expected.items()
    }


def test_memory_is_read_by_one_measure_a_machine(tmp_path: Path) -> None:
    bare = {"peak_device_bytes": None}
    cases = cases_of(tmp_path, ran(FP32, 10, 4 * GIB, **bare), ran(FP16, 10, 4 * GIB, **bare))
    assert {row.memory_measure for row in cases} == {"peak_reserved_bytes"}
    mixed = cases_of(tmp_path / "mixed", ran(FP32, 10, 4 * GIB), ran(FP16, 10, 4 * GIB, **bare))
    assert math.isnan(pick(mixed, FP16).memory_bytes)  # not the allocator's beside the device's
    unknown = ran(FP32, 10, 4 * GIB, executor="x")
    beside = cases_of(tmp_path / "beside", unknown, ran(FP16, 10, 4 * GIB, **bare))
    assert pick(beside, FP16).memory_bytes > 0  # what may be anything is no measure of others


def test_a_run_that_ended_early_is_of_the_environment_of_its_case(tmp_path: Path) -> None:
    """As in a folder of two versions of torch, where the folder does not tell."""
    early = make_record(FP32, status=Status.ERROR, reason="boom", repeat=2)
    cases = cases_of(tmp_path, ran(FP32, 10, torch="2.12"), early, ran(FP16, 10))
    assert [(case.torch, case.runs) for case in cases] == [("2.12", 2), ("2.13", 1)]


UNSETTLED = {"busy_s": 0.03, "step_time_median_s": 0.05, "step_time_mad_s": 0.005}
TRUSTED: dict[str, tuple[Sequence[Record], Trust, str, str]] = {
    # why no other is compared with it, and what it may be recommended for
    "plain": (repeat([5]), Trust.TRUSTED, "", "time memory"),
    "noisy, once": (repeat([5], **WITHIN, step_time_mad_s=0.1, step_time_median_s=1.0),
                    Trust.WARNED, "", "memory"),
    "noisy, three times": (repeat([5, 5, 5], step_time_mad_s=0.1, step_time_median_s=1.0),
                           Trust.TRUSTED, "", "time memory"),
    "waits for the host, twice": (repeat([5, 5], **UNSETTLED), Trust.WARNED,
                                  "waits for the host and does not settle", "memory"),
    "waits for the host, three times": (repeat([5, 5, 5], **UNSETTLED), Trust.TRUSTED, "",
                                        "time memory"),
    "throttled": (repeat([5, 5, 5], throttle_during="hardware slowdown"), Trust.WARNED, "",
                  "memory"),
    "diverged": (repeat([5], status=Status.DIVERGED), Trust.NONE, "", ""),
    "unknown": (repeat([5], executor="x"), Trust.NONE, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUSTED)
def test_what_is_trusted_is_recommended_and_what_settles_is_a_baseline(
    name: str, tmp_path: Path
) -> None:
    rows, trust, refused, aims = TRUSTED[name]
    (case,) = cases_of(tmp_path, *rows)
    assert (case.trust, refuse_base(case)) == (trust, refused)
    settings = list_settings([case])
    assert [aim for aim in ("time", "memory") if choose(settings, aim)] == aims.split()


NO_BASELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another card": ({}, {"gpu": "Another card"}),
    "another torch": ({}, {"torch": "2.12"}),
    "unknown": ({}, {"executor": "x"}),
    "invalid": ({}, {"status": Status.INVALID, "reason": "throttled"}),
    "another batch size": ({"batch_size": 256}, {}),
    "another compile": ({"compile": "default"}, {}),
    "other images": ({"dataset": "synthetic"}, {}),
}
"""Axes and values of a case in fp32, beside one in fp16 that it is no baseline of."""


def test_a_speed_up_is_over_the_same_case_in_fp32(tmp_path: Path) -> None:
    """Of several that measured a part, the larger; a profile makes no other case."""
    rows = [ran(replace(FP16, model=f"m:n{place}"), 80) for place in range(len(NO_BASELINES) + 1)]
    for place, (axes, values) in enumerate(NO_BASELINES.values()):
        rows.append(ran(Case(model=f"m:n{place}", **axes), 200, **values))
    last = Case(model=f"m:n{len(NO_BASELINES)}")
    rows += [ran(replace(last, fraction=0.1), 300), ran(replace(last, fraction=0.5), 200)]
    rows.append(ran(replace(last, fraction=0.2, profile=True), 180))
    found = [row.speedup for row in cases_of(tmp_path, *rows) if row.precision == "fp16"]
    expected = [NAN] * len(NO_BASELINES) + [2.5]
    assert sorted(found, key=str) == pytest.approx(sorted(expected, key=str), nan_ok=True)
