"""What a device can do: measured, kept in the rows, held against other times, and expected of."""

from __future__ import annotations

import csv
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_for_tests import Capture, Patch
from test_gpu import GPU, FakeNvml

from bench.case import Case
from bench.compare.__main__ import main as compare
from bench.diagnosis.prediction import describe_expectation, expect, find_step_floor
from bench.diagnosis.rates import CALL, find_losses, write_losses, write_rate
from bench.diagnosis.rates import RATES as RATE_NAMES
from bench.diagnosis.step import Bound, Rates, Step
from bench.doctor.__main__ import main as doctor
from bench.doctor.__main__ import read_json, write_json
from bench.doctor.counts import Counted, count_cases, count_model
from bench.doctor.earlier import (
    describe_slowdown,
    expect_rates,
    forget,
    keep,
    read_earlier,
    recall,
    recall_rates,
)
from bench.doctor.judgement import Level, judge
from bench.doctor.machine import Machine, measure_machine
from bench.doctor.rates import SECONDS, check_rates, choose_seconds, describe_rates, measure_rates
from bench.environment.asking import DeviceAnswer, ProcessAnswer
from bench.environment.device import Platform
from bench.errors import UsageError
from bench.executors.subprocess import SubprocessExecutor
from bench.fingerprint import Fingerprint
from bench.gpu.cards import Card
from bench.gpu.device import Depth, Reading, Unreadable
from bench.gpu.nvml import open_device
from bench.gpu.peaks import list_peaks
from bench.grid import grid
from bench.precision import Arithmetic
from bench.processes import run_module
from bench.questions.notices import warn
from bench.record import Environment, Measurement, Outcome, Status, WorkRow, read_missing
from bench.study import summaries
from bench.study.sweeps import read_sweep
from bench.sweep.__main__ import main as sweep
from bench.text import read_clock
from bench.training.counting import Counter
from bench.training.yardstick import (
    FEWEST_TRIES,
    TRIES,
    Meter,
    Task,
    list_arithmetics,
    make_call,
    make_convolution,
    make_copy,
    make_product,
    measure,
    time_task,
    use_threads,
)
from bench.yardstick import Collapse, Tries, Yardstick, read_tries
from tests.planted.records import make_run, write_sweep

CPU = torch.device("cpu")
FORMATS = list_arithmetics(CPU)
RECORDINGS = Path(__file__).parent / "recordings"

# ------------------------------------------------------------------------------------- measured


@pytest.mark.parametrize("arithmetic", FORMATS)
def test_tasks_are_of_the_flop_they_are_said_to_be(arithmetic: Arithmetic) -> None:
    for task in (
        make_product(arithmetic, CPU, 64),
        *(make_convolution(arithmetic, CPU, window, channels=8, images=2) for window in (1, 3)),
    ):
        with Counter() as counter:
            task.action()
        assert {label.format for label in counter.work} == {arithmetic}
        assert sum(work.flop for work in counter.work.values()) == task.amount
    assert make_product(arithmetic, CPU, 64).amount == 2 * 64**3


def test_a_copy_reads_and_writes_and_a_call_is_one(monkeypatch: Patch) -> None:
    monkeypatch.setattr("bench.training.yardstick.COPIED_BYTES", {"cpu": 4096})
    works = []
    for task in (make_copy(CPU), make_call(CPU)):
        with Counter() as counter:
            task.action()
        works += [(work, task.amount) for work in counter.work.values()]
    (copied, moved), (called, calls) = works
    assert copied.bytes == moved == 2 * 4096
    assert called.calls == calls == 1


def test_what_fails_is_named_and_the_rest_is_measured(monkeypatch: Patch) -> None:
    def make(device: torch.device) -> None:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("bench.training.yardstick.make_copy", make)
    found = measure(CPU, 0.001)
    products = {f"rate_{name}{format}" for name in ("", "conv_") for format in FORMATS}
    assert found.rates.keys() == found.tries.keys() == products | {"call_time_s"}
    assert all(math.isfinite(rate) and rate > 0 for rate in found.rates.values())
    assert found.reasons == {"rate_copy": "RuntimeError: no memory"}


@dataclass
class Moments(Unreadable):
    """A device that is fast from one action to another, and a card that says when."""

    reason: str = ""
    first: float = 0
    last: float = math.inf
    done: int = 0

    @property
    def fast(self) -> bool:
        return self.first <= self.done <= self.last

    def make(self, size: int) -> Task:
        return Task(self.act, 1e6)

    def act(self) -> None:
        self.done += 1
        time.sleep(0.002 if self.fast else 0.1)

    def read(self, depth: Depth) -> Sequence[Reading]:
        clock, power = (1980, 512.0) if self.fast else (1365, 723.0)
        return (Reading(0, sm_clock_mhz=clock, power_w=power),)


def measure_moments(
    monkeypatch: Patch, expected: dict[str, float] | None = None, **moments: Moments
) -> Yardstick:
    """Measure what takes the time of these moments, by column."""
    meters = [
        Meter(column, device.make, CPU, 0.002, card=device) for column, device in moments.items()
    ]
    monkeypatch.setattr("bench.training.yardstick.list_meters", lambda *_: meters)
    return measure(CPU, 0.002 * TRIES["cpu"], expected)


