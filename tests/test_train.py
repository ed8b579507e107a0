"""The page: it trains as a plain loop does, forgets its warm-up, and learns."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.data import load, prepare
from bench.data.batches import Batches
from bench.models import build_model
from bench.precision import PRECISIONS
from bench.timing import StepClock
from bench.train import MOMENTUM, WEIGHT_DECAY, Training, train_epoch

CPU = torch.device("cpu")
LR = 0.05


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 10)
    )


def batch(size: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 32, 32, generator=rng), torch.randint(10, (size,), generator=rng)


def training(precision: str = "fp32", **settings: object) -> Training:
    return Training(small(), PRECISIONS[precision], CPU, lr=LR, **settings)  # type: ignore[arg-type]


def distance(a: nn.Module, b: nn.Module) -> float:
    """Relative distance of two networks' parameters, in float64."""
    one, other = (
        torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (a, b)
    )
    return float((one - other).norm() / other.norm())


def plain_epoch(steps: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[float]]:
    """The same training as anybody would write it."""
    model = small().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    losses = []
    for seed in range(steps):
        x, y = batch(seed=seed)
        loss = F.cross_entropy(model(x.to(dtype)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def test_fp32_is_the_plain_loop() -> None:
    ours = training()
    losses = [float(ours.step(*batch(seed=seed))[0]) for seed in range(5)]
    model, expected = plain_epoch(5)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert distance(ours.model, model) < 1e-6


@pytest.mark.parametrize(
    ("precision", "scale", "near"),
    [
        ("fp32", None, 1e-6),
        ("fp16", 128.0, 2e-3),
        ("fp16", "dynamic", 2e-3),
        ("bf16", None, 2e-2),
        ("fp16-amp", 128.0, 2e-3),
        ("fp16-amp", "dynamic", 2e-3),
        ("bf16-amp", None, 2e-2),
    ],
)
def test_every_precision_follows_float64(
    precision: str, scale: float | str | None, near: float
) -> None:
    """Five steps stay as near to a float64 run as the format's rounding allows."""
    ours = training(precision, loss_scale=scale)
    for seed in range(5):
        ours.step(*batch(seed=seed))
    model, _ = plain_epoch(5, torch.float64)
    start = small()
    moved = distance(start, model)
    assert distance(ours.model, model) < near < moved


def test_masters_keep_what_half_precision_drops() -> None:
    """Updates below fp16's spacing add up in the fp32 masters; without them nothing would move."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False))
    nn.init.ones_(model[1].weight)
    ours = Training(model, PRECISIONS["fp16"], CPU, lr=1e-5, loss_scale=128.0)
    x, y = batch(4)
    for _ in range(20):
        ours.step(x, y)
    (master,), (weight,) = ours.masters, ours.parameters
    assert master.dtype == torch.float32
    assert (master != 1).float().mean() > 0.9
    torch.testing.assert_close(weight, master.half())


def test_static_scale_lets_inf_through_and_dynamic_skips() -> None:
    """The 2019 recipe never skips a step: an overflow reaches the weights."""
    x, y = batch()
    static, dynamic = training("fp16", loss_scale=2.0**24), training("fp16", loss_scale="dynamic")
    assert bool(static.step(x, y)[2])
    assert not all(torch.isfinite(p).all() for p in static.parameters)
    dynamic.loss_scale._scaler = torch.amp.GradScaler("cpu", 2.0**24)  # type: ignore[attr-defined]
    before = [p.clone() for p in dynamic.parameters]
    assert bool(dynamic.step(x, y)[2])
    assert all(map(torch.equal, before, dynamic.parameters))
    assert float(dynamic.loss_scale.current()) == 2.0**23


def test_a_skipped_first_step_leaves_no_rubbish_in_the_momentum() -> None:
    """torch's fused SGD makes the buffer uninitialised, and a skipped step writes nothing to it."""
    x, y = batch()
    ours, plain = (training("fp16-amp", loss_scale=s) for s in ("dynamic", 128.0))
    ours.loss_scale._scaler = torch.amp.GradScaler("cpu", 2.0**126)  # type: ignore[attr-defined]
    assert bool(ours.step(x, y)[2])
    for state in ours.optimizer.state.values():
        assert not state["momentum_buffer"].any()
    ours.loss_scale._scaler = torch.amp.GradScaler("cpu", 128.0)  # type: ignore[attr-defined]
    ours.model.load_state_dict(plain._start)
    for seed in range(3):
        ours.step(*batch(seed=seed))
        plain.step(*batch(seed=seed))
    assert distance(ours.model, plain.model) < 1e-6


@pytest.mark.parametrize(("precision", "scale"), [("fp32", None), ("fp16", 128.0)])
def test_reset_forgets_the_warm_up(precision: str, scale: float | None) -> None:
    """Weights, momentum, BatchNorm statistics: the epoch after is one from scratch."""
    fresh, warmed = training(precision, loss_scale=scale), training(precision, loss_scale=scale)
    for seed in range(3):
        warmed.step(*batch(seed=50 + seed))
    assert distance(warmed.model, fresh.model) > 0
    warmed.reset()
    for name, value in fresh.model.state_dict().items():
        assert torch.equal(value, warmed.model.state_dict()[name]), name
    for seed in range(3):
        assert fresh.step(*batch(seed=seed))[0] == warmed.step(*batch(seed=seed))[0]


def test_step_says_loss_and_hits() -> None:
    ours = training()
    x, y = batch(32)
    with torch.no_grad():
        logits = small()(x)
    loss, correct, overflowed = ours.step(x, y)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    assert int(correct) == int((logits.argmax(1) == y).sum())
    assert not overflowed


def test_evaluation_changes_nothing() -> None:
    ours = training()
    ours.step(*batch())
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


def test_channels_last_trains_alike() -> None:
    plain, last = training(), training(channels_last=True)
    for seed in range(3):
        a, b = plain.step(*batch(seed=seed)), last.step(*batch(seed=seed))
        assert float(a[0]) == pytest.approx(float(b[0]), rel=1e-4)
    assert next(last.model.parameters()).is_contiguous(memory_format=torch.channels_last)


def test_epoch_hands_over_every_step() -> None:
    seen: list[int] = []
    clock = StepClock(CPU)
    batches = [batch(8), batch(8, seed=2), batch(3, seed=3)]
    fetch = train_epoch(training(), batches, clock, lambda step, loss: seen.append(step))
    epoch = fetch()
    assert seen == [0, 1, 2]
    assert epoch.images == [8, 8, 3]
    assert len(epoch.losses) == len(epoch.correct) == len(clock.read()) == 3


@pytest.mark.slow
def test_small_dpn_learns_real_images(cifar10: Path) -> None:
    """2,000 real images, 3 passes: 26 to 31 % over six seeds, where chance is 10 ± 0.7 %."""
    data = load(prepare("cifar10", data_dir=cifar10).folder)
    torch.manual_seed(0)
    ours = Training(build_model("dpn-small"), PRECISIONS["fp32"], CPU, lr=0.02)
    images, labels = data.train_images[:2000], data.train_labels[:2000]
    batches = Batches(images, labels, batch_size=50, device=CPU, seed=0)
    passes = chain.from_iterable([[*batches.epoch(i)] for i in range(3)])
    epoch = train_epoch(ours, passes, StepClock(CPU), lambda step, loss: None)()
    last = sum(epoch.correct[-40:]) / sum(epoch.images[-40:])
    assert last > 0.2
    assert sum(epoch.losses[-40:]) / 40 < sum(epoch.losses[:40]) / 40
