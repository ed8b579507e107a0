"""A user's own command: what is measured of it, how it ends, and what is refused before it runs."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cards.__main__ import main as cards
from bench.compare.__main__ import main as compare
from bench.report.__main__ import main as report
from bench.results.store.reader import read_beside, read_records
from bench.schema.case import AXES, Case, fill_command
from bench.schema.command import parse_command
from bench.schema.record import Outcome, RankRow
from bench.schema.work import Label, Work, WorkKind
from bench.sweep.__main__ import main as sweep
from bench.sweep.options import parse_arguments, plan_cases
from bench.training.labels import judge_label
from bench.training.timing import LEAST_STEPS
from bench.validate.__main__ import main as validate
from bench.why import main as explain
from bench.workers.command import _profile
from bench.workers.executors import CaseEvent, Settings
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Channel, Job, StepTaken
from bench.workers.reports import TakenStep
from tests.frames_for_tests import read_steps, read_work
from tests.pytest_for_tests import Capture, Patch
from tests.workers_for_tests import gone

SCRIPT = Path(__file__).parents[1] / "scripts_for_tests.py"
RUN = f"{shlex.quote(sys.executable)} {shlex.quote(str(SCRIPT))}"
QUICK = ["--device", "cpu", "--no-report"]


def read(folder: Path, key: str = "vary") -> dict[str, Any]:
    rows = read_records(folder).to_dict("records")
    return {str(row[key]).partition("=")[2].strip("'") or str(row[key]): row for row in rows}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over a script's mistakes."""
    out = tmp_path_factory.mktemp("mistakes") / "out"
    names = "none silent epochs nan worsens oom killed daemon returns asks exits dies bytes text "
    names += "launched"
    vary = ["--vary", "mistake", *names.split()]
    # of a pod, or of another program
    left = "WORLD_SIZE=4 RANK=1 LOCAL_RANK="
    given = ["--command", f"{left} {RUN} {{mistake}}", *vary, "--out", str(out)]
    assert sweep([*given, *QUICK]) == 0
    return out


@pytest.mark.parametrize(
    ("mistake", "status", "reason"),
    [
        ("none", "ok", ""),
        ("silent", "ok", ""),
        ("epochs", "ok", ""),
        ("nan", "diverged", "the loss was inf or NaN from step 0 of"),
        ("worsens", "diverged", "the loss was inf or NaN from step "),
        ("oom", "oom", "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB"),
        ("killed", "killed", "the command ended by SIGKILL from outside"),
        ("daemon", "invalid", "it left 1 process running (sleep, pid "),
        ("returns", "ok", ""),
        ("asks", "error", "EOFError: EOF when reading a line (scripts_for_tests.py, line "),
        ("exits", "error", "the command ended with code 3: no data in ./data"),
        ("launched", "error", "ValueError: a shape does not fit (train.py, line 7)"),
        ("dies", "error", "ValueError: a shape does not fit (scripts_for_tests.py, line "),
        ("bytes", "error", "the command ended with code 1: \ufffd\ufffd not UTF-8"),
        ("text", "error", "takes a number or a tensor of one element, and this is a str (scripts_"),
    ],
)
def test_each_ends_in_its_outcome(mistakes: Path, mistake: str, status: str, reason: str) -> None:
    row = read(mistakes)[mistake]
    assert (row["status"], reason in row["reason"]) == (status, True), row["reason"]
    if mistake == "dies":  # of these the first starts up, and another is counted
        assert row["reason"].endswith("after 3 steps")
        assert (row["measured_steps"], row["measured_images"]) == (1, 8)
    if mistake == "daemon":
        assert gone([int((mistakes / row["log"]).read_text().split()[-1])])
    if mistake == "worsens":
        assert "test_loss: it is inf or NaN" in row["missing"]
    if mistake == "returns":
        assert row["epoch_time_s"] > 1.2
        assert "s later: its time is until then" in row["notes"]
    if mistake == "epochs":
        assert (row["train_images"], row["steps_per_epoch"]) == (480, 60)
        assert (row["test_loss"], row["test_accuracy"]) == (0.5, 0.75)


ENDS = """
import sys, time, bench
size, many = int(sys.argv[1]), 100
for epoch in range(4):
    for begin in range(0, many, size):
        time.sleep(0.002)
        bench.step(items=min(size, many - begin))
    bench.epoch(accuracy=0.1)
"""


def test_the_smaller_batch_that_ends_an_epoch_is_no_other_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(ENDS)
    run = f"{shlex.quote(sys.executable)} t.py {{batch_size}}"
    given = ["--command", run, "--batch-size", "64", "96", "--device", "cpu", "--out", "out"]
    assert sweep([*given, "--no-report"]) == 0
    rows = read_records(Path("out"))
    assert rows["step_items"].tolist() == [64, 96]
    assert "train_loss: the command tells no loss; give bench.step(loss=…)" in rows["missing"][0]
    capsys.readouterr()
    assert cards(["out"]) == 0
    assert " in own" not in (output := capsys.readouterr().out)
    assert " on own" not in output
    assert "s an epoch, at batch size " in output


def test_steps_that_its_warm_up_would_take_up_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = 1 + LEAST_STEPS  # with which a warm-up for few steps ends
    code = f"import time, bench\nfor _ in range({steps}): time.sleep(0.01); bench.step(items=8)"
    given = ["--command", f"{sys.executable} -c {shlex.quote(code)}", "--steps", "4"]
    given += ["--repeats", "1"]
    assert sweep([*given, "--out", "out", *QUICK]) == 0
    (row,) = read_records(Path("out")).to_dict("records")
    assert (row["unit"], row["measured_steps"]) == ("items", steps - 2)
    assert "warmup_steps: too few steps for a warm-up" in row["missing"]


