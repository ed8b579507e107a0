"""fp8: which layers are converted, what they compute, what is recorded of them, what is refused.

A CPU emulates it, as the variable `EMULATE_FP8` permits.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.base.errors import UnsupportedError
from bench.networks.data import DatasetInfo
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.precision import EMULATE_FP8, FP8_INSTALL, FP8_RECIPES, PRECISIONS, Arithmetic
from bench.schema.record import Environment, Outcome, Status
from bench.sweep.inputs import Inputs
from bench.training.arithmetic import name_arithmetic
from bench.training.float8 import convert, find_products, import_torchao
from bench.training.formats import set_flags
from bench.training.loop import Training
from bench.training.proof import LayerSetting, Proof, prove
from bench.workers.examination import Platform
from examples import transformer
from tests.planted.records import ROOT
from tests.training_for_tests import CPU, examine, run_case

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

FP8 = PRECISIONS["fp8"]
TINY = "examples.transformer:tiny"


@pytest.fixture(autouse=True, scope="module")
def _emulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EMULATE_FP8, "1")
        yield
    set_flags(PRECISIONS["fp32"])


@pytest.fixture(scope="module")
def run() -> Callable[..., Outcome]:
    done: dict[Case, Outcome] = {}

    def run(**settings: Any) -> Outcome:
        (case,) = grid({"workload": [TINY], "device": ["cpu"], "batch_size": [16]})
        case = replace(case, steps=5, **settings)
        if case not in done:
            done[case] = run_case(case)
        return done[case]

    return run


@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != "nvfp4"])
def test_the_transformer_trains_in_fp8(recipe: str, run: Callable[..., Outcome]) -> None:
    found = run(precision="fp8", fp8_recipe=recipe)
    m = found.measurement
    assert m.fp8_layers == "8 of 9 linear layers: blocks.*.qkv, blocks.*.out, blocks.*.wide.*"
    assert m.notes.startswith("fp8 is emulated in float32 (BENCH_EMULATE_FP8)")
    assert (found.status, m.arithmetic) == (Status.OK, "float8/bfloat16")
    assert m.proof_layer == (
        "fp8 linear layer, 32 to 128 features; linear layer, 32 to 16 features"
    )
    # 3.8e-2 of two factors in e4m3, 6.0e-2 with the gradient in e5m2
    back = 0.060 if recipe == "tensorwise" else 0.038
    exact = recipe == "rowwise_with_gw_hp"  # of two factors in bf16: 2.9e-3
    assert m.conv_error == pytest.approx(0.038, rel=0.15)
    assert m.input_grad_error == pytest.approx(back, rel=0.15)
    assert m.weight_grad_error == pytest.approx(0.0029 if exact else back, rel=0.15)
    share = run(precision="fp8", fp8_recipe="rowwise").measurement.fp8_flop_share
    assert share is not None
    assert m.fp8_flop_share == pytest.approx(share * (2 / 3 if exact else 1))
    theirs = run(precision="bf16-amp").steps
    for mine, other in zip(found.steps, theirs, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=0.02)
    assert [s.loss for s in found.steps] != [s.loss for s in theirs], "it would be bf16"


def train(
    workload: Workload | None = None, recipe: str = "tensorwise", **settings: Any
) -> Training:
    torch.manual_seed(0)
    workload = workload or transformer.tiny()
    case = Case(precision="fp8", lr=0.01, fp8_recipe=recipe, device="cpu", **settings)
    return Training(case, workload.build_model(), CPU, workload)


class Odd(nn.Module):
    """Layers that fp8 takes, and one of each kind that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3072, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.narrow = nn.Linear(32, 24)
        self.widen = nn.Linear(24, 32)
        self.normed = nn.utils.spectral_norm(nn.Linear(32, 32))
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.unused = nn.Linear(32, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(self.narrow(self.frozen(self.first(x.flatten(1)))))
        x = self.normed(x)[:, None]
        return self.head(self.attention(x, x, x)[0][:, 0])  # type: ignore[no-any-return]


class Images16(Workload):
    classes = 16

    def __init__(self, build: Callable[[], nn.Module] = Odd) -> None:
        self.build_model = build  # type: ignore[method-assign]


def test_what_is_left_alone() -> None:
    workload, model = Images16(), Odd()
    assert list(find_products(model, workload)) == ["first", "frozen", "unused"]
    found = convert(Case(precision="fp8"), model, CPU, workload)
    assert str(found) == "2 of 8 linear layers: first, frozen"
    changed = {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    assert changed == {"first", "frozen"}, "neither the head nor what is not called"
    # no gradient for the images; one for the input of the frozen layer, and none for its weight
    assert found.flop_per_unit == 2 * 2 * 3072 * 32 + 2 * 2 * 32 * 32
    assert found.largest.name == "first"


@pytest.mark.parametrize(
    ("batch", "accumulate", "samples", "recipe", "padded"),
    [
        (64, 1, 650, "tensorwise", True),
        (64, 4, 640, "tensorwise", False),
        (64, 1, 650, "rowwise_with_gw_hp", False),
    ],
)
def test_rows_that_are_no_multiple_of_16_are_padded(
    batch: int, accumulate: int, samples: int, recipe: str, padded: bool
) -> None:
    """torch's product takes no other inner dimension, and a weight's gradient sums over rows."""
    workload = Images16()
    workload.samples = samples
    case = Case(
        precision="fp8", device="cpu", batch_size=batch, accumulate=accumulate, fp8_recipe=recipe
    )
    training = Training(case, Odd(), CPU, workload)
    config = training.model.first.config  # type: ignore[union-attr]
    assert config.pad_inner_dim is padded  # type: ignore[union-attr]
    note = (
        "the products of fp8 are padded, since the rows of some are no multiple of 16 at this "
        "batch size"
    )
    assert (note in training.conversion.notes) is padded


def rounded(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)


@pytest.mark.parametrize(("bits", "expected"), [(4, "float8"), (3, "float8"), (2, "unclear")])
def test_rounding_is_named(bits: int, expected: str) -> None:
    """Simulated in float64, without torchao; of two formats it is the expected one."""
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, generator=rng, dtype=torch.float64) for n in ((64, 256), (256, 64)))
    error = float((rounded(a, 4) @ rounded(b, bits) - a @ b).norm() / (a @ b).norm())
    found = name_arithmetic("it", error, torch.bfloat16, 256, fp8_bits=(4, max(bits, 3)))
    assert found.arithmetic == expected
    plain = name_arithmetic("it", error, torch.bfloat16, 256)
    assert plain.arithmetic is not Arithmetic.FLOAT8, "only of a layer that was converted"


