"""The source of a function of a notebook, as a module that another process can import."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

from bench.errors import UsageError

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def write_module(function: Callable[..., Any]) -> tuple[str, str]:
    """Return a module with a function of ``__main__`` and all of its own that it uses, and a hash
    of it: functions and classes as they are written, modules and what comes from them as imports,
    numbers and text as they are now.

    Raises UsageError: it uses something else, or its source is not known.
    """
    parts: dict[str, str] = {}
    _collect(function.__name__, function, parts)
    imports = sorted(text for text in parts.values() if text.startswith(("import ", "from ")))
    rest = [text for text in parts.values() if text not in imports]
    text = "\n".join([*imports, "", *(f"\n{part}\n" for part in rest)])
    return text, sha256(text.encode()).hexdigest()[:8]


def _collect(name: str, value: Any, parts: dict[str, str]) -> None:
    """Add what ``name`` uses, and then what defines it, each once."""
    if name in parts:
        return
    origin, module = getattr(value, "__qualname__", name), getattr(value, "__module__", None)
    if isinstance(value, types.ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif _is_plain(value):
        parts[name] = f"{name} = {value!r}"
    elif isinstance(value, types.FunctionType | type) and module == "__main__":
        node, text = _find_source(name, value)
        outer = _find_globals(value)
        parts[name] = ""  # it may use itself
        for used in _list_names(node):
            if used in outer:
                _collect(used, outer[used], parts)
        del parts[name]
        parts[name] = text
    elif module and getattr(sys.modules.get(module), origin, None) is value:
        parts[name] = f"from {module} import {origin} as {name}"
    else:
        raise UsageError(_refuse(name, value))


def _refuse(name: str, value: Any) -> str:
    return (
        f"{name} is a {type(value).__name__} of the notebook, which another process cannot import; "
        "put the function into a module of its own, or make what it uses within it"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return isinstance(value, _PLAIN)


def _find_source(name: str, value: Any) -> tuple[ast.AST, str]:
    """Return the definition in the cell or file that defines a function or class, the last of that
    name. Raises UsageError: it is not known."""
    functions = [value] if isinstance(value, types.FunctionType) else _list_functions(value)
    files = dict.fromkeys(f.__code__.co_filename for f in functions if f.__module__ == "__main__")
    for file in files:
        text = "".join(linecache.getlines(file))
        nodes = [
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        if nodes and (source := ast.get_source_segment(text, nodes[-1])):
            marks = "".join(f"@{ast.unparse(mark)}\n" for mark in nodes[-1].decorator_list)
            return nodes[-1], marks + source
    raise UsageError(f"the source of {name} is not known; put it into a module of its own")


def _list_functions(kind: type) -> list[types.FunctionType]:
    return [f for f in vars(kind).values() if isinstance(f, types.FunctionType)]


def _find_globals(value: Any) -> dict[str, Any]:
    if isinstance(value, types.FunctionType):
        if free := inspect.getclosurevars(value).nonlocals:
            raise UsageError(_refuse(*next(iter(free.items()))))
        return value.__globals__
    own = _list_functions(value)
    return own[0].__globals__ if own else vars(__import__("__main__"))


def _list_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a definition reads, each once."""
    names = (one.id for one in ast.walk(node) if isinstance(one, ast.Name))
    yield from dict.fromkeys(names)
