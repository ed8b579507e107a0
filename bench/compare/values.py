"""Two values of one axis as the sides of a comparison, and suggestions of what to compare."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, product

from bench.axis import Value
from bench.case import AXES, NAMED, SAME_QUESTION, axis_flag, format_value, parse_value, spell_value
from bench.compare.comparison import Comparison, find_other_models
from bench.compare.side import Side
from bench.errors import UsageError
from bench.study.axes import name_setting, parse_name
from bench.study.pairs import match


def parse_axis(texts: Sequence[str]) -> tuple[str, list[Value]]:
    """Read the name of an axis and no values or two. Raises UsageError: the axis is unknown, there
    are not two different values, or one is invalid for the axis."""
    name, *values = texts
    name = parse_name("--axis", name, list(AXES))
    if len(values) not in (0, 2):
        raise UsageError(
            f"--axis {' '.join(texts)}: give two values of {name}, "
            "after the sweeps: SWEEP --axis NAME VALUE VALUE"
        )
    parsed = [parse_value(name, text, f"--axis {name}") for text in values]
    if parsed and parsed[0] == parsed[1]:
        raise UsageError(f"--axis {' '.join(texts)}: give two different values of {name}")
    return name, parsed


def take_values(a: Side, b: Side | None, axis: str, values: Sequence[Value]) -> tuple[Side, Side]:
    """Take one value of ``axis`` from each sweep, or both from ``a``; ``values`` may be empty if
    there is only one choice. Raises UsageError: a sweep has no case with a value, or the values
    must be given."""
    sweeps = [a, b] if b else [a]
    held = [list_values(side, axis) for side in sweeps]
    if not values:
        values = [value for found in held for value in found]
        if len(values) != 2 or not all(held) or values[0] == values[1]:
            found = zip(sweeps, held, strict=True)
            has = " and ".join(f"{side.path} has {_write(known)}" for side, known in found)
            if len({format_value(value) for value in values}) >= 2:
                raise UsageError(f"--axis {axis}: name two values, as {has}")
            more = "; leave --axis out to compare equal cases" if b else ""
            raise UsageError(f"--axis {axis}: needs two values, and {has}{more}")
    sides = []
    for side, known, value in zip((a, b or a), (held[0], held[-1]), values, strict=True):
        if value not in known:
            raise UsageError(
                f"no case with {axis} {spell_value(value)} in {side.path}; it has {_write(known)}"
            )
        sides.append(_take(side, axis, value))
    return sides[0], sides[1]


def list_values(side: Side, axis: str) -> list[Value]:
    """Return the values of an axis in a sweep, in order, from cases to which it applies."""
    values = dict.fromkeys(getattr(case, axis) for case in side.cases if AXES[axis].holds(case))
    return list(values)


def _write(values: Iterable[Value], most: int = 8) -> str:
    texts = [spell_value(value) for value in values]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "") or "none"


def _take(side: Side, axis: str, value: Value) -> Side:
    title = name_setting(axis, spell_value(value))
    held = AXES[axis].holds
    name = format_value(value) if AXES[axis].switch else title
    runs = [r for r in side.runs if getattr(r.case, axis) == value and held(r.case)]
    return replace(side, name=name, title=title, runs=runs)


def explain_unmatched(comparison: Comparison) -> str:
    """Return why no case is on both sides, with a command that compares the values, if any."""
    one, two = comparison.a, comparison.b
    a, b = ({comparison.ask(s.ran[c].case) for c in comparison.alone(s)} for s in (one, two))
    if a & b:
        mixed = {
            n: None for s in (one, two) for told in comparison.alone(s).values() for n, _ in told
        }
        return f"within a side, runs of one case differ in {', '.join(mixed)}; none has an equal"
    parted = [
        name
        for name in AXES
        if not {getattr(case, name) for case in a} & {getattr(case, name) for case in b}
        and name not in SAME_QUESTION
    ]
    why = f"they share no value of {', '.join(parted)}" if parted else "no combination is shared"
    devices = [set(s.environment("gpu") or s.environment("cpu")) for s in (one, two)]
    asked = comparison.axis or "device" in parted
    if parted and not asked and all(devices) and not devices[0] & devices[1]:
        # two values on two machines: neither the values nor the machines would be compared
        flags = ", ".join(map(axis_flag, parted))
        return f"{why}; to compare their devices, sweep both with the same {flags}"
    command = "" if comparison.axis else suggest(one, two, parted)
    return f"{why}; to compare these values: {command}" if command else why


def suggest(a: Side, b: Side, axes: Iterable[str]) -> str:
    """Return a command that compares a value of one of ``axes`` per sweep; empty if none works."""
    for axis in axes:
        pairs = product(list_values(a, axis), list_values(b, axis))
        for one, two in islice(pairs, 16):
            sides = _take(a, axis, one), _take(b, axis, two)
            matches = match(sides[0].cells, sides[1].cells, axis)
            if one != two and matches.pairs:
                sweeps = " ".join(shlex.quote(str(side.path)) for side in (a, b))
                mix = " --mix" * bool(find_other_models(Comparison(*sides, matches, {}, axis)))
                return f"python -m bench.compare {sweeps} {_write_flag(axis, one, two)}{mix}"
    return ""


def _write_flag(axis: str, one: Value, two: Value) -> str:
    return f"--axis {axis} {shlex.quote(spell_value(one))} {shlex.quote(spell_value(two))}"


def explain_one_sweep(side: Side) -> str:
    """Return the error for one sweep without an axis: what can be compared."""
    varying = {axis: values for axis in AXES if len(values := list_values(side, axis)) > 1}
    if not varying:
        return f"{side.path}: name a second sweep to compare with; nothing varies within this one"
    axis = next((name for name in NAMED if name in varying), next(iter(varying)))
    held = "; ".join(f"{name} ({_write(found)})" for name, found in varying.items())
    return (
        f"{side.path}: name a second sweep to compare with, or two values to compare within this "
        f"one, such as {_write_flag(axis, *varying[axis][:2])}; what varies: {held}"
    )
