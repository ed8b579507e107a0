"""NVIDIA GPUs read with NVML by UUID: memory, energy, clocks, throttling and neighbours; and the
cards of this machine.

pynvml is imported only when NVML is used. Of a card that is divided by MIG, the slice is read that
CUDA uses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.base.processes import name_processes
from bench.base.text import Explained, is_whole
from bench.machine.gpus import (
    Depth,
    Device,
    GpuProcess,
    HostReadings,
    ProcessTree,
    Reading,
    Unreadable,
)

THROTTLES: Mapping[int, tuple[str, str]] = {
    0x001: ("idle", "idle"),
    0x002: ("applications clocks", "set"),
    0x004: ("software power cap", "capped"),
    0x008: ("hardware slowdown", "slowed"),
    0x010: ("sync boost", "set"),
    0x020: ("software thermal slowdown", "slowed"),
    0x040: ("hardware thermal slowdown", "slowed"),
    0x080: ("hardware power brake", "slowed"),
    0x100: ("display clocks", "set"),
    0x200: ("board limit", "capped"),
    0x400: ("voltage reliability", "boost"),  # where every healthy card stops boosting
}
"""NVML's clocks event reasons: bit -> name, effect. Values: nvml.h, nvmlClocksEventReasons."""

EFFECTS: Mapping[str, str] = dict(THROTTLES.values())


def throttle_names(mask: int) -> tuple[str, ...]:
    """Name the reasons in an NVML bit mask. Idle holds nothing back, so it is not among them.

    >>> throttle_names(0x001 | 0x004)
    ('software power cap',)
    """
    bits = [1 << i for i in range(mask.bit_length()) if mask >> i & 1]
    named = (THROTTLES.get(bit, (f"reason {bit:#x}", "unknown")) for bit in bits)
    return tuple(name for name, effect in named if effect != "idle")


# Linux's bound of ``pid_max``: under WSL a driver was seen to list pid 4294967295.
_LARGEST_PID = 2**22


def _list(processes: Iterable[Any]) -> dict[int, int | None]:
    """Return the memory of processes in bytes, None where the driver does not tell it: a process on
    the card holds some."""
    known = (one for one in processes if 0 < one.pid <= _LARGEST_PID)
    return {one.pid: one.usedGpuMemory or None for one in known}


_Call = Callable[[Any, Any], Any]

