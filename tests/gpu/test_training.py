"""On a card: what the page promises there, each precision's proof, memory, and real exhaustion."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from bench.base.installation import find_version
from bench.base.text import write_bytes
from bench.machine.monitor import Monitor
from bench.machine.nvml import open_device
from bench.networks.data import DatasetInfo
from bench.networks.models import build_model
from bench.networks.workloads import Workload
from bench.schema.axis import Value
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.precision import (
    FP8_INSTALL,
    OPT_LEVELS,
    PRECISIONS,
    TRAINED,
    find_apex,
    refuse_apex,
)
from bench.schema.record import Outcome, Status
from bench.training.formats import set_flags
from bench.training.loop import Training, train_epoch
from bench.training.optimizers import learning_rates
from bench.training.proof import LayerSetting, prove
from bench.training.timing import StepClock
from bench.workers.epochs import read_reserved
from bench.workers.examination import Platform, probe
from bench.workers.executors import Settings
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Channel, Job
from bench.workers.preparation import set_up, start_over, warm_up_shapes
from tests.training_for_tests import (
    OURS,
    batch,
    differing_masters,
    list_batches,
    step_bound,
    step_error,
    training,
)

pytestmark = pytest.mark.gpu

CASE = Case(model="dpn26", dataset="synthetic", batch_size=512, fraction=0.2, device="cuda")
HELD_BYTES = 2 * 2**30
SCALES = {"fp16": 128.0, "fp16-amp": "dynamic", "fp16-apex": 128.0}


@pytest.fixture(scope="module")
def platform() -> Platform:
    return probe("cuda")


@pytest.fixture(scope="module")
def run(platform: Platform, data: DatasetInfo):
    def run(case: Case, log: Path | None = None) -> Outcome:
        executor = SubprocessExecutor(Settings(timeout_s=300, allow_shared=True))
        uuid = platform.environment.gpu_uuid
        return executor.run(Job(case, data.folder, uuid, log), lambda event: None, lambda: False)

    return run


def skip_unless_native(platform: Platform, name: str) -> None:
    precision = PRECISIONS[name]
    reason = platform.refuse(precision) or platform.find_emulation(precision)
    if precision.apex:
        reason = reason or refuse_apex(find_apex(), "cuda")
    if precision.float8 and find_version("torchao") is None:
        reason = reason or FP8_INSTALL
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("name", [n for n in TRAINED if not PRECISIONS[n].float8])
def test_a_case_in_every_precision(name: str, platform: Platform, run) -> None:
    """Measured, proven to be what its label says, and every column filled that a card can fill."""
    skip_unless_native(platform, name)
    outcome = run(replace(CASE, precision=name, loss_scale=SCALES.get(name)))
    m = outcome.measurement
    assert outcome.status is Status.OK, outcome.reason
    # not of every layer: one whose shape has no kernel in TF32 is computed in float32
    assert PRECISIONS[name].arithmetic in (m.arithmetic or "").split("/"), m.arithmetic
    assert m.epoch_time_s
    assert m.setup_time_s
    assert m.warmup_time_s
    # the device's peak is raised to the allocator's where readings missed it
    assert 0 < m.peak_allocated_bytes <= m.peak_reserved_bytes
    assert m.warmup_reserved_bytes >= m.peak_allocated_bytes
    assert math.isfinite(m.train_loss)
    assert m.energy_j or "energy_j" in (m.missing or "")


@pytest.mark.parametrize("name", OURS)
def test_no_step_waits_for_the_device(name: str, platform: Platform, data: DatasetInfo) -> None:
    """torch raises on any synchronisation inside a step."""
    skip_unless_native(platform, name)
    device = torch.device("cuda")
    case = replace(CASE, model="dpn-small", precision=name, loss_scale=SCALES.get(name))
    batches, training = set_up(case, data.folder)
    warm_up_shapes(training, batches, lambda step, loss: None)
    start_over(training, batches)
    report = Channel().reporter("epoch", 10, read_reserved(device))
    epoch = list_batches(batches, 0, steps=10)
    first = next(epoch)  # the whole epoch's order is drawn with it
    torch.cuda.set_sync_debug_mode("error")
    try:
        fetch = train_epoch(training, chain([first], epoch), StepClock(device), report)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(fetch().losses) == 10


@pytest.mark.parametrize("name", OURS)
def test_proof(name: str, platform: Platform) -> None:
    skip_unless_native(platform, name)
    set_flags(PRECISIONS[name])
    precision, device = PRECISIONS[name], torch.device("cuda")
    training = Training(Case(precision=name), build_model("dpn26"), device, Workload())
    images = torch.randn(2, 3, 32, 32, device=device)
    proof = prove(LayerSetting(precision, device, 512), lambda: training.compute(images), 2)
    print(*proof.findings, sep="\n")
    assert proof.contradicts(precision) == ""


def test_tf32_left_on_under_an_fp32_label_is_caught(platform: Platform) -> None:
    skip_unless_native(platform, "tf32")
    set_flags(PRECISIONS["tf32"])
    device = torch.device("cuda")
    model, images = build_model("dpn26").to(device), torch.randn(2, 3, 32, 32, device=device)
    proof = prove(LayerSetting(PRECISIONS["fp32"], device, 512), lambda: model(images), 2)
    set_flags(PRECISIONS["fp32"])
    assert "labelled fp32" in str(proof.contradicts(PRECISIONS["fp32"]))


def test_a_tenth_extrapolates_to_the_whole(run) -> None:
    """Within 3 % of a whole epoch that another process trained: a process repeats within 1 %."""
    case = replace(CASE, precision="fp16", loss_scale=128.0, batch_size=500)
    tenth, whole = (run(replace(case, fraction=part)).measurement for part in (0.1, 1.0))
    assert (tenth.measured_steps, whole.measured_steps) == (10, 100)
    error = tenth.epoch_time_s / whole.measured_time_s - 1
    print(f"extrapolation error at 0.1: {100 * error:+.2f} %")
    assert abs(error) < 0.03


def test_readings_see_what_the_allocator_holds(platform: Platform) -> None:
    """The sampled peak, not raised to any bound, from a process whose allocator is asked itself."""
    device = torch.device("cuda")
    torch.ones(1, device=device)  # the context is in the baseline
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with Monitor(open_device(platform.environment.gpu_uuid)) as monitor:
        monitor.watch(os.getpid())
        monitor.enter("warmup")
        monitor.enter("epoch")
        tensor = torch.empty(HELD_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        time.sleep(0.3)  # some twenty readings
        reserved = torch.cuda.memory_reserved() - before
        del tensor
        torch.cuda.empty_cache()
        monitor.enter("evaluation")
        seen = monitor.close()
    assert reserved >= HELD_BYTES
    # CUDA hands memory out in pages of 2 MiB; nothing else in this process asks for any
    assert reserved <= seen.values["peak_device_bytes"] < reserved + 64 * 2**20
    if "peak_process_bytes" in seen.values:
        assert seen.values["peak_process_bytes"] >= reserved


@pytest.mark.parametrize("name", OURS)
def test_every_weight_is_its_master(name: str, platform: Platform) -> None:
    """Bitwise, after steps: in torch 2.9 and 2.10 a copy of mixed lists spoilt BatchNorm here."""
    skip_unless_native(platform, name)
    ours = training(name, torch.device("cuda"), build=lambda seed: build_model("dpn-small"))
    for seed in range(5):
        ours.step(batch(seed=seed, device=ours.device))
    assert differing_masters(ours) == []


@pytest.mark.parametrize("name", OURS)
def test_a_step_is_within_the_bound_of_float64(name: str, platform: Platform) -> None:
    skip_unless_native(platform, name)
    error = step_error(name, torch.device("cuda"))
    print(f"{name}: {error:.1e} from float64, bound {step_bound(name):.1e}")
    assert error < step_bound(name)


def test_out_of_memory_is_a_row(run, tmp_path: Path) -> None:
    case = replace(CASE, model="models_for_tests:small_card", batch_size=2048)
    outcome = run(case, tmp_path / "log")
    assert outcome.status is Status.OOM, outcome.reason
    assert "OutOfMemoryError" in outcome.reason
    assert run(CASE).status is Status.OK  # and the card is free again


def test_a_memory_limit_counts_the_context_in(run) -> None:
    """What a case needs by its own columns is a limit that it fits; half of it is not."""
    free = run(replace(CASE, steps=2)).measurement
    assert free.context_bytes > 2**27
    need = free.peak_reserved_bytes + free.context_bytes
    ample = run(replace(CASE, steps=2, memory_limit=write_bytes(round(1.1 * need))))
    assert ample.status is Status.OK, ample.reason
    m = ample.measurement
    assert m.peak_reserved_bytes + m.context_bytes <= 1.1 * need
    for limit in (write_bytes(round(0.5 * need)), "128MiB"):
        outcome = run(replace(CASE, steps=2, memory_limit=limit))
        assert outcome.status is Status.OOM, outcome.reason
        assert outcome.reason.startswith("needs more than ")
        assert "of GPU memory" in outcome.reason


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_apex_trains(level: str, run) -> None:
    """The real one: the row says its version, and the label is true."""
    if reason := refuse_apex(find_apex(), "cuda"):
        pytest.skip(reason)
    case = replace(CASE, precision="fp16-apex", loss_scale=128.0, opt_level=level)
    outcome = run(case)
    assert outcome.status is Status.OK, outcome.reason
    assert "apex." in (outcome.measurement.apex or "")
    assert math.isfinite(outcome.measurement.train_loss)


@pytest.mark.parametrize(
    ("recipe", "batch_size", "compile"),
    [
        ("tensorwise", 16, "off"),
        ("rowwise", 16, "off"),
        pytest.param("tensorwise", 16, "default", marks=pytest.mark.slow),
    ],
)
def test_fp8_trains_a_transformer(
    recipe: str, batch_size: int, compile: str, platform: Platform, run
) -> None:
    """The real products, not their emulation: what a CPU shows of the recipes holds here too."""
    skip_unless_native(platform, "fp8")
    asked: dict[str, list[Value]] = {
        "workload": ["examples.transformer:tiny"],
        "precision": ["bf16-amp", "fp8"],
        "fp8_recipe": [recipe],
        "batch_size": [batch_size],
        "compile": [compile],
        "device": ["cuda"],
    }
    usual, found = (run(case) for case in grid(asked))
    m = found.measurement
    assert found.status is Status.OK, found.reason
    assert m.arithmetic == "float8/bfloat16", m.notes
    assert "emulated" not in (m.notes or "")
    assert m.fp8_flop_share == pytest.approx(0.84, abs=0.01)
    assert m.train_loss == pytest.approx(usual.measurement.train_loss, rel=0.02)


# max-autotune compiles and times each kernel many times over, one after the other, as max_autotune
# and coordinate_descent_tuning of torch._inductor.list_mode_options() have it
COMPILED = replace(CASE, model="models_for_tests:one_block", batch_size=500)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16"])
def test_compile_warms_up_and_trains(name: str, platform: Platform, run) -> None:
    skip_unless_native(platform, name)
    case = replace(COMPILED, precision=name, loss_scale=SCALES.get(name), compile="default")
    outcome = run(case)
    assert outcome.status is Status.OK, outcome.reason
    assert outcome.measurement.warmup_time_s > outcome.measurement.measured_time_s


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.slow
def test_modes_of_compilation_train(mode: str, run) -> None:
    """With graphs of torch.compile's own, also for the evaluation."""
    case = replace(COMPILED, steps=10, evaluate=True)
    usual, found = (run(replace(case, compile=one)) for one in ("off", mode))
    assert found.status is Status.OK, found.reason
    assert found.measurement.train_loss == pytest.approx(usual.measurement.train_loss, rel=0.02)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16-amp"])
