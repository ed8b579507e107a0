"""A case from set-up to end, in this process: what a measurement holds and what it must not."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count, repeat
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from bench.base.limits import find_ends
from bench.base.processes import OtherWork
from bench.networks.data import DatasetInfo, load, prepare
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.schema.precision import PRECISIONS, Arithmetic
from bench.schema.record import Measurement, Outcome, Status, Step, describe_unmet, write_missing
from bench.schema.rules import settle
from bench.training.arithmetic import OperationProof
from bench.training.formats import set_flags
from bench.training.loop import Training
from bench.training.proof import DENSE, LayerProof, Proof
from bench.training.switches import find_changes, keep_switches, read_switches
from bench.workers import measurement
from bench.workers.job import (
    Channel,
    Job,
)
from bench.workers.measurement import conclude, measure
from bench.workers.preparation import set_up, start_over, warm_up_shapes
from tests.pytest_for_tests import Patch
from tests.training_for_tests import list_batches

TINY = f"{__name__}:tiny"
CASE = Case(model=TINY, dataset="synthetic", device="cpu", batch_size=50, fraction=0.1)
IMAGES, TESTS, STEPS = 4980, 610, 100
"""Images for training and for tests, and steps of an epoch, of which the last is smaller."""


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )


def dropping() -> nn.Module:
    """Draws random numbers in each training step."""
    return nn.Sequential(nn.Dropout(0.2), tiny())


class Drawing(nn.Module):
    """Draws random numbers in each forward pass, also where it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + 0.1 * torch.randn_like(x))


