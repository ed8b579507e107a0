"""Several processes that train one network: real ones, of gloo on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest_for_tests import Patch
from ranks_for_tests import SLEEP_S
from workers_for_tests import find_workers

from bench.case import Case, divide_items, whole_batch
from bench.cores import OtherWork, share_cores
from bench.data import DatasetInfo
from bench.data.batches import Batches, MadeBatches, Share, plan_steps
from bench.data.loader import load_images
from bench.errors import UsageError
from bench.executors import Settings
from bench.executors import ranks as room
from bench.executors import subprocess as parent
from bench.executors.ranks import Ranks
from bench.executors.subprocess import SubprocessExecutor
from bench.grid import check_axes, check_batches, grid
from bench.record import Measurement, Outcome, RankRow, Status
from bench.training.loop import Epoch, merge
from bench.training.parallel import Exposed, find_slowest
from bench.training.schedule import learning_rates
from bench.worker.messages import GO_ON, Job, Lane, Message, PhaseEntered, StepTaken

RANKS = Path(__file__).with_name("ranks_for_tests.py")
SIZES = (2, 3)
CPU = torch.device("cpu")
DDP = Case(device="cpu", parallel="ddp", world_size=2, dataset="synthetic")

# ------------------------------------------------------------------- a batch is shared, none twice


@given(st.integers(1, 400), st.integers(1, 50), st.integers(1, 9))
def test_every_item_goes_to_one_process(samples: int, batch: int, size: int) -> None:
    steps = list(plan_steps(samples, batch * size))
    for items in steps:
        shares = [Share(rank, size).cut(items) for rank in range(size)]
        assert [item for share in shares for item in share] == list(items)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(map(len, shares)) <= batch
        assert shares[0], "the first process, which measures, has items in every step"


def shares_of(open_: Callable[[Share], Any], size: int) -> list[list[Any]]:
    """Of each process, what `divide` gives it of an epoch: items, whole and labels of each step."""
    return [
        [(b.size, b.whole, [y for _, ys in b.parts for y in ys.tolist()]) for b in supply.divide(3)]
        for supply in (open_(Share(rank, size)) for rank in range(size))
    ]


@pytest.mark.parametrize("loader", ["device", "torch"])
def test_processes_get_the_images_that_one_gets(loader: str) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (37, 3, 32, 32), dtype=np.uint8)
    about: dict[str, Any] = {"batch_size": 12, "micro_batch": 3, "device": CPU, "seed": 5}

    def open_(share: Share) -> Any:
        if loader == "device":
            supply: Any = Batches(images, np.arange(37), **about)
        else:
            supply = load_images(images, np.arange(37), **about)
        supply.share = share
        return supply

    (alone,) = shares_of(open_, 1)
    for size in (2, 5):
        ranks = shares_of(open_, size)
        for step, (items, _, labels) in enumerate(alone):
            parts = [rank[step] for rank in ranks]
            assert [label for _, _, part in parts for label in part] == labels
            assert sum(n for n, _, _ in parts) == items
            assert {whole for _, whole, _ in parts} == {items}


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


def test_processes_that_train_together_are_no_others_to_each_other() -> None:
    def work(on: list[int], busy: float, own: float) -> OtherWork:
        one = OtherWork(busy, own, 10.0)
        one.on, one.quota = on, None
        return one

    # 5 s of two cores for 10 s are somebody else's
    assert OtherWork.add([work([0], 10.0, 7.0), work([1], 8.0, 6.0)]).cores() == 0.5
    assert OtherWork.add([work([0], 10.0, 4.0), work([0], 10.0, 4.0)]).cores() == 0.2
    assert work([0], 10.0, 7.0).cores() == pytest.approx(0.3)


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "images", "said"),
    [
        # 50,000 leave 2 images in the last batch: one for each
        ({"batch_size": 641}, 50_000, "batch size 641 on each of 2 processes .* 640 should work"),
        ({"batch_size": 3}, 13, "one of them a batch of one image"),
        ({"batch_size": 600}, 1000, "is 1200 images a step, above .* 1000; use at most 500"),
        ({"batch_size": 9, "accumulate": 3}, 26, "a micro-batch of one image"),
        (
            {"batch_size": 64, "sync_bn": True, "device": "cuda", "world_size": 4},
            64 * 4 + 3,
            "not all of them compute in as many micro-batches",
        ),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(
    settings: dict[str, Any], images: int, said: str
) -> None:
    case = replace(DDP, **settings)
    with pytest.raises(UsageError, match=said) as refused:
        check_batches(case, images)
    if "should work" in str(refused.value):
        works = int(str(refused.value).split()[-3])
        check_batches(replace(case, batch_size=works), images)
    if "use at most" not in said:
        check_batches(case, images, batchnorm=False)


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"profile": True}, "--profile on with --parallel ddp is not measured"),
        ({"checkpoint": True}, "--checkpoint on with --parallel ddp is not measured"),
        ({"precision": "fp16-apex", "loss_scale": 128.0}, "trains on one GPU"),
        ({"sync_bn": True}, "--sync-bn needs GPUs"),
        ({"parallel": "dp"}, "--parallel dp needs GPUs"),
        (
            {"parallel": "dp", "device": "cuda", "compile": "default"},
            "--compile default with --parallel dp",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_axes(replace(DDP, **settings))


def test_the_learning_rate_scales_with_the_batch_of_all() -> None:
    case = replace(DDP, batch_size=128, world_size=4, lr=0.1, lr_scaling="linear", base_batch=128)
    assert learning_rates(case, 2) == pytest.approx([0.4, 0.4])


def test_cores_are_divided() -> None:
    assert share_cores([4, 5, 6, 7], 2) == [(4, 5), (6, 7)]
    assert share_cores([4], 2) == [(4,), (4,)]


# --------------------------------------------------------------- what processes of a group compute


@pytest.fixture(scope="module")
def found() -> dict[int, dict[str, Any]]:
    """What the scenarios of `ranks_for_tests` gave, by the number of processes."""
    names = "clipped,compressed,divided_first,overflow,straggler,exposed,buckets,synchronized"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, RANKS, folder, f"2,gradients,{names}", "3,gradients"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, env=environment, check=True, timeout=600)
        return {
            size: torch.load(Path(folder) / f"found{size}.pt", weights_only=False) for size in SIZES
        }


Found = dict[int, dict[str, Any]]


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


def test_clipped_gradients_are_those_of_one_process(found: Found) -> None:
    run = found[2]["clipped"]
    assert run["error"] < 1e-14
    assert len(set(run["weights"])) == 1
    assert max(run["norms"]) > 0.5, "something was clipped"


def test_compressed_gradients_are_rounded_once_or_twice(found: Found) -> None:
    """Of two numbers that are rounded to a format, and of their sum."""
    runs = found[2]["compressed"]
    assert runs["none"]["error"] < 1e-14
    assert 2.0**-16 < runs["fp16"]["error"] < 2 * 2.0**-11
    assert 2.0**-13 < runs["bf16"]["error"] < 2 * 2.0**-8
    for name, size in (("none", 8), ("fp16", 2), ("bf16", 2)):
        assert runs[name]["wire"] == size * runs[name]["weights"]


def test_gradients_are_divided_before_they_are_summed(found: Found) -> None:
    """40,000 and 40,000 would be infinite; 1e-6 survives."""
    run = found[2]["divided_first"]
    assert run["high"] == pytest.approx(40_000, rel=2.0**-10)
    assert run["low"] == pytest.approx(1e-6, rel=0.1)


@pytest.mark.parametrize("scale", ["dynamic", "dynamic-apex-amp"])
def test_all_skip_a_step_that_one_overflowed_in(found: Found, scale: str) -> None:
    run = found[2]["overflow"][scale]
    assert run["skipped"] == [[True, False, False]] * 2
    assert run["kept"] == [True, True]
    assert run["scales"][0] == run["scales"][1]
    assert run["weights"][0] == run["weights"][1]
    assert run["wire"] == 2 * run["halves"], "pure fp16 exchanges half the bytes"


def test_a_straggler_shows_in_its_work_and_not_in_steps(found: Found) -> None:
    run = found[2]["straggler"]
    first, last = run["work"]
    assert last > SLEEP_S
    assert last > 2 * first
    assert run["steps"][0] > SLEEP_S
    assert run["steps"][1] / run["steps"][0] == pytest.approx(1, abs=0.2)


def test_waiting_for_a_slower_process_is_no_exchange(found: Found) -> None:
    """The first process waits for `SLEEP_S` in each step that exchanges, and in no other."""
    run = found[2]["straggler"]["exposed"]
    assert run.no_sync_step_s > SLEEP_S
    assert_exposed(run, 0)


def test_exchange_that_nothing_hides_is_found(found: Found) -> None:
    run = found[2]["exposed"]
    assert_exposed(run["exposed"], SLEEP_S)
    assert run["same"] == [True, True], "the training is as it was"


def assert_exposed(found: Exposed, seconds: float) -> None:
    """Within a tenth of `SLEEP_S`, or what it says itself where other work disturbs the steps."""
    assert found.error_s < SLEEP_S / 2
    off = abs(found.sync_step_s - found.no_sync_step_s - seconds)
    assert off < min(SLEEP_S / 2, SLEEP_S / 10 + 2 * found.error_s)


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


def test_a_small_first_bucket_is_sent_early(found: Found) -> None:
    assert found[2]["buckets"] == 2, "of 6 MiB, which torch's 25 MiB would hold"


def test_with_sync_bn_no_process_works_alone(found: Found) -> None:
    told = found[2]["synchronized"]["found"]
    m = told.measurement
    assert m.wire_bytes
    empty = {"sync_step_s", "no_sync_step_s", "exposed_error_s", "slowest_rank"}
    assert {getattr(m, name) for name in empty} == {None}
    assert {told.missing[name] for name in empty} == {
        "with --sync-bn the processes wait for each other in the forward pass too"
    }
    assert [rank.work_s for rank in told.ranks] == [None, None]
    assert [rank.epoch_time_s for rank in told.ranks] == [2.0, 2.0], "half of it was measured"


# ------------------------------------------------------------------ several workers look like one


class Script:
    """A worker that says what it was given, and at each phase waits as one does; then it ends."""

    note = ""

    def __init__(self, says: list[Message], code: int = 0) -> None:
        self.says, self.code, self.pid, self.told = says, code, 4242, 0
        self._may, self._killed = threading.Semaphore(0), False

    def messages(self) -> Iterator[Message | None]:
        for one in self.says:
            yield one
            if isinstance(one, PhaseEntered):
                self._may.acquire()
                if self._killed:
                    return

    def send(self, content: str = GO_ON) -> None:
        self.told += 1
        self._may.release()

    def dump_stacks(self) -> str:
        return f"stacks of {self.code};"

    def wait(self, seconds: float) -> None: ...

    def kill(self) -> None:
        self._killed = True
        self._may.release()

    def end(self, patiently: bool) -> int:
        return self.code


def play(
    monkeypatch: Patch, *scripts: Script, log: Path | None = None
) -> tuple[Ranks, list[Message]]:
    """What the parent hears of workers that say their lines."""
    left = iter(scripts)
    monkeypatch.setattr(room, "Worker", lambda job, variables, rendezvous, cold: next(left))
    monkeypatch.setattr(room, "prepare", lambda variables, cores: None)
    monkeypatch.setattr(room, "_GRACE_S", 0.5)
    ranks = Ranks(Job(replace(DDP, world_size=len(scripts)), log=log), {}, 60.0)
    heard = []
    for message in ranks.messages():
        if isinstance(message, PhaseEntered):
            ranks.send()
        if message is not None:
            heard.append(message)
    return ranks, heard


GONE = Outcome(Status.ERROR, "RuntimeError: Connection closed by peer", peer=True)
OOM = Outcome(Status.OOM, "OutOfMemoryError: CUDA out of memory")
OK = Outcome(Status.OK, measurement=Measurement(epoch_time_s=1.0))


def test_a_phase_begins_once_all_are_there(monkeypatch: Patch) -> None:
    step = StepTaken("warmup", 0, 0, 1.0, 1)
    one = Script([PhaseEntered("warmup"), step, PhaseEntered("epoch"), OK])
    other = Script([PhaseEntered("warmup"), step, PhaseEntered("epoch"), Outcome(Status.OK)])
    ranks, heard = play(monkeypatch, one, other)
    assert heard[-1] == OK
    assert [m for m in heard if isinstance(m, StepTaken)] == [step], "the first one's alone"
    phases = [m.phase for m in heard if isinstance(m, PhaseEntered)]
    assert phases == ["warmup", "epoch"]
    assert (one.told, other.told) == (2, 2)
    assert ranks.end(patiently=True) == 0


MEASURED = replace(OK, follows=["sync_step_s"])


@pytest.mark.parametrize(
    ("scripts", "said", "code"),
    [
        # a phase that one does not reach does not begin
        ([([PhaseEntered("warmup"), OK], 0), ([], -9)], [], -9),
        # what was measured comes through before a later death; the parent keeps it, as of one
        ([([MEASURED], 1), ([MEASURED], -9)], [MEASURED], 1),
        # memory that ran out comes before peers that were gone, and so does a killed process
        ([([OOM], 1), ([GONE], 1)], [replace(OOM, reason=f"rank 0: {OOM.reason}")], 1),
        ([([GONE], 1), ([OOM], 1)], [replace(OOM, reason=f"rank 1: {OOM.reason}")], 1),
        ([([GONE], 1), ([], -9), ([GONE], 1)], [], -9),
    ],
)
def test_what_is_heard_of_processes_that_end(
    scripts: list[tuple[list[Message], int]], said: list[Message], code: int, monkeypatch: Patch
) -> None:
    ranks, heard = play(monkeypatch, *(Script(*one) for one in scripts))
    assert heard == said
    assert ranks.end(patiently=True) == code
    if code < 0:
        assert ranks.failed_rank == "rank 1: ", "which the parent reads from the return code"


def test_the_stacks_of_all_are_in_the_log(monkeypatch: Patch, tmp_path: Path) -> None:
    ranks, _ = play(monkeypatch, Script([OK], 0), Script([OK], 1), log=tmp_path / "log")
    assert ranks.dump_stacks() == "stacks of 0;stacks of 1;"
    assert (tmp_path / "log").read_text() == "[stacks of rank 0]\n[stacks of rank 1]\n"


def test_too_few_gpus_are_unsupported() -> None:
    job = Job(replace(DDP, device="cuda"), gpu_uuid="GPU-1")
    for case in (job.case, replace(job.case, parallel="dp")):
        found = SubprocessExecutor(Settings()).run(
            replace(job, case=case), lambda event: None, lambda: False
        )
        assert found.status is Status.UNSUPPORTED
        assert "--world-size 2" in found.reason


def test_each_process_sees_its_own_gpu(monkeypatch: Patch) -> None:
    seen: list[tuple[Job, Any, Any]] = []

    def start(job: Job, variables: Any, rendezvous: Any, cold: bool) -> Script:
        seen.append((job, variables, rendezvous))
        return Script([OK])

    monkeypatch.setattr(room, "Worker", start)
    job = Job(replace(DDP, device="cuda"), gpu_uuid="GPU-1", lane=Lane("", ("GPU-1", "GPU-2")))
    Ranks(job, {}, 60.0).end(patiently=True)
    own = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("GPU-1", "GPU-2")]
    assert [job.lane.variables for job, _, _ in seen] == own
    assert [job.gpu_uuid for job, _, _ in seen] == ["GPU-1", "GPU-2"]
    assert [rendezvous.rank for _, _, rendezvous in seen] == [0, 1]
    assert seen[0][2].gpus == ["GPU-1", "GPU-2"]


# --------------------------------------------------------------------------------- real workers


def run(case: Case, data: DatasetInfo, log: Path | None = None, timeout_s: float = 600) -> Outcome:
    executor = SubprocessExecutor(Settings(timeout_s=timeout_s))
    return executor.run(Job(case, data.folder, log=log), lambda event: None, lambda: False)


SHORT = replace(DDP, model="models_for_tests:exchanges_briefly", batch_size=256, world_size=2)


def test_several_gpus_need_a_way_to_train_on_them() -> None:
    """Also where ``--parallel none`` is said, which would drop the size in silence."""
    for parallel in ({}, {"parallel": ["none"]}):
        with pytest.raises(UsageError, match="--world-size is given, but it is of"):
            grid({"device": ["cpu"], "world_size": [1, 2], **parallel})
    both = grid({"device": ["cpu"], "world_size": [1, 2], "parallel": ["none", "ddp"]})
    assert [(c.parallel, c.world_size) for c in both] == [("none", 1), ("ddp", 1), ("ddp", 2)]


def test_one_process_trains_as_without(data: DatasetInfo) -> None:
    case = replace(SHORT, world_size=1, steps=4, precision="fp16", loss_scale=128.0, evaluate=True)
    alone = run(replace(case, parallel="none"), data)
    found = run(case, data)
    assert alone.status is found.status is Status.OK, (alone.reason, found.reason)
    told = [[(s.loss, s.correct, s.images) for s in one.steps] for one in (alone, found)]
    assert told[0] == told[1]
    assert found.measurement.test_loss == alone.measurement.test_loss
    assert found.measurement.arithmetic == alone.measurement.arithmetic
    assert found.ranks[0].work_s is not None
    assert not alone.ranks


@pytest.mark.slow
def test_a_whole_epoch_of_two_is_measured(data: DatasetInfo, tmp_path: Path) -> None:
    found = run(replace(SHORT, evaluate=True), data, tmp_path / "log")
    m = found.measurement
    assert found.status is Status.OK, found.reason
    assert m.measured_images == data.train_images == sum(s.images for s in found.steps)
    assert [s.images for s in found.steps] == [512] * 97 + [336]
    assert [r.images for r in found.ranks] == [25_000, 25_000]
    slowest = max(r.epoch_time_s or 0 for r in found.ranks)
    assert m.epoch_time_s == m.measured_time_s == pytest.approx(slowest)
    assert m.test_accuracy is not None
    assert str(m.comm_backend).startswith("gloo")
    assert m.wire_bytes == 4 * (3 * 4 * 9 + 4 + 256 * 10 + 10)
    assert m.buckets == 1
    assert m.sync_step_s
    assert m.no_sync_step_s
    assert m.exposed_error_s
    assert m.slowest_rank == max(found.ranks, key=lambda r: r.work_s or 0).rank
    assert all(isinstance(r, RankRow) and r.peak_process_bytes for r in found.ranks)
    assert m.arithmetic == "float32", "the first process goes on alone"
    assert m.step_bytes
    assert not find_workers()


def test_a_process_that_fails_in_the_exchange_does_not_keep_the_others(
    data: DatasetInfo, tmp_path: Path
) -> None:
    """The first one hangs there, as NCCL does where another is gone, and the epoch is kept."""
    case = replace(SHORT, model="models_for_tests:fails_to_exchange", steps=2)
    found = run(case, data, tmp_path / "log", timeout_s=120)
    m = found.measurement
    assert found.status is Status.OK, found.reason
    assert m.epoch_time_s
    assert m.slowest_rank is not None
    assert m.sync_step_s is None
    assert "sync_step_s: rank 1: RuntimeError: no link" in str(m.missing)
    assert not find_workers()


class Hour:
    """The parent's clock, an hour ahead from ``come`` on: no test waits for a deadline."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.come = False

    def monotonic(self) -> float:
        return time.monotonic() + 3600 * self.come


