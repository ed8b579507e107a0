"""Each claim of a folder of results, at the bounds from which its rows contradict it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.schema.case import Case
from bench.schema.record import EpochRow, Step, WorkRow
from bench.schema.work import WorkKind
from bench.validate import claims
from bench.validate.claims import CIFAR10, FLOP_PER_IMAGE, KNOWN_FAULTS, validate
from tests.planted.records import GIB, Row, make_record, write_sweep
from tests.pytest_for_tests import Patch

H100 = "NVIDIA H100 80GB HBM3"
FLOP = FLOP_PER_IMAGE["dpn92", None, None]
PLAIN = Case(device="cuda", dataset="synthetic", batch_size=128)
CIFAR = replace(PLAIN, dataset="cifar10")
SCRIPT = replace(PLAIN, command="python train.py")
CPU = replace(PLAIN, device="cpu")
TWO_GPUS = {"case": replace(PLAIN, batch_size=64, world_size=2, parallel="ddp"),
            "power_limit_w": 1400.0}  # fmt: skip
STEPS = [Step(n, 128, 2.0, 64, 0.1) for n in range(10)]
WORK = [WorkRow(WorkKind.CONVOLUTION, "3x3", "float32", 9, 128.0 * FLOP, 1e9, 0.08, 0.08)]
HONEST: dict[str, Any] = {
    # an epoch of ten steps of 0.1 s on a card that is known, of which all is consistent
    "gpu": H100, "capability": "9.0", "gpu_memory_bytes": int(79.6 * GIB), "mig": "off",
    "commit": "abc", "code": "def", "rate_float32": 50e12, "rate_copy": 3e12,
    "sm_clock_mhz": 1900.0, "sm_clock_first_mhz": 1900.0, "sm_clock_last_mhz": 1900.0,
    "dataset_fingerprint": "feed", "train_images": 1280, "test_images": 10_000,
    "setup_time_s": 20.0, "warmup_time_s": 10.0, "measured_time_s": 1.0, "epoch_time_s": 1.0,
    "measured_steps": 10, "measured_images": 1280, "images_per_s": 1280.0,
    "step_time_median_s": 0.1, "step_time_p95_s": 0.1, "step_time_mad_s": 0.0,
    "step_time_max_s": 0.1, "step_time_first_s": 0.1, "step_time_last_s": 0.1,
    "train_loss": 2.0, "train_accuracy": 0.5, "flop_per_image": FLOP, "step_bytes": 1e9,
    "energy_j": 400.0, "mean_power_w": 400.0, "power_limit_w": 700.0,
    "peak_allocated_bytes": 4 * GIB, "peak_reserved_bytes": 5 * GIB,
    "peak_process_bytes": 6 * GIB, "peak_device_bytes": 6 * GIB, "baseline_device_bytes": GIB,
    "busy_s": 0.08, "profiled_step_s": 0.1, "input_wait_s": 0.01, "sync_wait_s": 0.005,
    "arithmetic": "float32", "flags": "matmul=ieee conv=ieee cudnn=on",
    "started_at": "2026-11-20T10:00:00+00:00", "finished_at": "2026-11-20T10:01:00+00:00",
}  # fmt: skip


def make(
    case: Case = PLAIN,
    steps: Sequence[Step] = STEPS,
    epochs: Sequence[EpochRow] = (),
    work: Sequence[WorkRow] = WORK,
    **values: Any,
) -> Row:
    return make_record(case, **{**HONEST, **values}), [*steps], [*epochs], [*work]


def again(number: int, scale: float = 1.001, case: Case = PLAIN, **values: Any) -> Row:
    """Another repeat, with times of its own, after those before it."""
    steps = [replace(step, time_s=0.1 * scale, loss=2.0 + number / 100) for step in STEPS]
    stats = {name: 0.1 * scale for name in HONEST if name.startswith("step_time")}
    own = {**stats, "step_time_mad_s": 0.0, "measured_time_s": scale, "epoch_time_s": scale}
    own |= {"images_per_s": 1280 / scale, "energy_j": 400 * scale, "train_loss": 2 + number / 100}
    hour = f"2026-11-20T1{number}"
    moments = {"started_at": f"{hour}:00:00+00:00", "finished_at": f"{hour}:01:00+00:00"}
    return make(case, **{"repeat": number, "steps": steps, **own, **moments, **values})


def find_faults(folder: Path, rows: Sequence[Row]) -> dict[str, list[str]]:
    path = write_sweep(folder / "sweep", rows)
    return {check["name"]: check["faults"] for check in validate(path)["checks"]}


def scaled(column: str, factor: float) -> dict[str, Any]:
    return {column: HONEST[column] * factor}


def slower(*times: float) -> list[Step]:
    return [replace(step, time_s=time) for step, time in zip(STEPS, times, strict=False)]


def changed(**values: Any) -> list[Step]:
    """The steps, the last of which is another."""
    return [*STEPS[:-1], replace(STEPS[-1], **values)]


PROFILED = {"busy_s": 0.09, "work": [replace(WORK[0], exclusive_s=0.09)]}
TENTH = replace(PLAIN, fraction=0.1)
PART = {"train_images": 12_800, "epoch_time_s": 10.0, "images_per_s": 1280.0}
SCRIPTED = {"train_images": 2560, "epoch_time_s": 2.0}  # twice what was measured
UNLIKE = [replace(step, images=64 + 128 * (n % 2)) for n, step in enumerate(STEPS)]
LEARNT = EpochRow(0, 1.0, 2.0, 0.5, 1.8, 0.6)
SEEN = {"test_loss": 1.8, "test_accuracy": 0.6}
TF32 = replace(PLAIN, precision="tf32")

BOUNDS: list[tuple[str, str, dict[str, Any]]] = [
    # a claim, what is found, nothing where that is empty, and what is not as in `HONEST`
    ("rates", "", {"rate_float32": 67e12, "rate_copy": 3.35e12}),
    ("rates", "rate_float32 is 6.71e+13", {"rate_float32": 67.1e12}),
    ("rates", "rate_copy is 3.36e+12", {"rate_copy": 3.36e12}),
    ("rates", "", {"rate_float32": 67.1e12, "gpu": "A card"}),
    ("card", "not 9.1", {"capability": "9.1"}),
    ("card", "", {"capability": ""}),
    ("card", "", {"gpu_memory_bytes": int(0.881 * 80 * GIB)}),
    ("card", "and the row 70.3", {"gpu_memory_bytes": int(0.879 * 80 * GIB)}),
    ("card", "", {"gpu_memory_bytes": int(1.019 * 80 * GIB)}),
    ("card", "and the row 81.7", {"gpu_memory_bytes": int(1.021 * 80 * GIB)}),
    ("card", "", {"gpu_memory_bytes": 10 * GIB, "mig": "on"}),
    ("card", "", {"gpu_memory_bytes": None}),
    ("card", "", {"sm_clock_mhz": 1.0049 * 1980}),
    ("card", "sm_clock_mhz is 1990", {"sm_clock_mhz": 1.0051 * 1980}),
    ("card", "sm_clock_first_mhz is 1990", {"sm_clock_first_mhz": 1.0051 * 1980}),
    ("card", "sm_clock_last_mhz is 1990", {"sm_clock_last_mhz": 1.0051 * 1980}),
    ("speed", "", {"flop_per_image": 0.99 * 67e12 / 1280}),
    ("speed", "1.01 times the FLOP/s", {"flop_per_image": 1.01 * 67e12 / 1280}),
    ("speed", "", {"step_bytes": 0.99 * 3.35e11}),
    ("speed", "1.01 times the bytes/s", {"step_bytes": 1.01 * 3.35e11}),
    ("speed", "", {"case": replace(PLAIN, compile="default"), "step_bytes": 1.01 * 3.35e11}),
    ("energy", "", {"mean_power_w": 419.0}),
    ("energy", "its energy over its time is 400 W", {"mean_power_w": 422.0}),
    ("energy", "its mean power 379 W", {"mean_power_w": 379.0}),
    ("energy", "", {"mean_power_w": 403.0, "measured_time_s": 20.0, "energy_j": 8000.0}),
    ("energy", "its energy", {"mean_power_w": 405.0, "measured_time_s": 20.0, "energy_j": 8e3}),
    ("energy", "", {"mean_power_w": None}),
    ("energy", "", {"measured_time_s": 0.0}),  # which its steps contradict
    # of two GPUs of 700 W each, as a row has it: the sum, like its energy and its power
    ("energy", "", {**TWO_GPUS, "mean_power_w": 1400.0, "energy_j": 1400.0}),
    ("energy", "1500 W on average, and the limit was 1400",
     {**TWO_GPUS, "mean_power_w": 1500.0, "energy_j": 1500.0}),
    ("energy", "", {"energy_j": None, "mean_power_w": 9000.0}),
    ("energy", "", {"mean_power_w": 734.0, "energy_j": 734.0}),
    ("energy", "736 W on average, and the limit was 700", {"mean_power_w": 736.0, "energy_j": 736}),
    ("energy", "", {"mean_power_w": 736.0, "energy_j": 736.0, "power_limit_w": None}),
    ("memory", "peak_allocated_bytes is", {"peak_allocated_bytes": 5 * GIB + 1}),
    ("memory", "", {"peak_allocated_bytes": 5 * GIB}),
    ("memory", "peak_reserved_bytes is", {"peak_reserved_bytes": 6 * GIB + 1}),
    ("memory", "peak_allocated_bytes is",
     {"peak_allocated_bytes": 7 * GIB, "peak_reserved_bytes": None}),
    ("memory", "peak_process_bytes is", {"peak_process_bytes": 80 * GIB}),
    ("memory", "", {"case": CPU, "peak_allocated_bytes": 9 * GIB, "gpu": "", "flags": ""}),
    ("memory", "", {"peak_device_bytes": int(78.6 * GIB)}),
    ("memory", "bytes of the device were in use", {"peak_device_bytes": int(78.7 * GIB)}),
    ("memory", "", {"peak_device_bytes": int(78.7 * GIB), "gpu_memory_bytes": None}),
    ("memory", "", {"peak_device_bytes": 5 * GIB}),
    ("memory", "the process alone held", {"peak_device_bytes": 5 * GIB - 1}),
    ("memory", "", {"peak_device_bytes": 5 * GIB - 1, "baseline_device_bytes": None}),
    ("steps", "", {}),
    ("steps", "steps.csv has none of its steps", {"steps": []}),
    ("steps", "and together 0 s", {"measured_time_s": 0.0}),
    ("steps", "10 steps of 0 images", {"steps": [replace(s, images=0) for s in STEPS]}),
    ("steps", "", {"steps": [], "measured_steps": None}),
    ("steps", "measured_time_s is empty", {"measured_time_s": None}),
    ("steps", "10 steps of 1280 images, the row 11 of 1280", {"measured_steps": 11}),
    ("steps", "10 steps of 1280 images, the row 10 of 1281", {"measured_images": 1281}),
    ("steps", "", {"measured_time_s": 1.0349}),
    ("steps", "its steps take 1 s, and together 1.036 s", {"measured_time_s": 1.0355}),
    ("steps", "", {"measured_time_s": 0.9951}),
    ("steps", "and together 0.9949 s", {"measured_time_s": 0.9949}),
    ("steps", "", {"case": replace(PLAIN, epochs=2), "measured_time_s": 1.0649}),
    ("steps", "and together 1.065", {"case": replace(PLAIN, epochs=2), "measured_time_s": 1.0655}),
    *[("steps", f"{name} is", scaled(name, 1 + 2e-6)) for name in HONEST
      if name.startswith("step_time") and HONEST[name]],
    *[("steps", "", scaled(name, 1 + 5e-7)) for name in HONEST if name.startswith("step_time")],
    ("steps", "step_time_mad_s is", {"step_time_mad_s": 1e-9}),
    ("steps", "", {"step_time_mad_s": 1e-13}),  # a sum in another order
    ("steps", "its steps are of 128 images, and its batches of 256",
     {"case": replace(PLAIN, batch_size=256)}),
    ("steps", "", {"case": replace(PLAIN, batch_size=2048), "train_images": 128}),
    ("steps", "", {"case": replace(PLAIN, batch_size=64, world_size=2, parallel="ddp")}),
    ("steps", "", {"case": replace(SCRIPT, batch_size=256)}),
    # a smaller last step is not of the ends
    ("steps", "", {"steps": changed(images=1, time_s=0.01), "measured_images": 1153,
                   "measured_time_s": 0.91}),
    ("steps", "step_time_last_s is 0.1, not 0.2",
     {"steps": slower(*[0.1] * 5, *[0.2] * 5), "measured_time_s": 1.5,
      "step_time_median_s": 0.15, "step_time_p95_s": 0.2, "step_time_max_s": 0.2,
      "step_time_mad_s": 0.05}),
    ("steps", "", {"case": SCRIPT, "steps": slower(*[0.1] * 5, *[0.2] * 5),
                   "measured_time_s": 1.5, "step_time_median_s": 0.15, "step_time_p95_s": 0.2,
                   "step_time_max_s": 0.2, "step_time_mad_s": 0.05}),
    ("epoch", "", {"images_per_s": 1280 * (1 + 5e-7)}),
    ("epoch", "and an epoch has 1280", {"images_per_s": 1280 * (1 + 2e-6)}),
    ("epoch", "", {"epoch_time_low_s": 1.0, "epoch_time_high_s": 1.0}),
    ("epoch", "outside its interval", {"epoch_time_low_s": 1.01, "epoch_time_high_s": 1.1}),
    ("epoch", "outside its interval", {"epoch_time_low_s": 0.9, "epoch_time_high_s": 0.99}),
    ("epoch", "", {"epoch_time_low_s": 0.9, "epoch_time_high_s": 1.1}),
    ("epoch", "and was measured in 1 s", {"epoch_time_s": 1 + 2e-6, "images_per_s": None}),
    ("epoch", "", {"epoch_time_s": 1 + 5e-7, "images_per_s": None}),
    ("epoch", "was measured in", {"epoch_time_s": 0.9, "images_per_s": None,
                                  "measured_images": None}),
    ("epoch", "", {**SCRIPTED, "case": SCRIPT}),
    ("epoch", "and an epoch has 640", {"train_images": 640, "case": SCRIPT}),
    ("epoch", "and was measured in 0.5 s",
     {"train_images": 640, "images_per_s": 640.0, "case": SCRIPT}),
    ("epoch", "", {**PART, "steps": UNLIKE, "case": SCRIPT}),
    ("epoch", "and 10 by its steps",
     {**PART, "steps": UNLIKE, "case": SCRIPT, "epoch_time_s": 10.1, "images_per_s": None}),
    ("epoch", "was measured in", {"inferred": True, "epoch_time_s": 0.9, "images_per_s": None}),
    ("epoch", "", {"epoch_time_s": 0.9, "images_per_s": None, "measured_time_s": None}),
    ("epoch", "", {"case": replace(PLAIN, epochs=2), "epoch_time_s": 0.5,
                   "images_per_s": 2560.0}),
    ("epoch", "was measured in 0.5 s", {"case": replace(PLAIN, epochs=2)}),
    ("epoch", "", {"case": replace(PLAIN, epochs=3), "truncated_after": 1}),
    ("epoch", "", {**PART, "case": TENTH}),
    ("epoch", "", {**PART, "case": TENTH, "steps_per_epoch": 100}),
    ("epoch", "", {**PART, "case": TENTH, "steps_per_epoch": 91}),
    ("epoch", "10 steps were measured, and its setting says 100",
     {**PART, "steps_per_epoch": 100}),
    ("epoch", "and its setting says 9", {**PART, "case": TENTH, "steps_per_epoch": 90}),
    ("epoch", "", {**PART, "case": replace(PLAIN, steps=10), "steps_per_epoch": 100}),
    ("epoch", "and its setting says 11",
     {**PART, "case": replace(PLAIN, steps=11), "steps_per_epoch": 100}),
    ("epoch", "", {**PART, "case": replace(PLAIN, until=0.1), "steps_per_epoch": 100}),
    ("epoch", "and its setting says 9",
     {**PART, "case": replace(TENTH, until=0.1), "steps_per_epoch": 90}),
    ("epoch", "", {"case": replace(PLAIN, epochs=2), "epoch_time_s": 0.5, "images_per_s": 2560.0,
                   "steps_per_epoch": 5}),
    ("epoch", "",
     {**PART, "case": replace(TENTH, batch_size=64, world_size=2, parallel="ddp")}),
    ("epoch", "", {**PART, "case": TENTH, "epoch_time_s": 10.019, "images_per_s": None}),
    ("epoch", "and 10 by its steps",
     {**PART, "case": TENTH, "epoch_time_s": 10.021, "images_per_s": None}),
    ("epoch", "", {**PART, "case": TENTH, "steps": slower(1.0, *[0.1] * 9),
                   "measured_time_s": 1.9, "epoch_time_s": 10.9, "images_per_s": None}),
    ("epoch", "", {**PART, "case": replace(TENTH, loader="torch"), "epoch_time_s": 11.0,
                   "images_per_s": None}),
    ("learning", "", {"train_loss": 2 * (1 + 5e-6), "train_accuracy": 0.5 * (1 + 5e-6)}),
    ("learning", "its loss is", {"train_loss": 2 * (1 + 2e-5)}),
    ("learning", "its accuracy is", {"train_accuracy": 0.5 * (1 + 2e-5)}),
    ("learning", "", {"train_accuracy": 0.4, "steps": changed(correct=None)}),
    ("learning", "", {"train_loss": None, "train_accuracy": None}),
    ("learning", "", {"steps": [replace(s, images=0) for s in STEPS]}),
    ("learning", "", {"train_accuracy": 0.0, "steps": [replace(s, correct=0) for s in STEPS]}),
    ("learning", "", {"train_loss": 2.1, "case": replace(PLAIN, epochs=2)}),
    ("learning", "", {"train_loss": 2.1, "case": SCRIPT}),
    ("learning", "", {"train_loss": 2.1, "status": "diverged"}),
    ("learning", "", {"train_loss": 1.8, "steps": changed(loss=None)}),
    ("learning", "its loss is 2.0000, and 2.1000 by its steps", {"steps": changed(loss=3.0)}),
    ("learning", "", {**SEEN, "epochs": [LEARNT]}),
    ("learning", "", {**SEEN, "epochs": [replace(LEARNT, train_loss=3.0), LEARNT]}),
    ("learning", "", {"epochs": [LEARNT]}),
    *[("learning", f"{name} is", {**SEEN, "epochs": [replace(LEARNT, **{name: 0.7})]})
      for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy")],
    ("learning", "", {**SEEN, "epochs": [replace(LEARNT, test_loss=1.8 * (1 + 5e-7))]}),
    ("work", "FLOP an image, not 1.2251e+10", {"flop_per_image": FLOP * 2, "work": []}),
    ("work", "", {"flop_per_image": FLOP * 2, "work": [], "case": replace(PLAIN, classes=7)}),
    ("work", "flop_per_image is not what", {"work": [replace(WORK[0], flop=FLOP * 127.9)]}),
    ("work", "step_bytes is not what", {"work": [replace(WORK[0], bytes=0.99e9)]}),
    ("work", "", {"work": [replace(WORK[0], bytes=None, flop=None)]}),
    ("work", "", {"work": [replace(WORK[0], flop=1.5 * FLOP * 128)],
                  "recomputed_flop_per_image": FLOP / 2}),
    ("work", "", {"work": [replace(WORK[0], bytes=7.0, flop=7.0)], "case": SCRIPT}),
    ("profile", "", PROFILED | {"sync_wait_s": None}),
    ("profile", "its kernels and waits take 0.1001 s", PROFILED | {"sync_wait_s": 1e-4}),
    ("profile", "", PROFILED | {"sync_wait_s": 1e-4, "profiled_step_s": None}),
    ("profile", "", {"busy_s": 0.08 * 1.004}),
    ("profile", "and 0.08 by its operations", {"busy_s": 0.08 * 1.006}),
    ("profile", "", {"busy_s": 0.085, "work": [replace(WORK[0], exclusive_s=None)]}),
    ("profile", "", {"step_time_median_s": 0.08 / 1.09}),
    ("profile", "and its kernels alone take 0.08 s", {"step_time_median_s": 0.08 / 1.11}),
    ("profile", "", {"step_time_median_s": 0.07, "case": CPU, "gpu": ""}),
    ("profile", "", {"step_time_median_s": None}),
    ("proof", "fp32 rounds to float32, and what ran is float16", {"arithmetic": "float16"}),
    ("proof", "what ran is float32/float16", {"arithmetic": "float32/float16"}),
    ("proof", "what ran is float32/float31", {"arithmetic": "float32/float31"}),
    ("proof", "", {"arithmetic": "float16", "status": "diverged"}),
    ("proof", "", {"arithmetic": ""}),
    ("proof", "", {"case": replace(PLAIN, precision="fp16-apex", opt_level="O0"), "flags": ""}),
    ("proof", "", {"arithmetic": "unclear"}),
    ("proof", "", {"case": TF32, "arithmetic": "tfloat32/float32", "flags": "matmul=tf32"}),
    ("proof", "tf32 rounds to tfloat32", {"case": TF32, "arithmetic": "float32", "flags": ""}),
    ("proof", "fp32 sets matmul=ieee, and the worker read matmul=tf32", {"flags": "matmul=tf32"}),
    ("proof", "fp32 sets conv=ieee", {"flags": "matmul=ieee conv=tf32"}),
    ("proof", "tf32 sets conv=tf32", {"case": TF32, "arithmetic": "tfloat32",
                                      "flags": "matmul=tf32 conv=ieee"}),
    ("proof", "", {"flags": "matmul=tf32", "switched_within": "matmul"}),
    ("proof", "", {"flags": "matmul=tf32", "case": SCRIPT}),
    ("proof", "", {"flags": "matmul=tf32", "case": CPU, "gpu": ""}),
    ("proof", "", {"flags": "matmul=tf32", "arithmetic": "bfloat16",
                   "case": replace(PLAIN, precision="bf16")}),
    ("data", "dataset_fingerprint is feed", {"case": CIFAR}),
    ("data", "test_images is 9999", {"case": CIFAR, "test_images": 9999}),
    ("data", "train_images is 1280", {"case": CIFAR}),
    ("data", "", {"case": CIFAR, **CIFAR10, "test_images": None}),
    ("data", "", {"case": replace(CIFAR, input="3x64x64")}),
    ("data", "", {}),
    ("order", "", {"finished_at": "2026-11-20T10:00:30.100+00:00"}),
    ("order", "ran for 29.5 s, and its phases took 31 s",
     {"finished_at": "2026-11-20T10:00:29.500+00:00"}),
    ("order", "", {"finished_at": "2026-11-20T10:00:29.500+00:00", "warmup_time_s": None}),
    ("order", "", {"finished_at": "2026-11-20T10:00:05+00:00", "resumed_epochs": 1}),
    ("order", "", {"rates_at": "2026-11-20T10:00:59+00:00"}),
    ("order", "does not say when it started", {"started_at": ""}),
    ("order", "ran for 5 s", {"finished_at": "2026-11-20T10:00:05+00:00", "resumed_epochs": 0}),
    ("order", "does not say when it started", {"finished_at": "yesterday"}),
    ("order", "", {"finished_at": "", "inferred": True}),
    ("order", "", {"finished_at": "2026-11-20T10:00:29.500+00:00", "inferred": True}),
    ("order", "before the rates of its machine were known",
     {"rates_at": "2026-11-20T10:01:01+00:00"}),
    ("code", "measured by abc+dirty", {"commit": "abc+dirty"}),
    ("code", "do not say which commit", {"commit": ""}),
    ("code", "", {}),
    ("plan", "uses what row other found, not there", {"shared": "work: other"}),
    ("plan", "tells no epoch_time_s, energy_j, nor why",
     {"epoch_time_s": None, "energy_j": None}),
    ("plan", "tells no epoch_time_s, nor why", {"epoch_time_s": -1.0}),
    ("plan", "tells no peak_process_bytes, nor why", {"peak_process_bytes": 0}),
    ("plan", "", {"energy_j": None, "missing": "energy_j: no sensor"}),
    ("plan", "tells no energy_j, nor why", {"energy_j": None, "missing": "mean_power_w: x"}),
    ("plan", "", {"energy_j": None, "status": "invalid"}),
    ("plan", "", {"train_loss": -1.0}),
    ("plan", "tells no train_loss, nor why", {"train_loss": None}),
    ("plan", "", {"train_loss": None, "case": SCRIPT}),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "why", "values"), BOUNDS)
def test_a_row_contradicts_a_claim_from_a_bound_on(
    claim: str, why: str, values: dict[str, Any], tmp_path: Path
) -> None:
    faults = find_faults(tmp_path, [make(**values)])[claim]
    assert (bool(faults), why in " ".join(faults)) == (bool(why), True), faults


def at(start: str, end: str) -> dict[str, str]:
    """Times of day, of that hour."""
    day = "2026-11-20T10"
    return {"started_at": f"{day}:{start}+00:00", "finished_at": f"{day}:{end}+00:00"}


OTHER = replace(PLAIN, batch_size=64)
SIDES: list[tuple[str, str, list[Row]]] = [
    # a claim, what is found, and the rows
    ("environment", "", [make(), again(2)]),
    ("environment", "driver is not the same in all rows of cuda: 1, 2",
     [make(driver="1"), again(2, driver="2")]),
    ("environment", "", [make(host="a"), again(2, host="b")]),
    ("environment", "", [make(), again(2, dataset_fingerprint="other")]),
    ("energy", "", [make(), again(2, energy_j=321.0, mean_power_w=321.0)]),
    ("energy", "its mean power is 319 W, and 400 W where the same case ran as fast",
     [make(), again(2, energy_j=319.0, mean_power_w=319.0)]),
    ("energy", "its mean power is 319 W",
     [make(energy_j=319.0, mean_power_w=319.0), again(2)]),
    ("energy", "", [make(), again(2, 1.06, energy_j=338.0, mean_power_w=319.0)]),
    ("energy", "", [make(), again(2, mean_power_w=319.0, energy_j=319.0, power_limit_w=350.0)]),
    ("energy", "", [make(), again(2, mean_power_w=319.0, energy_j=319.0, lanes_beside=1)]),
    ("energy", "", [make(), again(2, 0.99, mean_power_w=319.0, energy_j=319.0)]),
    ("energy", "", [make(), again(2, mean_power_w=319.0, energy_j=319.0, case=OTHER)]),
    ("plan", "", [make(), again(2)]),
    ("plan", "there is no repeat 2", [make(), again(3)]),
    ("plan", "there is no repeat 1, 2", [again(3)]),
    ("plan", "", [make(), again(3, sentinel=True)]),
    ("plan", "", [make(), again(2, shared=f"work: {PLAIN.slug()}-r1-a1")]),
    ("order", "", [make(), again(2)]),
    ("order", "", [make(**at("10:00", "12:00")), again(2, **at("11:01", "14:00"))]),
    ("order", "and the row above it ended at",
     [make(**at("10:00", "12:00")), again(2, **at("10:59", "14:00"))]),
    ("order", "", [make(**at("10:00", "12:00"), lane="0"), again(2, **at("10:59", "14:00"))]),
    ("order", "", [make(**at("10:00", "12:00")),
                   again(2, **at("10:59", "14:00"), lanes_beside=1)]),
    ("order", "", [make(**at("10:00", "12:00")),
                   again(2, **at("10:00", "11:01"), lane="1")]),
    ("order", "and the row above it ended at",
     [make(**at("10:00", "12:00")), again(2, **at("10:00", "10:59"), lane="1")]),
    ("order", "and the row above it ended at",
     [make(**at("10:00", "12:00")), make(OTHER, inferred=True, started_at="", finished_at=""),
      again(2, **at("10:59", "14:00"))]),
    ("copies", "", [make(), again(2)]),
    ("copies", "its steps took the same times as those of", [make(), again(2, 1.0)]),
    ("copies", "", [make(steps=STEPS[:2]), again(2, 1.0, steps=STEPS[:2])]),
    ("copies", "its steps took the same", [make(steps=STEPS[:3]), again(2, steps=STEPS[:3])]),
    ("copies", "its losses are those of",
     [make(), again(2, steps=slower(*[0.2] * 10))]),
    ("copies", "", [make(), again(2, steps=slower(*[0.2] * 10), run_seed=0)]),
    ("copies", "", [make(SCRIPT), again(2, case=SCRIPT, steps=slower(*[0.2] * 10))]),
    ("copies", "", [make(steps=[replace(step, loss=None) for step in STEPS]),
                    again(2, steps=[replace(step, loss=None, time_s=0.2) for step in STEPS])]),
    ("profile", "and its kernels alone take 0.08 s",  # the shorter of those of a case
     [make(), again(2, busy_s=0.09, step_time_median_s=0.072,
                    work=PROFILED["work"])]),
    ("profile", "", [make(), again(2, busy_s=None, step_time_median_s=0.073)]),
    ("profile", "its kernels and waits take 0.11 s",
     [make(busy_s=None), again(2, input_wait_s=0.025)]),
    ("profile", "", [make(), again(2, busy_s=None, step_time_median_s=0.01, case=OTHER)]),
    ("profile", "and its kernels alone", [make(), again(2, busy_s=None, step_time_median_s=0.072)]),
    ("epoch", "", [make(), again(2)]),
    ("code", "", [make(), again(2, commit="ghi")]),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "why", "rows"), SIDES)
def test_rows_contradict_each_other_from_a_bound_on(
    claim: str, why: str, rows: list[Row], tmp_path: Path
) -> None:
    faults = find_faults(tmp_path, rows)[claim]
    assert (bool(faults), why in " ".join(faults)) == (bool(why), True), faults


def test_every_case_with_too_little_power_is_named(tmp_path: Path) -> None:
    """And of each case the row with the least alone."""
    weak = {"energy_j": 300.0, "mean_power_w": 300.0}
    rows = [make(**weak), again(2), again(3), make(OTHER, **weak), again(2, case=OTHER)]
    faults = find_faults(tmp_path, rows)["energy"]
    assert [fault.partition(":")[0] for fault in faults] == [
        "fp32 · batch size 128", "fp32 · batch size 64",
    ]  # fmt: skip


def test_an_honest_folder_has_no_fault(tmp_path: Path) -> None:
    """And what is foreign to this harness claims nothing of how it was measured."""
    faults = find_faults(tmp_path, [make(), again(2), again(3, 0.999)])
    assert {claim for claim, found in faults.items() if found} == set()
    checks = validate(write_sweep(tmp_path / "theirs", [make(executor="lab", commit="a+dirty")]))
    assert checks["subject"].endswith("; not measured by this harness")
    assert {check["result"] for check in checks["checks"]} == {"ok", "none"}


def test_what_is_lacking_is_told_and_what_is_disclosed(tmp_path: Path) -> None:
    lacking = make(
        steps=[], work=[], measured_steps=None, energy_j=None, gpu="A card", arithmetic="",
        busy_s=None, host="box", variables="A=1",
    )  # fmt: skip
    found = validate(write_sweep(tmp_path / "sweep", [lacking]))
    none = {check["name"]: check["lacks"] for check in found["checks"] if check["result"] == "none"}
    assert none == {
        "copies": "steps",
        "rates": "rates of a card whose data sheet is known",
        "card": "a card whose data sheet is known",
        "speed": "a card whose data sheet is known",
        "energy": "energy",
        "steps": "steps",
        "profile": "a profile",
        "proof": "a probe of its arithmetic",
    }
    assert found["discloses"] == ["host box", "variables A=1"]
    assert found["subject"] == "1 row, A card"
    assert found["ignored_known_faults"] == ""
    own = tmp_path / "sweep" / KNOWN_FAULTS
    own.write_text("x")
    assert validate(tmp_path / "sweep")["ignored_known_faults"] == str(own)


def test_a_commit_whose_code_is_known_is_held_to_it(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(claims, "hash_commit", {"abc": "def"}.get)
    assert find_faults(tmp_path / "same", [make()])["code"] == []
    assert find_faults(tmp_path / "unknown", [make(commit="xyz", code="other")])["code"] == []
    faults = ["commit abc has the code def, and the rows other"]
    assert find_faults(tmp_path / "other", [make(code="other")])["code"] == faults


ON_CPU = {"cpu": "EPYC", "gpu": "", "flags": ""}
STATED: list[tuple[Any, list[Row], list[str]]] = [
    # the environment in config.json, the rows, and what is found
    ({"cuda": {"gpu": H100, "driver": "1"}}, [make(driver="1")], []),
    ({"cuda": {"driver": 1}}, [make(driver="1")], []),
    ({"cuda": {"driver": "2"}}, [make(driver="1")],
     ["driver is 1 in the rows, and 2 in config.json"]),
    ({"cuda": {"driver": "2"}}, [make(), again(2, driver="1")],
     ["driver is 1 in the rows, and 2 in config.json"]),
    ({"cuda": {"driver": "2"}}, [make(), again(2)], []),  # no row knows it
    ({"cuda": {"driver": ""}}, [make(driver="1")], []),
    ({"cuda": {"host": "a"}}, [make(host="b")], []),  # which is of no comparison
    ({"cuda": {"driver": "2"}}, [make(CPU, **ON_CPU), again(2, driver="1")],
     ["driver is 1 in the rows, and 2 in config.json"]),
    ({"cpu": {"cpu": "Xeon"}, "cuda": {"driver": "1"}},
     [make(driver="1"), again(2, case=CPU, **ON_CPU)],
     ["cpu is EPYC in the rows, and Xeon in config.json"]),
    ({"cuda": "edited"}, [make(driver="1")], []),
    ("edited", [make(driver="1")], []),
    ({"cuda": {"driver": "2"}}, [make(driver="1", executor="ray")], []),  # on any machine
]  # fmt: skip


@pytest.mark.parametrize(("stated", "rows", "faults"), STATED)
def test_rows_are_of_the_environment_of_their_plan(
    stated: Any, rows: list[Row], faults: list[str], tmp_path: Path
) -> None:
    write_sweep(tmp_path / "sweep", rows)
    (tmp_path / "sweep" / "config.json").write_text(json.dumps({"environment": stated}))
    found = {check["name"]: check["faults"] for check in validate(tmp_path / "sweep")["checks"]}
    assert found["environment"] == faults


def test_repeats_of_a_shard_may_be_in_another(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep", [make(), again(3)])
    config = tmp_path / "sweep" / "config.json"
    for text, found in (("{}", True), (json.dumps({"shard": "1/2"}), False)):
        config.write_text(text)
        checks = validate(tmp_path / "sweep")["checks"]
        faults = " ".join(fault for check in checks for fault in check["faults"])
        assert ("there is no repeat 2" in faults) == found, faults
