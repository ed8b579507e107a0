"""Loss scaling: what each kind does to gradients, on overflow too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.training.loss_scale import (
    DynamicScale,
    LossScale,
    StaticScale,
    Unscaled,
    build_loss_scale,
)

CPU = torch.device("cpu")


def step(scale: LossScale, gradient: float, lr: float = 0.5) -> tuple[Tensor, bool]:
    """One step on a single weight of 1 whose unscaled gradient is ``gradient``."""
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr, fused=True)
    scale.scale((weight * gradient).sum()).backward()
    overflowed = scale.step(optimizer, [weight])
    return weight.detach(), bool(overflowed)


@settings(deadline=None)  # the first step loads half of torch
@given(st.floats(2**-10, 2**20), st.floats(-100, 100))
def test_static_scale_cancels_out(value: float, gradient: float) -> None:
    weight, overflowed = step(StaticScale(value, CPU), gradient)
    torch.testing.assert_close(weight, torch.tensor([1 - 0.5 * gradient]))
    assert not overflowed


def test_static_scale_never_skips() -> None:
    """As in 2019: the overflow is counted, and inf reaches the weights."""
    weight, overflowed = step(StaticScale(128, CPU), 1e37)  # times 128 is past fp32's 3.4e38
    assert overflowed
    assert not torch.isfinite(weight).any()


def test_static_scale_skips_if_told_to() -> None:
    weight, overflowed = step(StaticScale(128, CPU, skip=True), 1e37)
    assert overflowed
    assert weight.item() == 1
    weight, overflowed = step(StaticScale(128, CPU, skip=True), 3)
    torch.testing.assert_close(weight, torch.tensor([-0.5]))
    assert not overflowed


def test_dynamic_scale_skips_and_halves() -> None:
    scale = DynamicScale(CPU)
    before = float(scale.current())
    weight, overflowed = step(scale, 1e37)
    assert overflowed
    assert weight.item() == 1
    assert float(scale.current()) == before / 2
    weight, overflowed = step(scale, 3)
    assert not overflowed
    torch.testing.assert_close(weight, torch.tensor([-0.5]))


def test_unscaled_is_plain() -> None:
    weight, overflowed = step(Unscaled(CPU), 3)
    torch.testing.assert_close(weight, torch.tensor([-0.5]))
    assert not overflowed


@pytest.mark.parametrize(
    ("setting", "kind", "start"),
    [(None, Unscaled, 1), (64.0, StaticScale, 64), ("dynamic", DynamicScale, 65536)],
)
def test_axis_values(setting: float | str | None, kind: type, start: float) -> None:
    scale = build_loss_scale(setting, CPU)
    assert isinstance(scale, kind)
    assert float(scale.current()) == start


def test_static_scale_saves_small_gradients_from_flushing() -> None:
    """fp16 has nothing below 2^-24; a scale of 1024 carries 2^-30 through it."""
    small = 2.0**-30
    for value, survives in ((1.0, False), (1024.0, True)):
        weight = torch.zeros((), dtype=torch.float16, requires_grad=True)
        loss = weight.float() * small
        StaticScale(value, CPU).scale(loss).backward()
        assert weight.grad is not None
        assert (float(weight.grad) / value == small) is survives
