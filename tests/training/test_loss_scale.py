"""Loss scaling: what each kind does to gradients, on overflow too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.schema.precision import POLICIES
from bench.training.loss_scale import (
    DynamicScale,
    LossScale,
    StaticScale,
    build_loss_scale,
    clip,
    find_norm,
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


def torch_rule(overflows: list[bool]) -> Iterator[float]:
    """torch.amp.GradScaler's documented rule; the scale of each step, and after the last."""
    scale, good = 65536.0, 0
    for overflow in overflows:
        yield scale
        good = 0 if overflow else good + 1
        if overflow:
            scale *= 0.5
        elif good == 2000:
            scale, good = scale * 2, 0
    yield scale


def fp16_utils_rule(overflows: list[bool]) -> Iterator[float]:
    """apex.fp16_utils' of 2018: by the distance to the last overflow, which began at -1."""
    scale, last = 2.0**32, -1
    for step, overflow in enumerate(overflows):
        yield scale
        if overflow:
            scale, last = max(scale / 2, 1.0), step
        elif (step - last) % 1000 == 0:
            scale *= 2
    yield scale


def apex_amp_rule(overflows: list[bool]) -> Iterator[float]:
    """apex.amp's: 2,000 steps not skipped, and no more than 2^24."""
    scale, unskipped = min(2.0**24, 2.0**16), 0
    for overflow in overflows:
        yield scale
        unskipped = 0 if overflow else unskipped + 1
        if overflow:
            scale /= 2
        if unskipped == 2000:
            scale, unskipped = min(2.0**24, scale * 2), 0
    yield scale


RULES = {"dynamic": torch_rule, "dynamic-apex": fp16_utils_rule, "dynamic-apex-amp": apex_amp_rule}


@pytest.mark.parametrize("name", POLICIES)
def test_a_dynamic_scale_follows_its_rule_step_by_step(name: str) -> None:
    """Scale for scale; an overflow is told even at the lowest, and only it keeps the weight.

    Good steps until just before the window ends, down to the lowest scale, then past a window.
    """
    window = POLICIES[name].window
    overflows = [True] + [False] * (window - 1) + [True] * 40 + [False] * (window + 1)
    scale, weight = build_loss_scale(name, CPU), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1.0, fused=True)
    seen = [scale.current()]
    for overflow in overflows:
        weight.grad = scale.scale(torch.full((1,), torch.inf if overflow else 1.0))
        assert bool(scale.step(optimizer, [weight])) is overflow
        seen.append(scale.current())
    assert torch.stack(seen).tolist() == list(RULES[name](overflows))
    assert weight.item() == -overflows.count(False)


@pytest.mark.parametrize(
    ("name", "start", "overflow", "end"),
    [
        ("dynamic-apex", 1.0, True, 1.0),
        ("dynamic-apex-amp", 2.0**24, False, 2.0**24),
        ("dynamic", 1.0, True, 0.5),
        ("dynamic", 2.0**127, False, 2.0**127),
    ],
)
def test_apex_s_scales_are_bounded(name: str, start: float, overflow: bool, end: float) -> None:
    """Below by 1 in fp16_utils, above by 2^24 in amp; neither is reached by chance."""
    scale = DynamicScale(CPU, replace(POLICIES[name], initial=start, window=1))
    assert step(scale, float("inf") if overflow else 0.0)[1] is overflow
    assert float(scale.current()) == end


def test_a_large_gradient_in_fp16_is_no_overflow() -> None:
    """Its norm is past 65504 where its values are not."""
    weight = torch.zeros(2, dtype=torch.float16)
    weight.grad = torch.full_like(weight, 60_000)
    assert float(find_norm([weight])) == pytest.approx(60_000 * 2**0.5, rel=1e-3)


def test_the_norm_is_of_all_gradients_of_every_dtype() -> None:
    weights = [torch.zeros(1, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    assert float(find_norm(weights)) == 0.0
    assert find_norm(weights).shape == ()
    for weight, value in zip(weights, (3.0, 4.0), strict=True):
        weight.grad = torch.full_like(weight, value)
    assert float(find_norm(weights)) == pytest.approx(5.0)


def test_gradients_of_no_norm_stay_as_they_are() -> None:
    """The 1e-6 of torch's clip_grad_norm_ keeps a bound of 0 from dividing by it."""
    weight, theirs = torch.zeros(1), torch.zeros(1)
    for value in (0.0, 2e-6):
        weight.grad, theirs.grad = torch.full((1,), value), torch.full((1,), value)
        assert float(clip([weight], 1e-6)) == pytest.approx(value)
        torch.nn.utils.clip_grad_norm_([theirs], 1e-6)
        assert weight.grad.tolist() == pytest.approx(theirs.grad.tolist())


@pytest.mark.parametrize(
    ("setting", "value"),
    [(None, 1.0), (128.0, 128.0), *((name, policy.initial) for name, policy in POLICIES.items())],
)
def test_a_scale_tells_its_value_where_it_is(setting: float | str | None, value: float) -> None:
    assert build_loss_scale(setting, torch.device("meta")).current().device.type == "meta"
    assert float(build_loss_scale(setting, CPU).current()) == value


@pytest.mark.parametrize("setting", [None, 128.0, *POLICIES])
def test_a_restored_scale_goes_on_as_if_never_left(setting: float | str | None) -> None:
    """Its value, and how many good steps it has seen; an overflow after is told of that value."""
    one, other = build_loss_scale(setting, CPU), build_loss_scale(setting, CPU)
    step(one, float("inf"))
    step(one, 1.0)
    other.restore(one.state())
    assert other.state() == one.state()
    assert other.current() == one.current()
    assert [step(each, 1.0)[1] for each in (one, other)] == [False, False]
    assert other.current() == one.current()
