"""Presets: grids of cases in TOML, built in by name or from the user's own file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path

from bench.base.errors import UsageError, nearest
from bench.schema.axis import Value
from bench.schema.case import AXES, FOLLOWS, PARTS, SYNTHETIC_AXES, Case
from bench.schema.grid import grid, parse_values, refuse_auto

_FOLDER = files("bench.schema") / "presets"

_REPLACED = {
    "fraction": "steps",
    "steps": "fraction",
    "optimizer": "workload",
}
"""Axes of a preset that give way to another that is given as a flag: how much is measured, and the
optimizer to a workload, which may bring its own."""


@dataclass(frozen=True)
class Preset:
    name: str
    description: str
    grids: tuple[Mapping[str, Sequence[Value]], ...]

    def override(self, flags: Mapping[str, Sequence[Value]]) -> list[dict[str, Sequence[Value]]]:
        """Return the grids with ``flags`` in place of what they replace."""
        dropped = {name for name, flag in _REPLACED.items() if flag in flags}
        if any(isinstance(number, int) and number > 1 for number in flags.get("epochs", [])):
            dropped |= {*PARTS}  # several epochs are whole ones
        return [
            {name: values for name, values in block.items() if name not in dropped} | {**flags}
            for block in self.grids
        ]

    def cases(
        self,
        flags: Mapping[str, Sequence[Value]],
        defaults: Mapping[str, Sequence[Value]],
        find: Callable[[Case, str], Sequence[int]] = refuse_auto,
    ) -> list[Case]:
        """Expand to cases. ``flags`` override the grids, ``defaults`` fill axes that neither names,
        and ``find`` is as in `bench.schema.grid.grid`.

        Raises UsageError: settings do not go together, or an axis that is asked for applies to no
        case. A preset's own axis is not asked for if a flag decides whether it applies.
        """
        blocks = [{**defaults, **block} for block in self.override(flags)]
        decides = FOLLOWS | {"workload": SYNTHETIC_AXES, "dataset": SYNTHETIC_AXES}
        decided = {name for flag in flags for name in decides.get(flag, ())}
        asked = AXES.keys() - (decided - flags.keys())
        return grid(*blocks, find=find, asked=asked)


ADVICE = "advise"
"""The name of what a search for advice measures, which has no cases of its own."""


def default_preset(device: str) -> str:
    return "rtx-titan" if device == "cuda" else "quick"


def preset_names() -> list[str]:
    return sorted(p.name.removesuffix(".toml") for p in _FOLDER.iterdir() if p.name[-5:] == ".toml")


def load_preset(name: str) -> Preset:
    """Read a preset by name. Raises UsageError: there is none with that name."""
    if name not in preset_names():
        raise UsageError(f"--preset {name!r}: {nearest(name, preset_names())}")
    return parse_preset((_FOLDER / f"{name}.toml").read_bytes(), name)


def load_config(path: Path) -> Preset:
    """Read a preset from the user's own file. Raises UsageError: it is not one."""
    try:
        return parse_preset(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; give a readable TOML file") from error


def parse_preset(data: bytes, name: str) -> Preset:
    """Parse a preset's TOML. Raises UsageError: a key is not an axis, or a value is wrong."""
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # ValueError: also for a number of 5000 digits
        why = " ".join(str(error).split())[:200]
        right = "a line [[grid]] and then batch_size = [64, 128] would be right"
        raise UsageError(f"{name}: not TOML: {why}; {right}") from error
    _refuse_unknown(table, ["description", "grid"], name)
    grids = table.get("grid", [])
    if not (isinstance(grids, list) and grids and all(isinstance(g, dict) for g in grids)):
        raise UsageError(f"{name}: has no cases; give at least one [[grid]] table of axes")
    return Preset(
        name,
        str(table.get("description", "")),
        tuple(_parse_grid(block, f"{name}: [[grid]] {i}") for i, block in enumerate(grids, 1)),
    )


def _parse_grid(block: Mapping[str, object], where: str) -> dict[str, list[Value]]:
    _refuse_unknown(block, [*AXES], where)
    axes: dict[str, list[Value]] = {}
    for axis, given in block.items():
        values = given if isinstance(given, list) else [given]
        if not values or any(isinstance(value, (list, dict)) for value in values):
            raise UsageError(f"{where}: {axis}: give one value or a list of values")
        parsed = (parse_values(axis, value, f"{where}: {axis}") for value in values)
        axes[axis] = [*chain.from_iterable(parsed)]
    return axes


def _refuse_unknown(table: Mapping[str, object], right: list[str], where: str) -> None:
    for key in table:
        if key not in right:
            raise UsageError(f"{where}: unknown key {key[:60]!r}; {nearest(key, right)}")
