"""What the installed torch computes on, told without importing it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu.kinds import OTHERS

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


@cache
def read_build() -> Mapping[str, str]:
    """The versions that torch was built for, by the names that its `version.py` has for them:
    ``cuda``, ``hip`` (ROCm) or ``xpu``; nothing where it is a build for CPUs, or not there."""
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
    """The GPUs beside CUDA's that torch may have here, by the names that it gives them."""
    built = {"mps": sys.platform == "darwin", "xpu": "xpu" in read_build()}
    return tuple(device for device in OTHERS if built[device])


def has_amd(folder: Path = _KFD) -> bool:
    """Whether the driver amdgpu offers a GPU to compute on: of the nodes that it lists, a CPU has
    no SIMD units."""
    for file in folder.glob("*/properties"):
        try:
            if re.search(r"^simd_count [1-9]", file.read_text(), re.MULTILINE):
                return True
        except OSError:  # kept from this user
            continue
    return False


def name_uuid(uuid: Any, hip: bool) -> str:
    """Name a GPU by the ``uuid`` of torch's properties of it. Of ``hip`` its 16 bytes are the text
    that rocminfo prints after ``GPU-``: hipDeviceGetUuid in clr's hip_device.cpp."""
    with suppress(AttributeError, TypeError, ValueError):
        if hip and (text := bytes(uuid.bytes).rstrip(b"\0").decode("ascii")).isalnum():
            return f"GPU-{text}"
    return f"GPU-{uuid}"
