"""The sweep, driven by the fake executor: what is run, kept, skipped, resumed and stopped."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.base.processes import OtherWork, describe_pause, stop_signals
from bench.machine.host import describe_host
from bench.machine.nvml import Card
from bench.results.store.reader import read_records, read_rows
from bench.results.store.table import RECORDS
from bench.schema.case import Case
from bench.schema.flags import join_flags
from bench.schema.record import Environment, Outcome, Status
from bench.sweep import __main__ as sweep
from bench.sweep import execution, preflight
from bench.sweep.options import Options, parse_arguments, plan_cases
from bench.workers import examination as machine
from bench.workers.executors import ImageRequest
from tests import fake_executor as fake
from tests.fake_executor import FakeExecutor
from tests.planted.records import ROOT
from tests.pytest_for_tests import Capture, Patch

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("fake")

FAKE = ["--executor", "fake", "--device", "cpu", "--dataset", "synthetic", "--model", "dpn-small"]
FP32 = [*FAKE, "--precision", "fp32", "--batch-size"]
CASE = Case(model="dpn-small", dataset="synthetic", device="cpu", batch_size=8)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


FAKED = {"cards": fake.LANES, "answers": fake.ANSWERS}
"""What tells the fake its cards, as "A100:1 H100:2", and what it answers."""


def run(out: Path, *flags: str, rc: int = 0, report: bool = False, **faked: str) -> pd.DataFrame:
    """Run a sweep in this process; its records, if --out itself has any. The report is most of its
    time: only if asked."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in faked.items():
            patch.setenv(FAKED[name], value)
        if not report:
            patch.setattr(sweep, "print_report", lambda *folders: None)
        assert sweep.main(join_flags(FP32, flags, ["--out", str(out)])) == rc
    return read_records(out) if (out / RECORDS).exists() else pd.DataFrame()


def rows(frame: pd.DataFrame, *names: str) -> list[tuple[Any, ...]]:
    return list(frame[list(names)].itertuples(index=False, name=None))


# ---------------------------------------------------------------------------------- a whole sweep


def test_every_case_becomes_a_row(out: Path, capsys: Capture) -> None:
    frame = run(out, "8", "16", "--seed", "0", "1", report=True)
    each = [(seed, size, "ok", 1) for seed in (0, 1) for size in (8, 16)]
    assert rows(frame, "seed", "batch_size", "status", "attempt") == each
    assert set(frame["executor"]) == {"fake"}
    assert frame["host"].tolist() == [socket.gethostname()] * 4
    assert frame["train_images"].tolist() == [50_000] * 4
    assert (frame["started_at"] <= frame["finished_at"]).all()
    assert frame["record_id"].is_unique
    captured = capsys.readouterr()
    assert "4 to run, into" in captured.err
    assert "[4/4] fp32 · batch size 16" in captured.err


def test_the_configuration_and_the_commands_stand_beside_the_records(out: Path) -> None:
    for size in ("8", "16", "8"):
        run(out, size)
    config = json.loads((out / "config.json").read_text())
    commands = config["command"].splitlines()
    assert commands[0].startswith("python -m bench.sweep --executor fake")
    sizes = [line.partition("--batch-size ")[2][:2].strip() for line in commands]
    assert sizes == ["16", "8"], "the one that ran last is the last"
    (case,) = config["cases"]
    shared = config["settings"]
    assert (case["batch_size"], shared["lr"], shared["evaluate"]) == ("8", "0.01", "off")
    assert config["environment"]["cpu"]["host"] == socket.gethostname()
    assert config["datasets"]["synthetic"]["train_images"] == 50_000


def test_every_outcome_is_a_row_and_the_sweep_goes_on(out: Path) -> None:
    statuses = [status for status in Status if status is not Status.OK]
    answers = " ".join(f"seed={n}:{status}" for n, status in enumerate(statuses))
    seeds = map(str, range(len(statuses) + 1))
    frame = run(out, "8", "--seed", *seeds, report=True, answers=answers)
    assert frame["status"].tolist().count("lost") == 3, "it is tried again"
    assert frame["seed"].is_monotonic_increasing, "and at once"
    frame = frame.drop_duplicates("seed", keep="last")
    assert frame["status"].tolist() == [*statuses, "ok"]
    for status, reason, time_s in rows(frame, "status", "reason", "epoch_time_s"):
        assert reason == ("" if status == "ok" else "as the fake was told")
        assert (time_s > 0) == (status in ("ok", "diverged", "invalid"))


