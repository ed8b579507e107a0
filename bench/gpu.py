"""NVML by UUID: memory, energy, clocks, throttling and neighbours; and what stands in without it.

A `Device` is read while a worker trains, from the process that started the worker. `Nvml` is the
card, `Host` a CPU, `Unseen` a card nobody can look at, `Replay` a recording. torch is never
imported here, and pynvml only where a card is opened.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import psutil


class Depth(IntEnum):
    """How much to read. On an H200 memory takes 8 µs and the energy counter 3.5 ms."""

    FAST = 0  # memory
    SLOW = 1  # and power, clocks, temperature, throttling, processes
    EDGE = 2  # and energy: the boundary of a phase


@dataclass(frozen=True, slots=True)
class Process:
    """A process on the card that is not the worker's; ``display``: it draws, as a desktop does."""

    pid: int
    bytes: int | None = None
    name: str | None = None
    display: bool = False

    def __str__(self) -> str:
        """As in the column `neighbours`: ``pid 123 (python): 2100000000 B``."""
        name = f" ({self.name})" if self.name else ""
        return f"pid {self.pid}{name}: " + (f"{self.bytes} B" if self.bytes else "memory unknown")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device said at one moment, in SI units; None where it said nothing.

    ``time_ns`` is monotonic. ``device_bytes`` is raw: all memory in use on the card, by anyone.
    ``energy_j`` is a counter with an arbitrary start. ``throttle`` names reasons of `THROTTLES`.
    """

    time_ns: int
    device_bytes: int | None = None
    process_bytes: int | None = None
    energy_j: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] | None = None
    others: tuple[Process, ...] | None = None


QUANTITIES = tuple(f.name for f in fields(Reading) if f.name != "time_ns")


class Device(Protocol):
    """What a monitor watches. It never raises: what cannot be read is None, and `why` tells."""

    total_bytes: int | None

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of its readings should know."""

    def watch(self, pid: int) -> None:
        """Count this process and its descendants as the worker's own from now on."""

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Take one reading; a recording gives, at an edge, all it holds up to that edge."""

    def why(self, quantity: str) -> str:
        """Say in one line why ``quantity`` of `QUANTITIES` is None; empty if nothing is known."""

    def close(self) -> None:
        """Let go of the device."""


# ---------------------------------------------------------------------------------------- NVML

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


class _Call:
    """A question to NVML, and the quantities it answers.

    ``ways`` are alternatives, the preferred first: drivers and versions of pynvml differ in what
    they have. An ``instance`` call may be asked of a MIG instance, others only of the whole card.
    """

    def __init__(
        self, depth: Depth, *ways: Callable[[Any, Any], Any], instance: bool = False
    ) -> None:
        self.depth, self.ways, self.instance = depth, ways, instance


# Energy comes first, so that the time of an edge is the counter's.
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
        lambda n, h: n.nvmlDeviceGetComputeRunningProcesses(h),
        lambda n, h: n.nvmlDeviceGetComputeRunningProcesses_v2(h),
        instance=True,
    ),
    "display": _Call(
        Depth.SLOW,
        lambda n, h: n.nvmlDeviceGetGraphicsRunningProcesses(h),
        lambda n, h: n.nvmlDeviceGetGraphicsRunningProcesses_v2(h),
        instance=True,
    ),
}

# What will not get better by asking again; anything else (lost, timeout, unknown) may.
_LACKS = frozenset(
    {
        "AttributeError",
        "NVMLLibraryMismatchError",
        "NVMLError_NotSupported",
        "NVMLError_FunctionNotFound",
        "NVMLError_NoPermission",
        "NVMLError_InvalidArgument",
        "NVMLError_ArgumentVersionMismatch",
        "NVMLError_Deprecated",
    }
)


class Lack(StrEnum):
    """Why NVML cannot be used at all."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Lack:
        """Make a member from its spelling in JSON and its meaning."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    NOT_INSTALLED = "not installed", "nvidia-ml-py is not installed"
    NO_DRIVER = "no driver", "no NVIDIA driver (libnvidia-ml is not there)"
    NOT_LOADED = "not loaded", "the NVIDIA driver is not loaded"
    NO_PERMISSION = "no permission", "no permission to talk to the NVIDIA driver"
    MISMATCH = (
        "mismatch",
        "the NVIDIA driver and its library differ in version; reboot to fix this",
    )
    OTHER = "other", "NVML"


_START_ERRORS: Mapping[str, Lack] = {
    "NVMLError_LibraryNotFound": Lack.NO_DRIVER,
    "NVMLError_DriverNotLoaded": Lack.NOT_LOADED,
    "NVMLError_NoPermission": Lack.NO_PERMISSION,
    "NVMLError_LibRmVersionMismatch": Lack.MISMATCH,
}


class NvmlMissingError(Exception):
    """NVML cannot be used; the message is the reason, in one line."""

    def __init__(self, lack: Lack, reason: str = "") -> None:
        super().__init__(reason or lack.meaning)
        self.lack = lack


def _start(nvml: Any) -> Any:
    """Import and initialise pynvml, or the module given in its place."""
    try:
        nvml = nvml or import_module("pynvml")
    except ImportError:
        raise NvmlMissingError(Lack.NOT_INSTALLED) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        lack = _START_ERRORS.get(type(error).__name__, Lack.OTHER)
        reason = f"NVML: {error}" if lack is Lack.OTHER else ""
        raise NvmlMissingError(lack, reason) from None
    return nvml


def check_nvml(nvml: Any = None) -> tuple[Lack | None, str]:
    """Why NVML cannot be used, as a member and as a line; None and empty where it can."""
    try:
        nvml = _start(nvml)
    except NvmlMissingError as missing:
        return missing.lack, str(missing)
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    return None, ""


class Nvml:
    """A card, or a MIG instance of one, by UUID.

    A call that the driver or pynvml lacks is asked once and its quantity stays None; one that
    fails for the moment is asked again next time.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        """Open the card whose UUID this is, with or without its prefix ``GPU-`` or ``MIG-``.

        Raises:
            NvmlMissingError: NVML does not work here, or knows no such card.
        """
        self._nvml = _start(nvml)
        self._errors = (
            AttributeError,
            self._nvml.NVMLError,
            getattr(self._nvml, "NVMLLibraryMismatchError", AttributeError),
        )
        try:
            self._instance = self._card = self._find(uuid)
            mig = self._nvml.nvmlDeviceGetUUID(self._card).startswith("MIG-")
            if mig:
                self._card = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._card)
        except self._errors as error:
            self.close()
            raise NvmlMissingError(Lack.OTHER, f"NVML cannot open {uuid}: {error}") from None
        meter = "power is metered for the whole card, not for a MIG instance"
        metered = ("energy_j", "power_w", "power_limit_w")
        self._lacks: dict[str, str] = dict.fromkeys(metered, meter) if mig else {}
        self._fails: dict[str, str] = {}
        self._ways = {name: list(call.ways) for name, call in _CALLS.items()}
        self._tree: _Tree | None = None
        self._before: set[int] = set()
        self._listed = False  # the worker has been seen under its own pid
        self._alias: int | None = None
        self._names: dict[int, str | None] = {}
        with suppress(*self._errors):
            self.total_bytes = self._nvml.nvmlDeviceGetMemoryInfo(self._instance).total

    total_bytes: int | None = None

    def _find(self, uuid: str) -> Any:
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        *first, last = dict.fromkeys((uuid, f"GPU-{bare}", f"MIG-{bare}"))
        for name in first:
            with suppress(self._nvml.NVMLError_NotFound, self._nvml.NVMLError_InvalidArgument):
                return self._nvml.nvmlDeviceGetHandleByUUID(name)
        return self._nvml.nvmlDeviceGetHandleByUUID(last)

    @property
    def notes(self) -> Sequence[str]:
        """Under which pid NVML lists the worker, where that is not its own."""
        if self._alias is None or self._listed:
            return ()
        return (f"NVML lists the worker as pid {self._alias}, of another pid namespace",)

    def watch(self, pid: int) -> None:
        """Count this process and its descendants as the worker's own from now on."""
        self._tree = _Tree(pid)

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Take one reading."""
        now = time.monotonic_ns()
        values = {name: self._ask(name) for name, call in _CALLS.items() if call.depth <= depth}
        display = values.pop("display", None) or ()
        if (compute := values.get("others")) is not None:
            values["process_bytes"], values["others"] = self._attribute(compute, display)
        elif depth >= Depth.SLOW:
            self._fails["process_bytes"] = self.why("others")
        return (Reading(now, **values),)

    def why(self, quantity: str) -> str:
        """Say why ``quantity`` is None."""
        return self._lacks.get(quantity) or self._fails.get(quantity, "")

    def close(self) -> None:
        """Shut NVML down; it counts its users."""
        with suppress(*self._errors):
            self._nvml.nvmlShutdown()

    def _ask(self, name: str) -> Any:
        ways = self._ways[name]
        handle = self._instance if _CALLS[name].instance else self._card
        while ways and name not in self._lacks:
            try:
                value = ways[0](self._nvml, handle)
            except self._errors as error:
                if type(error).__name__ not in _LACKS:
                    self._fails[name] = f"NVML: {error}"
                    return None
                if not ways[1:]:
                    self._lacks[name] = f"NVML: {error}"
                ways.pop(0)
            else:
                del ways[1:]  # v1 and v2 of a call count differently: never change half way
                return value
        return None

    def _attribute(
        self, compute: Iterable[Any], drawing: Iterable[Any]
    ) -> tuple[int | None, tuple[Process, ...]]:
        """Tell the memory of the worker's processes from the others on the card."""
        # a process on the card holds some memory: 0 is a driver that cannot tell
        computing = {p.pid: p.usedGpuMemory or None for p in compute}
        listed = {p.pid: p.usedGpuMemory or None for p in drawing}
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
            "the driver does not tell a process's memory" if mine else "the card did not list it"
        )
        return None, others

    def _own(self, listed: Mapping[int, int | None]) -> set[int]:
        """The worker's pids among those listed.

        In a container NVML may list host pids. Where the worker is not listed, the first process
        to have joined since, whose pid nobody has here, is taken to be it.
        """
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
            with suppress(psutil.Error):
                self._names[pid] = psutil.Process(pid).name()
        return self._names[pid]


