"""The independent cross-check: both sides really run, and a planted difference is told."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest

from bench.case import Case
from bench.crosscheck import __main__ as crosscheck
from bench.crosscheck import bare, overhead, turns
from bench.crosscheck.agreement import (
    BOUND,
    JUDGED,
    Agreement,
    Judgement,
    Pair,
    Side,
    find_peak,
    judge,
    judge_all,
)
from bench.errors import UsageError
from bench.executors import Job
from bench.flags import join_flags
from bench.record import BESIDE, Measurement
from bench.store.reader import read_records

HERE = Path(crosscheck.__file__).parent
RESULTS = Path(__file__).parents[1] / "results"
SMALL = ["--device", "cpu", "--model", "dpn-small", "--fraction", "0.0003", "--batch-size", "8"]


MIB = 2**20


def pair(harness_s: float = 10.0, bare_s: float = 10.0, **unlike: int) -> Pair:
    """Of bf16-amp at batch size 256 on an H100: 769 MiB lie outside the allocator."""
    sizes = {"memory_bytes": 8635, "allocated_bytes": 6206, "reserved_bytes": 7866}
    work = {"steps": 20, "images": 5120, **{name: mib * MIB for name, mib in sizes.items()}}
    return Pair(Side(harness_s, **{**work, **unlike}), Side(bare_s, **work))


@pytest.mark.slow
def test_both_sides_do_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    """In bf16-amp; `test_the_bare_loop_imports_nothing_of_the_harness` is in fp32."""
    flags = ["--pairs", "1", "--json", "--precision", "bf16-amp"]
    assert crosscheck.main(join_flags(SMALL, flags)) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["rehearsal"]
    (both,) = answer["pairs"]
    for side in both.values():
        assert (side["steps"], side["images"]) == (2, 16)
        assert side["seconds"] > 0
        assert side["memory_bytes"] > 100e6
    assert 0 < both["bare"]["batches_s"] < both["bare"]["seconds"]
    assert answer["judgements"]["work"]["verdict"] == "agree"
    ratio = both["harness"]["seconds"] / both["bare"]["seconds"]
    assert answer["judgements"]["time"]["ratio"] == pytest.approx(ratio)
    assert "rehearsal" in said.err


@pytest.mark.slow
def test_a_workload_is_trained_by_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    """By tokens, and an optimizer of its own."""
    flags = ["--workload", "examples.transformer:tiny", "--batch-size", "16", "--fraction", "1"]
    flags += ["--device", "cpu", "--pairs", "1", "--json", "--precision", "bf16-amp"]
    assert crosscheck.main(flags) == 0
    said = capsys.readouterr()
    ((both,), judged) = (json.loads(said.out)[name] for name in ("pairs", "judgements"))
    assert judged["work"]["verdict"] == "agree"
    assert {side["images"] for side in both.values()} == {20 * 16 * 32}
    assert f"{20 * 16 * 32} tokens" in said.err
    assert said.err.startswith("examples.transformer:tiny, bf16-amp · batch size 16, own, ")


def test_the_bare_loop_imports_nothing_of_the_harness() -> None:
    """Its last batch is smaller: 40 images in batches of 24, in place of 50,000."""
    source = (HERE / "bare.py").read_text().replace("IMAGES = 50_000", "IMAGES = 40")
    source = source.replace("__file__", repr(str(HERE / "bare.py")))
    flags = "--model dpn_small --precision fp32 --batch-size 24 --steps 2 --warmup-s 0"
    command = [sys.executable, "-c", source, *flags.split(), "--device", "cpu"]
    done = subprocess.run(command, input="go\n", capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["images"] == 40
    assert answer["shared"] == []
    assert answer["allocated_bytes"] is None, "of a CPU torch tells nothing"
    assert answer["ended"] - answer["began"] == pytest.approx(answer["seconds"], abs=0.01)


def test_the_bare_loop_trains_a_loss_without_a_count_of_what_was_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And frozen weights. The last batch is smaller where 100 images are no multiple of 16."""
    flags = "--workload examples.two_losses:tiny --precision fp32 --batch-size 16 --steps 7"
    monkeypatch.setattr("sys.argv", ["bare.py", *flags.split(), "--warmup-s=0", "--device=cpu"])
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    monkeypatch.setattr("sys.path", [*sys.path])  # which it adds to
    bare.main()
    assert json.loads(capsys.readouterr().out)["images"] == 100