@pytest.mark.parametrize(
    ("status", "rc"),
    [("ok", 0), ("oom", 0), ("unsupported", 0), ("error", 1), ("timeout", 1)],
)
def test_nothing_measured_is_a_failure(out: Path, status: str, rc: int) -> None:
    run(out, "8", rc=rc, answers=f"batch_size=8:{status}")


# -------------------------------------------------------------------------------------- a dry run


def test_a_dry_run_says_how_many_runs_there_are_to_make(out: Path, capsys: Capture) -> None:
    flags = [*FP32, "8", "16", "--out", str(out), "--dry-run"]
    for more, expected in (
        (["--fraction", "0.1"], "7, of 2 cases with --repeats 3, 1 of them a drift check"),
        ([], "2, of 2 cases with --repeats 1"),
    ):
        assert sweep.main([*flags, *more]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"runs: {expected}"


def test_a_dry_run_looks_at_what_is_there(out: Path, capsys: Capture) -> None:
    run(out, "8", "16", answers="batch_size=16:interrupted")
    there = (out / RECORDS).read_bytes()
    capsys.readouterr()
    flags = [*FP32, "8", "16", "32", "--out", str(out), "--dry-run"]
    assert sweep.main(flags) == 0
    assert f"1 of them already there, in {out}; 2 to run" in capsys.readouterr().out.splitlines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "find_torch", lambda: "9.9")
        assert sweep.main(flags) == 2
        assert "torch was 2." in capsys.readouterr().err
        assert sweep.main([*flags, "--mix"]) == 0
    assert sweep.main([*flags, "--shard", "1/1"]) == 2
    assert "holds a sweep that is not split into shards" in capsys.readouterr().err
    assert (out / RECORDS).read_bytes() == there


def test_images_without_a_test_part_cannot_be_evaluated_on(tmp_path: Path, capsys: Capture) -> None:
    PIL.Image.new("RGB", (32, 32), (1, 2, 3)).save(png := io.BytesIO(), "PNG")
    images = {"img": [{"bytes": png.getvalue()}] * 8, "label": [0, 1] * 4}
    pq.write_table(pa.table(images), tmp_path / "train.parquet")
    warning = "warning: there are no test images, so that --evaluate measures nothing"
    for evaluate in ([], ["--evaluate"]):
        flags = ["--dataset", "cifar10", "--data-dir", str(tmp_path), *evaluate]
        run(tmp_path / f"out{len(evaluate)}", "4", *flags)
        assert (warning in capsys.readouterr().err) == bool(evaluate)


def test_a_dry_run_names_what_is_emulated(capsys: Capture) -> None:
    flags = ["--precision", "fp32", "fp16", "fp16-amp", "--device", "cpu", "--model", "dpn-small"]
    assert sweep.main([*flags, "--dry-run"]) == 0
    warning = "warning: fp16, fp16-amp may be slow: most CPUs have no float16 arithmetic"
    assert warning in capsys.readouterr().out


