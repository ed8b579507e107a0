"""Stand-ins for the three interfaces of NVIDIA apex: their rules, written anew, on any device.

With a static scale those of fp16_utils and amp step though gradients overflowed; contrib's skips.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.precision import PRECISIONS, cast

GENERATIONS = {
    "2018": {"fp16_utils": "FirstFp16UtilsOptimizer as FP16_Optimizer"},
    "2019": {
        "fp16_utils": "Fp16UtilsOptimizer as FP16_Optimizer",
        "amp": "initialize, load_state_dict, scale_loss, state_dict",
    },
    "today": {"contrib/optimizers": "ContribOptimizer as FP16_Optimizer"},
}
"""The packages that a copy of the time offers, and what each imports from here."""


def install(folder: Path, generation: str) -> Path:
    """Write a package ``apex`` of that time, to be put on the path; these stand-ins are in it."""
    files = {"optimizers/__init__.py": ""}
    for package, names in GENERATIONS[generation].items():
        files[f"{package}/__init__.py"] = f"from apex_for_tests import {names}\n"
        files[f"{package}/{'frontend' if package == 'amp' else 'fp16_optimizer'}.py"] = ""
    if generation == "today":
        files["contrib/optimizers/fused_sgd.py"] = "from apex_for_tests import FusedSGD\n"
        files["../amp_C.py"] = ""
    for name, content in files.items():
        (folder / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "apex" / name).write_text(content)
    return folder


def install_here(monkeypatch: pytest.MonkeyPatch, folder: Path, generation: str) -> None:
    """`install`, and have this process import that copy."""
    monkeypatch.syspath_prepend(str(install(folder, generation)))
    for name in [n for n in sys.modules if n.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)


class _Scaler:
    """A scale, static or by the rule of 2019: halved on overflow, doubled after 2,000 steps."""

    def __init__(self, setting: float | str) -> None:
        self.dynamic = setting == "dynamic"
        self.scale = 2.0**16 if setting == "dynamic" else float(setting)
        self.unskipped = 0

    def skips(self, overflowed: bool) -> bool:
        self.unskipped = 0 if overflowed else self.unskipped + 1
        if self.dynamic and overflowed:
            self.scale /= 2
        if self.dynamic and self.unskipped == 2000:
            self.scale, self.unskipped = min(self.scale * 2, 2.0**24), 0
        return self.dynamic and overflowed


def _bad(grads: list[Tensor]) -> bool:
    return any(not math.isfinite(float(g.float().sum())) for g in grads)


def _copy_in_fp32(weight: Tensor) -> Tensor:
    return weight.detach().clone().float().requires_grad_()


class Fp16UtilsOptimizer:
    """Masters of the half weights alone; a static scale never skips."""

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Any = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer, self.overflow = init_optimizer, False
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for group in init_optimizer.param_groups:
            for i, weight in enumerate(group["params"]):
                master = _copy_in_fp32(weight) if weight.dtype == torch.float16 else weight
                group["params"][i] = master
                self.pairs.append((master, weight))
        self.scaler = _Scaler("dynamic" if dynamic_loss_scale else static_loss_scale)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    def backward(self, loss: Tensor, update_master_grads: bool = True) -> None:
        (loss.float() * self.loss_scale).backward()
        if not update_master_grads:
            return
        scale = self.loss_scale
        used = [(m, w) for m, w in self.pairs if w.grad is not None]
        self.overflow = self.scaler.skips(_bad([w.grad for _, w in used]))  # type: ignore[misc]
        for master, weight in used:
            assert weight.grad is not None
            if master is weight:
                weight.grad.mul_(1 / scale)
            else:
                master.grad = weight.grad.float() / scale

    @torch.no_grad()
    def step(self) -> None:
        if self.overflow:
            return
        self.optimizer.step()
        for master, weight in self.pairs:
            weight.copy_(master)


class FirstFp16UtilsOptimizer(Fp16UtilsOptimizer):
    """That of April to August 2018, which takes fewer arguments."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
    ) -> None:
        super().__init__(optimizer, static_loss_scale, dynamic_loss_scale)


