"""What a device can do: measured, kept in the rows, and held against other times."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bench.doctor.__main__ import write_json
from bench.machine.gpus import Depth, Reading, Unreadable
from bench.machine.host import describe_host
from bench.profile.rates import CALL, RATES, DeviceRates, Tries, read_tries
from bench.schema.precision import Arithmetic
from bench.schema.record import Environment, Measurement, Outcome, Status, WorkRow, read_missing
from bench.sweep.__main__ import main as sweep
from bench.training.device_rates import (
    FEWEST_TRIES,
    TRIES,
    Rate,
    Task,
    list_arithmetics,
    make_convolution,
    make_copy,
    make_product,
    measure,
)
from bench.training.operations import WorkCounter
from bench.training.timing import ACCELERATORS
from bench.workers.examination import Machine, Platform
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.fingerprint import Fingerprint
from bench.workers.judgement import judge
from bench.workers.rating import (
    RATES_VARIABLE,
    check_rates,
    describe_rates,
    measure_machine,
    measure_rates,
)
from tests.machines_for_tests import RECORDINGS, read_machine
from tests.pytest_for_tests import Capture, Patch

CPU = torch.device("cpu")
FORMATS = list_arithmetics(CPU)


@pytest.mark.parametrize("arithmetic", FORMATS)
def test_tasks_are_of_the_flop_they_are_said_to_be(arithmetic: Arithmetic) -> None:
    for task in (
        make_product(arithmetic, CPU, 64),
        *(make_convolution(arithmetic, CPU, window, channels=8, images=2) for window in (1, 3)),
    ):
        with WorkCounter() as counter:
            task.action()
        assert {label.format for label in counter.work} == {arithmetic}
        assert sum(work.flop for work in counter.work.values()) == task.amount
    assert make_product(arithmetic, CPU, 64).amount == 2 * 64**3


def test_a_copy_is_read_and_written() -> None:
    task = make_copy(CPU)
    with WorkCounter() as counter:
        task.action()
    assert sum(work.bytes for work in counter.work.values()) == task.amount


def test_what_fails_is_named_and_the_rest_is_measured(monkeypatch: Patch) -> None:
    def make(device: torch.device, size: int) -> None:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("bench.training.device_rates.make_copy", make)
    found = measure(CPU, 0.001)
    products = {f"rate_{name}{format}" for name in ("", "conv_") for format in FORMATS}
    assert found.rates.keys() == found.tries.keys() == products | {"call_time_s"}
    assert all(math.isfinite(rate) and rate > 0 for rate in found.rates.values())
    assert found.rates["call_time_s"] < 1 < found.rates["rate_float32"]
    assert found.reasons == {"rate_copy": "RuntimeError: no memory"}


@dataclass
class Moments(Unreadable):
    """A GPU that is fast from one action to another, and done with a try after so many readings of
    its card. The first reading of a try still has the clock of the one before."""

    reason: str = ""
    first: float = 0
    last: float = math.inf
    during: int = 2
    done: int = 0
    reads: int = 0

    def make(self, size: int) -> Task:
        return Task(self.act, 1e6)

    def act(self) -> None:
        self.done, self.reads = self.done + 1, 0
        time.sleep(0.002 if self.first <= self.done <= self.last else 0.1)

    def read(self, depth: Depth) -> Sequence[Reading]:
        self.reads += 1
        clock = 1980 if self.first <= self.done <= self.last else 1365
        return (Reading(0, sm_clock_mhz=1785 if self.reads == 1 else clock, power_w=233.0),)

    def make_event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(query=lambda: self.reads > self.during)
        event.record = lambda: setattr(event, "moment", time.perf_counter())
        event.elapsed_time = lambda later: 1e3 * (later.moment - event.moment)
        return event


def measure_moments(monkeypatch: Patch, moments: Moments) -> Tries:
    """Measure what takes the time of these moments."""
    gpu = SimpleNamespace(Event=moments.make_event, synchronize=lambda _: None)
    monkeypatch.setitem(ACCELERATORS, "cpu", gpu)
    rate = Rate("rate_float16", moments.make)
    monkeypatch.setattr("bench.training.device_rates.list_rates", lambda _: [rate])
    found = measure(CPU, 0.002 * TRIES["cpu"], card=moments)
    assert 2e-3 <= 1e6 / found.rates["rate_float16"] < 1
    return found.tries["rate_float16"]


def test_the_best_of_tries_counts_with_its_clock_while_it_ran(monkeypatch: Patch) -> None:
    # the first two find the size; the next try is throttled, one is fast, the last is throttled
    tries = measure_moments(monkeypatch, Moments(first=4, last=4))
    assert tries.clock_mhz == 1980
    assert tries.number >= FEWEST_TRIES
    assert measure_moments(monkeypatch, Moments(first=math.inf)).clock_mhz == 1365
    over = measure_moments(monkeypatch, Moments(during=0))
    assert over.clock_mhz is None, "no reading ended before the try did"


def test_a_process_that_fails_gives_its_reason(monkeypatch: Patch) -> None:
    (reason,) = measure_rates("nowhere", 0.001).reasons.values()
    assert reason.startswith("RuntimeError: Expected one of cpu, cuda")
    monkeypatch.setattr("bench.workers.rating.call", Mock(side_effect=TimeoutError))
    assert measure_rates("cpu", 0.001) == DeviceRates(
        reasons={"rates": "not measured within 120 s"}
    )


SWEEP = "--model dpn-small --dataset synthetic --batch-size 16 --fraction 0.002 --repeats 1"


def run_sweep(out: Path, *more: str) -> None:
    command = [*SWEEP.split(), *more, "--device", "cpu", "--out", str(out)]
    assert sweep(command) == 0


@pytest.fixture
def quick(monkeypatch: Patch, unreported: None) -> None:
    """Sweeps ask and train nothing: a step does a product of 1 MFLOP in 10 ms."""

    def examine(self: object, lane: object, devices: list[str], *_: object, **__: object) -> Any:
        found = describe(torch="2.13.0", torch_threads=2)
        return Machine(devices=dict.fromkeys(devices, found), models=_Alike())

    times = {"epoch_time_s": 1.0, "measured_time_s": 1.0, "step_time_median_s": 0.01}
    work = [WorkRow("matmul", "mm", "float32", 1, 1e6, 1e3, 0.01)]
    answer = Outcome(Status.OK, measurement=Measurement(**times), work=work)
    monkeypatch.setattr(SubprocessExecutor, "examine", examine)
    monkeypatch.setattr(SubprocessExecutor, "run", lambda *_: deepcopy(answer))


def describe(**values: Any) -> Platform:
    return Platform(replace(describe_host(), **values))


class _Alike(dict[str, Fingerprint]):
    def get(self, model: str, default: object = None) -> Fingerprint:
        return Fingerprint("p", "l", "s", 10)


def answer_rates(monkeypatch: Patch, found: DeviceRates) -> list[str]:
    """Have sweeps measure what is ``found``; the devices that were measured."""
    asked: list[str] = []

    def rate(self: object, lane: object, device: str, seconds: float) -> DeviceRates:
        asked.append(device)
        return found

    monkeypatch.setenv(RATES_VARIABLE, "0.01")
    monkeypatch.setattr(SubprocessExecutor, "rate", rate)
    return asked


def read_rows(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "records.csv").read_text().splitlines()))


@pytest.mark.usefixtures("quick")
def test_a_sweep_measures_once_and_only_where_it_runs_something(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv(RATES_VARIABLE, "0.01")
    run_sweep(tmp_path / "a", "--precision", "fp32", "bf16-amp")
    errors = capsys.readouterr().err
    assert errors.count("the CPU: float32 products ") == 1
    first, second = read_rows(tmp_path / "a")
    names = ("rate_float32", "rate_bfloat16", "rate_copy", "call_time_s")
    assert all(0 < float(first[name]) == float(second[name]) for name in names)
    assert first["rate_tfloat32"] == first["rate_float8"] == ""
    assert list(read_tries(first["rate_tries"])) == [n for n in (*RATES, CALL) if first[n]]

    run_sweep(tmp_path / "a", "--precision", "bf16")  # it goes on at once
    assert "measuring" not in capsys.readouterr().err
    assert read_rows(tmp_path / "a")[-1]["rate_copy"] == first["rate_copy"]


@pytest.mark.usefixtures("quick")
def test_what_could_not_be_measured_is_told_and_not_tried_again_in_its_folder(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """But with another torch, whose rates are its own."""
    lacks = {"rate_float32": "no memory"}
    asked = answer_rates(
        monkeypatch, DeviceRates({"rate_copy": 5e9}, lacks, {"rate_copy": Tries(24)})
    )
    run_sweep(tmp_path, "--precision", "fp32")
    (row,) = read_rows(tmp_path)
    assert (row["rate_float32"], row["rate_copy"]) == ("", "5000000000")
    assert row["rate_tries"] == "rate_copy 24"
    assert read_missing(row["missing"])["rate_float32"] == "no memory"
    run_sweep(tmp_path, "--precision", "bf16-amp")
    assert asked == ["cpu"]
    answer = Machine(devices={"cpu": describe(torch="2.14.0")}, models=_Alike())
    monkeypatch.setattr(SubprocessExecutor, "examine", lambda *_, **__: answer)
    run_sweep(tmp_path, "--precision", "bf16", "--mix")
    assert asked == ["cpu", "cpu"]


@pytest.mark.usefixtures("quick")
def test_a_sweep_says_what_its_device_emulates(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Before its first case, unless its rates say otherwise."""
    for float16, warned in ((1e9, True), (2e11, False)):
        answer_rates(monkeypatch, DeviceRates({"rate_float32": 1e11, "rate_float16": float16}))
        run_sweep(tmp_path / str(warned), "--precision", "fp32", "fp16", "fp16-amp")
        errors = capsys.readouterr().err
        warning = "warning: fp16, fp16-amp may be slow: a CPU has no float16 arithmetic; leave out"
        assert errors.count(warning) == warned
        assert errors.count("may be slow") == warned
        assert not warned or errors.index(warning) < errors.index("[1/3]")


