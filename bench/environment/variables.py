"""Environment variables that change results."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from bench.precision import EMULATE_FP8

VARIABLES: dict[str, str] = {
    "AMD_SERIALIZE_*": "waits for each kernel, or copy: much slower",
    "ATEN_CPU_CAPABILITY": "limits the CPU instructions of torch's kernels",
    EMULATE_FP8: "computes fp8 in float32 on a CPU, for tests: its times mean nothing",
    "CUBLASLT_WORKSPACE_SIZE": "memory for matrix products, and so the algorithm chosen",
    "CUBLAS_WORKSPACE_CONFIG": "memory for matrix products: deterministic, perhaps slower",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues for kernels",
    "CUDA_DISABLE_PTX_JIT": "only kernels that were built for exactly this GPU",
    "CUDA_FORCE_PTX_JIT": "compiles every kernel again",
    "CUDA_LAUNCH_BLOCKING": "waits for each kernel: much slower",
    "CUDA_MODULE_LOADING": "loads kernels at once or when first used: memory and first steps",
    "CUDNN_*": "cuDNN's own settings",
    "DISABLE_ADDMM_CUDA_LT": "another library for matrix products with a bias",
    "DNNL_*": "oneDNN's own settings",
    "GOMP_*": "which cores threads run on, and how they wait",
    "KMP_*": "which cores threads run on, and how they wait",
    "LD_PRELOAD": "replaces library functions, such as the CPU's memory allocator",
    "MKL_*": "threads and instructions of MKL",
    "NCCL_*": "how GPUs exchange gradients",
    "HIPBLASLT_*": "hipBLASLt's own settings",
    "HIP_LAUNCH_BLOCKING": "waits for each kernel: much slower",
    "HSA_*": "ROCm's runtime: such as the architecture that a GPU is taken for",
    "MIOPEN_*": "MIOpen's own settings, such as which algorithms are tried",
    "NVIDIA_TF32_OVERRIDE": "turns TF32 off in all libraries, whatever the precision says",
    "OMP_*": "threads of an operation on a CPU, and which cores they run on",
    "ONEDNN_*": "oneDNN's own settings",
    "OPENBLAS_*": "threads of OpenBLAS",
    "PYTORCH_ALLOC_CONF": "torch's memory allocator",
    "PYTORCH_CUDA_ALLOC_CONF": "torch's memory allocator on a GPU, by its older name",
    "PYTORCH_HIP_ALLOC_CONF": "torch's memory allocator on an AMD GPU, by its older name",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "no caching of GPU memory: much slower",
    "PYTORCH_TUNABLEOP_*": "which matrix product is used, by timing them",
    "ROCBLAS_*": "rocBLAS's own settings",
    "TORCHDYNAMO_*": "whether and how torch.compile captures the network",
    "TORCHINDUCTOR_*": "the code that torch.compile makes",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "TF32 in matrix products from the start",
    "TORCH_BLAS_PREFER_*": "another library for matrix products",
    "TORCH_COMPILE_*": "whether and how torch.compile works",
    "TORCH_CUDNN_*": "how torch asks cuDNN for algorithms",
    "TORCH_LINALG_PREFER_*": "another library for linear algebra",
    "TORCH_MKLDNN_*": "when oneDNN takes a matrix product",
    "TRITON_*": "the kernels that torch.compile makes",
}
"""Environment variables that change results, by name or pattern, and what each does.

Sources: torch's notes on CUDA environment variables and on threading, `torch/_inductor/config.py`,
the CUDA Programming Guide, the reference of cuBLAS and of cuDNN, ROCm environment variables.
"""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Those that set how many threads an operation takes on a CPU: a choice, and no mistake."""

# Exceptions: folders, caches, logs and the compiler's own processes, which change no result.
_HARMLESS = re.compile(
    r"CACHE_DIR|(GRAPH|REMOTE|AUTOGRAD|AUTOTUNE)\w*_CACHE|CACHE_DEFAULT|LOG|DEBUG|DUMP|VERBOSE|PRINT"
    r"|PROFIL|PROTON|REPRO_|NCCL_VERSION|WORKER|COMPILE_THREADS|TIMEOUT|OUTPUT_DIR|SAVE_ARGS|HOME"
)


def find_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of `VARIABLES` that are set, sorted by name."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if not _HARMLESS.search(name) and any(fnmatchcase(name, known) for known in VARIABLES)
    }
