"""What a device can do: measured, kept in the rows, held against other times, and expected of."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from records_for_tests import make_record

from bench.case import Case, grid
from bench.compare.__main__ import main as compare
from bench.diagnosis.expectation import describe_expectation, expect, find_step_floor
from bench.diagnosis.rates import find_losses, write_losses, write_rate
from bench.diagnosis.step import Bound, Rates, Step
from bench.doctor.__main__ import Level, judge, read_json, write_json
from bench.doctor.__main__ import main as doctor
from bench.doctor.counts import Counted, count_cases, count_model
from bench.doctor.machine import Machine
from bench.doctor.rates import SECONDS, Yardstick, choose_seconds, describe_rates, measure_rates
from bench.errors import UsageError
from bench.precision import Arithmetic
from bench.record import Environment, WorkRow
from bench.report import summaries
from bench.report.__main__ import main as report
from bench.report.notices import warn
from bench.report.sweeps import read_sweep
from bench.store.writer import Store
from bench.sweep.__main__ import main as sweep
from bench.sweep.slowdown import describe_slowdown, recall_rates
from bench.training.counting import Counter
from bench.training.yardstick import list_arithmetics, make_call, make_copy, make_product, measure

CPU = torch.device("cpu")
RECORDINGS = Path(__file__).parent / "recordings"

# ------------------------------------------------------------------------------------- measured


@pytest.mark.parametrize("arithmetic", list_arithmetics(CPU))
def test_a_product_is_of_the_flop_it_is_said_to_be(arithmetic: Arithmetic) -> None:
    task = make_product(arithmetic, CPU, 64)
    with Counter() as counter:
        task.action()
    ((label, work),) = counter.work.items()
    assert label.format == arithmetic
    assert work.flop == task.amount == 2 * 64**3


def test_a_copy_is_of_the_bytes_that_it_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.training.yardstick.COPIED_BYTES", {"cpu": 4096})
    task = make_copy(CPU)
    with Counter() as counter:
        task.action()
    (work,) = counter.work.values()
    assert work.bytes == task.amount == 2 * 4096


def test_a_call_is_one_operation() -> None:
    task = make_call(CPU)
    with Counter() as counter:
        task.action()
    assert sum(work.calls for work in counter.work.values()) == task.amount == 1


def test_what_fails_is_named_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(device: torch.device) -> None:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("bench.training.yardstick.make_copy", make)
    rates, reasons = measure(CPU, 0.001)
    assert rates.keys() == {"rate_float32", "rate_float16", "rate_bfloat16", "call_time_s"}
    assert all(math.isfinite(rate) and rate > 0 for rate in rates.values())
    assert reasons == {"rate_copy": "RuntimeError: no memory"}


@pytest.mark.parametrize(("text", "seconds"), [("", 0.2), ("0", 0.0), ("3.5", 3.5)])
def test_how_long_is_a_variable(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS, text)
    assert choose_seconds("cpu") == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "61", "nan"])
def test_another_value_of_it_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS, text)
    with pytest.raises(UsageError, match="from 0 to 60"):
        choose_seconds("cpu")


@pytest.mark.slow
def test_a_process_that_fails_gives_its_reason() -> None:
    found = measure_rates("nowhere", 0.001)
    assert found.rates == {}
    assert "nowhere" in found.reasons["rates"]


# ------------------------------------------------------------------------------------ in a sweep

SWEEP = "--model dpn-small --dataset synthetic --batch-size 64 --fraction 0.002 --repeats 1"


def run_sweep(out: Path, *more: str) -> None:
    command = [*SWEEP.split(), *more, "--device", "cpu", "--out", str(out)]
    assert sweep(command) == 0


def read_rows(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "records.csv").read_text().splitlines()))


@pytest.mark.slow
def test_a_sweep_measures_once_and_only_where_it_runs_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECONDS, "0.01")
    run_sweep(tmp_path / "a", "--precision", "fp32", "bf16-amp")
    said = capsys.readouterr().err
    assert said.count("measuring what the CPU can do now\n") == 1
    assert "large products float32 " in said
    first, second = read_rows(tmp_path / "a")
    names = ("rate_float32", "rate_bfloat16", "rate_copy", "call_time_s")
    assert all(0 < float(first[name]) == float(second[name]) for name in names)
    assert first["rate_tfloat32"] == first["rate_float8"] == ""

    run_sweep(tmp_path / "a", "--precision", "fp32", "bf16-amp")  # nothing is left to run
    assert "measuring" not in capsys.readouterr().err
    run_sweep(tmp_path / "b", "--executor", "fake")
    assert "measuring" not in capsys.readouterr().err
    run_sweep(tmp_path / "a", "--precision", "bf16")  # it goes on at once
    assert "measuring" not in capsys.readouterr().err
    assert read_rows(tmp_path / "a")[-1]["rate_copy"] == first["rate_copy"]


# ------------------------------------------------------------------------------- at another time


def test_what_is_lost_is_named_with_its_share() -> None:
    before = {"rate_float32": 100.0, "rate_float16": 100.0, "rate_bfloat16": 9.0, "rate_copy": 10.0}
    now = {"rate_float32": 91.0, "rate_float16": 60.0, "rate_bfloat16": math.nan, "rate_copy": 8.0}
    losses = find_losses(now, before)
    assert list(losses) == ["rate_float16", "rate_copy"]
    assert write_losses(losses) == "float16 products −40 %, copies −20 %"
    assert find_losses(before, now) == {}


def test_units_are_those_of_the_column() -> None:
    assert write_rate("rate_float16", 612.3e12) == "612 TFLOP/s"
    assert write_rate("rate_copy", 4.31e12) == "4.31 TB/s"
    assert write_rate("call_time_s", 3.14e-6) == "3.1 µs"


FASTER: dict[str, Any] = {"rate_float32": 5e10, "rate_copy": 9e9, "call_time_s": 1e-6}
SLOWER: dict[str, Any] = {"rate_float32": 3e10, "rate_copy": 8.9e9, "call_time_s": 1e-6}
DEVICE: dict[str, Any] = {"gpu": None, "driver": None, "cpu": "C", "torch_threads": 2}


def write_sweep(folder: Path, **values: Any) -> Path:
    times = {"epoch_time_s": 1.0, "measured_time_s": 1.0, "measured_steps": 9}
    with Store(folder) as store:
        store.append(make_record(Case(device="cpu"), **{**DEVICE, **times, **values}))
    return folder


@pytest.fixture
def sweeps(tmp_path: Path) -> Path:
    """A folder with two sweeps of one machine, of which the later gave less."""
    write_sweep(tmp_path / "faster", **FASTER)
    write_sweep(tmp_path / "slower", **SLOWER)
    return tmp_path


def here(**values: Any) -> Environment:
    return Environment(**{**DEVICE, "torch": "2.13.0", **values})


def test_a_sweep_warns_of_a_device_slower_than_in_another(sweeps: Path) -> None:
    (line,) = describe_slowdown(here(**SLOWER), sweeps)
    assert line.startswith(f"warning: C gives less than in {sweeps / 'faster'} (")
    assert ": float32 products −40 %; python -m bench.doctor" in line
    assert describe_slowdown(here(**FASTER), sweeps) == []
    # of another device, or torch, nothing is to be expected
    assert describe_slowdown(here(**{**SLOWER, "cpu": "D"}), sweeps) == []
    assert describe_slowdown(here(**{**SLOWER, "torch_threads": 1}), sweeps) == []
    (sweeps / "faster" / "records.csv").write_text("not records")
    assert describe_slowdown(here(**SLOWER), sweeps) == []


def test_a_sweep_that_goes_on_soon_keeps_its_rates(sweeps: Path) -> None:
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}.000Z"
    kept = write_sweep(sweeps / "kept", **FASTER, finished_at=now)
    assert recall_rates(here(), kept) == FASTER
    assert recall_rates(here(gpu_uuid="GPU-1"), kept) == {}
    assert recall_rates(here(torch="2.14"), kept) == {}
    assert recall_rates(here(), sweeps / "nowhere") == {}
    assert recall_rates(here(), sweeps / "faster") == {}  # of another day


@pytest.mark.slow
def test_a_report_names_the_slower_of_two_times(
    sweeps: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    both = [str(sweeps / "faster"), str(sweeps / "slower")]
    assert report(both) == 0
    out = capsys.readouterr().out
    assert "Slower device: C gave less in slower (" in out
    assert "float32 products −40 %." in out
    assert report(both[:1]) == 0
    assert "Slower device" not in capsys.readouterr().out


@pytest.mark.parametrize(("lane", "told"), [("cpu0", True), ("cpu1", False)])
def test_two_lanes_are_not_one_device_at_two_times(lane: str, told: bool, tmp_path: Path) -> None:
    """How they differ, their anchors tell."""
    write_sweep(tmp_path, lane="cpu0", **FASTER)
    write_sweep(tmp_path, lane=lane, repeat=2, **SLOWER)
    rows = summaries.read([read_sweep(tmp_path)])
    labels = [notice.label for notice in warn(rows, summaries.summarize(summaries.latest(rows)))]
    assert ("Slower device" in labels) is told


def test_compare_tells_rates_that_differ(sweeps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([str(sweeps / "faster"), str(sweeps / "slower")]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "rate of" in line]
    assert line.split() == ["rate", "of", "float32", "products", "50", "GFLOP/s", "30", "GFLOP/s"]
    # where one side did not measure them, nothing is told
    write_sweep(sweeps / "unknown")
    assert compare([str(sweeps / "unknown"), str(sweeps / "slower")]) == 0
    assert "rate of" not in capsys.readouterr().out


# -------------------------------------------------------------------------------------- expected

RATES = Rates({"float32": 1e12, "float16": 4e12}, 1e11, 1e-6)


def row(format: str, flop: float, bytes: float, calls: int = 1) -> WorkRow:
    return WorkRow("matmul", "mm", format, calls, flop, bytes)


def step(*rows: WorkRow) -> Step:
    return Step(0.0, rows, RATES, "cuda")


FP32 = step(row("float32", 6e9, 0), row("float32", 0, 4e8))  # 6 ms and 4 ms
FP16 = step(row("float16", 6e9, 0), row("float16", 0, 2e8))  # 1.5 ms and 2 ms


def test_what_a_precision_can_bring_by_hand() -> None:
    found = expect(FP32, FP16)
    assert found is not None
    assert found.speedup == pytest.approx(10 / 3.5)
    assert found.a.bounds == pytest.approx({Bound.COMPUTE: 0.6, Bound.MEMORY: 0.4})
    assert describe_expectation(found, "fp32") == (
        "at most 2.9× over fp32, if both reach these rates: 40 % of fp32's least time is "
        "memory traffic, and 57 % of what remains"
    )


def test_starting_operations_may_be_what_limits() -> None:
    many = [row("float16", 0, 0, calls=5000)]  # 5 ms
    found = expect(FP32, step(*FP16.work, *many))
    assert found is not None
    assert found.speedup == pytest.approx(10 / 5.002)
    assert "then the start of its operations takes longest" in describe_expectation(found, "fp32")
    slow = step(*FP32.work, row("float32", 0, 0, calls=20_000))
    found = expect(slow, step(*FP16.work, *many))
    assert found is not None
    assert found.speedup == pytest.approx(20_002 / 5_002)
    assert "fp32 takes longer to start its operations" in describe_expectation(found, "fp32")


def test_without_counts_or_rates_nothing_is_expected() -> None:
    assert expect(FP32, step()) is None
    assert find_step_floor(step(row("float32", 0, 0))) is None
    assert expect(replace(FP32, rates=Rates()), FP16) is None


def test_a_step_is_counted_in_each_precision() -> None:
    axes = {"model": ["dpn-small"], "precision": ["fp32", "bf16-amp"], "batch_size": [64]}
    fp32, bf16 = count_cases(grid({**axes, "device": ["cpu"]}))
    assert (fp32.error, bf16.error) == ("", "")
    rates = Rates({"float32": 1e11, "bfloat16": 2e11}, 1e10)
    found = expect(fp32.make_step(rates), bf16.make_step(rates))
    assert found is not None
    assert 1 < found.speedup <= 2
    (broken,) = count_cases([Case(model="nowhere:build", precision="fp32", device="cpu")])
    assert broken.work == ()
    assert "nowhere" in broken.error


@pytest.mark.slow
def test_a_step_is_counted_in_a_process_of_its_own() -> None:
    (fp32,) = count_model("dpn-small", 64, "cpu", ["fp32"])
    assert (fp32.precision, fp32.batch_size, fp32.error) == ("fp32", 64, "")
    assert sum(row.flop or 0 for row in fp32.work) > 1e9
    (late,) = count_model("dpn-small", 64, "cpu", ["fp32"], timeout_s=0.01)
    assert (late.work, late.error) == ((), "not counted within 0.01 s")


# -------------------------------------------------------------------------------- by the doctor


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--batch-size 64", "give --model too"),
        ("--model dpn92 --batch-size 0", "give a number of images"),
        ("--model dpn92 --batch-size auto", "give a number of images"),
    ],
)
def test_a_wrong_batch_size_is_one_line(
    flags: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(flags.split()) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


@pytest.fixture
def rated() -> Machine:
    """A recorded H200, with rates and counts made by hand."""
    machine = read_json(RECORDINGS / "healthy.json")
    rates = {"rate_float32": 5e13, "rate_float16": 7e14, "rate_copy": 4e12, "call_time_s": 4e-6}
    counted = (
        Counted("dpn92", "fp32", 512, "cuda", (row("float32", 6e12, 4e11),)),
        Counted("dpn92", "fp16", 512, "cuda", (row("float16", 6e12, 2e11),)),
        Counted("dpn92", "bf16", 512, "cuda", error="out of memory"),
    )
    return replace(
        machine,
        yardsticks={"cuda": Yardstick(rates, {"rate_float8": "no kernel"})},
        counted=counted,
    )


def test_the_doctor_tells_rates_beside_the_data_sheet(rated: Machine) -> None:
    said = describe_rates(rated.yardsticks["cuda"], "NVIDIA H200")
    assert said == (
        "large products float32 50 TFLOP/s (75 % of the data sheet's), "
        "float16 700 TFLOP/s (71 % of the data sheet's); large copies 4 TB/s; "
        "the smallest operation 4 µs"
    )
    told = {f.what: f.level for f in judge(rated) if f.topic == "rates"}
    assert told[f"measured now: {said}"] is Level.FINE
    assert told["rate float8 could not be measured: no kernel"] is Level.NOTE


def test_the_doctor_tells_what_to_expect(rated: Machine, tmp_path: Path) -> None:
    # 120 ms of arithmetic in fp32, and 50 ms of traffic in fp16
    said = [f.what for f in judge(rated) if f.topic == "expected"]
    assert said == [
        "dpn92, batch size 512, fp16: at most 2.4× over fp32, if both reach these rates: 0 % of "
        "fp32's least time is memory traffic, and 100 % of what remains",
        "dpn92, batch size 512, bf16: not counted: out of memory",
    ]
    (file := tmp_path / "facts.json").write_text(write_json(rated, judge(rated)))
    assert read_json(file) == rated


def test_a_wrong_variable_is_refused_before_a_sweep_opens_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECONDS, "long")
    out = tmp_path / "out"
    assert sweep(["--preset", "quick", "--device", "cpu", "--out", str(out)]) == 2
    assert "give seconds for each rate" in capsys.readouterr().err
    assert not out.exists()
