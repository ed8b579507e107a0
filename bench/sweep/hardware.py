"""The lanes of a sweep, sorted into classes of like hardware, each with a folder of its own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import Case
from bench.errors import UnsupportedError, UsageError
from bench.executors import Executor, Lane, ShortageError
from bench.record import COMPARABLE, Environment, Status
from bench.store.cells import RECORDS
from bench.store.reader import read_config, read_records
from bench.sweep.folder import CLASS
from bench.sweep.options import Options
from bench.sweep.preflight import Inputs, find_inputs, find_lane_inputs

if TYPE_CHECKING:
    import pandas as pd

Kind = tuple[tuple[object, ...], ...]
"""What lanes of one class have in common, for each device."""

_OF_DEVICE = [name for name, owners in COMPARABLE.items() if owners == ("device",)]
_NAMED = 8  # lanes listed of a class
_AT_ONCE = 8  # lanes examined at once, each by a process that imports torch

_NAME_PARTS: tuple[Callable[[Environment], str], ...] = (
    lambda e: e.gpu or "cpu",
    lambda e: f"{round((e.gpu_memory_bytes or 0) / 2**30)} gib" if e.gpu_memory_bytes else "",
    lambda e: e.host or "",
    lambda e: " ".join(filter(None, [e.torch, e.driver])),
)
"""The parts of the names of class folders; parts are added until all names differ."""


@dataclass
class Hardware:
    """A class of lanes whose rows can be compared; ``folder``, set by `place_classes`, is empty if
    it is --out itself."""

    folder: str = ""
    lanes: list[tuple[Lane, Inputs]] = field(default_factory=list)

    @property
    def inputs(self) -> Inputs:
        return self.lanes[0][1]

    @property
    def environments(self) -> dict[str, Environment]:
        return self.inputs.environments

    def describe(self, out: Path) -> str:
        names = [lane.name or "the only one" for lane, _ in self.lanes]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"{', '.join(names[:_NAMED])}{more} into {out / self.folder}"


def open_lanes(executor: Executor, cases: Sequence[Case], options: Options) -> Sequence[Lane]:
    """Open the requested lanes. Raises UsageError: they are too many, or of several devices."""
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
    """Examine the lanes, and sort them into classes, in the order of their first lanes. Raises
    UsageError: as `find_inputs` and `find_lane_inputs`."""
    beside = count_beside(lanes, options)
    first = find_inputs(cases, options, families, executor, lanes[0], beside)
    every = [*cases, *families]
    look = partial(find_lane_inputs, first, every, options, executor)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = [first, *pool.map(look, lanes[1:])]
    classes: dict[Kind, Hardware] = {}
    for lane, inputs in zip(lanes, found, strict=True):
        kind = find_kind(inputs.environments)
        classes.setdefault(kind, Hardware()).lanes.append((lane, inputs))
    return list(classes.values())


def count_beside(lanes: Sequence[Lane], options: Options) -> int:
    """Return how many other lanes of the first one's machine may run at the same time."""
    return 0 if options.quiet else sum(lane.host == lanes[0].host for lane in lanes[1:])


def place_classes(classes: Sequence[Hardware], out: Path) -> list[str]:
    """Give each class the folder within ``out`` that an earlier start gave it. Return the names of
    the folders whose classes are absent now.

    A class is recognised by its machine; of several, by how much is unchanged of what its rows must
    agree on, so that a change, such as of the driver, is refused later. Otherwise it is recognised
    by its card, if that is unambiguous. A new class gets ``out`` itself if there never was another.
    """
    known = read_folders(out)
    if len(classes) == 1 and known.keys() <= {""}:
        return []
    new, left = list(classes), dict(known)

    def give(hardware: Hardware, name: str) -> None:
        hardware.folder = name
        new.remove(hardware)
        del left[name]

    likely = [
        (hardware, name)
        for hardware in classes
        for name, of in known.items()
        if find_machine(of) == find_machine(hardware.environments)
    ]
    likely.sort(key=lambda pair: -_count_common(pair[0].environments, known[pair[1]]))
    for hardware, name in likely:
        if hardware in new and name in left:
            give(hardware, name)
    for hardware in list(new):
        card = find_card(hardware.environments)
        names = [name for name, of in left.items() if find_card(of) == card]
        if len(names) == 1 == sum(find_card(other.environments) == card for other in new):
            give(hardware, names[0])
    others = [of for name, of in known.items() if name]
    names = name_folders([*(hardware.environments for hardware in new), *others])
    for hardware, name in zip(new, names, strict=False):
        tries = (f"{name}-{n}" if n > 1 else name for n in itertools.count(1))
        hardware.folder = next(name for name in tries if name not in known)
    return [name for name in left if name]


