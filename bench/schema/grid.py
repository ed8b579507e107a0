"""Grids of cases: what flags and presets give for each axis, and every combination of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from bench.base.errors import UsageError
from bench.networks.models import FACTORY_FORM, is_command
from bench.schema.axis import BATCH_SIZES, PARTED, Value, axis_flag, name_axis
from bench.schema.case import AXES, Case, list_values, make_case, parse_value
from bench.schema.command import list_worded, read_vary, refuse_places
from bench.schema.rules import check, go_together, list_lacks, settle

AUTO = "auto"
"""The batch size to be found: the largest that fits, less a margin."""

_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9}|auto)")


def _double(low: int, high: int) -> list[int]:
    return [low << n for n in range(high.bit_length()) if low << n <= high]


def fill_auto(text: str, largest: int, recommended: int) -> list[int]:
    """Return the batch sizes that ``auto`` or ``32..auto`` stands for once the largest is known.

    >>> fill_auto("auto", 600, 560), fill_auto("128..auto", 600, 560)
    ([560], [128, 256, 512, 560])
    """
    low, dots, _ = text.rpartition("..")
    return sorted({*(_double(int(low), largest) if dots else ()), recommended})


def parse_values(name: str, value: object, where: str) -> list[Value]:
    """Parse what a flag or preset gives for axis ``name``: a value, or for batch sizes several.

    ``32..1024`` gives the powers of two between; ``auto`` and ``32..auto`` are kept, to be found
    later. Raises UsageError as `parse_value` does.
    """
    if name == "batch_size" and value == AUTO:
        return [AUTO]
    if where.startswith("--") and PARTED.fullmatch(text := str(value)):
        raise UsageError(f"{where} {text}: give {where} {text.replace(',', ' ').rstrip()}")
    found = _RANGE.fullmatch(str(value)) if name == "batch_size" else None
    if found and int(found[1]).bit_count() == 1:
        if found[2] == AUTO:
            return [str(value)]
        if sizes := _double(int(found[1]), int(found[2])):
            return [*sizes]
    if found or (name == "batch_size" and str(value) == "0"):
        raise UsageError(f"{where} {str(value)!r}: {BATCH_SIZES}")
    if name == "model" and is_command(str(value)):
        raise UsageError(f"{where} {value!r}: {FACTORY_FORM}")
    return [parse_value(name, value, where)]


def refuse_auto(family: Case, text: str) -> list[int]:
    """Refuse ``auto`` in a command that does not look for the largest batch. Raises UsageError:
    always."""
    raise UsageError(
        f"--batch-size {text}: only bench.sweep looks for the largest batch; give a number, such "
        "as one that bench.fit recommends"
    )


def grid(
    *blocks: Mapping[str, Sequence[Value]],
    find: Callable[[Case, str], Sequence[int]] = refuse_auto,
    asked: Collection[str] | None = None,
) -> list[Case]:
    """Return every combination of the axes of each block, in order, without duplicates; the batch
    size varies fastest.

    Each case is settled and checked, see `bench.schema.rules`.

    ``blocks`` map axes to values. ``find`` gets the other settings and ``auto`` or ``32..auto``,
    and returns the batch sizes. ``asked`` are the axes, by default all of the blocks, that must
    apply to some case if any of their values is not the default. Raises UsageError: settings do not
    go together, or an axis that is asked for applies to no case.
    """
    families: list[Case] = []

    def note(family: Case, text: str) -> Sequence[int]:
        families.append(family)
        return find(family, text)

    cases = list(dict.fromkeys(case for block in blocks for case in _expand(block, note)))
    having = [*cases, *families]
    if any(case.command is not None for case in having):
        return cases  # what applies there is the command's own matter
    lacks = {tuple(list_lacks(case)) for case in having}
    for name, axis in AXES.items():
        given = {value for block in blocks for value in block.get(name, ())} - {axis.default}
        if given and (asked is None or name in asked):
            reasons = [[lack for lack in lacking if name in lack[0]] for lacking in lacks]
            if all(reasons):
                _, why, fix = min(reasons, key=len)[0]  # of the case that lacks least
                raise UsageError(f"{axis_flag(name)} is given, but {why}; add {fix}")
    return cases


def _expand(
    axes: Mapping[str, Sequence[Value]], find: Callable[[Case, str], Sequence[int]]
) -> Iterator[Case]:
    axes = dict(axes)
    chosen: Sequence[Any] = axes.pop("batch_size", [])
    if any(text is not None for text in axes.get("command", ())):
        _refuse_for_command(axes, chosen)
        chosen = chosen or [0]
    order = sorted(axes, key=[*AXES].index)
    for values in product(*(axes[name] for name in order)):
        family = settle(dict(zip(order, values, strict=True)))
        settled = dict(zip(AXES, list_values(family), strict=True))
        for size in chosen or [Case.batch_size]:
            sizes = [size]
            if isinstance(size, str):
                least = replace(family, batch_size=Case.batch_size * family.accumulate)
                check(least)
                found = find(least, size)
                sizes = [n for n in found if go_together(replace(least, batch_size=n))]
            for number in sizes:
                case = make_case(*(settled | {"batch_size": number}).values())
                check(case)
                yield case


def _refuse_for_command(axes: Mapping[str, Sequence[Any]], sizes: Sequence[Any]) -> None:
    """Refuse settings that a command has no placeholder for. Raises UsageError."""
    given = [*axes, *["batch_size"] * bool(sizes)]
    for command in axes["command"]:
        if command is None:
            raise UsageError("--command none beside a command: give them in sweeps of their own")
        for vary in axes.get("vary", [None]):
            if why := refuse_places(command, given, [*map(name_axis, read_vary(vary))], [*AXES]):
                quotes = "; put the whole command in quotes" * (" " not in command)
                raise UsageError(f"--command: {why}{quotes * (len(axes['command']) > 1)}")
        if "batch_size" in list_worded(command) and any(isinstance(size, str) for size in sizes):
            raise UsageError(
                "--command: {batch_size:…} has words for some sizes alone; write {batch_size} "
                "for the largest to be looked for"
            )
