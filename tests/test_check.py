"""The checks of a training: a sound one passes them all, and each planted fault fails its own."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from apex_for_tests import install
from asked_for_tests import ask_once
from pytest_for_tests import Capture, Patch
from torch import Tensor, nn

from bench.case import Case
from bench.check import findings
from bench.check.__main__ import LEAST_STEPS, choose_cases, main
from bench.check.checks import CHECKS, Check, Checked, Finding, Result, answer
from bench.check.findings import _bound_overfit, check_seed
from bench.check.layers import Ledger, dead_share, spread
from bench.check.pictures import draw_batch, draw_pictures
from bench.check.report import describe, explain, write_bounds
from bench.check.subject import Retained, Subject
from bench.data import DatasetInfo, load, prepare
from bench.data.batches import Batches, Divided, _Augmentation, stream
from bench.flags import join_flags
from bench.sweep.options import parse_arguments as parse_sweep
from bench.sweep.options import plan_cases as plan_sweep
from bench.training.loop import Training
from bench.workloads import Loss, Network, Workload

ROOT = Path(__file__).parents[1]

Device, Random = torch.device, torch.Generator
Plant = Callable[[Patch], None]
Run = Callable[..., int]

ALL = set(CHECKS)
HELD = ("memory", "graphs")
STEPS = 20
PICTURES = ["batch.png", "losses.png", "predictions.png", "layers.png"]


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

three_classes = partial(narrow, 3)
with_dropout = partial(Net, drop=0.5)
with_more_dropout = partial(Net, drop=0.95)  # so much that the training loss stays high
without_norm = partial(Net, norm=nn.Identity, width=8)
with_frozen_norm = partial(Net, norm=Standing)


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


class Masking(Net):
    """Dropout from a generator that starts anew in each process, not by the seed."""

    masks = torch.Generator()

    def prepare(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.masks) < 0.5) if self.training else x


class Drawing(Net):
    """Draws from numpy's generator, which a case's seed does not reach."""

    def prepare(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.default_rng().normal(size=x.shape))
        return x + noise.to(x) if self.training else x


class Standardising(Net):
    """Divides each image by its own deviation: of a blank one, 0 by 0."""

    def prepare(self, x: Tensor) -> Tensor:
        return (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)


class Mixing(Net):
    def prepare(self, x: Tensor) -> Tensor:
        return x.view(3, len(x), 32, 32).permute(1, 0, 2, 3)  # x was (N, 3, 32, 32) already


def with_a_spare_layer() -> nn.Module:
    net = narrow()
    net.spare = nn.Linear(4, 4)
    return net


class Keeping(Net):
    """Keeps something of every step: its images, or its logits with their graph or detached."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.history = what, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        kept = {"images": x, "logits": logits, "detached": logits.detach()}
        self.history.append(kept[self.what])
        return logits


keeping_images = partial(Keeping, "images")
keeping_logits = partial(Keeping, "logits")
keeping_detached = partial(Keeping, "detached")


def dying() -> nn.Module:
    """Biases so low that no ReLU of the second layer is ever active."""
    net = narrow()
    nn.init.constant_(net.norm2.bias, -50)
    return net


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

    def make_batch(self, size: int, device: Device, generator: Random) -> dict[str, Tensor]:
        numbers = torch.randn(size, 5, device=device, generator=generator)
        return {"numbers": numbers, "sum": numbers.sum(1, keepdim=True)}

    def compute_loss(self, network: Network, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(network(batch["numbers"]), batch["sum"])


class Total(Summing):
    """Its loss is that of all items together."""

    def compute_loss(self, network: Network, batch: dict[str, Tensor]) -> Tensor:
        return len(batch["sum"]) * super().compute_loss(network, batch)


class Ranking(Summing):
    """Its network compares each item with the mean of all."""

    def build_model(self) -> nn.Module:
        class Centred(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x - x.mean(0))  # type: ignore[no-any-return]

        return Centred(*super().build_model())  # type: ignore[misc]


class Deaf(Summing):
    """Its targets do not follow from what the network is given."""

    def make_batch(self, size: int, device: Device, generator: Random) -> dict[str, Tensor]:
        batch = super().make_batch(size, device, generator)
        return {**batch, "sum": torch.randn(size, 1, device=device, generator=generator)}


class Following(Workload):
    """Which token follows which of eight: its network is given whole numbers alone."""

    unit = "tokens"
    samples = 640

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))

    def make_batch(self, size: int, device: Device, generator: Random) -> Tensor:
        first = torch.randint(8, (size, 1), device=device, generator=generator)
        return (first + 3 * torch.arange(6, device=device)) % 8

    def compute_loss(self, network: Network, batch: Tensor) -> Loss:
        logits, right = network(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), right.flatten())
        return Loss(loss, (logits.detach().argmax(2) == right).sum())

    def count_units(self, size: int) -> int:
        return size * 5


