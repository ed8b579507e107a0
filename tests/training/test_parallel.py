"""Several processes that train one network, of gloo on the CPU: what they are given and compute."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from bench.base.errors import UsageError
from bench.networks.data.batches import MadeBatches, Share, plan_steps
from bench.networks.workloads import Network, Workload
from bench.schema.case import Case, divide_items, whole_batch
from bench.schema.rules import check_batches
from bench.training.building import build_training
from bench.training.loop import Epoch, merge
from bench.training.parallel import Exposed, find_slowest, replicate
from bench.workers.epochs import TimedEpoch, join_epochs
from bench.workers.fingerprint import examine_model, list_requests
from tests import ranks_for_tests
from tests.pytest_for_tests import Patch
from tests.ranks_for_tests import SLEEP_S
from tests.training_for_tests import batch, training

SIZES = (2, 3)
CPU = torch.device("cpu")
DDP = Case(device="cpu", parallel="ddp", world_size=2, dataset="synthetic")


@given(st.integers(1, 400), st.integers(1, 50), st.integers(1, 9))
def test_every_item_goes_to_one_process(samples: int, batch: int, size: int) -> None:
    steps = list(plan_steps(samples, batch * size, None, None))
    for items in steps:
        shares = [Share(rank, size).cut(items) for rank in range(size)]
        assert [item for share in shares for item in share] == list(items)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(map(len, shares)) <= batch
        assert shares[0], "the first process, which measures, has items in every step"


def test_batches_that_are_made_differ_between_processes() -> None:
    def make(size: int, device: torch.device, generator: torch.Generator) -> Any:
        return torch.randint(1000, (size,), generator=generator), torch.zeros(size)

    def first(share: Share) -> list[int]:
        supply = MadeBatches(make, 20, batch_size=8, micro_batch=4, device=CPU, seed=1)
        supply.share = share
        batch = next(supply.divide())
        numbers: list[int] = next(batch.parts)[0].tolist()
        return numbers

    one, other = (first(Share(rank, 2)) for rank in range(2))
    assert len(one) == len(other) == 4
    assert one != other
    assert one == first(Share(0, 1))[:4]


def test_epochs_of_processes_are_one_epoch() -> None:
    parts = [
        Epoch([4, 1], [1.0, 3.0], [2, 1], [False, True], [8.0, 4.0]),
        Epoch([4, 0], [2.0, float("nan")], [1, 0], [False, True], [8.0, 4.0]),
    ]
    whole = Epoch([8, 1], [1.5, 3.0], [3, 1], [False, True], [8.0, 4.0])
    assert merge(parts) == whole
    assert merge(parts[:1]) is parts[0]
    assert merge([replace(parts[0], correct=[]), parts[1]]).correct == []


def test_an_epoch_takes_as_long_as_in_the_slowest_process() -> None:
    fast, slow = (
        TimedEpoch(Epoch([4], [loss], [], [False], [1.0]), [time_s], [0.1], time_s)
        for loss, time_s in ((1.0, 2.0), (3.0, 5.0))
    )
    for ranks in ([fast], [slow]), ([slow], [fast]):
        (whole,) = join_epochs(ranks)
        assert (whole.time_s, whole.times) == (5.0, ranks[0][0].times), "steps are the first's"
        assert (whole.epoch.images, whole.epoch.losses) == ([8], [2.0])


@given(st.integers(1, 60), st.integers(1, 6), st.integers(2, 500))
def test_no_process_is_left_one_image(batch: int, size: int, images: int) -> None:
    """What passes leaves no process a batch of one; what is refused would, or is too large."""
    case = replace(DDP, batch_size=batch, world_size=size)
    whole = whole_batch(case)
    parts = [n for items in (whole, images % whole) for n in divide_items(case, items)]
    if whole <= images and 1 not in parts:
        check_batches(case, images)
    else:
        with pytest.raises(UsageError, match=f"atch size {batch} "):
            check_batches(case, images)


def copy_to_threads(patch: Patch, number: int) -> None:
    """Let torch's DataParallel run a network on the CPU in so many threads, which share its
    weights: of its parts, torch has those that copy for GPUs only."""

    def begin(self: Any, module: nn.Module, device_ids: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device = module, device_ids, 0
        self.src_device_obj = CPU

    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        parts = [*zip(*(one.chunk(number) for one in inputs), strict=True)]
        return parts, [kwargs] * len(parts)

    def run(self: Any, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        with ThreadPoolExecutor(len(replicas)) as pool:
            return [*pool.map(lambda network, given: network(*given), replicas, inputs)]

    parts = {
        "__init__": begin,
        "scatter": scatter,
        "replicate": lambda self, module, device_ids: [module] * len(device_ids),
        "parallel_apply": run,
        "gather": lambda self, outputs, device: torch.cat(outputs),
    }
    for name, part in parts.items():
        patch.setattr(DataParallel, name, part)
    patch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp", "bf16"])
def test_each_of_data_parallels_threads_computes_in_the_format_of_the_case(
    monkeypatch: Patch, precision: str
) -> None:
    """autocast is a thread's own. Losses and weights are those of one GPU, but for roundings."""
    copy_to_threads(monkeypatch, 3)
    seen, found = set[tuple[torch.dtype, bool]](), list[tuple[list[float], Tensor]]()
    main = threading.current_thread()

    def build(seed: int) -> nn.Module:
        network = ranks_for_tests.build()
        network[-1].register_forward_hook(
            lambda _, given, out: seen.add((out.dtype, threading.current_thread() is main))
        )
        return network

    for number in (1, 3):
        ours = training(precision, build=build)
        if number > 1:
            seen.clear()
            replicate(ours, number)
        losses = [float(ours.step(batch(7))[0]) for _ in range(3)]
        found.append((losses, torch.cat([one.detach().flatten() for one in ours.masters])))
    assert seen == {(torch.float32 if precision == "fp32" else torch.bfloat16, False)}
    (losses, weights), (copied, theirs) = found
    rounded = 1e-6 if precision == "fp32" else 1e-2
    assert copied == pytest.approx(losses, rel=rounded)
    assert (theirs - weights).norm() < rounded * weights.norm()


