"""The axes of a report: those that vary, in the order in which a reader compares them; and filters
by them, such as ``--where precision=fp16 batch_size=256,512``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from bench.base.errors import UsageError, nearest
from bench.base.text import parse_bytes
from bench.results.store.rows import group
from bench.results.study.runs import SOURCE
from bench.schema.axis import COMPILES, Value
from bench.schema.case import AXES, FOLLOWS, SAME_QUESTION, parse_value, spell_value
from bench.schema.precision import FP8_RECIPES, PRECISIONS

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
"""Every axis a table may have a column for. The machine implies the ``device``, and the model the
workload."""

_NUMERIC = [name for name, axis in AXES.items() if type(axis.default) in (int, float)]
NUMBERS = frozenset((*_NUMERIC, "loss_scale"))
"""Axes whose values are numbers, in ascending order; a dynamic loss scale comes last."""


def _order_scale(scale: Value) -> tuple[float, str]:
    """Return a sort key for loss scales: none, numbers ascending, dynamic."""
    return (math.inf, scale) if isinstance(scale, str) else (scale or 0.0, "")


_ORDERS: dict[str, Callable[[Any], Any]] = {
    "precision": list(PRECISIONS).index,
    "loss_scale": _order_scale,
    "opt_level": lambda text: text or "",
    "fp8_recipe": list(FP8_RECIPES).index,
    "memory_limit": lambda text: parse_bytes(text) if text else math.inf,
    "lr_warmup": lambda text: (text.endswith("%"), float(text.removesuffix("%"))),
    "clip_grad": lambda norm: norm or math.inf,
    "steps": lambda steps: steps or math.inf,
    "compile": list(COMPILES).index,
    "vary": lambda text: text or "",
}
"""Sort keys of an axis's values; other numbers need none."""


def find_varying(cases: Sequence[Any], among: Iterable[str] = ORDER) -> tuple[str, ...]:
    """Return the axes ``among`` these in which cases differ. One that only some precisions have,
    such as the loss scale, must differ within one precision; a learning rate also varies if each
    optimizer has its own. A subset of cases varies only in axes in which all of them do."""
    rivals = group(cases, lambda case: case.precision)
    varying = []
    for name in among:
        parts = rivals if name in FOLLOWS["precision"] else [cases]
        take = attrgetter("ran_on" if name == MACHINE else name)
        if any(len({*map(take, part)}) > 1 for part in parts):
            varying.append(name)
    return tuple(varying)


def list_naming_axes(varying: Collection[str]) -> list[str]:
    """Return the axes that name a case in a sentence: those that vary, precision and batch size."""
    return [name for name in ORDER if name in (*varying, "precision", "batch_size")]


def name_axis(axis: str) -> str:
    return axis.replace("_", " ")


def name_setting(axis: str, text: str) -> str:
    """Return a value's display text for places where nothing near it names the axis.

    >>> name_setting("precision", "fp32"), name_setting("compile", "off"), name_setting("lr", "0.1")
    ('fp32', 'compile off', 'lr 0.1')
    """
    return text if axis == MACHINE or AXES[axis].plain else f"{name_axis(axis)} {text}"


def order_values(axis: str, values: Iterable[Any]) -> list[Any]:
    """Return the distinct values of an axis in display order: precisions as in `PRECISIONS`,
    numbers and memory sizes ascending, dynamic loss scales and no limit last, off before on,
    anything else by first appearance."""
    distinct = list(dict.fromkeys(values))
    if axis == MACHINE:
        return distinct
    order, default = _ORDERS.get(axis), AXES[axis].default
    return sorted(distinct, key=order) if order or isinstance(default, int | float) else distinct


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
        commonest = min(counts, key=lambda scale: (-counts[scale], _order_scale(scale)))
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

NAMES = (*AXES, *SOURCE)
"""Names that a filter accepts: the axes, ``sweep`` and ``machine``."""


class Filter(NamedTuple):
    """An axis, or one of `SOURCE`, and the values to keep."""

    name: str
    values: tuple[Value, ...]


def parse_filter(text: str) -> Filter:
    """Read ``AXIS=VALUE`` or ``AXIS=VALUE,VALUE``; dashes may stand for underscores. Raises
    UsageError: the axis or its value does not exist."""
    name, equals, values = text.partition("=")
    name = parse_name("--where", name)
    if not equals or not values:
        raise UsageError(f"--where {text!r}: write AXIS=VALUE, such as precision=fp16,bf16")
    if name in SOURCE:  # a machine's name may hold a comma
        return Filter(name, (values,))
    may_be_empty = AXES[name].default is None
    kept = (
        None if word == "none" and may_be_empty else parse_value(name, word, f"--where {name}")
        for word in values.split(",")
    )
    return Filter(name, tuple(kept))


def parse_name(flag: str, text: str, names: Sequence[str] = NAMES) -> str:
    """Read a name, such as an axis, in the spelling of columns or flags. Raises UsageError: it is
    not in ``names``."""
    name = text.strip().lstrip("-").replace("-", "_")
    if name not in names:
        raise UsageError(f"{flag} {text!r}: {nearest(name, list(names))}")
    return name


def parse_change(texts: Sequence[str]) -> tuple[str, list[Value]]:
    """Read the words after ``--axis``: the name of an axis, and no values or two. Raises
    UsageError: the axis is unknown, there are not two different values, or one is invalid for the
    axis."""
    name, *values = texts
    name = parse_name("--axis", name, list(AXES))
    parsed = [parse_value(name, text, f"--axis {name}") for text in values]
    if len({*parsed}) != len(parsed) or len(parsed) not in (0, 2):
        raise UsageError(
            f"--axis {' '.join(texts)}: give two different values of {name} or none, after the "
            "sweeps"
        )
    return name, parsed


def select(cases: Sequence[C], filters: Sequence[Filter]) -> list[C]:
    """Keep the runs or results that pass every filter. Raises UsageError: nothing is left."""
    for name, values in filters:
        left = [case for case in cases if getattr(case, name) in values]
        if cases and not left:
            held = dict.fromkeys(getattr(case, name) for case in cases)
            known = ", ".join(map(spell_value, [*held][:8]))
            wanted = ",".join(map(spell_value, values))
            raise UsageError(f"--where {name}={wanted}: no case has it; there is {known}")
        cases = left
    return [*cases]
