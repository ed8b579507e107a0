"""A case from set-up to end, in this process: what a measurement holds and what it must not."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.case import Case
from bench.data import DatasetInfo, prepare
from bench.errors import UsageError
from bench.precision import Arithmetic
from bench.record import Measurement, Status, Step
from bench.training.flop import count_flop
from bench.training.loop import Training
from bench.training.proof import DENSE, Finding, LayerProof, Proof
from bench.worker.__main__ import conclude
from bench.worker.channel import Channel, Reporter
from bench.worker.measurement import (
    Findings,
    forgive,
    measure,
    set_up,
    start_over,
    warm_up_shapes,
)
from bench.worker.messages import Message, PhaseEntered, StepTaken, decode

TINY = f"{__name__}:tiny"
CASE = Case(model=TINY, dataset="synthetic", device="cpu", batch_size=512, fraction=0.1)


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )


def dropping() -> nn.Module:
    """Draws random numbers in each training step."""
    return nn.Sequential(nn.Dropout(0.2), tiny())


class Bad(nn.Module):
    """Its loss is NaN from its fifth training step after a reset."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.net(x) * torch.where(self.steps > 4, torch.nan, 1.0)


def bad() -> nn.Module:
    return Bad()


@pytest.fixture(scope="module", autouse=True)
def restore_torch() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.fixture(scope="module")
def data() -> DatasetInfo:
    return prepare("synthetic", data_dir=None)


def run(case: Case, data: DatasetInfo) -> tuple[Measurement, list[Step], dict[str, str]]:
    found = measure(case, data.folder, Channel(), time.monotonic())
    return found.measurement, found.steps, found.missing


@pytest.mark.slow
def test_a_whole_epoch(data: DatasetInfo) -> None:
    m, steps, missing = run(replace(CASE, fraction=1.0, evaluate=True), data)
    assert m.measured_steps == m.steps_per_epoch == len(steps) == math.ceil(50_000 / 512)
    assert m.measured_images == sum(step.images for step in steps) == 50_000
    assert steps[-1].images == 50_000 % 512
    assert m.epoch_time_s == m.measured_time_s
    assert m.epoch_time_s == pytest.approx(sum(step.time_s or 0 for step in steps), rel=0.02)
    assert m.images_per_s == pytest.approx(50_000 / m.epoch_time_s)
    total = sum(step.images * (step.loss or math.nan) for step in steps)
    assert m.train_loss == pytest.approx(total / 50_000)
    assert m.train_accuracy == sum(step.correct for step in steps) / 50_000
    assert m.train_accuracy > 0.15
    assert m.test_loss is not None
    assert m.test_accuracy is not None
    assert m.eval_time_s is not None
    assert m.setup_time_s is not None
    assert m.warmup_time_s is not None
    assert m.flop_per_image
    assert m.arithmetic == "float32"
    assert m.proof_layer == "3×3 convolution, 3 to 8 channels, on 32×32"
    assert 0 < m.conv_error < 1e-5
    assert 0 < m.input_grad_error < 1e-5
    assert 0 < m.weight_grad_error < 1e-5
    assert "conv=ieee" in (m.flags or "")
    assert m.first_bad_step is None
    assert missing["peak_allocated_bytes"] == "torch does not report CPU memory"
    assert m.peak_allocated_bytes is None


def test_a_fraction_is_extrapolated(data: DatasetInfo) -> None:
    m, steps, _ = run(CASE, data)
    assert m.measured_steps == len(steps) == math.ceil(0.1 * 98)
    assert m.steps_per_epoch == 98
    assert m.measured_images == 10 * 512
    assert m.epoch_time_low_s is not None
    assert m.epoch_time_high_s is not None
    assert m.measured_time_s <= m.epoch_time_low_s <= m.epoch_time_s <= m.epoch_time_high_s
    times = [step.time_s for step in steps]
    assert m.step_time_first_s == pytest.approx(sum(times[1:4]) / 3)
    assert m.step_time_last_s == pytest.approx(sum(times[-3:]) / 3)
    assert m.warmup_steps <= 1 + 10, "as many as are measured, and the first"
    assert 0 < m.first_steps_time_s < m.warmup_time_s
    assert m.measured_time_s is not None
    assert m.epoch_time_s is not None
    assert 5 * m.measured_time_s < m.epoch_time_s < 20 * m.measured_time_s


