"""torch's DataLoader: it trains on what the device's loader does, and ends in every way it can."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Process
from pathlib import Path
from typing import Any

import loads_for_tests
import numpy as np
import pytest
import torch
from loads_for_tests import ITEM_S, PIDS, Loads, Rows
from pytest_for_tests import Patch
from torch import nn
from training_for_tests import CPU, run_case
from workers_for_tests import gone

from bench.case import Case
from bench.data import DatasetInfo, loader, prepare
from bench.data.batches import Batches, Divided
from bench.data.loader import LoadedBatches, load_images, load_items, measure_rate
from bench.environment.machine import Machine
from bench.errors import UsageError
from bench.executors import Images, Settings
from bench.executors import subprocess as room
from bench.executors.subprocess import SubprocessExecutor
from bench.failure import classify, list_kinds
from bench.fingerprint import Fingerprint, name_subject
from bench.record import Status
from bench.sweep import preflight
from bench.sweep.options import Plan, parse_arguments, plan_cases
from bench.training.trial import try_workload
from bench.worker import Job
from bench.worker.preparation import set_up, start_over, warm_up_shapes
from bench.workloads import Workload

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
        worker.join(10)
    assert multiprocessing.active_children() == []


# ------------------------------------------------------------------------ the same, bit for bit


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


@pytest.mark.parametrize(("shape", "augment"), [((1, 40, 24), False), ((3, 32, 32), True)])
def test_images_that_come_several_times_are_those_of_the_device(
    shape: tuple[int, ...], augment: bool
) -> None:
    """As those of --input do: 16 images in an epoch of 61, cropped only in CIFAR's shape."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (16, *shape), dtype=np.uint8), rng.integers(0, 9, 16)
    about: dict[str, Any] = {**ABOUT, "samples": IMAGES, "augment": augment}
    ours, theirs = load_images(*images, **about), Batches(*images, **about)
    assert len(ours) == len(theirs) == 3
    assert ours.samples == theirs.samples == IMAGES
    for epoch in (0, 1):
        assert_divided_alike(ours.divide(epoch), theirs.divide(epoch))
    assert_equal(ours.evaluation(9), theirs.evaluation(9))


