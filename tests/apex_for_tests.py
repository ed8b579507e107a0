"""A stand-in for the amp of NVIDIA apex: its rules for O1 and O2, written anew, on any device.

With a static scale it steps though gradients overflowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.schema.precision import PRECISIONS
from bench.training.formats import cast


def install(folder: Path) -> Path:
    """Write a package ``apex`` with amp, to be put on the path; this stand-in is in it."""
    names = "initialize, load_state_dict, scale_loss, state_dict"
    files = {"__init__.py": f"from apex_for_tests import {names}\n", "frontend.py": ""}
    (folder / "apex/amp").mkdir(parents=True)
    for name, content in files.items():
        (folder / "apex/amp" / name).write_text(content)
    return folder


class _Amp:
    """The one scale of a process: halved on overflow where it is dynamic."""

    scale: float
    dynamic: bool
    pairs: list[tuple[Tensor, Tensor]]
    skip = delayed = False


def initialize(
    model: nn.Module, optimizer: Any, opt_level: str, loss_scale: float | str, verbosity: int = 1
) -> tuple[nn.Module, Any]:
    """Cast the network by its opt level and have the optimizer step masters at O2, made late."""
    if {p.dtype for p in model.parameters()} != {torch.float32}:
        raise RuntimeError("the model is to be in fp32")
    _Amp.dynamic = loss_scale == "dynamic"
    _Amp.scale = 2.0**16 if loss_scale == "dynamic" else float(loss_scale)
    _Amp.pairs, _Amp.skip, _Amp.delayed = [], False, False
    forward, step = model.forward, optimizer.step
    optimizer.late = opt_level == "O2"

    def cast_forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.float16, enabled=opt_level == "O1"):
            return forward(x.half() if opt_level == "O2" else x).float()  # type: ignore[no-any-return]

    if opt_level == "O2":
        cast(model, PRECISIONS["fp16"])
    model.forward = cast_forward

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
    for i, weight in enumerate(group["params"] if optimizer.late else []):
        if weight.dtype == torch.float16:
            group["params"][i] = weight.detach().clone().float().requires_grad_()
            _Amp.pairs.append((group["params"][i], weight))
        else:
            weight.grad = None
    optimizer.late = False


@contextmanager
def scale_loss(loss: Tensor, optimizer: Any, delay_unscale: bool = False) -> Iterator[Tensor]:
    """Give the scaled loss; unscale the gradients, into the masters where there are any."""
    (group,) = optimizer.param_groups
    scale = _Amp.scale
    if not delay_unscale and not _Amp.delayed:
        _make_masters(optimizer)
    yield loss.float() * scale
    _Amp.delayed = delay_unscale
    if delay_unscale:
        return
    _make_masters(optimizer)
    weights = {id(master): weight for master, weight in _Amp.pairs}
    seen = [weights.get(id(p), p) for p in group["params"]]
    overflowed = not all(bool(torch.isfinite(w.grad).all()) for w in seen if w.grad is not None)
    _Amp.skip = _Amp.dynamic and overflowed
    if _Amp.skip:
        _Amp.scale /= 2
    for master, weight in zip(group["params"], seen, strict=True):
        if weight.grad is not None and master is weight:
            weight.grad.mul_(1 / scale)
        elif weight.grad is not None:
            master.grad = weight.grad.float() / scale


def state_dict() -> dict[str, dict[str, float]]:
    """What amp keeps of its one scaler."""
    return {"loss_scaler0": {"loss_scale": _Amp.scale, "unskipped": 0}}


def load_state_dict(state: dict[str, dict[str, float]]) -> None:
    """Put it back."""
    _Amp.scale = state["loss_scaler0"]["loss_scale"]
