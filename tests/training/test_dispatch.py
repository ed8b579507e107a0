"""A step reads no value back from the device, in any precision, for which a GPU would wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dispatch_for_tests import Rule, Watch
from torch import Tensor

from bench.precision import POLICIES, PRECISIONS
from bench.training.loop import Training
from bench.training.loss_scale import build_loss_scale
from bench.workloads import Images

CPU = torch.device("cpu")

OURS = [n for n, precision in PRECISIONS.items() if not precision.apex and not precision.float8]
"""The steps of apex wait for the GPU, and on a CPU torchao's kernels are others."""


@pytest.mark.parametrize("name", OURS)
def test_a_step_waits_for_nothing(name: str) -> None:
    workload, watch = Images("models_for_tests:good"), Watch()
    training = Training(workload.build_model(), PRECISIONS[name], CPU, lr=0.01, workload=workload)
    batch = workload.make_batch(2, CPU, torch.Generator())
    training.step(batch)  # a first step makes the masters' gradients
    scales = (128.0,) if PRECISIONS[name].pure else (128.0, *POLICIES)
    for scale in scales if PRECISIONS[name].scales_loss else (None,):
        training.loss_scale = build_loss_scale(scale, CPU)
        watch.judge()
        with watch:
            training.step(batch)
        assert not watch.breaches, scale
        assert watch.launches > 0


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t[0].item(),
        lambda t: bool(t[0] > 0),
        lambda t: t[t > 0],
        lambda t: torch.equal(t, t),
    ],
)
def test_what_waits_is_seen(read: Callable[[Tensor], object]) -> None:
    watch = Watch()
    watch.judge()
    with watch:
        read(torch.ones(10))
    assert watch.rules == {Rule.READ}
