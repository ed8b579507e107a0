"""A step reads no value back from the device, in any precision, for which a GPU would wait.

On a CPU the operations of a step are watched. CUDA itself, in tests/gpu/test_training.py, raises
where a step waits, for copies too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.networks.workloads import Images
from bench.schema.case import Case
from bench.schema.optimization import OPTIMIZERS
from bench.schema.precision import POLICIES, PRECISIONS
from bench.training.loop import Training
from bench.training.loss_scale import build_loss_scale
from bench.training.optimizers import build_optimizer
from tests.training_for_tests import CPU

OURS = [n for n, precision in PRECISIONS.items() if not precision.apex and not precision.float8]
"""The steps of apex wait for the GPU, and on a CPU torchao's kernels are others."""


class Watch(TorchDispatchMode):
    """Collects the operations whose results the host has to know, backward and optimizer too."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*op.tags}:
            self.reads.append(op.name())
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", [name for name, kind in OPTIMIZERS.items() if kind.fused])
@pytest.mark.parametrize("name", OURS)
def test_a_step_waits_for_nothing(name: str, optimizer: str) -> None:
    workload = Images("models_for_tests:good")
    case = Case(precision=name, lr=0.01, optimizer=optimizer, device="cpu")
    training = Training(case, workload.build_model(), CPU, workload)
    batch = workload.make_batch(2, CPU, torch.Generator())
    training.step(batch)  # a first step makes the masters' gradients
    scales = (128.0,) if PRECISIONS[name].pure else (128.0, *POLICIES)
    for scale in scales if PRECISIONS[name].scales_loss else (None,):
        training.loss_scale = build_loss_scale(scale, CPU)
        with Watch() as watch:
            training.step(batch)
        assert not watch.reads, scale


@pytest.mark.parametrize(("optimizer", "reads_each"), [("adafactor", 3), ("muon", 0)])
def test_what_another_optimizer_waits_for_is_what_its_description_says(
    optimizer: str, reads_each: int
) -> None:
    """Of a network with a matrix between its first and its last layer, which muon steps."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    special = [model[1].weight] if optimizer == "muon" else []
    stepped = build_optimizer(optimizer, [*model.parameters()], 0.01, special=special or None)
    model(torch.ones(2, 64)).sum().backward()
    with Watch() as watch:
        stepped.step()
    assert len(watch.reads) == reads_each * 3
    assert ("twice a weight" in OPTIMIZERS[optimizer].name) is (
        reads_each == 3
    )  # and the number of the step, on the host


def test_what_waits_is_seen() -> None:
    with Watch() as watch:
        x = torch.ones(10)
        x[x > 0][0].item()
    assert watch.reads == ["aten::index.Tensor", "aten::_local_scalar_dense"]