def end_second(data: DatasetInfo, log: Path, number: int, clock: Hour | None = None) -> Outcome:
    """Run a case whose second process gets a signal within its epoch; then the hour has come."""

    def look(event: object) -> None:
        if isinstance(event, PhaseEntered) and event.phase == "epoch":
            os.kill(find_workers()[1].pid, number)
            if clock is not None:
                # the first one waits for it by then; what an event is held for does not count
                threading.Timer(1, setattr, (clock, "come", True)).start()

    case = replace(SHORT, batch_size=32)
    executor = SubprocessExecutor(Settings(timeout_s=1800))
    return executor.run(Job(case, data.folder, log=log), look, lambda: False)


def test_a_killed_process_ends_the_case(data: DatasetInfo, tmp_path: Path) -> None:
    found = end_second(data, tmp_path / "log", signal.SIGKILL)
    assert found.status is Status.KILLED
    assert found.reason == "rank 1: SIGKILL from outside the sweep"
    assert not find_workers()


def test_a_stopped_process_ends_at_the_deadline(
    data: DatasetInfo, tmp_path: Path, monkeypatch: Patch
) -> None:
    clock = Hour()
    monkeypatch.setattr(parent, "time", clock)
    found = end_second(data, tmp_path / "log", signal.SIGSTOP, clock)
    assert found.status is Status.TIMEOUT
    assert "epoch took longer than 1800 s" in found.reason
    first, _, second = (tmp_path / "log").read_text().partition("[stacks of rank 1]")
    assert "[stacks of rank 0]" in first
    assert "measurement.py" in first, "where it waits for the other"
    assert "measurement.py" not in second, "which was stopped and says nothing"
    assert not find_workers()