class FusedSGD(torch.optim.Optimizer):
    """Steps fp32 masters on gradients it is given, and writes the half weights, not the fp32."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, *, grads: Any, output_params: Any, scale: float, grad_norms: Any
    ) -> None:
        for group, weights, given in zip(self.param_groups, output_params, grads, strict=True):
            for master, weight, grad in zip(group["params"], weights, given, strict=True):
                speed = self.state[master].setdefault("momentum_buffer", torch.zeros_like(master))
                change = grad.float() / scale + group["weight_decay"] * master
                master.sub_(group["lr"] * speed.mul_(group["momentum"]).add_(change))
                if weight.dtype == torch.float16:
                    weight.copy_(master)


class ContribOptimizer:
    """Masters of every weight; skips on overflow whatever the scale."""

    def __init__(
        self,
        init_optimizer: FusedSGD,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Any = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.weights = [group["params"] for group in init_optimizer.param_groups]
        for group in init_optimizer.param_groups:
            group["params"] = [_copy_in_fp32(w) for w in group["params"]]
        self.overflow_buf = torch.zeros(1, dtype=torch.int32)
        self.scaler = _Scaler("dynamic" if dynamic_loss_scale else static_loss_scale)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def cur_scale(self) -> float:
        return self.scaler.scale

    def backward(self, loss: Tensor) -> None:
        (loss.float() * self.cur_scale).backward()

    def step(self) -> None:
        grads = [[w.grad for w in group] for group in self.weights]
        # the kernel reads all gradients of a group as of the first one's dtype
        assert all(len({grad.dtype for grad in group}) == 1 for group in grads)
        scale, bad = self.cur_scale, any(map(_bad, grads))
        self.overflow_buf.fill_(bad)
        self.scaler.skips(bad)
        if not bad:
            self.optimizer.step(grads=grads, output_params=self.weights, scale=scale, grad_norms=[])


class _Amp:
    scaler: _Scaler
    pairs: list[tuple[Tensor, Tensor]]
    skip = delayed = False


def initialize(
    model: nn.Module, optimizer: Any, opt_level: str, loss_scale: float | str, verbosity: int = 1
) -> tuple[nn.Module, Any]:
    """Cast the network by its opt level and have the optimizer step masters at O2, made late."""
    if {p.dtype for p in model.parameters()} != {torch.float32}:
        raise RuntimeError("the model is to be in fp32")
    _Amp.scaler, _Amp.pairs, _Amp.skip = _Scaler(loss_scale), [], False
    _Amp.delayed = False
    forward, step = model.forward, optimizer.step
    if opt_level == "O1":

        def cast_forward(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.float16):
                return forward(x).float()  # type: ignore[no-any-return]

        model.forward = cast_forward
    elif opt_level in ("O2", "O3"):
        if opt_level == "O2":
            cast(model, PRECISIONS["fp16"])
        else:
            model.half()
        model.forward = lambda x: forward(x.half()).float()
    optimizer.late = opt_level == "O2"

    @torch.no_grad()
    def new_step() -> None:
        if not _Amp.skip:
            step()
            for master, weight in _Amp.pairs:
                weight.copy_(master)
        for master, _ in _Amp.pairs:
            master.grad = None

    optimizer.step = new_step
    return model, optimizer


def _make_masters(optimizer: Any) -> None:
    """At the first loss that is unscaled; the gradients that fp32 weights have by then are lost."""
    (group,) = optimizer.param_groups
    if optimizer.late:
        for i, weight in enumerate(group["params"]):
            if weight.dtype == torch.float16:
                group["params"][i] = _copy_in_fp32(weight)
                _Amp.pairs.append((group["params"][i], weight))
            else:
                weight.grad = None
        optimizer.late = False


@contextmanager
def scale_loss(loss: Tensor, optimizer: Any, delay_unscale: bool = False) -> Iterator[Tensor]:
    """Give the scaled loss; unscale the gradients, into the masters where there are any."""
    scaler = _Amp.scaler
    (group,) = optimizer.param_groups
    scale = scaler.scale
    if not delay_unscale and not _Amp.delayed:
        _make_masters(optimizer)
    yield loss.float() * scale
    _Amp.delayed = delay_unscale
    if delay_unscale:
        return
    _make_masters(optimizer)
    weights = {id(master): weight for master, weight in _Amp.pairs}
    seen = [weights.get(id(p), p) for p in group["params"]]
    _Amp.skip = scaler.skips(_bad([w.grad for w in seen if w.grad is not None]))
    for master, weight in zip(group["params"], seen, strict=True):
        if weight.grad is not None and master is weight:
            weight.grad.mul_(1 / scale)
        elif weight.grad is not None:
            master.grad = weight.grad.float() / scale


def state_dict() -> dict[str, dict[str, float]]:
    """What amp keeps of its one scaler."""
    scaler = _Amp.scaler
    return {"loss_scaler0": {"loss_scale": scaler.scale, "unskipped": scaler.unskipped}}


def load_state_dict(state: dict[str, dict[str, float]]) -> None:
    """Put it back."""
    kept = state["loss_scaler0"]
    _Amp.scaler.scale, _Amp.scaler.unskipped = kept["loss_scale"], int(kept["unskipped"])