class Coded(Following):
    """Its network looks the tokens up in no `nn.Embedding`."""

    def build_model(self) -> nn.Module:
        class Code(nn.Module):
            def forward(self, tokens: Tensor) -> Tensor:
                return F.one_hot(tokens, 8).float()

        return nn.Sequential(Code(), nn.Linear(8, 8))


class Pictures(Workload):
    """Images of ten patterns, by the loss and the batches' form of the default."""

    samples = 640

    def build_model(self) -> nn.Module:
        return Net()

    def make_batch(self, size: int, device: Device, generator: Random) -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (size,), device=device, generator=generator)
        noise = torch.randn(size, *self.shape, device=device, generator=generator)
        noise[torch.arange(size), y % 3, y] += 8  # a bright row, in one of the colours
        return noise, y


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
        store(folder, **{f"{split}_images": images, f"{split}_labels": labels})
    info = DatasetInfo("synthetic", "made-up", 2000, 100, 10, "synthetic", "")
    return describe_data(folder, info)


def store(folder: Path, **arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def describe_data(folder: Path, info: DatasetInfo) -> DatasetInfo:
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
    return Subject(case, data.folder, STEPS)


def failing(subject: Subject, *names: str) -> set[str]:
    """The checks, of ``names`` or all, that fail."""
    answers = [answer(CHECKS[name], subject) for name in names or CHECKS]
    assert not [a for a in answers if a.result is Result.SKIPPED]
    return {a.check.name for a in answers if a.result is Result.FAIL}


# ----------------------------------------------------------------------------- what is sound passes


def test_what_frozen_weights_leave_need_not_fall_below_what_is_near_zero() -> None:
    data: Any = Mock(classes=10)
    assert _bound_overfit(data, 2.4, frozen=True) == pytest.approx(1.2)
    assert _bound_overfit(data, 0.15, frozen=True) == _bound_overfit(data, 2.4, frozen=False) == 0.1


LEARNING = {"overfit", "first-steps", "baseline"}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("narrow", {"channels_last": True, "seed": 5}),
        ("narrow", {"precision": "bf16-amp"}),
        ("narrow", {"precision": "bf16"}),
        ("narrow", {"precision": "fp16-amp"}),
        ("without_norm", {}),
        ("intended", {}),
    ],
)
def test_a_sound_training_passes(
    data: DatasetInfo, model: str, settings: dict[str, object]
) -> None:
    assert failing(subject(data, model, **settings)) == set()


def test_a_batch_of_two_is_a_poor_one_to_learn_from_and_not_unsound(data: DatasetInfo) -> None:
    assert failing(subject(data, batch_size=2), *(ALL - LEARNING)) == set()


def test_frozen_parts_are_named(data: DatasetInfo) -> None:
    frozen = subject(data, "intended")
    finding = CHECKS["gradients"].run(frozen)
    assert finding.data["frozen"] == ["first.weight", "norm.weight", "norm.bias"]
    assert "3 frozen" in finding.unit
    assert CHECKS["batchnorm"].run(frozen).data["frozen"] == ["norm"]


def store_anew(data: DatasetInfo, folder: Path, labels: np.ndarray, classes: int) -> DatasetInfo:
    """The first training images with other labels, of which those below ``classes`` are kept."""
    whole, few = load(data.folder), labels < classes
    store(folder, train_images=whole.train_images[: len(few)][few], train_labels=labels[few])
    store(folder, test_images=whole.test_images[:0], test_labels=whole.test_labels[:0])
    info = replace(data, classes=classes, train_images=int(few.sum()), test_images=0)
    return describe_data(folder, info)


