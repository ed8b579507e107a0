"""The work of a network, sketched without computing it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.case import Case
from bench.fingerprint import examine_model
from bench.training.building import build_training
from bench.training.counting import Counter, count_flop, sketch_work
from bench.work import sum_kinds
from bench.workloads import Images

CASE = Case(precision="fp32", batch_size=100)


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
    assert examine_model(f"{__name__}:looks").work == ()
    assert sum(row.flop or 0.0 for row in examine_model("dpn-small").work) > 1e7


class Looks(torch.nn.Linear):
    """Linear on the pixels, and asks what they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x.flatten(1))
        return -y if y.sum().item() < 0 else y


def looks() -> torch.nn.Module:
    return Looks(3072, 10)
