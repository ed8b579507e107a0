"""What a case runs on: host, code, torch, GPU; and the models it trains.

`python -m bench.environment cuda mynet:build` prints, as JSON, what needs torch to be known. A
sweep asks it of a process of its own, so that the sweep itself never imports torch or the user's
code, or holds a CUDA context.
"""

from __future__ import annotations

import gc
import io
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, TextIO

from bench.cores import read_governor, spell_cpu, usable_cpus
from bench.data import DatasetInfo
from bench.errors import UsageError
from bench.fingerprint import Fingerprint, examine_in_fork, parse_asked, split_subject
from bench.gpu.build import has_amd, name_uuid, read_build
from bench.gpu.cards import find_card, find_cards
from bench.gpu.kinds import DEVICES, refuse_others
from bench.plain import read_value
from bench.precision import EMULATE_FP8, Arithmetic, Precision, emulates_fp8
from bench.processes import leave, pause_collection
from bench.record import Environment
from bench.text import last_line, parse_bytes

_ROOT = Path(__file__).parent
_CPU = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Platform:
    """A device as torch sees it: what a record keeps of it, and what decides what it can run."""

    environment: Environment
    fp16_native: bool = True
    bf16_native: bool = True

    def refuse(self, precision: Precision) -> str:
        """Say why the device cannot run ``precision`` at all; empty where it can."""
        if (self._capability or (0, 0)) >= precision.min_capability:
            return ""
        least = "Ampere" if precision.arithmetic == "tfloat32" else ""
        if precision.float8 and not (self.environment.gpu is None and emulates_fp8()):
            least = "compute capability " + ".".join(map(str, precision.min_capability))
        needs = f"{precision.name} needs an NVIDIA GPU of {least} or later; this is {self.name}"
        return needs if least else ""

    def find_emulation(self, precision: Precision) -> str:
        """Say why ``precision`` would run but measure an emulation; empty where it would not."""
        if self._capability is not None:
            old = self._capability < precision.min_capability
            return f"{self.name} has no {precision.arithmetic} arithmetic" if old else ""
        halves = {"float16": ("fp16", self.fp16_native), "bfloat16": ("bf16", self.bf16_native)}
        half, native = halves.get(precision.arithmetic, ("", True))
        if not native:
            return f"{self.environment.gpu or 'this CPU'} has no {half} arithmetic"
        if self.environment.gpu is None and precision.float8:
            return f"{precision.name} is emulated on a CPU"
        return ""

    def discourage(self, precision: Precision) -> str:
        """Say why ``precision`` is only measured where it is asked for by name; else empty.

        On a CPU that emulates both halves, a step of DPN takes some 100 times as long in fp16 as in
        fp32. In bf16 it is 3 times where oneDNN computes the convolutions.
        """
        if self.environment.gpu is None and precision.arithmetic == "bfloat16":
            return ""
        return self.find_emulation(precision)

    def refuse_limit(self, limit: str | None) -> str:
        """Say why no memory limit can be set here; empty where it can, or ``limit`` is None."""
        if limit is None or self.environment.gpu is not None or sys.platform == "linux":
            return ""
        return "a memory limit on a CPU needs Linux; leave out --memory-limit"

    def check_limit(self, limit: str | None) -> None:
        """Refuse a memory limit above what the device has: it would limit nothing. Raises
        UsageError: it says how much there is."""
        if limit is None:
            return
        import psutil

        total = self.environment.gpu_memory_bytes or psutil.virtual_memory().total
        if parse_bytes(limit) > total:
            raise UsageError(
                f"--memory-limit {limit} is above the {total / 2**30:.1f} GiB of {self.name}; "
                "give less, or leave it out"
            )

    @property
    def name(self) -> str:
        return self.environment.gpu or "a CPU"

    @property
    def _capability(self) -> tuple[int, ...] | None:
        """CUDA's; None of what is no NVIDIA GPU."""
        told = self.environment.capability or ""
        return tuple(int(n) for n in told.split(".")) if told[:1].isdigit() else None


@dataclass(frozen=True)
class DeviceAnswer:
    """What torch says of a device: fields of `Environment`, or why it cannot be used."""

    environment: dict[str, Any] = field(default_factory=dict)
    fp16_native: bool = True
    error: str = ""
    bf16_native: bool = True


@dataclass(frozen=True)
class ProcessAnswer:
    """What a fresh process said of torch, of devices by name and of models by name.

    ``error`` is why torch cannot be asked at all. A model is a `Fingerprint`, or the line that says
    what is wrong with it. ``host`` describes the machine and the cores that the process had; None
    where it is this one.
    """

    error: str = ""
    devices: dict[str, DeviceAnswer] = field(default_factory=dict)
    models: dict[str, Fingerprint | str] = field(default_factory=dict)
    host: Environment | None = None

    def platform(self, device: str) -> Platform:
        """The device, described together with its host. Raises UsageError: torch is missing or
        broken, or cannot use the device."""
        if why := self.error or self.devices[device].error:
            raise UsageError(why)
        answer = self.devices[device]
        environment = replace(self.host or describe_host(), **answer.environment)
        if environment.gpu_uuid is not None and self.host is None:
            environment = replace(environment, **_describe_card(environment.gpu_uuid))
        return Platform(environment, answer.fp16_native, answer.bf16_native)

    def fingerprint(self, model: str) -> Fingerprint:
        """The model or workload, as `bench.fingerprint.name_subject` names it. Raises UsageError:
        it cannot be imported, built or run, or torch cannot."""
        found = self.error or self.models[model]
        if isinstance(found, str):
            raise UsageError(found)
        return found


