"""torch's global switches that change results or time, which a user's code may set too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch

Switch = tuple[Callable[[], Any], Callable[[Any], object]]
"""What reads a switch, and what sets it."""


def _backend(name: str) -> Switch:
    *owners, last = name.split(".")
    owner = reduce(getattr, owners, torch.backends)
    return partial(getattr, owner, last), partial(setattr, owner, last)


def _flushes() -> bool:
    """torch has no reader of this switch."""
    return not float(torch.tensor(1e-310, dtype=torch.float64, device="cpu") * 1)


def _place(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # any device slows each call


_BACKENDS = (
    *(f"{of}fp32_precision" for of in ("", "cudnn.", "mkldnn.")),  # before those that inherit them
    *(f"cudnn.{layer}.fp32_precision" for layer in ("conv", "rnn")),
    "cuda.matmul.fp32_precision",
    *(f"mkldnn.{layer}.fp32_precision" for layer in ("conv", "rnn", "matmul")),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    *(f"cudnn.{name}" for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")),
    *(f"mkldnn.{name}" for name in ("enabled", "deterministic")),
)

_sdp = torch.backends.cuda

_SWITCHES: dict[str, Switch] = {
    **{name: _backend(name) for name in _BACKENDS},
    "flash_sdp": (_sdp.flash_sdp_enabled, _sdp.enable_flash_sdp),
    "mem_efficient_sdp": (_sdp.mem_efficient_sdp_enabled, _sdp.enable_mem_efficient_sdp),
    "math_sdp": (_sdp.math_sdp_enabled, _sdp.enable_math_sdp),
    "cudnn_sdp": (_sdp.cudnn_sdp_enabled, _sdp.enable_cudnn_sdp),
    "deterministic_algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default_device": (torch.get_default_device, _place),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "flush_denormal": (_flushes, torch.set_flush_denormal),
    "anomaly_mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "grad_mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    **{
        f"autocast_{device}": (
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        for device in ("cpu", "cuda")
    },
}


def read_switches() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def find_changes(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the switches that differ from ``before``, with their values."""
    return {name: now for name, now in read_switches().items() if now != before[name]}


@contextmanager
def keep_switches(changed: dict[str, Any]) -> Iterator[None]:
    """Set back what the user's code that runs within changes, and add it to ``changed``."""
    before = read_switches()
    try:
        yield
    finally:
        found = find_changes(before)
        for name in found:  # in the order of `_SWITCHES`
            _, set_back = _SWITCHES[name]
            set_back(before[name])
        changed |= found


def write_switches(changed: Mapping[str, Any]) -> str | None:
    """Write switches for a cell.

    >>> write_switches({"cudnn.benchmark": True, "default_dtype": torch.float64})
    'cudnn.benchmark=True default_dtype=float64'
    """
    words = (f"{name}={str(value).removeprefix('torch.')}" for name, value in changed.items())
    return " ".join(words) or None
