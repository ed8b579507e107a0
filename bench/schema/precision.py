"""The number formats that a case can train in, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from bench.base.installation import describe_extra, find_version
from bench.networks.workloads import OWN


class Arithmetic(StrEnum):
    """What a layer rounds the inputs of its products to; the last two are only observed."""

    FLOAT32 = "float32"
    TFLOAT32 = "tfloat32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    UNCLEAR = "unclear"
    WRONG = "wrong"


BITS = {
    Arithmetic.FLOAT32: 24,
    Arithmetic.TFLOAT32: 11,
    Arithmetic.FLOAT16: 11,
    Arithmetic.BFLOAT16: 8,
    Arithmetic.FLOAT8: 4,
}
"""Significant bits of each arithmetic."""


@dataclass(frozen=True)
class Precision:
    """How weights, activations and arithmetic flags are set.

    ``weights`` and ``autocast`` are torch dtype names; ``arithmetic`` is what a convolution or
    matmul rounds its inputs to, which `bench.training.proof` must confirm.
    """

    name: str
    help: str
    weights: str = "float32"
    autocast: str | None = None
    arithmetic: Arithmetic = Arithmetic.FLOAT32
    scales_loss: bool = False
    default_loss_scale: float | str | None = None
    min_capability: tuple[int, int] = (0, 0)
    pure: bool = False  # the optimizer steps the rounded weights, without fp32 masters
    rounds_start: bool = False  # the masters start from rounded weights, as apex's did
    apex: bool = False  # trained by NVIDIA apex, if installed
    float8: bool = False  # torchao converts the linear layers; the rest runs under autocast
    brief: str = ""  # what it is, below a table

    @property
    def casts(self) -> bool:
        """Return whether the network's weights are rounded."""
        return self.weights != "float32"

    @property
    def masters(self) -> bool:
        """Return whether the network computes with rounded copies of fp32 master weights."""
        return self.casts and not self.pure


@dataclass(frozen=True)
class DynamicPolicy:
    """The rule of a dynamic loss scale.

    A step whose gradients overflow is skipped and divides the scale by ``factor``; ``window`` steps
    in a row without overflow multiply it by ``factor``. The scale starts at ``initial`` and stays
    between ``lowest`` and ``highest``.
    """

    name: str
    help: str
    initial: float
    window: int
    factor: float = 2.0
    lowest: float = 0.0
    # the largest power of two in fp32: torch stops there by itself; apex's scale, a Python number,
    # made the scaled loss inf above it, skipped that step and came back
    highest: float = 2.0**127