def test_a_side_that_is_a_fifth_slower_disagrees() -> None:
    judged = judge_all([pair(harness_s=12.0), pair(harness_s=12.1)])
    assert judged["time"].verdict is Agreement.DISAGREE
    assert judged["time"].ratio == pytest.approx(1.205)
    assert judged["work"].verdict is Agreement.AGREE
    assert "1.2000 to 1.2100" in judged["time"].describe("time")
    assert judge_all([pair(bare_s=12.0)])["time"].verdict is Agreement.DISAGREE


def test_fewer_images_are_not_the_same_work() -> None:
    judged = judge_all([pair(), pair(images=5119)])
    assert judged["work"].verdict is Agreement.DISAGREE
    assert judged["time"].verdict is Agreement.AGREE


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0099], Agreement.AGREE),
        ([0.9901, 1.0099], Agreement.AGREE),
        ([1.0101], Agreement.DISAGREE),
        ([0.98, 0.985], Agreement.DISAGREE),
        ([0.98, 1.0], Agreement.UNCLEAR),
        ([0.98, 1.02], Agreement.UNCLEAR),
        ([], Agreement.NOT_READ),
    ],
)
def test_verdicts_at_the_bound(ratios: list[float], verdict: Agreement) -> None:
    assert judge([(ratio, 1.0) for ratio in ratios]).verdict is verdict


def test_memory_that_was_not_read_in_every_pair_is_no_agreement() -> None:
    assert judge([(1.0, 1.0), None]) == Judgement(Agreement.NOT_READ)
    unread = pair()
    unread = unread._replace(harness=replace(unread.harness, memory_bytes=None))
    judged = judge_all([pair(), unread])
    assert judged["tensors"].verdict is Agreement.AGREE, "torch tells them without NVML"
    assert judged["outside the allocator"].verdict is Agreement.NOT_READ


@pytest.mark.parametrize(
    ("memory", "reserved", "allocated", "apart"),
    [
        # the first cross-check on a card: 1.8 %, of the allocator's segments alone
        (154, 154, 0, set()),
        # 1.05 % of the tensors, and 0.75 % of all that the device holds
        (65, 65, 65, {"tensors"}),
        # a reading that misses something: 7.8 % of what lies outside the allocator, 0.69 % of all
        (-60, 0, 0, {"outside the allocator"}),
    ],
)
def test_memory_is_judged_by_its_parts(
    memory: int, reserved: int, allocated: int, apart: set[str]
) -> None:
    """So many MiB more than the bare loop has."""
    more = {"memory_bytes": 8635 + memory, "reserved_bytes": 7866 + reserved}
    more["allocated_bytes"] = 6206 + allocated
    judged = judge_all([pair(**{name: size * MIB for name, size in more.items()})])
    verdicts = {what: judged[what].verdict for what in JUDGED}
    assert verdicts == {
        what: Agreement.DISAGREE if what in apart else Agreement.AGREE for what in JUDGED
    }


def test_on_a_cpu_there_is_the_resident_set_alone() -> None:
    side = Side(1.0, 1, 1, 500 * MIB)
    judged = judge_all([Pair(side, side)], rehearsal=True)
    assert set(judged) == {"work", "time", "memory"}
    assert judged["memory"].ratio == 1


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """The measured rows of the first card, of which `BOUND` speaks."""
    frames = map(read_records, RESULTS.glob("nvidia-h100-80gb-hbm3-20261122-*"))
    frame = pd.concat(list(frames), ignore_index=True)
    return frame[frame["peak_device_bytes"].notna()]


