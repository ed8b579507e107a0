"""What a machine, its devices and the user's models are: one examination, before anything trains.

torch, the cards and each model are asked in processes of their own, so that a sweep itself never
imports torch or the user's code, or holds a CUDA context. Facts are gathered here without being
assessed: `bench.workers.judgement` and `bench.sweep.preflight` do that.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.base.errors import UsageError
from bench.base.installation import find_version
from bench.base.processes import OtherWork, Quota, read_governor, usable_cpus
from bench.base.progress import watch
from bench.base.text import parse_bytes
from bench.machine.gpus import READINGS, Depth, GpuProcess
from bench.machine.host import (
    describe_card,
    describe_host,
    find_missing,
    find_torch,
    find_variables,
    has_cuda,
    name_cpu,
)
from bench.machine.nvml import (
    Card,
    NvmlProblem,
    check_nvml,
    find_card,
    find_cards,
    open_device,
    spell_uuid,
)
from bench.networks.data import find_layout
from bench.networks.weights import hash_weights
from bench.profile.rates import DeviceRates, find_emulated, find_halves
from bench.schema.case import DEVICES
from bench.schema.precision import FP8_RECIPES, Apex, Precision, emulates_fp8, find_apex
from bench.schema.record import Environment
from bench.workers.fingerprint import Examined, Request, try_model
from bench.workers.server import EndedError, MessageError, call


@dataclass(frozen=True)
class Platform:
    """A device as torch sees it: its description for a record, why it cannot be used, empty if it
    can, and by column why rates are missing from the description."""

    environment: Environment
    error: str = ""
    unrated: Mapping[str, str] = field(default_factory=dict)

    def rate(self, found: DeviceRates) -> Platform:
        """Return a copy with the measured rates."""
        environment = replace(self.environment, **found.columns)
        return replace(self, environment=environment, unrated=found.reasons)

    def refuse(self, precision: Precision) -> str:
        """Return why the device cannot run ``precision`` at all; empty if it can."""
        if (self._capability or (0, 0)) >= precision.min_capability:
            return ""
        least = "Ampere" if precision.arithmetic == "tfloat32" else ""
        if precision.float8 and not (self.environment.gpu is None and emulates_fp8()):
            least = "compute capability " + ".".join(map(str, precision.min_capability))
        needs = f"{precision.name} needs an NVIDIA GPU of {least} or later; this is {self.name}"
        return needs if least else ""

    def refuse_recipe(self, name: str) -> str:
        """Return why the device cannot multiply by a recipe of fp8; empty if it can, or emulates
        fp8."""
        recipe = FP8_RECIPES[name]
        least = recipe.min_capability
        if recipe.untrained or self._capability is None or self._capability >= least:
            return recipe.untrained
        needs = f"compute capability {'.'.join(map(str, least))} or later"
        return f"--fp8-recipe {name} needs an NVIDIA GPU of {needs}; this is {self.name}"

    def find_emulation(self, precision: Precision, convolves: bool | None = None) -> str:
        """Return why ``precision`` would run only as an emulation, and is measured only if it is
        asked for by name; empty if it would not. Of a network that ``convolves``, or does not, it
        may be slow by the rates too, as no flag tells of some instructions.

        Few CPUs have instructions for fp16: without them, a step of DPN takes about 100 times as
        long as in fp32. In bf16 it takes 3 times as long if oneDNN computes the convolutions. The
        rates tell, where they were measured.
        """
        format = precision.arithmetic
        lacks, which = False, f"{self.name} has"
        if self._capability is not None:
            lacks = self._capability < precision.min_capability
        elif self.environment.gpu is None and format in ("float16", "float8"):
            native = find_halves(vars(self.environment)).get(format)
            lacks = not native
            if format == "float16" and native is None:
                which = "most CPUs have"
        if lacks:
            return f"{which} no {format} arithmetic"
        rates = vars(self.environment)
        return find_emulated(format, rates, convolves) if convolves is not None else ""

    def check_limit(self, limit: str | None) -> None:
        """Raise UsageError if a memory limit is above the memory of the device, if that is known,
        and would limit nothing."""
        if limit is None:
            return
        total = self.environment.gpu_memory_bytes
        if self.environment.gpu is None:
            import psutil

            total = psutil.virtual_memory().total
        if total and parse_bytes(limit) > total:
            raise UsageError(
                f"--memory-limit {limit} is above the {total / 2**30:.1f} GiB of {self.name}; "
                "give less, or leave it out"
            )

    @property
    def name(self) -> str:
        return self.environment.gpu or "a CPU"

    @property
    def _capability(self) -> tuple[int, ...] | None:
        """CUDA's compute capability; None if this is not an NVIDIA GPU."""
        text = self.environment.capability or ""
        return tuple(int(n) for n in text.split(".")) if text[:1].isdigit() else None