class Bad(nn.Module):
    """Its loss is NaN in training after six steps from a reset."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return self.net(x) * torch.where(self.steps > 6, torch.nan, 1.0)


@pytest.fixture(scope="module", autouse=True)
def restore_torch() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def cut(train: int, test: int, load: Any = load) -> Any:
    """What loads so many of the images."""

    def load_some(folder: str) -> Any:
        whole, kept = load(folder), {"train": train, "test": test}
        names = [(f"{split}_{of}", n) for split, n in kept.items() for of in ("images", "labels")]
        return replace(whole, **{name: getattr(whole, name)[:n] for name, n in names})

    return load_some


@pytest.fixture(scope="module")
def data() -> Iterator[DatasetInfo]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.networks.data.load", cut(IMAGES, TESTS))
        yield prepare("synthetic", data_dir=None)


def find(case: Case, data: DatasetInfo) -> Outcome:
    return measure(Job(case, data.folder, asked_at=time.monotonic()), Channel())


def run(case: Case, data: DatasetInfo) -> tuple[Measurement, list[Step], dict[str, str]]:
    found = find(case, data)
    return found.measurement, found.steps, found.missing


def test_a_whole_epoch(data: DatasetInfo, monkeypatch: Patch) -> None:
    evaluated: list[list[int]] = []
    whole = Training.evaluate

    def watch(self: Training, batches: Any) -> tuple[float, float | None]:
        seen = list(batches)
        evaluated.append([len(y) for _, y in seen])
        return whole(self, seen)

    monkeypatch.setattr(Training, "evaluate", watch)
    m, steps, missing = run(replace(CASE, fraction=1.0, evaluate=True), data)
    # evaluation is new to cuDNN and the compiler: what they choose for a shape is not in its time
    warm, timed = evaluated
    assert warm == [50, TESTS % 50]
    assert sum(timed) == TESTS
    assert m.measured_steps == m.steps_per_epoch == len(steps) == STEPS
    assert m.measured_images == sum(step.images for step in steps) == IMAGES
    assert steps[-1].images == IMAGES % 50
    assert m.epoch_time_s == m.measured_time_s
    assert sum(step.time_s or 0 for step in steps) <= m.epoch_time_s
    assert m.images_per_s == pytest.approx(IMAGES / m.epoch_time_s)
    total = sum(step.images * (step.loss or math.nan) for step in steps)
    assert m.train_loss == pytest.approx(total / IMAGES)
    assert m.train_accuracy == sum(step.correct for step in steps) / IMAGES
    assert m.train_accuracy > 0.15
    values = (m.test_loss, m.test_accuracy, m.eval_time_s, m.setup_time_s, m.warmup_time_s)
    assert None not in values
    assert m.flop_per_image
    assert m.arithmetic == "float32"
    assert m.proof_layer == "3×3 convolution, 3 to 8 channels, on 32×32"
    for error in (m.conv_error, m.input_grad_error, m.weight_grad_error):
        assert 0 < error < 1e-5
    assert "conv=ieee" in (m.flags or "")
    assert m.first_bad_step is None
    assert missing["peak_allocated_bytes"] == "torch does not report CPU memory"


def test_a_fraction_is_extrapolated(data: DatasetInfo) -> None:
    found = find(CASE, data)
    m, steps = found.measurement, found.steps
    assert found.epochs == [], "one epoch is its record alone"
    assert (m.measured_steps, len(steps), m.steps_per_epoch) == (10, 10, STEPS)
    assert m.measured_images == 10 * 50
    assert m.measured_time_s <= m.epoch_time_low_s <= m.epoch_time_s <= m.epoch_time_high_s
    assert (m.step_time_first_s, m.step_time_last_s) == find_ends([s.time_s for s in steps])
    assert m.warmup_steps <= 1 + 5, "half as many as are measured, and the first"
    assert 0 < m.first_steps_time_s < m.warmup_time_s
    assert 5 * m.measured_time_s < m.epoch_time_s < 20 * m.measured_time_s


def test_the_ends_of_an_epoch_are_without_its_first_step_and_its_smaller_batch(
    data: DatasetInfo, monkeypatch: Patch
) -> None:
    """It starts on an idle device, and the last batch of a whole epoch is quicker."""
    level = [0.2 - step / 1000 for step in range(98)]
    for fraction, times in ((0.1, [0.5, *[0.1] * 8, 0.2]), (1.0, [0.5, *level, 0.01])):
        monkeypatch.setattr("bench.training.timing.StepClock.read", lambda self, times=times: times)
        m, _, _ = run(replace(CASE, fraction=fraction), data)
        whole = fraction == 1
        assert (m.step_time_first_s, m.step_time_last_s) == (
            find_ends(times[:-1]) if whole else (0.1, 0.1)
        )


@pytest.fixture
def few(data: DatasetInfo, monkeypatch: Patch) -> DatasetInfo:
    monkeypatch.setattr("bench.networks.data.load", cut(1100, 600))
    return data


THREE = replace(
    CASE, model=f"{__name__}:Drawing", fraction=1.0, batch_size=256, epochs=3, evaluate=True
)


def test_three_epochs_are_three_by_hand(few: DatasetInfo) -> None:
    """Bit for bit: the images of epochs 0, 1 and 2, one after the other, from scratch, as though
    no warm-up had been."""
    case = replace(THREE, model=f"{__name__}:dropping")
    found = find(case, few)
    batches, training = set_up(case, few.folder)
    start_over(training, batches)
    tests = training.workload.open_tests(batch_size=256, device=torch.device("cpu"))
    losses, hits, tested = [], [], []
    for index in range(3):
        for x, y in list_batches(batches, index):
            loss, correct, *_ = training.step((x, y))
            losses.append(float(loss))
            hits.append(int(correct))
        tested.append(training.evaluate(tests.evaluation()))
    assert [step.loss for step in found.steps] == losses
    assert [step.correct for step in found.steps] == hits
    assert [step.step for step in found.steps] == list(range(15))
    assert [step.images for step in found.steps] == [256, 256, 256, 256, 76] * 3
    assert len(set(losses[::5])) == 3, "each epoch has its own order and weights"
    m, rows = found.measurement, found.epochs
    assert [(row.test_loss, row.test_accuracy) for row in rows] == tested
    assert (m.test_loss, m.test_accuracy) == tested[-1]
    for row, start in zip(rows, (0, 5, 10), strict=True):
        parts = found.steps[start : start + 5]
        total = sum(step.images * (step.loss or math.nan) for step in parts)
        assert row.train_loss == pytest.approx(total / 1100)
        assert row.train_accuracy == sum(step.correct for step in parts) / 1100
        assert row.time_s >= sum(step.time_s or 0 for step in parts)
    assert (m.train_loss, m.train_accuracy) == (rows[-1].train_loss, rows[-1].train_accuracy)
    assert m.eval_time_s == rows[-1].eval_time_s
    assert (m.measured_steps, m.steps_per_epoch, m.measured_images) == (15, 5, 3300)
    assert m.measured_time_s == sum(row.time_s for row in rows)
    assert m.epoch_time_s == m.measured_time_s / 3
    assert m.images_per_s == pytest.approx(3300 / m.measured_time_s)


def test_an_evaluation_leaves_no_trace_in_training(few: DatasetInfo, monkeypatch: Patch) -> None:
    """Also where a model draws random numbers while it is evaluated, as this one does; nor one that
    fails half way: the second epoch trains all the same, and is evaluated."""
    evaluated, calls = Training.evaluate, 0

    def fail_once(self: Training, batches: Any) -> tuple[float, float | None]:
        nonlocal calls
        calls += 1
        if calls == 1:
            self.model.eval()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluated(self, batches)

    sound, without = (find(replace(THREE, evaluate=evaluate), few) for evaluate in (True, False))
    monkeypatch.setattr(Training, "evaluate", fail_once)
    found = find(THREE, few)
    assert found.epochs[0].test_loss is None
    assert [row.test_loss for row in found.epochs[1:]] == [r.test_loss for r in sound.epochs[1:]]
    assert found.measurement.test_loss == sound.measurement.test_loss
    assert "test_loss" not in found.missing
    for other in (without, found):
        assert [step.loss for step in other.steps] == [step.loss for step in sound.steps]


def test_overflows_and_divergence_count_over_all_epochs(few: DatasetInfo) -> None:
    settings = {"precision": "fp16", "loss_scale": "dynamic-apex"}  # its first is 2**32
    found = find(replace(THREE, model=f"{__name__}:Bad", **settings), few)
    m = found.measurement
    assert (found.status, m.first_bad_step, m.overflow_steps) == (Status.DIVERGED, 6, 15)
    assert (m.train_loss is None, m.epoch_time_s is None) == (True, False)
    assert [step.loss is None for step in found.steps] == [False] * 6 + [True] * 9
    assert [row.overflow_steps for row in found.epochs] == [5, 5, 5]
    assert [row.train_loss is None for row in found.epochs] == [False, True, True]
    assert found.reason.endswith("the loss was inf or NaN from step 6 of 15")


def test_too_short_for_an_interval_says_what_to_do(data: DatasetInfo) -> None:
    """Of a fraction and a number of steps the smaller counts."""
    for part, steps, flag in (
        ({"fraction": 0.01}, 1, "--fraction"),
        ({"fraction": 1.0, "steps": 3}, 3, "--steps"),
    ):
        m, rows, missing = run(replace(CASE, **part), data)  # type: ignore[arg-type]
        assert (m.measured_steps, m.steps_per_epoch, len(rows)) == (steps, STEPS, steps)
        assert m.epoch_time_low_s is None
        why = f"{steps} steps are too few for an interval; raise {flag}"
        assert missing["epoch_time_low_s"] == why
        assert m.epoch_time_s > 10 * m.measured_time_s
    assert run(replace(CASE, fraction=0.02, steps=9), data)[0].measured_steps == 2


def test_until_ends_an_epoch_that_is_known(data: DatasetInfo, monkeypatch: Patch) -> None:
    """One that cannot be told is measured whole. Warm-up is for the forty steps that most need."""
    steady, now = random.Random(0), count()  # a busy machine's steps may tell nothing
    monkeypatch.setattr(
        "bench.training.timing.perf_counter", lambda: (next(now) + steady.uniform(0, 0.1)) / 100
    )
    m, _, _ = run(replace(CASE, fraction=1.0, batch_size=8, until=0.5), data)
    assert 10 <= m.measured_steps < m.steps_per_epoch
    assert m.warmup_steps <= 1 + 20 + 3
    assert m.epoch_time_error == 0.5, "as well as was asked, and no better"
    assert m.epoch_time_low_s <= 0.5 * m.epoch_time_s
    m, _, _ = run(replace(CASE, fraction=1.0, until=1e-9), data)
    assert m.measured_steps == m.steps_per_epoch
    assert m.epoch_time_s == m.measured_time_s
    assert m.epoch_time_error is None


WHILE_STEPS_ARE_TIMED = """
import sys
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.training.parallel import ProcessGroup
from bench.training.timing import StepClock
from bench.workers.epochs import train
from bench.workers.job import Channel
from bench.workers.preparation import set_up