def test_the_best_of_tries_counts_with_its_clock_and_power(monkeypatch: Patch) -> None:
    # the first two find the size; the next try is throttled, one is fast, the last is throttled
    found = measure_moments(monkeypatch, rate_float16=Moments(first=4, last=4))
    tries = found.tries["rate_float16"]
    assert (tries.clock_mhz, tries.power_w) == (1980, 512.0)
    assert tries.number >= FEWEST_TRIES
    assert 2e-3 <= 1e6 / found.rates["rate_float16"] < 0.1
    throttled = measure_moments(monkeypatch, rate_float16=Moments(first=math.inf))
    assert throttled.tries["rate_float16"].clock_mhz == 1365
    assert throttled.tries["rate_float16"].power_w == 723.0


@pytest.fixture
def renewed(monkeypatch: Patch) -> list[str]:
    """The columns that are measured again."""
    columns: list[str] = []

    def renew(meter: Meter, renew: Callable[[Meter], None] = Meter.renew) -> None:
        columns.append(meter.column)
        renew(meter)

    monkeypatch.setattr(Meter, "renew", renew)
    return columns


def test_what_falls_short_of_what_is_expected_is_measured_again(
    monkeypatch: Patch, renewed: list[str]
) -> None:
    def measure_two(expected: float) -> Yardstick:
        return measure_moments(
            monkeypatch,
            {"rate_float16": expected},
            # slow for all tries of the first time, those that find the size too
            rate_float16=Moments(first=3 + FEWEST_TRIES),
            rate_copy=Moments(),
        )

    slow = measure_two(1e6 / 1.0)
    assert renewed == []
    assert slow.tries["rate_float16"].number == FEWEST_TRIES
    found = measure_two(1e6 / 0.002)
    assert renewed == ["rate_float16"]
    assert found.tries["rate_float16"].number >= 2 * FEWEST_TRIES
    assert found.rates["rate_float16"] > slow.rates["rate_float16"]


def test_what_is_far_from_the_data_sheet_is_measured_again(
    monkeypatch: Patch, renewed: list[str]
) -> None:
    peaks = {"rate_float16": 1e30, "rate_float32": 1.0, "rate_copy": 1e30}
    monkeypatch.setattr("bench.training.yardstick.list_peaks", lambda gpu: peaks)
    measure_moments(monkeypatch, **{column: Moments() for column in peaks})
    assert renewed == ["rate_float16", "rate_copy"]


@pytest.mark.parametrize(("expected", "peak"), [(1e30, 1.0), (1.0, 1e30)])
def test_of_what_is_expected_and_the_data_sheet_s_half_the_more_counts(
    expected: float, peak: float, monkeypatch: Patch, renewed: list[str]
) -> None:
    monkeypatch.setattr("bench.training.yardstick.list_peaks", lambda gpu: {"rate_float16": peak})
    moments = {"rate_float16": Moments(), "rate_copy": Moments()}
    measure_moments(monkeypatch, {"rate_float16": expected}, **moments)
    assert renewed == ["rate_float16"]


def test_a_card_is_read_while_it_computes() -> None:
    card = open_device(GPU, FakeNvml())
    _, reading = time_task(make_call(CPU), CPU, 1, card)
    assert (reading.sm_clock_mhz, reading.power_w) == (1980, 76.5)
    card.close()


@pytest.fixture
def two_threads() -> Iterator[None]:
    with use_threads(2):
        yield


def collapse_for(tries: float, monkeypatch: Patch) -> Yardstick:
    """Measure where two threads wait for each other in so many products of float32."""
    done = 0

    def make(arithmetic: Arithmetic, device: torch.device, size: int) -> Task:
        def act() -> None:
            nonlocal done
            float32 = arithmetic is Arithmetic.FLOAT32 and torch.get_num_threads() > 1
            done += float32
            time.sleep(0.1 if float32 and done <= tries else 0.002)

        return Task(act, 1e6)

    for kind in ("product", "convolution", "copy"):
        monkeypatch.setattr(
            f"bench.training.yardstick.make_{kind}",
            make if kind == "product" else lambda *_: Task(lambda: time.sleep(1e-3), 1.0),
        )
    return measure(CPU, 0.05)


def test_a_collapsed_rate_is_not_kept(monkeypatch: Patch, two_threads: None) -> None:
    found = collapse_for(math.inf, monkeypatch)
    assert found.collapsed.keys() == {f"rate_{format}" for format in FORMATS}
    assert found.rates.keys() == found.tries.keys()
    assert found.rates.keys() >= {"rate_conv_float32", "rate_copy", "call_time_s"}
    assert not found.rates.keys() & found.collapsed.keys()
    (collapse,) = set(found.collapsed.values())
    assert collapse.threads == 2
    assert 2e-3 <= 1e6 / collapse.alone < 0.1 <= 1e6 / collapse.rate
    assert found.missing == dict.fromkeys(found.collapsed, str(collapse))