def test_classes_of_ones_own_have_their_own_first_loss(data: DatasetInfo, tmp_path: Path) -> None:
    """Three classes: guessing has a loss of ln 3, and the training takes three logits."""
    info = store_anew(data, tmp_path, load(data.folder).train_labels, 3)
    three = subject(info, "three_classes")
    finding = CHECKS["initial-loss"].run(three)
    assert finding.passed
    assert (finding.low + finding.high) / 2 == pytest.approx(math.log(3))
    assert failing(three) == set()


@pytest.mark.thorough
def test_real_images(cifar10: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """The small network passes, and to learn what is on them from first steps takes it minutes, so
    another shows that it can be learnt. 2,000 images are copied each time in place of 50,000."""
    info = prepare("cifar10", data_dir=cifar10)
    few = store_anew(info, tmp_path, load(info.folder).train_labels[:2000], 10)
    case = Case("test_check:Net", "cifar10", precision="fp32", batch_size=32, device="cpu")
    taught = {"first-steps", "baseline"}
    assert failing(Subject(case, few.folder, 60), *taught) == set()
    monkeypatch.setattr("bench.check.subject.PATIENCE", 1)
    small = Subject(replace(case, model="dpn-small", batch_size=8), few.folder, LEAST_STEPS)
    assert failing(small, *(ALL - taught)) == set()


# ------------------------------------------------------------------------------- users' workloads


def own(workload: str, lr: float = 0.05, **settings: object) -> Subject:
    name, about = f"test_check:{workload}", {"device": "cpu", "batch_size": 32, **settings}
    return Subject(Case(name, "own", workload=name, lr=lr, **about), "", STEPS)  # type: ignore[arg-type]


IMAGES, CLASSES = "no images of --dataset", "no number of classes"


@pytest.mark.parametrize(
    ("workload", "lr", "lacking"),
    [
        ("Summing", 0.05, {"batch": IMAGES, "initial-loss": CLASSES}),
        ("Following", 0.5, {"batch": IMAGES, "initial-loss": CLASSES}),
        ("Pictures", 0.01, {"batch": IMAGES}),
    ],
)
def test_a_sound_workload_passes_what_it_has_the_data_for(
    workload: str, lr: float, lacking: dict[str, str]
) -> None:
    """Nor does torch's mse_loss retain anything, though its result is in the memory of all
    elements' losses."""
    checked = own(workload, lr)
    answers = {name: answer(check, checked) for name, check in CHECKS.items()}
    assert {name for name, a in answers.items() if a.result is Result.FAIL} == set()
    found = {name: a.lacks for name, a in answers.items() if a.result is Result.SKIPPED}
    assert found.keys() == lacking.keys()
    for name, what in lacking.items():
        assert what in found[name], "it says what is missing"
        assert len(describe(answers[name])) <= 80


@pytest.mark.parametrize(
    ("workload", "check"), [("Total", "averaging"), ("Ranking", "own-pixels"), ("Deaf", "baseline")]
)
def test_what_is_planted_in_a_workload_is_caught(workload: str, check: str) -> None:
    assert failing(own(workload), check) == {check}
    assert failing(own("Summing"), check) == set()


def test_blank_images_that_become_nan_test_nothing(data: DatasetInfo) -> None:
    checked = subject(data, "Standardising")
    assert failing(checked, "first-steps") == set()
    found = answer(CHECKS["baseline"], checked)
    assert found.lacks == "blank inputs give the network no finite loss"
    assert failing(subject(data, lr=1e30), "baseline") == {"baseline"}, "its own loss is NaN too"


def test_what_only_whole_numbers_enter_cannot_be_followed() -> None:
    found = answer(CHECKS["own-pixels"], own("Coded", 0.5))
    assert found.result is Result.SKIPPED
    assert found.lacks == "the network has no float inputs and no nn.Embedding"


# ------------------------------------------------------------------------ what is planted is caught


def shuffle_labels(monkeypatch: Patch, augmented: bool = False) -> None:
    """Give each image the label of the one before; ``augmented`` ones alone."""
    divide = Batches.divide

    def shuffled(self: Batches, *at: int | None, **limits: int | None) -> Iterator[Divided]:
        for batch in divide(self, *at, **limits):  # type: ignore[arg-type]
            shuffle = self.augment or not augmented
            parts = ((x, y.roll(1) if shuffle else y) for x, y in batch.parts)
            yield Divided(batch.size, parts)

    monkeypatch.setattr(Batches, "divide", shuffled)


def mix_samples(monkeypatch: Patch) -> None:
    normalise = Batches._normalise

    def mixed(self: Batches, x: Tensor) -> Tensor:
        return normalise(self, x).view(3, len(x), 32, 32).permute(1, 0, 2, 3).contiguous()

    monkeypatch.setattr(Batches, "_normalise", mixed)


def crop_a_neighbour(monkeypatch: Patch) -> None:
    """Augmentation hands over a neighbour's pixels; without it the batch is right."""
    made = _Augmentation.__call__
    monkeypatch.setattr(
        _Augmentation, "__call__", lambda self, x, c, f: made(self, x, c, f).roll(1, 0)
    )


@pytest.mark.parametrize(
    "plant",
    [shuffle_labels, partial(shuffle_labels, augmented=True), mix_samples, crop_a_neighbour],
)
def test_a_batch_that_is_not_the_datasets(
    data: DatasetInfo, monkeypatch: Patch, plant: Plant
) -> None:
    plant(monkeypatch)
    assert failing(subject(data), "batch") == {"batch"}


def test_labels_shuffled_on_disk(data: DatasetInfo, tmp_path: Path) -> None:
    """Then the batch is the dataset's, and only learning can tell."""
    shuffled = np.random.default_rng(0).permutation(load(data.folder).train_labels)
    stored = subject(store_anew(data, tmp_path, shuffled, 10), "narrow")
    found = failing(stored, *LEARNING, "batch", "initial-loss", "gradients", "activations")
    assert {"baseline"} <= found <= {"baseline", "first-steps"}


@pytest.mark.parametrize(
    ("model", "checks", "caught"),
    [
        ("Mixing", ("own-pixels", "batch"), {"own-pixels"}),
        ("Drawing", ("seed", "own-pixels"), {"seed"}),
        ("trained", ("initial-loss", "seed"), {"initial-loss"}),
        ("with_frozen_norm", ("batchnorm", "gradients"), {"batchnorm": ("norm", "norm2")}),
        ("with_a_spare_layer", ALL, {"gradients": ("spare.weight", "spare.bias")}),
        ("keeping_logits", HELD, {"graphs", "memory"}),
        ("keeping_detached", HELD, {"memory"}),
        ("keeping_images", HELD, {"memory"}),
    ],
)
def test_a_network_at_fault(
    data: DatasetInfo, model: str, checks: Sequence[str], caught: Collection[str]
) -> None:
    faulty = subject(data, model)
    assert failing(faulty, *checks) == set(caught)
    for name, layers in caught.items() if isinstance(caught, dict) else ():
        assert CHECKS[name].run(faulty).named == layers
    # without a graph, only the bytes tell: float32, of 32 images or of their logits
    kept = {"keeping_detached": 10, "keeping_images": 3 * 32 * 32}.get(model)
    if kept is not None:
        assert CHECKS["memory"].run(faulty).value == pytest.approx(4 * 32 * kept, abs=100)


def test_dead_layers_are_named(data: DatasetInfo) -> None:
    dead = subject(data, "dying")
    assert failing(dead, "activations", "gradients") == {"activations", "gradients"}
    assert "head (100% dead)" in CHECKS["activations"].run(dead).named


def test_a_summed_loss(data: DatasetInfo, monkeypatch: Patch) -> None:
    made = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda logits, y, **_: made(logits, y, reduction="sum"))
    assert failing(subject(data), "initial-loss", "averaging") == {"initial-loss", "averaging"}