timed, imported, tick = False, [], StepClock.tick

def begin(clock):
    global timed
    tick(clock)
    timed = True

sys.addaudithook(lambda event, of: event == "import" and timed and imported.append(of[0]))
case = Case(
    model="models_for_tests:good", dataset="synthetic", device="cpu", batch_size=50, until=9.0
)
batches, training = set_up(case, sys.argv[1])
for batch in batches.divide(0, steps=2):
    training.step(batch)
StepClock.tick = begin
fetch = train(training, batches, 0, [0.1] * len(batches), Channel(), ProcessGroup())
timed = False
steps = len(fetch().times)
looked = steps < len(batches)
sys.exit(f"{steps} of {len(batches)} steps, imported {imported}" if imported or not looked else 0)
"""


@pytest.mark.slow
def test_nothing_is_imported_while_steps_are_timed(data: DatasetInfo) -> None:
    """By the first look at the interval it took an H200 as long as one to five steps."""
    command = [sys.executable, "-c", WHILE_STEPS_ARE_TIMED, data.folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def shapes(case: Case, data: DatasetInfo) -> list[int]:
    """The batch sizes of each step that the case takes before its epoch."""
    batches, training = set_up(case, data.folder)
    seen: list[int] = []
    training.model.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    warm = warm_up_shapes(training, batches, lambda step, loss: None)
    assert warm.steps == len(seen)
    start_over(training, batches)
    return seen


def test_retries_and_others_on_the_cpu_are_counted(few: DatasetInfo, monkeypatch: Patch) -> None:
    """Two retries since the process started, three more within the first epoch, and one within the
    second. Of the machine and of this process there are readings at the start and the end of
    each."""
    counts = iter([2, 2, 5, 6, 7])

    monkeypatch.setattr(measurement, "_count_retries", lambda device: next(counts))
    rows = [(10.0, 5.0, 100.0, 1.0), (29.0, 14.0, 110.0, 3.0)]
    readings = iter([*rows, (40.0, 20.0, 120.0, 3.0), (51.0, 21.0, 130.0, 4.0)])
    monkeypatch.setattr(OtherWork, "_read", lambda others: next(readings))
    m, _, _ = run(replace(THREE, epochs=2, evaluate=False), few)
    assert (m.warmup_alloc_retries, m.alloc_retries) == (2, 4)
    assert m.other_cores == pytest.approx(1.0)


def test_the_smaller_batch_is_warmed_only_where_it_is_measured(data: DatasetInfo) -> None:
    rest = IMAGES % 50
    assert shapes(CASE, data).count(rest) == 0
    assert shapes(replace(CASE, fraction=0.995), data).count(rest) == 3  # rounded up to the whole
    assert set(shapes(replace(CASE, batch_size=498, fraction=1.0), data)) == {498}
    few = shapes(replace(CASE, fraction=1.0, steps=1), data)
    assert (few.count(rest), set(few)) == (1, {50, rest}), "a few steps try each shape"
    assert len(few) <= 1 + 5 + 1


def test_a_false_label_is_invalid(data: DatasetInfo, monkeypatch: Patch) -> None:
    """As on a card whose convolutions ran in TF32 under an fp32 label, and diverged besides."""
    tf32 = OperationProof("a convolution", Arithmetic.TFLOAT32, 3e-4)
    matmul = OperationProof("a matmul", Arithmetic.FLOAT32, 2e-7)
    proof = Proof((LayerProof(DENSE, tf32, tf32, tf32),), matmul)
    monkeypatch.setattr(measurement, "prove", lambda *_: proof)
    found = find(CASE, data)
    assert found.status is Status.INVALID
    assert found.reason.startswith("labelled fp32, but a convolution: tfloat32 (error 3.0e-04); ")
    m = found.measurement
    assert m.arithmetic == "tfloat32/float32"
    m.first_bad_step, bad = 3, "the loss was inf or NaN from step 3 of 10"
    assert conclude(m, "mislabelled") == (Status.INVALID, f"mislabelled; {bad}")
    assert conclude(m) == (Status.DIVERGED, bad)
    unclear = OperationProof("a convolution", Arithmetic.UNCLEAR, 5e-5)
    proof = Proof((LayerProof(DENSE, unclear, unclear, unclear),), unclear)
    found = find(replace(CASE, steps=1), data)
    assert (found.status, found.reason) == (Status.OK, ""), "which is noted, and no more"
    assert found.measurement.arithmetic == "unclear"
    assert "a convolution: unclear (error 5.0e-05)" in found.measurement.proof_notes


def spoiled() -> nn.Module:
    """Sets switches, as a script may for its own training; here each to what it was not."""
    network = tiny()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return network


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tiny()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.backends.cudnn.deterministic = True
        return self.net(x)


def test_switches_that_the_users_code_sets_are_set_back(data: DatasetInfo) -> None:
    set_flags(PRECISIONS["fp32"])
    before = read_switches()
    with keep_switches({}):
        m, steps, _ = run(replace(CASE, model=f"{__name__}:spoiled"), data)
        assert find_changes(before) == {}
    assert steps
    assert (m.flags or "").split()[0] == "matmul=ieee"
    assert "cudnn_benchmark=false" in (m.flags or "")
    assert set((m.switched or "").split()) >= {
        "cuda.matmul.fp32_precision=tf32",
        "cudnn.benchmark=True",
        f"num_threads={before['num_threads'] + 1}",
        "default_dtype=float64",
        "grad_mode=False",
    }
    assert m.switched_within is None


def test_a_switch_that_is_set_within_steps_is_told(data: DatasetInfo) -> None:
    with keep_switches({}):
        m = run(replace(CASE, model=f"{__name__}:Later"), data)[0]
    assert (m.switched, m.switched_within) == (None, "cudnn.deterministic=True")


class Within(nn.Sequential):
    """Compiles a part of itself."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3072, 10))

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


