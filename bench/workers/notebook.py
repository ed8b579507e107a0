"""A function of a notebook or a script as a module, by which another process imports it.

The module holds what the function uses now: the source of each function and class, found by its
code, and the value of each variable. Which cells ran, and in which order, is nothing to it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import linecache
import math
import symtable
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from bench.base.errors import UsageError
from bench.schema.failure import is_library

MAIN = "__main__"

_LONGEST = 100_000  # characters of a variable

_PLAIN = (type(None), bool, int, complex, str, bytes, type(...))

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def write_module(function: Callable[..., Any], space: dict[str, Any] | None = None) -> str:
    """Return the text of a module with ``function`` and all that it uses of ``space``, the names of
    the notebook. Raises UsageError: something of that cannot be carried; it names the variable."""
    writer = _Writer(vars(sys.modules[MAIN]) if space is None else space)
    writer.bind(function.__name__, function)
    return "\n\n\n".join(filter(None, ["\n".join(sorted(writer.imports)), *writer.parts])) + "\n"


class _Writer:
    """The imports and the other statements of a module, each after what it needs."""

    def __init__(self, space: dict[str, Any]) -> None:
        self._space = space
        self._bound = set[str]()
        self.imports, self.parts = set[str](), list[str]()

    def bind(self, name: str, value: Any) -> None:
        """Add statements that give ``name`` this value."""
        if name in self._bound:
            return
        self._bound.add(name)
        if isinstance(value, ModuleType):
            refuse_edited(name, value)
            renamed = f" as {name}" if name != value.__name__ else ""
            self.imports.add(f"import {value.__name__}{renamed}")
        elif isinstance(inspect.unwrap(value) if callable(value) else value, FunctionType | type):
            if value.__module__ == MAIN:
                self._define(name, value)
            elif (path := self._find_path(name, value)) and "." not in path[1]:
                renamed = f" as {name}" if name != path[1] else ""
                self.imports.add(f"from {path[0]} import {path[1]}{renamed}")
            else:
                self.parts.append(f"{name} = {self._spell(name, value)}")
        else:
            self.parts.append(f"{name} = {self._spell(name, value)}")

    def _define(self, name: str, value: Any) -> None:
        if "<locals>" in value.__qualname__:
            raise _refuse(name, value, "it was made within another function")
        node = find_definition(name, value, self._space)
        if isinstance(node, ast.Lambda):
            text = f"{name} = {ast.unparse(node)}"
        else:
            node.name = name
            self._settle(name, node, value)
            text = ast.unparse(node)
        now, later = _list_names(text)
        for path in _list_paths(ast.parse(text), self._space):
            self.imports.add(f"import {path}")
        for names, ready in ((now, True), (later, False)):
            if not ready:
                self.parts.append(text)
            for used in sorted(names & self._space.keys()):
                self.bind(used, self._space[used])

    def _settle(self, name: str, node: _Definition, value: Any) -> None:
        """Write the values that a definition had computed once, as defaults and attributes, as they
        are now."""

        def write(found: Any) -> ast.expr:
            return ast.parse(self._spell(name, found), mode="eval").body

        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
                    target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                    with suppress(UsageError, KeyError):  # one that is made, such as a layer
                        line.value = write(vars(value)[ast.unparse(target)])
            return
        function: Any = inspect.unwrap(value)
        given = node.args
        for there, values in (
            (given.defaults, function.__defaults__ or ()),
            (
                given.kw_defaults,
                [(function.__kwdefaults__ or {}).get(a.arg) for a in given.kwonlyargs],
            ),
        ):
            for index, found in enumerate(values):
                if there[index] is not None:
                    there[index] = write(found)  # type: ignore[call-overload]

    def _find_path(self, name: str, value: Any) -> tuple[str, str] | None:
        """Return the module and the name in it of what is importable."""
        path = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        for module in (getattr(value, "__module__", None) or "builtins", "torch"):
            found: Any = sys.modules.get(module)
            for part in path.split("."):
                found = getattr(found, part, None)
            if found is value and module != MAIN:
                refuse_edited(name, sys.modules[module], value)
                return module, path
        return None

    def _spell(self, name: str, value: Any) -> str:
        """Return an expression of a value, of the variable ``name``."""
        spell, kind = partial(self._spell, name), type(value)
        text = ""
        if kind in _PLAIN:
            text = repr(value)
        elif kind is float:
            text = repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        elif kind in (list, set, frozenset, tuple):
            inner = ", ".join(map(spell, sorted(value, key=repr) if kind is set else value))
            text = f"[{inner}]" if kind is list else f"{kind.__name__}([{inner}])"
        elif kind is dict:
            text = f"{{{', '.join(f'{spell(k)}: {spell(v)}' for k, v in value.items())}}}"
        elif kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
            self.imports.add("import torch")
            text = repr(value) if kind.__name__ == "dtype" else f"torch.device({str(value)!r})"
        elif isinstance(value, PurePath):
            self.imports.add("import pathlib")
            text = f"pathlib.{kind.__name__}({str(value)!r})"
        elif isinstance(value, partial):
            given = [spell(value.func), *map(spell, value.args)]
            given += [f"{key}={spell(one)}" for key, one in value.keywords.items()]
            self.imports.add("import functools")
            text = f"functools.partial({', '.join(given)})"
        elif isinstance(value, Enum):
            text = f"{spell(kind)}.{value.name}"
        elif is_dataclass(value) and not isinstance(value, type):
            items = ((f.name, getattr(value, f.name)) for f in fields(value) if f.init)
            text = f"{spell(kind)}({', '.join(f'{key}={spell(one)}' for key, one in items)})"
        elif kind is SimpleNamespace:
            self.imports.add("import types")
            parts = (f"{key}={spell(one)}" for key, one in vars(value).items())
            text = f"types.SimpleNamespace({', '.join(parts)})"
        elif isinstance(value, tuple) and hasattr(kind, "_fields"):
            text = f"{spell(kind)}({', '.join(map(spell, value))})"
        elif callable(value) and getattr(value, "__module__", None) == MAIN:
            own = getattr(value, "__name__", "")
            if self._space.get(own) is value:
                self.bind(own, value)
                text = own
        elif callable(value) and (path := self._find_path(name, value)):
            self.imports.add(f"import {path[0]}")
            text = f"{path[0]}.{path[1]}" if path[0] != "builtins" else path[1]
        if not text or len(text) > _LONGEST:
            raise _refuse(name, value, "it is too large" if text else "")
        return text


def _refuse(name: str, value: object, why: str = "") -> UsageError:
    reason = f" ({why})" if why else ""
    return UsageError(
        f"the variable {name!r} of the notebook, of type {type(value).__name__}, cannot be carried "
        f"to another process{reason}; make it within the function that uses it, or import it from "
        "a module"
    )


# ------------------------------------------------------------------------------------- the source


def find_definition(name: str, value: Any, space: dict[str, Any]) -> _Definition | ast.Lambda:
    """Return the definition of a function or class of the notebook, whose names are ``space``, that
    ``name`` stands for. Raises UsageError: its source is not known, or is not that of its code."""
    codes = list(_list_codes(value))
    texts = ["".join(linecache.getlines(code.co_filename)) for code in codes]
    if isinstance(value, type) and not texts:  # no method tells of the cell
        file = space.get("__file__")
        cells = space.get("In") or ([Path(file).read_text("utf-8")] if file else [])
        texts = [cell for cell in cells if f"class {value.__name__}" in cell][-1:]
    for text in filter(None, texts[:1]):
        with suppress(SyntaxError):
            tree = ast.parse(text)
            kept = _compile(tree)
            found = [node for node in ast.walk(tree) if _defines(node, value, codes)]
            if found and all(_mark(code) in kept for code in codes):
                return found[-1]  # type: ignore[return-value]
            raise _refuse(name, value, "it was edited or patched since, or is in a magic cell")
    raise UsageError(
        f"the source of {name} is not kept: it came from a prompt, python -c or standard input; "
        "write it to a file, and run that or import it"
    )


def _list_codes(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of the methods that a class itself defines."""
    members = vars(value).values() if isinstance(value, type) else [inspect.unwrap(value)]
    for member in members:
        plain = getattr(member, "fget", None) or getattr(member, "__func__", member)
        function = inspect.unwrap(plain) if callable(plain) else plain
        # what dataclass adds has no file, or its own: __replace__, from Python 3.13 on
        if isinstance(function, FunctionType) and function.__code__.co_filename not in (
            "<string>", dataclasses.__file__,
        ):  # fmt: skip
            yield function.__code__