FILLS_DISK = """
import bench, resource, time
for i in range(30):
    time.sleep(0.01)
    bench.step(items=8, loss=1.0)
    if i == 9:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))  # of each file, as on a full disk
"""


def test_steps_that_it_could_not_tell_are_said_to_be_lost(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(FILLS_DISK)
    given = ["--command", f"{sys.executable} {tmp_path}/t.py", "--repeats", "1", *QUICK]
    assert sweep([*given, "--out", str(tmp_path / "out")]) == 0
    (row,) = read_records(tmp_path / "out").to_dict("records")
    assert row["notes"] == (
        "it told only of its first 10 steps: OSError: [Errno 27] File too large"
    )


def test_what_a_command_alone_tells_is_its_wall_time_and_memory(mistakes: Path) -> None:
    row = read(mistakes)["silent"]
    assert row["unit"] == "runs"
    assert row["epoch_time_s"] == row["measured_time_s"] > 0.05
    # of the script alone: the process that starts it holds torch, which takes more
    assert 1e6 < row["peak_process_bytes"] < 1e8
    assert row["precision"] == row["optimizer"] == "own"
    assert not row["torch"] and not row["python"], "it imports none"  # noqa: PT018
    assert row["batch_size"] == 0
    assert row["measured_steps"] != row["measured_steps"]
    assert "no steps were seen: the command imports no torch" in row["missing"]


def test_steps_that_it_tells_are_timed_without_their_warm_up(mistakes: Path) -> None:
    row = read(mistakes)["none"]
    steps = read_steps(mistakes)
    own = steps[steps["record_id"] == row["record_id"]]
    assert row["warmup_steps"] + row["measured_steps"] == 60
    assert own["step"].tolist() == list(range(int(row["warmup_steps"]), 60))
    assert row["measured_images"] == 8 * row["measured_steps"] == own["images"].sum()
    assert row["step_time_median_s"] >= 0.012
    assert row["step_items"] == 8
    # there is no epoch: the time is that of 10,000 items
    assert (row["unit"], row["train_images"]) == ("items", 10_000)
    assert row["images_per_s"] * row["epoch_time_s"] == pytest.approx(10_000)
    # of all its steps: how many the warm-up took is chance
    assert row["train_loss"] == pytest.approx(sum(2 / (i + 1) for i in range(60)) / 60, rel=1e-6)


RANKS = """
import sys, multiprocessing as mp
def train(rank, store):
    import bench, torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    for i in range(30):
        torch.ones(4, 8) @ torch.ones(8, 8)
        bench.step(items=4, loss=torch.tensor(float(rank)))
    dist.destroy_process_group()
if __name__ == "__main__":
    with mp.get_context("spawn").Pool(2) as pool:
        pool.starmap(train, [(rank, sys.argv[1]) for rank in range(2)], chunksize=1)
"""


@pytest.mark.slow
def test_processes_that_train_together_are_one(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(RANKS)
    command = f"{shlex.quote(sys.executable)} {tmp_path}/t.py {tmp_path}/store"
    assert sweep(["--command", command, "--out", str(tmp_path / "o"), *QUICK]) == 0
    (row,) = read_records(tmp_path / "o").to_dict("records")
    assert row["warmup_steps"] + row["measured_steps"] == 30
    assert row["measured_images"] == 8 * row["measured_steps"]
    assert row["flop_per_image"] == 2 * 8 * 8
    assert row["train_loss"] == 0  # of the first


SHARDED = """
import sys, multiprocessing as mp
def train(rank, store, how):
    import bench, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    network = torch.nn.Linear(8, 8, bias=False)
    if how == "fsdp":
        fully_shard(network)
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",) if how == "named" else None)
        parallelize_module(network, mesh, ColwiseParallel())
    for i in range(30):
        loss = network(torch.ones(4, 8, requires_grad=True)).sum()
        loss.backward()
        bench.step(items=4, loss=loss)
    dist.destroy_process_group()
if __name__ == "__main__":
    with mp.get_context("spawn").Pool(2) as pool:
        pool.starmap(train, [(rank, *sys.argv[1:]) for rank in range(2)], chunksize=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "items"), [("named", 4), ("unnamed", 4), ("fsdp", 8)])
def test_of_processes_that_share_their_items_no_work_is_told(
    how: str, items: int, tmp_path: Path
) -> None:
    """What one of them counts may be its part of it; without names the items were twice as many."""
    (tmp_path / "t.py").write_text(SHARDED)
    command = f"{shlex.quote(sys.executable)} {tmp_path}/t.py {tmp_path}/store {how}"
    assert sweep(["--command", command, "--out", str(tmp_path / "o"), *QUICK]) == 0
    (row,) = read_records(tmp_path / "o").to_dict("records")
    assert row["measured_images"] == items * row["measured_steps"]
    flop = {"fsdp": pytest.approx(3 * 2 * 8 * 8)}.get(how, pytest.approx(math.nan, nan_ok=True))
    assert row["flop_per_image"] == flop


LAUNCHED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(2**18))
optimizer = torch.optim.SGD([weight], lr=1e-9)
items = torch.ones(int(sys.argv[1]), 2**19)  # 2 MiB each, held by both processes in all steps
for _ in range(12):
    optimizer.zero_grad()
    (items[:32, : 2**18] * weight).square_().sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
"""


def test_a_memory_limit_that_reaches_no_torch_is_told(tmp_path: Path) -> None:
    flags = ["--command", "true", "--memory-limit", "1GiB", "--repeats", "1"]
    assert sweep([*flags, "--out", str(tmp_path), *QUICK]) == 0
    (row,) = read_records(tmp_path).to_dict("records")
    assert (row["status"], row["reason"]) == (
        "invalid",
        "--memory-limit did not reach the command: it holds where Python imports torch with this "
        "harness beside it, and uses --device; leave it out",
    )


@pytest.mark.slow
def test_a_memory_limit_holds_in_each_process_that_torchrun_starts(tmp_path: Path) -> None:
    """And not for what they hold together."""
    (tmp_path / "t.py").write_text(LAUNCHED)
    start = f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node"
    command = f"{start} 2 {tmp_path}/t.py {{batch_size}}"
    flags = ["--batch-size", "200", "900", "--memory-limit", "900MiB", "--out", str(tmp_path / "o")]
    assert sweep(["--command", command, *flags, *QUICK]) == 0
    fits, fails = read_records(tmp_path / "o").to_dict("records")
    assert (fits["status"], fails["status"]) == ("ok", "oom")
    assert fits["peak_process_bytes"] > 900 * 2**20
    assert fits["measured_images"] == 2 * 200 * fits["measured_steps"]


def test_the_report_says_of_what_its_times_are(
    mistakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([str(mistakes), "--where", "mistake=silent"]) == 0
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if "--vary" not in line]  # the command to go on
    assert not [line for line in lines if "epoch" in line]
    assert "scripts_for_tests.py" in output
    assert report([str(mistakes), "--where", "mistake=none"]) == 0
    assert "10,000 items" in capsys.readouterr().out


def test_it_ends_a_script_that_has_been_measured(tmp_path: Path) -> None:
    given = ["--command", f"{RUN} none", "--steps", "5", "--repeats", "1"]
    given += ["--out", str(tmp_path / "out")]
    assert sweep([*given, *QUICK]) == 0
    (row,) = read_records(tmp_path / "out").to_dict("records")
    assert (row["status"], row["measured_steps"]) == ("ok", 5)
    assert "ended after 5 measured steps, as --steps asks" in row["notes"]


def test_a_command_that_ends_neither_by_itself_nor_by_a_signal_is_ended(tmp_path: Path) -> None:
    given = ["--command", f"{RUN} late", "--timeout", "3", "--out", str(tmp_path / "out")]
    assert sweep([*given, *QUICK]) == 1
    (row,) = read_records(tmp_path / "out").to_dict("records")
    assert (row["status"], "the command took longer than 3 s" in row["reason"]) == ("timeout", True)
    assert gone([int((tmp_path / "out" / row["log"]).read_text().split()[0])])


UNEDITED = """
import importlib.util, os, sys
how, size = sys.argv[1], int(sys.argv[2])
if how == "nothing":
    sys.exit()
importlib.util.find_spec("torch")  # as libraries look whether it is there
import torch
if how == "idle":
    sys.exit()
net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
class Own:
    def step(self):
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 0.1 * weight.grad
optimizer = Own() if how == "foreign" else torch.optim.AdamW(net.parameters())
other = torch.optim.SGD(net.parameters(), 1e-3) if how == "turns" else None
if how == "late":  # only after many steps
    import bench
if how == "named":
    import precision_bench as bench
for i in range(60):
    if how == "accumulates" and i:
        net(torch.randn(size, 32)).square().mean().backward()
    loss = net(torch.randn(size, 32)).square().mean()
    loss.backward()
    (other if i % 2 and how == "turns" else optimizer).step()
    net.zero_grad()
    if (how == "late" and i > 29) or how == "named":
        bench.step(items=3, loss=7.0)
"""


def run_unedited(
    folder: Path, hows: str, *given: str, command: str = "", script: str = UNEDITED
) -> dict[str, Any]:
    """Return the rows of an unedited script by what it does."""
    (folder / "t.py").write_text(script)
    # the script's folder has a bench of its own, which nothing is to import
    if script == UNEDITED and "late" not in hows:
        (folder / "bench.py").write_text("raise SystemExit('of the script')")
    command = command or f"{shlex.quote(sys.executable)} {folder}/t.py {{how}} {{batch_size}}"
    out = ["--out", str(folder / "out"), "--batch-size", "16", *QUICK]
    assert sweep(["--command", command, "--vary", "how", *hows.split(), *out, *given]) == 0
    return read(folder / "out")


@pytest.mark.slow
def test_steps_are_seen_in_a_script_that_tells_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_unedited(tmp_path, "trains accumulates named turns")
    errors = capsys.readouterr().err
    assert errors.count("is taken to be of its {batch_size} items") == 1
    row = rows["trains"]
    assert (row["status"], row["unit"], row["step_items"]) == ("ok", "items", 16)
    assert row["warmup_steps"] + row["measured_steps"] == 60
    assert row["measured_images"] == 16 * row["measured_steps"]
    assert row["train_loss"] > 0
    # forward and the weights' gradients of both layers, and the input's of the second
    assert row["flop_per_image"] == 2 * (2 * 32 * 256 + 3 * 256 * 4)
    weights = 4 * (32 * 256 + 256 + 256 * 4 + 4)
    assert row["weights_bytes"] == row["gradients_bytes"] == weights
    assert row["optimizer_bytes"] == 2 * weights + 4 * 4  # a count of steps for each of four
    assert "a step has up to 2 backward passes" in rows["accumulates"]["notes"]
    assert "which number is a step's loss is not known" in rows["accumulates"]["missing"]
    assert (rows["named"]["step_items"], rows["named"]["train_loss"]) == (3, 7)
    note = "several optimizers step in turn: updates are counted, of any of them"
    assert (rows["turns"]["unit"], rows["turns"]["notes"]) == ("updates", note)
    assert "weights_bytes: several optimizers step in turn" in rows["turns"]["missing"]
    assert rows["named"]["flop_per_image"] == row["flop_per_image"] * 16 / 3


PROFILED = """
import os, sys, time, torch
how, size = sys.argv[1], int(sys.argv[2])
net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(net.parameters())
data = torch.utils.data.DataLoader(torch.randn(size * 4000, 32), size)
if how == "named":
    import bench
if how == "profiler":
    torch.autograd.profiler.profile().__enter__()
for i, x in enumerate(data):
    if how == "ends" and os.path.exists(os.environ["BENCH_PROFILE"]):
        sys.exit(3)
    if how == "few" and i == 5:
        break
    if how == "forks" and not os.fork():
        net(x)
        os._exit(0)
    optimizer.zero_grad()

    def run():
        loss = net(x).square().mean()
        loss.backward()
        return loss

    if how == "closes":  # as Lightning does
        optimizer.step(closure=run)
    else:
        run()
        optimizer.step()
    if how == "named":
        bench.step(items=len(x))
"""


@pytest.mark.slow
def test_steps_after_the_measured_ones_are_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hows = "trains named forks closes ends few profiler"
    given = ["--profile", "--trace", "--steps", "8", "--repeats", "1"]
    rows = run_unedited(tmp_path, hows, *given, script=PROFILED)
    work = read_work(tmp_path / "out")
    for how in ("trains", "named", "forks", "closes"):
        row = rows[how]
        assert (row["status"], row["measured_steps"]) == ("ok", 8), row["reason"]
        assert 2 <= row["profiled_steps"] <= 5
        assert 0 < row["busy_s"] < row["profiled_step_s"]
        own = work[work["record_id"] == row["record_id"]]
        products = own[own["kind"] == "matmul"]
        assert products["flop"].sum() == 16 * row["flop_per_image"]
        assert products["time_s"].min() > 0
        # counted and profiled, in the part of the step that it is of
        for kind in ("optimizer", "input"):
            parts = own[own["kind"] == kind].dropna(subset=["bytes", "time_s"])
            assert len(parts) > 0, own
    for how, why in {
        "ends": "the command ended before ",
        "few": "the command ended before the steps to profile",
        "profiler": "a profiler of the script is at work",
    }.items():
        assert rows[how]["status"] == "ok"
        assert "profiled_steps: " in rows[how]["missing"]
        assert why in rows[how]["missing"]
    assert len([*(tmp_path / "out" / "traces").iterdir()]) == 4
    capsys.readouterr()
    assert explain([str(tmp_path / "out"), "--axis", "how", "trains", "forks"]) == 0
    output = capsys.readouterr().out
    assert "Why: how trains → how forks" in output
    assert "waiting for a batch" in output


TOGETHER = """
import sys, time, torch, torch.distributed as dist
how, size = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
if how == "own":
    import bench
for i in range(100):
    net(torch.randn(size, 32)).square().mean().backward()
    time.sleep(0.2 if how == "late" and dist.get_rank() else 0.02)
    optimizer.step()
    optimizer.zero_grad()
    if how == "own":
        bench.step(items=size)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_process_that_the_others_wait_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"{shlex.quote(sys.executable)} -m torch.distributed.run --nproc-per-node 2"
    command = f"OMP_NUM_THREADS=1 {run} {tmp_path}/t.py {{how}} {{batch_size}}"
    given = ["--profile", "--steps", "5", "--repeats", "3"]
    run_unedited(tmp_path, "late even", *given, command=command, script=TOGETHER)
    capsys.readouterr()
    assert explain([str(tmp_path / "out"), "--axis", "how", "even", "late"]) == 0
    answer = capsys.readouterr().out
    late = re.findall(
        r"In (.*) rank 1 computes (.*) ms longer a step than", " ".join(answer.split())
    )
    ((case, longer_ms),) = late
    assert case == "how late"
    assert float(longer_ms) == pytest.approx(180, rel=0.5)
    assert "exchange between processes" in answer
    given = ["--profile", "--steps", "5", "--repeats", "1", "--out", str(tmp_path / "own")]
    run_unedited(tmp_path, "own", *given, command=command, script=TOGETHER)
    (ranks,) = read_beside(tmp_path / "own", RankRow).values()
    assert [row.rank for row in ranks] == [0, 1]
    assert {row.waits_in for row in ranks} == {"all_reduce"}
    assert min(row.computing_s or 0.0 for row in ranks) > 0.02


COMPILED = """
import contextlib, sys, torch
how, words = sys.argv[1], sys.argv[2:]
net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
net = torch.compile(net, backend="eager" if how == "foreign" else "inductor")
beside = torch.nn.Linear(512, 512) if how in ("differs", "mixed") else None
if how == "mixed":
    beside = torch.compile(beside, backend="eager")
if how == "edits":
    import torch._inductor.config

    torch._inductor.config.post_grad_custom_post_pass = lambda graph: None
parameters = [*net.parameters(), *(beside.parameters() if beside is not None else ())]
optimizer = torch.optim.AdamW(parameters)
amp = torch.autocast("cpu", torch.bfloat16) if words and how != "forgets" else None
for i in range(60):
    with amp or contextlib.nullcontext():
        loss = net(torch.randn(16, 32)).square().mean()
    if beside is not None:
        loss = loss + beside(torch.randn(16, 512)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_label_of_what_is_compiled_is_that_of_its_graphs(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} {tmp_path}/t.py {{how}} {{precision:bf16-amp=--amp}}"
    (tmp_path / "t.py").write_text(COMPILED)
    whys = {
        "differs": "compiled code differ",
        "foreign": "does not show",
        "mixed": "not all that torch.compile compiled is known, as with another backend",
        "edits": "the script changes its graphs by post_grad_custom_post_pass",
    }
    hows = ["holds", "forgets", *whys]
    given = ["--vary", "how", *hows, "--precision", "bf16-amp", "--repeats", "1", *QUICK]
    assert sweep(["--command", command, "--out", str(tmp_path / "o"), *given]) == 0
    rows = read(tmp_path / "o")
    assert (rows["holds"]["status"], rows["holds"]["labelled_flop_share"]) == ("ok", 1)
    assert math.isnan(rows["holds"]["flop_per_image"])
    reason = "labelled bf16-amp, but 100 % of the FLOP of a step ran in float32"
    assert reason in rows["forgets"]["reason"]
    for how, why in whys.items():
        assert rows[how]["status"] == "ok"
        assert why in re.findall("labelled_flop_share: ([^;]*)", rows[how]["missing"])[0]


def test_steps_that_are_too_long_to_profile_are_left_out() -> None:
    case = Case(command="python t.py", device="cpu", steps=1, profile=True)
    found, run = Outcome(), SimpleNamespace(case=case)
    step = TakenStep(0, 0.0, 300.0, 1, None)
    assert _profile(found, run, [step], Channel(None)) is None  # type: ignore[arg-type]
    reason = "to profile 2 steps takes 900 s or more, and 600 s at most are given to it"
    assert found.missing["profiled_steps"] == reason


@pytest.mark.slow
def test_what_the_script_says_of_its_steps_wins(tmp_path: Path) -> None:
    row = run_unedited(tmp_path, "late")["late"]
    assert (row["unit"], row["step_items"]) == ("items", 3)
    assert row["warmup_steps"] + row["measured_steps"] == 30
    assert row["train_loss"] == 7


@pytest.mark.slow
def test_items_are_those_that_are_given(tmp_path: Path) -> None:
    row = run_unedited(tmp_path, "trains", "--items", "48", "--steps", "4")["trains"]
    assert (row["step_items"], row["measured_steps"]) == (48, 4)
    assert "ended after 4 measured steps" in row["notes"]


@pytest.mark.slow
def test_why_no_steps_are_seen_is_said(tmp_path: Path) -> None:
    rows = run_unedited(tmp_path, "nothing idle foreign")
    for how, why in {
        "nothing": "no steps were seen: the command imports no torch",
        "idle": "no steps were seen: torch ran no backward pass",
        "foreign": "no steps were seen: no optimizer of torch's took a step; call bench.step",
    }.items():
        assert (rows[how]["status"], rows[how]["unit"]) == ("ok", "runs")
        assert why in rows[how]["missing"]


def test_a_torch_that_shows_no_steps_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "t.py").write_text("import torch")
    command = f"{shlex.quote(sys.executable)} {tmp_path}/t.py"
    assert sweep(["--command", command, "--out", str(tmp_path / "out"), *QUICK]) == 0
    (row,) = read_records(tmp_path / "out").to_dict("records")
    assert (row["status"], row["unit"]) == ("ok", "runs")
    assert "no steps were seen: this torch does not show them (AttributeError" in row["missing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "given", "missing"),
    [
        ("-I ", [], "no steps were seen: Python did not tell of itself, as under -I, -E or -S"),
        ("", ["--no-steps"], "--no-steps leaves the command alone"),
    ],
)
def test_a_script_that_is_left_alone_is_known_by_its_run(
    before: str, given: list[str], missing: str, tmp_path: Path
) -> None:
    run = f"{shlex.quote(sys.executable)} {before}{tmp_path}/t.py {{how}} {{batch_size}}"
    row = run_unedited(tmp_path, "trains", *given, command=run)["trains"]
    assert (row["unit"], row["status"]) == ("runs", "ok")
    assert missing in row["missing"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["PYTHONPATH=lib {}", "env PYTHONPATH=lib {}", "sh -c '{}'"])
def test_a_path_that_the_command_sets_is_kept(how: str, tmp_path: Path) -> None:
    run = f"{sys.executable} {tmp_path}/t.py {{how}} {{batch_size}}"
    run = f"PYTHONPATH=lib:$PYTHONPATH {run}" if how.startswith("sh") else run
    row = run_unedited(tmp_path, "trains", command=how.format(run))["trains"]
    assert row["unit"] == "items"


TORCH = """
import sys, torch, bench
model = torch.nn.Linear(64, 64)
for i in range(30):
    with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] == "amp"):
        loss = model(torch.ones(int(sys.argv[2]), 64)).sum()
    loss.backward()
    bench.step(items=int(sys.argv[2]), loss=loss)
"""


@pytest.mark.slow
def test_a_label_that_changed_nothing_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("amp", "off"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.py").write_text(TORCH)
    words = "{precision:fp32=,bf16-amp=amp,bf16=off}"
    command = f"{shlex.quote(sys.executable)} {tmp_path}/{words}/t.py {words} {{batch_size}}"
    given = ["--precision", "bf16-amp", "bf16", "--batch-size", "16", "--out", str(tmp_path / "o")]
    command = command.replace("'", "")
    assert sweep(["--command", command, *given, *QUICK]) == 0
    rows = read(tmp_path / "o", "precision")
    assert (rows["bf16-amp"]["status"], rows["bf16-amp"]["labelled_flop_share"]) == ("ok", 1)
    assert rows["bf16"]["status"] == "invalid"
    reason = "labelled bf16, but 100 % of the FLOP of a step ran in float32 (most of it in matrix"
    assert reason in rows["bf16"]["reason"]
    # forward, and the gradient of the weights: 2 x 64 x 64 an item each
    assert rows["bf16-amp"]["flop_per_image"] == 2 * 2 * 64 * 64
    assert set(read_work(tmp_path / "o")["record_id"]) == {r["record_id"] for r in rows.values()}
    capsys.readouterr()
    assert report([str(tmp_path / "o")]) == 0
    output = capsys.readouterr().out
    assert "bf16-amp" in output
    assert "autocast" not in output, "what the harness does by that name, and not the command"


_CONV, _PRODUCT, _BF16 = (
    Label(WorkKind.CONVOLUTION, "3×3", "float32"),
    Label(WorkKind.MATMUL, "mm", "float32"),
    Label(WorkKind.ATTENTION, "_flash_attention_backward", "bfloat16"),
)
_OLD, _NEW, _CPU = (7, 5), (8, 0), (0, 0)


@pytest.mark.parametrize(
    ("label", "capability", "conv", "matmul", "shares", "standing", "says"),
    [
        # torch's default, where most of the FLOP are convolutions, and where they are a thousandth
        ("fp32", _NEW, "tf32", "none", {_CONV: 99, _PRODUCT: 1}, "invalid", "may run in TF32"),
        ("fp32", _NEW, "tf32", "none", {_CONV: 1, _PRODUCT: 999}, "proven", ""),
        ("fp32", _NEW, "ieee", "tf32", {_CONV: 1, _PRODUCT: 999}, "invalid", "may run in TF32"),
        ("fp32", _NEW, "ieee", "ieee", {_CONV: 99, _PRODUCT: 1}, "proven", ""),
        ("fp32", _OLD, "tf32", "tf32", {_CONV: 99, _PRODUCT: 1}, "proven", ""),
        ("fp32", _CPU, "tf32", "tf32", {_CONV: 99}, "proven", ""),
        ("tf32", _NEW, "tf32", "none", {_CONV: 99, _PRODUCT: 1}, "proven", ""),
        ("tf32", _NEW, "tf32", "none", {_CONV: 1, _PRODUCT: 999}, "invalid", "TF32 was off"),
        ("tf32", _NEW, "ieee", "ieee", {_PRODUCT: 1}, "invalid", "TF32 was off"),
        ("tf32", _OLD, "tf32", "tf32", {_PRODUCT: 1}, "invalid", "this device has no TF32"),
        ("bf16-amp", _NEW, "tf32", "tf32", {_BF16: 99, _CONV: 1}, "proven", ""),
        ("bf16-amp", _NEW, "tf32", "tf32", {_CONV: 99, _BF16: 1}, "invalid", "ran in TF32"),
        ("bf16-amp", _NEW, "ieee", "tf32", {_CONV: 99, _BF16: 1}, "invalid", "in float32 (most"),
        ("fp8", _NEW, "tf32", "tf32", {_BF16: 99, _CONV: 1}, "proven", ""),
        ("fp16", _NEW, "tf32", "tf32", {}, "unproven", "a step multiplies nothing"),
    ],
)
def test_a_label_is_held_to_what_may_have_run(
    label: str, capability: tuple[int, int], conv: str, matmul: str, shares: dict[Label, int],
    standing: str, says: str,
) -> None:  # fmt: skip
    work = {one: Work(1, float(flop), 1.0) for one, flop in shares.items()}
    case = Case(precision=label, device="cpu" if capability == _CPU else "cuda", command="x")
    flags = {"conv": conv, "matmul": matmul}
    found = judge_label(work, case, flags, capability)
    assert (str(found.standing), says in found.reason) == (standing, True), found
    # what the counter does not see may be most of it
    beside = judge_label(work, case, flags, capability, ["transformer_engine"])
    assert (str(beside.standing), beside.share) == ("unproven", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("python  t.py \t{batch_size}\n", "python t.py {batch_size}"),
        ("python t.py \\\n  --lr 1 \\\n--a", "python t.py --lr 1 --a"),
        ("""sh -c 'a  &&\nb'  "c  d" e\\  f""", """sh -c 'a  &&\nb' "c  d" e\\  f"""),
        ("t.py {precision:fp32=,  bf16=--amp}", "t.py {precision:fp32=, bf16=--amp}"),
    ],
)
def test_a_command_is_the_same_however_it_is_laid_out(given: str, kept: str) -> None:
    assert parse_command(given) == parse_command(kept) == kept


def test_progress_counts_the_steps_that_are_asked_for() -> None:
    events: list[CaseEvent] = []
    case = Case(command=f"{RUN} none", device="cpu", steps=9)
    SubprocessExecutor(Settings()).run(Job(case), events.append, lambda: False)
    taken = [event for event in events if isinstance(event, StepTaken)]
    measured = next(step for step in taken if step.phase == "epoch")
    assert (measured.step, measured.total) == (0, 9), "after those of the warm-up"


def test_it_is_validated_and_compared(mistakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate([str(mistakes)])
    faults = [line for line in capsys.readouterr().out.splitlines() if "  FAULT" in line]
    assert all("the code is a commit's" in line for line in faults), faults  # edited, here
    assert compare([str(mistakes), str(mistakes)]) == 0
    output = capsys.readouterr().out
    assert "\nTime in s: " in output  # its scripts tell of items, of an epoch, or of nothing
    assert ("10,000 items" in output, "a run" in output) == (True, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--command ''", "give what starts your training"),
        ("--command 'python t.py | tee log'", "no shell runs the command; give sh -c '…'"),
        ("--command 'python t.py --lr {lrr}'", "{lrr} is neither an axis nor a --vary; did you"),
        ("--command 'python t.py' --batch-size 8", "the command has no {batch_size}; add it"),
        ("--command 'python t.py {batch-size}' --batch-size 8", "write {batch_size}"),
        ("--command python t.py --batch-size 8", "; put the whole command in quotes"),
        (
            "--command 'python t.py {profile:on=-p,off=}' --profile",
            "{profile}: --profile is for what",
        ),
        (
            "--command 'python t.py {parallel:ddp=-d}' --parallel ddp",
            "no word of a command; give a",
        ),
        ("--command 'python t.py {lr}'", "{lr} has no value; give --lr VALUE …"),
        ("--command './t.py'", "'./t.py' is no program that can be run here; give its path"),
        ("--command python t.py", "'t.py' is no program that can be run here; give its path, or "),
        ("--command python t.py", "; put the whole command in quotes"),
        ("--command 'python t.py' --vary x 1", "the command has no {x}; add it there"),
        (
            "--command 'python t.py {lr}' --vary lr 1 --lr 2",
            "--lr and --vary lr are one axis; give",
        ),
        ("--command 'python t.py {lr}' --vary lr -1", "--vary lr '-1': "),
        (
            "--command 'python t.py {x}' --vary x 1 --vary lr 2",
            "--lr is given, but the command has",
        ),
        ("--command 'python t.py {steps}' --vary steps 1", "--vary steps: this is an axis; give"),
        (
            "--command 'python t.py {repeats}' --vary repeats 1",
            "the name of a flag, or of a column",
        ),
        ("--command 'python t.py {out}' --vary out 1", "give another, as --vary own_out … with"),
        ("--command 'python t.py {energy_j}' --vary energy_j 1", "the name of a flag, or of a col"),
        ("--command 'python t.py {deph}' --vary depth 1", "{deph} is neither an axis nor a --vary"),
        ("--command 'python t.py {x}' --vary x 1 --vary x 2", "--vary x: give a name once"),
        ("--command 'python t.py {x}' --vary x 'a=1,b'", "--vary x a=1,b: give words for each"),
        ("--command 'python t.py {x}' --vary x off= on=-x", "write the values with their words as"),
        ("--command 'python t.py {x:1=}' --vary x 1=,2=", "--vary x and {x:…} both give words"),
        ("--command 'python t.py {x}' --vary x '1=\"a,2='", "its quotes do not match (No closing"),
        ("--command 'python t.py {x}' --vary x 'b=&&,c='", "{x}: && is for a shell, and no shell"),
        ("--command 'python t.py {x:b=>log,c=}' --vary x b", "{x}: >log is for a shell, and no"),
        ("--command 'python t.py {x}' --vary x \"b='p,c=q'\"", "{x}: its quotes do not match"),
        ("--vary x 1", "--vary is for a placeholder in --command; give that too"),
        ("--command 'python nosuch.py'", "there is no file nosuch.py; give its path"),
        ("--command 'python t.py {precision:fp32=}' --precision bf16", "has no word for bf16; it"),
        (
            "--command 'python t.py {batch_size:8=,16=-b}' --batch-size auto --memory-limit 2GiB",
            "{batch_size:…} has words for some sizes alone; write {batch_size}",
        ),
        (
            "--command 'python t.py {batch_size}' --batch-size auto",
            "give one, such as --memory-lim",
        ),
        ("--command 'python t.py' --profile", "says how many: give --steps 40, or leave out"),
        ("--workload command", "--workload command is that of a --command; give --command"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(
    given: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    # a start measures the load of the CPU, and then asks torch about it
    for name in ("preflight.choose_number", "preflight.examine"):
        monkeypatch.delattr(f"bench.sweep.{name}")
    for dry in (["--dry-run"], []):
        assert sweep([*shlex.split(given), "--device", "cpu", *dry]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert expected in error


def test_an_axis_of_the_harness_may_be_given_among_ones_own() -> None:
    command = ["--command", "t {clip} {lr} {precision} {batch_size}", "--device", "cpu"]
    mixed = "--vary clip 0 1 --vary lr 0.1 2e-1 --vary precision fp32=,bf16=--amp"
    flags = "--vary clip 0 1 --lr 0.1 0.2 --precision fp32 bf16"
    sizes = ["--vary", "batch_size", "8..16"]
    one = plan_cases(parse_arguments([*command, *shlex.split(mixed), *sizes])).cases
    command[1] = "t {clip} {lr} {precision:fp32=,bf16=--amp} {batch_size}"
    two = plan_cases(
        parse_arguments([*command, *shlex.split(flags), "--batch-size", "8..16"])
    ).cases
    assert {*one} == {*two}
    assert len(one) == 16


@pytest.mark.parametrize(
    ("places", "values", "filled"),
    [
        ("{compile:off=,on=--compile}", {"compile": "default"}, "--compile"),
        ("{lr:1e-2=small,1=large}", {"lr": 0.01}, "small"),
        ("{evaluated:on=-e}", {"vary": "evaluated=on"}, "-e"),
        ("{channels_last:true=-c,false=}", {"channels_last": True}, "-c"),
    ],
)
def test_words_are_for_what_was_typed(places: str, values: dict[str, Any], filled: str) -> None:
    assert fill_command(Case(command=f"t {places}", **values)) == f"t {filled}"


def test_a_command_is_named_by_nothing_that_its_script_decides() -> None:
    named = Case(command="t {batch_size}", model="t", batch_size=8, device="cpu").label(AXES)
    assert named == "t · batch size 8 · command t {batch_size} · cpu"


def test_a_dry_run_repeats_what_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    words = ["--command", "python t.py {precision}", "--precision", "fp32", "bf16"]
    assert sweep([*words, "--device", "cpu", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "   1  fp32",
        "   2  bf16",
        "all with --command 'python t.py {precision}' --device cpu",
    ]


def test_outside_a_sweep_its_lines_do_nothing_and_import_nothing() -> None:
    code = (
        "import sys, json; before = set(sys.modules); import bench; bench.step(items=1, loss=2); "
        "bench.epoch(); print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert not {"torch", "pandas", "numpy", "bench.schema.case"} & {*loaded}


STEPS = """
import time, bench
from speed import STEP_S
for _ in range(30):
    time.sleep(STEP_S)
    bench.step(items=8)
"""


@pytest.mark.slow
def test_two_checkouts_are_measured_in_turns_and_a_slower_one_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step three times as long, and one as long as before, on a machine that others use."""

    def git(*words: str) -> None:
        known = ("-c", "user.name=a", "-c", "user.email=a@b", "-C", "main")
        subprocess.run(["git", *known, *words], check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    Path("main").mkdir()
    Path("main/train.py").write_text(STEPS)
    Path("main/speed.py").write_text("STEP_S = 0.01")
    for words in ("init", "add -A", "commit -m a"):
        git(*words.split())
    for tree in ("pr", "same"):
        git("worktree", "add", f"../{tree}", "-b", tree)
    Path("pr/speed.py").write_text("STEP_S = 0.03")
    given = ["--command", f"{shlex.quote(sys.executable)} {{tree}}/train.py"]
    given += ["--vary", "tree", "main", "pr", "same", "--repeats", "3", "--out", "out", *QUICK]
    assert sweep(given) == 0
    ran = [row["vary"] for row in read_records(Path("out")).to_dict("records")]
    assert ran[:6] == ["tree=main", "tree=pr", "tree=same"] * 2
    for tree, code in (("pr", 1), ("same", 0)):
        found = compare(["out", "--axis", "tree", "main", tree, "--fail-on", "slower:50%"])
        assert found == code, capsys.readouterr().out
    assert report(["out", "--full"]) == 0
    assert "tree: main → pr" in capsys.readouterr().out


def test_a_script_that_needs_its_own_folder_is_told_how_to_start_there(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own/conf").mkdir(parents=True)
    Path("own/conf/a.json").write_text("{}")
    Path("own/t.py").write_text("print(open('conf/a.json').read())")
    python = shlex.quote(sys.executable)
    commands = [f"{python} own/t.py", f"sh -c 'cd own && {python} t.py'"]
    assert sweep(["--command", *commands, "--out", "out", *QUICK]) == 0
    failed, went = read_records(Path("out")).to_dict("records")
    assert failed["reason"].endswith("; it is in own: sh -c 'cd own && …' starts the command there")
    assert went["status"] == "ok"


NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\")"
FAILS_LATER = "import bench\nfor _ in range(9): bench.step(items=1)\nopen('none')"


@pytest.mark.parametrize(
    ("script", "sizes", "expected"),
    [
        (NO_TORCH, "1 2 3 4 5", f"an environment that has it, or write {sys.executable}"),
        (FAILS_LATER, "1 2 --repeats 2", "No such file or directory: 'none' (t.py, line 3); after"),
    ],
)
def test_runs_that_all_end_with_one_error_are_not_all_tried(
    script: str, sizes: str, expected: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(script)
    given = ["--command", f"{shlex.quote(sys.executable)} t.py {{batch_size}}", "--out", "out"]
    assert sweep([*given, "--batch-size", *sizes.split(), *QUICK]) == 1
    rows = read_records(Path("out"))
    assert len(rows) == 3
    (reason,) = {*rows["reason"]}
    assert expected in reason
    output = "".join(capsys.readouterr())
    assert "the first 3 runs ended alike" in output
    assert "3 runs done, 2 runs left; to continue: " in output
    assert " --retry error\n" in output


TRAINS = """
import sys, torch
size, precision = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 8)
)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for _ in range(int(sys.argv[3])):
    x = torch.randn(size, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.skipif(
    "BENCH_OLD_PYTHON" not in os.environ, reason="BENCH_OLD_PYTHON names no Python with a torch"
)
def test_two_pythons_with_other_torches_are_measured_alike_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(TRAINS)
    old, own = os.environ["BENCH_OLD_PYTHON"], sys.executable
    given = ["--vary", "env", old, own, "--precision", "fp32", "bf16-amp", "--batch-size", "8"]
    run = "{env} t.py {batch_size} {precision} 400"
    given += ["--command", run, "--out", "out", "--steps", "30", "--profile", *QUICK]
    assert sweep(given) == 0
    rows = read_records(Path("out")).to_dict("records")
    code = "import torch, platform; print(torch.__version__, platform.python_version())"
    expected = {
        python: subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split()
        for python in (old, own)
    }
    parts = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "flop_per_image")
    for row in rows:
        python = next(one for one in expected if one in row["vary"])
        assert [row["torch"], row["python"]] == expected[python]
        assert (row["status"], row["measured_steps"], row["unit"]) == ("ok", 30, "items")
        assert row["labelled_flop_share"] == 1
        assert row["profiled_steps"] >= 2, row["missing"]
        assert [row[name] for name in parts] == [rows[0][name] for name in parts]
    capsys.readouterr()
    assert compare(["out", "--axis", "env", old, own]) == 0
    assert "2 cases with both values of env" in (output := capsys.readouterr().out)
    assert "Mixed environments" not in output
    limited = ["--batch-size", "8", "--precision", "fp32", "--memory-limit", "2GiB", "--out", "l"]
    assert (
        sweep(["--command", f"{old} t.py {{batch_size}} {{precision}} 60", *limited, *QUICK]) == 0
    )
    assert read_records(Path("l"))["status"].tolist() == ["ok"]
