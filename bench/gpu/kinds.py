"""The kinds of devices that a case may train on, by torch's names, and those that the installed
torch was built for, found without importing it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.errors import UsageError

OTHERS = ("mps", "xpu")
"""Apple's and Intel's GPUs. Training is measured there; whatever needs CUDA or NVML is refused or
left out. Neither has been tested on hardware yet."""

DEVICES = ("cuda", *OTHERS, "cpu")
"""torch's build for ROCm calls an AMD GPU cuda."""

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


def size_as(device: str) -> str:
    """Return the device whose sizes and limits apply: for any GPU, those of an NVIDIA one."""
    return "cpu" if device == "cpu" else "cuda"


def refuse_others(devices: Iterable[object], command: str) -> None:
    """Raise UsageError if a device is a GPU that a command does not support."""
    for device in devices:
        if device in OTHERS:
            raise UsageError(
                f"--device {device}: {command} runs on cuda or cpu; bench.sweep runs there"
            )


@cache
def read_build() -> Mapping[str, str]:
    """Return the versions that torch was built for, by their names in its `version.py`: ``cuda``,
    ``hip`` (ROCm) or ``xpu``; empty if it is a build for CPUs, or not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return {"cuda": ""}
    # cuda: Optional[str] = '13.0', with another annotation in other versions
    return dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"](.*?)['\"]", text, re.MULTILINE))


def list_others() -> tuple[str, ...]:
    """Return the other GPUs that torch may have here besides CUDA's, by torch's names."""
    built = {"mps": sys.platform == "darwin", "xpu": "xpu" in read_build()}
    return tuple(device for device in OTHERS if built[device])


def has_amd(folder: Path = _KFD) -> bool:
    """Return whether the driver amdgpu offers a GPU to compute on. It also lists CPUs, which have
    no SIMD units."""
    for file in folder.glob("*/properties"):
        with suppress(OSError):  # not accessible to this user
            if re.search(r"^simd_count [1-9]", file.read_text(), re.MULTILINE):
                return True
    return False


def name_uuid(uuid: Any, hip: bool) -> str:
    """Name a GPU by the ``uuid`` in torch's device properties. With ``hip`` its 16 bytes are the
    text that rocminfo prints after ``GPU-``: hipDeviceGetUuid in clr's hip_device.cpp."""
    with suppress(AttributeError, TypeError, ValueError):
        if hip and (text := bytes(uuid.bytes).rstrip(b"\0").decode("ascii")).isalnum():
            return f"GPU-{text}"
    return f"GPU-{uuid}"