ASK_S = 600.0
"""How long torch, devices and models may take to answer."""

Asking = AbstractContextManager[tuple[int, IO[bytes]]]
"""A process that answers: its id, and where it writes the answer, in a line. It leads a session of
its own, which is ended with it where it is left."""


@contextmanager
def start_asked(
    names: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]
) -> Iterator[tuple[int, IO[bytes]]]:
    """Ask a new Python; what goes wrong is written to ``errors``."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "bench.environment", *names],
        stdin=pipe,
        stdout=pipe,
        stderr=errors,
        start_new_session=True,  # so that whatever a user's model starts can be ended with it
        env=environment,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.pid, process.stdout
            process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ask(
    devices: Sequence[str],
    models: Sequence[str] = (),
    *,
    timeout_s: float = ASK_S,
    look: Callable[[ProcessAnswer, int], None] = lambda answer, pid: None,
    variables: Mapping[str, str] | None = None,
    start: Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Asking] = start_asked,
) -> ProcessAnswer:
    """Ask a fresh process about devices ("cuda" or "cpu") and about networks and workloads, as
    `bench.fingerprint.Asked` writes them. ``look`` is called with the answer and the process's id
    while it still holds the devices; ``variables`` of the environment choose the GPU; ``start`` is
    how the process is started."""
    late = False
    pid: int | None = None
    answer: ProcessAnswer | None = None

    def end() -> None:
        nonlocal late
        late = True
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)

    with TemporaryFile() as errors:
        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            with start([*devices, *models], {**os.environ, **(variables or {})}, errors) as asked:
                pid, said_to = asked
                with suppress(ValueError, TypeError):
                    answer = read_value(ProcessAnswer, json.loads(said_to.readline()))
                if answer is not None:
                    look(answer, pid)
        finally:
            timer.cancel()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if answer is not None:
        return answer
    if late and models:
        what = ", ".join(split_subject(parse_asked(text).subject)[0] for text in models)
        return ProcessAnswer(
            f"model {what}: not built and run within {timeout_s:g} s; raise --timeout"
        )
    return ProcessAnswer(
        f"torch cannot be asked about the device: {last_line(said)}; install torch>=2.9"
    )


def probe(device: str) -> Platform:
    """Ask a fresh process what ``device`` ("cuda" or "cpu") is. Raises UsageError: torch is missing
    or broken, or cannot use the device."""
    return ask([device]).platform(device)


def with_inputs(
    environment: Environment, data: DatasetInfo, model: Fingerprint | None
) -> Environment:
    """A copy of ``environment`` that names the dataset and the model; None if not examined."""
    inputs = replace(
        environment,
        dataset_fingerprint=data.fingerprint,
        dataset_source=data.source,
        train_images=data.train_images,
        test_images=data.test_images,
    )
    if model is not None:
        inputs.model_parameters = model.parameters
        inputs.model_structure = model.structure
        inputs.model_source = model.source
        if model.workload is not None:
            inputs.train_images = model.workload.units
            inputs.test_images = model.workload.test_units
            inputs.unit = model.workload.unit
    return inputs


def _describe_card(uuid: str) -> dict[str, Any]:
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
        commit=_read_commit(),
        code=hash_code(),
        variables=" ".join(f"{name}={value}" for name, value in find_variables().items()) or None,
        cpu_governor=read_governor(),
    )


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

# Of those patterns: folders, caches, logs and the compiler's own processes, which change no result.
_HARMLESS = re.compile(
    r"CACHE_DIR|(GRAPH|REMOTE|AUTOGRAD|AUTOTUNE)\w*_CACHE|CACHE_DEFAULT|LOG|DEBUG|DUMP|VERBOSE|PRINT"
    r"|PROFIL|PROTON|REPRO_|NCCL_VERSION|WORKER|COMPILE_THREADS|TIMEOUT|OUTPUT_DIR|SAVE_ARGS|HOME"
)


def find_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables of `VARIABLES` that are set, by name, sorted."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if not _HARMLESS.search(name) and any(fnmatchcase(name, known) for known in VARIABLES)
    }


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
    """What `hash_code` says at a commit; None where this is no clone that has it."""
    command = ["git", "-C", str(_ROOT), "archive", "--format=tar", commit]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {PurePosixPath(member.name): member for member in tar if member.isfile()}
        code = sorted(path for path in files if path.suffix == ".py")
        return _hash((p, tar.extractfile(files[p]).read()) for p in code)  # type: ignore[union-attr]


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
    "tenacity": "tenacity",
    "seaborn": "seaborn",
    "scipy": "scipy",
    "jinja2": "jinja2",
}
"""The packages that this harness needs, and the module that each is imported as."""


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_missing(packages: Iterable[str] = PACKAGES) -> tuple[str, ...]:
    return tuple(name for name in packages if find_spec(PACKAGES[name]) is None)


def refuse_missing(packages: Iterable[str] = PACKAGES) -> None:
    """Refuse to start where packages are missing that would be needed on the way. Raises
    UsageError: it names them, and the command that installs them."""
    if missing := find_missing(packages):
        are = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{', '.join(missing)} {are} not installed for {sys.executable}; "
            f"{describe_install(missing)}"
        )


def describe_install(packages: Iterable[str]) -> str:
    return f"{sys.executable} -m pip install {' '.join(packages)}"


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


def _describe_device(device: str) -> DeviceAnswer:
    import torch

    environment: dict[str, Any] = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
    }
    if device == "cuda":
        return DeviceAnswer(environment, error=_use_card(environment))
    build = "install a build of torch for it"
    if device == "mps":
        if not torch.backends.mps.is_available():
            return DeviceAnswer(environment, error=_word_lack(device, "finds no Apple GPU", build))
        name = getattr(torch.backends.mps, "get_name", lambda: "Apple GPU")()
        memory = torch.mps.recommended_max_memory()
        return DeviceAnswer({**environment, "gpu": name, "gpu_memory_bytes": memory})
    if device == "xpu":
        if not torch.xpu.is_available():
            return DeviceAnswer(environment, error=_word_lack(device, "finds no Intel GPU", build))
        card = torch.xpu.get_device_properties(0)
        environment.update(
            gpu=card.name, gpu_memory_bytes=card.total_memory, driver=card.driver_version
        )
        halves = (card.has_fp16, getattr(card, "has_bfloat16_conversions", True))
        return DeviceAnswer(environment, bool(halves[0]), bf16_native=bool(halves[1]))
    try:
        fp16_native = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        fp16_native = False
    # torch's own question is whether oneDNN can: with AVX-512 alone it does, by way of float32
    flags = read_cpu_flags()
    bf16_native = not flags or bool(flags & CPU_FLAGS[Arithmetic.BFLOAT16])
    return DeviceAnswer(environment, fp16_native, bf16_native=bf16_native)


def _word_lack(device: str, what: str, fix: str) -> str:
    import torch

    return f"device {device}: torch {torch.__version__} {what}; {fix}, or use --device cpu"


def _use_card(environment: dict[str, Any]) -> str:
    """Compute on the first card and add what it is to ``environment``; or say why that fails."""
    import torch

    hip = torch.version.hip is not None
    if torch.version.cuda is None and not hip:
        return _word_lack("cuda", "is a CPU build", "install a CUDA build of torch")
    with warnings.catch_warnings(record=True) as warned:  # that is where torch says why
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        why = next((f" ({str(w.message).partition('. ')[0]})" for w in warned), "")
        look = "rocminfo and HIP_VISIBLE_DEVICES" if hip else "nvidia-smi and CUDA_VISIBLE_DEVICES"
        return _word_lack("cuda", f"finds no usable GPU{why}", f"check {look}")
    card = torch.cuda.get_device_properties(0)
    environment.update(
        gpu=card.name,
        gpu_uuid=name_uuid(card.uuid, hip),
        gpu_memory_bytes=card.total_memory,
        # gfx942:sramecc+:xnack-
        capability=card.gcnArchName.partition(":")[0] if hip else f"{card.major}.{card.minor}",
        **{"miopen" if hip else "cudnn": str(torch.backends.cudnn.version())},
    )
    known = _describe_card(environment["gpu_uuid"])
    environment.update({name: value for name, value in known.items() if value is not None})
    try:
        torch.ones(2, device="cuda").sum().item()
    except RuntimeError as error:  # no kernels for this GPU, or another process has it alone
        why = (str(error).splitlines() or [""])[0]
        what = f"cannot compute on {card.name}: {why}"
        return _word_lack("cuda", what, "install a build of torch for this GPU")
    return ""


def respond(names: Sequence[str], answers: TextIO) -> None:
    """Answer in a line, and hold the devices until standard input ends. Models are examined in
    forks of this process, which has imported torch."""
    devices = [name for name in names if name in DEVICES]
    models = [name for name in names if name not in devices]
    if len(models) > 1:  # else each fork imports them, which takes as long as torch itself
        for name in ("bench.training.counting", "bench.training.trial", "torch._dynamo"):
            import_module(name)
    # models first: a fork of a process that has used CUDA cannot use it
    found = {
        "models": {parse_asked(text).subject: examine_in_fork(text) for text in models},
        "devices": {name: vars(_describe_device(name)) for name in devices},
        "host": asdict(describe_host()),
    }
    print(json.dumps(found), file=answers, flush=True)
    if not sys.stdin.isatty():
        sys.stdin.read()


def _main(names: Sequence[str]) -> None:
    with pause_collection():
        import torch  # noqa: F401

    gc.freeze()  # a fork does not go through all of it again
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a user's model may print
    respond(names, answers)


if __name__ == "__main__":
    _main(sys.argv[1:])
    leave(0)
