"""The candidate settings of a search for advice, and what counts and rates predict for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from bench.advise.standing import strip
from bench.axis import Value
from bench.case import AXES, FOLLOWS, Case
from bench.cores import count_cores
from bench.errors import UsageError
from bench.grid import grid
from bench.precision import PRECISIONS
from bench.scale_map import find_window, read_scale_map
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
"""Values that are tried by default: what people change without changing the network. fp16 has its
default static loss scale. max-autotune is left out, as it takes minutes to compile."""

LESS, MORE = 4, 32
"""Batch sizes from the present one over ``LESS`` to ``MORE`` times it are tried, if they fit."""

LEAST_STEPS = 8
"""Least steps of an epoch; with fewer, a larger batch would be all of the data."""

TRUST = 0.6
"""Share of the predicted logarithm that was measured: for fp16, the least times of DPN-92's
operations predict 6.6× on an H100, and 3.3× were measured."""


STARTS = {"cuda": (10.0, 40.0), "cpu": (4.0, 20.0)}
"""Expected seconds of a run beside its steps, and those that compiling adds: an H100 took 9 to 13 s
to start; an H200 took 75 s to compile DPN-92, and less for a smaller network."""


def expect_start(setting: Case) -> float:
    """Return the expected seconds of a run beside its steps, before any run was seen."""
    start, compiling = STARTS[setting.device]
    return start + compiling * setting.compiled


def find_room(now: Case, inputs: Inputs) -> float:
    """Return the bytes that training may use: a limit, the card's memory, or half
    of what a CPU has available, as other programs need some."""
    import psutil

    if now.memory_limit:
        return parse_bytes(now.memory_limit)
    card = inputs.platforms[now.device].environment.gpu_memory_bytes
    return card or psutil.virtual_memory().available / 2


def name_levers(now: Case) -> list[str]:
    """Return the axes whose values are tried if no flag fixes them."""
    return [*LEVERS[now.device], "batch_size", *(["workers"] if now.loader == "torch" else [])]


def list_levers(
    now: Case, given: Mapping[str, Sequence[Value]], items: int
) -> dict[str, list[Value]]:
    """Return the values of each lever to try, the present one first.

    Args:
        given: the values that flags give.
        items: the number of training items of an epoch.
    """
    tried: dict[str, Sequence[Value]] = dict(LEVERS[now.device])
    least = max(1, now.batch_size // LESS)
    sizes = [now.batch_size]
    while sizes[-1] * 2 <= min(MORE * now.batch_size, items // LEAST_STEPS):
        sizes.append(sizes[-1] * 2)
    smaller = [now.batch_size >> n for n in range(1, 8) if now.batch_size >> n >= least]
    tried["batch_size"] = [*sizes, *smaller]
    if "workers" in name_levers(now):
        cores = math.ceil(count_cores())
        tried["workers"] = sorted({0, 1, 2, 4, 8, cores} & {*range(cores + 1)})
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
    """List all combinations of levers that are valid and fit the data, the present setting first,
    except those that `refuse` excludes on this machine.

    Args:
        given: the values of axes that flags give, and the loss scale from a scale map.
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
    """Return the present setting with some levers changed, and the defaults that follow from them,
    by `grid`. Raises UsageError: they cannot be combined."""
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
    """Return the loss scale for fp16, as a list, from the network's map that `bench.scales` left in
    a folder; empty if there is none. Raises UsageError: the map cannot be read."""
    found = read_scale_map(folder)
    cases = [case for case in found.cases if case.model == now.model] if found else []
    return [use for case in cases if case.precision == "fp16" and (use := find_window(case).use)]


def refuse(setting: Case, now: Case, inputs: Inputs, asked: Sequence[Value]) -> str:
    """Return why a setting is not tried on this machine; empty if it may be tried. An emulated
    precision is tried only if flags ask for it."""
    if setting.precision == now.precision:
        return ""
    why = inputs.refuse(setting)
    if why or setting.precision in asked:
        return why
    emulated = inputs.platforms[setting.device].find_emulation(PRECISIONS[setting.precision])
    return emulated and f"{emulated}; --precision {now.precision} {setting.precision} tries it"


def expect(settings: Sequence[Case], inputs: Inputs) -> list[float]:
    """Return the logarithm of the epoch time that counts and rates predict for each of
    ``settings``, up to a constant; empty if the device or the network was not measured."""
    found: dict[tuple[str, int], float | None] = {}
    for setting in settings:
        told = setting.precision, setting.batch_size
        if told not in found:
            found[told] = inputs.predict(setting)
    if None in found.values():
        return []
    return [TRUST * math.log(found[s.precision, s.batch_size] or 1.0) for s in settings]