def test_what_collapses_for_a_moment_is_measured_again(
    monkeypatch: Patch, two_threads: None, renewed: list[str]
) -> None:
    found = collapse_for(2 + FEWEST_TRIES, monkeypatch)
    assert found.collapsed == {}
    assert found.rates["rate_float32"] > 1e6 / 0.1
    assert set(renewed) == {f"rate_{format}" for format in FORMATS}  # it speaks for the others too


def test_how_long_is_a_variable(monkeypatch: Patch) -> None:
    for text, seconds in (("", 0.1), ("0", 0.0), ("3.5", 3.5)):
        monkeypatch.setenv(SECONDS, text)
        assert choose_seconds("cpu") == seconds
    for text in ("soon", "-1", "61", "nan"):
        monkeypatch.setenv(SECONDS, text)
        with pytest.raises(UsageError, match="from 0 to 60"):
            choose_seconds("cpu")


def test_a_process_that_fails_gives_its_reason(monkeypatch: Patch) -> None:
    said, last = run_module("nowhere", timeout_s=60)
    assert (said, "No module named nowhere" in (last or "")) == ("", True)
    for why, reason in (("no device", "no device"), (None, "not measured within 120 s")):
        monkeypatch.setattr("bench.doctor.rates.run_module", lambda *_, why=why, **__: ("", why))
        assert measure_rates("cpu", 0.001) == Yardstick(reasons={"rates": reason})


# ------------------------------------------------------------------------------------ in a sweep

SWEEP = "--model dpn-small --dataset synthetic --batch-size 16 --fraction 0.002 --repeats 1"


def run_sweep(out: Path, *more: str) -> None:
    command = [*SWEEP.split(), *more, "--device", "cpu", "--out", str(out)]
    assert sweep(command) == 0


@pytest.fixture
def quick(monkeypatch: Patch, unreported: None) -> None:
    """Sweeps ask and train nothing: a step does a product of 1 MFLOP in 10 ms."""

    def examine(self: object, lane: object, devices: list[str], *_: object, **__: object) -> Any:
        answer = DeviceAnswer({"torch": "2.13.0", "torch_threads": 2})
        return ProcessAnswer(devices=dict.fromkeys(devices, answer), models=_Alike())

    times = {"epoch_time_s": 1.0, "measured_time_s": 1.0, "step_time_median_s": 0.01}
    work = [WorkRow("matmul", "mm", "float32", 1, 1e6, 1e3, 0.01)]
    answer = Outcome(Status.OK, measurement=Measurement(**times), work=work)
    monkeypatch.setattr(SubprocessExecutor, "examine", examine)
    monkeypatch.setattr(SubprocessExecutor, "run", lambda *_: deepcopy(answer))


class _Alike(dict[str, Fingerprint]):
    def __missing__(self, model: str) -> Fingerprint:
        return Fingerprint("p", "l", "s", 10)


def answer_rates(
    monkeypatch: Patch, answer: Callable[[int], Yardstick]
) -> list[Mapping[str, float]]:
    """Have sweeps measure what ``answer`` says of the nth time; what each time was expected."""
    asked: list[Mapping[str, float]] = []

    def rate(
        self: object, lane: object, device: str, seconds: float, expected: Mapping[str, float]
    ) -> Yardstick:
        asked.append(expected)
        return answer(len(asked))

    monkeypatch.setenv(SECONDS, "0.01")
    monkeypatch.setattr(SubprocessExecutor, "rate", rate)
    return asked


def read_rows(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "records.csv").read_text().splitlines()))


