"""Networks by name. A name is an entry of `MODELS` or the user's own ``package.module:factory``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.data.sources import CLASSES, SHAPE, Shape
from bench.errors import UsageError, nearest

if TYPE_CHECKING:
    from torch import nn

MODELS: dict[str, str] = {
    "dpn92": "bench.models.dpn:dpn92",
    "dpn26": "bench.models.dpn:dpn26",
    "dpn-small": "bench.models.dpn:dpn_small",
}


TIMM = "timm:"

_SET_BY_FLAGS = {
    "num_classes": "--classes",
    "in_chans": "--input",
    "img_size": "--input",
    "pretrained": "--start FILE",
}
"""Arguments of a network of timm that it has from flags."""


Argument = bool | int | float | str | None
"""A keyword argument of a factory, as it can be written in a name."""


def parse_model(text: str) -> str:
    """Check a model's name without importing it: registered, of the form ``package.module:factory``
    or ``timm:NAME``, each with or without arguments, or that of a command. Return it as it is
    spelled in records. Raises ValueError: it is none of these.

    >>> parse_model("timm:resnet18( drop_rate = .1 )")
    'timm:resnet18(drop_rate=0.1)'
    """
    if text in MODELS or is_command(text):
        return text
    if is_timm(text):
        for name in read_arguments(text):
            if name in _SET_BY_FLAGS:
                raise ValueError(f"give {_SET_BY_FLAGS[name]} in place of {name}")
        return _spell_factory(text)
    own = "(or package.module:factory for your own, or timm:NAME)"
    return parse_factory(text, f"{nearest(text, list(MODELS))} {own}")


def parse_factory(text: str, otherwise: str) -> str:
    """Return ``package.module:factory``, perhaps with arguments, in its one spelling: a sweep tells
    networks apart by it. Raises ValueError: it has another form; the message may be ``otherwise``.

    >>> parse_factory("nets:VGG( depth = 16, bias='off', act=relu, p=.5, pool=True )", "")
    "nets:VGG(act=relu,bias='off',depth=16,p=0.5,pool=on)"
    """
    if not is_factory(text):
        raise ValueError(name_module(text) or otherwise)
    return _spell_factory(text)


def _spell_factory(text: str) -> str:
    target, _, _ = text.partition("(")
    given = sorted(read_arguments(text).items())
    told = ",".join(f"{name}={_spell(value)}" for name, value in given)
    return f"{target}({told})" if told else target


def read_arguments(text: str) -> dict[str, Argument]:
    """Return the arguments in the name of a factory. Raises ValueError: one has another form.

    >>> read_arguments("nets:VGG(depth=16,bias=off)"), read_arguments("nets:build")
    ({'depth': 16, 'bias': False}, {})
    """
    found: dict[str, Argument] = {}
    inner = text.partition("(")[2].rstrip().removesuffix(")")
    for part in inner.split(",") if inner.strip() else ():
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (equals and name.isidentifier()):
            raise ValueError(f"{part.strip()!r}: give arguments by name, such as (depth=16)")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = _read_argument(name, value)
    return found


_WORDS = {"on": True, "true": True, "off": False, "false": False, "none": None}

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,18}|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)")

_QUOTED = re.compile(r"""(['"]?)([\w.+/:@%~-]*)\1""")
"""Text without what separates the words of a shell, of a CSV, or of these names."""


def _read_argument(name: str, text: str) -> Argument:
    if text.casefold() in _WORDS:
        return _WORDS[text.casefold()]
    if _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eE]", text) or len(text) > 18 else int(text)
    found = _QUOTED.fullmatch(text)
    if not text or not found:
        raise ValueError(
            f"{name}={text}: an argument is a number, on, off, none, or text of letters, digits "
            "and . _ - + / : @ % ~; for any other write a function that calls this one"
        )
    return found[2]


def _spell(value: Argument) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    text = str(value)
    unquoted = isinstance(value, str) and (
        not text or text.casefold() in _WORDS or _NUMBER.fullmatch(text)
    )
    return repr(value) if unquoted else text


def is_timm(name: str) -> bool:
    return re.fullmatch(rf"{TIMM}[A-Za-z0-9_.-]+(\(.*\))?", name) is not None


def is_command(text: str) -> bool:
    """Return whether a model is what a user's command trains, as `bench.command.name_command` names
    it. As the value of a flag, it is meant to be a network of one's own."""
    return re.fullmatch(r"[\w.+-]+(\.py|\.sh| \(command\))", text) is not None


def is_factory(text: str) -> bool:
    target, bracket, arguments = text.partition("(")
    module, colon, factory = target.partition(":")
    parts = module.split(".")
    named = colon and all(part.isidentifier() for part in [*parts, factory]) and parts[-1] != "py"
    return bool(named and (not bracket or arguments.rstrip().endswith(")")))


def name_module(text: str) -> str:
    """Say what to give in place of a file; empty if ``text`` names none.

    >>> name_module("./nets/mlp.py:build"), name_module("mlp.py"), name_module("res-net")
    ('give nets.mlp:build', 'give mlp:FUNCTION, with the name of the function', '')
    >>> name_module("/home/me/mlp.py:build")
    'give mlp:build, in the folder /home/me'
    """
    path, _, factory = text.partition(":")
    file = Path(path.removesuffix(".py"))
    if file.parts == (path,):
        return ""
    elsewhere = ".." in file.parts or file.is_absolute()
    right = f"{file.name if elsewhere else '.'.join(file.parts)}:{factory or 'FUNCTION'}"
    if not is_factory(right):
        return ""
    called = "" if factory else ", with the name of the function"
    return f"give {right}{called}" + (f", in the folder {file.parent}" if elsewhere else "")


def split_model(name: str) -> tuple[str, str]:
    """Return the module and the factory of a model: ``("bench.models.dpn", "dpn92")`` for
    ``dpn92``; for a network of timm the module is timm."""
    target, _, _ = MODELS.get(name, name).partition("(")
    module, _, factory = target.partition(":")
    return module, factory


def build_model(name: str, classes: int = CLASSES, shape: Shape = SHAPE) -> nn.Module:
    """Build the network ``name``, which maps float images (N, *shape), ``shape`` being channels,
    height and width, to logits (N, classes).

    ``classes`` is for the head of built-in networks and those of timm; a user's own factory gets
    the arguments in its name. Raises UsageError: the module cannot be imported, has no such
    factory, or the factory does not return an ``nn.Module``.
    """
    from torch import nn

    if is_timm(name):
        return _build_timm(name, classes, shape)
    factory: Callable[..., object] = load_factory(name)
    # defaults are not passed, so that an entry of `MODELS` may be a function without arguments
    special = (classes, shape[0]) != (CLASSES, SHAPE[0])
    model = factory(classes, shape[0]) if name in MODELS and special else factory()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r} returned {type(model).__name__}; a factory returns a torch.nn.Module"
        )
    return model


