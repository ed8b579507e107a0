"""Which runs have a warning, and which only look so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.answers.notices import warn
from bench.results.study import warnings
from bench.results.study.runs import Result
from bench.results.study.sweeps import read_sweep
from bench.schema.axis import axis_flag
from bench.schema.case import Case
from bench.schema.record import Record, Status
from bench.schema.rules import settle
from tests.planted.records import (
    FP16,
    FP32,
    GIB,
    ROOT,
    list_committed,
    make_record,
    measured,
    write_sweep,
)
from tests.planted.results import read_results
from tests.planted.scripts import script
from tests.planted.warnings import WARNED, list_planted

CARD = {"gpu": "A card", "torch": "2.13", "gpu_memory_bytes": 24 * GIB}


def ran(case: Case, time_s: float, **values: Any) -> Record:
    return make_record(case, **{**CARD, **measured(time_s, GIB), **values})


def read(folder: Path, *rows: Record) -> list[Result]:
    return read_results(read_sweep(write_sweep(folder / "sweep", rows)))[1]


def list_warnings(result: Result) -> set[str]:
    return {name for name in warnings.WARNINGS if getattr(result, name)}


def test_every_warning_is_found_where_it_is_planted_and_only_there(tmp_path: Path) -> None:
    """A fatal one is not trusted, nor is what may be anything."""
    folder = write_sweep(tmp_path / "sweep", list_planted(WARNED))
    _, results = read_results(read_sweep(folder))
    for row in results:
        name = list(WARNED)[row.seed]
        found = list_warnings(row)
        assert found == {*WARNED[name].warnings.split()}, name
        fatal = row.kind == "unknown" or any(warnings.WARNINGS[one].fatal for one in found)
        assert row.trusted == (not fatal), name
    assert len(results) == len(WARNED)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("unknown", {"measured_steps": 3, "steps_per_epoch": 30, "measured_images": 192}),
        ("energy", {"energy_j": 50.0, "measured_time_s": 1.0}),
        ("diverged", {"status": Status.DIVERGED}),
    ],
)
def test_what_helps_a_command_is_no_flag_that_it_cannot_take(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    row = ran(script(), 1.0, unit="items", **values)
    runs, results = read_results(read_sweep(write_sweep(tmp_path / "sweep", [row])))
    warning = warnings.WARNINGS[name]
    assert list_warnings(results[0]) >= {name}
    (remedy,) = (n.remedy for n in warn(runs, results) if n.found.startswith(warning.warning))
    assert "the script" in remedy
    for flag in ("--fraction", "--workers", "--lr", "--loss-scale"):
        assert flag not in remedy


def test_isolated_spikes_of_a_card_are_no_trend_and_its_drifts_are() -> None:
    """As recorded: half precision at batch size 128 drifts, 43 → 56 ms; others have spikes."""
    folders = [f for f in list_committed("records.csv") if f.name.startswith("nvidia-h100-")]
    drifts = [run for run in read_results(*map(read_sweep, folders))[0] if warnings.has_trend(run)]
    assert {run.batch_size for run in drifts} == {128}
    assert {"fp16"} <= {run.precision for run in drifts} <= {"fp16", "bf16-amp"}


def test_an_energy_of_seconds_may_be_five_percent_too_low() -> None:
    """Of those of an H200, no whole epoch took more than its part may have; the H100's parts of 2.6
    s are warned, and are known well enough not to lose to fp32's 9 s."""

    def read(card: str) -> list[Any]:
        folder, *_ = sorted((ROOT / "results").glob(f"nvidia-{card}*"))
        return read_results(read_sweep(folder))[0]

    runs = [run for run in read("h200") if run.batch_size > 128]
    least = {warnings.bound_energy(run) for run in runs if run.precision == "fp16" and run.part < 1}
    whole = [run for run in runs if run.precision == "fp16" and run.part >= 1]
    assert not any(run.energy for run in whole)
    assert min(warnings.bound_energy(run) for run in whole) < min(least)
    half = {run.precision: run for run in read("h100-80gb-hbm3-20261122-1130")}
    assert half["fp16"].energy
    assert warnings.bound_energy(half["fp16"]) < warnings.bound_energy(half["fp32"])
    assert warnings.bound_energy(half["fp16"]) == 1.05 * half["fp16"].energy_per_epoch_j


