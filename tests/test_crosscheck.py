"""The independent cross-check: both sides really run, and a planted difference is told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.crosscheck import __main__ as crosscheck
from bench.crosscheck.__main__ import Judgement, Pair, Side, Verdict, find_peak, judge, judge_all
from bench.environment import Platform, probe

HERE = Path(crosscheck.__file__).parent
SMALL = ["--device", "cpu", "--model", "dpn-small", "--fraction", "0.001", "--batch-size", "32"]


def pair(harness_s: float = 10.0, bare_s: float = 10.0, **unlike: int) -> Pair:
    work = {"steps": 20, "images": 5120, "memory_bytes": 2_000_000_000}
    return Pair(Side(harness_s, **{**work, **unlike}), Side(bare_s, **work))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
def test_both_sides_do_the_same_work(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert crosscheck.main([*SMALL, "--pairs", "1", "--json", "--precision", precision]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["rehearsal"]
    (both,) = answer["pairs"]
    for side in both.values():
        assert (side["steps"], side["images"]) == (2, 64)
        assert side["seconds"] > 0
        assert side["memory_bytes"] > 100e6
    assert 0 < both["bare"]["batches_s"] < both["bare"]["seconds"]
    assert answer["judgements"]["work"]["verdict"] == "agree"
    ratio = both["harness"]["seconds"] / both["bare"]["seconds"]
    assert answer["judgements"]["time"]["ratio"] == pytest.approx(ratio)
    assert "rehearsal" in said.err


@pytest.mark.slow
def test_the_bare_loop_imports_nothing_of_the_harness() -> None:
    flags = "--model dpn_small --precision fp32 --batch-size 16 --steps 1 --warmup-s 0"
    command = [sys.executable, str(HERE / "bare.py"), *flags.split(), "--device", "cpu"]
    done = subprocess.run(command, input="go\n", capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["shared"] == []
    assert answer["ended"] - answer["began"] == pytest.approx(answer["seconds"], abs=0.01)


@pytest.mark.slow
def test_an_epochs_last_batch_is_smaller() -> None:
    """40 images in batches of 24, in place of 50,000."""
    source = (HERE / "bare.py").read_text().replace("IMAGES = 50_000", "IMAGES = 40")
    source = source.replace("__file__", repr(str(HERE / "bare.py")))
    flags = "--model dpn_small --precision fp32 --batch-size 24 --steps 2 --warmup-s 0"
    command = [sys.executable, "-c", source, *flags.split(), "--device", "cpu"]
    done = subprocess.run(command, input="go\n", capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["images"] == 40


def test_a_harness_that_is_a_fifth_slower_disagrees() -> None:
    judged = judge_all([pair(harness_s=12.0), pair(harness_s=12.1)])
    assert judged["time"].verdict is Verdict.DISAGREE
    assert judged["time"].ratio == pytest.approx(1.205)
    assert judged["work"].verdict is Verdict.AGREE
    assert "1.2000 to 1.2100" in judged["time"].describe("time")


def test_a_bare_loop_that_is_a_fifth_slower_disagrees() -> None:
    assert judge_all([pair(bare_s=12.0)])["time"].verdict is Verdict.DISAGREE


def test_fewer_images_are_not_the_same_work() -> None:
    judged = judge_all([pair(), pair(images=5119)])
    assert judged["work"].verdict is Verdict.DISAGREE
    assert judged["time"].verdict is Verdict.AGREE


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0099], Verdict.AGREE),
        ([0.9901, 1.0099], Verdict.AGREE),
        ([1.0101], Verdict.DISAGREE),
        ([0.98, 0.985], Verdict.DISAGREE),
        ([0.98, 1.0], Verdict.UNCLEAR),
        ([0.98, 1.02], Verdict.UNCLEAR),
        ([], Verdict.NOT_READ),
    ],
)
def test_verdicts_at_the_bound(ratios: list[float], verdict: Verdict) -> None:
    assert judge([(ratio, 1.0) for ratio in ratios]).verdict is verdict


def test_memory_that_was_not_read_in_every_pair_is_no_agreement() -> None:
    assert judge([(1.0, 1.0), None]) == Judgement(Verdict.NOT_READ)
    unread = Pair(Side(1, 1, 1, None), Side(1, 1, 1, 10))
    assert judge_all([unread])["memory"].verdict is Verdict.NOT_READ


def test_what_the_allocator_does_not_use_is_no_difference() -> None:
    held = pair(memory_bytes=2_200_000_000, unused_bytes=200_000_000)
    assert judge_all([held])["memory"].ratio == 1
    used = pair(memory_bytes=2_200_000_000, unused_bytes=0)
    assert judge_all([used])["memory"].verdict is Verdict.DISAGREE


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


@pytest.fixture(scope="module")
def platform() -> Platform:
    """What torch says of the CPU, asked once."""
    return probe("cpu")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "0"], "--pairs 0: give a whole number of at least 1"),
        (
            ["--precision", "fp16"],
            "--precision fp16: the bare loop can only train fp32 or bf16-amp",
        ),
        (["--precision", "fp32", "bf16-amp"], "2 cases are given; give one value for each axis"),
        (["--model", "package:factory"], "the bare loop can only train dpn92, dpn26, dpn-small"),
        (["--channels-last"], "the bare loop supports --model, --precision, --batch-size"),
    ],
)
def test_bad_input(
    flags: list[str],
    message: str,
    platform: Platform,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crosscheck, "probe", lambda device: platform)
    assert crosscheck.main([*SMALL, *flags]) == 2
    assert message in capsys.readouterr().err