# Energy comes first, so that the timestamp of a phase boundary is that of the energy counter. What
# is called is in every driver that runs a torch of today, under an older name where it has two.
_CALLS: Mapping[str, tuple[Depth, _Call]] = {
    "energy_j": (Depth.EDGE, lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3),
    # v1 counts what the driver reserves: 648 MB on an idle H200 where v2 says 3 MB
    "device_bytes": (
        Depth.FAST,
        lambda n, h: n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used,
    ),
    "power_w": (Depth.SLOW, lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1e3),
    "power_limit_w": (Depth.EDGE, lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3),
    "sm_clock_mhz": (Depth.SLOW, lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
    "memory_clock_mhz": (Depth.SLOW, lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)),
    "temperature_c": (
        Depth.SLOW,
        lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    ),
    "throttle": (
        Depth.SLOW,
        lambda n, h: throttle_names(n.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
    ),
    "others": (Depth.SLOW, lambda n, h: _list(n.nvmlDeviceGetComputeRunningProcesses(h))),
    "display": (Depth.SLOW, lambda n, h: _list(n.nvmlDeviceGetGraphicsRunningProcesses(h))),
}


UNSUPPORTED = "NVML: Not Supported"
"""Why a quantity is None that a card never tells."""

OF_WHOLE = "NVML tells it of a whole card, and this is a MIG slice of one"
"""The same of a slice."""

_SLICE = "MIG-"
"""How the UUID of a slice begins, which MIG makes of a card."""

_WHOLE = ("energy_j", "power_w", "power_limit_w")
"""What is of the whole card, whichever of its slices is asked."""


class NvmlProblem(Explained):
    NOT_INSTALLED = "not installed", "nvidia-ml-py is not installed"
    NO_DRIVER = "no driver", "no NVIDIA driver (libnvidia-ml is not there)"
    NOT_LOADED = "not loaded", "the NVIDIA driver is not loaded"
    NO_PERMISSION = "no permission", "no permission to talk to the NVIDIA driver"
    MISMATCH = (
        "mismatch",
        "the NVIDIA driver and its library differ in version; reboot to fix this",
    )
    OTHER = "other", "NVML"


_ERRORS: Mapping[str, NvmlProblem] = {
    "ModuleNotFoundError": NvmlProblem.NOT_INSTALLED,
    "NVMLError_LibraryNotFound": NvmlProblem.NO_DRIVER,
    "NVMLError_DriverNotLoaded": NvmlProblem.NOT_LOADED,
    "NVMLError_NoPermission": NvmlProblem.NO_PERMISSION,
    "NVMLError_LibRmVersionMismatch": NvmlProblem.MISMATCH,
}


class NvmlMissingError(Exception):
    def __init__(self, lack: NvmlProblem, reason: str) -> None:
        super().__init__(reason or lack.meaning)
        self.lack = lack


def _say(error: Exception) -> str:
    return f"NVML: {error}" if str(error) else f"NVML: {type(error).__name__}"


@contextmanager
def use_nvml(nvml: Any) -> Iterator[Any]:
    """Yield NVML, and shut it down at the end. ``nvml`` replaces the module pynvml. Raises
    NvmlMissingError: it does not work here, or a call to it failed."""
    try:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            with suppress(Exception):
                nvml.nvmlShutdown()
    except Exception as error:
        lack = _ERRORS.get(type(error).__name__, NvmlProblem.OTHER)
        reason = _say(error) if lack is NvmlProblem.OTHER else ""
        raise NvmlMissingError(lack, reason) from None


def check_nvml(nvml: Any) -> tuple[NvmlProblem | None, str]:
    """Return why NVML cannot be used, as a `NvmlProblem` and a line; None and empty if it can."""
    try:
        with use_nvml(nvml):
            return None, ""
    except NvmlMissingError as missing:
        return missing.lack, str(missing)


class Nvml(Device):
    """A card by UUID. What a failed call was to tell is None, and the call made again next time."""

    def __init__(self, uuid: str, nvml: Any) -> None:
        """Open the card. Raises NvmlMissingError: NVML does not work here, or knows no such
        card."""
        with ExitStack() as opened:
            self._nvml = opened.enter_context(use_nvml(nvml))
            self._card = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._opened = opened.pop_all()
        self._slice = uuid.startswith(_SLICE)
        self._reasons: dict[str, str] = {}
        self._tree: ProcessTree | None = None
        self._before: set[int] = set()
        self._strangers: set[int] = set()
        self._listed = False  # the worker has been seen under its own pid
        self._alias: int | None = None

    def close(self) -> None:
        self._opened.close()

    def watch(self, pid: int) -> None:
        self._tree = ProcessTree(pid)

    def is_used(self) -> bool:
        return self._listed or self._alias is not None

    def read(self, depth: Depth) -> Sequence[Reading]:
        now = time.monotonic_ns()
        values = {name: self._ask(name) for name, (least, _) in _CALLS.items() if least <= depth}
        display = values.pop("display", None) or {}
        if (computing := values.get("others")) is not None:
            # under WDDM every window is listed as computing too, with its memory unknown
            listed = {pid: size for pid, size in computing.items() if size or pid not in display}
            values["process_bytes"], others = self._attribute(listed)
            # a desktop's programs (C+G in nvidia-smi) hold a context to draw with
            values["others"] = tuple(other for other in others if other.pid not in display)
        elif depth >= Depth.SLOW:
            self._reasons["process_bytes"] = self.why("others")
        return (Reading(now, **values),)

    def why(self, quantity: str) -> str:
        return self._reasons.get(quantity, "")

    def _ask(self, name: str) -> Any:
        if self._slice and name in _WHOLE:
            self._reasons[name] = OF_WHOLE
            return None
        try:
            return _CALLS[name][1](self._nvml, self._card)
        except Exception as error:  # of the driver, or of an older nvidia-ml-py
            self._reasons[name] = _say(error)
        return None

    def _attribute(
        self, listed: Mapping[int, int | None]
    ) -> tuple[int | None, tuple[GpuProcess, ...]]:
        """Return the memory of the worker's processes, and the others that compute on the card."""
        mine = self._own(listed.keys())
        names = name_processes(listed.keys() - mine)  # of those of this pid namespace
        others = tuple(
            GpuProcess(pid, size, names.get(pid)) for pid, size in listed.items() if pid not in mine
        )
        sizes = [size for pid in mine if (size := listed[pid]) is not None]
        if mine and len(sizes) == len(mine):
            return sum(sizes), others
        self._reasons["process_bytes"] = "the driver does not report the memory of the process"
        return None, others

    def _own(self, listed: Set[int]) -> Set[int]:
        """Return the worker's pids among those listed. In a container NVML may list host
        pids. If the worker is not listed, the first new process whose pid does not exist here is
        taken to be it, unless several appear at once."""
        if self._tree is None:
            self._before |= listed
            return set()
        if listed - self._tree.pids - self._strangers:
            self._tree.refresh()
        mine = listed & self._tree.pids
        self._strangers |= listed - mine
        self._listed |= bool(mine)
        if self._listed:
            return mine
        if self._alias is None:
            new = listed - self._before
            hidden = [pid for pid in new if not Path(f"/proc/{pid}").exists()]
            self._alias = hidden[0] if len(hidden) == 1 else None
        return {pid for pid in listed if pid == self._alias}


def open_device(uuid: str | None, nvml: Any = None) -> Device:
    """Open the device of a case: a card by UUID, or the CPU if that is None. A card that cannot be
    read becomes an `Unreadable` with the reason: training goes on without the readings. ``nvml``
    replaces the module pynvml."""
    if uuid is None:
        return HostReadings()
    try:
        return Nvml(uuid, nvml)
    except NvmlMissingError as missing:
        return Unreadable(str(missing))


def find_neighbours(uuid: str, nvml: Any = None) -> tuple[GpuProcess, ...] | None:
    """Return the processes on the card, without this one's descendants, and this one first if it
    uses it, as a notebook may; None if unknown."""
    device = open_device(uuid, nvml)
    try:
        # processes listed now are not this one under another pid
        listed = device.read(Depth.SLOW)[-1].others or ()
        device.watch(own := os.getpid())
        others = device.read(Depth.SLOW)[-1].others
        return None if others is None else (*(p for p in listed if p.pid == own), *others)
    finally:
        device.close()


# -------------------------------------------------------------------------------------------- cards


UNKNOWN = "unknown GPU"
"""The name of a card that does not tell a readable one, as under WSL with driver 555."""


@dataclass(frozen=True)
class Card:
    """A GPU that CUDA would offer, as described by NVML; unknown values are None.

    ``index`` is its index in NVML, which counts by PCI bus. ``driver_cuda`` is the newest CUDA
    version that the driver can run. ``part_of`` is, of a slice that MIG made of a card, the UUID of
    that card, whose index it has.
    """

    uuid: str
    name: str
    index: int = 0
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    mig: bool | None = None
    ecc: bool | None = None
    persistence_mode: bool | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    application_clock_mhz: int | None = None
    default_application_clock_mhz: int | None = None
    part_of: str = ""

    @property
    def kind(self) -> tuple[str, int | None]:
        """What cards have in common whose rows can be compared."""
        return self.name, self.memory_bytes


def spell_uuid(named: str, cards: Iterable[Card]) -> str:
    """Return NVML's UUID of the device that CUDA tells with one: that of a slice is its own, or,
    by some drivers, its card's."""
    for card in cards:
        if named in (card.uuid.partition("-")[2], card.part_of.partition("-")[2]):
            return card.uuid
    return f"GPU-{named}"


def find_card(uuid: str, cards: Iterable[Card]) -> Card | None:
    """Return the card of ``uuid``; None if not there."""
    return next((card for card in cards if card.uuid == uuid), None)


def find_cards(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> tuple[list[Card], str]:
    """Return the cards that CUDA would offer here, in NVML's order, or in that of
    `CUDA_VISIBLE_DEVICES`, found without torch and without CUDA; if there are none, also the reason
    in one line. Of cards that MIG divides it is a slice.

    Give a worker ``CUDA_VISIBLE_DEVICES=<uuid>`` of the chosen card: of unlike cards CUDA counts
    the fastest first, unless `CUDA_DEVICE_ORDER` is ``PCI_BUS_ID``, and NVML counts by PCI bus.
    """
    try:
        with use_nvml(nvml) as used:
            there = [*_list_cards(used)]
    except NvmlMissingError as missing:
        return [], str(missing)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen := select_visible(there, visible):
        return chosen, ""
    if not there:
        return [], "no GPU is there"
    if visible is None or select_visible([replace(card, mig=None) for card in there], visible):
        return [], "MIG is on, and no slice is made of the card: sudo nvidia-smi mig -cgi 0 -C"
    return [], f"CUDA_VISIBLE_DEVICES={visible!r} names no card"


def _list_cards(nvml: Any) -> Iterator[Card]:
    """Yield the cards by their index, each followed by the slices that MIG made of it."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(Exception):  # it is lost, or not accessible to this user
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            card = _describe(nvml, index, gpu)
            yield card
            if card.mig:
                yield from _list_slices(nvml, gpu, card)


def _list_slices(nvml: Any, gpu: Any, card: Card) -> Iterator[Card]:
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with suppress(Exception):  # there are fewer
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
            found = _describe(nvml, card.index, part)
            name = f"{card.name} MIG" if found.name == UNKNOWN else found.name
            yield replace(
                card,
                uuid=found.uuid,
                name=name,
                memory_bytes=found.memory_bytes,
                power_limit_w=None,
                default_power_limit_w=None,
                part_of=card.uuid,
            )


def _describe(nvml: Any, index: int, gpu: Any) -> Card:
    """Describe a card or a slice by its handle. Raises an exception: it has no UUID."""

    def ask(name: str, *args: Any) -> Any:
        with suppress(Exception):
            return getattr(nvml, name)(*args)
        return None

    uuid = nvml.nvmlDeviceGetUUID(gpu)
    name, memory = ask("nvmlDeviceGetName", gpu), ask("nvmlDeviceGetMemoryInfo", gpu)
    cuda = ask("nvmlSystemGetCudaDriverVersion_v2")  # 13020 is CUDA 13.2
    capability = ask("nvmlDeviceGetCudaComputeCapability", gpu)
    # the first mode is the current one, the second applies after a reset
    mig, ecc = ask("nvmlDeviceGetMigMode", gpu), ask("nvmlDeviceGetEccMode", gpu)
    persistence = ask("nvmlDeviceGetPersistenceMode", gpu)
    limit = ask("nvmlDeviceGetEnforcedPowerLimit", gpu)
    usual = ask("nvmlDeviceGetPowerManagementDefaultLimit", gpu)
    return Card(
        uuid,
        name if name and is_whole(name) else UNKNOWN,
        index,
        memory_bytes=(memory and memory.total) or None,
        capability=capability and tuple(capability),
        driver=ask("nvmlSystemGetDriverVersion"),
        driver_cuda=cuda and (cuda // 1000, cuda % 1000 // 10),
        mig=mig and bool(mig[0]),
        ecc=ecc and bool(ecc[0]),
        persistence_mode=None if persistence is None else bool(persistence),
        power_limit_w=limit and limit / 1e3,
        default_power_limit_w=usual and usual / 1e3,
        application_clock_mhz=ask("nvmlDeviceGetApplicationsClock", gpu, _SM),
        default_application_clock_mhz=ask("nvmlDeviceGetDefaultApplicationsClock", gpu, _SM),
    )


_SM = 1  # nvml.h, nvmlClockType_t


def select_visible(cards: Sequence[Card], visible: str | None) -> list[Card]:
    """Choose from ``cards``, and the slices of these, as CUDA does by `CUDA_VISIBLE_DEVICES`.

    Entries are indices, or UUIDs or their prefixes. The list ends at the first entry that names no
    card, or more than one; a card named twice leaves none. A card that MIG divides stands for its
    first slice, and where there is a slice CUDA offers that one alone. Sources: CUDA Programming
    Guide, CUDA Environment Variables; NVIDIA MIG User Guide, CUDA Device Enumeration; for
    repetitions, torch 2.13.
    """
    chosen = [card for card in cards if not card.part_of]
    if visible is not None:
        named: list[Card] = []
        for entry in map(str.strip, visible.split(",")):
            uuid = entry if entry.startswith(("GPU-", _SLICE)) else "no UUID"
            found = [c for c in chosen if str(c.index) == entry]
            found = found or [c for c in cards if c.uuid.startswith(uuid)]
            if len(found) != 1:
                break
            if found[0] in named:
                return []
            named += found
        chosen = named
    parts = [c if c.part_of else next((p for p in cards if p.part_of == c.uuid), c) for c in chosen]
    if slices := [part for part in parts if part.part_of]:
        return slices[:1]
    return [card for card in parts if not card.mig]  # one that is not divided yet cannot be used
