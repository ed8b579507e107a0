"""What devices and models are, found in processes of their own.

So a sweep itself never imports torch or the user's code, or holds a CUDA context.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from typing import Any

from bench.data import DatasetInfo
from bench.data.progress import Progress
from bench.environment.device import Platform
from bench.environment.host import CPU_FLAGS, describe_card, describe_host, read_cpu_flags
from bench.errors import UsageError
from bench.fingerprint import Fingerprint, parse_request, split_subject, try_model
from bench.gpu.cards import UNKNOWN
from bench.precision import Arithmetic
from bench.record import Environment
from bench.run.process import EndedError, MessageError, Process
from bench.text import is_whole


@dataclass(frozen=True)
class DeviceAnswer:
    """Description of a device by torch: fields of `Environment`, or why it cannot be used."""

    environment: dict[str, Any] = field(default_factory=dict)
    fp16_native: bool = True
    error: str = ""
    bf16_native: bool = True


@dataclass(frozen=True)
class ProcessAnswer:
    """A fresh process's answer about torch, devices by name and models by name.

    ``error`` says why torch cannot be used at all. A model is a `Fingerprint`, or the line that
    says what is wrong with it. ``host`` describes the machine and the cores of the process; None
    means this machine.
    """

    error: str = ""
    devices: dict[str, DeviceAnswer] = field(default_factory=dict)
    models: dict[str, Fingerprint | str] = field(default_factory=dict)
    host: Environment | None = None

    def platform(self, device: str) -> Platform:
        """Return the device together with its host. Raises UsageError: torch is missing or broken,
        or cannot use the device."""
        if why := self.error or self.devices[device].error:
            raise UsageError(why)
        answer = self.devices[device]
        environment = replace(self.host or describe_host(), **answer.environment)
        if environment.gpu_uuid is not None and self.host is None:
            environment = replace(environment, **describe_card(environment.gpu_uuid))
        return Platform(environment, answer.fp16_native, answer.bf16_native)

    def fingerprint(self, model: str) -> Fingerprint:
        """Return the fingerprint of a ``model`` named by `bench.fingerprint.name_subject`. Raises
        UsageError: the model cannot be imported, built or run, or torch cannot be used."""
        found = self.error or self.models[model]
        if isinstance(found, str):
            raise UsageError(found)
        return found


ASK_S = 600.0
"""Time limit for an answer about torch, devices and models, in s."""


def ask(
    devices: Sequence[str],
    models: Sequence[str] = (),
    *,
    timeout_s: float = ASK_S,
    look: Callable[[ProcessAnswer, int], None] = lambda answer, pid: None,
    variables: Mapping[str, str] | None = None,
    cold: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> ProcessAnswer:
    """Describe devices ("cuda" or "cpu") in a process of its own, and networks and workloads, each
    written as by `bench.fingerprint.ExamineRequest`, in one each. ``look`` is called with what the
    first says and its id while it still holds the devices; the environment ``variables`` choose the
    GPU; ``cold`` as for `bench.run.process.Process`. ``progress`` is told of several models."""
    until = time.monotonic() + timeout_s
    about: dict[str, Any] = {"variables": variables, "cold": cold}
    with Process("bench.environment.examination:answer", devices, **about) as process:
        try:
            answer: ProcessAnswer = process.receive(timeout_s)
        except (TimeoutError, EndedError, MessageError) as error:
            why = str(error) or f"no answer within {timeout_s:g} s"
            found = PathFinder.find_spec("torch")
            mend = "install torch>=2.9"
            if found and not found.submodule_search_locations:  # a file, and no package
                mend = f"{found.origin} hides torch: give it another name"
            return ProcessAnswer(f"torch cannot be asked about the device: {why}; {mend}")
        look(answer, process.pid)
    for done, text in enumerate(models):
        request = parse_request(text)
        if len(models) > 1:
            progress("networks tried", done, len(models))
        try:
            left_s = until - time.monotonic()
            answer.models[request.subject] = try_model(request, left_s, **about)
        except TimeoutError:
            what = ", ".join(split_subject(parse_request(text).subject)[0] for text in models)
            return ProcessAnswer(
                f"model {what}: not built and run within {timeout_s:g} s; raise --timeout"
            )
    return answer


def answer(told: Connection, devices: Sequence[str]) -> None:
    """Describe devices, and hold them until nobody listens any more."""
    import torch  # noqa: F401

    found = {name: describe_device(name) for name in devices}
    told.send(ProcessAnswer(devices=found, host=describe_host()))
    with suppress(EOFError):
        told.recv()


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


def probe(device: str) -> Platform:
    """Ask a fresh process to describe ``device`` ("cuda" or "cpu"). Raises UsageError: torch is
    missing or broken, or cannot use the device."""
    return ask([device]).platform(device)


def with_inputs(
    environment: Environment, data: DatasetInfo, model: Fingerprint | None
) -> Environment:
    """Return a copy of ``environment`` with the dataset and, if it was examined, the model."""
    inputs = replace(
        environment,
        dataset_fingerprint=data.fingerprint,
        dataset_source=data.source,
        train_images=data.train_images,
        test_images=data.test_images,
        dataset_classes=data.classes or None,
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
