"""Optimizers: their rules in float64, a fresh start after a warm-up, and steps that are skipped."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.base.errors import UnsupportedError, UsageError
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.optimization import OFFLOADED, OPTIMIZERS, SPECIAL
from bench.schema.record import Environment
from bench.sweep.__main__ import main as sweep
from bench.sweep.inputs import Inputs
from bench.training.loop import Training
from bench.training.memory import measure_parts, watch_gradients
from bench.workers.examination import Platform
from tests.pytest_for_tests import Capture
from tests.training_for_tests import LR, batch, examine, in_parts, run_case, small, training

Formula = Callable[[Tensor, Tensor, dict[str, Tensor], int, float], Tensor]


def sgd_rule(w: Tensor, g: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
    kind = OPTIMIZERS["sgd"]
    state["v"] = kind.momentum * state.get("v", torch.zeros_like(w)) + g + kind.weight_decay * w
    return w - lr * state["v"]


def adamw_rule(w: Tensor, g: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with torch's constants."""
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(w)) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", torch.zeros_like(w)) + 0.001 * g * g
    change = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return w - lr * (change + OPTIMIZERS["adamw"].weight_decay * w)


def adam_rule(w: Tensor, g: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
    """Without its decay of 0, Adam is AdamW without decay."""
    assert OPTIMIZERS["adam"].weight_decay == 0
    return adamw_rule(w, g, state, step, lr) + lr * OPTIMIZERS["adamw"].weight_decay * w


def adafactor_rule(w: Tensor, g: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
    """Shazeer and Stern, arXiv 1804.04235, algorithm 4, with torch's place of epsilon."""
    keep, eps = 1 - step**-0.8, 2.0**-23
    v = state["v"] = keep * state.get("v", torch.zeros_like(w)) + (1 - keep) * g * g
    if w.dim() > 1:
        rows, columns = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
        v = rows * columns / rows.mean(-2, keepdim=True).clamp(min=eps)
    u = g / v.clamp(min=eps**2).sqrt()
    relative = min(lr, step**-0.5) * max(1e-3, float(w.square().mean().sqrt()))
    return w - relative * u / max(1.0, float(u.square().mean().sqrt()))


def muon_rule(w: Tensor, g: Tensor, state: dict[str, Tensor], step: int, lr: float) -> Tensor:
    """Liu et al., arXiv 2502.16982, equations 1 and 4, with the five steps of Newton and Schulz."""
    kind = OPTIMIZERS["muon"]
    m = state["m"] = state.get("m", torch.zeros_like(w)).lerp(g, 1 - kind.momentum)
    x = g.lerp(m, kind.momentum)
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return w - lr * (0.2 * max(w.shape) ** 0.5 * x + kind.weight_decay * w)


RULES: dict[str, Formula] = {
    "sgd": sgd_rule,
    "adam": adam_rule,
    "adamw": adamw_rule,
    "adafactor": adafactor_rule,
}
CLOSE = {"sgd": 2.0**-20, "adafactor": 2.0**-16}
"""Of the others, first steps divide by roots of tiny squares: thousands of roundings."""


def test_every_optimizer_has_a_formula_or_is_nearly_adamw() -> None:
    assert {*RULES, *SPECIAL} == {*OPTIMIZERS}


def layered(seed: int = 0) -> nn.Module:
    """Two matrices of hidden layers, both of a multiple of 256 elements and 4096 or more."""
    torch.manual_seed(seed)
    hidden = (nn.Linear(3072, 16), nn.ReLU(), nn.Linear(16, 256, bias=False), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))


def step_with(ours: Training, seed: int) -> list[Tensor]:
    """Take a step; return the unscaled gradients that it took, in float64."""
    x, y = batch(seed=seed)
    ours.backward(F.cross_entropy(ours.compute(x), y))
    scale = float(ours.current_scale())
    grads = [p.grad.double() / scale for p in ours.parameters if p.grad is not None]
    assert not ours.update()[0]
    return grads


@pytest.mark.parametrize(("precision", "scale"), [("fp32", None), ("fp16", 8.0)])
@pytest.mark.parametrize("name", RULES)
def test_masters_follow_the_rule_in_float64(name: str, precision: str, scale: float | None) -> None:
    """Given the gradients that the network made."""
    ours = training(precision, optimizer=name, loss_scale=scale)
    exact = [m.detach().double() for m in ours.masters]
    begun = [e.clone() for e in exact]
    states: list[dict[str, Tensor]] = [{} for _ in exact]
    for step in range(1, 9):
        grads = step_with(ours, step)
        exact = [
            RULES[name](e, g, state, step, LR)
            for e, g, state in zip(exact, grads, states, strict=True)
        ]
        for master, weight, e, b in zip(ours.masters, ours.parameters, exact, begun, strict=True):
            far = CLOSE.get(name, 2.0**-12) * float((e - b).abs().max())
            assert float((master.detach().double() - e).abs().max()) < far + 2.0**-22 * float(
                e.abs().max()
            )
            assert torch.equal(weight, master.to(weight.dtype))
            assert not torch.equal(e, b)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_muon_steps_hidden_matrices_and_adamw_the_others(precision: str) -> None:
    ours = training(precision, build=layered, optimizer="muon", lr=0.001)
    begun = [m.detach().double() for m in ours.masters]
    grads, names = step_with(ours, 1), [n for n, _ in ours.model.named_parameters()]
    for name, master, w, g in zip(names, ours.masters, begun, grads, strict=True):
        # five steps in bf16: 3.3e-2 and 8.3e-2
        rule, far = (muon_rule, 0.12) if name in ("1.weight", "3.weight") else (adamw_rule, 2e-3)
        right = rule(w, g, {}, 1, 0.001) - w
        assert float((master.detach().double() - w - right).norm() / right.norm()) < far


def make(name: str, build: Callable[[int], nn.Module] = layered, **axes: Any) -> Training:
    return training(build=build, optimizer=name, lr=OPTIMIZERS[name].lr, **axes)


BIG, SMALL = 3072 * 16 + 16 * 256, 16 + 256 * 10 + 10
STATE_BYTES = {
    "sgd": 4 * (BIG + SMALL),
    "adam": 8 * (BIG + SMALL) + 5 * 4,  # and a count of steps for each of five weights
    "adamw": 8 * (BIG + SMALL) + 5 * 4,
    "muon": 4 * BIG + 8 * SMALL + 3 * 4,
    "adafactor": 4 * (3072 + 16 + 16 + 16 + 256 + 256 + 10 + 10) + 5 * 4,
    # two codes, a scale for each block of each moment, and two tables of values for each weight
    "adamw-8bit": 2 * BIG + 2 * 4 * BIG // 256 + 2 * 2 * 256 * 4 + 8 * SMALL + 5 * 4,
    "adamw-4bit": BIG + 2 * 4 * BIG // 128 + 2 * 2 * 16 * 4 + 8 * SMALL + 5 * 4,
    "adamw-fp8": 2 * BIG + 2 * 4 * BIG // 256 + 8 * SMALL + 5 * 4,
}
ON_A_CPU = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            OPTIMIZERS[name].torchao and find_spec("torchao") is None,
            reason="torchao is not installed",
        ),
    )
    for name in STATE_BYTES
]