def test_a_loss_summed_behind_an_averaged_figure(data: DatasetInfo, monkeypatch: Patch) -> None:
    """What is reported is right, what is differentiated is not."""
    made = Training.step

    def step(self: Training, batch: Any) -> tuple[Tensor | None, ...]:
        scale = self.loss_scale.scale
        self.loss_scale.scale = lambda loss: scale(loss) * len(batch[0])  # type: ignore[method-assign]
        result = made(self, batch)
        self.loss_scale.scale = scale  # type: ignore[method-assign]
        return result

    monkeypatch.setattr(Training, "step", step)
    assert failing(subject(data), "initial-loss", "averaging") == {"averaging"}


def test_a_loss_partly_summed(data: DatasetInfo, monkeypatch: Patch) -> None:
    """Twice the images make 1.5 times the step: more than noise, less than a sum."""
    made, compute = Training.backward, Training.compute

    def backward(self: Training, loss: Tensor, last: bool) -> Any:
        return made(self, loss * self.images ** math.log2(1.5), last)  # type: ignore[attr-defined]

    def count(self: Training, x: Tensor) -> Tensor:
        self.images = len(x)  # type: ignore[attr-defined]
        return compute(self, x)

    monkeypatch.setattr(Training, "backward", backward)
    monkeypatch.setattr(Training, "compute", count)
    # without weight decay the step would be 1.5 times to the last digit
    assert CHECKS["averaging"].run(subject(data)).value == pytest.approx(1.5, abs=0.02)
    assert failing(subject(data), "averaging") == {"averaging"}


