"""The settings that advice chooses from, and what counts and rates expect of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from bench.advise.standing import strip
from bench.axis import Value
from bench.case import AXES, FOLLOWS, Case
from bench.cores import usable_cpus
from bench.errors import UsageError
from bench.grid import grid
from bench.precision import PRECISIONS
from bench.scale_map import find_window
from bench.store.scale_map import read_scale_map
from bench.sweep.preflight import Inputs
from bench.text import parse_bytes

LEVERS: dict[str, dict[str, Sequence[Value]]] = {
    "cuda": {
        "precision": ("fp32", "tf32", "fp16", "fp16-amp", "bf16", "bf16-amp"),
        "compile": ("off", "default", "reduce-overhead"),
        "cuda_graphs": (False, True),
        "channels_last": (False, True),
        "cudnn_benchmark": (False, True),
    },
    "cpu": {
        "precision": ("fp32", "bf16-amp"),
        "compile": ("off", "default"),
        "channels_last": (False, True),
    },
}
"""What is tried where no flag says otherwise: what people change without changing the network. Of
fp16 with a static loss scale, its default. max-autotune takes minutes to compile."""

LESS, MORE = 4, 32
"""Batch sizes from the present one over this to it times this are tried, as far as they fit."""

LEAST_STEPS = 8
"""An epoch has at least so many steps; with fewer a larger batch would be all of the data."""

TRUST = 0.6
"""Of the logarithm of what the least times of operations expect, about so much was measured: of
DPN-92 on an H100 they expect 6.6× of fp16, and 3.3× were measured."""


STARTS = {"cuda": (10.0, 40.0), "cpu": (4.0, 20.0)}
"""Seconds that a run takes beside its steps, and those that compiling adds, before any was seen: on
an H100 starts took 9 to 13; to compile DPN-92 took 75 on an H200, and a smaller network less."""


def expect_start(setting: Case) -> float:
    """The seconds of a run beside its steps, before any was seen."""
    start, compiling = STARTS[setting.device]
    return start + compiling * setting.compiled


def find_room(now: Case, inputs: Inputs) -> float:
    """Bytes that training may take: of the card, or of a CPU's memory half, as others need some."""
    import psutil

    if now.memory_limit:
        return parse_bytes(now.memory_limit)
    card = inputs.platforms[now.device].environment.gpu_memory_bytes
    return card or psutil.virtual_memory().available / 2


def name_levers(now: Case) -> list[str]:
    """The axes of which values are tried where no flag fixes them."""
    return [*LEVERS[now.device], "batch_size", *(["workers"] if now.loader == "torch" else [])]


def list_levers(
    now: Case, given: Mapping[str, Sequence[Value]], items: int
) -> dict[str, list[Value]]:
    """The values of each lever that are to be tried, the present one first.

    Args:
        given: those that flags say.
        items: of an epoch of training data.
    """
    tried: dict[str, Sequence[Value]] = dict(LEVERS[now.device])
    least = max(1, now.batch_size // LESS)
    sizes = [now.batch_size]
    while sizes[-1] * 2 <= min(MORE * now.batch_size, items // LEAST_STEPS):
        sizes.append(sizes[-1] * 2)
    smaller = [now.batch_size >> n for n in range(1, 8) if now.batch_size >> n >= least]
    tried["batch_size"] = [*sizes, *smaller]
    if "workers" in name_levers(now):
        tried["workers"] = sorted(
            {0, 1, 2, 4, 8, len(usable_cpus())} & {*range(len(usable_cpus()) + 1)}
        )
    tried |= given
    return {
        name: list(dict.fromkeys([getattr(now, name), *values])) for name, values in tried.items()
    }


def list_settings(
    now: Case,
    levers: Mapping[str, Sequence[Value]],
    given: Mapping[str, Sequence[Value]],
    inputs: Inputs,
) -> list[Case]:
    """All combinations of levers that go together and fit the data, the present setting first; what
    this machine cannot run, or only emulates, is left out unless it is asked for.

    Args:
        given: the values of axes that flags say, and of the loss scale that a map does.
    """
    kept = {now: None}
    for values in product(*levers.values()):
        try:
            setting = make_setting(now, dict(zip(levers, values, strict=True)), given)
            inputs.check_batches(setting)
        except UsageError:
            continue
        if not refuse(setting, now, inputs, given.get("precision", ())):
            kept[setting] = None
    return list(kept)


def make_setting(
    now: Case, changes: Mapping[str, Value], given: Mapping[str, Sequence[Value]] = {}
) -> Case:
    """The present setting with some levers changed, and what follows from each: as `grid` has it.
    Raises UsageError: they do not go together."""
    fixed = {name: getattr(now, name) for name in AXES}
    if changes.get("precision", now.precision) != now.precision:
        for name in FOLLOWS["precision"]:
            del fixed[name]
            if name in given:
                fixed[name] = given[name][0]
    chosen = {name: [value] for name, value in (fixed | dict(changes)).items()}
    (setting,) = grid(chosen, asked=())
    return strip(setting)


def read_scale(folder: Path, now: Case) -> list[Value]:
    """The loss scale to use in fp16, where `bench.scales` left a map of the network in a folder;
    none where it did not. Raises UsageError: it cannot be read."""
    found = read_scale_map(folder)
    cases = [case for case in found.cases if case.model == now.model] if found else []
    return [use for case in cases if case.precision == "fp16" and (use := find_window(case).use)]


def refuse(setting: Case, now: Case, inputs: Inputs, asked: Sequence[Value]) -> str:
    """Why a setting is not tried on this machine; empty where it may be. A precision that would be
    emulated is tried where flags ask for it."""
    if setting.precision == now.precision:
        return ""
    why = inputs.refuse(setting)
    if why or setting.precision in asked:
        return why
    emulated = inputs.platforms[setting.device].find_emulation(PRECISIONS[setting.precision])
    return emulated and f"{emulated}; --precision {now.precision} {setting.precision} tries it"


def expect(settings: Sequence[Case], inputs: Inputs) -> list[float]:
    """The logarithm of an epoch's time that counts and rates expect, but for a constant; shape of
    ``settings``. Empty where the device or the network was not measured."""
    found: dict[tuple[str, int], float | None] = {}
    for setting in settings:
        told = setting.precision, setting.batch_size
        if told not in found:
            found[told] = inputs.predict(setting)
    if None in found.values():
        return []
    return [TRUST * math.log(found[s.precision, s.batch_size] or 1.0) for s in settings]
