"""Facts about a machine, gathered in two seconds: driver, cards, torch, CPU, disk, packages.

`examine_machine` gathers facts without assessing them; `bench.doctor.judgement` does that. Facts
are plain values, which are written as JSON.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.apex import Apex, find_apex
from bench.case import DEVICES
from bench.cores import OtherWork, Quota, read_governor, usable_cpus
from bench.data import find_layout
from bench.doctor.earlier import describe_slowdown, read_earlier
from bench.doctor.rates import choose_seconds, measure_rates
from bench.environment.device import Platform
from bench.environment.examination import DeviceAnswer, ProcessAnswer, ask
from bench.environment.host import describe_host, find_missing, find_variables, find_version
from bench.errors import UsageError
from bench.fingerprint import split_subject
from bench.gpu.cards import Card, find_card, find_cards
from bench.gpu.device import READINGS, Depth, Process
from bench.gpu.nvml import NvmlProblem, check_nvml, open_device
from bench.precision import find_torchao
from bench.record import Environment
from bench.yardstick import Yardstick


@dataclass(frozen=True)
class Gpu:
    """A card that CUDA would offer, and what could be read of it.

    ``lacks`` maps the quantities that NVML does not report to the reasons. ``process_bytes`` is the
    memory that our own torch process held on the card; None if it was not reported, or if there was
    no such process (``tried`` is false). ``others`` is None if processes cannot be listed.
    """

    card: Card
    lacks: dict[str, str] = field(default_factory=dict)
    others: tuple[Process, ...] | None = None
    throttle: tuple[str, ...] | None = None
    tried: bool = False
    process_bytes: int | None = None


@dataclass(frozen=True)
class Cpu:
    """The CPU. ``others`` is the mean number of cores that other processes used, ``steal`` the
    fraction of all cores' time that the hypervisor gave to other machines. A ``quota`` allows less
    than the time of these ``cores``."""

    name: str
    cores: int
    governor: str | None = None
    others: float = 0.0
    steal: float = 0.0
    watched_s: float = 0.0
    quota: Quota | None = None


@dataclass(frozen=True)
class Machine:
    """The facts. Sizes are in bytes, None if they could not be found out.

    ``missing`` lists the packages of `bench.environment.host.PACKAGES` that are not installed.
    ``yardsticks`` holds the measured rates of devices, and ``slower`` how much they are below those
    of an earlier sweep. ``data_fault`` says what is wrong with the images in ``data_dir``.
    """

    host: str
    os: str
    python: str
    nvml: NvmlProblem | None
    nvml_reason: str
    cuda_visible_devices: str | None
    gpus: tuple[Gpu, ...]
    no_gpu: str
    torch_error: str
    devices: dict[str, DeviceAnswer]
    models: dict[str, str]
    cpu: Cpu
    results: str
    results_free_bytes: int | None
    shm_free_bytes: int | None
    data_dir: str
    data_layout: str | None
    apex: Apex | None
    nvidia_ml_py: str | None
    pynvml: str | None
    variables: dict[str, str]
    missing: tuple[str, ...] = ()
    torchao: str | None = None
    yardsticks: dict[str, Yardstick] = field(default_factory=dict)
    slower: str = ""
    data_fault: str = ""

    @property
    def device(self) -> str | None:
        """The device that torch can use, a GPU if possible; None if it can use none."""
        usable = [name for name in DEVICES if name in self.devices]
        return next((name for name in usable if not self.devices[name].error), None)

    def platform(self, device: str) -> Platform:
        """Return what a device can run, as reported by torch."""
        answer = self.devices[device]
        environment = Environment(**answer.environment)
        return Platform(environment, answer.fp16_native, answer.bf16_native)


def examine_machine(
    devices: Sequence[str] = (),
    models: Sequence[str] = (),
    *,
    data_dir: Path | None = None,
    out: Path | None = None,
    timeout_s: float = 600.0,
    watch_s: float = 0.5,
    nvml: Any = None,
    ask: Callable[..., ProcessAnswer] = ask,
) -> tuple[Machine, ProcessAnswer]:
    """Gather the facts. torch and the models are examined in a separate process, whose full answer
    is returned with the facts.

    Args:
        devices: by default all of `DEVICES`.
        models: to import, build and run once.
        data_dir: where to look for CIFAR-10, ./data if None.
        out: where results would go, ./results if None.
        timeout_s: the time limit for the models.
        watch_s: how long to watch the CPU at least.
        nvml: replaces the module pynvml.
        ask: replaces `bench.environment.examination.ask`.
    """
    devices = devices or DEVICES
    begun, load = time.monotonic(), OtherWork()
    load.start()
    lack, reason = check_nvml(nvml)
    cards, no_gpu = find_cards(nvml) if "cuda" in devices else ([], "")
    opened = [open_device(card.uuid, nvml) for card in cards]
    for device in opened:
        device.read(Depth.SLOW)  # the processes there before our own starts
    gpus: list[Gpu] = []

    def look(pid: int, ours: Card | None = None) -> None:
        for card, device in zip(cards, opened, strict=True):
            device.watch(pid)
            now, tried = device.read(Depth.EDGE)[-1], card is ours
            asked = [name for name in READINGS if tried or name != "process_bytes"]
            lacks = {name: device.why(name) for name in asked if getattr(now, name) is None}
            held = now.process_bytes if tried else None
            gpus.append(Gpu(card, lacks, now.others, now.throttle, tried, held))

    def look_at_ours(answer: ProcessAnswer, pid: int) -> None:
        uuid = answer.devices["cuda"].environment.get("gpu_uuid") if "cuda" in devices else None
        look(pid, find_card(uuid, cards) if uuid else None)

    folder = (data_dir or Path("data")).absolute()
    place = (out or Path("results")).absolute()
    with ThreadPoolExecutor() as pool:
        host, layout = pool.submit(describe_host), pool.submit(find_layout, folder)
        # in this thread, so that Ctrl-C ends a model that hangs
        answer = ask(devices, models, timeout_s=timeout_s, look=look_at_ours)
    if not gpus:
        look(os.getpid())
    for device in opened:
        device.close()
    time.sleep(max(0.0, begun + watch_s - time.monotonic()))
    load.stop()
    used = round(load.cores(guests=False), 2), round(load.stolen(), 3), round(load.sums[2], 2)
    cpu, fault = host.result().cpu or "", layout.exception()
    return Machine(
        host=socket.gethostname(),
        os=platform.platform(),
        python=platform.python_version(),
        nvml=lack,
        nvml_reason=reason,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=tuple(gpus),
        no_gpu=no_gpu,
        torch_error=answer.error,
        devices=answer.devices,
        models={
            split_subject(subject)[0]: found if isinstance(found, str) else ""
            for subject, found in answer.models.items()
        },
        cpu=Cpu(cpu, len(usable_cpus()), read_governor(), *used, load.quota),
        results=str(place),
        results_free_bytes=_free_bytes(place),
        shm_free_bytes=_free_bytes(Path("/dev/shm")) if Path("/dev/shm").exists() else None,
        data_dir=str(folder),
        # None for a folder that this user may not read
        data_layout=None if isinstance(fault, OSError | UsageError) else layout.result(),
        data_fault=str(fault) if isinstance(fault, UsageError) else "",
        apex=find_apex(),
        nvidia_ml_py=find_version("nvidia-ml-py"),
        pynvml=find_version("pynvml"),
        variables=find_variables(),
        missing=find_missing(),
        torchao=find_torchao(),
    ), answer


def measure_machine(machine: Machine) -> Machine:
    """Measure the rates of the device. Raises UsageError: `bench.doctor.rates.SECONDS` is not a
    number of seconds."""
    device = machine.device
    if device is None or not (seconds := choose_seconds(device)):
        return machine
    platform = ProcessAnswer(devices=machine.devices).platform(device)
    earlier = read_earlier(platform, Path(machine.results))
    found = measure_rates(device, seconds)
    slower = describe_slowdown(found.rates, earlier)
    return replace(machine, yardsticks={device: found}, slower=slower)


def _free_bytes(place: Path) -> int | None:
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None