def test_a_captured_step_trains_as_one_that_is_not(
    name: str, optimizer: str, platform: Platform, data: DatasetInfo
) -> None:
    """Losses within rounding: two runs of the same steps differ too, since sums have no order."""
    skip_unless_native(platform, name)
    case = replace(
        CASE, model="dpn-small", precision=name, loss_scale=SCALES.get(name), optimizer=optimizer,
        lr=1e-3, schedule="cosine", batch_size=64, steps=20,
    )  # fmt: skip
    device = torch.device("cuda")

    def losses(case: Case) -> list[float]:
        batches, ours = set_up(case, data.folder)
        warm_up_shapes(ours, batches, lambda *_: None)
        start_over(ours, batches)
        assert (ours.captured is not None) == case.cuda_graphs
        supply = chain(batches.divide(0, 19), batches.divide(1, 1, 40))  # the last one smaller
        fetch = train_epoch(
            ours, supply, StepClock(device), lambda *_: None, learning_rates(case, 20)
        )
        return fetch().losses

    one, again, found = (losses(replace(case, cuda_graphs=on)) for on in (False, False, True))
    noise = max(abs(a - b) for a, b in zip(one, again, strict=True))
    assert found[0] == pytest.approx(one[0], rel=1e-3)
    assert found == pytest.approx(one, rel=0.02, abs=5 * noise)
    assert losses(replace(case, cuda_graphs=True, lr=1e-2))[-1] != pytest.approx(found[-1])


def test_a_whole_epoch_with_evaluation_and_autotuning(run) -> None:
    """50000 % 512 leaves a smaller last batch, a shape of its own to cuDNN."""
    case = replace(CASE, model="dpn-small", fraction=1.0, evaluate=True, cudnn_benchmark=True)
    m = run(case).measurement
    assert m.measured_images == 50_000
    assert m.test_accuracy > 0.1
    assert m.eval_time_s < m.epoch_time_s
    assert m.step_time_max_s < 10 * m.step_time_median_s  # nothing was tuned inside the clock
    assert m.alloc_retries == 0
