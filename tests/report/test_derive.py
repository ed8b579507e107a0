"""What is derived of records: one row a case, its quantities and its doubts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_for_tests import Capture

from bench.case import Case
from bench.gpu.peaks import list_peaks
from bench.questions.notices import warn
from bench.questions.report_data import gather
from bench.record import Record, Status, Step
from bench.report.__main__ import main as report
from bench.store.attempts import FEWEST, number_groups
from bench.study import doubts
from bench.study.results import Result
from bench.study.sweeps import Sweep, read_sweep, read_sweeps
from tests.planted.records import (
    GIB,
    REFERENCE,
    list_committed,
    make_record,
    measured,
    write_sweep,
)
from tests.planted.results import read_results
from tests.planted.situations.notices import EACH_DOUBT

FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)
WIDE = replace(FP16, batch_size=256)
CARD = {"gpu": "A card", "torch": "2.13"}


def sweep_of(folder: Path, records: Sequence[Record], name: str = "sweep") -> Sweep:
    return read_sweep(write_sweep(folder / name, records))


def cases_of(folder: Path, *records: Record) -> list[Result]:
    return read_results(sweep_of(folder, records))[1]


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
TENSORS = [ran(case, 10, (2 + gib) * GIB, peak_allocated_bytes=gib * GIB)
           for case, gib in ((FP32, 4), (FP16, 2))]  # fmt: skip
RATED = {"energy_j": 5000.0, "flop_per_image": 1e9}
HALF, TENTH = Case(fraction=0.5), Case(fraction=0.1)
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
    # of a case beside others, or of several alike; each of the first row's precision and batch
    "tensors and all memory": (TENSORS[::-1], {"memory_saved": 1 / 3, "tensors_saved": 1 / 2}),
    "within a run": (
        [ran(HALF, 10, **WITHIN)], {"coverage": 0.95, "images_per_s_low": 50_000 / 10.8},
    ),
    # repeats are told by each other, not by what each says of itself
    "two runs": (
        repeat((10, 10.1), HALF, **WITHIN),
        {"epoch_time_s_low": 10, "epoch_time_s_high": 10.1, "coverage": NAN, "noisy": False},
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
    "rates not counted": (
        repeat((300, 100), **RATED, measured_images=None), {"images_per_j": NAN},
    ),
    "a repeat failed": (
        [ran(FP32, 10), fail(FP32, repeat=2)],
        {"status": "ok", "epoch_time_s": 10, "repeats": 1, "runs": 2},
    ),
    "a repeat diverged": (
        [ran(FP32, 10), ran(FP32, 9, repeat=2, status=Status.DIVERGED)],
        {"status": "ok", "epoch_time_s": 10, "diverged": True},
    ),
    "the last attempt failed": ([ran(FP32, 10), fail(FP32, attempt=2)], {"status": "error"}),
    "the last attempt ended": ([fail(FP32), ran(FP32, 10, attempt=2)], {"epoch_time_s": 10}),
    "a sentinel is no result": (
        [ran(FP32, 100), ran(FP32, 103, sentinel=True)], {"epoch_time_s": 100},
    ),
    "by hand": (
        [ran(FP32, 100, 10 * GIB, **BY_HAND)],
        {
            "images_per_s": 500, "images_per_j": 10_000 / 600, "achieved_flops": 8.5e12,
            "energy_per_epoch_j": 3000,  # a fifth of the images was measured
            "fragmentation": pytest.approx(1 - 0.9 / 0.95, abs=1e-9), "step_noise": 0.02,
            "peak_share": 8.5e12 / list_peaks("NVIDIA H200")["rate_float32"],
        },
    ),
    **{
        f"peak of {arithmetic}": (
            [ran(FP16, 100, gpu="NVIDIA H200", flop_per_image=17e9, arithmetic=arithmetic)],
            {"peak_share": 8.5e12 / peak},
        )
        for arithmetic, peak in (
            ("tfloat32/float32", 494.5e12),  # no kernel took one of the gradients in TF32
            ("float16/unclear", 989.5e12),
            ("unclear/float16", NAN),  # what the forward pass ran in is not known
            ("", 989.5e12),  # not probed: what the label says
        )
    },
    "of what the device does": (
        [ran(FP16, 100, **REACHED)], {"measured_share": 0.5, "copy_share": 0.25},  # 8.5 TFLOP/s
    ),
    **{
        f"convolutions at {rate / 1e12:g} TFLOP/s": (
            [ran(FP16, 100, **REACHED | {"rate_conv_float16": rate})], {"measured_share": share},
        )
        for rate, share in ((34e12, 0.25), (8.5e12, 0.5))
    },
    "half in fp8": (
        [ran(FP16, 100, **REACHED | {"arithmetic": "float8", "fp8_flop_share": 0.5})],
        {"measured_share": 8.5 / (1 / (0.5 / 20 + 0.5 / 10))},
    ),
    # it moves less than was counted
    "compiled": ([ran(replace(FP16, compile="default"), 100, **REACHED)], {"copy_share": NAN}),
    "rates not measured": (
        [ran(FP16, 100, **REACHED | {"arithmetic": "tfloat32", "rate_copy": None})],
        {"measured_share": NAN, "copy_share": NAN},
    ),
    **{
        f"{wrong or 'no rate'} above the data sheet": (
            [ran(FP16, 100, **ON_H100 | ({wrong: 5e15} if wrong else {}))],
            {
                "measured_share": NAN if wrong == "rate_float16" else 8.5 / 700,
                "copy_share": NAN if wrong == "rate_copy" else 1 / 3,
            },
        )
        for wrong in ("", "rate_float16", "rate_copy")
    },
    "a part of synthetic images": (
        [ran(replace(TENTH, dataset="synthetic"), 10)], {"extrapolated": True, "synthetic": True},
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


def test_a_repeat_that_diverged_is_not_trusted(summed: list[Result]) -> None:
    names = {f"m:n{list(RUNS).index(n)}": n for n in ("a repeat diverged", "a repeat failed")}
    told = {names[row.model]: row.trusted for row in summed if row.model in names}
    assert told == {"a repeat diverged": False, "a repeat failed": True}


def test_memory_is_read_by_one_measure_a_machine(tmp_path: Path) -> None:
    bare = {"peak_device_bytes": None}
    cases = cases_of(tmp_path, ran(FP32, 10, 4 * GIB, **bare), ran(FP16, 10, 4 * GIB, **bare))
    assert {row.memory_measure for row in cases} == {"peak_reserved_bytes"}
    mixed = cases_of(tmp_path / "mixed", ran(FP32, 10, 4 * GIB), ran(FP16, 10, 4 * GIB, **bare))
    assert math.isnan(pick(mixed, FP16).memory_bytes)  # not the allocator's beside the device's
    unknown = ran(FP32, 10, 4 * GIB, executor="x")
    beside = cases_of(tmp_path / "beside", unknown, ran(FP16, 10, 4 * GIB, **bare))
    assert pick(beside, FP16).memory_bytes > 0  # what may be anything is no measure of others


# -------------------------------------------------------------------------------------- doubts


FALLING = (2.3, 2.2, 2.1, 2.05, 2.0)


@pytest.mark.parametrize(
    ("losses", "other", "axis"),
    [
        (FALLING, {"lr": 1.0}, "--lr"),
        (FALLING, {"precision": "bf16"}, "--precision"),
        (FALLING, {"optimizer": "adamw", "lr": 3e-4}, "--optimizer"),
        (FALLING, {"compile": "default"}, ""),  # computes the same
        (FALLING, {"precision": "fp16", "loss_scale": 128.0, "lr": 1.0}, ""),  # differs in two
        (FALLING[:3], {"lr": 1.0}, ""),  # too few to tell
        ((2.0,) * 5, {"lr": 1.0}, ""),  # learns nothing anyway
    ],
)
def test_a_setting_without_effect_is_named(
    losses: tuple[float, ...], other: dict[str, Any], axis: str, tmp_path: Path, capsys: Capture
) -> None:
    """As the lr that a workload's own optimizer ignores."""

    def train(case: Case, losses: Sequence[float], seed: int) -> tuple[Record, list[Step]]:
        values = {"train_loss": sum(losses) / len(losses), "measured_steps": len(losses)}
        row = ran(case, 10, repeat=seed + 1, run_seed=seed, **values)
        return row, [Step(i, 64, loss, None, 0.1) for i, loss in enumerate(losses)]

    steady = [train(replace(FP32, **other), losses[::-1], 1), train(FP32, losses[::-1], 2)]
    for at, rows in enumerate((steady, [*steady, train(FP32, losses, 0)])):
        last = [train(replace(FP32, **other), losses, 0)] if at else []
        folder = write_sweep(tmp_path / str(at), [*rows, *last])
        runs, _ = read_results(read_sweep(folder))
        assert sum(run.without_effect for run in runs) == (2 if at and axis else 0)
        assert report([str(folder)]) == 0
        assert (f"{axis} changed no loss" in capsys.readouterr().out) == bool(at and axis)


