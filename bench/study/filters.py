"""Filters for the cases of a report: ``--where precision=fp16 batch_size=256,512``."""

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
"""Names that a filter accepts: the axes, ``sweep`` and ``machine``."""


@dataclass(frozen=True)
class Filter:
    """An axis, or one of `SOURCE`, and the values to keep, as CSV spells them."""

    name: str
    values: tuple[str, ...]


def parse_filter(text: str) -> Filter:
    """Read ``AXIS=VALUE`` or ``AXIS=VALUE,VALUE``; dashes may stand for underscores. Raises
    UsageError: the axis or its value does not exist."""
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
    """Read a name, such as an axis, in the spelling of columns or flags. Raises UsageError: it is
    not in ``names``."""
    name = text.strip().lstrip("-").replace("-", "_")
    if name not in names:
        raise UsageError(f"{flag} {text!r}: {nearest(name, list(names))}")
    return name


def select(frame: pd.DataFrame, filters: Sequence[Filter]) -> pd.DataFrame:
    """Keep the records or cases that pass every filter. Raises UsageError: nothing is left."""
    for kept in filters:
        column = frame[kept.name].map(format_value)
        left = frame[column.isin(kept.values)]
        if not len(left) and len(frame):
            known = ", ".join(value or "none" for value in column.unique()[:8])
            wanted = ",".join(value or "none" for value in kept.values)
            raise UsageError(f"--where {kept.name}={wanted}: no case has it; there is {known}")
        frame = left
    return frame