def _defines(node: ast.AST, value: Any, codes: list[CodeType]) -> bool:
    if isinstance(value, type):
        return isinstance(node, ast.ClassDef) and node.name == value.__name__
    (code,) = codes
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.name, first) == (code.co_name, code.co_firstlineno)


def _compile(tree: ast.Module) -> set[Any]:
    """Return the marks of all code that a source gives, as a file and as IPython compiles it,
    statement by statement: a call of an imported module's function differs between them."""
    await_ = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    parts = [tree, *(ast.Module([line], []) for line in tree.body)]
    codes = (compile(part, "", "exec", await_, dont_inherit=True) for part in parts)
    return {_mark(inner) for code in codes for inner in _walk(code)}


def _walk(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _walk(part)


def _mark(code: CodeType) -> tuple[Any, ...]:
    plain = [repr(c) for c in code.co_consts if not isinstance(c, CodeType)]
    inner = [_mark(c) for c in code.co_consts if isinstance(c, CodeType)]
    return code.co_name, code.co_code, code.co_names, code.co_varnames, (*plain,), (*inner,)


def _list_names(text: str) -> tuple[set[str], set[str]]:
    """Return the global names that a definition uses where it is made, and those when it is
    called."""
    now, later = set[str](), set[str]()

    def look(table: symtable.SymbolTable, called: bool) -> None:
        called = called or table.get_type() == "function"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                (later if called else now).add(symbol.get_name())
        for inner in table.get_children():
            look(inner, called)

    look(symtable.symtable(text, "", "exec"), False)
    return now, later


def _list_paths(tree: ast.AST, space: dict[str, Any]) -> Iterator[str]:
    """Yield the modules that are used by a dotted name, as torch.utils.checkpoint."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            root = space.get(first)
            if isinstance(root, ModuleType) and (path := f"{root.__name__}.{rest}") in sys.modules:
                yield path


def refuse_edited(name: str, module: ModuleType, value: Any = None) -> None:
    """Refuse a module of the user's whose file is not what the notebook has imported, or only a
    ``value`` of it. Raises UsageError."""
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or is_library(Path(file)):
        return
    text = Path(file).read_text("utf-8")
    kept = _compile(ast.parse(text))
    members = vars(module).values() if value is None else [value]
    own = [one for one in members if getattr(one, "__module__", None) == module.__name__]
    own = [one for one in own if isinstance(one, FunctionType | type)]
    constants = {
        target.id: line.value.value
        for line in ast.parse(text).body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
    live = vars(module)
    changed = [key for key, one in constants.items() if key in live and live[key] != one]
    if changed or any(_mark(code) not in kept for one in own for code in _list_codes(one)):
        what = f"its {changed[0]} is another there" if changed else "it was edited"
        raise UsageError(
            f"{name!r} of the notebook is from {file}, which is not what was imported ({what}): "
            f"run importlib.reload({module.__name__}) and the cells that import from it"
        )