POLICIES: dict[str, DynamicPolicy] = {
    p.name: p
    for p in (
        DynamicPolicy("dynamic", "torch.amp.GradScaler's rule: from 65536", 2.0**16, 2000),
        # DynamicLossScaler of apex/fp16_utils/loss_scaler.py, April 2018 to May 2025; the
        # FP16_Optimizer of fp16_utils followed it until February 2019
        DynamicPolicy(
            "dynamic-apex", "apex.fp16_utils' rule of 2018: from 2^32", 2.0**32, 1000, lowest=1
        ),
        # LossScaler of apex/amp/scaler.py; FP16_Optimizer followed it from then on
        DynamicPolicy(
            "dynamic-apex-amp",
            "apex.amp's rule of 2019: from 65536, at most 2^24",
            2.0**16,
            2000,
            highest=2.0**24,
        ),
    )
}
"""The loss scales that change during training, by their names on the axis."""


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision(
            "fp32", "fp32 weights and IEEE fp32 arithmetic, TF32 off", brief="IEEE, TF32 off"
        ),
        Precision(
            "tf32",
            "fp32 weights, TF32 in convolutions and matmuls (Ampere and later)",
            arithmetic=Arithmetic.TFLOAT32,
            min_capability=(8, 0),
            brief="torch's default for convolutions",
        ),
        Precision(
            "fp16",
            "the 2019 recipe: fp16 network, fp32 BatchNorm, loss and master weights, loss scale",
            weights="float16",
            arithmetic=Arithmetic.FLOAT16,
            scales_loss=True,
            default_loss_scale=128.0,  # what the RTX Titan page used for its batch-size rows
            rounds_start=True,
            brief="the 2019 recipe with fp32 master weights",
        ),
        Precision(
            "fp16-amp",
            "fp32 weights under torch.autocast(float16), loss scale",
            autocast="float16",
            arithmetic=Arithmetic.FLOAT16,
            scales_loss=True,
            default_loss_scale="dynamic",
            brief="autocast",
        ),
        # the masters start from the fp32 weights: there is no recipe of 2019 to match, and rounding
        # to bf16 first would lose up to 2^-9 of each weight, which the masters are there to keep
        Precision(
            "bf16",
            "bf16 network, fp32 BatchNorm, loss and master weights",
            weights="bfloat16",
            arithmetic=Arithmetic.BFLOAT16,
            brief="as fp16, without a loss scale",
            # Volta and Turing emulate bf16, too slowly to say anything about the card
            min_capability=(8, 0),
        ),
        Precision(
            "bf16-amp",
            "fp32 weights under torch.autocast(bfloat16)",
            autocast="bfloat16",
            brief="autocast",
            arithmetic=Arithmetic.BFLOAT16,
            min_capability=(8, 0),
        ),
        Precision(
            "fp16-apex",
            "NVIDIA apex's amp, where it is installed, at --opt-level; loss scale",
            weights="float16",
            arithmetic=Arithmetic.FLOAT16,
            scales_loss=True,
            default_loss_scale=128.0,
            rounds_start=True,
            apex=True,
            brief="NVIDIA's apex",
        ),
        Precision(
            "fp8",
            "bf16-amp with linear layers in fp8 by torchao, for networks of matrix products",
            autocast="bfloat16",
            arithmetic=Arithmetic.FLOAT8,
            min_capability=(8, 9),
            float8=True,
            brief="bf16-amp with linear layers in fp8",
        ),
        # as airbench trains, which keeps BatchNorm in fp32 too. It scales no loss, but sums it over
        # the batch; here the scale is fp16's, so that the two differ in the masters alone
        Precision(
            "fp16-pure",
            "fp16 weights, gradients and optimizer state, no masters; fp32 BatchNorm, loss scale",
            weights="float16",
            arithmetic=Arithmetic.FLOAT16,
            scales_loss=True,
            default_loss_scale=128.0,
            pure=True,
            brief="as fp16, without master weights",
        ),
        Precision(
            "bf16-pure",
            "bf16 weights, gradients and optimizer state, no masters; fp32 BatchNorm",
            weights="bfloat16",
            arithmetic=Arithmetic.BFLOAT16,
            min_capability=(8, 0),
            pure=True,
            brief="as bf16, without master weights",
        ),
        Precision(OWN, "what a --command without {precision} computes in"),
    )
}

TRAINED = tuple(name for name in PRECISIONS if name != OWN)
"""The precisions that the harness itself can train in."""


@dataclass(frozen=True)
class Recipe:
    """How torchao scales the operands of a linear layer before rounding them to fp8.

    Inputs and weights are rounded to e4m3, with 4 significant bits; the gradients of a layer's
    output to a format of ``gradient_bits``. Rowwise needs no newer GPU than tensorwise: torch's
    kernel for compute capability 8.9 came with 2.7 (pytorch pull request 144348). ``untrained``
    says why no device trains with it, and what does.
    """

    help: str
    gradient_bits: int
    rounds_weight_gradient: bool = True  # else its product runs in bf16
    multiple: int = 16  # of which each dimension of a product must be one
    min_capability: tuple[int, int] = (8, 9)
    untrained: str = ""


FP8_RECIPES: dict[str, Recipe] = {
    "tensorwise": Recipe("one scale for each tensor; gradients in e5m2", gradient_bits=3),
    "rowwise": Recipe(
        "a scale for each row, a power of two; gradients in e4m3: more exact, and slower",
        gradient_bits=4,
    ),
    "rowwise_with_gw_hp": Recipe(
        "as rowwise, but the gradients of weights in bf16: the most exact",
        gradient_bits=4,
        rounds_weight_gradient=False,
    ),
    "mxfp8": Recipe(
        "a scale for each 32 elements, a power of two; gradients in e4m3; on Blackwell",
        gradient_bits=4,
        multiple=32,
        min_capability=(10, 0),
    ),
    "nvfp4": Recipe(
        "4 bits, a scale for each 16 elements; not trained yet",
        gradient_bits=2,
        untrained="--fp8-recipe nvfp4 is not trained here yet: torchao has it only as kernels for "
        "Blackwell, on which its label was not proven, and without an emulation to prove it by; "
        "use --fp8-recipe mxfp8 on a Blackwell, or rowwise",
    ),
}
"""The values of the axis ``fp8_recipe``, by torchao's names."""


