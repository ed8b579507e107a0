"""Answers about devices and models, given by a process that has imported torch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import Any, TextIO

from bench.case import DEVICES
from bench.environment.asking import DeviceAnswer
from bench.environment.host import CPU_FLAGS, describe_card, describe_host, read_cpu_flags
from bench.fingerprint import examine_in_fork, parse_request
from bench.gpu.cards import UNKNOWN
from bench.precision import Arithmetic
from bench.text import is_whole


def describe_device(device: str) -> DeviceAnswer:
    import torch

    environment: dict[str, Any] = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
    }
    if device == "cuda":
        return DeviceAnswer(environment, error=_use_card(environment))
    try:
        fp16_native = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        fp16_native = False
    # torch itself only checks whether oneDNN can: with AVX-512 alone it does so via float32
    flags = read_cpu_flags()
    bf16_native = not flags or bool(flags & CPU_FLAGS[Arithmetic.BFLOAT16])
    return DeviceAnswer(environment, fp16_native, bf16_native=bf16_native)


def _word_lack(what: str, fix: str) -> str:
    import torch

    return f"device cuda: torch {torch.__version__} {what}; {fix}, or use --device cpu"


def _use_card(environment: dict[str, Any]) -> str:
    """Describe the first card in ``environment`` and compute on it; return why that fails."""
    import torch

    if not torch.backends.cuda.is_built():
        return _word_lack("is a CPU build", "install a CUDA build of torch")
    with warnings.catch_warnings(record=True) as warned:  # torch gives the reason in a warning
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        why = next((f" ({str(w.message).partition('. ')[0]})" for w in warned), "")
        check = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return _word_lack(f"finds no usable GPU{why}", check)
    card = torch.cuda.get_device_properties(0)
    gpu = UNKNOWN
    with suppress(UnicodeDecodeError):  # as under WSL, with driver 555
        gpu = card.name if is_whole(card.name) else UNKNOWN
    environment.update(
        gpu=gpu,
        gpu_uuid=f"GPU-{card.uuid}",
        gpu_memory_bytes=card.total_memory,
        # that of a ROCm build means another architecture
        capability=f"{card.major}.{card.minor}" if torch.version.cuda else None,
        cudnn=str(torch.backends.cudnn.version()),
    )
    known = describe_card(environment["gpu_uuid"])
    environment.update({name: value for name, value in known.items() if value is not None})
    try:
        torch.ones(2, device="cuda").sum().item()
    except RuntimeError as error:  # no kernels for this GPU, or another process has it alone
        why = (str(error).splitlines() or [""])[0]
        what = f"cannot compute on {gpu}: {why}"
        return _word_lack(what, "install a build of torch for this GPU")
    return ""


def respond(names: Sequence[str], answers: TextIO, asker: TextIO) -> None:
    """Answer in one line, and hold the devices until ``asker`` ends, unless it is a terminal.
    Models are examined in forks of this process, which has imported torch."""
    devices = [name for name in names if name in DEVICES]
    models = [name for name in names if name not in devices]
    if len(models) > 1:  # else each fork imports them, which takes as long as torch itself
        for name in ("bench.training.counting", "bench.training.trial", "torch._dynamo"):
            import_module(name)
    # models first: a fork of a process that has used CUDA cannot use it
    found = {
        "models": {parse_request(text).subject: examine_in_fork(text) for text in models},
        "devices": {name: vars(describe_device(name)) for name in devices},
        "host": asdict(describe_host()),
    }
    print(json.dumps(found), file=answers, flush=True)
    if not asker.isatty():
        asker.read()
