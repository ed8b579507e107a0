"""The installed NVIDIA apex, recognised by its files without importing it.

Two projects have the name: the one on PyPI is a login toolkit for web sites. NVIDIA's had ``amp``
with opt levels from March 2019 to April 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Apex:
    """The installed package `apex`; ``amp`` is whether it has NVIDIA's amp with opt levels."""

    version: str
    amp: bool


def find_apex() -> Apex | None:
    spec = find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    try:
        number = version("apex")
    except PackageNotFoundError:
        number = ""
    # `initialize` is in this file; the amp of 2018 had none
    return Apex(number, any((folder / "amp/frontend.py").is_file() for folder in folders))


_BUILD = "build a commit of NVIDIA/apex on GitHub from between March 2019 and April 2025"


def refuse_apex(apex: Apex | None, device: str) -> str:
    """Return why apex cannot train on a device, and what to do; empty if it can."""
    if device != "cuda":
        return "NVIDIA apex needs an NVIDIA GPU; fp16 is the same recipe on a CPU"
    if apex is None:
        return f"NVIDIA apex is not installed: {_BUILD}"
    if not apex.amp:
        return f"the installed apex {apex.version} has no amp.initialize: {_BUILD}"
    return ""
