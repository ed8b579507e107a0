"""Conversion of JSON values to the types that they were written from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_list_fields = cache(get_type_hints)


def read_value(kind: Any, value: Any) -> Any:
    """Convert a JSON value to a dataclass (from a table of its fields, or a row of all), an enum, a
    literal, a list, a tuple, a table of texts or numbers, a union or a plain type.

    Raises ValueError: it does not fit. Raises TypeError: a field is missing.
    """
    options, origin = get_args(kind), get_origin(kind)
    make: Any = kind
    if kind is Any or (origin is Literal and value in options):
        return value
    if is_dataclass(kind):
        hints = _list_fields(make)
        cells = dict(zip(hints, value, strict=True)) if isinstance(value, list) else value
        if not isinstance(cells, dict) or not cells.keys() <= hints.keys():
            raise ValueError(f"{value!r:.80} has not the fields {', '.join(hints)}")
        return make(**{name: read_value(hints[name], cell) for name, cell in cells.items()})
    if origin in (Union, UnionType):
        for one in options:
            with suppress(ValueError):
                return read_value(one, value)
    elif origin in (dict, Mapping) and isinstance(value, dict):  # in JSON, numbers are text as keys
        return {options[0](key): read_value(options[1], one) for key, one in value.items()}
    elif origin in (list, tuple, Sequence) and isinstance(value, list):
        if origin is tuple and Ellipsis not in options and len(value) != len(options):
            raise ValueError(f"{len(value)} values in place of {len(options)}")
        return (list if origin is list else tuple)(read_value(options[0], one) for one in value)
    elif origin is None:
        if issubclass(kind, Enum):
            return kind(value)
        # JSON does not distinguish 2 from 2.0, and in Python bool is an int
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind or (value is None and kind is NoneType):
            return value
    raise ValueError(f"{value!r:.80} is not of type {kind}")