def test_no_process_outlives_the_sweep(tmp_path: Path) -> None:
    flags = "--device cpu --dataset synthetic --model models_for_tests:good --batch-size 32"
    flags += f" --parallel ddp --world-size 2 --repeats 1 --out {tmp_path / 'out'}"
    command, nowhere = [sys.executable, "-m", "bench.sweep", *flags.split()], subprocess.DEVNULL
    sweep = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        end = time.monotonic() + 300
        ours: list[psutil.Process] = []
        while len(ours) < 2 and time.monotonic() < end and sweep.poll() is None:
            ours = find_workers(sweep.pid)
            time.sleep(0.1)
        assert len(ours) == 2
    finally:
        sweep.kill()
        sweep.wait()
    _, alive = psutil.wait_procs(ours, timeout=60)
    assert not alive


def test_a_case_of_several_processes_has_a_seat_or_says_so() -> None:
    from bench.worker.measurement import measure
    from bench.worker.messages import Channel

    with pytest.raises(UsageError, match=r"only bench\.sweep starts"):
        measure(Job(DDP), Channel())


def test_axes_of_several_gpus_vary_with_them_alone() -> None:
    axes: dict[str, Any] = {"parallel": ["none", "ddp"], "grad_compression": ["none", "bf16"]}
    cases = grid({**axes, "device": ["cpu"], "world_size": [2]})
    assert [(c.parallel, c.world_size, c.grad_compression) for c in cases] == [
        ("none", 1, "none"),
        ("ddp", 2, "none"),
        ("ddp", 2, "bf16"),
    ]
