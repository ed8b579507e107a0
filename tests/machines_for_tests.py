"""Machines: those that the doctor examined, in ``recordings/``, and `MACHINES`, made from the
documents of their cards, with what NVML and torch answer on each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from bench.base.plain import read_value
from bench.machine import host
from bench.machine.nvml import find_cards, spell_uuid
from bench.schema.record import Environment
from bench.workers import examination as machine
from bench.workers.examination import Machine, Platform, describe
from tests.pytest_for_tests import Patch

RECORDINGS = Path(__file__).parent / "recordings"

GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


def read_machine(file: Path) -> Machine:
    """Read the facts in what ``python -m bench.doctor --format json`` printed."""
    machine: Machine = read_value(Machine, json.loads(file.read_text())["facts"])
    return machine


# ----------------------------------------------------------------------------------- a fake of NVML


@dataclass(frozen=True)
class Board:
    """A card as its documents describe it. ``lacks`` are NVML's calls that it does not support;
    ``draws`` and ``computes`` the processes on it, by pid, with their memory; and ``slices`` what
    MIG made of it: UUID, name and GiB of each."""

    name: str = "NVIDIA H200"
    gib: float = 140e9 / 2**30
    capability: tuple[int, int] = (9, 0)
    watts: float = 700
    lacks: tuple[str, ...] = ()
    draws: tuple[tuple[int, int | None], ...] = ()
    computes: tuple[tuple[int, int | None], ...] = ()
    mig: bool | None = False
    slices: tuple[tuple[str, str, float], ...] = ()


def error(code):
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))


def handle_by_uuid(fake, uuid):
    if uuid in fake.cards or fake.find_slice(uuid):
        return uuid
    raise error("NOT_FOUND")


def handle_by_index(fake, index):
    if fake.cards[index] is None:
        raise error("NO_PERMISSION")
    return fake.cards[index]


def slice_by_index(fake, handle, index):
    slices = fake.board(handle).slices
    if index >= len(slices):
        raise error("NOT_FOUND")
    return slices[index][0]


def mig_mode(fake, handle):
    if (mode := fake.board(handle).mig) is None:
        raise error("NOT_SUPPORTED")
    return [int(mode), 1]


def memory(fake, handle, version=None):
    part = fake.find_slice(handle)
    return SimpleNamespace(
        total=round((part[2] if part else fake.board(handle).gib) * 2**30),
        used=3_000_000 if version == pynvml.nvmlMemory_v2 else 648_000_000,
    )


def limit_of(fake, handle):
    return fake.limits.get(handle, round(fake.board(handle).watts * 1e3))


def list_processes(kind):
    return lambda fake, handle: [
        SimpleNamespace(pid=pid, usedGpuMemory=size)
        for pid, size in (
            *getattr(fake, kind),
            *getattr(fake.board(handle), KINDS[kind]),
            *(fake.ours.get(handle, ()) if kind == "compute" else ()),
        )
    ]


KINDS = {"compute": "computes", "graphics": "draws"}


ANSWERS = {  # a handle is its UUID
    "nvmlInit": lambda fake: setattr(fake, "open", fake.open + 1),
    "nvmlShutdown": lambda fake: setattr(fake, "open", fake.open - 1),
    "nvmlSystemGetDriverVersion": lambda fake: "580.65",
    "nvmlSystemGetCudaDriverVersion_v2": lambda fake: 13010,
    "nvmlDeviceGetEccMode": lambda fake, h: [1, 0],
    "nvmlDeviceGetPersistenceMode": lambda fake, h: 1,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda fake, h: round(fake.board(h).watts * 1e3),
    "nvmlDeviceGetApplicationsClock": lambda fake, h, kind: 1980,
    "nvmlDeviceGetDefaultApplicationsClock": lambda fake, h, kind: 1980,
    "nvmlDeviceGetCount": lambda fake: len(fake.cards),
    "nvmlDeviceGetHandleByIndex": handle_by_index,
    "nvmlDeviceGetHandleByUUID": handle_by_uuid,
    "nvmlDeviceGetMaxMigDeviceCount": lambda fake, h: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": slice_by_index,
    "nvmlDeviceGetUUID": lambda fake, h: h,
    "nvmlDeviceGetName": lambda fake, h: (fake.find_slice(h) or (h, fake.board(h).name))[1],
    "nvmlDeviceGetCudaComputeCapability": lambda fake, h: fake.board(h).capability,
    "nvmlDeviceGetMigMode": mig_mode,
    "nvmlDeviceGetMemoryInfo": memory,
    "nvmlDeviceGetTotalEnergyConsumption": lambda fake, h: 12_345_678,
    "nvmlDeviceGetPowerUsage": lambda fake, h: 76_500,
    "nvmlDeviceGetEnforcedPowerLimit": lambda fake, h: limit_of(fake, h),
    "nvmlDeviceGetPowerManagementLimit": lambda fake, h: limit_of(fake, h),
    # the least is made up, and of no card
    "nvmlDeviceGetPowerManagementLimitConstraints": lambda fake, h: [
        round(fake.board(h).watts * 1e3 * share) for share in (0.25, 1)
    ],
    "nvmlDeviceSetPowerManagementLimit": lambda fake, h, limit: fake.limits.update({h: limit}),
    "nvmlDeviceGetClockInfo": lambda fake, h, kind: {
        pynvml.NVML_CLOCK_SM: 1980,
        pynvml.NVML_CLOCK_MEM: 3201,
    }[kind],
    "nvmlDeviceGetTemperature": lambda fake, h, sensor: 32,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda fake, h: fake.reasons,
    "nvmlDeviceGetComputeRunningProcesses": list_processes("compute"),
    "nvmlDeviceGetGraphicsRunningProcesses": list_processes("graphics"),
}


class FakeNvml:
    """pynvml of H200s, or of ``boards`` by UUID. ``fail`` maps calls to their errors."""

    def __init__(self, cards=(GPU,), boards=None, **fail):
        self.cards, self.fail, self.boards = cards, fail, boards or {}
        self.calls, self.compute, self.graphics = [], [], []
        self.reasons, self.open, self.ours = 0x1, 0, {}
        self.limits = {}  # power limits that were set, in mW

    def __getattr__(self, name):
        if name.startswith("NVML") or name == "nvmlMemory_v2":
            return getattr(pynvml, name)
        if name not in ANSWERS or self.fail.get(name) is AttributeError:
            raise AttributeError(f"module 'pynvml' has no attribute {name!r}")

        def call(*args, **kwargs):
            self.calls.append((name, *args))
            if name in self.fail:
                if isinstance(self.fail[name], Exception):
                    raise self.fail[name]
                return self.fail[name]
            if args and name in self.board(args[0]).lacks:
                raise error("NOT_SUPPORTED")
            return ANSWERS[name](self, *args, **kwargs)

        return call

    def find_slice(self, handle):
        parts = (part for board in self.boards.values() for part in board.slices)
        return next((part for part in parts if part[0] == handle), None)

    def board(self, handle):
        """The card of a handle; of a slice's, the whole."""
        for uuid, board in self.boards.items():
            if handle == uuid or handle in [part[0] for part in board.slices]:
                return board
        return Board()

    def called(self, name):
        return sum(call[0] == name for call in self.calls)