@pytest.mark.usefixtures("quick")
def test_a_sweep_measures_once_and_only_where_it_runs_something(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
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
    assert list(read_tries(first["rate_tries"])) == [n for n in (*RATE_NAMES, CALL) if first[n]]

    run_sweep(tmp_path / "a", "--precision", "fp32", "bf16-amp")  # nothing is left to run
    run_sweep(tmp_path / "b", "--executor", "fake")
    run_sweep(tmp_path / "a", "--precision", "bf16")  # it goes on at once
    assert "measuring" not in capsys.readouterr().err
    assert read_rows(tmp_path / "a")[-1]["rate_copy"] == first["rate_copy"]


@pytest.mark.usefixtures("quick")
def test_a_collapsed_yardstick_is_not_written(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    kept = Yardstick({"rate_copy": 5e9}, {}, {"rate_copy": Tries(24)})
    lost = replace(kept, collapsed={"rate_float32": COLLAPSE})
    asked = answer_rates(monkeypatch, lambda time: lost if time < 3 else kept)
    run_sweep(tmp_path / "a", "--precision", "fp32")
    assert "warning: 2 threads reach 0.34 GFLOP/s in float32" in capsys.readouterr().err
    (row,) = read_rows(tmp_path / "a")
    assert (row["rate_float32"], row["rate_copy"]) == ("", "5000000000")
    assert row["rate_tries"] == "rate_copy 24"
    assert read_missing(row["missing"])["rate_float32"] == str(COLLAPSE)
    run_sweep(tmp_path / "a", "--precision", "bf16-amp")  # it may have passed by now
    assert len(asked) == 2
    # another sweep beside it expects what that one reached
    run_sweep(tmp_path / "b", "--precision", "fp32")
    assert asked[-1] == {"rate_copy": 5e9}


def test_the_better_of_two_measurements_counts_with_the_tries_of_both() -> None:
    before = Yardstick(
        {"rate_copy": 5e9, "rate_float32": 1e12, "call_time_s": 2e-6},
        tries={"rate_copy": Tries(8), "rate_float32": Tries(8, 1980), "call_time_s": Tries(8)},
    )
    now = Yardstick(
        {"rate_copy": 6e9, "rate_float32": 9e11, "rate_float16": 2e12, "call_time_s": 1e-6},
        tries={name: Tries(16, 1365) for name in (*before.rates, "rate_float16")},
    )
    for found in (now.improve(before), before.improve(now)):
        best = {"rate_copy": 6e9, "rate_float32": 1e12, "rate_float16": 2e12, "call_time_s": 1e-6}
        assert found.rates == best
        assert found.tries == {
            "rate_copy": Tries(24, 1365),
            "rate_float32": Tries(24, 1980),
            "rate_float16": Tries(16, 1365),
            "call_time_s": Tries(24, 1365),
        }


@pytest.mark.usefixtures("quick")
def test_a_step_that_beats_the_rates_has_them_measured_again(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def answer(time: int) -> Yardstick:
        float32, copy = (1e4, 1e12) if time == 1 else (1e12, 1e3)
        rates = {"rate_float32": float32, "rate_copy": copy}
        tries = dict.fromkeys(rates, Tries(24))
        return Yardstick(rates, tries=tries, measured_at=read_clock())

    asked = answer_rates(monkeypatch, answer)
    monkeypatch.setattr("bench.sweep.loop.recall_rates", lambda *_: Yardstick())
    run_sweep(tmp_path / "a", "--precision", "fp32", "--seed", "0", "1", "2")
    said = capsys.readouterr().err
    assert said.count("note: float32 products reached ") == 1
    assert said.count("measuring what the CPU can do now") == len(asked) == 2
    assert asked[0] == {}
    assert asked[1]["rate_float32"] > 1e4
    before, *after = read_rows(tmp_path / "a")
    assert (before["rate_float32"], before["rate_copy"]) == ("10000", "1000000000000")
    for row in after:
        assert (row["rate_float32"], row["rate_copy"]) == ("1000000000000",) * 2
        assert row["rate_tries"] == "rate_float32 48; rate_copy 48"
    run_sweep(tmp_path / "b", "--precision", "fp32")
    assert len(asked) == 3, "what was beaten is not kept for another sweep"


# ------------------------------------------------------------------------- once a machine and hour


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: Patch) -> None:
    """What is kept of this machine is of one test."""
    monkeypatch.setattr("bench.doctor.earlier.find_cache", lambda: tmp_path / "cache")


def measured(**values: Any) -> Yardstick:
    rates = {"rate_float32": 1e12, "rate_copy": 5e9, "call_time_s": 1e-6}
    tries = {name: Tries(24, 1980.0) for name in rates}
    return Yardstick(**{"rates": rates, "tries": tries, "measured_at": read_clock(), **values})


def test_what_was_measured_is_kept_as_it_was() -> None:
    found = measured()
    keep(found, here(), 0.2)
    assert recall(here(), 0.2) == found
    keep(measured(rates={"rate_float32": 2e12}), here(), 0.2)
    assert recall(here(), 0.2).rates == {"rate_float32": 2e12}
    forget(here())
    forget(here())
    assert recall(here(), 0.2) == Yardstick()


def test_rates_are_those_of_one_machine() -> None:
    keep(measured(), here(), 0.2)
    others = {"torch": "2.14.0", "driver": "590.1", "gpu": "NVIDIA Other", "gpu_uuid": "GPU-1"}
    others |= {"cpu": "another", "host": "another", "code": "0123", "variables": "A=1"}
    for name, value in {**others, "torch_threads": 1}.items():
        assert recall(here(**{name: value}), 0.2) == Yardstick(), name


def test_rates_are_those_of_one_power_limit_and_way_to_measure(monkeypatch: Patch) -> None:
    def limit(watts: float) -> None:
        card = Card("GPU-1", "NVIDIA Imaginary", power_limit_w=watts, names=("GPU-1",))
        monkeypatch.setattr("bench.doctor.earlier.find_cards", lambda: ([card], ""))

    limit(700.0)
    keep(measured(), here(gpu_uuid="GPU-1"), 0.2)
    assert recall(here(gpu_uuid="GPU-1"), 0.2).rates
    assert not recall(here(gpu_uuid="GPU-1"), 0.4).rates
    assert not recall(here(gpu_uuid="GPU-1"), 0.2, (0, 1)).rates, "of a lane with cores of its own"
    limit(350.0)
    assert not recall(here(gpu_uuid="GPU-1"), 0.2).rates


@pytest.mark.parametrize(
    "found",
    [
        measured(rates={}),
        measured(reasons={"rate_float16": "out of memory"}),
        measured(collapsed={"rate_float32": Collapse(1e8, 5e10, 2)}),
    ],
)
def test_what_may_be_better_next_time_is_not_kept(found: Yardstick) -> None:
    """Nor what was measured before: since then something has changed."""
    keep(measured(), here(), 0.2)
    keep(found, here(), 0.2)
    assert recall(here(), 0.2) == Yardstick()


@pytest.mark.parametrize("at", ["", "soon", "2026-11-20T10:00:00", "3026-11-20T10:00:00Z"])
def test_rates_stand_for_an_hour(at: str) -> None:
    keep(measured(measured_at=at), here(), 0.2)
    assert recall(here(), 0.2) == Yardstick()
    for minutes, kept in ((59, True), (61, False)):
        then = datetime.now(UTC) - timedelta(minutes=minutes)
        keep(measured(measured_at=then.isoformat()), here(), 0.2)
        assert bool(recall(here(), 0.2).rates) is kept


def test_a_file_of_rates_that_cannot_be_read_is_measured_again(tmp_path: Path) -> None:
    keep(measured(), here(), 0.2)
    (file,) = (tmp_path / "cache" / "rates").iterdir()
    for text in ("", "[]", "{}", '{"of": 1, "yardstick": {"rates": 3}}', file.read_text()[:-9]):
        file.write_text(text)
        assert recall(here(), 0.2) == Yardstick()


@pytest.mark.usefixtures("quick")
def test_the_next_sweep_takes_the_rates_of_this_one(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    found = measured()
    asked = answer_rates(monkeypatch, lambda time: found)
    run_sweep(tmp_path / "a", "--precision", "fp32")
    run_sweep(tmp_path / "b", "--precision", "fp32")
    said = capsys.readouterr().err
    assert said.count("measuring what the CPU can do now") == len(asked) == 1
    words = " ".join(said.split())
    assert re.search(r"as measured \d+ min ago; python -m bench.doctor measures it again", words)
    (one,), (other,) = read_rows(tmp_path / "a"), read_rows(tmp_path / "b")
    names = ("rate_float32", "rate_copy", "call_time_s", "rate_tries", "rates_at")
    assert [one[name] for name in names] == [other[name] for name in names]
    assert other["rates_at"] == found.measured_at


@pytest.mark.usefixtures("quick")
def test_rates_that_are_less_than_in_another_sweep_are_not_kept_for_a_third(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Whatever holds the machine back may be gone by then."""

    def answer(time: int) -> Yardstick:
        return measured(rates={"rate_float32": 2e12 if time == 1 else 1e12, "rate_copy": 5e9})

    asked = answer_rates(monkeypatch, answer)
    run_sweep(tmp_path / "a", "--precision", "fp32")
    shutil.rmtree(tmp_path / "cache")
    for name in ("b", "c"):
        run_sweep(tmp_path / name, "--precision", "fp32")
    assert len(asked) == 3


def test_the_doctor_measures_anew_and_keeps_that(tmp_path: Path, monkeypatch: Patch) -> None:
    device = DeviceAnswer({**DEVICE, "torch": "2.13.0"})
    recorded = read_json(next((Path(__file__).parent / "recordings").glob("*cpu*.json")))
    machine = replace(recorded, devices={"cpu": device}, models={}, results=str(tmp_path))
    kept_for = ProcessAnswer(devices=machine.devices).platform("cpu").environment
    rates = [2e12, 1e12]

    def measure(*_: object, **__: object) -> Yardstick:
        return measured(rates={"rate_float32": rates.pop(), "rate_copy": 1e9})

    monkeypatch.setenv(SECONDS, "0.2")
    monkeypatch.setattr("bench.doctor.machine.measure_rates", measure)
    for rate in (1e12, 2e12):
        measure_machine(machine, 128)
        assert recall(kept_for, 0.2).rates["rate_float32"] == rate, "as a sweep asks"
    # it was faster in a sweep: something holds it back now, and may be gone soon
    host = {"cpu": kept_for.cpu, "variables": kept_for.variables}
    write_row(tmp_path / "faster", rate_float32=4e12, rate_copy=1e9, **host)
    rates.append(2e12)
    assert measure_machine(machine, 128).slower
    assert recall(kept_for, 0.2) == Yardstick()


# ------------------------------------------------------------------------------- at another time


def test_what_is_lost_is_named_with_its_share() -> None:
    before = {"rate_float32": 100.0, "rate_float16": 100.0, "rate_bfloat16": 9.0, "rate_copy": 10.0}
    now = {"rate_float32": 91.0, "rate_float16": 60.0, "rate_bfloat16": math.nan, "rate_copy": 8.0}
    losses = find_losses(now, before)
    assert list(losses) == ["rate_float16", "rate_copy"]
    assert write_losses(losses) == "float16 products −40 %, copies −20 %"
    assert find_losses(before, now) == {}


def test_units_are_those_of_the_column() -> None:
    found = {"rate_float16": 612.3e12, "rate_copy": 4.31e12, "call_time_s": 3.14e-6}
    assert [write_rate(*one) for one in found.items()] == ["612 TFLOP/s", "4.31 TB/s", "3.1 µs"]


FASTER: dict[str, Any] = {"rate_float32": 5e10, "rate_copy": 9e9, "call_time_s": 1e-6}
SLOWER: dict[str, Any] = {"rate_float32": 3e10, "rate_copy": 8.9e9, "call_time_s": 1e-6}
DEVICE: dict[str, Any] = {"gpu": None, "driver": None, "cpu": "C", "torch_threads": 2}


def write_row(folder: Path, **values: Any) -> Path:
    """A sweep of one row."""
    times = {"epoch_time_s": 1.0, "measured_time_s": 1.0, "measured_steps": 9}
    return write_sweep(folder, [make_run(Case(device="cpu"), **{**DEVICE, **times, **values})])


@pytest.fixture
def sweeps(tmp_path: Path) -> Path:
    """A folder with two sweeps of one machine, of which the later gave less."""
    write_row(tmp_path / "faster", **FASTER)
    write_row(tmp_path / "slower", **SLOWER)
    return tmp_path


def here(**values: Any) -> Environment:
    return Environment(**{**DEVICE, "torch": "2.13.0", **values})


def find_platform(halves: bool = True, **values: Any) -> Platform:
    return Platform(here(**values), halves, halves)


def test_a_sweep_warns_of_a_device_slower_than_in_another(sweeps: Path) -> None:
    earlier = read_earlier(find_platform(), sweeps)
    for times in (earlier, earlier[::-1]):
        assert expect_rates(times) == {"rate_float32": 5e10, "rate_copy": 9e9}
    said = describe_slowdown(SLOWER, earlier)
    assert said.startswith(f"less than a CPU of this name in {sweeps / 'faster'} (")
    assert said.endswith("): float32 products −40 %")
    assert describe_slowdown(FASTER, earlier) == ""
    # of another device, or torch, nothing is to be expected
    assert read_earlier(find_platform(cpu="D"), sweeps) == []
    assert read_earlier(find_platform(torch_threads=1), sweeps) == []
    (sweeps / "faster" / "records.csv").write_text("not records")
    assert describe_slowdown(SLOWER, read_earlier(find_platform(), sweeps)) == ""


def rate_halves(share: float) -> dict[str, float]:
    return {f"rate_{half}": share * SLOWER["rate_float32"] for half in ("float16", "bfloat16")}


def test_a_cpu_that_computes_halves_otherwise_is_another(tmp_path: Path) -> None:
    """Virtual machines give unlike CPUs one name: one with AMX, and one without."""
    native, emulated, unclear = (rate_halves(share) for share in (3.0, 0.02, 0.5))
    for name, halves in (("native", native), ("emulated", emulated), ("unclear", unclear)):
        write_row(tmp_path / name, **{**FASTER, **halves})

    def find(halves: bool, **values: Any) -> set[str]:
        return {one.folder.name for one in read_earlier(find_platform(halves, **values), tmp_path)}

    assert find(True) == {"native", "unclear"}
    assert find(False) == {"emulated", "unclear"}
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}.000Z"
    fresh = write_row(tmp_path / "fresh", **FASTER, **native, finished_at=now)
    assert recall_rates(find_platform(True), fresh).rates
    assert not recall_rates(find_platform(False), fresh).rates
    # a card is what it says
    for name, halves in (("native", native), ("emulated", emulated)):
        write_row(tmp_path / "card" / name, **{**FASTER, **halves, "gpu": "G"})
    cards = read_earlier(find_platform(False, gpu="G"), tmp_path / "card")
    assert {one.folder.name for one in cards} == {"native", "emulated"}
    assert describe_slowdown(SLOWER, cards).startswith(f"less than in {tmp_path / 'card'}")
    # the same of two sweeps in a report
    both = [tmp_path / name for name in ("native", "emulated")]
    assert list_slower(*both) == []
    (said,) = list_slower(*(tmp_path / "card" / folder.name for folder in both))
    assert "float16 products −99 %" in said
    assert "its clocks or its power limit is between them. Run" in said


def test_a_cpu_whose_instructions_are_not_told_is_no_other(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("bench.environment.device.read_cpu_flags", frozenset)
    write_row(tmp_path / "emulated", **{**FASTER, **rate_halves(0.02)})
    assert len(read_earlier(find_platform(halves=True), tmp_path)) == 1


def test_a_sweep_that_goes_on_soon_keeps_its_rates(sweeps: Path) -> None:
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}.000Z"
    tries = {"rate_tries": "rate_float32 48; rate_copy 3"}
    kept = write_row(sweeps / "kept", **FASTER, **tries, finished_at=now)
    assert recall_rates(find_platform(), kept).columns == FASTER | tries | {"rates_at": None}
    none = Yardstick()
    assert recall_rates(find_platform(gpu_uuid="GPU-1"), kept) == none
    assert recall_rates(find_platform(torch="2.14"), kept) == none
    assert recall_rates(find_platform(), sweeps / "nowhere") == none
    assert recall_rates(find_platform(), sweeps / "faster") == none  # of another day
    collapsed = {**FASTER, "rate_float32": None, "finished_at": now}
    assert recall_rates(find_platform(), write_row(sweeps / "collapsed", **collapsed)) == none


def list_slower(*folders: Path) -> list[str]:
    rows = summaries.read([read_sweep(folder) for folder in folders])
    notices = warn(rows, summaries.summarize(summaries.latest(rows)))
    return [notice.text for notice in notices if notice.label == "Slower device"]


def test_a_report_names_the_slower_of_two_times(sweeps: Path) -> None:
    (said,) = list_slower(sweeps / "faster", sweeps / "slower")
    assert said.startswith("C gave less in slower (")
    assert "): float32 products −40 %. What else used it" in said
    assert "is between them, or it was another CPU of this name. Run" in said
    assert list_slower(sweeps / "faster") == []


@pytest.mark.parametrize(("lane", "told"), [("cpu0", True), ("cpu1", False)])
def test_two_lanes_are_not_one_device_at_two_times(lane: str, told: bool, tmp_path: Path) -> None:
    """How they differ, their anchors tell."""
    write_row(tmp_path, lane="cpu0", **FASTER)
    write_row(tmp_path, lane=lane, repeat=2, **SLOWER)
    assert bool(list_slower(tmp_path)) is told


def test_compare_tells_rates_that_differ(sweeps: Path, capsys: Capture) -> None:
    assert compare([str(sweeps / "faster"), str(sweeps / "slower"), "--full"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "rate of" in line]
    assert line.split() == ["rate", "of", "float32", "products", "50", "GFLOP/s", "30", "GFLOP/s"]
    # where one side did not measure them, nothing is told
    write_row(sweeps / "unknown")
    assert compare([str(sweeps / "unknown"), str(sweeps / "slower"), "--full"]) == 0
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
    assert found.speedup == pytest.approx(10 / 3.5)
    assert found.a == pytest.approx({Bound.COMPUTE: 6e-3, Bound.MEMORY: 4e-3})
    assert describe_expectation(found, "fp32") == (
        "about 2.9× over fp32, were both to run at these rates: 40 % of fp32's least time is "
        "memory traffic, and 57 % of what remains"
    )


def test_starting_operations_may_be_what_limits() -> None:
    many = [row("float16", 0, 0, calls=5000)]  # 5 ms
    found = expect(FP32, step(*FP16.work, *many))
    assert found.speedup == pytest.approx(10 / 5.002)
    assert "then the start of its operations takes longest" in describe_expectation(found, "fp32")
    slow = step(*FP32.work, row("float32", 0, 0, calls=20_000))
    found = expect(slow, step(*FP16.work, *many))
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
    assert 1 < found.speedup <= 2
    (broken,) = count_cases([Case(model="nowhere:build", precision="fp32", device="cpu")])
    assert broken.work == ()
    assert "nowhere" in broken.error


def test_a_step_is_counted_in_a_process_of_its_own() -> None:
    model = "tests.models_for_tests:good"
    (fp32,) = count_model(model, 64, "cpu", ["fp32"])
    assert (fp32.precision, fp32.batch_size, fp32.error) == ("fp32", 64, "")
    assert sum(row.flop or 0 for row in fp32.work) > 64 * 3e4
    (late,) = count_model(model, 64, "cpu", ["fp32"], timeout_s=0.01)
    assert (late.work, late.error) == ((), "not counted within 0.01 s")


# -------------------------------------------------------------------------------- by the doctor


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--batch-size 64", "give --model too"),
        ("--model dpn92 --batch-size 0", "give a whole number of at least 1"),
    ],
)
def test_a_wrong_batch_size_is_one_line(flags: str, why: str, capsys: Capture) -> None:
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
    yardsticks = {"cuda": Yardstick(rates, {"rate_float8": "no kernel"})}
    return replace(machine, yardsticks=yardsticks, counted=counted)


def test_the_doctor_tells_rates_beside_the_data_sheet(rated: Machine) -> None:
    said = describe_rates(rated.yardsticks["cuda"], "NVIDIA H200")
    assert said == (
        "large products float32 50 TFLOP/s (75 % of the data sheet's), "
        "float16 700 TFLOP/s (71 % of the data sheet's); "
        "large copies 4 TB/s (83 % of the data sheet's); "
        "the smallest operation 4 µs"
    )
    told = {f.what: f.level for f in judge(rated) if f.topic == "rates"}
    assert told[f"measured now: {said}"] is Level.FINE
    assert told["rate float8 could not be measured: no kernel"] is Level.NOTE


def test_the_doctor_says_of_each_precision_what_it_expects_or_why_not(rated: Machine) -> None:
    def judge_model(machine: Machine) -> list[str]:
        return [f.what.removeprefix("dpn92, batch size 512, ") for f in judge(machine)
                if f.topic == "expected"]  # fmt: skip

    fp16, bf16 = judge_model(rated)
    assert fp16.startswith("fp16: about 2.4× over fp32")
    assert bf16 == "bf16: not counted: out of memory"
    rates = {"rate_float32": 5e13, "rate_copy": 4e12}
    unrated = replace(rated, yardsticks={"cuda": Yardstick(rates)})
    unknown = "fp16: not estimated, because a rate that it needs was not measured"
    assert judge_model(unrated) == [unknown, bf16]


COLLAPSE = Collapse(3.4e8, 9.5e10, 2)


def test_the_doctor_tells_of_a_collapse_and_how_to_mend_it(tmp_path: Path) -> None:
    machine = read_json(RECORDINGS / "cpu-only.json")
    lost = dict.fromkeys(["rate_float32", "rate_bfloat16"], COLLAPSE)
    found = Yardstick({"rate_copy": 5e9}, {}, {"rate_copy": Tries(3)}, lost)
    machine = replace(machine, yardsticks={"cpu": found}, slower="less than in results/a: copies")
    collapsed, slower = (f for f in judge(machine) if f.topic == "rates" and f.level > Level.FINE)
    assert collapsed.level is Level.UNBELIEVABLE
    assert collapsed.what == (
        "2 threads reach 0.34 GFLOP/s in float32, where one of them reaches 95 GFLOP/s: no rate of "
        "float32 products, bfloat16 products is kept"
    )
    assert "top" in collapsed.fix
    assert (slower.level, slower.what) == (Level.NOTE, f"measured now: {machine.slower}")
    (file := tmp_path / "facts.json").write_text(write_json(machine, judge(machine)))
    assert read_json(file) == machine


def test_the_doctor_tells_how_a_card_was_held_back() -> None:
    throttled = Yardstick(
        {"rate_float16": 3e14, "rate_bfloat16": 7e14},
        tries={"rate_float16": Tries(16, 1065, 701.2), "rate_bfloat16": Tries(8, 1980, 690.0)},
    )
    said = describe_rates(throttled, "NVIDIA H200")
    assert said == (
        "large products float16 300 TFLOP/s (30 % of the data sheet's, 1065 MHz), "
        "bfloat16 700 TFLOP/s (71 % of the data sheet's, 1980 MHz)"
    )
    ((what, fix),) = check_rates(throttled, "NVIDIA H200")
    assert what == (
        "float16 products reach 30 % of the data sheet's, in the best of 16 tries, at 1065 MHz"
    )
    assert fix.startswith("nvidia-smi -q")
    assert list(check_rates(throttled, None)) == []
    ((what, _),) = check_rates(Yardstick({"rate_copy": 0.3e12}), "NVIDIA H100 80GB HBM3")
    assert what == "copies reach 9 % of the data sheet's, in the best of 1 tries"


def test_a_rate_above_the_data_sheet_is_doubted_and_not_told() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    wrong = {"rate_copy": 5e12, "rate_float16": 1.6e15}
    found = Yardstick({**wrong, "rate_float32": 51e12}, tries={"rate_copy": Tries(8, 1980)})
    assert describe_rates(found, h100).startswith("large products float32 51 TFLOP/s (76 %")
    assert not {"copies", "float16"} & set(describe_rates(found, h100).split())
    doubts = [what for what, _ in check_rates(found, h100)]
    assert [what.partition(",")[0] for what in doubts] == [
        "float16 products would be above the data sheet's",
        "copies would be above the data sheet's",
    ]
    assert "5 TB/s" in describe_rates(found, "Card 9")
    assert list(check_rates(found, "Card 9")) == []
    # of two measurements it is never the better
    sound = Yardstick({"rate_copy": 3e12}, tries={"rate_copy": Tries(8)})
    wrong_copy = Yardstick({"rate_copy": 5e12}, tries={"rate_copy": Tries(8)})
    for one, other in ((sound, wrong_copy), (wrong_copy, sound)):
        assert one.improve(other, list_peaks(h100)).rates == {"rate_copy": 3e12}
        assert one.improve(other).rates == {"rate_copy": 5e12}


def test_the_doctor_tells_what_to_expect(rated: Machine, tmp_path: Path) -> None:
    # 120 ms of arithmetic in fp32, and 50 ms of traffic in fp16
    said = [f.what for f in judge(rated) if f.topic == "expected"]
    assert said == [
        "dpn92, batch size 512, fp16: about 2.4× over fp32, were both to run at these rates: 0 % "
        "of fp32's least time is memory traffic, and 100 % of what remains",
        "dpn92, batch size 512, bf16: not counted: out of memory",
    ]
    (file := tmp_path / "facts.json").write_text(write_json(rated, judge(rated)))
    assert read_json(file) == rated


def test_a_wrong_variable_is_refused_before_a_sweep_opens_its_folder(
    monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setenv(SECONDS, "long")
    out = tmp_path / "out"
    assert sweep(["--preset", "quick", "--device", "cpu", "--out", str(out)]) == 2
    assert "give seconds for each rate" in capsys.readouterr().err
    assert not out.exists()