def prove_conversion(training: Training, layer: nn.Linear | None = None, **settings: Any) -> Proof:
    """The proof of a training; ``layer`` stands for all that it converted."""
    batch = training.workload.make_batch(2, CPU, torch.Generator().manual_seed(0))
    setting, conversion = LayerSetting(FP8, CPU, 16, **settings), training.conversion
    if layer is not None:
        conversion = replace(conversion, products=(replace(conversion.largest, layer=layer),))
    return prove(setting, lambda: training.compute_loss(batch), 2, conversion)


class Unscaled(nn.Linear):
    """Rounds to e4m3 what has not been scaled, so that what is small or large is lost."""

    def forward(self, x: Tensor) -> Tensor:
        low = (x * 300).to(torch.float8_e4m3fn).float() / 300
        return nn.functional.linear(low, self.weight, self.bias)


def test_a_layer_that_was_not_converted_or_not_scaled_belies_the_label() -> None:
    training = train()
    honest = prove_conversion(training)
    assert honest.contradicts(FP8) == ""
    assert honest.remarks(FP8) == [], "that the rest runs in bf16 is as it should be"
    for layer, ran in ((nn.Linear, "bfloat16"), (Unscaled, "wrong")):
        sentence = str(prove_conversion(training, layer(32, 128)).contradicts(FP8))
        assert sentence.startswith(f"labelled fp8, but fp8 linear layer, 32 to 128 features: {ran}")


