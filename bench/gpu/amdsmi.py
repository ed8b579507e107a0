"""AMD GPUs read with AMD SMI: memory, energy, clocks, throttling and neighbours.

Names and units are those of version 7.0.2 of its Python package, which comes with ROCm and is also
on PyPI, and of amdsmi.h. It is imported only when a card is opened, and never shut down:
amdsmi_shut_down counts no users and would invalidate other handles in this process, even torch's.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any

from bench.gpu.device import Depth
from bench.gpu.library import Call, LibraryCard, Listed

INSTALL = "pip install -e '.[amd]'"


class AmdsmiMissingError(Exception):
    pass


def _start(amdsmi: Any) -> Any:
    try:
        with redirect_stdout(io.StringIO()):  # it prints which library it does not find
            amdsmi = amdsmi or import_module("amdsmi")
    except ModuleNotFoundError:
        raise AmdsmiMissingError(f"amdsmi is not installed: {INSTALL}") from None
    except Exception:  # a KeyError if libamd_smi.so is missing or too old
        why = "amdsmi cannot load libamd_smi.so; install ROCm's amd-smi-lib"
        raise AmdsmiMissingError(why) from None
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        raise AmdsmiMissingError(f"amdsmi: {_word(error)}") from None
    return amdsmi


def _word(error: Exception) -> str:
    """Return an error as one line; its own text has two, the code first."""
    return str(getattr(error, "err_info", None) or " ".join(str(error).split()))


def _take(found: Mapping[str, Any], *names: str) -> Any:
    """Return the first of these values that is known. Raises LookupError: none of them is."""
    for name in names:
        if (value := found.get(name, "N/A")) != "N/A":
            return value
    raise LookupError(f"no {names[0]} is told")


def _count_energy(a: Any, h: Any) -> float:
    found = a.amdsmi_get_energy_count(h)
    return float(found["energy_accumulator"] * found["counter_resolution"] / 1e6)  # from µJ


def _list(a: Any, h: Any) -> Listed:
    for process in a.amdsmi_get_gpu_process_list(h):
        used = process["memory_usage"]["vram_mem"]
        yield process["pid"], process["mem"] if used in (0, "N/A") else used


_RESIDENCIES = {
    "ppt_residency_acc": "software power cap",
    "prochot_residency_acc": "hardware slowdown",
    "socket_thm_residency_acc": "hardware thermal slowdown",
    "vr_thm_residency_acc": "hardware thermal slowdown",
    "hbm_thm_residency_acc": "hardware thermal slowdown",
}
"""Counters of how long each limit held the clocks back, and NVML's name of a similar reason. They
are read and compared here, as amdsmi_get_violation_status waits 100 ms between two readings."""


# Energy comes first, so that the timestamp of a phase boundary is that of the energy counter.
_CALLS: Mapping[str, Call] = {
    "energy_j": Call(Depth.EDGE, _count_energy),
    "device_bytes": Call(
        Depth.FAST, lambda a, h: a.amdsmi_get_gpu_memory_usage(h, a.AmdSmiMemoryType.VRAM)
    ),
    "power_w": Call(
        Depth.SLOW,
        lambda a, h: float(
            _take(a.amdsmi_get_power_info(h), "current_socket_power", "average_socket_power")
        ),
    ),
    # in µW on Linux
    "power_limit_w": Call(
        Depth.EDGE, lambda a, h: _take(a.amdsmi_get_power_cap_info(h), "power_cap") / 1e6
    ),
    "sm_clock_mhz": Call(
        Depth.SLOW, lambda a, h: _take(a.amdsmi_get_clock_info(h, a.AmdSmiClkType.GFX), "clk")
    ),
    "memory_clock_mhz": Call(
        Depth.SLOW, lambda a, h: _take(a.amdsmi_get_clock_info(h, a.AmdSmiClkType.MEM), "clk")
    ),
    "temperature_c": Call(
        Depth.SLOW,
        *(
            lambda a, h, where=where: a.amdsmi_get_temp_metric(
                h, getattr(a.AmdSmiTemperatureType, where), a.AmdSmiTemperatureMetric.CURRENT
            )
            for where in ("HOTSPOT", "EDGE")
        ),
    ),
    "others": Call(Depth.SLOW, lambda a, h: list(_list(a, h))),
}

_LACKS = ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "NO_PERM", "INVAL")
"""Permanent errors, for which asking again does not help, by the ends of their names."""


class Amdsmi(LibraryCard):
    """An AMD GPU by its UUID, as rocminfo prints it."""

    name = "amdsmi"

    def __init__(self, uuid: str, amdsmi: Any = None) -> None:
        """Open the GPU; if there is only one, ``uuid`` is not compared. Raises AmdsmiMissingError:
        AMD SMI does not work here, or knows no such GPU."""
        amdsmi = _start(amdsmi)
        errors = (AttributeError, LookupError, amdsmi.AmdSmiException)
        statuses = amdsmi.amdsmi_wrapper
        self._codes = {getattr(statuses, f"AMDSMI_STATUS_{name}", None) for name in _LACKS}
        try:
            cards = list(amdsmi.amdsmi_get_processor_handles())
        except errors as error:
            raise AmdsmiMissingError(f"amdsmi: {_word(error)}") from None
        found = cards
        if len(cards) > 1:
            found = [card for card in cards if uuid.lower() in _list_names(amdsmi, card, errors)]
        if len(found) != 1:
            raise AmdsmiMissingError(f"amdsmi knows no GPU {uuid}")
        throttle = Call(Depth.SLOW, self._name_throttling)
        super().__init__(amdsmi, {**_CALLS, "throttle": throttle}, errors, found[0])
        self._counted: dict[str, int] = {}
        with suppress(*errors):
            memory = amdsmi.AmdSmiMemoryType.VRAM
            self.total_bytes = amdsmi.amdsmi_get_gpu_memory_total(found[0], memory)

    def word(self, error: Exception) -> str:
        return _word(error)

    def is_lack(self, error: Exception) -> bool:
        known = isinstance(error, AttributeError | LookupError)
        return known or getattr(error, "err_code", None) in self._codes

    def _name_throttling(self, amdsmi: Any, card: Any) -> tuple[str, ...] | None:
        """Return what held the clocks back since the previous call; None at the first call."""
        found = amdsmi.amdsmi_get_gpu_metrics_info(card)
        now = {name: found[name] for name in _RESIDENCIES if found.get(name, "N/A") != "N/A"}
        if not now:
            raise LookupError("this GPU does not report why its clocks are reduced")
        before, self._counted = self._counted, now
        grown = [_RESIDENCIES[name] for name in now if now[name] > before.get(name, now[name])]
        return tuple(dict.fromkeys(grown)) if before else None


def _list_names(amdsmi: Any, card: Any, errors: tuple[type[Exception], ...]) -> set[str]:
    """Return a GPU's UUID, also as made from its serial number, for AMD SMI before ROCm 6.4."""
    names = set()
    with suppress(*errors):
        names.add(amdsmi.amdsmi_get_gpu_enumeration_info(card)["hip_uuid"].lower())
    with suppress(*errors):
        serial = amdsmi.amdsmi_get_gpu_asic_info(card)["asic_serial"]
        names.add(f"gpu-{serial.removeprefix('0x').lower()}")
    return names