def test_the_state_of_each_optimizer_has_a_formula() -> None:
    assert STATE_BYTES.keys() == OPTIMIZERS.keys() - {OFFLOADED}  # whose state is the host's


@pytest.mark.parametrize("name", ON_A_CPU)
def test_the_state_takes_its_formula_s_bytes_and_clears(name: str) -> None:
    """A reset is bitwise a fresh start, and what a checkpoint holds continues bitwise."""
    ours = make(name)
    first = [float(ours.step(batch(seed=seed))[0]) for seed in range(4)]
    assert measure_parts([ours.optimizer], [ours.model]) == {
        "weights_bytes": 4 * (BIG + SMALL),
        "optimizer_bytes": STATE_BYTES[name],
    }
    kept = io.BytesIO()
    torch.save(ours.state(), kept)
    then = float(ours.step(batch(seed=5))[0])
    ours.reset()
    assert [float(ours.step(batch(seed=seed))[0]) for seed in range(4)] == first
    other = make(name, seed=1)
    kept.seek(0)
    other.restore(torch.load(kept, weights_only=True))
    after = float(other.step(batch(seed=5))[0])
    last = [one.step(batch(seed=6))[0] for one in (other, make(name, seed=1))]
    assert after == then
    assert last[0] != last[1]


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize(
    ("name", "most"), [("adamw-8bit", 0.03), ("adamw-4bit", 0.3), ("adamw-fp8", 0.03)]
)
@torch.no_grad()
def test_rounded_moments_move_weights_nearly_as_adamw_s(name: str, most: float) -> None:
    """By the median weight, as e4m3 has no second moments 2^-18 of the largest in their block."""
    exact, rounded = make("adamw"), make(name)
    begun = [w.clone() for w in exact.parameters]
    for one in (exact, rounded):
        for seed in range(4):
            with torch.enable_grad():
                one.step(batch(seed=seed))
    for begin, right, ours in zip(begun, exact.parameters, rounded.parameters, strict=True):
        off = float((ours - right).abs().median() / (right - begin).abs().median())
        assert off < most
        assert off > 1e-3 or right.numel() < 4096, "nothing was rounded"


