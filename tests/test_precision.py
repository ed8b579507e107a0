"""Number formats: what a cast leaves in fp32, flags that hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.precision import PRECISIONS, cast, read_flags, set_flags


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_cast_keeps_affine_batchnorm_in_fp32(name: str) -> None:
    conv, affine, plain = cast(network(), PRECISIONS[name])  # type: ignore[misc]
    half = getattr(torch, PRECISIONS[name].weights)
    assert conv.weight.dtype == half
    assert affine.weight.dtype == affine.running_mean.dtype == torch.float32
    assert plain.running_mean.dtype == half


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16-amp", "bf16-amp"])
def test_cast_leaves_the_others_alone(name: str) -> None:
    assert {t.dtype for t in cast(network(), PRECISIONS[name]).parameters()} == {torch.float32}


@pytest.mark.parametrize(("name", "mode"), [("fp32", "ieee"), ("tf32", "tf32"), ("fp16", "ieee")])
def test_flags_are_set_for_both_and_read_back(name: str, mode: str) -> None:
    set_flags(PRECISIONS[name])
    flags = read_flags()
    assert flags["matmul"] == flags["conv"] == mode
    assert torch.backends.cudnn.rnn.fp32_precision == mode  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_the_older_flags_can_be_read(name: str) -> None:
    """torch raises on reading them where only some of cuDNN's newer ones are set."""
    set_flags(PRECISIONS[name])
    assert torch.backends.cudnn.allow_tf32 is (name == "tf32")
    assert torch.backends.cuda.matmul.allow_tf32 is (name == "tf32")
