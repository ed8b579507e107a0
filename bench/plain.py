"""Conversion of JSON values to the types that they were written from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Reader = Callable[[Any], Any]


def read_value(kind: Any, value: Any) -> Any:
    """Convert a JSON value to a dataclass (from a table of its fields, or a row of all), an enum, a
    literal, a list, a tuple, a table of texts or numbers, a union or a plain type.

    Raises ValueError: it does not fit; says where and why. Raises TypeError: a field is missing.
    """
    return _make_reader(kind)(value)


@cache
def _make_reader(kind: Any) -> Reader:
    options, origin = get_args(kind), get_origin(kind)
    if kind is Any:
        return lambda value: value
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        readers = {field.name: _make_reader(hints[field.name]) for field in fields(kind)}
        return partial(_read_fields, kind, readers)
    if origin is Literal:
        return partial(_choose, options)
    if origin in (Union, UnionType):
        return partial(_try, [_make_reader(one) for one in options if one is not NoneType])
    if origin in (dict, Mapping):
        key, reader = options[0], _make_reader(options[1])  # JSON keys are text, also for numbers
        return lambda table: {
            key(k): _within(k, reader, v) for k, v in _expect(dict, table).items()
        }
    if origin in (list, tuple, Sequence):
        made = list if origin is list else tuple
        # all items of a tuple have one type
        number = len(options) if origin is tuple and Ellipsis not in options else None
        return partial(_read_list, made, _make_reader(options[0]), number)
    return kind if issubclass(kind, Enum) else partial(_expect, kind)


def _expect(kind: type, value: Any) -> Any:
    # JSON does not distinguish 2 from 2.0, and in Python bool is an int
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value


def _choose(options: tuple[Any, ...], value: Any) -> Any:
    if value not in options:
        raise ValueError(f"{value!r} is not one of {', '.join(options)}")
    return value


def _within(place: str, reader: Reader, value: Any) -> Any:
    try:
        return reader(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _read_list(kind: type, reader: Reader, number: int | None, values: Any) -> Any:
    if len(_expect(list, values)) != (len(values) if number is None else number):
        raise ValueError(f"{len(values)} values in place of {number}")
    return kind(map(reader, values))


def _try(readers: list[Reader], value: Any) -> Any:
    if value is None:
        return None
    for reader in readers[:-1]:
        with suppress(ValueError):
            return reader(value)
    return readers[-1](value)


def _read_fields(kind: Any, readers: dict[str, Reader], value: Any) -> Any:
    if isinstance(value, list):
        if len(value) != len(readers):
            raise ValueError(f"{len(value)} values, where {kind.__name__} has {len(readers)}")
        return kind(*(reader(cell) for reader, cell in zip(readers.values(), value, strict=True)))
    if unknown := sorted(_expect(dict, value).keys() - readers.keys()):
        raise ValueError(f"no field {unknown[0]!r}; right values: {', '.join(sorted(readers))}")
    return kind(**{name: _within(name, readers[name], one) for name, one in value.items()})
