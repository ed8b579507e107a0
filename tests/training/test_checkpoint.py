"""Training resumed from a checkpoint goes on bit for bit; a file that is not whole is not read."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.networks.workloads import Loss, Network
from bench.results.store.reader import read_records
from bench.results.store.table import BEST, LAST
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.record import Environment, EpochRow, Outcome, Status
from bench.sweep.__main__ import main as sweep_main
from bench.sweep.folder import KeptRun
from bench.training.building import seed_all
from bench.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from bench.training.loop import Training
from bench.workers.checkpoints import Checkpoints, find_best
from bench.workers.job import Channel, Job
from bench.workers.measurement import measure
from tests import models_for_tests
from tests.frames_for_tests import read_steps
from tests.planted.records import make_run
from tests.training_for_tests import CPU, OURS, batch, in_parts, training


@pytest.fixture(scope="module", autouse=True)
def restore_torch() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


# ------------------------------------------------------------------------------- bitwise exactness


class Counting(nn.Module):
    """Multiplies by what it counts, in a buffer that its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls / 16)


def dropping(seed: int) -> nn.Module:
    """BatchNorm, which counts, and dropout, which draws."""
    torch.manual_seed(seed)
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), Counting(), nn.ReLU())
    return nn.Sequential(*convolution, nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10))


WAYS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OURS),
    ("fp16", {"loss_scale": "dynamic"}),
    ("fp16", {"loss_scale": "dynamic-apex-amp", "optimizer": "adamw"}),
    ("fp16", {"loss_scale": "dynamic-apex"}),
    ("bf16", {"channels_last": True, "optimizer": "adamw"}),
]


def read_bits(tensor: Tensor) -> bytes:
    torch.save(tensor.detach().clone(), file := BytesIO())
    return file.getvalue()


