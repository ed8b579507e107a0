"""The cards that CUDA would list here, in its order, found without torch and without CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from bench.gpu.nvml import Checked, NvmlMissingError, UnknownError, use_nvml

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
