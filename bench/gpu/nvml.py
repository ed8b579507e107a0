"""NVIDIA GPUs read with NVML by UUID: memory, energy, clocks, throttling and neighbours; and the
cards of this machine.

pynvml is imported only when NVML is used.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import combinations, groupby
from typing import Any

from bench.gpu.device import Depth, Device, Host, Process, ProcessTree, Reading, Unreadable
from bench.text import Explained, is_whole

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


_Listed = Iterable[tuple[int, int | None]]
"""Processes on a card: pid, and memory in bytes if known."""


_LARGEST_PID = 2**22
"""Linux's bound of ``pid_max``. A container's own setting may be below the pids of its host."""


class UnknownError(Exception):
    """NVML does not answer a question, or answers what cannot be; says why. ``kind`` is the name of
    the error that it raised."""

    def __init__(self, error: Exception) -> None:
        self.kind = type(error).__name__
        why = "a text that is not UTF-8" if isinstance(error, UnicodeError) else str(error)
        super().__init__(f"NVML: {why or self.kind}")

    @property
    def strange(self) -> bool:
        """Whether it is neither an error of NVML's own nor a call that this version lacks."""
        return not self.kind.startswith("NVML") and self.kind not in _LACKS


class Checked:
    """NVML, whose every answer is checked: whatever is wrong with it raises UnknownError.

    A driver under WSL was seen to give a card's name that is not UTF-8, and pid 4294967295 among
    the processes of a card.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __getattr__(self, name: str) -> Any:
        try:
            found = getattr(self._nvml, name)
        except Exception as error:
            raise UnknownError(error) from None
        if not callable(found):
            return found

        def ask(*arguments: Any, **named: Any) -> Any:
            try:
                answer = found(*arguments, **named)
                if isinstance(answer, bytes):  # before nvidia-ml-py 11.515
                    answer = answer.decode()
                if why := _find_impossible(name, answer):
                    raise ValueError(why)
            except Exception as error:
                raise UnknownError(error) from None
            return answer

        return ask


_WIDE = re.compile("Energy|Reasons")  # the numbers of 64 bits; of others, all ones are no answer


def _find_impossible(name: str, answer: Any) -> str:
    """Return what an answer to a call says that cannot be; empty if there is nothing."""
    told = f"{name} is {answer!r}"[:80]
    if re.search("Name$|UUID$|GetDriverVersion$", name):
        if not isinstance(answer, str):
            return told
        return "" if is_whole(answer) else "a text that is not UTF-8"
    if name.endswith("MemoryInfo"):
        if answer.total == 0:
            return "a card of 0 bytes of memory"
        return "" if 0 <= answer.used < _MOST_BYTES > answer.total > 0 else told
    if "RunningProcesses" in name:
        pids = [process.pid for process in answer]
        wrong = next((pid for pid in pids if not 0 < pid <= _LARGEST_PID), None)
        return "" if wrong is None else f"a process with pid {wrong}, which none can have"
    if re.search("Mode$|Capability$", name) and "Persistence" not in name:
        return "" if all(isinstance(one, int) and 0 <= one < 2**31 for one in answer) else told
    if re.search("Init|Shutdown|Handle|PciInfo", name):
        return ""
    least, most = (-273, 1000) if "Temperature" in name else (0, 2**63 - 1)
    most = most if _WIDE.search(name) else min(most, 2**32 - 2)
    return "" if isinstance(answer, int) and least <= answer <= most else told


_MOST_BYTES = 2**53


class _Call:
    """A call to NVML for one quantity. ``ways`` are alternatives, the preferred one first, as
    drivers and versions of NVML differ in the calls they support. An ``instance`` call may be
    made for a MIG instance, others only for the whole card."""

    def __init__(
        self, depth: Depth, *ways: Callable[[Any, Any], Any], instance: bool = False
    ) -> None:
        self.depth, self.ways, self.instance = depth, ways, instance


def _list(processes: Iterable[Any]) -> _Listed:
    sizes = ((process.pid, process.usedGpuMemory) for process in processes)
    return [(pid, size if size and 0 < size < _MOST_BYTES else None) for pid, size in sizes]


# Energy comes first, so that the timestamp of a phase boundary is that of the energy counter.
_CALLS: Mapping[str, _Call] = {
    "energy_j": _Call(Depth.EDGE, lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3),
    "device_bytes": _Call(
        Depth.FAST,
        # v1 counts what the driver reserves: 648 MB on an idle H200 where v2 says 3 MB
        lambda n, h: n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used,
        lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used,
        instance=True,
    ),
    "power_w": _Call(Depth.SLOW, lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1e3),
    "power_limit_w": _Call(Depth.EDGE, lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3),
    "sm_clock_mhz": _Call(Depth.SLOW, lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
    "memory_clock_mhz": _Call(
        Depth.SLOW, lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)
    ),
    "temperature_c": _Call(
        Depth.SLOW,
        lambda n, h: n.nvmlDeviceGetTemperatureV(h, n.NVML_TEMPERATURE_GPU),
        lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    ),
    "throttle": _Call(
        Depth.SLOW,
        lambda n, h: throttle_names(n.nvmlDeviceGetCurrentClocksEventReasons(h)),
        lambda n, h: throttle_names(n.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
    ),
    "others": _Call(
        Depth.SLOW,
        lambda n, h: _list(n.nvmlDeviceGetComputeRunningProcesses(h)),
        lambda n, h: _list(n.nvmlDeviceGetComputeRunningProcesses_v2(h)),
        instance=True,
    ),
    "display": _Call(
        Depth.SLOW,
        lambda n, h: _list(n.nvmlDeviceGetGraphicsRunningProcesses(h)),
        lambda n, h: _list(n.nvmlDeviceGetGraphicsRunningProcesses_v2(h)),
        instance=True,
    ),
}

# Permanent errors, for which asking again does not help; others (lost, timeout, unknown) may pass.
_LACKS = frozenset(
    {
        "AttributeError",
        "TypeError",  # an older nvidia-ml-py, whose call has no such argument
        "NVMLLibraryMismatchError",
        "NVMLError_NotSupported",
        "NVMLError_FunctionNotFound",
        "NVMLError_NoPermission",
        "NVMLError_InvalidArgument",
        "NVMLError_ArgumentVersionMismatch",
        "NVMLError_Deprecated",
    }
)


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


_START_ERRORS: Mapping[str, NvmlProblem] = {
    "NVMLError_LibraryNotFound": NvmlProblem.NO_DRIVER,
    "NVMLError_DriverNotLoaded": NvmlProblem.NOT_LOADED,
    "NVMLError_NoPermission": NvmlProblem.NO_PERMISSION,
    "NVMLError_LibRmVersionMismatch": NvmlProblem.MISMATCH,
}


class NvmlMissingError(Exception):
    def __init__(self, lack: NvmlProblem, reason: str = "") -> None:
        super().__init__(reason or lack.meaning)
        self.lack = lack


def start_nvml(nvml: Any) -> Checked:
    try:
        checked = Checked(nvml or import_module("pynvml"))
    except ImportError:
        raise NvmlMissingError(NvmlProblem.NOT_INSTALLED) from None
    try:
        checked.nvmlInit()
    except UnknownError as error:
        lack = _START_ERRORS.get(error.kind, NvmlProblem.OTHER)
        reason = str(error) if lack is NvmlProblem.OTHER else ""
        raise NvmlMissingError(lack, reason) from None
    return checked


@contextmanager
def use_nvml(nvml: Any = None) -> Iterator[Checked]:
    """Yield NVML, and shut it down at the end. Raises NvmlMissingError: it does not work here, or a
    call to it failed."""
    checked = start_nvml(nvml)
    try:
        yield checked
    except UnknownError as error:
        raise NvmlMissingError(NvmlProblem.OTHER, str(error)) from None
    finally:
        with suppress(UnknownError):
            checked.nvmlShutdown()


def check_nvml(nvml: Any = None) -> tuple[NvmlProblem | None, str]:
    """Return why NVML cannot be used, as a `NvmlProblem` and a line; None and empty if it can."""
    try:
        with use_nvml(nvml):
            return None, ""
    except NvmlMissingError as missing:
        return missing.lack, str(missing)


class Nvml(Device):
    """A card, or a MIG instance of one, by UUID.

    A call that the driver or NVML's package lacks is made once and its quantity stays None; one
    that fails temporarily is made again next time.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        """Open the card of this UUID, with or without its prefix ``GPU-`` or ``MIG-``. Raises
        NvmlMissingError: NVML does not work here, or knows no such card."""
        self._nvml = nvml = start_nvml(nvml)
        try:
            instance = card = _find(nvml, uuid)
            mig = nvml.nvmlDeviceGetUUID(card).startswith("MIG-")
            if mig:
                card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(card)
        except UnknownError as error:
            with suppress(UnknownError):
                nvml.nvmlShutdown()
            why = str(error).removeprefix("NVML: ")
            raise NvmlMissingError(NvmlProblem.OTHER, f"NVML cannot open {uuid}: {why}") from None
        self._card, self._instance = card, instance
        meter = "power is metered for the whole card, not for a MIG instance"
        metered = ("energy_j", "power_w", "power_limit_w")
        self._lacks = dict.fromkeys(metered, meter) if mig else {}
        self._fails: dict[str, str] = {}
        self._ways = {name: list(call.ways) for name, call in _CALLS.items()}
        self._tree: ProcessTree | None = None
        self._before: set[int] = set()
        self._listed = False  # the worker has been seen under its own pid
        self._alias: int | None = None
        self._names: dict[int, str | None] = {}
        with suppress(UnknownError):
            self.total_bytes = nvml.nvmlDeviceGetMemoryInfo(instance).total

    def close(self) -> None:
        with suppress(UnknownError):
            self._nvml.nvmlShutdown()

    @property
    def notes(self) -> Sequence[str]:
        """A remark on the pid under which NVML lists the worker, if it is not its own."""
        if self._alias is None or self._listed:
            return ()
        return (f"NVML lists the worker as pid {self._alias}, of another pid namespace",)

    def watch(self, pid: int) -> None:
        self._tree = ProcessTree(pid)

    def read(self, depth: Depth) -> Sequence[Reading]:
        now = time.monotonic_ns()
        values = {name: self._ask(name) for name, call in _CALLS.items() if call.depth <= depth}
        if self._tree is not None and values.get("device_bytes") == 0:
            # an idle card may hold none, one that a worker computes on always some
            values["device_bytes"] = None
            self._fails["device_bytes"] = "NVML: 0 bytes in use on the worker's card"
        display = values.pop("display", None) or ()
        if (compute := values.get("others")) is not None:
            values["process_bytes"], values["others"] = self._attribute(compute, display)
        elif depth >= Depth.SLOW:
            self._fails["process_bytes"] = self.why("others")
        return (Reading(now, **values),)

    def why(self, quantity: str) -> str:
        return self._lacks.get(quantity) or self._fails.get(quantity, "")

    def _ask(self, name: str) -> Any:
        ways = self._ways[name]
        handle = self._instance if _CALLS[name].instance else self._card
        while ways and name not in self._lacks:
            try:
                value = ways[0](self._nvml, handle)
            except UnknownError as error:
                if error.kind not in _LACKS:
                    self._fails[name] = str(error)
                    return None
                if not ways[1:]:
                    self._lacks[name] = str(error)
                ways.pop(0)
            else:
                del ways[1:]  # v1 and v2 of a call count differently: never change half way
                return value
        return None

    def _attribute(
        self, compute: _Listed, drawing: _Listed
    ) -> tuple[int | None, tuple[Process, ...]]:
        """Return the memory of the worker's processes, and the other processes on the card."""
        # a process on the card holds some memory: 0 means that the driver does not know how much
        computing = {pid: size or None for pid, size in compute}
        listed = {pid: size or None for pid, size in drawing}
        # Under WDDM every window is listed as computing too, with its memory unknown.
        display = {pid for pid in listed if computing.get(pid) is None}
        listed |= computing
        mine = self._own(listed)
        others = tuple(
            Process(pid, size, self._name(pid), pid in display)
            for pid, size in listed.items()
            if pid not in mine
        )
        sizes = [size for pid in mine if (size := listed[pid]) is not None]
        if mine and len(sizes) == len(mine):
            return sum(sizes), others
        self._fails["process_bytes"] = (
            "the driver does not report a process's memory" if mine else "the card did not list it"
        )
        return None, others

    def _own(self, listed: Mapping[int, int | None]) -> set[int]:
        """Return the worker's pids among those listed. In a container NVML may list host
        pids. If the worker is not listed, the first new process whose pid does not exist here is
        taken to be it, unless several appear at once."""
        if self._tree is None:
            self._before |= listed.keys()
            return set()
        if listed.keys() - self._tree.pids - self._names.keys():
            self._tree.refresh()
        mine = listed.keys() & self._tree.pids
        self._listed |= bool(mine)
        if self._listed:
            return mine
        if self._alias is None:
            from psutil import pid_exists

            hidden = [pid for pid in listed.keys() - self._before if not pid_exists(pid)]
            self._alias = hidden[0] if len(hidden) == 1 else None
        return {pid for pid in listed if pid == self._alias}

    def _name(self, pid: int) -> str | None:
        if pid not in self._names:
            import psutil

            self._names[pid] = None
            with suppress(Exception):  # whatever psutil raises of another's process
                name = psutil.Process(pid).name()
                self._names[pid] = name if is_whole(name) else None
        return self._names[pid]