class _Tree:
    """The worker's process and its descendants; those that have ended remain its own."""

    def __init__(self, pid: int) -> None:
        import psutil

        self.pids = {pid}
        self._alive: list[psutil.Process] = []
        self._error = psutil.Error
        with suppress(psutil.Error):
            self._alive = [psutil.Process(pid)]
        self.refresh()

    def refresh(self) -> None:
        """Look for new descendants: about 13 µs for every process of the machine."""
        with suppress(self._error, IndexError):
            root = self._alive[0]
            self._alive = [root, *root.children(recursive=True)]
        self.pids.update(process.pid for process in self._alive)

    def resident_bytes(self) -> int | None:
        """Resident set of all of them together; None once they have ended."""
        total = 0
        for process in self._alive:
            with suppress(self._error):
                total += process.memory_info().rss
        return total or None


# ------------------------------------------------------------------------------- without NVML


@dataclass
class Unseen:
    """A card nobody can look at: every quantity is None, for one reason."""

    reason: str
    total_bytes: int | None = None
    notes: Sequence[str] = ()

    def watch(self, pid: int) -> None:
        """Nothing to watch."""

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Only the time."""
        return (Reading(time.monotonic_ns()),)

    def why(self, quantity: str) -> str:
        """The reason."""
        return self.reason

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class Host(Unseen):
    """A CPU: the resident set of the worker and its descendants, and nothing else.

    Descendants are looked for at the edges of phases only: the search would take from the very
    cores that train.
    """

    reason: str = "the case ran on a CPU"
    _tree: _Tree | None = field(default=None, repr=False)

    def watch(self, pid: int) -> None:
        """Count this process and its descendants as the worker's own from now on."""
        self._tree = _Tree(pid)

    def read(self, depth: Depth) -> Sequence[Reading]:
        """The resident set."""
        now = time.monotonic_ns()
        if self._tree is None:
            return (Reading(now),)
        if depth == Depth.EDGE:
            self._tree.refresh()
        return (Reading(now, process_bytes=self._tree.resident_bytes()),)

    def why(self, quantity: str) -> str:
        """The worker had ended, or the reason."""
        return "the worker had ended" if quantity == "process_bytes" else self.reason


