"""The proof: what an error names, which layers are probed, what contradicts a label."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.networks.models import build_model
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.schema.precision import PRECISIONS, Arithmetic, Precision
from bench.training import proof as proof_module
from bench.training.arithmetic import OperationProof, name_arithmetic
from bench.training.formats import autocast, cast, set_flags
from bench.training.loop import Training
from bench.training.proof import DENSE, Layer, LayerProof, LayerSetting, Proof, find_layers, prove

CPU = torch.device("cpu")
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
K = 128 * 9  # products of one element of DENSE


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    set_flags(PRECISIONS["fp32"])
    yield
    set_flags(PRECISIONS["fp32"])


HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("error", "dtype", "arithmetic"),
    [
        # as simulated in float64: the figures of bench/training/arithmetic.py
        (3.9e-7, FULL, "float32"),  # Winograd F(4,3)
        (2.9e-4, FULL, "tfloat32"),
        (7.7e-4, FULL, "tfloat32"),  # truncated
        (6.1e-4, FULL, "tfloat32"),  # Winograd F(2,3)
        (2.4e-3, FULL, "unclear"),  # 8 bits, or tfloat32 by Winograd
        (2.9e-3, BRAIN, "bfloat16"),
        (3.6e-4, HALF, "float16"),
        (6.1e-4, HALF, "float16"),  # Winograd F(2,3)
        (3.2e-3, HALF, "float16"),  # Winograd F(4,3)
        (1.3e-3, HALF, "float16"),  # summed in fp16
        # between two bands
        (5e-5, FULL, "unclear"),
        (1.3e-3, FULL, "unclear"),
        (1e-3, BRAIN, "unclear"),
        (1.8e-3, HALF, "unclear"),
        # no rounding
        *((0.06, dtype, "wrong") for dtype in (FULL, HALF, BRAIN)),
        (math.nan, FULL, "wrong"),
    ],
)
def test_arithmetic_is_named_by_its_error(
    error: float, dtype: torch.dtype, arithmetic: str
) -> None:
    finding = name_arithmetic("it", error, dtype, K, winograd=True)
    assert finding.arithmetic == arithmetic, finding


def test_an_error_of_two_arithmetics_contradicts_what_neither_obeys() -> None:
    """Winograd F(4,3) in TF32 is as far off as bf16: both belie fp32, and one is true of tf32."""
    found = name_arithmetic("it", 3.2e-3, FULL, K, winograd=True)
    whole = Proof((LayerProof(DENSE, *[found] * 3),), finding("float32"))
    assert whole.contradicts(PRECISIONS["tf32"]) == ""
    sentence = whole.contradicts(PRECISIONS["fp32"])
    assert sentence.count("unclear, bfloat16 or tfloat32 (error ") == 3


def test_winograd_is_named_only_where_it_can_be() -> None:
    straight = name_arithmetic("it", 2.4e-3, FULL, K, winograd=False)
    assert straight.arithmetic == "bfloat16"
    grouped = Layer((64, 8, 8), (64, 8, 3, 3), (64, 8, 8), (1, 1), (1, 1), (1, 1), 8)
    assert DENSE.winograd
    assert grouped.winograd
    assert not replace(DENSE, stride=(2, 2)).winograd
    assert not replace(DENSE, weight=(128, 128, 1, 1)).winograd


def finding(arithmetic: str, error: float = 3e-4) -> OperationProof:
    return OperationProof("it", Arithmetic(arithmetic), error)


def proof(forward: str, grads: str = "", matmul: str = "", dense: str = "") -> Proof:
    layer = LayerProof(DENSE, finding(forward), *[finding(grads or forward)] * 2)
    known = finding(dense) if dense else None
    return Proof((layer,), finding(matmul or forward), known)


@pytest.mark.parametrize(
    ("found", "label"),
    [
        (proof("tfloat32", matmul="float32"), "fp32"),  # the default of every torch so far
        (proof("float32", matmul="tfloat32"), "fp32"),
        (proof("float32", grads="tfloat32"), "fp32"),
        (proof("float32", grads="bfloat16"), "tf32"),
        (proof("float32", matmul="tfloat32", dense="float32"), "tf32"),  # its flag is off
        (proof("float32", dense="float32"), "fp16-amp"),
        (proof("tfloat32", dense="tfloat32"), "fp16"),
        (proof("float16", grads="wrong"), "fp16"),
    ],
)
def test_a_false_label_is_contradicted(found: Proof, label: str) -> None:
    contradiction = found.contradicts(PRECISIONS[label])
    assert str(contradiction).startswith(f"labelled {label}, but it: ")


@pytest.mark.parametrize(
    ("found", "label", "arithmetic"),
    [
        (proof("tfloat32"), "tf32", "tfloat32"),
        (proof("tfloat32", grads="float32"), "tf32", "tfloat32/float32"),  # finer is no lie,
        (proof("float32", dense="tfloat32"), "tf32", "float32"),  # where no kernel takes the shape
        (proof("float16", grads="unclear"), "fp16", "float16/unclear"),
        (proof("unclear", matmul="float32", dense="unclear"), "fp32", "unclear/float32"),
    ],
)
def test_a_true_or_unclear_label_is_not(found: Proof, label: str, arithmetic: str) -> None:
    assert found.contradicts(PRECISIONS[label]) == ""
    assert found.arithmetic == arithmetic
    remarks = found.remarks(PRECISIONS[label])
    assert bool(remarks) == (arithmetic != PRECISIONS[label].arithmetic)
    assert all("error 3.0e-04" in remark for remark in remarks)


def prove_model(
    model: nn.Module, name: str = "fp32", compile: str = "off", channels_last: bool = False
) -> Proof:
    memory = torch.channels_last if channels_last else torch.contiguous_format
    precision = PRECISIONS[name]
    setting = LayerSetting(precision, CPU, 32, memory, compile)
    images = IMAGES.to(getattr(torch, precision.weights))
    cast(model, precision)

    def compute() -> None:
        with autocast(precision, CPU):
            model(images)

    return prove(setting, compute, len(IMAGES))


@pytest.mark.parametrize("name", ["fp32", "fp16", "fp16-amp", "bf16-amp"])
def test_what_ran_is_found(name: str) -> None:
    """Forward and both gradients, of a dense and of a grouped convolution of the network."""
    found = prove_model(build_model("dpn-small"), name)
    assert found.arithmetic == PRECISIONS[name].arithmetic
    assert found.contradicts(PRECISIONS[name]) == ""
    assert [str(p.layer) for p in found.layers] == [
        "1×1 convolution, 80 to 64 channels, on 16×16",
        "3×3 convolution, 64 to 64 channels, 8 groups, on 16×16",
    ]
    assert len({f.operation for f in found.findings}) == len(found.findings) == 7


def test_a_lie_is_found() -> None:
    """fp32 by its label, bf16 by what it does, gradients included."""
    liar = Precision("fp32", "", autocast="bfloat16")
    training = Training(Case(precision="bf16-amp"), build_model("dpn-small"), CPU, Workload())
    found = prove(LayerSetting(liar, CPU, 8), lambda: training.compute(IMAGES), len(IMAGES))
    contradiction = found.contradicts(PRECISIONS["fp32"])
    assert contradiction.count("(error ") == 8  # dense as well
    assert "weight gradient of the 3×3 convolution" in str(contradiction)


MODELS = {
    "5×3 convolution, 3 to 4 channels, on 32×32": lambda: nn.Conv2d(
        3, 4, (5, 3), stride=(2, 1), padding=(1, 0), dilation=2
    ),
    "3×3×3 convolution, 3 to 2 channels, on 2×32×16": lambda: nn.Sequential(
        nn.Unflatten(3, (2, 16)), Swap(), nn.Conv3d(3, 2, 3, padding=1)
    ),
    "linear layer, 3072 to 10 features": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)),
    "3×3 convolution, 128 to 128 channels, on 16×16": lambda: nn.Flatten(),
}  # fmt: skip


class Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 1, 3, 2, 4)


@pytest.mark.parametrize("layer", MODELS)
def test_any_network_is_probed(layer: str) -> None:
    """By the same layer, however many images are looked at."""
    model = MODELS[layer]()
    few, more = (
        find_layers(partial(model, x), len(x)) for x in (IMAGES, IMAGES.repeat(3, 1, 1, 1))
    )
    assert few == more
    found = prove_model(model)
    assert [str(p.layer) for p in found.layers] == [layer]
    assert found.arithmetic == "float32"
    assert found.notes == ()


def test_the_most_expensive_is_taken_of_each() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.Conv2d(32, 16, 3), nn.Conv2d(16, 16, 3, groups=4), nn.Flatten()
    )
    layers = find_layers(lambda: model(IMAGES), len(IMAGES))
    assert [(layer.weight, layer.groups) for layer in layers] == [
        ((16, 32, 3, 3), 1),
        ((16, 4, 3, 3), 4),
    ]
    larger, twice = nn.Conv2d(3, 32, 3), nn.Conv2d(3, 24, 3)
    (layer,) = find_layers(lambda: (larger(IMAGES), twice(IMAGES.repeat(2, 1, 1, 1))), len(IMAGES))
    assert (layer.weight, layer.batch) == ((24, 3, 3, 3), 2), "it sees each image twice"


def test_a_network_that_cannot_be_looked_into_is_probed_all_the_same() -> None:
    class Stubborn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("512 images or none\nsecond line")

    found = prove_model(Stubborn())
    assert [p.layer for p in found.layers] == [DENSE]
    assert found.contradicts(PRECISIONS["fp32"]) == ""
    assert found.remarks(PRECISIONS["fp32"]) == [
        "the network's layers could not be listed: ValueError: 512 images or none"
    ]


def test_the_dense_convolution_is_large_enough_at_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel without tensor cores for few images, as cuDNN has, belies no label."""

    def compute(self: Layer, x: Tensor, w: Tensor) -> Tensor:
        few = x.dtype == torch.float64 or len(x) < 16
        out = F.conv2d(x, w, padding=1)
        return out if few else out + (F.conv2d(x.half().float(), w.half().float(), padding=1) - out)

    monkeypatch.setattr(Layer, "compute", compute)
    monkeypatch.setitem(proof_module._FLOP, "cpu", 1e10)
    model = nn.Conv2d(3, 8, 3, padding=1)
    found = prove(LayerSetting(PRECISIONS["tf32"], CPU, 1), partial(model, IMAGES), len(IMAGES))
    assert found.dense.arithmetic == "tfloat32"
    assert found.layers[0].forward.arithmetic == "float32"


def test_a_probe_is_compiled_as_the_case_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for CUDA graphs; where the compiler fails, it runs without."""
    modes: list[str] = []

    def compile(compute: Callable[..., Tensor], dynamic: bool, mode: str) -> Callable[..., Tensor]:
        modes.append(mode)
        if mode != "default":
            raise RuntimeError("no compiler\nhere")
        return compute

    monkeypatch.setattr(torch, "compile", compile)
    found = prove_model(nn.Conv2d(3, 16, 3), compile="reduce-overhead")
    assert (found.arithmetic, found.notes) == ("float32", ())
    found = prove_model(nn.Conv2d(3, 16, 3), compile="max-autotune")
    assert found.arithmetic == "float32"
    assert found.notes == (
        "the probe could not be compiled and ran without: RuntimeError: no compiler",
    )
    assert set(modes) == {"default", "max-autotune-no-cudagraphs"}
