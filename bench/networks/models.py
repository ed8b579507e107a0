"""Networks by name. A name is an entry of `MODELS` or the user's own ``package.module:factory``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.base.errors import UsageError, nearest
from bench.base.processes import stand_for
from bench.networks.data.cifar10 import CIFAR10_SHAPE, CLASSES, Shape

if TYPE_CHECKING:
    from torch import nn

MODELS: dict[str, str] = {
    "dpn92": "bench.networks.dpn:dpn92",
    "dpn26": "bench.networks.dpn:dpn26",
    "dpn-small": "bench.networks.dpn:dpn_small",
    "gpt-small": "bench.networks.gpt:gpt_small",
    "gpt-tiny": "bench.networks.gpt:gpt_tiny",
}

LENGTHS = {"gpt-small": 1024, "gpt-tiny": 64}
"""The models that are workloads, with data of their own, and how long their sequences are by
default."""

USUAL_LRS = {"gpt-tiny": 1e-3}
"""Default learning rates of AdamW for networks that learn little at its usual one: of gpt-tiny's 64
features, at 0.0003, one batch is not learnt by heart in the steps of `bench.check`."""


Arguments = dict[str, object]
"""Keyword arguments of a factory, as they can be written in a name."""

FACTORY_FORM = "give package.module:factory, such as nets.mlp:build for build in nets/mlp.py"


def parse_model(text: str) -> str:
    """Check a model's name without importing it: registered, of the form
    ``package.module:factory``, with or without arguments, or that of a command. Return it as it is
    spelled in records. Raises ValueError: it is none of these."""
    if text in MODELS or is_command(text):
        return text
    if ":" not in text:
        raise ValueError(f"{nearest(text, list(MODELS))}; or {FACTORY_FORM}")
    return parse_factory(text)


def parse_factory(text: str) -> str:
    """Return ``package.module:factory``, perhaps with arguments, in its one spelling: a sweep tells
    networks apart by it. Raises ValueError: it has another form.

    >>> parse_factory("nets:VGG( depth = 16, act=relu, p=.5, pool=True )")
    'nets:VGG(act=relu,depth=16,p=0.5,pool=True)'
    """
    target, arguments = split_arguments(text)
    module, _, factory = target.partition(":")
    parts = module.split(".")
    if not all(part.isidentifier() for part in [*parts, factory]) or parts[-1] == "py":
        raise ValueError(FACTORY_FORM)
    spelt = []
    for name, value in sorted(arguments.items()):
        word = isinstance(value, str) and value.isidentifier() and not iskeyword(value)
        spelt.append(f"{name}={value if word else repr(value)}")
    return f"{target}({','.join(spelt)})" if spelt else target


def split_arguments(text: str) -> tuple[str, Arguments]:
    """Return the name of a factory and its arguments: Python's literals, or words, which are text.
    Raises ValueError: one has another form.

    >>> split_arguments("nets:VGG(depth=16,act=relu)"), split_arguments("nets:build")
    (('nets:VGG', {'depth': 16, 'act': 'relu'}), ('nets:build', {}))
    """
    target, bracket, rest = text.partition("(")
    found: Arguments = {}
    try:
        call = ast.parse(f"f({rest}" if bracket else "f()", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("they have no names")
        for given in call.keywords:
            word = given.value.id if isinstance(given.value, ast.Name) else None
            found[str(given.arg)] = word or ast.literal_eval(given.value)
        if len(found) != len(call.keywords):
            raise ValueError("one is given twice")
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"its arguments cannot be read ({error}): give them by name, as numbers, words, True, "
            "False or None, such as (depth=16,act=relu); for any other write a function that calls "
            "this one"
        ) from None
    return target.strip(), found


def is_command(text: str) -> bool:
    """Return whether a model is what a user's command trains, as
    `bench.schema.command.name_command` names it. As the value of a flag, it is meant to be a
    network of one's own."""
    return re.fullmatch(r"[\w.+-]+(\.py|\.sh| \(command\))", text) is not None


def split_model(name: str) -> tuple[str, str]:
    """Return the module and the factory of a model: ``("bench.networks.dpn", "dpn92")`` for
    ``dpn92``."""
    target, _, _ = MODELS.get(name, name).partition("(")
    module, _, factory = target.partition(":")
    return module, factory


def build_model(name: str, classes: int = CLASSES, shape: Shape = CIFAR10_SHAPE) -> nn.Module:
    """Build the network ``name``, which maps float images (N, *shape), ``shape`` being channels,
    height and width, to logits (N, classes).

    ``classes`` is for the head of built-in networks; a user's own factory gets the arguments in its
    name. Raises UsageError: the module cannot be imported, or has no such
    factory.
    """
    factory: Callable[..., nn.Module] = load_factory(name)
    # defaults are not passed, so that an entry of `MODELS` may be a function without arguments
    special = (classes, shape[0]) != (CLASSES, CIFAR10_SHAPE[0])
    return factory(classes, shape[0]) if name in MODELS and special else factory()


def load_factory(name: str, flag: str = "--model") -> Callable[..., Any]:
    """Import the factory ``name``, given as ``flag``, with the arguments in its name. Raises
    UsageError: the module cannot be imported, or has no such function."""
    module_name, factory_name = split_model(name)
    # which ``python -m`` does by default, but not with PYTHONSAFEPATH; last, so that a file there
    # cannot replace another package's module, which that prevents
    if not {"", (here := str(Path.cwd()))} & set(sys.path):
        sys.path.append(here)
    stand_for(module_name)
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"{flag} {name!r} cannot be imported from {Path.cwd()}: {error}; run in its folder, or "
            "add that to PYTHONPATH"
        ) from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        there = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(
            f"{flag} {name!r}: module {module_name!r} has no function {factory_name!r}; "
            + nearest(factory_name, there, "define it there")
        )
    return partial(factory, **split_arguments(name)[1])