# ------------------------------------------------------------------------------ machines, as data

_OLD = ("nvmlDeviceGetTotalEnergyConsumption",)
"""nvml.h: the counter of energy is "for Volta or newer fully supported devices"."""

_LAPTOP = (
    *("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit"),
    *("nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerManagementLimitConstraints"),
    *("nvmlDeviceGetApplicationsClock", "nvmlDeviceGetDefaultApplicationsClock"),
    "nvmlDeviceSetPowerManagementLimit",
)
"""Where a laptop's firmware sets the power, nvidia-smi prints N/A for these."""

_GEFORCE = ("nvmlDeviceGetApplicationsClock", "nvmlDeviceGetDefaultApplicationsClock")
"""nvml.h: clocks of applications are of fully supported devices, which GeForce are not."""

_WSL = (
    *("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"),
    *("nvmlDeviceGetEccMode", "nvmlDeviceGetPersistenceMode", *_GEFORCE),
    "nvmlDeviceSetPowerManagementLimit",  # it is set on the host, Windows
)
"""CUDA on WSL User Guide, Known Limitations: NVML knows no process there."""

_SLICE = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


@dataclass(frozen=True)
class Made:
    """A machine. ``first`` is the board, by NVML's index, that CUDA counts first; ``no_driver``
    says that there is none at all."""

    boards: tuple[Board, ...] = ()
    first: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    no_driver: bool = False
    torch: str = "2.11.0+cu130"

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(f"GPU-{i:08x}-d72c-4106-c12f-20bd9faed9f6" for i in range(len(self.boards)))

    @property
    def nvml(self) -> FakeNvml:
        fail = {"nvmlInit": error("LIBRARY_NOT_FOUND")} if self.no_driver else {}
        return FakeNvml(self.uuids, dict(zip(self.uuids, self.boards, strict=True)), **fail)

    def describe(self, device: str) -> Platform:
        """Describe a device as torch does."""
        cuda = self.torch.partition("+cu")[2]
        about = Environment(torch=self.torch, torch_threads=8, cpu="a CPU, 8 cores")
        about.cuda = f"{cuda[:-1]}.{cuda[-1]}"
        if device == "cpu":
            return Platform(about)
        if self.no_driver:
            lack = f"device cuda: torch {self.torch} finds no usable GPU"
            fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
            return Platform(about, f"{lack}; {fix}")
        board, uuid, name, gib = self.boards[self.first], self.uuids[self.first], "", 0.0
        if board.slices:  # CUDA tells the slice's own
            uuid, name, gib = board.slices[0]
        about.gpu, about.gpu_memory_bytes = name or board.name, round((gib or board.gib) * 2**30)
        about.capability = ".".join(map(str, board.capability))
        about.gpu_uuid = spell_uuid(uuid.partition("-")[2], find_cards()[0])
        return Platform(about, vars(about).update(host.describe_card(about.gpu_uuid)) or "")

    @contextmanager
    def enter(self, monkeypatch: Patch, folder: Path) -> Iterator[None]:
        """Be this machine, with a build of torch for CUDA."""
        build = folder / "torch" / "version.py"
        build.parent.mkdir(parents=True, exist_ok=True)
        build.write_text("cuda: str | None = '13.0'\n")
        (build.with_name("__init__.py")).touch()
        spec = SimpleNamespace(origin=str(build.with_name("__init__.py")))

        def ask(devices: Any, models: Any = (), *_: Any, **__: Any) -> Machine:
            fake.ours.clear()
            found = describe(devices, use)
            fake.ours.clear()  # the process has ended
            return found

        def use(device: str) -> Platform:
            platform = self.describe(device)
            if uuid := platform.environment.gpu_uuid:
                fake.ours[uuid] = ((os.getpid(), 300 << 20),)
            return platform

        fake = self.nvml

        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "pynvml", fake)
            patch.setattr(host, "find_spec", lambda name: spec)
            patch.setattr(machine, "ask_processes", ask)
            patch.setattr(machine, "describe_host", lambda: Environment(cpu="a CPU, 8 cores"))
            patch.setattr("bench.workers.executors.ask_processes", ask)
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            patch.delenv("CUDA_DEVICE_ORDER", raising=False)
            for name, value in self.environ.items():
                patch.setenv(name, value)
            host.has_cuda.cache_clear()
            try:
                yield
            finally:
                host.has_cuda.cache_clear()