def test_dropout_hides_what_was_learnt(data: DatasetInfo) -> None:
    """The training loss stays high; that in evaluation mode tells."""
    finding = CHECKS["overfit"].run(subject(data, "with_more_dropout"))
    assert finding.passed
    assert min(finding.data["losses"]) > finding.high


def test_a_frozen_backbone(data: DatasetInfo) -> None:
    """Its head cannot learn a batch by heart at this rate: it must halve the first loss."""
    slow = subject(data, "with_frozen_backbone", lr=0.0005)
    finding = CHECKS["overfit"].run(slow)
    assert finding.passed
    assert finding.high == finding.data["losses"][0] / 2 > finding.value > 0.1
    assert "6 frozen" in finding.unit
    stuck = subject(data, "with_frozen_backbone", lr=1e-7)
    said = explain(answer(CHECKS["overfit"], stuck))
    assert "6 weights are frozen; --skip overfit if that is intended" in said


def test_a_scale_that_starts_far_too_large(data: DatasetInfo) -> None:
    """apex's first rule starts at 2^32: the first eighteen steps or so overflow."""
    scaled = subject(data, "narrow", precision="fp16", loss_scale="dynamic-apex")
    assert failing(scaled, "own-pixels", "gradients", "averaging", "activations") == set()


def test_a_scale_that_only_a_whole_batch_bears(data: DatasetInfo) -> None:
    """Of one sample's loss the scaled gradient would overflow."""
    bold = subject(data, "narrow", precision="fp16", loss_scale=2.0**17)
    assert failing(bold, "own-pixels") == set()