class Late(Within):
    """Compiles it from the seventh step after a reset on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return super().forward(x) if self.steps > 6 else nn.Sequential.forward(self, x)


@pytest.mark.parametrize(("name", "within"), [("Within", 0), ("Late", 1)])
@pytest.mark.usefixtures("uncompiled")
def test_what_a_network_compiles_itself_is_told(name: str, within: int, data: DatasetInfo) -> None:
    """However it does: a network, a layer or a method; and whether measured steps hold it."""
    m = run(replace(CASE, model=f"{__name__}:{name}", fraction=1.0, batch_size=8, steps=8), data)[0]
    assert (m.compiled_within or 0) > 0
    assert m.epoch_recompilations == within


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Longer(Workload):
    """Each batch is longer than all before it."""

    samples = 40
    lengths = count(9)

    def build_model(self) -> nn.Module:
        return Twice(8, 2)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        return torch.randn(size, next(self.lengths), 8, generator=generator)

    def compute_loss(self, network: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = network(batch).square().mean()
        return loss


class Growing(nn.Module):
    """From the seventh step after a reset it trains an eleventh weight, each of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 512 + 32 * i, bias=False) for i in range(11))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        used = [*self.layers][: 11 if self.steps > 6 else 10]
        return torch.cat([layer(x) for layer in used], -1)


