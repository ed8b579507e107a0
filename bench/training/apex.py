"""Training by NVIDIA apex's amp: its own code scales the loss, keeps the masters, steps and skips.

Only the network, the images and the clock are ours. On overflow a static scale steps nevertheless;
a dynamic one skips, and waits for the device to decide it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench.base.errors import UnsupportedError, UsageError
from bench.schema.optimization import OPTIMIZERS
from bench.schema.precision import APEX_LEVEL, POLICIES, find_apex, refuse_apex
from bench.training.loop import Training
from bench.training.loss_scale import clip, find_norm


class ApexTraining(Training):
    """A network that ``amp.initialize(model, optimizer, opt_level=…, loss_scale=…)`` trains, which
    can be called once per process. Raises UnsupportedError: the installed apex does not support
    it, or cannot be imported."""

    def _equip(self) -> None:
        """Pass network and optimizer to apex, which makes the masters. The optimizer is torch's
        fused SGD, as in our own precisions."""
        setting = 1.0 if self.case.loss_scale is None else self.case.loss_scale
        installed = find_apex()
        refusal = refuse_apex(installed, "cuda")
        if self.workload.build_optimizer(self.parameters, self.lr) is not None:
            refusal = "NVIDIA apex trains with SGD only, and the workload brings its own optimizer"
        if setting in POLICIES and setting != "dynamic":
            refusal = f"NVIDIA apex cannot follow {setting}: give --loss-scale dynamic"
        if refusal or not installed:
            raise UnsupportedError(refusal)
        try:
            self._amp: Any = import_module("apex.amp")
        except ImportError as error:
            raise UnsupportedError(
                f"NVIDIA apex cannot be imported ({error}); build it for this torch"
            ) from error
        self.apex = f"{installed.version} apex.amp".strip()
        self._move()
        sgd = OPTIMIZERS["sgd"]
        # on a CPU, torch 2.13's fused SGD steps fp16 weights, which O3 has, wrongly: 0.16 off after
        # one step of 216 weights from N(0, 1)
        fast = self.device.type == "cuda"
        made = torch.optim.SGD(
            self.parameters, self.lr, sgd.momentum, weight_decay=sgd.weight_decay, fused=fast
        )
        level = self.case.opt_level or APEX_LEVEL
        _, self.optimizer = self._amp.initialize(
            self.model, made, opt_level=level, loss_scale=setting, verbosity=0
        )
        self._ratios = [1.0] * len(self.optimizer.param_groups)
        self._scaling = {name: dict(state) for name, state in self._amp.state_dict().items()}
        # apex makes its masters at the first loss and then clears the gradients of fp32 weights,
        # which would lose those of the first of several micro-batches
        with self._amp.scale_loss(torch.zeros((), device=self.device), self.optimizer):
            pass
        self.masters = [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def reset(self) -> None:
        self._load(self._start, self._start_unsaved)
        self.model.zero_grad(set_to_none=True)
        for master, weight in zip(self.masters, self.parameters, strict=True):
            master.copy_(weight)
            master.grad = None
        for state in self.optimizer.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()
        self._amp.load_state_dict({name: dict(state) for name, state in self._scaling.items()})
        self.set_lr(self.lr)

    def state(self) -> dict[str, Any]:
        """Raise UsageError: amp is made once per process, and keeps objects of its own."""
        raise UsageError(
            "NVIDIA apex keeps its state in objects that no checkpoint holds; --precision fp16 "
            "trains by the same recipe with checkpoints"
        )

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Backpropagate the scaled loss; apex unscales the sum as the last context closes."""
        with self._amp.scale_loss(loss, self.optimizer, delay_unscale=not last) as scaled:
            scaled.backward()

    def update(self) -> tuple[Tensor, Tensor | None]:
        """Update as apex does, which clears the masters' gradients; return whether the gradients
        overflowed, and their norm if they are clipped."""
        overflowed, norm = ~torch.isfinite(find_norm(self.parameters)), None
        if self.case.clip_grad is not None:
            norm = clip(self.masters, self.case.clip_grad)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return overflowed, norm

    def current_scale(self) -> Tensor:
        return torch.tensor(float(self._amp.state_dict()["loss_scaler0"]["loss_scale"]))
