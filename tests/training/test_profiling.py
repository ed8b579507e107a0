"""Steps under torch's profiler: what takes the time of networks that are made to take it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.networks.workloads import Workload
from bench.profile.timeline import TimedOperations, Timeline
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.record import Outcome
from bench.schema.work import Label, Work, WorkKind
from bench.sweep.__main__ import main as sweep
from bench.sweep.options import parse_arguments, plan_cases
from bench.training import profiling
from bench.training.counting import join_work
from bench.training.loop import Training
from bench.training.profiling import profile_step
from bench.workers import measurement
from bench.workers.preparation import open_supply
from tests.pytest_for_tests import Capture, Patch
from tests.training_for_tests import CPU, run_case

WIDTH, LAYERS, ITEMS = 512, 6, 512
TRIES = 5  # a busy machine may stop a step anywhere
TINY = "loads_for_tests:Loads"


class Products(nn.Module):
    """Nothing but large matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(LAYERS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights.unbind():
            x = x @ weight
        return x


class Planted(Workload):
    """A network whose work is known, on vectors; with ``nap_s`` each batch is long in coming."""

    samples = 64 * ITEMS

    def __init__(self, nap_s: float = 0.0) -> None:
        self.nap_s, self.slept = nap_s, list[float]()

    def build_model(self) -> nn.Module:
        return Products()

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        begun = time.perf_counter()
        time.sleep(self.nap_s)
        self.slept.append(time.perf_counter() - begun)
        return (torch.ones(size, WIDTH),)

    def compute_loss(self, network: Any, batch: Any) -> Tensor:
        return network(*batch).mean()


def run(workload: Workload, batch: int = ITEMS, **settings: Any) -> Timeline:
    (case,) = grid({"workload": [TINY], "device": ["cpu"], "batch_size": [batch]})
    case = replace(case, **settings)
    training = Training(case, workload.build_model(), CPU, workload)
    return profile_step(training, open_supply(case, workload, CPU), step_s=1.0, trace=None)


def test_the_kind_of_work_that_is_planted_is_found() -> None:
    # a busy machine may take the core away within one of the few other operations
    for _ in range(3):
        line = run(Planted())
        found: dict[WorkKind, float] = {}
        for label, timed in line.work.items():
            found[label.kind] = found.get(label.kind, 0.0) + timed.time_s / line.busy_s
        if max(found, key=found.__getitem__) is WorkKind.MATMUL:
            break
    assert max(found, key=found.__getitem__) is WorkKind.MATMUL
    calls = sum(timed.calls for label, timed in line.work.items() if label.kind is WorkKind.MATMUL)
    assert calls == 3 * LAYERS - 1, "of the first layer's input there is no gradient"
    assert sum(found.values()) == pytest.approx(1)
    assert WorkKind.OTHER not in found


def test_a_sleeping_loader_is_waited_for() -> None:
    errors = []
    for _ in range(TRIES):
        workload = Planted(nap_s=0.1)
        line = run(workload)
        assert len(workload.slept) == 1 + line.steps, "the profiler starts in a step of its own"
        slept = sum(workload.slept[-line.steps :]) / line.steps
        errors.append(abs(line.input_wait_s - slept) / line.step_s)
        assert line.input_wait_s + line.busy_s <= line.step_s
    assert min(errors) <= 0.05


def test_a_batch_may_be_larger_than_the_data() -> None:
    """Without a full batch it would look for one for ever."""
    workload = Planted()
    workload.samples = ITEMS // 2
    assert run(workload).steps == 2


@pytest.fixture(scope="module")
def found() -> Outcome:
    return run_case(tiny(profile=True))


def tiny(**settings: Any) -> Case:
    (case,) = grid({"workload": [TINY], "device": ["cpu"], "batch_size": [16]})
    return replace(case, steps=4, **settings)


def test_a_case_holds_what_was_profiled(found: Outcome) -> None:
    m = found.measurement
    assert m.profiled_steps == profiling.MOST
    assert m.profiled_step_s
    assert m.busy_s
    assert m.input_wait_s is not None
    assert m.sync_wait_s == 0
    assert m.busy_s == pytest.approx(sum(row.time_s or 0 for row in found.work))
    assert [row.exclusive_s for row in found.work] == [row.time_s for row in found.work]
    products = [row for row in found.work if row.kind == WorkKind.MATMUL]
    assert [row.operation for row in products] == ["addmm", "mm"]
    assert all(row.flop and row.bytes and row.time_s for row in products)
    # counted, and of no list of tensors: each has its time
    assert [row.operation for row in found.work if row.time_s is None and row.bytes] == []


def test_a_profile_that_fails_costs_only_itself(monkeypatch: Patch) -> None:
    def fail(*_: object) -> Timeline:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(measurement, "profile_step", fail)
    found = run_case(tiny(profile=True))
    assert found.missing["busy_s"] == "RuntimeError: no CUPTI"
    assert found.measurement.busy_s is None
    assert found.measurement.step_bytes
    assert found.work


def test_time_joins_what_was_counted() -> None:
    """Exactly; or divided over formats, where the trace knows none; or in a row of its own."""
    mm, half = Label(WorkKind.MATMUL, "mm", "float32"), Label(WorkKind.MATMUL, "mm", "float16")
    cats = [Label(WorkKind.CONCATENATION, "cat", format) for format in ("float32", "float16")]
    counted = {mm: Work(2, 8.0, 4.0), cats[0]: Work(1, 0.0, 30.0), cats[1]: Work(1, 0.0, 10.0)}
    timed = {
        mm: TimedOperations(2, 5.0, 4.0, {"gemm_nn": 0.3, "gemm_tn": 4.7}),
        half: TimedOperations(1.4, 3.0, 3.0, {f"part_{i}": 0.3 for i in range(10)}),
        Label(WorkKind.CONCATENATION, "cat"): TimedOperations(2, 8.0, 4.0, {"CatArray": 8.0}),
        Label(WorkKind.OTHER, "mystery"): TimedOperations(0.3, 1.0, 1.0),
    }
    rows = {(r.operation, r.format): r for r in join_work(counted, timed)}
    assert {key: (row.time_s, row.exclusive_s) for key, row in rows.items()} == {
        ("mm", "float32"): (5.0, 4.0),
        ("cat", "float32"): (6.0, 3.0),
        ("cat", "float16"): (2.0, 1.0),
        ("mm", "float16"): (3.0, 3.0),
        ("mystery", ""): (1.0, 1.0),
    }
    assert [row.kernels for row in rows.values()] == [
        "4.7 gemm_tn; 0.3 gemm_nn",
        "6 CatArray",
        "2 CatArray",
        "0.3 part_0; 0.3 part_1; 0.3 part_2; 0.3 part_3; 0.3 part_4; 0.3 part_5; 1.2 4 others",
        "",
    ]
    assert timed[mm].time_s == 5.0, "what was timed stays as it was"
    assert (rows["mm", "float32"].flop, rows["mm", "float16"].flop) == (8.0, None)
    assert [rows[key].calls for key in (("mm", "float16"), ("mystery", ""))] == [1, 1]


def test_a_trace_needs_a_profile(capsys: Capture) -> None:
    axes = {case.profile for case in plan_cases(parse_arguments(["--trace"])).cases}
    assert axes == {True}
    both = parse_arguments(["--trace", "--profile", "on", "off"])
    assert {case.profile for case in plan_cases(both).cases} == {True, False}
    assert sweep(["--trace", "--profile", "off"]) == 2
    assert "leave out --profile off" in capsys.readouterr().err