DEVICE: dict[str, Any] = {"gpu": None, "driver": None, "cpu": "C", "torch_threads": 2}


def test_the_doctor_measures_anew(tmp_path: Path, monkeypatch: Patch) -> None:
    recorded = read_machine(RECORDINGS / "cpu-only.json")
    about = Platform(Environment(**{**DEVICE, "torch": "2.13.0"}))
    machine = replace(recorded, devices={"cpu": about}, models={})
    found = DeviceRates({"rate_float32": 2e12, "rate_copy": 1e9}, tries={"rate_copy": Tries(3)})
    monkeypatch.setenv(RATES_VARIABLE, "0.2")
    monkeypatch.setattr("bench.workers.rating.measure_rates", lambda *_: found)
    examined = measure_machine(machine)
    assert examined.device_rates == {"cpu": found}
    (file := tmp_path / "facts.json").write_text(write_json(examined, judge(examined)))
    assert read_machine(file) == examined


@pytest.mark.parametrize(
    ("others", "variables", "threads", "expected"),
    [
        (1.9, {}, "1", "measured now with 1 thread: float32 products 2 TFLOP/s; other work"),
        (1.9, {"OMP_NUM_THREADS": "2"}, None, "measured now: float32 products 2 TFLOP/s; other"),
        (0.1, {}, None, "measured now: float32 products 2 TFLOP/s"),
    ],
)
def test_the_doctor_measures_with_the_threads_of_free_cores(
    monkeypatch: Patch, others: float, variables: dict[str, str], threads: str | None, expected: str
) -> None:
    """As a sweep does: two threads on two busy cores wait for each other. And it says so."""
    asked: list[Any] = []

    def measure(device: str, seconds: float, given: Any = None) -> DeviceRates:
        asked.append(given)
        return DeviceRates({"rate_float32": 2e12})

    machine = read_machine(RECORDINGS / "cpu-only.json")
    busy = replace(machine, cpu=replace(machine.cpu, others=others), variables=variables)
    monkeypatch.setenv(RATES_VARIABLE, "0.2")
    monkeypatch.setattr("bench.workers.rating.measure_rates", measure)
    (rates,) = (f for f in judge(measure_machine(busy)) if f.topic == "rates")
    assert asked == [threads and {"OMP_NUM_THREADS": threads}]
    assert rates.what.startswith(expected)
    assert (rates.level > 0) == ("other work" in rates.what) == (others > 1)
    # a little, such as 1 % that the hypervisor takes of an idle machine, is no reason to wait
    little = replace(machine, cpu=replace(machine.cpu, steal=0.01 + 1e-3))
    assert [f.level for f in judge(measure_machine(little)) if f.topic == "rates"] == [0]


