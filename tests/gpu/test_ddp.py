"""A real card: one process of a group trains as one alone does, over NCCL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.machine.nvml import find_cards
from bench.networks.data import DatasetInfo
from bench.schema.case import Case
from bench.schema.record import Outcome, Status
from bench.workers.executors import Settings
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Job

CARDS, WHY = find_cards()
pytestmark = [
    pytest.mark.gpu,
    # a case in three workers takes 17 s on an H100; unmarked, these came before all others there
    pytest.mark.slow,
    pytest.mark.skipif(not CARDS, reason=f"no CUDA device: {WHY}"),
]

CASE = Case(
    model="dpn-small", dataset="synthetic", device="cuda", batch_size=128, steps=10, world_size=1
)


def run(case: Case, data: DatasetInfo) -> Outcome:
    executor = SubprocessExecutor(Settings(timeout_s=300, allow_shared=True))
    job = Job(case, data.folder, gpu_uuid=CARDS[0].uuid)
    found = executor.run(job, lambda event: None, lambda: False)
    assert found.status is Status.OK, found.reason
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-amp"])
def test_a_group_of_one_trains_as_one_alone(data: DatasetInfo, precision: str) -> None:
    scale = 128.0 if precision == "fp16" else None
    case = replace(CASE, precision=precision, loss_scale=scale)
    alone = run(case, data)
    found = run(replace(case, parallel="ddp"), data)
    assert found.measurement.arithmetic == alone.measurement.arithmetic
    # sums of atomic additions differ from run to run, the first loss has none before it
    assert found.steps[0].loss == alone.steps[0].loss
    assert [s.loss for s in found.steps] == pytest.approx([s.loss for s in alone.steps], rel=0.02)


def test_what_a_group_tells_of_itself(data: DatasetInfo) -> None:
    found = run(replace(CASE, parallel="ddp", grad_compression="bf16"), data)
    m = found.measurement
    print(m)
    assert str(m.comm_backend).startswith("nccl ")
    assert m.wire_bytes
    assert m.buckets
    assert m.sync_step_s
    assert m.no_sync_step_s
    (rank,) = found.ranks
    assert rank.gpu_uuid == CARDS[0].uuid
    assert rank.peak_reserved_bytes
    assert rank.work_s
    assert rank.work_s < m.sync_step_s * 1.5