def _alone(name: str, gib: float, capability: tuple[int, int], watts: float, **more: Any) -> Made:
    torch = "2.9.1+cu126" if capability < (7, 5) else Made.torch
    return Made((Board(name, gib, capability, watts, **more),), torch=torch)


# GiB and watts are those of the data sheets that bench/machine/peaks.py names, or of the product
# page; capabilities of developer.nvidia.com/cuda-gpus; nvml.h says which cards have a MIG mode.
# Nothing was recorded on such a machine.
MACHINES: dict[str, Made] = {
    # GeForce GTX 1080 white paper; torch's builds for CUDA 13 have no kernels below 7.5
    "gtx-1080": _alone("NVIDIA GeForce GTX 1080", 8, (6, 1), 180, lacks=_OLD, mig=None),
    "v100": _alone("Tesla V100-SXM2-16GB", 16, (7, 0), 300, mig=None),
    "titan-rtx": _alone("NVIDIA TITAN RTX", 24, (7, 5), 280, lacks=_GEFORCE, mig=None),
    "t4": _alone("Tesla T4", 15, (7, 5), 70, mig=None),
    "a100": _alone("NVIDIA A100-SXM4-40GB", 40, (8, 0), 400),
    "rtx-3060-laptop": _alone(
        "NVIDIA GeForce RTX 3060 Laptop GPU", 6, (8, 6), 80, lacks=_LAPTOP, mig=None
    ),
    "rtx-4080": _alone("NVIDIA GeForce RTX 4080", 15.99, (8, 9), 320, lacks=_GEFORCE, mig=None),
    # a desktop on Ubuntu: Xorg is G, gnome-shell and a browser C+G, each with its memory
    "rtx-4090-display": _alone(
        *("NVIDIA GeForce RTX 4090", 23.99, (8, 9), 450),
        lacks=_GEFORCE,
        mig=None,
        draws=((2101, 300 << 20), (2345, 90 << 20), (4711, 60 << 20)),
        computes=((2345, 90 << 20), (4711, 60 << 20)),
    ),
    "l4": _alone("NVIDIA L4", 22.49, (8, 9), 72, mig=None),
    "h100": _alone("NVIDIA H100 80GB HBM3", 79.65, (9, 0), 700),
    "h200": _alone("NVIDIA H200", 140.4, (9, 0), 700),
    "b200": _alone("NVIDIA B200", 179, (10, 0), 1000),
    # NVIDIA MIG User Guide: a slice is named by its UUID, and CUDA offers that one alone
    "mig-slice": Made(
        (
            Board(
                *("NVIDIA A100-SXM4-40GB", 40, (8, 0), 400),
                mig=True,
                slices=(
                    (_SLICE, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75),
                    ("MIG-11111111-42e4-5de3-91c7-45d71c87eb3f", "… MIG 3g.20gb", 19.6),
                ),
            ),
        ),
        environ={"CUDA_VISIBLE_DEVICES": _SLICE},
    ),
    "wsl2": _alone("NVIDIA GeForce RTX 4090", 23.99, (8, 9), 450, lacks=_WSL, mig=None),
    # CUDA counts the fastest first, which NVML has second
    "two-unlike": Made(
        (
            Board("NVIDIA GeForce GTX 1080", 8, (6, 1), 180, _OLD, mig=None),
            Board("NVIDIA GeForce RTX 4090", 23.99, (8, 9), 450, _GEFORCE, mig=None),
        ),
        first=1,
        torch="2.9.1+cu126",
    ),
    "eight-h100": Made((Board("NVIDIA H100 80GB HBM3", 79.65, (9, 0), 700),) * 8),
    "login-node": Made(no_driver=True),
}
