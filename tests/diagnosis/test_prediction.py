"""How long a case takes at least, told before it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.case import Case
from bench.diagnosis.breakdown import WARMUP_STEPS, predict_seconds, predict_step
from bench.diagnosis.step import Rates
from bench.fingerprint import examine
from bench.record import WorkRow
from bench.training.building import build_training
from bench.training.counting import Counter, count_flop, sketch_work
from bench.work import Kind, sum_kinds
from bench.workloads.images import Images

RATES = Rates({"float32": 1e12, "tfloat32": 2e12, "bfloat16": 1e10}, 1e9)
WORK = (
    WorkRow(Kind.CONVOLUTION, "", "float32", 9, 1e9, 1e3),
    WorkRow(Kind.ELEMENTWISE, "", "float32", 9, 0.0, 1e6),
)
CASE = Case(precision="fp32", batch_size=100)


@pytest.mark.parametrize(
    ("precision", "seconds"),
    [("fp32", 0.1 + 0.1), ("tf32", 0.05 + 0.1), ("bf16-amp", 10 + 0.05), ("fp16", None)],
)
def test_a_step_by_hand(precision: str, seconds: float | None) -> None:
    found = predict_step(replace(CASE, precision=precision), WORK, RATES)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_a_case_by_hand() -> None:
    def steps(case: Case) -> float | None:
        found = predict_seconds(case, WORK, RATES, 1050, 300)
        return None if found is None else round(found / 0.2, 6)

    assert steps(CASE) == WARMUP_STEPS + 11
    assert steps(replace(CASE, fraction=0.5)) == WARMUP_STEPS + 6
    assert steps(replace(CASE, steps=3)) == WARMUP_STEPS + 3
    assert steps(replace(CASE, epochs=2, evaluate=True)) == WARMUP_STEPS + 2 * (11 + 1)
    assert steps(replace(CASE, freeze="backbone")) is None
    assert predict_seconds(CASE, (), RATES, 1050) is None


def test_work_is_counted_without_computing_it() -> None:
    workload = Images("dpn-small")
    model = workload.build_model()
    sketched = {row.kind: row for row in sketch_work(model, workload)}
    assert all(parameter.is_meta for parameter in model.parameters())
    flop = sum(row.flop or 0.0 for row in sketched.values())
    assert flop == pytest.approx(count_flop(workload))
    training = build_training(replace(CASE, model="dpn-small", device="cpu"), workload, CPU)
    batch = workload.make_batch(64, CPU, torch.Generator().manual_seed(0))
    with Counter() as counter:
        found = workload.compute_loss(training.model, batch)
        found.loss.backward()
    for kind, work in sum_kinds(counter.work).items():
        if work.flop:
            assert sketched[kind].flop == pytest.approx(work.flop / 64), kind
    # on shapes alone torch divides some operations further, so that they move more
    bytes = sum(work.bytes for work in counter.work.values()) / 64
    assert 1 <= sum(row.bytes or 0.0 for row in sketched.values()) / bytes < 1.5


CPU = torch.device("cpu")


def test_what_looks_at_values_is_not_counted() -> None:
    assert examine(f"{__name__}:looks").work == ()
    assert sum(row.flop or 0.0 for row in examine("dpn-small").work) > 1e7


class Looks(torch.nn.Linear):
    """Linear on the pixels, and asks what they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x.flatten(1))
        return -y if y.sum().item() < 0 else y


def looks() -> torch.nn.Module:
    return Looks(3072, 10)