def test_what_data_parallel_would_divide_or_join_wrongly_is_refused(monkeypatch: Patch) -> None:
    """Of a mask with one item torch makes one part, and then trains on that part of the batch."""
    copy_to_threads(monkeypatch, 2)
    ours = training()
    replicate(ours, 2)
    x, _ = batch(8)
    with pytest.raises(UsageError, match=r"have 8 and 1 items; give --parallel ddp"):
        ours.compute(x, mask=torch.zeros(1, 32, 32))
    with pytest.raises(UsageError, match="have 8 and no items"):
        ours.compute(x, torch.tensor(2))
    assert ours.compute(x).shape == (8, 10)
    ours.model.register_forward_hook(lambda _, given, out: (out, out.sum()))
    with pytest.raises(UsageError, match=r"returns a single number.*give --parallel ddp"):
        ours.compute(x)


class Weighted(Workload):
    """Gives its network weights of the colours too, which are those of all images."""

    def build_model(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.last = nn.Linear(3072, 10)

            def forward(self, x: Tensor, colours: Tensor) -> Tensor:
                y: Tensor = self.last((x * colours).flatten(1))
                return y

        return Net()

    def compute_loss(self, network: Network, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(network(x, torch.ones(1, 3, 1, 1)), y)


def test_a_network_whose_batches_cannot_be_divided_is_refused_before_it_is_trained() -> None:
    name = f"{__name__}:Weighted"
    for parallel in ("ddp", "dp"):
        (asked,) = list_requests([Case(name, workload=name, parallel=parallel, world_size=2)])
        if parallel == "ddp":
            assert examine_model(asked)
            continue
        with pytest.raises(UsageError, match=r"have 2 and 1 items; give --parallel ddp"):
            examine_model(asked)


def test_data_parallel_needs_so_many_gpus(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="--world-size 2: this process sees 1 GPUs"):
        replicate(training(), 2)


@pytest.fixture(scope="module")
def found() -> dict[int, dict[str, Any]]:
    """What the scenarios of `ranks_for_tests` gave, by the number of processes."""
    names = "clipped,compressed,divided_first,overflow,straggler,exposed,ended_early"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            ranks_for_tests.__file__,
            folder,
            f"2,gradients,{names}",
            "3,gradients",
        ]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, env=environment, check=True, timeout=600)
        return {
            size: torch.load(Path(folder) / f"found{size}.pt", weights_only=False) for size in SIZES
        }


Found = dict[int, dict[str, Any]]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_one_process(found: Found, size: int) -> None:
    """In float64, with micro-batches, an uneven last batch, and one that leaves some without."""
    runs = found[size]["gradients"]
    assert f"{8 * size + 1} 1" in runs, "the last batch has one image"
    for name, run in runs.items():
        assert max(run["errors"]) < 1e-14, name
        mine, exact = run["losses"]
        assert mine == pytest.approx(exact, rel=1e-14), name
        mine, exact = run["images"]
        assert mine == exact, name
        assert len(set(run["weights"])) == 1, "all processes hold the same weights"


@pytest.mark.slow
def test_processes_end_an_early_epoch_together(found: Found) -> None:
    """Once all are certain, as one that went on alone would wait for the others for ever."""
    steady, unsteady, late = found[2]["ended_early"]
    assert steady == [10, 10]
    assert unsteady[0] == unsteady[1] > 20
    assert late == [17, 17]


@pytest.mark.slow
def test_clipped_gradients_are_those_of_one_process(found: Found) -> None:
    run = found[2]["clipped"]
    assert run["error"] < 1e-14
    assert len(set(run["weights"])) == 1
    assert max(run["norms"]) > 0.5, "something was clipped"


