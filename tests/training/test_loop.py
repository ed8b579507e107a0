"""The page: it trains as a plain loop does, forgets its warm-up, and learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.schema.precision import POLICIES
from bench.training.loop import Training
from bench.training.loss_scale import DynamicScale
from tests.pytest_for_tests import Patch
from tests.training_for_tests import (
    CPU,
    LR,
    MOMENTUM,
    OURS,
    WEIGHT_DECAY,
    batch,
    differing_masters,
    pass_through,
    small,
    step_bound,
    step_error,
    training,
)


class Awkward(nn.Module):
    """Whatever makes an update of lists go wrong: mixed dtypes, tied, frozen and idle weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, 2)
        self.bn = nn.BatchNorm2d(8)
        self.tied, self.again = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.again.weight = self.tied.weight
        self.head = nn.Linear(1800, 10)
        self.head.bias.requires_grad_(False)
        self.idle, self.sometimes = nn.Linear(4, 4), nn.Parameter(torch.ones(10))
        self.uses_all = True

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Have a cast leave one weight in bf16, as a layer that chooses its own format does."""
        super()._apply(fn, recurse)
        if self.conv.weight.dtype == torch.float16:
            self.conv.weight.data = self.conv.weight.data.bfloat16()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x.to(self.conv.weight.dtype), self.conv.weight, stride=2).to(x.dtype)
        x = torch.relu(self.again(self.tied(torch.relu(self.bn(x)))))
        logits: Tensor = self.head(x.flatten(1))
        return logits * self.sometimes if self.uses_all else logits


@torch.no_grad()
def update_each(ours: Training, masters: list[Tensor]) -> tuple[Tensor, None]:
    """The rule of an update, tensor by tensor: every weight has a copy in fp32, BatchNorm too."""
    for master, weight in zip(masters, ours.parameters, strict=True):
        master.grad = None if weight.grad is None else weight.grad.float().clone()
    ours.model.zero_grad()
    overflowed = ours.loss_scale.step(ours.optimizer, masters)
    for master, weight in zip(masters, ours.parameters, strict=True):
        weight.copy_(master)
    return overflowed, None


@pytest.mark.parametrize("build", [small, Awkward])
@pytest.mark.parametrize(
    ("precision", "scale"), [("fp16", 128.0), ("fp16", "dynamic"), ("bf16", None)]
)
def test_update_is_bitwise_the_rule(
    build: Callable[[], nn.Module], precision: str, scale: float | str | None, monkeypatch: Patch
) -> None:
    """Three steps by lists of one dtype are three steps of one tensor after another."""
    ours, plain = (training(precision, build=lambda _: build(), loss_scale=scale) for _ in range(2))
    masters = [m.detach().clone().requires_grad_() for m in plain.masters]
    plain.optimizer = torch.optim.SGD(masters, LR, MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True)
    monkeypatch.setattr(plain, "update", lambda: update_each(plain, masters))
    for seed in range(3):
        for one in (ours, plain):
            if isinstance(one.model, Awkward):
                one.model.uses_all = seed != 1
        a, b = (one.step(batch(seed=seed)) for one in (ours, plain))
        assert all(map(torch.equal, a[:3], b[:3]))
        # weights that have no gradient yet are bitwise as they were too
        for mine, master, theirs in zip(ours.parameters, ours.masters, masters, strict=True):
            assert torch.equal(master, theirs)
            assert torch.equal(mine, theirs.to(mine.dtype))
    assert differing_masters(ours) == []


class Keeps(nn.Module):
    """Adds to each loss what it counted: in an object of its own, and in a buffer that its
    state_dict leaves out. It also has a cache, which comes with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.own = small(), {"calls": 0}
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return self.own

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.own = state

    def forward(self, x: Tensor) -> Tensor:
        self.own["calls"] += 1
        self.calls += 1
        self.register_buffer("cache", x[0].clone(), persistent=False)
        out: Tensor = self.body(x) * (self.own["calls"] + 10 * self.calls)
        return out


def test_reset_restores_what_a_network_keeps_beside_its_weights() -> None:
    ours = training(build=lambda seed: Keeps())
    first = [ours.step(batch(seed=s))[0] for s in range(3)]
    for _ in range(2):
        ours.reset()
        assert [ours.step(batch(seed=s))[0] for s in range(3)] == first


def test_a_network_in_evaluation_mode_is_trained() -> None:
    """As pretrained networks are returned, whose BatchNorm would not see the batches."""
    one, other = (training(build=lambda seed, m=m: m) for m in (small(), small().eval()))  # type: ignore[misc]
    other.model.load_state_dict(one.model.state_dict())
    assert other.model.training
    assert one.step(batch())[0].equal(other.step(batch())[0])


def test_evaluation_changes_nothing() -> None:
    ours = training()
    ours.step(batch())
    before = {name: value.clone() for name, value in ours.model.state_dict().items()}
    batches = [batch(16), batch(7, seed=2)]
    loss, accuracy = ours.evaluate(batches)
    ours.model.eval()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        logits = ours.model(x)
    assert loss == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    assert accuracy == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    assert all(torch.equal(before[n], v) for n, v in ours.model.state_dict().items())


def test_epoch_tells_the_scale_that_each_step_had() -> None:
    """From 2^24 this overflows: what a step is told to have had, not what it left for the next."""
    ours = training("fp16", loss_scale="dynamic")
    ours.loss_scale = DynamicScale(CPU, replace(POLICIES["dynamic"], initial=2.0**24))
    batches = [batch(16, seed=seed) for seed in range(12)]
    epoch = pass_through(ours, batches)
    scale = 2.0**24
    for used, overflowed in zip(epoch.loss_scales, epoch.overflowed, strict=True):
        assert used == scale
        scale /= 2 if overflowed else 1
    assert epoch.overflowed[0]
    assert not epoch.overflowed[-1]
    assert float(ours.loss_scale.current()) == scale


def test_fp16_starts_from_rounded_weights_as_apex_did() -> None:
    """Also after a warm-up. bf16, which had no such recipe, starts from the fp32 weights."""
    start = list(small().parameters())
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.float32)):
        ours = training(precision)
        for again in (False, True):
            if again:
                ours.step(batch())
                ours.reset()
            for master, weight, before in zip(ours.masters, ours.parameters, start, strict=True):
                kept = before if weight.dtype == torch.float32 else before.to(dtype).float()
                assert torch.equal(master, kept)


@pytest.mark.parametrize("precision", [name for name in OURS if name != "tf32"])
def test_a_step_is_within_the_bound_of_float64(precision: str) -> None:
    assert step_error(precision) < step_bound(precision)