def test_a_dry_run_names_what_differs_and_what_all_have_in_common(capsys: Capture) -> None:
    """And a folder of images that is not used."""
    quick = ["--preset", "quick", "--device", "cpu", "--executor", "fake", "--lr", "0.1"]
    quick += ["--data-dir", "data"]
    assert sweep.main([*quick, "--seed", *map(str, range(7)), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "   1  fp32 · batch size 16 · seed 0"
    assert lines[12:15] == [
        "  12  bf16-amp · batch size 16 · seed 4",
        "      and 2 more",
        "all with --model dpn-small --dataset synthetic --lr 0.1 --steps 12 --device cpu",
    ]
    note = "note: --data-dir data is not used, because the images are synthetic; give "
    assert any(line.startswith(note) for line in lines)


def test_a_dry_run_knows_how_many_texts_there_are(capsys: Capture) -> None:
    """And that a transformer has no BatchNorm, which needs two: without torch, as of no user's."""
    words = "--model gpt-tiny --device cpu --dry-run --length"
    assert sweep.main(f"{words} 64 --batch-size 1".split()) == 0
    assert sweep.main(f"{words} 63 --batch-size 3 --accumulate 3".split()) == 0
    for length, says in (("100000", "2 items; use at most 2"), ("300000", "0 items; give a lower")):
        capsys.readouterr()
        assert sweep.main([*words.split(), length, "--batch-size", "4"]) == 2
        assert f"is above the dataset's {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", ["--model gpt-tiny", "--workload examples.two_losses:tiny", "--model dpn-small"]
)
def test_what_all_have_in_common_can_be_given_again(capsys: Capture, given: str) -> None:
    assert sweep.main([*given.split(), "--device", "cpu", "--dry-run"]) == 0
    _, *cases = capsys.readouterr().out.splitlines()  # --steps given anew raises the repeats
    flags = cases[-1].removeprefix("all with ")
    assert given in flags
    assert sweep.main([*shlex.split(flags), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == cases


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lanes 1000", "--lanes: this process may use "),
        (
            "--parallel ddp --batch-size 8 --world-size 2500",
            "--world-size 2500: world size 2500 takes 2500 CPU cores; ",
        ),
        ("--memory-limit 9000GiB", "--memory-limit 9000GiB is above the "),
        ("--precision fp8", "--precision fp8: fp8 needs an NVIDIA GPU"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(
    out: Path, capsys: Capture, flags: str, expected: str
) -> None:
    quick = ["--preset", "quick", "--device", "cpu", "--precision", "fp32", "--dry-run"]
    assert sweep.main(join_flags(quick, flags.split(), ["--out", str(out)])) == 2
    assert expected in capsys.readouterr().err
    assert not out.exists()


def test_a_dry_run_asks_for_the_card_and_its_memory(monkeypatch: Patch, capsys: Capture) -> None:
    """It may be run on a machine without, with a warning; a limit above the card is refused."""
    cards = [Card(f"GPU-{i}", "a card", memory_bytes=2**33) for i in (1, 2)]
    for module in ("bench.workers.examination", "bench.workers.executors.subprocess"):
        monkeypatch.setattr(f"{module}.find_cards", lambda: (cards, ""))
    flags = ["--preset", "quick", "--precision", "fp32", "--device", "cuda", "--dry-run"]
    warning = "warning: torch has no GPU here, so that a start on this machine is refused"
    for there in (False, True):
        for module in (machine, preflight):
            monkeypatch.setattr(module, "has_cuda", lambda there=there: there)
        assert sweep.main(flags) == 0
        assert (warning in capsys.readouterr().out) != there
    for limit, lanes in itertools.product(("7GiB", "9GiB"), ("1", "all")):
        refused = limit == "9GiB"
        assert sweep.main([*flags, "--memory-limit", limit, "--lanes", lanes]) == 2 * refused
        assert ("9GiB is above the 8.0 GiB of a card" in capsys.readouterr().err) == refused


def test_rows_of_a_gpu_are_there_where_there_is_none(capsys: Capture, monkeypatch: Patch) -> None:
    """Or where its driver does not answer: nothing of it is compared."""
    (out,) = (TESTS.parent / "results").glob("nvidia-h200-20261126-*")
    monkeypatch.setattr(machine, "find_cards", lambda: ([], "NVML: unknown error"))
    flags = ["--preset", "quick", "--device", "cuda", "--precision", "fp32", "--out", str(out)]
    assert sweep.main([*flags, "--dry-run"]) == 0
    assert f"already there, in {out}; " in capsys.readouterr().out
    options = parse_arguments(flags)
    monkeypatch.setattr(execution, "list_left", lambda *_: [])
    monkeypatch.setattr(execution, "read_config", lambda _: {"command": options.invocation})
    assert execution.count_known(plan_cases(options), options, out) == 0, "torch is to tell"


# ------------------------------------------------------------------------------ skip, retry, resume


def test_with_until_repeats_go_where_the_time_is_not_known(
    out: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Of batch size 8 the runs differ by up to 20 %, of 16 and 32 by a ten-thousandth."""
    run_fake, order = FakeExecutor.run, list[int]()

    def run_noisily(self: FakeExecutor, job: Any, *rest: Any) -> Outcome:
        outcome = run_fake(self, job, *rest)
        size = job.case.batch_size
        noise = {8: 0.1, 16: 1e-4, 32: 1e-4}[size] * (-1) ** order.count(size)
        outcome.measurement.epoch_time_s = 10 * (1 + noise)
        order.append(size)
        return outcome

    monkeypatch.setattr(FakeExecutor, "run", run_noisily)
    flags = ["8", "16", "32", "--until", "1%", "--repeats", "4"]
    run(out, *flags)
    assert order == [8, 16, 32, 8, 16, 32, 8, 8, 8], "and 8 once more, as the drift check"
    errors = capsys.readouterr().err
    assert "[9/9]" in errors, "the count is of what runs"
    run(out, *flags, report=True)
    assert len(order) == 9, "nor when it goes on"
    assert "no row of" not in capsys.readouterr().out, "none of those is missed"
    run(out, "8", "16", "32", "--repeats", "3")
    assert len(order) == 9 + 10, "without --until all run"


def test_an_oom_is_inferred_for_the_larger_batches_of_its_family(out: Path) -> None:
    frame = run(out, "8", "16", "32", "--lr", "0.02", "0.01", answers="lr=0.02:oom")
    skipped = "batch size 8 already ran out of memory"
    assert rows(frame, "lr", "batch_size", "status", "inferred", "reason") == [
        (0.02, 8, "oom", False, "as the fake was told"),
        (0.02, 16, "oom", True, skipped),
        (0.02, 32, "oom", True, skipped),
        *((0.01, size, "ok", False, "") for size in (8, 16, 32)),
    ]
    suspected = run(out.with_name("other"), "8", "16", answers="batch_size=8:oom_suspected")
    assert suspected["status"].tolist() == ["oom_suspected", "ok"], "which proves nothing"


def test_a_wall_of_before_is_remembered_until_it_is_tried_again(out: Path) -> None:
    run(out, "24", answers="batch_size=24:oom")
    names = ("batch_size", "status", "inferred", "attempt")
    frame = run(out, "8", "24", "32")
    assert rows(frame[1:], *names) == [(8, "ok", False, 1), (32, "oom", True, 1)]
    frame = run(out, "24", "32", "--retry", "oom")
    assert rows(frame[3:], *names) == [(24, "ok", False, 2), (32, "ok", False, 2)]


def test_resuming_runs_what_is_left(out: Path, capsys: Capture) -> None:
    """An interrupted run is to run, and not already there."""
    before = run(out, "8", "16", answers="batch_size=16:interrupted")
    frame = run(out, "8", "16", "32")
    assert "2 to run, 1 already there" in capsys.readouterr().err
    assert rows(frame, "batch_size", "status", "attempt") == [
        (8, "ok", 1),
        (16, "interrupted", 1),
        (16, "ok", 2),
        (32, "ok", 1),
    ]
    assert frame["record_id"].tolist()[:2] == before["record_id"].tolist()
    written = (out / "config.json").stat().st_mtime_ns
    run(out, "8", "16", "32")
    assert "0 to run, 3 already there" in capsys.readouterr().err
    assert (out / "config.json").stat().st_mtime_ns == written
    run(out, "8", "64")
    assert "1 to run, 1 already there" in capsys.readouterr().err, "of what is asked for"


def test_with_nothing_left_torch_is_not_asked_unless_its_rows_may_be_another_s(
    out: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """A command that does not pass by the examination cannot run anything, nor say that all is
    there."""

    def ask(*_: object) -> None:
        raise LookupError("what may differ")

    run(out, "8", "16")
    monkeypatch.setattr(execution, "open_loop", ask)
    capsys.readouterr()
    assert len(run(out, "8", "16")) == 2
    assert capsys.readouterr().err == f"0 to run, 2 already there, into {out}\n"
    for flags in (["8"], ["8", "16", "--retry", "ok"]):
        with pytest.raises(LookupError):
            run(out, *flags)
    for place in ("workers.examination.find_torch", "machine.host.name_cpu"):
        with monkeypatch.context() as patch:
            patch.setattr(f"bench.{place}", lambda *_: "another")
            with pytest.raises(LookupError):
                run(out, "8", "16")
    monkeypatch.setenv("CUDNN_LOGLEVEL", "1")
    assert len(run(out, "8", "16")) == 2, "it changes nothing"
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    with pytest.raises(LookupError):
        run(out, "8", "16")


def test_failures_are_not_tried_again_unasked(out: Path) -> None:
    run(out, "8", "16", rc=1, answers="batch_size=8:error batch_size=16:timeout")
    run(out, "8", "16")
    frame = run(out, "8", "16", "--retry", "timeout", "killed")
    assert rows(frame, "batch_size", "status", "attempt") == [
        (8, "error", 1),
        (16, "timeout", 1),
        (16, "ok", 2),
    ], "the earlier attempt stays"
    frame = run(out, "8", "16", "--retry", "error")
    assert rows(frame, "batch_size", "status", "attempt")[3:] == [(8, "ok", 2)]


# ------------------------------------------------------------------------------------------- seeds


def test_each_repeat_has_a_seed_of_its_own_and_the_sentinel_the_first(
    out: Path, monkeypatch: Patch
) -> None:
    seeds = []
    answer = FakeExecutor.run

    def watch(self: FakeExecutor, job: Any, *rest: Any) -> Outcome:
        seeds.append(job.case.seed)
        return answer(self, job, *rest)

    monkeypatch.setattr(FakeExecutor, "run", watch)
    frame = run(out, "8", "16", "--seed", "5", "--repeats", "2")
    assert rows(frame, "batch_size", "seed", "repeat", "sentinel", "run_seed") == [
        (8, 5, 1, False, 5),
        (16, 5, 1, False, 5),
        (8, 5, 2, False, 6),
        (16, 5, 2, False, 6),
        (8, 5, 1, True, 5),
    ]
    assert seeds == frame["run_seed"].tolist(), "the worker is given that of its run"
    frame = run(out.with_name("same"), "8", "--repeats", "2", "--same-seed")
    assert frame["run_seed"].tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------------------ mixing


@pytest.fixture
def host(monkeypatch: Patch) -> Callable[..., None]:
    """Run on another machine."""

    def move(**changed: str) -> None:
        def describe() -> Environment:
            environment = describe_host()
            for name, value in changed.items():
                setattr(environment, name, value)
            return environment

        monkeypatch.setattr(fake, "describe_host", describe)

    return move


def test_rows_that_cannot_be_compared_are_not_mixed(
    out: Path, host: Callable[..., None], capsys: Capture
) -> None:
    changed = {"gpu": "=HYPERLINK()", "driver": "'1", "torch": "9.9", "cuda": "99", "cudnn": "9"}
    changed |= {"code": "deadbeef", "cpu": "Another", "variables": "CUDA_LAUNCH_BLOCKING=1"}
    before = run(out, "8")
    host(**changed)
    capsys.readouterr()
    assert len(run(out, "8", "16", rc=2)) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: --out {out}: has rows that would not be comparable: ")
    for name, now in changed.items():
        assert f"{name} was {before[name][0] or 'none'}, now {now}" in message
    assert "choose another --out, or add to them with --mix" in message
    run(out, "8", "--input", "3x16x16", rc=2)
    assert "cpu was " in capsys.readouterr().err, "whatever images its rows are of"

    frame = run(out, "8", "16", "--mix")
    (name, now), *_ = changed.items()
    assert rows(frame, "batch_size", "attempt", name) == [
        (8, 1, before[name][0]),
        (8, 2, now),  # the case as it runs here has not been measured yet
        (16, 1, now),
    ]
    assert len(run(out, "8", "16", "--mix")) == 3


def test_a_command_that_is_refused_leaves_the_files_of_an_older_version(out: Path) -> None:
    shutil.copytree(ROOT / "results" / "cpu-epyc-20261120", out)
    before = {file: file.read_bytes() for file in out.glob("*.*")}
    run(out, "64", rc=2)
    assert {file: file.read_bytes() for file in before} == before


def test_a_machine_that_returns_finds_its_rows_and_no_other_s(
    out: Path, host: Callable[..., None]
) -> None:
    host(gpu="small")
    run(out, "8", answers="batch_size=8:oom")
    host(gpu="large")
    frame = run(out, "24", "--mix")
    assert rows(frame, "gpu", "status") == [("small", "oom"), ("large", "ok")], (
        "its own largest_batch"
    )
    host(gpu="small")
    assert len(run(out, "8", "--mix")) == 2


def test_what_does_not_change_numbers_may_differ(out: Path, host: Callable[..., None]) -> None:
    run(out, "8")
    host(host="elsewhere", python="3.99", os="Plan 9", commit="f00")
    assert len(run(out, "8", "16")) == 2


def test_other_images_are_not_mixed(out: Path, monkeypatch: Patch, capsys: Capture) -> None:
    run(out, "8")
    plain = ImageRequest.prepare
    monkeypatch.setattr(
        ImageRequest, "prepare", lambda images: replace(plain(images), fingerprint="feedface")
    )
    run(out, "8", rc=2)
    assert "dataset_fingerprint was" in capsys.readouterr().err


# ------------------------------------------------------------------------------- stopping, signals


def start(out: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """Start a sweep in a process of its own, with the fake that takes its time."""
    command = [sys.executable, TESTS / "slow_sweep.py", *FP32, *flags, "--out", out]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, **environment}, **pipes, text=True)


def wait_until_begun(process: subprocess.Popen[str]) -> None:
    for line in process.stderr:
        if line.startswith("[2/"):
            return
    pytest.fail("the sweep ended before its second case")


MANY = ["8", "--seed", *map(str, range(400))]


@pytest.mark.slow
def test_stopped_once_it_ends_cleanly_and_goes_on_later(out: Path, capsys: Capture) -> None:
    """And until then a second sweep of the folder is refused, by the name of the first."""
    process = start(out, *MANY, BENCH_TEST_DELAY_S="0.05")
    wait_until_begun(process)
    run(out, "8", rc=2)
    holder = f"in use by pid {process.pid} on {socket.gethostname()}; wait until that ends"
    assert holder in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 143, errors
    assert "stopping: what is done is kept; again to stop at once" in errors
    assert output == "", "no report"
    frame = read_records(out)
    *_, last = errors.splitlines()
    done = int((frame["status"] == "ok").sum())
    assert last.startswith(f"stopped: {done} runs done, {400 - done} runs left; to continue: ")
    assert shlex.split(last)[-2:] == ["--out", str(out)]
    assert 2 <= len(frame) < 400
    assert set(frame["status"][:-1]) == {"ok"}
    assert not list(out.glob("*.torn-*"))
    assert not (out / ".holder").exists()

    frame = run(out, *MANY)
    assert sorted(frame[frame["status"] == "ok"]["seed"]) == list(range(400))


def test_handlers_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(n) for n in numbers]
    for number in numbers:
        with stop_signals(lambda: None) as stopped:
            assert stopped() == 0
            os.kill(os.getpid(), number)
            assert stopped() == number
        assert before == [signal.getsignal(n) for n in numbers]


def test_an_end_by_timeout_is_no_stop_by_ctrl_z() -> None:
    """It lets a command go on, too, that it sent a signal: what is measured there is valid."""
    awake, _ = describe_pause()
    with stop_signals(lambda: None) as stopped:
        for number in (signal.SIGTERM, signal.SIGCONT):
            os.kill(os.getpid(), number)
        assert stopped() == signal.SIGTERM
    assert describe_pause(awake)[1] == ""


def test_a_stop_by_ctrl_z_is_known(monkeypatch: Patch) -> None:
    """And the sleep of a laptop, which no clock of a step counts."""
    awake, sentence = describe_pause()
    assert sentence == ""
    with stop_signals(lambda: None):
        os.kill(os.getpid(), signal.SIGCONT)
    later, sentence = describe_pause(awake)
    assert "the sweep was stopped and went on" in sentence
    clock = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 60)
    assert describe_pause(later)[1] == "the machine slept for 60 s"


def test_what_nohup_ignores_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(lambda: None) as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stopped() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_stops_it_cleanly(out: Path) -> None:
    """What it says then goes nowhere, and ends nothing."""
    terminal, end = os.openpty()
    command = [sys.executable, TESTS / "slow_sweep.py", *FP32, *MANY, "--out", out]
    environment = {**os.environ, "BENCH_TEST_DELAY_S": "0.05"}
    streams = {"stdin": end, "stdout": end, "stderr": end}
    with subprocess.Popen(["setsid", "--ctty", *command], **streams, env=environment) as process:
        os.close(end)
        output = b""
        while b"[2/" not in output:
            output += os.read(terminal, 4096)
        os.close(terminal)
        assert process.wait(60) == 128 + signal.SIGHUP
    assert {*read_records(out)["status"][:-1]} == {"ok"}


def test_a_sweep_of_another_thread_is_run_without_signals() -> None:
    """Where only the main thread may handle them: asyncio.to_thread, Gradio, Streamlit."""
    signals = []

    def go() -> None:
        with stop_signals(lambda: None) as stopped:
            signals.append(stopped())

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert signals == [0]


# ----------------------------------------------------------------------------------- a full disk


def test_a_disk_that_fills(out: Path) -> None:
    """Stood for by files that may not grow."""
    command = [
        sys.executable,
        TESTS / "slow_sweep.py",
        *FP32,
        "8",
        "--repeats",
        "200",
        "--out",
        out,
    ]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    how = {"env": {**os.environ, "BENCH_TEST_DELAY_S": "0"}, "preexec_fn": limit}
    full = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    assert full.returncode == 1, full.stderr
    *_, last = full.stderr.strip().splitlines()
    assert re.fullmatch(r"error: .*\.csv: .*; the rows before are intact, and the same .*", last)
    assert "not written: {" in full.stderr, "what was measured last is not lost"
    assert "Traceback" not in full.stderr
    frame = read_records(out)
    assert 5 < len(frame) < 200
    assert frame["repeat"].tolist() == list(range(1, len(frame) + 1))
    assert not list(out.glob("*.torn-*"))
    frame = run(out, "8", "--repeats", "200")
    assert frame["repeat"].tolist() == [*range(1, 201), 1], "and the drift check"


# ------------------------------------------------------------------------------ threads on a CPU


@pytest.mark.slow
def test_a_folder_s_cases_take_the_threads_of_free_cores(
    out: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """They are those of the row, a resume takes the same, and the user's number holds. Cold, as the
    server of other variables would be of no use to other tests."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(preflight, "_WATCHED_S", 0.0)
    monkeypatch.setattr(preflight, "usable_cpus", lambda: range(4))
    monkeypatch.setattr(preflight, "count_cores", lambda: 4.0)
    busy = [1.3]
    monkeypatch.setattr(OtherWork, "cores", lambda self, guests=True: busy[0])
    flags = ["--model", "tests.models_for_tests:good", "--device", "cpu", "--precision", "fp32"]
    flags += ["--dataset", "synthetic", "--batch-size", "8", "--steps", "2", "--no-report"]
    assert sweep.main([*flags, "--cold", "--repeats", "1", "--out", str(out)]) == 0
    errors = capsys.readouterr().err
    assert errors.startswith("note: an operation takes 2 threads, as many as cores were free when ")
    assert "OMP_NUM_THREADS=2 is set and changes results" not in errors
    assert {*read_records(out)["torch_threads"]} == {2}
    assert "OMP_NUM_THREADS" not in os.environ
    there = read_rows(out)
    for rows, cores, busy[0], wanted in (
        (there, 4.0, 0.0, 2),
        ([], 4.0, 0.1, None),
        ([], 0.3, 0.0, 1),
    ):
        monkeypatch.setattr(preflight, "count_cores", lambda cores=cores: cores)
        assert preflight.choose_number([CASE], Options(), rows) == wanted
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert preflight.choose_number([CASE], Options(), there) is None, "the user's own"
