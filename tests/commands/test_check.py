"""The checks of a training: a sound one passes them all, and each planted fault fails its own."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.check import probes
from bench.check.__main__ import FEWEST_CHECKED, choose_cases, main
from bench.check.checks import (
    CHECKS,
    Check,
    Finding,
    OutOfTimeError,
    describe,
    explain,
)
from bench.check.probes import Subject, answer, check_seed
from bench.networks.data import DatasetInfo, load
from bench.networks.data.batches import stream
from bench.networks.workloads import Network, Workload
from bench.schema.case import Case
from bench.schema.flags import join_flags
from bench.sweep.options import parse_arguments as parse_sweep
from bench.sweep.options import plan_cases as plan_sweep
from bench.training.loop import Training
from tests.asked_for_tests import ask_once
from tests.pytest_for_tests import Capture, Patch

Run = Callable[..., int]

ALL = set(CHECKS)
STEPS = 20


# ---------------------------------------------------------------------------------- the networks


class Net(nn.Module):
    """Two convolutions with BatchNorm and a head of ten classes; ``prepare`` sees the images."""

    def __init__(
        self,
        classes: int = 10,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        width: int = 16,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.norm = norm(width)
        self.second = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)
        self.norm2 = norm(2 * width)
        self.head = nn.Linear(2 * width * 4 * 4, classes)
        self.drop = nn.Dropout(drop)

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(self.prepare(x))))
        x = F.relu(self.norm2(self.second(x)))
        logits: Tensor = self.head(self.drop(F.max_pool2d(x, 2).flatten(1)))
        return logits


class Standing(nn.BatchNorm2d):
    """Frozen: in evaluation mode whatever the network is in."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> Standing:
        return super().train(False)


narrow = partial(Net, width=4)
"""For fp16, which a CPU emulates: a step of 32 images takes 0.03 s, of `Net` 0.3 s."""

with_dropout = partial(Net, drop=0.5)


def with_frozen_backbone() -> nn.Module:
    """A linear head on fixed random features."""
    net = Net().requires_grad_(False)
    net.head.requires_grad_(True)
    return net


def intended() -> nn.Module:
    """As in fine-tuning the first convolution and its BatchNorm are not to be trained, and the head
    starts at zero: in the first step nothing behind it receives a gradient. And dropout."""
    net = with_dropout()
    net.norm = Standing(16)
    for parameter in (*net.first.parameters(), *net.norm.parameters()):
        parameter.requires_grad_(False)
    nn.init.zeros_(net.head.weight)
    return net


class Ending(Net):
    """Ends its process in the first batch of 16 images, as the kernel does without memory."""

    def prepare(self, x: Tensor) -> Tensor:
        if len(x) == 16:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Drawing(Net):
    """Draws from numpy's generator, which a case's seed does not reach."""

    def prepare(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.default_rng().normal(size=x.shape))
        return x + noise.to(x) if self.training else x


class Mixing(Net):
    def prepare(self, x: Tensor) -> Tensor:
        return x.view(3, len(x), 32, 32).permute(1, 0, 2, 3)  # x was (N, 3, 32, 32) already


