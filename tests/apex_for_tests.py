"""A stand-in for the amp of NVIDIA apex: its rules, written anew, on any device.

With a static scale it steps though gradients overflowed.
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


def install(folder: Path) -> Path:
    """Write a package ``apex`` with amp, to be put on the path; this stand-in is in it."""
    names = "initialize, load_state_dict, scale_loss, state_dict"
    files = {"__init__.py": f"from apex_for_tests import {names}\n", "frontend.py": ""}
    (folder / "apex/amp").mkdir(parents=True)
    for name, content in files.items():
        (folder / "apex/amp" / name).write_text(content)
    return folder


def install_here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """`install`, and have this process import that copy."""
    monkeypatch.syspath_prepend(str(install(folder)))
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