WITH_TORCHAO = "torchao>=0.18 beside torch>=2.11"
"""The versions of the extra ``fp8`` of pyproject.toml."""


def ask_for_torchao(what: str) -> str:
    """Return the message if torchao, which ``what`` needs, is not installed, or is for another
    torch, of which the package itself demands none."""
    return f"{what} needs {WITH_TORCHAO}: {describe_extra('fp8')}"


FP8_INSTALL = ask_for_torchao("fp8")

EMULATE_FP8 = "BENCH_EMULATE_FP8"


def emulates_fp8() -> bool:
    """Return whether fp8 may be emulated on a CPU: for tests only, as times say nothing of GPUs."""
    return os.environ.get(EMULATE_FP8) == "1"


def refuse_fp8(network: str) -> str:
    return (
        f"no layer of {network} is a matrix product whose dimensions are both multiples of 16 "
        "(its head is left out), so fp8 has nothing to convert; use --precision bf16-amp"
    )


OPT_LEVELS: dict[str, Precision] = {
    level: replace(PRECISIONS["fp16-apex"], help=help, weights=weights, arithmetic=arithmetic)
    for level, help, weights, arithmetic in (
        ("O0", "fp32 throughout", "float32", Arithmetic.FLOAT32),
        ("O1", "fp32 weights, each function cast by apex's lists", "float32", Arithmetic.FLOAT16),
        ("O2", "fp16 network, fp32 BatchNorm and master weights", "float16", Arithmetic.FLOAT16),
        ("O3", "fp16 throughout, no master weights", "float16", Arithmetic.FLOAT16),
    )
}
"""The number formats of fp16-apex, by the values of the axis ``opt_level``."""

APEX_LEVEL = "O2"
"""The opt level of fp16-apex without another one: what `PRECISIONS` says of it."""


@dataclass(frozen=True)
class Apex:
    """The installed package `apex`; ``amp`` is whether it has NVIDIA's amp with opt levels, as its
    copies from March 2019 to April 2025. The package of this name on PyPI is a login toolkit."""

    version: str
    amp: bool


def find_apex() -> Apex | None:
    """Recognise it by its files, without importing it."""
    spec = find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    # `initialize` is in this file; the amp of 2018 had none
    amp = any((folder / "amp/frontend.py").is_file() for folder in folders)
    return Apex(find_version("apex") or "", amp)


_BUILD = "build a commit of NVIDIA/apex on GitHub from between March 2019 and April 2025"


def refuse_apex(apex: Apex | None, device: str) -> str:
    """Return why apex cannot train on a device, and what to do; empty if it can."""
    if device != "cuda":
        return "NVIDIA apex needs an NVIDIA GPU; fp16 is the same recipe on a CPU"
    if apex is None:
        return f"NVIDIA apex is not installed: {_BUILD}"
    if not apex.amp:
        return f"the installed apex {apex.version} has no amp.initialize: {_BUILD}"
    return ""


def find_formats(name: str, opt_level: str | None) -> Precision:
    """Return the number formats of a precision, at an opt level if it has one."""
    return PRECISIONS[name] if opt_level is None else OPT_LEVELS[opt_level]


LEAST_LABELLED = 0.5
"""A row is invalid if less than this share of its step's FLOP ran in the number format of its
label: more than half of what was timed was something else. A network that keeps parts in fp32 on
purpose, such as norms, a head or a loss, is far above it: DPN-92 has 1.0 in every precision (H100,
H200)."""

MOSTLY_LABELLED = 0.9
"""A row has a warning below this share, which is printed with it."""


def list_formats(precision: Precision) -> tuple[str, ...]:
    """Return torch's names of the formats that the products of a precision read, the labelled one
    first. TF32 reads float32; what fp8 does not convert runs in bfloat16."""
    named = {
        Arithmetic.TFLOAT32: ("float32",),
        Arithmetic.FLOAT8: ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
    }
    return named.get(precision.arithmetic, (str(precision.arithmetic),))