class Blind(Net):
    def prepare(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Offset(Net):
    """Its outputs are near 1000; with ``leak`` they depend a little on the batch's mean."""

    leak = 0.0

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits + 1000 + self.leak * logits.mean(0)


class Leaking(Offset):
    leak = 0.1


def with_a_spare_layer() -> nn.Module:
    net = narrow()
    net.spare = nn.Linear(4, 4)
    return net


class Keeping(Net):
    """Keeps the logits of every step, detached from their graph."""

    def __init__(self) -> None:
        super().__init__()
        self.history = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.history.append(logits.detach())
        return logits


def trained() -> nn.Module:
    """Sure of its answer before the first step."""
    net = Net()
    with torch.no_grad():
        net.head.bias[3] = 12
    return net


# ----------------------------------------------------------------------------------- the workloads


class Summing(Workload):
    """Predict the sum of five numbers: no classes, nothing that is right, a loss of its own."""

    unit = "sums"
    samples = 640

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))

    def make_batch(
        self, size: int, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        numbers = torch.randn(size, 5, device=device, generator=generator)
        return {"numbers": numbers, "sum": numbers.sum(1, keepdim=True)}

    def compute_loss(self, network: Network, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(network(batch["numbers"]), batch["sum"])


class Deaf(Summing):
    """Its targets do not follow from what the network is given."""

    def make_batch(
        self, size: int, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        batch = super().make_batch(size, device, generator)
        return {**batch, "sum": torch.randn(size, 1, device=device, generator=generator)}


class Paired(Summing):
    """Neighbours are equal but for their targets, which no network sees."""

    alike = 2

    def make_batch(
        self, size: int, device: torch.device, generator: torch.Generator
    ) -> dict[str, Tensor]:
        batch = super().make_batch(size, device, generator)
        numbers = batch["numbers"][:: self.alike].repeat_interleave(self.alike, 0)[:size]
        return {**batch, "numbers": numbers}


class Constant(Paired):
    alike = 64


class Rowless(Summing):
    """Its network returns one number for all samples."""

    class Average(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    def build_model(self) -> nn.Module:
        return self.Average(5, 1)

    def compute_loss(self, network: Network, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(network(batch["numbers"]), batch["sum"].mean())


class Scaling(Net):
    """Divides its images by their deviation, which blank ones have none of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.std())


# ------------------------------------------------------------------------------------ the subject


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    """Two thousand images of ten patterns in noise: a small network learns them in a few steps."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 128, (10, 3, 4, 4), dtype=np.uint8).repeat(8, 2).repeat(8, 3)
    folder = tmp_path_factory.mktemp("few")
    for split, n in (("train", 2000), ("test", 100)):
        labels = rng.integers(0, 10, n).astype(np.uint8)
        images = patterns[labels] + rng.integers(0, 128, (n, 3, 32, 32), dtype=np.uint8)
        np.save(folder / f"{split}_images.npy", images)
        np.save(folder / f"{split}_labels.npy", labels)
    info = DatasetInfo("synthetic", "made-up", 2000, 100, 10, "synthetic", "")
    meta = {key: value for key, value in vars(info).items() if key != "folder"}
    (folder / "meta.json").write_text(json.dumps(meta))
    return load(folder).info


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def subject(data: DatasetInfo, model: str = "Net", **settings: object) -> Subject:
    settings = {"batch_size": 32, "lr": 0.005, **settings}
    case = Case(model=f"test_check:{model}", dataset="synthetic", device="cpu", **settings)  # type: ignore[arg-type]
    return Subject(case, data.folder, STEPS, math.inf)


def failing(subject: Subject, *names: str) -> set[str]:
    """The checks, of ``names`` or all, that fail."""
    answers = [answer(CHECKS[name], subject) for name in names or CHECKS]
    assert not [a for a in answers if a.result == "skipped"]
    return {a.check.name for a in answers if a.result == "FAIL"}


def find(name: str, subject: Subject) -> Finding:
    """What a check finds; it can be run, and applies."""
    found = answer(CHECKS[name], subject).finding
    assert found is not None
    return found


# ----------------------------------------------------------------------------- what is sound passes

LEARNING = {"overfit", "first-steps", "baseline"}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("narrow", {"precision": "fp16-amp"}),
        ("intended", {"channels_last": True, "seed": 5}),
    ],
)
def test_a_sound_training_passes(
    data: DatasetInfo, model: str, settings: dict[str, object]
) -> None:
    sound = subject(data, model, **settings)
    assert failing(sound) == set()
    if model == "intended":
        assert "3 frozen" in find("gradients", sound).unit


# ------------------------------------------------------------------------------- users' workloads


def test_targets_that_do_not_follow_from_the_inputs_are_caught() -> None:
    assert failing(own("Deaf"), "baseline", "overfit") == {"baseline"}


def own(name: str, batch_size: int = 32) -> Subject:
    name = f"test_check:{name}"
    case = Case(name, "own", workload=name, lr=0.05, device="cpu", batch_size=batch_size)
    return Subject(case, "", STEPS, math.inf)


def test_samples_that_are_equal_do_not_count_as_unused() -> None:
    assert failing(own("Paired"), "own-pixels") == set()


def test_what_does_not_apply_is_skipped_and_says_why(data: DatasetInfo) -> None:
    for name, alone, why in (
        ("initial-loss", own("Summing"), "the workload's own loss has no number of classes"),
        ("own-pixels", own("Summing", 1), "a batch has one sample: none can replace it"),
        ("own-pixels", own("Constant"), "all samples are equal: none can replace another"),
        ("own-pixels", own("Rowless"), "the network returns no row for each sample"),
        ("baseline", subject(data, "Scaling"), "blank inputs give the network no finite loss"),
    ):
        found = answer(CHECKS[name], alone)
        assert (found.result, found.why) == ("skipped", why)
        assert len(found.why) <= 55


# ------------------------------------------------------------------------ what is planted is caught


@pytest.mark.parametrize(
    ("model", "checks", "caught"),
    [
        ("Mixing", ("own-pixels", "seed"), {"own-pixels"}),
        ("Leaking", ("own-pixels",), {"own-pixels"}),
        ("Offset", ("own-pixels",), set()),
        ("Blind", ("own-pixels",), {"own-pixels"}),
        ("Drawing", ("seed", "own-pixels"), {"seed"}),
        ("trained", ("initial-loss", "seed"), {"initial-loss"}),
        ("Keeping", ("memory", "averaging"), {"memory"}),
    ],
)
def test_a_network_at_fault(
    data: DatasetInfo, model: str, checks: Sequence[str], caught: set[str]
) -> None:
    faulty = subject(data, model)
    assert failing(faulty, *checks) == caught
    if "own-pixels" in caught:
        expected = "does not depend on it" if model == "Blind" else "depends on sample"
        assert all(expected in named for named in find("own-pixels", faulty).named)
    if model == "Keeping":  # only the bytes tell: ten float32 logits of 32 images
        assert find("memory", faulty).value == pytest.approx(4 * 32 * 10, abs=100)


def test_a_loss_partly_summed(data: DatasetInfo, monkeypatch: Patch) -> None:
    """Twice the images make 1.5 times the step: more than noise, less than a sum. And the loss that
    is reported is right."""
    made, compute = Training.backward, Training.compute

    def backward(self: Training, loss: Tensor, last: bool) -> Any:
        return made(self, loss * self.images ** math.log2(1.5), last)  # type: ignore[attr-defined]

    def count(self: Training, x: Tensor) -> Tensor:
        self.images = len(x)  # type: ignore[attr-defined]
        return compute(self, x)

    monkeypatch.setattr(Training, "backward", backward)
    monkeypatch.setattr(Training, "compute", count)
    # without weight decay the step would be 1.5 times to the last digit
    assert find("averaging", subject(data)).value == pytest.approx(1.5, abs=0.02)
    assert failing(subject(data), "averaging", "initial-loss") == {"averaging"}


def test_a_frozen_backbone(data: DatasetInfo) -> None:
    """Its head cannot learn a batch by heart at this rate: it must halve the first loss."""
    slow = subject(data, "with_frozen_backbone", lr=0.0005)
    finding = find("overfit", slow)
    assert finding.passed
    assert finding.high > finding.value > 0.1
    assert finding.named == ("6 weights are frozen; --skip overfit if that is intended",)


def test_a_scale_that_overflows_for_a_while_is_not_unsound(data: DatasetInfo) -> None:
    """apex's first rule starts at 2^32: the first eighteen steps or so overflow."""
    scaled = subject(data, "narrow", precision="fp16", loss_scale="dynamic-apex")
    assert failing(scaled, "own-pixels", "gradients", "averaging") == set()


@pytest.mark.parametrize("lr", [1e6, 1e-7])
def test_a_learning_rate_at_fault(data: DatasetInfo, lr: float) -> None:
    faulty = subject(data, "narrow", lr=lr)
    assert failing(faulty, *LEARNING, "initial-loss") == LEARNING
    assert math.isfinite(faulty.first_losses[-1]) == (lr != 1e6)


def test_nearly_the_same_again(data: DatasetInfo, monkeypatch: Patch) -> None:
    """As on CUDA, where kernels add in no fixed order: not to the bit, and near all the same."""
    update, noise = Training.update, torch.Generator()
    assert find("seed", subject(data)).passed

    def waver(self: Training) -> tuple[Tensor, Tensor | None]:
        for p in self.parameters:
            p.grad *= 1 + 1e-6 * torch.randn(p.shape, generator=noise)
        return update(self)

    monkeypatch.setattr(Training, "update", waver)
    assert failing(subject(data), "seed") == {"seed"}
    near = check_seed(subject(data), exact=False)
    assert near.passed
    assert 0 < near.value < 1e-3 * near.high
    assert "with other batches" in near.unit
    # random numbers that no seed reaches make more than a tenth of what other batches make
    assert not check_seed(subject(data, "Drawing"), exact=False).passed


def test_a_training_that_stands_still_shows_nothing_of_a_seed(
    data: DatasetInfo, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Training, "update", lambda self: (torch.zeros((), dtype=torch.bool), None))
    assert not check_seed(subject(data), exact=False).passed


# ------------------------------------------------------------------------------------- the command


def test_a_finding_passes_within_its_bounds_alone() -> None:
    assert Finding(1.0, "", 0.5, 1.0).passed
    assert not Finding(math.nan, "").passed
    assert not Finding(math.inf, "", high=3).passed


def test_what_raises_fails_and_says_why(data: DatasetInfo, monkeypatch: Patch) -> None:
    def broken(_: Subject) -> Finding:
        raise ValueError("no such\nluck")

    monkeypatch.setattr(probes, "check_broken", broken, raising=False)
    found = answer(Check("broken", "it works", "Mend it."), subject(data))
    assert found.result == "FAIL"
    assert "could not be run" in describe(found)
    assert "ValueError: no such luck" in explain(found)


@pytest.fixture(scope="module")
def answers() -> Callable[..., object]:
    return ask_once(
        "test_check:with_a_spare_layer", "test_check:Ending", "workload:test_check:Summing"
    )


@pytest.fixture
def asked(answers: Callable[..., object], monkeypatch: Patch) -> None:
    """The command does not start a process to ask."""
    monkeypatch.setattr("bench.sweep.preflight.examine", answers)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the synthetic images are made, once."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def run(asked: None, images: Path) -> Run:
    def run(*flags: str, model: str) -> int:
        common = ["--device", "cpu", "--batch-size", "16", "--steps", str(FEWEST_CHECKED)]
        common += ["--data-dir", str(images), "--budget", "1h"]
        own = ["--model", model, "--dataset", "synthetic"] if model else []
        return main(join_flags(common, own, flags))

    return run


def test_the_command_takes_a_workload(run: Run, capsys: Capture) -> None:
    assert run("--workload", "test_check:Summing", "--lr", "0.05", model="") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("test_check:Summing, fp32 · batch size 16, on cpu\n")
    assert all(len(line) <= 80 for line in captured.out.splitlines())
    assert "8 of 8 checks passed" in captured.out
    assert re.search(r"^initial-loss +skipped the workload's own", captured.out, re.MULTILINE)


def test_the_command_outlives_its_training(run: Run, capsys: Capture) -> None:
    """And says of every check why it has no answer."""
    assert run("--skip", *sorted(ALL - {"gradients", "seed"}), model="test_check:Ending") == 1
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("FAIL could not be run") == 2
    assert output.count("the process of the checks ended with SIGKILL") == 2
    assert "0 of 2 checks passed" in output


ALONE = """
import sys
from bench.check.__main__ import main
skipped = "--skip", *"own-pixels averaging overfit seed memory first-steps baseline".split()
code = main(["--device", "cpu", "--batch-size", "8", "--model", "test_check:Net", *skipped])
print(code, "torch" in sys.modules)
"""


@pytest.mark.slow
def test_the_command_waits_for_torch_once(tmp_path: Path) -> None:
    """In the process that others are forked from, which is asked of the machine already."""
    command = [sys.executable, "-c", ALONE]
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}}
    done = subprocess.run(command, capture_output=True, text=True, check=True, **where)
    assert done.stdout.splitlines()[-1] == "0 False"
    assert "2 of 2 checks passed" in done.stdout


@pytest.mark.slow
def test_the_command_fails_where_a_check_does(run: Run, capsys: Capture) -> None:
    skipped = sorted(ALL - {"gradients", "initial-loss", "first-steps"})
    model = "test_check:with_a_spare_layer"
    assert run("--lr", "1e6", "--skip", *skipped, model=model) == 1
    output = capsys.readouterr().out
    assert "spare.weight; spare.bias" in output
    results = re.findall("^([a-z-]+) +(pass|FAIL) ", output, re.MULTILINE)
    assert dict(results) == {"initial-loss": "pass", "first-steps": "FAIL", "gradients": "FAIL"}


def test_what_the_time_is_too_short_for_is_named(
    run: Run, capsys: Capture, data: DatasetInfo
) -> None:
    """Before a check and within one, and nothing of it counts as passed or failed."""
    assert run("--workload", "test_check:Summing", "--budget", "0.001s", model="") == 1
    output = capsys.readouterr().out
    assert "0 of 0 checks passed" in output
    assert f"not run: {', '.join([*CHECKS][1:])}; --budget 10m runs all" in output
    late = subject(data)
    batches, training = late.start()
    late.until = 0.0
    with pytest.raises(OutOfTimeError):
        training.step(next(stream(batches)))
    assert answer(CHECKS["overfit"], late).result == "not run"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_network_and_the_images_are_those_of_a_sweep(device: str) -> None:
    """So on a CPU nothing is downloaded."""
    (case,) = choose_cases({"device": [device]})
    first, *_ = plan_sweep(parse_sweep(["--device", device])).cases
    assert (case.model, case.dataset) == (first.model, first.dataset)
