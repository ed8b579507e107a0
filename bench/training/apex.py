"""Training by NVIDIA apex: its own code scales the loss, keeps the masters, steps and skips.

Only the network, the images and the clock are ours. The interfaces differ on overflow: with a
static scale, amp and the `FP16_Optimizer` of fp16_utils step nevertheless, and contrib's skips;
with a dynamic scale all skip, and wait for the device to decide it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from bench.apex import Interface, choose_interface, find_apex
from bench.errors import UnsupportedError, UsageError
from bench.optimization import OPTIMIZERS
from bench.precision import cast, is_dynamic
from bench.training.loop import Training
from bench.training.loss_scale import clip, find_norm

SGD = OPTIMIZERS["sgd"]


def _masters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Fp16Optimizer:
    """``FP16_Optimizer(optimizer, static_loss_scale=..., dynamic_loss_scale=...)`` of fp16_utils or
    contrib, with the interface of `_Amp`. It steps ``masters``, in the order of the weights.

    Args:
        scale_name: the attribute that holds its scale.
        setting: its loss scale, a number or "dynamic".
        optimizers: makes an optimizer of the weights, called at each restart.
    """

    def __init__(
        self,
        wrap: Any,
        scale_name: str,
        setting: float | str,
        optimizers: Callable[[], torch.optim.Optimizer],
        weights: Sequence[Tensor],
    ) -> None:
        self._wrap, self._scale_name, self._optimizers = wrap, scale_name, optimizers
        self._weights = weights
        kind = "dynamic" if is_dynamic(setting) else "static"
        value = True if is_dynamic(setting) else float(setting)
        self._arguments: dict[str, Any] = {f"{kind}_loss_scale": value}
        if "verbose" in signature(wrap).parameters:  # absent in the first versions, of 2018
            self._arguments["verbose"] = False
        # fp16_utils' backward can copy and unscale; contrib's leaves both to the step
        self._unscales = len(signature(wrap.backward).parameters) > 2
        self.restart()

    def restart(self) -> None:
        """Reset masters, momentum and loss scale from the current weights."""
        optimizer = self._optimizers()
        stepped = [id(weight) for weight in _masters(optimizer)]
        self.optimizer: Any = self._wrap(optimizer, **self._arguments)
        made = dict(zip(stepped, _masters(self.optimizer), strict=True))
        self.masters = [made[id(weight)] for weight in self._weights]
        # contrib's makes masters of fp32 weights too, steps them and never copies them back
        pairs = zip(self.masters, self._weights, strict=True)
        apart = [(m, w) for m, w in pairs if m is not w and w.dtype == torch.float32]
        self._apart = [m for m, _ in apart], [w for _, w in apart]

    def scale(self) -> float:
        return float(getattr(self.optimizer, self._scale_name))

    def backward(self, loss: Tensor, last: bool) -> None:
        self.optimizer.backward(loss, *([last] if self._unscales else []))

    def list_stepped(self) -> tuple[Sequence[Tensor], float]:
        """Return the tensors whose gradients a step reads, and by what these are scaled."""
        return (self.masters, 1.0) if self._unscales else (self._weights, self.scale())

    def step(self) -> Tensor | None:
        """Update the weights, or skip, and clear all gradients. Return whether it skipped, if apex
        keeps that on the device: of shape () or (1,), 0 if not skipped."""
        self.optimizer.step()
        masters, weights = self._apart
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        for tensor in (*self._weights, *self.masters):
            tensor.grad = None
        # contrib's flag: 0 at the start of a step, 1 for an overflow, after which it skips
        skipped: Tensor | None = getattr(self.optimizer, "overflow_buf", None)
        return skipped


class _Amp:
    """``amp.initialize(model, optimizer, opt_level=..., loss_scale=...)``; once per process."""

    def __init__(
        self,
        amp: Any,
        model: nn.Module,
        opt_level: str,
        setting: float | str,
        optimizer: torch.optim.Optimizer,
        weights: Sequence[Tensor],
    ) -> None:
        self._amp, self._weights, self._model = amp, weights, model
        _, self.optimizer = amp.initialize(
            model, optimizer, opt_level=opt_level, loss_scale=setting, verbosity=0
        )
        self._scaling = {name: dict(state) for name, state in amp.state_dict().items()}
        # apex makes its masters at the first loss and then clears the gradients of fp32 weights,
        # which would lose those of the first of several micro-batches
        with amp.scale_loss(torch.zeros((), device=weights[0].device), self.optimizer):
            pass
        self.masters = _masters(self.optimizer)

    def restart(self) -> None:
        with torch.no_grad():
            for master, weight in zip(self.masters, self._weights, strict=True):
                master.copy_(weight)
                master.grad = None
        for state in self.optimizer.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()
        self._amp.load_state_dict({name: dict(state) for name, state in self._scaling.items()})

    def scale(self) -> float:
        return float(self._amp.state_dict()["loss_scaler0"]["loss_scale"])

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backpropagate the scaled loss; apex unscales the sum as the last context closes."""
        with self._amp.scale_loss(loss, self.optimizer, delay_unscale=not last) as scaled:
            scaled.backward()

    def list_stepped(self) -> tuple[Sequence[Tensor], float]:
        return self.masters, 1.0

    def step(self) -> None:
        """Step or skip, and clear all gradients; apex itself clears the masters'."""
        self.optimizer.step()
        self._model.zero_grad(set_to_none=True)


