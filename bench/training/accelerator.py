"""Device functions that a training needs besides computing, by kind of device.

torch has the same names for CUDA (and ROCm, which it treats as CUDA) and Intel's XPU; for Apple's
MPS it has fewer, and records no peak memory. Sources: torch 2.13, `torch/cuda/memory.py`,
`torch/xpu/memory.py`, `torch/mps/__init__.py` and `torch/mps/event.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch

from bench.processes import read_peak_memory


@dataclass(frozen=True)
class Accelerator:
    """A kind of device; the defaults are for a CPU, whose work is done when a call returns.

    Attributes:
        synchronize: waits until a device has finished its work.
        make_event: makes an event in the device's work: ``record()``, ``query()`` whether it was
            reached, and ``elapsed_time(later)`` in ms; None if the host's clock is used instead.
        empty_cache: releases the allocator's cached memory; None if it caches nothing.
        read_stats: statistics of the allocator, with peaks since `reset_peaks`; None if torch has
            none, as ``lack`` explains.
        held_bytes: memory that this process holds, for its progress display.
        free_bytes: memory still available.
        get_random, set_random: read and set the state of the device's random number generator.
        pins: whether a number can be copied to the host without waiting.
        sums: the widest dtype that it can add in.
    """

    synchronize: Callable[[torch.device], object] = lambda device: None
    make_event: Callable[[], Any] | None = None
    empty_cache: Callable[[], object] | None = None
    read_stats: Callable[[torch.device], Mapping[str, int]] | None = None
    reset_peaks: Callable[[torch.device], object] = lambda device: None
    lack: str = "torch does not report CPU memory"
    held_bytes: Callable[[], int] = read_peak_memory
    free_bytes: Callable[[torch.device], int] = lambda device: psutil.virtual_memory().available
    get_random: Callable[[torch.device], torch.Tensor] | None = None
    set_random: Callable[[torch.Tensor, torch.device], object] | None = None
    pins: bool = False
    sums: torch.dtype = torch.float64


def _describe(module: Any, sums: torch.dtype) -> Accelerator:
    return Accelerator(
        synchronize=module.synchronize,
        make_event=partial(module.Event, enable_timing=True),
        empty_cache=module.empty_cache,
        read_stats=module.memory_stats,
        reset_peaks=module.reset_peak_memory_stats,
        held_bytes=module.memory_reserved,
        free_bytes=lambda device: module.mem_get_info(device)[0],
        get_random=module.get_rng_state,
        set_random=module.set_rng_state,
        pins=True,
        sums=sums,
    )


ACCELERATORS: dict[str, Accelerator] = {
    "cuda": _describe(torch.cuda, torch.float64),
    "xpu": _describe(torch.xpu, torch.float32),  # some of Intel's GPUs have no float64
    "mps": Accelerator(
        synchronize=lambda device: torch.mps.synchronize(),
        make_event=partial(torch.mps.event.Event, enable_timing=True),
        empty_cache=torch.mps.empty_cache,
        lack="torch keeps no peak of the memory of an Apple GPU",
        held_bytes=torch.mps.driver_allocated_memory,
        free_bytes=lambda device: (
            torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        ),
        get_random=torch.mps.get_rng_state,
        set_random=torch.mps.set_rng_state,
        sums=torch.float32,
    ),
    "cpu": Accelerator(),
}


def find_accelerator(device: torch.device) -> Accelerator:
    """Return the entry of a device; one without its own, such as meta, is treated as a CPU."""
    return ACCELERATORS.get(device.type, Accelerator())