@pytest.mark.parametrize("name", ["adamw-8bit", "muon"])
@pytest.mark.parametrize("precision", ["fp16-amp", "bf16-pure"])
def test_others_train_with_scaling_clipping_and_parts(name: str, precision: str) -> None:
    """A step whose gradients overflow changes nothing: the scaler skips it."""
    ours = make(name, clip_grad=0.1, accumulate=2, precision=precision)
    assert all(math.isfinite(float(ours.step(in_parts(*batch(), 8, 8))[0])) for _ in range(2))
    if precision == "fp16-amp":
        begun = [w.detach().clone() for w in ours.parameters]
        x, y = batch()
        assert ours.step((x * 1e30, y))[2]
        assert all(map(torch.equal, begun, ours.parameters))


class Stream:
    """A stream of a GPU that runs everything at once; its own event."""

    def wait_stream(self, other: Stream) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stands for the GPU, to which it copies."""
    pytest.importorskip("torchao.optim")
    make_like = torch.empty_like
    plain = lambda x, pin_memory=False, **to: make_like(x, **to)  # noqa: E731
    monkeypatch.setattr(torch, "empty_like", plain)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torchao.optim.cpu_offload.get_available_devices", lambda: ["cuda"])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    # torch's build for CUDA asks the driver here whether a graph is captured
    check = "_accelerator_graph_capture_health_check"
    monkeypatch.setattr(torch.optim.Optimizer, check, lambda self: None, raising=False)


@pytest.mark.usefixtures("pretended_gpu")
def test_an_offloaded_step_is_bitwise_adamw_s_also_after_a_reset() -> None:
    """Its copies of weights on the host follow a reset and a checkpoint, which torchao's do not."""
    ours, right = make("adamw-offload"), make("adamw")
    for one in (ours, right):
        with watch_gradients(one.optimizer, one.parameters) as gradients:
            for seed in range(3):
                one.step(in_parts(*batch(seed=seed), 8, 8))
        assert gradients, "its steps are seen"
    assert all(map(torch.equal, ours.parameters, right.parameters))
    kept = copy.deepcopy(ours.state())
    for one in (ours, right):
        one.reset()
        one.step(batch(seed=9))
    assert all(map(torch.equal, ours.parameters, right.parameters))
    ours.restore(kept)
    right.restore(copy.deepcopy(kept) | {"optimizer": right.optimizer.state_dict()})
    assert all(map(torch.equal, ours.parameters, right.parameters))
    begun = [w.detach().clone() for w in ours.parameters]
    ours.set_lr(0.0)
    ours.step(batch(seed=9))
    assert all(map(torch.equal, ours.parameters, begun)), "a rate of 0 moves no weight"