def test_the_memory_of_a_card_is_made_up_of_what_is_judged(rows: pd.DataFrame) -> None:
    assert len(rows) == 22
    inside = rows["peak_reserved_bytes"] + rows["context_bytes"]
    assert (rows["peak_process_bytes"] == inside).all()
    assert set(rows["peak_device_bytes"] - rows["peak_process_bytes"]) == {9_240_576}
    outside = (rows["peak_device_bytes"] - rows["peak_reserved_bytes"]) / MIB
    alone = outside[rows["parallel"] == "none"]
    assert set(alone[rows["precision"] != "tf32"]) == {768.8125}
    assert set(alone[rows["precision"] == "tf32"]) == {770.8125}
    assert alone.max() / alone.min() - 1 < BOUND / 3


def test_tensors_vary_by_a_tenth_of_the_bound_and_what_is_unused_by_far_more(
    rows: pd.DataFrame,
) -> None:
    tensors = rows["warmup_allocated_bytes"] / rows["peak_allocated_bytes"]
    assert (tensors - 1).abs().max() < BOUND / 9
    unused = 1 - rows["peak_allocated_bytes"] / rows["peak_reserved_bytes"]
    assert (unused.min(), unused.max()) == pytest.approx((0.135, 0.211), abs=0.001)


def test_the_peak_is_the_epochs_alone_and_over_the_baseline() -> None:
    polled = [(0.0, 100), (1.0, 900), (2.0, 500), (2.5, 600), (3.0, 950)]
    assert find_peak(polled, 1.5, 2.9, over_baseline=True) == 500
    assert find_peak(polled, 1.5, 2.9, over_baseline=False) == 600
    assert find_peak(polled, 4.0, 5.0, over_baseline=True) is None