def _find(nvml: Any, uuid: str) -> Any:
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    *first, last = dict.fromkeys((uuid, f"GPU-{bare}", f"MIG-{bare}"))
    for name in first:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except UnknownError as error:
            if error.kind not in ("NVMLError_NotFound", "NVMLError_InvalidArgument"):
                raise
    return nvml.nvmlDeviceGetHandleByUUID(last)


def open_device(uuid: str | None, nvml: Any = None) -> Device:
    """Open the device of a case: a card or MIG instance by UUID, or the CPU if that is None. A card
    that cannot be read becomes an `Unreadable` with the reason: training goes on without the
    readings. ``nvml`` replaces the module pynvml."""
    if uuid is None:
        return Host()
    try:
        return Nvml(uuid, nvml)
    except NvmlMissingError as missing:
        return Unreadable(str(missing))


def find_neighbours(uuid: str, nvml: Any = None) -> tuple[Process, ...] | None:
    """Return other processes on the card, without this one's descendants; None if unknown."""
    device = open_device(uuid, nvml)
    try:
        device.read(Depth.SLOW)  # processes listed now are not this one under another pid
        device.watch(os.getpid())
        return device.read(Depth.SLOW)[-1].others
    finally:
        device.close()


_PATHS: Mapping[int, str] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""How nvidia-smi names NVML's topology levels (nvml.h, nvmlGpuTopologyLevel_t), nearest first."""