class ApexTraining(Training):
    """A network that apex trains. Raises UnsupportedError: the installed apex does not support it,
    or cannot be imported."""

    def _equip(self) -> None:
        """Pass network and optimizer to apex, which makes the masters. The optimizer is torch's
        fused SGD, as in our own precisions, but contrib's FP16_Optimizer supports only apex's."""
        if self.workload.build_optimizer(self.parameters, self.lr) is not None:
            raise UnsupportedError(
                "NVIDIA apex trains with SGD only, and the workload brings its own optimizer: "
                "choose another --precision"
            )
        installed = find_apex()
        interface = choose_interface(installed, self._opt_level)
        setting = 1.0 if self._loss_scale_setting is None else self._loss_scale_setting
        if is_dynamic(setting) and setting != "dynamic":
            raise UnsupportedError(
                f"NVIDIA apex has a dynamic rule of its own, and cannot follow {setting}: "
                "give --loss-scale dynamic"
            )
        try:
            self.apex = f"{installed.version} {interface}".strip() if installed else None
            self._recipe = self._build(interface, setting)
        except ImportError as error:
            raise UnsupportedError(
                f"NVIDIA apex cannot be imported ({error}); build it for this torch"
            ) from error

    def _build(self, interface: Interface, setting: float | str) -> _Fp16Optimizer | _Amp:
        # on a CPU, torch 2.13's fused SGD steps fp16 weights, which O3 has, wrongly: 0.16 off after
        # one step of 216 weights from N(0, 1)
        fast = self.device.type == "cuda"

        def torch_sgd() -> torch.optim.Optimizer:
            return torch.optim.SGD(
                self.parameters, self.lr, SGD.momentum, weight_decay=SGD.weight_decay, fused=fast
            )

        if interface is Interface.AMP:
            amp = import_module("apex.amp")
            self._move()
            level = str(self._opt_level)
            return _Amp(amp, self.model, level, setting, torch_sgd(), self.parameters)
        # the rule of fp16_utils.network_to_half; contrib's documentation would halve BatchNorm too
        cast(self.model, self.precision, self.workload.keeps_fp32)
        self._move()
        if interface is Interface.FP16_UTILS:
            wrap = import_module("apex.fp16_utils").FP16_Optimizer
            return _Fp16Optimizer(wrap, "loss_scale", setting, torch_sgd, self.parameters)
        wrap = import_module("apex.contrib.optimizers").FP16_Optimizer
        sgd = import_module("apex.contrib.optimizers.fused_sgd").FusedSGD

        def apex_sgd() -> torch.optim.Optimizer:
            # one group per dtype: FP16_Optimizer detects overflow with one multi_tensor_l2norm per
            # group, whose kernel reads all tensors as if they had the first one's dtype
            alike = [
                {"params": [p for p in self.parameters if p.dtype is dtype]}
                for dtype in dict.fromkeys(p.dtype for p in self.parameters)
            ]
            optimizer: torch.optim.Optimizer = sgd(
                alike, self.lr, SGD.momentum, weight_decay=SGD.weight_decay
            )
            return optimizer

        return _Fp16Optimizer(wrap, "cur_scale", setting, apex_sgd, self.parameters)

    @torch.no_grad()
    def reset(self) -> None:
        self._reset_model()
        self.model.zero_grad(set_to_none=True)
        self._recipe.restart()
        self.masters = self._recipe.masters
        self.set_lr(self.lr)

    def state(self) -> dict[str, Any]:
        """Raise UsageError: apex keeps masters and loss scale in objects of its own.

        ``fp16_utils.FP16_Optimizer.state_dict`` holds its loss scaler as a Python object, which
        could only be read by running code, and amp is made once per process.
        """
        raise UsageError(
            "NVIDIA apex keeps its state in objects that no checkpoint holds; --precision fp16 "
            "trains by the same recipe with checkpoints"
        )

    def set_lr(self, lr: float) -> None:
        for group in self._recipe.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor, last: bool = True) -> None:
        self._recipe.backward(loss, last)

    def update(self) -> tuple[Tensor, Tensor | None]:
        """Update as apex does; return whether the gradients overflowed, and their norm if they are
        clipped. A step that apex skips counts as an overflow, whatever the gradients were."""
        overflowed, norm = ~torch.isfinite(find_norm(self.parameters)), None
        if self.clip_grad is not None:
            stepped, scale = self._recipe.list_stepped()
            norm = clip(stepped, self.clip_grad * scale) / scale
        skipped = self._recipe.step()
        return overflowed if skipped is None else overflowed | skipped.ne(0).any(), norm

    def current_scale(self) -> Tensor:
        return torch.tensor(self._recipe.scale())