@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name not in ("mxfp8", "nvfp4")])
def test_a_recipe_s_bits_are_torchao_s(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig

    made = Float8LinearConfig.from_recipe_name(recipe)
    bits = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}
    assert bits[made.cast_config_grad_output.target_dtype] == FP8_RECIPES[recipe].gradient_bits
    assert bits[made.cast_config_input.target_dtype] == 4
    assert bits[made.cast_config_weight.target_dtype] == 4


def gpu(capability: str) -> Platform:
    return Platform(Environment(gpu="NVIDIA L4", capability=capability))


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu("8.9").refuse(FP8) == gpu("12.0").refuse(FP8) == gpu("9.0").find_emulation(FP8) == ""
    needs = "fp8 needs an NVIDIA GPU of compute capability 8.9 or later; this is "
    assert gpu("8.6").refuse(FP8) == needs + "NVIDIA L4"
    cpu = Platform(Environment())
    assert cpu.refuse(FP8) == ""
    assert cpu.find_emulation(FP8) == "a CPU has no float8 arithmetic"
    monkeypatch.delenv(EMULATE_FP8)
    assert cpu.refuse(FP8) == needs + "a CPU"


def test_mxfp8_needs_a_blackwell_and_blocks_of_32() -> None:
    models = {f"workload:{TINY}": examine(TINY, "workload")}
    data = {"cifar10": DatasetInfo(*"abcdefg")}  # type: ignore[arg-type]
    case = Case(model=TINY, workload=TINY, precision="fp8", fp8_recipe="mxfp8")
    for capability, lack in (
        ("9.0", "10.0 or later; this is NVIDIA L4"),
        ("10.0", ""),
        ("12.0", ""),
    ):
        refusal = Inputs({"cuda": gpu(capability)}, models, data).refuse(case)
        assert refusal == (
            lack and "--fp8-recipe mxfp8 needs an NVIDIA GPU of compute capability " + lack
        )
    with pytest.raises(UnsupportedError, match="mxfp8 scales blocks of 32"):
        train(Images16(), "mxfp8", batch_size=16)


def test_nvfp4_is_known_and_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(model=TINY, workload=TINY, precision="fp8", fp8_recipe="nvfp4")
    data = {"cifar10": DatasetInfo(*"abcdefg")}  # type: ignore[arg-type]
    monkeypatch.delenv(EMULATE_FP8)
    for platform in (Platform(Environment()), gpu("9.0"), gpu("10.0")):
        refusal = Inputs({"cuda": platform}, {}, data).refuse(case)
        assert refusal.startswith("--fp8-recipe nvfp4 is not trained here yet: torchao has it only")


def test_a_network_without_products_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {
        "dpn92": examine("dpn-small"),
        f"workload:{TINY}": examine(TINY, "workload"),
    }
    assert [model.products for model in models.values()] == [0, 8]
    inputs = Inputs({"cuda": gpu("9.0")}, models, {"cifar10": DatasetInfo(*"abcdefg")})  # type: ignore[arg-type]
    expected = "no layer of dpn92 is a matrix product whose dimensions are both multiples of 16 "
    assert inputs.refuse(Case(precision="fp8")).startswith(expected)
    ours = Case(model=TINY, workload=TINY, precision="fp8")
    assert inputs.refuse(ours) == inputs.refuse(Case()) == ""
    monkeypatch.setattr("bench.sweep.inputs.find_version", lambda package: None)
    assert inputs.refuse(ours) == FP8_INSTALL
    with pytest.raises(UnsupportedError, match="no layer of the network is a matrix product"):
        train(Images16(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 16))))


def test_torchao_for_another_torch_is_told_with_the_versions_that_go_together() -> None:
    with pytest.raises(UnsupportedError) as error:
        import_torchao("no_such_part", "adamw-8bit")
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert str(error.value).startswith(f"adamw-8bit needs {' beside '.join(extra['fp8'])}: pip ins")
    here = f"(here are torchao {version('torchao')} and torch {torch.__version__}: ModuleNotFound"
    assert here in str(error.value)