def open_device(uuid: str | None, nvml: Any = None) -> Device:
    """Open what a case trains on: a card or MIG instance by UUID, or the CPU where that is None.

    A card that NVML cannot open becomes an `Unseen` with the reason: training goes on without
    the readings. ``nvml`` replaces the module pynvml.
    """
    if uuid is None:
        return Host()
    try:
        return Nvml(uuid, nvml)
    except NvmlMissingError as missing:
        return Unseen(str(missing))


def find_neighbours(uuid: str, nvml: Any = None) -> tuple[Process, ...] | None:
    """Other processes on the card now, this one and its descendants aside; None if unknown."""
    device = open_device(uuid, nvml)
    try:
        device.read(Depth.SLOW)  # whoever is here already is not this process by another pid
        device.watch(os.getpid())
        return device.read(Depth.SLOW)[-1].others
    finally:
        device.close()


# ---------------------------------------------------------------------------------- recordings


class Replay:
    """A recording played back: at each edge, the readings made up to that edge.

    A recording is JSON lines. First ``{"total_bytes": …, "why": {quantity: reason}, "notes": []}``,
    then one `Reading` a line, None left out, with ``"edge": true`` at the edges of phases.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        """Take a recording's lines, an open file for instance."""
        head, *rows = map(json.loads, lines)
        self.total_bytes: int | None = head.get("total_bytes")
        self.notes: Sequence[str] = head.get("notes", ())
        self._why: Mapping[str, str] = head.get("why", {})
        self._rows = iter(rows)

    def watch(self, pid: int) -> None:
        """The recording knows whom it watched."""

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Nothing between edges; at an edge everything up to it; at the end nothing."""
        readings = []
        for row in self._rows if depth == Depth.EDGE else ():
            edge = row.pop("edge", False)
            if row.get("others") is not None:
                row["others"] = tuple(Process(**process) for process in row["others"])
            if row.get("throttle") is not None:
                row["throttle"] = tuple(row["throttle"])
            readings.append(Reading(**row))
            if edge:
                break
        return readings

    def why(self, quantity: str) -> str:
        """As recorded."""
        return self._why.get(quantity, "")

    def close(self) -> None:
        """Nothing to close."""


class Recorder:
    """A device that writes down what another one reads, for `Replay`."""

    def __init__(self, device: Device, file: IO[str]) -> None:
        """Record ``device``; the file is written when the device is closed."""
        self._device = device
        self._file = file
        self._rows: list[dict[str, Any]] = []
        self.total_bytes = device.total_bytes
        self.watch = device.watch
        self.why = device.why

    @property
    def notes(self) -> Sequence[str]:
        """The device's notes."""
        return self._device.notes

    def read(self, depth: Depth) -> Sequence[Reading]:
        """Read the device."""
        readings = self._device.read(depth)
        for reading in readings:
            row = {name: value for name, value in asdict(reading).items() if value is not None}
            self._rows.append(row)
        if readings and depth == Depth.EDGE:
            self._rows[-1]["edge"] = True
        return readings

    def close(self) -> None:
        """Close the device and write the recording."""
        why = {quantity: self.why(quantity) for quantity in QUANTITIES if self.why(quantity)}
        head = {"total_bytes": self.total_bytes, "why": why, "notes": list(self.notes)}
        self._device.close()
        self._file.writelines(json.dumps(row) + "\n" for row in (head, *self._rows))