_TO_SWITCH = 2  # nvml.h, nvmlIntNvLinkDeviceType_t


def describe_links(uuids: Sequence[str], nvml: Any = None) -> tuple[str | None, str]:
    """Return how each pair of cards, by index in ``uuids``, is connected, as ``nvidia-smi topo -m``
    names it: ``0-1 NV18``, separated by commas; or None and the reason in one line.

    ``NV18`` means 18 NVLinks, between the two cards or to switches that both have. Otherwise it is
    the path over PCIe: PIX, PXB, PHB, NODE or SYS, from one bridge to the link between processors.
    """
    try:
        with use_nvml(nvml) as used:
            cards = [used.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            links = [Counter(_list_links(used, card)) for card in cards]
            names = [_read_bus(used.nvmlDeviceGetPciInfo(card)) for card in cards]
            pairs = []
            for a, b in combinations(range(len(cards)), 2):
                if number := links[a][names[b]] + min(links[a][""], links[b][""]):
                    pairs.append(f"{a}-{b} NV{number}")
                else:
                    level = used.nvmlDeviceGetTopologyCommonAncestor(cards[a], cards[b])
                    pairs.append(f"{a}-{b} {_PATHS.get(level, f'level {level}')}")
            return ", ".join(pairs), ""
    except NvmlMissingError as missing:
        return None, str(missing)


def _list_links(nvml: Any, card: Any) -> Iterator[str]:
    """Yield the PCI name of the device at the end of each active NVLink; empty for a switch."""
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(card, link):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(card, link) == _TO_SWITCH:
                yield ""
            else:
                yield _read_bus(nvml.nvmlDeviceGetNvLinkRemotePciInfo(card, link))
        except UnknownError as error:
            if error.kind not in _LACKS:
                raise
            return  # a card without NVLink, or with fewer links


def _read_bus(found: Any) -> str:
    name = found.busId
    return (name.decode() if isinstance(name, bytes) else str(name)).lower()


# -------------------------------------------------------------------------------------------- cards


UNKNOWN = "unknown GPU"
"""The name of a card that does not tell a readable one."""


@dataclass(frozen=True)
class Card:
    """A GPU or MIG instance that CUDA would offer, as described by NVML; unknown values are None.

    ``index`` is the GPU's index in NVML, which counts by PCI bus. ``names`` are spellings whose
    prefixes `CUDA_VISIBLE_DEVICES` may contain. ``driver_cuda`` is the newest CUDA version that the
    driver can run. ``strange`` is what NVML answered that cannot be. Link, ECC and persistence mode
    of the whole card are also given for an instance; power and clocks are not its own, so they are
    None.
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
    pcie: Link | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    application_clock_mhz: int | None = None
    default_application_clock_mhz: int | None = None
    names: tuple[str, ...] = field(default=(), repr=False)
    strange: str = ""


@dataclass(frozen=True)
class Link:
    """A PCIe link, as it runs now and at most. An idle card lowers its generation."""

    generation: int
    width: int
    max_generation: int
    max_width: int

    def __str__(self) -> str:
        """As in the column `pcie`: ``gen 4 x16, at most gen 5 x16``."""
        now = f"gen {self.generation} x{self.width}"
        return f"{now}, at most gen {self.max_generation} x{self.max_width}"


def find_card(uuid: str, cards: Iterable[Card]) -> Card | None:
    """Return the card of ``uuid``; None if not there. The prefix ``GPU-`` or ``MIG-`` is ignored,
    as torch writes ``GPU-`` for a MIG instance too."""

    def bare(text: str) -> str:
        return text.removeprefix("GPU-").removeprefix("MIG-")

    return next((card for card in cards if bare(card.uuid) == bare(uuid)), None)


def find_cards(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> tuple[list[Card], str]:
    """Return the cards that CUDA would offer here, in its order, found without torch and without
    CUDA; if there are none, also the reason in one line.

    Give a worker ``CUDA_VISIBLE_DEVICES=<uuid>`` of the chosen card: CUDA counts the fastest card
    first, unless `CUDA_DEVICE_ORDER` is ``PCI_BUS_ID``, and NVML counts by PCI bus.
    """
    try:
        with use_nvml(nvml) as used:
            driver = cuda = None
            with suppress(UnknownError):
                driver = used.nvmlSystemGetDriverVersion()
            with suppress(UnknownError):
                number = used.nvmlSystemGetCudaDriverVersion_v2()  # 13020 is CUDA 13.2
                cuda = (number // 1000, number % 1000 // 10)
            cards = [
                replace(card, driver=driver, driver_cuda=cuda)
                for index in range(used.nvmlDeviceGetCount())
                for card in _describe(used, index)
            ]
    except NvmlMissingError as missing:
        return [], str(missing)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = select_visible(cards, visible)
    if chosen:
        return chosen, ""
    return [], f"CUDA_VISIBLE_DEVICES={visible!r} names no card" if cards else "no GPU is there"


def _describe(nvml: Checked, index: int) -> list[Card]:
    """Return the card at ``index``, or its MIG instances if it is divided."""
    strange: dict[str, None] = {}

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(*args)
        except UnknownError as error:
            if error.strange:
                strange[f"{name}: {error}"] = None
            return None

    gpu = ask("nvmlDeviceGetHandleByIndex", index)
    uuid = gpu and ask("nvmlDeviceGetUUID", gpu)
    if not uuid:  # lost, or not accessible to this user
        return []
    capability = ask("nvmlDeviceGetCudaComputeCapability", gpu)
    mig, ecc = ask("nvmlDeviceGetMigMode", gpu), ask("nvmlDeviceGetEccMode", gpu)
    persistence = ask("nvmlDeviceGetPersistenceMode", gpu)
    link = [
        ask(f"nvmlDeviceGet{which}PcieLink{what}", gpu)
        for which in ("Curr", "Max")
        for what in ("Generation", "Width")
    ]
    whole = Card(
        uuid,
        ask("nvmlDeviceGetName", gpu) or UNKNOWN,
        index,
        capability=tuple(capability) if capability else None,
        # the first mode is the current one, the second applies after a reset
        mig=bool(mig[0]) if mig else None,
        ecc=bool(ecc[0]) if ecc else None,
        persistence_mode=None if persistence is None else bool(persistence),
        pcie=None if None in link else Link(*link),
    )
    if not whole.mig:
        memory = ask("nvmlDeviceGetMemoryInfo", gpu)
        limit = ask("nvmlDeviceGetEnforcedPowerLimit", gpu)
        usual, sm = ask("nvmlDeviceGetPowerManagementDefaultLimit", gpu), nvml.NVML_CLOCK_SM
        found = replace(
            whole,
            memory_bytes=memory and memory.total,
            power_limit_w=limit and limit / 1e3,
            default_power_limit_w=usual and usual / 1e3,
            application_clock_mhz=ask("nvmlDeviceGetApplicationsClock", gpu, sm),
            default_application_clock_mhz=ask("nvmlDeviceGetDefaultApplicationsClock", gpu, sm),
            names=(uuid,),
        )
        return [replace(found, strange="; ".join(strange))]
    cards: list[Card] = []
    for i in range(ask("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0):
        instance = ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu, i)
        if own := instance and ask("nvmlDeviceGetUUID", instance):
            memory = ask("nvmlDeviceGetMemoryInfo", instance)
            size = memory and memory.total
            ids = [ask(f"nvmlDeviceGet{kind}InstanceId", instance) for kind in ("Gpu", "Compute")]
            # the second spelling is from before driver 470; the UUID of a divided card stands for
            # its first instance
            names = (own, f"MIG-{uuid}/{ids[0]}/{ids[1]}", *(() if cards else (uuid,)))
            name = ask("nvmlDeviceGetName", instance) or f"{whole.name} MIG"
            cards.append(replace(whole, uuid=own, name=name, memory_bytes=size, names=names))
    return [replace(card, strange="; ".join(strange)) for card in cards]


def select_visible(cards: Sequence[Card], visible: str | None) -> list[Card]:
    """Choose from ``cards`` as CUDA does by `CUDA_VISIBLE_DEVICES`.

    Entries are indices, UUIDs or their prefixes, or MIG names. The list ends at the first entry
    that names no card, or more than one; a card named twice leaves none. Source: CUDA Programming
    Guide, CUDA Environment Variables; for repetitions and entries such as ``1abc``, torch 2.13.
    """
    if visible is None:
        return [next(instances) for _, instances in groupby(cards, lambda card: card.index)]
    chosen: list[Card] = []
    for entry in map(str.strip, visible.split(",")):
        if number := re.match(r"\+?[0-9]+", entry):
            found = [card for card in cards if card.index == int(number[0])][:1]
        elif entry.startswith(("GPU-", "MIG-")):
            found = [card for card in cards if any(n.startswith(entry) for n in card.names)]
        else:
            found = []
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen += found
    return chosen
