"""torch's DataLoader: it trains on what the device's loader does, and ends in every way it can."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bench.base.errors import UsageError
from bench.networks.data import DatasetInfo
from bench.networks.data.batches import Batches, Divided
from bench.networks.data.loader import LoadedBatches, load_images, load_items, measure_rate
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.schema.failure import classify, list_kinds
from bench.schema.record import Status
from bench.training.trial import try_workload
from bench.workers.preparation import set_up, start_over, warm_up_shapes
from tests import loads_for_tests
from tests.loads_for_tests import ITEM_S, PIDS, Loads, Rows
from tests.pytest_for_tests import Patch
from tests.training_for_tests import CPU
from tests.workers_for_tests import gone

IMAGES = 61  # batches of 22, 22 and 17, of micro-batches of 8


def pictures() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, IMAGES)


ABOUT: dict[str, Any] = {"batch_size": 22, "micro_batch": 8, "device": CPU, "seed": 3}


def loaded(workers: int, **about: Any) -> LoadedBatches:
    return load_images(*pictures(), **{**ABOUT, **about}, workers=workers)


def assert_equal(ours: Iterator[Any], theirs: Iterator[Any]) -> None:
    """Bit for bit, and laid out alike."""
    for (x, y), (u, v) in zip(ours, theirs, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
        assert (x.dtype, y.dtype, x.stride()) == (u.dtype, v.dtype, u.stride())


def assert_divided_alike(ours: Iterator[Divided], theirs: Iterator[Divided]) -> None:
    """And size for size."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.size == b.size
        assert_equal(a.parts, b.parts)


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    for worker in multiprocessing.active_children():  # one beside a worker that failed is ending
        worker.join(60)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_order_augmentation_and_labels_are_those_of_the_device(workers: int) -> None:
    ours, theirs = loaded(workers), Batches(*pictures(), **ABOUT)
    assert len(ours) == len(theirs)
    assert ours.samples == theirs.samples
    state = torch.get_rng_state()
    for epoch in (0, 1, 0):
        assert_divided_alike(ours.divide(epoch), theirs.divide(epoch))
    # as warm-up takes them: some steps, and the first images of each batch
    assert_divided_alike(ours.divide(2, steps=2), theirs.divide(2, steps=2))
    assert_divided_alike(ours.divide(1, size=17), theirs.divide(1, size=17))
    assert_equal(ours.evaluation(9), theirs.evaluation(9))
    assert torch.equal(torch.get_rng_state(), state), "the network draws what it would have drawn"
    ours.close()


