"""Accumulation: a batch in micro-batches is the batch, in every precision and on overflow too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.networks.data.batches import Batches
from bench.networks.workloads import Workload
from bench.schema.case import Case, micro_batch
from bench.training.loop import Training
from tests.training_for_tests import (
    CPU,
    LR,
    batch,
    differing_masters,
    distance,
    in_parts,
    list_batches,
    pass_through,
    training,
)

IMAGES, BATCH = 61, 22  # batches of 22, 22 and 17
HALF_STEPS = [("fp16", 128.0), ("fp16", "dynamic"), ("fp16-amp", 128.0)]
HALF_STEPS += [("bf16", None), ("bf16-amp", None)]


def smooth(seed: int = 0) -> nn.Module:
    """No BatchNorm and no kink, so that float64 tells a wrong weight from rounding."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(196, 10))


def few_batches(accumulate: int) -> Batches:
    rng = np.random.default_rng(0)
    micro = micro_batch(Case(batch_size=BATCH, accumulate=accumulate))
    images = rng.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, IMAGES)
    return Batches(*images, batch_size=BATCH, micro_batch=micro, device=CPU, seed=3)


class Double(Training):
    """Trains in float64."""

    def compute(self, x: Tensor) -> Tensor:
        return self.forward(x.double())  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_micro_batches_are_the_large_batch_in_float64(accumulate: int, optimizer: str) -> None:
    """Six steps with momentum, by a plain loop and torch's plain optimizer: the same weights, and
    the loss and the hits of each whole batch. Of 4 the last micro-batch is uneven."""
    plain = smooth().double()
    made = {
        "sgd": lambda: torch.optim.SGD(plain.parameters(), LR, 0.9, weight_decay=5e-4),
        "adamw": lambda: torch.optim.AdamW(plain.parameters(), LR, weight_decay=1e-2),
    }[optimizer]()
    case = Case(lr=LR, optimizer=optimizer, device="cpu")
    ours = Double(case, smooth().double(), CPU, Workload())
    for epoch in range(2):
        found = pass_through(ours, few_batches(accumulate).divide(epoch))
        losses, hits = [], []
        for x, y in list_batches(few_batches(1), epoch):
            made.zero_grad()
            logits = plain(x.double())
            loss = F.cross_entropy(logits, y)
            loss.backward()
            made.step()
            losses.append(loss.item())
            hits.append(int((logits.argmax(1) == y).sum()))
        assert found.images == [22, 22, 17]
        assert found.losses == pytest.approx(losses, rel=1e-6)
        assert found.correct == hits
    assert distance(ours.model, plain) < 1e-12
    assert distance(plain, smooth()) > 1e-2


def no_norm(precision: str, **settings: object) -> Training:
    return training(precision, build=smooth, **settings)


@pytest.mark.parametrize(("precision", "scale"), HALF_STEPS)
def test_masters_get_exactly_the_accumulated_gradient(
    precision: str, scale: float | str | None
) -> None:
    """Bitwise: what autograd sums in the weights, unscaled and stepped once, momentum included."""
    ours, plain = (no_norm(precision, loss_scale=scale) for _ in range(2))
    assert precision.endswith("amp") or ours.parameters[0].dtype != torch.float32
    for seed in range(3):
        x, y = batch(seed=seed)
        ours.step(in_parts(x, y, 7, 7, 2))
        for part, labels in zip(x.split([7, 7, 2]), y.split([7, 7, 2]), strict=True):
            loss = F.cross_entropy(plain.compute(part), labels)
            plain.loss_scale.scale(loss * (len(labels) / 16)).backward()
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in plain.parameters)
        plain.update()
        assert all(map(torch.equal, ours.masters, plain.masters))
        assert all(map(torch.equal, ours.parameters, plain.parameters))
    assert differing_masters(ours) == []


@pytest.mark.parametrize("spoilt", [0, 14])
@pytest.mark.parametrize("scale", ["dynamic", 128.0])
@pytest.mark.parametrize("precision", ["fp16", "fp16-amp"])
def test_overflow_in_one_micro_batch_is_that_of_the_step(
    precision: str, scale: float | str, spoilt: int
) -> None:
    """Of the first or the last: the whole step is skipped and counted once, or inf reaches the
    weights."""
    ours = no_norm(precision, loss_scale=scale)
    x, y = batch()
    ours.step(in_parts(x, y, 7, 7, 2))
    before = [p.detach().clone() for p in ours.masters]
    momentum = [s["momentum_buffer"].clone() for s in ours.optimizer.state.values()]
    used = float(ours.current_scale())
    bad = x.clone()
    bad[spoilt] = torch.inf
    assert pass_through(ours, [in_parts(bad, y, 7, 7, 2)]).overflowed == [True]
    skips = scale == "dynamic"
    assert float(ours.current_scale()) == (used / 2 if skips else used)
    if skips:
        assert all(map(torch.equal, before, ours.masters))
        buffers = [s["momentum_buffer"] for s in ours.optimizer.state.values()]
        assert all(map(torch.equal, momentum, buffers))
        assert not ours.step(in_parts(x, y, 7, 7, 2))[2], "nothing of it is left in the gradients"
        assert not all(map(torch.equal, before, ours.masters))
    else:
        assert not all(bool(torch.isfinite(p).all()) for p in ours.parameters)
