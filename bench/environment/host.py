"""This machine, as far as it is known without torch."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.cores import count_cores, read_governor, spell_cpu
from bench.environment.packages import find_version
from bench.environment.source import hash_code, read_commit
from bench.environment.variables import find_variables
from bench.gpu.cards import find_card, find_cards
from bench.precision import Arithmetic
from bench.record import Environment

_CPU = Path("/proc/cpuinfo")


def describe_card(uuid: str) -> dict[str, Any]:
    """Return NVML's description of a card, by fields of `Environment`; empty if it is unknown."""
    card = find_card(uuid, find_cards()[0])
    if card is None:
        return {}
    words = {None: None, True: "on", False: "off"}
    states = {name: words[getattr(card, name)] for name in ("persistence_mode", "ecc", "mig")}
    return {"driver": card.driver, "pcie": card.pcie and str(card.pcie), **states}


def describe_host() -> Environment:
    """Describe what is known without torch: host, system, CPU, this harness and its commit."""
    cpu = _look_up_cpu("model name")
    cpu = platform.processor() if cpu is None else cpu or platform.machine()
    return Environment(
        cpu=spell_cpu(cpu, count_cores()),
        python=platform.python_version(),
        os=platform.platform(),
        host=socket.gethostname(),
        bench=find_version("gpu-precision-bench"),  # None for a checkout that is not installed
        commit=read_commit(),
        code=hash_code(),
        variables=" ".join(f"{name}={value}" for name, value in find_variables().items()) or None,
        cpu_governor=read_governor(),
    )


CPU_FLAGS: dict[Arithmetic, frozenset[str]] = {
    Arithmetic.FLOAT16: frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    Arithmetic.BFLOAT16: frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
}
"""Linux's names of the CPU instructions that multiply in half precision, on x86 and Arm."""


def read_cpu_flags(file: Path = _CPU) -> frozenset[str]:
    """Return Linux's names of the CPU's instruction sets; empty if unknown."""
    return frozenset((_look_up_cpu("flags", "Features", file=file) or "").split())


def _look_up_cpu(*names: str, file: Path = _CPU) -> str | None:
    """Return the first CPU's value under one of these names; empty if none, None without Linux."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


@cache
def has_cuda() -> bool:
    """Return whether torch has a CUDA GPU, as far as can be found without asking torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    built = True
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
        # cuda: Optional[str] = '13.0', with another annotation in other versions
        built = re.search(r"^cuda\b[^=\n]*= *['\"]", text, re.MULTILINE) is not None
    return built and bool(find_cards()[0])


def list_devices(axes: Mapping[str, list[Any]]) -> list[Any]:
    """Return the devices that a command is to run on, by default a GPU if there is one."""
    return axes.get("device", ["cuda" if has_cuda() else "cpu"])
