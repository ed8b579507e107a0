"""The memory limit of a case, which simulates a smaller GPU or a smaller host.

On a GPU the limit covers all memory of the process. torch's allocator is capped at the limit minus
the context: the memory of driver, kernels and libraries outside the allocator, which is measured.
On a CPU the kernel refuses private memory (RLIMIT_DATA) once the process would hold more than the
limit, see `bench.base.processes.read_held_memory`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bench.base.processes import read_held_memory
from bench.base.text import parse_bytes
from bench.machine.gpus import Depth, Device
from bench.machine.nvml import open_device

_MIB = 2**20
_STATUS = Path("/proc/self/status")


class MemoryLimitError(MemoryError):
    """The process reaches its memory limit even without a training batch."""


def build_limit(text: str | None, device: str, gpu_uuid: str | None) -> GpuLimit | HostLimit:
    """Return the limit that the text of an axis names. Call this before CUDA is used, so that the
    processes already on the card are known."""
    limit = None if text is None else parse_bytes(text)
    return GpuLimit(limit, open_device(gpu_uuid)) if device == "cuda" else HostLimit(limit)


def arm(
    text: str, device: str, gpu_uuid: str | None, tell: Callable[[], object]
) -> GpuLimit | HostLimit:
    """Limit this process of a user's command, which has imported torch: at once, or on a GPU once
    it uses CUDA, since a process that only starts others has no context. ``tell`` is called once it
    is limited. Raises MemoryLimitError."""
    limit = build_limit(text, device, gpu_uuid)

    def impose() -> None:
        limit.impose()
        tell()

    def impose_on_gpu() -> None:
        with suppress(Exception):  # what fails is told: without ``tell`` the limit does not hold
            impose()

    if isinstance(limit, GpuLimit):
        import torch

        torch.cuda._lazy_call(impose_on_gpu)
    else:
        impose()
    return limit


# ------------------------------------------------------------------------------------ on a GPU


class GpuLimit:
    """A cap on torch's allocator. Without a limit it only measures the context.

    `impose` sets the cap before the network and the images are on the device. `adjust` sets it
    again after warm-up, exactly, when kernels and libraries are loaded. Both raise
    MemoryLimitError: the context alone reaches the limit. `lift` removes the cap.
    """

    context_bytes: int | None = None
    note = ""  # what the context is, where the driver does not tell the memory of a process

    def __init__(self, limit_bytes: int | None, device: Device) -> None:
        self._limit, self._device = limit_bytes, device
        # read before watching: a process of another pid namespace is recognised by appearing later
        self._before = device.read(Depth.SLOW)[-1].device_bytes
        device.watch(os.getpid())

    def impose(self) -> None:
        if self._limit is not None:
            self.adjust()

    def adjust(self) -> None:
        import torch

        free, total = torch.cuda.mem_get_info()  # creates the context, if there is none
        now = self._device.read(Depth.SLOW)[-1]
        used, lacks = now.process_bytes, "the driver does not tell the memory of a process: "
        if used is None:  # WDDM, some containers
            used, instead = total - free, "has that of other processes too"
            if now.device_bytes is not None and self._before is not None:
                used = now.device_bytes - self._before
                instead = "is what the GPU holds more than before CUDA was used"
            self.note = f"{lacks}context_bytes {instead}"
        self.context_bytes = max(0, used - torch.cuda.memory_reserved())
        if self._limit is not None:
            share = share_of_device(self._limit, self.context_bytes, total)
            torch.cuda.set_per_process_memory_fraction(share)

    def lift(self) -> None:
        import torch

        if self._limit is not None:
            torch.cuda.set_per_process_memory_fraction(1.0)
        self._device.close()


def share_of_device(limit_bytes: int, context_bytes: int, total_bytes: int) -> float:
    """Return the share of device memory that torch's allocator may hold, above 0 and at most 1.

    torch multiplies it by the total and rounds down to whole bytes; its allocator takes memory in
    blocks of 2 MiB. Raises MemoryLimitError: the context alone reaches the limit.
    """
    if context_bytes >= limit_bytes:
        taken = f"the context alone takes {context_bytes / _MIB:.0f} MiB of GPU memory"
        raise MemoryLimitError(f"{taken}; raise --memory-limit")
    return min(1.0, (limit_bytes - context_bytes) / total_bytes)


# ------------------------------------------------------------------------------------ on a CPU

MAPPED_BYTES = 64 * 2**10
"""Under a limit, blocks of at least this size are mapped individually and returned when freed.

glibc would keep them, fragmented: dpn-small in fp32 at batch 256 peaked at 1416, 1425, 1427 and
1431 MiB in four runs, and at 1102 MiB in both runs with this setting. A threshold of 1 MiB is too
high: near the limit, batch 22 trained once and ran out of memory twice. The pages are mapped
again in each step, which takes time.
"""

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # malloc.h: M_MMAP_THRESHOLD, M_ARENA_MAX

ALLOWANCE_BYTES = 256 * _MIB
"""How much higher the limit is until warm-up is over.

oneDNN maps code buffers that it hardly touches (51 MiB for dpn-small), and RLIMIT_DATA counts
mapped memory. Its size is known after warm-up.
"""


class HostLimit:
    """A limit on the private memory that the process holds, at first `ALLOWANCE_BYTES` too high.
    It has the methods of `GpuLimit`, and no context."""

    context_bytes: int | None = None
    note = ""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = limit_bytes

    def impose(self) -> None:
        if self._limit is None:
            return
        import torch

        # a thread that cannot be started ends the process, so all of them are started here
        torch.ones(1 << 20).add_(1.0)
        _call_glibc("mallopt", _ARENA_MAX, 1)
        _call_glibc("mallopt", _MMAP_THRESHOLD, MAPPED_BYTES)
        self._set(ALLOWANCE_BYTES)

    def adjust(self) -> None:
        if self._limit is not None:
            gc.collect()
            self._set(0)

    def lift(self) -> None:
        lift_host_limit()

    def _set(self, allowance: int) -> None:
        assert self._limit is not None
        _call_glibc("malloc_trim", 0)  # freed blocks that glibc keeps must not count as held
        used = read_held_memory(os.getpid())
        taken = f"the process alone takes {used / _MIB:.0f} MiB without a training batch"
        error = MemoryLimitError(f"{taken}; raise --memory-limit")
        (mapped,) = re.findall(r"^VmData:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = max(0, int(mapped) * 1024 + self._limit - used + allowance)
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        if used >= self._limit:
            raise error


def lift_host_limit() -> None:
    """Remove the process's own memory limit, so that reporting a failure cannot fail itself."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _call_glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc's allocator; do nothing with another C library."""
    if function := getattr(ctypes.CDLL(None), name, None):
        function(*arguments)