@dataclass(frozen=True)
class Gpu:
    """A card that CUDA would offer, and what could be read of it.

    ``lacks`` maps the quantities that NVML does not report to the reasons. ``others`` is None if
    processes cannot be listed.
    """

    card: Card
    lacks: dict[str, str] = field(default_factory=dict)
    others: tuple[GpuProcess, ...] | None = None
    throttle: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Cpu:
    """The CPU. ``others`` is the mean number of cores that other processes used, ``steal`` the
    fraction of all cores' time that the hypervisor gave to other machines. A ``quota`` allows less
    than the time of these ``cores``."""

    name: str = ""
    cores: int = 0
    governor: str | None = None
    others: float = 0.0
    steal: float = 0.0
    quota: Quota | None = None


@dataclass(frozen=True)
class Machine:
    """What an examination found. Sizes are in bytes, None if they could not be found out.

    The first fields are told by processes of their own, wherever cases run: why torch cannot be
    used, devices by name, models by `bench.workers.fingerprint.name_subject`, and cards. The others
    are of this machine. ``starts`` has the hashes of files of weights. ``missing`` lists the
    packages of `bench.machine.host.PACKAGES` that are not installed. ``device_rates`` holds the
    measured rates of devices."""

    torch_error: str = ""
    devices: dict[str, Platform] = field(default_factory=dict)
    models: dict[str, Examined] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    nvml: NvmlProblem | None = None
    nvml_reason: str = ""
    no_gpu: str = ""

    starts: dict[str, str] = field(default_factory=dict)
    cpu: Cpu = Cpu()
    results: str = ""
    results_free_bytes: int | None = None
    shm_free_bytes: int | None = None
    data_dir: str = ""
    data_layout: str | None = None
    data_error: str = ""
    apex: Apex | None = None
    variables: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    torchao: str | None = None
    device_rates: dict[str, DeviceRates] = field(default_factory=dict)

    def use(self, devices: Iterable[str]) -> dict[str, Platform]:
        """Return those of ``devices`` that were examined. Raises UsageError: torch is missing or
        broken, or cannot use one of them."""
        found = {name: self.devices[name] for name in devices if name in self.devices}
        for why in (self.torch_error, *(one.error for one in found.values())):
            if why:
                raise UsageError(why)
        return found


ASK_S = 600.0
"""Time limit for an answer about torch, devices and models, in s."""


def examine(
    devices: Sequence[str] = DEVICES,
    models: Sequence[Request] = (),
    *,
    data_dir: Path | None = None,
    out: Path | None = None,
    timeout_s: float = ASK_S,
    ask: Callable[[Sequence[str], Sequence[Request], float], Machine] | None = None,
) -> Machine:
    """Examine this machine, in two seconds. Raises UsageError: a file of weights that a model is
    to start from cannot be read.

    Args:
        models: to import, build and run once.
        data_dir: where to look for CIFAR-10, ./data if None.
        out: where results would go, ./results if None.
        timeout_s: the time limit for the models.
        ask: replaces `ask_processes`, where other places than this machine run cases.
    """
    starts = {name: hash_weights(name) for asked in models for name in asked.starts}
    load = OtherWork()
    load.start()
    # in this thread, so that Ctrl-C ends a model that hangs
    machine = (ask or ask_processes)(devices, models, timeout_s)
    load.stop()
    used = round(load.cores(guests=False), 2), round(load.stolen(), 3)
    folder = (data_dir or Path("data")).absolute()
    place = (out or Path("results")).absolute()
    layout, wrong = None, ""
    try:
        layout = find_layout(folder)
    except (OSError, UsageError) as error:  # as in a folder that this user may not read
        wrong = str(error)
    return replace(
        machine,
        starts=starts,
        cpu=Cpu(name_cpu(), len(usable_cpus()), read_governor(), *used, load.quota),
        results=str(place),
        results_free_bytes=_free_bytes(place),
        shm_free_bytes=_free_bytes(Path("/dev/shm")) if Path("/dev/shm").exists() else None,
        data_dir=str(folder),
        data_layout=layout,
        data_error=wrong,
        apex=find_apex(),
        variables=find_variables(),
        missing=find_missing(),
        torchao=find_version("torchao"),
    )


def _free_bytes(place: Path) -> int | None:
    try:
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        return shutil.disk_usage(there).free
    except OSError:
        return None


@watch("asking torch what this machine can run")
def ask_processes(
    devices: Sequence[str],
    models: Sequence[Request] = (),
    timeout_s: float = ASK_S,
    *,
    variables: Mapping[str, str] | None = None,
    cold: bool = False,
) -> Machine:
    """Ask a process of its own about torch, devices ("cuda" or "cpu") and cards, and one each about
    networks and workloads. The environment ``variables`` choose the GPU; ``cold`` is as for
    `bench.workers.server.Process`."""
    until, found = time.monotonic() + timeout_s, dict[str, Examined]()
    about: dict[str, Any] = {"variables": variables, "cold": cold}
    place = "bench.workers.examination:answer"
    try:
        machine: Machine = call(place, devices, timeout_s=timeout_s, **about)
    except (TimeoutError, EndedError, MessageError) as error:
        why = str(error) or f"no answer within {timeout_s:g} s"
        why = f"torch cannot be asked about the device: {why}; install torch>=2.9"
        return replace(describe(devices, None), torch_error=why)
    for asked in models:
        try:
            found[asked.subject] = try_model(asked, until - time.monotonic(), **about)
        except TimeoutError:
            late = f"not built and run within {timeout_s:g} s; raise --timeout"
            found[asked.subject] = f"{asked.what}: {late}"
    return replace(machine, models=found)


