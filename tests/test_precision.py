"""Number formats: what a cast leaves in fp32, flags that hold, a proof that sees through labels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bench.precision import (
    PRECISIONS,
    Precision,
    Proof,
    _name_arithmetic,
    autocast,
    cast,
    prove,
    read_flags,
    set_flags,
)

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("name", ["fp32", "fp16", "fp16-amp", "bf16", "bf16-amp"])
def test_proof_finds_what_ran(name: str) -> None:
    proof = prove(PRECISIONS[name], CPU)
    assert proof.conv == proof.matmul == PRECISIONS[name].arithmetic
    assert proof.contradicts(PRECISIONS[name]) == ""


def test_proof_catches_a_false_label() -> None:
    """fp32 by its label, bf16 by what it does: the label of the record would be a lie."""
    honest = PRECISIONS["fp32"]
    liar = Precision("fp32", "", autocast="bfloat16")
    reason = prove(liar, CPU).contradicts(honest)
    assert reason.startswith("labelled fp32, but the convolution ran in bfloat16")


def test_a_tf32_convolution_under_an_fp32_label_is_caught() -> None:
    """The default of every torch so far: matmuls in fp32, convolutions in TF32."""
    default = Proof("tfloat32", 3e-4, "float32", 2e-7)
    assert "convolution ran in tfloat32" in default.contradicts(PRECISIONS["fp32"])
    assert default.contradicts(PRECISIONS["tf32"]) == ""


def test_the_convolution_decides() -> None:
    """A tf32 row whose convolutions ran in fp32 is no tf32 row, whatever its matmul did."""
    assert Proof("float32", 1e-7, "tfloat32", 3e-4).contradicts(PRECISIONS["tf32"])
    assert Proof("tfloat32", 3e-4, "float32", 1e-7).contradicts(PRECISIONS["tf32"]) == ""


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float16, 0.5), (torch.bfloat16, math.nan), (torch.float16, 0.0)]
)
def test_a_dtype_alone_proves_nothing(dtype: torch.dtype, error: float) -> None:
    assert "with an error of" in _name_arithmetic(dtype, error)


@pytest.mark.parametrize(
    ("bits", "arithmetic"), [(24, "float32"), (11, "tfloat32"), (8, "bfloat16")]
)
def test_arithmetic_is_told_by_rounding(bits: int, arithmetic: str) -> None:
    """Round a matmul's inputs to so many significant bits in float64; the error names them."""
    rng = torch.Generator().manual_seed(1)
    a = torch.randn(256, 512, generator=rng, dtype=torch.float64)
    b = torch.randn(512, 256, generator=rng, dtype=torch.float64)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)

    error = float((rounded(a) @ rounded(b) - a @ b).norm() / (a @ b).norm())
    assert _name_arithmetic(torch.float32, error) == arithmetic


def test_autocast_is_on_only_where_the_precision_says() -> None:
    for precision in PRECISIONS.values():
        with autocast(precision, CPU):
            assert torch.is_autocast_enabled("cpu") is (precision.autocast is not None)