def _build_timm(name: str, classes: int, shape: Shape) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision raises both with a wrong torch
        why = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--model {name!r}: timm cannot be imported ({why}); pip install timm, with the "
            "torchvision that belongs to this torch"
        ) from error
    _, known = split_model(name)
    if not timm.is_model(known):
        raise UsageError(
            f"--model {name!r}: timm {timm.__version__} has no such network; "
            f"{nearest(known, timm.list_models())}"
        )
    own = read_arguments(name)
    make = partial(timm.create_model, known, pretrained=False, num_classes=classes, **own)
    if shape[0] != SHAPE[0]:
        make = partial(make, in_chans=shape[0])
    model: nn.Module
    try:
        model = make(img_size=shape[1:])  # a vision transformer has weights for each position
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        model = make()
    return model


def load_factory(name: str, flag: str = "--model") -> Callable[[], object]:
    """Import the factory ``name``, given as ``flag``, with the arguments in its name. Raises
    UsageError: the module cannot be imported, or has no such function, or it takes others."""
    from importlib import import_module
    from inspect import signature

    module_name, factory_name = split_model(name)
    _add_current_folder()
    try:
        module = import_module(module_name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # the user's module may exist and import a missing one
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(_no_module(name, missing, flag)) from error
        raise UsageError(f"{flag[2:]} {name!r} cannot be imported: {error}") from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        package, _, _ = module_name.partition(".")  # which may import its functions from its files
        there = [
            key
            for key, value in vars(module).items()
            if f"{getattr(value, '__module__', '')}.".startswith(f"{package}.")
            and callable(value)
            and key[0] != "_"
        ]
        raise UsageError(
            f"{flag} {name!r}: module {module_name!r} has no function {factory_name!r}; "
            + (nearest(factory_name, there) if there else "define it there")
        )
    arguments = read_arguments(name)
    with suppress(ValueError):  # it does not say what it takes
        takes = signature(factory)
        try:
            takes.bind(**arguments)
        except TypeError as error:
            told = [str(one.replace(annotation=one.empty)) for one in takes.parameters.values()]
            needed = [f"{word}=…" for word in told if word.isidentifier()]
            example = f"'{module_name}:{factory_name}({','.join(needed or ['…'])})'"
            right = f"takes {', '.join(told)}, written as {example}" if told else "takes none"
            raise UsageError(f"{flag} {name!r}: {error}; it {right}") from None
    return partial(factory, **arguments)


def _add_current_folder() -> None:
    """Make modules of the current folder importable, which ``python -m`` does by default but not
    with `PYTHONSAFEPATH` or ``python -P``. The folder goes last, so that a file there cannot
    replace another package's module, which these two options prevent."""
    if not {"", (here := str(Path.cwd()))} & set(sys.path):
        sys.path.append(here)


def _no_module(name: str, module: str, flag: str) -> str:
    installed = (sys.prefix, sys.base_prefix)
    folders = [Path.cwd(), *(Path(place) for place in sys.path if not place.startswith(installed))]
    there = ", ".join(dict.fromkeys(str(folder) for folder in folders if folder.is_absolute()))
    return (
        f"{flag} {name!r}: there is no module {module!r} in {there} or among what is installed; "
        "run in its folder, or add that to PYTHONPATH"
    )