@pytest.mark.parametrize(
    ("until", "values", "warned"),
    [
        (None, {"epoch_time_low_s": 8.0, "epoch_time_high_s": 12.0}, False),
        (None, {"epoch_time_low_s": 0.6, "epoch_time_high_s": 90.0}, True),
        (0.01, {"epoch_time_error": 0.009}, False),
        (0.01, {"epoch_time_error": 0.015}, False),  # which changes no verdict
        (0.01, {"epoch_time_error": 0.12}, True),
    ],
)
def test_an_epoch_that_is_hardly_known_is_noisy_and_has_no_interval(
    until: float | None, values: dict[str, float], warned: bool, tmp_path: Path
) -> None:
    steps = {"measured_steps": 40, "steps_per_epoch": 400}
    row = ran(replace(FP32, fraction=0.1, until=until), 10, **values, **steps)
    (case,) = read(tmp_path, row)
    assert case.noisy is warned
    shown = case.epoch_time_s_high == case.epoch_time_s_high
    assert shown == ("epoch_time_high_s" in values and not warned)


@pytest.mark.parametrize(
    ("step_items", "values", "warned"),
    [
        (64, {}, True),
        (None, {}, False),  # steps of 20 to 100 tokens take other times, without noise
        (None, {"sm_clock_first_mhz": 1980.0, "sm_clock_last_mhz": 1500.0}, True),
        (None, {"epoch_time_low_s": 0.1, "epoch_time_high_s": 9.0}, True),
    ],
)
def test_steps_of_other_numbers_of_items_are_no_noise(
    step_items: int | None, values: dict[str, Any], warned: bool, tmp_path: Path
) -> None:
    steps = {"step_time_median_s": 0.1, "step_time_mad_s": 0.03, "step_time_max_s": 0.3}
    ends = {"step_time_first_s": 0.1, "step_time_last_s": 0.13, "measured_steps": 100}
    items = {"unit": "items", "step_items": step_items, "measured_time_s": 12.0}
    (case,) = read(tmp_path, ran(script(), 1.0, **{**steps, **ends, **items, **values}))
    assert case.noisy is warned
    assert not case.slow_steps


def test_a_whole_epoch_waits_for_the_host_by_the_profile_of_its_part(tmp_path: Path) -> None:
    """Kernels take what they take, however much of an epoch is measured; in another sweep or
    another environment nobody knows."""
    steps = {"step_time_median_s": 0.05, "step_time_mad_s": 0.005, "measured_steps": 40}
    part = ran(replace(FP16, fraction=0.1, profile=True), 20, busy_s=0.03, **steps)
    others = [
        ran(FP16, 20, **steps),
        ran(FP16, 12, **{**steps, "step_time_median_s": 0.03}, repeat=2),
        ran(replace(FP16, batch_size=256), 20, **steps),
        ran(FP16, 20, **{**steps, "torch": "2.14"}, repeat=3),
    ]
    elsewhere = [ran(FP16, 20, **steps)]
    runs, _ = read_results(
        read_sweep(write_sweep(tmp_path / "sweep", [part, *others])),
        read_sweep(write_sweep(tmp_path / "elsewhere", elsewhere)),
    )
    assert [run.busy_share for run in runs[:3]] == pytest.approx([0.6, 0.6, 1.0])
    assert [run.host_bound for run in runs] == [True, True, False, False, False, False]