@pytest.mark.slow
def test_one_slow_first_step_is_no_trend(
    data: DatasetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts on an idle device; the smaller last batch, which is quicker, is none either."""
    import bench.training.timing

    times = [0.15, *[0.1] * 8, 0.11]
    monkeypatch.setattr(bench.training.timing.StepClock, "read", lambda self: times)
    m, _, _ = run(CASE, data)
    assert m.step_time_first_s == pytest.approx(0.1)
    assert m.step_time_last_s == pytest.approx(0.31 / 3)
    monkeypatch.setattr(
        bench.training.timing.StepClock, "read", lambda self: [0.15, *[0.1] * 96, 0.01]
    )
    m, _, _ = run(replace(CASE, fraction=1.0), data)
    assert m.step_time_first_s == m.step_time_last_s == pytest.approx(0.1)


def test_too_short_for_an_interval_says_what_to_do(data: DatasetInfo) -> None:
    m, _, missing = run(replace(CASE, fraction=0.01), data)
    assert m.epoch_time_s is not None
    assert m.epoch_time_low_s is None
    assert missing["epoch_time_low_s"] == "1 steps are too few for an interval; raise --fraction"


def shapes(case: Case, data: DatasetInfo) -> list[int]:
    """The batch sizes of each step that the case takes before its epoch."""
    _, batches, training = set_up(case, data.folder)
    seen: list[int] = []
    training.model.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    warm = warm_up_shapes(training, batches, case, lambda step, loss: None)
    assert warm.steps == len(seen)
    start_over(training, batches, case)
    return seen


@pytest.mark.slow
def test_the_smaller_batch_is_warmed_only_where_it_is_measured(data: DatasetInfo) -> None:
    rest = 50_000 % 512
    assert shapes(CASE, data).count(rest) == 0
    assert shapes(replace(CASE, fraction=0.99), data).count(rest) == 3  # rounded up to the whole
    assert set(shapes(replace(CASE, batch_size=500, fraction=1.0), data)) == {500}


@pytest.mark.slow
def test_warm_up_leaves_no_trace(data: DatasetInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch is one from scratch: the same losses however long the warm-up was."""
    import bench.training.timing

    case = replace(CASE, model=f"{__name__}:dropping")
    losses = []
    for steady, steps in ((True, bench.training.timing.FEWEST_WINDOWS), (False, 10)):  # its budget
        monkeypatch.setattr(bench.training.timing.Slope, "within", lambda *_, steady=steady: steady)
        m, found, _ = run(case, data)
        assert m.warmup_steps == 1 + steps
        losses.append([step.loss for step in found])
    assert losses[0] == losses[1]


def test_divergence_is_measured_and_located(data: DatasetInfo) -> None:
    m, steps, _ = run(replace(CASE, model=f"{__name__}:bad"), data)
    assert m.first_bad_step == 4
    assert m.train_loss is None
    assert [step.loss is None for step in steps] == [False] * 4 + [True] * 6
    assert m.epoch_time_s is not None


def test_uncountable_models_are_no_loss() -> None:
    found = Findings()
    with forgive(found, "flop_per_image"):
        count_flop(f"{__name__}:uncountable")
    assert "meta tensor" in found.missing["flop_per_image"].lower()


def test_a_false_label_is_invalid(data: DatasetInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card whose convolutions ran in TF32 under an fp32 label, and diverged besides."""
    tf32 = Finding("a convolution", Arithmetic.TFLOAT32, 3e-4)
    matmul = Finding("a matmul", Arithmetic.FLOAT32, 2e-7)
    proof = Proof((LayerProof(DENSE, tf32, tf32, tf32),), matmul)
    monkeypatch.setattr("bench.training.proof.prove", lambda *_: proof)
    found = measure(CASE, data.folder, Channel(), time.monotonic())
    status, reason = conclude(found)
    assert status is Status.INVALID
    assert reason.startswith("labelled fp32, but a convolution: tfloat32 (error 3.0e-04); ")
    assert found.measurement.arithmetic == "tfloat32/float32"
    found.measurement.first_bad_step = 3
    assert conclude(found)[0] is Status.INVALID
    assert conclude(found)[1].endswith("the loss was inf or NaN from step 3 of 10")
    found.contradiction = None
    assert conclude(found) == (Status.DIVERGED, "the loss was inf or NaN from step 3 of 10")
    assert conclude(Findings()) == (Status.OK, "")


def test_a_failing_proof_keeps_the_flags_and_the_epoch(
    data: DatasetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("bench.training.proof.prove", fail)
    found = measure(CASE, data.folder, Channel(), time.monotonic())
    assert conclude(found) == (Status.OK, "")
    assert "conv=ieee" in (found.measurement.flags or "")
    for column in ("arithmetic", "proof_layer", "conv_error", "weight_grad_error"):
        assert getattr(found.measurement, column) is None
        assert found.missing[column] == "RuntimeError: no such kernel"


def test_an_unclear_proof_is_noted_and_the_row_stays_ok(
    data: DatasetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    unclear = Finding("a convolution", Arithmetic.UNCLEAR, 5e-5)
    proof = Proof((LayerProof(DENSE, unclear, unclear, unclear),), unclear)
    monkeypatch.setattr("bench.training.proof.prove", lambda *_: proof)
    found = measure(CASE, data.folder, Channel(), time.monotonic())
    assert conclude(found) == (Status.OK, "")
    assert found.measurement.arithmetic == "unclear"
    assert "a convolution: unclear (error 5.0e-05)" in (found.measurement.notes or "")


def test_both_shapes_are_evaluated_once_before_the_clock(
    data: DatasetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation is new to cuDNN and the compiler: what they choose is not in its time."""
    calls: list[list[int]] = []
    evaluated = Training.evaluate

    def watch(self: Training, batches: Any) -> tuple[float, float]:
        seen = list(batches)
        calls.append([len(y) for _, y in seen])
        return evaluated(self, seen)

    monkeypatch.setattr(Training, "evaluate", watch)
    m, _, _ = run(replace(CASE, evaluate=True), data)
    warm, timed = calls
    assert warm == [512, 10_000 % 512]
    assert sum(timed) == 10_000
    assert m.eval_time_s


def test_a_failing_evaluation_keeps_the_epoch(
    data: DatasetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("bench.worker.measurement.evaluate", fail)
    m, steps, missing = run(replace(CASE, evaluate=True), data)
    assert m.epoch_time_s
    assert len(steps) == 10
    assert m.test_loss is None
    assert missing["test_loss"].startswith("OutOfMemoryError: CUDA out of memory")


def test_a_model_of_other_classes_is_told_so(data: DatasetInfo) -> None:
    with pytest.raises(UsageError, match=r"returned \(512, 20\) for 512 images; .* \(512, 10\)"):
        run(replace(CASE, model=f"{__name__}:twenty"), data)


def twenty() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 20))


def test_a_shared_cpu_is_noted(data: DatasetInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings of the machine and of this process, at the start and the end of the epoch."""
    from bench.worker.measurement import OtherWork

    readings = iter([(10.0, 5.0, 100.0), (29.0, 14.0, 110.0)])
    monkeypatch.setattr(OtherWork, "_read", staticmethod(lambda: next(readings)))
    m, _, _ = run(CASE, data)
    assert m.other_cores == pytest.approx(1.0)


def uncountable() -> nn.Module:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, : int(x.sum())]  # a value decides a shape

    return Picky()


def test_phases_wait_for_the_parent(data: DatasetInfo, tmp_path: Path) -> None:
    """At each boundary the worker says where it is and waits for a line before going on."""
    read, write = os.pipe()
    answers_read, answers_write = os.pipe()
    with open(answers_read) as stdin, pytest.MonkeyPatch.context() as patch:  # noqa: PTH123
        patch.setattr("sys.stdin", stdin)
        os.write(answers_write, b"\n\n\n")
        os.close(answers_write)
        measure(CASE, data.folder, Channel(write), time.monotonic())
        assert stdin.read() == ""  # three phases, three lines
    with open(read, "rb") as events:  # noqa: PTH123
        os.set_blocking(read, False)
        said = [decode(line) for line in events.read().splitlines()]
    phases = [m.phase for m in said if isinstance(m, PhaseEntered)]
    assert phases == ["warmup", "epoch", "evaluation"]
    steps = [m for m in said if isinstance(m, StepTaken) and m.phase == "epoch"]
    assert steps
    assert all(m.total == 10 and m.memory_bytes > 2**20 for m in steps)


def test_reporter_is_sparing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand steps within a moment are a line or two, not ten thousand."""
    sent: list[int] = []

    class Ear(Channel):
        def send(self, message: Message) -> None:
            assert isinstance(message, StepTaken)
            sent.append(message.step)

    now = 100.0
    monkeypatch.setattr("bench.worker.channel.time.perf_counter", lambda: now)
    report = Reporter(Ear(), torch.device("cpu"), "epoch", 10_000)
    for index in range(10_000):
        now += 0.0001
        report(index, torch.zeros(()))
    assert 4 <= len(sent) <= 6
