"""The lanes of a sweep, sorted into classes of like hardware, each with a folder of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bench.case import Case
from bench.errors import UnsupportedError, UsageError
from bench.executors import Executor, Lane
from bench.record import COMPARABLE, Environment
from bench.sweep.options import Options
from bench.sweep.preflight import Inputs, find_inputs, find_lane_inputs

Kind = tuple[object, ...]
"""What lanes of one class agree on."""

_AT_ONCE = 8  # processes that import torch to say what a lane is

_TOLD_APART: tuple[Callable[[Environment], str], ...] = (
    lambda e: e.gpu or "cpu",
    lambda e: f"{round((e.gpu_memory_bytes or 0) / 2**30)} gib" if e.gpu_memory_bytes else "",
    lambda e: e.host or "",
    lambda e: " ".join(filter(None, [e.torch, e.driver])),
)
"""What the folders of classes are named by, until no two have one name."""


@dataclass
class Hardware:
    """A class of lanes whose rows can be compared; ``folder`` is empty for the only one."""

    folder: str = ""
    lanes: list[tuple[Lane, Inputs]] = field(default_factory=list)

    @property
    def inputs(self) -> Inputs:
        """What is known of its first lane."""
        return self.lanes[0][1]


def open_lanes(executor: Executor, cases: Sequence[Case], options: Options) -> Sequence[Lane]:
    """Open the lanes that are asked for.

    Raises:
        UsageError: there are not so many, or the cases are of several devices.
    """
    devices = list(dict.fromkeys(case.device for case in cases))
    if len(devices) > 1 and options.lanes not in (None, 1):
        raise UsageError(f"--lanes: the cases are of {' and '.join(devices)}; give one --device")
    return executor.open_lanes(devices[0], options.lanes)


def examine_lanes(
    executor: Executor,
    lanes: Sequence[Lane],
    cases: Sequence[Case],
    options: Options,
    families: Sequence[Case] = (),
) -> list[Hardware]:
    """Find out what each lane is, and sort them into classes, in the order of their first lanes.

    Raises:
        UsageError: as `find_inputs` and `find_lane_inputs`.
    """
    first = find_inputs(cases, options, families, executor, lanes[0])
    every = [*cases, *families]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        others = pool.map(
            lambda lane: find_lane_inputs(first, every, options, executor, lane), lanes[1:]
        )
        known = list(zip(lanes, [first, *others], strict=True))
    classes: dict[Kind, Hardware] = {}
    for lane, inputs in known:
        classes.setdefault(find_kind(inputs), Hardware()).lanes.append((lane, inputs))
    if len(classes) > 1:
        names = name_folders(
            [next(iter(c.inputs.platforms.values())).environment for c in classes.values()]
        )
        for hardware, name in zip(classes.values(), names, strict=True):
            hardware.folder = name
    return list(classes.values())


def expect_one(classes: Sequence[Hardware], why: str) -> Hardware:
    """The only class.

    Args:
        classes: of `examine_lanes`.
        why: one is needed, as it follows the kinds in a sentence.

    Raises:
        UsageError: there are several.
    """
    if len(classes) > 1:
        kinds = ", ".join(hardware.folder for hardware in classes)
        raise UsageError(
            f"--lanes: these are of several kinds ({kinds}), {why}; choose with "
            "CUDA_VISIBLE_DEVICES"
        )
    return classes[0]


def find_kind(inputs: Inputs) -> Kind:
    """What a lane must have in common with others for its rows to be compared with theirs."""
    return tuple(
        (device, *(getattr(e, n) for n in COMPARABLE if COMPARABLE[n] == ("device",)), memory)
        for device, platform in inputs.platforms.items()
        for e in [platform.environment]
        # two of one name may have 40 and 80 GB
        for memory in [round((e.gpu_memory_bytes or 0) / 2**30)]
    )


def name_folders(environments: Sequence[Environment]) -> list[str]:
    """A name for the folder of each class, short, of letters that every file system has."""
    names = [""] * len(environments)
    for tell in _TOLD_APART:
        more = [tell(environment) for environment in environments]
        alike = Counter(names)
        names = [
            _slug(f"{name} {word}") if alike[name] > 1 or not name else name
            for name, word in zip(names, more, strict=True)
        ]
        if len(set(names)) == len(names):
            return names
    return [f"{name}-{number}" for number, name in enumerate(names, 1)]


def _slug(text: str) -> str:
    words = "".join(c if c.isascii() and c.isalnum() else " " for c in text).lower()
    return "-".join(words.split())


def refuse_world_sizes(
    executor: Executor, classes: Sequence[Hardware], cases: Sequence[Case], options: Options
) -> None:
    """Refuse a --world-size that no class of hardware has the GPUs for.

    Raises:
        UsageError: it says how many there are.
    """
    if "world_size" not in options.axes:
        return
    for device, size in dict.fromkeys((case.device, case.world_size) for case in cases):
        reasons = []
        for hardware in classes:
            try:
                executor.gather(hardware.lanes[0][0], device, size)
            except UnsupportedError as error:
                reasons.append(str(error))
        if len(reasons) == len(classes):
            raise UsageError(f"--world-size {size}: {'; '.join(dict.fromkeys(reasons))}")
