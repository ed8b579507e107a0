"""On a card: what the page promises there, each precision's proof, memory, and real exhaustion."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.case import Case
from bench.data import DatasetInfo, prepare
from bench.environment import Platform, probe
from bench.executors import Job, Settings
from bench.executors.subprocess import SubprocessExecutor
from bench.models import build_model
from bench.precision import PRECISIONS, prove, set_flags
from bench.record import Outcome, Status
from bench.train import Training

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
    assert PRECISIONS[name].arithmetic in (m.arithmetic or "")
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
def test_no_step_waits_for_the_device(name: str, platform: Platform) -> None:
    """torch raises on any synchronisation inside a step."""
    skip_unless_native(platform, name)
    device = torch.device("cuda")
    training = Training(
        build_model("dpn-small"),
        PRECISIONS[name],
        device,
        lr=0.01,
        loss_scale=SCALES.get(name),  # type: ignore[arg-type]
    )
    x = torch.randn(64, 3, 32, 32, device=device)
    y = torch.randint(10, (64,), device=device)
    training.step(x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            training.step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    """The goal is 2 % at a fraction of 0.1, on the same warm card."""
    case = replace(CASE, precision="fp16", loss_scale=128.0, batch_size=128)
    whole = run(replace(case, fraction=1.0)).measurement
    tenth = run(replace(case, fraction=0.1)).measurement
    error = tenth.epoch_time_s / whole.epoch_time_s - 1
    print(f"extrapolation error at 0.1: {100 * error:+.2f} %")
    assert abs(error) < 0.02


def small_card() -> nn.Module:
    """A network on a card that offers this process 1 % of its memory."""
    torch.cuda.set_per_process_memory_fraction(0.01)
    return build_model("dpn92")


def test_out_of_memory_is_a_row(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    case = replace(CASE, model=f"{__name__}:small_card", batch_size=2048)
    outcome = run(case, tmp_path / "log")
    assert outcome.status is Status.OOM, outcome.reason
    assert "OutOfMemoryError" in outcome.reason
    assert run(CASE).status is Status.OK  # and the card is free again


@pytest.mark.slow
def test_compile_warms_up_and_trains(run) -> None:  # type: ignore[no-untyped-def]
    outcome = run(replace(CASE, model="dpn-small", compile=True, batch_size=500))
    assert outcome.status is Status.OK, outcome.reason
    assert outcome.measurement.warmup_time_s > outcome.measurement.measured_time_s


def test_cases_start_quickly(run) -> None:  # type: ignore[no-untyped-def]
    """Printed, not asserted: a clock decides nothing in a test."""
    m = run(replace(CASE, model="dpn-small")).measurement
    print(f"set-up: {m.setup_time_s:.2f} s")
    assert m.setup_time_s > 0