@pytest.mark.parametrize(
    ("generation", "checks"), [("2018", ALL - LEARNING), ("2019", ALL - LEARNING), ("today", ALL)]
)
def test_apex_passes(
    generation: str, checks: set[str], data: DatasetInfo, tmp_path: Path, monkeypatch: Patch
) -> None:
    """By a stand-in of each FP16_Optimizer."""
    monkeypatch.syspath_prepend(str(install(tmp_path, generation)))
    for name in [n for n in sys.modules if n.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    apex = subject(data, "narrow", precision="fp16-apex", loss_scale=128.0)
    assert failing(apex, *checks) == set()


@pytest.mark.parametrize(
    ("lr", "least"), [(20.0, {"overfit", "first-steps"}), (1e6, LEARNING), (1e-7, LEARNING)]
)
def test_a_learning_rate_at_fault(
    data: DatasetInfo, tmp_path: Path, lr: float, least: set[str]
) -> None:
    """A training that has gone to NaN is drawn as far as it goes."""
    faulty = subject(data, "narrow", lr=lr)
    assert least <= failing(faulty, *LEARNING, "initial-loss") <= LEARNING
    assert math.isfinite(faulty.first_steps.losses[-1]) == (lr != 1e6)
    if lr == 1e6:
        assert faulty.batch is not None
        assert [file.name for file in draw_pictures(faulty, tmp_path)] == PICTURES


@pytest.mark.parametrize(("retain", "caught"), [(False, {"graphs"}), (True, {"graphs", "memory"})])
def test_a_kept_graph(
    data: DatasetInfo, monkeypatch: Patch, retain: bool, caught: set[str]
) -> None:
    """The classic: the loss that the loop collects is not detached. Or backward does not free what
    the graph has saved, either."""

    def step(self: Training, batch: Any) -> tuple[Tensor | None, ...]:
        x, y = batch
        loss = F.cross_entropy(self.compute(x), y)
        self.loss_scale.scale(loss).backward(retain_graph=retain)
        return loss, (y == 0).sum(), *self.update()

    monkeypatch.setattr(Training, "step", step)
    assert failing(subject(data), *HELD) == caught


def test_what_a_step_keeps_on_purpose_fits_a_card(data: DatasetInfo) -> None:
    """Four tensors, each in a block of 512 bytes."""
    plain = subject(data)
    plain.__dict__["retained"] = Retained([2048 * step for step in range(10)], [0] * 10)
    assert failing(plain, "memory") == {"memory"}
    plain.device = torch.device("cuda")
    assert failing(plain, "memory") == set()


def test_nearly_the_same_again(data: DatasetInfo, monkeypatch: Patch) -> None:
    """As on CUDA, where kernels add in no fixed order: not to the bit, and near all the same."""
    update, noise = Training.update, torch.Generator()
    assert CHECKS["seed"].run(subject(data)).passed
    assert check_seed(subject(data), exact=False).value == 0

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


@pytest.mark.parametrize("model", ["Drawing", "Masking"])
def test_random_numbers_that_no_seed_reaches_on_a_card(data: DatasetInfo, model: str) -> None:
    """They make more than a tenth of what other batches make."""
    found = check_seed(subject(data, model, precision="bf16-amp"), exact=False)
    assert not found.passed
    assert found.value < 1


def test_a_training_that_stands_still_shows_nothing_of_a_seed(
    data: DatasetInfo, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Training, "update", lambda self: (torch.zeros((), dtype=torch.bool), None))
    assert not check_seed(subject(data), exact=False).passed


@pytest.mark.parametrize(
    ("evaluates", "graph", "trains_again", "word"),
    [
        (True, True, True, "graph"),
        (False, False, False, "norm.running_mean"),
        (True, False, False, "leaves the network in evaluation mode"),
    ],
)
def test_evaluation_at_fault(
    data: DatasetInfo,
    monkeypatch: Patch,
    evaluates: bool,
    graph: bool,
    trains_again: bool,
    word: str,
) -> None:
    def evaluate(self: Training, batches: Any) -> tuple[float, float]:
        self.model.train(not evaluates)
        with torch.set_grad_enabled(graph):
            losses = [F.cross_entropy(self.compute(x), y) for x, y in batches]
        if trains_again:
            self.model.train()
        return float(torch.stack(losses).detach().mean()), 0.0

    monkeypatch.setattr(Training, "evaluate", evaluate)
    finding = CHECKS["evaluation"].run(subject(data))
    assert not finding.passed
    assert any(word in named for named in finding.named)


# ------------------------------------------------------------------------------------- the readings


def test_dead_channels_of_a_known_tensor() -> None:
    values = torch.zeros(2, 4, 3, 3)
    values[:, 1] = 7  # one value, though not zero
    values[0, 2, 1, 1] = 1
    values[:, 3] = torch.randn(2, 3, 3)
    assert dead_share(values) == 0.5
    assert dead_share(values[:1]) == 0  # nine values are too few to tell


def test_a_spread_of_known_values() -> None:
    found = spread(torch.tensor([0.0, 0.0, 1.0, 2.0, torch.inf]))
    assert found.zeros == pytest.approx(0.4)
    assert found.not_finite == pytest.approx(0.2)
    assert spread(torch.arange(101.0)).quantiles == pytest.approx((1, 25, 50, 75, 99))


def test_a_spread_leaves_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    spread(torch.zeros(200_000))
    assert torch.equal(before, torch.get_rng_state())


def test_watching_leaves_the_training_as_it_is(data: DatasetInfo) -> None:
    """The losses of the watched steps are those of the same steps unwatched, dropout included."""
    watched = subject(data, "with_dropout")
    batches, training = watched.start()
    plain = [float(training.step(batch)[0]) for batch in islice(stream(batches), STEPS)]
    assert watched.first_steps.losses[:STEPS] == plain


def test_the_ledger_sees_what_only_a_graph_holds() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with Ledger() as ledger:
        kept = (weight * 2).exp().sum()  # exp saves its 4,000 bytes; sum makes 4
        assert ledger.held() == 4004
        kept.backward()  # frees what was saved; the gradient stays
        assert ledger.held() == 4004
        weight.grad = None
        assert ledger.held() == 4
        del kept
        assert ledger.held() == 0


# ------------------------------------------------------------------------------------ the pictures


def test_nothing_is_trained_for_a_picture(
    data: DatasetInfo, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Training, "step", None)
    assert draw_pictures(subject(data), tmp_path) == []


def test_the_batch_is_drawn_as_it_was(data: DatasetInfo, tmp_path: Path) -> None:
    """The pixels of the picture's first image are those of the batch, its normalisation undone."""
    looked = subject(data)
    figure = draw_batch(looked)
    (image,) = figure.axes[0].get_images()
    shown = np.asarray(image.get_array()).transpose(2, 0, 1) * 255
    right = looked.batch[0][0] / looked.start()[0].scale + looked.start()[0].mean
    assert np.abs(shown - right.numpy()).max() < 1e-3
    assert figure.axes[0].get_title() == str(int(looked.batch[1][0]))


# ------------------------------------------------------------------------------------- the command


def test_a_finding_passes_within_its_bounds_alone() -> None:
    assert Finding(1.0, "", 0.5, 1.0).passed
    assert not Finding(math.nan, "").passed
    assert not Finding(math.inf, "", high=3).passed
    assert write_bounds(Finding(1, "", low=0.25)) == "at least 0.25"
    assert write_bounds(Finding(1, "", high=0.1)) == "at most 0.1"


def test_what_raises_fails_and_says_why(data: DatasetInfo, monkeypatch: Patch) -> None:
    def broken(_: Subject) -> Finding:
        raise ValueError("no such\nluck")

    monkeypatch.setattr(findings, "check_broken", broken, raising=False)
    found = answer(Check("broken", "it works", "Mend it."), subject(data))
    assert found.result is Result.FAIL
    assert "could not be run" in describe(found)
    assert "ValueError: no such luck" in explain(found)


def test_every_line_fits_a_terminal() -> None:
    figures = [
        Finding(1234, "of 1234 receive gradients, 123 frozen", low=1234, named=("x" * 60,) * 20),
        Finding(12345.678, "lower than with blank images", 1.80259, 2.80259, ("x",) * 20),
    ]
    for check in CHECKS.values():
        for finding in figures:
            found = Checked(check, finding)
            assert len(describe(found)) <= 80
            text = explain(found)
            assert all(len(line) <= 80 for line in text.splitlines())
            assert "12 more" in " ".join(text.split())
            assert check.fix.split()[0] in text


def test_the_checks_are_told_apart_by_one_word() -> None:
    assert all(name == check.name and " " not in name for name, check in CHECKS.items())


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def answers() -> Callable[..., object]:
    models = [f"test_check:{name}" for name in ("Net", "with_a_spare_layer", "three_classes")]
    return ask_once(*models, "workload:test_check:Summing")


@pytest.fixture
def asked(answers: Callable[..., object], monkeypatch: Patch) -> None:
    """The command does not start a process to ask."""
    monkeypatch.setattr("bench.check.__main__.ask", answers)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the synthetic images are made, once."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def run(asked: None, images: Path, tmp_path: Path) -> Run:
    def run(*flags: str, model: str = "test_check:Net") -> int:
        common = ["--device", "cpu", "--batch-size", "16", "--steps", str(LEAST_STEPS)]
        common += ["--data-dir", str(images), "--out", str(tmp_path / "out")]
        own = ["--model", model, "--dataset", "synthetic"] if model else []
        return main(join_flags(common, own, flags))

    return run


def test_the_command_takes_a_workload(run: Run, tmp_path: Path, capsys: Capture) -> None:
    assert run("--workload", "test_check:Summing", "--lr", "0.05", model="") == 0
    said = capsys.readouterr().out
    assert said.startswith("test_check:Summing, fp32 · batch size 16, on cpu\n")
    assert "13 of 13 checks passed" in said
    assert re.search(r"^batch +skipped the workload has no images", said, re.MULTILINE)
    (case,) = json.loads((tmp_path / "out" / "check.json").read_text())["cases"]
    assert [Path(picture).name for picture in case["pictures"]] == ["losses.png", "layers.png"]
    assert case["environment"]["unit"] == "sums"
    assert case["checks"][0]["lacks"] == "the workload has no images of --dataset"


def test_a_terminal_shows_which_check_runs(run: Run, monkeypatch: Patch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    assert run("--skip", *sorted(ALL - {"averaging"})) == 0
    shown = screen.getvalue()
    assert "\raveraging …" in shown
    assert "\n" not in shown, "on one line"
    assert shown.endswith("\r"), "which is empty again"


def test_the_command(run: Run, tmp_path: Path, capsys: Capture) -> None:
    """Two precisions of a user's own model: table and file, and no picture of what was skipped."""
    skipped = sorted(ALL - {"batch", "own-pixels", "evaluation"})
    assert run("--precision", "fp32", "bf16-amp", "--skip", *skipped) == 0
    said = capsys.readouterr()
    assert said.err == "", "nothing runs in a line of its own where there is no terminal"
    lines = said.out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("figures and pictures"))
    assert sum(line.startswith("own-pixels    pass") for line in lines) == 2
    assert sum(line.startswith("memory        skipped") for line in lines) == 2
    report = json.loads((tmp_path / "out" / "check.json").read_text())
    assert [case["case"]["precision"] for case in report["cases"]] == ["fp32", "bf16-amp"]
    for case in report["cases"]:
        assert [one["name"] for one in case["checks"]] == list(CHECKS)
        assert case["environment"]["torch"] == torch.__version__
        assert [Path(picture).name for picture in case["pictures"]] == ["batch.png"]


def test_the_command_fails_where_a_check_does(run: Run, tmp_path: Path, capsys: Capture) -> None:
    skipped = sorted(ALL - {"gradients", "batchnorm"})
    assert run("--json", "--skip", *skipped, model="test_check:with_a_spare_layer") == 1
    said = capsys.readouterr()
    (case,) = json.loads(said.out)["cases"]
    results = {one["name"]: one["result"] for one in case["checks"]}
    assert results["gradients"] == "FAIL"
    assert results["batchnorm"] == "pass"
    assert "spare.weight; spare.bias" in said.err
    assert [Path(picture).name for picture in case["pictures"]] == PICTURES
    for picture in case["pictures"]:
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--skip", "first-step"], "did you mean 'first-steps'?"),
        (["--steps", "3"], "at least 20"),
        (["--model", "dpn93"], "did you mean 'dpn92'?"),
        (["--precision", "fp61"], "did you mean 'fp16'?"),
        (["--device", "cpu", "cuda"], "give one"),
        (["--precision", "fp16-apex", "--opt-level", "O1"], "check the precision without opt"),
        (["--precision", "fp16-apex"], "fp16-apex: NVIDIA apex needs an NVIDIA GPU"),
        (["--precision", "tf32"], "needs an NVIDIA GPU"),
        (["--model", "test_check:three_classes"], "one logit for each"),
        (["--out", __file__], "choose a place that can be written"),
    ],
)
def test_bad_input_is_refused_before_training(
    flags: list[str], message: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Subject, "__init__", lambda *_: pytest.fail("trained"))
    usual = ["--model", "test_check:Net", "--dataset", "synthetic", "--device", "cpu"]
    assert main(join_flags(usual, ["--out", str(tmp_path / "out")], flags)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("device", "network"), [("cpu", ("dpn-small", 64)), ("cuda", ("dpn92", 128))]
)
def test_the_network_and_the_images_are_those_of_a_sweep(
    device: str, network: tuple[str, int]
) -> None:
    """So on a CPU nothing is downloaded."""
    (case,) = choose_cases({"device": [device]})
    assert (case.model, case.batch_size) == network
    first, *_ = plan_sweep(parse_sweep(["--device", device])).cases
    assert (case.model, case.dataset) == (first.model, first.dataset)
    assert case.dataset == {"cpu": "synthetic", "cuda": "cifar10"}[device]