def test_the_doctor_tells_how_a_card_was_held_back() -> None:
    throttled = DeviceRates(
        {"rate_float16": 3e14, "rate_bfloat16": 7e14},
        tries={"rate_float16": Tries(16, 1065), "rate_bfloat16": Tries(8, 1980)},
    )
    assert describe_rates(throttled, "NVIDIA H200") == (
        "float16 products 300 TFLOP/s (30 % of the data sheet's, 1065 MHz); "
        "bfloat16 products 700 TFLOP/s (71 % of the data sheet's, 1980 MHz)"
    )
    ((what, fix),) = check_rates(throttled, "NVIDIA H200")
    assert what == "float16 products reach 30 % of the data sheet's at 1065 MHz"
    assert fix.startswith("nvidia-smi -q")
    assert list(check_rates(throttled, None)) == []


def test_a_rate_above_the_data_sheet_is_doubted_and_not_told() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    found = DeviceRates({"rate_copy": 5e12, "rate_float16": 1.6e15, "rate_float32": 51e12})
    assert describe_rates(found, h100) == "float32 products 51 TFLOP/s (76 % of the data sheet's)"
    warnings = [what.partition(" reach ")[0] for what, _ in check_rates(found, h100)]
    assert warnings == ["float16 products", "copies"]
    assert "5 TB/s" in describe_rates(found, "Card 9")
    assert list(check_rates(found, "Card 9")) == []


def test_a_wrong_variable_is_refused_before_a_sweep_opens_its_folder(
    monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setenv(RATES_VARIABLE, "long")
    out = tmp_path / "out"
    assert sweep(["--preset", "quick", "--device", "cpu", "--out", str(out)]) == 2
    assert "give seconds for each rate" in capsys.readouterr().err
    assert not out.exists()
