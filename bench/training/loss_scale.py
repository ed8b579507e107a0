"""Loss scaling: none, static as in 2019, or dynamic; and the detection of overflow.

fp16 has no values below 2^-24: small gradients flush to zero unless the loss, and so every
gradient, is multiplied by a scale first; a scale that is too large overflows to inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.schema.precision import POLICIES, DynamicPolicy


class LossScale:
    """Scales the loss and steps on unscaled gradients, without waiting for the device. This base
    class scales nothing, for precisions whose gradients have fp32's range."""

    def __init__(self, device: torch.device, value: float = 1.0) -> None:
        self._current = torch.full((), value, device=device)
        self._never = torch.zeros((), dtype=torch.bool, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss, float32 of shape ()."""
        return loss

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        look: Callable[[], object] | None = None,
    ) -> Tensor:
        """Unscale ``parameters``' gradients and step; return whether any overflowed: bool, ().

        ``look`` is called when they are unscaled, before the step, and may change them. Without it
        a fused optimizer may be given scaled ones, which its kernel unscales.
        """
        if look:
            look()
        optimizer.step()
        return self._never

    def current(self) -> Tensor:
        """Return the current scale, float32 of shape (), on the device."""
        return self._current

    def state(self) -> dict[str, Any]:
        """Return the state that steps change, as plain numbers; this waits for the device."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""


def group_gradients(parameters: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Return the gradients by dtype: over several, torch's ``_foreach_*`` take a kernel for each
    tensor, and are wrong on a GPU in torch 2.9 and 2.10."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for grad in (p.grad for p in parameters if p.grad is not None):
        groups.setdefault(grad.dtype, []).append(grad)
    return groups


def find_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, of shape (): in float32 also where they are half.

    One fused norm for each dtype: 0.03 ms of bandwidth for DPN-92 on a card of 4 TB/s.
    """
    norms: list[Tensor] = []
    for dtype, grads in group_gradients(parameters).items():
        norms += torch._foreach_norm(grads, 2.0, dtype=torch.promote_types(dtype, torch.float))
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    whole = getattr(norm, "full_tensor", None)  # of a DTensor, over all processes
    return whole() if whole else norm


def clip(parameters: Sequence[Tensor], most: float) -> Tensor:
    """Scale gradients whose norm is above ``most`` down to it, as torch.nn.utils.clip_grad_norm_;
    return the norm that they had, of shape ()."""
    norm = find_norm(parameters)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for dtype, grads in group_gradients(parameters).items():
        if dtype == factor.dtype:
            torch._foreach_mul_(grads, factor)
        else:  # by a factor of another dtype, a foreach takes a kernel for each tensor
            none = torch.zeros_like(factor)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, none, factor)
    return norm


class StaticScale(LossScale):
    """A constant scale, like apex's ``static_loss_scale``.

    No step is skipped: inf and NaN reach the weights, as in 2019, and overflows are counted. A
    constant scale that skipped them would skip at the same weights again; a dynamic one falls.
    """

    def __init__(self, value: float, device: torch.device) -> None:
        super().__init__(device, value)
        self.value = value

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        look: Callable[[], object] | None = None,
    ) -> Tensor:
        overflowed = ~torch.isfinite(find_norm(parameters))
        for grads in group_gradients(parameters).values():
            torch._foreach_mul_(grads, 1 / self.value)
        super().step(optimizer, parameters, look)
        return overflowed


class DynamicScale(LossScale):
    """A scale that follows a `DynamicPolicy`: on overflow it is lowered and the step skipped.

    apex's rules equal that of torch's GradScaler except for constants and bounds: apex counted the
    steps since the last overflow and grew at every multiple of its window; restarting the count at
    each multiple gives the same. So GradScaler implements all policies. A fused optimizer skips
    inside the kernel without waiting for the device; with any other, each step waits to learn
    whether to skip.
    """

    def __init__(self, device: torch.device, policy: DynamicPolicy) -> None:
        super().__init__(device)
        self._policy, self._one = policy, self._current
        self._scaler = torch.amp.GradScaler(
            device.type, policy.initial, policy.factor, 1 / policy.factor, policy.window
        )
        self._current = self._scaler.scale(self._one)

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        look: Callable[[], object] | None = None,
    ) -> Tensor:
        if look:
            self._scaler.unscale_(optimizer)
            look()
        self._scaler.step(optimizer)
        self._scaler.update()
        adapted = self._scaler.scale(self._one)
        overflowed = adapted < self._current
        if (self._policy.lowest, self._policy.highest) != (0.0, 2.0**127):
            adapted = adapted.clamp(self._policy.lowest, self._policy.highest)
            self._scaler.update(adapted)
        self._current = adapted
        return overflowed

    def state(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)
        self._current = self._scaler.scale(self._one)


def build_loss_scale(setting: float | str | None, device: torch.device) -> LossScale:
    """Make the loss scale of an axis value."""
    if setting is None:
        return LossScale(device)
    if isinstance(setting, str):
        return DynamicScale(device, POLICIES[setting])
    return StaticScale(float(setting), device)