class Grown(Longer):
    """At most six steps of warm-up are as many as it takes until the network changes."""

    samples = 40
    lengths = repeat(1)

    def build_model(self) -> nn.Module:
        return Growing()


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.usefixtures("uncompiled")
def test_what_an_optimizer_compiles_in_measured_steps_is_counted(
    data: DatasetInfo, monkeypatch: Patch
) -> None:
    """It lifts torch's limit of eight, so that none of its steps runs as written."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    given = {"workload": f"{__name__}:Grown", "batch_size": 4, "device": "cpu"}
    m, _, _ = run(settle(given | {"optimizer": "adamw-fp8"}), data)
    assert m.measured_steps == 10
    assert (m.recompilations, m.epoch_recompilations, m.uncompiled) == (10, 1, 0)
    assert run(settle(given | {"optimizer": "adamw"}), data)[0].recompilations is None


# torch never compiles again what it once gave up, so that this comes last
@pytest.mark.parametrize(("dynamic", "most"), [("on", 1), ("auto", 2), ("off", 1000), ("off", 8)])
@pytest.mark.usefixtures("uncompiled")
def test_what_is_compiled_again_is_counted(
    dynamic: str, most: int, data: DatasetInfo, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    given = {"workload": f"{__name__}:Longer", "batch_size": 4, "device": "cpu"}
    with torch._dynamo.config.patch(recompile_limit=max(8, most)):
        m, _, _ = run(settle(given | {"compile": "default", "dynamic": dynamic}), data)
    assert m.warmup_steps
    assert m.measured_steps == 10
    in_warmup, every = (min(n, most) - 1 for n in (m.warmup_steps, m.warmup_steps + 10))
    assert (m.recompilations, m.epoch_recompilations) == (every, every - in_warmup)
    assert m.uncompiled == (most == 8)


def test_a_failing_proof_or_evaluation_keeps_the_epoch(
    data: DatasetInfo, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(measurement, "prove", Mock(side_effect=RuntimeError("no such kernel")))
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(measurement, "evaluate", Mock(side_effect=full))
    found = find(replace(CASE, evaluate=True), data)
    assert (found.status, found.reason) == (Status.OK, "")
    assert found.measurement.epoch_time_s
    assert len(found.steps) == 10
    assert "conv=ieee" in (found.measurement.flags or "")
    for column in ("arithmetic", "weight_grad_error"):
        assert getattr(found.measurement, column) is None
        assert found.missing[column] == "RuntimeError: no such kernel"
    assert found.measurement.test_loss is None
    reason = "--evaluate failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert describe_unmet(write_missing(found.missing)) == reason
