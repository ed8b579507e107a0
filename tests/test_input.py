"""Synthetic images of another shape, and of other classes; and data that is not what it should be.

What is asked for with ``--input`` and ``--classes`` is what the network is built for, trained on
and reported by.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench.base.errors import UsageError
from bench.networks.data import ImageArrays, load, prepare
from bench.networks.data.batches import Batches, Counted, Divided, Supply
from bench.networks.data.synthetic import count_images
from bench.networks.workloads import Images, Network, Workload
from bench.report.__main__ import main as report
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.record import Measurement, Status
from bench.schema.rules import check_batches
from bench.sweep.__main__ import main as sweep
from bench.sweep.largest_batch import Probe, ProbedFamily, name_family
from bench.training.counting import count_flop
from tests.pytest_for_tests import Capture
from tests.training_for_tests import CPU, examine, list_batches, run_case


def pooled() -> nn.Module:
    """Takes images of any size, 3 channels, to 300 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 300)
    )


def of_cifar() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))


# ---------------------------------------------------------------------------------- the images


@pytest.fixture(scope="module")
def dataset() -> ImageArrays:
    return load(prepare("synthetic", data_dir=None, input="3x64x64", classes=300).folder)


def test_large_images_take_no_more_memory_than_cifar(dataset: ImageArrays) -> None:
    info = dataset.info
    assert dataset.train_images.shape == (12_500, 3, 64, 64)
    assert dataset.test_images.shape == (info.test_images, 3, 64, 64) == (2_500, 3, 64, 64)
    assert (info.train_images, info.distinct, info.classes) == (50_000, 12_500, 300)
    assert info.source == "synthetic, 3x64x64, 300 classes"
    assert dataset.train_labels.dtype == np.uint16
    assert set(dataset.train_labels.tolist()) == set(range(300))
    assert count_images("train", (1, 8, 8)) == 50_000, "small ones are not more"


def test_an_epoch_visits_few_images_again() -> None:
    images = np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1).repeat(4, axis=2)
    batches = Batches(
        images, np.arange(7), batch_size=8, device=CPU, seed=0, augment=False, samples=20
    )
    assert (len(batches), batches.samples) == (3, 20)
    found = list(list_batches(batches, 0))
    assert [len(y) for _, y in found] == [8, 8, 4]
    labels = torch.cat([y for _, y in found])
    assert sorted(torch.bincount(labels).tolist()) == [2] + [3] * 6
    assert not torch.equal(labels, torch.cat([y for _, y in list_batches(batches, 1)]))
    for x, y in found:
        pixels = (x / batches.scale + batches.mean).round()
        assert torch.equal(pixels.amax(dim=(1, 2, 3)).long(), y)
    assert [len(y) for _, y in batches.evaluation(4)] == [4, 3]


def test_a_network_is_built_and_counted_for_its_images(dataset: ImageArrays) -> None:
    images = Images("dpn-small", dataset)
    assert (images.samples, images.shape, images.classes) == (50_000, (3, 64, 64), 300)
    model = images.build_model()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 300)
    # four times the pixels, and a larger head
    assert count_flop(images) == pytest.approx(4 * count_flop(Images("dpn-small")), rel=0.01)
    batches = images.open_batches(batch_size=16, micro_batch=8, device=CPU, seed=0)
    (x, y), _ = next(batches.divide(0)).parts
    assert x.shape == (8, 3, 64, 64)
    index = torch.nonzero(batches.labels == y[0]).flatten()
    raw = (x[0] / batches.scale + batches.mean).round().byte()
    assert any(torch.equal(raw, batches.images[i]) for i in index), "they are taken as they are"


# ------------------------------------------------------------------------------------ the cases


