"""This machine, as far as it is known without torch."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bench.cores import read_governor, spell_cpu, usable_cpus
from bench.environment.packages import find_version
from bench.environment.source import hash_code, read_commit
from bench.environment.variables import find_variables
from bench.gpu.cards import find_card, find_cards
from bench.gpu.kinds import has_amd, read_build, refuse_others
from bench.precision import Arithmetic
from bench.record import Environment

_CPU = Path("/proc/cpuinfo")


def describe_card(uuid: str) -> dict[str, Any]:
    """What NVML says of a card, by fields of `Environment`; nothing where it does not know it."""
    card = find_card(uuid, find_cards()[0])
    if card is None:
        return {}
    words = {None: None, True: "on", False: "off"}
    states = {name: words[getattr(card, name)] for name in ("persistence_mode", "ecc", "mig")}
    return {"driver": card.driver, "pcie": card.pcie and str(card.pcie), **states}


def describe_host() -> Environment:
    """What is known without torch: host, operating system, CPU, this harness and its commit."""
    cpu = _look_up_cpu("model name")
    cpu = platform.processor() if cpu is None else cpu or platform.machine()
    return Environment(
        cpu=spell_cpu(cpu, len(usable_cpus())),
        python=platform.python_version(),
        os=platform.platform(),
        host=socket.gethostname(),
        bench=find_version("gpu-precision-bench"),  # not of a checkout that is not installed
        commit=read_commit(),
        code=hash_code(),
        variables=" ".join(f"{name}={value}" for name, value in find_variables().items()) or None,
        cpu_governor=read_governor(),
    )


CPU_FLAGS: dict[Arithmetic, frozenset[str]] = {
    Arithmetic.FLOAT16: frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    Arithmetic.BFLOAT16: frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
}
"""What Linux calls the instructions of a CPU that multiply in half precision, of x86 and Arm."""


def read_cpu_flags(file: Path = _CPU) -> frozenset[str]:
    """The instructions that the CPU has, as Linux calls them; none where it does not tell."""
    return frozenset((_look_up_cpu("flags", "Features", file=file) or "").split())


def _look_up_cpu(*names: str, file: Path = _CPU) -> str | None:
    """What Linux says of the first CPU by one of these names; None on another system."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


@cache
def has_cuda() -> bool:
    """Whether torch has a GPU by that name, which an AMD one has too: as far as can be told without
    asking torch."""
    build = read_build()
    return ("cuda" in build and bool(find_cards()[0])) or ("hip" in build and has_amd())


def list_devices(axes: Mapping[str, list[Any]], command: str) -> list[Any]:
    """Where a command was asked to run, by default a GPU if there is one. Raises UsageError: it
    does not know one of them."""
    devices = axes.get("device", ["cuda" if has_cuda() else "cpu"])
    refuse_others(devices, command)
    return devices
