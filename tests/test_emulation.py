"""Precisions that a device emulates: said before anything runs, with the time that they take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pytest_for_tests import Capture, Patch

from bench.doctor.rates import SECONDS
from bench.environment.asking import DeviceAnswer, ProcessAnswer
from bench.environment.host import describe_host
from bench.executors import Lane
from bench.executors.subprocess import SubprocessExecutor
from bench.fingerprint import Fingerprint, parse_request
from bench.record import Outcome, Status, WorkRow
from bench.sweep.__main__ import main as sweep
from bench.work import Kind
from bench.yardstick import Collapse, Yardstick

WORK = (WorkRow(Kind.CONVOLUTION, "", "float32", 9, 1e9, 1e3),)
RATES = {"rate_float32": 1e11, "rate_bfloat16": 1e9, "rate_float16": 1e9, "rate_copy": 1e10}
CASES = ["--device", "cpu", "--model", "dpn-small", "--fraction", "0.008", "--batch-size", "100"]


@pytest.fixture
def measured(monkeypatch: Patch) -> dict[str, Any]:
    """What a CPU that emulates both halves is asked in a dry run, and answers."""
    said: dict[str, Any] = {"yardstick": Yardstick(RATES), "native": False}

    def ask(devices: Sequence[str], models: Sequence[str], *, timeout_s: float) -> ProcessAnswer:
        native = said["native"]
        answer = DeviceAnswer({}, fp16_native=native, bf16_native=native)
        fingerprint = Fingerprint("a", "b", "c", work=WORK)
        return ProcessAnswer("", dict.fromkeys(devices, answer), dict.fromkeys(models, fingerprint))

    monkeypatch.setattr("bench.sweep.emulation.ask", ask)
    monkeypatch.setattr("bench.sweep.emulation.read_cpu_flags", frozenset)
    monkeypatch.setattr("bench.sweep.emulation.measure_rates", lambda *_: said["yardstick"])
    monkeypatch.setattr("bench.sweep.emulation.recall", lambda *_: Yardstick())
    monkeypatch.setattr("bench.sweep.emulation.keep", lambda *_: None)
    monkeypatch.setenv(SECONDS, "1")
    return said


def foresee(capsys: Capture, *flags: str) -> list[str]:
    """The warnings of a dry run."""
    assert sweep([*CASES, *flags, "--dry-run"]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


def test_a_dry_run_says_what_is_emulated_and_for_how_long(
    capsys: Capture, measured: dict[str, Any]
) -> None:
    # 4 steps and 4 of warm-up, of 100 images of 1 GFLOP
    assert foresee(capsys, "--precision", "fp32", "bf16", "bf16-amp") == [
        "warning: bf16, bf16-amp are emulated: this CPU has no bf16 arithmetic; a run of bf16 at "
        "batch size 100 takes at least 13 min, and of fp32 8 s, as estimated from the rates of "
        "this machine; leave out of --precision what is too slow, or lower --fraction or "
        "--batch-size"
    ]
    both = foresee(capsys, "200", "--precision", "fp16", "bf16")
    assert ["fp16" in line for line in both] == [True, False]
    assert all("at batch size 200 takes at least 20 min" in line for line in both)


def test_a_plan_says_how_many_repeats_the_predicted_time_allows(
    capsys: Capture, measured: dict[str, Any]
) -> None:
    """A pass takes 13 minutes in bf16 and 8 s in fp32; repeats take five minutes at most."""
    why = ", as estimated from the rates of this machine; fewer where the repeats would take more"
    for names, said in {
        "fp32 bf16": "runs: at most 2 of 2 cases, each once; a pass over the cases takes at",
        "fp32": "runs: 4 of 1 case, each 3 times, and the first once more at the end; fewer where",
    }.items():
        assert sweep([*CASES, "--precision", *names.split(), "--dry-run"]) == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("runs: "))
        assert line.startswith(said)
        assert (why in line) is ("bf16" in names)
    assert sweep([*CASES, "--precision", "bf16", "--repeats", "3", "--dry-run"]) == 0
    said = "runs: 4 of 1 case, each 3 times, and the first once more at the end\n"
    assert said in capsys.readouterr().out
    measured["yardstick"] = Yardstick({**RATES, "rate_conv_bfloat16": 4e9})
    assert sweep([*CASES, "--precision", "bf16", "--dry-run"]) == 0
    assert "runs: at most 3 of 1 case, each twice, and the first once" in capsys.readouterr().out


def test_convolutions_count_at_their_own_rate(capsys: Capture, measured: dict[str, Any]) -> None:
    measured["yardstick"] = Yardstick({**RATES, "rate_conv_bfloat16": 2e10})
    (line,) = foresee(capsys, "--precision", "bf16-amp")
    assert "takes at least 40 s, and of fp32 8 s" in line


def test_what_is_not_emulated_is_not_said(
    capsys: Capture, measured: dict[str, Any], monkeypatch: Patch
) -> None:
    assert foresee(capsys, "--precision", "fp32") == []
    assert foresee(capsys, "--precision", "fp32", "bf16", "--executor", "fake") == []
    # fp16 would be unsupported unless it is asked for by name
    assert all("bf16-amp is" in line for line in foresee(capsys))
    # an instruction that no flag tells of
    measured["yardstick"] = Yardstick({**RATES, "rate_bfloat16": 2e11})
    assert foresee(capsys, "--precision", "bf16") == []
    measured["native"] = True
    assert foresee(capsys, "--precision", "bf16") == []
    monkeypatch.setattr("bench.sweep.emulation.ask", None)
    native = frozenset({"avx512_bf16"})
    monkeypatch.setattr("bench.sweep.emulation.read_cpu_flags", lambda: native)
    assert foresee(capsys, "--precision", "bf16") == []


def test_without_rates_there_is_no_time(
    capsys: Capture, measured: dict[str, Any], monkeypatch: Patch
) -> None:
    collapse = Collapse(1e8, 1e11, 2)
    measured["yardstick"] = Yardstick(collapsed=dict.fromkeys(RATES, collapse))
    collapsed, emulated = foresee(capsys, "--precision", "bf16")
    assert str(collapse) in collapsed
    assert "takes at least" not in emulated
    monkeypatch.setenv(SECONDS, "0")
    assert foresee(capsys, "--precision", "bf16") == [emulated]


@pytest.mark.usefixtures("unreported")
def test_a_sweep_says_it_before_its_first_case(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Nothing is asked of torch, and nothing trained."""

    def examine(
        self: SubprocessExecutor, lane: Lane, devices: list[str], models: list[str], **_: object
    ) -> ProcessAnswer:
        answers = dict.fromkeys(devices, DeviceAnswer({}, bf16_native=False))
        subjects = [parse_request(name).subject for name in models]
        found = dict.fromkeys(subjects, Fingerprint("a", "b", "c", work=WORK))
        return ProcessAnswer("", answers, found, host=describe_host())

    monkeypatch.setenv(SECONDS, "1")
    for name, stand_in in {
        "examine": examine,
        "rate": lambda *_: Yardstick(RATES),
        "run": lambda *_: Outcome(Status.OK),
    }.items():
        monkeypatch.setattr(SubprocessExecutor, name, stand_in)
    flags = ["--dataset", "synthetic", "--repeats", "1", "--precision", "fp32", "bf16-amp"]
    assert sweep([*CASES, *flags, "--steps", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert said.count("warning: bf16-amp is emulated: this CPU has no bf16 arithmetic; ") == 1
    assert "takes at least" in said
    assert said.index("is emulated") < said.index("[1/2]")
