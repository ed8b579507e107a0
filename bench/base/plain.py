"""JSON: the documents that commands write for programs, and conversion of its values to the types
that they were written from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_list_fields = cache(get_type_hints)


def dump_document(command: str, version: int, content: Mapping[str, Any]) -> str:
    """Return what a command answers as a JSON document, which begins with what it is and its
    version: docs/schemas/ describes it. Values are as of `dump`."""
    return dump({"format": f"precision-bench {command}", "version": version, **content})


def dump(value: Any) -> str:
    """Return JSON to write as UTF-8: dataclasses as tables of their fields, and null for NaN and
    infinity, which JSON has not. Raises TypeError: a value is of another type."""
    return json.dumps(_simplify(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _simplify(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {field.name: _simplify(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _simplify(one) for name, one in value.items()}
    return [*map(_simplify, value)] if isinstance(value, list | tuple) else value


def read_value(kind: Any, value: Any) -> Any:
    """Convert a JSON value to a dataclass (from a table of its fields, or a row of all), an enum, a
    list, a tuple of one type, a table of texts or numbers, a union or a plain type.

    Raises ValueError: it does not fit. Raises TypeError: a field is missing.
    """
    options, origin = get_args(kind), get_origin(kind)
    make: Any = kind
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