def test_what_is_examined_is_the_network_of_its_images() -> None:
    found = examine(f"{__name__}:pooled", input="3x64x64")
    assert (found.outputs, found.batchnorm) == (300, False)
    ten, many = examine("dpn-small"), examine("dpn-small", classes=300)
    assert ten.batchnorm
    assert ten.parameters != many.parameters
    with pytest.raises(UsageError, match=r"fails on \(2, 3, 64, 64\) images"):
        examine(f"{__name__}:of_cifar", input="3x64x64")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", f"{__name__}:pooled"], "(2, 300) for 2 images; it must give (2, 20)"),
        (["--workload", "examples.two_losses:tiny"], "--workload brings its own input"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_case(
    flags: list[str], message: str, capsys: Capture
) -> None:
    assert sweep(["--input", "3x16x16", "--classes", "20", "--dry-run", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_sweep_of_two_shapes_is_measured_and_reported(tmp_path: Path, capsys: Capture) -> None:
    """In one folder, without --mix; --input alone means synthetic images."""
    flags = ["--model", "dpn-small", "--device", "cpu", "--precision", "fp32", "--batch-size", "32"]
    flags += ["--classes", "20", "--steps", "2", "--repeats", "1", "--evaluate", "off"]
    assert sweep([*flags, "--input", "1x16x16", "3x16x24", "--out", str(tmp_path)]) == 0
    with (tmp_path / "records.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["status"], row["input"], row["classes"]) for row in rows] == [
        ("ok", "1x16x16", "20"),
        ("ok", "3x16x24", "20"),
    ]
    assert {row["dataset"] for row in rows} == {"synthetic"}
    assert rows[0]["dataset_source"] == "synthetic, 1x16x16, 20 classes"
    assert len({row["dataset_fingerprint"] for row in rows}) == 2
    assert len({row["model_parameters"] for row in rows}) == 2
    assert 2.5 < float(rows[0]["train_loss"]) < 4, "ln 20 is 3.0"
    assert rows[0]["proof_layer"].endswith("on 8×8"), "of 32 pixels it is on 16×16"
    capsys.readouterr()
    assert report([str(tmp_path), "--full"]) == 0
    assert "Mixed environments" not in capsys.readouterr().out


# ------------------------------------------------------------------------------- batches of one


def test_one_item_is_a_batch_unless_there_may_be_batchnorm() -> None:
    one, halves = Case(batch_size=1), Case(batch_size=4, accumulate=4)
    for case in (one, halves):
        check_batches(case, 100, batchnorm=False)
        with pytest.raises(UsageError, match=r"one image.*BatchNorm needs two"):
            check_batches(case, 100)


def test_a_search_without_batchnorm_may_try_every_size() -> None:
    """64 images at 21 leave one. Records alone tell by what was tried."""
    family = name_family(Case(dataset="synthetic", device="cpu"))
    assert 21 in ProbedFamily(family, [Probe(21, Status.OK)]).aim(64, 1).sizes
    assert not {1, 21} & set(ProbedFamily(family, [Probe(20, Status.OK)]).aim(64, 1).sizes)
    assert {1, 21} <= set(ProbedFamily(family).aim(64, 1, batchnorm=False).sizes)


# ------------------------------------------------------------------------------------ a user's data


class Given:
    """A user's own supply, of no class of the harness: sizes of batches, each with its parts'."""

    batch_size, samples = 4, 6

    def __init__(self, *batches: tuple[int, ...]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def divide(self, *place: Any, **settings: Any) -> Iterator[Divided]:
        for size, *parts in self.batches:
            yield Divided(size, iter([torch.zeros(n, 2) for n in parts]))

    def evaluation(self, batch_size: int | None = None) -> Iterator[Any]:
        return iter([torch.zeros(batch_size or 4, 2)])


class Undivided(Workload):
    """Whose batches are never divided; of sequences of numbers."""

    samples = 8

    def build_model(self) -> nn.Module:
        return nn.LSTM(2, 1)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Tensor:
        return torch.zeros(size, 2, device=device)

    def compute_loss(self, network: Network, batch: Tensor) -> Tensor:
        loss: Tensor = network(batch)[0].mean()
        return loss

    def open_batches(self, **settings: Any) -> Supply:
        supply = Given((4, 4), (4, 4))
        supply.samples = self.samples
        return supply


def test_a_supply_that_does_not_divide_its_batches_is_refused() -> None:
    def run(**settings: Any) -> Measurement:
        name = f"{__name__}:Undivided"
        (case,) = grid({"workload": [name], "device": ["cpu"], "batch_size": [4]} | settings)
        return run_case(case).measurement

    whole = run()
    assert whole.measured_images == 8
    assert whole.proof_notes == "recurrent layers were not probed for their arithmetic"
    with pytest.raises(UsageError, match="a batch of 4 items where 2 were asked for"):
        run(accumulate=[2])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([(4, 2, 1)], "a batch of 1 items where 2 were asked for"),
        ([(4, 2)], "left out 2 items of a batch"),
        ([(4, 2, 2), (4, 3)], "a batch of 3 items where 2 were asked for"),
    ],
)
def test_a_users_batches_are_counted(batches: list[tuple[int, ...]], message: str) -> None:
    def count(*batches: tuple[int, ...]) -> list[list[int]]:
        return [[len(p) for p in batch.parts] for batch in Counted(Given(*batches), 2).divide()]

    assert count((4, 2, 2), (2, 2)) == [[2, 2], [2]]
    with pytest.raises(UsageError, match=message):
        count(*batches)


def test_a_users_batches_end_after_as_many_as_are_asked_for() -> None:
    endless = Counted(Given(*[(4, 2, 2)] * 9), 2)
    assert [[len(p) for p in batch.parts] for batch in endless.divide(steps=1)] == [[2, 2]]
