"""The kinds of devices that a case may train on, by the names that torch has for them."""

from __future__ import annotations

from collections.abc import Iterable

from bench.errors import UsageError

OTHERS = ("mps", "xpu")
"""Apple's and Intel's GPUs: training itself is measured there, and what needs CUDA or NVML is
refused or left out. Neither was seen on hardware yet."""

DEVICES = ("cuda", *OTHERS, "cpu")
"""Of an AMD GPU torch's build for ROCm says cuda."""


def size_as(device: str) -> str:
    """The device whose sizes and limits it has: of any GPU, those of an NVIDIA one."""
    return "cpu" if device == "cpu" else "cuda"


def refuse_others(devices: Iterable[object], command: str) -> None:
    """Refuse the GPUs that a command does not know. Raises UsageError."""
    for device in devices:
        if device in OTHERS:
            raise UsageError(
                f"--device {device}: {command} runs on cuda or cpu; bench.sweep runs there"
            )