def test_settings_of_committed_sweeps_have_effects() -> None:
    """On an H100 and an H200 bf16 and bf16-amp were the same arithmetic, to the last digit."""
    found = [read_sweep(path).read_unaffected() for path in list_committed("steps.csv")]
    assert found == [{}] * len(found)
    assert len(found) > 3


def test_a_fatal_doubt_is_not_trusted(tmp_path: Path) -> None:
    for row in cases_of(tmp_path, *EACH_DOUBT):
        found = [name for name in doubts.DOUBTS if getattr(row, name)]
        assert len(found) == (not row.model.startswith(("m:no_", "m:none", "m:little"))), row.model
        doubted = row.kind == "unknown" or any(doubts.DOUBTS[name].fatal for name in found)
        assert row.trusted == (not doubted), row.model


COMMITTED = [f for f in list_committed("records.csv") if f.name.startswith("nvidia-h100-")]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name[-6:])
def test_isolated_spikes_of_a_card_are_no_trend_and_its_drifts_are(folder: Path) -> None:
    """As recorded: half precision at batch size 128 drifts, 43 → 56 ms; others have spikes."""
    drifts = [run for run in read_results(read_sweep(folder))[0] if run.trend]
    assert {run.batch_size for run in drifts} == {128}
    assert {"fp16"} <= {run.precision for run in drifts} <= {"fp16", "bf16-amp"}