def name_source(model: str, source: str, batch: int = 128) -> Record:
    hashes = ("model_parameters", "model_structure", "model_source")
    return ran(Case(model=model, batch_size=batch), 10, **dict.fromkeys(hashes, source))


LOST = make_record(Case(model="dpn92", batch_size=256), status=Status.ERROR, reason="boom")
TWO_MODELS = [name_source("dpn-small", "aaa"), name_source("dpn92", "bbb")]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([ran(FP32, 10), ran(FP16, 10, torch="2.12")], "torch 2.13 or 2.12"),
        ([*TWO_MODELS, LOST], ""),
        ([*TWO_MODELS, name_source("dpn-small", "ccc", 256)], "model source aaa or ccc"),
    ],
)
def test_mixed_environments_are_said(rows: list[Record], expected: str, tmp_path: Path) -> None:
    """Two models are none, nor is what failed before it knew its own."""
    runs, results = read_results(read_sweep(write_sweep(tmp_path / "sweep", rows)))
    notices = warn(runs, results)
    texts = [notice.text for notice in notices if notice.label == "Mixed environments"]
    assert len(texts) == bool(expected)
    assert all(expected in text for text in texts)
    assert {notice.label for notice in notices} <= {"Mixed environments", "No result"}
    if LOST in rows:
        assert [run.model_source for run in runs] == ["aaa", "bbb", "bbb"]


def test_a_run_that_failed_after_a_few_steps_has_no_time_to_warn_of(tmp_path: Path) -> None:
    values = {"step_time_median_s": 0.1, "step_time_mad_s": 0.02}
    values |= {"measured_steps": 2, "steps_per_epoch": 391}
    case = replace(FP32, steps=2)
    rows = [
        make_record(case, status=status, reason="boom", **values)
        for status in (Status.OK, Status.ERROR)
    ]
    runs, _ = read_results(read_sweep(write_sweep(tmp_path / "sweep", rows)))
    assert [(run.noisy, run.unknown) for run in runs] == [(True, True), (False, False)]


GRAPHED = {"busy_s": 0.034, "step_time_median_s": 0.045}
SHAKY = {"step_time_median_s": 0.1, "step_time_mad_s": 0.006, "measured_steps": 40}
ALONE = {"other_cores": 0.02}
SHORT = {"energy_j": 100.0, "measured_time_s": 3.0, "steps_per_epoch": 400}
FEW = {"measured_steps": 3, "steps_per_epoch": 100, "measured_images": 384, "train_images": 12_800}
AHEAD = FEW | {"measured_steps": 5}
NAN = {"status": Status.DIVERGED}
BEYOND = {"flop_per_image": 1e12, "gpu": "NVIDIA H200"}