def _count_common(one: Mapping[str, Environment], other: Mapping[str, Environment]) -> int:
    parts = zip(find_kind(one), find_kind(other), strict=True)
    return sum(a == b for mine, its in parts for a, b in zip(mine, its, strict=True))


def describe_places(classes: Sequence[Hardware], absent: Sequence[str], out: Path) -> list[str]:
    """Return lines on which lanes measure into which folder, unless that is ``out`` alone;
    ``absent`` are the folders that `place_classes` returned."""
    if not absent and not any(hardware.folder for hardware in classes):
        return []
    places = "; ".join(hardware.describe(out) for hardware in classes)
    left = "no lane is of the kind of {}: nothing is added to it"
    return [f"lanes: {places}", *(left.format(out / name) for name in absent)]


def read_folders(out: Path) -> dict[str, dict[str, Environment]]:
    """Return the environments of the class folders within ``out``, by name; ``out`` itself is "".
    Folders of other sweeps are skipped: the configuration of a class folder names its class."""
    configs = {"": read_config(out)}
    with suppress(OSError):
        configs |= {path.name: read_config(path) for path in sorted(out.iterdir())}
    return {
        name: of
        for name, config in configs.items()
        if config.get(CLASS, "") == name and (of := _read_environments(config))
    }


def _read_environments(config: Mapping[str, Any]) -> dict[str, Environment]:
    """Return the environments in a configuration, with only what distinguishes classes."""
    types = dict.fromkeys(_OF_DEVICE, str) | {"gpu_memory_bytes": int}
    found = config.get("environment")
    return {
        device: Environment(**{n: cells[n] for n in types if isinstance(cells.get(n), types[n])})
        for device, cells in (found if isinstance(found, dict) else {}).items()
        if isinstance(cells, dict)
    }


def refuse_unlike(classes: Sequence[Hardware], why: str) -> None:
    """Refuse lanes of several classes. Raises UsageError: the message has ``why``, a clause that
    follows the list of classes."""
    if len(classes) > 1:
        kinds = ", ".join(name_folders([one.environments for one in classes]))
        raise UsageError(
            f"--lanes: these are of several kinds ({kinds}), {why}; choose with "
            "CUDA_VISIBLE_DEVICES"
        )


def find_kind(environments: Mapping[str, Environment]) -> Kind:
    """Return what lanes must have in common for their rows to be comparable."""
    return tuple(
        (device, *(getattr(e, name) for name in _OF_DEVICE), _round_memory(e))
        for device, e in environments.items()
    )


def find_machine(environments: Mapping[str, Environment]) -> Kind:
    """Return what stays of a lane's kind if other software is installed."""
    return tuple((device, e.gpu, e.cpu, _round_memory(e)) for device, e in environments.items())


def find_card(environments: Mapping[str, Environment]) -> Kind:
    """Return what identifies a lane's card if it moves to another host, or gets other cores."""
    return tuple((device, e.gpu or e.cpu, _round_memory(e)) for device, e in environments.items())


def _round_memory(environment: Environment) -> int:
    # cards of the same name may have 40 or 80 GB
    return round((environment.gpu_memory_bytes or 0) / 2**30)


def name_folders(classes: Sequence[Mapping[str, Environment]]) -> list[str]:
    """Return a short name for the folder of each class, valid on every file system."""
    environments = [next(iter(environments.values())) for environments in classes]
    names = [""] * len(environments)
    for describe in _NAME_PARTS:
        more = [describe(environment) for environment in environments]
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
    executor: Executor,
    lanes: Sequence[Lane],
    folders: Sequence[Path],
    cases: Sequence[Case],
    options: Options,
) -> None:
    """Refuse a --world-size for which no class has the GPUs, or ever had by its folder; ``lanes``
    has a lane of each class. Raises UsageError: the message says how many there are."""
    if "world_size" not in options.axes:
        return
    widest = [find_widest(read_records(f)) for f in folders if (f / RECORDS).is_file()]
    for device, size in dict.fromkeys((case.device, case.world_size) for case in cases):
        lacks = []
        for lane in lanes:
            try:
                executor.gather(lane, device, size)
            except UnsupportedError as error:
                lacks.append(str(error))
            except ShortageError:
                continue
        if len(lacks) == len(lanes) and size > max(widest, default=0):
            # what it needs, once, and what each class has
            parts = dict.fromkeys(part for lack in lacks for part in lack.split("; "))
            raise UsageError(f"--world-size {size}: {'; '.join(parts)}")


def find_widest(records: pd.DataFrame) -> int:
    """Return the most GPUs that any recorded case had, if it was measured or lost."""
    had = records["world_size"][records["status"] != Status.UNSUPPORTED]
    return int(had.max()) if len(had) else 0