# --------------------------------------------------------------------------------------- cards


@dataclass(frozen=True)
class Card:
    """A GPU or MIG instance that CUDA would offer, as NVML describes it; None where it does not.

    ``index`` is that of the GPU in NVML's order, that of the PCI bus. ``names`` are the
    spellings `CUDA_VISIBLE_DEVICES` may begin with. ``driver_cuda`` is the newest CUDA that the
    driver can run. What belongs to the whole card (link, ECC, persistence mode) is told of an
    instance too; its power and clocks are not its own, and None.
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


@dataclass(frozen=True)
class Link:
    """A PCIe link: what it runs at now, and at most. An idle card lowers its generation."""

    generation: int
    width: int
    max_generation: int
    max_width: int

    def __str__(self) -> str:
        """As in the column `pcie`: ``gen 4 x16, at most gen 5 x16``."""
        now, most = f"gen {self.generation} x{self.width}", (self.max_generation, self.max_width)
        return f"{now}, at most gen {most[0]} x{most[1]}"


def find_card(uuid: str, cards: Iterable[Card]) -> Card | None:
    """The card of ``uuid``, with or without its prefix ``GPU-`` or ``MIG-``; None if not there.

    torch spells the UUID of a MIG instance with the prefix of a GPU.
    """

    def bare(text: str) -> str:
        return text.removeprefix("GPU-").removeprefix("MIG-")

    return next((card for card in cards if bare(card.uuid) == bare(uuid)), None)


def find_cards(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> tuple[list[Card], str]:
    """List the cards CUDA would offer here, in its order, without torch and without CUDA.

    Give a worker ``CUDA_VISIBLE_DEVICES=<uuid>`` of the card chosen: CUDA counts the fastest card
    first, unless `CUDA_DEVICE_ORDER` says ``PCI_BUS_ID``, and NVML counts by PCI bus.

    Returns:
        The cards, and the reason in one line where there are none.
    """
    try:
        nvml = _start(nvml)
    except NvmlMissingError as missing:
        return [], str(missing)
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
        cuda = None
        with suppress(AttributeError, nvml.NVMLError):
            number = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 13020 is CUDA 13.2
            cuda = (number // 1000, number % 1000 // 10)
        cards = [
            replace(card, driver=driver, driver_cuda=cuda)
            for index in range(nvml.nvmlDeviceGetCount())
            for card in _describe(nvml, index)
        ]
    except nvml.NVMLError as error:
        return [], f"NVML: {error}"
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = select_visible(cards, visible)
    if chosen:
        return chosen, ""
    return [], f"CUDA_VISIBLE_DEVICES={visible!r} names no card" if cards else "no GPU is there"


def _describe(nvml: Any, index: int) -> list[Card]:
    """The card at ``index``, or its MIG instances where it is divided."""

    def ask(name: str, *args: Any) -> Any:
        with suppress(AttributeError, nvml.NVMLError):
            return getattr(nvml, name)(*args)

    gpu = ask("nvmlDeviceGetHandleByIndex", index)
    uuid = gpu and ask("nvmlDeviceGetUUID", gpu)
    if not uuid:  # lost, or kept from this user
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
        ask("nvmlDeviceGetName", gpu) or "unknown GPU",
        index,
        capability=tuple(capability) if capability else None,
        # of two modes the first is in force, the second after a reset
        mig=bool(mig[0]) if mig else None,
        ecc=bool(ecc[0]) if ecc else None,
        persistence_mode=None if persistence is None else bool(persistence),
        pcie=None if None in link else Link(*link),
    )
    if not whole.mig:
        memory = ask("nvmlDeviceGetMemoryInfo", gpu)
        limit = ask("nvmlDeviceGetEnforcedPowerLimit", gpu)
        usual = ask("nvmlDeviceGetPowerManagementDefaultLimit", gpu)
        clock = ask("nvmlDeviceGetApplicationsClock", gpu, nvml.NVML_CLOCK_SM)
        usual_clock = ask("nvmlDeviceGetDefaultApplicationsClock", gpu, nvml.NVML_CLOCK_SM)
        return [
            replace(
                whole,
                memory_bytes=memory and memory.total,
                power_limit_w=limit and limit / 1e3,
                default_power_limit_w=usual and usual / 1e3,
                application_clock_mhz=clock,
                default_application_clock_mhz=usual_clock,
                names=(uuid,),
            )
        ]
    cards: list[Card] = []
    for i in range(ask("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0):
        instance = ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu, i)
        own = instance and ask("nvmlDeviceGetUUID", instance)
        if own:
            memory = ask("nvmlDeviceGetMemoryInfo", instance)
            ids = [ask(f"nvmlDeviceGet{kind}InstanceId", instance) for kind in ("Gpu", "Compute")]
            # the second spelling is that before driver 470; a divided card stands for its first
            # instance
            names = (own, f"MIG-{uuid}/{ids[0]}/{ids[1]}", *(() if cards else (uuid,)))
            name = ask("nvmlDeviceGetName", instance) or f"{whole.name} MIG"
            cards.append(
                replace(
                    whole, uuid=own, name=name, memory_bytes=memory and memory.total, names=names
                )
            )
    return cards


def select_visible(cards: Sequence[Card], visible: str | None) -> list[Card]:
    """Choose from ``cards`` as CUDA does by `CUDA_VISIBLE_DEVICES`.

    Indices, UUIDs or their beginnings, MIG names. The list ends at the first entry that names no
    card, or more than one; a card named twice leaves none. Source: CUDA Programming Guide, CUDA
    Environment Variables; what is said of repetitions and of ``1abc`` is as torch 2.13 reads it.
    """
    if visible is None:
        return [
            card for i, card in enumerate(cards) if card.index not in {c.index for c in cards[:i]}
        ]
    chosen: list[Card] = []
    for entry in visible.split(","):
        entry = entry.strip()
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