def probe(device: str) -> Platform:
    """Ask a fresh process to describe ``device`` ("cuda" or "cpu"). Raises UsageError: torch is
    missing or broken, or cannot use the device."""
    return ask_processes([device]).use([device])[device]


def are_unlike(cards: Sequence[Card]) -> bool:
    """Return whether CUDA may count cards in another order than NVML: the fastest first."""
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return not by_bus and len({card.kind for card in cards}) > 1


def guess_devices() -> dict[str, Platform]:
    """Describe the CPU, and the GPU that torch would use, as far as they are known without it. Of
    unlike GPUs only CUDA knows which one it takes for the fastest: then torch is asked."""
    host = replace(describe_host(), torch=find_torch())
    known, cards = {"cpu": Platform(host)}, find_cards()[0] if has_cuda() else []
    if are_unlike(cards):
        return ask_processes(DEVICES).devices
    for card in cards[:1]:
        about = replace(
            host,
            gpu=card.name,
            driver=card.driver,
            gpu_memory_bytes=card.memory_bytes,
            capability=".".join(map(str, card.capability or ())),
        )
        known["cuda"] = Platform(about)
    return known


# ----------------------------------------------------------------------------- in the process asked


def answer(connection: Connection, devices: Sequence[str]) -> None:
    import torch  # noqa: F401

    connection.send(describe(devices, partial(describe_device, host=describe_host())))


def describe(
    devices: Sequence[str], use: Callable[[str], Platform] | None, nvml: Any = None
) -> Machine:
    """Describe devices by ``use``, which holds them in this process from then on, if there is
    torch, and the cards meanwhile. ``nvml`` replaces the module pynvml."""
    lack, reason = check_nvml(nvml)
    cards, no_gpu = find_cards(nvml) if "cuda" in devices else ([], "")
    opened = [open_device(card.uuid, nvml) for card in cards]
    for device in opened:
        device.read(Depth.SLOW)  # the processes there before this one
    found = {name: use(name) for name in devices} if use else {}
    uuid = found["cuda"].environment.gpu_uuid if "cuda" in found else None
    ours, gpus = find_card(uuid, cards) if uuid else None, list[Gpu]()
    for card, device in zip(cards, opened, strict=True):
        device.watch(os.getpid())
        now = device.read(Depth.EDGE)[-1]
        asked = [name for name in READINGS if card is ours or name != "process_bytes"]
        lacks = {name: device.why(name) for name in asked if getattr(now, name) is None}
        gpus.append(Gpu(card, lacks, now.others, now.throttle))
        device.close()
    return Machine("", found, {}, tuple(gpus), lack, reason, no_gpu)


def describe_device(device: str, host: Environment) -> Platform:
    """Describe a device of ``host`` by torch."""
    import torch

    about = replace(
        host,
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        torch_threads=torch.get_num_threads(),
    )
    return Platform(about, _use_card(about) if device == "cuda" else "")


def _use_card(about: Environment) -> str:
    """Describe the first card in ``about`` and compute on it; return why that fails."""
    import torch

    def lack(what: str, fix: str) -> str:
        return f"device cuda: torch {torch.__version__} {what}; {fix}, or use --device cpu"

    if not torch.backends.cuda.is_built():
        return lack("is a CPU build", "install a CUDA build of torch")
    with warnings.catch_warnings(record=True) as warned:  # torch gives the reason in a warning
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        why = next((f" ({str(w.message).partition('. ')[0]})" for w in warned), "")
        return lack(f"finds no usable GPU{why}", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    card = torch.cuda.get_device_properties(0)
    uuid = spell_uuid(str(card.uuid), find_cards()[0])
    vars(about).update(
        gpu=card.name,
        gpu_uuid=uuid,
        gpu_memory_bytes=card.total_memory,
        # that of a ROCm build means another architecture
        capability=f"{card.major}.{card.minor}" if torch.version.cuda else None,
        cudnn=str(torch.backends.cudnn.version()),
        **describe_card(uuid),
    )
    try:
        torch.ones(2, device="cuda").sum().item()
    except RuntimeError as error:  # no kernels for this GPU, or another process has it alone
        why = (str(error).splitlines() or [""])[0]
        fix = "install a build of torch for this GPU"
        return lack(f"cannot compute on {about.gpu}: {why}", fix)
    return ""
