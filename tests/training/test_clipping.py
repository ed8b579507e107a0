"""Clipping: gradients are scaled down by their own norm, whatever the loss was scaled by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.networks.data import DatasetInfo
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.training.loss_scale import clip
from tests.training_for_tests import (
    MOMENTUM,
    OURS,
    WEIGHT_DECAY,
    batch,
    run_case,
    small,
    step_bound,
    training,
)

MOST = 0.5
"""Half of the norm of the first steps."""

SCALED = [(name, scale) for name in OURS if "fp16" in name for scale in (128.0, "dynamic")]
WAYS = [*((name, None) for name in OURS if "fp16" not in name), *SCALED]


def true_norm(x: Tensor, y: Tensor) -> float:
    """The norm of the first gradients of `small`, in float64."""
    exact = small().double()
    F.cross_entropy(exact(x.double()), y).backward()
    return float(
        torch.nn.utils.get_total_norm([p.grad for p in exact.parameters() if p.grad is not None])
    )


@pytest.mark.parametrize(("precision", "scale"), WAYS)
def test_the_norm_is_that_of_the_unscaled_gradients_in_every_precision(
    precision: str, scale: float | str | None
) -> None:
    ours = training(precision, loss_scale=scale, clip_grad=MOST)
    norm = ours.step(batch())[3]
    assert norm is not None
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(true_norm(*batch()), rel=step_bound(precision))
    assert float(norm) > MOST


class Foreach(TorchDispatchMode):
    """The dtypes that each foreach operation was given in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach_mul" in str(func) or "_foreach_norm" in str(func):
            given = {x.dtype for x in tree_leaves(args) if isinstance(x, Tensor)}
            self.seen.append((str(func), given))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp16-pure", "bf16-pure", "fp16", "fp32"])
def test_no_foreach_is_given_two_dtypes(precision: str) -> None:
    """On a GPU such a one takes a kernel for each tensor. Without masters, gradients are of two."""
    ours = training(precision, clip_grad=MOST)
    with Foreach() as calls:
        ours.step(batch())
    assert calls.seen
    assert all(len(given) == 1 for _, given in calls.seen), calls.seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_clipped_halves_are_rounded_once(dtype: torch.dtype) -> None:
    """A factor of 1e-4 in fp16 would be 0.3 % off."""
    weight = torch.zeros(4, dtype=dtype, requires_grad=True)
    given = torch.tensor([3e3, 1e4, -5e3, 2e2]).to(dtype)
    weight.grad = given.clone()
    norm = clip([weight], 1.0)
    exact = given.double() * (1.0 / (given.double().norm() + 1e-6))
    assert float(norm) == pytest.approx(float(given.double().norm()), rel=1e-6)
    assert torch.equal(weight.grad, exact.to(dtype)) or dtype is torch.float32
    torch.testing.assert_close(weight.grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(("precision", "scale"), SCALED)
def test_an_optimizer_of_one_s_own_sees_unscaled_gradients(
    precision: str, scale: float | str
) -> None:
    """One that clips in its step, and is fused: its weights end where --clip-grad brings them."""

    class Clipping(torch.optim.SGD):
        norms: list[float] = []  # noqa: RUF012

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            weights = self.param_groups[0]["params"]
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(weights, MOST)))
            super().step(closure)

    class Own(Workload):
        def build_optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
            return Clipping(parameters, lr, MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True)

    own = training(precision, loss_scale=scale, workload=Own())
    ours = training(precision, loss_scale=scale, clip_grad=MOST)
    for seed in range(3):
        norm = [one.step(batch(seed=seed)) for one in (own, ours)][1][3]
        assert Clipping.norms[-1] == norm
    for mine, theirs in zip(own.masters, ours.masters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_row_counts_the_clipped_steps(data: DatasetInfo) -> None:
    """And has the norm that a bound can be chosen by; one above all norms changes no step."""
    case = Case(
        model="models_for_tests:good", dataset="synthetic", batch_size=4, steps=4, device="cpu"
    )
    plain, tight, loose = (
        run_case(replace(case, clip_grad=most), data.folder) for most in (None, 1e-3, 1e9)
    )
    clipped = [row.measurement.clipped_steps for row in (plain, tight, loose)]
    assert clipped == [None, 4, 0]
    assert [s.loss for s in loose.steps] == [s.loss for s in plain.steps]
    assert [s.loss for s in tight.steps] != [s.loss for s in plain.steps]
    assert plain.measurement.grad_norm_median is None
    assert tight.measurement.grad_norm_median > 1e-3  # type: ignore[operator]


def test_a_step_that_overflows_is_not_counted_as_clipped() -> None:
    ours = training("fp16-amp", clip_grad=MOST)
    before = [m.detach().clone() for m in ours.masters]
    x, y = batch()
    *_, overflowed, norm = ours.step((x * torch.inf, y))
    assert bool(overflowed)
    assert not torch.isfinite(norm)  # type: ignore[arg-type]
    assert all(map(torch.equal, ours.masters, before)), "it is skipped"


def test_a_row_counts_no_skipped_step_as_clipped(data: DatasetInfo) -> None:
    case = Case(
        model="models_for_tests:good",
        dataset="synthetic",
        batch_size=4,
        steps=2,
        device="cpu",
        precision="fp16-amp",
        loss_scale=1e30,
        clip_grad=1e-3,
    )
    row = run_case(case, data.folder).measurement
    assert row.overflow_steps == 2
    assert row.clipped_steps == 0
    assert row.grad_norm_median is None