def tiny() -> nn.Module:
    """Draws random numbers as it trains."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(512, 10),
    )  # fmt: skip


CASE = Case(f"{__name__}:tiny", "synthetic", device="cpu", batch_size=100)


def test_no_worker_of_the_warm_up_is_there_in_the_epoch(data: DatasetInfo) -> None:
    case = replace(CASE, steps=4, loader="torch", workers=2)
    batches, training = set_up(case, data.folder)
    warm_up_shapes(training, batches, lambda step, loss: None)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    start_over(training, batches)
    assert multiprocessing.active_children() == []
    assert not any(process.is_alive() for process in workers)


def pids() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def test_a_part_of_an_epoch_is_closed_and_then_gives_nothing() -> None:
    batches = loaded(2)
    divided, *_ = batches.divide(steps=1)
    next(divided.parts)
    assert batches.first_batch_s > 0
    assert len(pids()) == 2
    batches.close()
    assert pids() == set()
    with pytest.raises(RuntimeError, match="after its epoch"):
        next(divided.parts)


def test_the_loader_alone_is_as_fast_as_its_data() -> None:
    """Slow items, of which two come at a time."""
    for workers, known in ((0, 1 / ITEM_S), (2, 2 / ITEM_S)):
        about = {**ABOUT, "batch_size": 4, "micro_batch": 4}
        batches = load_items(Rows(24, loads_for_tests.sleep), **about, workers=workers)
        rate = measure_rate(batches, workers, lambda: None)
        assert known / 2 < rate < known * 1.15
    short = loaded(2, batch_size=IMAGES, micro_batch=IMAGES)
    assert measure_rate(short, 2, lambda: None) is None, "no batch after the first of each worker"


def look(workload: Workload) -> Any:
    model = workload.build_model()
    return try_workload("workload 'm:f'", workload, (), model)


class Doubles(Rows):
    def __getitem__(self, number: int) -> Any:
        return torch.zeros(5, dtype=torch.float64), 0


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Doubles(4000), "gives float64 (2, 5), int64 (2,); make_batch gives float32 (2, 4), int64"),
        (Rows(7), "build_dataset returned a Rows of 7 items; it returns a map-style dataset of"),
        (Rows(4000, {}.__getitem__), "a batch of build_dataset fails: KeyError: "),
        (7, "build_dataset: len() fails: TypeError: object of type 'int' has no len()"),
    ],
)
def test_a_dataset_that_is_unlike_make_batch_is_refused(dataset: Any, expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        look(Loads(lambda samples: dataset))
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


ONE_BATCH: dict[str, Any] = {**ABOUT, "batch_size": 40, "micro_batch": 40}


def test_each_item_of_a_dataset_comes_once_an_epoch() -> None:
    batches = load_items(Rows(40), **ONE_BATCH)
    orders = [
        [round(40 * float(v)) for d in batches.divide(epoch) for x, _ in d.parts for v in x[:, 0]]
        for epoch in (0, 1, 0)
    ]
    assert sorted(orders[0]) == list(range(40)) != orders[0]
    assert orders[0] == orders[2] != orders[1]


def test_what_a_dataset_draws_in_a_worker_is_its_epochs_own() -> None:
    batches = load_items(loads_for_tests.DrawingRows(4), **ONE_BATCH, workers=1)
    drawn = [
        [x.tolist() for divided in batches.divide(epoch) for x, _ in divided.parts]
        for epoch in (0, 1, 0)
    ]
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize(
    ("name", "status", "expected"),
    [
        ("raising", Status.ERROR, r"ValueError: item \d+ is$"),
        ("full", Status.OOM, r"^/dev/shm is full; enlarge .* fewer loader workers: Runt"),
        ("bus", Status.OOM, r"^/dev/shm is full; .*DataLoader worker \(pid.*Bus error"),
        ("dying", Status.KILLED, r"DataLoader worker \(pid.*is killed by signal: Killed"),
    ],
)
def test_workers_that_fail_are_outcomes(name: str, status: Status, expected: str) -> None:
    batches = getattr(loads_for_tests, name)().open_loader(
        batch_size=20, micro_batch=20, device=CPU, seed=0, workers=2
    )
    with pytest.raises(Exception, match=r"\w") as ended:
        sum(1 for divided in batches.divide() for _ in divided.parts)
    batches.close()
    fault = classify(list_kinds(ended.value), str(ended.value), None, Case(memory_limit="21GiB"))
    assert fault.status is status
    assert re.search(expected, fault.reason), fault.reason
    assert fault.reason.isprintable()


HANGS = """
import multiprocessing, sys, torch, loads_for_tests
multiprocessing.set_start_method(sys.argv[1])
batches = loads_for_tests.hanging().open_loader(
    batch_size=20, micro_batch=20, device=torch.device("cpu"), seed=0, workers=1
)
for divided in batches.divide():
    list(divided.parts)
"""


@pytest.mark.slow
def test_a_worker_that_hangs_ends_with_a_killed_parent(tmp_path: Path, monkeypatch: Patch) -> None:
    place = tmp_path / "pids"
    monkeypatch.setenv(PIDS, str(place))
    with subprocess.Popen([sys.executable, "-c", HANGS, "fork"]) as process:
        while not place.exists() and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None, "its worker did not load"
        process.kill()
    (worker,) = {int(line) for line in place.read_text().split()}
    assert gone([worker], within_s=60)
