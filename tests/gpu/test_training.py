"""On a card: what the page promises there, each precision's proof, memory, and real exhaustion."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from bench.case import Case
from bench.data import DatasetInfo, prepare
from bench.environment import Platform, probe
from bench.executors import Job, Settings
from bench.executors.subprocess import SubprocessExecutor
from bench.precision import PRECISIONS, prove, set_flags
from bench.record import Outcome, Status
from bench.timing import StepClock, extrapolate
from bench.train import train_epoch
from bench.worker import Channel, Reporter, set_up, start_over, warm_up_shapes

pytestmark = pytest.mark.gpu

CASE = Case(model="dpn26", dataset="synthetic", batch_size=512, fraction=0.2, device="cuda")
SCALES = {"fp16": 128.0, "fp16-amp": "dynamic"}


@pytest.fixture(scope="module")
def platform() -> Platform:
    return probe("cuda")


@pytest.fixture(scope="module")
def data() -> DatasetInfo:
    return prepare("synthetic", data_dir=None)


@pytest.fixture(scope="module")
def run(platform: Platform, data: DatasetInfo):  # type: ignore[no-untyped-def]
    def run(case: Case, log: Path | None = None) -> Outcome:
        executor = SubprocessExecutor(Settings(timeout_s=300, allow_shared=True))
        uuid = platform.environment.gpu_uuid
        return executor.run(Job(case, data.folder, uuid, log), lambda event: None, lambda: False)

    return run


def skip_unless_native(platform: Platform, name: str) -> None:
    if reason := platform.refuse(PRECISIONS[name]) or platform.discourage(PRECISIONS[name]):
        pytest.skip(reason)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_case_in_every_precision(name: str, platform: Platform, run) -> None:  # type: ignore[no-untyped-def]
    """Measured, proven to be what its label says, and every column filled that a card can fill."""
    skip_unless_native(platform, name)
    outcome = run(replace(CASE, precision=name, loss_scale=SCALES.get(name)))
    m = outcome.measurement
    assert outcome.status is Status.OK, outcome.reason
    assert (m.arithmetic or "").split("/")[0] == PRECISIONS[name].arithmetic
    assert m.epoch_time_s
    assert m.setup_time_s
    assert m.warmup_time_s
    # tensors <= allocator <= device: three of the four truths are ordered
    assert m.peak_allocated_bytes
    assert m.peak_allocated_bytes <= m.peak_reserved_bytes <= (m.peak_device_bytes or math.inf)
    assert m.warmup_reserved_bytes >= m.peak_allocated_bytes
    assert m.train_loss is not None
    assert m.train_loss < 3
    assert m.energy_j or "energy_j" in (m.missing or "")


@pytest.mark.parametrize("name", PRECISIONS)
def test_no_step_waits_for_the_device(name: str, platform: Platform, data: DatasetInfo) -> None:
    """torch raises on any synchronisation inside a step."""
    skip_unless_native(platform, name)
    device = torch.device("cuda")
    case = replace(CASE, model="dpn-small", precision=name, loss_scale=SCALES.get(name))
    _, batches, training = set_up(case, data.folder)
    warm_up_shapes(training, batches, case, lambda step, loss: None)
    start_over(training, batches, case)
    report = Reporter(Channel(), device, "epoch", 10)
    epoch = iter(batches.epoch(0, steps=10))
    first = next(epoch)  # the whole epoch's order is drawn with it
    torch.cuda.set_sync_debug_mode("error")
    try:
        fetch = train_epoch(training, chain([first], epoch), StepClock(device), report)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(fetch().losses) == 10


@pytest.mark.parametrize("name", PRECISIONS)
def test_proof(name: str, platform: Platform) -> None:
    skip_unless_native(platform, name)
    set_flags(PRECISIONS[name])
    assert prove(PRECISIONS[name], torch.device("cuda")).contradicts(PRECISIONS[name]) == ""


def test_tf32_left_on_under_an_fp32_label_is_caught(platform: Platform) -> None:
    skip_unless_native(platform, "tf32")
    set_flags(PRECISIONS["tf32"])
    proof = prove(PRECISIONS["fp32"], torch.device("cuda"))
    set_flags(PRECISIONS["fp32"])
    assert "labelled fp32" in proof.contradicts(PRECISIONS["fp32"])


def test_a_tenth_extrapolates_to_the_whole(run) -> None:  # type: ignore[no-untyped-def]
    """Within 2 % at a fraction of 0.1, told from the first tenth of the same epoch's steps."""
    outcome = run(replace(CASE, precision="fp16", loss_scale=128.0, fraction=1.0, batch_size=500))
    times = [step.time_s for step in outcome.steps]
    tenth = times[: len(times) // 10]
    error = extrapolate(sum(tenth), tenth, len(times), 0.0) / sum(times) - 1
    print(f"extrapolation error at 0.1: {100 * error:+.2f} %")
    assert abs(error) < 0.02


def test_out_of_memory_is_a_row(  # type: ignore[no-untyped-def]
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests}{os.pathsep}{tests.parent}")
    case = replace(CASE, model="models_for_tests:small_card", batch_size=2048)
    outcome = run(case, tmp_path / "log")
    assert outcome.status is Status.OOM, outcome.reason
    assert "OutOfMemoryError" in outcome.reason
    assert run(CASE).status is Status.OK  # and the card is free again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16"])
def test_compile_warms_up_and_trains(name: str, platform: Platform, run) -> None:  # type: ignore[no-untyped-def]
    skip_unless_native(platform, name)
    case = replace(CASE, precision=name, loss_scale=SCALES.get(name), batch_size=500)
    outcome = run(replace(case, model="dpn-small", compile=True))
    assert outcome.status is Status.OK, outcome.reason
    assert outcome.measurement.warmup_time_s > outcome.measurement.measured_time_s


def test_a_whole_epoch_with_evaluation_and_autotuning(run) -> None:  # type: ignore[no-untyped-def]
    """50000 % 512 leaves a smaller last batch, a shape of its own to cuDNN."""
    case = replace(CASE, model="dpn-small", fraction=1.0, evaluate=True, cudnn_benchmark=True)
    m = run(case).measurement
    assert m.measured_images == 50_000
    assert m.test_accuracy > 0.1
    assert m.eval_time_s < m.epoch_time_s
    assert m.step_time_max_s < 10 * m.step_time_median_s  # nothing was tuned inside the clock
    assert m.alloc_retries == 0


def test_cases_start_quickly(run) -> None:  # type: ignore[no-untyped-def]
    """Printed, not asserted: a clock decides nothing in a test."""
    m = run(replace(CASE, model="dpn-small")).measurement
    print(f"set-up: {m.setup_time_s:.2f} s")
    assert m.setup_time_s > 0
