"""Which cases a report is about: ``--where precision=fp16 batch_size=256,512``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.case import AXES, format_value, parse_value
from bench.errors import UsageError, nearest
from bench.study.summaries import SOURCE

if TYPE_CHECKING:
    import pandas as pd

NAMES = (*AXES, *SOURCE)
"""What cases can be chosen by: their axes, the sweep and the machine."""


@dataclass(frozen=True)
class Filter:
    """An axis, or one of `SOURCE`, and the values to keep, as CSV spells them."""

    name: str
    values: tuple[str, ...]


def parse_filter(text: str) -> Filter:
    """Read ``AXIS=VALUE`` or ``AXIS=VALUE,VALUE``; dashes may stand for underscores. Raises
    UsageError: there is no such axis, or it can have no such value."""
    name, equals, values = text.partition("=")
    name = parse_name("--where", name)
    if not equals or not values:
        raise UsageError(f"--where {text!r}: write AXIS=VALUE, such as precision=fp16,bf16")
    if name in SOURCE:  # a machine's name may hold a comma
        return Filter(name, (values,))
    where = f"--where {name}"
    return Filter(
        name,
        tuple(
            "" if value == "none" else format_value(parse_value(name, value, where))
            for value in values.split(",")
        ),
    )


def parse_name(flag: str, text: str, names: Sequence[str] = NAMES) -> str:
    """Read a name, of an axis say, as columns or flags spell it. Raises UsageError: there is none
    of that name."""
    name = text.strip().lstrip("-").replace("-", "_")
    if name not in names:
        raise UsageError(f"{flag} {text!r}: {nearest(name, list(names))}")
    return name


def select(frame: pd.DataFrame, filters: Sequence[Filter]) -> pd.DataFrame:
    """Keep the records or cases that every filter lets pass. Raises UsageError: nothing is left."""
    for kept in filters:
        column = frame[kept.name].map(format_value)
        left = frame[column.isin(kept.values)]
        if not len(left) and len(frame):
            known = ", ".join(value or "none" for value in column.unique()[:8])
            wanted = ",".join(value or "none" for value in kept.values)
            raise UsageError(f"--where {kept.name}={wanted}: no case has it; there is {known}")
        frame = left
    return frame
