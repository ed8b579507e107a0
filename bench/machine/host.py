"""This machine and this harness, as far as they are known without torch."""

from __future__ import annotations

import io
import os
import platform
import re
import socket
import subprocess
import sys
import tarfile
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from bench.base.errors import UsageError
from bench.base.installation import DISTRIBUTION, find_version
from bench.base.processes import count_cores, read_governor, spell_cpu
from bench.machine.nvml import Card, find_card, find_cards
from bench.schema.precision import EMULATE_FP8
from bench.schema.record import Environment


def describe_card(uuid: str) -> dict[str, Any]:
    """Return NVML's description of a card, by fields of `Environment`; empty if it is unknown."""
    card = find_card(uuid, find_cards()[0])
    if card is None:
        return {}
    return {"driver": card.driver, **_spell_states(card)}


def _spell_states(card: Card) -> dict[str, str | None]:
    words = {None: None, True: "on", False: "off"}
    return {name: words[getattr(card, name)] for name in ("persistence_mode", "ecc", "mig")}


def describe_other(card: Card, usual: Card | None) -> dict[str, Any]:
    """Return the fields of `Environment` of a card that a command chose instead of the ``usual``
    one, of which torch told them; none if it is that."""
    if card == usual:
        return {}
    fields: dict[str, Any] = {"gpu_uuid": card.uuid, **_spell_states(card)}
    if usual is None or card.kind != usual.kind:
        fields |= {"gpu": card.name, "gpu_memory_bytes": card.memory_bytes}
        fields["capability"] = card.capability and "{}.{}".format(*card.capability)
    return fields


def describe_host() -> Environment:
    """Describe what is known without torch: host, system, CPU, this harness and its commit."""
    return Environment(
        cpu=name_cpu(),
        python=platform.python_version(),
        os=platform.platform(),
        host=socket.gethostname(),
        bench=find_version(DISTRIBUTION),  # None for a checkout that is not installed
        commit=read_commit(),
        code=hash_code(),
        variables=" ".join(f"{name}={value}" for name, value in find_variables().items()) or None,
        cpu_governor=read_governor(),
    )


def name_cpu() -> str:
    """Return the name of the CPU, with the cores that this process may use."""
    cpu = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        cpu = next(names, platform.machine())
    return spell_cpu(cpu, count_cores())


def _read_build() -> str | None:
    """Return what torch tells of its build, without importing it: empty if it cannot be read, None
    without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with suppress(OSError):
        return Path(spec.origin).with_name("version.py").read_text("utf-8")
    return ""


def find_torch() -> str | None:
    """Return torch's own name of its version: that of its package may lack its end, ``+cu130``."""
    found = re.search(r"^__version__ = ['\"](.+)['\"]$", _read_build() or "", re.MULTILINE)
    return found[1] if found else find_version("torch")


@cache
def has_cuda() -> bool:
    """Return whether torch has a CUDA GPU, as far as can be found without asking torch."""
    text = _read_build()
    # cuda: Optional[str] = '13.0', with another annotation in other versions
    built = text == "" or re.search(r"^cuda\b[^=\n]*= *['\"]", text or "", re.MULTILINE)
    return bool(built and find_cards()[0])


def list_devices(axes: Mapping[str, list[Any]]) -> list[Any]:
    """Return the devices that a command is to run on, by default a GPU if there is one."""
    return axes.get("device", ["cuda" if has_cuda() else "cpu"])


def choose_device(axes: Mapping[str, list[Any]]) -> Any:
    """Return the one device that a command runs on. Raises UsageError: several are given."""
    device, *others = list_devices(axes)
    if others:
        raise UsageError(f"--device {device} {' '.join(others)}: give one")
    return device


# ----------------------------------------------------------------------------------------- packages

PACKAGES: dict[str, str] = {
    "torch": "torch",
    "numpy": "numpy",
    "nvidia-ml-py": "pynvml",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "pillow": "PIL",
    "rich": "rich",
    "psutil": "psutil",
    "filelock": "filelock",
    "seaborn": "seaborn",
    "scipy": "scipy",
    "jinja2": "jinja2",
}
"""The packages that this harness needs, and the module that each is imported as."""


def find_missing(packages: Iterable[str] = PACKAGES) -> tuple[str, ...]:
    return tuple(name for name in packages if find_spec(PACKAGES[name]) is None)


def refuse_missing(packages: Iterable[str]) -> None:
    """Raise UsageError if packages are missing that will be needed later; it names them, and the
    command that installs them."""
    if missing := find_missing(packages):
        are = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{', '.join(missing)} {are} not installed for {sys.executable}; "
            f"{describe_install(missing)}"
        )


def describe_install(packages: Iterable[str]) -> str:
    return f"{sys.executable} -m pip install {' '.join(packages)}"


# ------------------------------------------------------------------------------------- this harness

_ROOT = Path(__file__).parents[1]


def _git(*arguments: str) -> bytes:
    """Return what git says of the repository that has this harness. Raises OSError or
    CalledProcessError: none has it."""
    # GIT_DIR and others name another repository: a hook of git's, and `git rebase --exec`, set them
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, check=True, env=own).stdout


def read_commit() -> str | None:
    """Return the commit of a clone, or as a tag the release that pip installed; ``+dirty`` where
    files have changed since. None for a copy of neither."""
    try:
        _git("ls-files", "--error-unmatch", ".")  # not in one that only lies around its packages
        dirty = _git("status", "--porcelain", "--untracked-files=no", "--", ".")
        head = _git("rev-parse", "--short=12", "HEAD").decode().strip()
        return head + ("+dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return _read_release()


def _read_release() -> str | None:
    """What pip wrote down of each file as it installed it says whether it is as it was."""
    try:
        about = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None
    files = {
        Path(file.locate()): urlsafe_b64decode(f"{file.hash.value}=")
        for file in about.files or ()
        if file.hash and file.suffix == ".py" and file.parts[0] == _ROOT.name
    }
    changed = any(sha256(path.read_bytes()).digest() != known for path, known in files.items())
    return f"v{about.version}{'+dirty' * changed}" if files else None


@cache
def hash_code() -> str:
    """Return the first 12 hex digits of the SHA-256 over the harness's own Python source."""
    files = sorted(_ROOT.rglob("*.py"))
    return _hash((path.relative_to(_ROOT), path.read_bytes()) for path in files)


def _hash(files: Iterable[tuple[PurePath, bytes]]) -> str:
    digest = sha256()
    for path, content in files:
        digest.update(path.as_posix().encode())
        digest.update(content)
    return digest.hexdigest()[:12]


@cache
def hash_commit(commit: str) -> str | None:
    """Return `hash_code` at a commit; None if this is not a clone that has it."""
    try:
        archive = _git("archive", "--format=tar", commit)
    except (OSError, subprocess.CalledProcessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {PurePosixPath(member.name): member for member in tar if member.isfile()}
        code = sorted(path for path in files if path.suffix == ".py")
        return _hash((p, tar.extractfile(files[p]).read()) for p in code)  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------- variables

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


def drop_harmless(variables: str) -> str:
    """Return what the column ``variables`` says without those that change no result, which older
    versions wrote too.

    >>> drop_harmless("NCCL_VERSION=2.28.3-1 OMP_NUM_THREADS=2")
    'OMP_NUM_THREADS=2'
    """
    each = re.split(r" (?=[A-Za-z_]\w*=)", variables)
    return " ".join(one for one in each if not _HARMLESS.search(one.partition("=")[0]))
