"""The axes of a report: those that vary, in the order in which a reader compares them; and filters
by them, such as ``--where precision=fp16 batch_size=256,512``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from bench.base.errors import UsageError, nearest
from bench.results.store.rows import group
from bench.results.study.runs import SOURCE
from bench.schema.axis import Value, is_own, name_axis, order_scale, own_axis
from bench.schema.case import (
    AXES,
    FOLLOWS,
    SAME_QUESTION,
    find_axis,
    list_axes,
    parse_value,
    spell_value,
)
from bench.schema.precision import PRECISIONS

C = TypeVar("C")  # a run, a result or a case

MACHINE = "machine"
"""Where a case ran, compared like an axis; its values are `bench.results.study.runs.Run.ran_on`."""

# in the order of `Case`, but the batch size comes before axes that only few precisions have
_FIRST = ("model", "dataset", "precision", "loss_scale", "batch_size")

ORDER = (
    MACHINE,
    *_FIRST,
    *(name for name in AXES if name not in (*_FIRST, *SAME_QUESTION, "device", "workload")),
)
"""Every axis a table may have a column for, ``vary`` standing for a user's own. The machine implies
the ``device``, and the model the workload."""

GROUPS = tuple(name for name in ORDER if name != "vary")
"""Names that a table may be grouped by, beside those of a user's own axes."""

_NUMERIC = [name for name, axis in AXES.items() if type(axis.default) in (int, float)]
NUMBERS = frozenset((*_NUMERIC, "loss_scale", "length", "power_limit"))
"""Axes whose values are numbers, in ascending order; a dynamic loss scale comes last."""


def find_varying(cases: Sequence[Any], among: Iterable[str] = ORDER) -> tuple[str, ...]:
    """Return the axes ``among`` these, see `list_axes`, in which cases differ. One that only some
    precisions have, such as the loss scale, must differ within one precision; a learning rate also
    varies if each optimizer has its own. A subset of cases varies only in axes in which all of them
    do."""
    rivals = group(cases, lambda case: case.precision)
    varying = []
    for name in list_axes(cases, among):
        parts = rivals if name in FOLLOWS["precision"] else [cases]
        take = attrgetter("ran_on" if name == MACHINE else name)
        if any(len({*map(take, part)}) > 1 for part in parts):
            varying.append(name)
    return tuple(varying)


def list_naming_axes(varying: Collection[str]) -> list[str]:
    """Return the axes that name a case in a sentence: those that vary, precision and batch size."""
    named = dict.fromkeys([*varying, "precision", "batch_size"])
    return sorted(named, key=lambda name: ORDER.index("vary" if is_own(name) else name))


def name_setting(axis: str, text: str) -> str:
    """Return a value's display text for places where nothing near it names the axis.

    >>> name_setting("precision", "fp32"), name_setting("compile", "off"), name_setting("lr", "0.1")
    ('fp32', 'compile off', 'lr 0.1')
    """
    return text if axis == MACHINE or find_axis(axis).plain else f"{name_axis(axis)} {text}"


def order_values(axis: str, values: Iterable[Any]) -> list[Any]:
    """Return the distinct values of an axis in display order: precisions as in `PRECISIONS`,
    numbers and memory sizes ascending, dynamic loss scales and no limit last, off before on,
    anything else by first appearance."""
    distinct = list(dict.fromkeys(values))
    if axis == MACHINE:
        return distinct
    if is_own(axis):
        numbers = read_numbers(distinct)
        return sorted(distinct, key=numbers.get) if numbers else distinct  # type: ignore[arg-type]
    order, default = AXES[axis].order, AXES[axis].default
    return sorted(distinct, key=order) if order or isinstance(default, int | float) else distinct


def read_numbers(values: Iterable[str | None]) -> dict[str | None, float]:
    """Return the values of a user's own axis as numbers, a case without one as the lowest; nothing
    unless all are numbers, and distinct texts distinct ones, which versions are not.

    >>> read_numbers(["1e-3", "2"]), read_numbers(["2.1", "2.10"]), read_numbers(["1", "auto"])
    ({'1e-3': 0.001, '2': 2.0}, {}, {})
    """
    try:
        numbers = {text: -math.inf if text is None else float(text) for text in values}
    except ValueError:
        return {}
    known = {number for number in numbers.values() if number == number}
    return numbers if len(known) == len(numbers) else {}


def read_own(cases: Collection[Any]) -> dict[str, Mapping[Any, float]]:
    """Return of each of a user's own axes that cases have its values as numbers, see
    `read_numbers`."""
    own = {axis: {getattr(case, axis) for case in cases} for axis in list_axes(cases, ["vary"])}
    return {axis: read_numbers(values - {None}) for axis, values in own.items()}


def is_number_axis(axis: str, values: Iterable[Any]) -> bool:
    """Return whether an axis with these values is one of numbers, in ascending order."""
    return axis in NUMBERS or (is_own(axis) and bool(read_numbers(values)))


def take_value(case: Any, axis: str) -> Any:
    """Return a case's value of an axis, or of `MACHINE`."""
    return getattr(case, "ran_on" if axis == MACHINE else axis)


def sort_cases(cases: Sequence[C], axes: Sequence[str]) -> list[C]:
    """Sort cases by ``axes``, the last varying fastest, so that neighbours differ little."""
    places = {}
    for axis in axes:
        values = order_values(axis, (take_value(case, axis) for case in cases))
        places[axis] = {value: place for place, value in enumerate(values)}
    return sorted(cases, key=lambda c: [places[axis][take_value(c, axis)] for axis in axes])