def test_what_noise_explains_of_a_trend_is_two_standard_errors(tmp_path: Path) -> None:
    """Of two medians of ten steps each, whose deviations from theirs are 4 % in the median."""
    noisy = {"step_time_median_s": 0.1, "step_time_mad_s": 0.004, "measured_steps": 40}
    believed = 0.02 + 2 * 1.2533 * 1.4826 * 0.04 * (1 / 10 + 1 / 10) ** 0.5
    for over, trend in ((0.001, True), (-0.001, False)):
        ends = {"step_time_first_s": 0.1, "step_time_last_s": 0.1 * (1 + believed + over)}
        cases = cases_of(tmp_path / str(trend), ran(FP32, 10, **noisy, **ends))
        assert [row.trend for row in cases] == [trend]


@pytest.mark.parametrize(
    ("until", "values", "told"),
    [
        (None, {"epoch_time_low_s": 8.0, "epoch_time_high_s": 12.0}, ""),
        (None, {"epoch_time_low_s": 0.6, "epoch_time_high_s": 90.0}, "not known within 100 %"),
        (0.01, {"epoch_time_error": 0.009}, ""),
        (0.01, {"epoch_time_error": 0.12}, "±12 %"),
        (0.05, {"epoch_time_error": 55.8}, "not known within 100 %"),
        # 400 steps, each bound by the host, in which kernels run for 5 ms
        (
            0.01,
            {"epoch_time_error": 0.17, "busy_s": 0.005},
            "±17 %; the GPU's kernels alone take 2 s",
        ),
    ],
)
def test_an_epoch_that_is_hardly_known_has_no_interval(
    until: float | None, values: dict[str, float], told: str, tmp_path: Path
) -> None:
    steps = {"measured_steps": 40, "steps_per_epoch": 400}
    row = ran(replace(FP32, fraction=0.1, until=until), 10, **values, **steps)
    runs, (case,) = read_results(sweep_of(tmp_path, [row]))
    assert case.unknown == bool(told)
    said = [notice.text for notice in warn(runs, [case]) if "vary too much" in notice.text]
    assert len(said) == bool(told)
    assert all(told in text and "a larger --fraction" in text for text in said)
    shown = case.epoch_time_s_high == case.epoch_time_s_high
    assert shown == ("epoch_time_high_s" in values and not told)