def trace(ours: Training, batches: Iterator[Any]) -> list[object]:
    """Train on ``batches`` and return what came of it, bit for bit: the loss scale, loss and
    overflow of each step, then all of the state."""
    ours.set_lr(ours.lr)
    found: list[Any] = []
    for each in batches:
        found.append(ours.current_scale())
        loss, _, overflowed, _ = ours.step(each)
        found += [loss.detach(), overflowed]
    leaves = tree_leaves([found, ours.state()])
    return [read_bits(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]


def batches(first: int, steps: int) -> Iterator[Any]:
    return (in_parts(*batch(8, seed), 5, 3) for seed in range(first, first + steps))


def train_and_save(file: Path, precision: str = "fp16", **settings: Any) -> Training:
    torch.manual_seed(0)
    ours = training(precision, build=dropping, **settings)
    for each in batches(0, 4):
        ours.step(each)
    save_checkpoint(file, ours)
    return ours


def resume(file: Path, precision: str = "fp16", **settings: Any) -> list[object]:
    """The trace of a network of another seed that goes on from the file."""
    torch.manual_seed(99)
    random.seed(99)
    other = training(precision, seed=7, build=dropping, **settings)
    for each in batches(50, 2):
        other.step(each)
    restore_checkpoint(load_checkpoint(file), other)
    return trace(other, batches(4, 3))


@pytest.mark.parametrize(
    ("precision", "settings"), WAYS, ids=[f"{n} {'-'.join(map(str, s.values()))}" for n, s in WAYS]
)
def test_resumed_steps_are_those_without_bit_for_bit(
    precision: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    live = train_and_save(tmp_path / LAST, precision, **settings)
    expected = trace(live, batches(4, 3))
    assert resume(tmp_path / LAST, precision, **settings) == expected
    untouched = trace(training(precision, build=dropping, **settings), batches(4, 3))
    assert untouched != expected, "a comparison that sees nothing"


def test_the_random_numbers_of_python_and_numpy_go_on_too(tmp_path: Path) -> None:
    def take() -> list[float]:
        drawn = [np.random.randn(), np.random.rand()]
        return [random.gauss(), random.random(), *drawn, float(torch.rand(()))]

    seed_all(3)
    random.gauss()  # leaves a second one to be given
    np.random.randn()  # likewise
    save_checkpoint(tmp_path / LAST, training())
    expected = take()
    seed_all(4)
    assert take() != expected
    restore_checkpoint(load_checkpoint(tmp_path / LAST), training())
    assert take() == expected


# ---------------------------------------------------------------------------------- files are whole


def test_a_torn_file_is_never_read(tmp_path: Path) -> None:
    """Cut off anywhere, with a page of zeros, or with one wrong bit in the largest tensor."""
    file = tmp_path / LAST
    train_and_save(file, "fp32")
    whole = file.read_bytes()
    torn = [whole[:end] for end in range(0, len(whole), len(whole) // 40)]
    largest = max(zipfile.ZipFile(file).infolist(), key=lambda part: part.file_size)
    inside = largest.header_offset + largest.file_size // 2 + 128  # of its header and padding
    flipped = bytes([whole[inside] ^ 1])
    altered = whole[:inside] + flipped + whole[inside + 1 :]
    for data in (*torn, whole[:4096] + bytes(4096) + whole[8192:], altered):
        file.write_bytes(data)
        with pytest.raises(CheckpointError):
            load_checkpoint(file)


def test_a_file_of_another_format_or_with_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / LAST
    torch.save({"format": 0}, file)
    with pytest.raises(CheckpointError, match="of another format than 1"):
        load_checkpoint(file)
    torch.save({"format": 1, "evil": os.system}, file)
    with pytest.raises(CheckpointError, match=r"last.pt cannot be read as a whole .*[Ww]eights"):
        load_checkpoint(file)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt")


def test_on_a_full_disk_the_earlier_file_stands(tmp_path: Path) -> None:
    file = tmp_path / LAST
    save_checkpoint(file, training(), number=1)
    (tmp_path / f".{LAST}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        save_checkpoint(file, training(), number=2)
    assert load_checkpoint(file)["number"] == 1
    assert [f.name for f in tmp_path.iterdir()] == [LAST], "and nothing lies beside it"
    save_checkpoint(file, training(), number=3)
    assert load_checkpoint(file)["number"] == 3


# ------------------------------------------------------------------------------------ a whole case


class Rows(models_for_tests.Rows):
    """By a network with buffers and random numbers of its own."""

    test_samples = 32

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2)
        )


WAIT = "BENCH_TEST_WAIT"
"""Environment variable: a folder; once a checkpoint is in it, or below, `Waiting` trains no step
more."""


class Waiting(Rows):
    def compute_loss(self, network: Network, batch: Any) -> Tensor | Loss:
        while WAIT in os.environ and any(Path(os.environ[WAIT]).rglob(LAST)):
            time.sleep(0.05)
        return super().compute_loss(network, batch)


def make_case(name: str = "Rows", **settings: Any) -> Case:
    axes = {"workload": [f"{__name__}:{name}"], "device": ["cpu"], "batch_size": [16]}
    (case,) = grid({**axes, "lr": [0.3], **{k: [v] for k, v in settings.items()}})
    return replace(case, checkpoint=True)


THREE = {"epochs": 3, "evaluate": True, "schedule": "cosine"}
WHOLE = make_case(**THREE)


def run(case: Case, folder: Path | None = None, **identity: str) -> Outcome:
    job = Job(case, checkpoints=folder, identity=identity, asked_at=time.monotonic())
    return measure(job, Channel())


def learnt(found: Outcome) -> tuple[Any, ...]:
    """What was learnt, without times."""
    steps = [replace(step, time_s=None) for step in found.steps]
    epochs = [asdict(row) | {"time_s": 0, "eval_time_s": 0} for row in found.epochs]
    m = found.measurement
    return steps, epochs, m.train_loss, m.test_accuracy, m.final_loss_scale, m.overflow_steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Three epochs that nothing interrupts."""
    return run(WHOLE, tmp_path_factory.mktemp("whole") / "run")


def test_saving_is_in_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda *args: (time.sleep(1.0), save(*args)))
    found = run(make_case(epochs=2), tmp_path)
    assert found.measurement.measured_time_s < 1.0
    assert (tmp_path / LAST).exists()


class Interrupted(BaseException):
    """As a Ctrl-C comes: nothing that a worker forgives."""


def interrupt(case: Case, folder: Path, epoch: int, **identity: str) -> None:
    """Train until ``epoch``, from 0, has begun, and be cut short."""

    class Ear(Channel):
        def enter(self, phase: Any, entered: int = 0) -> None:
            if (phase, entered) == ("epoch", epoch):
                raise Interrupted

    job = Job(case, checkpoints=folder, identity=identity, asked_at=time.monotonic())
    with pytest.raises(Interrupted):
        measure(job, Ear())


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp16", "loss_scale": "dynamic"},
        {"precision": "bf16-amp", "optimizer": "adamw", "accumulate": 3},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_an_interrupted_case_ends_as_if_it_had_not_been(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    case = make_case(**settings, **THREE)
    whole = run(case, tmp_path / "whole")
    for epoch in (1, 2):  # twice: the second process resumes, and is interrupted as well
        interrupt(case, tmp_path / "parts", epoch)
    found = run(case, tmp_path / "parts")
    assert learnt(found) == learnt(whole)
    m = found.measurement
    assert (m.resumed_epochs, whole.measurement.resumed_epochs) == (2, 0)
    assert (m.measured_steps, len(found.steps), len(found.epochs)) == (12, 12, 3)
    assert m.epoch_time_s == pytest.approx(sum(row.time_s for row in found.epochs) / 3)
    assert "2 epochs of 3 trained by an earlier process" in (m.notes or "")


def test_the_last_and_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By test accuracy, of which the second epoch has the highest here."""
    from bench.workers import measurement
    from bench.workers.epochs import evaluate

    scores = iter([0.5, 0.75, 0.625])
    monkeypatch.setattr(
        measurement, "evaluate", lambda *args: replace(evaluate(*args), accuracy=next(scores))
    )
    found = run(WHOLE, tmp_path)
    last, best = (load_checkpoint(tmp_path / name) for name in (LAST, BEST))
    assert (last["epoch"], best["epoch"]) == (3, 2)
    other = Training(WHOLE, Rows().build_model(), CPU, Rows())
    restore_checkpoint(best, other)
    loss, _ = other.evaluate(Rows().open_tests(batch_size=16, device=CPU).evaluation())
    assert loss == pytest.approx(found.epochs[1].test_loss)


@pytest.mark.parametrize(
    ("best", "epochs"),  # of training loss, test loss and test accuracy
    [
        (None, []),
        (1, [(1.0, None, None), (0.5, None, None)]),
        (0, [(1.0, 2.0, None), (0.5, 3.0, None)]),
        (0, [(1.0, 2.0, 0.5), (0.5, 1.0, 0.25), (1, 1, 0.5)]),
        (0, [(1.0, 2.0, 0.5), (None, None, 0.75)]),
        (None, [(None, None, 0.5)]),
    ],
)
def test_the_best_epoch(best: int | None, epochs: list[Any]) -> None:
    rows = [EpochRow(i, 1.0, one, 0.5, *tested) for i, (one, *tested) in enumerate(epochs)]
    assert find_best(rows) == best


def test_a_damaged_checkpoint_or_one_of_another_run_is_not_resumed(
    whole: Outcome, tmp_path: Path
) -> None:
    interrupt(WHOLE, tmp_path / "run", 2, code="1", torch="2.12")
    found = run(WHOLE, tmp_path / "run", code="1", torch="2.13")
    assert learnt(found) == learnt(whole)
    assert found.measurement.resumed_epochs == 0
    note = "an earlier checkpoint was not resumed: it is of another run, or of other code, data"
    assert (found.measurement.notes or "").startswith(note)
    last = tmp_path / "run" / LAST
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    m = run(WHOLE, tmp_path / "run", code="1", torch="2.13").measurement
    assert m.resumed_epochs == 0
    assert "last.pt cannot be read as a whole" in (m.notes or "")
    assert load_checkpoint(tmp_path / "run" / BEST)["epoch"] in (1, 2, 3)


def test_where_nothing_can_be_saved_the_row_is_not_lost(whole: Outcome, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run(WHOLE, tmp_path / "file")
    assert learnt(found) == learnt(whole)
    note = "no checkpoint was saved after an epoch: File exists"
    assert (found.measurement.notes or "").split("; ").count(note) == 1, "not after each epoch"
    assert found.missing["checkpoint"] == note


# ------------------------------------------------------------------------------ through processes


@pytest.mark.slow
def test_a_sweep_killed_between_two_epochs_is_continued(tmp_path: Path) -> None:
    """By SIGKILL, to the sweep itself; the same command then ends with the same losses."""
    out = tmp_path / "out"
    flags = f"--workload tests.training.{__name__}:Waiting --device cpu --batch-size 16 --lr 0.3"
    flags += " --epochs 3 --evaluate --schedule cosine --checkpoint --precision bf16 --fraction 1"
    command = [sys.executable, "-m", "bench.sweep", *flags.split(), "--out", str(out)]
    with (tmp_path / "log").open("wb") as log:
        sweep = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, WAIT: str(out)}
        )
        while not any(out.rglob(LAST)):
            assert sweep.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        sweep.send_signal(signal.SIGKILL)
        sweep.wait()
    assert len(read_records(out)) == 0
    assert sweep_main(command[3:]) == 0
    (found,) = read_records(out).to_dict("records")
    assert (found["status"], found["resumed_epochs"]) == ("ok", 1)
    case = make_case("Waiting", precision="bf16", **THREE)
    whole = run(case, tmp_path / "whole")
    steps = read_steps(out)
    assert steps["loss"].tolist() == [step.loss for step in whole.steps]
    assert steps["lr"].tolist() == [step.lr for step in whole.steps]
    (kept,) = (out / "checkpoints").iterdir()
    assert sorted(file.name for file in kept.iterdir()) == [BEST, LAST, "record_id"]


def test_a_run_that_has_its_row_starts_anew(tmp_path: Path) -> None:
    """One that was cut short is gone on from; asked for with --retry, it is trained again."""
    case, kept = WHOLE, KeptRun(tmp_path / "checkpoints" / "run", "1")
    identity = kept.identify(case, Environment(torch="2.13"))
    assert (identity["torch"], identity["precision"]) == ("2.13", "fp32")
    interrupt(case, kept.folder, 2, **identity)
    kept.finish(make_run(case, status=Status.INTERRUPTED))
    kept.open()
    assert (kept.folder / LAST).exists()
    assert run(case, kept.folder, **identity).measurement.resumed_epochs == 2
    kept.finish(make_run(case))
    kept.open()
    assert list(kept.folder.iterdir()) == []
    assert run(case, kept.folder, **identity).measurement.resumed_epochs == 0
