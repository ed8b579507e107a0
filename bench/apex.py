"""The installed NVIDIA apex, recognised by its files without importing it.

Its mixed precision has three interfaces; a copy offers those of its time: ``fp16_utils`` (April
2018 to May 2025), ``amp`` with opt levels (February 2019 to May 2025), and the ``FP16_Optimizer``
of ``contrib.optimizers`` (since October 2019), the only one left today. Two projects have the name:
the one on PyPI is a login toolkit for web sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from bench.errors import UnsupportedError


class Interface(StrEnum):
    """The interface that trains in mixed precision, by its import path."""

    FP16_UTILS = "apex.fp16_utils.FP16_Optimizer"
    AMP = "apex.amp"
    CONTRIB = "apex.contrib.optimizers.FP16_Optimizer"


@dataclass(frozen=True)
class Apex:
    """The installed package `apex`; its contrib interface also needs the CUDA extensions."""

    version: str
    nvidia: bool
    cuda_extensions: bool = False
    contrib_extensions: bool = False
    interfaces: tuple[Interface, ...] = ()


# Top-level modules that NVIDIA's setup.py builds beside the package, as it does amp_C.
_CONTRIB_EXTENSIONS = (
    "bnp",
    "cudnn_gbn_lib",
    "distributed_adam_cuda",
    "fast_multihead_attn",
    "focal_loss_cuda",
    "fused_adam_cuda",
    "group_norm_cuda",
    "nccl_p2p_cuda",
    "peer_memory_cuda",
    "transducer_joint_cuda",
    "xentropy_cuda",
)

_FILES = {
    Interface.FP16_UTILS: "fp16_utils/fp16_optimizer.py",
    Interface.AMP: "amp/frontend.py",  # `initialize`; the amp of 2018 had none
    Interface.CONTRIB: "contrib/optimizers/fp16_optimizer.py",
}


def find_apex(path: Sequence[str] | None = None) -> Apex | None:
    """Recognise the package `apex` by its files, on ``path`` or wherever `import` would find it.

    Only NVIDIA's has a sub-package ``optimizers``; the one on PyPI does not.
    """

    def look(name: str) -> ModuleSpec | None:
        # an editable install has its own finder, outside sys.path
        return find_spec(name) if path is None else PathFinder.find_spec(name, path)

    spec = look("apex")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations]

    def holds(file: str) -> bool:
        return any((folder / file).is_file() for folder in folders)

    try:
        number = version("apex")
    except PackageNotFoundError:
        number = ""
    return Apex(
        number,
        holds("optimizers/__init__.py"),
        look("amp_C") is not None,
        any(map(look, _CONTRIB_EXTENSIONS)),
        tuple(interface for interface, file in _FILES.items() if holds(file)),
    )


_BUILD = "build it from the repository NVIDIA/apex on GitHub"


def choose_interface(apex: Apex | None, opt_level: str | None) -> Interface:
    """Return the interface for a case: amp with an opt level, else the oldest FP16_Optimizer.
    Raises UnsupportedError: this copy cannot train it; the message says what to do."""
    if apex is None:
        raise UnsupportedError(f"NVIDIA apex is not installed: {_BUILD}")
    if not apex.nvidia:
        raise UnsupportedError(
            f"apex {apex.version} is a login toolkit for web sites from PyPI, not NVIDIA's: "
            f"pip uninstall -y apex, then {_BUILD}"
        )
    if opt_level is not None:
        if Interface.AMP in apex.interfaces:
            return Interface.AMP
        raise UnsupportedError(
            f"this NVIDIA apex has no amp.initialize for opt level {opt_level}: leave --opt-level "
            "out, or build a commit from between March 2019 and April 2025"
        )
    if Interface.FP16_UTILS in apex.interfaces:
        return Interface.FP16_UTILS
    if Interface.CONTRIB not in apex.interfaces:
        raise UnsupportedError(f"this NVIDIA apex has no FP16_Optimizer: {_BUILD}")
    if not apex.cuda_extensions:
        raise UnsupportedError(
            "this NVIDIA apex was built without its CUDA extensions, which its FP16_Optimizer "
            "needs: build it again with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"
        )
    return Interface.CONTRIB


_ON_A_CPU = {None: "fp16", "O0": "fp32", "O1": "fp16-amp", "O2": "fp16"}
"""What to train instead, by opt level; O3 has no counterpart: all fp16, without masters."""


def refuse_apex(apex: Apex | None, opt_level: str | None, device: str) -> str:
    """Return why apex cannot train a case here, and what to do; empty if it can."""
    if device != "cuda":
        instead = _ON_A_CPU.get(opt_level)
        alike = f"; {instead} is the same recipe on a CPU" if instead else ""
        return f"NVIDIA apex needs an NVIDIA GPU{alike}"
    try:
        choose_interface(apex, opt_level)
    except UnsupportedError as error:
        return str(error)
    return ""
