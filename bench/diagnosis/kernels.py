"""What the name of a GPU's kernel tells: which it is, and whether it runs on tensor cores."""

from __future__ import annotations

import re

from bench.record import WorkRow, read_kernels

PLAIN = (
    "ffma",
    "simt",
    "sgemm",
    "scudnn",
    "_direct_kernel",
    "depthwise",
    "dgrad_engine",
    "wgrad_alg",
    "convolve_common_engine",
)
"""Parts of the names of kernels of cuBLAS, cuDNN and torch that multiply without tensor cores; such
a name may have a part of `TENSOR_CORES` too: cuBLAS's ``sm80_xmma_gemm_..._ffma_...``."""

TENSOR_CORES = (
    *("h884", "s884", "h1688", "s1688", "i8816", "16816", "hmma", "xmma"),
    *("tensorop", "_tensor16", "wmma", "gmma", "nvjet", "flash_", "fmha"),
)
"""Parts of the names of kernels that use them: the first eight from NVIDIA's PyProf
(pyprof/prof/tc.py), those of CUTLASS, and of cuBLAS and attention since Hopper."""


def find_tensor_cores(row: WorkRow) -> bool | None:
    """Whether most of the time of a row's products is in kernels that use tensor cores.

    Returns:
        None where no kernel's name tells it, or none was recorded.
    """
    using = plain = 0.0
    for kernel in read_kernels(row.kernels):
        name = kernel.name.lower()
        if any(part in name for part in PLAIN):
            plain += kernel.time_s
        elif any(part in name for part in TENSOR_CORES):
            using += kernel.time_s
    return using > plain if using or plain else None


def name_kernel(row: WorkRow) -> str:
    """Name the kernel that takes longest, without namespaces; empty where none was recorded."""
    kernels = read_kernels(row.kernels)
    longest = max(kernels, key=lambda kernel: kernel.time_s).name if kernels else ""
    return re.sub(r"\w+::", "", longest)
