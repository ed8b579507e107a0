"""Choice of a device's reader: NVML for NVIDIA GPUs, AMD SMI for AMD GPUs, the system for CPUs."""

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
    """Open the device of a case: a card or MIG instance by UUID, or the CPU if that is None. A card
    that cannot be read, or a kind of ``device`` that has no reader, becomes an `Unreadable` with
    the reason: training goes on without the readings. ``nvml`` replaces the module pynvml,
    ``amdsmi`` the module of that name."""
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
    """Return other processes on the card, without this one's descendants; None if unknown."""
    device = open_device(uuid, nvml)
    try:
        device.read(Depth.SLOW)  # processes listed now are not this one under another pid
        device.watch(os.getpid())
        return device.read(Depth.SLOW)[-1].others
    finally:
        device.close()
