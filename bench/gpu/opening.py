"""Who reads a device: NVML an NVIDIA GPU, AMD SMI an AMD one, the system a CPU."""

from __future__ import annotations

import os
from typing import Any

from bench.gpu.amdsmi import Amdsmi, AmdsmiMissingError
from bench.gpu.device import Depth, Device, Host, Process, Unreadable
from bench.gpu.kinds import read_build
from bench.gpu.nvml import Nvml, NvmlMissingError

_READERLESS = {
    "mps": "on an Apple GPU only powermetrics can read that, as root",
    "xpu": "on an Intel GPU no supported library reads that",
}

UNREAD = "memory in use, power, clocks, temperature and other processes of the GPU are not read"


def open_device(
    uuid: str | None, nvml: Any = None, *, device: str = "cuda", amdsmi: Any = None
) -> Device:
    """Open what a case trains on: a card or MIG instance by UUID, or the CPU where that is None,
    unless it is on a ``device`` whose readings nobody tells. A card that nothing can read becomes
    an `Unreadable` with the reason: training goes on without the readings. ``nvml`` replaces the
    module pynvml, ``amdsmi`` the one of this name."""
    if why := _READERLESS.get(device):
        return _leave_unread(why)
    if uuid is None:
        return Host()
    try:
        return Amdsmi(uuid, amdsmi) if "hip" in read_build() else Nvml(uuid, nvml)
    except AmdsmiMissingError as missing:
        return _leave_unread(str(missing))
    except NvmlMissingError as missing:
        return Unreadable(str(missing))


def _leave_unread(reason: str) -> Unreadable:
    return Unreadable(reason, notes=[f"{UNREAD}: {reason}"])


def find_neighbours(uuid: str, nvml: Any = None) -> tuple[Process, ...] | None:
    """Other processes on the card now, this one and its descendants aside; None if unknown."""
    device = open_device(uuid, nvml)
    try:
        device.read(Depth.SLOW)  # whoever is here already is not this process by another pid
        device.watch(os.getpid())
        return device.read(Depth.SLOW)[-1].others
    finally:
        device.close()
