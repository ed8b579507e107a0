"""Number formats: what a cast leaves in fp32, flags that hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bench.base.errors import UsageError
from bench.schema.grid import grid
from bench.schema.precision import PRECISIONS
from bench.training.formats import cast, set_flags
from bench.training.operations import read_flags
from bench.training.optimizers import build_optimizer
from tests.training_for_tests import batch, training


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))


@pytest.mark.parametrize("name", [name for name, p in PRECISIONS.items() if not p.apex])
def test_a_cast_keeps_affine_batchnorm_in_fp32(name: str) -> None:
    layers: Any = cast(network(), PRECISIONS[name])
    conv, affine, plain = layers
    kind = getattr(torch, PRECISIONS[name].weights)
    assert (kind == torch.float32) is (name not in ("fp16", "bf16", "fp16-pure", "bf16-pure"))
    assert conv.weight.dtype == plain.running_mean.dtype == kind
    assert affine.weight.dtype == affine.running_mean.dtype == torch.float32


@pytest.mark.parametrize(("name", "mode"), [("fp32", "ieee"), ("tf32", "tf32"), ("fp16", "ieee")])
def test_flags_are_set_for_all_and_read_back(name: str, mode: str) -> None:
    """By the older names too, which torch refuses where only some of cuDNN's newer ones are set."""
    set_flags(PRECISIONS[name])
    flags = read_flags()
    assert flags["matmul"] == flags["conv"] == mode
    assert torch.backends.cudnn.rnn.fp32_precision == mode  # type: ignore[attr-defined]
    # torch.compile's own convolutions, which max-autotune tries, are in the format that this says
    assert torch.backends.cudnn.fp32_precision == mode  # type: ignore[attr-defined]
    assert torch.backends.cudnn.allow_tf32 is (name == "tf32")
    assert torch.backends.cuda.matmul.allow_tf32 is (name == "tf32")


PURE = [("fp16-pure", "sgd"), ("bf16-pure", "sgd"), ("bf16-pure", "adamw")]


@pytest.mark.parametrize(("name", "optimizer"), PURE)
def test_without_masters_the_optimizer_steps_the_weights_in_half(name: str, optimizer: str) -> None:
    """Its state is half too, except that of BatchNorm. The loss falls, and a reset is a start."""
    ours, half = training(name, optimizer=optimizer), getattr(torch, PRECISIONS[name].weights)
    assert all(m is weight for m, weight in zip(ours.masters, ours.parameters, strict=True))
    assert ours.state()["masters"] == []
    begun = [weight.clone() for weight in ours.parameters]
    ours.set_lr(0.01)
    losses = [float(ours.step(batch())[0]) for _ in range(12)]
    assert losses[-1] < 0.1 < losses[0]
    normed = {id(weight) for weight in ours.model[1].parameters()}  # type: ignore[index]
    for weight in ours.parameters:
        kind = torch.float32 if id(weight) in normed else half
        state = ours.optimizer.state[weight]
        dtypes = [value.dtype for key, value in state.items() if key != "step"]
        assert {weight.dtype, *dtypes} == {kind}
        assert dtypes, "momentum, or both averages"
    ours.reset()
    assert all(map(torch.equal, ours.parameters, begun))
    again = training(name, optimizer=optimizer)
    again.set_lr(0.01)
    ours.set_lr(0.01)
    assert torch.equal(ours.step(batch())[0], again.step(batch())[0])


def test_half_precision_sgd_on_a_cpu_follows_the_rule() -> None:
    """torch's own kernel leaves whole vectors of weights as they are (pytorch issue 191763)."""
    for kind in (torch.float16, torch.bfloat16):
        weight = torch.ones(1000, dtype=kind, requires_grad=True)
        optimizer = build_optimizer("sgd", [weight], 0.5)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert torch.allclose(weight, torch.full_like(weight, 0.5), rtol=1e-2)


@pytest.mark.parametrize("setting", [{"optimizer": "adamw"}, {"loss_scale": "dynamic"}])
def test_what_pure_fp16_cannot_train_with_is_refused(setting: dict[str, str]) -> None:
    given = {name: [value] for name, value in setting.items()}
    with pytest.raises(UsageError, match="--precision fp16-pure with --"):
        grid({"precision": ["fp16-pure"], **given})