def test_what_offloading_cannot_do_is_refused_in_one_line() -> None:
    for axis, value in (("precision", "fp16-amp"), ("precision", "bf16"), ("clip_grad", 1.0)):
        with pytest.raises(UsageError, match="sends gradients to the host before they are"):
            grid({"optimizer": ["adamw-offload"], axis: [value]})
    with pytest.raises(UsageError, match="torch captures fused steps"):
        grid({"optimizer": ["muon"], "cuda_graphs": [True]})
    inputs = Inputs({"cpu": Platform(Environment())}, {}, {})
    why = inputs.refuse(Case(optimizer="adamw-offload", device="cpu"))
    assert why.endswith("this is a CPU; use adamw")


class Layered(Workload):
    classes = 10

    def build_model(self) -> nn.Module:
        return layered()


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_a_step_that_an_optimizer_compiles_is_not_the_user_s_code() -> None:
    (case,) = grid({"workload": [f"{__name__}:Layered"], "device": ["cpu"], "batch_size": [16]})
    done = run_case(replace(case, optimizer="adamw-fp8", lr=3e-4, steps=2))
    assert done.status == "ok", done.reason
    assert done.measurement.compiled_within is None
    assert done.measurement.labelled_flop_share == 1.0, "what it steps is counted, uncompiled"


def test_what_would_be_adamw_alone_is_refused() -> None:
    """DPN's only matrix is its head; the weights of the other network are small."""
    reasons = {"muon": "is a matrix of a hidden layer", "adamw-8bit": "has at least 4,096 elements"}
    for name, why in reasons.items():
        build = (
            small
            if name == "muon"
            else (lambda seed: nn.Sequential(nn.Flatten(), nn.Linear(3072, 1)))
        )
        with pytest.raises(UnsupportedError, match=f"{why}.* so {name} would be AdamW"):
            make(name, build)
    assert examine("dpn-small").plain == ("muon",)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_reset_is_bitwise_a_fresh_start(name: str) -> None:
    """Weights, momentum, AdamW's count of steps: nothing is left, and nothing was missing."""
    fresh, warmed = (training("fp16", optimizer=name) for _ in range(2))
    allocated = {k: v.shape for s in warmed.optimizer.state.values() for k, v in s.items()}
    for seed in range(3):
        warmed.step(batch(seed=50 + seed))
    assert {k: v.shape for s in warmed.optimizer.state.values() for k, v in s.items()} == allocated
    assert any(bool(v.any()) for s in warmed.optimizer.state.values() for v in s.values())
    warmed.reset()
    for state in warmed.optimizer.state.values():
        assert not any(bool(value.any()) for value in state.values())
    begun = [one.model.state_dict().values() for one in (fresh, warmed)]
    assert all(map(torch.equal, *begun)), "BatchNorm's statistics too"
    for seed in range(3):
        assert torch.equal(fresh.step(batch(seed=seed))[0], warmed.step(batch(seed=seed))[0])
        assert all(map(torch.equal, fresh.masters, warmed.masters))


def test_each_optimizer_takes_its_own_learning_rate() -> None:
    cases = grid({"optimizer": [*OPTIMIZERS]})
    assert {c.optimizer: c.lr for c in cases} == {n: k.lr for n, k in OPTIMIZERS.items()}
    with pytest.raises(UsageError, match="apex trains with SGD only"):
        grid({"optimizer": ["adamw"], "precision": ["fp16-apex"]})


def test_the_list_tells_the_settings(capsys: Capture) -> None:
    assert sweep(["--list"]) == 0
    listed = capsys.readouterr().out
    for kind in OPTIMIZERS.values():
        assert f"{kind.name}: lr {kind.lr:g}, {kind.settings}" in listed
