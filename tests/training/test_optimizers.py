"""Optimizers: their rules in float64, a fresh start after a warm-up, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.base.errors import UsageError
from bench.schema.grid import grid
from bench.schema.optimization import OPTIMIZERS
from bench.sweep.__main__ import main as sweep
from tests.pytest_for_tests import Capture
from tests.training_for_tests import LR, batch, training

ROOT = Path(__file__).parents[2]
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


RULES: dict[str, Formula] = {"sgd": sgd_rule, "adamw": adamw_rule}


@pytest.mark.parametrize(("precision", "scale"), [("fp32", None), ("fp16", 8.0)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_follow_the_rule_in_float64(name: str, precision: str, scale: float | None) -> None:
    """Given the gradients that the network made."""
    ours = training(precision, optimizer=name, loss_scale=scale)
    exact = [m.detach().double() for m in ours.masters]
    begun = [e.clone() for e in exact]
    states: list[dict[str, Tensor]] = [{} for _ in exact]
    # AdamW's first steps divide by roots of tiny squares: thousands of roundings
    rounds = 2.0**-20 if name == "sgd" else 2.0**-12
    for step in range(1, 9):
        x, y = batch(seed=step)
        loss = F.cross_entropy(ours.compute(x), y)
        ours.backward(loss)
        grads = [p.grad.double() / (scale or 1) for p in ours.parameters if p.grad is not None]
        assert not ours.update()[0]
        exact = [
            RULES[name](e, g, state, step, LR)
            for e, g, state in zip(exact, grads, states, strict=True)
        ]
        for master, weight, e, b in zip(ours.masters, ours.parameters, exact, begun, strict=True):
            far = rounds * float((e - b).abs().max()) + 2.0**-22 * float(e.abs().max())
            assert float((master.detach().double() - e).abs().max()) < far
            assert torch.equal(weight, master.to(weight.dtype))
            assert not torch.equal(e, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
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


def test_the_list_and_the_page_tell_the_settings(capsys: Capture) -> None:
    assert sweep(["--list"]) == 0
    listed, page = capsys.readouterr().out, (ROOT / "docs" / "own-model.md").read_text()
    for name, kind in OPTIMIZERS.items():
        assert f"{kind.name}: lr {kind.lr:g}, {kind.settings}" in listed
        assert f"| `{name}` | {kind.lr:g} | {kind.settings} |" in page
