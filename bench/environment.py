"""What a case runs on: host, code, torch, GPU.

`python -m bench.environment cuda` prints it as JSON. A sweep asks it of a process of its own, so
that the sweep itself never imports torch or holds a CUDA context.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from bench.data import DatasetInfo
from bench.errors import UsageError
from bench.gpu import find_cards
from bench.precision import Precision
from bench.record import Environment

_ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Platform:
    """A device as torch sees it: what a record keeps of it, and what decides what it can run."""

    environment: Environment
    fp16_native: bool = True

    def refuse(self, precision: Precision) -> str:
        """Say why the device cannot run ``precision`` at all; empty where it can."""
        if precision.arithmetic == "tfloat32" and self._capability < precision.min_capability:
            return f"{precision.name} needs an NVIDIA GPU of Ampere or later; this is {self.name}"
        return ""

    def discourage(self, precision: Precision) -> str:
        """Say why ``precision`` would run but measure an emulation; empty where it would not."""
        on_gpu = self.environment.gpu is not None
        if on_gpu and self._capability < precision.min_capability:
            return f"{precision.arithmetic} is emulated on {self.name}"
        if not on_gpu and precision.arithmetic == "float16" and not self.fp16_native:
            # a step of fp16 DPN takes about 100 times as long as fp32
            return "this CPU has no fp16 arithmetic"
        return ""

    @property
    def name(self) -> str:
        """The GPU's name, or that there is none."""
        return self.environment.gpu or "a CPU"

    @property
    def _capability(self) -> tuple[int, ...]:
        return tuple(int(n) for n in (self.environment.capability or "0.0").split("."))


def probe(device: str) -> Platform:
    """Ask a fresh process what ``device`` ("cuda" or "cpu") is.

    Raises:
        UsageError: torch is missing or broken, or cannot use the device.
    """
    command = [sys.executable, "-m", "bench.environment", device]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(answer.stdout)
    except json.JSONDecodeError:
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(
            f"torch cannot be asked about the device: {last}; install torch>=2.9"
        ) from None
    if found["error"]:
        raise UsageError(found["error"])
    environment = describe_host()
    for name, value in found["environment"].items():
        setattr(environment, name, value)
    if environment.gpu is not None:
        environment.driver = next((card.driver for card in find_cards()[0]), None)
    return Platform(environment, found["fp16_native"])


def with_dataset(environment: Environment, data: DatasetInfo) -> Environment:
    """A copy of ``environment`` that names the dataset."""
    values = asdict(environment)
    values.update(
        dataset_fingerprint=data.fingerprint,
        dataset_source=data.source,
        train_images=data.train_images,
        test_images=data.test_images,
    )
    return Environment(**values)


def describe_host() -> Environment:
    """What is known without torch: host, operating system, CPU, this harness and its commit."""
    try:
        installed = version("gpu-precision-bench")
    except PackageNotFoundError:  # run from a checkout that is not installed
        installed = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Environment(
        cpu=f"{_cpu_model()}, {cores} cores",
        python=platform.python_version(),
        os=platform.platform(),
        host=socket.gethostname(),
        bench=installed,
        commit=_read_commit(),
        code=hash_code(),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _read_commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def hash_code() -> str:
    """First 12 hex digits of the SHA-256 over the harness's own Python source."""
    digest = sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        digest.update(path.relative_to(_ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def has_cuda() -> bool:
    """Whether torch was built for CUDA and NVML finds a GPU, without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    build = Path(spec.origin).with_name("version.py")
    try:
        cuda_build = "cuda: Optional[str] = '" in build.read_text()
    except OSError:
        cuda_build = True
    return cuda_build and bool(find_cards()[0])


def _describe_torch(device: str) -> dict[str, object]:
    """The half that needs torch, for `probe`: {"environment", "fp16_native", "error"}."""
    import torch

    environment = Environment(torch=str(torch.__version__), cuda=torch.version.cuda)
    fp16_native, error = True, ""
    if device == "cuda":
        if torch.version.cuda is None:
            error = (
                f"device cuda: torch {torch.__version__} is a CPU build; install a CUDA build of "
                "torch, or use --device cpu"
            )
        elif not torch.cuda.is_available():
            error = (
                f"device cuda: torch {torch.__version__} finds no usable GPU; check nvidia-smi "
                "and CUDA_VISIBLE_DEVICES, or use --device cpu"
            )
        else:
            card = torch.cuda.get_device_properties(0)
            environment.gpu = card.name
            environment.gpu_uuid = f"GPU-{card.uuid}"
            environment.gpu_memory_bytes = card.total_memory
            environment.capability = f"{card.major}.{card.minor}"
            environment.cudnn = str(torch.backends.cudnn.version())
    else:
        try:
            fp16_native = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        except (AttributeError, RuntimeError):
            fp16_native = False
    found = {f.name: getattr(environment, f.name) for f in fields(environment)}
    return {
        "environment": {name: value for name, value in found.items() if value is not None},
        "fp16_native": fp16_native,
        "error": error,
    }


if __name__ == "__main__":
    print(json.dumps(_describe_torch(sys.argv[1])))