@pytest.mark.parametrize(
    ("warning", "axes", "values", "expected"),
    [
        ("noisy", {}, SHAKY, "Close other programs, or use --repeats 5 or more."),
        ("noisy", {}, SHAKY | ALONE, "Use --repeats 5 or more."),
        ("noisy", {"command": "t"}, SHAKY | ALONE, "Use --repeats 5 or more."),
        ("energy", {"fraction": 0.1, "steps": 9}, SHORT, "Use a larger --steps."),
        ("energy", {"fraction": 0.1}, SHORT, "Use a larger --fraction."),
        ("energy", {"fraction": 0.1, "until": 0.05}, SHORT | {"measured_steps": 30},
         "Use a larger --fraction without --until."),
        # it ended before its interval was as narrow as asked
        ("energy", {"steps": 12, "until": 0.05}, SHORT | {"measured_steps": 12},
         "Use a larger --steps."),
        ("energy", {"fraction": 0.1, "until": 0.05}, SHORT | {"measured_steps": 40},
         "Use a larger --fraction without --until."),
        ("energy", {"steps": 12, "until": 0.05}, SHORT | {"measured_steps": 9}, "Use no --until."),
        ("energy", {}, SHORT, "Use its energy as a lower bound, where a whole epoch takes no "),
        ("energy", {"command": "t"}, SHORT, "Let the script take more steps."),
        ("energy", {"command": "t", "steps": 9}, SHORT, "Use a larger --steps."),
        ("unknown", {"loader": "torch", "workers": 4, "fraction": 0.1}, AHEAD,
         "Use a larger --fraction or fewer --workers."),
        # of three steps no number of workers is the fault
        ("unknown", {"loader": "torch", "workers": 4, "fraction": 0.1}, FEW,
         "Use a larger --fraction."),
        ("unclear", {"command": "t"}, {"switched_within": "cudnn.benchmark=True"},
         "For a --command, bench.report --full says which of these it is."),
        ("unknown", {"command": "t"}, FEW, "Let the script take more steps."),
        ("unknown", {"command": "t -w {workers}", "loader": "torch", "workers": 4}, AHEAD,
         "Use fewer --workers."),
        ("diverged", {"precision": "fp16", "loss_scale": 128.0}, NAN,
         "Use a lower --lr or --loss-scale dynamic."),
        ("diverged", {"precision": "fp16", "loss_scale": "dynamic"}, NAN, "Use a lower --lr."),
        ("diverged", {"precision": "bf16"}, NAN, "Use a lower --lr."),
        ("diverged", {"command": "t"}, NAN, "Let the script use a lower learning rate."),
        ("diverged", {"command": "t --lr {lr}"}, NAN, "Use a lower --lr."),
        ("host_bound", {}, GRAPHED,
         "Use a larger --batch-size, --cuda-graphs on or --compile; python -m bench.why shows"),
        ("host_bound", {"profile": True, "compile": "default"}, GRAPHED,
         "Use a larger --batch-size or --cuda-graphs on; python"),
        # that scale is kept on the host
        ("host_bound", {"precision": "fp16", "loss_scale": "dynamic"}, GRAPHED,
         "Use a larger --batch-size or --compile; python"),
        ("host_bound", {"parallel": "ddp"}, GRAPHED, "Use a larger --batch-size or --compile; "),
        ("synthetic", {"dataset": "synthetic"}, {}, "Use --dataset cifar10 without --input and --"),
        ("synthetic", {"model": "gpt-tiny"}, {}, "Use a --workload of your own."),
        ("beyond", {}, BEYOND, "Use a larger --batch-size, and check the times: in a checkout"),
        ("beyond", {"command": "t {batch_size}"}, BEYOND, "Look whether the script calls bench."),
    ],
)  # fmt: skip
def test_a_remedy_is_one_that_the_row_can_take(
    warning: str, axes: dict[str, Any], values: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """A script takes what it has a place for; what a row has already, or cannot go with it, is no
    remedy."""
    case = settle({"batch_size": 128, **axes})
    folder = write_sweep(tmp_path / "sweep", [ran(case, 10, **values)])
    (run,), _ = read_results(read_sweep(folder))
    assert getattr(run, warning)
    assert warnings.WARNINGS[warning].fix.advise([run]).startswith(expected)


@pytest.mark.parametrize(
    ("repeats", "values", "expected"),
    [
        (4, ALONE, "Use --repeats 5 or more."),
        (5, ALONE, "Rely on the interval over the repeats."),
        (5, {"other_cores": 0.9}, "Close other programs."),
    ],
)
def test_a_remedy_is_none_that_was_taken(
    repeats: int, values: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    rows = [ran(Case(), 10, repeat=n + 1, **SHAKY, **values) for n in range(repeats)]
    found, results = read_results(read_sweep(write_sweep(tmp_path / "sweep", rows)))
    for noisy in (found, results):
        assert warnings.WARNINGS["noisy"].fix.advise(noisy) == expected


PART = {"fraction": 0.1}
EARLY = {"fraction": 0.5, "until": 0.05}
LONG = {**SHORT, "measured_time_s": 8.0}
CASUAL = {"loader": "torch", "workers": 4, **PART}
TRANSPOSED = {"epoch_recompilations": 2}


@pytest.mark.parametrize(
    ("warning", "axes", "values", "then", "measured"),
    [
        ("energy", PART, SHORT, {"fraction": 0.5}, LONG),
        ("energy", {"steps": 9}, SHORT, {"steps": 30}, LONG),
        ("energy", EARLY, SHORT | {"measured_steps": 30}, {"fraction": 1.0, "until": None}, LONG),
        ("energy", {"until": 0.05}, SHORT | {"measured_steps": 30}, {"until": None}, LONG),
        ("unknown", PART, FEW, {"fraction": 0.2}, FEW | {"measured_steps": 20}),
        ("unknown", CASUAL, AHEAD, {"workers": 0}, AHEAD),
        ("unknown", CASUAL, AHEAD, {"fraction": 0.2}, FEW | {"measured_steps": 20}),
        ("diverged", {}, NAN, {"lr": 0.01}, {}),
        ("host_bound", {}, GRAPHED, {"batch_size": 256}, {**GRAPHED, "busy_s": 0.044}),
        ("recompiled", {"compile": "default"}, TRANSPOSED, {"dynamic": True}, {}),
        ("extrapolated", PART, {"measured_steps": 40}, {"fraction": 1.0}, {}),
        ("synthetic", {"dataset": "synthetic"}, {}, {"dataset": "cifar10"}, {}),
        ("emulated", {"precision": "fp8", "device": "cpu"}, {"gpu": ""}, {"device": "cuda"}, {}),
    ],
)
def test_a_warning_goes_by_what_is_told_to_help(
    warning: str,
    axes: dict[str, Any],
    values: dict[str, Any],
    then: dict[str, Any],
    measured: dict[str, Any],
    tmp_path: Path,
) -> None:
    """By the flags that its remedy names, and no others."""
    cases = [(settle({"batch_size": 128, **axes}), values)]
    cases.append((settle({"batch_size": 128, **axes, **then}), measured))
    before, after = (
        read(tmp_path / str(number), ran(case, 10, **known))[0]
        for number, (case, known) in enumerate(cases)
    )
    assert (getattr(before, warning), getattr(after, warning)) == (True, False)
    remedy = warnings.WARNINGS[warning].fix.advise([before])
    words = [axis_flag(name) if name != "device" else "on a GPU" for name in then]
    assert [word for word in words if word not in remedy] == []


def test_of_repeats_that_are_enough_no_more_are_asked_for(tmp_path: Path) -> None:
    for repeats, remedy in ((2, "range, or use --repeats 5 or more."), (5, "end of its range.")):
        rows = [ran(Case(), 10, repeat=n + 1) for n in range(repeats - 1)]
        rows.append(ran(Case(), 10, **measured(10, 2 * GIB), repeat=repeats))
        runs, _ = read_results(read_sweep(write_sweep(tmp_path / f"{repeats}", rows)))
        assert all(run.memory_varies for run in runs)
        assert remedy in warnings.WARNINGS["memory_varies"].fix.advise(runs)


def test_a_remedy_for_some_rows_and_another_for_others_are_both_said(tmp_path: Path) -> None:
    rows = [ran(settle(axes), 10, **NAN) for axes in ({}, {"command": "t", "batch_size": 128})]
    runs, _ = read_results(read_sweep(write_sweep(tmp_path / "sweep", rows)))
    assert warnings.WARNINGS["diverged"].fix.advise(runs) == (
        "Use a lower --lr. Let the script use a lower learning rate."
    )


def test_a_script_on_a_cpu_that_is_labelled_fp8_was_not_emulated(tmp_path: Path) -> None:
    case = settle({"command": "t {precision}", "precision": "fp8", "device": "cpu"})
    (row,) = read(tmp_path, ran(case, 10, gpu="", cpu="A CPU"))
    assert list_warnings(row) == {"unproven"}
