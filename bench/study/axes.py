"""Which axes a report is about: those that vary, in the order in which a reader compares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.axis import Value
from bench.case import AXES, FOLLOWS, SAME_QUESTION, format_value, main_loss_scale, mark_legacy
from bench.study.columns import find_least
from bench.study.summaries import SOURCE

if TYPE_CHECKING:
    import pandas as pd

MACHINE = "machine"
"""Where a case ran, which is compared like an axis: a sweep and a machine of it."""

# as `Case` has them, but for the batch size, which comes before what few precisions have
_FIRST = ("model", "dataset", "precision", "loss_scale", "skip_overflow", "batch_size")

ORDER = (
    MACHINE,
    *_FIRST,
    *(name for name in AXES if name not in (*_FIRST, *SAME_QUESTION, "device", "workload")),
)
"""Every axis a table may have a column for. ``device`` is told by the machine, a workload by the
model."""

NUMBERS = frozenset(name for name, axis in AXES.items() if axis.number)
"""Axes whose values are numbers, upwards; a dynamic loss scale comes last."""

Machines = Mapping[tuple[str, str], str]
"""(sweep, machine) to its name for people."""


def find_default(axis: str) -> Value:
    """The default of an axis, as a table of cases has it."""
    default = AXES[axis].default
    return "" if default is None else default


def find_varying(cases: pd.DataFrame, among: Iterable[str] = ORDER) -> tuple[str, ...]:
    """The axes ``among`` these in which cases differ. A loss scale (and what else only some
    precisions have) varies if it does within one precision; a learning rate also where each
    optimizer has its own. Some of the cases vary in no axis in which all of them do not."""
    varying = []
    for name in among:
        if name == MACHINE:
            several = len(cases[list(SOURCE)].drop_duplicates()) > 1
        else:
            several = len(set(cases[name].tolist())) > 1
            if several and AXES[name].follows == "precision":
                several = bool((cases.groupby("precision")[name].nunique() > 1).any())
        if several:
            varying.append(name)
    return tuple(varying)


def list_naming_axes(varying: Collection[str]) -> list[str]:
    """The axes by which a sentence names a case: those that vary, and two that are always told."""
    return [name for name in ORDER if name in (*varying, "precision", "batch_size")]


def name_axis(axis: str) -> str:
    return axis.replace("_", " ")


def name_value(axis: str, value: Any, machines: Machines) -> str:
    """Write a value of an axis, of `take_values`, for people."""
    if axis == MACHINE:
        return machines[value]
    return mark_legacy(axis, format_value(value)) or "none"


def name_setting(axis: str, text: str) -> str:
    """What a value, as text, is called where nothing near it says the axis.

    >>> name_setting("precision", "fp32"), name_setting("compile", "off"), name_setting("lr", "0.1")
    ('fp32', 'compile off', 'lr 0.1')
    """
    return text if axis == MACHINE or AXES[axis].plain else f"{name_axis(axis)} {text}"


def order_values(axis: str, values: Iterable[Any]) -> list[Any]:
    """The distinct values of an axis as a reader expects them: precisions in the order of
    `PRECISIONS`, numbers and amounts of memory upwards, dynamic loss scales and no limit last, off
    before on, anything else as it first ran."""
    distinct = list(dict.fromkeys(values))
    if axis == MACHINE:
        return distinct
    order, default = AXES[axis].order, AXES[axis].default
    return sorted(distinct, key=order) if order or isinstance(default, int | float) else distinct


def rank(cases: pd.DataFrame, axis: str) -> pd.Series:
    """Where each case's value of an axis stands in `order_values`; of machines, as they ran."""
    import pandas as pd

    values = take_values(cases, axis).tolist()
    order = {value: place for place, value in enumerate(order_values(axis, values))}
    return pd.Series([order[value] for value in values], cases.index, dtype=int)


def take_values(cases: pd.DataFrame, axis: str) -> pd.Series:
    """Each case's value of an axis; of `MACHINE` its (sweep, machine)."""
    import pandas as pd

    if axis != MACHINE:
        return cases[axis]
    pairs = list(zip(cases["sweep"], cases["machine"], strict=True))
    return pd.Series(pairs, index=cases.index, dtype=object)


def sort_cases(cases: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """Cases ordered by ``axes``, the last varying fastest, so that neighbours differ in little."""
    import numpy as np

    # beside the frame: a column that is dropped again leaves it in a hundred pieces
    keys = [rank(cases, axis).to_numpy() for axis in reversed(axes)]
    return cases.take(np.lexsort(keys)) if keys else cases


def keep_main(cases: pd.DataFrame, equal: pd.Series | None = None) -> pd.DataFrame:
    """Of the cases of each precision, those that stand for it where precisions are compared.

    They are at its main loss scale and at the defaults of all else that follows from a precision,
    such as not to skip overflows, if any such ran. Of cases that are equal in all else, by their
    number ``equal``, those at the lowest scale stand for it where none is at the main one of the
    whole sweep.
    """
    import numpy as np

    precisions, scales = cases["precision"].tolist(), cases["loss_scale"].tolist()
    by_precision: dict[str, list[str]] = {}
    for precision, scale in zip(precisions, scales, strict=True):
        by_precision.setdefault(precision, []).append(scale)
    usual = {name: main_loss_scale(name, held) for name, held in by_precision.items()}
    main = [usual[name] == scale for name, scale in zip(precisions, scales, strict=True)]
    places = []
    for name in FOLLOWS["precision"]:
        first = main if name == "loss_scale" else cases[name] == find_default(name)
        places.append(np.where(first, -1, rank(cases, name)))
    numbers: dict[tuple[int, str], int] = {}
    alike = zip([0] * len(cases) if equal is None else equal.tolist(), precisions, strict=True)
    group = np.array([numbers.setdefault(one, len(numbers)) for one in alike], int)
    left = np.arange(len(cases))
    for place in places:
        left = left[place[left] == find_least(place[left], group[left])]
    return cases.take(left)