def test_the_poller_sees_a_process_grow() -> None:
    grow = "import sys; sys.stdin.readline(); x = b'x' * 300_000_000; sys.stdin.readline()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", grow], **pipes) as child:  # type: ignore[call-overload]
        command = [sys.executable, str(HERE / "poller.py"), str(child.pid)]
        with subprocess.Popen(command, **pipes) as poller:  # type: ignore[call-overload]
            first = float(poller.stdout.readline().split()[1])
            child.stdin.write("go\n")
            child.stdin.flush()
            end, size = time.monotonic() + 60, first
            while size < first + 290e6 and time.monotonic() < end:
                size = float(poller.stdout.readline().split()[1])
            assert size >= first + 290e6
            child.communicate("end\n")
            poller.communicate()
            assert poller.returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "0"], "--pairs '0': give a whole number of at least 1"),
        (
            ["--precision", "fp16"],
            "--precision fp16: the bare loop can only train fp32 or bf16-amp",
        ),
        (["--precision", "fp32", "bf16-amp"], "2 cases are given; give one value for each axis"),
        (
            ["--model", "package:factory"],
            "can only train dpn92, dpn26, dpn-small; give your own as a --workload",
        ),
        (
            ["--channels-last"],
            "--channels-last: bench.crosscheck does not take it, because the bare loop ",
        ),
        (["--seed", "1"], "--seed: bench.crosscheck does not take it, because the bare loop "),
        (["--seed", "0", "--precision", "tf32"], "--precision tf32: the bare loop can only train"),
        (["--data-dir", "data"], "--data-dir: the bare loop makes its own images; add --overhead"),
        (["--workload", "examples.resnet:tiny"], "--workload brings its own model"),
    ],
)
def test_bad_input(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert crosscheck.main(join_flags(SMALL, flags)) == 2
    assert message in capsys.readouterr().err


OVERHEAD = ["--overhead", "--device", "cpu", "--model", "dpn-small"]
OVERHEAD += ["--fraction", "0.001", "--batch-size", "16"]


@pytest.mark.slow
def test_an_overhead_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert crosscheck.main(join_flags(OVERHEAD, ["--pairs", "1"])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dpn-small, fp32 · batch size 16, synthetic, fraction 0.001, on ")
    pair = re.fullmatch(r"pair 1: bare (\S+) s, harness (\S+) s, ratio (\S+)", lines[-3])
    assert pair
    assert float(pair[3]) == pytest.approx(float(pair[2]) / float(pair[1]), abs=0.01)
    assert lines[-1].startswith(f"overhead: harness / bare = {pair[3]} (")
    beside = re.fullmatch(r"seconds beside training: (\S+) \((.+)\)", lines[-2])
    assert beside
    parts = dict(part.rsplit(" ", 1) for part in beside[2].split(", "))
    assert [*parts] == [*BESIDE.values()]
    assert float(beside[1]) == pytest.approx(sum(map(float, parts.values())), abs=0.05)
    assert float(parts["imports"]) > 0


def test_the_turns_alternate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever goes first may find a cooler machine."""
    order: list[str] = []

    def time_bare(*_: object) -> float:
        order.append("bare")
        return 2.0

    def measure(*_: object) -> Measurement:
        order.append("harness")
        return Measurement(measured_time_s=2.02, imports_s=len(order), data_s=0.5)

    monkeypatch.setattr(overhead, "time_bare", time_bare)
    monkeypatch.setattr(turns, "measure", measure)
    assert crosscheck.main(join_flags(OVERHEAD, ["--pairs", "3"])) == 0
    assert order == ["bare", "harness", "harness", "bare", "bare", "harness"]
    *_, beside, ratio = capsys.readouterr().out.splitlines()
    assert ratio == "overhead: harness / bare = 1.0100 (median of 3; 1.0100 to 1.0100)"
    # of 2, 3 and 6 s of imports the median
    assert beside.startswith("seconds beside training: 3.50 (process start 0.00, imports 3.00, ")
    assert crosscheck.main(join_flags(OVERHEAD, ["--pairs", "1"])) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "overhead: harness / bare = 1.0100 (one pair: its spread is unknown; use --pairs 5)"
    )


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("kill -9 $$", "killed by SIGKILL"),
        ("echo 'a warning' >&2; kill -9 $$", "killed by SIGKILL; a warning"),
        ("echo 'a\nValueError: b' >&2; exit 1", "ValueError: b"),
        ("exit 3", "return code 3"),
    ],
)
def test_a_bare_loop_that_fails_says_how(
    monkeypatch: pytest.MonkeyPatch, does: str, told: str
) -> None:
    """The kernel ends a process that takes too much memory without a word."""
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **rest: run(["sh", "-c", does], **rest))
    with pytest.raises(UsageError, match=f"the bare loop failed: {told}$"):
        overhead.time_bare(Job(Case(device="cpu"), ""))


def test_the_bare_loop_of_an_overhead_trains_a_workload(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "examples.two_losses:tiny"
    case = Case(name, "own", workload=name, batch_size=16, steps=2, device="cpu")
    job = json.dumps({"case": asdict(case), "folder": ""})
    monkeypatch.setattr("sys.stdin", io.StringIO(job))
    overhead._train()
    assert 0 < float(capsys.readouterr().out) < math.inf


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "0"], "--pairs '0': give a whole number of at least 1"),
        (["--precision", "fp32", "bf16"], "2 cases are given; give one value for each axis"),
        (["--batch-size", "60000"], "batch size 60000 is above the dataset's 50000 images"),
        (["--pears", "1"], "unknown argument '--pears'; did you mean '--pairs'?"),
    ],
)
def test_an_overhead_that_cannot_be_measured(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert crosscheck.main(join_flags(OVERHEAD, flags)) == 2
    assert message in capsys.readouterr().err


def test_the_older_name_measures_an_overhead() -> None:
    """Only an overhead takes learning rates, though not two."""
    command = [sys.executable, "-m", "bench.overhead", "--device", "cpu", "--lr", "0.1", "0.2"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: 2 cases are given; give one value for each axis\n"