def list_main(cases: Sequence[Any], equal: Sequence[Hashable]) -> list[int]:
    """Return the places of cases that represent their precision where precisions are compared.

    These have its main loss scale, which is its default or else the commonest one (of several the
    lowest, dynamic ones last), and the defaults of all other axes that follow from a precision, if
    any such case ran. ``equal`` tells the groups of cases that are equal in all other axes: if
    no case of a group has the main loss scale of the whole sweep, those at the lowest scale
    represent the precision there.
    """
    scales: dict[str, Value] = {}
    for some in group(cases, lambda case: case.precision):
        precision = some[0].precision
        counts = Counter(case.loss_scale for case in some)
        default = PRECISIONS[precision].default_loss_scale
        commonest = min(counts, key=lambda scale: (-counts[scale], order_scale(scale)))
        scales[precision] = default if default in counts else commonest
    kept: list[int] = []
    for alike in group(range(len(cases)), lambda at: (equal[at], cases[at].precision)):
        for name in FOLLOWS["precision"]:
            precision = cases[alike[0]].precision
            main = scales[precision] if name == "loss_scale" else AXES[name].default
            there = [getattr(cases[at], name) for at in alike]
            best = main if main in there else order_values(name, there)[0]
            alike = [at for at, value in zip(alike, there, strict=True) if value == best]
        kept += alike
    return sorted(kept)


# ----------------------------------------------------------------------------------------- filters

NAMES = (*(name for name in AXES if name != "vary"), *SOURCE)
"""Names that a filter accepts beside those of a user's own axes: the axes, ``sweep`` and
``machine``."""


COMPARED = NAMES[: -len(SOURCE)]
"""Names that a change may have, beside those of a user's own axes."""


class Filter(NamedTuple):
    """An axis, or one of `SOURCE`, and the values to keep."""

    name: str
    values: tuple[Value, ...]


def parse_filter(text: str) -> Filter:
    """Read ``AXIS=VALUE`` or ``AXIS=VALUE,VALUE``; dashes may stand for underscores. Raises
    UsageError: it is of another form, or the axis has no such value."""
    name, equals, values = text.partition("=")
    name = parse_name("--where", name)
    if not equals or not (values or is_own(name)):
        raise UsageError(f"--where {text!r}: write AXIS=VALUE, such as precision=fp16,bf16")
    if name in SOURCE:  # a machine's name may hold a comma
        return Filter(name, (values,))
    if is_own(name):  # its values are any texts
        return Filter(name, tuple(dict.fromkeys([values, *values.split(",")])))
    may_be_empty = AXES[name].default is None

    def read(*words: str) -> tuple[Value, ...]:
        return tuple(
            None if word == "none" and may_be_empty else parse_value(name, word, f"--where {name}")
            for word in words
        )

    kept = tuple[Value, ...]()
    with suppress(UsageError):  # a command, or arguments of a factory, may hold commas
        kept = read(values)
    try:
        kept += read(*values.split(","))
    except UsageError:
        if not kept:
            raise
    return Filter(name, tuple(dict.fromkeys(kept)))


def parse_name(flag: str, text: str, names: Sequence[str] = NAMES) -> str:
    """Read a name, such as an axis, in the spelling of columns or flags. One that is not in
    ``names`` is taken for that of a user's own axis, of which `refuse_unknown` knows once cases
    are read. Raises UsageError: it is no name."""
    name = text.strip().lstrip("-").replace("-", "_")
    if name in names:
        return name
    if not name.isidentifier():
        raise UsageError(f"{flag} {text!r}: {nearest(name, list(names))}")
    return own_axis(name)


def refuse_unknown(
    flag: str, axis: str, cases: Iterable[Any], names: Sequence[str] = NAMES
) -> None:
    """Raises UsageError: ``axis``, which `parse_name` read, is one of a user's own that no case
    has; the message names the nearest."""
    own = list_axes(cases, ["vary"])
    if is_own(axis) and axis not in own:
        near = nearest(name_axis(axis), [*map(name_axis, own), *names])
        raise UsageError(f"{flag} {name_axis(axis)!r}: {near}")


def parse_change(texts: Sequence[str]) -> tuple[str, list[Value]]:
    """Read the words after ``--axis``: the name of an axis, and no values or two. Raises
    UsageError: there are not two different values, or one is invalid for the axis."""
    name = parse_name("--axis", texts[0], COMPARED)
    parsed = [parse_value(name, text, f"--axis {texts[0]}") for text in texts[1:]]
    if len({*parsed}) != len(parsed) or len(parsed) not in (0, 2):
        raise UsageError(
            f"--axis {' '.join(texts)}: give two different values of {texts[0]} or none, after "
            "the sweeps"
        )
    return name, parsed


def select(cases: Sequence[C], filters: Sequence[Filter]) -> list[C]:
    """Keep the runs or results that pass every filter. Raises UsageError: no case has an axis, or
    nothing is left."""
    for name, values in filters:
        refuse_unknown("--where", name, cases)
        left = [case for case in cases if getattr(case, name) in values]
        if cases and not left:
            present = dict.fromkeys(getattr(case, name) for case in cases)
            known = ", ".join(map(spell_value, [*present][:8]))
            wanted = ",".join(map(spell_value, values))
            raise UsageError(
                f"--where {name_axis(name).replace(' ', '_')}={wanted}: no case has it; there is "
                f"{known}"
            )
        cases = left
    return [*cases]