@pytest.mark.slow
def test_compressed_gradients_are_rounded_once_or_twice(found: Found) -> None:
    """Of two numbers that are rounded to a format, and of their sum."""
    runs = found[2]["compressed"]
    assert runs["none"]["error"] < 1e-14
    assert 2.0**-16 < runs["fp16"]["error"] < 2 * 2.0**-11
    assert 2.0**-13 < runs["bf16"]["error"] < 2 * 2.0**-8
    for name, size in (("none", 8), ("fp16", 2), ("bf16", 2)):
        assert runs[name]["wire"] == size * runs[name]["weights"]


@pytest.mark.slow
def test_gradients_are_divided_before_they_are_summed(found: Found) -> None:
    """40,000 and 40,000 would be infinite; 1e-6 survives."""
    run = found[2]["divided_first"]
    assert run["high"] == pytest.approx(40_000, rel=2.0**-10)
    assert run["low"] == pytest.approx(1e-6, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["dynamic", "dynamic-apex-amp"])
def test_all_skip_a_step_that_one_overflowed_in(found: Found, scale: str) -> None:
    run = found[2]["overflow"][scale]
    assert run["skipped"] == [[True, False, False]] * 2
    assert run["kept"] == [True, True]
    assert run["scales"][0] == run["scales"][1]
    assert run["weights"][0] == run["weights"][1]
    assert run["wire"] == 2 * run["halves"], "pure fp16 exchanges half the bytes"


@pytest.mark.slow
def test_a_straggler_shows_in_its_work_and_not_in_steps(found: Found) -> None:
    run = found[2]["straggler"]
    first, last = run["work"]
    assert last > SLEEP_S
    assert last > 2 * first
    assert run["steps"][0] > SLEEP_S
    assert run["steps"][1] / run["steps"][0] == pytest.approx(1, abs=0.2)


@pytest.mark.slow
def test_waiting_for_a_slower_process_is_no_exchange(found: Found) -> None:
    """The first process waits for `SLEEP_S` in each step that exchanges, and in no other."""
    run = found[2]["straggler"]["exposed"]
    assert run.no_sync_step_s > SLEEP_S
    assert_exposed(run, 0)


@pytest.mark.slow
def test_exchange_that_nothing_hides_is_found(found: Found) -> None:
    run = found[2]["exposed"]
    assert_exposed(run["exposed"], SLEEP_S)
    assert run["same"] == [True, True], "the training is as it was"


def assert_exposed(found: Exposed, seconds: float) -> None:
    """Within a tenth of `SLEEP_S`, or what it says itself where other work disturbs the steps."""
    assert found.error_s < SLEEP_S / 2
    off = abs(found.sync_step_s - found.no_sync_step_s - seconds)
    assert off < min(SLEEP_S / 2, SLEEP_S / 10 + 2 * found.error_s)


def test_batchnorm_that_is_scripted_is_not_synchronised() -> None:
    case = Case(parallel="ddp", sync_bn=True, device="cpu")
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(UsageError) as refused:
        build_training(case, Workload(), torch.device("cpu"), scripted)
    assert str(refused.value) == (
        "--sync-bn: BatchNorm that is scripted or traced cannot be converted; return the network "
        "as it is written, or leave out --sync-bn"
    )


def test_the_interval_of_exposed_communication_covers_as_often_as_it_says() -> None:
    """95 of 100: blocks whose steps vary by 2 %, on a machine that slows down meanwhile."""
    draw, covered, rounds = np.random.default_rng(1), 0, 2000
    for _ in range(rounds):
        blocks = np.array([1.1, 1.0]) + draw.normal(0, 0.02, (6, 2)) + np.arange(6)[:, None] / 10
        found = Exposed.of([(a, b) for a, b in blocks.tolist()])
        covered += abs(found.sync_step_s - found.no_sync_step_s - 0.1) <= found.error_s
    assert 0.935 < covered / rounds < 0.965


def test_waiting_for_whoever_jitters_is_no_exchange() -> None:
    """Steps of 1 s that vary by 2 %; of eight processes, those that exchange wait for the last."""
    random, rounds, noise = np.random.default_rng(0), 300, 0.02
    found = []
    for _ in range(rounds):
        free, bound = random.normal(1, noise, (2, 8, 6, 30))
        bound[:] = bound.max(0)
        steps = zip(find_slowest(bound.tolist()), find_slowest(free.tolist()), strict=True)
        found.append(Exposed.of(list(steps)))
    exposed = [one.sync_step_s - one.no_sync_step_s for one in found]
    assert abs(np.mean(exposed)) < noise / 20
    above = np.mean([e > one.error_s for e, one in zip(exposed, found, strict=True)])
    assert above < 0.06, "half of the five in a hundred that are outside their interval"
