"""Frozen weights: what is frozen, what is not kept of it, and what goes on as before."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.base.errors import UsageError
from bench.networks.freezing import freeze, normalises_batches
from bench.networks.workloads import Workload, load_workload
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.precision import PRECISIONS
from bench.schema.record import Outcome, Status
from bench.sweep.inputs import Inputs
from bench.training.counting import count_flop
from bench.training.formats import cast
from bench.workers.epochs import evaluate
from tests.training_for_tests import (
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    batch,
    examine,
    in_parts,
    run_case,
    small,
    training,
)

TWO, TRANSFORMER = "examples.two_losses:tiny", "examples.transformer:tiny"
find_head = Workload().find_head


class Fine(Workload):
    """Small images, a network with BatchNorm, and test images too."""

    shape, samples, test_samples = (3, 8, 8), 32, 16

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def make_test_batch(self, first: int, size: int, device: torch.device) -> Any:
        return self.make_batch(size, device, torch.Generator(device).manual_seed(first))


class Named(nn.BatchNorm2d):
    """A subclass, as timm's BatchNormAct2d."""


class Held(nn.Module):
    """Frozen by its author, as torchvision's FrozenBatchNorm2d: it never normalises by the batch,
    and computes in the format of its weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            self.register_buffer(name, torch.full((channels,), float(value)))

    def forward(self, x: Tensor) -> Any:
        scale = (self.weight * (self.running_var + 1e-5).rsqrt())[:, None, None]  # type: ignore[operator,union-attr]
        return x * scale + (self.bias - self.running_mean * scale[:, 0, 0])[:, None, None]  # type: ignore[operator]


def with_norm(norm: Any = nn.BatchNorm2d) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )


def parametrized() -> Any:
    model = with_norm()
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    return model


WRITTEN: dict[str, Callable[[], Any]] = {
    "eager": with_norm,
    "scripted": lambda: torch.jit.script(with_norm()),
    "scripted subclass": lambda: torch.jit.script(with_norm(Named)),
    "subclass": lambda: with_norm(Named),
    "synchronised": lambda: with_norm(nn.SyncBatchNorm),
    "graph": lambda: torch.fx.symbolic_trace(with_norm()),
    "parametrized": parametrized,
    "traced": lambda: torch.jit.trace(with_norm(), torch.zeros(2, 3, 8, 8), check_trace=False),
    "frozen": lambda: with_norm(Held),
}


@pytest.mark.parametrize("way", WRITTEN)
def test_batchnorm_is_known_however_it_was_written(way: str) -> None:
    """As eager: its weights and statistics stay in fp32, and are frozen by name."""
    model = WRITTEN[way]()
    norms = {n: t for n, t in model.named_buffers() if n.endswith(("running_mean", "running_var"))}
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    if way != "synchronised":  # its kernels are of CUDA
        run = training("bf16", build=lambda _: model)
        losses = [float(run.step((images, torch.arange(8)))[0]) for _ in range(3)]
        assert losses[-1] < losses[0]
        if "frozen" not in way:
            plain = training("bf16", build=lambda _: with_norm())
            assert losses == [float(plain.step((images, torch.arange(8)))[0]) for _ in range(3)]
    else:
        cast(model, PRECISIONS["bf16"])
    kept = [t.dtype for n, t in model.state_dict().items() if n.rpartition(".")[0].endswith("1")]
    assert {*kept} - {torch.int64} == {torch.float32}
    assert model.state_dict()[next(iter(model.state_dict()))].dtype == torch.bfloat16
    assert len(norms) == 2
    if way == "frozen":
        assert not normalises_batches(model), "it needs no batch of two"
    elif way == "traced":
        with pytest.raises(UsageError, match=r"was traced as it trains.*torch\.jit\.script"):
            freeze(model, "bn", find_head)
    else:
        (layer,) = freeze(model, "bn", find_head)
        assert (layer.training, normalises_batches(model, [layer])) == (False, False)
        assert normalises_batches(model), "another may be in the setting"
        assert len(trained(model)) == 4


def trained(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def run(frozen: str, precision: str = "fp32", workload: str = f"{__name__}:Fine") -> Outcome:
    (case,) = grid({"workload": [workload], "device": ["cpu"], "precision": [precision]})
    return run_case(replace(case, batch_size=8, freeze=frozen, evaluate=True))


def test_a_batch_of_one_needs_no_batchnorm_that_is_frozen() -> None:
    name = f"{__name__}:Fine"
    found = examine(name, "workload", freezes=("bn", "0", "backbone"))
    assert (found.batchnorm, found.still) == (True, ("bn", "backbone"))
    assert replace(found, still=()) == examine(name, "workload"), "it is the same network"
    inputs = Inputs({}, {f"workload:{name}": found}, {})
    case = Case(model=name, dataset="own", workload=name, batch_size=1, freeze="bn")
    inputs.check_batches(case)
    for trained in ("0", "none"):
        with pytest.raises(UsageError, match="BatchNorm needs two"):
            inputs.check_batches(replace(case, freeze=trained))


@pytest.mark.parametrize(
    ("setting", "left", "still"),
    [
        ("none", ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"], []),
        ("backbone", ["4.weight", "4.bias"], ["1"]),
        ("bn", ["0.weight", "0.bias", "4.weight", "4.bias"], ["1"]),
        ("*.bias", ["0.weight", "1.weight", "4.weight"], []),  # its BatchNorm still trains
        ("4,1", ["0.weight", "0.bias"], ["1"]),
    ],
)
def test_a_setting_names_weights_and_the_batchnorm_among_them(
    setting: str, left: list[str], still: list[str]
) -> None:
    model = small()
    layers = freeze(model, setting, find_head)
    assert trained(model) == left
    assert [name for name, module in model.named_modules() if not module.training] == still
    assert layers == [model.get_submodule(name) for name in still]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("O", "--freeze O: nothing that trains has this name; it has 0.weight, 0.bias, 1.weight"),
        ("backbon", "did you mean 'backbone'?"),
        ("*", "--freeze *: nothing is left to train; freeze less"),
    ],
)
def test_what_freezes_nothing_or_all_is_refused(setting: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        freeze(small(), setting, find_head)
    assert message in str(refused.value)


def test_the_name_that_was_given_is_not_proposed() -> None:
    with pytest.raises(UsageError, match=r"has this name; it has weight, bias, …$"):
        freeze(nn.Linear(4, 4), "bn", find_head)


def test_tied_weights_are_one_and_what_a_network_froze_itself_stays_frozen() -> None:
    """The head of a transformer is its embedding: that is left to train, by either name."""
    model = load_workload(TRANSFORMER).build_model()
    freeze(model, "backbone", load_workload(TRANSFORMER).find_head)
    (left,) = (p for p in model.parameters() if p.requires_grad)
    assert left is find_head(model).weight
    own = load_workload(TWO).build_model()
    freeze(own, "neck", find_head)
    assert trained(own) == ["what.weight", "what.bias", "where.weight", "where.bias"]


@pytest.mark.parametrize(
    ("setting", "sizes"), [("bn", (16,)), ("backbone", (7, 7, 2)), ("0", (16,)), ("0", (7, 7, 2))]
)
def test_steps_are_those_of_a_plain_loop(setting: str, sizes: tuple[int, ...]) -> None:
    """In float64, by torch's own SGD, on a network frozen by hand."""
    torch.manual_seed(0)
    ours = training(build=lambda _: small().double(), freeze=setting)
    plain = small().double()
    fixed = {"bn": [1], "backbone": [0, 1], "0": [0]}[setting]
    for index in fixed:
        plain[index].requires_grad_(False)  # type: ignore[index]
        if index == 1:
            plain[index].eval()  # type: ignore[index]
    left = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(left, LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    for seed in range(3):
        x, y = batch(seed=seed)
        x = x.double()
        ours.step(in_parts(x, y, *sizes) if len(sizes) > 1 else (x, y))
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            # the loss is float32, as is what the network gives to it
            (F.cross_entropy(plain(a).float(), b) * len(a) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, one), (_, other) in zip(
        ours.model.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("setting", "precision"),
    [("bn", "fp32"), ("bn", "fp16"), ("backbone", "bf16"), ("0", "bf16-amp"), ("0", "fp16")],
)
def test_frozen_weights_and_statistics_stay_and_the_others_go_on(
    setting: str, precision: str
) -> None:
    class Tested(Workload):
        test_samples = 16

        def make_test_batch(self, first: int, size: int, device: torch.device) -> Any:
            return batch(size)

    ours = training(precision, workload=Tested(), batch_size=16, freeze=setting)
    before = copy.deepcopy(ours.model.state_dict())
    for _ in range(2):
        ours.step(batch())
        ours.evaluate([batch()])
        evaluate(ours)
        ours.step(batch())
    moved = {
        name.partition(".")[0] + ("s" if "running" in name else "")
        for name, value in ours.model.state_dict().items()
        if not torch.equal(value, before[name])
        and (value.is_floating_point() and "batches" not in name)
    }
    assert moved == {"bn": {"0", "4"}, "backbone": {"4"}, "0": {"1", "1s", "4"}}[setting]
    ours.reset()
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_flop_by_hand() -> None:
    """Of 2 FLOP a product: forward for all layers, and the gradients that autograd computes."""
    first, second, head = 2 * 64 * 4 * 27, 2 * 64 * 8 * 36, 2 * 512 * 10
    every = first + second + head
    assert count_flop(Fine(), "none") == every + first + 2 * (second + head)
    assert count_flop(Fine(), "backbone") == every + head
    assert count_flop(Fine(), "0,1") == every + second + 2 * head  # the first that trains: weights
    assert count_flop(Fine(), "3,4") == every + first + second + 2 * head
    assert count_flop(Fine(), "bn") == count_flop(Fine(), "none")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_case_says_what_was_not_computed(precision: str) -> None:
    found = run("backbone", precision)
    m = found.measurement
    assert found.status is Status.OK
    assert m.flop_per_image == count_flop(Fine(), "backbone")
    assert m.conv_error is not None
    assert m.input_grad_error is m.weight_grad_error is None
    assert found.missing["weight_grad_error"] == "what was probed, or all before it, is frozen"
    assert found.missing["input_grad_error"] == found.missing["weight_grad_error"]
    assert math.isfinite(m.test_loss)


class Needy(Fine):
    """Its optimizer wants weights of the first convolution."""

    def build_optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.shape[1:] == (3, 3, 3)], lr)


def test_a_freeze_is_tried_before_any_case() -> None:
    examine(f"{__name__}:Needy", "workload", freezes=["bn"])
    with pytest.raises(UsageError, match="in fp32 with --freeze 0 fails: ValueError: optimizer"):
        examine(f"{__name__}:Needy", "workload", freezes=["0"])
    with pytest.raises(UsageError, match=r"model 'dpn26': --freeze stme: nothing .*stem"):
        examine("dpn26", freezes=["stme"])
