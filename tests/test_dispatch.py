"""A step waits for the device nowhere, in any precision: as the helper of these tests sees it."""

from __future__ import annotations

import pytest
import torch
from dispatch_for_tests import Rule, Watch

from bench.precision import POLICIES, PRECISIONS
from bench.training.loop import Training
from bench.training.loss_scale import build_loss_scale
from bench.workloads.images import Images

CPU = torch.device("cpu")

OURS = [n for n, precision in PRECISIONS.items() if not precision.apex and not precision.float8]
"""The steps of apex wait for the GPU, and on a CPU torchao's kernels are others."""


@pytest.mark.parametrize("name", OURS)
def test_a_step_waits_for_nothing(name: str) -> None:
    workload, watch = Images("models_for_tests:good"), Watch()
    with watch:  # from the start, to track what is made in host memory and what is moved
        training = Training(
            workload.build_model(), PRECISIONS[name], CPU, lr=0.01, workload=workload
        )
        batch = workload.make_batch(2, CPU, torch.Generator())
    training.step(batch)  # a first step makes the masters' gradients
    for scale in (128.0, *POLICIES) if PRECISIONS[name].scales_loss else (None,):
        training.loss_scale = build_loss_scale(scale, CPU)
        watch.judge()
        with watch:
            training.step(batch)
        assert not watch.breaches, scale
        assert watch.launches > 0


PLANTED = {
    Rule.READ: {
        "item": lambda t: t[0].item(),
        "float": lambda t: float(t[0]),
        "bool": lambda t: bool(t[0] > 0),
        "nonzero": lambda t: t.nonzero(),
        "mask": lambda t: t[t > 0],
        "equal": lambda t: torch.equal(t, t),
        "numpy": lambda t: t.numpy(),
        "tolist": lambda t: t.tolist(),
    },
    Rule.COPY: {
        "to": lambda t: torch.zeros(10).to(CPU),
        "to-keyword": lambda t: torch.zeros(10).to(device=CPU),
        "to-other": lambda t: torch.zeros(10).to(t),
        "copy_": lambda t: t.copy_(torch.ones(10)),
        "add": lambda t: t + torch.ones(10).mul(2),
        "index": lambda t: t[torch.arange(3)],
        "tensor": lambda t: torch.tensor([1.0, 2.0], device=CPU),
        "foreach": lambda t: torch._foreach_copy_([t], [torch.ones(10)]),
        "cpu": lambda t: t.cpu(),
        "to-cpu": lambda t: t.to("cpu"),
    },
    Rule.MIXED: {
        "foreach-mixed": lambda t: torch._foreach_add_([t, t.half()], 1.0),
    },
}


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule in PLANTED for name in PLANTED[rule]]
)
def test_what_waits_is_seen(rule: Rule, name: str) -> None:
    with Watch() as watch:
        x = torch.ones(10, device=CPU)
        watch.judge()
        PLANTED[rule][name](x)
    assert watch.rules == {rule}


def test_what_costs_nothing_is_let_through() -> None:
    """A host scalar is a kernel's argument; work on host tensors is no business of the device."""
    with Watch() as watch:
        x = torch.ones(4, 4, device=CPU)
        watch.judge()
        x.view(16).t().detach()
        assert watch.launches == 0
        x * torch.tensor(2.0)
        x.to(CPU, torch.float16)
        torch.zeros(3, device=CPU)
        x[0, 1:3] = 0
        x[torch.zeros(2, dtype=torch.long, device=CPU)]
        host = torch.arange(5)
        assert host.sum().item() == 10
        assert host.tolist() == [*range(5)]
        (host + 1).to("cpu").numpy()
    assert not watch.breaches
    assert watch.launches == 6