def test_a_whole_epoch_waits_for_the_host_by_the_profile_of_its_part(tmp_path: Path) -> None:
    """Kernels take what they take, however much of an epoch is measured; in another sweep or
    another environment nobody knows. Noise is then the host's: no other program is to blame."""
    steps = {"step_time_median_s": 0.05, "step_time_mad_s": 0.005, "measured_steps": 40}
    part = ran(replace(FP16, fraction=0.1, profile=True), 20, busy_s=0.03, **steps)
    others = [
        ran(FP16, 20, **steps),
        ran(FP16, 12, **{**steps, "step_time_median_s": 0.03}, repeat=2),
        ran(WIDE, 20, **steps),
        ran(FP16, 20, **{**steps, "torch": "2.14"}, repeat=3),
    ]
    elsewhere = [ran(FP16, 20, **steps)]
    runs, _ = read_results(
        sweep_of(tmp_path, [part, *others]), sweep_of(tmp_path, elsewhere, "elsewhere")
    )
    assert [run.busy_share for run in runs[:3]] == pytest.approx([0.6, 0.6, 1.0])
    assert [run.host_bound for run in runs] == [True, True, False, False, False, False]
    noisy, waiting = doubts.DOUBTS["noisy"], doubts.DOUBTS["host_bound"]
    assert all(run.noisy for run in runs)
    assert "(down to 60 %)" in waiting.warn(runs[1:2])
    assert "programs" not in noisy.advise(runs[:2])
    assert "--cuda-graphs on" in noisy.advise(runs[:2])
    assert "; where a step waits for the host, a larger" in noisy.advise(runs[1:3])
    assert "host" not in noisy.advise(runs[3:])


def name_source(model: str, source: str, batch: int = 128) -> Record:
    hashes = ("model_parameters", "model_structure", "model_source")
    return ran(Case(model=model, batch_size=batch), 10, **dict.fromkeys(hashes, source))


LOST = make_record(Case(model="dpn92", batch_size=256), status=Status.ERROR, reason="boom")
TWO_MODELS = [name_source("dpn-small", "aaa"), name_source("dpn92", "bbb")]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ran(FP32, 10), ran(FP16, 10, torch="2.12")], "torch 2.13 or 2.12"),
        (
            [ran(FP32, 10), ran(WIDE, 20, variables="CUDA_LAUNCH_BLOCKING=1")],
            "variables none or CUDA_LAUNCH_BLOCKING=1",
        ),
        ([*TWO_MODELS, LOST], ""),
        ([*TWO_MODELS, name_source("dpn-small", "ccc", 256)], "model source aaa or ccc"),
    ],
)
def test_mixed_environments_are_said(rows: list[Record], said: str, tmp_path: Path) -> None:
    """Two models are none, nor is what failed before it knew its own."""
    runs, results = read_results(sweep_of(tmp_path, rows))
    notices = warn(runs, results)
    told = [notice.text for notice in notices if notice.label == "Mixed environments"]
    assert len(told) == bool(said)
    assert all(said in text for text in told)
    assert {notice.label for notice in notices} <= {"Mixed environments", "No result"}
    if LOST in rows:
        assert [run.model_source for run in runs] == ["aaa", "bbb", "bbb"]


# ------------------------------------------------------------------------------ beside each other


def test_published_figures_stand_beside_what_they_match(tmp_path: Path) -> None:
    reference = read_sweep(REFERENCE)
    wide = Case(precision="fp16", loss_scale=128.0, batch_size=512)
    other_scale = Case(precision="fp16", loss_scale=32.0, batch_size=128)
    strange = Case(model="dpn26", batch_size=256)
    synthetic = Case(dataset="synthetic", precision="fp16", loss_scale=128.0, batch_size=640)
    rows = [ran(c, 10) for c in (FP32, wide, other_scale, strange, synthetic)]
    found = gather([sweep_of(tmp_path, rows)], reference)
    beside = {row.axes: found.find_published(row) for row in found.results}
    times = [one and one.epoch_time_s for one in beside.values()]
    assert sorted(time for time in times if time) == [140.061, 212.328]
    assert len(times) == len(rows)
    itself = gather([reference], reference)
    assert not any(map(itself.find_published, itself.results))


def test_sweeps_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_sweep(tmp_path / lab / "run", [ran(FP32, 10)]) for lab in ("a", "b")]
    assert [sweep.name for sweep in read_sweeps([*paths, paths[0]])] == ["a/run", "b/run"]


_NUMBERS = st.none() | st.sampled_from([0.0, 1.0])


@given(st.lists(st.tuples(st.sampled_from("xy"), _NUMBERS, st.booleans()), min_size=1, max_size=30))
def test_group_numbers_agree_exactly_where_rows_do(
    rows: list[tuple[str, float | None, bool]],
) -> None:
    """Two cells that hold no number agree; and of many rows, which are looked at by columns."""
    import pandas as pd

    few = pd.DataFrame(rows, columns=["a", "b", "c"]).astype({"b": float})
    numbers = number_groups(few, ["a", "b", "c"]).tolist()
    for i, first in enumerate(rows):
        for j, second in enumerate(rows):
            assert (numbers[i] == numbers[j]) == (first == second)
    many = pd.concat([few] * FEWEST, ignore_index=True)
    assert number_groups(many, ["a", "b", "c"]).tolist() == numbers * FEWEST