def tiny() -> nn.Module:
    """Draws random numbers as it trains."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(512, 10),
    )  # fmt: skip


CASE = Case(f"{__name__}:tiny", "synthetic", device="cpu", batch_size=100)


@pytest.fixture
def few(monkeypatch: Patch) -> DatasetInfo:
    """The synthetic images, of which 610 are trained on."""
    import bench.data

    def load(folder: str, whole: Callable[[str], Any] = bench.data.load) -> Any:
        data = whole(folder)
        return replace(
            data, train_images=data.train_images[:610], train_labels=data.train_labels[:610]
        )

    monkeypatch.setattr(bench.data, "load", load)
    return prepare("synthetic", data_dir=None)


@pytest.mark.slow
def test_what_is_measured_learns_the_same(few: DatasetInfo, monkeypatch: Patch) -> None:
    """Warm-up, two epochs and their uneven last batches, in micro-batches."""
    monkeypatch.setattr(loader, "ALONE_S", 0.1)
    case = replace(CASE, accumulate=2, epochs=2)
    plain = run_case(case, few.folder)
    assert plain.measurement.loader_first_batch_s is None
    assert plain.measurement.loader_samples_per_s is None
    case = replace(case, loader="torch", workers=2)
    found = run_case(case, few.folder)
    learnt = [[(s.images, s.loss, s.correct) for s in one.steps] for one in (found, plain)]
    assert learnt[0] == learnt[1]
    m = found.measurement
    assert 0 < m.loader_first_batch_s < m.measured_time_s
    assert m.loader_samples_per_s > 0


def test_no_worker_of_the_warm_up_is_there_in_the_epoch(few: DatasetInfo) -> None:
    case = replace(CASE, batch_size=200, loader="torch", workers=2)
    _, batches, training = set_up(case, few.folder)
    warm_up_shapes(training, batches, case, lambda step, loss: None)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    start_over(training, batches, case)
    assert multiprocessing.active_children() == []
    assert not any(process.is_alive() for process in workers)


# ---------------------------------------------------------------------------------- its processes


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


# ----------------------------------------------------------------------------- a user's dataset


def look(workload: Workload) -> Any:
    model = workload.build_model()
    return try_workload("workload 'm:f'", workload, model)


class Doubles(Rows):
    def __getitem__(self, number: int) -> Any:
        return torch.zeros(5, dtype=torch.float64), 0


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Doubles(4000), "gives float64 (2, 5), int64 (2,); make_batch gives float32 (2, 4), int64"),
        (Rows(7), "build_dataset returned a Rows of 7 items; it returns a map-style dataset of"),
        (Rows(4000, {}.__getitem__), "a batch of build_dataset fails: KeyError: "),
        (7, "build_dataset: len() fails: TypeError: object of type 'int' has no len()"),
    ],
)
def test_a_dataset_that_is_unlike_make_batch_is_refused(dataset: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        look(Loads(lambda samples: dataset))
    assert said in str(refused.value)
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


def test_a_workload_without_a_dataset_is_refused_before_any_case() -> None:
    flags = "--workload loads_for_tests:Bare --device cpu --precision fp32 --batch-size 20 --loader"
    options = parse_arguments([*flags.split(), "device", "torch"])
    device, torch_ = plan_cases(options).cases
    assert look(Loads()).dataset
    known = Fingerprint("", "", "", workload=look(loads_for_tests.Bare()))
    machine = Machine(models={name_subject(device): known})
    preflight.check(Plan([device]), machine, options, Images.count)
    with pytest.raises(UsageError, match="workload 'loads_for_tests:Bare': it has no dataset for"):
        preflight.check(Plan([device, torch_]), machine, options, Images.count)


# ------------------------------------------------------------------------------------ its outcomes


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("raising", Status.ERROR, r"ValueError: item \d+ is$"),
        ("full", Status.OOM, r"^/dev/shm is full; enlarge .* lower --workers: Runt"),
        ("bus", Status.OOM, r"^/dev/shm is full; .*DataLoader worker \(pid.*Bus error"),
        ("dying", Status.KILLED, r"DataLoader worker \(pid.*is killed by signal: Killed"),
    ],
)
def test_workers_that_fail_are_outcomes(name: str, status: Status, said: str) -> None:
    batches = getattr(loads_for_tests, name)().open_loader(
        batch_size=20, micro_batch=20, device=CPU, seed=0, workers=2
    )
    with pytest.raises(Exception, match=r"\w") as ended:
        sum(1 for divided in batches.divide() for _ in divided.parts)
    batches.close()
    fault = classify(list_kinds(ended.value), str(ended.value), None, Case(memory_limit="21GiB"))
    assert fault.status is status
    assert re.search(said, fault.reason), fault.reason
    assert fault.reason.isprintable()


class Breaks:
    """Batches whose worker dies while one of them is read: its pipe breaks before it has ended."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        dies = "import os, time; time.sleep(0.3); os.kill(os.getpid(), 9)"
        self._workers = [Process(target=exec, args=(dies,)), Process(target=time.sleep, args=(9,))]
        for worker in self._workers:
            worker.start()

    def __next__(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error", [EOFError(), RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")], ids=str
)
def test_a_worker_that_dies_within_a_batch_is_named(error: Exception) -> None:
    broken = Breaks(error)
    try:
        with pytest.raises(RuntimeError) as ended:
            LoadedBatches._load(broken)  # type: ignore[arg-type]
    finally:
        for worker in broken._workers:
            worker.kill()
            worker.join()
            worker.close()
    fault = classify(list_kinds(ended.value), str(ended.value), None, Case())
    assert (fault.status, ended.value.__cause__) == (Status.KILLED, error)
    assert "is killed by signal: Killed" in fault.reason


class Hurried:
    """The parent's clock, an hour ahead once a worker of the loader hangs."""

    sleep = staticmethod(time.sleep)

    def __init__(self, hangs: Callable[[], bool]) -> None:
        self._hangs = hangs

    def monotonic(self) -> float:
        return time.monotonic() + 3600 * self._hangs()


@pytest.mark.slow
def test_no_worker_outlives_its_case(tmp_path: Path, monkeypatch: Patch) -> None:
    place, started = tmp_path / "pids", time.monotonic()

    def hangs() -> bool:
        began = place.exists() and len(set(place.read_text().split())) == 2
        quiet = began and time.time() - place.stat().st_mtime > 3
        return quiet and time.monotonic() - started > 3

    monkeypatch.setattr(room, "time", Hurried(hangs))
    monkeypatch.setenv(PIDS, str(place))
    name = "loads_for_tests:hanging"
    own: dict[str, Any] = {"workload": name, "dataset": "own", "device": "cpu", "batch_size": 20}
    case = Case(name, **own, fraction=0.5, loader="torch", workers=2)
    job = Job(case, "", log=tmp_path / "log")
    executor = SubprocessExecutor(Settings(timeout_s=600))
    outcome = executor.run(job, lambda event: None, stopping=lambda: False)
    log = (tmp_path / "log").read_text()
    assert outcome.status is Status.TIMEOUT, log[-2000:]
    assert "warmup took longer than 600 s; raise --timeout; the log" in outcome.reason
    assert "hang" in log, "where the worker itself hangs; others write between the words"
    workers = [int(line) for line in place.read_text().split()]
    assert len(set(workers)) >= 2
    assert gone(workers)


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
